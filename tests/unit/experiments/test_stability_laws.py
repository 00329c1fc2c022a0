"""What the rows of pairs say, on rows whose laws are known."""

from __future__ import annotations

import math

import pytest

from theodolite.experiments.stability import appendix, main_text, pairs
from theodolite.experiments.stability.main_text import contrast, farthest, reported_delta

SIZES = (100, 200, 400, 800)


def pair_rows(configuration="1a", trial=0, time="T", rule="updates", **exponents):
    """Rows with `q = m^b` for the larger of two pairs, and half of it for the other."""
    return [
        {
            "configuration": configuration,
            "trial": trial,
            "time": time,
            "rule": rule,
            "m": m,
            "pair": pair,
            "step": 10,
            "steps_taken": m,
            **{name: m**b / (1 + pair) for name, b in exponents.items()},
        }
        for m in SIZES
        for pair in (0, 1)
    ]


def test_exponents_and_their_differences():
    rows = pair_rows(stab=-0.2, gap_loss=-0.7, dist=0.1) + pair_rows("2b", stab=-1.0, gap_loss=-1.0, dist=-1.0)
    assert main_text.exponent("stab", configuration="1a")(rows).value == pytest.approx(-0.2)
    assert main_text.difference("stab", "gap_loss", configuration="1a")(rows) == pytest.approx(0.5)
    assert main_text.delta(configuration="1a")(rows).value == pytest.approx(0.5)
    assert main_text.kept("stab", configuration="2b")(rows) == pytest.approx(1 / 8)
    assert main_text.upper_end("gap_loss", configuration="1a")(rows) >= -0.7 - 1e-9


def test_two_sizes_are_no_law_and_missing_rows_are_told():
    rows = [row for row in pair_rows(stab=-1.0) if row["m"] < 400]
    with pytest.raises(ValueError, match="3 sizes"):
        main_text.law(rows, "stab")
    with pytest.raises(ValueError, match="configuration = 9z"):
        main_text.exponent("stab", configuration="9z")(rows)


def test_seed_trials_are_read_one_by_one():
    rows = [
        row
        for trial, b in enumerate((-0.2, -0.68, -0.9))
        for row in pair_rows(trial=trial, stab=b, gap_loss=-0.7, dist=-0.1 * trial, ndist=-0.3)
    ]
    assert main_text.unexplained(0.05, configuration="1a")(rows) == 1
    smallest = main_text.over_trials(min, "stab", configuration="1a")(rows)
    assert (smallest.value, smallest.error) == (pytest.approx(-0.9), pytest.approx(0.35))
    assert main_text.gain("dist", "ndist", configuration="1a")(rows) == pytest.approx(0.2)


def test_contrast_with_logistic_regression():
    rows = pair_rows("1a", dist=-0.1) + pair_rows("logistic regression", dist=-1.1)
    assert contrast("1a")(rows) == pytest.approx(1.0)
    assert reported_delta("1a") == 0.09
    assert reported_delta("2a") == "at least 0.48"
    assert farthest("stab", "dist")(pair_rows(stab=-1.0, dist=-0.8)) == pytest.approx(-0.8)


def test_slopes_of_a_broken_line():
    rows = [
        {"time": "T/2", "m": m, "gap_loss": g / (1 + pair)}
        for m, g in ((1, 8.0), (2, 4.0), (4, 2.0), (8, 1.9))
        for pair in (0, 1)
    ]
    assert appendix.sizes_in_window("T/2")(rows) == 3
    assert appendix.spread("T/2")(rows) > appendix.ROUGHLY


def test_updates_under_a_stopping_rule():
    rows = pair_rows(stab=-0.5, gap_loss=-0.7) + pair_rows(rule="epochs", stab=-0.1, gap_loss=-0.7)
    assert appendix.longer("epochs")(rows) == 8.0
    assert appendix.harder("epochs")(rows) == pytest.approx(0.4)


def path_rows(configuration, heights):
    return [
        {"configuration": configuration, "size": "smallest", "trial": 0, "pair": k, "alpha": alpha, "barrier_train": height}
        for k, height in enumerate(heights)
        for alpha in (0.0, 0.5, 1.0)
    ]


def test_barriers_count_once_for_each_pair():
    rows = path_rows("1a", (0.0, 0.01, 0.05, 0.0)) + path_rows("2b", (0.1, 0.2, 0.3))
    assert main_text.connected("1a", "smallest")(rows) == 0.75
    assert main_text.barriers("2b", "smallest").median()(rows) == pytest.approx(0.2)
    assert main_text.higher("2b", "1a", "smallest")(rows) == pytest.approx(0.195)


def test_shares_of_a_bound():
    assert pairs.share(0.0, 0.0) == 0.0
    assert pairs.share(1.0, 4.0) == 0.25
    assert math.isinf(pairs.share(1.0, 0.0))
