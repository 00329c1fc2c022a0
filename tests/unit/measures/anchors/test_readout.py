"""Read-outs on label words: what they fit, what a shift does to them, and the states after a prompt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.data.generators import exact_anchor_world
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.probing.probe import probe_states
from theodolite.measures.anchors.transfer.certificate import transfer_certificate
from theodolite.measures.anchors.transfer.log_linear import LogLinear, shift_anchor, shifted_module, silencing_shift
from theodolite.measures.anchors.transfer.prompts import PromptComparison, compare_prompts, prompted_states
from theodolite.measures.anchors.transfer.readout import (
    ReadoutComparison,
    anchored_logits,
    compare_readouts,
    fit_readout,
    logistic_regression,
    thresholded_score,
)
from theodolite.models.transformers import bert, gpt

DOUBLE = torch.float64
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=DOUBLE)
TEXTS = ["good", "a longer text", "bad bad", "x", "the very longest of these texts, which is cut"]


@pytest.fixture(scope="module")
def world():
    return exact_anchor_world(seed=0)


@pytest.fixture(scope="module")
def model(world):
    return LogLinear(world.states, world.atoms)


@pytest.fixture(scope="module")
def task(world, model):
    """Features and classes of a thresholded teacher."""
    u = anchored_logits(model, world.anchor, world.labels)
    return u, thresholded_score(u, SIGNS, u.quantile(0.25, dim=0)).sign()


def letters(text):
    return [ord(letter) % 64 for letter in text]


# fitting -------------------------------------------------------------------------------------------------------------


def test_anchored_logits_are_log_ratios_to_the_bulk(world, model):
    p = model.logits().softmax(1)
    expected = (p[:, :4] / p[:, 4:].sum(1, keepdim=True)).log()
    torch.testing.assert_close(anchored_logits(model, world.anchor, world.labels), expected, rtol=0, atol=1e-12)


def test_logistic_regression_finds_the_minimum():
    """The gradient, by autograd, is zero; and the answer is scikit-learn's where that is installed."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 5, generator=g, dtype=DOUBLE), torch.randn(300, generator=g, dtype=DOUBLE).sign()
    a = logistic_regression(x, y, ridge=0.01).requires_grad_()
    loss = nn.functional.softplus(-y * (x @ a)).mean() + 0.005 * a.square().sum()
    assert torch.autograd.grad(loss, a)[0].norm() < 1e-9
    linear_model = pytest.importorskip("sklearn.linear_model")
    other = linear_model.LogisticRegression(C=1 / (0.01 * 300), fit_intercept=False, tol=1e-10).fit(x.numpy(), y.numpy())
    torch.testing.assert_close(a.detach(), torch.as_tensor(other.coef_[0]), rtol=0, atol=1e-6)


def test_separable_classes_do_not_run_away():
    x = torch.tensor([[1.0], [2.0], [-1.0], [-2.0]], dtype=DOUBLE)
    a = logistic_regression(x, torch.tensor([True, True, False, False]), ridge=1e-6)
    assert a.isfinite().all()
    assert a[0] > 5


def test_a_planted_readout_is_recovered(task):
    """Thresholds at the teacher's quantile: the classes are separable, and the coefficients have the planted direction."""
    u, classes = task
    decided = classes != 0
    readout = fit_readout(u[decided], classes[decided], ridge=1e-5)
    assert (readout.score(u[decided]) * classes[decided] > 0).double().mean() > 0.99
    cosine = torch.cosine_similarity(readout.a, SIGNS, dim=0)
    assert cosine > 0.99
    torch.testing.assert_close(readout.b, u[decided].quantile(0.25, dim=0))


def test_adam_moves_the_thresholds_to_where_they_are_needed(task):
    u, _ = task
    b = u.quantile(0.7, dim=0)
    classes = thresholded_score(u, SIGNS, b).sign()
    u, classes = u[classes != 0], classes[classes != 0]
    fixed, free = (fit_readout(u, classes, method=method, ridge=1e-4, steps=200) for method in ("logistic", "adam"))
    right = [float((r.score(u) * classes > 0).double().mean()) for r in (fixed, free)]
    assert right[1] > right[0] + 0.02
    assert not torch.equal(fixed.b, free.b)


# comparison under the shift ------------------------------------------------------------------------------------------


def test_only_raw_logits_break_under_the_shift(world, model, task):
    one = compare_readouts(model, task[1], labels=world.labels, anchor=world.anchor, shift=50.0)
    rows = {row["readout"]: row for row in one.rows()}
    for name in ("anchored", "log-probabilities", "state"):
        assert rows[name]["accuracy_shifted"] == pytest.approx(rows[name]["accuracy"], abs=1e-12)
    assert min(row["accuracy"] for row in rows.values()) > 0.75
    assert rows["anchored"]["accuracy"] > 0.97  # the task is of this form
    assert rows["raw logits"]["accuracy_shifted"] < 0.65
    assert rows["raw logits"]["undecided_shifted"] > 0.3
    assert one.trained_on == one.tested_on == 1000
    assert "raw logits" in one.sentence()


def test_a_silencing_shift_leaves_raw_logits_without_an_answer(world, model, task):
    raw = model.logits()[:, world.labels]
    shift = torch.full((2000,), silencing_shift(raw, raw))
    one = compare_readouts(model, task[1], labels=world.labels, anchor=world.anchor, shift=shift)
    rows = {row["readout"]: row for row in one.rows()}
    assert rows["raw logits"]["undecided_shifted"] == 1
    assert rows["raw logits"]["accuracy_shifted"] == 0
    assert rows["anchored"]["accuracy_shifted"] == rows["anchored"]["accuracy"]


def test_a_state_readout_that_saw_the_coordinate_is_hurt(world, model, task):
    one = compare_readouts(model, task[1], labels=world.labels, anchor=world.anchor, shift=500.0, train_shift=1.0)
    rows = {row["readout"]: row for row in one.rows()}
    assert rows["state"]["accuracy_shifted"] < rows["state"]["accuracy"] - 0.03
    assert rows["anchored"]["accuracy_shifted"] == pytest.approx(rows["anchored"]["accuracy"], abs=1e-12)


def test_comparisons_are_saved(world, model, task, tmp_path):
    one = compare_readouts(model, task[1], labels=world.labels, anchor=world.anchor, seed=3)
    one.save(tmp_path / "one")
    assert ReadoutComparison.load(tmp_path / "one").rows() == one.rows()
    assert one.seed == 3


# prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_states_after_a_prompt_are_those_of_single_texts(batch_size):
    """Padding and order leave no trace; long texts lose their beginning."""
    model = gpt(context=24, dim=16, depth=2, heads=2, seed=0).double().train()
    found = prompted_states(model, TEXTS, "It was", letters, batch_size=batch_size)
    for row, text in enumerate(TEXTS):
        ids = torch.tensor(letters(f"{text} It was")[-24:])[None]
        torch.testing.assert_close(found.logits()[row], model.eval()(ids)[0, -1].detach(), rtol=1e-9, atol=1e-10)
        model.train()
    assert model.training
    assert not model.head._forward_pre_hooks


def test_a_masked_model_is_read_at_its_mask():
    model = bert(vocabulary=70, context=64, dim=16, depth=2, heads=2, seed=0).double().eval()
    with torch.no_grad():
        model.head.bias.normal_()
    found = prompted_states(model, TEXTS, "It was", letters, mask_token=69)
    for row, text in enumerate(TEXTS):
        ids = torch.tensor([*letters(f"{text} It was"), 69])[-64:][None]
        torch.testing.assert_close(found.logits()[row], model(ids)[0, -1].detach(), rtol=1e-9, atol=1e-10)
    assert found.dim == 17  # with the coordinate of the bias


def test_a_shifted_model_has_the_same_anchored_logits_after_a_prompt():
    model = gpt(context=64, dim=16, depth=2, heads=2, seed=0).double().eval()
    twin = shifted_module(model, lambda h: 20 * h[..., 1], head="head")
    plain, moved = (prompted_states(m, TEXTS, "It was", letters) for m in (model, twin))
    anchor = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    assert moved.dim == 17
    assert (moved.logits() - plain.logits()).abs().max() > 1
    torch.testing.assert_close(anchored_logits(moved, shift_anchor(anchor), [3, 4]), anchored_logits(plain, anchor, [3, 4]))


def test_prompts_are_compared_by_what_enters_the_theorem(world, model, tmp_path):
    b = anchored_logits(model, world.anchor, world.labels).quantile(0.25, dim=0)
    models = {"first": model.at(slice(0, 500)), "second": model.at(slice(500, 900))}
    one = compare_prompts(models, labels=world.labels, a=SIGNS, b=b, mu={"second": 0.4})
    for row, part in zip(one.rows(), models.values(), strict=True):
        u = anchored_logits(part, world.anchor, world.labels)
        f = thresholded_score(u, SIGNS, b).abs()
        assert row["active"] == pytest.approx(float((u > b).double().mean()))
        assert row["undecided"] == pytest.approx(float((f == 0).double().mean()))
        assert row["Gamma"] == pytest.approx(float(f[f > 0].min()) / 4)
        assert row["p_b"] == pytest.approx(float(part.logits().softmax(1)[:, 4:].sum(1).min()))
        assert row["eps_b"] < 1e-12
    assert math.isnan(one.mu[0])
    assert one.mu[1] == 0.4
    fixed = compare_prompts(models, labels=world.labels, a=SIGNS, b=b, anchor=world.anchor + 0.1)
    assert fixed.eps_b[0] > 0.1
    one.save(tmp_path / "one")
    assert PromptComparison.load(tmp_path / "one").sentence() == one.sentence()


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fit_readout(torch.ones(3, 2), torch.ones(3)), ValueError, "one class only"),
        (lambda: fit_readout(torch.ones(3, 2), torch.ones(4)), ValueError, "features must be"),
        (lambda: fit_readout(torch.ones(0, 2), torch.ones(0)), ValueError, "at least one"),
        (lambda: fit_readout(torch.full((2, 2), math.nan), torch.tensor([1.0, -1.0])), NonFiniteError, "features hold NaN"),
        (lambda: fit_readout(torch.ones(2, 2), torch.tensor([1.0, -1.0]), method="svm"), ValueError, "method must be one of"),
        (lambda: fit_readout(torch.ones(2, 2), torch.tensor([1.0, -1.0]), quantile=1.0), ValueError, "quantile must lie"),
        (
            lambda: logistic_regression(torch.ones(2, 2), torch.tensor([1.0, -1.0]), ridge=0.0),
            ValueError,
            "ridge must be positive",
        ),
        (lambda: prompted_states(gpt(), [], "It was", letters), ValueError, "at least one text"),
        (lambda: prompted_states(gpt(), "one text", "It was", letters), ValueError, "list of at least one text"),
        (lambda: prompted_states(gpt(), TEXTS, "It was", None), ValueError, "tokenizer="),
        (lambda: prompted_states(gpt(10, context=8), TEXTS, "It was", letters), ValueError, "embeds 0 .. 9"),
        (lambda: prompted_states(gpt(), TEXTS, "It was", letters, batch_size=0), ValueError, "batch_size"),
        (lambda: compare_prompts({}, labels=[0], a=[1.0], b=[0.0]), ValueError, "at least one prompt"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_classes_must_fit_the_contexts(world, model):
    with pytest.raises(ValueError, match=r"classes must be \(2000,\)"):
        compare_readouts(model, torch.ones(3), labels=world.labels, anchor=world.anchor)
    with pytest.raises(ValueError, match="train_share"):
        compare_readouts(model, torch.ones(2000), labels=world.labels, anchor=world.anchor, train_share=1.0)


def test_prompts_and_certificates_remove_the_same_words(model, world):
    """`top` counts label words among the most probable, for both."""
    b = [-30.0] * 4
    one = compare_prompts({"": model}, labels=world.labels, a=SIGNS, b=b, top=7)
    two = transfer_certificate(model, model, labels=world.labels, a=SIGNS, b=b, top=7)
    z = model.logits()
    assert bool((z.topk(7).indices[:, :, None] == world.labels).any())  # else nothing is tested
    assert one.p_b[0] == pytest.approx(two.p_b, rel=1e-12)
    assert one.eps_b[0] == pytest.approx(two.eps_b_teacher, rel=1e-6)
    probe = probe_states(model.states, model.weight, top=7, exclude=world.labels)
    assert probe.mass_min[0] == pytest.approx(two.p_b, rel=1e-12)
    assert probe.max_error[0] == pytest.approx(two.eps_b_teacher, rel=1e-6)
