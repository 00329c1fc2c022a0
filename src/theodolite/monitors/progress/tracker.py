"""Is it learning? What every step and every look adds to the answer; nothing is computed here that the loop did not compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from theodolite.monitors.progress.layers import LayerSummary, LayerTracker
from theodolite.monitors.progress.loss_course import LossCourse, LossSummary
from theodolite.monitors.progress.trivial import TrivialPredictor
from theodolite.monitors.watching.recorder import rate_of
from theodolite.monitors.watching.watched_model import StepRecord, WatchedModel
from theodolite.results import Row

#: Steps between two looks at the layers: at the beginning of a run, and later.
EARLY, LATER, BEGINNING = 20, 50, 200
#: Looks at targets before every fourth will do.
TARGETS = 10
#: A rate below this share of the highest one moves nothing any more; so many steps of it, and this share of all, are no end of
#: a usual schedule.
GONE, GONE_STEPS, GONE_SHARE = 1e-4, 50, 0.02


@dataclass(frozen=True, kw_only=True)
class ProgressSample:
    """The progress of a run at one look; `saturation` is the share of saturated outputs by layer, where one can saturate.

    `rate_gone` counts the steps since the learning rate has been all but zero, `decay` is the weight decay of the optimizer and
    `working` counts the steps at a rate near the highest.
    """

    loss: LossSummary
    layers: LayerSummary = field(default_factory=LayerSummary)
    rate: float = math.nan
    highest_rate: float = math.nan
    rate_gone: int = 0
    decay: float = 0.0
    working: int = 0
    saturation: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.loss.step

    @property
    def ended(self) -> bool:
        """Whether the learning rate has been gone for longer than the end of a usual schedule."""
        return rate_has_ended(self.rate_gone, self.loss.steps)

    def row(self) -> Row:
        return {**self.loss.row(), **self.layers.row(), "saturated": max(self.saturation.values(), default=None)}


def rate_has_ended(gone: int, steps: int) -> bool:
    """Whether so many steps without a learning rate are too many among `steps`."""
    return gone > max(GONE_STEPS, GONE_SHARE * steps)


class ProgressTracker:
    """Follows a run: `update` at every step, `look` where it is due."""

    def __init__(self) -> None:
        self.course = LossCourse()
        self.samples: list[ProgressSample] = []
        self._models: dict[int, _Model] = {}  # by what is watched
        self._highest_rate = 0.0
        self._rate_gone = 0

    def update(self, record: StepRecord, watched: WatchedModel) -> bool:
        """Take a step; whether a look is due."""
        stats = record.stats
        self.course.update(stats.step, stats.loss, stats.rate)
        if stats.rate > self._highest_rate:
            self._highest_rate = stats.rate
        self._rate_gone = self._rate_gone + 1 if stats.rate <= GONE * self._highest_rate else 0
        died = self._of(watched).layers.update(stats.step, record.gradient_norms)
        index = self.course.steps - 1
        return died or index % (EARLY if index < BEGINNING else LATER) == 0

    def look(self, record: StepRecord, watched: WatchedModel) -> ProgressSample:
        """Look at the layers and the targets of a step, and keep what was seen."""
        model, learns = self._of(watched), bool(self.samples) and self.samples[-1].loss.state in ("learning", "flat")
        often = len(self.samples) < TARGETS or len(self.samples) % 4 == 0 or not learns
        loss = record.stats.loss if len(record.batches) == 1 else None
        for batch in record.batches if often else ():
            target = batch.kwargs.get(watched.target_key) if watched.loss is None else batch.target
            model.trivial.update(target, record.output if batch is record.batches[-1] else None, watched.score, loss)
        model.seen = model.layers.look(record.stats.step, record.gradient_norms, watched.previous_weights.lengths)
        self.samples.append(self.now(watched))
        return self.samples[-1]

    def now(self, watched: WatchedModel) -> ProgressSample:
        """The run as it stands, with the layers as they were last seen."""
        model, groups = self._of(watched), watched.optimizer.param_groups
        ended, guess = rate_has_ended(self._rate_gone, self.course.steps), model.trivial
        return ProgressSample(
            loss=self.course.summary(guess.value, guess.name, ended=ended, possible_gain=guess.possible_gain),
            layers=model.seen,
            rate=rate_of(watched.optimizer),
            highest_rate=self._highest_rate,
            rate_gone=self._rate_gone,
            decay=max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0),
            working=self.course.working,
            saturation=watched.saturation,
        )

    def _of(self, watched: WatchedModel) -> _Model:
        known = self._models.get(id(watched))
        if known is None:
            layers = LayerTracker(watched.called, watched.called_parameters)
            known = self._models[id(watched)] = _Model(watched, layers, TrivialPredictor(watched.loss))
        return known


@dataclass
class _Model:
    """What is followed of one watched model."""

    watched: WatchedModel  # kept, so that its place in memory stays its own
    layers: LayerTracker
    trivial: TrivialPredictor
    seen: LayerSummary = field(default_factory=LayerSummary)
