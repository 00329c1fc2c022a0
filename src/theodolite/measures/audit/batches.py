"""Every batch once: its loss, its gradient, its weight, and where NaN or infinity first appears."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError, WeightingError
from theodolite.problem import Problem
from theodolite.problem.weighting import IGNORED
from theodolite.results import Cost, Outcome, Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchAudit(Result):
    """The batches one by one. `bad` says what is not finite, batch by batch and parameter by parameter.

    `loss` weighs each batch by what its loss divides by (`rule`), `naive_loss` averages the batches as they come.
    `labels` counts the labels where they are classes, `ignored` those that do not count, `label_entropy` is the entropy of
    their frequencies in nats.
    """

    batches: tuple[Row, ...]
    rule: str
    loss: float
    naive_loss: float
    ignored: int
    labels: int
    classes: int
    majority: float
    label_entropy: float
    bad: tuple[str, ...]

    @property
    def finite(self) -> bool:
        return not self.bad

    @property
    def sizes(self) -> list[int]:
        return [int(row["samples"]) for row in self.batches]

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.batches]

    def sentence(self) -> str:
        if self.bad:
            return " ".join(self.bad[:3])
        count = (
            f"{len(self.batches)} batches, {sum(self.sizes)} samples" if len(self.batches) > 1 else f"{sum(self.sizes)} samples"
        )
        return f"{count}, weighted by {self.rule}; the loss is {self.loss:.4g} and finite everywhere."


def audit_batches(problem: Problem) -> BatchAudit:
    """One pass over the data, loss and gradient; nothing is raised for NaN, it is written down.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.ones(3, 1)
    >>> audit_batches(Problem(model, torch.nn.MSELoss(), [(x, x), (x[:1], x[:1])])).sizes
    [3, 1]
    """
    began = time.perf_counter()
    bad = _bad_parameters(problem)
    weights, rule = _weights(problem)
    rows: list[Row] = []
    with problem.session(second=False):
        leaves = problem.leaves()
        tensors = problem.tensors(leaves)
        for i, batch in enumerate(problem.data):
            loss, norm = math.nan, math.nan
            if weights is None or weights[i] > 0:
                try:
                    value = problem.evaluate(tensors, problem.placed(batch), i).loss
                    loss = float(value.detach())
                    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
                    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
                    if not math.isfinite(norm):
                        bad.append(_bad_gradient(i, problem, gradients))
                except NonFiniteError as error:
                    bad.append(str(error))
            weight = None if weights is None else weights[i]
            rows.append({"batch": i, "samples": batch.size, "weight": weight, "loss": loss, "gradient_norm": norm})
    labels, ignored = _labels(problem)
    counted = [row["loss"] for row in rows if row["weight"] is None or row["weight"] > 0]
    return BatchAudit(
        batches=tuple(rows),
        rule=rule,
        loss=_weighted(rows, rule) if weights is not None else math.nan,
        naive_loss=sum(counted) / max(1, len(counted)),
        ignored=ignored,
        labels=sum(labels.values()),
        classes=len(labels),
        majority=max(labels.values(), default=0) / max(1, sum(labels.values())),
        label_entropy=-sum(n / labels.total() * math.log(n / labels.total()) for n in labels.values()),
        bad=tuple(bad),
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="gradients of batches"),
    )


def _weights(problem: Problem) -> tuple[tuple[float, ...] | None, str]:
    try:
        return problem.weighting.weights, problem.weighting.rule
    except (WeightingError, NonFiniteError) as error:
        return None, f"unknown ({error})"


def _weighted(rows: list[Row], rule: str) -> float:
    total = 1.0 if rule == "sum" else sum(row["weight"] for row in rows)
    return float(sum(row["weight"] * row["loss"] for row in rows if row["weight"] > 0)) / total


def _bad_parameters(problem: Problem) -> list[str]:
    bad = []
    for kind, named in (("parameter", problem.model.named_parameters()), ("buffer", problem.model.named_buffers())):
        for name, t in named:
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                bad.append(f"The {kind} {name} holds {int((~torch.isfinite(t)).sum())} NaN or inf of {t.numel()} values.")
    return bad


def _bad_gradient(index: int, problem: Problem, gradients: tuple[Tensor | None, ...]) -> str:
    for name, g in zip(problem.names, gradients, strict=True):
        if g is not None and not bool(torch.isfinite(g).all()):
            return f"The loss of batch {index} is finite, but its gradient is not: {name} is the first parameter concerned."
    return f"The gradient of batch {index} overflows."


def _labels(problem: Problem) -> tuple[Counter[int], int]:
    """How often each class label occurs, and how many labels are ignored."""
    counts: Counter[int] = Counter()
    ignored = 0
    skip = getattr(problem.loss_function, "ignore_index", IGNORED)
    for batch in problem.data:
        target = batch.target
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
            continue
        values, times = torch.unique(target, return_counts=True)
        for value, count in zip(values.tolist(), times.tolist(), strict=True):
            if value == skip:
                ignored += count
            else:
                counts[int(value)] += count
    return counts, ignored
