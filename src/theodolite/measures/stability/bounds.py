"""How far stochastic gradient descent on a convex loss can carry two runs apart that differ in one example.

The argument is that of Hardt, Recht and Singer (2016), with the constants of a linear model under the logistic loss. Let
x̃ = (x, 1) (or x, without a bias), f = w·x̃, and G_S(w) = w − η ∇L_S(w) one step on a batch of B examples with mean loss L_S.

* A gradient is at most ‖x̃‖: it is −y σ(−y f) x̃. Its Hessian is at most x̃ x̃ᵀ / 4, since σ' ≤ 1/4, so L_S is β_s-smooth with
  β_s = λ_max(X̃ᵀX̃ / B) / 4.
* A convex, β_s-smooth loss has a non-expansive step where η ≤ 2/β_s: ‖G_S(w) − G_S(w')‖ ≤ ‖w − w'‖.
* Where the batches of the two runs differ in one example, ‖G_S(w) − G_S'(w')‖ ≤ ‖G_S(w) − G_S(w')‖ + ‖G_S(w') − G_S'(w')‖, and
  the second part is η/B times the difference of two gradients, at most 2ηL/B.

So after h such batches D ≤ (2ηL/B) h, and each loss differs by at most ‖x̃‖ D, as it is 1-Lipschitz in f.

With softmax over C ≥ 2 outputs and cross-entropy the gradient is (p − e_y) x̃ᵀ with ‖p − e_y‖ ≤ √2, and the Hessian is
(diag p − p pᵀ) ⊗ x̃ x̃ᵀ, whose first factor has no eigenvalue above 1/2. All gradients gain √2, and β_s is twice as large.

All this is for plain descent: no momentum and no weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.arguments import also_called, checked, count, nonnegative, positive, sequence, shown
from theodolite.problem.arguments import a_finite_tensor, as_finite_tensor, numbers_in
from theodolite.results import Result, Row

_NUMBERS = 2**23  # held at once while batches are gathered: 64 MB in float64


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ConvexBounds(Result):
    """What distance and stability cannot exceed, if every step is non-expansive (`non_expansive`).

    `distance_bound` and `stability_bound` (float64 tensors, shaped as the visits), `visits` the batches so far that held the
    exchanged example, `largest_rate = 2 / smoothness` the rate up to which steps are non-expansive.
    """

    distance_bound: Tensor
    stability_bound: Tensor
    visits: Tensor
    non_expansive: bool
    rate: float
    smoothness: float
    largest_rate: float

    def rows(self) -> list[Row]:
        columns = (self.visits, self.distance_bound, self.stability_bound)
        shared = {"non_expansive": self.non_expansive, "rate": self.rate, "largest_rate": self.largest_rate}
        return [
            {"visits": int(h), "distance_bound": d, "stability_bound": s, **shared}
            for h, d, s in zip(*(column.reshape(-1).tolist() for column in columns), strict=True)
        ]

    def sentence(self) -> str:
        rate = f"the rate {self.rate:.3g} is {{}} 2/β = {self.largest_rate:.3g}"
        if not self.non_expansive:
            return f"The convex bound does not apply: {rate.format('above')}, so a step may drive the two runs apart."
        last = self.rows()[-1]
        bounds = f"at most {last['distance_bound']:.3g} apart, and their losses at most {last['stability_bound']:.3g}"
        return f"After {last['visits']} differing batches the two runs are {bounds} ({rate.format('within')})."

    @checked(distance=numbers_in(least=0), stability=numbers_in(least=0), tolerance=nonnegative)
    def hold(self, distance: Any, stability: Any, *, tolerance: float = 1e-5) -> bool:
        """Whether the measured distances and stabilities respect the bounds, up to a relative rounding."""
        slack = 1.0 + tolerance
        far, unstable = (torch.as_tensor(x, dtype=torch.float64) for x in (distance, stability))
        return bool((far <= slack * self.distance_bound).all() and (unstable <= slack * self.stability_bound).all())


@also_called(lr="rate")
@checked(
    largest_input=positive, largest_test_input=positive, rate=numbers_in(above=0), batch=count,
    visits=numbers_in(least=0, most=2.0**53), smoothness=positive, outputs=count,
)  # fmt: skip
def convex_bounds(
    *,
    largest_input: float,
    largest_test_input: float,
    rate: Any,
    batch: int,
    visits: Any,
    smoothness: float,
    outputs: int = 1,
) -> ConvexBounds:
    """The bounds `D ≤ (2ηL/B) h` and `stability ≤ L_test D` of logistic regression trained by plain descent.

    Args:
        largest_input, largest_test_input: L and L_test, the largest ‖x̃‖ among the training examples of both runs and among the
            test examples; see `largest_norm`.
        rate: (or `lr`) η, a number or one per step (T,).
        batch: B.
        visits: h, how many batches so far held the exchanged example: a number, or one per checkpoint. With a rate per step:
            which steps did, as zeros and ones (T,); the bounds are then those after each step.
        smoothness: the largest β_s of all batches; see `largest_smoothness`.
        outputs: 1 for the binary logistic loss, the number of classes for softmax.

    >>> found = convex_bounds(largest_input=2.0, largest_test_input=3.0, rate=0.1, batch=4, visits=5, smoothness=1.0)
    >>> round(float(found.distance_bound), 9), round(float(found.stability_bound), 9), found.non_expansive
    (0.5, 1.5, True)
    """
    rates, seen = torch.as_tensor(rate, dtype=torch.float64), torch.as_tensor(visits).long()
    highest = float(rates.max())
    slope, _ = _constants(outputs)
    if rates.ndim:
        if rates.shape != seen.shape or int(seen.max()) > 1:
            raise ValueError(
                "With a rate per step, visits must be zeros and ones, one per step: whether its batch held the exchanged "
                f"example. Got {tuple(rates.shape)} rates and visits of shape {tuple(seen.shape)} up to {int(seen.max())}."
            )
        travelled, seen = (rates * seen).cumsum(0), seen.cumsum(0)
    else:
        travelled = rates * seen
    distance = 2.0 * slope * largest_input / batch * travelled
    return ConvexBounds(
        distance_bound=distance,
        stability_bound=slope * largest_test_input * distance,
        visits=seen,
        non_expansive=highest <= 2.0 / smoothness,
        rate=highest,
        smoothness=float(smoothness),
        largest_rate=2.0 / smoothness,
    )


def _indices(name: str, value: Any) -> Any:
    """Batches of whole numbers, as one tensor or as several."""
    parts = [value] if isinstance(value, Tensor) else [as_finite_tensor(name, part) for part in sequence(name, value)]
    if any(part.is_meta or part.is_floating_point() or part.dtype == torch.bool for part in parts):
        raise ValueError(f"{name} must hold whole numbers, indices of the inputs. Got {shown(value)}.")
    return value


@checked(inputs=a_finite_tensor)
def largest_norm(inputs: Tensor, *, bias: bool = True) -> float:
    """L, the largest ‖x̃‖ over inputs of shape (N, ...).

    >>> largest_norm(torch.tensor([[2.0, 2.0], [0.0, 1.0]]))
    3.0
    """
    return float(_extended(inputs, bias).norm(dim=1).max())


@checked(inputs=a_finite_tensor, batches=_indices, outputs=count, enough=positive)
def largest_smoothness(
    inputs: Tensor, batches: Tensor | Sequence[Tensor], *, bias: bool = True, outputs: int = 1, enough: float | None = None
) -> float:
    """The largest β_s = κ λ_max(X̃ᵀX̃ / B) of all batches, κ = 1/4 (one output) or 1/2 (softmax), in float64.

    Most batches are passed over by λ_max ≤ ‖Gram‖_F ≤ trace, which cannot exceed the largest value found so far; only the rest
    meet an eigenvalue solver, so the value is exact. Where `enough` is given (2/η, say) such a bound is taken as the value as
    soon as it is not above `enough`: what returns is then an upper bound.

    Args:
        inputs: (N, ...), flattened per example.
        batches: indices into them, (batches, B) or a sequence of index tensors of any length.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    >>> largest_smoothness(x, torch.tensor([[0, 1], [1, 2]]), bias=False)
    1.0
    """
    x = _extended(inputs, bias)
    _, curvature = _constants(outputs)
    best, limit = 0.0, 0.0 if enough is None else enough / curvature
    squares = x.square().sum(1)
    for indices in _by_length(batches):
        for part in indices.to(x.device).split(max(1, _NUMBERS // (indices.shape[1] * x.shape[1]))):
            best = _largest_eigenvalue(x, squares, part, best, limit)
    return curvature * best


def _largest_eigenvalue(x: Tensor, squares: Tensor, part: Tensor, best: float, limit: float) -> float:
    """The larger of `best` and the λ_max of these batches (k, B); bounds up to `limit` count as values."""
    best, rest = _pass_over(squares[part].mean(1), best, limit)
    if not rest.any():
        return best
    X = x[part[rest]]  # (k, B, d)
    small = X @ X.mT if X.shape[1] <= X.shape[2] else X.mT @ X
    gram = small / X.shape[1]
    sizes = gram.flatten(1).norm(dim=1)
    if float(sizes.max()) > max(best, limit):  # the likeliest maximum first: it rules out most others
        best = max(best, float(torch.linalg.eigvalsh(gram[sizes.argmax()])[-1]))
    best, rest = _pass_over(sizes, best, limit)
    return max(best, float(torch.linalg.eigvalsh(gram[rest])[:, -1].max())) if rest.any() else best


def _pass_over(bounds: Tensor, best: float, limit: float) -> tuple[float, Tensor]:
    """The new best value, and which batches still need a closer look."""
    rest = bounds > max(best, limit)
    return max(best, float(bounds[~rest].max())) if limit > best and not rest.all() else best, rest


def _by_length(batches: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Batches stacked, (k, B) for each length B."""
    if isinstance(batches, Tensor) and batches.ndim == 2:
        found = [batches]
    else:
        by_length: dict[int, list[Tensor]] = {}
        for batch in batches:
            index = torch.as_tensor(batch).reshape(-1)
            by_length.setdefault(len(index), []).append(index)
        found = [torch.stack(group) for group in by_length.values()]
    if not sum(len(group) for group in found) or any(not group.shape[1] for group in found):
        raise ValueError("batches must hold at least one batch, and no empty one.")
    return found


def _extended(inputs: Tensor, bias: bool) -> Tensor:
    """x̃, one row per example, in float64."""
    x = inputs.detach().flatten(1).double()
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1) if bias else x


def _constants(outputs: int) -> tuple[float, float]:
    """The Lipschitz constant of the loss in the outputs, and that of its gradient."""
    if outputs < 1:
        raise ValueError(f"outputs must be 1 for the binary logistic loss, or the number of classes. Got {outputs}.")
    return (1.0, 0.25) if outputs == 1 else (math.sqrt(2.0), 0.5)


# The high-probability bound on the generalisation gap by uniform stability (Feldman and Vondrák 2019).


@checked(beta=numbers_in(least=0), m=numbers_in(least=1), delta=numbers_in(above=0, below=1), c=positive)
def fv_bound(beta: Any, m: Any, delta: Any, c: float = 1.0) -> Any:
    """What a β-uniformly stable algorithm can lose from training to test, with probability at least 1 − δ over the training set.

    `c (β log(m) log(m/δ) + sqrt(log(1/δ)) / sqrt(m))`.

    The constant c is not known, so only the shape in β, m and δ means anything. With β = 1/m the bound falls towards m^(−1/2);
    with a constant β it grows with m and is vacuous.

    Args:
        beta: ≥ 0.
        m: ≥ 1.
        delta: 0 < δ < 1. Floats, arrays or tensors, which broadcast.

    >>> round(fv_bound(0.0, 100, 0.1), 6)                                # sqrt(log 10) / 10
    0.151743
    """
    like = next((x for x in (beta, m, delta) if isinstance(x, Tensor)), None)
    if like is not None:
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        beta, m, delta = (torch.as_tensor(x, dtype=dtype, device=like.device) for x in (beta, m, delta))
        return c * (beta * m.log() * (m / delta).log() + (-delta.log()).sqrt() / m.sqrt())
    beta, m, delta = (np.asarray(x, dtype=np.float64) for x in (beta, m, delta))
    bound = c * (beta * np.log(m) * np.log(m / delta) + np.sqrt(-np.log(delta)) / np.sqrt(m))
    return bound if bound.ndim else float(bound)
