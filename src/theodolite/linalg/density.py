"""`spectral_density`: the whole spectrum at a glance, by Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import A_NUMBER, fraction, integer, positive, random_seed, shown
from theodolite.linalg.lockstep import solve
from theodolite.operators import LinearOperator
from theodolite.results import Cost, Outcome, Result, Row

#: Memory for the bases that keep the probes' Lanczos vectors orthogonal, in bytes.
PROBE_BYTES = 2 * 2**30

#: Grid points beyond which a bandwidth is too narrow to be drawn.
MOST_POINTS = 100_000

#: Numbers of the kernel matrix (grid points by nodes) made at a time.
KERNEL_ENTRIES = 2**22

#: Kernel width in units of (spectral range / steps); there the quadrature error is far below the sampling error.
KERNEL_WIDTH = 0.6


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Density(Result):
    """The spectral density smoothed by a Gaussian kernel, with its sampling error at each point.

    `nodes` and `weights` are the quadrature rule, averaged over the probes; the weights sum to 1.
    `stderr` is the standard error of random probes, for which `interval` knows the quantiles. The grid resolves the kernel: the
    density integrates to 1.
    """

    grid: Tensor
    density: Tensor
    stderr: Tensor
    nodes: Tensor
    weights: Tensor
    bandwidth: float
    probes: int
    steps: int
    matvecs: int

    def smooth(self, eigenvalues: Tensor) -> Tensor:
        """A known spectrum smoothed by the same kernel on the same grid, for comparison."""
        values = eigenvalues.detach().double().reshape(-1)
        return smoothed(self.grid, values, torch.full_like(values, 1.0 / len(values))[None], self.bandwidth)[0]

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of a band that holds the smoothed density at a point of the grid with probability `level`.

        What a probe sees of an eigenvector is a χ² variable of one degree of freedom, so the density is nearly a multiple of one
        too, of as many as its mean and its error say: a band that is right for few probes and around a single eigenvalue.
        """
        from scipy.stats import chi2

        tail = 0.5 - fraction("level", level) / 2
        freedom = (2 * (self.density / self.stderr).square()).nan_to_num().clamp(self.probes, 1e12)
        few, many = (torch.as_tensor(chi2.ppf(q, freedom.tolist())) / freedom for q in (tail, 1 - tail))
        return self.density / many, self.density / few

    def rows(self) -> list[Row]:
        return [
            {"eigenvalue": g, "density": d, "stderr": e, "seed": self.seed}
            for g, d, e in zip(self.grid.tolist(), self.density.tolist(), self.stderr.tolist(), strict=True)
        ]

    def sentence(self) -> str:
        mean = float((self.nodes * self.weights).sum())
        near_zero = float(self.weights[self.nodes.abs() <= self.bandwidth].sum())
        return (
            f"spectral density between {float(self.nodes.min()):.4g} and {float(self.nodes.max()):.4g}, "
            f"mean eigenvalue {mean:.4g}, {100 * near_zero:.0f} % of the weight within {self.bandwidth:.2g} of zero "
            f"({self.probes} probes of {self.steps} steps, {self.matvecs} products)."
        )


def spectral_density(
    op: Any,
    *,
    probes: int = 8,
    steps: int = 64,
    points: int = 512,
    bandwidth: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Any:
    """The density of eigenvalues of a symmetric operator (a `Density`), or of each one of a mapping in lockstep.

    Each probe is a random unit vector that sees the spectrum through its overlaps with the eigenvectors; a block
    Lanczos run of all probes, one block product per step, turns that into a quadrature rule. `bandwidth` is
    the standard deviation of the smoothing kernel, by default 0.6 times the spectral range over `steps`. The grid has `points`
    points, and more where it takes more to resolve the kernel.

    Returns:
        A `Density` on a grid with its standard errors and `.plot()`; of a mapping, one by name.

    >>> import torch
    >>> d = spectral_density(torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()), probes=4, steps=3)
    >>> [round(float(node), 6) for node in d.nodes], round(float(d.weights.sum()), 6)
    ([1.0, 2.0, 3.0], 1.0)
    """
    seed = random_seed(seed)
    for name, value, least in (("probes", probes, 2), ("steps", steps, 1), ("points", points, 2)):
        integer(name, value, least=least, wanted=f"an integer of at least {least}")
    bandwidth = None if bandwidth is None else positive("bandwidth", bandwidth, wanted=A_NUMBER)
    return solve(
        op,
        "spectral density",
        lambda _, operator: _steps(operator, probes, steps, seed),
        lambda operator, rules, cost: _result(rules, operator.shape[0], steps, points, bandwidth, seed, cost),
        progress=progress,
        total=lambda operator: probes * min(steps, operator.shape[0]),
    )


@dataclass(frozen=True)
class _Rule:
    """Quadrature rules of a group of probes: shared nodes (m,), one row of weights per probe (b, m)."""

    nodes: Tensor
    weights: Tensor
    matvecs: int


def _steps(op: LinearOperator, probes: int, steps: int, seed: int) -> Generator[Tensor, Tensor, list[_Rule]]:
    if not op.symmetric:
        raise ValueError(f"spectral_density needs a symmetric operator. Got {shown(op)}.")
    n = op.shape[0]
    steps = min(steps, n)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randn(n, probes, generator=generator, dtype=torch.float64).to(op.device)
    starts = starts / starts.norm(dim=0)
    group = PROBE_BYTES // (steps * n * 8)
    rules = []
    if group:
        for block in starts.split(min(group, probes), dim=1):
            rules.append((yield from _block_lanczos(block, steps)))  # noqa: PERF401 (a comprehension cannot yield)
        return rules
    return (yield from _short_lanczos(starts, steps))


def _block_lanczos(z: Tensor, steps: int) -> Generator[Tensor, Tensor, _Rule]:
    """One rule for b unit starts (n, b): Ritz values of their joint Krylov space, weights by projection.

    Sharing the space gives every probe the nodes of all, a far finer rule than its own chain would.
    """
    # The vectors are kept as rows: thin products with contiguous rows are several times faster than with columns.
    n, b = z.shape
    frame, triangle = torch.linalg.qr(z)
    block = frame.T.contiguous()
    basis = z.new_empty(min(n, b * steps), n)
    projection = torch.zeros(len(basis), len(basis), dtype=torch.float64)
    size = 0
    for _ in range(steps):
        block = block[: len(basis) - size]
        if len(block) == 0:
            break
        image = (yield block.T).T.double()
        scale = float(image.norm(dim=1).max())
        basis[size : size + len(block)] = block
        first, size = size, size + len(block)
        seen = basis[:size]
        rows = image @ seen.T
        projection[first:size, :size] = rows.cpu()
        projection[:size, first:size] = rows.T.cpu()
        before = image.norm(dim=1)
        image = torch.addmm(image, rows, seen, alpha=-1.0)
        if bool((image.norm(dim=1) < 0.5 * before).any()):  # much has cancelled: once more
            image = torch.addmm(image, image @ seen.T, seen, alpha=-1.0)
        block = _independent_rows(image, 1e-12 * scale, seen)
    nodes, vectors = torch.linalg.eigh(projection[:size, :size])
    weights = (triangle.T.cpu() @ vectors[: triangle.shape[0]]).square()
    return _Rule(nodes, weights, size)


def _independent_rows(image: Tensor, tiny: float, seen: Tensor) -> Tensor:
    """An orthonormal basis of the rows, orthogonal to `seen`, without those that are rounding."""
    _, sizes, frame = torch.linalg.svd(image, full_matrices=False)
    left: Tensor = frame[sizes > tiny]
    if len(left) == 0:
        return left
    if float(sizes[sizes > tiny].min()) > 1e-4 * float(sizes.max()):
        return left.contiguous()
    left = torch.addmm(left, left @ seen.T, seen, alpha=-1.0)  # small rows are mostly what rounding left of large ones
    orthonormal: Tensor = torch.linalg.qr(left.T)[0].T.contiguous()
    return orthonormal


def _short_lanczos(z: Tensor, steps: int) -> Generator[Tensor, Tensor, list[_Rule]]:
    """A rule per start (n, b) by the three-term recurrence: for operators whose Lanczos vectors cannot be kept."""
    b = z.shape[1]
    alpha = torch.zeros(b, steps, dtype=torch.float64)
    beta = torch.zeros(b, steps, dtype=torch.float64)
    q, previous = z, torch.zeros_like(z)
    for j in range(steps):
        w = (yield q).double()
        alpha[:, j] = (w * q).sum(0).cpu()
        for seen in (q, previous):
            w = w - seen * (w * seen).sum(0)
        norm = w.norm(dim=0)
        alive = norm.cpu() > 1e-12 * torch.maximum(alpha.abs().amax(1), beta.amax(1))
        beta[:, j] = torch.where(alive, norm.cpu(), 0.0)
        # A closed chain goes on with zeros: its later nodes get weight 0.
        previous, q = q, torch.where(alive.to(w.device), w / norm.clamp(min=1e-300), 0.0)
    tridiagonal = torch.diag_embed(alpha) + torch.diag_embed(beta[:, :-1], 1) + torch.diag_embed(beta[:, :-1], -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return [_Rule(nodes[i], vectors[i, :1].square(), steps) for i in range(b)]


def _result(rules: list[_Rule], n: int, steps: int, points: int, bandwidth: float | None, seed: int, cost: Cost) -> Density:
    probes = sum(len(rule.weights) for rule in rules)
    held = torch.cat([rule.nodes[rule.weights.mean(0) > 1e-14] for rule in rules])
    low, high = float(held.min()), float(held.max())
    smallest = 1e-6 * max(abs(low), abs(high), 1e-30)
    bandwidth = bandwidth or max(KERNEL_WIDTH * (high - low) / min(steps, n), smallest)
    grid = _grid(low - 4 * bandwidth, high + 4 * bandwidth, bandwidth, points)
    nodes = torch.cat([rule.nodes for rule in rules])
    weights = torch.cat([rule.weights.sum(0) for rule in rules]) / probes
    density = smoothed(grid, nodes, weights[None], bandwidth)[0]
    if len(rules) == probes and probes > 1:
        cost = replace(cost, notes=(*cost.notes, "too large to keep the Lanczos vectors of the density: short recurrences"))
    return Density(
        grid=grid,
        density=density,
        stderr=_probe_error(grid, density, nodes, weights, bandwidth, n) / math.sqrt(probes),
        nodes=nodes,
        weights=weights,
        bandwidth=bandwidth,
        probes=probes,
        steps=steps,
        matvecs=sum(rule.matvecs for rule in rules),
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=cost,
    )


def _grid(low: float, high: float, bandwidth: float, points: int) -> Tensor:
    """At least so many points, and none further apart than the bandwidth: there sums over the grid are integrals to 1e-8."""
    needed = (high - low) / bandwidth + 1
    if needed > MOST_POINTS:
        raise ValueError(
            f"bandwidth must be at least {(high - low) / MOST_POINTS:.2g} for eigenvalues between {low:.4g} and {high:.4g}: "
            f"a grid of at most {MOST_POINTS} points has to resolve it. Got {bandwidth:g}."
        )
    return torch.linspace(low, high, max(points, math.ceil(needed)), dtype=torch.float64)


def _probe_error(grid: Tensor, density: Tensor, nodes: Tensor, weights: Tensor, bandwidth: float, n: int) -> Tensor:
    """The standard deviation of the density that one random probe sees, at each point of the grid.

    The squared overlaps of a random unit vector with n eigenvectors have a known covariance: a kernel K is seen with
    variance `2/(n+2) (mean of K² − (mean of K)²)` over the spectrum. Hardly noisy, where the spread of a few probes is.
    """
    # The square of a Gaussian kernel is a narrower one of another size.
    squares = smoothed(grid, nodes, weights[None], bandwidth / math.sqrt(2))[0] / (2 * bandwidth * math.sqrt(math.pi))
    return (2 / (n + 2) * (squares - density.square()).clamp(min=0)).sqrt()


def smoothed(grid: Tensor, nodes: Tensor, weights: Tensor, bandwidth: float) -> Tensor:
    """Gaussian-smoothed densities (b, points) of nodes (m,) with weights (b, m) on a grid."""
    parts = []
    for points in grid.split(max(1, KERNEL_ENTRIES // len(nodes))):
        z = (points[:, None] - nodes[None, :]) / bandwidth
        parts.append(weights @ torch.exp(-0.5 * z.square()).T)
    return torch.cat(parts, dim=1) / (bandwidth * math.sqrt(2 * math.pi))
