"""From a survey to its page: sections with pictures, tables, how and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from theodolite.instruments.registry import get, names
from theodolite.plots import to_svg
from theodolite.report import Answer, Page, Section, provenance_of
from theodolite.results import Row
from theodolite.text import duration

if TYPE_CHECKING:
    from theodolite.instruments.survey_run import Survey


#: The instrument whose picture stands beside the verdict, the first that has one.
FIRST = ("learning_rate", "rate", "trials")


def page_of(survey: Survey) -> Page:
    """All that the page of a survey shows."""
    known = set(names())
    sections = [_section(survey, row, place) for place, row in enumerate(survey.plan) if row["instrument"] in known]
    few = survey.shown
    return Page(
        title=survey.title,
        answer=_answer(survey),
        findings=[*few, *(f for f in survey.findings if f not in few)],
        most=len(few),
        folded=True,
        sections=sections,
        facts=survey.facts,
        plan=[_plan_row(row) for row in survey.plan],
        provenance=provenance_of(survey),
    )


def first_picture(survey: Survey) -> Figure | None:
    """The picture beside the verdict; None where there is none."""
    for name in FIRST:
        drawn = get(name).figure(survey.results) if name in survey.results and name in names() else None
        if drawn is not None:
            return drawn if isinstance(drawn, Figure) else drawn.figure  # type: ignore[return-value]
    return None


def _answer(survey: Survey) -> Answer:
    """The verdict, the rate to set, and the picture that people know."""
    tone = "critical" if survey.causes or survey.learning is False else "good" if survey.good else "note"
    setting = "" if survey.lr is None else f"lr={survey.lr:.3g}"
    try:
        figure = first_picture(survey)
    except Exception:  # the section of that instrument says what went wrong
        figure = None
    pictures = [] if figure is None else [to_svg(figure, prefix="picture-first")]
    return Answer(sentences=survey.sentences, tone=tone, setting=setting, pictures=pictures)


def _section(survey: Survey, row: Row, place: int) -> Section:
    name = row["instrument"]
    instrument = get(name)
    result = survey.results.get(name)
    svg, error = _drawn(survey, name, place)
    return Section(
        name=name,
        title=instrument.title,
        question=instrument.question,
        state=row["state"] if row["state"] in ("done", "failed") else "skipped",
        reason=row.get("reason", ""),
        sentence="" if result is None or survey.of(name) else result.sentence(),
        findings=survey.of(name),
        svg=svg,
        figure_error=error,
        rows=[] if result is None else instrument.rows(result),
        how=instrument.how,
        cost=_cost(row),
        source=instrument.source,
    )


def _drawn(survey: Survey, name: str, place: int) -> tuple[str, str]:
    """The picture as SVG; one that cannot be drawn leaves its error instead."""
    try:
        figure = get(name).figure(survey.results) if name in survey.results else None
        return ("", "") if figure is None else (to_svg(figure, prefix=f"picture-{place}"), "")
    except Exception as problem:
        return "", f"{type(problem).__name__}: {problem}"


def _cost(row: Row) -> str:
    if row.get("took") is None:
        return ""
    took = duration(row["took"])
    if not row.get("seconds"):
        return took
    per = row["seconds"] / row["gradients"] if row.get("gradients") else 0.0
    gradients = f", that is {row['took'] / per:.3g} gradients" if per else ""
    settings = f" ({row['effort']})" if row.get("effort") else ""
    return f"{took}{gradients}{settings}; expected {duration(row['seconds'])}"


def _plan_row(row: Row) -> Row:
    costs = {"expected gradients": "gradients", "expected seconds": "seconds", "seconds": "took", "MiB": "MiB"}
    shown: Row = {"instrument": row["instrument"], "state": row["state"], "effort": row.get("effort", "")}
    return {**shown, **{name: row.get(key) for name, key in costs.items()}, "reason": row.get("reason", "")}
