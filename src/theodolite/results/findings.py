"""`Finding`: what a measurement means, in one sentence, with its number, its advice and where the knowledge comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from theodolite.results.base import Row, fields_of


class Severity(StrEnum):
    """How much a finding matters, worst last."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found.

    `sentence` is for people; `label` is the same in a word or two that programs can rely on ("monotone", "dead layer");
    `quantity`, `value` and `error` are the number behind it, `advice` what to do about it and `source` where the
    knowledge comes from. `instrument` names the section of the survey that measured it.

    >>> found = Finding(instrument="rate", severity=Severity.NOTE, sentence="The critical rate is 0.5.", value=0.5, error=0.01)
    >>> print(found)
    note: The critical rate is 0.5.
    """

    instrument: str
    severity: Severity
    sentence: str
    label: str = ""
    quantity: str = ""
    value: float | None = None
    error: float | None = None
    advice: str = ""
    source: str = ""
    headline: bool = False  # answers what the user asked: it stands before notes, however harmless

    def row(self) -> Row:
        """The finding as one flat dictionary."""
        found = fields_of(self, "instrument severity label sentence quantity value error advice source")
        return {**found, "severity": self.severity.value}

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.sentence}" + (f" {self.advice}" if self.advice else "")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by severity, headlines before notes, and otherwise in the order they came."""

    def urgency(finding: Finding) -> float:
        rank = float(finding.severity.rank)
        return max(rank, Severity.NOTE.rank + 0.5) if finding.headline else rank

    return sorted(findings, key=urgency, reverse=True)
