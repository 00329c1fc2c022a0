"""Experiments on dictionaries: pairing of the two objectives, and what claims read, on rows whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from theodolite.experiments import get
from theodolite.experiments import rows as query
from theodolite.experiments.sparse_coding import comparisons, theorems, variants
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Setting, Trained, job_of, planted
from theodolite.experiments.sparse_coding.recovery import (
    NAMES,
    PANELS,
    TABLE_21,
    TINY,
    Recovery,
    beyond_first,
    errors,
    farthest,
    first_improvement,
    full,
    gaps,
    mean_and_spread,
    noisy,
    over_realized,
    rises,
    spread,
)
from theodolite.measures.dictionary import recovery_error


def trained(setting, objective, runs):
    return list(Trained().run(job_of(setting, objective, runs)))


SMALL = Setting(dim=20, atoms=24, learned=48, sparsity=2, samples=80, batch=40, epochs=2)


def figure_rows(table=TABLE_21, initial=0.4, seeds=(0, 1), shift=0.0):
    """Rows whose means over two seeds are a table's values."""
    return [
        {
            "panel": panel,
            "init": PANELS[panel],
            "objective": objective,
            "seed": seed,
            "place": place,
            "initial": initial if panel == "a" else 0.0,
            "final": value + shift + (0.01 if seed else -0.01),
            "learned": int(200 * place),
            "samples": 1000,
        }
        for (panel, objective), values in table.items()
        for place, value in values.items()
        for seed in seeds
    ]


# Data


def test_both_objectives_see_the_same_dictionary_signals_and_start():
    base, masked = (trained(SMALL, objective, (("samples", 3),))[0] for objective in OBJECTIVES)
    assert base["initial"] == masked["initial"] > 0
    assert base["final"] != masked["final"]
    again, other = planted(SMALL, "samples", 3), planted(SMALL, "samples", 4)
    assert all(torch.equal(a, b) for a, b in zip(planted(SMALL, "samples", 3), again, strict=True))
    assert not torch.equal(again.signals, other.signals)


def test_signals_do_not_depend_on_the_number_of_learned_atoms_and_scale_with_the_noise_alone():
    few, many = planted(SMALL, "samples", 0), planted(replace(SMALL, learned=96), "samples", 0)
    assert torch.equal(few.signals, many.signals)
    assert torch.equal(few.true, many.true)
    clean = planted(replace(SMALL, noise=0.0), "samples", 0).signals
    louder = planted(replace(SMALL, noise=2 * SMALL.deviation), "samples", 0).signals
    assert torch.allclose(louder - clean, 2 * (few.signals - clean), atol=1e-12)


def test_starts():
    local, samples, gaussian = (planted(SMALL, init, 1) for init in ("local", "samples", "gaussian"))
    assert recovery_error(local.true, local.start) == pytest.approx(0, abs=1e-12)
    assert torch.equal(local.start[24:], samples.start[:24])
    assert not any(torch.equal(row, sample) for row in samples.start[:3] for sample in samples.signals)
    # random directions learn from the signals that the others start at
    assert torch.equal(gaussian.signals, torch.cat([samples.signals, samples.start]))
    assert planted(replace(SMALL, learned=24), "local", 1).start.shape == (24, 20)


def test_a_fleet_equals_its_runs_one_by_one():
    runs = (("samples", 0), ("local", 0))
    for together, run in zip(trained(SMALL, "masked", runs), runs, strict=True):
        alone = trained(SMALL, "masked", (run,))[0]
        for column in ("initial", "final", "score", "last_loss"):
            assert alone[column] == pytest.approx(together[column], rel=1e-6, abs=1e-12)


def test_jobs_carry_their_settings():
    job = job_of(SMALL, "masked", (("samples", 2),), place=1)
    assert Setting(**job["setting"]) == SMALL
    assert (job["seed"], job["place"], job["runs"]) == (2, 1, [["samples", 2]])
    (needed,) = Recovery().needs(job)
    assert list(needed.study.run(needed.job)) == trained(SMALL, "masked", (("samples", 2),))
    (row,) = Recovery().run(job, trained(SMALL, "masked", (("samples", 2),)))
    assert (row["panel"], row["place"], row["learned"]) == ("a", 1, SMALL.learned)


def test_sizes_of_the_figures():
    paper = get("sparse-coding/figure-2.1").parameters("paper")
    assert [setting.learned for _, setting in paper.settings] == [200, 400, 600, 800, 1000]
    assert paper.seeds == 5
    scaled = get("sparse-coding/figure-2.2").parameters("paper").settings
    assert [(s.dim, s.atoms, s.learned, s.sparsity) for _, s in scaled] == [
        (100, 200, 400, 5),
        (150, 300, 600, 7),
        (200, 400, 800, 10),
        (250, 500, 1000, 12),
    ]
    levels = [setting.deviation for _, setting in noisy(Setting(), 0, 0.25, 0.5, 0.75, 1)]
    assert levels == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.1])
    for figure in ("figure-2.1", "figure-2.2", "figure-2.3"):
        experiment = get(f"sparse-coding/{figure}")
        assert len(experiment.chosen_jobs("laptop")) in (16, 24)
    assert [setting.learned for _, setting in over_realized(TINY, 1, 5)] == [100, 500]


# Readings


def test_readings_of_the_figure():
    rows = figure_rows()
    value = query(panel="a", objective="masked", place=5)["final"].reduce(mean_and_spread)(rows)
    assert (value.value, value.error) == (pytest.approx(0.384), pytest.approx(0.01))
    assert gaps("b")(rows)[0] == pytest.approx(-0.027)
    assert gaps("b", beyond_first).min()(rows) == pytest.approx(0.007)
    assert gaps("a").steps().min()(rows) == pytest.approx(0.011)
    assert rises("a", "reconstruction", full).only()(rows) == pytest.approx(0.133)
    assert spread("masked")(rows) == pytest.approx(0.009)
    assert first_improvement(rows) == pytest.approx(0.019)
    assert errors("b", "masked")(rows) == pytest.approx([0.153, 0.149, 0.153, 0.158, 0.158])


def test_distance_from_a_table_is_the_largest_over_what_was_run():
    rows = figure_rows(shift=0.02)
    measure = farthest("final", TABLE_21["a", "masked"], panel="a", objective="masked")
    assert measure(rows) == pytest.approx(0.02)
    assert measure([row for row in rows if row["place"] in (1, 2, 5)]) == pytest.approx(0.02)
    assert math.isnan(measure([{**row, "final": math.nan} for row in rows]))
    assert math.isnan(query["final"].min()([{"final": value} for value in (1.0, math.nan)]))


def test_claims_of_figure_21_hold_for_the_authors_values_and_not_for_swapped_ones():
    experiment = get("sparse-coding/figure-2.1")
    rows = figure_rows(initial=0.4)
    failed = [verdict.text for verdict in experiment.judge(rows, "paper") if verdict.failed]
    assert all("before training" in text or "its start" in text or "own start" in text for text in failed), failed
    swapped = [{**row, "objective": OBJECTIVES[1 - OBJECTIVES.index(row["objective"])]} for row in rows]
    assert len([v for v in experiment.judge(swapped, "paper") if v.failed]) > 8


def test_claims_say_where_values_were_read():
    for figure in ("figure-2.1", "figure-2.2", "figure-2.3"):
        for claim in get(f"sparse-coding/{figure}").claims:
            if "read from" in claim.text:
                assert claim.reported is not None
                assert claim.reported.read_from == "plot"


def test_readings_of_the_theorems():
    rows = [
        {"part": "T7", "scale": scale, "seed": seed, "wrong": 3 / scale, "excess": 2 / scale, "excess_error": 0.1, "bayes": 0.5}
        for scale in (4.0, 8.0, 16.0)
        for seed in (0, 1)
    ]
    assert theorems.power_of_scale("wrong", 8)(rows) == pytest.approx(-1)
    share = theorems.excess_share(rows)
    assert (share.value, share.error) == (pytest.approx(0.25), pytest.approx(0.1 / math.sqrt(2) / 0.5))
    losses = [{"part": "T8", "loss": "reconstruction", "true": 1.0, "mixtures": value} for value in (0.7, 0.9)]
    assert theorems.relative_loss("reconstruction").max()(losses) == pytest.approx(-0.1)


def test_readings_of_the_score():
    rows = [
        {"part": "objectives", "init": init, "objective": objective, "score": value, "reconstruction": 1 / value}
        for init, values in (("samples", (4.0, 3.0)), ("local", (2.0, 1.9)))
        for objective, value in zip(OBJECTIVES, values, strict=True)
    ]
    assert comparisons.advantages("score").max()(rows) == pytest.approx(-0.05)
    assert comparisons.advantages("reconstruction").min()(rows) == pytest.approx(2 / 1.9 - 1)
    search = [
        {
            "part": "search",
            "atoms": 40,
            "true_sparsity": 3,
            "n_components": p,
            "sparsity": k,
            "hidden_error": abs(k - 3) + p,
            "train_reconstruction": 1 / (p * k),
        }
        for p in (20, 40)
        for k in (2, 3, 4)
    ]
    assert comparisons.extreme(search)
    best = comparisons.preferred(search)
    assert (best["n_components"], best["sparsity"]) == (20, 3)


# Other packages


def test_a_package_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(comparisons, "find_spec", lambda name: None)
    row = comparisons.compared("spams", SMALL, 0)
    assert row["state"] == "not installed"
    assert math.isnan(row["final"])
    assert comparisons.error_of("spams")([{**row, "method": "spams", "place": 5}]) == "not installed"
    assert comparisons.installed("scikit-learn, mini-batch")


@pytest.mark.parametrize("method", comparisons.OTHERS)
def test_other_methods_start_where_ours_do_and_repeat(method):
    if not comparisons.installed(method):
        pytest.skip(f"{method} is not installed")
    data = planted(SMALL, "samples", 0)
    learn = comparisons.OTHERS[method]
    first, again = (learn(data.signals, data.start, 2, batch=40, epochs=2, seed=0) for _ in range(2))
    assert first.shape == data.start.shape
    assert torch.equal(first, again)
    comparisons.compared(method, SMALL, 0)


# Patches


def test_patches_are_of_unit_size_and_training_patches_have_no_mean():
    study = comparisons.Patching(samples=200, tested=50)
    known, tested, origin = comparisons.patches(study, 0)
    assert (known.shape, tested.shape, origin) == ((200, 64), (50, 64), "digits")
    assert float(known.mean(0).abs().max()) < 1e-12
    assert float(known.square().sum(1).mean()) == pytest.approx(1)
    noisy_known, _, _ = comparisons.patches(replace(study, noise=0.5), 0)
    assert float((noisy_known - known).square().sum(1).mean()) == pytest.approx(0.25, rel=0.1)


def test_gradients_of_both_objectives():
    rows = list(variants.gradient_norms(SMALL, 0))
    assert len(rows) == 2
    assert all(row[f"{objective}_norm"] > 0 for row in rows for objective in OBJECTIVES)
    assert variants.gradient_ratio([{"part": "gradients", "masked_norm": 1.0, "reconstruction_norm": 4.0}]) == 0.25
    assert set(NAMES) == set(OBJECTIVES)
