"""The survey page: findings first, then one section per instrument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from theodolite.results import Finding, Row


@dataclass(frozen=True, kw_only=True)
class Section:
    """One instrument as the page shows it.

    `state` is "done", "skipped" or "failed", `reason` says why it is not done; `svg` is an inline picture, `rows` the table
    below it, `how` one paragraph on how it was measured, `cost` what it took beside what was expected.
    """

    name: str
    title: str
    question: str
    state: str = "done"
    reason: str = ""
    sentence: str = ""
    findings: Sequence[Finding] = ()
    svg: str = ""
    figure_error: str = ""
    rows: Sequence[Row] = ()
    how: str = ""
    cost: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class SurveyPage:
    """All the survey page shows. `facts` describe what was surveyed, `plan` is the table of expected and real costs,
    `provenance` what somebody needs to repeat it. Every text may come from a user: the template escapes it."""

    title: str
    findings: Sequence[Finding]
    sections: Sequence[Section]
    facts: dict[str, str] = field(default_factory=dict)
    plan: Sequence[Row] = ()
    provenance: dict[str, str] = field(default_factory=dict)


def survey_html(page: SurveyPage) -> str:
    """The page as one self-contained text."""
    raise NotImplementedError


def write_survey(page: SurveyPage, path: str | PathLike[str]) -> Path:
    """Write the page; folders are made."""
    raise NotImplementedError
