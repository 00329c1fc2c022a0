"""The user's data, whatever its form, as a repeatable sequence of batches.

Small data is read once and held, so a shuffling loader is harmless. Data too large to hold is read anew for each
pass, and every pass is compared with the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.errors import NonFiniteError, NotRepeatableError
from theodolite.problem.losses import compares_numbers
from theodolite.problem.state_guard import random_states_kept
from theodolite.problem.tables import column_names, input_tensor, is_array, is_frame, target_tensor
from theodolite.problem.tensors import bytes_of, map_tensors, named_tensors
from theodolite.text import listed

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

        return self.mapped(move)

    def in_float64(self) -> Batch:
        """Floating tensors widened."""
        return self.mapped(lambda t: t.double() if t.is_floating_point() else t)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Each tensor as `change` makes it."""
        args, kwargs, target = (map_tensors(change, part) for part in (self.args, self.kwargs, self.target))
        return replace(self, args=args, kwargs=kwargs, target=target)

    def joined(self, *others: Batch) -> Batch:
        """All batches as one, where their shapes allow it."""
        every = (self, *others)
        columns = zip(*((b.args, b.kwargs, b.target) for b in every), strict=True)
        args, kwargs, target = (join_trees(*trees, sizes=[b.size for b in every]) for trees in columns)
        return Batch(args, kwargs, target, sum(b.size for b in every))

    def part(self, rows: slice | Tensor) -> Batch:
        """Some samples of the batch, by slice or indices; tensors whose first size is not the batch's are shared."""
        size = len(range(*rows.indices(self.size))) if isinstance(rows, slice) else len(rows)
        args, kwargs, target = (rows_of(part, rows, self.size) for part in (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target, size)


def rows_of(tree: Any, rows: slice | Tensor, size: int) -> Any:
    """Some samples of a structure: rows of the tensors that have `size` of them, places of lists that hold a sample each."""
    if isinstance(tree, Tensor):
        return tree[rows] if tree.ndim and tree.shape[0] == size else tree
    if holds_samples(tree, size):
        return [tree[i] for i in torch.arange(size)[rows].tolist()]
    return _by_part(lambda part: rows_of(part, rows, size), tree)


def holds_samples(tree: Any, size: int) -> bool:
    """Whether this is a list with one sample in each of its `size` places, and not one of tensors that hold them all."""
    if not isinstance(tree, list) or len(tree) != size:
        return False
    return any(not isinstance(part, Tensor) or part.ndim == 0 or part.shape[0] != size for part in tree)


def join_trees(*trees: Any, sizes: Sequence[int], shared: bool = True) -> Any:
    """Nested structures of one form, of batches of these `sizes`, with their samples one after the other.

    Tensors that are not per sample are taken once, as `rows_of` leaves them, unless none is to be `shared`.
    """
    first = trees[0]
    if isinstance(first, Tensor):
        per_sample = not shared or all(t.ndim and t.shape[0] % size == 0 for t, size in zip(trees, sizes, strict=True))
        return torch.cat(trees) if first.ndim and per_sample else first
    if all(holds_samples(tree, size) for tree, size in zip(trees, sizes, strict=True)):
        return [sample for tree in trees for sample in tree]
    columns = zip(*(_parts(tree) for tree in trees), strict=True)
    return _by_part(lambda _: join_trees(*next(columns), sizes=sizes, shared=shared), first)


def _parts(tree: Any) -> list[Any]:
    """What `_by_part` visits, in its order."""
    found: list[Any] = []
    _by_part(found.append, tree)
    return found


def _by_part(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with each part that is a structure itself changed."""
    if type(tree) in (tuple, list):
        return type(tree)(change(part) for part in tree)
    if type(tree) is dict:
        return {key: change(part) for key, part in tree.items()}
    return map_tensors(change, tree)


@dataclass(eq=False, kw_only=True)
class BatchParser:
    """Turns one raw batch (a pair, a mapping, a table with the target among its columns) into a `Batch`.

    `check` looks for NaN and infinity in it. A mapping of inputs becomes keyword arguments of `forward`, or its one argument
    where it takes no such keywords. Arrays and tables become tensors, real numbers in `dtype`; the whole numbers of a
    table too, except that they stay `tokens` for a model that embeds them, and targets stay classes unless the loss takes
    `real_targets`. The names of columns and classes are those of the first table; later ones must agree.
    """

    own_loss: bool
    target_key: str
    check: bool = True
    allow_empty: bool = False
    dtype: torch.dtype = torch.float32
    tokens: bool = False
    real_targets: bool = False
    forward: InitVar[Callable[..., Any] | None] = None
    columns: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module, loss: Any, target_key: str, **options: Any) -> BatchParser:
        """The parser for a model and its loss, whose precision and kind of targets it knows."""
        double = any(p.dtype == torch.float64 for p in model.parameters())
        known: dict[str, Any] = {"own_loss": loss is None, "real_targets": compares_numbers(loss), "tokens": _embeds(model)}
        known |= {"dtype": torch.float64 if double else torch.float32, "forward": model.forward, **options}
        return cls(target_key=target_key, **known)

    def __post_init__(self, forward: Callable[..., Any] | None) -> None:
        self.signature = None if forward is None else inspect.signature(forward)

    def __call__(self, raw: Any, index: int) -> Batch:
        came = type(raw).__name__
        raw = self._as_tensors(raw, index)
        if isinstance(raw, Batch):
            batch = raw
        elif isinstance(raw, Mapping):
            batch = self._from_mapping(raw, index)
        elif isinstance(raw, tuple | list) and len(raw) >= 2:
            batch = self._from_pair(raw)
        elif self.own_loss and isinstance(raw, Tensor):
            batch = Batch((raw,), {}, None, _size(raw, None))
        else:
            raise ValueError(
                f"data: a batch must be a pair (inputs, targets), or a mapping or a table with {self.target_key!r}. "
                f"Batch {index} is a {came}."
            )
        if batch.size == 0 and not self.allow_empty:
            raise ValueError(f"data: batch {index} is empty: give at least one sample.")
        _check_batch(batch, index, finite=self.check)
        return batch.mapped(lambda t: t.clone() if t.is_inference() else t)  # such tensors have no derivatives

    def _as_tensors(self, raw: Any, index: int) -> Any:
        """Tables and arrays as tensors; the last of a tuple and the target of a mapping are targets."""
        if is_frame(raw) and self.target_key in raw.columns:
            raw = (raw.drop(columns=self.target_key), raw[self.target_key])
        if isinstance(raw, Mapping):
            names = self._names([value for key, value in raw.items() if key != self.target_key])
            found: Any = {k: self._target(v) if k == self.target_key else self._input(v) for k, v in raw.items()}
        elif type(raw) in (tuple, list) and len(raw) >= 2:
            names = self._names(raw[:-1])
            found = type(raw)([*map(self._input, raw[:-1]), self._target(raw[-1])])
        else:
            names, found = self._names(raw), self._input(raw)
        if names is not None and self.columns not in (None, names):
            own, other = (f"{len(columns)} columns ({listed(columns, 6)})" for columns in (self.columns, names))
            raise ValueError(f"data: batch {index} has {other}, the first table {own}: take frame[[...]] with the same columns.")
        self.columns = self.columns or names
        return found

    def _names(self, inputs: Any) -> tuple[str, ...] | None:
        """The names of the columns, where the inputs hold one table."""
        frames = [column_names(part) for part in _leaves(inputs) if is_frame(part)]
        return frames[0] if len(frames) == 1 else None

    def _input(self, raw: Any) -> Any:
        if is_array(raw):
            return input_tensor(raw, self.dtype, whole=self.tokens, check=self.check)
        if isinstance(raw, Mapping):
            return {key: self._input(value) for key, value in raw.items()}
        return type(raw)(map(self._input, raw)) if type(raw) in (tuple, list) else raw

    def _target(self, raw: Any) -> Any:
        if is_array(raw):
            t, names = target_tensor(raw, self.dtype, real=self.real_targets, known=self.classes, check=self.check)
            self.classes = self.classes or names
            return t
        if isinstance(raw, Mapping):
            return {key: self._target(value) for key, value in raw.items()}
        return type(raw)(map(self._target, raw)) if type(raw) in (tuple, list) else raw

    def _from_mapping(self, raw: Mapping[str, Any], index: int) -> Batch:
        fields = dict(raw)
        if self.own_loss:
            target = fields.get(self.target_key)
            return Batch(*self._called_with(fields), target, _size(fields, target))
        if self.target_key not in fields:
            raise ValueError(
                f"data: batch {index} has no {self.target_key!r}: its keys are {', '.join(map(repr, fields))}. "
                "Name the target with Problem(..., target='...')."
            )
        target = fields.pop(self.target_key)
        args, kwargs = self._called_with(fields)
        return Batch(args, kwargs, target, _size(fields, target))

    def _called_with(self, fields: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A mapping as keyword arguments, or as the one argument of a model that needs one and takes no such keywords."""
        if self.signature is not None and self._needs_one:
            with suppress(TypeError):
                self.signature.bind(**fields)
                return (), fields
            with suppress(TypeError):
                self.signature.bind(fields)
                return (fields,), {}
        return (), fields

    def _takes_list(self, inputs: Any, target: Any) -> bool:
        """Whether a list of inputs is the one argument of the model (images of different sizes) and not several."""
        if self.signature is None or not isinstance(inputs, list) or not self._needs_one:
            return False
        with suppress(TypeError):
            self.signature.bind(*inputs)
            return isinstance(target, list) and len(target) == len(inputs)
        return True

    @property
    def _needs_one(self) -> bool:
        """Whether the model cannot be called without an argument and can with one."""
        assert self.signature is not None
        kinds = inspect.Parameter
        places = [p for p in self.signature.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        required = [p for p in places if p.default is kinds.empty]
        return len(required) == 1 or len(places) <= 1

    def _from_pair(self, raw: tuple[Any, ...] | list[Any]) -> Batch:
        *inputs, target = raw
        size = _size(inputs, target)
        kwargs: dict[str, Any] = {}
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            found, kwargs = self._called_with(dict(inputs[0]))
            inputs = [*found]
        elif len(inputs) == 1 and isinstance(inputs[0], tuple | list) and not self._takes_list(inputs[0], target):
            inputs = list(inputs[0])
        if self.own_loss:
            kwargs[self.target_key] = target
        return Batch(tuple(inputs), kwargs, target, size)


def _size(inputs: Any, target: Any) -> int:
    """How many samples a batch has: the first size of its inputs; where they disagree (nodes and edges) that of the targets.

    Lists of equal length, as detectors take them, hold one sample in each place.
    """
    lists = [inputs, *inputs] if isinstance(inputs, tuple | list) else [*inputs.values()] if isinstance(inputs, Mapping) else []
    if isinstance(target, list) and any(isinstance(part, list) and len(part) == len(target) for part in lists):
        return len(target)
    sizes = [t.shape[0] for _, t in named_tensors(inputs) if t.ndim]
    targets = target.shape[0] if isinstance(target, Tensor) and target.ndim else None
    if not sizes or (targets and len(set(sizes)) > 1):
        return targets or 1
    return sizes[0]


def _check_batch(batch: Batch, index: int, *, finite: bool) -> None:
    for name, t in named_tensors({**batch.inputs, "target": batch.target}):
        if t.is_meta:
            raise ValueError(f"data: {name} of batch {index} lies on the meta device and has no values; load the data first.")
        if finite and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            bad = int((~torch.isfinite(t)).sum())
            raise NonFiniteError(f"data: {name} of batch {index} holds {bad} NaN or inf values; remove or impute them.")


class Data:
    """Batches that can be iterated any number of times. `varying`: their source gives other samples at each reading."""

    def __init__(
        self, batches: list[Batch] | None, source: Iterable[Any] | None, parse: BatchParser, *, varying: bool = False
    ) -> None:
        self._batches, self._source, self._parse, self.varying = batches, source, parse, varying
        self._fingerprints: list[float] = []
        self.sizes = [batch.size for batch in batches or ()]  # how many samples each batch has
        if batches is None:
            for batch in self._read():
                self._fingerprints.append(fingerprint(batch))
                self.sizes.append(batch.size)
            for _ in self:  # the probe: a second pass must equal the first
                pass

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the inputs, where they came as a table with named columns."""
        return self._parse.columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        """What the user calls the classes 0, 1, ..., where the targets came as categories."""
        return self._parse.classes

    @property
    def held(self) -> bool:
        return self._batches is not None

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is not None:
            yield from self._batches
            return
        count = 0
        for i, batch in enumerate(self._read()):
            if i >= len(self._fingerprints) or fingerprint(batch) != self._fingerprints[i]:
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
            batch = self._parse(raw, i)
            if batch.size:
                yield batch


def fingerprint(batch: Batch) -> float:
    """A number that changes when the batch does; the position of each value counts."""
    total = 0.0
    for _, t in named_tensors({**batch.inputs, "target": batch.target}):
        flat = t.detach().reshape(-1).double()
        total = 0.7 * total + float(flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64, device=flat.device))
    return total


def read_data(data: Any, parse: BatchParser, *, hold_bytes: int = HOLD_BYTES) -> Data:
    """Accept `(inputs, targets)`, a mapping, a list of batches, or anything that yields batches."""
    if _is_one_batch(data, parse) and not (parse.own_loss and isinstance(data, list)):
        return Data(_not_empty([parse(data, 0)]), None, parse)
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
        if i >= ENDLESS and not has_length(data):
            raise NotRepeatableError(f"data: {ENDLESS:,} batches and no end in sight. {_FIRST_FEW}")
        if total > limit:
            if not has_length(data):
                size = f"{hold_bytes / 2**30:.1f} GB"
                raise NotRepeatableError(f"data: more than {size} from a generator, which may be endless. {_FIRST_FEW}")
            held.clear()
            return Data(None, data, parse)
    return Data(_not_empty(held), None, parse, varying=_samples_vary(data, parse))


def _samples_vary(data: Any, parse: BatchParser) -> bool:
    """Whether a loader's data set gives another sample when it is asked for the same one again, as random transforms do."""
    dataset: Any = getattr(data, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not has_length(dataset) or not len(dataset):
        return False

    def read() -> list[Tensor]:
        return [t for _, t in named_tensors(parse._as_tensors(dataset[0], 0))]

    try:
        first = read()
        return any(len(again) != len(first) or not all(map(torch.equal, again, first)) for again in (read() for _ in range(6)))
    except Exception:  # a data set that is not asked by numbers
        return False


def _not_empty(batches: list[Batch]) -> list[Batch]:
    """Those with samples: the last batch of a loader may have none."""
    full = [batch for batch in batches if batch.size]
    if not full:
        raise ValueError("data is empty: give at least one batch with at least one sample.")
    return full


#: Batches read from a source without a length before it is taken for endless.
ENDLESS = 100_000
_FIRST_FEW = "Remedy: pass the first batches as a list, list(itertools.islice(data, 100))."


def has_length(data: Any) -> bool:
    """Whether a source says how many batches it has, as a loader of an `IterableDataset` does not."""
    try:
        return len(data) >= 0
    except TypeError:
        return False


def _is_one_batch(data: Any, parse: BatchParser) -> bool:
    if isinstance(data, Mapping) or is_frame(data):
        return True
    if not isinstance(data, tuple | list) or len(data) < 2:
        return False
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Mapping) for part in data):
        return not parse.own_loss and parse.target_key not in data[0]  # inputs and targets, each by name
    # (X, y), (inputs mapping, y), (x1, x2, y), (X, (y1, y2)): the last item or the first is a bare tensor. A list of batches
    # begins and ends with a pair or mapping, except that a model with its own loss may take bare tensors.
    return is_bare(data[-1]) or (is_bare(data[0]) and not parse.own_loss)


def is_bare(item: Any) -> bool:
    """Whether this is numbers, not a collection of them: a tensor, an array or a table."""
    return isinstance(item, Tensor) or is_array(item)


def _leaves(tree: Any) -> Iterator[Any]:
    """What nested tuples, lists and mappings hold."""
    if isinstance(tree, Mapping | tuple | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(part)
    else:
        yield tree


def _embeds(model: nn.Module) -> bool:
    """Whether a model has a table of vectors that whole numbers are looked up in."""
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())


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
