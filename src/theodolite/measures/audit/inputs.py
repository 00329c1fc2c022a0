"""The inputs of the data: which never change, which say the same as another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.problem import Batch, Problem
from theodolite.problem.tensors import named_tensors
from theodolite.results import Cost, Outcome, Result, Row

#: Samples looked at; features that agree on so many agree.
SAMPLES = 2000

#: Features treated at a time, to bound the memory.
CHUNK = 4096


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class InputAudit(Result):
    """Features of the (one, floating-point) input: `constant` ones, and groups that are the same up to shift and scale."""

    features: int
    samples: int
    constant: tuple[int, ...]
    duplicated: tuple[tuple[int, ...], ...]

    @property
    def redundant(self) -> int:
        """Features that could be left out because another says the same."""
        return sum(len(group) - 1 for group in self.duplicated)

    def rows(self) -> list[Row]:
        groups = [{"features": ", ".join(map(str, group[:8])), "count": len(group), "what": "same"} for group in self.duplicated]
        constant = [{"features": ", ".join(map(str, self.constant[:8])), "count": len(self.constant), "what": "constant"}]
        return [*groups, *constant] if self.constant else groups

    def sentence(self) -> str:
        if not self.constant and not self.duplicated:
            return f"All {self.features} inputs vary and no two are the same."
        return f"Of {self.features} inputs {len(self.constant)} never change and {self.redundant} repeat another."


def has_main_input(problem: Problem) -> bool:
    """Whether the data has one floating-point input, a matrix or more for each batch."""
    return _main_tensor(next(iter(problem.data))) is not None


def _main_tensor(batch: Batch) -> Tensor | None:
    floating = [t for _, t in named_tensors(batch.inputs) if t.is_floating_point() and t.ndim >= 2]
    return floating[0] if len(floating) == 1 and floating[0].shape[0] == batch.size else None


def main_input(problem: Problem) -> Tensor | None:
    """The input of all samples as a matrix (samples, features), if it is one floating tensor; at most `SAMPLES` rows."""
    parts: list[Tensor] = []
    for batch in problem.data:
        found = _main_tensor(batch)
        if found is None:
            return None
        parts.append(found.flatten(1)[: SAMPLES - sum(map(len, parts))])
        if sum(map(len, parts)) >= SAMPLES:
            break
    if len({part.shape[1] for part in parts}) != 1:
        return None
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def audit_inputs(problem: Problem) -> InputAudit:
    """Find constant and duplicated features; feature numbers count through the flattened sample.

    Two features are the same if one is the other shifted and scaled, up to the rounding of their own precision; features that
    stand out on fewer than five samples are not compared, for rare ones fall together by chance.

    >>> x = torch.tensor([[1.0, 5.0, 2.0], [2.0, 5.0, 4.0], [4.0, 5.0, 8.0], [5.0, 5.0, 10.0], [9.0, 5.0, 18.0], [0.0, 5.0, 0.0]])
    >>> audit_inputs(Problem(torch.nn.Linear(3, 1), torch.nn.MSELoss(), (x, torch.zeros(6, 1)))).duplicated
    ((0, 2),)
    """
    began = time.perf_counter()
    x = main_input(problem)
    if x is None:
        raise ValueError("audit_inputs needs data with one floating-point input of equal shape in all batches.")
    direction = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    still, rare, place, blur = (torch.cat(column) for column in zip(*_facts(x, direction), strict=True))
    usable = torch.nonzero(~still & ~rare).flatten()
    groups = _same(x, usable, place, blur) if len(x) > 2 else []
    return InputAudit(
        features=x.shape[1],
        samples=len(x),
        constant=tuple(torch.nonzero(still).flatten().tolist()),
        duplicated=tuple(tuple(group) for group in groups),
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="comparison of features"),
    )


def _facts(x: Tensor, direction: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """By chunks of features: whether constant, whether rare, a number that copies share, and how blurred it is."""
    eps = torch.finfo(x.dtype).eps
    for start in range(0, x.shape[1], CHUNK):
        part = x[:, start : start + CHUNK].double()
        largest = part.abs().amax(0).clamp_min(1e-300)
        centred = part - part.mean(0)
        spread = centred.abs().amax(0)
        still = spread <= 4 * eps * largest
        usual = part.median(0).values
        rare = ((part - usual).abs() > 1e-3 * spread).sum(0) < min(5, max(1, len(x) // 3))
        scaled = _signed(centred / spread.clamp_min(1e-300))
        blur = 1e-6 + 8 * eps * largest / spread.clamp_min(1e-300)
        yield still, rare, direction @ scaled, blur


def _signed(columns: Tensor) -> Tensor:
    """Columns turned so that their largest entry is positive: a mirrored copy is a copy too."""
    peak = columns.gather(0, columns.abs().argmax(0, keepdim=True))
    return columns * torch.sign(peak)


def _same(x: Tensor, usable: Tensor, place: Tensor, blur: Tensor) -> list[list[int]]:
    """Groups of features whose scaled columns agree; only neighbours along a random direction are compared."""
    order = usable[place[usable].argsort()]
    groups: list[list[int]] = []
    for i, j in itertools.pairwise(order.tolist()):
        near = float(blur[i] + blur[j])
        if abs(float(place[j] - place[i])) <= 4 * near * len(x) ** 0.5 and _agree(x, i, j, near):
            if groups and groups[-1][-1] == i:
                groups[-1].append(j)
            else:
                groups.append([i, j])
    return sorted(sorted(group) for group in groups)


def _agree(x: Tensor, i: int, j: int, near: float) -> bool:
    pair = x[:, [i, j]].double()
    pair = pair - pair.mean(0)
    pair = _signed(pair / pair.abs().amax(0))
    return float((pair[:, 0] - pair[:, 1]).abs().max()) <= near
