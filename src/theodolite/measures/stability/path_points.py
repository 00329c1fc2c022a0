"""One point of a path: BatchNorm statistics by policy, the loss, and which answers are right."""

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
from theodolite.problem.calling import Evaluation, Loss, ModelCall
from theodolite.problem.weighting import IGNORED

BatchNormPolicy = Literal["interpolate", "recompute", "batch"]
Accuracy = Callable[[Tensor, Any], Tensor] | Literal["auto"] | None
Norms = dict[str, nn.modules.batchnorm._NormBase]

_BINARY = (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits)


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


def right_answers(output: Tensor, target: Any, loss: Any = None, *, shift: int = 0) -> Tensor | None:
    """Which answers are right, one bit per label that counts; None where the target names no class.

    Classes are integer labels, one-hot rows, or the sign of a single output: targets -1 and 1, or 0 and 1 under binary cross
    entropy. An output that is not finite is wrong. Position t answers for the label t + `shift`.

    >>> right_answers(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    if not isinstance(target, Tensor):
        return None
    if output.numel() == target.numel() == len(target):
        return _right_signs(output, target, loss)
    if target.is_floating_point():
        one_hot = output.shape == target.shape and output.ndim == 2 and bool(((target == 0) | (target == 1)).all())
        if not one_hot or not bool((target.sum(1) == 1).all()):
            return None
        target = target.argmax(1)
    if shift:
        output, target = output[:, :-shift], target[:, shift:]
    axis = _class_axis(output, target, loss)
    if axis is None:
        return None
    counted = target != getattr(loss, "ignore_index", IGNORED)
    right: Tensor = (output.argmax(axis) == target) & torch.isfinite(output).all(axis)
    return right[counted]


def answers(target: Any, loss: Any = None, shift: int = 0) -> Tensor | None:
    """The labels that count as one vector of whole numbers; None where the target names no class."""
    if not isinstance(target, Tensor) or target.is_complex():
        return None
    if not target.is_floating_point():
        labels = target[:, shift:] if shift else target
        return labels[labels != getattr(loss, "ignore_index", IGNORED)]
    return target.argmax(1) if target.ndim == 2 and target.shape[1] > 1 else (target > 0).long().reshape(-1)


def _right_signs(output: Tensor, target: Tensor, loss: Any) -> Tensor | None:
    """A single output: right where its sign is that of the target."""
    output, target = output.reshape(-1), target.reshape(-1)
    binary = loss in _BINARY[1:] or isinstance(loss, _BINARY[0])
    if not bool((((target == 0) | (target == 1)) if binary else (target.abs() == 1)).all()):
        return None
    return ((output > 0) == (target > 0)) & torch.isfinite(output)


def _class_axis(output: Tensor, target: Tensor, loss: Any) -> int | None:
    """Where the classes stand: (B, C, ...) as torch's losses want them, or last, as language models give them."""
    first = output.ndim == target.ndim + 1 and (len(output), *output.shape[2:]) == tuple(target.shape)
    last = output.shape[:-1] == target.shape
    if not (first or last):
        return None
    axis = 1 if first and (isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or not last) else output.ndim - 1
    return axis if output.shape[axis] > 1 else None


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
