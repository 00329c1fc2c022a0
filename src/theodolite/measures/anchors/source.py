"""What a model is called with, and the positions whose states are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.problem.calling import unwrap
from theodolite.problem.tensors import map_tensors, named_tensors

#: Positions of one sequence, or samples of other inputs, that are enough to look at a head.
GLANCE = 16
#: The target of a position that has none.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Reading:
    """One call `model(*args, **kwargs)`.

    `keep` (B, T) marks the positions wanted, None all of them; `targets` (B, T) are the tokens to predict there, −100 where
    there is none.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: Tensor | None = None
    targets: Tensor | None = None

    @property
    def samples(self) -> int:
        return next((len(t) for _, t in named_tensors((self.args, self.kwargs)) if t.ndim), 1)

    def glance(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A little of it, enough to look at the head: one sequence, or some rows of other inputs, and few positions."""
        tokens = [t for _, t in named_tensors((self.args, self.kwargs)) if not t.is_floating_point() and t.ndim == 2]
        rows, whole = (1 if tokens else GLANCE), self.samples

        def cut(t: Tensor) -> Tensor:
            t = t[:rows] if t.ndim and len(t) == whole else t
            return t[:, :GLANCE] if tokens and t.ndim == 2 and not t.is_floating_point() else t

        return tuple(map_tensors(cut, self.args)), dict(map_tensors(cut, self.kwargs))


@dataclass(frozen=True, eq=False)
class Source:
    """Readings in order; `total` positions where that is known beforehand, else perhaps the number of `samples`.

    `ends` are the numbers of positions after which a window ends, where one window makes several rows of readings.
    """

    readings: Callable[[], Iterator[Reading]]
    total: int | None = None
    samples: int | None = None
    ends: Tensor | None = None

    def __iter__(self) -> Iterator[Reading]:
        return self.readings()


def check_ids(ids: Tensor, model: nn.Module) -> None:
    """Refuse tokens that the model has no embedding for, before torch does so without a name."""
    method = getattr(unwrap(model), "get_input_embeddings", None)
    table = method() if callable(method) else None
    if table is None:
        tables = [m for m in unwrap(model).modules() if isinstance(m, nn.Embedding)]
        table = max(tables, key=lambda m: m.num_embeddings, default=None)
    known = getattr(table, "num_embeddings", None)
    if known is not None and len(ids.reshape(-1)) and (int(ids.max()) >= known or int(ids.min()) < 0):
        raise ValueError(
            f"The data hold tokens from {int(ids.min())} to {int(ids.max())}, but {type(model).__name__} embeds 0 .. {known - 1}"
            ": the tokenizer is not that of this model. Encode the text with the model's own tokenizer."
        )


def following(ids: Tensor, present: Tensor | None = None) -> Tensor:
    """The token after each position (B, T), −100 at the end and where it is not `present`."""
    ids = ids if present is None else ids.masked_fill(~present, IGNORED)
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
