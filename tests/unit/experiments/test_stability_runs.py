"""The settings of the stability experiments, and the runs that their figures share."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

import theodolite as th
from theodolite.data import MissingDataError
from theodolite.experiments import Params
from theodolite.experiments.stability import pairs
from theodolite.experiments.stability.appendix import FigureA2, FigureA5, FigureA11
from theodolite.experiments.stability.main_text import Figure22, Figure23
from theodolite.experiments.stability.pairs import (
    CONFIGURATIONS,
    DEEP_SIZES,
    LOGISTIC_SIZES,
    TINY,
    ConvexPairs,
    Pairs,
    Paths,
    Setting,
    Stopped,
    pair_job,
    pair_rows,
    recipe_of,
    task_of,
)
from theodolite.measures.stability.training_pairs import visiting_steps
from theodolite.runners.store import plain

SHORT = replace(TINY[0], steps=8, tested=100)
REGRESSION = replace(LOGISTIC_SIZES["tiny"], steps=24, tested=100)


def measured(setting, trial, m, count):
    """Rows of a job of `Pairs`."""
    job = pair_job(setting, trial, m, Params(pairs=count, further=count))
    return list(Pairs().run(job))


def stopped(setting, m, count, rule, epochs, target):
    job = pair_job(setting, 0, m, Params(pairs=count, further=count))
    return list(Stopped().run({**job, "rule": rule, "epochs": epochs, "loss_target": target}))


def test_every_row_of_the_chapter_is_registered():
    done, total = th.experiments.coverage().by_system()["H"]
    assert (done, total) == (20, 20)


def test_a_setting_survives_the_way_through_a_job():
    for setting in (*CONFIGURATIONS.values(), *TINY):
        assert Setting.of(plain(asdict(setting))) == setting


def test_rates_fall_where_the_table_says():
    rates = [CONFIGURATIONS["2b"].rate_at(step) for step in (0, 31_999, 32_000, 47_999, 48_000, 149_999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert CONFIGURATIONS["1a"].rate_at(149_999) == 0.01
    first, second, third = TINY
    assert (first.drops, second.drops, third.momentum) == ((), (80, 120), 0.9)


def test_gaussian_classes_stand_in_for_files_that_are_not_there(monkeypatch):
    def nothing(name):
        raise MissingDataError(name)

    monkeypatch.setattr(pairs.data, "load", nothing)
    monkeypatch.setattr(pairs, "GENERATED", 40)
    for network, shape, origin in (("linear", (40, 1), "two Gaussian classes"), ("mlp", (40,), "ten Gaussian classes")):
        setting = replace(SHORT, data="mnist", network=network, tested=20)
        task = task_of(replace(setting, source="either"))
        assert (task.origin, len(task.bench.test)) == (origin, 20)
        assert task.bench.train.targets.shape == shape
        with pytest.raises(MissingDataError):
            task_of(replace(setting, source="files"))


def test_the_test_pool_is_a_choice_made_once():
    setting = replace(SHORT, source="files", tested=50)
    task = task_of(setting)
    assert len(task.bench.test) == len(task.bench.eval_rows) == 50
    assert torch.equal(task.bench.test.inputs, task_of(setting).bench.test.inputs)


def test_logistic_regression_starts_at_zero_and_networks_do_not():
    model = recipe_of(REGRESSION, task_of(REGRESSION)).factory(3)
    assert sum(p.numel() for p in model.parameters()) == 51
    assert not any(bool(p.any()) for p in model.parameters())
    task = task_of(SHORT)
    network, again = (recipe_of(SHORT, task).factory(3) for _ in range(2))
    assert [tuple(p.shape) for p in network.parameters()][::2] == [(32, 64), (32, 32), (10, 32)]
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), again.parameters(), strict=True))


def test_a_run_repeats():
    assert measured(SHORT, 1, 40, 2) == measured(SHORT, 1, 40, 2)
    assert [row["step"] for row in measured(SHORT, 1, 40, 2)] == [4, 4, 8, 8, 12, 12]


def test_the_first_pairs_do_not_depend_on_how_many_follow():
    few, many = measured(SHORT, 0, 40, 2), [row for row in measured(SHORT, 0, 40, 3) if row["pair"] < 2]
    for row, other in zip(few, many, strict=True):
        assert row["stab"] == pytest.approx(other["stab"], rel=1e-3, abs=1e-6)
        assert row["dist"] == pytest.approx(other["dist"], rel=1e-3, abs=1e-6)


def test_figures_of_one_configuration_share_their_jobs():
    """Equal jobs of one study are computed once, whatever figures look at them."""

    def jobs(figure):
        return figure().chosen_jobs("laptop")

    assert jobs(FigureA2) == jobs(FigureA5)
    assert [job for job in jobs(FigureA2) if job["trial"] == 0] == [job for job in jobs(Figure22) if job["configuration"] == "1a"]
    assert all(job in jobs(FigureA11) for job in (*jobs(FigureA2), *jobs(Figure22)))
    assert [job for job in jobs(Figure23) if job["configuration"] in ("1a", "2a", "2b")] == jobs(Figure22)
    assert {job["compared"] for job in jobs(FigureA2)} == {DEEP_SIZES["laptop"].further}


def test_the_rule_by_updates_takes_the_runs_of_the_other_figures():
    p = Params(settings=(SHORT,), ms=(40,), pairs=2, further=1, trials=(0,), epochs=1, loss_target=1.0)
    job = next(iter(Stopped(sizes={"tiny": p}).jobs(p)))
    (needed,) = Stopped().needs(job)
    assert needed.job == next(iter(Pairs().jobs(p)))
    rows = list(Stopped().run(job, list(Pairs().run(needed.job))))
    assert [(row["time"], row["pair"], row["rule"]) for row in rows] == [("T", 0, "updates")]


def test_stopping_by_epochs_takes_more_updates_for_larger_sets():
    task = task_of(SHORT)
    for m in (40, 80):
        rows = stopped(SHORT, m, 1, "epochs", 2, 0.1)
        assert rows[-1]["step"] == 2 * (m // SHORT.batch)
    assert rows[0]["data"] == task.origin
    reached = stopped(SHORT, 40, 1, "train_loss", 2, 100.0)
    assert reached[-1]["steps_taken"] < 5 * SHORT.steps


def test_profiles_end_at_the_two_solutions():
    p = Params(settings=(SHORT,), ms=(40, 80), trials=(0,), joined=2)
    rows = list(Paths().run(next(iter(Paths().jobs(p)))))
    assert len(rows) == 2 * 76
    assert {row["pair"] for row in rows} == {0, 1}
    end = [row for row in measured(SHORT, 0, 40, 2) if row["step"] == SHORT.steps]
    at_one = {row["pair"]: row for row in rows if row["alpha"] == 1.0}
    for row in end:
        assert at_one[row["pair"]]["train_accuracy"] == pytest.approx(row["train_accuracy"], abs=1e-9)


def test_a_short_run_begins_before_the_first_update():
    rows = pair_rows(SHORT, 0, 40, 1, (0, 4, 8))
    assert [row["step"] for row in rows] == [0, 4, 8]
    assert rows[0]["dist"] == rows[0]["stab"] == 0.0


def test_check_10_pairs_of_logistic_regression_respect_the_convex_bounds():
    job = pair_job(REGRESSION, 0, 200, Params(pairs=3, further=3))
    rows = list(ConvexPairs().run(job, list(Pairs().run(job))))
    assert len(rows) == 9
    assert max(row["rate_share"] for row in rows) <= 1.0
    for share in ("distance_share", "stability_share"):
        assert 0.0 < max(row[share] for row in rows) <= 1.0 + 1e-5


def test_the_smoothness_of_batches_is_that_of_their_matrices():
    small = replace(REGRESSION, rate=2.0, batch=16)  # 2/rate = 1: bounds on the smoothness do not settle it
    found, tested = pairs.batch_constants(small, 64, 1)
    bench = task_of(small).bench
    swap = pairs.draw_swaps(len(bench.train), len(bench.test), 64, 1, 0)[0]
    inputs = torch.cat([bench.joined[0].double(), torch.ones(len(bench.joined[0]), 1)], 1)
    places = pairs.batch_places(64, 16, 24)
    exact = max(
        float(torch.linalg.matrix_norm(inputs[both[batch]], 2) ** 2 / 16 / 4)
        for both in swap.rows(len(bench.train))
        for batch in places
    )
    assert found[0][1] == pytest.approx(max(exact, 0.0), rel=1e-6)
    assert tested == pytest.approx(float(inputs[len(bench.train) :].norm(dim=1).max()))


def test_batches_are_those_of_the_fleet():
    places = pairs.batch_places(10, 3, 7, order_seed=5)
    seen = visiting_steps(torch.arange(10), 10, 3, 7, order_seed=5)
    assert torch.equal(torch.stack([(places == i).any(1) for i in range(10)]), seen)


def test_the_shared_runs_keep_what_figures_need():
    rows = measured(SHORT, 0, 40, 2)
    assert set(pairs.COLUMNS) <= set(rows[0])
    assert {row["configuration"] for row in rows} == {"1a"}
