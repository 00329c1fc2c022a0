"""`spectral_density`: the whole spectrum at a glance, by Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from theodolite.arguments import A_NUMBER, integer, positive, random_seed
from theodolite.linalg.lockstep import solve
from theodolite.operators import LinearOperator
from theodolite.results import Cost, Outcome, Result, Row

#: Memory for the bases that keep the probes' Lanczos vectors orthogonal, in bytes.
PROBE_BYTES = 2 * 2**30

#: Kernel width in units of (spectral range / steps); there the quadrature error is far below the sampling error.
KERNEL_WIDTH = 0.6


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Density(Result):
    """The spectral density smoothed by a Gaussian kernel, with its sampling error at each point.

    `nodes` and `weights` are the quadrature rule, averaged over the probes; the weights sum to 1.
    `stderr` is the standard error over probes (with few probes read it as a t-interval).
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
    the standard deviation of the smoothing kernel, by default 0.6 times the spectral range over `steps`.

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
        lambda rules, cost: _result(rules, steps, points, bandwidth, seed, cost),
        progress=progress,
        good=Outcome.ESTIMATED,
        seed=seed,
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
        raise ValueError(f"spectral_density needs a symmetric operator. Got {op!r}.")
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


def _result(rules: list[_Rule], steps: int, points: int, bandwidth: float | None, seed: int, cost: Cost) -> Density:
    probes = sum(len(rule.weights) for rule in rules)
    held = torch.cat([rule.nodes[rule.weights.mean(0) > 1e-14] for rule in rules])
    low, high = float(held.min()), float(held.max())
    smallest = 1e-6 * max(abs(low), abs(high), 1e-30)
    bandwidth = bandwidth or max(KERNEL_WIDTH * (high - low) / steps, smallest)
    grid = torch.linspace(low - 4 * bandwidth, high + 4 * bandwidth, points, dtype=torch.float64)
    curves = torch.cat([smoothed(grid, rule.nodes, rule.weights, bandwidth) for rule in rules])
    if len(rules) == probes and probes > 1:
        cost = replace(cost, notes=(*cost.notes, "too large to keep the Lanczos vectors of the density: short recurrences"))
    return Density(
        grid=grid,
        density=curves.mean(0),
        stderr=curves.std(0) / math.sqrt(probes),
        nodes=torch.cat([rule.nodes for rule in rules]),
        weights=torch.cat([rule.weights.sum(0) for rule in rules]) / probes,
        bandwidth=bandwidth,
        probes=probes,
        steps=steps,
        matvecs=sum(rule.matvecs for rule in rules),
        outcome=Outcome.ESTIMATED,
        seed=seed,
        cost=cost,
    )


def smoothed(grid: Tensor, nodes: Tensor, weights: Tensor, bandwidth: float) -> Tensor:
    """Gaussian-smoothed densities (b, points) of nodes (m,) with weights (b, m) on a grid."""
    z = (grid[:, None] - nodes[None, :]) / bandwidth
    kernel = torch.exp(-0.5 * z.square()) / (bandwidth * math.sqrt(2 * math.pi))
    return weights @ kernel.T
