"""Alerts while a training runs: rules over what is known of it, each raised once per stretch and said in one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from theodolite.monitors.progress.causes import (
    LONG,
    Edge,
    Trouble,
    dead_layer,
    dead_units,
    dying_units,
    lower_rate,
    missing_parameters,
    trouble_of,
    vanishing,
)
from theodolite.monitors.progress.tracker import ProgressSample
from theodolite.monitors.spikes.diagnosis import Spike
from theodolite.monitors.watching.recorder import StepStats
from theodolite.results import Finding, Row, Severity, fields_of

Kind = Literal[
    "not finite", "divergence coming", "dying units", "missing parameters", "vanishing gradients",
    "critical exceeded persistently", "loss floor", "not learning",
]  # fmt: skip

#: Steps for which what an alert says must not be so before it may be raised again.
STRETCH = 200
#: A loss is on its way to infinity above so many times a guess and the beginning, with gradients so many times the usual ones.
RUNAWAY, STEEP = 3.0, 3.0
#: Looks in a row that must agree on a loss that is stuck.
IN_A_ROW = 3
#: Looks at the critical rate, or spikes above it within `STRETCH` steps, that make exceeding it persistent.
EXCEEDED_LOOKS, EXCEEDED_SPIKES = 4, 3
#: Gradients in a row that are not finite while the loss is: a scaler of mixed precision skips one or two.
BAD_GRADIENTS = 3


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something to act on while the training runs.

    `kind` is one of a few fixed words, `cause` a name of `theodolite.results.CAUSES`, `advice` what to change and `lr` the
    learning rate to set, where one follows.

    >>> print(Alert(step=120, kind="dying units", severity=Severity.CRITICAL, sentence="Layer 7 is dead.", advice="Set lr=0.05."))
    step 120: dying units: Layer 7 is dead. Set lr=0.05.
    """

    step: int
    kind: Kind
    severity: Severity
    sentence: str
    advice: str = ""
    cause: str = ""
    lr: float | None = None

    def row(self) -> Row:
        return {**fields_of(self, "step"), "alert": self.kind, **fields_of(self, "severity cause sentence advice lr")}

    def finding(self, *, past: bool = False) -> Finding:
        """The alert as a finding of the report; a note, where what it said is `past`."""
        return Finding(
            instrument="monitor",
            severity=Severity.NOTE if past else self.severity,
            sentence=f"Alert at step {self.step}, {self.kind}: {self.sentence[0].lower()}{self.sentence[1:]}",
            label=f"alert: {self.kind}",
            advice="" if past else self.advice,
            cause="" if past else self.cause,
        )

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.sentence}" + (f" {self.advice}" if self.advice else "")


def print_alert(line: str) -> None:
    """The default way to show an alert: one line on stderr."""
    sys.stderr.write(f"theodolite: {line}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Situation:
    """What the rules look at: the last look at the progress, the looks before it, the edge, the spikes and the steps."""

    samples: Sequence[ProgressSample]
    edge: Edge
    spikes: Sequence[Spike]
    steps: Sequence[StepStats]

    @property
    def now(self) -> ProgressSample:
        return self.samples[-1]


class AlertKeeper:
    """Raises alerts: at most one of a kind, and of a cause, per stretch."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._seen: dict[str, int] = {}  # kind or cause -> the observed step at which it last held
        self._index = 0

    def step(
        self, steps: Sequence[StepStats], reference: float | None, weights_fine: Callable[[float], bool] = lambda limit: False
    ) -> Iterator[Alert]:
        """What must be said at once: numbers that are not finite, and a loss that runs away.

        `weights_fine` says whether other data stay below a limit at the same weights: then it is the batch and not the rate.
        """
        self._index += 1
        for alert in (_not_finite(steps), _divergence(steps, reference)):
            if alert is not None and not (alert.kind == "divergence coming" and weights_fine(RUNAWAY * (reference or 0.0))):
                yield from self._raised(alert)

    def look(self, here: Situation) -> Iterator[Alert]:
        """What a look at the whole shows; nothing more, once the loss is no number."""
        for rule in _RULES if here.now.loss.state != "not finite" else ():
            alert = rule(here)
            if alert is not None:
                yield from self._raised(alert)

    def _raised(self, alert: Alert) -> Iterator[Alert]:
        names = [alert.kind, *([f"cause: {alert.cause}"] if alert.cause else [])]
        known = any(self._index - self._seen.get(name, -STRETCH - 1) <= STRETCH for name in names)
        self._seen |= dict.fromkeys(names, self._index)
        if not known:
            self.alerts.append(alert)
            yield alert


# At every step


def _not_finite(steps: Sequence[StepStats]) -> Alert | None:
    now = steps[-1]
    if now.finite:
        return None
    if math.isfinite(now.loss) and (len(steps) < BAD_GRADIENTS or any(s.finite for s in steps[-BAD_GRADIENTS:])):
        return None
    what = "gradient" if math.isfinite(now.loss) else "loss"
    return Alert(
        step=now.step,
        kind="not finite",
        severity=Severity.CRITICAL,
        sentence=f"The {what} is {'NaN' if math.isnan(now.gradient_norm) or math.isnan(now.loss) else 'infinite'}.",
        advice="Stop, look at this batch and at the learning rate, and go on from the last checkpoint.",
        cause="not finite",
    )


def _divergence(steps: Sequence[StepStats], reference: float | None) -> Alert | None:
    """A loss far above a guess that still grows, with gradients far above the usual ones."""
    now = steps[-1]
    if reference is None or len(steps) < 5 or not RUNAWAY * reference < now.loss < math.inf:
        return None
    recent = [s.loss for s in steps[-5:]]
    usual = median(s.gradient_norm for s in steps[-200:])
    if now.loss < max(recent) or not now.gradient_norm > STEEP * usual:
        return None
    return Alert(
        step=now.step,
        kind="divergence coming",
        severity=Severity.CRITICAL,
        sentence=f"The loss has grown to {now.loss:.3g}, far above where it began, and gradients grow with it.",
        advice=f"Stop and lower the learning rate, now {now.rate:.3g}, by a factor of 4 or more, or clip the gradient.",
        cause="rate too high",
    )


# At looks


def _dying(here: Situation) -> Alert | None:
    if here.now.layers.dead:
        found = trouble_of(here.now, here.edge, here.spikes)
        if found is None or found.cause != "dead layer":
            return None
        return _alert(here, "dying units", dead_layer(here.now, here.edge, here.spikes), Severity.CRITICAL)
    last = [dying_units(sample) for sample in here.samples[-IN_A_ROW:]]
    if len(last) < IN_A_ROW or None in last or here.now.loss.state == "learning":
        return None
    return _alert(here, "dying units", dead_units(here.now, here.edge), Severity.WARNING)


def _missing(here: Situation) -> Alert | None:
    if not here.now.layers.missing:
        return None
    return _alert(here, "missing parameters", missing_parameters(here.now), Severity.WARNING)


def _vanishing(here: Situation) -> Alert | None:
    last = [vanishing(sample) for sample in here.samples[-IN_A_ROW:]]
    trouble = trouble_of(here.now, here.edge, here.spikes)
    if last[-1] is None or None in last or len(last) < IN_A_ROW or here.now.loss.falls:
        return None
    if trouble is not None and trouble.cause != "vanishing gradients":  # they follow from something else
        return None
    return _alert(here, "vanishing gradients", last[-1], Severity.WARNING)


def _exceeded(here: Situation) -> Alert | None:
    """Above the critical rate for long, in a run that does not learn."""
    if here.now.loss.state in ("learning", "starting"):
        return None
    above = [s for s in here.spikes if (s.ratio or 0.0) > 1.0 and here.now.step - s.start <= STRETCH]
    by_looks = here.edge.looks >= EXCEEDED_LOOKS and (here.edge.ratio or 0.0) > 1.2
    by_spikes = len(above) >= EXCEEDED_SPIKES and here.now.loss.state != "flat"
    if not by_looks and not by_spikes:
        return None
    lr = lower_rate(here.now, here.edge)
    ratio = here.edge.ratio if by_looks else median(s.ratio or 0.0 for s in above)
    how = "at the last looks" if by_looks else f"at the last {len(above)} spikes"
    why = f"the learning rate was {ratio:.3g} times the critical one {how}, and the loss does not fall"
    advice = "" if lr is None else f"Set lr={lr:g}."
    trouble = Trouble(cause="rate too high", why=why, advice=advice, lr=lr)
    return _alert(here, "critical exceeded persistently", trouble, Severity.WARNING)


def _stuck(here: Situation) -> Alert | None:
    """A loss at the level of a guess, or far above its best, for several looks."""
    now, states = here.now, [sample.loss.state for sample in here.samples[-IN_A_ROW:]]
    if now.ended and now.loss.state != "learning":
        trouble = trouble_of(now, here.edge, here.spikes)
        return None if trouble is None else _alert(here, "not learning", trouble, Severity.CRITICAL)
    if len(states) < IN_A_ROW or now.loss.falls:
        return None
    trouble = trouble_of(now, here.edge, here.spikes)
    if trouble is None:
        return None
    if all(state == "lost" for state in states):
        return _alert(here, "loss floor", trouble, Severity.WARNING)
    severity = Severity.WARNING if trouble.cause == "rate too low" else Severity.CRITICAL
    long_enough = now.working >= LONG or (trouble.hard and now.working >= LONG // 2)
    thrown = trouble.cause == "rate too high" and now.loss.state == "flat" and now.working >= LONG // 2
    if thrown:
        return _alert(here, "loss floor", trouble, Severity.WARNING)
    if not long_enough or any(state not in ("not learning", "diverged") for state in states):
        return None
    unknown = now.loss.trivial is None and now.working < 2 * LONG and not trouble.hard
    return None if unknown else _alert(here, "not learning", trouble, severity)


_RULES: tuple[Callable[[Situation], Alert | None], ...] = (_missing, _dying, _vanishing, _exceeded, _stuck)


def _alert(here: Situation, kind: Kind, trouble: Trouble, severity: Severity) -> Alert:
    loss = here.now.loss
    said = f"{trouble.why[0].upper()}{trouble.why[1:]}."
    if kind in ("not learning", "loss floor"):
        said = f"{_level(loss.level, loss.trivial, loss.trivial_name)}; {trouble.why}."
    return Alert(
        step=here.now.step, kind=kind, severity=severity, sentence=said, advice=trouble.advice, cause=trouble.cause, lr=trouble.lr
    )


def _level(level: float, trivial: float | None, name: str) -> str:
    against = "" if trivial is None else f", where {name} gives {trivial:.3g}"
    return f"The loss is {level:.3g}{against}"
