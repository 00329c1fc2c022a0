"""Stochastic gradient descent on random least-squares tasks: its mean errors exactly, or by drawn paths.

One sample per step, drawn with replacement: `w ← w − η(⟨w, xᵢ⟩ − yᵢ) xᵢ`. Where the samples can be fitted (n ≤ d) the distance
e = w − a to that fit obeys `e ← (I − η zᵢzᵢᵀ) e`, so that `S = E eeᵀ` obeys

    S ← M S = S − η(HS + SH) + η²/n Σ (zᵢᵀ S zᵢ) zᵢzᵢᵀ,      H = diag(λ), zᵢ the samples along its eigenvectors.

M is a symmetric map of symmetric matrices: one eigendecomposition of it gives `Mᵗ S₀` for every number of steps at once. It has
n(n+1)/2 rows, which is why many samples are left to paths; so are runs that are truncated where they diverge.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.arguments import checked, count, each, instance, one_or_each, optional, positive, seed
from theodolite.measures.stepsize.quadratics.least_squares import LIMIT, EigenTasks, LeastSquaresTasks, diagonalise
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row, number

#: Samples up to which the moments are exact where nothing else is asked: 528 rows of the map.
EXACT_UP_TO = 32
#: Paths that are drawn beyond.
PATHS = 1000
_HUGE = 1e150  # powers of the map end here: the run has diverged
_NUMBERS = 2**22  # that are held of one kind at once


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGDRisk(Result):
    """Means over the order of the samples, (m, E, T) for m tasks, E rates and T numbers of steps, each with its error.

    `distance` is E ‖w − a‖² to the weights a that fit the samples (for n > d the least-squares solution), `train_loss` E f̂(w),
    `error` E ‖w − w*‖². With `paths` = 0 they are exact and the errors 0; `truncated` (m, E) is the share of paths that diverged.
    """

    sigma: float
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    paths: int
    distance: Tensor
    train_loss: Tensor
    error: Tensor
    distance_stderr: Tensor
    train_loss_stderr: Tensor
    error_stderr: Tensor
    truncated: Tensor

    def rows(self) -> list[Row]:
        names = ("distance", "train_loss", "error")
        columns = {name: getattr(self, name).tolist() for part in names for name in (part, f"{part}_stderr")}
        cut = self.truncated.tolist()
        return [
            {"task": i, "rate": rate, "steps": t, **{name: v[i][j][k] for name, v in columns.items()}, "truncated": cut[i][j]}
            for i in range(len(cut))
            for j, rate in enumerate(self.rates)
            for k, t in enumerate(self.steps)
        ]

    def sentence(self) -> str:
        error = self.error[..., -1].mean(0)
        best = int(torch.nan_to_num(error, nan=float("inf")).argmin())
        how = f"{self.paths} paths" if self.paths else "exact"
        return (
            f"After {self.steps[-1]} steps of SGD the mean squared distance to the true weights is lowest at rate "
            f"{number(self.rates[best])}: {number(float(error[best]))} ({how})."
        )


@checked(
    drawn=instance(LeastSquaresTasks, wanted="tasks, as draw_tasks gives them"),
    rates=each(positive),
    steps=one_or_each(count),
    sigma=positive,
    paths=optional(count),
    seed=seed,
)
def sgd_risk(
    drawn: LeastSquaresTasks,
    rates: Sequence[float],
    steps: int | Sequence[int],
    *,
    sigma: float = 1.0,
    paths: int | None = None,
    truncate: bool = False,
    averaged: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> SGDRisk:
    """What SGD comes to in the mean over the order of the samples, at each rate and after each number of steps.

    Exact for up to 32 samples, all different and no more than weights; by drawn paths otherwise, and where `paths` or `truncate`
    asks for them. All rates see the same orders.

    Args:
        steps: one number or several; exact moments of several cost no more than those of one.
        paths: how many orders are drawn; None is exact where that is possible, else 1000.
        truncate: freeze a path where its weights reach the norm 40σ.
        averaged: over w* and the noise too, for these inputs (exact moments alone).

    >>> from theodolite.measures.stepsize.quadratics.least_squares import draw_tasks
    >>> found = sgd_risk(draw_tasks(6, 1, 1), [0.05], [1, 2])
    >>> ratio = found.distance[0, 0]                     # one sample: e ← (1 − η‖x‖²) e
    >>> x = draw_tasks(6, 1, 1).x[0, 0]
    >>> round(float(ratio[1] / ratio[0] / (1 - 0.05 * x @ x) ** 2), 9)
    1.0
    """
    lengths = [steps] if isinstance(steps, int) else list(steps)
    n, d = drawn.x.shape[1:]
    began = time.perf_counter()
    eigen = diagonalise(drawn)
    fits = n <= d and not bool(eigen.singular.isinf().any())  # samples that come twice have two targets
    exact = fits and n <= EXACT_UP_TO and paths is None and not truncate
    if averaged and not exact:
        raise ValueError(
            f"averaged asks for exact moments: at most {EXACT_UP_TO} samples, all different and no more than weights, no paths, "
            f"no truncate. Got {n} samples of {d} weights."
        )
    lr = torch.tensor(rates, dtype=torch.float64)
    if exact:
        means = _exact(eigen, lr, torch.tensor(lengths), sigma, averaged=averaged)
        errors, cut = torch.zeros_like(means), torch.zeros(means.shape[1:3], dtype=means.dtype)
    else:
        means, errors, cut = _by_paths(eigen, lr, lengths, sigma, paths or PATHS, truncate, seed, progress)
    return SGDRisk(
        sigma=sigma,
        rates=tuple(rates),
        steps=tuple(lengths),
        paths=0 if exact else paths or PATHS,
        distance=means[0],
        train_loss=means[1],
        error=means[2],
        distance_stderr=errors[0],
        train_loss_stderr=errors[1],
        error_stderr=errors[2],
        truncated=cut,
        outcome=Outcome.FINISHED if exact else Outcome.ESTIMATED,
        seed=None if exact else seed,
        cost=Cost(time.perf_counter() - began, "one eigendecomposition per rate" if exact else "steps of all paths together"),
    )


# Exact


def _exact(eigen: EigenTasks, rates: Tensor, steps: Tensor, sigma: float, *, averaged: bool) -> Tensor:
    """Distance, training loss and error, (3, m, E, T)."""
    lam, noise = eigen.eigenvalues, sigma * eigen.noise
    m, r = lam.shape
    dim = eigen.tasks.x.shape[2]
    fit = eigen.true + noise
    variance = sigma**2 / (r * lam)  # of the coordinates of X⁺ξ
    start = torch.diag_embed(1 / dim + variance) if averaged else fit[:, :, None] * fit[:, None]
    marks = torch.stack([torch.eye(r, dtype=lam.dtype).expand(m, r, r), torch.diag_embed(lam)], 1)
    second = _evolved(eigen, rates, steps, _packed(start), _packed(marks))  # (m, 2, E, T): tr S and tr HS
    mean_path = ((1 - rates[:, None, None] * lam[:, None, None]) ** steps[:, None]).clamp(-_HUGE, _HUGE)  # (m, E, T, r)
    overlap = (mean_path @ (variance if averaged else fit * noise)[:, None, :, None])[..., 0]
    apart = variance.sum(1) if averaged else noise.square().sum(1)
    outside = torch.full((m,), 1 - r / dim, dtype=lam.dtype) if averaged else eigen.beyond
    error = second[:, 0] - 2 * overlap + (apart + outside)[:, None, None]
    return torch.stack([second[:, 0], 0.5 * second[:, 1], error])


def _packed(matrices: Tensor) -> Tensor:
    """Symmetric matrices (..., r, r) as vectors (..., r(r+1)/2) with the same inner products."""
    r = matrices.shape[-1]
    i, j = torch.triu_indices(r, r)
    return matrices[..., i, j] * torch.where(i == j, 1.0, 2.0**0.5)


def sgd_map(eigen: EigenTasks, rates: Tensor) -> Tensor:
    """The map M of packed second moments, one matrix for each task and rate: (m, E, p, p)."""
    lam, z = eigen.eigenvalues, eigen.samples()
    r = lam.shape[1]
    i, j = torch.triu_indices(r, r)
    outer = _packed(z[..., :, None] * z[..., None, :])  # (m, n, p)
    drift = torch.diag_embed(lam[:, i] + lam[:, j])[:, None]
    noise = (outer.mT @ outer / z.shape[1])[:, None]
    lr = rates[:, None, None]
    return torch.eye(len(i), dtype=lam.dtype) - lr * drift + lr.square() * noise


def _evolved(eigen: EigenTasks, rates: Tensor, steps: Tensor, start: Tensor, marks: Tensor) -> Tensor:
    """`⟨mark, Mᵗ start⟩` for marks (m, k, p): (m, k, E, T)."""
    width = max(1, _NUMBERS // (len(start) * start.shape[1] ** 2))
    parts = []
    for some in rates.split(width):
        values, vectors = torch.linalg.eigh(sgd_map(eigen, some))  # (m, e, p), (m, e, p, p)
        weight = (marks[:, None] @ vectors) * (start[:, None, None] @ vectors)  # (m, e, k, p)
        power = (values[..., None] ** steps).clamp(-_HUGE, _HUGE)  # (m, e, p, T)
        parts.append((weight @ power).transpose(1, 2))
    return torch.cat(parts, 2)


# By paths


def _by_paths(
    eigen: EigenTasks, rates: Tensor, steps: list[int], sigma: float, paths: int, truncate: bool, seed: int, progress: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Means and standard errors (3, m, E, T) of distance, training loss and error, and the share truncated (m, E)."""
    z, fit = eigen.samples(), eigen.fit(torch.tensor([sigma], dtype=torch.float64))[:, 0]
    m, n, r = z.shape
    targets = (eigen.tasks.x @ eigen.tasks.true[..., None])[..., 0] + sigma * eigen.tasks.noise  # (m, n)
    generator = torch.Generator().manual_seed(seed)
    w = torch.zeros(m, paths, len(rates), r, dtype=torch.float64)
    cut = torch.zeros(m, paths, len(rates), dtype=torch.bool)
    task, looks = torch.arange(m)[:, None], {}
    with counting("SGD", progress=progress, total=max(steps)) as advance:
        for step in range(1, max(steps) + 1):
            index = torch.randint(n, (m, paths), generator=generator)
            x, y = z[task, index], targets[task, index]  # (m, P, r), (m, P)
            residual = (w @ x[..., None])[..., 0] - y[..., None]  # (m, P, E)
            move = (rates * residual)[..., None] * x[:, :, None]
            w = torch.where(cut[..., None], w, w - move) if truncate else w - move
            if truncate:
                norms = w.norm(dim=-1, keepdim=True)
                beyond = (norms >= LIMIT * sigma)[..., 0] & ~cut
                w = torch.where(beyond[..., None], w * (LIMIT * sigma / norms), w)
                cut |= beyond
            if step in steps:
                looks[step] = _looked(eigen, w, z, fit, targets)
            advance(1)
    found = torch.stack([looks[t] for t in steps], -1)  # (3, m, P, E, T)
    spread = found.std(2) if paths > 1 else torch.zeros_like(found[:, :, 0])
    return found.mean(2), spread / paths**0.5, cut.double().mean(1)


def _looked(eigen: EigenTasks, w: Tensor, z: Tensor, fit: Tensor, targets: Tensor) -> Tensor:
    """Distance, training loss and error of weights (m, P, E, r): (3, m, P, E)."""
    distance = (w - fit[:, None, None]).square().sum(-1)
    residual = (w.flatten(1, 2) @ z.mT).unflatten(1, w.shape[1:3]) - targets[:, None, None]
    error = (w - eigen.true[:, None, None]).square().sum(-1) + eigen.beyond[:, None, None]
    return torch.stack([distance, 0.5 * residual.square().mean(-1), error])
