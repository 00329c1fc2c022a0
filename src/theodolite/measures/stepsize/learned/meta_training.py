"""`meta_train`: a learned optimizer, trained by what the runs that it steers come to.

A problem is a fresh subset of the data with its classes renamed at random, and a network before training. Several problems run in
lockstep as one program. A trajectory is cut into segments; after each the mean loss along it, on the training data or on
validation data, is differentiated through the steps of the segment in the weights of the optimizer, which then take one step of
RMSProp. The next segment goes on from where the last one ended.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from theodolite.arguments import a_path, checked, count, fraction, nonnegative, one_of, optional, positive, shown, whole
from theodolite.arguments import seed as a_seed
from theodolite.errors import ArgumentError
from theodolite.interrupts import unbroken
from theodolite.measures.data_audit.discreteness import sample_keys
from theodolite.measures.stability.training_pairs import Pool, read_pool
from theodolite.measures.stepsize.learned.learned_optimizer import LearnedOptimizer, OptimizerNetwork, as_network, learned_step
from theodolite.problem import Problem
from theodolite.problem.arguments import a_factory, a_loss
from theodolite.problem.batches import BatchParser
from theodolite.problem.calling import Loss
from theodolite.problem.derivatives.second_order import quiet_vmap
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import number, plural
from theodolite.training.fleets.data import FleetBatch, FleetFeed
from theodolite.training.fleets.routes import VmapRoute
from theodolite.training.fleets.state import FleetState, stack_replicas
from theodolite.training.interruption import deferred_interrupt, load_state, save_state, tensor_check_sums

Split = Literal["train", "valid"]

#: Weights times problems from which on the features of a step are computed again in the backward pass, not kept.
RECOMPUTED_FROM = 2**16


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetaTraining(Result):
    """A trained optimizer, and how its training went.

    `network` goes to `LearnedOptimizer`, or to a `Fleet` as its `optimizer`. `trace` has a row for each meta-update: the group of
    problems, the trajectory and the segment, its `steps`, the mean loss along it (`objective`) and the norm of the meta-gradient.
    `samples` and `valid_samples` are those of a problem, `inner_steps` the steps of all problems together, `skipped` the
    meta-updates whose gradient was not finite in some entry.
    """

    network: OptimizerNetwork
    trace: tuple[Row, ...]
    split: str
    problems: int
    samples: int
    valid_samples: int
    inner_steps: int
    skipped: int

    def optimizer(self, params: Any, *, lr: float = 1.0) -> LearnedOptimizer:
        """The trained optimizer for the parameters of a model."""
        return LearnedOptimizer(params, self.network, lr=lr)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.trace]

    @property
    def objectives(self) -> tuple[float, float]:
        """The mean loss along the first trajectory, and along the last one; infinite where a run diverged."""
        ends = [[row for row in self.trace if _whose(row) == _whose(end)] for end in (self.trace[0], self.trace[-1])]
        first, last = (statistics.fmean(row["objective"] for row in rows) for rows in ends)
        return tuple(value if value == value else math.inf for value in (first, last))  # type: ignore[return-value]

    def sentence(self) -> str:
        first, last = map(number, self.objectives)
        on = f"{self.valid_samples} validation samples" if self.split == "valid" else "the samples trained on"
        lost = f" {plural(self.skipped, 'meta-update')} had a gradient that was not finite." if self.skipped else ""
        return (
            f"After {plural(len(self.trace), 'meta-update')} on {plural(self.problems, 'problem')} of {self.samples} samples, "
            f"scored on {on}, the learned optimizer's mean loss along a run went from {first} to {last}.{lost}"
        )


def _whose(row: Row) -> tuple[int, int]:
    return row["group"], row["trajectory"]


def _two_numbers(name: str, value: Any) -> tuple[int, float]:
    """A number and the mean of what is added to it."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair, the least number and the mean of what is added to it. Got {shown(value)}.")
    least = 2 if name == "length" else 1  # the loss is taken before each step: only a second one depends on the optimizer
    try:
        first, more = whole(name, value[0]), nonnegative(name, value[1])
    except ValueError:
        first, more = 0, 0.0
    if first < least:
        raise ValueError(
            f"{name} must be a pair, a whole number of at least {least} and a mean of 0 or more. Got {shown(value)}."
        )
    return first, more


@checked(
    factory=a_factory,
    loss=a_loss,
    split=one_of("train", "valid"),
    samples=count,
    valid_samples=count,
    problems=count,
    trajectories=count,
    together=count,
    segments=_two_numbers,
    length=_two_numbers,
    batch_size=count,
    network=optional(as_network),
    lr=positive,
    decay=fraction,
    eps=positive,
    clip=positive,
    checkpoint=a_path,
    checkpoint_every=count,
    seed=a_seed,
)
def meta_train(
    factory: Callable[[int], nn.Module],
    train: Any,
    valid: Any = None,
    *,
    loss: Loss,
    split: Split = "valid",
    samples: int | None = None,
    valid_samples: int | None = None,
    permute: bool | None = None,
    problems: int = 320,
    trajectories: int = 1,
    together: int = 8,
    segments: tuple[int, float] = (8, 12),
    length: tuple[int, float] = (20, 10),
    batch_size: int = 32,
    network: OptimizerNetwork | MetaTraining | str | PathLike[str] | None = None,
    lr: float = 0.01,
    decay: float = 0.9,
    eps: float = 1e-10,
    clip: float = 1e4,
    detach: bool = True,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 20,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> MetaTraining:
    """Train an optimizer on many short trainings of a small network; the result steers anyone's.

    The defaults take minutes for networks of some thousand weights and give some 800 meta-updates: with much fewer, an optimizer
    may still lose late in a run what the network has learned. Wang and others (2021), and
    Metz and others before them, have problems=100, trajectories=3, together=1, segments=(10, 30), length=(50, 100).

    Args:
        factory: seed -> the network before training. It must be one that can be vectorised: no dropout.
        train, valid: `(inputs, targets)` as tensors or tables, a data set, or a plain loader of one.
        loss: `(output, target) -> mean loss` of the networks.
        split: what a run is scored on: "valid" for samples that it does not train on, "train" for those that it does. The latter
            teaches to fit the samples, noise included, where they are few.
        samples, valid_samples: of one problem, drawn anew for each; default: all. Without `valid` both are drawn from `train`,
            half of it each where nothing is said.
        permute: rename the classes at random in each problem; None where targets are class labels.
        problems, trajectories: how many, and from how many starts each is trained.
        together: problems that run in lockstep and share their meta-updates.
        segments, length: of a trajectory, and the steps of a segment: the least number, and the mean of the exponential variable
            that is added to it.
        network: to go on from; default: an untrained one. `OptimizerNetwork.new(normalise="standard")` has other settings.
        lr, decay, eps, clip: of the RMSProp that trains the network; entries of its gradient are clipped at ±clip, and 0 where
            they are not finite.
        detach: leave out how the gradients of a run depend on its weights (second derivatives), which is what the sources do.
        checkpoint, checkpoint_every, resume: a folder for the state, after how many meta-updates it is saved, and whether to go
            on from it, bit by bit as an undisturbed run.

    Returns:
        The `MetaTraining`: `.network`, `.optimizer(model.parameters())`, the trace, `.plot()`.

    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> found = meta_train(
    ...     lambda seed: nn.Linear(3, 2), (x, (x[:, 0] > 0).long()), loss=nn.CrossEntropyLoss(), problems=2, together=2,
    ...     segments=(2, 0), length=(5, 0), progress=False,
    ... )
    >>> len(found.trace), found.inner_steps, found.samples, found.valid_samples
    (2, 20, 30, 30)
    """
    began = time.perf_counter()
    pools = _read_pools(train, valid, split)
    recipe = Recipe(
        split=split,
        size=_sizes(pools, split, samples, valid_samples),
        classes=_classes(pools, permute),
        problems=problems,
        trajectories=trajectories,
        together=min(together, problems),
        segments=segments,
        length=length,
        batch_size=batch_size,
        lr=lr,
        decay=decay,
        eps=eps,
        clip=clip,
        detach=detach,
        seed=seed,
    )
    start = OptimizerNetwork.new(seed=seed) if network is None else network
    assert isinstance(start, OptimizerNetwork)
    with unbroken(torch.inference_mode(False)), unbroken(torch.enable_grad()), quiet_vmap():
        run = _Run(factory, loss, pools, recipe, start)
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is not None:
            run.open(folder, resume=resume)
        with counting("meta-training", progress=progress, total=len(run.plan)) as counted, deferred_interrupt() as interrupted:
            counted(run.done)
            for _ in run.updates():
                counted(1)
                if folder is not None and (interrupted() or run.done % checkpoint_every == 0 or run.over):
                    save_state(folder, run.state())
                if interrupted():
                    raise KeyboardInterrupt
    return run.result(time.perf_counter() - began)


# What a meta-training does, and on what


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a meta-training.

    `size` are the samples of a problem, trained on and scored on apart; `classes` those whose labels are renamed, 0 for none.
    """

    split: Split
    size: tuple[int, int]
    classes: int
    problems: int
    trajectories: int
    together: int
    segments: tuple[int, float]
    length: tuple[int, float]
    batch_size: int
    lr: float
    decay: float
    eps: float
    clip: float
    detach: bool
    seed: int


class Pools(NamedTuple):
    """Samples to draw problems from; without `valid` both kinds come from `train`."""

    train: Pool
    valid: Pool | None


def _read_pools(train: Any, valid: Any, split: Split) -> Pools:
    pool = read_pool(train, "train")
    if valid is None:
        return Pools(pool, None)
    if split == "train":
        raise ArgumentError("valid is given, but split='train' scores runs on what they train on. Leave valid out, or the split.")
    other = read_pool(valid, "valid").in_types_of(pool)
    problems = [Problem(nn.Linear(1, 1), nn.MSELoss(), part.both, check=False) for part in (pool, other)]
    keys, others = map(sample_keys, problems)
    shared = int(torch.isin(others, keys).sum())
    if shared:
        raise ArgumentError(
            f"valid holds {shared} samples of train: what is trained on says nothing about new data. Remove them."
        )
    return Pools(pool, other)


def _sizes(pools: Pools, split: Split, samples: int | None, valid_samples: int | None) -> tuple[int, int]:
    """Samples of one problem: those that it trains on, and those apart that it is scored on."""
    there = len(pools.train)
    if split == "train":
        n, m = samples or there, 0
    elif pools.valid is not None:
        n, m = samples or there, valid_samples or len(pools.valid)
    else:
        n = samples or (there - (valid_samples or there // 2))
        m = valid_samples or min(n, there - n)
    if n + (m if pools.valid is None else 0) > there or n < 1 or (split == "valid" and m < 1):
        raise ArgumentError(
            f"samples and valid_samples must fit into the {there} samples of train. Got samples={samples}, "
            f"valid_samples={valid_samples} with split={split!r}."
        )
    if pools.valid is not None and m > len(pools.valid):
        raise ArgumentError(f"valid_samples must be at most {len(pools.valid)}, those of valid. Got {valid_samples}.")
    return n, m


def _classes(pools: Pools, permute: bool | None) -> int:
    targets = [pool.targets for pool in pools if pool is not None]
    labels = all(t.ndim == 1 and not t.is_floating_point() and t.dtype != torch.bool for t in targets)
    if permute and not labels:
        raise ArgumentError("permute renames classes, and the targets of train are no class labels. Leave permute out.")
    return int(max(t.max() for t in targets)) + 1 if labels and permute is not False else 0


def draw_problems(pools: Pools, recipe: Recipe, seeds: Sequence[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What P problems train on, inputs (P, n, ...) and targets (P, n, ...), and what they are scored on."""
    inner: list[tuple[Tensor, Tensor]] = []
    scored: list[tuple[Tensor, Tensor]] = []
    n, m = recipe.size
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(pools.train), generator=generator)
        others = order[n:] if pools.valid is None else torch.randperm(len(pools.valid), generator=generator)
        names = torch.randperm(recipe.classes, generator=generator) if recipe.classes else None
        mine = _renamed(pools.train.part(order[:n]), names)
        inner.append(mine)
        scored.append(mine if recipe.split == "train" else _renamed((pools.valid or pools.train).part(others[:m]), names))
    return _stacked(inner), _stacked(scored)


def _renamed(part: tuple[Tensor, Tensor], names: Tensor | None) -> tuple[Tensor, Tensor]:
    return part if names is None else (part[0], names[part[1].long()])


def _stacked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.stack(column) for column in zip(*parts, strict=True))
    return inputs, targets


@dataclass(frozen=True)
class Place:
    """One meta-update: problems `first` .. `end` in lockstep, the trajectory, the segment and its steps."""

    group: int
    first: int
    end: int
    trajectory: int
    segment: int
    steps: int


def plan_of(recipe: Recipe) -> list[Place]:
    """All meta-updates in order."""
    generator = torch.Generator().manual_seed(recipe.seed)
    places: list[Place] = []
    for group, first in enumerate(range(0, recipe.problems, recipe.together)):
        end = min(first + recipe.together, recipe.problems)
        for trajectory in range(recipe.trajectories):
            segments = range(_drawn(recipe.segments, generator))
            places += [Place(group, first, end, trajectory, s, _drawn(recipe.length, generator)) for s in segments]
    return places


def _drawn(pair: tuple[int, float], generator: torch.Generator) -> int:
    """The least number and an exponential variable of this mean, as a whole number."""
    least, mean = pair
    more = torch.empty((), dtype=torch.float64).exponential_(generator=generator)
    return least + round(mean * float(more))


# Problems in lockstep under one optimizer


class Unroll:
    """P networks of N weights on their way: values (P, N), moving averages (5, P, N) and the steps taken."""

    def __init__(self, route: VmapRoute, state: FleetState, feed: FleetFeed, scored: FleetBatch, decays: int) -> None:
        self.route, self.feed, self.scored = route, feed, scored
        self.module, self.buffers, self.ids = state.module, state.buffers, state.ids
        self.shapes = {name: p.shape for name, p in state.parameters.items()}
        self.sizes = [p[0].numel() for p in state.parameters.values()]
        self.values = torch.cat(
            [p.detach().flatten(1) if p.ndim > 1 else p.detach()[:, None] for p in state.parameters.values()], 1
        )
        self.means = self.values.new_zeros(decays, *self.values.shape)
        self.squares = torch.zeros_like(self.means)
        self.steps = 0

    def segment(self, network: OptimizerNetwork, steps: int, *, detach: bool) -> tuple[Tensor, Tensor]:
        """Take steps: the mean losses (P,) along them, before each, and a scalar whose gradient is that of their mean."""
        values, means, squares = self.values.detach(), self.means.detach(), self.squares.detach()
        losses, score = self.values.new_zeros(len(self.values)), self.values.new_zeros(())
        look = self._slopes if detach else self._graph
        advance = self._recomputed if values.numel() >= RECOMPUTED_FROM else learned_step
        for _ in range(steps):
            batch = self.feed.batch(*divmod(self.steps, self.feed.batches))
            now, part, gradient = look(values if detach or values.requires_grad else values.requires_grad_(), batch)
            losses, score = losses + now, score + part / (steps * len(self.values))
            self.steps += 1
            change, means, squares = advance(network, values, gradient, means, squares, torch.tensor(self.steps), self.sizes)
            values = values - change
        self.values, self.means, self.squares = values.detach(), means.detach(), squares.detach()
        return losses / steps, score

    def _slopes(self, values: Tensor, batch: FleetBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, their sum as a linear function of the values, and the gradients on the batch, which are constants.

        Along `values` the sum has the slopes of the loss itself: the graph of a step holds no forward pass of the networks.
        """
        state = self._state(values.detach(), leaves=True)
        losses, slopes = self.route(state, self.scored)
        part = (self._flat(slopes, values) * values).sum() if values.requires_grad else values.new_zeros(())
        return losses, part, self._flat(self.route(state, batch)[1], values)

    def _graph(self, values: Tensor, batch: FleetBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The same with second derivatives: gradients that depend on the values."""
        state = self._state(values)
        losses = self.route.losses(state, self.scored)
        (gradient,) = torch.autograd.grad(self.route.losses(state, batch).sum(), values, create_graph=True)
        return losses.detach(), losses.sum(), gradient

    def _state(self, values: Tensor, *, leaves: bool = False) -> FleetState:
        pieces = zip(self.shapes.items(), values.split(self.sizes, 1), strict=True)
        parameters = {name: piece.reshape(shape) for (name, shape), piece in pieces}
        if leaves:
            parameters = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        return FleetState(self.module, parameters, self.buffers, self.ids)

    def _flat(self, gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Gradients by name as (P, N); zero for a parameter that enters no loss."""
        parts = [gradients[name] if name in gradients else like.new_zeros(shape) for name, shape in self.shapes.items()]
        return torch.cat([part.reshape(len(like), -1) for part in parts], 1)

    @staticmethod
    def _recomputed(*given: Any) -> Any:
        return recomputed(learned_step, *given, use_reentrant=False, preserve_rng_state=False)

    def state(self) -> dict[str, Any]:
        """What changes along the way."""
        return {"values": self.values, "means": self.means, "squares": self.squares, "steps": self.steps, "buffers": self.buffers}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Starts(NamedTuple):
    """Seeds of all problems: of what each is, (problems,), of its starts and of its orders, (trajectories, problems)."""

    problems: list[int]
    weights: list[list[int]]
    orders: list[list[int]]

    @staticmethod
    def of(recipe: Recipe) -> Starts:
        generator = torch.Generator().manual_seed(recipe.seed)
        table = torch.randint(2**31, (1 + 2 * recipe.trajectories, recipe.problems), generator=generator).tolist()
        return Starts(table[0], table[1 : 1 + recipe.trajectories], table[1 + recipe.trajectories :])


class _Run:
    """A meta-training under way: the weights of the optimizer, RMSProp's state, the trajectory, the trace."""

    def __init__(self, factory: Any, loss: Loss, pools: Pools, recipe: Recipe, start: OptimizerNetwork) -> None:
        self.factory, self.loss, self.pools, self.recipe, self.start = factory, loss, pools, recipe, start
        self.plan, self.seeds = plan_of(recipe), Starts.of(recipe)
        self.unroll = self.begin(self.plan[0])
        self.network = start.like(self.unroll.values)
        self.weights = [w.detach().clone().requires_grad_() for w in self.network.weights.values()]
        self.network = replace(self.network, weights=dict(zip(self.network.weights, self.weights, strict=True)))
        self.optimizer = torch.optim.RMSprop(self.weights, lr=recipe.lr, alpha=recipe.decay, eps=recipe.eps)
        self.done = self.skipped = self.inner_steps = 0
        self.trace: list[Row] = []

    @property
    def over(self) -> bool:
        return self.done >= len(self.plan)

    def begin(self, place: Place) -> Unroll:
        """The problems of a place before their first step."""
        recipe, mine = self.recipe, slice(place.first, place.end)
        inner, scored = draw_problems(self.pools, recipe, self.seeds.problems[mine])
        state = stack_replicas(self.factory, self.seeds.weights[place.trajectory][mine])
        orders = self.seeds.orders[place.trajectory][mine]
        shared: dict[str, Any] = {"order_seeds": orders, "device": state.device, "shared": False}
        shared["parse"] = BatchParser.of(state.module, self.loss, "labels")
        feed = FleetFeed(inner, len(orders), batch_size=recipe.batch_size, drop_last=True, **shared)
        whole = FleetFeed(scored, len(orders), **shared).batch(0, 0)
        route = VmapRoute(state.module, self.loss, None)
        _refuse_unvectorised(route, state, feed.batch(0, 0))
        return Unroll(route, state, feed, whole, len(self.start.decays))

    def updates(self) -> Iterator[None]:
        """The meta-updates that remain."""
        while not self.over:
            place = self.plan[self.done]
            if place.segment == 0:
                self.unroll = self.begin(place)
            finite = self._update(place)
            self.done += 1
            if not finite:  # nothing can be learned from the rest of this trajectory
                while not self.over and self.plan[self.done].segment:
                    self.done += 1
            yield

    def _update(self, place: Place) -> bool:
        """One segment and one step of RMSProp; whether the losses were finite."""
        recipe = self.recipe
        losses, score = self.unroll.segment(self.network, place.steps, detach=recipe.detach)
        found = torch.autograd.grad(score, self.weights) if score.requires_grad else [torch.zeros_like(w) for w in self.weights]
        sound = all(bool(g.isfinite().all()) for g in found)
        for weight, g in zip(self.weights, found, strict=True):
            weight.grad = g.where(g.isfinite(), torch.zeros_like(g)).clamp(-recipe.clip, recipe.clip)
        norm = math.sqrt(sum(float(w.grad.double().square().sum()) for w in self.weights if w.grad is not None))
        self.optimizer.step()
        objective = float(losses.mean())
        self.skipped += not sound
        self.inner_steps += place.steps * (place.end - place.first)
        where = {"group": place.group, "trajectory": place.trajectory, "segment": place.segment, "steps": place.steps}
        self.trace.append({"update": len(self.trace), **where, "objective": objective, "gradient": norm, "finite": sound})
        return math.isfinite(objective)

    # Where it is, on disk

    def open(self, folder: Path, *, resume: bool) -> None:
        """Go on from what a folder holds, which must be the same meta-training."""
        found = load_state(folder)
        if found is None:
            return
        if not resume:
            raise ArgumentError(f"checkpoint: {folder} holds a meta-training. Pass resume=True to go on, or give another folder.")
        if found["identity"] != self._identity():
            raise ArgumentError(f"checkpoint: {folder} holds a meta-training of other data or settings. Give another folder.")
        self.done, self.skipped, self.inner_steps = found["place"]
        self.trace = list(found["trace"])
        with unbroken(torch.no_grad()):
            for weight, saved in zip(self.weights, found["weights"], strict=True):
                weight.copy_(saved)
        self.optimizer.load_state_dict(found["optimizer"])
        if not self.over:
            self.unroll = self.begin(self.plan[self.done])
            self.unroll.restore(found["unroll"])

    def _identity(self) -> dict[str, Any]:
        pools = {pool.name: dict(zip(("inputs", "targets"), pool.both, strict=True)) for pool in self.pools if pool is not None}
        data = {name: tensor_check_sums(parts) for name, parts in pools.items()}
        return {"recipe": asdict(self.recipe), "start": self.start.digest, "data": data}

    def state(self) -> dict[str, Any]:
        """All that a later `open` needs to take the same meta-updates."""
        return {
            "identity": self._identity(),
            "place": [self.done, self.skipped, self.inner_steps],
            "trace": self.trace,
            "weights": self.weights,
            "optimizer": self.optimizer.state_dict(),
            "unroll": self.unroll.state(),
        }

    def result(self, seconds: float) -> MetaTraining:
        recipe = self.recipe
        weights = {name: weight.detach().clone() for name, weight in self.network.weights.items()}
        diverged = not math.isfinite(self.trace[-1]["objective"])
        return MetaTraining(
            network=replace(self.network, weights=weights),
            trace=tuple(self.trace),
            split=recipe.split,
            problems=recipe.problems,
            samples=recipe.size[0],
            valid_samples=recipe.size[1],
            inner_steps=self.inner_steps,
            skipped=self.skipped,
            outcome=Outcome.DIVERGED if diverged else Outcome.FINISHED,
            seed=recipe.seed,
            cost=Cost(seconds, f"{recipe.together} problems in lockstep"),
        )


def _refuse_unvectorised(route: VmapRoute, state: FleetState, batch: FleetBatch) -> None:
    """Raise where all problems cannot be computed at once."""
    try:
        route.losses(state, batch)
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error) for word in ("vmap", "Batching rule")):  # of torch's refusals of dropout and of LSTM
            raise
        raise ArgumentError(
            "factory: problems are computed at once, which this model refuses, as dropout and recurrent layers do. Leave such "
            "layers out."
        ) from error
