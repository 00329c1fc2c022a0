"""Writes `sources.rst`: the papers and theses behind the experiments, their figures and tables, and what reproduces them."""

from __future__ import annotations

from pathlib import Path

from theodolite.experiments import coverage, sources
from theodolite.experiments.sources import REPRODUCIBLE, Source


def write(folder: Path) -> None:
    """The page below the folder of the documentation; one that is as it was is left alone."""
    path, text = folder / "sources.rst", page()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def page() -> str:
    """The page as text."""
    covered = coverage()
    heading = "The sources"
    intro = (
        "Every figure and table of these papers and theses is, or becomes, an experiment with claims that can fail: "
        f"{covered.count} of {covered.total} are there. ``theodolite reproduce ID`` runs one; "
        ":doc:`guide/reproducing` says how, and how your own paper joins them.\n"
    )
    parts = [heading, "=" * len(heading), "", intro]
    for source in sources().values():
        parts += [_section(source, covered.registered)]
    return "\n".join(parts)


def _section(source: Source, registered: dict[str, tuple[str, ...]]) -> str:
    place = f"`{source.link} <{source.link}>`__" if source.link else ""
    about = f"{', '.join(source.authors)}: *{source.title}*. {source.published}, {source.year}. {place}"
    lines = [
        source.label,
        "-" * len(source.label),
        "",
        about,
        "",
        ".. list-table::",
        "   :widths: 20 80",
        "   :header-rows: 1",
        "",
    ]
    lines += ["   * - item", "     - experiments"]
    for item in source.items:
        if item.kind in REPRODUCIBLE or item.key in registered:
            owners = ", ".join(f"``{name}``" for name in registered.get(item.key, ())) or "not yet"
            lines += [f"   * - {item.key.partition(' ')[2]}", f"     - {owners}"]
    return "\n".join([*lines, ""])
