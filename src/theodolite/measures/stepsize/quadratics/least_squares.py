"""Which step size for random least-squares tasks: by the training loss, or by held-out samples?

    w* uniform on the unit sphere of ℝᵈ,   y = ⟨w*, x⟩ + σξ,   x and ξ standard normal,   f̂(w) = Σ (yᵢ − ⟨w, xᵢ⟩)² / 2n

Gradient descent from 0 is simple along the eigenvectors of XᵀX/n: after t steps coordinate i is `(1 − (1 − ηλᵢ)ᵗ) aᵢ`, where a
are the coordinates of the solution that fits the samples. So one eigendecomposition of the smaller Gram matrix of a task serves
every rate η and every noise σ, and a run of t steps is a power. A run whose weights reach the norm 40σ has diverged: it is frozen
there, in the direction in which it went.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from theodolite.arguments import checked, count, each, fraction, positive, seed, shown
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row, number

#: Step sizes that are tried where none are named: 25 from 10⁻⁶ to 1, four to a decade.
RATES = tuple(10.0 ** (k / 4 - 6) for k in range(25))
#: A run ends where its weights reach this many σ: 4√L, with the constant L = 100 of the proofs.
LIMIT = 40.0
#: What the step size is chosen by: the samples it trains on, or others.
SPLITS = ("train", "valid")
#: By which factor the two choices may differ before the training samples are said to mislead.
APART = 3.0
_RANK = 1e-7  # singular values below this share of the largest are none: a Gram matrix has half of their digits
_HUGE = 1e100  # powers end here: the weights of such a run have passed any limit
_NUMBERS = 2**22  # that are held of one kind at once


# Tasks and their eigenvectors


@dataclass(frozen=True, eq=False)
class LeastSquaresTasks:
    """Random tasks: inputs `x` (m, n, d), true weights `true` (m, d), and the noise (m, n) for σ = 1."""

    x: Tensor
    true: Tensor
    noise: Tensor

    def part(self, samples: slice) -> LeastSquaresTasks:
        """The same tasks with some of their samples."""
        return LeastSquaresTasks(self.x[:, samples], self.true, self.noise[:, samples])


@checked(dim=count, samples=count, tasks=count, seed=seed)
def draw_tasks(dim: int, samples: int, tasks: int, *, seed: int = 0) -> LeastSquaresTasks:
    """Random least-squares tasks, as many as `tasks` says.

    >>> drawn = draw_tasks(5, 3, 2)
    >>> tuple(drawn.x.shape), [round(norm, 12) for norm in drawn.true.norm(dim=1).tolist()]
    ((2, 3, 5), [1.0, 1.0])
    """
    return _draw(dim, samples, tasks, torch.Generator().manual_seed(seed))


def _draw(dim: int, samples: int, tasks: int, generator: torch.Generator) -> LeastSquaresTasks:
    true, x, noise = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((tasks, dim), (tasks, samples, dim), (tasks, samples))
    )
    return LeastSquaresTasks(x, true / true.norm(dim=1, keepdim=True), noise)


@dataclass(frozen=True, eq=False)
class EigenTasks:
    """Tasks along the r = min(n, d) eigenvectors vᵢ of XᵀX/n, eigenvalues ascending (m, r).

    `true` are the coordinates ⟨vᵢ, w*⟩, `noise` those of X⁺ξ, each (m, r): with noise σ the samples are fitted by
    `a = true + σ noise`. `beyond` (m,) is the part of ‖w*‖² outside the eigenvectors, `unfitted` (m,) the training loss that is
    left by the best weights for σ = 1.
    """

    tasks: LeastSquaresTasks
    vectors: Tensor  # of the smaller Gram matrix: (m, n, n) or (m, d, d)
    singular: Tensor  # (m, r), those of X; an infinite one stands for one that is 0
    eigenvalues: Tensor
    true: Tensor
    noise: Tensor
    beyond: Tensor
    unfitted: Tensor

    def fit(self, sigmas: Tensor) -> Tensor:
        """Coordinates of the weights that fit the samples, for each noise: (m, S, r)."""
        return self.true[:, None] + sigmas[:, None] * self.noise[:, None]

    def weights(self, coordinates: Tensor) -> Tensor:
        """Weights (m, ..., d) from coordinates (m, ..., r)."""
        flat = coordinates.flatten(1, -2)
        wide = self.tasks.x.shape[1] < self.tasks.x.shape[2]
        found: Tensor = (flat / self.singular[:, None] @ self.vectors.mT @ self.tasks.x) if wide else flat @ self.vectors.mT
        weights: Tensor = found.unflatten(1, coordinates.shape[1:-1])
        return weights

    def samples(self) -> Tensor:
        """Coordinates of the samples: (m, n, r)."""
        wide = self.tasks.x.shape[1] < self.tasks.x.shape[2]
        singular = self.singular.masked_fill(self.singular.isinf(), 0.0)
        return self.vectors * singular[:, None] if wide else self.tasks.x @ self.vectors


def diagonalise(tasks: LeastSquaresTasks) -> EigenTasks:
    """The eigenvectors of each task, from the smaller of XXᵀ and XᵀX."""
    x, n = tasks.x, tasks.x.shape[1]
    wide = n < x.shape[2]
    squares, vectors = torch.linalg.eigh(x @ x.mT if wide else x.mT @ x)
    singular = squares.clamp(min=0).sqrt()
    singular = torch.where(singular > _RANK * singular[:, -1:], singular, math.inf)
    both = torch.stack([(x @ tasks.true[..., None])[..., 0], tasks.noise], 1)  # (m, 2, n): what the samples hold of each
    left = both @ vectors if wide else (both @ x) @ vectors / singular[:, None]  # along the left singular vectors
    left = left.masked_fill(singular[:, None].isinf(), 0.0)
    true, noise = (left / singular[:, None]).unbind(1)
    true = true if wide else (tasks.true[:, None] @ vectors)[:, 0]
    unfitted = (tasks.noise.square().sum(1) - left[:, 1].square().sum(1)).clamp(min=0) / (2 * n)
    beyond = (1 - true.square().sum(1)).clamp(min=0)
    eigenvalues = torch.where(singular.isinf(), 0.0, singular.square() / n)
    return EigenTasks(tasks, vectors, singular, eigenvalues, true, noise, beyond, unfitted)


# Gradient descent


def descend_tasks(eigen: EigenTasks, rates: Tensor, steps: int, sigmas: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates after `steps` of descent from 0, (m, S, E, r) for S noises and E rates, and where they were truncated."""
    z = 1 - rates[:, None] * eigen.eigenvalues[:, None]  # (m, E, r)
    fit, limits = eigen.fit(sigmas), LIMIT * sigmas
    ends = _first_beyond(z, fit, steps, limits)  # (m, S, E)
    truncated = ends > 0
    taken = torch.where(truncated, ends, steps).to(z.dtype)
    w = (1 - (z[:, None] ** taken[..., None]).clamp(-_HUGE, _HUGE)) * fit[:, :, None]
    scale = torch.where(truncated, limits[:, None] / w.norm(dim=-1).clamp(min=1e-300), 1.0)
    return w * scale[..., None], truncated


def _first_beyond(z: Tensor, fit: Tensor, steps: int, limits: Tensor) -> Tensor:
    """The first step at which the weights have reached their limit, 0 where they never do: (m, S, E)."""
    ends = torch.zeros(len(z), len(limits), z.shape[1], dtype=torch.long)
    far = (2 * fit.norm(dim=-1) >= limits).any()  # no power above 1 takes the weights farther than twice the solution
    risky = ((z.abs() > 1).any(-1).any(0) | far).nonzero()[:, 0]
    if not len(risky):
        return ends
    found, z, power = ends[..., risky], z[:, risky], torch.ones_like(z[:, risky])
    squares = fit.square().mT
    for step in range(1, steps + 1):
        power = (power * z).clamp_(-_HUGE, _HUGE)
        norms = ((1 - power).square() @ squares).mT  # (m, S, e)
        found[(found == 0) & (norms >= limits.square()[:, None])] = step
        if bool((found > 0).all()):
            break
    ends[..., risky] = found
    return ends


def train_loss(eigen: EigenTasks, w: Tensor, sigmas: Tensor) -> Tensor:
    """`f̂(w)` (m, S, E) of coordinates w (m, S, E, r)."""
    away = w - eigen.fit(sigmas)[:, :, None]
    unfitted = sigmas.square() * eigen.unfitted[:, None]
    return 0.5 * (away.square() @ eigen.eigenvalues[:, None, :, None])[..., 0] + unfitted[..., None]


def distance_to_true(eigen: EigenTasks, w: Tensor) -> Tensor:
    """`‖w − w*‖²` (m, S, E)."""
    return (w - eigen.true[:, None, None]).square().sum(-1) + eigen.beyond[:, None, None]


def loss_on(others: LeastSquaresTasks, weights: Tensor, sigmas: Tensor) -> Tensor:
    """The loss of weights (m, S, E, d) on other samples of the same tasks: (m, S, E)."""
    clean = (others.x @ others.true[..., None])[..., 0]
    targets = clean[:, None] + sigmas[:, None] * others.noise[:, None]  # (m, S, n)
    predicted: Tensor = (weights.flatten(1, 2) @ others.x.mT).unflatten(1, weights.shape[1:3])  # (m, S, E, n)
    return 0.5 * (predicted - targets[:, :, None]).square().mean(-1)


# The curve over rates


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LeastSquaresCurves(Result):
    """The mean loss of random tasks over step sizes, by training samples and by held-out ones, for each noise.

    `losses` (2, S, E, m) are those of `SPLITS`, S noises, E rates and m tasks, the same tasks for every rate; `truncated`, of the
    same shape, tells the runs that have diverged.
    """

    dim: int
    samples: int
    train_samples: int
    steps: int
    sigmas: tuple[float, ...]
    rates: tuple[float, ...]
    losses: Tensor
    truncated: Tensor

    @property
    def objective(self) -> Tensor:
        """The mean over tasks: (2, S, E)."""
        return self.losses.mean(-1)

    @property
    def best(self) -> Tensor:
        """The rate with the lowest mean for each way to choose and each noise: (2, S)."""
        return torch.tensor(self.rates, dtype=torch.float64)[self.objective.argmin(-1)]

    @property
    def ratio(self) -> Tensor:
        """By which factor the training samples choose a higher rate, for each noise: (S,)."""
        return self.best[0] / self.best[1]

    def rows(self) -> list[Row]:
        """A row for each noise, way to choose and rate; `above` is the distance to the best rate, with its own error."""
        m = self.losses.shape[-1]
        lowest = self.losses.gather(2, self.objective.argmin(-1)[..., None, None].expand(-1, -1, 1, m))
        table = {
            "objective": self.objective,
            "stderr": _stderr(self.losses),
            "above": (self.losses - lowest).mean(-1),
            "above_stderr": _stderr(self.losses - lowest),
            "truncated": self.truncated.double().mean(-1),
        }
        columns = {name: values.tolist() for name, values in table.items()}
        return [
            {"sigma": sigma, "split": split, "rate": rate, **{name: values[i][j][k] for name, values in columns.items()}}
            for j, sigma in enumerate(self.sigmas)
            for i, split in enumerate(SPLITS)
            for k, rate in enumerate(self.rates)
        ]

    def sentence(self) -> str:
        j = int(self.ratio.argmax())
        by_train, by_valid = self.best[:, j].tolist()
        said = (
            f"At noise {number(self.sigmas[j])} the loss on the {self.samples} training samples is lowest at rate "
            f"{number(by_train)}, that on held-out samples at {number(by_valid)}"
        )
        if by_train / by_valid <= APART:
            return f"{said}: both choose about the same." if by_valid / by_train <= APART else f"{said}."
        worse, error = self._worse(j)
        if worse < max(3 * error, 0.01 * float(self.objective[1, j].min())):
            return f"{said}, where it is lower by {number(worse)} ± {number(error)}: too little to choose by."
        return f"{said}: chosen by the training samples, the rate is {number(by_train / by_valid)} times as high and fits noise."

    def _worse(self, j: int) -> tuple[float, float]:
        """By how much the rate that the training samples choose is worse on held-out ones, and the error of that."""
        by_train, by_valid = self.objective[:, j].argmin(-1).tolist()
        worse = self.losses[1, j, by_train] - self.losses[1, j, by_valid]
        return float(worse.mean()), float(_stderr(worse))


def _stderr(values: Tensor) -> Tensor:
    """The standard error of the mean over tasks; 0 where there is one task."""
    m = values.shape[-1]
    return values.std(-1) / math.sqrt(m) if m > 1 else torch.zeros(values.shape[:-1], dtype=values.dtype)


@checked(
    dim=count,
    samples=count,
    sigmas=each(positive),
    rates=each(positive),
    steps=count,
    tasks=count,
    train_share=fraction,
    seed=seed,
)
def least_squares_curves(
    dim: int,
    samples: int,
    *,
    sigmas: Sequence[float] = (1.0,),
    rates: Sequence[float] | None = None,
    steps: int = 40,
    tasks: int = 300,
    train_share: float = 0.5,
    seed: int = 0,
    progress: bool | None = None,
) -> LeastSquaresCurves:
    """The loss after `steps` of descent, averaged over random tasks, at each rate: on the training samples and on others.

    The first is `f̂(w_t)` after training on all samples; for the second a share of them trains and the rest judges. All rates and
    noises see the same tasks, so that differences between rates have small errors.

    Args:
        dim: d, the number of weights.
        samples: n of each task, both parts together.
        sigmas: standard deviations of the noise.
        rates: step sizes, 25 from 1e-6 to 1 where none are given.
        tasks: how many are averaged.
        train_share: the share of the samples that trains where the others judge.

    >>> found = least_squares_curves(40, 20, sigmas=[3.0], tasks=50)
    >>> by_train, by_valid = found.best[:, 0].tolist()
    >>> by_train > 50 * by_valid, tuple(found.losses.shape)
    (True, (2, 1, 25, 50))
    """
    rates = list(RATES if rates is None else rates)
    held_in = round(train_share * samples)
    if not 0 < held_in < samples:
        raise ValueError(f"train_share must leave samples for both parts. Got {train_share:g} of {samples}.")
    began = time.perf_counter()
    lr, noise = (torch.tensor(values, dtype=torch.float64) for values in (rates, sigmas))
    losses, truncated = [], []
    with counting("least-squares tasks", progress=progress, total=tasks) as advance:
        for drawn in _batches(dim, samples, tasks, len(rates) * len(sigmas), seed):
            whole = diagonalise(drawn)
            w, cut = descend_tasks(whole, lr, steps, noise)
            part = diagonalise(drawn.part(slice(held_in)))
            w_part, cut_part = descend_tasks(part, lr, steps, noise)
            others = drawn.part(slice(held_in, None))
            losses.append(torch.stack([train_loss(whole, w, noise), loss_on(others, part.weights(w_part), noise)]))
            truncated.append(torch.stack([cut, cut_part]))
            advance(len(drawn.true))
    return LeastSquaresCurves(
        dim=dim,
        samples=samples,
        train_samples=held_in,
        steps=steps,
        sigmas=tuple(sigmas),
        rates=tuple(rates),
        losses=torch.cat(losses, 1).movedim(1, -1).contiguous(),
        truncated=torch.cat(truncated, 1).movedim(1, -1).contiguous(),
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "one eigendecomposition per task and split"),
    )


def _batches(dim: int, samples: int, tasks: int, runs: int, seed: int) -> Iterator[LeastSquaresTasks]:
    """The tasks, as many at once as memory allows."""
    generator = torch.Generator().manual_seed(seed)
    width = max(1, _NUMBERS // max(samples * dim, runs * max(dim, samples)))
    for first in range(0, tasks, width):
        yield _draw(dim, samples, min(width, tasks - first), generator)


# What a rate does on new tasks


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LeastSquaresScores(Result):
    """Root mean squared errors on the training samples and on as many new ones, (E, m) for E rates and m new tasks."""

    sigma: float
    steps: int
    rates: tuple[float, ...]
    train_rmse: Tensor
    test_rmse: Tensor

    def rows(self) -> list[Row]:
        train, test = self.train_rmse.tolist(), self.test_rmse.tolist()
        return [
            {"sigma": self.sigma, "rate": rate, "task": k, "train_rmse": train[i][k], "test_rmse": test[i][k]}
            for i, rate in enumerate(self.rates)
            for k in range(len(train[i]))
        ]

    def sentence(self) -> str:
        means = zip(self.rates, self.train_rmse.mean(1).tolist(), self.test_rmse.mean(1).tolist(), strict=True)
        parts = [
            f"{number(train)} on the training samples and {number(test)} on new ones at rate {number(r)}"
            for r, train, test in means
        ]
        return f"The root mean squared error is {'; '.join(parts)}."


@checked(dim=count, samples=count, rates=each(positive), sigma=positive, steps=count, tasks=count, seed=seed)
def least_squares_scores(
    dim: int, samples: int, rates: Sequence[float], *, sigma: float = 1.0, steps: int = 40, tasks: int = 10, seed: int = 1
) -> LeastSquaresScores:
    """Train new tasks with each rate and measure the errors; each task's new samples are as many as its training samples.

    Returns:
        Root mean squared errors, without the factor ½ of the loss; every rate is tried on the same tasks.

    >>> found = least_squares_scores(20, 10, [1e-9, 0.3], sigma=3.0)
    >>> bool((found.train_rmse[0] > 2 * found.train_rmse[1]).all()), bool(found.test_rmse[0].mean() < found.test_rmse[1].mean())
    (True, True)
    """
    lr, noise = (torch.tensor(values, dtype=torch.float64) for values in (rates, [sigma]))
    train, test = [], []
    for drawn in _batches(dim, 2 * samples, tasks, len(rates), seed):
        eigen = diagonalise(drawn.part(slice(samples)))
        w, _ = descend_tasks(eigen, lr, steps, noise)
        train.append(train_loss(eigen, w, noise)[:, 0])
        test.append(loss_on(drawn.part(slice(samples, None)), eigen.weights(w), noise)[:, 0])
    train_rmse, test_rmse = ((2 * torch.cat(parts)).sqrt().T.contiguous() for parts in (train, test))
    return LeastSquaresScores(
        sigma=sigma,
        steps=steps,
        rates=tuple(rates),
        train_rmse=train_rmse,
        test_rmse=test_rmse,
        outcome=Outcome.ESTIMATED,
        seed=seed,
    )


# What the formulas say, averaged over w* and the noise


class PopulationRisk(NamedTuple):
    """Means over w* and the noise, for the given eigenvalues, one for each rate: (..., E)."""

    train_loss: Tensor
    error: Tensor  # E ‖w − w*‖²
    train_rmse: Tensor  # √(2 train_loss): the loss has a factor ½
    test_rmse: Tensor  # √(error + σ²)


def _spectrum(eigenvalues: Tensor, dim: int, samples: int) -> Tensor:
    """Positive eigenvalues of XᵀX/n, (..., min(n, d))."""
    try:
        found = torch.as_tensor(eigenvalues, dtype=torch.float64)
        good = found.ndim > 0 and found.shape[-1] == min(dim, samples) and found.numel() > 0
        good = good and not found.is_meta and bool(((found > 0) & found.isfinite()).all())
    except (TypeError, ValueError, RuntimeError):
        good = False
    if not good:
        raise ValueError(
            f"eigenvalues must be the {min(dim, samples)} positive eigenvalues of XᵀX/n, or several rows of them. "
            f"Got {shown(eigenvalues)}."
        )
    return found


@checked(rates=each(positive), steps=count, dim=count, samples=count, sigma=positive)
def population_risk(
    eigenvalues: Tensor, rates: Sequence[float], steps: int, *, dim: int, samples: int, sigma: float
) -> PopulationRisk:
    """What descent without truncation comes to for given eigenvalues λ of XᵀX/n, exactly, with p = (1 − ηλ)ᵗ:

    `E f̂(w_t) = ½ Σ p² (λ/d + σ²/n) + max(n − d, 0) σ²/2n` and
    `E ‖w_t − w*‖² = Σ (p²/d + (1 − p)² σ²/(nλ)) + 1 − min(n, d)/d`.

    >>> risk = population_risk(torch.ones(2), [0.5], 1, dim=2, samples=4, sigma=2.0)
    >>> float(risk.train_loss), float(risk.error)            # p = ½
    (1.375, 0.75)
    """  # noqa: D415
    lam = _spectrum(eigenvalues, dim, samples)
    power = (1 - torch.tensor(rates, dtype=torch.float64)[:, None] * lam[..., None, :]) ** steps  # (..., E, r)
    lam, squares = lam[..., None, :], power.square()
    train = 0.5 * (squares * (lam / dim + sigma**2 / samples)).sum(-1) + max(samples - dim, 0) * sigma**2 / (2 * samples)
    error = (squares / dim + (1 - power).square() * sigma**2 / (samples * lam)).sum(-1)
    error = error + 1 - lam.shape[-1] / dim
    return PopulationRisk(train, error, (2 * train).sqrt(), (error + sigma**2).sqrt())


@checked(steps=count, dim=count, samples=count, sigma=positive)
def population_rates(eigenvalues: Tensor, steps: int, *, dim: int, samples: int, sigma: float) -> dict[str, float]:
    """The best step sizes by those formulas, of several spectra by their mean: "train" for `f̂`, "valid" for `‖w − w*‖²`.

    >>> found = population_rates(torch.tensor([0.5, 1.0]), 1, dim=2, samples=4, sigma=1.0)
    >>> round(found["train"], 6), round(found["valid"], 6)
    (1.142857, 0.75)
    """
    lam = _spectrum(eigenvalues, dim, samples).reshape(-1, min(dim, samples))

    def means(rates: Sequence[float]) -> dict[str, Tensor]:
        risk = population_risk(lam, rates, steps, dim=dim, samples=samples, sigma=sigma)
        return {"train": risk.train_loss.mean(0), "valid": risk.error.mean(0)}

    top = 4 / float(lam.max())
    least = 1e-4 * top / (steps * (1 + sigma**2))
    grid = torch.logspace(math.log10(least), math.log10(top), 400, dtype=torch.float64).tolist()
    found = {}
    for split, values in means(grid).items():
        i = int(torch.nan_to_num(values, nan=math.inf).argmin())
        ends = math.log(grid[max(i - 1, 0)]), math.log(grid[min(i + 1, len(grid) - 1)])
        best = minimize_scalar(
            lambda u, of=split: float(means([math.exp(u)])[of]), bounds=ends, method="bounded", options={"xatol": 1e-9}
        )
        found[split] = math.exp(float(best.x))
    return found


@checked(dim=count, samples=count, sigma=positive)
def interpolation_error(dim: int, samples: int, sigma: float) -> float:
    """`E ‖w − w*‖²` of the weights that descent ends at: those of least norm that fit, or the least-squares solution.

    `1 − n/d + σ² n/(d − n − 1)` below n = d − 1 samples, `σ² d/(n − d − 1)` above d + 1, infinite between.

    >>> round(interpolation_error(9, 4, 2.0), 6), interpolation_error(4, 9, 2.0), interpolation_error(4, 4, 1.0)
    (4.555556, 4.0, inf)
    """
    if samples < dim - 1:
        return 1 - samples / dim + sigma**2 * samples / (dim - samples - 1)
    return sigma**2 * dim / (samples - dim - 1) if samples > dim + 1 else math.inf
