"""What the analyses share: findings by their label, and a page whose sections show the findings of their name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite.report import Page, Section, provenance_of, write_page
from theodolite.results import Finding, Result, Severity, worst_first


@dataclass(frozen=True)
class Findings:
    """Makes findings from one source; `labels` says in which severities each label comes, the usual one first."""

    source: str
    labels: Mapping[str, tuple[Severity, ...]]

    def __call__(self, section: str, label: str, sentence: str, **fields: Any) -> Finding:
        usual = {"severity": self.labels[label][0], "source": self.source}
        return Finding(instrument=section, label=label, sentence=sentence, **usual | fields)


def analysis_page(
    result: Result,
    name: str,
    kind: str,
    sections: Sequence[Section],
    findings: Sequence[Finding],
    facts: Mapping[str, str],
) -> Page:
    """All that the page of an analysis shows; every text is escaped by the template."""
    placed = [replace(section, findings=[f for f in findings if f.instrument == section.name]) for section in sections]
    provenance = provenance_of(result)
    return Page(title=name, findings=findings, sections=placed, kind=kind, part="section", facts=facts, provenance=provenance)


def write_analysis(page: Page, out: str | PathLike[str]) -> tuple[Path, list[Finding]]:
    """Write the page; its place and its findings, the weightiest first."""
    return write_page(page, out), worst_first(page.findings or ())
