"""The picture of a path: lines per data set, the barrier measured, several paths under their median, odd numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theodolite import plots
from theodolite.plots.axes_style import notes
from theodolite.plots.linear_path import linear_path, linear_path_panels

ALPHAS = np.linspace(-1, 2, 76).tolist()


def profile(depth: float, *, test: bool = True, **more) -> list[dict]:
    """Accuracy 0.9 that dips by `depth` half-way, and a loss that rises as much."""
    rows = []
    for alpha in ALPHAS:
        dip = depth * max(0.0, 4 * alpha * (1 - alpha))
        row = {"alpha": alpha, "train_accuracy": 0.9 - dip, "train_loss": 0.3 + dip, **more}
        rows.append(row | ({"test_accuracy": 0.8 - dip, "test_loss": 0.5 + dip} if test else {}))
    return rows


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def drawn(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in ax.lines if not str(line.get_label()).startswith("_")}


def test_lines_ends_and_barrier():
    ax = linear_path(profile(0.25), ends=("first", "second"))
    assert set(drawn(ax)) == {"train", "test"}
    assert drawn(ax)["train"][25] == pytest.approx(0.9)
    assert {"first", "second", "train barrier: 25 points"} <= set(texts(ax))
    assert notes(ax) == ["test barrier: 25 points"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("alpha", "accuracy")
    (shade,) = ax.patches
    assert (shade.get_x(), shade.get_width()) == (0.0, 1.0)


def test_the_loss_and_its_barrier():
    ax = linear_path(profile(0.25), "loss")
    assert "train barrier: 0.25" in texts(ax)
    assert ax.get_yscale() == "linear"
    steep = [{**row, "train_loss": math.exp(4 * row["alpha"])} for row in profile(0.0)]
    assert linear_path(steep, "loss").get_yscale() == "log"


def test_no_barrier_is_said():
    ax = linear_path(profile(0.0))
    assert notes(ax) == ["train barrier: none", "test barrier: none"]


def test_several_paths_lie_thin_under_their_median():
    rows = [row for pair, depth in enumerate((0.1, 0.2, 0.6)) for row in profile(depth, pair=pair)]
    ax = linear_path(rows)
    thin = [line for line in ax.lines if line.get_label() == "_pair"]
    assert len(thin) == 6
    assert max(line.get_linewidth() for line in thin) < min(
        line.get_linewidth() for line in ax.lines if line.get_label() in ("train", "test")
    )
    assert drawn(ax)["train"].tolist() == pytest.approx([row["train_accuracy"] for row in profile(0.2)])
    assert ax.get_ylabel() == "accuracy, median of 3 pairs"
    assert notes(ax) == ["median train barrier: 20 points", "median test barrier: 20 points"]


def test_panels_have_what_the_rows_have():
    assert [ax.get_ylabel() for ax in linear_path_panels(profile(0.1)).axes] == ["accuracy", "loss"]
    bare = [{"alpha": row["alpha"], "train_loss": row["train_loss"], "train_accuracy": None} for row in profile(0.1)]
    figure = linear_path_panels(bare, title="a path")
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss"]
    assert plots.to_svg(figure).startswith("<svg")


def test_infinite_losses_and_missing_ends():
    rows = profile(0.1, test=False)
    rows[-1]["train_loss"] = math.inf
    ax = linear_path(rows, "loss")
    assert any("not finite" in text for text in notes(ax))
    rows[40]["train_loss"] = math.inf  # between the ends: the barrier is infinite, and only said
    assert "train barrier: inf" in notes(linear_path(rows, "loss"))
    beyond = linear_path([row for row in rows if row["alpha"] > 1.5], "loss")
    assert not any("barrier" in text for text in (*texts(beyond), *notes(beyond)))
    beyond.figure.draw_without_rendering()


def test_rows_that_do_not_fit():
    with pytest.raises(ValueError, match="alpha"):
        linear_path([{"x": 1.0}])
    with pytest.raises(ValueError, match="no column train_loss"):
        linear_path([{"alpha": 0.0}])
    with pytest.raises(ValueError, match="y must be"):
        linear_path(profile(0.1), "error")
