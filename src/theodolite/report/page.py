"""`Page` and `Section`: what every page is made of, from findings, figures, tables and text, through one template."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import Enum
from itertools import chain, count
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from theodolite.files import write_whole
from theodolite.report.rendering import environment, slug
from theodolite.results import Finding, Result, Row, Severity, number, worst_first
from theodolite.text import plural

SHOWN = 12  # rows of a table that are seen at once; the others unfold
SPARE = 3  # no fold for this many rows or fewer
MOST = 500  # rows of one table on the page: thousands would make it slow, and the data are in the survey's files
_WORD = 24  # letters up to which a cell stays on one line
_CELL = 200  # letters of one cell
_FEW = 8  # numbers of an array that a cell shows
_NAMES = {
    Severity.CRITICAL: ("critical finding", "critical findings"),
    Severity.WARNING: ("warning", "warnings"),
    Severity.NOTE: ("note", "notes"),
    Severity.GOOD: ("good sign", "good signs"),
}


@dataclass(frozen=True)
class Badge:
    """A few words in a coloured frame; `tone` is a severity's value, "failed" or "skipped"."""

    text: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell that is more than a value: with badges, a small second line, a bar for a share, a link.

    `link` is the name of a section on the page, or an address; only http and https are linked.
    """

    text: str = ""
    note: str = ""
    link: str = ""
    badges: Sequence[Badge] = ()
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph: a badge or a title in bold letters before it, a command after it."""

    text: str = ""
    title: str = ""
    badge: Badge | None = None
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What a reader may unfold below its title: facts, a table, or a text that keeps its lines."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and its answer: an instrument of a survey, a part of an analysis, an experiment of the gallery.

    `state` is "done", "skipped" or "failed", `reason` says why it is not done; `about` stands in small letters below the title,
    `svg` is an inline picture with `notes` before it, `rows` the table below it, of which `shown` rows are seen at once, with
    `more` notes and folds after it; `how` is one paragraph on how it was measured, `cost` what it took beside what was expected.
    `svg` goes onto the page as it is: it has to come from `plots.to_svg`.
    """

    name: str
    title: str
    question: str = ""
    state: str = "done"
    reason: str = ""
    about: Sequence[Cell] = ()
    sentence: str = ""
    findings: Sequence[Finding] = ()
    notes: Sequence[Note] = ()
    svg: str = ""
    figure_error: str = ""
    rows: Sequence[Row] = ()
    shown: int = SHOWN
    more: Sequence[Note | Fold] = ()
    how: str = ""
    cost: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The verdict of a page; `tone` is a severity's value. `pictures` stand side by side where there is room.

    Each of them has to come from `plots.to_svg`.
    """

    sentences: Sequence[str]
    tone: str = "note"
    setting: str = ""
    pictures: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page shows. `findings` is None where a page has none by its nature; then `badges` sum it up.

    `facts` describe what the page is about, with `notes` and `folds` after them; `contents` is a table that leads to the
    sections, else their titles are listed; `plan` is the table of expected and real costs, `provenance` what somebody needs to
    repeat it, `made` the time (now by default). `kind` is what the page calls itself, `part` what it calls that which a section
    stands for. Every text may come from a user: the template escapes it.

    `answer` stands before everything else: its sentences, a `setting` to copy ("lr=0.1") and pictures; of the findings `most`
    are seen at once, and `folded` sections show their title and first sentence until they are opened.
    """

    title: str
    answer: Answer | None = None
    most: int | None = None
    folded: bool = False
    findings: Sequence[Finding] | None = None
    sections: Sequence[Section]
    badges: Sequence[Badge] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[Note] = ()
    folds: Sequence[Fold] = ()
    contents: Sequence[Row] = ()
    plan: Sequence[Row] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    kind: str = "survey"
    part: str = "instrument"


@dataclass(frozen=True)
class Table:
    """Rows as the page shows them: per column its name and its kind ("number", "word" or "text"), and the cells."""

    columns: list[tuple[str, str]]
    shown: list[list[Cell]]
    folded: list[list[Cell]]
    left_out: int


@dataclass(frozen=True)
class Part:
    """A section with its place on the page, its table, and the findings that its own sentence does not already say."""

    section: Section
    anchor: str
    table: Table
    badge: Badge | None
    findings: list[Finding]
    first: str  # what a folded section says


def page_html(page: Page) -> str:
    """The page as one self-contained text.

    >>> found = Finding(instrument="rate", severity=Severity.NOTE, sentence="The critical rate is 0.5.")
    >>> text = page_html(Page(title="my <net>", findings=[found], sections=[]))
    >>> "my &lt;net&gt;" in text, "The critical rate is 0.5." in text
    (True, True)
    """
    from theodolite import __version__

    anchors = _anchors([section.name for section in page.sections])
    parts = [_part(section, anchor) for section, anchor in zip(page.sections, anchors, strict=True)]
    findings = None if page.findings is None else list(page.findings) if page.answer else worst_first(page.findings)
    most = len(findings or ()) if page.most is None else page.most
    template = environment().get_template("page.html.j2")
    return template.render(
        page=page,
        findings=None if findings is None else findings[:most],
        further=(findings or [])[most:],
        badges=page.badges or _counts(findings or ()),
        states=_states(page.sections, page.part),
        quiet=_quiet(page.sections),
        parts=parts,
        places={part.section.name: part for part in reversed(parts)},
        made=page.made or datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        number=number,
        table_of=table_of,
        everything=MOST,
    )


def write_page(page: Page, path: str | PathLike[str]) -> Path:
    """Write the page; folders are made."""
    path = Path(path)
    write_whole(path, page_html(page).encode(errors="replace"))  # a file name need not be proper Unicode
    return path


def provenance_of(result: Result) -> dict[str, str]:
    """What somebody needs to repeat a measurement, as a page shows it."""
    facts = asdict(result.provenance) | ({} if result.seed is None else {"seed": result.seed})
    return {name: str(value) for name, value in facts.items()}


def table_of(rows: Sequence[Row], shown: int = SHOWN) -> Table:
    """Rows as texts: columns in the order they appear, a dash where a row has no value."""
    kept = list(rows[:MOST])
    names = list(dict.fromkeys(name for row in kept for name in row))
    values = {name: [_plain(row.get(name)) for row in kept] for name in names}
    cells = {name: [v if isinstance(v, Cell) else Cell(text=cell(v)) for v in values[name]] for name in names}
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


def _kind(values: Sequence[Any], cells: Sequence[Cell]) -> str:
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, Real) and not isinstance(value, bool) for value in there):
        return "number"
    return "word" if all(max(len(c.text), len(c.note)) <= _WORD and len(c.badges) < 2 for c in cells) else "text"


def _anchors(names: Iterable[str]) -> list[str]:
    """One anchor per name, different ones also where two names look the same as a slug."""
    anchors: list[str] = []
    for name in names:
        base = f"section-{slug(name)}"
        numbered = chain([base], (f"{base}-{n}" for n in count(2)))
        anchors.append(next(anchor for anchor in numbered if anchor not in anchors))
    return anchors


def _part(section: Section, anchor: str) -> Part:
    findings = worst_first(section.findings)
    tone = section.state if section.state in ("failed", "skipped") else findings[0].severity.value if findings else ""
    badge = Badge(tone, tone) if tone else None
    further = [finding for finding in findings if finding.sentence != section.sentence]
    first = findings[0].sentence if findings else section.sentence or section.reason
    return Part(section, anchor, table_of(section.rows, section.shown), badge, further, first)


def _counts(findings: Sequence[Finding]) -> list[Badge]:
    """Per severity that occurs, worst first, a phrase such as "2 warnings"."""
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in _NAMES}
    return [Badge(f"{n} {_NAMES[severity][n > 1]}", severity.value) for severity, n in counts.items() if n]


def _states(sections: Sequence[Section], part: str) -> str:
    """How many instruments there were, and how many of them have nothing to show."""
    rest = [(sum(section.state == state for section in sections), state) for state in ("failed", "skipped")]
    return ", ".join([plural(len(sections), part), *(f"{n} {state}" for n, state in rest if n)])


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
