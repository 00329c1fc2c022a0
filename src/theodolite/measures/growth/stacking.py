"""`adaptive_stacking`: from a shallow model to a deep one in stages, the operator of each chosen by a short trial.

Beside it runs last stacking, which copies the last layers on top in every stage: the same stages, data and steps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import a_text, checked, count, fields_checked, optional, positive, sequence, shown, whole
from theodolite.arguments import seed as a_seed
from theodolite.measures.growth.body import find_body
from theodolite.measures.growth.choice import GrowthChoice, landscape_aware_growth
from theodolite.measures.growth.growing import grow
from theodolite.measures.growth.operators import GrowthOperator, growth_operators
from theodolite.measures.growth.runs import finite_stream
from theodolite.measures.growth.search import own_optimizer
from theodolite.measures.growth.validation import part_losses, validation_problem
from theodolite.problem.arguments import a_factory, a_loss
from theodolite.problem.calling import Loss
from theodolite.problem.state_guard import own_random_state
from theodolite.progress import stages as named_stages
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import number
from theodolite.training import train
from theodolite.training.own_order import OwnOrder
from theodolite.training.schedules import Schedule


@dataclass(frozen=True)
class Stage:
    """A stage of stacking: a depth, the steps trained at it, and the operators that are tried to reach it.

    `starts` and `blocks` as in `growth_operators`, None for all; new layers are copies unless `inits` says otherwise.

    >>> [operator.name for operator in Stage(3, 100).operators(2)]
    ['0/1/copy', '1/1/copy']
    """

    layers: int
    steps: int
    starts: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    inits: tuple[str, ...] = ("copy",)

    def __post_init__(self) -> None:
        fields_checked(self, layers=count, steps=count)

    @checked(depth=count)
    def operators(self, depth: int) -> list[GrowthOperator]:
        """The operators from a model of `depth` layers to this stage."""
        return growth_operators(depth, self.layers - depth, starts=self.starts, blocks=self.blocks, inits=self.inits)


def bert_large_stages() -> list[Stage]:
    """The schedule by which Karp (2024) trained BERT-Large: six stages of four layers, 93 trials.

    >>> depths = [stage.layers for stage in bert_large_stages()]
    >>> [len(stage.operators(depth)) for depth, stage in zip(depths, bert_large_stages()[1:])]
    [3, 15, 27, 21, 27]
    """
    starts = [(0,), tuple(range(5)), tuple(range(9)), tuple(range(0, 13, 2)), tuple(range(0, 17, 2))]
    steps = [160_000, 160_000, 160_000, 160_000, 200_000]
    grown = [Stage(8 + 4 * i, n, first, (1, 2, 4)) for i, (n, first) in enumerate(zip(steps, starts, strict=True))]
    return [Stage(4, 160_000), *grown]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Stacking(Result):
    """Adaptive stacking beside last stacking.

    Attributes:
        model, optimizer: at the end of adaptive stacking; None in a result that was loaded.
        table: a row for each way and stage: layers, the operator, global step and validation loss at its end.
        lag: steps of each trial.
        trial_steps: of all trials; the winners' are part of the training.
    """

    model: nn.Module | None
    optimizer: Optimizer | None
    table: tuple[Row, ...]
    lag: int
    trial_steps: int

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.table]

    def loss(self, way: Literal["adaptive", "last"] = "adaptive") -> float:
        """The final validation loss of a way."""
        found = [row["loss"] for row in self.table if row["way"] == way]
        if not found:
            raise ValueError(f"way must be one that was trained: {', '.join(sorted({row['way'] for row in self.table}))}.")
        return float(found[-1])

    def save(self, path: str | PathLike[str]) -> None:
        """Write what the result says; the model and the optimizer are for their own `save_pretrained` or `state_dict`."""
        super(Stacking, replace(self, model=None, optimizer=None)).save(path)

    def sentence(self) -> str:
        rows = [row for row in self.table if row["way"] == "adaptive"]
        chosen = ", ".join(row["operator"] for row in rows[1:]) or "none"
        text = f"Adaptive stacking to {rows[-1]['layers']} layers ends at validation loss {number(rows[-1]['loss'])} by {chosen}"
        if any(row["way"] == "last" for row in self.table):
            text += f", last stacking at {number(self.loss('last'))}: one run each, without an error"
        share = 100 * self.trial_steps / rows[-1]["step"]
        return f"{text}. The trials took {self.trial_steps} steps, {share:.2g} % of the {rows[-1]['step']} of a way."


def some_stages(name: str, value: Any) -> list[Stage]:
    """Stages, or pairs (layers, steps); each deeper than the one before and at most twice as deep."""
    found = [
        entry if isinstance(entry, Stage) else Stage(*entry) if isinstance(entry, tuple | list) else entry
        for entry in sequence(name, value)
    ]
    if not found or not all(isinstance(stage, Stage) for stage in found):
        raise ValueError(f"{name} must be a list of Stage or of pairs (layers, steps). Got {shown(value)}.")
    for before, after in itertools.pairwise(found):
        if not before.layers < after.layers <= 2 * before.layers:
            raise ValueError(
                f"{name} must be deeper one after the other, each at most twice as deep as the one before. Got {after.layers} "
                f"after {before.layers} layers."
            )
    return found


@checked(
    build=a_factory, loss=a_loss, stages=some_stages, lag=whole, batch_size=count, clip=optional(positive), body=a_text,
    target=a_text, seed=a_seed,
)  # fmt: skip
def adaptive_stacking(
    build: Callable[[int], nn.Module],
    loss: Loss,
    data: Any,
    *,
    optimizer: Any,
    stages: Sequence[Stage | tuple[int, int]],
    lag: int,
    validation: Any,
    schedule: Schedule | Mapping[int, float] | float | None = None,
    compare: bool = True,
    prune: bool = False,
    engine: Any = "serial",
    batch_size: int | None = None,
    shuffle: bool = True,
    clip: float | None = None,
    body: str | None = None,
    target: str = "labels",
    seed: int = 0,
    progress: bool | None = None,
) -> Stacking:
    """Train a shallow model, and in each further stage grow it by the operator that leads after `lag` steps.

    Args:
        build: `layers -> nn.Module`, the model of the first stage; torch's generator is seeded by `seed` before it is called.
        optimizer: a function of the parameters that makes one, or a name with a `schedule`.
        stages: `Stage` or pairs (layers, steps), each deeper than the one before.
        lag: steps of the trials, part of the stage's steps for the winner.
        schedule: the learning rate as a function of the global step: growing does not restart it.
        compare: whether to train last stacking too, from the same first stage.
        loss, data, validation, prune, engine, batch_size, shuffle, clip, body, target, seed: as in `landscape_aware_growth`.

    Returns:
        Losses at the end of each stage, what was chosen, and the model with its optimizer.

    >>> import torch
    >>> build = lambda layers: nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    >>> x = torch.randn(32, 4)
    >>> stacked = adaptive_stacking(
    ...     build, nn.MSELoss(), (x[:16], x[:16]), optimizer="adam", schedule=0.01, validation=(x[16:], x[16:]),
    ...     stages=[(2, 4), (3, 4)], lag=2)
    >>> [(row["way"], row["layers"], row["step"]) for row in stacked.rows()]
    [('adaptive', 2, 4), ('adaptive', 3, 8), ('last', 3, 8)]
    """
    began = time.perf_counter()
    planned = some_stages("stages", stages)
    for stage in planned[1:]:
        if lag > stage.steps:
            raise ValueError(f"lag must be at most the steps of a stage, {stage.steps} for {stage.layers} layers. Got {lag}.")
    with own_random_state(seed):
        model = build(planned[0].layers)
    if (depth := find_body(model, body).layers) != planned[0].layers:
        raise ValueError(f"build({planned[0].layers}) must make a model of {planned[0].layers} layers. It has {depth}.")
    moving = own_optimizer(optimizer, model, schedule)
    data = finite_stream(data, sum(stage.steps for stage in planned))
    options = {"batch_size": batch_size, "shuffle": shuffle, "clip": clip, "schedule": schedule, "target": target, "seed": seed}
    way = _Way("adaptive", loss, data, validation, options)
    trial = {"lag": lag, "prune": prune, "engine": engine, "body": body, "every": None if prune else max(1, lag)}
    with named_stages(len(planned) * (1 + compare), progress=progress) as begin:
        begin(f"{planned[0].layers} layers")
        way.train(model, moving, planned[0].steps)
        way.note(planned[0], "", model)
        last, start = replace(way, name="last", table=[]), (model, moving)
        trials = 0
        for stage in planned[1:]:
            begin(f"{stage.layers} layers by the best of a trial")
            candidates = stage.operators(find_body(model, body).layers)
            choice = way.choose(model, moving, layers=stage.layers, operators=candidates, **trial)
            assert choice.model is not None
            assert choice.optimizer is not None
            model, moving, trials = choice.model, choice.optimizer, trials + choice.trial_steps
            way.step += choice.lag
            way.train(model, moving, stage.steps - choice.lag)
            way.note(stage, choice.best.name, model)
        for stage in planned[1:] if compare else []:
            begin(f"{stage.layers} layers by last stacking")
            grown = grow(start[0], "last", layers=stage.layers, optimizer=start[1], seed=seed, body=body)
            assert grown.model is not None
            assert grown.optimizer is not None
            start = (grown.model, grown.optimizer)
            last.train(*start, stage.steps)
            last.note(stage, "last", grown.model)
    return Stacking(
        model=model,
        optimizer=moving,
        table=(*way.table, *last.table),
        lag=lag,
        trial_steps=trials,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - began),
    )


@dataclass
class _Way:
    """A way through the stages: the step it has reached, and the losses at the end of each stage."""

    name: str
    loss: Loss
    data: Any
    validation: Any
    options: dict[str, Any]
    step: int = 0
    table: list[Row] = field(default_factory=list)

    def train(self, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        """Go on for so many steps, in the order of the data that has no part in the model."""
        if steps:
            seed = self.options["seed"]
            given = self.data if isinstance(self.data, list | tuple) else OwnOrder(self.data, seed, self.step // len(self.data))
            train(model, self.loss, given, optimizer, steps=steps, first=self.step, progress=False, **self.options)
            self.step += steps

    def choose(self, model: nn.Module, optimizer: Optimizer, **trial: Any) -> GrowthChoice:
        """The operator of a stage, by a trial from here."""
        given = {**self.options, **trial, "validation": self.validation, "first": self.step, "baselines": (), "progress": False}
        return landscape_aware_growth(model, self.loss, self.data, optimizer, **given)

    def note(self, stage: Stage, operator: str, model: nn.Module) -> None:
        """The validation loss at the end of a stage."""
        problem = validation_problem(model, self.loss, self.validation, self.options["target"])
        losses = part_losses(problem, model)
        loss = sum(share * value for share, value in zip(problem.weighting.shares, losses, strict=True))
        row = {"way": self.name, "layers": stage.layers, "operator": operator, "step": self.step, "loss": loss}
        self.table.append(row)
