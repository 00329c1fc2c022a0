"""The largest learning rate at which training stays stable."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from theodolite.arguments import also_called, choice, positive
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.dynamics.stability_laws import StabilityLaw, has_law, plain_optimizer, stability_law
from theodolite.measures.dynamics.trials import run_trial
from theodolite.measures.kernel.quadratic_checks import TRIAL_SEEDS, squared_loss_curvature, third_difference, trial_step
from theodolite.measures.kernel.scalar_output import outputs_per_sample, require_problem
from theodolite.operators import (
    GaussNewtonOperator,
    HessianOperator,
    LinearOperator,
    TangentKernelOperator,
    hessian,
    tangent_kernel_operator,
)
from theodolite.operators.algebra import DiagonalOperator
from theodolite.operators.matrices import MATRICES, ON_PARAMETERS, MatrixName
from theodolite.problem import Problem
from theodolite.results import Cost, Result, Row, fields_of

#: Rates tried on a copy, in units of the critical one, and how many steps each gets.
TRIALS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
TRIAL_STEPS = 60


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CriticalRate(Result):
    """The edge of stability: `value` is the critical learning rate, `sharpness` the eigenvalue it comes from.

    `error` bounds what the eigen-residual leaves open, and holds the sampling error where a population was named.
    `window` are rates above the edge at which training still converges, and `window_by` how that is known. "exact": empty,
    for a quadratic loss. "trial": from short runs on a copy (`trial=True`). "theory": up to twice the edge, for a model
    quadratic in its parameters under a squared loss and plain descent; that is the limit of wide models, and narrow ones may
    diverge before or even below the edge. None and "" where nobody looked. `predicted_maximum` is the largest rate by
    theory: `value` for a quadratic loss, twice that for a squared loss, which is where the quadratic twin of a wide network
    diverges (ReLU networks tolerate more); None where there is no theory. `quadratic` says whether the loss is a quadratic
    function of the parameters, `linear` whether the optimizer is then a linear recursion, so that theory is exact (Adam is
    not: it adapts). `rule` is the formula used.
    """

    value: float
    sharpness: float
    error: float
    window: tuple[float, ...] | None
    rule: str
    by: str
    optimizer: str
    matvecs: int
    quadratic: bool
    linear: bool
    note: str = ""
    predicted_maximum: float | None = None
    window_by: str = ""

    def rows(self) -> list[Row]:
        low, high = self.window if self.window else (None, None)
        place = {"rate": self.value, **fields_of(self, "error sharpness"), "window_low": low, "window_high": high}
        return [{**place, **fields_of(self, "window_by predicted_maximum rule by optimizer seed")}]

    def sentence(self) -> str:
        if math.isinf(self.value):
            return f"No direction curves upwards (largest eigenvalue {self.sharpness:.3g}), so no learning rate is critical here."
        note = f" ({self.note})" if self.note else ""
        rate = f"The critical learning rate of {self.optimizer} is {self.value:.4g} ± {self.error:.1g}"
        return f"{rate}: {self.rule}{note}.{self._above()}"

    def _above(self) -> str:
        """What is known about rates above the edge."""
        if self.window is None:
            return ""
        if self.window_by == "trial":
            tried = f"In trial runs of {TRIAL_STEPS} steps"
            return f" {tried} it still converges up to {self.window[1]:.3g}." if self.window else f" {tried} it diverges above."
        if not self.window:
            return " Above it training diverges."
        return f" Theory for wide models: it still converges up to {self.window[1]:.3g}; trial=True measures it."


@also_called(matrix="by")
def critical_learning_rate(
    problem: Problem,
    *,
    by: MatrixName = "hessian",
    optimizer: Optimizer | None = None,
    trial: bool = False,
    clip: float | None = None,
    population: int | None = None,
    operator: LinearOperator | None = None,
    start: Any = None,
    max_matvecs: int | None = None,
    tol: float = 1e-4,
    seed: int = 0,
    progress: bool | None = None,
) -> CriticalRate:
    """The learning rate above which the optimizer leaves the sharpest direction of the loss.

    Plain descent 2/λ; heavy ball 2(1+β)/λ; Nesterov 2(1+β)/((1+2β)λ); coupled weight decay adds to λ; Adam
    2(1+β₁)/((1−β₁)λ(P⁻¹H)) with P = (1−β₁ᵗ)(√v̂+ε), its second moment and bias corrections frozen; NAdam, RAdam, Adamax,
    RMSprop and Adagrad likewise, each with its own P. Groups of different rates are measured by the first one's.

    Args:
        by: (or `matrix`) the matrix λ belongs to: `"hessian"`, `"gauss_newton"`, or `"kernel"` for c·K with K the tangent kernel
            and c the curvature of a squared loss in one output: c = 1 for ½ Σ r², 2/N for a mean over N numbers, 1/N for half of
            it.
        optimizer: the optimizer as it stands; None means plain gradient descent.
        trial: look for rates above the edge at which training still converges, by short runs on a copy, unless the loss is
            quadratic. An optimizer without a law gets its edge that way.
        clip: the factor by which clipping makes the gradients smaller (`min(1, max_norm / norm)`): the curvature that the
            optimizer meets is smaller by it. None means that they are not clipped.
        population: size of the set the data was drawn from; adds the sampling error.
        operator, start, max_matvecs: the Hessian (or Gauss-Newton matrix, or tangent kernel operator: what `by` names) where it
            is there already, eigenvectors to start from, and the budget in products.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))
    >>> rate = critical_learning_rate(problem)                # λ = 9
    >>> round(rate.value, 6), rate.window, rate.rule
    (0.222222, (), '2/λ')
    """
    require_problem(problem, "critical_learning_rate")
    choice("by", by, MATRICES)
    began = time.perf_counter()
    optimizer = plain_optimizer(optimizer)
    if clip is not None and (trial or not positive("clip", clip) <= 1.0):
        raise ValueError(f"clip is a factor above 0 and up to 1, and goes without trial=True: trials do not clip. Got {clip!r}.")
    if trial and not has_law(optimizer):
        return _by_trial(problem, by, optimizer, seed, began)
    law = stability_law(optimizer, problem).clipped(clip)
    op, rule = _edge(problem, by, law, operator)
    pairs = top_eigenpairs(op, 1, tol=tol, start=start, max_matvecs=max_matvecs, seed=seed, progress=progress)
    sharpness, residual = float(pairs.values[0]), float(pairs.residuals[0])
    value, error = math.inf, 0.0  # where no direction curves upwards
    if not sharpness <= tol * pairs.scale:
        value = law.rate(sharpness)
        error = value - law.rate(sharpness + residual)
    if population is not None and math.isfinite(value):
        error = math.hypot(error, _sampling_error(problem, by, optimizer, clip, population, pairs, tol, seed))
    quadratic = is_quadratic(problem)
    window, window_by, maximum = (None, "", None) if math.isinf(value) else _above(problem, optimizer, value, quadratic, trial)
    return CriticalRate(
        value=value,
        sharpness=sharpness,
        error=error,
        window=window,
        rule=rule,
        by=by,
        optimizer="gradient descent" if optimizer is None else type(optimizer).__name__,
        matvecs=pairs.matvecs,
        quadratic=quadratic,
        linear=law.linear,
        note="; ".join(filter(None, [law.note, _on_the_floor(law, pairs) if by != "kernel" else ""])),
        predicted_maximum=maximum,
        window_by=window_by,
        outcome=pairs.outcome,
        seed=seed,
        cost=Cost(time.perf_counter() - began, pairs.cost.route, pairs.cost.peak_bytes, pairs.cost.notes),
    )


def _edge(
    problem: Problem, by: MatrixName, law: StabilityLaw, operator: LinearOperator | None = None
) -> tuple[LinearOperator, str]:
    """The operator whose largest eigenvalue sets the edge, and the rule in words."""
    if by != "kernel":
        return law.effective(ON_PARAMETERS[by](problem) if operator is None else operator), law.rule
    curvature = squared_loss_curvature(problem)
    if curvature is None:
        raise ValueError(
            "by='kernel' needs a squared loss, such as MSELoss or ½ Σ r²: only there is the curvature of the loss c times the "
            "tangent kernel. Use by='gauss_newton', which weights the kernel by the curvature of any loss, or by='hessian'."
        )
    decay = law.decay
    uniform = decay is None or bool((decay == decay[0]).all())
    if law.shift is not None or not uniform or (decay is not None and law.scale is not None):
        raise ValueError(
            "by='kernel' works on outputs and cannot see weight decay that differs between parameters. Use by='gauss_newton': "
            "for a squared loss it has the same eigenvalues, and the decay joins it."
        )
    metric = None if law.scale is None else law.scale.square()
    kernel = tangent_kernel_operator(problem, metric=metric) if operator is None else _kernel(problem, operator, metric)
    op = law.clip * curvature * kernel
    if decay is not None:
        op = op + DiagonalOperator(torch.full((op.shape[0],), float(decay[0]), dtype=op.dtype, device=op.device))
    return op, f"{law.rule}, λ = c λ₁(K), c = {curvature:.4g}"


def _kernel(problem: Problem, operator: LinearOperator, metric: Tensor | None) -> LinearOperator:
    """The operator given for by='kernel', which must act on outputs and be the kernel of this optimizer."""
    rows = problem.samples * outputs_per_sample(problem)
    if tuple(operator.shape) != (rows, rows) or isinstance(operator, HessianOperator | GaussNewtonOperator):
        raise ValueError(
            "by='kernel' takes operator=theodolite.tangent_kernel_operator(problem), or that kernel formed: it acts on the "
            f"{rows} outputs. Got {type(operator).__name__} of shape {tuple(operator.shape)}; a Hessian or Gauss-Newton matrix "
            "goes with its own by=."
        )
    given = operator.metric if isinstance(operator, TangentKernelOperator) else None
    own = None if given is None else given[:, 0]
    if (own is None) != (metric is None) or (own is not None and metric is not None and not torch.equal(own, metric.to(own))):
        raise ValueError(
            "The tangent kernel operator given does not have the preconditioner of the optimizer. Leave operator= out, and it is "
            "built as the optimizer needs it."
        )
    return operator


def _on_the_floor(law: StabilityLaw, pairs: Eigenpairs) -> str:
    """A caveat where the sharpest direction lies on parameters whose second moment is hardly there."""
    if law.floored is None:
        return ""
    share = float(pairs.vectors[:, 0].double().square()[law.floored.to(pairs.vectors.device)].sum())
    if share < 0.1:
        return ""
    return f"{100 * share:.0f} % of the sharpest direction lies where the second moment is nearly zero and eps decides"


def _sampling_error(
    problem: Problem,
    by: MatrixName,
    optimizer: Optimizer | None,
    clip: float | None,
    population: int,
    pairs: Eigenpairs,
    tol: float,
    seed: int,
) -> float:
    """The jackknife over groups of samples, each started from the eigenvector of them all."""

    def value(part: Problem) -> float:
        law = stability_law(optimizer, part).clipped(clip)
        start = None if by == "kernel" else pairs  # a part has fewer outputs
        found = top_eigenpairs(_edge(part, by, law)[0], 1, tol=max(tol, 1e-3), start=start, seed=seed, progress=False)
        return law.rate(float(found.values[0]))

    return problem.sampling_error(value, population=population)


# Above the edge


def _by_trial(problem: Problem, by: MatrixName, optimizer: Optimizer, seed: int, began: float) -> CriticalRate:
    """The edge of an optimizer without a law: the largest rate at which short runs on a copy still end below their start."""

    def falls(rate: float) -> bool:
        losses = run_trial(problem, rate, optimizer=optimizer, steps=TRIAL_STEPS)
        return losses[-1] < losses[0]

    low = high = float(optimizer.param_groups[0]["lr"])
    while not falls(low) and low > 1e-12:
        low, high = low / 4.0, low
    while high == low or (falls(high) and high < 1e12):
        low, high = high, high * 4.0
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falls(middle) else (low, middle)
    return CriticalRate(
        value=low,
        sharpness=math.nan,
        error=high - low,
        window=None,
        rule=f"no law: the largest rate at which {TRIAL_STEPS} trial steps lower the loss",
        by=by,
        optimizer=type(optimizer).__name__,
        matvecs=0,
        quadratic=is_quadratic(problem),
        linear=False,
        window_by="trial",
        seed=seed,
        cost=Cost(time.perf_counter() - began, "trial runs"),
    )


def _above(
    problem: Problem, optimizer: Optimizer | None, value: float, quadratic: bool, trial: bool
) -> tuple[tuple[float, ...] | None, str, float | None]:
    """The window above the edge, how it is known, and the largest rate that theory allows."""
    if quadratic:
        return (), "exact", value
    squared = _is_plain(optimizer) and squared_loss_curvature(problem) is not None
    maximum = 2.0 * value if squared else None
    if trial:
        return _window(problem, optimizer, value), "trial", maximum
    if squared and is_quadratic_model(problem):
        return (value, 2.0 * value), "theory", maximum
    return None, "", maximum


def _is_plain(optimizer: Optimizer | None) -> bool:
    """Gradient descent with one rate, nothing else."""
    if optimizer is None:
        return True
    groups = optimizer.param_groups
    extras = ("momentum", "weight_decay", "nesterov")
    return (
        isinstance(optimizer, SGD) and not any(g.get(x) for g in groups for x in extras) and len({g["lr"] for g in groups}) == 1
    )


def _window(problem: Problem, optimizer: Optimizer | None, value: float) -> tuple[float, ...]:
    """Rates above the edge at which a short run on a copy ends below its start."""
    highest = value
    for factor in TRIALS:
        losses = run_trial(problem, factor * value, optimizer=optimizer, steps=TRIAL_STEPS)
        if not losses[-1] < losses[0]:
            break
        highest = factor * value
    return () if highest == value else (value, highest)


def is_quadratic(problem: Problem) -> bool:
    """Whether the loss is a quadratic function of the parameters: its Hessian is the same at two other places."""
    v = torch.randn(problem.size, generator=torch.Generator().manual_seed(sum(TRIAL_SEEDS)), dtype=torch.float32)
    v = v.to(problem.device, problem.dtype)
    here = hessian(problem, keep="never") @ v
    tolerance = (1e-3 if problem.dtype == torch.float32 else 1e-9) * float(here.norm())
    return all(float((hessian(_away(problem, seed), keep="never") @ v - here).norm()) <= tolerance for seed in TRIAL_SEEDS)


def is_quadratic_model(problem: Problem) -> bool:
    """Whether the outputs are quadratic in the parameters, as those of a second order Taylor model: third differences vanish."""
    tolerance = 1e-4 if problem.dtype == torch.float32 else 1e-10
    found = (third_difference([_first_output(_away(problem, seed, i)) for i in range(4)]) for seed in TRIAL_SEEDS)
    return all(size <= tolerance * scale for size, scale in found)


def _away(problem: Problem, seed: int, steps: int = 1) -> Problem:
    """The problem on a copy of the model, so many trial steps away."""
    elsewhere = problem.copied()
    named = dict(zip(problem.names, elsewhere.parameters, strict=True))
    step = trial_step(named, seed)
    with torch.no_grad():
        for name, p in named.items():
            p.add_(step[name], alpha=steps)
    return elsewhere


def _first_output(problem: Problem) -> Tensor:
    with problem.session(second=False), torch.no_grad():
        batch = problem.placed(next(iter(problem.data)))
        return problem.output(problem.tensors(problem.leaves(grad=False)), batch, 0)
