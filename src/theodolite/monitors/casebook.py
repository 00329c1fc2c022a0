"""The spikes of a training run: each is opened, looked into, followed and closed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from theodolite.monitors.alarm import Alarm, log_noise
from theodolite.monitors.diagnosis import (
    IN_A_ROW,
    Cause,
    Evidence,
    Spike,
    batch_is_bad,
    cause_of,
    is_scaled,
    rate_jumped,
)
from theodolite.monitors.inspector import Inspector
from theodolite.monitors.looks import Look
from theodolite.monitors.subject import Subject
from theodolite.monitors.vitals import Vitals, first_bad_gradient, second_beta
from theodolite.problem.batches import Batch

#: Steps over which a fall of Adam's second moment is remembered, in units of its own memory 1/(1−β₂), and at most.
MEMORIES, MEMORY = 5.0, 5000
#: A step is quiet where the squared gradient is less than this share of the second moment, which then all but decays freely.
QUIET = 0.1
#: A step that raises the loss of the probe by this share has done harm, and so has a rise by `RAISED` since calm times.
STEP_RAISED, RAISED = 0.05, 0.2
#: Noises above the least loss from which a jump is clear.
CLEAR = 8.0
#: A rise that is over so soon teaches the alarm what noise is, unless something else caused it.
SHORT = 2
#: Steps over which a rise of the learning rate is looked for, and the factor from which it is worth a word.
GROWTH, GREW = 200, 1.5
#: So many hard batches within so many steps are the nature of the data.
LIKES, LIKES_WITHIN = 2, 500
#: Steps within which a spike may be the aftershock of another.
AFTERSHOCK = 15


class Casebook:
    """Spikes from the vital signs of each step; `told` hears of every spike as it is opened and better understood."""

    def __init__(self, inspector: Inspector, told: Callable[[Spike], None]) -> None:
        self.inspector, self._told = inspector, told
        self.alarm = Alarm()
        self.spikes: list[Spike] = []
        self._evidence: Evidence | None = None
        self._odd = self._heavy = False
        self._outliers: deque[tuple[int, float]] = deque(maxlen=20)  # batches called bad: observed step and loss
        self._began = 0  # of the last spike, in observed steps
        self._moments: deque[tuple[float, bool]] = deque(maxlen=MEMORY)  # of each step, and whether it was quiet

    def update(self, subject: Subject, vitals: Sequence[Vitals], batches: list[Batch]) -> bool:
        """Follow the last step; whether it is a calm one."""
        now = vitals[-1]
        if now.moment is not None and now.surprise is not None:
            self._moments.append((now.moment, now.surprise**2 < QUIET))
        self._odd_inputs(subject, vitals)
        word = self.alarm.update(len(vitals) - 1, now.loss)  # counted in observed steps, whatever numbers they carry
        if not now.finite:
            self._non_finite(subject, vitals)
        elif word == "begins":
            self._begin(subject, vitals, batches)
        elif word == "goes on":
            self._go_on(subject, vitals, batches)
        elif word == "is over":
            self._end(subject, vitals)
        return word == "calm" and now.finite

    def _odd_inputs(self, subject: Subject, vitals: Sequence[Vitals]) -> None:
        """Inputs of another size than all others deserve a word even where the loss does not mind."""
        scale = _scale_of_inputs(subject, vitals)
        if is_scaled(scale) and not self._odd:
            self._odd = True
            self.inspector.note(f"the inputs of batch {vitals[-1].step} are {scale:.3g} times as large as those of other batches")

    # Opening

    def _begin(self, subject: Subject, vitals: Sequence[Vitals], batches: list[Batch]) -> None:
        """A loss has jumped: is it the batch, or did the step before do it?"""
        now = vitals[-1]
        evidence = Evidence(
            start=now.step,
            batch_loss=now.loss,
            before=self.alarm.before,
            gradient_norm=now.gradient_norm,
            probe_loss=self.inspector.probe_loss(subject),
            usual=subject.usual_ratio,
            noise=self.alarm.noise,
            rates=tuple(v.rate for v in vitals[-41:-1]),
            surprise=max((v.surprise for v in vitals[-6:] if v.surprise is not None), default=None),
            moment_fall=self._fall_in_quiet(subject),
            spread=self.alarm.spread,
        )
        spike = self._measured(
            Spike(start=now.step, peak=now.step, end=None, height=1.0, cause=Cause.UNEXPLAINED, rate=now.rate), vitals
        )
        evidence = replace(
            evidence, input_scale=_scale_of_inputs(subject, vitals), typical_loss=self.inspector.typical_loss(subject, batches)
        )
        evidence = replace(evidence, probe_raised=not self._harmless(subject, vitals, evidence))
        if cause_of(evidence) is Cause.BAD_BATCH and self._has_its_like(now.loss, len(vitals) - 1):
            self.alarm.dismiss(now.loss)
        elif cause_of(evidence) is Cause.BAD_BATCH:
            self._open(
                replace(spike, cause=cause_of(evidence), batch=now.step, detail=_detail(Cause.BAD_BATCH, evidence)), evidence
            )
        elif not evidence.probe_raised:
            self.alarm.dismiss(now.loss, new_level=self.alarm.excess >= CLEAR)
        else:
            self._look_into(subject, vitals, evidence, spike)

    def _fall_in_quiet(self, subject: Subject) -> float | None:
        """By how much Adam's second moment has fallen in a quiet stretch that lasted as long as its memory; None without one."""
        memory = 1.0 / (1.0 - second_beta(subject.optimizer))
        recent = list(self._moments)[-int(min(MEMORY, MEMORIES * memory)) :]
        if not recent or sum(quiet for _, quiet in recent) < min(memory, MEMORY / 2):
            return None
        moments = [moment for moment, _ in recent]
        return max(moments) / min(moments[-20:])

    def _has_its_like(self, loss: float, index: int) -> bool:
        """Whether batches as hard as this one keep coming: then the data is like that, and none of them is bad."""
        alike = [at for at, height in self._outliers if index - at <= LIKES_WITHIN and height >= 0.5 * loss]
        self._outliers.append((index, loss))
        if len(alike) < LIKES:
            return False
        if not self._heavy:
            self._heavy = True
            self.inspector.note(f"single batches far harder than the probe keep coming (batch {index} is one of several): "
                                "rare classes or heavy tails, not bad batches")  # fmt: skip
        return True

    def _harmless(self, subject: Subject, vitals: Sequence[Vitals], evidence: Evidence) -> bool:
        """Whether the weights are as good as ever: then a harder batch, or the end of easy ones, is no spike.

        Doubtful jumps must show in the probe since calm times, clear ones at least in the last step.
        """
        probe = evidence.probe_loss
        if probe is None or not subject.probe_losses or len(vitals) < 2:
            return False
        raised = (1.0 + RAISED) * math.exp(3.0 * log_noise(subject.probe_losses))
        if probe > raised * subject.probe_losses[-1] and evidence.batch_loss > (1.0 + RAISED) * evidence.before:
            return False
        if self.alarm.excess < CLEAR:
            return True
        with subject.footprint.before_the_step(subject.parameters):
            before = self.inspector.probe_loss(subject)
        return before is not None and probe <= (1.0 + STEP_RAISED) * before

    def _look_into(self, subject: Subject, vitals: Sequence[Vitals], evidence: Evidence, spike: Spike) -> None:
        """The critical rate of the step that led here, on its batch and on the probe, and where the rise lies."""
        evidence = replace(evidence, input_scale=_scale_of_inputs(subject, vitals[:-1]))
        back = self._look_back(subject, vitals)
        first, second = self._around(subject, vitals)
        evidence = replace(
            evidence, ratio=None if back is None else back.ratio, probe_ratio=None if first is None else first.ratio
        )
        seen = [look for look in (back, first) if look is not None and look.ratio is not None]
        told = max(seen, key=lambda look: look.ratio or 0.0, default=None)
        cause, detail = self._aftershock(cause_of(evidence), evidence, vitals)
        self._open(
            replace(
                spike,
                cause=cause,
                batch=vitals[-2].step if len(vitals) > 1 else spike.start,
                rising=_rate_growth(vitals) >= GREW and cause is Cause.UNEXPLAINED,
                rate=vitals[-2].rate if len(vitals) > 1 else vitals[-1].rate,
                ratio=None if told is None else told.ratio,
                on="" if told is None else told.on,
                top_share=_share_of_rise(first, second),
                sharpness_before=None if first is None else first.kernel_norm or first.sharpness,
                kernel=first is not None and first.kernel_norm is not None,
                detail=detail,
            ),
            evidence,
        )

    def _aftershock(self, cause: Cause, evidence: Evidence, vitals: Sequence[Vitals]) -> tuple[Cause, str]:
        """A spike without a cause of its own, right after another, has that one's."""
        last = self.spikes[-1] if self.spikes else None
        if cause is not Cause.UNEXPLAINED or last is None or len(vitals) - 1 - self._began > AFTERSHOCK:
            grew = _rate_growth(vitals)
            if cause is Cause.UNEXPLAINED and grew >= GREW:
                return cause, f"the learning rate had risen {grew:.3g} times in the last {GROWTH} steps"
            return cause, _detail(cause, evidence)
        return last.cause, f"an aftershock of step {last.start}"

    def _look_back(self, subject: Subject, vitals: Sequence[Vitals]) -> Look | None:
        """The batch before, at the weights its step was taken from."""
        if len(vitals) < 2 or not subject.previous:
            return None
        with subject.footprint.before_the_step(subject.parameters):
            return self.inspector.look(
                subject, lambda: subject.problem(subject.previous), vitals[-2], on="batch", why="spike", urgent=True,
                coming_step=False,
            )  # fmt: skip

    def _around(self, subject: Subject, vitals: Sequence[Vitals]) -> tuple[Look | None, Look | None]:
        """The probe before and after the step that led to the spike."""
        if not subject.has_probe or len(vitals) < 2:
            return None, None
        with subject.footprint.before_the_step(subject.parameters):
            first = self.inspector.look(
                subject, subject.probe, vitals[-2], on="probe", why="spike", split=True, urgent=True, coming_step=False
            )
        if first is None:
            return None, None
        return first, self.inspector.look(subject, subject.probe, vitals[-1], on="probe", why="spike", split=True, urgent=True)

    def _non_finite(self, subject: Subject, vitals: Sequence[Vitals]) -> None:
        """NaN or infinity in the loss or a gradient: the batch is named, and where it entered."""
        now = vitals[-1]
        last = self.spikes[-1] if self.spikes else None
        if last is not None and last.cause is Cause.NON_FINITE and not last.over:
            self._update(self._measured(last, vitals))
            return
        if last is not None and not last.over:
            self._update(replace(last, over=True))
        name = first_bad_gradient(subject.named)
        poisoned = next((n for n, p in subject.named.items() if not bool(torch.isfinite(p).all())), None)
        detail = f"the gradient of {name} is not finite" if name else "the loss is not finite"
        detail = subject.bad_data or detail
        if poisoned is not None:
            detail = f"weight {poisoned} is not finite any more, because of the step before"
        evidence = Evidence(
            start=now.step, batch_loss=now.loss, before=self.alarm.before, gradient_norm=now.gradient_norm, bad_parameter=name
        )
        if not self.alarm.on:
            self.alarm.begin(len(vitals) - 1, now.loss)
        batch = vitals[-2].step if poisoned is not None and len(vitals) > 1 else now.step
        cause = cause_of(evidence)
        self._open(
            Spike(
                start=now.step, peak=now.step, end=None, height=math.inf, cause=cause, batch=batch, rate=now.rate, detail=detail
            ),
            evidence,
        )

    # Following and closing

    def _go_on(self, subject: Subject, vitals: Sequence[Vitals], batches: list[Batch]) -> None:
        now, spike, evidence = vitals[-1], self.spikes[-1], self._evidence
        assert evidence is not None
        if spike.cause not in (Cause.BAD_BATCH, Cause.DATA_SHIFT) and self._bad_batch_inside(subject, vitals, batches, evidence):
            return
        if spike.cause is Cause.BAD_BATCH and evidence.batches_high <= IN_A_ROW:
            typical = self.inspector.typical_loss(subject, batches)
            again = replace(evidence, batch_loss=now.loss, probe_loss=self.inspector.probe_loss(subject), typical_loss=typical)
            # The probe must be as it was: where weights were thrown far away, every batch differs from every other.
            unharmed = (again.probe_loss or math.inf) < 2.0 * (evidence.probe_loss or 0.0)
            if unharmed and batch_is_bad(again):
                self._evidence = evidence = replace(again, batches_high=evidence.batches_high + 1)
            if evidence.batches_high > IN_A_ROW:
                spike = replace(spike, cause=cause_of(evidence), detail=_detail(Cause.DATA_SHIFT, evidence))
        if spike.cause is Cause.UNEXPLAINED and now.loss > 2.0 * evidence.batch_loss:
            spike = self._reconsidered(spike, evidence, subject, vitals)
        self._update(self._measured(spike, vitals))

    def _bad_batch_inside(self, subject: Subject, vitals: Sequence[Vitals], batches: list[Batch], evidence: Evidence) -> bool:
        """Whether a sudden second rise comes from a bad batch: then that is a spike of its own."""
        now, index = vitals[-1], len(vitals) - 1
        if self.alarm.peak != index or not now.loss > 2.0 * vitals[-2].loss:
            return False
        evidence = replace(
            evidence,
            start=now.step,
            batch_loss=now.loss,
            probe_loss=self.inspector.probe_loss(subject),
            probe_raised=False,
            typical_loss=self.inspector.typical_loss(subject, batches),
            input_scale=_scale_of_inputs(subject, vitals),
        )
        if cause_of(evidence) is not Cause.BAD_BATCH:
            return False
        self._update(replace(self.spikes[-1], over=True))
        self.alarm.start = index
        spike = Spike(start=now.step, peak=now.step, end=None, height=1.0, cause=Cause.BAD_BATCH, rate=now.rate, batch=now.step)
        self._open(replace(self._measured(spike, vitals), detail=_detail(Cause.BAD_BATCH, evidence)), evidence)
        return True

    def _reconsidered(self, spike: Spike, evidence: Evidence, subject: Subject, vitals: Sequence[Vitals]) -> Spike:
        """A spike that has doubled since it was judged is judged anew: what it comes from may only show now."""
        back = self._look_back(subject, vitals)
        ratio = evidence.ratio if back is None else back.ratio
        self._evidence = evidence = replace(
            evidence,
            batch_loss=vitals[-1].loss,
            typical_loss=None,
            probe_loss=None,
            input_scale=_scale_of_inputs(subject, vitals[:-1]),
            rates=tuple(v.rate for v in vitals[-41:-1]),
            surprise=max((v.surprise for v in vitals[-6:] if v.surprise is not None), default=None),
            moment_fall=self._fall_in_quiet(subject),
            ratio=ratio,
        )
        cause = cause_of(evidence)
        if cause is Cause.UNEXPLAINED:
            return spike
        return replace(spike, cause=cause, ratio=ratio, on="batch", rate=vitals[-2].rate, batch=vitals[-2].step,
                       detail=_detail(cause, evidence), rising=False)  # fmt: skip

    def _end(self, subject: Subject, vitals: Sequence[Vitals]) -> None:
        """The loss is back, or the new level has become the normal one."""
        now, spike, after = vitals[-1], self.spikes[-1], None
        took = len(vitals) - 1 - self._began
        if took <= SHORT and spike.cause in (Cause.UNEXPLAINED, Cause.BAD_BATCH) and math.isfinite(self.alarm.top):
            self.alarm.learn(self.alarm.top)
        back = took < self.alarm.patience
        if spike.sharpness_before is not None:
            after = self.inspector.look(
                subject, subject.probe, now, on="probe", why="after", split=True, urgent=True, features=True
            )
        self._update(
            replace(
                spike,
                end=now.step if back else None,
                took=took if back else None,
                over=True,
                sharpness_after=None if after is None else after.kernel_norm or after.sharpness,
            )
        )

    def _open(self, spike: Spike, evidence: Evidence) -> None:
        self._evidence, self._began = evidence, self.alarm.start if self.alarm.start is not None else 0
        self.spikes.append(spike)
        self._told(spike)

    def _update(self, spike: Spike) -> None:
        if spike != self.spikes[-1]:
            self.spikes[-1] = spike
            self._told(spike)

    def _measured(self, spike: Spike, vitals: Sequence[Vitals]) -> Spike:
        """The spike as high as it is by now: over the loss before, where that was positive, and above it."""
        top, before = self.alarm.top, self.alarm.before
        if not math.isfinite(top):
            height = rise = math.inf
        else:
            height, rise = top / before if before > 0 else math.nan, top - before
        return replace(spike, peak=vitals[self.alarm.peak].step, height=height, rise=rise)


def _rate_growth(vitals: Sequence[Vitals]) -> float:
    """The learning rate over the least one of the last steps."""
    rates = [v.rate for v in vitals[-GROWTH - 1 : -1]]
    least = min(rates, default=0.0)
    return rates[-1] / least if least > 0 else 1.0


def _detail(cause: Cause, evidence: Evidence) -> str:
    """The numbers behind a cause that no look tells."""
    if cause is Cause.RATE_JUMP:
        return f"the learning rate had jumped {rate_jumped(evidence.rates):.3g} times"
    if cause is Cause.MOMENT_COLLAPSE:
        return (
            f"the gradient was {evidence.surprise:.3g} times what Adam's second moment expected, which had fallen "
            f"{evidence.moment_fall:.3g} times in the quiet stretch before"
        )
    if cause is Cause.DATA_SHIFT:
        return f"{evidence.batches_high} batches in a row are far harder than the probe"
    if cause is Cause.BAD_BATCH and batch_is_bad(evidence) and evidence.probe_loss:
        times = evidence.batch_loss / (evidence.usual * evidence.probe_loss)
        if times <= 0 or evidence.probe_loss < 0:
            return f"its loss lies {evidence.batch_loss - evidence.probe_loss:.3g} above that of the probe at the same weights"
        return f"its loss is {times:.3g} times what the probe has at the same weights"
    if cause is Cause.BAD_BATCH:
        return f"its inputs are {evidence.input_scale:.3g} times as large as those of other batches"
    return ""


def _share_of_rise(first: Look | None, second: Look | None) -> float | None:
    """Part of the rise of the probe's loss that lies in the top eigenspace; None where it did not rise."""
    if first is None or second is None or first.top_loss is None or second.top_loss is None or not second.loss > first.loss:
        return None
    return (second.top_loss - first.top_loss) / (second.loss - first.loss)


def _scale_of_inputs(subject: Subject, vitals: Sequence[Vitals]) -> float | None:
    """The inputs of the last batch against those before and the probe: the smaller departure counts, if beyond their noise."""
    sizes = [v.input_size for v in vitals[-42:] if v.input_size is not None]
    if len(sizes) < 3 or subject.probe_size is None:
        return None
    departures = [sizes[-1] / other for other in (median(sizes[:-1]), subject.probe_size) if other]
    least = min(departures, key=lambda d: abs(math.log(d)) if d else math.inf, default=None)
    if not least:
        return least
    return least if abs(math.log(least)) > 6.0 * log_noise(sizes[:-1]) else 1.0
