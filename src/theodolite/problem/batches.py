"""The user's data, whatever its form, as a repeatable sequence of batches.

Small data is read once and held, so a shuffling loader is harmless. Data too large to hold is read anew for each
pass, and every pass is compared with the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError, NotRepeatableError
from theodolite.problem.state_guard import random_states_kept
from theodolite.problem.tensors import bytes_of, map_tensors, named_tensors

#: Data up to this many bytes is held in memory.
HOLD_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Batch:
    """What one call of the model gets: `model(*args, **kwargs)`, compared with `target`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int

    @property
    def inputs(self) -> Any:
        return {**{f"input[{i}]": a for i, a in enumerate(self.args)}, **self.kwargs}

    def to(self, device: torch.device, half_to: torch.dtype | None) -> Batch:
        """On another device; half-precision floats become `half_to` where it is given."""

        def move(t: Tensor) -> Tensor:
            half = half_to is not None and t.dtype in (torch.bfloat16, torch.float16)
            return t.to(device=device, dtype=half_to if half else t.dtype)

        return replace(
            self, args=map_tensors(move, self.args), kwargs=map_tensors(move, self.kwargs), target=map_tensors(move, self.target)
        )

    def in_float64(self) -> Batch:
        """Floating tensors widened."""

        def widen(t: Tensor) -> Tensor:
            return t.double() if t.is_floating_point() else t

        return replace(
            self,
            args=map_tensors(widen, self.args),
            kwargs=map_tensors(widen, self.kwargs),
            target=map_tensors(widen, self.target),
        )

    def joined(self, *others: Batch) -> Batch:
        """All batches as one, where their shapes allow it."""
        every = (self, *others)
        columns = zip(*((b.args, b.kwargs, b.target) for b in every), strict=True)
        args, kwargs, target = (join_trees(*trees) for trees in columns)
        return Batch(args, kwargs, target, sum(b.size for b in every))

    def part(self, rows: slice | Tensor) -> Batch:
        """Some samples of the batch, by slice or indices; tensors whose first size is not the batch's are shared."""

        def cut(t: Tensor) -> Tensor:
            return t[rows] if t.ndim and t.shape[0] == self.size else t

        size = len(range(*rows.indices(self.size))) if isinstance(rows, slice) else len(rows)
        return Batch(map_tensors(cut, self.args), map_tensors(cut, self.kwargs), map_tensors(cut, self.target), size)


def join_trees(*trees: Any) -> Any:
    """Nested structures of one form with their tensors joined along the first dimension."""
    columns = zip(*([t for _, t in named_tensors(tree)] for tree in trees), strict=True)
    joined = (torch.cat(tensors) if tensors[0].ndim else tensors[0] for tensors in columns)
    return map_tensors(lambda _: next(joined), trees[0])


class BatchParser:
    """Turns one raw batch (a pair or a mapping) into a `Batch`; `check` looks for NaN and infinity in it."""

    def __init__(self, *, own_loss: bool, target_key: str, check: bool = True) -> None:
        self.own_loss, self.target_key, self.check = own_loss, target_key, check

    def __call__(self, raw: Any, index: int) -> Batch:
        if isinstance(raw, Mapping):
            batch = self._from_mapping(raw, index)
        elif isinstance(raw, tuple | list) and len(raw) >= 2:
            batch = self._from_pair(raw)
        elif self.own_loss and isinstance(raw, Tensor):
            batch = Batch((raw,), {}, None, _size(raw))
        else:
            raise ValueError(
                f"A batch must be a pair (inputs, targets) or a mapping with the key {self.target_key!r}. "
                f"Batch {index} is a {type(raw).__name__}."
            )
        if self.check:
            _check_batch(batch, index)
        return batch

    def _from_mapping(self, raw: Mapping[str, Any], index: int) -> Batch:
        fields = dict(raw)
        if self.own_loss:
            return Batch((), fields, fields.get(self.target_key), _size(fields))
        if self.target_key not in fields:
            raise ValueError(
                f"Batch {index} has no {self.target_key!r}: its keys are {', '.join(map(repr, fields))}. "
                "Name the target with Problem(..., target='...')."
            )
        target = fields.pop(self.target_key)
        return Batch((), fields, target, _size(fields))

    def _from_pair(self, raw: tuple[Any, ...] | list[Any]) -> Batch:
        if any(_is_array(item) for item in raw):
            raise ValueError(
                "data: a batch holds NumPy arrays. Turn them into tensors first: (torch.as_tensor(x), torch.as_tensor(y))."
            )
        *inputs, target = raw
        size = _size(inputs)
        kwargs: dict[str, Any] = {}
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            kwargs, inputs = dict(inputs[0]), []
        elif len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            inputs = list(inputs[0])
        if self.own_loss:
            kwargs[self.target_key] = target
        return Batch(tuple(inputs), kwargs, target, size)


def _size(tree: Any) -> int:
    return next((t.shape[0] for _, t in named_tensors(tree) if t.ndim), 1)


def _check_batch(batch: Batch, index: int) -> None:
    if batch.size == 0:
        raise ValueError(f"Batch {index} is empty: give at least one sample.")
    for name, t in named_tensors({**batch.inputs, "target": batch.target}):
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            bad = int((~torch.isfinite(t)).sum())
            raise NonFiniteError(f"data: {name} of batch {index} holds {bad} NaN or inf values; remove or impute them.")


class Data:
    """Batches that can be iterated any number of times."""

    def __init__(self, batches: list[Batch] | None, source: Iterable[Any] | None, parse: BatchParser) -> None:
        self._batches, self._source, self._parse = batches, source, parse
        self._fingerprints: list[float] = []
        if batches is None:
            self._fingerprints = [_fingerprint(b) for b in self._read()]
            for _ in self:  # the probe: a second pass must equal the first
                pass

    @property
    def held(self) -> bool:
        return self._batches is not None

    def __len__(self) -> int:
        return len(self._batches) if self._batches is not None else len(self._fingerprints)

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is not None:
            yield from self._batches
            return
        count = 0
        for i, batch in enumerate(self._read()):
            if i >= len(self._fingerprints) or _fingerprint(batch) != self._fingerprints[i]:
                raise NotRepeatableError(
                    f"data: batch {i} changed between two passes over a loader too large to hold. Usual causes: shuffle=True, "
                    "random augmentation. Remedy: shuffle=False and fixed transforms, or a smaller subset of the data."
                )
            count += 1
            yield batch
        if count != len(self._fingerprints):
            raise NotRepeatableError(f"data: a pass gave {count} batches, the first one {len(self._fingerprints)}.")

    def _read(self) -> Iterator[Batch]:
        assert self._source is not None
        with random_states_kept(generators=generators_of(self._source)):  # beginning a pass draws a seed for the workers
            source = iter(self._source)
        for i, raw in enumerate(source):
            yield self._parse(raw, i)


def _fingerprint(batch: Batch) -> float:
    """A number that changes when the batch does; the position of each value counts."""
    total = 0.0
    for _, t in named_tensors({**batch.inputs, "target": batch.target}):
        flat = t.detach().reshape(-1).double()
        total = 0.7 * total + float(flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64, device=flat.device))
    return total


def read_data(data: Any, parse: BatchParser, *, hold_bytes: int = HOLD_BYTES) -> Data:
    """Accept `(inputs, targets)`, a mapping, a list of batches, or anything that yields batches."""
    if _is_one_batch(data, parse.own_loss) and not (parse.own_loss and isinstance(data, list)):
        return Data([parse(data, 0)], None, parse)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"data must be (inputs, targets), a mapping, a list of batches or a DataLoader. Got {type(data).__name__}."
        )
    held: list[Batch] = []
    total = 0
    # A list is in memory already: holding it costs nothing.
    limit = float("inf") if isinstance(data, tuple | list) else hold_bytes
    for i, raw in enumerate(data):
        held.append(parse(raw, i))
        total += bytes_of(raw)
        if total > limit:
            if iter(data) is data:
                raise NotRepeatableError(
                    "data: a generator too large to hold cannot be read twice. Remedy: pass a DataLoader or a list."
                )
            held.clear()
            return Data(None, data, parse)
    if not held:
        raise ValueError("data is empty: give at least one batch.")
    return Data(held, None, parse)


def _is_one_batch(data: Any, own_loss: bool) -> bool:
    if isinstance(data, Mapping):
        return True
    if not isinstance(data, tuple | list) or len(data) < 2:
        return False
    # (X, y), (inputs mapping, y), (x1, x2, y), (X, (y1, y2)): the last item or the first is a bare tensor. A list of batches
    # begins and ends with a pair or mapping, except that a model with its own loss may take bare tensors.
    return _is_bare(data[-1]) or (_is_bare(data[0]) and not own_loss)


def _is_bare(item: Any) -> bool:
    return isinstance(item, Tensor) or _is_array(item)


def _is_array(item: Any) -> bool:
    """Whether this is a NumPy array, or something else that wants to be one."""
    return hasattr(item, "__array__") and not isinstance(item, Tensor)


def generators_of(data: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, if they have their own."""
    batch_sampler = getattr(data, "batch_sampler", None)
    holders = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def merge(batches: list[Batch]) -> list[Batch]:
    """Single samples joined into one batch where their shapes allow it."""

    def signature(batch: Batch) -> list[Any]:
        return [(n, t.shape, t.dtype) for n, t in named_tensors({**batch.inputs, "target": batch.target})]

    alike = all(signature(b) == signature(batches[0]) for b in batches)
    return [batches[0].joined(*batches[1:])] if alike else batches
