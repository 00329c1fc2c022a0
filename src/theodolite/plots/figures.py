"""Whole figures: several axes with letters; SVG that is byte for byte the same each time, without date or random ids."""

from __future__ import annotations

import hashlib
import html
import math
import re
from collections.abc import Iterator
from io import BytesIO, StringIO
from os import PathLike
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from theodolite.arguments import a_path, a_text, checked, number_in, shown, up_to
from theodolite.arguments import count as positive_count
from theodolite.files import write_whole
from theodolite.interrupts import unbroken_context
from theodolite.plots.style import a_figure, new_figure, style, write

# Letters are drawn as paths: a page with no network cannot bring its font, and in another font labels would be
# clipped or overlap. The words are kept for screen readers in the <title>.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "theodolite", "svg.image_inline": True}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_PROLOG = '<?xml version="1.0" encoding="utf-8" standalone="no"?>\n'
_ROOT = re.compile(r"<svg\b[^>]*>")


def _two_sizes(name: str, value: Any) -> tuple[float, float]:
    """Width and height of a panel in inches, at most a hundred."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be (width, height) in inches. Got {shown(value)}.")
    inches = number_in(above=0, most=100)
    return inches(f"{name}[0]", value[0]), inches(f"{name}[1]", value[1])


#: Panels of a figure at most.
MOST = 1000


@checked(
    count=lambda name, value: up_to(name, value, MOST, of="panels a figure holds"), columns=positive_count, size=_two_sizes,
    figure=a_figure,
)  # fmt: skip
def panels(
    count: int,
    *,
    columns: int | None = None,
    size: tuple[float, float] = (3.6, 2.9),
    letters: bool = True,
    share_x: bool = False,
    share_y: bool = False,
    title: str | None = None,
    figure: Figure | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes, left to right and top to bottom, lettered (a), (b), ...

    `size` is that of one panel in inches; unless `columns` says otherwise at most three stand side by side. They are drawn into
    `figure` where one is given, `plt.figure(layout="constrained")` say, which pyplot then shows.

    >>> figure, (left, right) = panels(2)
    >>> [float(inches) for inches in figure.get_size_inches()]
    [7.2, 2.9]
    """
    if columns is None:
        columns = count if count <= 3 else 2 if count == 4 else 3
    columns = min(columns, count)
    lines = math.ceil(count / columns)
    with style():
        whole = (columns * size[0], lines * size[1])
        if figure is None:
            figure = new_figure(whole)
        else:
            figure.set_size_inches(whole)
        grid = figure.subplots(lines, columns, sharex=share_x, sharey=share_y, squeeze=False)
        axes = [ax for line in grid for ax in line]
        for ax in axes[count:]:
            ax.remove()
        axes = axes[:count]
        if share_x:  # a panel with nothing below it keeps its tick labels
            for ax in axes[max(count - columns, 0) :]:
                ax.xaxis.set_tick_params(labelbottom=True)
        if letters:
            where = {"xycoords": "axes fraction", "annotation_clip": False}
            for i, ax in enumerate(axes):
                write(ax, f"({_name(i)})", (0, 1), (-8, 8), ha="right", fontsize=11, fontweight="bold", label="_letter", **where)
        if title is not None:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure, axes


def _name(i: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    return (_name(i // 26 - 1) if i >= 26 else "") + ascii_lowercase[i % 26]


@checked(prefix=a_text)
def to_svg(figure: Figure | Axes, *, prefix: str | None = None, title: str | None = None) -> str:
    """The figure as an `<svg>` element to put inline into an HTML page.

    Its width follows the page up to the figure's own width, which the style sheet knows as `--size`. All ids start with
    `prefix`, by default a hash of the content, so several pictures on one page do not collide. `title` is what a screen reader
    says.
    """
    figure = _root(figure)
    text = _drawn(figure)
    if prefix is None:
        prefix = "t" + hashlib.sha256(text.encode()).hexdigest()[:10]
    elif not re.fullmatch(r"[A-Za-z][\w.-]*", prefix, re.ASCII):
        prefix = "t" + re.sub(r"[^\w-]", "-", prefix, flags=re.ASCII)
    return _inline(text, prefix, _spoken(figure) if title is None else str(title))


@checked(path=a_path)
def save(figure: Figure | Axes, path: str | PathLike[str]) -> Path:
    """Write the figure as .svg, .pdf or .png, without a date; folders are made. A file that was there stays until it is done."""
    figure, path = _root(figure), Path(path)
    kind = path.suffix.lower()
    if kind not in (".svg", ".pdf", ".png"):
        raise ValueError(f"path must end in .svg, .pdf or .png. Got {path.name!r}.")
    if kind == ".svg":
        write_whole(path, (_PROLOG + _drawn(figure)).encode())
        return path
    metadata = {"Software": None} if kind == ".png" else {"CreationDate": None, "Creator": None, "Producer": None}
    content = BytesIO()
    with style(), _as_found(figure):
        figure.draw_without_rendering()
        figure.savefig(content, format=kind[1:], metadata=metadata)
    write_whole(path, content.getvalue())
    return path


def _drawn(figure: Figure) -> str:
    """The `<svg>` element as matplotlib writes it; the figure stays as it was."""
    buffer = StringIO()
    with style(), matplotlib.rc_context(_SETTINGS), _as_found(figure):
        figure.dpi = 72  # that of the SVG writer
        figure.draw_without_rendering()  # once before the draw that counts: then the layout is settled as far as the eye can see
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata=_NO_METADATA)
    text = re.sub(r"\s*<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)  # the words of each label, once more
    return text[text.index("<svg") :]


@unbroken_context
def _as_found(figure: Figure) -> Iterator[None]:
    """Put canvas and positions back.

    The layout goes on moving axes a little with every draw, and from the same beginning the same number of draws gives the same
    picture.
    """
    canvas, dpi = figure.canvas, figure.dpi
    places = [(ax, ax.get_position(original=True), ax.get_position(), ax.get_in_layout()) for ax in figure.axes]
    try:
        yield
    finally:
        figure.set_canvas(canvas)
        figure.dpi = dpi
        for ax, original, active, in_layout in places:
            ax.set_position(original, which="original")
            ax.set_position(active, which="active")
            ax.set_in_layout(in_layout)


def _inline(text: str, prefix: str, title: str) -> str:
    root = _ROOT.match(text)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', root.group()) if root else None
    if root is None or box is None:
        raise RuntimeError("matplotlib wrote an SVG without a viewBox.")
    body = text[root.end() :]
    body = re.sub(r'(?<=\sid=")([^"]+)(?=")', rf"{prefix}-\1", body)
    body = re.sub(r'(?<=xlink:href="#)', f"{prefix}-", body)
    body = re.sub(r"(?<=url\(#)", f"{prefix}-", body)
    body = body.replace('<style type="text/css">*{', f'<style type="text/css">#{prefix} *{{', 1)
    head = (
        f'<svg id="{prefix}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" '
        f'viewBox="{box.group()[9:-1]}" role="img" style="--size:{box.group(1)}pt;width:100%;max-width:var(--size);height:auto">'
    )
    return f"{head}\n <title>{html.escape(title)}</title>{body}"


def _spoken(figure: Figure) -> str:
    """The titles in the figure, or what is drawn against what."""
    titles = [figure.get_suptitle()]
    for ax in figure.axes:
        name = ax.get_title(loc="left") or ax.get_title()
        if not name and ax.get_xlabel() and ax.get_ylabel():
            name = f"{ax.get_ylabel()} against {ax.get_xlabel()}"
        titles.append(name)
    return "; ".join(t.replace(r"\$", "$") for t in titles if t) or "figure"


def _root(figure: Any) -> Figure:
    found = figure
    for _ in range(3):
        if isinstance(found, Figure):
            return found
        found = getattr(found, "figure", None)
    raise ValueError(f"figure must be a matplotlib Figure or Axes. Got {shown(figure)}.")
