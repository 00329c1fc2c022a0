"""The inputs of the data: which never change, which say the same as another."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.audit.twins import equal_rows
from theodolite.problem import Problem
from theodolite.problem.tensors import named_tensors
from theodolite.results import Cost, Outcome, Result, Row

#: Samples looked at; features that agree on so many agree.
SAMPLES = 2000


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


def main_input(problem: Problem) -> Tensor | None:
    """The input of all samples as a matrix (samples, features), if it is one floating tensor; at most `SAMPLES` rows."""
    parts: list[Tensor] = []
    for batch in problem.data:
        floating = [t for _, t in named_tensors(batch.inputs) if t.is_floating_point() and t.ndim >= 2]
        if len(floating) != 1 or floating[0].shape[0] != batch.size:
            return None
        parts.append(floating[0].flatten(1))
        if sum(map(len, parts)) >= SAMPLES:
            break
    if len({part.shape[1] for part in parts}) != 1:
        return None
    return torch.cat(parts)[:SAMPLES]


def audit_inputs(problem: Problem) -> InputAudit:
    """Find constant and duplicated features; feature numbers count through the flattened sample.

    >>> x = torch.tensor([[1.0, 5.0, 2.0], [2.0, 5.0, 4.0], [4.0, 5.0, 8.0]])      # the third is twice the first
    >>> audit_inputs(Problem(torch.nn.Linear(3, 1), torch.nn.MSELoss(), (x, torch.zeros(3, 1)))).duplicated
    ((0, 2),)
    """
    began = time.perf_counter()
    x = main_input(problem)
    if x is None:
        raise ValueError("audit_inputs needs data with one floating-point input of equal shape in all batches.")
    centred = (x.double() - x.double().mean(0)).T  # (features, samples)
    spread = centred.abs().amax(1)
    still = spread <= 1e-12 * x.double().abs().amax(0).clamp_min(1e-300)
    moving = torch.nonzero(~still).flatten()
    groups: list[list[int]] = []
    if len(moving) > 1 and len(x) > 2:
        scaled = centred[moving] / spread[moving, None]
        sign = torch.sign(scaled.gather(1, scaled.abs().argmax(1, keepdim=True)))  # a mirrored copy is a copy too
        groups = [[int(moving[i]) for i in group] for group in equal_rows(scaled * sign)]
    return InputAudit(
        features=x.shape[1],
        samples=len(x),
        constant=tuple(torch.nonzero(still).flatten().tolist()),
        duplicated=tuple(tuple(group) for group in groups),
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="comparison of features"),
    )
