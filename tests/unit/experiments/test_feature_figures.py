"""What the rows of the experiments on features say, on rows whose answer is known, and that figures share their runs."""

from __future__ import annotations

import math

import pytest

from theodolite.experiments import get
from theodolite.experiments.catapult_features.features import (
    BatchSizes,
    Figure48,
    FigureC17,
    RaisedRates,
    Table41,
    block_distance,
    by_batch,
    by_seed,
    gain,
    lowest,
    monotone,
    nearer,
    quotient,
    seeds_better,
    spread,
)
from theodolite.experiments.catapult_features.features_optimizers import OPTIMIZERS, TABLE_C_1, correlation, rate_of
from theodolite.experiments.catapult_features.tasks import Setting
from theodolite.runners import Computations, run_stored


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
    assert by_seed("rank-2", "test_loss")(rows) == [0.5, 2.0, 0.9]
    assert by_seed("rank-2", "spikes", 0)(rows) == [0, 0, 0]
    with pytest.raises(ValueError, match="no rows with raises = 1"):
        by_seed("rank-2", "spikes", 1)(rows)
    full_rank = [{**row, "panel": "full rank"} for row in rows]
    alignment, loss = (claim.measure(full_rank) for claim in FigureC17.claims)
    assert alignment == pytest.approx(0.1)
    assert loss == pytest.approx(3.4 / 3 - 1)
    spikes_per_raise = Figure48.claims[-1].measure
    assert spikes_per_raise(rows) == 1.0


def batch_rows():
    values = {5: (0.9, 0.4), 50: (0.8, 0.7), 500: (0.7, 0.8)}
    return [
        {"panel": "rank-2", "ratio": 0.5, "batch": b, "all": b == 500, "seed": s, "alignment": a + 0.01 * s, "test_loss": loss}
        for b, (a, loss) in values.items()
        for s in (-1, 1)
    ]


def test_trends_over_batch_sizes():
    rows = batch_rows()
    assert monotone(by_batch("rank-2", "alignment"))(rows) == 1.0
    assert monotone(by_batch("rank-2", "test_loss"), falling=False)(rows) == 1.0
    assert monotone(by_batch("rank-2", "test_loss"))(rows) == 0.0
    assert gain("rank-2", "alignment")(rows) == pytest.approx(0.2)
    assert quotient(by_batch("rank-2", "test_loss"))(rows) == pytest.approx(0.5)
    assert spread(by_batch("rank-2", "test_loss", ratio=0.5))(rows) == pytest.approx(0.4 / (1.9 / 3))
    with_all_points = next(c for c in Table41.claims if c.text == "test loss with all points (GD)")
    assert with_all_points.measure(rows) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no two batch sizes"):
        gain("rank-2", "alignment")(rows[:2])


def test_lowest_validation_loss_by_batch_size():
    curve = [(5, 0, 3.0), (5, 0, 1.0), (5, 1, 2.0), (9, 0, 4.0)]
    rows = [{"panel": "rank-2", "batch": b, "seed": s, "validation": v} for b, s, v in curve]
    assert lowest("rank-2")(rows) == [1.5, 4.0]


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


@pytest.mark.parametrize(
    ("study", "job"),
    [
        (RaisedRates(), {"raises": 1, "check": 10, "scheduled": False, "init": "ntk"}),
        (BatchSizes(), {"batch": 5, "init": "ntk", "ratio": 0.5}),
    ],
)
def test_runs_repeat_and_are_stored_by_what_is_computed(study, job):
    job = {"setting": Setting("rank-2", 30, 20, 4, 16)._asdict(), "seeds": 2, "steps": 30, "seed": 0, **job}
    shared = Computations()
    first, stored = (run_stored(study.work(), [job], name=name, computations=shared) for name in ("one", "another"))
    assert (first.reused, stored.reused) == (0, 1)
    assert stored.rows == first.rows == run_stored(study.work(), [job], name="one").rows


@pytest.mark.parametrize(
    ("figure", "others"),
    [
        ("figure-4.8", ["figure-C.13", "figure-C.14", "figure-C.15"]),
        ("figure-4.9", ["figure-C.19", "table-4.1"]),
        ("figure-C.18", ["figure-C.20"]),
        ("figure-4.11", ["table-C.1"]),
    ],
)
def test_figures_of_the_same_runs_share_them(figure, others):
    first = get(f"catapult-features/{figure}")
    for other in (get(f"catapult-features/{name}") for name in others):
        assert other.study.name == first.study.name
        jobs = other.chosen_jobs("tiny")
        shared = [job for job in first.chosen_jobs("tiny") if job in jobs]
        assert len(shared) == min(len(jobs), len(first.chosen_jobs("tiny")))
