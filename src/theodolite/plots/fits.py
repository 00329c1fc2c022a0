"""Power laws: the fit as a number with its error, and the log-log picture it is read from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from theodolite.measures.fits import log_log_fit
from theodolite.plots.axes_style import (
    label_axes,
    labelled,
    legend,
    make_headroom,
    note,
    note_left_out,
    note_not_positive,
    set_scales,
)
from theodolite.plots.style import GREY, looks, new_axes, style
from theodolite.plots.tables import Array, By, finite, groups, numbers, positive, read


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
    keep = finite(x) & finite(y) & positive(x) & positive(y)
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
    by: By = None,
    window: tuple[float, float] | None = None,
    guides: Sequence[float] = (),
    order: Sequence[Any] | None = None,
    label: str = "",
    xlabel: str | None = None,
    ylabel: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Points on log-log axes with a fitted power law per value of `by`, each slope written with its standard error.

    `window` limits the fit (not the points drawn) to a range of x. `guides` are slopes drawn dotted for comparison.
    The numbers are those of `power_law(x, y)`.

    >>> ax = log_log([{"n": 1, "gap": 8.0}, {"n": 2, "gap": 4.0}, {"n": 4, "gap": 2.0}], "n", "gap")
    >>> ax.get_legend().get_texts()[0].get_text()
    'slope −1.00 ± 0.00'
    """
    table = read(rows, x, y, by)
    found = groups(table, by, order)
    bad = negative = 0
    with style():
        ax = new_axes(ax)
        set_scales(ax, "xy")
        for group, look in zip(found, looks([g.key for g in found], start=labelled(ax)), strict=True):
            xs, ys = numbers(group.rows, x), numbers(group.rows, y)
            usable = finite(xs) & finite(ys)
            shown = usable & positive(xs) & positive(ys)
            bad, negative = bad + int((~usable).sum()), negative + int((usable & ~shown).sum())
            xs, ys = xs[shown], ys[shown]
            inside = np.ones(len(xs), bool) if window is None else (xs >= window[0]) & (xs <= window[1])
            text = _draw_fit(ax, xs[inside], ys[inside], look)
            name = group.label or label
            ax.plot(xs, ys, linestyle="none", marker=look.marker, color=look.colour, label=f"{name}: {text}" if name else text)
        _draw_guides(ax, guides)
        label_axes(ax, x, y, xlabel, ylabel, title)
        make_headroom(ax, labelled(ax))
        legend(ax)
        if window is not None:
            note(ax, f"fitted from {window[0]:g} to {window[1]:g}")
        note_left_out(ax, bad, len(table))
        note_not_positive(ax, negative, len(table))
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
    for slope, dots in zip(slopes, [(0, (1, 2)), (0, (1, 4)), (0, (3, 3))] * len(slopes), strict=False):
        text = f"slope {slope:g} for comparison".replace("-", "−")
        ax.plot(ends, middle[1] * (ends / middle[0]) ** slope, color=GREY, linestyle=dots, linewidth=1.3, zorder=1.5, label=text)
