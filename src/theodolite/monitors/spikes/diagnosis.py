"""Why did the loss spike? Evidence in, a cause and a sentence out; nothing is measured here."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from theodolite.results import Finding, Row, Severity, fields_of
from theodolite.text import plural

SOURCE = "Zhu 2024, sections 4.2 and 4.3 (catapults in SGD)"

#: A batch is bad where its loss exceeds that of the probe at the same weights this many times, over what is usual.
BAD_BATCH = 1.5
#: A batch whose loss is less than this many times the usual one, for a single step, is hard and no fault.
HARD = 6.0
#: So is one whose loss stays below this share of that of a guess, however long it takes to be back.
FAR_BELOW = 0.6
#: A few samples carry a batch's loss where it is so many times what it is in most parts of the batch, and on the probe.
CARRIED = 10.0
#: Inputs so many times larger than those of other batches, or smaller, make a batch bad.
SCALED = 3.0
#: Standard deviations of the noise of a batch's loss that a bad batch exceeds.
BEYOND_NOISE = 6.0
#: A learning rate has jumped where it is this many times the ones before, within the last steps.
RATE_JUMP, LATELY = 1.5, 15
#: Batches in a row that are bad before the data counts as shifted.
IN_A_ROW = 3
#: A jump this large explains a spike even below the critical rate: that rate is about small steps.
LARGE_JUMP = 3.0
#: Adam's second moment is stale where the gradient is this many times what it expects ...
SURPRISE = 2.5
#: ... after it has fallen by this factor from its recent level.
MOMENT_FALL = 3.0


#: How a spike ended: not judged yet, all as before, the loss stayed up, or units died in it.
Aftermath = Literal["", "settled", "did not recover", "died"]


class Cause(StrEnum):
    """What a spike comes from."""

    CATAPULT = "catapult"
    RATE_JUMP = "learning-rate jump"
    BAD_BATCH = "bad batch"
    DATA_SHIFT = "data shift"
    MOMENT_COLLAPSE = "second-moment collapse"
    NON_FINITE = "non-finite"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known when a spike is judged; None where nobody could look.

    `batch_loss` is the loss of the batch at step `start`, before a step was taken on it, and `probe_loss` that of the probe at
    the same weights; `usual` is their ratio in calm times, and `probe_raised` says whether the probe has risen too. `rates` are
    the learning rates before the spike, in order, the last one being that of the step which led to it. `ratio` is the learning
    rate of that step over the critical one of its batch at the weights it was taken from, and `probe_ratio` the same on the
    probe. `spread` is the noise of the logarithm of a batch's loss, `noise` that of the loss itself, and `typical_loss` the
    median over parts of the batch. `input_scale` is the size of the inputs of the batch at fault over that of recent batches
    and of the probe, whichever it is nearer to. `began` is the least of the first losses of the run.
    """

    start: int
    batch_loss: float
    before: float
    gradient_norm: float = 0.0
    probe_loss: float | None = None
    probe_raised: bool = True
    usual: float = 1.0
    noise: float = 0.0
    rates: tuple[float, ...] = ()
    ratio: float | None = None
    probe_ratio: float | None = None
    surprise: float | None = None
    moment_fall: float | None = None
    bad_parameter: str | None = None
    batches_high: int = 1
    spread: float = 0.0
    typical_loss: float | None = None
    input_scale: float | None = None
    began: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Spike:
    """One spike as it is understood so far: where, how high, why, and whether it did harm.

    `height` is the highest loss over the one before (not a number where that was not positive), `rise` their difference; both
    are infinite where the loss was not finite. `took` counts the steps until the loss was back, None while it is not. `ratio`
    is the learning rate over the critical one, and `top_share` the part of the rise in the top eigenspace. `aftermath` is what
    the steps after it have shown; `bad_data`, that the batch itself holds what is not finite; `few_samples`, that a few of its
    samples carry its loss.
    """

    start: int
    peak: int
    cause: Cause
    end: int | None = None
    height: float = 1.0
    rise: float = math.nan
    took: int | None = None
    batch: int | None = None
    rate: float = math.nan
    ratio: float | None = None
    on: str = "batch"
    top_share: float | None = None
    sharpness_before: float | None = None
    sharpness_after: float | None = None
    kernel: bool = False
    over: bool = False
    rising: bool = False  # the learning rate was on its way up
    detail: str = ""
    aftermath: Aftermath = ""
    bad_data: bool = False
    few_samples: bool = False

    @property
    def recovered(self) -> bool:
        """Whether the loss came back, and nothing has shown since that it was not for good."""
        return self.end is not None and not self.harmed

    @property
    def died(self) -> bool:
        return self.aftermath == "died"

    @property
    def harmed(self) -> bool:
        """Whether it is known to have done lasting harm."""
        return self.aftermath in ("did not recover", "died") or (self.over and self.end is None)

    def row(self) -> Row:
        place = {**fields_of(self, "start peak end height"), "cause": self.cause.value}
        return place | fields_of(self, "rate ratio top_share sharpness_before sharpness_after batch aftermath")

    @property
    def fall(self) -> float | None:
        """Share of the sharpness that the spike has taken away."""
        if self.sharpness_before is None or self.sharpness_after is None or not self.sharpness_before > 0:
            return None
        return 1.0 - self.sharpness_after / self.sharpness_before


def few_carry(evidence: Evidence) -> bool:
    """Whether a few samples hold nearly all of a batch's loss, at weights that other data do not mind.

    More than the beginning lost, too: in a model that has learned, a sample that it gets wrong is nothing special.
    """
    others = [loss for loss in (evidence.typical_loss, evidence.probe_loss) if loss is not None]
    known = evidence.typical_loss is not None and min(others) > 0
    return known and max(CARRIED * max(others), evidence.began) < evidence.batch_loss < math.inf


def batch_is_bad(evidence: Evidence) -> bool:
    """Whether a batch stands out at weights where other data does not: most of it, or so far that no noise explains it."""
    if evidence.probe_loss is None or not math.isfinite(evidence.batch_loss):
        return False
    if few_carry(evidence):
        return True
    typical = min(evidence.batch_loss, evidence.batch_loss if evidence.typical_loss is None else evidence.typical_loss)
    expected = max(evidence.usual * evidence.probe_loss, evidence.before)
    if min(evidence.probe_loss, evidence.before, expected) <= 0:  # ratios mean nothing: the noise decides
        return typical > max(evidence.probe_loss, evidence.before) + 2.0 * BEYOND_NOISE * evidence.noise
    all_of_it = BAD_BATCH * math.exp(2.0 * evidence.spread)
    extreme = max(2.0, math.exp(min(50.0, BEYOND_NOISE * evidence.spread)))
    far_off = evidence.spread > 0 and evidence.batch_loss > extreme * expected and typical > expected
    return typical > all_of_it * expected or far_off


def is_scaled(scale: float | None) -> bool:
    """Whether a factor between sizes is beyond what batches differ by."""
    return scale is not None and scale > 0 and not 1.0 / SCALED < scale < SCALED


def rate_jumped(rates: tuple[float, ...]) -> float | None:
    """The largest factor by which a learning rate of the last steps lies above all of the five before it; None if it is small.

    >>> rate_jumped((0.1,) * 10 + (1.0,) * 3), rate_jumped((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7))
    (10.0, None)
    """
    if not all(map(math.isfinite, rates)):
        return None
    jumps = [_jump(rates[max(0, i - 6) : i], rates[i]) for i in range(max(3, len(rates) - LATELY), len(rates))]
    factor = max(jumps, default=0.0)
    return factor if factor >= RATE_JUMP else None


def _jump(before: tuple[float, ...], now: float) -> float:
    """A rate over the largest one before; 0 where it only goes on rising as it did."""
    largest = max(before)
    usual = max((b - a for a, b in itertools.pairwise(before)), default=0.0)
    return now / largest if largest > 0 and now - before[-1] > 2.0 * max(usual, 0.0) else 0.0


def cause_of(evidence: Evidence) -> Cause:
    """The first cause that the evidence proves, the most certain ones first."""
    if evidence.bad_parameter is not None or not math.isfinite(evidence.gradient_norm) or not math.isfinite(evidence.batch_loss):
        return Cause.NON_FINITE
    ratios = [r for r in (evidence.ratio, evidence.probe_ratio) if r is not None]
    jump = rate_jumped(evidence.rates)
    bad = batch_is_bad(evidence) or is_scaled(evidence.input_scale)
    if bad and (jump is None or not evidence.probe_raised):
        return Cause.DATA_SHIFT if evidence.batches_high > IN_A_ROW else Cause.BAD_BATCH
    if jump is not None and (jump >= LARGE_JUMP or not ratios or max(ratios) > 1.0):
        return Cause.RATE_JUMP
    stale = evidence.surprise is not None and evidence.surprise >= SURPRISE
    if stale and evidence.moment_fall is not None and evidence.moment_fall >= MOMENT_FALL:
        return Cause.MOMENT_COLLAPSE
    if ratios and max(ratios) > 1.0:
        return Cause.CATAPULT
    return Cause.UNEXPLAINED


def detail_of(cause: Cause, evidence: Evidence) -> str:
    """The numbers behind a cause that no measurement of curvature shows."""
    if cause is Cause.RATE_JUMP:
        return f"the learning rate had jumped {rate_jumped(evidence.rates):.3g} times"
    if cause is Cause.MOMENT_COLLAPSE:
        return (
            f"the gradient was {evidence.surprise:.3g} times what Adam's second moment expected, which had fallen "
            f"{evidence.moment_fall:.3g} times in the quiet stretch before"
        )
    if cause is Cause.DATA_SHIFT:
        return f"{evidence.batches_high} batches in a row are far harder than the probe"
    if cause is Cause.BAD_BATCH and few_carry(evidence):
        return f"a few of its samples carry its loss of {evidence.batch_loss:.3g}; most of it has {evidence.typical_loss:.3g}"
    if cause is Cause.BAD_BATCH and batch_is_bad(evidence) and evidence.probe_loss:
        times = evidence.batch_loss / (evidence.usual * evidence.probe_loss)
        if times <= 0 or evidence.probe_loss < 0:
            return f"its loss lies {evidence.batch_loss - evidence.probe_loss:.3g} above that of the probe at the same weights"
        return f"its loss is {times:.3g} times what the probe has at the same weights"
    if cause is Cause.BAD_BATCH:
        return f"its inputs are {evidence.input_scale:.3g} times as large as those of other batches"
    return ""


def finding_of(spike: Spike, *, learns: bool = True, guess: float | None = None) -> Finding:
    """The spike in words, with its number, its advice and its weight; none is called harmless in a run that does not learn.

    `guess` is the loss of the best constant prediction, where it is known.
    """
    severity, outcome = _outcome(spike, guess)
    soothing = severity is Severity.NOTE and spike.cause in _BY_THE_RATE and not learns
    outcome = outcome if learns else outcome.removesuffix(": harmless")
    advice = _HARMED if spike.harmed and spike.cause in _BY_THE_RATE else RISING_RATE if spike.rising else _ADVICE[spike.cause]
    return Finding(
        instrument="monitor",
        severity=severity,
        sentence=f"Step {spike.start} {_HEADS[spike.cause]}: {_because(spike)}{_height(spike)}{outcome}.",
        label=f"spike: {spike.cause.value}",
        quantity="learning rate / critical rate" if spike.ratio is not None else "height",
        value=spike.ratio if spike.ratio is not None else spike.height,
        advice="" if soothing else advice.format(batch=spike.batch, start=spike.start),
        source=SOURCE,
        cause="" if severity.rank < Severity.WARNING.rank else FAULTS[spike.cause],
    )


#: What is at fault (a name of `theodolite.results.CAUSES`) where a spike matters.
FAULTS = {
    Cause.CATAPULT: "rate too high",
    Cause.RATE_JUMP: "rate too high",
    Cause.BAD_BATCH: "bad batch",
    Cause.DATA_SHIFT: "data shift",
    Cause.MOMENT_COLLAPSE: "stale moments",
    Cause.NON_FINITE: "not finite",
    Cause.UNEXPLAINED: "",
}
_BY_THE_RATE = (Cause.CATAPULT, Cause.RATE_JUMP)
_HEADS = {
    Cause.CATAPULT: "was a catapult",
    Cause.RATE_JUMP: "came from a jump of the learning rate",
    Cause.BAD_BATCH: "was not a catapult but a bad batch",
    Cause.DATA_SHIFT: "was not a catapult but a shift of the data",
    Cause.MOMENT_COLLAPSE: "was not a catapult but a stale second moment",
    Cause.NON_FINITE: "was not a catapult but a number that is not finite",
    Cause.UNEXPLAINED: "saw the loss rise for a reason that was not found",
}
_HARMED = "Go back to a checkpoint before step {start}, and keep the learning rate below the critical one."
RISING_RATE = "Keep the learning rate where it was before, or raise it more slowly."
_PLACES = {"batch": "for that batch", "probe": "on the probe"}
_ADVICE = {
    Cause.CATAPULT: "Catapults of this kind need no remedy as long as the loss comes back; for none of them, lower the learning "
    "rate below the critical one.",
    Cause.RATE_JUMP: "Look at the schedule: warm up more slowly, or keep the rate below the critical one.",
    Cause.BAD_BATCH: "Look at batch {batch}: its labels, the scale of its inputs, duplicates. Clipping the gradient limits "
    "the harm.",
    Cause.DATA_SHIFT: "The data from step {batch} on differs from what was trained before: look at its order, its source and its "
    "preprocessing.",
    Cause.MOMENT_COLLAPSE: "Adam had forgotten how large gradients can be: lower beta2, clip the gradient or the update, raise "
    "eps, or warm up again after a quiet stretch.",
    Cause.NON_FINITE: "Look at batch {batch} and at the loss there; skip steps whose gradient is not finite.",
    Cause.UNEXPLAINED: "A larger budget, or a probe set of your own, lets the monitor look closer.",
}


def _because(spike: Spike) -> str:
    """The numbers that prove the cause."""
    parts = [spike.detail] if spike.detail else []
    if spike.ratio is not None and spike.cause in (Cause.CATAPULT, Cause.RATE_JUMP, Cause.UNEXPLAINED, Cause.BAD_BATCH):
        verb = "was" if spike.ratio > 1 else "was only"
        parts.append(f"lr {spike.rate:.3g} {verb} {spike.ratio:.3g} times critical {_PLACES.get(spike.on, '')}")
    if spike.top_share is not None and spike.top_share > 0 and spike.cause in (Cause.CATAPULT, Cause.RATE_JUMP):
        parts.append(f"{100 * min(1.0, spike.top_share):.0f} % of the rise in the top direction")
    if spike.fall is not None:
        what = "kernel norm" if spike.kernel else "sharpness"
        parts.append(f"{what} {'fell' if spike.fall >= 0 else 'rose'} {100 * abs(spike.fall):.0f} %")
    return ", ".join(parts) + (", " if parts else "")


def _merely_hard(spike: Spike, guess: float | None) -> bool:
    """Whether a batch is one of those that are harder than others in a healthy run: for a step, or far below a guess.

    Wrong labels cost a model that has learned more than a guess does.
    """
    if spike.cause is not Cause.BAD_BATCH or spike.bad_data or not spike.height < HARD:
        return False
    highest = spike.rise * spike.height / (spike.height - 1.0) if spike.height > 1.0 else math.nan
    return (spike.took or 0) <= 1 or (guess is not None and highest < FAR_BELOW * guess)


def _height(spike: Spike) -> str:
    if math.isinf(spike.rise):
        return "the loss was no number, "
    if math.isfinite(spike.height):
        return f"loss up to {spike.height:.3g} times, "
    return f"loss up by {spike.rise:.3g}, " if math.isfinite(spike.rise) else ""


def _outcome(spike: Spike, guess: float | None) -> tuple[Severity, str]:
    """How it ended, and how much that matters."""
    blameless = spike.cause in (Cause.CATAPULT, Cause.RATE_JUMP, Cause.UNEXPLAINED)
    known = FAULTS[spike.cause] != ""
    if spike.died:
        return (Severity.CRITICAL if known else Severity.NOTE), "and units died in it that have had no gradient since"
    if spike.aftermath == "did not recover":
        return (Severity.WARNING if known else Severity.NOTE), "and the loss did not recover: it settled above where it had been"
    if spike.recovered:
        blameless = blameless or _merely_hard(spike, guess)
        steps = f"back after {plural(spike.took or 0, 'step')}"
        settled = blameless and spike.aftermath == "settled"
        return (Severity.NOTE if blameless else Severity.WARNING), f"{steps}: harmless" if settled else steps
    if math.isinf(spike.rise):
        return Severity.CRITICAL, "and training cannot go on from it"
    return (
        Severity.WARNING if known and spike.over else Severity.NOTE
    ), "and it has not come back" if spike.over else "not back yet"
