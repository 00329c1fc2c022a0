"""The answer to a whole run: is it learning, what is wrong, what to change; at most three sentences, from all that is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from theodolite.monitors.measuring.curvature import CurvatureSample
from theodolite.monitors.progress.alerts import Alert
from theodolite.monitors.progress.causes import (
    GAINED,
    LONG,
    Trouble,
    dying_units,
    edge_of,
    few_units,
    gained,
    high_start,
    slow,
    trouble_of,
)
from theodolite.monitors.progress.loss_course import BELOW, LossSummary
from theodolite.monitors.progress.tracker import ProgressSample
from theodolite.monitors.spikes.diagnosis import Spike
from theodolite.results import Finding, Row, Severity
from theodolite.text import listed, plural

#: Validations before their course is judged, and by how much the last ones exceed the best where a model overfits.
VALIDATIONS, OVERFIT = 4, 0.25
#: A share of what a guess loses that is little to have gained.
LITTLE = 0.3
#: A share from which little is left to gain, and one of the highest learning rate below which it has been lowered.
MOST, DECAYED = 0.98, 0.2
#: Of the steps so far, the share after the best validation that makes the rise lasting.
LATE = 0.3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer (`text`), its `cause`, the rate to set, and the findings it rests on, the ones that it speaks of first."""

    text: str
    state: str
    cause: str = ""
    lr: float | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def learns(self) -> bool:
        return self.state in ("learning", "flat")

    @property
    def good(self) -> bool:
        """It learns, and nothing is wrong."""
        return self.learns and not self.cause

    def beside(self, finding: Finding) -> Finding:
        """A finding as it stands beside the verdict: what another fault brought about, or only came with it, is a note."""
        roots = {"dead layer": ("rate too high",)}.get(self.cause, ())
        if not self.cause or self.learns or finding.cause in ("", self.cause, *roots):
            return finding
        return replace(finding, severity=Severity.NOTE, cause="", advice="")


def verdict_of(
    sample: ProgressSample | None,
    looks: Sequence[CurvatureSample],
    spikes: Sequence[Spike],
    alerts: Sequence[Alert] = (),
    validation: Sequence[Row] = (),
) -> Verdict:
    """The verdict on a run, by explicit rules: how it stands, then why, then what to do. Pure."""
    if sample is None:
        return Verdict(text="Nothing has been observed yet.", state="starting")
    edge, loss = edge_of(looks), sample.loss
    trouble = trouble_of(sample, edge, spikes)
    if trouble is not None and not trouble.hard and sample.working < LONG:
        trouble = None
    state = _standing(sample, trouble)
    overfit = _overfitting(validation, loss) if state in ("learning", "flat") else None
    found = [
        _progress_finding(sample, state, trouble),
        *([] if overfit is None else [overfit]),
        *_smaller_findings(sample, trouble),
    ]
    sentences = [_head(loss, state, validation)]
    note = slow(sample, edge) if trouble is None else None
    if trouble is not None:
        sentences += [_sentence(trouble.why), trouble.advice]
        found.insert(0, _trouble_finding(trouble, state))
        found = found if trouble.cause != state else [found[0], *found[2:]]  # one finding says both
    elif overfit is not None:
        sentences += [overfit.sentence, overfit.advice]
    elif note is not None:
        sentences += [_sentence(note.why), note.advice]
        found.append(_finding(Severity.NOTE, _sentence(note.why), "slow", advice=note.advice))
    else:
        sentences += [_quiet(sample, state, spikes)]
    lr = trouble.lr if trouble is not None else note.lr if note is not None else None
    answer = Verdict(
        text=" ".join(text for text in sentences if text), state=state, cause="" if trouble is None else trouble.cause, lr=lr
    )
    past = trouble is None and answer.learns  # what an alert said is over
    found += [answer.beside(alert.finding(past=past)) for alert in alerts if alert.cause != answer.cause]
    return replace(answer, findings=tuple(found))


def _standing(sample: ProgressSample, trouble: Trouble | None) -> str:
    """The state as the verdict calls it: a plateau at the beginning, without another sign, is none of not learning."""
    state = sample.loss.state
    if trouble is None:
        return "starting" if state == "not learning" else state
    ended = sample.ended and state in ("starting", "flat")
    dead = trouble.cause == "dead layer" and state in ("starting", "learning") and gained(sample.loss) < BELOW
    return "not learning" if ended or dead else state


def _head(loss: LossSummary, state: str, validation: Sequence[Row]) -> str:
    guess = "" if loss.trivial is None else f" ({loss.trivial_name}: {_shown(loss.trivial)})"
    course = f"the loss went from {_shown(loss.began)} to {_shown(loss.level)} in {plural(loss.steps, 'step')}{guess}"
    falls = 100.0 * -loss.slope / loss.level * 100 if loss.falls and loss.level > 0 else 0.0
    at = "" if loss.trivial is None else f", where {loss.trivial_name} gives {_shown(loss.trivial)}"
    still = f" and falls by {falls:.2g} % per 100 steps" if 0.05 <= falls < 100.0 else ""
    last = f"; the validation loss is {_shown(validation[-1]['loss'])}" if validation else ""
    return {
        "learning": f"Learning: {course}{still}{last}.",
        "flat": f"{'Learned' if gained(loss) > GAINED else 'Little learned'}, and flat by now: {course}{last}.",
        "starting": f"Too early to say: {course}.",
        "lost": f"Progress was lost: from {_shown(loss.best)} at step {loss.best_step} to {_shown(loss.level)} now{guess}.",
        "not learning": f"Not learning: after {plural(loss.steps, 'step')} the loss is {_shown(loss.level)}{at}.",
        "diverged": f"Diverged: the loss went from {_shown(loss.began)} to {_shown(loss.level)}{guess}.",
        "not finite": "Broken: the loss is not a finite number any more.",
    }[state]


def _quiet(sample: ProgressSample, state: str, spikes: Sequence[Spike]) -> str:
    if state not in ("learning", "flat"):
        return ""
    loss, frozen = sample.loss, sample.layers.frozen
    if frozen > 0.5 and loss.reference - loss.level < LITTLE * abs(loss.reference):
        return f"Little is gained, and {100 * frozen:.0f} % of the weights are frozen: unfreeze them if that is not meant."
    few, harmed, over = dying_units(sample), [s for s in spikes if s.harmed], sum(s.recovered for s in spikes)
    if few is not None and state == "learning":
        return f"But {few_units(few)}: a lower rate from the start, or a leaky activation, keeps more of them."
    if harmed:
        return f"It went on after {plural(len(harmed), 'spike')} that did harm."
    advice = "nothing to change"
    if state == "flat" and gained(loss) < MOST and not sample.rate < DECAYED * sample.highest_rate:
        advice = f"a lower learning rate than {sample.rate:.3g} shows whether more can be gained"
    return _sentence(f"it came back from {plural(over, 'spike')}; {advice}" if over else advice)


def _progress_finding(sample: ProgressSample, state: str, trouble: Trouble | None) -> Finding:
    loss = sample.loss
    good = state in ("learning", "flat") and trouble is None
    stuck = {"learning": Severity.NOTE, "flat": Severity.NOTE, "starting": Severity.NOTE, "lost": Severity.WARNING}
    severity = Severity.GOOD if good else stuck.get(state, Severity.CRITICAL)
    best = f" The best was {_shown(loss.best)} at step {loss.best_step}, {plural(loss.since, 'step')} ago."
    sentence = _head(loss, state, ()) + (best if loss.since > 100 and state != "lost" and loss.best_step >= 0 else "")
    cause = trouble.cause if trouble is not None and severity.rank >= Severity.WARNING.rank else ""
    if severity.rank >= Severity.WARNING.rank and not cause:
        severity = Severity.NOTE
    error = loss.error if math.isfinite(loss.error) else None
    return _finding(severity, sentence, state, "loss", loss.level, error=error, cause=cause, headline=True)


def _trouble_finding(trouble: Trouble, state: str) -> Finding:
    severity = Severity.WARNING if state in ("learning", "flat", "lost", "starting") else Severity.CRITICAL
    return _finding(severity, _sentence(trouble.why), trouble.cause, advice=trouble.advice, cause=trouble.cause)


def _smaller_findings(sample: ProgressSample, trouble: Trouble | None) -> list[Finding]:
    """What is true and no cause: a high start, units that rest, layers without a gradient or frozen."""
    found: list[Finding] = []
    start = high_start(sample.loss)
    if start and trouble is None:
        advice = "Smaller initial weights save the first steps."
        found.append(_finding(Severity.NOTE, _sentence(start), "high start", "loss", sample.loss.began, advice=advice))
    layers, cause = sample.layers, "" if trouble is None else trouble.cause
    few = dying_units(sample)
    if few is not None and cause not in ("dead layer", "dead units"):
        found.append(_finding(Severity.NOTE, _sentence(few_units(few)), "few units alive", "units alive", float(few.lately or 0)))
    unused = [name for name in layers.unused if name not in layers.dead]
    if unused and cause != "dead layer":
        sentence = (
            f"{listed(unused, 3)} never had a gradient: the loss does not depend on {'it' if len(unused) == 1 else 'them'}."
        )
        found.append(_finding(Severity.NOTE, sentence, "no gradient", "layers", float(len(unused))))
    if layers.frozen > 0.0:
        sentence = f"{100 * layers.frozen:.0f} % of the model's weights are frozen (requires_grad is False)."
        found.append(_finding(Severity.NOTE, sentence, "frozen weights", "share of the weights", layers.frozen))
    return found


def _overfitting(validation: Sequence[Row], loss: LossSummary) -> Finding | None:
    """A validation loss that has risen for long while the training loss was below it."""
    losses = [(int(row["step"]), float(row["loss"])) for row in validation if math.isfinite(row["loss"])]
    if len(losses) < VALIDATIONS:
        return None
    step, best = min(losses, key=lambda pair: pair[1])
    last = [value for _, value in losses[-3:]]
    late = losses[-1][0] - step > LATE * (losses[-1][0] - losses[0][0])
    if not late or min(last) <= best + OVERFIT * abs(best) or losses[-1][1] <= loss.level:
        return None
    sentence = f"The validation loss has risen from {_shown(best)} at step {step} to {_shown(losses[-1][1])}: the model overfits."
    advice = f"Keep the weights of step {step}; more data, more regularisation or a smaller model help."
    return _finding(
        Severity.WARNING, sentence, "overfitting", "validation loss", losses[-1][1], advice=advice, cause="overfitting"
    )


def _finding(
    severity: Severity, sentence: str, label: str, quantity: str = "", value: float | None = None, **more: Any
) -> Finding:
    about = {"sentence": sentence, "label": label, "quantity": quantity, "value": value, **more}
    return Finding(instrument="monitor", severity=severity, **about)


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:].rstrip('.')}."


def _shown(value: float) -> str:
    return f"{value:.3g}"
