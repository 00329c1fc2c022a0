"""The reading rule on planted rates: what was reported of logistic regression and of three deep networks comes out."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest

from theodolite.measures.stability.power_law import MARKED, Explanation, explains, resampled_exponents

DEEP = tuple(range(15_000, 50_001, 5_000))
SMALL = (800, 1600, 3200, 6400, 12800)


def study(ms, b_gap, b_stab, *, pairs=40, spread=0.02, b_dist=-1.0, seed=0, trial=0, step=100) -> list[dict]:
    """Rows whose gap, stability and distance go like given powers of m, with a common spread over pairs."""
    rng = np.random.default_rng(seed)
    rows = []
    for m in ms:
        for pair in range(pairs):
            noise = np.exp(spread * rng.normal(size=3))
            values = {"gap_loss": 2 * m**b_gap * noise[0], "stab": 3 * m**b_stab * noise[1], "dist": m**b_dist * noise[2]}
            rows.append({"trial": trial, "m": m, "pair": pair, "step": step, **values})
    return rows


@pytest.mark.parametrize(
    ("ms", "b_gap", "b_stab", "verdict"),
    [
        (SMALL, -1.13, -1.05, "explains"),  # logistic regression, as reported
        (SMALL, -1.05, -1.13, "explains"),
        (DEEP, -0.18, -0.09, "does not explain"),  # the three deep configurations, as reported
        (DEEP, -0.48, 0.02, "does not explain"),
        (DEEP, -0.35, -0.17, "does not explain"),
        (SMALL, -0.4, -1.0, "explains"),
        (SMALL, -0.4, -0.4, "explains"),
        (SMALL, -0.4, 0.0, "does not explain"),
        (SMALL, 0.1, -1.0, "unclear"),
    ],
)
def test_planted_rates_give_the_verdict_of_the_source(ms, b_gap, b_stab, verdict):
    """The reported exponents set the threshold of similarity, so their rows guard the rule and are no evidence for it."""
    found = explains(study(ms, b_gap, b_stab))
    assert found.verdict == verdict, found.sentence()
    assert found.b_gap == pytest.approx(b_gap, abs=0.05)
    assert found.delta_b == pytest.approx(b_stab - b_gap, abs=0.06)
    assert found.delta_b == found.b_stab - found.b_gap
    assert found.delta_low <= found.delta_b <= found.delta_high
    assert found.b_dist == pytest.approx(-1.0, abs=0.05)


def test_sentences_say_how_the_gap_stands_to_the_bound():
    fast = explains(study(SMALL, -1.1, -1.1)).sentence()
    assert "explains the generalisation gap" in fast
    assert "the bound's own term 1/√m is the slower one" in fast
    assert "Δb = " in fast
    slow = explains(study(SMALL, -0.3, -0.3)).sentence()
    assert "more slowly than m^(−1/2)" in slow
    assert "about as fast as m^(−1/2)" in explains(study(SMALL, -0.5, -0.5)).sentence()
    flat = explains(study(SMALL, -0.3, 0.1)).sentence()
    assert "does not explain" in flat
    assert "stability shows no fall, and without one the bound is vacuous" in flat
    assert "too slow as well" in explains(study(SMALL, -1.1, -0.1)).sentence()


def test_wide_intervals_are_unclear():
    """The deep rates of SVHN with few and scattered pairs: nothing can be said."""
    found = explains(study(DEEP, -0.18, -0.09, pairs=4, spread=0.5))
    assert found.verdict == "unclear"
    assert "would narrow it" in found.sentence()
    assert found.delta_high - found.delta_low > MARKED


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (study(SMALL[:2], -0.4, -0.4), "positive at 2 sizes"),
        ([{**row, "gap_loss": -0.1} for row in study(SMALL, -0.4, -0.4)], "the gap has no rate"),
        ([{**row, "stab": 0.0} for row in study(SMALL, -0.4, -0.4)], "the stability has no rate"),
        (study(SMALL, -0.4, -0.4, pairs=1), "at least two pairs per size"),
        ([{**row, "gap_loss": math.nan} for row in study(SMALL, -0.4, -0.4)], "there are no sizes"),
    ],
)
def test_what_cannot_be_read_is_unclear_with_the_reason(rows, reason):
    found = explains(rows, resamples=50)
    assert found.verdict == "unclear"
    assert reason in found.reason
    assert reason in found.sentence()


def test_gap_and_stability_are_resampled_together():
    """Stability a multiple of the gap times m^0.2 pair by pair: on two sizes Δb is 0.2 in each resample, wide as each b is."""
    rows = study((100, 200), -0.5, -0.5, pairs=8, spread=0.5)
    rows = [{**row, "stab": row["gap_loss"] * row["m"] ** 0.2} for row in rows]
    found = explains(rows)
    assert (found.delta_low, found.delta_high) == (pytest.approx(0.2, abs=1e-9), pytest.approx(0.2, abs=1e-9))
    assert found.fits["gap_loss"].b_high - found.fits["gap_loss"].b_low > 0.1
    ms = (100, 200)
    gaps = [[row["gap_loss"] for row in rows if row["m"] == m] for m in ms]
    drawn = resampled_exponents(ms, gaps)
    assert found.fits["gap_loss"].b_low == pytest.approx(np.quantile(drawn, 0.025), abs=1e-9)


def test_pairs_that_are_not_finite_leave_together():
    rows = study(SMALL, -0.4, -0.4, pairs=8)
    rows[3]["stab"] = math.inf
    found = explains(rows)
    assert found.fits["gap_loss"].pairs == found.fits["stab"].pairs == (7, 8, 8, 8, 8)
    assert "1 of 40 pairs left out" in found.note
    assert "between 7 and 8 pairs per size" in found.note


def test_trial_and_checkpoint():
    one = study(SMALL, -0.4, -0.4, step=100) + study(SMALL, -0.4, 0.1, step=200)
    rows = one + study(SMALL, -0.8, -0.8, trial=1, step=200)
    found = explains(rows)
    assert (found.trial, found.step, found.verdict) == (0, 200, "does not explain")
    assert "trial 0 of 2" in found.note
    assert explains(rows, step=100).verdict == "explains"
    assert explains(rows, trial=1).b_gap == pytest.approx(-0.8, abs=0.05)
    with pytest.raises(ValueError, match=r"no trial 7\. They have 0, 1"):
        explains(rows, trial=7)
    with pytest.raises(ValueError, match=r"no step 150\. They have 100, 200"):
        explains(rows, step=150)
    by_epochs = [{**row, "step": row["m"] * 10} for row in study(SMALL, -0.4, -0.4)]
    found = explains(by_epochs)
    assert found.step is None
    assert "trained for 8000 to 128000 steps" in found.note
    assert found.verdict == "explains"


def test_the_whole_pool_is_pointed_out():
    assert "whole pool" in explains(study(DEEP, -0.4, -0.4), pool=50_000).note
    assert "whole pool" not in explains(study(DEEP, -0.4, -0.4), pool=60_000).note


def test_other_columns_frames_and_results():
    rows = [{**row, "gap_01": 0.5 * row["m"] ** -0.2, "stab_excl_z": 0.9 * row["stab"]} for row in study(SMALL, -0.4, -0.1)]
    found = explains(pandas.DataFrame(rows), gap="gap_01", stab="stab_excl_z")
    assert found.b_gap == pytest.approx(-0.2, abs=1e-6)
    assert list(found.fits) == ["gap_01", "stab_excl_z", "gap_loss", "stab", "dist"]

    class Study:
        def rows(self) -> list[dict]:
            return rows

    assert explains(Study()).delta_b == explains(rows).delta_b
    with pytest.raises(ValueError, match=r"no 'gap_los'\. Nearest: gap_loss"):
        explains(rows, gap="gap_los")
    with pytest.raises(TypeError, match="Got int"):
        explains(3)
    with pytest.raises(ValueError, match="holds no row"):
        explains([])


def test_an_explanation_is_a_result(tmp_path):
    found = explains(study(SMALL, -0.4, -0.1))
    assert [row["quantity"] for row in found.rows()] == ["gap_loss", "stab", "dist"]
    found.save(tmp_path / "reading")
    again = Explanation.load(tmp_path / "reading")
    assert again.sentence() == found.sentence()
    assert explains(study(SMALL, -0.4, -0.1)).rows() == found.rows()
