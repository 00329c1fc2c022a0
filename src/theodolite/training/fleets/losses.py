"""Common losses of all replicas at once, where that is faster than torch's own under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

StackedLoss = Callable[[Tensor, Tensor], Tensor]  # outputs (R, B, ...), targets (R, B, ...) or (B, ...) -> (R,)


def has_short_cut(loss: Any) -> bool:
    """Whether `stacked_loss` knows the loss, for outputs and targets of fitting shapes."""
    if type(loss) is nn.MSELoss:
        return bool(loss.reduction == "mean")
    plain = type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean"
    return plain and loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index < 0


def stacked_loss(loss: Any, outputs: Tensor, targets: Tensor, *, shared: bool) -> StackedLoss | None:
    """A loss for stacked outputs with the numbers of `loss`, None where there is no short cut.

    `shared` says that the targets have no replica axis.

    >>> z, y = torch.zeros(5, 3, 4), torch.tensor([0, 1, 3])
    >>> stacked_loss(nn.CrossEntropyLoss(), z, y, shared=True)(z, y)[:2]      # log 4
    tensor([1.3863, 1.3863])
    """
    if not has_short_cut(loss):
        return None
    shape = targets.shape if shared else targets.shape[1:]
    if type(loss) is nn.MSELoss:
        return _squared_error if outputs.shape[1:] == shape else None
    labels = outputs.ndim == 3 and len(shape) == 1 and not targets.is_floating_point()
    return _cross_entropy if labels and int(targets.min()) >= 0 else None  # below 0 are labels to ignore


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes are moved away from the last axis: torch's log-softmax over a short last axis is some ten times slower."""
    logs = F.log_softmax(outputs.transpose(1, 2).contiguous(), dim=1)  # (R, C, B)
    index = targets.expand(len(outputs), -1)[:, None]  # (R, 1, B)
    return torch.gather(logs, 1, index).squeeze(1).mean(1).neg()
