"""`growth_study` and `adaptive_stacking`: all operators to the end, and stages chosen by trials."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import theodolite as th
from tests.unit.measures.growth.small import CRITERION, TRAIN, VALID, Network, given, trained
from theodolite.measures.growth import GrowthStudy, Stage, adaptive_stacking, bert_large_stages, grow, growth_study
from theodolite.measures.growth.diagnostics import stacking_trial_steps
from theodolite.testing import same


def study(**more):
    return growth_study(**given(**{"steps": 8, "every": 4, "operators": ["last", "random-top", "identity"], **more}))


def test_the_losses_are_those_of_plain_runs():
    found = study(seeds=[3, 4])
    model, optimizer = trained()
    for s, seed in enumerate((3, 4)):
        for c, operator in enumerate(found.operators):
            given_inputs = {"inputs": VALID[0]} if operator.init == "identity" else {}
            grown = grow(model, operator, optimizer=optimizer, seed=seed, **given_inputs)
            th.train(grown.model, CRITERION, TRAIN, grown.optimizer, steps=8, first=10, batch_size=16, seed=seed)
            assert float(found.losses[s, c, -1]) == pytest.approx(th.Problem(grown.model, CRITERION, VALID).loss(), rel=1e-6)


def test_the_identity_operator_starts_at_the_loss_of_the_small_model():
    found = study(baselines=("small",))
    start = next(row["loss"] for row in found.baselines if row["step"] == 0)
    identity = found.names.index(next(name for name in found.names if "identity" in name))
    assert found.curves[identity, 0] == pytest.approx(start, rel=1e-6)


def planted(losses, seeds=1, noise=0.0):
    """A study with known curves."""
    plain = study(steps=1, every=1)
    losses = torch.as_tensor(np.asarray(losses, dtype=np.float64))[None].repeat(seeds, 1, 1)
    losses = losses + noise * torch.randn(losses.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fields = {name: getattr(plain, name) for name in ("operators", "step_flops", "small_step_flops", "baselines")}
    error = torch.tensor([0.0, 0.01, 0.01], dtype=torch.float64)
    steps = tuple(range(0, 10 * losses.shape[2], 10))
    return GrowthStudy(losses=losses, steps=steps, seeds=tuple(range(seeds)), sampling_error=error, **fields)


def test_diagnostics_of_known_curves():
    found = planted([[3.0, 1.5, 1.0], [2.0, 1.6, 1.5], [1.0, 1.8, 2.0]])
    assert found.final_correlation().tolist() == [-1.0, 1.0, 1.0]
    assert found.final_correlation("pearson")[0] == pytest.approx(-1)
    assert found.relative_regret().tolist() == [1.0, 0.0, 0.0]
    assert found.regret().tolist() == [1.0, 0.0, 0.0]
    assert found.recall(1).tolist() == [0, 1, 1]
    assert found.recall(3).tolist() == [1, 1, 1]
    assert found.transition() == 10
    assert found.heatmap()[0, 2] == -1
    assert found.heatmap(until=10).shape == (2, 2)
    assert found.chosen(0) == found.operators[2]
    assert found.chosen(12) == found.best == found.operators[0]
    assert found.smoothed(3)[0].tolist() == [2.25, 5.5 / 3, 1.25]
    assert "rank correlation -1" in found.sentence()
    assert len(found.plot().axes) == 4


def test_no_rank_statistic_is_given_of_noise():
    found = planted([[3.0, 1.0], [2.0, 1.01], [1.0, 1.02]])
    statistics = (found.heatmap, found.final_correlation, found.recall, found.relative_regret, found.transition)
    assert all(statistic() is None for statistic in statistics)
    assert found.heatmap(anyway=True) is not None
    assert "no rank statistic" in found.sentence()


def test_the_noise_is_that_over_seeds_where_there_are_several():
    found = planted([[3.0, 1.0], [2.0, 1.5], [1.0, 2.0]], seeds=60, noise=0.1)
    assert found.noise == pytest.approx(0.1 * np.sqrt(2 / 3) / np.sqrt(60), rel=0.2)
    assert np.isfinite(found.errors).all()
    assert planted([[3.0, 1.0], [2.0, 1.5], [1.0, 2.0]]).noise == pytest.approx(0.01)


def test_a_killed_study_goes_on(tmp_path):
    whole = study()
    study(operators=["last", "random-top", "identity"], checkpoint=tmp_path)
    again = study(checkpoint=tmp_path, resume=True)  # nothing is left to train
    assert torch.equal(again.losses, whole.losses)
    assert same(again.rows(), whole.rows())


# Stacking


def stacked(**more):
    options = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), "stages": [(1, 6), (2, 8), (3, 8)], "lag": 2, "validation": VALID,
        "batch_size": 16, "progress": False, **more,
    }  # fmt: skip
    return adaptive_stacking(Network, CRITERION, TRAIN, **options)


def test_the_schedule_of_the_source_has_its_counts():
    stages = bert_large_stages()
    counts = [len(stage.operators(before.layers)) for before, stage in itertools.pairwise(stages)]
    assert counts == [3, 15, 27, 21, 27]
    assert stacking_trial_steps(counts, 200) == (18_600, 17_600)
    assert sum(stage.steps for stage in stages) == 1_000_000


def test_both_ways_have_the_same_stages_and_steps():
    found = stacked()
    rows = {way: [(row["layers"], row["step"]) for row in found.rows() if row["way"] == way] for way in ("adaptive", "last")}
    assert rows["adaptive"] == [(1, 6), (2, 14), (3, 22)]
    assert rows["last"] == [(2, 14), (3, 22)]
    assert found.trial_steps == 2 * 1 + 2 * 2  # one operator from 1 to 2 layers, two from 2 to 3
    assert len(found.model.blocks) == 3
    assert found.loss() == pytest.approx(th.Problem(found.model, CRITERION, VALID).loss(), rel=1e-6)


def test_with_one_operator_adaptive_stacking_is_last_stacking():
    """From one layer there is one operator: the ways are the same, bit by bit."""
    found = stacked(stages=[(1, 6), (2, 9)])
    assert found.loss("adaptive") == found.loss("last")


def test_bad_stages_are_refused():
    with pytest.raises(ValueError, match="at most twice as deep"):
        stacked(stages=[(1, 5), (3, 5)])
    with pytest.raises(ValueError, match="lag must be at most"):
        stacked(lag=9)
    with pytest.raises(ValueError, match=r"build\(1\) must make"):
        adaptive_stacking(
            lambda layers: Network(2), CRITERION, TRAIN, optimizer="adam", schedule=0.01, stages=[(1, 5), (2, 5)], lag=1,
            validation=VALID,
        )  # fmt: skip
    assert Stage(3, 100, starts=(0,), inits=("copy", "random")).operators(2)[0].init == "random"
