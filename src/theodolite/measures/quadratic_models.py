"""Quadratic models whose gradient descent is known exactly: gated networks, scalar recursions, the general form.

Convention of the formulas: loss ½ Σ (g − y)², tangent kernel K = J Jᵀ without a factor. Gradients descend from
`rate · ∇loss`; `half_sum_rate` translates a rate that belongs to another squared loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from theodolite.arguments import (
    a_function,
    also_called,
    checked,
    count,
    entry,
    finite,
    fraction,
    instance,
    nonnegative,
    positive,
    shown,
    whole,
)
from theodolite.interrupts import unbroken
from theodolite.problem.arguments import (
    a_finite_tensor,
    a_plain_function,
    a_tensor,
    numbers,
    numbers_in,
    of_dimensions,
    tensors_fit,
)

__all__ = [
    "CONVENTIONS",
    "Descent",
    "GatedBilinear",
    "GeneralQuadratic",
    "Orbit",
    "QuadraticStep",
    "SignClasses",
    "TopDirection",
    "class_eigenvalues",
    "class_orbit",
    "critical_rate",
    "descend",
    "displacement",
    "gated_kernel",
    "gated_output",
    "half_sum_rate",
    "largest_rate",
    "one_example",
    "one_example_step",
    "pure_quadratic",
    "quadratic_step",
    "reduced_step",
    "sign_classes",
    "top_direction",
    "unit_sigma",
]


# Squared losses differ by a factor, and with it every critical rate.

#: Name of a loss -> its gradient in the outputs over the residual: 1 for ½ Σ r², whose step is r ← (I − ηK) r.
CONVENTIONS: Mapping[str, Callable[[int], float]] = {
    "half sum": lambda outputs: 1.0,
    "mean": lambda outputs: 2.0 / outputs,
    "half mean": lambda outputs: 1.0 / outputs,
}


@also_called(lr="rate")
@checked(rate=nonnegative, outputs=count)
def half_sum_rate(rate: float, convention: str, outputs: int) -> float:
    """The rate for ½ Σ r² that takes the steps which `rate` takes for another squared loss.

    `outputs` counts all numbers that a mean runs over: samples, times outputs per sample.

    >>> half_sum_rate(0.5, "mean", 10), half_sum_rate(0.5, "half mean", 10), half_sum_rate(0.5, "half sum", 10)
    (0.1, 0.05, 0.5)
    """
    return rate * entry("convention", convention, CONVENTIONS)(outputs)


@checked(lambda_1=positive, outputs=count)
def critical_rate(lambda_1: float, convention: str, outputs: int) -> float:
    """2/λ₁ in the given convention: n/λ₁ for a mean over n outputs; the quadratic model allows up to twice that.

    >>> critical_rate(4.0, "half sum", 10), critical_rate(4.0, "mean", 10), critical_rate(4.0, "half mean", 10)
    (0.5, 2.5, 5.0)
    """
    return 2.0 / (lambda_1 * half_sum_rate(1.0, convention, outputs))


@checked(converges=a_plain_function, low=positive, high=positive, tol=fraction, expansions=whole)
def largest_rate(converges: Callable[[float], bool], low: float, high: float, *, tol: float = 0.01, expansions: int = 3) -> float:
    """The upper end of the rates that converge, to the share `tol`: the last one tried that did.

    `converges` says of a rate whether all runs at it converge (let it look at several seeds: near the edge some do, some
    do not). `low` must converge; where `high` does too it is doubled, at most `expansions` times.

    >>> 0.99 * 3.0 <= largest_rate(lambda rate: rate < 3.0, 1.0, 8.0) < 3.0
    True
    """
    if not 0 < low < high:
        raise ValueError(f"low and high must be positive rates, the lower first. Got {shown(low)} and {shown(high)}.")
    if not converges(low):
        raise ValueError(f"Training must converge at low = {low:.4g}, and did not. Name a lower rate.")
    while converges(high):
        if expansions == 0:
            raise ValueError(f"Training still converges at {high:.4g}. Name a higher rate, or allow more expansions.")
        low, high, expansions = high, 2 * high, expansions - 1
    while high - low > tol * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if converges(middle) else (low, middle)
    return low


@dataclass(frozen=True, eq=False)
class Orbit:
    """Runs of gradient descent on ½ Σ (g − y)²: time first, then the axes of the runs, then the n examples.

    `rate` (runs), `target` (n) or (runs, n), `output` (steps + 1, runs, n), `kernel` (steps + 1, runs, n, n). A run that
    blows up goes on as infinity or NaN.
    """

    rate: Tensor
    target: Tensor
    output: Tensor
    kernel: Tensor

    @property
    def residual(self) -> Tensor:
        """g − y, shaped as the outputs."""
        return self.output - self.target

    @property
    def loss(self) -> Tensor:
        """½ Σ (g − y)²: (steps + 1, runs)."""
        return 0.5 * self.residual.square().sum(-1)

    @property
    def kernel_norm(self) -> Tensor:
        """Largest eigenvalue of the kernel: (steps + 1, runs); NaN where the run has blown up."""
        if self.kernel.shape[-1] == 1:
            return self.kernel[..., 0, 0]
        finite = self.kernel.isfinite().all(-1).all(-1)
        top = torch.full_like(self.kernel[..., 0, 0], torch.nan)
        top[finite] = torch.linalg.eigvalsh(self.kernel[finite])[..., -1]
        return top


def all_over(loss: Tensor, until: float | None) -> bool:
    """Whether every run has blown up or, with `until`, has come down to that loss."""
    gone = ~loss.isfinite()
    return bool((gone if until is None else gone | (loss <= until)).all())


# One example: gradient descent on a quadratic model is a map of two numbers, output and kernel.
#
# All functions broadcast over starts and rates, in float64, and follow the loss ½ (g − y)².

Number = Tensor | float
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _scalar_orbit(step: Step, g: Tensor, kernel: Tensor, y: Tensor, rate: Tensor, steps: int, until: float | None) -> Orbit:
    """The orbit of one example under a map of output and kernel."""
    outputs, kernels = [g], [kernel]
    while len(outputs) <= steps and not all_over(0.5 * (g - y).square(), until):
        g, kernel = step(g, kernel)
        outputs.append(g)
        kernels.append(kernel)
    return Orbit(rate, y[..., None], torch.stack(outputs)[..., None], torch.stack(kernels)[..., None, None])


@also_called(lr="rate")
@checked(g=a_tensor, kernel=a_tensor, y=numbers, c=numbers_in(least=0), rate=numbers)
@tensors_fit
def one_example_step(g: Tensor, kernel: Tensor, y: Number, c: Number, rate: Number) -> tuple[Tensor, Tensor]:
    """Output and kernel of the gated network after one step, (3.11) and (3.12) without the division; c = ‖x‖²/(md).

    A run that has blown up goes on: NaN in the output or the kernel gives NaN.
    """
    return _one_example_step(g, kernel, y, c, rate)


def _one_example_step(g: Tensor, kernel: Tensor, y: Number, c: Number, rate: Number) -> tuple[Tensor, Tensor]:
    r = g - y
    mu = 1 - rate * kernel + c * rate**2 * r * g
    return y + mu * r, kernel - rate * c * r * (4 * g - rate * kernel * r)


@also_called(lr="rate")
@checked(g=numbers, kernel=numbers, y=numbers, c=numbers_in(least=0), rate=numbers, steps=whole, until=nonnegative)
@tensors_fit
def one_example(
    g: Number, kernel: Number, y: Number, c: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """The gated network on one example from its first output and kernel; c = 0 is the linear model.

    >>> float(one_example(1.0, 1.0, 0.0, 0.0, 0.5, 1).output[-1, 0])          # linear: r ← (1 − ηλ) r
    0.5
    """
    g, kernel, y, c, rate = _together(g, kernel, y, c, rate)
    return _scalar_orbit(lambda g, kernel: _one_example_step(g, kernel, y, c, rate), g, kernel, y, rate, steps, until)


@checked(u=a_tensor, v=a_tensor, w=numbers)
@tensors_fit
def reduced_step(u: Tensor, v: Tensor, w: Number = 0.0) -> tuple[Tensor, Tensor]:
    """One step in the variables u = cη²(g−y)², v = ηλ, w = cη²(g−y)y: (3.13) and (3.14).

    w changes sign with g − y, so u and v alone make a map only for y = 0, where w is 0.
    """
    return (1 - v + u + w).square() * u, v - u * (4 - v) - 4 * w


@checked(orbit=instance(Orbit), c=numbers_in(least=0))
@tensors_fit
def displacement(orbit: Orbit, c: Number) -> Tensor:
    """How far the weights of a gated network have moved since the start, ‖w(t) − w(0)‖: (steps + 1, runs).

    Along x the weights of every active unit undergo the same 2×2 map: a step multiplies u·x/‖x‖ + v by 1 − b and
    u·x/‖x‖ − v by 1 + b with b = η(g−y)√c, so two products and the first output and kernel hold the distance.
    """
    c = torch.as_tensor(c, dtype=torch.float64)
    g, kernel = orbit.output[0, ..., 0], orbit.kernel[0, ..., 0, 0]
    b = orbit.rate * orbit.residual[:-1, ..., 0] * c.sqrt()
    start = torch.ones_like(g)[None]
    plus, minus = (torch.cat([start, torch.cumprod(1 + sign * b, 0)]) for sign in (-1, 1))
    cross = 2 * c.sqrt() * g
    return (0.5 / c * ((plus - 1).square() * (kernel + cross) + (minus - 1).square() * (kernel - cross))).sqrt()


@also_called(lr="rate")
@checked(g=numbers, kernel=numbers, y=numbers, c0=numbers, gamma=numbers, rate=numbers, steps=whole, until=nonnegative)
@tensors_fit
def unit_sigma(
    g: Number, kernel: Number, y: Number, c0: Number, gamma: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """`g = wᵀφ + ½γ wᵀΣw` with Σ² = I on one example; c0 = φᵀΣφ, first kernel ‖φ + γΣw‖²."""
    g, kernel, y, c0, gamma, rate = _together(g, kernel, y, c0, gamma, rate)

    def step(g: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        r, bent = g - y, gamma * (c0 + 2 * gamma * g)
        output = g - rate * r * kernel + 0.5 * rate**2 * r**2 * bent
        return output, kernel - 2 * rate * r * bent + (rate * gamma * r) ** 2 * kernel

    return _scalar_orbit(step, g, kernel, y, rate, steps, until)


@also_called(lr="rate")
@checked(g=numbers, kernel=numbers, gamma=numbers, norm=numbers_in(least=0), rate=numbers, steps=whole, until=nonnegative)
def pure_quadratic(
    g: Number, kernel: Number, gamma: Number, norm: Number, rate: Number, steps: int, *, until: float | None = None
) -> Orbit:
    """The case φ = 0, y = 0, Σ² = ‖x‖² I (`norm` is ‖x‖), two-layer linear networks among them.

    It is the map of the gated network with c = γ²‖x‖²: the source prints γ for γ² and leaves out one η.
    """
    gamma, norm = _together(gamma, norm)
    return one_example(g, kernel, 0.0, (gamma * norm).square(), rate, steps, until=until)


def _together(*numbers: Number) -> tuple[Tensor, ...]:
    return tuple(torch.broadcast_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in numbers)))


# Several examples on a line: two problems of one example each, exactly.
#
# With inputs of one dimension and no biases a two-layer ReLU network, and its quadratic model, is `a₊x` for x ≥ 0 and
# `a₋x` for x < 0. Points of one sign therefore act as one example of size ‖p‖, p the vector of these inputs, and what of
# the targets is orthogonal to both vectors is never fitted.


@dataclass(frozen=True, eq=False)
class SignClasses:
    """Inputs on a line by sign, x ≥ 0 first.

    `directions` (2, n) holds p₊ and p₋, the inputs of either sign by absolute value (the source has p₋ with the other
    sign); `inputs` (2, 1) and `targets` (2) are the two effective examples, ±‖p‖ and ⟨p, y⟩/‖p‖; `floor` is the part of the
    loss that no weights can remove.
    """

    directions: Tensor
    inputs: Tensor
    targets: Tensor
    floor: Tensor

    @property
    def norms(self) -> Tensor:
        """‖p₊‖ and ‖p₋‖."""
        return self.inputs[:, 0].abs()

    def project(self, values: Tensor) -> Tensor:
        """⟨p, values⟩/‖p‖ of outputs, targets or residuals (..., n): (..., 2)."""
        return values @ self.directions.mT / self.norms

    def rest(self, residual: Tensor) -> Tensor:
        """½ ‖residual off both directions‖² of (..., n)."""
        inside = self.project(residual) / self.norms @ self.directions
        return 0.5 * (residual - inside).square().sum(-1)


@checked(x=of_dimensions(1, 2), y=of_dimensions(1))
@tensors_fit
def sign_classes(x: Tensor, y: Tensor) -> SignClasses:
    """The two effective examples of inputs (n) or (n, 1) and targets (n); both signs must occur."""
    x = x.reshape(-1)
    directions = torch.stack([x.clamp(min=0), (-x).clamp(min=0)])
    norms = directions.norm(dim=1)
    if not bool((norms > 0).all()):
        raise ValueError("Inputs of both signs are needed. Got one sign only: the data are one example, use `one_example`.")
    targets = directions @ y / norms
    inputs = (norms * torch.tensor([1.0, -1.0], dtype=x.dtype))[:, None]
    return SignClasses(directions, inputs, targets, 0.5 * (y.square().sum() - targets.square().sum()))


@checked(u=a_tensor, v=a_tensor, u0=a_tensor, classes=instance(SignClasses))
@tensors_fit
def class_eigenvalues(u: Tensor, v: Tensor, u0: Tensor, classes: SignClasses) -> Tensor:
    """Eigenvalues of the kernel along p₊ and p₋, `‖p‖² (1/m) Σ (u_k² + v_k²)` over units open there: (..., 2).

    u, u0 (..., m, 1), v (..., m). With u for u0 they belong to the ReLU network, not to its quadratic model.
    """
    square = u[..., 0].square() + v.square()
    open_units = torch.stack([u0[..., 0] >= 0, u0[..., 0] <= 0], -1).to(u.dtype)
    return classes.norms.square() * (square[..., None, :] @ open_units)[..., 0, :] / u.shape[-2]


@also_called(lr="rate")
@checked(u=a_finite_tensor, v=a_finite_tensor, classes=instance(SignClasses), rate=numbers, steps=whole, until=nonnegative)
@tensors_fit
def class_orbit(
    u: Tensor, v: Tensor, classes: SignClasses, rate: Tensor | float, steps: int, *, until: float | None = None
) -> tuple[Orbit, Tensor]:
    """The recursion of either class from weights (..., m, 1), (..., m): its last run axis is (p₊, p₋).

    Also the constants c = ‖p‖²/m of the two. `rate` broadcasts against the leading axes.
    """
    c = classes.norms.square() / u.shape[-2]
    kernel = class_eigenvalues(u, v, u, classes)
    product = u[..., 0] * v
    slopes = torch.stack([product * (u[..., 0] >= 0), product * (u[..., 0] <= 0)], -1).sum(-2) / u.shape[-2] ** 0.5
    output = slopes * classes.inputs[:, 0]
    rates = torch.as_tensor(rate, dtype=torch.float64)[..., None]
    return one_example(output, kernel, classes.targets, c, rates, steps, until=until), c


# The quadratic model of a two-layer ReLU network: the same network with the gates of its start.


class GatedBilinear(nn.Module):
    """`g(u, v; x) = (md)^(-1/2) Σ_i 1{u0_i·x ≥ 0} v_i u_i·x`: second Taylor model of a two-layer ReLU network at (u0, v0).

    Parameters `u` (m, d) and `v` (m) start at the given weights, the gates stay those of `u0` (by default of `u`).
    Inputs are (n, d) or images of d values, outputs (n).

    >>> model = GatedBilinear(torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0]))
    >>> round(model(torch.tensor([[2.0]])).item(), 6)                     # 2/√2: the second unit is off, and stays off
    1.414214
    """

    u0: Tensor

    @checked(u=a_finite_tensor, v=a_finite_tensor, u0=a_finite_tensor)
    def __init__(self, u: Tensor, v: Tensor, u0: Tensor | None = None) -> None:
        super().__init__()
        if u.ndim != 2 or v.shape != u.shape[:1]:
            raise ValueError(f"u must be (m, d) and v (m). Got {tuple(u.shape)} and {tuple(v.shape)}.")
        if u0 is not None and u0.shape != u.shape:
            raise ValueError(f"u0 must have the shape of u, {tuple(u.shape)}. Got {tuple(u0.shape)}.")
        self.u = nn.Parameter(u.detach().clone())
        self.v = nn.Parameter(v.detach().clone())
        self.register_buffer("u0", (u if u0 is None else u0).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return gated_output(self.u, self.v, gates(self.u0, x), x)

    def kernel(self, x: Tensor) -> Tensor:
        """Tangent kernel (n, n) at the inputs."""
        x = x.flatten(1)
        with unbroken(torch.no_grad()):
            return gated_kernel(self.u, self.v, gates(self.u0, x), x)


def gates(u: Tensor, x: Tensor) -> Tensor:
    """1{u_i·x_j ≥ 0}: (..., m, n), as numbers."""
    return (u @ x.mT >= 0).to(u.dtype)


@checked(u=a_tensor, v=a_tensor, gate=a_tensor, x=a_tensor)
@tensors_fit
def gated_output(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """Outputs (..., n) of weights u (..., m, d), v (..., m) with given gates (..., m, n) at inputs (n, d)."""
    return _scale(u) * (v[..., None, :] @ (gate * (u @ x.mT)))[..., 0, :]


@checked(u=a_tensor, v=a_tensor, gate=a_tensor, x=a_tensor)
@tensors_fit
def gated_kernel(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """`K_jk = (md)^(-1) Σ_i gate_ij gate_ik (v_i² x_j·x_k + u_i·x_j u_i·x_k)`: (..., n, n).

    With gates 1{u_i·x_j ≥ 0} it is the kernel of the ReLU network itself.
    """
    active = gate * (u @ x.mT)
    return _scale(u) ** 2 * ((gate * v.square()[..., None]).mT @ gate * (x @ x.mT) + active.mT @ active)


@dataclass(frozen=True, eq=False)
class Descent(Orbit):
    """An orbit with the weights it ended at: u (runs, m, d), v (runs, m)."""

    u: Tensor
    v: Tensor


@also_called(lr="rate")
@checked(
    u=a_finite_tensor, v=a_finite_tensor, x=of_dimensions(2), y=of_dimensions(1), rate=numbers, steps=whole, until=nonnegative
)
@tensors_fit
def descend(
    u: Tensor,
    v: Tensor,
    x: Tensor,
    y: Tensor,
    rate: Tensor | float,
    steps: int,
    *,
    frozen: bool = True,
    until: float | None = None,
) -> Descent:
    """Full-batch gradient descent on ½ Σ (g − y)² for many starts and rates at once.

    Starts u (runs, m, d) and v (runs, m), inputs (n, d), targets (n); `rate` broadcasts against the runs, so one start
    can be run at many rates. `frozen=False` takes the gates anew in every step: the ReLU network instead of its
    quadratic model. Descent ends early once every loss is at most `until` or infinite.
    """
    rates = torch.as_tensor(rate, dtype=u.dtype, device=u.device)
    runs = torch.broadcast_shapes(u.shape[:-2], rates.shape)
    rates = rates.expand(runs)
    u = u.expand(*runs, *u.shape[-2:]).clone()
    v = v.expand(*runs, v.shape[-1]).clone()
    scale, gate = _scale(u), gates(u, x)
    outputs, kernels = [], []
    for taken in range(steps + 1):
        if not frozen and taken:
            gate = gates(u, x)
        active = gate * (u @ x.mT)  # (runs, m, n)
        output = scale * (v[..., None, :] @ active)[..., 0, :]
        outputs.append(output)
        kernels.append(gated_kernel(u, v, gate, x))
        residual = output - y
        if taken == steps or all_over(0.5 * residual.square().sum(-1), until):
            break
        pull = (rates[..., None] * scale * residual)[..., None, :]  # (runs, 1, n)
        change = (active * pull).sum(-1)
        u -= (v[..., None] * gate * pull) @ x
        v -= change
    return Descent(rates, y, torch.stack(outputs), torch.stack(kernels), u, v)


def _scale(u: Tensor) -> float:
    m, d = u.shape[-2:]
    return 1.0 / math.sqrt(m * d)


class GeneralQuadratic(nn.Module):
    """`g(w; x) = wᵀφ(x) + ½γ wᵀΣ(x)w`, with Σ(x) symmetric and known by its products.

    Args:
        w: first weights (p).
        features: φ, inputs (n, ...) -> (n, p).
        product: (inputs, w) -> Σ(x_i) w for every input: (n, p).
        gamma: weight of the quadratic part.

    >>> model = GeneralQuadratic(torch.ones(2), lambda x: x, lambda x, w: w.expand(len(x), -1), gamma=0.5)
    >>> model(torch.tensor([[1.0, 2.0]])).item()                             # 3 + ½·½·2
    3.5
    """

    @checked(w=of_dimensions(1), features=a_function, product=a_function, gamma=finite)
    def __init__(
        self, w: Tensor, features: Callable[[Tensor], Tensor], product: Callable[[Tensor, Tensor], Tensor], gamma: float
    ) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach().clone())
        self.features, self.product, self.gamma = features, product, gamma

    def forward(self, x: Tensor) -> Tensor:
        return (self.features(x) + 0.5 * self.gamma * self.product(x, self.w)) @ self.w

    def jacobian(self, x: Tensor) -> Tensor:
        """φ(x) + γΣ(x)w: (n, p)."""
        with unbroken(torch.no_grad()):
            return self.features(x) + self.gamma * self.product(x, self.w)

    @also_called(lr="rate")
    @checked(x=a_finite_tensor, y=numbers, rate=finite)
    @tensors_fit
    def step(self, x: Tensor, y: Tensor, rate: float) -> QuadraticStep:
        """What one step of gradient descent on ½ Σ (g − y)² makes of residual and kernel."""
        with unbroken(torch.no_grad()):
            residual, jacobian = self(x) - y, self.jacobian(x)
            return quadratic_step(residual, jacobian, self.gamma * self.product(x, residual @ jacobian), rate)


class QuadraticStep(NamedTuple):
    """Residual (n) and tangent kernel (n, n) after a step."""

    residual: Tensor
    kernel: Tensor


@also_called(lr="rate")
@checked(residual=a_tensor, jacobian=a_tensor, curved=a_tensor, rate=numbers)
@tensors_fit
def quadratic_step(residual: Tensor, jacobian: Tensor, curved: Tensor, rate: float) -> QuadraticStep:
    """One exact step of any quadratic model: (3.15), and (3.16) corrected.

    `curved` (n, p) has the rows G_i = rᵀJ H_i with H_i the Hessian of output i; a run that has blown up goes on, NaN giving NaN.
    As J(t+1) = J − ηG, the kernel becomes K − η(GJᵀ + JGᵀ) + η²GGᵀ; the source prints another form, which does not hold.
    """
    cross = curved @ jacobian.mT
    kernel = jacobian @ jacobian.mT
    after = residual - rate * kernel @ residual + 0.5 * rate**2 * cross @ residual
    return QuadraticStep(after, kernel - rate * (cross + cross.mT) + rate**2 * curved @ curved.mT)


# What leaves linear dynamics along the top eigenvector of the tangent kernel.

#: Below this share of the residual its part along the eigenvector is too small to divide by.
TOO_SMALL = 1e-8


class TopDirection(NamedTuple):
    """Between two steps, each (...): `rho_f` = p·R_f p and `rho_K` = p·R_K p of the source, and where they act.

    `lambda_1` and `vector` p (..., n) are the top eigenpair of the first kernel, `share` the part of the first loss along p.
    """

    lambda_1: Tensor
    vector: Tensor
    share: Tensor
    rho_f: Tensor
    rho_K: Tensor  # noqa: N815 (as the source writes it)


@also_called(lr="rate")
@checked(kernel=a_finite_tensor, next_kernel=a_tensor, residual=a_tensor, next_residual=a_tensor, rate=numbers)
@tensors_fit
def top_direction(
    kernel: Tensor, next_kernel: Tensor, residual: Tensor, next_residual: Tensor, rate: Tensor | float
) -> TopDirection:
    """Kernels (..., n, n) and residuals f − y (..., n) of consecutive steps of ½ Σ (f − y)² at `rate` (...).

    `rho_f = ⟨p, r'⟩/⟨p, r⟩ − 1 + ηλ₁` and `rho_K = λ₁ − p·K'p`; both are 0 for a linear model. `rho_f` is NaN where the
    residual has no part along p to speak of; where the run has blown up, NaN gives NaN.

    >>> K, r = torch.diag(torch.tensor([3.0, 1.0])), torch.tensor([1.0, 1.0])
    >>> found = top_direction(K, K, r, r - 0.5 * K @ r, 0.5)
    >>> float(found.rho_f), float(found.rho_K), float(found.share)
    (0.0, 0.0, 0.5)
    """
    values, vectors = torch.linalg.eigh(kernel)
    lambda_1, p = values[..., -1], vectors[..., -1]
    before, after = (p * residual).sum(-1), (p * next_residual).sum(-1)
    size = residual.square().sum(-1)
    usable = before.abs() >= TOO_SMALL * size.sqrt()
    quotient = torch.where(usable & (size > 0), after / torch.where(before == 0, 1.0, before), torch.nan)
    rho_K = lambda_1 - (p * (next_kernel @ p[..., None])[..., 0]).sum(-1)
    return TopDirection(lambda_1, p, before.square() / size, quotient - 1 + rate * lambda_1, rho_K)
