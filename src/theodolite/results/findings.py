"""`Finding`: what a measurement means, in one sentence, with its number, its advice and where the knowledge comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from theodolite.results.base import Row


class Severity(Enum):
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

    def row(self) -> Row:
        """The finding as one flat dictionary."""
        return {
            "instrument": self.instrument,
            "severity": self.severity.value,
            "label": self.label,
            "sentence": self.sentence,
            "quantity": self.quantity,
            "value": self.value,
            "error": self.error,
            "advice": self.advice,
            "source": self.source,
        }

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.sentence}" + (f" {self.advice}" if self.advice else "")


def number(value: float, error: float | None = None) -> str:
    """A number with its error, as a sentence shows it.

    >>> number(0.123456, 0.00123), number(2000.0, 0.5), number(1.5), number(float("inf"))
    ('0.1235 ± 0.0012', '2000 ± 0.5', '1.5', 'infinite')
    """
    if math.isinf(value):
        return "infinite"
    if error is None or not error > 0 or not math.isfinite(error):
        return f"{value:.4g}"
    return f"{value:.4g} ± {error:.2g}"
