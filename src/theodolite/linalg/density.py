"""`spectral_density`: the whole spectrum at a glance, by Lanczos quadrature."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.linalg.lockstep import run, run_all
from theodolite.operators import LinearOperator, as_operator
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, ResultMapping, Row

#: Memory for the bases that keep the probes' Lanczos vectors orthogonal, in bytes.
PROBE_BYTES = 2 * 2**30

#: Kernel width in units of (spectral range / steps); there the quadrature error is far below the sampling error.
KERNEL_WIDTH = 1.25


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Density(Result):
    """The spectral density smoothed by a Gaussian kernel, with its sampling error at each point.

    `nodes` and `weights` are the quadrature rules of all probes, one after the other; the weights sum to 1.
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
        values = eigenvalues.detach().double().reshape(1, -1)
        return smoothed(self.grid, values, torch.full_like(values, 1.0 / values.numel()), self.bandwidth)[0]

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

    Each probe is a random unit vector whose Lanczos run gives a Gauss quadrature rule for the spectrum; all
    probes are multiplied together, one block product per step. `bandwidth` is the standard deviation of the
    smoothing kernel, by default 1.25 times the spectral range over `steps`.

    >>> import torch
    >>> d = spectral_density(torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()), probes=4, steps=3)
    >>> round(float((d.nodes * d.weights).sum() / d.weights.sum()), 1) in (1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4)
    True
    """
    for name, value, least in (("probes", probes, 2), ("steps", steps, 1), ("points", points, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}. Got {value!r}.")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive. Got {bandwidth!r}.")
    began = time.perf_counter()
    settings = _Settings(probes, steps, points, bandwidth, seed)
    if isinstance(op, Mapping):
        with counting("spectral density", progress=progress) as count:
            rules = run_all(op, lambda _, block: _steps(block, settings), count)
        cost = Cost(seconds=time.perf_counter() - began, route="lockstep")
        return ResultMapping(
            results={name: _result(rule, settings, cost) for name, rule in rules.items()},
            outcome=Outcome.ESTIMATED,
            seed=seed,
            cost=cost,
        )
    operator = as_operator(op)
    with counting("spectral density", progress=progress, total=probes * min(steps, operator.shape[0])) as count:
        rule = run(operator, _steps(operator, settings), count)
    facts = operator.cost()
    return _result(rule, settings, Cost(time.perf_counter() - began, facts.route, facts.peak_bytes, facts.notes + rule.notes))


@dataclass(frozen=True)
class _Settings:
    probes: int
    steps: int
    points: int
    bandwidth: float | None
    seed: int


@dataclass(frozen=True)
class _Rule:
    nodes: Tensor  # (probes, steps)
    weights: Tensor  # (probes, steps), rows sum to 1
    notes: tuple[str, ...]


def _steps(op: LinearOperator, settings: _Settings) -> Generator[Tensor, Tensor, _Rule]:
    if not op.symmetric:
        raise ValueError(f"spectral_density needs a symmetric operator. Got {op!r}.")
    n = op.shape[0]
    steps = min(settings.steps, n)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.randn(settings.probes, n, generator=generator, dtype=torch.float64).to(op.device)
    # As many probes at once as keep full reorthogonalisation within memory; none at all for huge operators.
    group = PROBE_BYTES // (steps * n * 8)
    notes = () if group else ("Lanczos vectors of the density are orthogonal to their neighbours only: too large to keep",)
    width = min(settings.probes, max(1, group)) if group else settings.probes
    parts = []
    for block in starts.split(width):
        parts.append((yield from _lanczos(block / block.norm(dim=1, keepdim=True), steps, reorthogonalise=bool(group))))  # noqa: PERF401 (a comprehension cannot yield)
    nodes, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return _Rule(nodes, weights, notes)


def _lanczos(q: Tensor, steps: int, *, reorthogonalise: bool) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Gauss rules (nodes, weights), each (b, steps), of b unit start vectors `q` (b, n) at once."""
    b, n = q.shape
    alpha = torch.zeros(b, steps, dtype=torch.float64)
    beta = torch.zeros(b, steps, dtype=torch.float64)
    basis = q.new_zeros(b, steps, n) if reorthogonalise else q.new_zeros(b, 2, n)
    scale = torch.zeros(b, dtype=torch.float64)
    for j in range(steps):
        place = j if reorthogonalise else j % 2
        basis[:, place] = q
        w = (yield q.T).T.double()
        alpha[:, j] = (w * q).sum(1).cpu()
        seen = basis[:, : j + 1] if reorthogonalise else basis
        for _ in range(2):
            w = torch.baddbmm(w[:, :, None], seen.transpose(1, 2), torch.bmm(seen, w[:, :, None]), alpha=-1.0)[:, :, 0]
        norm = w.norm(dim=1)
        scale = torch.maximum(scale, torch.maximum(norm.cpu(), alpha[:, j].abs()))
        alive = norm.cpu() > 1e-12 * scale
        beta[:, j] = torch.where(alive, norm.cpu(), 0.0)
        # A closed chain goes on with zeros: its later nodes get weight 0.
        q = torch.where(alive.to(w.device)[:, None], w / norm.clamp(min=1e-300)[:, None], 0.0)
    tridiagonal = torch.diag_embed(alpha) + torch.diag_embed(beta[:, :-1], 1) + torch.diag_embed(beta[:, :-1], -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[:, 0].square()


def _result(rule: _Rule, settings: _Settings, cost: Cost) -> Density:
    probes, steps = rule.nodes.shape
    held = rule.weights > 1e-14
    low, high = float(rule.nodes[held].min()), float(rule.nodes[held].max())
    smallest = 1e-6 * max(abs(low), abs(high), 1e-30)
    bandwidth = settings.bandwidth or max(KERNEL_WIDTH * (high - low) / steps, smallest)
    grid = torch.linspace(low - 4 * bandwidth, high + 4 * bandwidth, settings.points, dtype=torch.float64)
    curves = smoothed(grid, rule.nodes, rule.weights, bandwidth)
    return Density(
        grid=grid,
        density=curves.mean(0),
        stderr=curves.std(0) / math.sqrt(probes),
        nodes=rule.nodes.flatten(),
        weights=rule.weights.flatten() / probes,
        bandwidth=bandwidth,
        probes=probes,
        steps=steps,
        matvecs=probes * steps,
        outcome=Outcome.ESTIMATED,
        seed=settings.seed,
        cost=cost,
    )


def smoothed(grid: Tensor, nodes: Tensor, weights: Tensor, bandwidth: float) -> Tensor:
    """Gaussian-smoothed densities (b, points) of weighted nodes (b, m) on a grid."""
    z = (grid[None, :, None] - nodes[:, None, :]) / bandwidth
    kernel = torch.exp(-0.5 * z.square()) / (bandwidth * math.sqrt(2 * math.pi))
    return torch.einsum("bpm,bm->bp", kernel, weights)
