"""The fixed validation data of a trial: its parts, their losses, and whether the training text holds it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from theodolite.arguments import about
from theodolite.problem import Batch, Problem
from theodolite.problem.batches import BatchParser
from theodolite.problem.calling import Loss, unwrap
from theodolite.problem.tensors import named_tensors

#: Parts of the validation data at least, so that differences have an error.
PARTS = 8
#: Tokens that have to agree for a stretch of text to be the same: half a sample, from 24 (of which characters of plays repeat in
#: at most 4 % of samples of 256) to 48; and the share of the samples from which on it is no accident.
SHORTEST, LONGEST, SHARED = 24, 48, 0.2
#: A stretch of fewer different tokens is padding.
DISTINCT = 4
#: Batches of the training data that are searched.
SEARCHED = 200


def validation_problem(model: nn.Module, loss: Loss, validation: Any, target: str) -> Problem:
    """The validation loss of a model in eval mode, over at least eight parts where the data can be cut."""
    with about("validation"):
        problem = in_parts(Problem(model, loss, validation, target=target, check=False))
        if not np.isfinite(part_losses(problem, model)).all():
            raise ValueError(
                "the loss of the model itself is not finite there: look for bad values in the data, or in the model."
            )
        _ = problem.weighting  # found out once, on the small model
    return problem


def in_parts(problem: Problem) -> Problem:
    """The same problem with its data in at least eight parts, where they can be cut."""
    batches = list(problem.data) if problem.data.held else []
    if not 0 < len(batches) < PARTS <= problem.samples or problem.coupled:
        return problem
    each = -(-PARTS // len(batches))
    return problem.with_batches([part for batch in batches for part in _cut(batch, each)])


def _cut(batch: Batch, parts: int) -> Iterator[Batch]:
    parts = min(parts, batch.size)
    ends = [round(i * batch.size / parts) for i in range(parts + 1)]
    return (batch.part(slice(a, b)) for a, b in itertools.pairwise(ends))


def part_losses(problem: Problem, model: nn.Module) -> list[float]:
    """The loss of each part of the validation data, NaN and infinity as they come."""
    other = problem if model is problem.model else problem.with_model(model)
    with other.session(second=False), torch.no_grad():
        return [other.raw_loss({}, batch) for batch in other.data]  # the model itself, which the session puts in eval mode


# What is the same


def batch_check_sum(batch: Batch, before: int = 0) -> int:
    """A number that follows from all tensors of a batch, and from that of the batches before."""
    for _, tensor in named_tensors([(batch.args, batch.kwargs, batch.target)]):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        before = zlib.crc32(flat.view(torch.uint8).numpy().data, before)
    return before


def refuse_shared_text(model: nn.Module, loss: Loss, data: Iterable[Any], problem: Problem, target: str) -> None:
    """Raise where much of the validation data stands in the training data.

    Tokens are compared stretch by stretch, at all offsets, in the first batches of the training data; other samples as a whole.
    """
    parse = BatchParser.of(unwrap(model), loss, target)
    batches = (parse(raw, i) for i, raw in enumerate(itertools.islice(data, SEARCHED)))
    training = [t for batch in batches if (t := _samples(batch)) is not None]
    validation = [t for batch in problem.data if (t := _samples(batch)) is not None] if problem.data.held else []
    if not training or not validation:
        return
    rows = [row for table in validation for row in table]
    length = min(*(len(row) for row in rows), *(table.shape[1] for table in training))
    width = min(LONGEST, max(SHORTEST, length // 2))
    whole = any(np.issubdtype(table.dtype, np.floating) for table in (*training, *validation))
    if not whole and width > length:
        return  # too short to tell a copy from an accident
    known: set[int] = set()
    for table in training:
        known.update(map(_whole, table) if whole else _stretches(table, width).tolist())
    found = sum(_whole(row) in known if whole else _has_known(row, width, known) for row in rows)
    if found > SHARED * len(rows):
        what = "stand" if whole else f"hold {width} tokens in a row that stand"
        raise ValueError(
            f"validation: {found} of its {len(rows)} samples {what} in the training data, so that its loss says nothing about "
            "new text. Keep some text back before training, and give that."
        )


def _samples(batch: Batch) -> NDArray[Any] | None:
    """The tokens or features of a batch, (samples, values)."""
    named = [(name, t) for name, t in named_tensors([(batch.args, batch.kwargs)]) if t.ndim > 1 and len(t) == batch.size]
    ordered = sorted(named, key=lambda pair: "input_ids" not in pair[0])  # not the mask beside them
    return ordered[0][1].detach().reshape(batch.size, -1).cpu().numpy() if ordered else None


def _has_known(row: NDArray[Any], width: int, known: set[int]) -> bool:
    places = [i for i, stretch in enumerate(_stretches(row[None], width).tolist()) if stretch in known]
    return any(len(np.unique(row[i : i + width])) >= DISTINCT for i in places)  # padding is everywhere


def _whole(row: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(row).data)


def _stretches(table: NDArray[Any], width: int) -> NDArray[np.uint64]:
    """A hash of each stretch of `width` tokens in rows of tokens: a polynomial in an odd number, modulo 2^64."""
    powers = np.full(width, 0x9E3779B97F4A7C15, dtype=np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    # Tokens are spread first: small numbers would make small sums of the low powers.
    spread = (table.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    windows = np.lib.stride_tricks.sliding_window_view(spread, width, axis=1)
    found: NDArray[np.uint64] = (windows * powers).sum(axis=-1, dtype=np.uint64)
    return found.reshape(-1)
