"""The largest learning rate at which training stays stable: on all the data, and on random batches of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from theodolite.arguments import also_called, checked, choice, count, fraction, number_in, positive, seed, shown
from theodolite.errors import BatchCoupledError
from theodolite.interrupts import unbroken
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.dynamics.optimizers import (
    StabilityLaw,
    first_rate,
    has_law,
    never_rises,
    plain_optimizer,
    run_trial,
    stability_law,
)
from theodolite.measures.dynamics.spikes import Proportion
from theodolite.measures.kernel.problem_views import (
    TRIAL_SEEDS,
    outputs_per_sample,
    picked,
    squared_loss_curvature,
    third_difference,
    trial_step,
)
from theodolite.operators import (
    GaussNewtonOperator,
    HessianOperator,
    LinearOperator,
    TangentKernelOperator,
    as_operator,
    hessian,
    tangent_kernel,
    tangent_kernel_operator,
)
from theodolite.operators.algebra import DiagonalOperator
from theodolite.operators.matrices import MATRICES, ON_PARAMETERS, MatrixName, check_matrix_or_none
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.results import Cost, Outcome, Result, Row, fields_of, number

#: Rates tried on a copy, in units of the critical one, and how many steps each gets.
TRIALS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
TRIAL_STEPS = 60
#: By how much a quadratic loss must have grown above the edge for a run that never rises to say something: even from rounding.
GROWN = 1e16


def edge_is_no_limit(losses: Sequence[float], ratio: float) -> bool:
    """Whether a run at `ratio` times the critical rate never rises, where a quadratic loss would have grown by (2 ratio − 1)².

    As near zero loss, where the curvature falls with the loss.

    >>> edge_is_no_limit([1.0, 0.5, 0.2], 1.5), edge_is_no_limit([0.99**i for i in range(61)], 1.5)
    (False, True)
    """
    return ratio > 1.0 and never_rises(losses) and 2 * (len(losses) - 1) * math.log(2 * ratio - 1) > math.log(GROWN)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CriticalRate(Result):
    """The edge of stability: `value` is the critical learning rate, `sharpness` the eigenvalue it comes from.

    `error` bounds what the eigen-residual leaves open, and holds the sampling error where a population was named.
    `window` are rates above the edge at which training still converges, and `window_by` how that is known. "exact": empty,
    for a quadratic loss. "trial": from short runs on a copy (`trial=True`). "theory": up to twice the edge, for a model
    quadratic in its parameters under a squared loss and plain descent; that is the limit of wide models, and narrow ones may
    diverge before or even below the edge. None and "" where nobody looked. `predicted_maximum` is the largest rate by
    theory: `value` for a quadratic loss, twice that for a squared loss, which is where the quadratic twin of a wide network
    diverges (ReLU networks tolerate more); None where there is no theory. `never_rose` is the largest rate above the edge up
    to which trial runs never raise the loss though a quadratic one would have shown it: the edge is no limit there.
    `quadratic` says whether the loss is a quadratic function of the parameters, `linear` whether the optimizer is then a linear
    recursion, so that theory is exact (Adam is not: it adapts). `rule` is the formula used.
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
    never_rose: float | None = None

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
            if self.never_rose is None:
                return (
                    f" {tried} it still converges up to {self.window[1]:.3g}." if self.window else f" {tried} it diverges above."
                )
            times = f"{self.never_rose:.3g}, {self.never_rose / self.value:.3g} times the edge"
            farther = f" It still converges up to {self.window[1]:.3g}." if self.window[1:] > (self.never_rose,) else ""
            return f" {tried} the loss never rises at rates up to {times}: the edge is no limit here.{farther}"
        if not self.window:
            return " Above it training diverges."
        return f" Theory for wide models: it still converges up to {self.window[1]:.3g}; trial=True measures it."


@also_called(matrix="by")
@checked(problem=a_problem, population=count, max_matvecs=count, tol=fraction, seed=seed)
def critical_learning_rate(
    problem: Problem,
    *,
    by: MatrixName = "hessian",
    optimizer: Optimizer | str | None = None,
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
        optimizer: the optimizer as it stands, or a name for a new one (`"sgd"`, `"momentum"`, `"adam"`, `"adamw"`); None means
            plain gradient descent.
        trial: look for rates above the edge at which training still converges, by short runs on a copy, unless the loss is
            quadratic. An optimizer without a law gets its edge that way.
        clip: the factor by which clipping makes the gradients smaller (`min(1, max_norm / norm)`): the curvature that the
            optimizer meets is smaller by it. None means that they are not clipped.
        population: size of the set the data was drawn from; adds the sampling error.
        operator, start, max_matvecs: the Hessian (or Gauss-Newton matrix, or tangent kernel operator: what `by` names) where it
            is there already, eigenvectors to start from, and the budget in products.

    Returns:
        A `CriticalRate`: `value` with its error, the sharpness behind it, and the `window` of rates that catapult.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))
    >>> rate = critical_learning_rate(problem)                # λ = 9
    >>> round(rate.value, 6), rate.window, rate.rule
    (0.222222, (), '2/λ')
    """
    choice("by", by, MATRICES)
    began = time.perf_counter()
    optimizer = as_optimizer(plain_optimizer(optimizer), problem.parameters)
    if clip is not None and (trial or not positive("clip", clip) <= 1.0):
        raise ValueError(f"clip is a factor above 0 and up to 1, and goes without trial=True: trials do not clip. Got {clip!r}.")
    if trial and optimizer is not None and not has_law(optimizer):
        return _by_trial(problem, by, optimizer, seed, began)
    law = stability_law(optimizer, problem).clipped(clip)
    op, rule = _edge(problem, by, law, operator)
    # Certified from any start: a sharper direction that was overlooked would make the rate too large.
    pairs = top_eigenpairs(op, 1, tol=tol, start=start, max_matvecs=max_matvecs, verify="full", seed=seed, progress=progress)
    sharpness, residual = float(pairs.values[0]), float(pairs.residuals[0])
    value, error = math.inf, 0.0  # where no direction curves upwards
    if not sharpness <= tol * pairs.scale:
        value = law.rate(sharpness)
        error = value - law.rate(sharpness + residual)
    if population is not None and math.isfinite(value):
        error = math.hypot(error, _sampling_error(problem, by, optimizer, clip, population, pairs, tol, seed))
    quadratic = is_quadratic(problem)
    window, window_by, maximum, calm = None, "", None, None
    if math.isfinite(value):
        window, window_by, maximum = _above(problem, optimizer, value, quadratic)
        if trial and not quadratic:
            (window, calm), window_by = _window(problem, optimizer, value), "trial"
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
        never_rose=calm,
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
    if law.shift is not None or not law.even_decay or (decay is not None and law.scale is not None):
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


def _by_trial(problem: Problem, by: MatrixName, optimizer: Optimizer, seed: int, began: float) -> CriticalRate:
    """The edge of an optimizer without a law: the largest rate at which short runs on a copy still end below their start."""

    def falls(rate: float) -> bool:
        losses = run_trial(problem, rate, optimizer=optimizer, steps=TRIAL_STEPS)
        return losses[-1] < losses[0]

    low = high = first_rate(optimizer) or 1.0
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
    problem: Problem, optimizer: Optimizer | None, value: float, quadratic: bool
) -> tuple[tuple[float, ...] | None, str, float | None]:
    """The window above the edge, how it is known, and the largest rate that theory allows."""
    if quadratic:
        return (), "exact", value
    squared = _is_plain(optimizer) and squared_loss_curvature(problem) is not None
    maximum = 2.0 * value if squared else None
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


def _window(problem: Problem, optimizer: Optimizer | None, value: float) -> tuple[tuple[float, ...], float | None]:
    """Rates above the edge at which a short run on a copy ends below its start, and the largest up to which none ever rises."""
    good: list[float] = []
    calm: list[float] = []
    for factor in TRIALS:
        losses = run_trial(problem, factor * value, optimizer=optimizer, steps=TRIAL_STEPS)
        if not losses[-1] < losses[0]:
            break
        calm += [factor * value] if len(calm) == len(good) and edge_is_no_limit(losses, factor) else []
        good.append(factor * value)
    return (value, good[-1]) if good else (), calm[-1] if calm else None


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
    with unbroken(torch.no_grad()):
        for name, p in named.items():
            p.add_(step[name], alpha=steps)
    return elsewhere


def _first_output(problem: Problem) -> Tensor:
    with problem.session(second=False), torch.no_grad():
        batch = problem.placed(next(iter(problem.data)))
        return problem.output(problem.tensors(problem.leaves(grad=False)), batch, 0)


#: Rows of the kernel of all samples up to which it is formed once and every batch cut out of it.
KERNEL_ROWS = 2000
#: Rows of a batch's kernel up to which all its eigenvalues are computed, in stacks of about this many numbers.
DENSE_ROWS = 300
STACK = 20_000_000
#: Accuracy of the eigenvalue of one batch where it is computed by products.
TOL = 1e-3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchCriticalRates(Result):
    """Critical learning rates of random batches of one size.

    `rates` holds one per batch; `rate` is the optimizer's (None without one) and `below` the share of batches whose critical
    rate lies under it, with `below_error` from the number of batches: on such a batch a step overshoots.
    """

    rates: Tensor
    batch_size: int
    samples: int
    rate: float | None
    below: float | None
    below_error: float | None
    by: str
    rule: str
    optimizer: str

    def quantile(self, share: float) -> float:
        """The critical rate that this share of the batches does not exceed."""
        share = number_in(least=0, most=1)("share", share)
        return float(torch.quantile(self.rates, share, interpolation="lower"))  # infinite rates do not average

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def rows(self) -> list[Row]:
        return [
            {"batch": i, "critical_rate": value, "batch_size": self.batch_size, "rate": self.rate, "seed": self.seed}
            for i, value in enumerate(self.rates.tolist())
        ]

    def sentence(self) -> str:
        low, middle, high = (number(self.quantile(q)) for q in (0.05, 0.5, 0.95))
        spread = f"Critical rates of batches of {self.batch_size}: median {middle}, from {low} (5 %) to {high} (95 %)"
        if self.below is None or self.below_error is None:
            return f"{spread}."
        share = f"{100 * self.below:.3g} ± {100 * self.below_error:.2g} %"
        return f"{spread}; the rate {self.rate:.4g} exceeds that of {share} of the batches."


@also_called(matrix="by")
@checked(problem=a_problem, batch_size=count, batches=count, seed=seed)
def batch_critical_rates(
    problem: Problem,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int | None = None,
    batches: int = 200,
    own: bool = False,
    by: MatrixName | None = None,
    seed: int = 0,
) -> BatchCriticalRates:
    """The critical learning rate of random batches at the current weights.

    For a squared loss the tangent kernel of all samples is formed once, if it has at most 2000 rows, and the kernel of each
    batch is cut out of it. Otherwise each batch costs some products with its Gauss-Newton matrix, started from the last one.

    Args:
        optimizer: sets the law of stability (momentum, decay, Adam) and the rate to compare with; None is plain descent.
        batch_size: None means the size of the problem's own batches, where it has several.
        batches: how many are drawn, each without replacement.
        own: measure the problem's own batches as they are instead, `batches` of them at most, chosen at random.
        by: (or `matrix`) "kernel", "gauss_newton" or "hessian"; None takes the kernel where that is possible and the Gauss-Newton
            matrix elsewhere.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> x = torch.tensor([[1.0], [1.0], [1.0], [2.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, 0 * x))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> found = batch_critical_rates(problem, optimizer=sgd, batch_size=1)           # 1 / x²: 1 or, for one in four, 0.25
    >>> sorted(set(found.rates.tolist())), found.below == float((found.rates < 0.5).double().mean())
    ([0.25, 1.0], True)
    """
    check_matrix_or_none(by)
    began = time.perf_counter()
    optimizer = as_optimizer(optimizer, problem.parameters, needs_rate=True, rate="")
    law = stability_law(optimizer, problem)
    if own:
        chosen = _some(list(problem.data), batches, seed)
        size, batches = max(batch.size for batch in chosen), len(chosen)
        largest, by = _each(problem, [[batch] for batch in chosen], law, by)
        route = "each batch alone"
    else:
        problem.refuse_cutting("The critical rate of random batches")
        size = _batch_size(problem, batch_size)
        largest, by, route = _drawn(problem, random_batches(problem.samples, size, batches, seed), law, by)
    floor = 1e-12 * float(largest.abs().max())
    rates = torch.tensor([law.rate(x) if x > floor else math.inf for x in largest.tolist()], dtype=torch.float64)
    rate = None if optimizer is None else first_rate(optimizer)
    share = None if rate is None else Proportion(int((rates < rate).sum()), batches)
    return BatchCriticalRates(
        rates=rates,
        batch_size=size,
        samples=problem.samples,
        rate=rate,
        below=None if share is None else share.value,
        below_error=None if share is None else share.error,
        by=str(by),
        rule=law.rule,
        optimizer="gradient descent" if optimizer is None else type(optimizer).__name__,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route=route),
    )


def random_batches(samples: int, size: int, batches: int, seed: int) -> Tensor:
    """(batches, size): indices of samples, each row without repetition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(samples, generator=generator)[:size] for _ in range(batches)])


def _some(batches: list[Batch], most: int, seed: int) -> list[Batch]:
    """At most so many batches, chosen at random and left in their order."""
    if len(batches) <= most:
        return batches
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))[:most]
    return [batches[i] for i in order.sort().values.tolist()]


def _drawn(problem: Problem, rows: Tensor, law: StabilityLaw, by: MatrixName | None) -> tuple[Tensor, MatrixName, str]:
    """The eigenvalue of the edge of each drawn batch (batches, size), how it was found, and the route."""
    curvature = None
    if by not in ON_PARAMETERS:  # that of a batch: a mean divides by the batch's numbers
        one = problem.with_batches(picked(problem, rows[0]))
        most = KERNEL_ROWS * rows.shape[1] // problem.samples
        curvature = kernel_curvature(one, law, rows=most, required=by == "kernel")
    if curvature is None:
        largest, found = _each(problem, (picked(problem, mine) for mine in rows), law, by or "gauss_newton")
        return largest, found, "products, batch by batch"
    return _shifted(curvature * _through_kernel(problem, rows), law), "kernel", "one tangent kernel"


def _shifted(largest: Tensor, law: StabilityLaw) -> Tensor:
    """With the weight decay, which is the same for all parameters here."""
    return largest if law.decay is None else largest + float(law.decay[0])


def _batch_size(problem: Problem, given: int | None) -> int:
    samples = problem.samples
    if given is None:
        if len(problem.data) < 2:
            raise ValueError("The data is one batch: say how large the batches of training are with batch_size=...")
        given = next(iter(problem.data)).size
    if not 1 <= given <= samples:
        raise ValueError(f"batch_size must be from 1 to the number of samples, {samples}. Got {shown(given)}.")
    return given


def kernel_curvature(problem: Problem, law: StabilityLaw, *, rows: int, required: bool) -> float | None:
    """The c of a squared loss whose curvature is c times its tangent kernel; None where that kernel cannot give the edge.

    None too where it has more than `rows` rows. `required` raises instead, and takes any size.
    """
    plain = law.scale is None and law.shift is None and law.even_decay
    found = squared_loss_curvature(problem) if plain else None
    if required and found is None:
        raise ValueError(
            "by='kernel' needs a squared loss and an optimizer with one rate and one decay for all parameters (no Adam). Use "
            "by='gauss_newton', which knows them."
        )
    if found is None or (not required and problem.samples * outputs_per_sample(problem) > rows):
        return None
    try:
        problem.refuse_batch_coupling("A tangent kernel")
    except BatchCoupledError:
        if required:
            raise
        return None
    return found


def _through_kernel(problem: Problem, chosen: Tensor) -> Tensor:
    """λ₁ of the kernel of each batch, from one kernel of all samples."""
    kernel = tangent_kernel(problem).double()
    outputs = kernel.shape[0] // problem.samples
    rows = (chosen[:, :, None] * outputs + torch.arange(outputs)).flatten(1).to(kernel.device)  # (batches, size * outputs)
    width = rows.shape[1]
    if width > DENSE_ROWS:
        found = [top_eigenpairs(as_operator(kernel[mine][:, mine]), 1, tol=1e-6, progress=False) for mine in rows]
        return torch.tensor([float(pairs.values[0]) for pairs in found], dtype=torch.float64)
    stacks = rows.split(max(1, STACK // width**2))
    return torch.cat([torch.linalg.eigvalsh(kernel[part[:, :, None], part[:, None, :]])[:, -1] for part in stacks]).cpu()


def _each(problem: Problem, parts: Iterable[list[Batch]], law: StabilityLaw, by: MatrixName | None) -> tuple[Tensor, MatrixName]:
    """The eigenvalue of the edge of each part: by its kernel where that is small, else by products from the last eigenvector."""
    found: list[float] = []
    start = None
    for mine in parts:
        part = problem.with_batches(mine)
        if by is None:
            by = "gauss_newton" if kernel_curvature(part, law, rows=DENSE_ROWS, required=False) is None else "kernel"
        if by == "kernel":
            curvature = kernel_curvature(part, law, rows=DENSE_ROWS, required=True)
            assert curvature is not None
            largest = curvature * torch.linalg.eigvalsh(tangent_kernel(part).double())[-1].cpu()
            found.append(float(_shifted(largest, law)))
        else:
            op = law.effective(ON_PARAMETERS[by](part))
            start = top_eigenpairs(op, 1, tol=TOL, start=start, verify="full", seed=0, progress=False)
            found.append(float(start.values[0]))
    return torch.tensor(found, dtype=torch.float64), by or "gauss_newton"
