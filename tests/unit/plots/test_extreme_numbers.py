"""Numbers that break pictures elsewhere: every kind of drawing takes them, with a note, without a warning."""

from __future__ import annotations

import math

import pytest

from theodolite import plots

AWKWARD = {
    "one": ([1], [1]),
    "zero": ([0, 0], [0, 0]),
    "nothing": ([math.nan, 1], [math.inf, -math.inf]),
    "negative": ([-1, -2], [-1, -5]),
    "vast": ([1e299, 1, 1e-300], [1e-290, 1, 1e290]),
}
KINDS = {
    "curves": lambda rows: plots.curves(rows, "x", "y", log="xy", label="a"),
    "scatter": lambda rows: plots.scatter(rows, "x", "y", log="xy", identity=True, correlation="pearson"),
    "histogram": lambda rows: plots.histogram(rows, "y", log="xy"),
    "eigenvalues": lambda rows: plots.eigenvalues(rows, value="y", log=True, kind="stems"),
    "density": lambda rows: plots.density(rows, x="x", y="y", nodes=[row["x"] for row in rows]),
    "log_log": lambda rows: plots.log_log(rows, "x", "y", guides=[-1, -0.5]),
    "heatmap": lambda rows: plots.heatmap(rows, "x", "y", "y", log=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_numbers_are_drawn(kind, name):
    x, y = AWKWARD[name]
    ax = KINDS[kind]([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    ax.figure.draw_without_rendering()
