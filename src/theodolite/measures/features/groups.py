"""The AGOPs of groups of samples: numbers of their weighted means, and error bars from leaving each out in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from theodolite.measures.features.agop import AGOP, inner
from theodolite.measures.features.gradients import Chunk, InputGradients

#: Groups of samples that are left out in turn for the error bars.
GROUPS = 5
#: Errors below this share of the value are rounding, not sampling.
ROUNDING = 1e-6

Matrix = Tensor | InputGradients


@dataclass
class Group:
    """The AGOP of some samples: as gradients while they are fewer than coordinates, then as a matrix."""

    count: int = 0
    rows: list[Tensor] = field(default_factory=list)
    sums: AGOP | None = None

    def add(self, rows: Tensor, count: int) -> None:
        self.rows.append(rows)
        self.count += count
        if self.sums is not None or sum(map(len, self.rows)) > rows.shape[1]:
            self.sums = AGOP() if self.sums is None else self.sums
            self.sums.add(torch.cat(self.rows), 0)
            self.rows.clear()

    def matrix(self) -> Matrix:
        if self.sums is None:
            return InputGradients(torch.cat(self.rows), self.count)
        self.sums.count = self.count
        return self.sums.compute()


def gathered(source: Iterable[Chunk]) -> Matrix:
    """The AGOP of all chunks, in the smaller of its two forms."""
    group = Group()
    for chunk in source:
        group.add(chunk.rows, chunk.count)
    return group.matrix()


@dataclass
class Gathered:
    """Groups of samples, what their gradients were taken at, and the number of outputs."""

    groups: list[Group]
    values: Tensor  # (positions, d)
    outputs: int


def gather(source: Iterable[Chunk], seed: int) -> Gathered:
    """Samples at random into groups: sorted data must not make them unlike."""
    generator = torch.Generator().manual_seed(seed)
    groups = [Group() for _ in range(GROUPS)]
    values: list[Tensor] = []
    order = torch.empty(0, dtype=torch.long)
    outputs, start = 0, 0
    for chunk in source:
        if chunk.first:
            turn = (torch.arange(chunk.samples) + start) % GROUPS
            order = turn[torch.randperm(chunk.samples, generator=generator)]  # a group for each sample
            start += chunk.samples
            values.append(chunk.values)
            outputs = chunk.outputs
        place = order.repeat_interleave(chunk.gradients.shape[1] // chunk.samples).to(chunk.gradients.device)
        for i in order.unique().tolist():
            rows = chunk.gradients[:, place == i]
            groups[i].add(rows.reshape(-1, rows.shape[-1]), rows.shape[1] if chunk.first else 0)
    return Gathered(groups, torch.cat(values), outputs)


def weighted_mean(parts: list[Tensor], weights: list[float]) -> Tensor:
    """The mean of tensors with these weights."""
    return torch.stack([w * p for w, p in zip(weights, parts, strict=True)]).sum(0) / sum(weights)


def diagonal_of(matrix: Matrix) -> Tensor:
    """The diagonal of a matrix, written out or kept as rows."""
    return matrix.diagonal() if isinstance(matrix, Tensor) else matrix.rows.square().sum(0) / matrix.count


def inner_products(matrices: list[Matrix]) -> Tensor:
    """`Tr(AᵀB)` of all pairs, in float64."""
    found = torch.zeros(len(matrices), len(matrices), dtype=torch.float64)
    for i, a in enumerate(matrices):
        for j, b in enumerate(matrices[: i + 1]):
            found[i, j] = found[j, i] = inner(a, b)
    return found


class Moments:
    """Traces and inner products of the groups: all that the numbers of any weighted mean of them need."""

    def __init__(self, matrices: list[Matrix], vectors: Tensor, reference: Matrix | None) -> None:
        self.products = inner_products(matrices)
        self.traces = torch.tensor([float(diagonal_of(m).sum()) for m in matrices], dtype=torch.float64)
        self.compressed = torch.stack([_compressed(m, vectors) for m in matrices])  # (groups, r, r)
        self.with_reference = [] if reference is None else [inner(m, reference) for m in matrices]
        self.reference_size = 1.0 if reference is None else math.sqrt(inner(reference, reference))

    def size(self, w: Tensor) -> float:
        """‖G‖ of the mean with weights w."""
        return math.sqrt(float(w @ self.products @ w))

    def effective_rank(self, w: Tensor) -> float:
        """(Tr G)²/‖G‖², 0 where G vanishes."""
        squared = float(w @ self.products @ w)
        return float(w @ self.traces) ** 2 / squared if squared > 0 else 0.0

    def top_share(self, w: Tensor) -> float:
        """The largest eigenvalue, within the top directions of all samples, over the trace."""
        largest = torch.linalg.eigvalsh(torch.einsum("g,gij->ij", w, self.compressed))[-1]
        trace = float(w @ self.traces)
        return min(1.0, float(largest) / trace) if trace > 0 else 0.0

    def alignment(self, w: Tensor) -> float:
        """The cosine with the reference."""
        size = self.size(w) * self.reference_size
        return min(1.0, float(w @ torch.tensor(self.with_reference, dtype=torch.float64)) / size) if size > 0 else 0.0


def _compressed(matrix: Matrix, vectors: Tensor) -> Tensor:
    if isinstance(matrix, Tensor):
        return vectors.double().T @ matrix.double() @ vectors.double()
    seen = matrix.rows.double() @ vectors.double()
    return seen.T @ seen / matrix.count


class Jackknife:
    """A number of all groups, and its error from leaving each out in turn."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def __call__(self, quantity: Callable[[Tensor], float]) -> tuple[float, float]:
        w, g = self.weights, len(self.weights)
        value = quantity(w / w.sum())
        if g < 2:
            return value, 0.0
        left = torch.tensor([quantity(_without(w, i)) for i in range(g)], dtype=torch.float64)
        error = math.sqrt((g - 1) / g * float((left - left.mean()).square().sum()))
        return value, error if error > ROUNDING * abs(value) else 0.0


def _without(weights: Tensor, i: int) -> Tensor:
    left = weights.clone()
    left[i] = 0.0
    return left / left.sum()
