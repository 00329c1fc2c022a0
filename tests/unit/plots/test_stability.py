"""Pictures of a stability study: every pair is there, the maxima and the law are those of the fit, and gaps are said."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest

from theodolite import plots
from theodolite.measures.stability.power_law import fit_power_law
from theodolite.plots.axes_style import notes
from theodolite.plots.stability import FIT, MAXIMA, PAIRS, pairs_and_maxima, stability_panels

SIZES = (100, 200, 400, 800)


def study(trials=(0,), configs=("a",), steps=(10,), seed=0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "trial": t, "config": c, "m": m, "pair": k, "step": s,
            "gap_loss": m**-0.5 * rng.uniform(0.5, 1), "stab": s * m**-0.1 * rng.uniform(0.5, 1), "dist": rng.uniform(1, 2) / m,
        }
        for t in trials for c in configs for s in steps for m in SIZES for k in range(6)
    ]  # fmt: skip


def drawn(ax) -> dict[str, np.ndarray]:
    return {str(line.get_label()): np.asarray(line.get_xydata()) for line in ax.lines}


def test_pairs_maxima_and_law_of_one_panel():
    rows = study()
    ax = pairs_and_maxima(rows, "stab")
    fit = fit_power_law(SIZES, [[row["stab"] for row in rows if row["m"] == m] for m in SIZES])
    lines = drawn(ax)
    assert len(lines["pairs"]) == 24
    np.testing.assert_allclose(lines["maximum"], list(zip(SIZES, fit.g, strict=True)))
    name = f"$m^{{{fit.b:.2f}}}$ [{fit.b_low:.2f}, {fit.b_high:.2f}]".replace(" [-", " [−").replace(", -", ", −")
    np.testing.assert_allclose(lines[name][:, 1], fit.curve(lines[name][:, 0]))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["pairs", "maximum", name]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training examples m", "stability")


def test_pairs_and_maxima_differ_without_colour():
    assert len({PAIRS[0], MAXIMA[0], FIT}) == 3
    assert PAIRS[1] != MAXIMA[1]


def test_columns_are_quantities_and_lines_trials():
    figure = stability_panels(study(trials=(0, 1)), ["gap_loss", "stab", "dist"])
    assert [ax.get_ylabel() for ax in figure.axes] == ["gap (loss)", "stability", "parameter distance"] * 2
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["trial 0"] * 3 + ["trial 1"] * 3
    assert len({round(ax.get_position().y0, 3) for ax in figure.axes}) == 2
    assert [len(ax.get_legend().get_texts()) for ax in figure.axes] == [3, 1, 1, 1, 1, 1]
    assert plots.to_svg(figure).startswith("<svg")


def test_columns_can_be_configurations():
    rows = study(trials=(0, 1), configs=("a", "b"))
    rows = [row for row in rows if not (row["trial"] == 1 and row["config"] == "b")]
    figure = stability_panels(pandas.DataFrame(rows), ["gap_loss", "stab"], by="config")
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.axison]
    assert titles == ["a, trial 0", "b, trial 0"] * 2 + ["a, trial 1"] * 2


def test_the_last_checkpoint_unless_one_is_named():
    rows = study(steps=(10, 1000))
    assert drawn(pairs_and_maxima(rows, "stab"))["pairs"][:, 1].min() > 100
    assert drawn(pairs_and_maxima(rows, "stab", step=10))["pairs"][:, 1].max() < 100
    with pytest.raises(ValueError, match="They have 10, 1000"):
        stability_panels(rows, ["stab"], step=11)


def test_linear_axes_keep_what_is_not_positive():
    rows = study()
    rows[0]["gap_loss"] = -0.2
    rows[1]["gap_loss"] = math.nan
    log = pairs_and_maxima(rows, "gap_loss")
    assert len(drawn(log)["pairs"]) == 22
    assert "1 of 24 values not positive, not on the log axis" in notes(log)
    assert "1 of 24 values not finite" in notes(log)
    linear = pairs_and_maxima(rows, "gap_loss", log=False)
    assert (linear.get_xscale(), linear.get_yscale()) == ("linear", "linear")
    assert len(drawn(linear)["pairs"]) == 23


def test_no_law_is_said():
    ax = pairs_and_maxima([{**row, "gap_loss": -1.0} for row in study()], "gap_loss")
    assert any("a power law needs two sizes" in text for text in notes(ax))
    assert len(ax.get_legend().get_texts()) == 2
    ax.figure.draw_without_rendering()


def test_the_window_of_constant_slope_is_shaded():
    law = [
        {"m": m, "stab": (m if m < 3000 else 1600) ** -1.0 * (1 - 0.01 * k)} for m in (200, 400, 800, 1600, 6400) for k in (0, 1)
    ]
    ax = pairs_and_maxima(law, "stab", window=True)
    (patch,) = ax.patches
    assert (patch.get_x(), patch.get_x() + patch.get_width()) == pytest.approx((200, 1600))
    assert any("slope constant within 20 % from 200 to 1600" in text for text in notes(ax))
    bent = [{"m": m, "stab": s} for m, s in ((1, 1.0), (2, 4.0), (4, 2.0), (8, 7.0))]
    ax = pairs_and_maxima(bent, "stab", window=True)
    assert not ax.patches
    assert "no three sizes with a constant slope" in notes(ax)


def test_wrong_arguments_are_told():
    with pytest.raises(TypeError, match="quantities must be the name of a column"):
        stability_panels(study(), [])
    with pytest.raises(ValueError, match="no column 'stabb'"):
        stability_panels(study(), ["stabb"])
