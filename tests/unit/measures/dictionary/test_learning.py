"""Learning: gradients against autograd, projection, masks, fleets, resuming, missing values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.decomposition import sparse_encode
from torch import Tensor

from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.errors import NumericalWarning
from theodolite.measures.dictionary import (
    LearnerState,
    LearningSettings,
    learn_dictionaries,
    objective_and_gradient,
    recovery_error,
)
from theodolite.measures.dictionary.decoding import decode, lasso
from theodolite.measures.dictionary.hidden import hidden_count, visible_masks
from theodolite.measures.dictionary.learning import initial_dictionary, learn_batch

BASE = LearningSettings(sparsity=2, batch_size=25)


@pytest.fixture(scope="module")
def signals() -> Tensor:
    return planted_samples(planted_dictionary(12, 16), 100, 2, noise=0.05).signals


@pytest.fixture(scope="module")
def start(signals: Tensor) -> Tensor:
    return initial_dictionary(signals, 20, seed=1)[None]


@pytest.mark.parametrize("decoder", ["omp", "lasso"])
@pytest.mark.parametrize("shape", ["none", "shared", "own"])
def test_check_05_gradient_equals_autograd_with_fixed_codes(signals: Tensor, start: Tensor, decoder: str, shape: str) -> None:
    B = LearnerState.begin(start).components
    visible = (
        None
        if shape == "none"
        else visible_masks(16, 3, masks="batch" if shape == "shared" else "sample", batch=100, step=0, seeds=(5,))
    )
    settings = replace(BASE, decoder=decoder)
    loss, gradient = objective_and_gradient(B, signals[None], settings, visible)
    codes = decode(signals[None], B, 2, visible, settings.decoder, "raw", 0.1)
    dense = codes if isinstance(codes, Tensor) else codes.dense(20)
    leaf = B.clone().requires_grad_()
    left = (signals - dense @ leaf).square()
    wanted = (left if visible is None else torch.where(visible, 0.0, left)).sum() / 100
    wanted.backward()
    assert leaf.grad is not None
    assert abs(float(loss[0]) - wanted.item()) < 1e-12
    assert (gradient - leaf.grad).abs().max() < 1e-12
    if shape == "shared":
        assert visible is not None
        assert not gradient[:, :, visible[0, 0]].any()
        assert gradient[:, :, ~visible[0, 0]].any()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_check_06_unit_atoms_after_every_step(signals: Tensor, start: Tensor, optimizer: str) -> None:
    state = LearnerState.begin(7 * start)
    for _ in range(10):
        state, _ = learn_batch(state, signals, replace(BASE, learning_rate=0.05, optimizer=optimizer))
        assert (state.components.norm(dim=2) - 1).abs().max() < 1e-12


def test_adam_is_that_of_torch_followed_by_projection(signals: Tensor, start: Tensor) -> None:
    state = LearnerState.begin(start)
    theirs = torch.nn.Parameter(state.components.clone())
    optimizer = torch.optim.Adam([theirs], lr=1e-2)
    settings = replace(BASE, objective="reconstruction", learning_rate=1e-2)
    for _ in range(8):
        _, theirs.grad = objective_and_gradient(theirs.data, signals[None], settings, None)
        optimizer.step()
        theirs.data /= theirs.data.norm(dim=2, keepdim=True)
        state, _ = learn_batch(state, signals, settings)
    assert (state.components - theirs.data).abs().max() < 1e-10


def test_several_runs_are_those_runs_alone(signals: Tensor) -> None:
    starts = torch.stack([initial_dictionary(signals, 20, seed=s) for s in range(3)])
    for masks in ("batch", "sample", "cycle"):
        settings = replace(BASE, masks=masks)
        together = learn_dictionaries(signals, starts, settings, epochs=5, seeds=(3, 4, 5))
        for run, seed in enumerate((3, 4, 5)):
            alone = learn_dictionaries(signals, starts[run : run + 1], settings, epochs=5, seeds=(seed,))
            assert (together.components[run] - alone.components[0]).abs().max() < 1e-10
            assert (together.losses[:, run] - alone.losses[:, 0]).abs().max() < 1e-10


def test_resuming_equals_not_stopping(signals: Tensor, start: Tensor) -> None:
    settings = replace(BASE, masks="sample")
    whole = learn_dictionaries(signals, start, settings, epochs=6)
    half = learn_dictionaries(signals, start, settings, epochs=3)
    kept = half.state.components.clone()
    rest = learn_dictionaries(signals, None, settings, epochs=3, resume=half.state)
    assert torch.equal(whole.components, rest.components)
    assert torch.equal(kept, half.state.components), "a state is never written to"
    assert [row["epoch"] for row in rest.rows()] == [4, 5, 6]


def test_masked_learning_beats_reconstruction_when_over_realised() -> None:
    """Ten times as many atoms as were planted, and noise as strong as the signal."""
    true = planted_dictionary(30, 20, seed=2)
    sample = planted_samples(true, 600, 2, seed=2).signals
    errors = {}
    for objective in ("masked", "reconstruction"):
        settings = LearningSettings(sparsity=2, objective=objective, batch_size=100, learning_rate=3e-3, shuffle=False)
        found = learn_dictionaries(sample[:300], sample[None, 300:], settings, epochs=200)
        errors[objective] = recovery_error(true, found.components[0])
    assert errors["masked"] < errors["reconstruction"] - 0.03  # 0.152 against 0.219; seeds 0, 1: 0.154, 0.211 and 0.151, 0.220


def test_missing_entries_have_no_influence(signals: Tensor, start: Tensor) -> None:
    g = torch.Generator().manual_seed(0)
    observed = torch.rand(signals.shape, generator=g) < 0.8
    for objective in ("masked", "reconstruction"):
        settings = replace(BASE, objective=objective)
        one = learn_dictionaries(signals, start, settings, epochs=3, observed=observed)
        two = learn_dictionaries(torch.where(observed, signals, 1e6), start, settings, epochs=3, observed=observed)
        three = learn_dictionaries(torch.where(observed, signals, torch.nan), start, settings, epochs=3, observed=observed)
        assert torch.equal(one.components, two.components)
        assert torch.equal(one.components, three.components)


def test_diverging_is_an_outcome(signals: Tensor, start: Tensor) -> None:
    bad = signals.clone()
    bad[0] = 1e308
    learned = learn_dictionaries(bad, start, replace(BASE, objective="reconstruction"), epochs=3)
    assert not learned.outcome.good
    assert len(learned.losses) < 3


class TestMasks:
    def test_at_least_one_hidden_and_one_visible(self) -> None:
        assert [hidden_count(d, 0.1) for d in (2, 9, 10, 19, 20, 100)] == [1, 1, 1, 1, 2, 10]
        assert hidden_count(3, 0.99) == 2
        assert hidden_count(30, 0.1) == 3, "three tenths of ten are three, whatever rounding says"
        with pytest.raises(ValueError, match="2 features"):
            hidden_count(1, 0.1)
        with pytest.raises(ValueError, match="hidden_fraction must be a number above 0 and below 1"):
            hidden_count(10, 0.0)

    @pytest.mark.parametrize("masks", ["batch", "sample", "cycle"])
    def test_the_right_number_is_hidden(self, masks: str) -> None:
        for step in range(7):
            seen = visible_masks(23, 4, masks=masks, batch=9, step=step, seeds=(1, 2))
            assert seen.shape == (2, 9 if masks == "sample" else 1, 23)
            assert ((~seen).sum(2) == 4).all()

    def test_a_cycle_hides_every_coordinate_equally_often(self) -> None:
        hidden = sum((~visible_masks(10, 4, masks="cycle", batch=1, step=step, seeds=(0,))[0, 0]).long() for step in range(5))
        assert torch.equal(hidden, torch.full((10,), 2))

    def test_random_sets_are_uniform(self) -> None:
        hidden = sum(
            (~visible_masks(10, 2, masks="batch", batch=1, step=step, seeds=(0,))[0, 0]).double() for step in range(2000)
        )
        assert ((hidden - 400).abs() < 5 * (2000 * 0.2 * 0.8) ** 0.5).all()


def test_lasso_equals_scikit_learn(signals: Tensor, start: Tensor) -> None:
    D = LearnerState.begin(start).components[0]
    ours = lasso(signals[None], D[None], 0.1, tolerance=1e-8, steps=20000)[0]
    theirs = sparse_encode(signals.numpy(), D.numpy(), algorithm="lasso_cd", alpha=0.1, max_iter=20000)
    objective = lambda z: 0.5 * (signals - z @ D).square().sum(1) + 0.1 * z.abs().sum(1)  # noqa: E731
    assert (objective(ours) - objective(torch.from_numpy(theirs))).max() < 1e-6
    assert (ours - torch.from_numpy(theirs)).abs().max() < 1e-2


def test_lasso_sees_visible_coordinates_only(signals: Tensor, start: Tensor) -> None:
    D = LearnerState.begin(start).components
    seen = visible_masks(16, 4, masks="batch", batch=100, step=0, seeds=(0,))
    short = lasso(signals[None, :, seen[0, 0]], D[:, :, seen[0, 0]], 0.1, tolerance=1e-8, steps=20000)
    for visible in (seen, seen.expand(1, 100, 16)):
        assert torch.allclose(lasso(signals[None], D, 0.1, visible, tolerance=1e-8, steps=20000), short, atol=1e-5)


class TestStarts:
    def test_samples_are_taken_once_and_zeros_never(self, signals: Tensor) -> None:
        data = torch.cat([torch.zeros(5, 16, dtype=torch.float64), signals[:10]])
        start = initial_dictionary(data, 10, seed=0)
        assert all((signals[:10] == row).all(1).any() for row in start)
        assert len(torch.unique(start, dim=0)) == 10

    def test_what_is_lacking_is_random(self, signals: Tensor) -> None:
        start = initial_dictionary(signals[:4], 9, seed=0)
        assert start.shape == (9, 16)
        assert (start.norm(dim=1) > 0).all()

    def test_given_and_bad(self, signals: Tensor) -> None:
        assert torch.equal(initial_dictionary(signals, 3, signals[:3].numpy()), signals[:3])
        with pytest.raises(ValueError, match=r"init must be \(3, 16\)"):
            initial_dictionary(signals, 3, signals[:2])
        with pytest.raises(ValueError, match="'samples', 'random'"):
            initial_dictionary(signals, 3, "pca")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "mask"}, "'masked' or 'reconstruction'"),
        ({"sparsity": 21}, "at most 15"),
        ({"sparsity": 0}, "whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"optimizer": "lion"}, "'adam' or 'sgd'"),
        ({"masks": "all"}, "masks must be one of"),
        ({"decoder": "lars"}, "'omp' or 'lasso'"),
        ({"penalty": 0.0}, "penalty"),
        ({"selection": "cos"}, "'raw' or 'normalized'"),
        ({"hidden_fraction": 1.0}, "hidden_fraction"),
    ],
)
def test_bad_settings(signals: Tensor, start: Tensor, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learn_dictionaries(signals, start, replace(BASE, **change), epochs=1)  # type: ignore[arg-type]


def test_bad_shapes(signals: Tensor, start: Tensor) -> None:
    with pytest.raises(ValueError, match="one per run"):
        learn_dictionaries(signals, start, BASE, epochs=1, seeds=(1, 2))
    with pytest.raises(ValueError, match="signals must be"):
        learn_dictionaries(signals[:, :5], start, BASE, epochs=1)
    with pytest.raises(ValueError, match="NaN"):
        learn_dictionaries(torch.full_like(signals, torch.nan), start, BASE, epochs=1)
    with pytest.raises(ValueError, match="initial must be"):
        learn_dictionaries(signals, start[0], BASE, epochs=1)


@pytest.mark.parametrize("penalty", [0.1, 0.01])
def test_lasso_is_optimal_for_coherent_atoms(penalty: float) -> None:
    g = torch.Generator().manual_seed(2)
    D = torch.randn(40, 20, dtype=torch.float64, generator=g) + 1.0
    D = D / D.norm(dim=1, keepdim=True)
    Y = torch.randn(30, 20, dtype=torch.float64, generator=g)
    codes = lasso(Y[None], D[None], penalty)[0]
    slope = (Y - codes @ D) @ D.T
    at_zero = (slope.abs() - penalty)[codes == 0].max()
    elsewhere = (slope - penalty * codes.sign())[codes != 0].abs().max()
    assert max(float(at_zero), float(elsewhere)) <= 1.001e-4 * penalty


def test_lasso_says_which_codes_are_not_optimal() -> None:
    D = planted_dictionary(30, 10)
    with pytest.warns(NumericalWarning, match="codes of 5 signals are not optimal after 3 steps"):
        lasso(planted_samples(D, 5, 2).signals[None], D[None], 0.01, steps=3)


@pytest.mark.parametrize("factor", [1e-200, 1e-13, 1e200])
def test_recovery_and_coherence_do_not_depend_on_lengths(factor: float) -> None:
    from theodolite.measures.dictionary import coherence, exhaustive_codes

    true, other = planted_dictionary(8, 6), planted_dictionary(9, 6, seed=1)
    assert recovery_error(true, factor * other) == pytest.approx(recovery_error(true, other), rel=1e-12)
    assert coherence(factor * true) == pytest.approx(coherence(true), rel=1e-12)
    signals = planted_samples(true, 10, 1).signals
    assert torch.equal(exhaustive_codes(signals, factor * true, 1) != 0, exhaustive_codes(signals, true, 1) != 0)
