"""The survey page: findings first, then one section per instrument."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.files import write_whole
from theodolite.report.pages import environment
from theodolite.results import Finding, Row, Severity, number, worst_first
from theodolite.text import plural

if TYPE_CHECKING:
    from markupsafe import Markup

SHOWN = 12  # rows of a table that are seen at once; the others unfold
SPARE = 3  # no fold for this many rows or fewer
MOST = 500  # rows of one table on the page: thousands would make it slow, and the data are in the survey's files
_WORD = 24  # letters up to which a cell stays on one line
_CELL = 200  # letters of one cell
_FEW = 8  # numbers of an array that a cell shows
_LONG = 30  # letters from which a word may be broken after its dots
_ADDRESS = re.compile(r"https?://\w[^\s<>\"]*", re.IGNORECASE)
_NAMES = {
    Severity.CRITICAL: ("critical finding", "critical findings"),
    Severity.WARNING: ("warning", "warnings"),
    Severity.NOTE: ("note", "notes"),
    Severity.GOOD: ("good sign", "good signs"),
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """One instrument as the page shows it.

    `state` is "done", "skipped" or "failed", `reason` says why it is not done; `svg` is an inline picture, `rows` the table
    below it, `how` one paragraph on how it was measured, `cost` what it took beside what was expected. `svg` goes onto the
    page as it is: it has to come from `plots.to_svg`.
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
    `provenance` what somebody needs to repeat it, `made` the time of the survey (now by default). `kind` is what the page
    calls itself, `part` what it calls that which a section stands for. Every text may come from a user: the template
    escapes it."""

    title: str
    findings: Sequence[Finding]
    sections: Sequence[Section]
    facts: dict[str, str] = field(default_factory=dict)
    plan: Sequence[Row] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    made: str = ""
    kind: str = "survey"
    part: str = "instrument"


@dataclass(frozen=True)
class Table:
    """Rows as the page shows them: per column its name and its kind ("number", "word" or "text"), cells as texts."""

    columns: list[tuple[str, str]]
    shown: list[list[str]]
    folded: list[list[str]]
    left_out: int


@dataclass(frozen=True)
class Part:
    """A section with its place on the page, its table, and the findings that its own sentence does not already say."""

    section: Section
    anchor: str
    table: Table
    badge: Severity | None
    more: list[Finding]


def survey_html(page: SurveyPage) -> str:
    """The page as one self-contained text.

    >>> found = Finding(instrument="rate", severity=Severity.NOTE, sentence="The critical rate is 0.5.")
    >>> text = survey_html(SurveyPage(title="my <net>", findings=[found], sections=[]))
    >>> "my &lt;net&gt;" in text, "The critical rate is 0.5." in text
    (True, True)
    """
    from theodolite import __version__

    anchors = _anchors([section.name for section in page.sections])
    parts = [_part(section, anchor) for section, anchor in zip(page.sections, anchors, strict=True)]
    findings = worst_first(page.findings)
    return (
        environment()
        .get_template("survey.html.j2")
        .render(
            page=page,
            findings=findings,
            counts=_counts(findings),
            states=_states(page.sections, page.part),
            quiet=_quiet(page.sections),
            parts=parts,
            places={part.section.name: part for part in reversed(parts)},
            plan=table_of(page.plan),
            made=page.made or datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=__version__,
            number=number,
            pieces=pieces,
            breakable=breakable,
        )
    )


def write_survey(page: SurveyPage, path: str | PathLike[str]) -> Path:
    """Write the page; folders are made."""
    path = Path(path)
    write_whole(path, survey_html(page).encode(errors="replace"))  # a file name need not be proper Unicode
    return path


def slug(name: str) -> str:
    """A name as part of an anchor: nothing but small letters, digits and hyphens.

    >>> slug("Learning rate_2"), slug('"><script>'), slug("λ")
    ('learning-rate-2', 'script', 'part')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"


def pieces(text: str) -> list[tuple[str, str]]:
    """A text cut into (words, address) with an empty address where nothing is linked; only http and https become links.

    >>> pieces("see https://a.org/b.")
    [('see ', ''), ('https://a.org/b', 'https://a.org/b'), ('.', '')]
    >>> pieces("javascript:alert(1)")
    [('javascript:alert(1)', '')]
    """
    found: list[tuple[str, str]] = []
    end = 0
    for match in _ADDRESS.finditer(text):
        address = _without_the_stop(match.group())
        found += [(text[end : match.start()], ""), (address, address)]
        end = match.start() + len(address)
    return [piece for piece in [*found, (text[end:], "")] if piece[0]]


def breakable(text: Any) -> Markup:
    """The text escaped, long names with places where a line may end: a name cut in mid-word is hard to read.

    >>> str(breakable("<b> blocks.11.attention.query_projection"))
    '&lt;b&gt; blocks.<wbr>11.<wbr>attention.<wbr>query_<wbr>projection'
    """
    from markupsafe import Markup, escape

    words = [re.split(r"(?<=[./_\\:-])", word) if len(word) >= _LONG else [word] for word in re.split(r"(\s+)", str(text))]
    return Markup("").join(Markup("<wbr>").join(escape(part) for part in word if part) for word in words)


def table_of(rows: Sequence[Row], shown: int = SHOWN) -> Table:
    """Rows as texts: columns in the order they appear, a dash where a row has no value."""
    kept = list(rows[:MOST])
    names = list(dict.fromkeys(name for row in kept for name in row))
    values = {name: [_plain(row.get(name)) for row in kept] for name in names}
    cells = {name: [cell(value) for value in values[name]] for name in names}
    lines = [[cells[name][i] for name in names] for i in range(len(kept))]
    cut = len(lines) if len(lines) <= shown + SPARE else shown
    columns = [(str(name).replace("_", " "), _kind(values[name], cells[name])) for name in names]
    return Table(columns, lines[:cut], lines[cut:], len(rows) - len(kept))


def cell(value: Any) -> str:
    """A value as a table shows it: four significant digits, yes and no for truth, a dash for nothing.

    >>> cell(0.123456), cell(123456), cell(True), cell(None), cell(float("-inf")), cell([1.0, 2.0])
    ('0.1235', '123456', 'yes', '–', '-∞', '1, 2')
    """
    value = _plain(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return _float(float(value))
    if isinstance(value, complex):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        value = ", ".join(cell(v) for v in value)
    text = str(value)
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"


def _float(value: float) -> str:
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.4g}"


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python, large arrays by their shape; everything else as it is."""
    if isinstance(value, Enum):
        return value.value
    if not hasattr(value, "tolist") or not hasattr(value, "shape"):
        return value
    shape = tuple(value.shape)
    return value.tolist() if math.prod(shape) <= _FEW else " × ".join(map(str, shape)) + " numbers"


def _kind(values: Sequence[Any], cells: Sequence[str]) -> str:
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, Real) and not isinstance(value, bool) for value in there):
        return "number"
    return "word" if all(len(text) <= _WORD for text in cells) else "text"


def _without_the_stop(address: str) -> str:
    """The address without what ends the sentence around it; a bracket stays where it was opened inside."""
    while address[-1] in ".,;:!?'" or (address[-1] == ")" and address.count(")") > address.count("(")):
        address = address[:-1]
    return address


def _anchors(names: Iterable[str]) -> list[str]:
    """One anchor per name, different ones also where two names look the same as a slug."""
    anchors: list[str] = []
    for name in names:
        anchor = base = f"section-{slug(name)}"
        count = 1
        while anchor in anchors:
            count += 1
            anchor = f"{base}-{count}"
        anchors.append(anchor)
    return anchors


def _part(section: Section, anchor: str) -> Part:
    findings = worst_first(section.findings)
    badge = findings[0].severity if findings else None
    more = [finding for finding in findings if finding.sentence != section.sentence]
    return Part(section, anchor, table_of(section.rows), badge, more)


def _counts(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Per severity that occurs, worst first: its name and a phrase such as "2 warnings"."""
    counts = []
    for severity, (one, many) in _NAMES.items():
        count = sum(finding.severity is severity for finding in findings)
        if count:
            counts.append((severity.value, f"{count} {one if count == 1 else many}"))
    return counts


def _states(sections: Sequence[Section], part: str) -> str:
    """How many instruments there were, and how many of them have nothing to show."""
    count = len(sections)
    text = plural(count, part)
    rest = [(sum(section.state == state for section in sections), state) for state in ("failed", "skipped")]
    return ", ".join([text, *(f"{n} {state}" for n, state in rest if n)])


def _quiet(sections: Sequence[Section]) -> str:
    """What to say where nothing was found: silence after a failure is no good news."""
    if not sections:
        return "No instrument was asked to measure anything."
    done = [section for section in sections if section.state == "done"]
    if not done:
        return "No instrument finished, so nothing is known yet. The sections below say why."
    if len(done) < len(sections):
        return "The instruments that finished found nothing that needs your attention. The others say below why they did not."
    return "Nothing needs your attention: every instrument finished and none of them had anything to report."
