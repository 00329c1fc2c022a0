"""The answer: is it learning, what is wrong, what to change, how that is known. From findings and trials, by explicit rules.

1. Findings of one cause count as one. A warning whose remedy was tried and brought nothing becomes a note.
2. What follows from another cause (`CAUSES`) becomes a note, unless taking it away alone helps more than taking that one away.
3. Causes that stop training come first, in the order of `CAUSES`; then those whose remedy took most of the loss away; then
   those that could not be tried.
4. The first sentence says whether it learns, the second names the cause and what to change, the third what became of that on
   a copy. One learning rate is named: that of the advice, else that of the trials of rates, else the user's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from theodolite.measures.trials import TrialRuns, outcome_of
from theodolite.results import CAUSES, Finding, Row, Severity, worst_first
from theodolite.text import plural

#: Causes that an inspection proves, of which nothing else matters before they are repaired; no trial can take back these, nor
#: those of the validation data.
STOPPING = ("not finite", "frozen model", "missing parameters", "dead layer", "labels do not fit")
PROVEN = (*STOPPING, "augmented validation", "leaked validation", "overfitting")
#: Labels of what is said of the loss in eval mode, by which nothing can be told of the training -> where that follows from.
FOLLOWS = {"no rate helps": "batch statistics"}
#: What has no remedy of its own: it stands only where no cause is found that brings it about.
UNEXPLAINED = "not learning"
#: Instruments without which nobody can say that nothing needs to be changed.
DECISIVE = ("learning_rate", "progress")
#: How many findings stand below the verdict.
SHOWN = 7
#: A consequence is a cause of its own where its remedy takes away more of the loss than that of its cause, by this share.
CLEARLY = 0.1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """At most three sentences, and one number to set.

    `causes` are those at fault, the worst first; `lr` is the learning rate to train with, None where nothing is known of it;
    `learning` whether the run learns, None where that is not known.
    """

    sentences: tuple[str, ...]
    lr: float | None = None
    causes: tuple[str, ...] = ()
    learning: bool | None = None

    def __str__(self) -> str:
        return " ".join(self.sentences)


def judge(
    findings: Sequence[Finding], results: Mapping[str, Any], *, lr: float | None = None
) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict, and the findings with the severities that the trials have left them."""
    trials = next((found for found in results.values() if isinstance(found, TrialRuns)), TrialRuns(trials=()))
    serious = {f.cause: f for f in reversed(worst_first(findings)) if f.severity.rank >= Severity.WARNING.rank and f.cause}
    tried = {row["cause"]: row for row in trials.trials if not row["not_tried"]}
    useless = {cause for cause in serious if cause in tried and not tried[cause]["better"] and cause not in PROVEN}
    standing = [cause for cause in serious if cause not in useless]
    behind = {cause: root for cause in standing if (root := _root(cause, standing, tried))}
    roots = sorted((cause for cause in standing if cause not in behind), key=lambda cause: _urgency(serious[cause], tried))
    adjusted = [_adjusted(f, useless, behind, tried) for f in findings]
    adjusted = [_of_the_eval_loss(f) if not f.cause and FOLLOWS.get(f.label) in standing else f for f in adjusted]
    order = {cause: place for place, cause in enumerate(roots)}
    adjusted = sorted(worst_first(adjusted), key=lambda f: order.get(f.cause, len(order)))
    progress = results.get("progress")
    if getattr(progress, "learning", None) is False:  # then no answer is good
        adjusted = [replace(f, severity=Severity.NOTE) if f.headline and f.severity is Severity.GOOD else f for f in adjusted]
    rate = _rounded(_recommended(results, roots, trials, lr))
    wrong = _causes(roots, serious, trials) if roots else [_nothing_wrong(results, findings, rate)]
    sentences = (_learning(progress), *wrong)
    learning = getattr(progress, "learning", None)
    return Verdict(sentences=sentences[:3], lr=rate, causes=tuple(roots), learning=learning), tuple(adjusted)


def shown(findings: Sequence[Finding], most: int = SHOWN) -> list[Finding]:
    """The findings that stand below a verdict: what is serious, what answers the question, then what says what to do."""

    def weight(finding: Finding) -> tuple[bool, bool, bool]:
        serious = finding.severity.rank >= Severity.WARNING.rank
        return (not serious, not finding.headline, not finding.advice)

    once: dict[str, Finding] = {}
    for finding in findings:  # the worst finding of a cause stands for it
        once.setdefault(finding.cause or f"{finding.instrument} {finding.label} {finding.sentence}", finding)
    return sorted(once.values(), key=weight)[:most]


def gain(trial: Row) -> float:
    """Which share of the loss a change has taken away; 0 where it is no better.

    >>> gain({"better": True, "start": 2.0, "own": 2.0, "changed": 0.5}), gain({"better": False})
    (0.75, 0.0)
    """
    if not trial["better"]:
        return 0.0
    own, changed = trial["own"], trial["changed"]
    if not math.isfinite(own):
        return 1.0
    return float((own - changed) / max(abs(own), abs(changed), 1e-300))


def _root(cause: str, standing: Sequence[str], tried: Mapping[str, Row]) -> str:
    """The cause that this one follows from, empty where it stands for itself."""
    for other in standing:
        if other == cause or cause not in _consequences(other):
            continue
        known = cause == UNEXPLAINED or other in tried or other in PROVEN
        own = gain(tried[cause]) if cause in tried else 0.0
        theirs = gain(tried[other]) if other in tried else 1.0
        if known and own <= theirs + CLEARLY:
            return other
    return ""


def _consequences(cause: str) -> set[str]:
    """All that follows from a cause, also by way of others."""
    found: set[str] = set()
    todo = list(CAUSES.get(cause, ()))
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += CAUSES.get(name, ())
    return found - {cause}


def _urgency(finding: Finding, tried: Mapping[str, Row]) -> tuple[bool, float, float, int, int]:
    cause, trial = finding.cause, tried.get(finding.cause)
    place = list(CAUSES).index(cause) if cause in CAUSES else len(CAUSES)
    ended = trial["changed"] if trial is not None and trial["better"] else math.inf
    return (cause not in STOPPING, -gain(trial) if trial is not None else 0.0, ended, -finding.severity.rank, place)


def _adjusted(finding: Finding, useless: set[str], behind: Mapping[str, str], tried: Mapping[str, Row]) -> Finding:
    if finding.severity.rank < Severity.WARNING.rank:
        return finding
    if finding.cause in useless:
        trial = tried[finding.cause]
        text = f"{finding.sentence} It was tried: {trial['advice']} brings nothing here, {outcome_of(trial)}."
        return replace(finding, severity=Severity.NOTE, sentence=text, advice="")
    if finding.cause in behind:
        text = f"{finding.sentence} It follows from: {behind[finding.cause]}."
        return replace(finding, severity=Severity.NOTE, sentence=text, advice="")  # that of its cause is the one to follow
    return finding


def _of_the_eval_loss(finding: Finding) -> Finding:
    """A finding without a cause of its own: a training that blows up has one, and is none of these."""
    text = f"In eval mode: {finding.sentence[:1].lower()}{finding.sentence[1:]} It follows from: {FOLLOWS[finding.label]}."
    return replace(finding, severity=Severity.NOTE, sentence=text, advice="", cause="")


def _recommended(results: Mapping[str, Any], roots: Sequence[str], trials: TrialRuns, own: float | None) -> float | None:
    """The one rate to set."""
    if roots:
        main = trials.of(roots[0])
        if main is not None and main["lr"] is not None:
            return float(main["lr"])
    chosen = next((found for found in results.values() if hasattr(found, "recommended")), None)
    about_rates = not roots or any("rate" in cause or cause == "no warm-up" for cause in roots)
    if chosen is not None and chosen.recommended is not None and (about_rates or own is None):
        return float(chosen.recommended)
    return own


def _rounded(lr: float | None) -> float | None:
    """A rate that somebody types: two digits, unless it came with more."""
    return None if lr is None else float(f"{lr:.3g}")


def _learning(progress: Any) -> str:
    if progress is None:
        return "Whether it learns was not measured."
    return first_sentence(progress.sentence())


def _causes(roots: Sequence[str], serious: Mapping[str, Finding], trials: TrialRuns) -> list[str]:
    """What is wrong, what to change, and how that is known."""
    main = serious[roots[0]]
    trial = trials.of(roots[0])
    said = first_sentence(main.sentence).rstrip(".")
    vain = trial is not None and not trial["not_tried"] and not trial["better"] and roots[0] not in STOPPING
    advice = first_sentence(main.advice).rstrip(".") if trial is None or vain else trial["advice"]
    sentences = [f"{said}: {advice[:1].lower()}{advice[1:]}." if advice else f"{said}."]
    known = "" if trial is None else ("Not tried" if trial["not_tried"] else "Tried on a copy")
    outcome = "" if trial is None else trial["not_tried"] or outcome_of(trial)
    if trial is not None and vain:
        known, outcome = "Not enough on a copy", f"{trial['advice']}, {outcome}"
    rest = f"next: {', '.join(roots[1:3])}" if len(roots) > 1 else ""
    if known:
        sentences.append(f"{known}: {outcome}{'; ' + rest if rest else ''}.")
    elif rest:
        sentences.append(f"{rest[0].upper()}{rest[1:]}.")
    return sentences


def _nothing_wrong(results: Mapping[str, Any], findings: Sequence[Finding], lr: float | None) -> str:
    failed = next((f for f in findings if f.label == "failed" and f.instrument in DECISIVE), None)
    if failed is not None:
        return f"{first_sentence(failed.sentence).rstrip('.')}; the other measurements found nothing that needs to be changed."
    learning = getattr(results.get("progress"), "learning", None)
    rate = "" if lr is None else f"; lr={lr:.3g}"
    if learning is False:
        return f"No cause was found among those that were looked for{rate}."
    if learning is None:
        return f"{plural(len(results), 'measurement')} found nothing that needs to be changed; the others were not made."
    return f"Nothing was found that needs to be changed{rate}."


def first_sentence(text: str) -> str:
    """The first sentence of a text; names in quotes may hold full stops.

    >>> first_sentence("The loss is 2.3. Lower the rate.")
    'The loss is 2.3.'
    """
    text = text.strip()
    without_names = re.sub(r"(?<!\w)'.*?'(?!\w)", lambda name: "'" * len(name[0]), text)
    end = re.search(r"(?<=[.!?])\s+(?=[A-ZΑ-Ω'\"0-9])", without_names)
    return text if end is None else text[: end.start()]
