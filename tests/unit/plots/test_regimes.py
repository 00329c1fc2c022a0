"""The diagram of regimes: bands where the runs were, lines for those that ended, marks for the rates that matter."""

from __future__ import annotations

import pytest

from theodolite import plots
from theodolite.plots.axes_style import notes
from theodolite.plots.regimes import COLOURS


def runs() -> list[dict]:
    table = [
        (0.5, "monotone", 0.1, 1.0),
        (0.9, "monotone", 0.05, 1.0),
        (1.5, "catapult", 0.01, 9.0),
        (4.0, "divergent", float("inf"), 1e9),
    ]
    return [
        {"model": "network", "ratio": ratio, "regime": word, "final_loss": final, "peak_loss": peak}
        for ratio, word, final, peak in table
    ]


def test_bands_meet_half_way_and_divergent_runs_are_bands_only():
    ax = plots.regime_diagram(runs(), own=0.7, steps=60)
    edges = sorted({round(float(x), 6) for patch in ax.patches for x in (patch.get_x(), patch.get_x() + patch.get_width())})
    assert edges == pytest.approx([0.5 / 1.15, (0.9 * 1.5) ** 0.5, (1.5 * 4.0) ** 0.5, 4.0 * 1.15], rel=1e-5)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines if not line.get_label().startswith("_")}
    assert drawn["loss after 60 steps"] == [0.1, 0.05, 0.01]
    assert drawn["highest loss"] == [1.0, 1.0, 9.0]
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == ["loss after 60 steps", "highest loss", "monotone", "catapult", "divergent"]
    assert {"critical", "yours"} <= {text.get_text() for text in ax.texts}
    assert any("diverged" in text for text in notes(ax))


def test_a_rate_far_off_is_said_and_a_twin_gets_its_own_line():
    twin = [{**row, "model": "quadratic"} for row in runs()[:3]]
    ax = plots.regime_diagram([*runs(), *twin], own=1e-3)
    assert any("0.001 times the critical one, lies outside" in text for text in notes(ax))
    assert "quadratic twin in the end" in [line.get_label() for line in ax.lines]
    assert plots.to_svg(ax).startswith("<svg")


def test_losses_below_zero_and_nothing_to_draw():
    ax = plots.regime_diagram([{**row, "final_loss": -1.0} for row in runs()])
    assert ax.get_yscale() == "linear"
    assert ax.get_xscale() == "log"
    blown = plots.regime_diagram([row for row in runs() if row["regime"] == "divergent"])
    assert [text.get_text() for text in blown.get_legend().get_texts()] == ["divergent"]
    with pytest.raises(ValueError, match="rows is empty"):
        plots.regime_diagram([])


def test_every_word_of_the_instrument_has_a_colour():
    from theodolite.instruments.rates.regimes import WORDS

    assert set(WORDS) <= set(COLOURS)
