"""Attacks that the language-model loss does not see: exact divergences, silent units, untouched anchored logits."""

from __future__ import annotations

import copy
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn

from theodolite.data.generators import exact_anchor_world, gaussian_dictionary_world
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.transfer.certificate import fit_anchor
from theodolite.measures.anchors.transfer.log_linear import (
    LogLinear,
    kl_divergence,
    rare_word_kl,
    rare_word_logits,
    rare_word_module,
    rare_word_weight,
    shift_anchor,
    shift_log_linear,
    shift_logits,
    shifted_module,
    silencing_shift,
    total_variation,
)
from theodolite.measures.anchors.transfer.readout import anchored_logits, thresholded_score

DOUBLE = torch.float64


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


class TinyModel(nn.Module):
    """Embedding, mixing, and a head tied to the embedding."""

    def __init__(self, words=11, dim=5, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, dim)
        self.mix = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, words, bias=bias)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.lm_head

    def states(self, ids):
        return torch.tanh(self.mix(self.embed(ids)))

    def forward(self, ids):
        return self.lm_head(self.states(ids))


def exact_world():
    world = exact_anchor_world(seed=1)
    return world, LogLinear(world.states, world.atoms)


def log_bulk(model, labels):
    logits = model.logits()
    logits[:, labels] = -torch.inf
    return logits.logsumexp(1)


# divergences ---------------------------------------------------------------------------------------------------------


def test_divergences_match_torch_and_their_definitions(rng):
    p, q = 3 * torch.randn(2, 200, 30, generator=rng, dtype=DOUBLE)
    expected = nn.functional.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl_divergence(p, q), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(total_variation(p, q), (p.softmax(1) - q.softmax(1)).abs().sum(1) / 2)
    assert (kl_divergence(p, q) >= 2 * total_variation(p, q).square()).all()  # Pinsker


def test_divergence_of_nearly_equal_models_keeps_its_digits(rng):
    """For q = p + ε g the divergence is ε² Var_p(g) / 2; a plain sum of p log(p/q) would be lost in rounding."""
    p, g = torch.randn(2, 30, generator=rng, dtype=DOUBLE)
    weights = p.softmax(0)
    variance = (weights * g.square()).sum() - (weights * g).sum().square()
    torch.testing.assert_close(kl_divergence(p, p + 1e-9 * g), 0.5e-18 * variance, rtol=1e-4, atol=0)
    assert kl_divergence(p, p) == 0


def test_divergence_survives_extreme_logits():
    p, q = torch.tensor([0.0, -900.0, 3.0]), torch.tensor([-900.0, 0.0, 3.0])
    expected = p.double().softmax(0)[0] * (p.double().log_softmax(0) - q.double().log_softmax(0))[0]
    value = kl_divergence(p, q)
    assert value.isfinite()
    torch.testing.assert_close(value, expected, rtol=1e-3, atol=0)


def test_models_over_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="share one vocabulary"):
        kl_divergence(torch.zeros(3, 4), torch.zeros(3, 5))


# rare word -----------------------------------------------------------------------------------------------------------


def test_check_08_rare_word_kl_is_exact_on_random_heads(rng):
    """1000 heads (T1): the closed form to 1e-9, at most s p, and f moved by s c_t."""
    cases, words, dim = 1000, 40, 6
    weight = torch.randn(cases, words, dim, generator=rng, dtype=DOUBLE)
    state = 2 * torch.randn(cases, dim, generator=rng, dtype=DOUBLE)
    strength = 20 * torch.rand(cases, generator=rng, dtype=DOUBLE)
    word = torch.randint(words, (cases,), generator=rng)
    coefficients = torch.randn(cases, words, generator=rng, dtype=DOUBLE)
    edited = torch.stack(
        [rare_word_weight(w, h, int(t), float(s)) for w, h, t, s in zip(weight, state, word, strength, strict=True)]
    )
    teacher, student = (torch.einsum("cnd,cd->cn", w, state) for w in (weight, edited))
    probability = teacher.softmax(1).gather(1, word[:, None])[:, 0]
    measured = kl_divergence(teacher, student)
    assert (measured - rare_word_kl(probability, strength)).abs().max() < 1e-9
    assert (measured <= strength * probability + 1e-12).all()
    drop = ((teacher - student) * coefficients).sum(1)
    torch.testing.assert_close(drop, strength * coefficients.gather(1, word[:, None])[:, 0])


def test_flipping_a_linear_task_costs_little():
    """T1: the sign of f* turns at s = f*/c_t, for a divergence of at most p f*/c_t."""
    logits, c = torch.tensor([2.0, 1.0, -6.0], dtype=DOUBLE), torch.tensor([1.0, 0.0, 0.25], dtype=DOUBLE)
    f = float(logits @ c)
    s = f / float(c[2]) * 1.01
    attacked = rare_word_logits(logits, 2, s)
    assert f > 0 > float(attacked @ c)
    assert kl_divergence(logits, attacked) <= logits.softmax(0)[2] * s
    assert kl_divergence(logits, attacked) < 2e-3
    assert logits[2] == -6


@pytest.mark.parametrize("strength", [1.0, 5.0, 50.0])
def test_check_09_an_inactive_unit_does_not_feel_the_attack(strength):
    """T2, raw and anchored: f is exactly what it was."""
    world, model = exact_world()
    a = torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=DOUBLE)
    for features in (anchored_logits(model, world.anchor, world.labels), model.logits()[:, world.labels]):
        b = features.median(0).values
        inactive = features[:, 2] <= b[2]
        assert 0 < inactive.sum() < len(features)
        attacked = rare_word_logits(features, 2, strength)
        before, after = thresholded_score(features, a, b), thresholded_score(attacked, a, b)
        assert torch.equal(before[inactive], after[inactive])
        assert (before[~inactive] != after[~inactive]).all()


def test_the_head_edit_is_made_in_a_copy():
    model = TinyModel()
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(11)
    state = model.states(ids)[3].detach()
    twin = rare_word_module(model, state, word=7, strength=4.0)
    moved = (model(ids) - twin(ids)).detach()
    assert moved[3, 7] == pytest.approx(4.0, rel=1e-5)
    assert moved[:, [j for j in range(11) if j != 7]].abs().max() == 0
    assert torch.equal(twin.embed.weight, model.embed.weight)  # the tied embedding is left alone
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight is model.embed.weight


# shift ---------------------------------------------------------------------------------------------------------------


def test_check_10_a_shifted_head_silences_the_thresholded_task():
    """T3: divergence below 1e-12, every unit off; the anchored classifier is what it was, also after a refit."""
    world, model = exact_world()
    labels = world.labels
    a, raw = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=DOUBLE), model.logits()[:, labels]
    b = raw.quantile(0.25, dim=0)
    tau = silencing_shift(raw, b)
    assert tau < float(b.min() - raw.max())
    shifted = shift_log_linear(model, tau)
    assert thresholded_score(raw, a, b).count_nonzero() > 1900
    assert thresholded_score(shifted.logits()[:, labels], a, b).count_nonzero() == 0
    assert kl_divergence(model.logits(), shifted.logits()).max() < 1e-12
    assert kl_divergence(model.logits(), shift_logits(model.logits(), tau)).max() < 1e-12
    u = anchored_logits(model, world.anchor, labels)
    thresholds = u.quantile(0.25, dim=0)
    score = thresholded_score(u, a, thresholds)
    for anchor in (shift_anchor(world.anchor), fit_anchor(shifted.states, log_bulk(shifted, labels))):
        again = thresholded_score(anchored_logits(shifted, anchor, labels), a, thresholds)
        assert (again - score).abs().max() < 1e-8


def test_check_07_anchored_logits_do_not_see_the_shift_in_the_exact_world(rng):
    world, model = exact_world()
    c = 50 * torch.randn(model.contexts, generator=rng, dtype=DOUBLE)
    shifted = shift_log_linear(model, c)
    assert (shifted.logits().softmax(1) - model.logits().softmax(1)).abs().max() < 1e-9
    assert (shifted.logits() - model.logits() - c[:, None]).abs().max() < 1e-9
    u = anchored_logits(model, world.anchor, world.labels)
    assert (anchored_logits(shifted, shift_anchor(world.anchor), world.labels) - u).abs().max() < 1e-6
    refit = fit_anchor(shifted.states, log_bulk(shifted, world.labels))
    assert (anchored_logits(shifted, refit, world.labels) - u).abs().max() < 1e-6


def test_check_07_a_refit_elsewhere_moves_anchored_logits_by_the_rounding_of_a_mean(rng):
    """No exact anchor: the new column fits a little of the residual, of the order RMSE / √N."""
    world = gaussian_dictionary_world(1000, 32, 1500, 3.0, seed=0)
    model = LogLinear(world.states, world.atoms)
    labels = torch.arange(4)
    c = 50 * torch.randn(model.contexts, generator=rng, dtype=DOUBLE)
    shifted = shift_log_linear(model, c)
    anchor = fit_anchor(model.states, log_bulk(model, labels))
    refit = fit_anchor(shifted.states, log_bulk(shifted, labels))
    rmse = (model.states @ anchor - log_bulk(model, labels)).square().mean().sqrt()
    u = anchored_logits(model, anchor, labels)
    assert (anchored_logits(shifted, shift_anchor(anchor), labels) - u).abs().max() < 1e-6
    moved = (anchored_logits(shifted, refit, labels) - u).abs().mean()
    assert 0 < moved < 10 * rmse / model.contexts**0.5


@pytest.mark.parametrize("bias", [False, True])
def test_a_shifted_module_keeps_probabilities_and_can_be_probed(bias):
    model = TinyModel(bias=bias).double()
    before = copy.deepcopy(model.state_dict())
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
    twin = shifted_module(model, lambda h: 30 * h[..., 0])
    seen = []
    twin.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    out, shifted = model(ids), twin(ids)
    torch.testing.assert_close(shifted - out, (30 * model.states(ids)[..., :1]).expand_as(out))
    torch.testing.assert_close(shifted.softmax(-1), out.softmax(-1), rtol=1e-10, atol=1e-12)
    extra = twin.lm_head.bias if bias else 0.0
    torch.testing.assert_close(seen[0] @ twin.lm_head.weight.mT + extra, shifted)  # what a probe's hook relies on
    assert twin.get_output_embeddings() is twin.lm_head
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.lm_head._forward_pre_hooks


def test_a_constant_shift_and_a_named_head():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double()
    x = torch.randn(5, 3, dtype=DOUBLE)
    torch.testing.assert_close(shifted_module(model, -100.0, head="2")(x), model(x) - 100)
    torch.testing.assert_close(shifted_module(nn.Linear(3, 2), 1.0, head="").weight[:, -1], torch.ones(2))


def test_rare_word_kl_at_certain_words_and_strong_attacks():
    assert float(rare_word_kl(1.0, 50.0)) == 0.0
    assert float(rare_word_kl(0.0, -800.0)) == 0.0
    for p, s in ((0.999, 50.0), (0.5, 800.0), (1 - 1e-12, 30.0), (0.3, -800.0), (1e-9, 5.0), (0.4, 1e-3)):
        with localcontext(prec=60):
            p_, s_ = Decimal(p), Decimal(s)
            exact = float(s_ * p_ + (1 - p_ + p_ * (-s_).exp()).ln())
        assert float(rare_word_kl(p, s)) == pytest.approx(exact, rel=1e-9, abs=1e-14)
    grid = rare_word_kl(torch.linspace(0, 1, 101, dtype=DOUBLE)[:, None], torch.linspace(-60, 60, 121, dtype=DOUBLE))
    assert bool(grid.isfinite().all())
    assert float(grid.min()) >= 0


def test_kl_divergence_with_words_that_are_never_said():
    never = -math.inf
    cases = [([0.0, never], [0.0, 0.0], math.log(2)), ([0.0, never], [0.0, never], 0.0), ([0.0, 0.0], [0.0, never], math.inf)]
    cases.append(([1.0, 1.0, never], [0.0, 5.0, 1.0], None))
    for teacher, student, expected in cases:
        p, q = torch.tensor(teacher, dtype=DOUBLE), torch.tensor(student, dtype=DOUBLE)
        if expected is None:
            expected = float((p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0)))[:2].sum())
        assert float(kl_divergence(p, q)) == pytest.approx(expected, abs=1e-15)


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rare_word_logits(torch.zeros(3), 3, 1.0), ValueError, "from 0 to 2"),
        (lambda: rare_word_weight(torch.eye(3), torch.zeros(3), 0, 1.0), ValueError, "state is zero"),
        (lambda: rare_word_weight(torch.eye(3), torch.ones(2), 0, 1.0), ValueError, r"state must be \(3,\)"),
        (lambda: rare_word_kl(1.5, 1.0), ValueError, "probability must be a number of at least 0 and at most 1"),
        (lambda: silencing_shift(torch.zeros(3), torch.zeros(2), slack=0.0), ValueError, "slack"),
        (lambda: silencing_shift(torch.zeros(0), torch.zeros(2)), ValueError, "at least one logit"),
        (lambda: shift_log_linear(LogLinear(torch.ones(3, 2), torch.ones(4, 2)), torch.ones(2)), ValueError, r"\(3,\)"),
        (lambda: shifted_module(nn.Sequential(nn.Linear(2, 2)), 1.0), ValueError, "Pass head="),
        (lambda: shifted_module(TinyModel(), 1.0, head="lm_haed"), ValueError, "Nearest names: lm_head"),
        (lambda: shifted_module(TinyModel(), 1.0, head="embed"), TypeError, "must be an nn.Linear"),
        (lambda: shifted_module(TinyModel(), lambda h: h)(torch.arange(3)), ValueError, "one number per state"),
        (lambda: LogLinear(torch.ones(3, 2), torch.ones(4, 5)), ValueError, "one dim"),
        (lambda: LogLinear(torch.ones(0, 2), torch.ones(4, 2)), ValueError, "needs contexts and words"),
        (lambda: LogLinear(torch.ones(3, 2), torch.ones(4, 2), torch.ones(3)), ValueError, r"bias must be \(4,\)"),
        (lambda: LogLinear(torch.full((3, 2), torch.nan), torch.ones(4, 2)), NonFiniteError, "states holds NaN"),
        (lambda: LogLinear.from_logits(torch.full((3, 2), -torch.inf)), NonFiniteError, "logits hold NaN"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
