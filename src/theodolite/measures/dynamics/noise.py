"""The gradient and its noise: how far a batch's gradient strays from that of all the data."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from theodolite.arguments import checked, integer, seed
from theodolite.errors import BatchCoupledError
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem, of_dimensions
from theodolite.problem.parameters import join_like
from theodolite.results import Cost, Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GradientNoise(Result):
    """Loss, gradient and gradient noise, from groups of samples.

    `noise` is tr Σ, the variance of one sample's gradient summed over the parameters; `noise_scale` is tr Σ / ‖g‖², the
    batch size at which noise and signal are equally strong (infinite where the gradient cannot be told from zero). Errors
    are standard errors over the choice of samples, by the jackknife over the groups.
    """

    loss: float
    loss_error: float
    norm: float
    norm_error: float
    noise: float
    noise_error: float
    noise_scale: float
    noise_scale_error: float
    samples: int
    group_losses: Tensor
    group_norms: Tensor
    group_sizes: Tensor

    def rows(self) -> list[Row]:
        columns = zip(self.group_sizes.tolist(), self.group_losses.tolist(), self.group_norms.tolist(), strict=True)
        return [{"group": i, "samples": n, "loss": x, "gradient_norm": g} for i, (n, x, g) in enumerate(columns)]

    def sentence(self) -> str:
        scale = (
            "no more than its noise would make"
            if math.isinf(self.noise_scale)
            else f"noise scale {number(self.noise_scale, self.noise_scale_error)} samples"
        )
        return f"Loss {number(self.loss, self.loss_error)}, gradient norm {number(self.norm, self.norm_error)}, {scale}."


@checked(problem=a_problem, groups=partial(integer, least=2), gradient=of_dimensions(1), seed=seed)
def gradient_noise(problem: Problem, *, groups: int = 32, gradient: Tensor | None = None, seed: int = 0) -> GradientNoise:
    """Loss, gradient norm and noise of the gradient, from one pass over the data in `groups` parts.

    With the gradient g_i of part i (n_i of N samples) and their mean g, tr Σ is estimated by
    Σ n_i ‖g_i − g‖² / (groups − 1), and ‖g‖² is freed of its own noise, tr Σ / N. Samples are put into groups at random:
    the order of the data does not matter.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x = torch.ones(4, 1).double()
    >>> noise = gradient_noise(Problem(model, torch.nn.MSELoss(), (x, x * torch.tensor([[1.0], [1.0], [3.0], [3.0]]))), groups=4)
    >>> noise.norm, round(noise.noise, 9)                       # gradients −2, −2, −6, −6: variance 16/3
    (4.0, 5.333333333)
    """
    began = time.perf_counter()
    g = (problem.gradient() if gradient is None else gradient).double()
    parts = random_parts(problem, groups, seed)
    if len(parts.data) < 2:
        raise ValueError("gradient_noise needs at least two samples (or batches, where samples are coupled).")
    sizes, losses, squares, dots = _measure_parts(parts, g)
    n = sizes.sum()
    share = sizes / n
    loss = float((share * losses).sum())
    variance = float((sizes * (losses - loss).square()).sum()) / (len(sizes) - 1)
    total = _Statistics(sizes, squares, dots, float(g @ g))
    left_out = [total.without(i) for i in range(len(sizes))] if len(sizes) > 2 else []
    return GradientNoise(
        loss=loss,
        loss_error=math.sqrt(max(variance, 0.0) / float(n)),
        norm=math.sqrt(float(g @ g)),
        norm_error=_jackknife([math.sqrt(max(s.square, 0.0)) for s in left_out]),
        noise=total.noise,
        noise_error=_jackknife([s.noise for s in left_out]),
        noise_scale=total.scale,
        noise_scale_error=_jackknife([s.scale for s in left_out]),
        samples=int(n),
        group_losses=losses,
        group_norms=squares.sqrt(),
        group_sizes=sizes,
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="gradients of groups"),
    )


@dataclass(frozen=True)
class _Statistics:
    """What the noise is computed from: group sizes, ‖g_i‖², g_i·g, and ‖g‖² of the whole."""

    sizes: Tensor
    squares: Tensor
    dots: Tensor
    square: float

    @property
    def noise(self) -> float:
        n = float(self.sizes.sum())
        return max(0.0, (float((self.sizes * self.squares).sum()) - n * self.square) / (len(self.sizes) - 1))

    @property
    def scale(self) -> float:
        signal = self.square - self.noise / float(self.sizes.sum())
        return self.noise / signal if signal > 0 else math.inf

    def without(self, i: int) -> _Statistics:
        """The same without group i; only sizes, squares and the norm of the mean are needed then."""
        n, m = float(self.sizes.sum()), float(self.sizes[i])
        square = (n * n * self.square - 2 * n * m * float(self.dots[i]) + m * m * float(self.squares[i])) / (n - m) ** 2
        keep = torch.arange(len(self.sizes)) != i
        return _Statistics(self.sizes[keep], self.squares[keep], self.dots[keep], square)


def _jackknife(values: list[float]) -> float:
    """Standard error from leave-one-out values; infinite where one of them is."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values))


def random_parts(problem: Problem, groups: int, seed: int) -> Problem:
    """The problem with its samples in `groups` random parts; its own batches where samples may not be parted."""
    if not problem.data.held:
        return problem
    try:
        problem.refuse_batch_coupling("The gradient noise")
        problem.refuse_cutting("The gradient noise")
        return problem.with_batches(_random_groups(list(problem.data), min(groups, problem.samples), seed))
    except (BatchCoupledError, ValueError):  # coupled samples, or weights given batch by batch
        return problem


def _random_groups(batches: list[Batch], groups: int, seed: int) -> list[Batch]:
    """All samples dealt out at random; what shapes keep apart (sequences of different length) stays apart."""
    total = sum(batch.size for batch in batches)
    group_of = torch.randperm(total, generator=torch.Generator().manual_seed(seed)) % groups
    found: list[list[Batch]] = [[] for _ in range(groups)]
    start = 0
    for batch in batches:
        mine = group_of[start : start + batch.size]
        start += batch.size
        for group in mine.unique().tolist():
            found[group].append(batch.part(torch.nonzero(mine == group).flatten()))
    return [part for parts in found for part in joined_parts(parts)]


def joined_parts(parts: list[Batch]) -> list[Batch]:
    """Parts of several batches as one, if their shapes allow it."""
    try:
        return [reduce(Batch.joined, parts)] if parts else []
    except (RuntimeError, StopIteration, TypeError):
        return parts


def _measure_parts(parts: Problem, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sizes in samples, losses, ‖g_i‖² and g_i·g of the parts that count."""
    columns: list[tuple[float, float, float, float]] = []
    summed = parts.weighting.rule == "sum"
    samples = parts.samples
    with parts.session(second=False):
        leaves = parts.leaves()
        tensors = parts.tensors(leaves)
        for i, share, batch in parts.iterate():
            # A sum grows with its samples; as a mean over the data it is the same problem scaled.
            fraction = batch.size / samples if summed else share
            scale = 1.0 / fraction if summed else 1.0
            loss = parts.evaluate(tensors, batch, i).loss
            part = join_like(torch.autograd.grad(loss, leaves, allow_unused=True), leaves).double() * scale
            columns.append((fraction * samples, float(loss.detach()) * scale, float(part @ part), float(part @ g)))
    sizes, losses, squares, dots = torch.tensor(columns, dtype=torch.float64).T
    return sizes, losses, squares, dots
