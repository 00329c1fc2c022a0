"""Synthetic word models: the exact anchor, and the Gaussian dictionary against its reference table."""

from __future__ import annotations

import pytest
import torch

from theodolite.data.generators import exact_anchor_world, gaussian_dictionary_world

TOP = (0, 1, 8, 80, 800)
# Mean square error of the best linear fit without the top k words, k = TOP: 4000 words, 32 dimensions, 6000 contexts.
REFERENCE = {
    1.0: (0.00039, 0.00030, 0.00021, 0.00010, 0.00005),
    2.0: (0.0166, 0.0077, 0.0035, 0.0012, 0.0003),
    3.0: (0.166, 0.056, 0.017, 0.0043, 0.0009),
    4.0: (0.619, 0.193, 0.049, 0.011, 0.0020),
}
CONTEXTS = 1000  # the in-sample bias is 1 − 32/1000; the table was made with 6000


def log_bulk(states, atoms):
    """log Σ exp over all but the k largest logits, (contexts, len(TOP)), by sorting."""
    ascending = (states @ atoms.T).sort(dim=1).values.logcumsumexp(1)
    return torch.stack([ascending[:, len(atoms) - 1 - k] for k in TOP], dim=1)


def fit(states, y):
    """Mean square error and R² of the least squares fit, per column."""
    residual = y - states @ torch.linalg.lstsq(states, y).solution
    mse = residual.square().mean(0)
    return mse, 1 - mse / y.var(0, unbiased=False)


@pytest.mark.parametrize("radius", REFERENCE)
def test_check_05_the_gaussian_dictionary_has_the_errors_of_the_table(radius):
    world = gaussian_dictionary_world(contexts=CONTEXTS, radius=radius, seed=0)
    mse, _ = fit(world.states, log_bulk(world.states, world.atoms))
    ratio = mse / torch.tensor(REFERENCE[radius], dtype=torch.float64)
    assert ratio.max() < 2
    assert ratio.min() > 0.5
    assert (mse.diff() < 0).all()


def test_check_05_states_of_variable_norm_have_no_anchor():
    world = gaussian_dictionary_world(contexts=CONTEXTS, radius=(0.5, 4.0), seed=0)
    mse, r2 = fit(world.states, log_bulk(world.states, world.atoms))
    assert 4.7 / 2 < mse[0] < 4.7 * 2
    assert 1.53 / 2 < mse[3] < 1.53 * 2
    assert r2[3] < 0.3


def test_check_06_two_norms_have_an_anchor_each():
    world = gaussian_dictionary_world(contexts=CONTEXTS, radius=(0.5, 4.0), law="two", seed=0)
    y = log_bulk(world.states, world.atoms)
    joint = fit(world.states, y)[0]
    assert 13.0 / 2 < joint[0] < 13.0 * 2
    assert 4.23 / 2 < joint[3] < 4.23 * 2
    halves = [fit(world.states[world.group == g], y[world.group == g])[0][3] for g in (0, 1)]
    assert halves[0] < 2e-5
    assert 0.010 / 2 < halves[1] < 0.010 * 2


def test_the_groups_are_the_two_halves():
    world = gaussian_dictionary_world(20, 5, 11, (1.0, 3.0), law="two")
    norms = world.states[:, :-1].norm(dim=1)
    torch.testing.assert_close(norms, torch.where(world.group == 1, 3.0, 1.0).double())
    assert world.group.sum() == 5
    assert gaussian_dictionary_world(20, 5, 11, (1.0, 3.0)).group.sum() == 0


def test_uniform_radii_fill_the_interval():
    norms = gaussian_dictionary_world(3, 5, 4000, (1.0, 3.0)).states[:, :-1].norm(dim=1)
    assert norms.min() > 1
    assert norms.max() < 3
    assert abs(float(norms.mean()) - 2) < 0.05  # standard error 0.009
    one = gaussian_dictionary_world(3, 5, 50, 2).states[:, :-1].norm(dim=1)
    torch.testing.assert_close(one, torch.full_like(one, 2.0))


def test_check_04_the_exact_anchor_is_found_by_least_squares():
    world = exact_anchor_world(seed=3)
    y = (world.states @ world.atoms[4:].T).logsumexp(1)
    found = torch.linalg.lstsq(world.states, y[:, None]).solution[:, 0]
    assert (world.states @ found - y).square().mean() <= 1e-18
    assert (world.states @ found - y).abs().max() <= 1e-12
    torch.testing.assert_close(found, world.anchor, rtol=0, atol=1e-9)


def test_anchored_logits_have_the_level_and_the_scale():
    world = exact_anchor_world(contexts=20_000, label_words=200, level=-0.7, scale=0.5, seed=1)
    u = world.states @ (world.atoms[world.labels] - world.anchor).T
    assert abs(float(u.mean()) + 0.7) < 0.01  # common to all words: the mean state
    assert abs(float(u.std()) - 0.5) < 0.02
    assert (world.states[:, -1] == 1).all()
    assert world.atoms.shape == (250, 16)


def test_worlds_repeat_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    for make in (exact_anchor_world, lambda seed: gaussian_dictionary_world(30, 4, 20, seed=seed)):
        first, again, other = make(seed=0), make(seed=0), make(seed=1)
        assert torch.equal(first.states, again.states)
        assert torch.equal(first.atoms, again.atoms)
        assert not torch.equal(first.atoms, other.atoms)
        assert first.states.dtype == first.atoms.dtype == torch.float64
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exact_anchor_world(0), "contexts must be a positive integer"),
        (lambda: exact_anchor_world(dim=1), "dim must be an integer of at least 2"),
        (lambda: exact_anchor_world(bulk_words=0), "bulk_words"),
        (lambda: exact_anchor_world(scale=float("nan")), "scale must be"),
        (lambda: gaussian_dictionary_world(radius=-1.0), "radius must be"),
        (lambda: gaussian_dictionary_world(radius=(3.0, 1.0)), "radius must be"),
        (lambda: gaussian_dictionary_world(law="both"), "law must be one of 'uniform', 'two'"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
