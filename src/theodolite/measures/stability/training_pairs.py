"""Training sets that differ in one example, and both models of every pair trained in lock-step: same start, same order."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from theodolite.arguments import a_function, checked, count, seed, shown, whole
from theodolite.errors import NonFiniteError, NotRepeatableError
from theodolite.interrupts import called_within
from theodolite.problem.accuracy import right_answers
from theodolite.problem.arguments import a_finite_tensor, a_tensor, of_dimensions, tensors_fit
from theodolite.problem.batches import is_bare
from theodolite.problem.tables import as_tensors
from theodolite.results import Row
from theodolite.training import Fleet, FleetTrace
from theodolite.training.fleets.fleet import AnySchedule
from theodolite.training.schedules import epoch_order

Examples = tuple[Tensor, Tensor]

#: Samples of a data set that are read a second time.
READ_TWICE = 256


# The pools that training sets are drawn from: whatever the user gave, as tensors that do not change.


@dataclass(frozen=True)
class Pool:
    """Examples `(inputs, targets)`, sample axis first."""

    inputs: Tensor
    targets: Tensor
    name: str

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Some examples."""
        return self.inputs[index], self.targets[index]

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def in_types_of(self, other: Pool) -> Pool:
        """Floats in the width of the other pool; what holds other kinds of numbers is refused, for a cast would change them."""
        parts = {"inputs": (self.inputs, other.inputs), "targets": (self.targets, other.targets)}
        for part, (mine, theirs) in parts.items():
            whole = part == "targets" and _is_whole(mine) and _is_whole(theirs)
            if mine.dtype != theirs.dtype and not whole and not (mine.is_floating_point() and theirs.is_floating_point()):
                raise ValueError(
                    f"The {part} of {other.name} and {self.name} must hold the same kind of numbers, for one is exchanged. "
                    f"Got {theirs.dtype} and {mine.dtype}: convert one pool as the other was, scaling included."
                )
        inputs, targets = (mine.to(theirs.dtype) if mine.is_floating_point() else mine for mine, theirs in parts.values())
        return replace(self, inputs=inputs, targets=targets)

    def followed_by(self, other: Pool) -> tuple[Tensor, Tensor]:
        """The examples of both, those of `other` behind: the numbers of the first stay."""
        pairs = zip(self.both, other.in_types_of(self).both, strict=True)
        try:
            inputs, targets = (torch.cat(pair) for pair in pairs)
        except RuntimeError as error:
            shapes = f"{tuple(self.inputs.shape[1:])} and {tuple(other.inputs.shape[1:])}"
            raise ValueError(
                f"{self.name} and {other.name} must hold examples of one shape, for one is exchanged. Inputs are {shapes}, "
                f"targets {tuple(self.targets.shape[1:])} and {tuple(other.targets.shape[1:])}."
            ) from error
        return inputs, targets


def read_pool(data: Any, name: str) -> Pool:
    """Accept `(inputs, targets)`, a `Dataset`, a plain `DataLoader` (its data set is taken), or a list of batches or of samples.

    A data set that gives other numbers when it is read again (augmentation, moving data) is refused: the size of a training set
    must be known, and the run must be repeatable.
    """
    if isinstance(data, DataLoader):
        data = _set_behind(data, name)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, IterableDataset | Iterator):
        raise ValueError(
            f"{name} can be read only once or in one order; give tensors (inputs, targets) or a data set with an index."
        )
    if isinstance(data, tuple) and len(data) == 2 and all(map(is_bare, data)):
        inputs, targets = as_tensors(*data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | dict):
        inputs, targets = _read_samples(data, name)
    else:
        raise ValueError(f"{name} must be tensors (inputs, targets), a data set, or a loader of one. Got {type(data).__name__}.")
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise ValueError(
            f"{name} must have as many inputs as targets. Got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    if not len(inputs):
        raise ValueError(f"{name} is empty: give at least one example.")
    for part, t in (("inputs", inputs), ("targets", targets)):
        if t.is_meta:
            raise ValueError(f"{name}: its {part} lie on the meta device and have no values; load the data first.")
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise NonFiniteError(
                f"{name}: its {part} hold {int((~torch.isfinite(t)).sum())} NaN or inf values; remove or impute them."
            )
    return Pool(inputs.detach(), targets.detach(), name)


def _set_behind(loader: DataLoader[Any], name: str) -> Any:
    """The data set of a loader that gives all its samples as they are; other loaders are refused."""
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset):
        return data
    chosen = batches.sampler if type(batches) is BatchSampler else batches
    every = type(chosen) is SequentialSampler or (type(chosen) is RandomSampler and not chosen.replacement)
    if not every or len(chosen) != len(data):  # type: ignore[arg-type]
        raise ValueError(
            f"{name} is a loader whose {type(chosen).__name__} need not give every sample once; give its data set, or tensors "
            "(inputs, targets) of the samples that count."
        )
    if loader.collate_fn is not default_collate:
        raise ValueError(
            f"{name} is a loader with a collate_fn of its own, which makes the examples; give its data set, or tensors."
        )
    return data


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _read_samples(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """All samples of a data set, or of a list of batches, stacked."""
    size = len(data)
    if not size:
        raise ValueError(f"{name} is empty: give at least one example.")
    first = data[0]
    if not isinstance(first, Sequence) or len(first) != 2:
        raise ValueError(f"The examples of {name} must be pairs (input, target). The first is a {type(first).__name__}.")
    samples = [data[i] for i in range(size)]
    for i in range(0, size, max(1, size // READ_TWICE)):
        if not all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(samples[i], data[i], strict=True)):
            raise NotRepeatableError(
                f"{name}: example {i} changed between two readings. Usual causes: random augmentation, a data set that keeps a "
                "state. Remedy: fixed transforms, or tensors (inputs, targets)."
            )
    if isinstance(data, list) and all(isinstance(part, Tensor) and part.ndim for part in first):  # batches
        inputs, targets = (torch.cat(list(column)) for column in zip(*samples, strict=True))
    else:
        inputs, targets = default_collate(samples)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(f"The inputs and targets of {name} must be one tensor each.")
    return inputs, targets


@dataclass(frozen=True)
class Swap:
    """S is `members` (m,) of the training pool; S' has example `z` of the test pool at place `i`."""

    members: Tensor
    i: int
    z: int

    def rows(self, pool: int) -> Tensor:
        """(2, m): both sets as numbers in the training pool of that size, followed by the test pool."""
        both = self.members.repeat(2, 1)
        both[1, self.i] = pool + self.z
        return both


def draw_swap(train_size: int, test_size: int, m: int, rng: np.random.Generator) -> Swap:
    """m examples without repetition, one of the test pool, and a place, all uniform."""
    members = rng.choice(train_size, m, replace=False)
    return Swap(torch.from_numpy(members.astype(np.int64)), z=int(rng.integers(test_size)), i=int(rng.integers(m)))


def draw_swaps(train_size: int, test_size: int, m: int, pairs: int, seed: int) -> list[Swap]:
    """So many pairs; further ones do not change the first. They depend on the seed, the size and the number of the pair alone."""
    return [draw_swap(train_size, test_size, m, np.random.default_rng([seed, m, pair])) for pair in range(pairs)]


@checked(m=count, rng=lambda name, value: value if isinstance(value, np.random.Generator) else whole(name, value))
def make_pair(train_pool: Any, test_pool: Any, m: int, rng: np.random.Generator | int) -> tuple[Examples, Examples, int, int]:
    """A training set S of m examples, S' with one of them exchanged, its place i, and the number z of what came.

    `rng` is a generator of NumPy, or the seed of one.

    >>> pool = torch.arange(6.0)[:, None], torch.zeros(6)
    >>> (x, _), (x2, _), i, z = make_pair(pool, (torch.full((2, 1), 9.0), torch.ones(2)), 4, np.random.default_rng(0))
    >>> int((x != x2).sum()), float(x2[i])
    (1, 9.0)
    """
    train, test = read_pool(train_pool, "train_pool"), read_pool(test_pool, "test_pool")
    check_size(m, len(train))
    swap = draw_swap(len(train), len(test), m, np.random.default_rng(rng))
    inputs, targets = train.followed_by(test)
    first, second = ((inputs[rows], targets[rows]) for rows in swap.rows(len(train)))
    return first, second, swap.i, swap.z


def check_size(m: Any, pool: int) -> None:
    """Refuse a training set larger than the pool."""
    if not isinstance(m, int | np.integer) or isinstance(m, bool) or not 1 <= m <= pool:
        raise ValueError(
            f"A training set (sizes, or m) must hold 1 to {pool} examples, as many as the training pool has. Got {shown(m)}."
        )


# When an example is seen: the batches of the common order that hold a given place of the training set.


def batches_per_epoch(m: int, batch_size: int, drop_last: bool) -> int:
    """Batches in which m examples are seen once; one that is incomplete counts unless it is left out.

    >>> batches_per_epoch(23, 5, drop_last=True), batches_per_epoch(23, 5, drop_last=False)
    (4, 5)
    """
    width = min(batch_size, m)
    return m // width if drop_last else -(-m // width)


@checked(places=of_dimensions(1), m=count, batch_size=count, steps=whole, order_seed=seed)
@tensors_fit
def visiting_steps(places: Tensor, m: int, batch_size: int, steps: int, *, order_seed: int, drop_last: bool = True) -> Tensor:
    """Whether step t sees place i of the training set: bool (P, T) for `places` (P,), t = 0 .. T-1.

    The order is that of a fleet with the same seed. An example left out by `drop_last` is not seen in that epoch.

    >>> visiting_steps(torch.tensor([0]), 4, 2, 4, order_seed=0).sum()        # two epochs of two batches: seen twice
    tensor(2)
    """
    width = min(batch_size, m)
    batches = batches_per_epoch(m, batch_size, drop_last)
    seen = torch.zeros(len(places), batches * (-(-steps // batches)), dtype=torch.bool)
    if width == m:
        seen[:] = True
        return seen[:, :steps]
    rows = torch.arange(len(places))
    for epoch in range(-(-steps // batches)):
        slot = torch.argsort(epoch_order(order_seed, epoch, m))[places] // width  # the batch of each place, (P,)
        kept = slot < batches
        seen[rows[kept], epoch * batches + slot[kept]] = True
    return seen[:, :steps]


#: Quantiles of the differences of losses, by the name of their column.
QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}
#: Numbers held at once while pairs are evaluated.
HELD = 2**25


# What two solutions do on the same examples: stability, gap, distance, all in float64.


@checked(loss=a_function, outputs=a_tensor, targets=a_finite_tensor)
def example_losses(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every example in float64, never clipped: (n,) from `outputs` (n, ...) and `targets` (n, ...).

    Their mean is the loss of all. Where labels have weights (0 for those ignored) that is sum l / sum w, so an example has its
    own sum of l over the mean of the examples' sums of w. A loss without `reduction` is taken of each example alone.

    >>> example_losses(nn.CrossEntropyLoss(), torch.tensor([[0.0, 0.0], [200.0, 0.0]]), torch.tensor([0, 1]))
    tensor([  0.6931, 200.0000], dtype=torch.float64)
    """
    try:
        return _example_losses(loss, outputs.double(), targets.double() if targets.is_floating_point() else targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ValueError(
            f"loss cannot be taken of outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}: {text}."
        ) from error


def _example_losses(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) in ("mean", "sum", "none"):
        each: Any = copy.deepcopy(loss).double()
        each.reduction = "none"
        found: Tensor = each(outputs, targets)
        if found.ndim and len(found) == len(outputs):  # others have a reduction of their own
            weights = label_weights(each, targets)
            found = found.reshape(len(found), -1)
            return found.mean(1) if weights is None else found.sum(1) / mean(weights)
    found = vmap(lambda output, target: loss(output[None], target[None]))(outputs, targets)
    return found.reshape(len(outputs), -1).mean(1)


def label_weights(loss: Any, targets: Tensor) -> Tensor | None:
    """What the labels of each example (n, ...) count for in torch's mean, summed to (n,); None where all count alike.

    >>> label_weights(nn.CrossEntropyLoss(), torch.tensor([[0, 1, -100], [2, 2, 2]]))
    tensor([2., 3.], dtype=torch.float64)
    """
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or targets.is_floating_point():
        return None
    ignored = targets == loss.ignore_index
    each = torch.ones_like(targets, dtype=torch.float64)
    if loss.weight is not None:
        each = loss.weight.double()[targets.masked_fill(ignored, 0).long()]
    return each.masked_fill(ignored, 0.0).reshape(len(targets), -1).sum(1)


def mean(losses: Tensor) -> float:
    """The mean, rounded once: it does not depend on the order of the examples."""
    return math.fsum(losses.tolist()) / len(losses) if bool(torch.isfinite(losses).all()) else float(losses.mean())


def error_rate(loss: Any, outputs: Tensor, targets: Tensor) -> float:
    """Share of wrong answers, NaN where the targets name no classes."""
    right = right_answers(outputs, targets, loss)
    return float("nan") if right is None else 1.0 - float(right.double().mean())


def differences(first: Tensor, second: Tensor, z: int | None = None) -> dict[str, float]:
    """Stability of a pair from the losses (n,) of both solutions on the evaluation examples; `z` is left out of `stab_excl_z`.

    >>> found = differences(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 4.0]), z=2)
    >>> found["stab"], found["stab_excl_z"], found["worst"]
    (1.0, 0.5, 2)
    """
    gaps = (first - second).abs()
    others = gaps if z is None else torch.cat([gaps[:z], gaps[z + 1 :]])
    worst = int(gaps.argmax())
    levels = torch.quantile(gaps, gaps.new_tensor(list(QUANTILES.values())))
    return {
        "stab": float(gaps[worst]),
        "stab_excl_z": float(others.max()) if len(others) else 0.0,
        "worst": worst,
        **dict(zip(QUANTILES, levels.tolist(), strict=True)),
    }


def distances(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distance and norms of the parameters of all pairs, (P,) each, from stacks (2P, *shape) whose rows 2p, 2p+1 are a pair.

    Buffers (running statistics) do not belong to them.
    """
    flat = [p.detach().double().flatten(1) for p in parameters.values()]
    squares = [
        sum((part(p) ** 2).sum(1) for p in flat) for part in (lambda p: p[::2], lambda p: p[1::2], lambda p: p[::2] - p[1::2])
    ]
    norm, other, apart = (torch.as_tensor(square).sqrt() for square in squares)
    middle = (norm + other) / 2
    relative = torch.where(apart == 0, torch.zeros_like(apart), apart / middle)
    return {"dist": apart, "norm_S": norm, "norm_S2": other, "ndist": relative}


@dataclass(frozen=True)
class Recipe:
    """The algorithm whose stability is measured: a deterministic map from a training set to parameters.

    `optimizer` and `settings` are those of `Fleet`. `steps` is the number of updates, the most of them where `loss_target` (mean
    batch loss over an epoch) ends a run earlier.
    """

    factory: Any
    optimizer: Any
    loss: Any
    steps: int
    batch_size: int
    init_seed: int = 0
    order_seed: int = 0
    drop_last: bool = True
    schedule: AnySchedule = None
    loss_target: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def fleet(self, replicas: int) -> Fleet:
        """Replicas that start bitwise equal."""
        seeds = [self.init_seed] * replicas
        fleet = Fleet(self.factory, seeds, loss=self.loss, optimizer=self.optimizer, bitwise=True, **self.settings)
        for name, p in {**fleet.parameters, **fleet.buffers}.items():
            if not torch.equal(p, p[:1].expand_as(p)):
                raise NotRepeatableError(
                    f"factory({self.init_seed}) gave other weights when called again ({name}). It must depend on its seed and on "
                    "torch's generator alone, which is seeded before each call."
                )
        return fleet

    def batches(self, m: int) -> int:
        """Updates of an epoch on m examples."""
        return batches_per_epoch(m, self.batch_size, self.drop_last)

    def one_by_one(self) -> Recipe:
        """The same without vectorisation."""
        return replace(self, settings={**self.settings, "route": "loop"})

    def train(self, fleet: Fleet, data: tuple[Tensor, Tensor], index: Tensor, **options: Any) -> FleetTrace:
        options.setdefault("steps", self.steps)
        stop = None if self.loss_target is None else LossTarget(self.loss_target, self.batches(index.shape[1]))
        return fleet.train(
            data,
            index=index,
            batch_size=min(self.batch_size, index.shape[1]),
            order_seeds=self.order_seed,
            drop_last=self.drop_last,
            schedule=self.schedule,
            stop=stop,
            **options,
        )


class LossTarget:
    """Ends the run of each replica whose mean batch loss over the last epoch is at most `target`."""

    def __init__(self, target: float, batches: int) -> None:
        self.target, self.batches = target, batches
        self._seen: Tensor | None = None  # (E, R), the last epoch

    def __call__(self, step: int, losses: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.full((self.batches, len(losses)), torch.inf, dtype=torch.float64)
        known = ~torch.isnan(losses)  # others are frozen, or belong to another chunk
        self._seen[step % self.batches, known] = losses[known].double()
        return self._seen.mean(0) <= self.target


@dataclass(frozen=True)
class Bench:
    """The pools, and the examples on which pairs are compared: `eval_rows` (n,) of the test pool."""

    train: Pool
    test: Pool
    eval_rows: Tensor
    joined: tuple[Tensor, Tensor]

    @property
    def evaluation(self) -> tuple[Tensor, Tensor]:
        return self.test.part(self.eval_rows)

    def is_evaluation(self, members: Tensor) -> bool:
        """Whether these examples of the training pool are those that pairs are compared on."""
        if len(members) != len(self.eval_rows):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.train.part(members.sort().values), self.evaluation, strict=True))

    def place_of(self, z: int) -> int | None:
        """Where example z of the test pool stands among those evaluated."""
        found = (self.eval_rows == z).nonzero()
        return int(found[0]) if len(found) else None


def null_swap(recipe: Recipe, bench: Bench, swaps: Sequence[Swap], steps: int) -> tuple[str, Recipe]:
    """Train every pair on two equal sets; says what was done, and gives the recipe by which they end bitwise equal.

    Without this the measured stability would be the chaos of rounding. A vectorised program that lets them part gives way to
    one replica after the other; where these part too an error is raised.
    """
    index = torch.cat([swap.members.repeat(2, 1) for swap in swaps])
    _check_repeatable(recipe, bench, index[:2], min(steps, 3))
    fleet = recipe.fleet(len(index))
    trace = recipe.train(fleet, bench.joined, index, steps=steps, progress=False)
    tensors = {**fleet.parameters, **fleet.buffers, "outputs": fleet.outputs(bench.evaluation)}
    apart = {name: (t[::2].double() - t[1::2].double()).abs().max() for name, t in tensors.items() if not _equal(t[::2], t[1::2])}
    if not apart:
        return f"{len(swaps)} pairs on equal data stayed bitwise equal over {steps} steps by {trace.route}", recipe
    if trace.route != "loop":
        return null_swap(recipe.one_by_one(), bench, swaps, steps)
    name = max(apart, key=lambda key: float(apart[key]))
    raise _not_repeatable(steps, f"{name} by up to {float(apart[name]):.3g}")


def _check_repeatable(recipe: Recipe, bench: Bench, index: Tensor, steps: int) -> None:
    """A few steps twice, one run after the other: what a model draws for all replicas at once shows only so."""
    ends = []
    for _ in range(2):
        fleet = recipe.fleet(len(index))
        recipe.train(fleet, bench.joined, index, steps=steps, progress=False)
        ends.append({**fleet.parameters, **fleet.buffers})
    for name, t in ends[0].items():
        if not _equal(t, ends[1][name]):
            raise _not_repeatable(steps, name)


def _not_repeatable(steps: int, what: str) -> NotRepeatableError:
    return NotRepeatableError(
        f"Two runs on the same data differ after {steps} steps: {what}. A stability cannot be measured. Usual causes: a model "
        "that draws random numbers by other means than torch's generator, or kernels that are not deterministic "
        "(torch.use_deterministic_algorithms(True) names them)."
    )


def train_pairs(
    recipe: Recipe, bench: Bench, swaps: Sequence[Swap], checkpoints: Sequence[int], *, progress: bool | None = None
) -> tuple[Fleet, FleetTrace, list[Row]]:
    """Train all pairs of one size; the rows hold every metric at every checkpoint and at the end.

    A control is trained with them: the first model once more, at the far end of the stack. Should it end one bit apart, the
    pairs are trained anew one after the other.
    """
    index = torch.cat([swap.rows(len(bench.train)) for swap in swaps])
    index = torch.cat([index, index[:1]])
    fleet = recipe.fleet(len(index))
    looks: list[tuple[int, list[Row]]] = []

    def look(step: int, fleet: Fleet) -> dict[str, Tensor]:
        looks.append((step, compare_pairs(fleet, recipe, bench, swaps)))
        return {}

    trace = recipe.train(fleet, bench.joined, index, every=list(checkpoints), record=look, progress=progress)
    if trace.route != "loop" and not all(_equal(t[0], t[-1]) for t in {**fleet.parameters, **fleet.buffers}.values()):
        return train_pairs(recipe.one_by_one(), bench, swaps, checkpoints, progress=progress)
    return fleet, trace, [row for step, table in looks for row in _placed(table, step, recipe, swaps, trace)]


def _placed(table: list[Row], step: int, recipe: Recipe, swaps: Sequence[Swap], trace: FleetTrace) -> Iterator[Row]:
    """The rows of a checkpoint with where they come from."""
    m = len(swaps[0].members)
    places = torch.tensor([swap.i for swap in swaps])
    seen = visiting_steps(places, m, recipe.batch_size, recipe.steps, order_seed=recipe.order_seed, drop_last=recipe.drop_last)
    for pair, (swap, metrics) in enumerate(zip(swaps, table, strict=True)):
        both = slice(2 * pair, 2 * pair + 2)
        taken = min([step, *(at for at in (*trace.diverged_at[both], *trace.stopped_at[both]) if at is not None)])
        lost = any(at is not None and at <= step for at in trace.diverged_at[both])
        place = {"m": m, "pair": pair, "step": step, "i": swap.i, "z": swap.z, "visits": int(seen[pair, :taken].sum())}
        yield {**place, **metrics, "diverged": lost, "steps_taken": taken}


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; what is not a number is equal to its like."""
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


@called_within(torch.no_grad)
def compare_pairs(fleet: Fleet, recipe: Recipe, bench: Bench, swaps: Sequence[Swap]) -> list[Row]:
    """All metrics of all pairs as they are now."""
    apart = distances({name: p[: 2 * len(swaps)] for name, p in fleet.parameters.items()})
    inputs, targets = bench.evaluation
    sample = fleet.outputs((inputs[:1], targets[:1]), replicas=[0])
    m = len(swaps[0].members)
    at_once = max(1, HELD // (2 * sample[0].numel() * (len(inputs) + m)))
    rows: list[Row] = []
    for first in range(0, len(swaps), at_once):
        some = swaps[first : first + at_once]
        numbers = range(2 * first, 2 * (first + len(some)))
        tested = fleet.outputs((inputs, targets), replicas=numbers)
        members = torch.stack([swap.members for swap in some])
        fitted = fleet.outputs(bench.train.both, index=members, replicas=numbers[::2])
        for p, swap in enumerate(some):
            own = fitted[p], bench.train.targets[swap.members]
            if bench.is_evaluation(swap.members):  # one pass for both, since another may round otherwise
                own = tested[2 * p], targets
            found = _metrics(recipe.loss, bench, swap, tested[2 * p : 2 * p + 2], own)
            rows.append({**found, **{name: float(t[first + p]) for name, t in apart.items()}})
    return rows


def _metrics(loss: Any, bench: Bench, swap: Swap, tested: Tensor, own: tuple[Tensor, Tensor]) -> Row:
    """Of one pair, from the outputs (2, n, ...) on the evaluation examples, and outputs and targets (m, ...) on S."""
    targets = bench.test.targets[bench.eval_rows]
    first, second = (example_losses(loss, outputs, targets) for outputs in tested)
    train_loss, train_error = mean(example_losses(loss, *own)), error_rate(loss, *own)
    test_loss, test_error = mean(first), error_rate(loss, tested[0], targets)
    found = differences(first, second, bench.place_of(swap.z))
    return {
        **found,
        "worst": int(bench.eval_rows[int(found["worst"])]),
        "gap_loss": test_loss - train_loss,
        "gap_01": test_error - train_error,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "train_accuracy": 1 - train_error,
        "test_accuracy": 1 - test_error,
    }
