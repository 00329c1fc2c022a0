"""Downstream tasks, attacks and certificates on small models, and the parts of the theorems."""

from __future__ import annotations

import pytest
import torch

from theodolite.experiments.anchors import synthetic as theorems
from theodolite.experiments.anchors.local_gpt import (
    anchor_of,
    certified,
    follows,
    frequent_words,
    log_bulk,
    rare_word_rows,
    readout_rows,
    shift_rows,
    states_at,
    task_of,
    violated,
)
from theodolite.experiments.anchors.small_gpt import Recipe, windows, zipf_text
from theodolite.measures.anchors.transfer.certificate import normalized_margin
from theodolite.measures.anchors.transfer.readout import anchored_logits, thresholded_score

RECIPE = Recipe(words=40, context=8, dim=12, depth=1, heads=2)


@pytest.fixture(scope="module")
def model():
    """An untrained network with large weights, so that its distributions differ between contexts."""
    network = RECIPE.network(seed=1).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
    return network


@pytest.fixture(scope="module")
def text():
    return windows(zipf_text(40, 401), 8)


def test_states_give_the_logits_of_the_model(model, text):
    found = states_at(model, text[0])
    assert found.contexts == 400
    torch.testing.assert_close(found.logits(), model(text[0]).detach().reshape(400, 40))


def test_the_bulk_leaves_the_labels_out(model, text):
    clean = states_at(model, text[0])
    labels = torch.tensor([3, 7])
    rest = [j for j in range(40) if j not in (3, 7)]
    torch.testing.assert_close(log_bulk(clean, labels), clean.logits()[:, rest].logsumexp(1))


def test_tasks_read_frequent_words_for_and_against(model, text):
    clean = states_at(model, text[0])
    labels = frequent_words(clean, 4, seed=0)
    often = clean.logits().softmax(1).mean(0).topk(20).indices.tolist()
    assert set(labels.tolist()) <= set(often)
    assert len(set(labels.tolist())) == 4
    assert torch.equal(labels, frequent_words(clean, 4, seed=0))
    assert not torch.equal(labels, frequent_words(clean, 4, seed=1))
    task = task_of(clean, anchor_of(clean, labels), labels)
    assert task.a.tolist() == [1, 1, -1, -1]
    u = anchored_logits(clean, anchor_of(clean, labels), labels)
    assert ((u < task.b).double().mean(0) - 0.25).abs().max() < 0.01


def test_a_shift_ruins_raw_scores_only(model, text):
    for row in shift_rows(model, *text, seed=0):
        assert row["loss_change"] < 1e-12
        assert row["anchored_change"] < 1e-9
        assert row["raw_kept"] < 0.8
    assert row["attack"] == "varying"


def test_a_rare_word_costs_what_the_formula_says(model, text):
    for row in rare_word_rows(model, *text, seed=0):
        assert row["kl_error"] < 1e-9
        assert row["kl_over_bound"] <= 1 + 1e-9
        assert row["linear_change"] == pytest.approx(row["strength"])
        assert row["anchored_change"] == 0


def test_readouts_before_and_after(model, text):
    rows = {row["readout"]: row for row in readout_rows(model, text[0], seed=0)}
    assert rows["anchored"]["accuracy"] == rows["anchored"]["accuracy_shifted"]
    assert rows["raw logits"]["accuracy_shifted"] < rows["raw logits"]["accuracy"]


def test_a_teacher_certifies_itself(model, text):
    clean = states_at(model, text[0])
    labels = frequent_words(clean, 4, seed=0)
    row = certified(clean, clean, labels, task_of(clean, anchor_of(clean, labels), labels))
    assert row["failed"] == 0
    assert row["eps_kl"] == 0
    assert violated([row]) == 0


def test_violations_and_correlations_are_seen():
    bounds = {"theorem_bound": 1.0, "general_bound": 1.0, "tight_bound": 0.2}
    rows = [{"task": 0, "eps_kl": float(i), "failed": i / 10, "eps_cls": -float(i), **bounds} for i in range(5)]
    assert violated(rows) == 2  # 0.3 and 0.4 are above 0.2
    assert follows("failed")(rows) == pytest.approx(1.0)
    assert follows("eps_cls")(rows) == pytest.approx(-1.0)


# theorems ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3])
def test_pairs_disagree_and_their_anchors_err_by_at_most_what_is_said(k):
    pairs = theorems.disagreeing(k, 300, seed=2)
    assert len(pairs.f) == 300
    other = thresholded_score(pairs.u[:, 1], pairs.a, pairs.b)
    assert (pairs.f * other < 0).all()
    assert (normalized_margin(pairs.f.abs(), pairs.a) > 4 * pairs.eps_b).all()
    for z, u in zip((pairs.teacher, pairs.student), pairs.u.unbind(1), strict=True):
        error = (z[:, :-1] - z[:, -1:] - u).abs().amax(1)
        assert (error <= pairs.eps_b + 1e-12).all()


def test_one_word_cannot_disagree():
    with pytest.raises(ValueError, match="k must be at least 2"):
        theorems.disagreeing(1, 10, seed=0)


def test_check_13_closed_form_example():
    (row,) = theorems.example({"seed": 0})
    assert row["kl"] == pytest.approx(0.088678, abs=1e-5)
    assert row["theorem"] == pytest.approx(6.877e-4, abs=1e-7)
    assert row["kl"] > row["theorem"]


def test_check_14_no_bound_is_violated_in_the_exact_world():
    for scale in (1.0, 0.5):
        rows = list(theorems.certificate({"scale": scale, "noise": [0.001, 0.1, 1.0], "seed": 3}))
        assert all(row["failed"] <= row["bound"] for row in rows)
        assert rows[-1]["failed"] > 0.05
    assert rows[0]["bound"] < 1


def test_check_04_exact_world():
    (exact,) = theorems.exact({"seed": 1})
    assert exact["mse"] <= 1e-18


def test_errors_fall_in_a_smaller_gaussian_world():
    """Up to 80 of 1000 words removed; 800 would leave no bulk to speak of. The full table is a claim of `anchor/worlds`."""
    job = {"radius": 3, "words": 1000, "dim": 8, "contexts": 800, "seed": 0}
    line = [row["mse"] for row in theorems.gaussian(job) if row["top"] <= 80]
    assert line == sorted(line, reverse=True)
