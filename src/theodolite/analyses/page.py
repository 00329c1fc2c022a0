"""What the analyses share: findings by their label, and a page whose sections show the findings of their name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite.report import Answer, Page, Section, provenance_of, write_page
from theodolite.results import Finding, Result, Severity, worst_first


def labels(**by_severity: str) -> dict[str, tuple[Severity, ...]]:
    """Labels with the severities they come in, the usual one first, from lists of labels with bars between them.

    >>> labels(note="idle | chosen", warning="idle")["idle"]
    (<Severity.NOTE: 'note'>, <Severity.WARNING: 'warning'>)
    """
    found: dict[str, tuple[Severity, ...]] = {}
    for severity, listed in by_severity.items():
        for label in listed.split(" | "):
            found[label] = (*found.get(label, ()), Severity(severity))
    return found


@dataclass(frozen=True)
class Findings:
    """Makes findings from one source; `labels` says in which severities each label comes, the usual one first."""

    source: str
    labels: Mapping[str, tuple[Severity, ...]]

    def __call__(self, section: str, label: str, sentence: str, **fields: Any) -> Finding:
        usual = {"severity": self.labels[label][0], "source": self.source}
        return Finding(instrument=section, label=label, sentence=sentence, **usual | fields)


def write_analysis(
    result: Result,
    out: str | PathLike[str],
    name: str,
    kind: str,
    sections: Sequence[Section],
    findings: Sequence[Finding],
    facts: Mapping[str, str],
    source: str,
    answer: Answer | None = None,
) -> tuple[Path, list[Finding]]:
    """Write the page of an analysis; its place and its findings, the weightiest first.

    `source` is that of the sections that name none. Below an `answer` the findings and sections are folded. Every text is
    escaped by the template.
    """
    placed = [
        replace(section, source=section.source or source, findings=[f for f in findings if f.instrument == section.name])
        for section in sections
    ]
    provenance = provenance_of(result)
    page = Page(
        title=name,
        answer=answer,
        most=None if answer is None else 0,
        folded=answer is not None,
        findings=findings,
        sections=placed,
        kind=kind,
        part="section",
        facts=facts,
        provenance=provenance,
    )
    return write_page(page, out), worst_first(findings)
