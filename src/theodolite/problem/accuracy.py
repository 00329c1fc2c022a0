"""Which class a target names, and whether an output gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.problem.weighting import IGNORED


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
    binary = isinstance(loss, nn.BCEWithLogitsLoss) or loss is functional.binary_cross_entropy_with_logits
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
