"""Both models of every pair trained in lock-step: same start, same order, training sets that differ in one example."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from theodolite.errors import NotRepeatableError
from theodolite.measures.stability.pairs import Pool, Swap, batches_per_epoch, visiting_steps
from theodolite.problem.accuracy import right_answers
from theodolite.results import Row
from theodolite.training import Fleet, FleetTrace
from theodolite.training.fleets.fleet import AnySchedule

#: Quantiles of the differences of losses, by the name of their column.
QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}
#: Numbers held at once while pairs are evaluated.
HELD = 2**25


# What two solutions do on the same examples: stability, gap, distance, all in float64.


def example_losses(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every example in float64, never clipped: (n,) from `outputs` (n, ...) and `targets` (n, ...).

    Their mean is the loss of all. Where labels have weights (0 for those ignored) that is sum l / sum w, so an example has its
    own sum of l over the mean of the examples' sums of w. A loss without `reduction` is taken of each example alone.

    >>> example_losses(nn.CrossEntropyLoss(), torch.tensor([[0.0, 0.0], [200.0, 0.0]]), torch.tensor([0, 1]))
    tensor([  0.6931, 200.0000], dtype=torch.float64)
    """
    outputs = outputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
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


@torch.no_grad()
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
