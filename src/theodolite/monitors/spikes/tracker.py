"""The spikes of a training run: each is opened, explained, followed and closed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from theodolite.monitors.measuring.curvature import CurvatureSample
from theodolite.monitors.measuring.scheduler import MeasurementScheduler
from theodolite.monitors.progress.layers import LayerSummary
from theodolite.monitors.spikes.detector import PATIENCE, Correction, LossState, log_noise
from theodolite.monitors.spikes.diagnosis import (
    IN_A_ROW,
    Aftermath,
    Cause,
    Evidence,
    Spike,
    batch_is_bad,
    cause_of,
    detail_of,
    few_carry,
    is_scaled,
)
from theodolite.monitors.watching.recorder import StepStats, first_bad_gradient, second_beta
from theodolite.monitors.watching.watched_model import StepRecord, WatchedModel

#: Steps over which a fall of Adam's second moment is remembered, in units of its own memory 1/(1−β₂), and at most.
MEMORIES, MEMORY = 5.0, 5000
#: A step is quiet where the squared gradient is less than this share of the second moment, which then all but decays freely.
QUIET = 0.1
#: A step that raises the loss of the probe by this share has done harm, and so has a rise by `RAISED` since calm times.
STEP_RAISED, RAISED = 0.05, 0.2
#: Noises above the least loss from which a jump is clear.
CLEAR = 8.0
#: A rise that is over so soon shows what noise is, unless something else caused it.
SHORT = 2
#: Steps over which a rise of the learning rate is looked for, and the factor from which it is worth a word.
GROWTH, GREW = 200, 1.5
#: So many hard batches within so many steps are the nature of the data.
LIKES, LIKES_WITHIN = 2, 500
#: Losses at the beginning, the least of which says where a run began.
BEGINNING = 10
#: Steps within which a spike may be the aftershock of another.
AFTERSHOCK = 15
#: Calm steps after a spike that tell whether the loss came back for good, and steps after which they are not waited for.
SETTLED, SETTLED_WITHIN = 40, 300
#: A loss above that before a spike by this share, and by so many noises, has not come back; fewer than this share of the units
#: that lived before it, and they have died in it.
STAYS_UP, STAYS_UP_NOISES, LIVING = 0.1, 2.0, 0.5
#: Steps within which units that die were killed by a spike.
KILLED_WITHIN = 100


@dataclass(frozen=True)
class Situation:
    """A step as the tracker meets it: what the detector says, all steps so far, and what can be measured."""

    state: LossState
    record: StepRecord
    history: Sequence[StepStats]
    watched: WatchedModel
    measure: MeasurementScheduler
    layers: LayerSummary = field(default_factory=LayerSummary)  # as they were last seen

    @property
    def now(self) -> StepStats:
        return self.history[-1]

    @property
    def index(self) -> int:
        """The step counted in observed steps, whatever number it carries."""
        return len(self.history) - 1

    def probe_loss(self, *, before: bool = False) -> float | None:
        return self.measure.probe_loss(self.watched, before=before)

    def typical_loss(self) -> float | None:
        return self.measure.typical_loss(self.watched, self.record.batches)

    def input_scale(self, *, of_step_before: bool = False) -> float | None:
        """The inputs of a batch against those before and the probe: the smaller departure counts, if beyond their noise."""
        history = self.history[:-1] if of_step_before else self.history
        sizes = [v.input_size for v in history[-42:] if v.input_size is not None]
        probe = self.watched.probe.input_size
        if len(sizes) < 3 or probe is None:
            return None
        departures = [sizes[-1] / other for other in (median(sizes[:-1]), probe) if other]
        least = min(departures, key=lambda d: abs(math.log(d)) if d else math.inf, default=None)
        if not least:
            return least
        return least if abs(math.log(least)) > 6.0 * log_noise(sizes[:-1]) else 1.0

    def rate_growth(self) -> float:
        """The learning rate over the least one of the last steps."""
        rates = [v.rate for v in self.history[-GROWTH - 1 : -1]]
        least = min(rates, default=0.0)
        return rates[-1] / least if least > 0 else 1.0

    def spike(self, cause: Cause, led: StepStats, detail: str, **more: Any) -> Spike:
        """A spike that begins at this step, because of the step `led`."""
        step = self.now.step
        return Spike(start=step, peak=step, cause=cause, detail=detail, **{"batch": led.step, "rate": led.rate, **more})

    def measured(self, spike: Spike) -> Spike:
        """The spike as high as it is by now: over the loss before, where that was positive, and above it."""
        top, before = self.state.top, self.state.before
        if not math.isfinite(top):
            height = rise = math.inf
        else:
            height, rise = top / before if before > 0 else math.nan, top - before
        return replace(spike, peak=self.history[self.state.peak].step, height=height, rise=rise)


@dataclass(frozen=True)
class Diagnosis:
    """What a step has shown: spikes opened or better understood, a correction for the detector, notes for the reader."""

    spikes: tuple[Spike, ...] = ()
    correction: Correction | None = None
    notes: tuple[str, ...] = ()


@dataclass
class _Unsettled:
    """A spike whose loss is back, until the steps after it have shown whether for good."""

    place: int  # among the spikes
    before: float
    noise: float
    ended: int  # in observed steps
    alive: float | None
    losses: list[float] = field(default_factory=list)  # of calm steps since


class SpikeTracker:
    """Follows the spikes of a run from step to step."""

    def __init__(self) -> None:
        self.spikes: list[Spike] = []
        self._evidence: Evidence | None = None
        self._odd = self._heavy = False
        self._outliers: deque[tuple[int, float]] = deque(maxlen=20)  # batches called bad: observed step and loss
        self._began = 0  # of the last spike, in observed steps
        self._moments: deque[tuple[float, bool]] = deque(maxlen=MEMORY)  # of each step, and whether it was quiet
        self._noise = 0.0  # of the loss before the last spike
        self._alive: float | None = None  # share of living units before the last spike
        self._unsettled: list[_Unsettled] = []

    def update(self, here: Situation) -> Diagnosis:
        """Follow one step."""
        now, phase = here.now, here.state.phase
        if now.moment is not None and now.surprise is not None:
            self._moments.append((now.moment, now.surprise**2 < QUIET))
        notes = self._odd_inputs(here)
        if not now.finite:
            found = self._non_finite(here)
        elif phase == "begins":
            found = self._begin(here)
        elif phase == "goes on":
            found = self._go_on(here)
        elif phase == "is over":
            found = self._end(here)
        else:
            found = Diagnosis()
        judged = self._settle(here, calm=phase == "calm")
        return replace(found, notes=(*notes, *found.notes), spikes=(*found.spikes, *judged)) if notes or judged else found

    def _odd_inputs(self, here: Situation) -> tuple[str, ...]:
        """Inputs of another size than all others deserve a word even where the loss does not mind."""
        scale = here.input_scale()
        if self._odd or not is_scaled(scale):
            return ()
        self._odd = True
        return (f"the inputs of batch {here.now.step} are {scale:.3g} times as large as those of other batches",)

    # Opening

    def _begin(self, here: Situation) -> Diagnosis:
        """A loss has jumped: is it the batch, or did the step before do it?"""
        now, state = here.now, here.state
        evidence = Evidence(
            start=now.step,
            batch_loss=now.loss,
            before=state.before,
            gradient_norm=now.gradient_norm,
            probe_loss=here.probe_loss(),
            usual=here.watched.probe.usual_ratio,
            noise=state.noise,
            spread=state.spread,
            input_scale=here.input_scale(),
            typical_loss=here.typical_loss(),
            began=min(step.loss for step in here.history[:BEGINNING]),
            **self._before_the_step(here),
        )
        evidence = replace(evidence, probe_raised=not _harmless(here, evidence))
        if cause_of(evidence) is Cause.BAD_BATCH:
            return self._bad_batch(here, evidence)
        if not evidence.probe_raised:
            return Diagnosis(correction="new level" if state.excess >= CLEAR else "noise")
        return self._harmful(here, evidence)

    def _before_the_step(self, here: Situation) -> dict[str, Any]:
        """Evidence from the steps that led here."""
        return {
            "rates": tuple(v.rate for v in here.history[-41:-1]),
            "surprise": max((v.surprise for v in here.history[-6:] if v.surprise is not None), default=None),
            "moment_fall": self._fall_in_quiet(here),
        }

    def _fall_in_quiet(self, here: Situation) -> float | None:
        """By how much Adam's second moment has fallen in a quiet stretch that lasted as long as its memory; None without one."""
        memory = 1.0 / (1.0 - second_beta(here.watched.optimizer))
        recent = list(self._moments)[-int(min(MEMORY, MEMORIES * memory)) :]
        if not recent or sum(quiet for _, quiet in recent) < min(memory, MEMORY / 2):
            return None
        moments = [moment for moment, _ in recent]
        return max(moments) / min(moments[-20:])

    def _bad_batch(self, here: Situation, evidence: Evidence) -> Diagnosis:
        """A spike of its own, unless batches as hard as this one keep coming: then the data is like that."""
        loss, index = here.now.loss, here.index
        alike = [at for at, height in self._outliers if index - at <= LIKES_WITHIN and height >= 0.5 * loss]
        self._outliers.append((index, loss))
        if len(alike) < LIKES:
            return self._open_by_batch(here, evidence)
        text = (
            f"single batches far harder than the probe keep coming (batch {index} is one of several): "
            "rare classes or heavy tails, not bad batches"
        )
        notes, self._heavy = () if self._heavy else (text,), True
        return Diagnosis(correction="noise", notes=notes)

    def _harmful(self, here: Situation, evidence: Evidence) -> Diagnosis:
        """The critical rate of the step that led here, on its batch and on the probe, and where the rise lies."""
        evidence = replace(evidence, input_scale=here.input_scale(of_step_before=True))
        back = _batch_before(here)
        first, second = _probe_around(here)
        evidence = replace(
            evidence, ratio=None if back is None else back.ratio, probe_ratio=None if first is None else first.ratio
        )
        seen = [sample for sample in (back, first) if sample is not None and sample.ratio is not None]
        shown = max(seen, key=lambda sample: sample.ratio or 0.0, default=None)
        cause, detail = self._aftershock(cause_of(evidence), evidence, here)
        led = here.history[-2] if len(here.history) > 1 else here.now
        spike = here.spike(
            cause,
            led,
            detail,
            rising=here.rate_growth() >= GREW and cause is Cause.UNEXPLAINED,
            ratio=None if shown is None else shown.ratio,
            on="" if shown is None else shown.on,
            top_share=_share_of_rise(first, second),
            sharpness_before=_sharpness(first),
            kernel=first is not None and first.kernel_norm is not None,
        )
        return self._open(here, here.measured(spike), evidence)

    def _aftershock(self, cause: Cause, evidence: Evidence, here: Situation) -> tuple[Cause, str]:
        """A spike without a cause of its own, right after another, has that one's."""
        last = self.spikes[-1] if self.spikes else None
        if cause is Cause.UNEXPLAINED and last is not None and here.index - self._began <= AFTERSHOCK:
            return last.cause, f"an aftershock of step {last.start}"
        grew = here.rate_growth()
        if cause is Cause.UNEXPLAINED and grew >= GREW:
            return cause, f"the learning rate had risen {grew:.3g} times in the last {GROWTH} steps"
        return cause, detail_of(cause, evidence)

    def _non_finite(self, here: Situation) -> Diagnosis:
        """NaN or infinity in the loss or a gradient: the batch is named, and where it entered."""
        now, named = here.now, here.watched.named
        last = self.spikes[-1] if self.spikes else None
        if last is not None and last.cause is Cause.NON_FINITE and not last.over:
            return self._change(here.measured(last))
        closed = self._change(replace(last, over=True)) if last is not None and not last.over else Diagnosis()
        name = first_bad_gradient(named)
        poisoned = next((n for n, p in named.items() if not bool(torch.isfinite(p).all())), None)
        detail = here.record.bad_data or (f"the gradient of {name} is not finite" if name else "the loss is not finite")
        if poisoned is not None:
            detail = f"weight {poisoned} is not finite any more, because of the step before"
        evidence = Evidence(
            start=now.step, batch_loss=now.loss, before=here.state.before, gradient_norm=now.gradient_norm, bad_parameter=name
        )
        led = here.history[-2] if poisoned is not None and len(here.history) > 1 else now
        bad_data = bool(here.record.bad_data)
        spike = here.spike(cause_of(evidence), led, detail, rate=now.rate, height=math.inf, bad_data=bad_data)
        opened = self._open(here, spike, evidence, correction="spike" if here.state.start is None else None)
        return replace(opened, spikes=(*closed.spikes, *opened.spikes))

    # Following and closing

    def _go_on(self, here: Situation) -> Diagnosis:
        spike, evidence = self.spikes[-1], self._evidence
        assert evidence is not None
        if spike.cause not in (Cause.BAD_BATCH, Cause.DATA_SHIFT):
            inside = self._bad_batch_inside(here, evidence)
            if inside is not None:
                return inside
        if spike.cause is Cause.BAD_BATCH and evidence.batches_high <= IN_A_ROW:
            evidence = self._still_bad(here, evidence)
            if evidence.batches_high > IN_A_ROW:
                spike = replace(spike, cause=cause_of(evidence), detail=detail_of(Cause.DATA_SHIFT, evidence))
        if spike.cause is Cause.UNEXPLAINED and here.now.loss > 2.0 * evidence.batch_loss:
            spike = self._reconsidered(spike, evidence, here)
        return self._change(here.measured(spike))

    def _bad_batch_inside(self, here: Situation, evidence: Evidence) -> Diagnosis | None:
        """A sudden second rise that comes from a bad batch is a spike of its own."""
        now = here.now
        if here.state.peak != here.index or not now.loss > 2.0 * here.history[-2].loss:
            return None
        evidence = replace(
            evidence,
            start=now.step,
            batch_loss=now.loss,
            probe_loss=here.probe_loss(),
            probe_raised=False,
            typical_loss=here.typical_loss(),
            input_scale=here.input_scale(),
        )
        if cause_of(evidence) is not Cause.BAD_BATCH:
            return None
        closed = self._change(replace(self.spikes[-1], over=True))
        opened = self._open_by_batch(here, evidence, correction="new spike")
        return replace(opened, spikes=(*closed.spikes, *opened.spikes))

    def _still_bad(self, here: Situation, evidence: Evidence) -> Evidence:
        """Count one more bad batch, if this is one at weights where the probe is as it was.

        Where weights were thrown far away, every batch differs from every other.
        """
        typical = here.typical_loss()
        again = replace(evidence, batch_loss=here.now.loss, probe_loss=here.probe_loss(), typical_loss=typical)
        unharmed = (again.probe_loss or math.inf) < 2.0 * (evidence.probe_loss or 0.0)
        if unharmed and batch_is_bad(again) and not few_carry(again):
            self._evidence = evidence = replace(again, batches_high=evidence.batches_high + 1)
        return evidence

    def _reconsidered(self, spike: Spike, evidence: Evidence, here: Situation) -> Spike:
        """A spike that has doubled since it was judged is judged anew: what it comes from may only show now."""
        back = _batch_before(here)
        ratio = evidence.ratio if back is None else back.ratio
        self._evidence = evidence = replace(
            evidence,
            batch_loss=here.now.loss,
            typical_loss=None,
            probe_loss=None,
            input_scale=here.input_scale(of_step_before=True),
            ratio=ratio,
            **self._before_the_step(here),
        )
        cause, led = cause_of(evidence), here.history[-2]
        if cause is Cause.UNEXPLAINED:
            return spike
        detail = detail_of(cause, evidence)
        return replace(spike, cause=cause, ratio=ratio, on="batch", rate=led.rate, batch=led.step, detail=detail, rising=False)

    def _end(self, here: Situation) -> Diagnosis:
        """The loss is back, or the new level has become the normal one."""
        spike, took, after = self.spikes[-1], here.index - self._began, None
        blameless = spike.cause in (Cause.UNEXPLAINED, Cause.BAD_BATCH) and math.isfinite(here.state.top)
        if spike.sharpness_before is not None:
            after = here.measure.curvature(
                here.watched, here.now, on="probe", why="after", split=True, urgent=True, features=True
            )
        back = took < PATIENCE
        closed = replace(
            spike,
            end=here.now.step if back else None,
            took=took if back else None,
            over=True,
            sharpness_after=_sharpness(after),
        )
        if back:
            unsettled = _Unsettled(len(self.spikes) - 1, here.state.before, self._noise, here.index, self._alive)
            self._unsettled.append(unsettled)
        return replace(self._change(closed), correction="short rise" if took <= SHORT and blameless else None)

    # What the steps after it show

    def _settle(self, here: Situation, *, calm: bool) -> list[Spike]:
        """Judge spikes whose loss came back by the calm steps since, and by the units that have died."""
        changed = self._killed(here)
        for one in list(self._unsettled):
            if calm:
                one.losses.append(here.now.loss)
            seen = here.layers.step > here.history[one.ended].step  # units as they were before say nothing of those after
            if (len(one.losses) < SETTLED or not seen) and here.index - one.ended < SETTLED_WITHIN:
                continue
            self._unsettled.remove(one)
            spike = self.spikes[one.place]
            if not spike.died:
                last = seen and one.place == len(self.spikes) - 1  # of a series it is the last one that kills
                alive = here.layers.alive if last else None
                self.spikes[one.place] = replace(spike, aftermath=_aftermath(one, alive))
                changed.append(self.spikes[one.place])
        return changed

    def _killed(self, here: Situation) -> list[Spike]:
        """The last spike, where a layer has died in it or soon after."""
        if not here.layers.dead or not self.spikes or self.spikes[-1].died:
            return []
        since, last = max(here.layers.dead.values()), self.spikes[-1]
        if not 0 <= since - last.start <= KILLED_WITHIN:
            return []
        self.spikes[-1] = replace(last, aftermath="died")
        return [self.spikes[-1]]

    def _open(self, here: Situation, spike: Spike, evidence: Evidence, correction: Correction | None = None) -> Diagnosis:
        began = here.state.start if correction is None else None
        self._evidence, self._began = evidence, here.index if began is None else began
        self._noise, self._alive = here.state.noise, here.layers.alive
        self.spikes.append(spike)
        return Diagnosis((spike,), correction)

    def _open_by_batch(self, here: Situation, evidence: Evidence, correction: Correction | None = None) -> Diagnosis:
        detail = detail_of(Cause.BAD_BATCH, evidence)
        spike = here.spike(Cause.BAD_BATCH, here.now, detail, few_samples=few_carry(evidence))
        return self._open(here, here.measured(spike), evidence, correction)

    def _change(self, spike: Spike) -> Diagnosis:
        if spike == self.spikes[-1]:
            return Diagnosis()
        self.spikes[-1] = spike
        return Diagnosis((spike,))


def _aftermath(one: _Unsettled, alive: float | None) -> Aftermath:
    """Whether loss and units are what they were before a spike."""
    if alive is not None and one.alive is not None and alive < LIVING * one.alive:
        return "died"
    if len(one.losses) < SETTLED // 2 or not math.isfinite(one.before):
        return "settled" if not math.isfinite(one.before) else ""
    above = median(one.losses) - one.before
    return "did not recover" if above > max(STAYS_UP * abs(one.before), STAYS_UP_NOISES * one.noise) else "settled"


def _harmless(here: Situation, evidence: Evidence) -> bool:
    """Whether the weights are as good as ever: then a harder batch, or the end of easy ones, is no spike.

    Doubtful jumps must show in the probe since calm times, clear ones at least in the last step.
    """
    probe, losses = evidence.probe_loss, here.watched.probe.losses
    if probe is None or not losses or len(here.history) < 2:
        return False
    raised = (1.0 + RAISED) * math.exp(3.0 * log_noise(losses))
    if probe > raised * losses[-1] and evidence.batch_loss > (1.0 + RAISED) * evidence.before:
        return False
    if here.state.excess < CLEAR:
        return True
    before = here.probe_loss(before=True)
    return before is not None and probe <= (1.0 + STEP_RAISED) * before


def _batch_before(here: Situation) -> CurvatureSample | None:
    """The curvature on the batch before, at the weights its step was taken from."""
    batches = here.watched.previous_batches
    if len(here.history) < 2 or not batches:
        return None
    return here.measure.curvature(
        here.watched, here.history[-2], on="batch", why="spike", batches=batches, before=True, urgent=True
    )


def _probe_around(here: Situation) -> tuple[CurvatureSample | None, CurvatureSample | None]:
    """The curvature on the probe before and after the step that led to the spike."""
    if here.watched.probe.data is None or len(here.history) < 2:
        return None, None
    first = here.measure.curvature(here.watched, here.history[-2], on="probe", why="spike", before=True, split=True, urgent=True)
    if first is None:
        return None, None
    return first, here.measure.curvature(here.watched, here.now, on="probe", why="spike", split=True, urgent=True)


def _sharpness(sample: CurvatureSample | None) -> float | None:
    return None if sample is None else sample.kernel_norm or sample.sharpness


def _share_of_rise(first: CurvatureSample | None, second: CurvatureSample | None) -> float | None:
    """Part of the rise of the probe's loss that lies in the top eigenspace; None where it did not rise."""
    if first is None or second is None or first.top_loss is None or second.top_loss is None or not second.loss > first.loss:
        return None
    return (second.top_loss - first.top_loss) / (second.loss - first.loss)
