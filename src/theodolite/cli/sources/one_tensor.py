"""Hugging Face models as functions of one tensor, for measures that want `(inputs, targets)` and the loss of each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.cli.sources.batches import LABELS, raw_batches
from theodolite.cli.sources.losses import cross_entropy_for
from theodolite.problem.calling import main_output


class OneTensor(nn.Module):
    """The model on its inputs side by side in one tensor, `widths` columns of each; `shift` drops the last token's output."""

    def __init__(self, model: nn.Module, keys: tuple[str, ...], widths: tuple[int, ...], *, shift: bool) -> None:
        super().__init__()
        self.model, self.keys, self.widths, self.shift = model, keys, widths, shift

    def forward(self, inputs: Tensor) -> Tensor:
        parts = [inputs] if len(self.keys) == 1 else list(inputs.split(self.widths, dim=1))
        found = main_output(self.model(**dict(zip(self.keys, parts, strict=True))))
        return found[:, :-1] if self.shift else found


def as_one_tensor(model: nn.Module, data: Any) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """A wrapper for such models, their loss, and the data as `(inputs, targets)`.

    A mask that hides nothing is left out.
    """
    from theodolite.cli.sources.hugging_face import task_of

    task = task_of(type(model).__name__)
    batches = list(raw_batches(data))
    if task is None or not batches or not all(isinstance(batch, Mapping) and LABELS in batch for batch in batches):
        raise ValueError(
            f"{type(model).__name__} computes its own loss, so that of a single example is not known. Name one with --loss, or a "
            "model of transformers for text or images, on data with labels."
        )
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    targets = joined.pop(LABELS)
    joined = {key: t for key, t in joined.items() if key != "attention_mask" or not bool((t == 1).all())}
    keys, widths = tuple(joined), tuple(t.shape[1] for t in joined.values())
    shift = task == "causal"
    inputs = next(iter(joined.values())) if len(keys) == 1 else torch.cat(list(joined.values()), dim=1)
    targets = targets[:, 1:].contiguous() if shift else targets
    loss: Any = nn.MSELoss() if targets.is_floating_point() else cross_entropy_for(targets)
    if targets.is_floating_point() and targets.ndim == 1:
        targets = targets.unsqueeze(1)
    return lambda fresh: OneTensor(fresh, keys, widths, shift=shift), loss, (inputs, targets)
