"""Scatter plots by group, with the diagonal and a correlation where asked; on logarithmic axes power laws with their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np
from matplotlib.axes import Axes

from theodolite.measures.fits import log_log_fit
from theodolite.plots.axes_style import check_log, make_headroom, note
from theodolite.plots.chart import Grouping, chart
from theodolite.plots.style import GREY, dots, write
from theodolite.plots.tables import Array, finite, label_of, numbers, on_axes


def scatter(
    rows: Any,
    x: str,
    y: str,
    *,
    text: str | None = None,
    identity: bool = False,
    correlation: Literal["pearson", "spearman"] | None = None,
    log: str = "",
    **given: Unpack[Grouping],
) -> Axes:
    """Column `y` against column `x` as points, one look per value of `by`.

    `text` names a column written beside each point, `identity` draws the line y = x, `correlation` writes the
    coefficient over all points with its 95 % interval (of the logarithms on log axes).

    >>> ax = scatter([{"a": 1, "b": 2}, {"a": 2, "b": 4}], "a", "b", identity=True)
    >>> ax.collections[0].get_offsets().tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    check_log(log)
    if identity and log not in ("", "xy"):
        raise ValueError('The line y = x needs both axes alike: log="" or log="xy".')
    kept: list[Array] = []
    with chart(rows, x, y, text, log=log, size=(4.6, 4.2) if identity else None, **given) as drawn:
        for group, look in drawn:
            points = np.column_stack([numbers(group.rows, x), numbers(group.rows, y)])
            usable = np.asarray(finite(points).all(axis=1))
            allowed = usable & on_axes(points[:, 0], points[:, 1], log)
            drawn.count(usable, allowed)
            shown = np.flatnonzero(allowed)
            points = points[shown]
            kept.append(points)
            _draw(drawn.ax, points, look, group.label)
            if text is not None:
                for i, point in zip(shown, points, strict=True):
                    name = label_of(group.rows[i].get(text))
                    write(drawn.ax, name, (point[0], point[1]), (5, 4), fontsize=8.5, color=GREY)
        if identity:
            _diagonal(drawn.ax, np.concatenate(kept))
        if correlation is not None:
            note(drawn.ax, _correlation_sentence(np.concatenate(kept), correlation, log))
    return drawn.ax


def correlation_of(x: Any, y: Any, kind: Literal["pearson", "spearman"] = "pearson") -> float:
    """The correlation coefficient; NaN if there are fewer than two points or one side is constant.

    >>> round(correlation_of([1, 2, 3], [1, 4, 9], "spearman"), 9)
    1.0
    """
    if kind not in ("pearson", "spearman"):
        raise ValueError(f'correlation must be "pearson" or "spearman". Got {kind!r}.')
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if kind == "spearman":
        from scipy.stats import rankdata

        x, y = rankdata(x), rankdata(y)
    if len(x) < 2 or not (np.ptp(x) > 0 and np.ptp(y) > 0):
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    dx, dy = dx / np.abs(dx).max(), dy / np.abs(dy).max()
    return float(np.clip(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)), -1.0, 1.0))


def _correlation_sentence(points: Array, kind: Literal["pearson", "spearman"], log: str) -> str:
    points = points.copy()
    for column, axis in enumerate("xy"):
        if axis in log:
            points[:, column] = np.log(points[:, column])
    r, n = correlation_of(points[:, 0], points[:, 1], kind), len(points)
    name = kind.capitalize() + (" correlation of logs" if log and kind == "pearson" else " correlation")
    if math.isnan(r):
        return f"{name} undefined ({n} points, or a constant side)"
    if n <= 3 or abs(r) == 1.0:
        return f"{name} {r:.2f} ({n} points)".replace("-", "−")
    half = 1.96 * (1.03 if kind == "spearman" else 1.0) / math.sqrt(n - 3)  # Fisher's z
    low, high = math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
    return f"{name} {r:.2f}, 95 % interval {low:.2f} to {high:.2f} ({n} points)".replace("-", "−")


def _draw(ax: Axes, points: Array, look: Any, label: str) -> None:
    """Many points are drawn smaller and fainter, so that density shows."""
    crowd = len(points)
    size, alpha = (30.0, 0.9) if crowd <= 60 else (16.0, 0.7) if crowd <= 600 else (7.0, 0.4)
    ax.scatter(
        points[:, 0],
        points[:, 1],
        s=size,
        alpha=alpha,
        color=look.colour,
        marker=look.marker,
        linewidths=0.4,
        edgecolors="white",
        label=label,
        rasterized=crowd > 5000,
        zorder=2.2,
    )


def _diagonal(ax: Axes, points: Array) -> None:
    """y = x over the range of the data, behind the points, both axes alike."""
    if not len(points):
        return
    ax.autoscale_view()
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    ax.plot([low, high], [low, high], color=GREY, linestyle=(0, (4, 2)), linewidth=1.1, zorder=1.5, label="y = x")
    ax.set(xlim=(low, high), ylim=(low, high))
    ax.set_aspect("equal", adjustable="box")


@dataclass(frozen=True)
class PowerLaw:
    """`y = prefactor * x ** exponent`, fitted as a straight line through the logarithms.

    `stderr` is the standard error of the exponent (NaN for two points), `scatter` the standard deviation of log y
    about the line; `left_out` counts points that are not finite or not positive.
    """

    exponent: float
    stderr: float
    prefactor: float
    scatter: float
    points: int
    left_out: int = 0

    def __call__(self, x: Any) -> Array:
        """The fitted curve at x."""
        with np.errstate(over="ignore"):
            return np.asarray(self.prefactor * np.asarray(x, dtype=np.float64) ** self.exponent)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the exponent, by Student's t."""
        from scipy.stats import t

        half = float(t.ppf(0.5 + level / 2, max(self.points - 2, 1))) * self.stderr
        return self.exponent - half, self.exponent + half

    def __str__(self) -> str:
        return f"slope {with_error(self.exponent, self.stderr)}"


def power_law(x: Any, y: Any) -> PowerLaw:
    """Least squares in log-log; the error comes from the scatter about the line.

    >>> fit = power_law([1.0, 2.0, 4.0], [3.0, 1.5, 0.75])
    >>> round(fit.exponent, 9), round(fit.prefactor, 9), fit.points
    (-1.0, 3.0, 3)
    """
    x, y = np.asarray(x, dtype=np.float64).reshape(-1), np.asarray(y, dtype=np.float64).reshape(-1)
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same length. Got {len(x)} and {len(y)}.")
    keep = finite(x) & finite(y) & on_axes(x, y, "xy")
    n = int(keep.sum())
    if n < 2 or not np.ptp(x[keep]) > 0:
        raise ValueError(f"A power law needs two different positive x with positive y. Got {n} usable of {len(x)} points.")
    found = log_log_fit(x[keep], y[keep])
    with np.errstate(over="ignore"):
        prefactor = float(np.exp(found.intercept))
    return PowerLaw(found.slope, found.stderr, prefactor, found.scatter, n, len(x) - n)


def log_log(
    rows: Any,
    x: str,
    y: str,
    *,
    window: tuple[float, float] | None = None,
    guides: Sequence[float] = (),
    **given: Unpack[Grouping],
) -> Axes:
    """Points on log-log axes with a fitted power law per value of `by`, each slope written with its standard error.

    `window` limits the fit (not the points drawn) to a range of x. `guides` are slopes drawn dotted for comparison.
    The numbers are those of `power_law(x, y)`.

    >>> ax = log_log([{"n": 1, "gap": 8.0}, {"n": 2, "gap": 4.0}, {"n": 4, "gap": 2.0}], "n", "gap")
    >>> ax.get_legend().get_texts()[0].get_text()
    'slope −1.00 ± 0.00'
    """
    low, high = window or (0.0, math.inf)
    with chart(rows, x, y, log="xy", **given) as drawn:
        ax = drawn.ax
        for group, look in drawn:
            xs, ys = numbers(group.rows, x), numbers(group.rows, y)
            usable = finite(xs) & finite(ys)
            shown = usable & on_axes(xs, ys, "xy")
            drawn.count(usable, shown)
            xs, ys = xs[shown], ys[shown]
            inside = (xs >= low) & (xs <= high)
            text = _draw_fit(ax, xs[inside], ys[inside], look)
            name = f"{group.label}: {text}" if group.label else text
            dots(ax, xs, ys, look.colour, look.marker, label=name)
        _draw_guides(ax, guides)
        make_headroom(ax)
        drawn.legend_title = None  # slopes are no values of `by`
        if window is not None:
            note(ax, f"fitted from {low:g} to {high:g}")
    return ax


def with_error(value: float, error: float) -> str:
    """A number and its standard error, rounded to two digits of the error.

    >>> with_error(-1.04321, 0.0532), with_error(3.0, float("nan"))
    ('−1.043 ± 0.053', '3.00 (no error from two points)')
    """
    if not math.isfinite(error):
        return f"{value:.2f} (no error from two points)".replace("-", "−")
    digits = 2 if error < 1e-8 else min(max(1 - math.floor(math.log10(error)), 0), 6)
    return f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def _draw_fit(ax: Axes, x: Array, y: Array, look: Any) -> str:
    """The line over the fitted range; what to say of it."""
    if len(np.unique(x)) < 2:
        return "too few points to fit"
    fit = power_law(x, y)
    ends = np.array([x.min(), x.max()])
    ax.plot(ends, fit(ends), color=look.colour, linestyle=look.line, linewidth=1.4, zorder=1.9)
    return str(fit)


def _draw_guides(ax: Axes, slopes: Sequence[float]) -> None:
    """Dotted lines of given slope through the middle of what is drawn."""
    drawn = [line.get_xydata() for line in ax.lines]
    points = np.concatenate([np.asarray(p, dtype=float) for p in drawn]) if drawn else np.empty((0, 2))
    if not len(points):
        return
    middle = np.exp(np.log(points).mean(axis=0))
    ends = np.array([points[:, 0].min(), points[:, 0].max()])
    for slope, dash in zip(slopes, [(0, (1, 2)), (0, (1, 4)), (0, (3, 3))] * len(slopes), strict=False):
        text = f"slope {slope:g} for comparison".replace("-", "−")
        ax.plot(ends, middle[1] * (ends / middle[0]) ** slope, color=GREY, linestyle=dash, linewidth=1.3, zorder=1.5, label=text)
