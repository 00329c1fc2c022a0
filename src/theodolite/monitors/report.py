"""What a monitored training has shown: spikes with their causes, the learning rate against its edge, the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.measures.dynamics.spikes import MatchTable
from theodolite.monitors.measuring.curvature import CurvatureSample
from theodolite.monitors.progress.alerts import Alert
from theodolite.monitors.progress.causes import ABOVE_THE_EDGE, AT_THE_EDGE
from theodolite.monitors.progress.tracker import ProgressSample
from theodolite.monitors.spikes.diagnosis import SOURCE, Cause, Spike, finding_of
from theodolite.monitors.verdict import Verdict, verdict_of
from theodolite.monitors.watching.recorder import StepStats
from theodolite.results import Cost, Finding, Result, Row, Severity, fields_of
from theodolite.results.findings import worst_first
from theodolite.text import plural

#: Alignment of the features with those at the first look below which they have moved.
MOVED = 0.9
#: Share of a run between two looks from which what has not moved means something.
LONG_ENOUGH = 0.25
#: Share of sampled batches above their critical rate from which spikes are to be expected.
OFTEN = 0.1

#: Sampled steps below which no rate of matches is reported.
FEW = 5
#: Findings that the text shows.
SHOWN = 7


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MonitorReport(Result):
    """A monitored run.

    `verdict` says in at most three sentences whether it learns, what is wrong and what to change; `lr` is the learning rate to
    set, where one follows, and `state` how the loss stands, in a word. `findings` are worst first; `spikes` in order, each with
    its cause; `alerts` as they were raised. `match` is the table of exceeded critical rates against rises of the probe's loss,
    from the looks of calm times; `exceeded` of `sampled` looks at a batch found the learning rate above the critical one.
    `steps`, `looks`, `progress` (is it learning), `validation` and `layers` (at the last look) are rows.
    """

    findings: tuple[Finding, ...]
    spikes: tuple[Spike, ...]
    match: MatchTable
    steps: tuple[Row, ...]
    looks: tuple[Row, ...]
    exceeded: int
    sampled: int
    training_seconds: float
    monitor_seconds: float
    notes: tuple[str, ...] = ()
    verdict: str = ""
    state: str = ""
    lr: float | None = None
    alerts: tuple[Alert, ...] = ()
    progress: tuple[Row, ...] = ()
    layers: tuple[Row, ...] = ()
    validation: tuple[Row, ...] = ()

    @property
    def catapults(self) -> int:
        """Spikes that were catapults: the learning rate was above the critical one."""
        return sum(s.cause in (Cause.CATAPULT, Cause.RATE_JUMP) and (s.ratio or 0.0) > 1.0 for s in self.spikes)

    @property
    def overhead(self) -> float:
        """Time spent on monitoring over time spent on training."""
        return self.monitor_seconds / self.training_seconds if self.training_seconds else 0.0

    def rows(self) -> list[Row]:
        """One row per spike."""
        return [spike.row() for spike in self.spikes]

    def sentence(self) -> str:
        rest = len(self.findings) - SHOWN
        more = [f"{plural(rest, 'more finding')} in report.findings"] if rest > 0 else []
        return "\n".join([*([self.verdict] if self.verdict else []), *map(str, self.findings[:SHOWN]), *more])

    def end_record(self) -> dict[str, Any]:
        """The last line of a log."""
        rates = fields_of(self.match, "match_rate base_rate up_given_exceeded")
        return {
            "step": self.steps[-1]["step"] if self.steps else -1,
            "seconds": self.training_seconds + self.monitor_seconds,
            "monitor_seconds": self.monitor_seconds,
            **{name: rate.value for name, rate in rates.items()},
            **fields_of(self, "catapults exceeded sampled verdict state lr"),
        }

    def records(self) -> list[Row]:
        """Everything as records of a log: what `plots.plot_monitor` draws."""
        return [
            *({"kind": "step", **row} for row in self.steps),
            *({"kind": "look", **row} for row in self.looks),
            *({"kind": "spike", **row} for row in self.rows()),
            *({"kind": "progress", **row} for row in self.progress),
            *({"kind": "validation", **row} for row in self.validation),
            *({"kind": "alert", **alert.row()} for alert in self.alerts),
        ]


def summarise(
    steps: Sequence[StepStats],
    looks: Sequence[CurvatureSample],
    spikes: Sequence[Spike],
    match: MatchTable,
    *,
    training_seconds: float,
    monitor_seconds: float,
    notes: tuple[str, ...] = (),
    progress: Sequence[ProgressSample] = (),
    now: ProgressSample | None = None,
    alerts: Sequence[Alert] = (),
    validation: Sequence[Row] = (),
) -> MonitorReport:
    """The report of what a monitor has gathered; `now` is the progress at the last step. Pure."""
    on_batch = [look for look in looks if look.on == "batch" and look.why == "schedule" and look.exceeded is not None]
    exceeded, sampled = sum(bool(look.exceeded) for look in on_batch), len(on_batch)
    verdict = verdict_of(now, looks, spikes, alerts, validation)
    guess = None if now is None else now.loss.trivial
    found = [finding_of(spike, learns=verdict.good, guess=guess) for spike in spikes]
    findings = [*verdict.findings, *map(verdict.beside, found)]
    if not spikes and steps:
        findings.append(_calm(steps, verdict))
    possible = (_rate(looks, exceeded, sampled, verdict), _match(match, sampled, exceeded), _features(looks, len(steps)))
    findings += [f for f in possible if f is not None]
    findings += [_note(text) for text in notes]
    return MonitorReport(
        findings=tuple(worst_first(findings)),
        spikes=tuple(spikes),
        match=match,
        steps=tuple({**s.row(), "moment": s.moment, "surprise": s.surprise} for s in steps),
        looks=tuple(look.row() for look in looks),
        exceeded=exceeded,
        sampled=sampled,
        training_seconds=training_seconds,
        monitor_seconds=monitor_seconds,
        notes=notes,
        verdict=verdict.text,
        state=verdict.state,
        lr=verdict.lr,
        alerts=tuple(alerts),
        progress=tuple(sample.row() for sample in progress),
        layers=() if now is None else tuple(layer.row() for layer in now.layers.layers),
        validation=tuple(validation),
        cost=Cost(monitor_seconds, "monitor"),
    )


def _finding(sentence: str, label: str, quantity: str, value: float | None, **more: Any) -> Finding:
    settings = {"severity": Severity.NOTE, "source": SOURCE, **more}
    return Finding(instrument="monitor", sentence=sentence, label=label, quantity=quantity, value=value, **settings)


def _calm(steps: Sequence[StepStats], verdict: Verdict) -> Finding:
    """No spikes are good in a run that learns, and worth knowing in any other."""
    sentence = f"No spike in {len(steps)} steps; the loss went from {steps[0].loss:.4g} to {steps[-1].loss:.4g}."
    return _finding(sentence, "no spikes", "spikes", 0.0, severity=Severity.GOOD if verdict.good else Severity.NOTE)


def _rate(looks: Sequence[CurvatureSample], exceeded: int, sampled: int, verdict: Verdict) -> Finding | None:
    """The learning rate against the critical one of the probe, lately."""
    seen = [look for look in looks if look.on == "probe" and look.ratio is not None and look.why != "spike"]
    if not seen:
        return None
    last = seen[-1]
    assert last.ratio is not None
    near = "edge of stability" if last.ratio > AT_THE_EDGE else "below critical"
    word = "above critical" if last.ratio > ABOVE_THE_EDGE else near
    share = exceeded / sampled if sampled else 0.0
    meaning = {
        "above critical": " Training is above its edge of stability: expect catapults.",
        "edge of stability": " Training moves at its edge of stability.",
        "below critical": "" if share <= OFTEN else f" But {share:.0%} of the batches looked at are above theirs.",
    }[word]
    least = "" if last.converged else " at least"
    sentence = (
        f"At step {last.step} the learning rate {last.rate:.3g} is{least} {last.ratio:.3g} times the critical one on the "
        f"probe, {last.critical_rate:.3g}.{meaning}"
    )
    advice = "Lower the rate, or warm up longer, if the spikes do harm." if word == "above critical" and verdict.learns else ""
    error = last.ratio * last.error**2
    return _finding(
        sentence, word, "learning rate / critical rate", last.ratio, error=error, advice=advice, headline=verdict.good
    )


def _match(match: MatchTable, sampled: int, exceeded: int) -> Finding | None:
    if match.steps < FEW:
        return None
    sentence = f"{exceeded} of {sampled} sampled batches were above their critical rate. {match.sentence()}"
    label = "batches above critical" if exceeded > OFTEN * sampled else "batches below critical"
    rate = match.match_rate
    value, error = (rate.value, rate.error) if rate.count else (None, None)
    return _finding(sentence, label, "match rate P(exceeded | loss rose)", value, error=error)


def _features(looks: Sequence[CurvatureSample], steps: int) -> Finding | None:
    """How far the average gradient outer product has turned since the first look."""
    seen = [(look.step, look.agop_alignment) for look in looks if look.agop_alignment is not None]
    if len(seen) < 2 or seen[-1][0] - seen[0][0] < LONG_ENOUGH * steps:
        return None
    (first, _), (last, alignment) = seen[0], seen[-1]
    assert alignment is not None
    moved = alignment < MOVED
    sentence = (
        f"The input directions the model uses {'have turned' if moved else 'have hardly moved'}: their average gradient "
        f"outer product at step {last} has a cosine of {alignment:.2f} with that at step {first}."
    )
    label, source = "features moved" if moved else "features kept", "Zhu 2024, section 4.4 (AGOP)"
    return _finding(sentence, label, "AGOP alignment with the first look", alignment, source=source)


def _note(text: str) -> Finding:
    return _finding(f"{text[0].upper()}{text[1:].rstrip('.')}.", "monitor note", "", None, source="")
