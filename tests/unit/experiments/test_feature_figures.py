"""What the rows of the experiments on features say, on rows whose answer is known, and that runs repeat without their cache."""

from __future__ import annotations

import math

import pytest

from theodolite.experiments.catapult_features import feature_gd, feature_sgd
from theodolite.experiments.catapult_features.feature_gd import change, seeds_better, spikes_per_raise
from theodolite.experiments.catapult_features.feature_gd_figures import block_distance, nearer
from theodolite.experiments.catapult_features.feature_optimizers import OPTIMIZERS, TABLE_C_1, correlation, rate_of
from theodolite.experiments.catapult_features.feature_sgd import at_batch, gain, lowest, monotone, quotient, spread
from theodolite.experiments.catapult_features.feature_tasks import Setting


def raised_row(raises, seed, loss, alignment=0.5, spikes=0):
    return {
        "panel": "rank-2",
        "start": "ntk",
        "raises": raises,
        "seed": seed,
        "test_loss": loss,
        "alignment": alignment,
        "spikes": spikes,
    }


def test_seeds_that_gain_from_raises():
    rows = [raised_row(0, s, 1.0) for s in range(3)] + [raised_row(2, s, loss, 0.6, 2) for s, loss in enumerate((0.5, 2.0, 0.9))]
    assert seeds_better("rank-2", "test_loss")(rows) == pytest.approx(2 / 3)
    assert seeds_better("rank-2", "alignment", larger=True)(rows) == 1.0
    assert change("rank-2", "alignment")(rows) == pytest.approx(0.1)
    assert change("rank-2", "test_loss", relative=True)(rows) == pytest.approx(3.4 / 3 - 1)
    assert spikes_per_raise("rank-2")(rows) == 1.0


def batch_rows():
    values = {5: (0.9, 0.4), 50: (0.8, 0.7), 500: (0.7, 0.8)}
    return [
        {"panel": "rank-2", "ratio": 0.5, "batch": b, "all": b == 500, "seed": s, "alignment": a + 0.01 * s, "test_loss": loss}
        for b, (a, loss) in values.items()
        for s in (-1, 1)
    ]


def test_trends_over_batch_sizes():
    rows = batch_rows()
    assert monotone("rank-2", "alignment")(rows) == 1.0
    assert monotone("rank-2", "test_loss", falling=False)(rows) == 1.0
    assert monotone("rank-2", "test_loss")(rows) == 0.0
    assert gain("rank-2", "alignment")(rows) == pytest.approx(0.2)
    assert quotient("rank-2", "test_loss")(rows) == pytest.approx(0.5)
    assert spread("rank-2", "test_loss", 0.5)(rows) == pytest.approx(0.4 / (1.9 / 3))
    assert at_batch("test_loss", None)(rows) == pytest.approx(0.8)
    assert math.isnan(at_batch("test_loss", 7)(rows))
    with pytest.raises(ValueError, match="no two batch sizes"):
        gain("rank-2", "alignment")(rows[:2])


def test_lowest_validation_loss_by_batch_size():
    curve = [(5, 0, 3.0), (5, 0, 1.0), (5, 1, 2.0), (9, 0, 4.0)]
    rows = [{"panel": "rank-2", "batch": b, "seed": s, "validation": v} for b, s, v in curve]
    assert lowest("rank-2")(rows) == {5: 1.5, 9: 4.0}


def test_distance_of_blocks():
    entries = {-1: (1.0, 0.0), 0: (1.0, 1.0), 3: (1.0, 0.5)}
    rows = [{"raises": k, "row": 0, "column": j, "value": v} for k, pair in entries.items() for j, v in enumerate(pair)]
    assert block_distance(rows, 0) == pytest.approx(math.sqrt(0.5))
    assert nearer(rows) == pytest.approx(0.5)


def test_rates_of_table_c1():
    assert all(len(rates) == len(OPTIMIZERS) for rates in TABLE_C_1.values())
    assert rate_of("rank-2", "SGD", 6.15) == pytest.approx(2.0)
    assert rate_of("rank-4", "GD", 14.8) == pytest.approx(2.0)
    assert rate_of("svhn", "SGD+M", 2.0) == pytest.approx(0.6)
    assert rate_of("celeba", "Adadelta", 2.0) == 10.0


def test_correlation_over_optimizers():
    rows = [
        {"panel": "rank-2", "optimizer": o, "alignment": i + e, "test_loss": -float(i)}
        for i, o in enumerate(OPTIMIZERS)
        for e in (-0.1, 0.1)
    ]
    assert correlation(rows, "rank-2") == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="six"):
        correlation(rows[:6], "rank-2")


def test_runs_repeat_without_their_cache():
    setting = Setting("rank-2", 30, 20, 4, 16)
    first = feature_gd.raised(setting, 1, 2, 30, 10, scheduled=False)
    other = feature_sgd.trained(setting, 5, 30, 2, "ntk", 0.5)
    feature_gd.raised.cache_clear()
    feature_sgd.trained.cache_clear()
    again = feature_gd.raised(setting, 1, 2, 30, 10, scheduled=False)
    assert again is not first
    assert (again.runs, again.curves, again.blocks) == (first.runs, first.curves, first.blocks)
    assert feature_sgd.trained(setting, 5, 30, 2, "ntk", 0.5).runs == other.runs
