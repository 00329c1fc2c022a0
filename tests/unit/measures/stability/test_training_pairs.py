"""Pairs in lock-step: parts, the control, divergence, and the examples they are compared on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.unit.measures.stability.test_study import LOSS, TEST, TRAIN, X, Y, small, study
from theodolite.measures.stability import example_losses, training_pairs
from theodolite.measures.stability.study import make_bench
from theodolite.measures.stability.training_pairs import Recipe, draw_swaps
from theodolite.results import Outcome

GENERATOR = torch.Generator().manual_seed(0)
WIDE = torch.randn(1000, 50, generator=GENERATOR)
SIDES = (WIDE[:, 0] + torch.randn(1000, generator=GENERATOR) > 0).long()


@pytest.mark.parametrize(
    ("size", "factory"),
    [
        (333, lambda seed: nn.Sequential(nn.Linear(50, 37), nn.ReLU(), nn.BatchNorm1d(37), nn.Linear(37, 2))),
        (97, lambda seed: nn.Linear(50, 2)),
        (1000, lambda seed: nn.Sequential(nn.Linear(50, 61), nn.Tanh(), nn.Linear(61, 2))),
    ],
)
@pytest.mark.parametrize("loss", [LOSS, nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.7]))])
def test_check_17_the_gap_on_the_training_set_is_zero_to_the_bit(size, factory, loss):
    pool = WIDE[:size], SIDES[:size]
    found = study(factory, pool, pool, sizes=[size], pairs=3, steps=12, batch_size=33, rate=0.1, loss=loss)
    assert [(row["gap_loss"], row["gap_01"]) for row in found.rows()] == [(0.0, 0.0)] * 3


def test_other_examples_are_not_taken_for_the_evaluation_set():
    bench = make_bench((X[:40], Y[:40]), (X[:40], Y[:40]))
    assert bench.is_evaluation(torch.randperm(40))
    assert not bench.is_evaluation(torch.arange(39))
    assert not make_bench((X[:80], Y[:80]), (X[:40], Y[:40])).is_evaluation(torch.arange(40) + 1)
    assert not make_bench((X[:40], Y[:40]), (X[:40], 1 - Y[:40])).is_evaluation(torch.arange(40))


def test_pairs_compared_in_parts_have_the_numbers_of_one_part(monkeypatch):
    whole = study(sizes=[40], pairs=5, steps=12, checkpoints=[6])
    monkeypatch.setattr(training_pairs, "HELD", 2 * 2 * 2 * (100 + 40))  # two pairs at once
    parts = study(sizes=[40], pairs=5, steps=12, checkpoints=[6])
    for row, wanted in zip(parts.rows(), whole.rows(), strict=True):
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        assert [row[name] for name in ("dist", "norm_S", "norm_S2")] == [wanted[name] for name in ("dist", "norm_S", "norm_S2")]
    assert len({row["dist"] for row in whole.select(step=12)}) == 5


def test_a_control_that_ends_apart_has_the_pairs_trained_anew(monkeypatch):
    options = {"sizes": [40], "pairs": 2, "steps": 12, "check_steps": 0}
    plain, looped = study(**options), study(**options, route="loop")
    assert (plain.cost.route, looped.cost.route) == ("vmap", "loop")
    train, routes = Recipe.train, []

    def apart(self, fleet, *given, **more):
        trace = train(self, fleet, *given, **more)
        routes.append(trace.route)
        if trace.route != "loop":
            next(iter(fleet.parameters.values()))[-1] += 1e-6
        return trace

    monkeypatch.setattr(Recipe, "train", apart)
    found = study(**options)
    assert routes == ["vmap", "loop"]
    assert found.cost.route == "loop"
    assert found.rows() == looped.rows()


def test_a_loss_target_waits_for_a_whole_epoch_with_the_incomplete_batch(monkeypatch):
    windows = []
    rule = training_pairs.LossTarget
    monkeypatch.setattr(training_pairs, "LossTarget", lambda target, batches: windows.append(batches) or rule(target, batches))
    for drop_last, m in ((True, 23), (False, 23), (False, 20), (False, 3)):
        study(sizes=[m], pairs=1, steps=4, stop="train_loss", loss_target=1e-3, check_steps=0, drop_last=drop_last)
    assert windows == [2, 3, 2, 1]


def blown_up(**options):
    """Regression at a rate above what all batches bear."""
    train, test = (X[:160], X[:160, :1]), (X[160:], X[160:, :1])
    return study(lambda seed: nn.Linear(6, 1), train, test, loss=nn.MSELoss(), **{"rate": 3.0, "steps": 60, **options})


def test_rows_before_a_divergence_are_kept():
    found = blown_up(checkpoints=[0, 2])
    for row in found.rows():
        assert row["diverged"] == (row["step"] > 2)
        assert math.isnan(row["stab"]) == row["diverged"]
    assert {row["step"] for row in found.rows()} >= {0, 2}
    assert all(math.isfinite(value) for values in found.values("dist", step=2).values() for value in values)
    assert found.outcome is Outcome.DIVERGED
    assert found.sentence().startswith("All pairs diverged")
    assert "Exchanging" not in found.sentence()  # numbers of an earlier checkpoint are not those of the end
    assert any("3 of 3 pairs diverged" in note for note in found.notes)


def test_a_pair_is_lost_from_the_checkpoint_at_which_its_loss_was_seen():
    trace = training_pairs.FleetTrace(
        loss=torch.zeros(5, 20), rates=torch.zeros(5), factors=torch.ones(1, 20), seeds=(0,) * 5, order_seeds=(0,) * 5,
        epoch=(0,) * 20, diverged_at=(None, 9, None, None, 3), stopped_at=(None,) * 5, measured_at=(), measured={},
    )  # fmt: skip
    swaps = draw_swaps(160, 100, 40, 2, 0)
    recipe = Recipe(small, "sgd", LOSS, 20, 10)
    lost = {
        step: [row["diverged"] for row in training_pairs._placed([{}, {}], step, recipe, swaps, trace)] for step in (3, 8, 9, 20)
    }
    assert lost == {3: [False, False], 8: [False, False], 9: [True, False], 20: [True, False]}


def test_studies_with_a_pair_left_have_not_diverged_and_lost_pairs_have_no_path():
    x = X.clone()
    x[:4] *= 100  # steep examples, which some of the training sets hold
    train, test = (x[:160], x[:160, :1]), (x[160:], x[160:, :1])
    found = study(lambda seed: nn.Linear(6, 1), train, test, loss=nn.MSELoss(), rate=0.05, sizes=[20, 40], pairs=6, paths=6)
    ends = {(row["m"], row["pair"]): row["diverged"] for row in found.rows()}
    assert 0 < sum(ends.values()) < len(ends)
    assert found.outcome is Outcome.FINISHED
    joined = {(int(words[3].strip(",")), int(words[5])) for words in (name.split() for name in found.paths)}
    assert joined == {place for place, lost in ends.items() if not lost}


def test_a_part_of_the_test_pool_is_compared_on_and_named_by_its_numbers():
    found, again = (study(sizes=[40], pairs=4, steps=12, eval_size=30, pair_seed=5) for _ in range(2))
    assert found.rows() == again.rows()
    assert found.settings["eval_size"] == 30
    chosen = make_bench(TRAIN, TEST, 30, 5).eval_rows
    assert len(chosen) == 30
    full = study(sizes=[40], pairs=4, steps=12, pair_seed=5)
    recipe = Recipe(small, "sgd", LOSS, 12, 10, settings={"rate": 0.2})
    swaps = draw_swaps(160, 100, 40, 4, 5)
    fleet = recipe.fleet(9)
    index = torch.cat([swap.rows(160) for swap in swaps])
    recipe.train(fleet, make_bench(TRAIN, TEST).joined, torch.cat([index, index[:1]]), progress=False)
    outputs = fleet.outputs(TEST)
    for pair, (row, all_) in enumerate(zip(found.rows(), full.rows(), strict=True)):
        first, second = (example_losses(LOSS, outputs[2 * pair + twin], TEST[1]) for twin in (0, 1))
        gaps = (first - second).abs()
        assert all_["worst"] == int(gaps.argmax())
        assert row["worst"] == int(chosen[gaps[chosen].argmax()])
        assert row["stab"] == pytest.approx(float(gaps[row["worst"]]), rel=1e-4)
