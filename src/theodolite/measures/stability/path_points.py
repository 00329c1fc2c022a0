"""One point of a path: BatchNorm statistics by policy, the loss, and which answers are right there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.problem import Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.problem.calling import Evaluation, Loss, ModelCall

BatchNormPolicy = Literal["interpolate", "recompute", "batch"]
Accuracy = Callable[[Tensor, Any], Tensor] | Literal["auto"] | None
Norms = dict[str, nn.modules.batchnorm._NormBase]


class Meter:
    """Loss and right answers of one data set at any weights; `passes` counts the forward passes over it."""

    def __init__(self, problem: Problem, accuracy: Accuracy) -> None:
        self.problem, self.accuracy = problem, accuracy
        self.passes = 0
        self._call = ModelCall(problem.model, _in_float64(problem.loss_function))
        self._shift: int | None = 0 if problem.loss_function is not None else None  # None: not known yet

    def read(self, tensors: Mapping[str, Tensor]) -> tuple[float, Tensor | None]:
        """The loss, infinite where it is no number, and for each label whether the answer is right; inside a session."""
        total, bits = 0.0, []
        for i, share, batch in self.problem.iterate():
            found = self._call(tensors, batch, i)
            total += share * float(found.loss.double())
            bits.append(self._right(found, batch.target))
        self.passes += 1
        whole = [b for b in bits if b is not None]
        return total if math.isfinite(total) else math.inf, torch.cat(whole).cpu() if len(whole) == len(bits) else None

    def chance(self) -> float | None:
        """The share of the most frequent answer, which needs no model; None where that is not known."""
        if self.accuracy != "auto":
            return None
        found = [answers(batch.target, self.problem.loss_function, self._shift or 0) for batch in self.problem.data]
        known = [a for a in found if a is not None]
        if not known or len(known) < len(found):
            return None
        counts = torch.cat(known).unique(return_counts=True)[1]
        return int(counts.max()) / int(counts.sum())

    def _right(self, found: Evaluation, target: Any) -> Tensor | None:
        if self.accuracy is None:
            return None
        if self.accuracy != "auto":
            return self.accuracy(found.output, target).detach().reshape(-1).bool()
        if self._shift is None:
            self._shift = _label_shift(found, target)
            if self._shift is None:
                self.accuracy = None  # which label an output answers is not known
                return None
        return right_answers(found.output, target, self.problem.loss_function, shift=self._shift)


def _label_shift(found: Evaluation, target: Any) -> int | None:
    """How many places ahead the labels of a model with its own loss stand: that is the cross entropy with its loss's value."""
    output = found.output.double()
    if not isinstance(target, Tensor) or target.ndim < 2 or output.shape[:-1] != target.shape:
        return 0
    for shift in (0, 1):
        logits, labels = output[:, : output.shape[1] - shift].flatten(0, -2), target[:, shift:].flatten()
        if math.isclose(float(functional.cross_entropy(logits, labels)), float(found.loss), rel_tol=1e-3):
            return shift
    return None


def _in_float64(loss: Loss) -> Loss:
    """torch's own losses of widened outputs: the log-softmax of confident networks needs it. Other losses as they are."""
    plain = isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss"
    if loss is None or not (plain or getattr(loss, "__module__", "") == "torch.nn.functional"):
        return loss
    wide: Any = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss

    def widened(output: Any, target: Any) -> Tensor:
        floats = isinstance(target, Tensor) and target.is_floating_point()
        value: Tensor = wide(output.double(), target.double() if floats else target)
        return value

    return widened


def statistics_of(model: nn.Module) -> Norms:
    """The normalisations that keep running statistics, by name."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
    }


@contextmanager
def batch_statistics(norms: Norms, *, cumulative: bool = False) -> Iterator[None]:
    """Let normalisations use the statistics of each batch; everything else stays in its mode.

    Their running statistics move too, to the plain average over the batches if `cumulative`.
    """
    before = [(norm, norm.training, norm.momentum) for norm in norms.values()]
    try:
        for norm in norms.values():
            norm.training = True
            norm.momentum = None if cumulative else norm.momentum
        yield
    finally:
        for norm, training, own in before:
            norm.training, norm.momentum = training, own


def recompute_statistics(tensors: Mapping[str, Tensor], norms: Norms, meter: Meter) -> None:
    """Estimate running statistics anew, in place, as the plain average over the batches of the data; inside a session."""
    for name in norms:
        start = f"{name}." if name else ""
        for part, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            tensors[f"{start}{part}"].fill_(value)
    with batch_statistics(norms, cumulative=True):
        for i, _, batch in meter.problem.iterate():
            meter.problem.output(dict(tensors), batch, i, check=False)
    meter.passes += 1
