"""Arguments of the algorithms: what is no number, not finite or too large is refused in plain words."""

from __future__ import annotations

import pytest
import torch

import theodolite as th

MATRIX = torch.diag(torch.arange(1.0, 6.0)).double()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "a", -1.0, 0, True, 1j, None, 10**400, [1.0, 2.0]])
def test_numbers_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"tol must be a number above 0 and below 1\. Got"):
        th.top_eigenpairs(MATRIX, 2, tol=value)
    if value is not None:
        with pytest.raises(ValueError, match=r"bandwidth must be positive and finite, a number\. Got"):
            th.spectral_density(MATRIX, bandwidth=value)


def test_numbers_of_any_type():
    pairs = th.top_eigenpairs(MATRIX, 2, tol=torch.tensor(1e-3), max_matvecs=torch.tensor(40))
    assert pairs.values.tolist() == pytest.approx([5.0, 4.0])
    assert th.spectral_density(MATRIX, bandwidth=torch.tensor(0.5)).bandwidth == 0.5


@pytest.mark.parametrize("value", [1, 1.0, 2.5, 95])
def test_shares_lie_between_nought_and_one(value):
    """With a tolerance of 1 any vector is an eigenvector; a level of 1 has no interval."""
    with pytest.raises(ValueError, match=r"tol must be a number above 0 and below 1\. Got"):
        th.top_eigenpairs(MATRIX, 2, tol=value)
    for found in (th.trace(MATRIX), th.spectral_density(MATRIX)):
        with pytest.raises(ValueError, match=r"level must be a number above 0 and below 1\. Got"):
            found.interval(value)


COUNTS = {
    "k": th.top_eigenpairs,
    "max_matvecs": th.top_eigenpairs,
    "probes": th.spectral_density,
    "steps": th.spectral_density,
    "points": th.spectral_density,
    "matvecs": th.trace,
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["a", 2.5, True, 0, -3, float("nan"), float("inf"), [8]])
def test_counts_are_whole_and_positive(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be an? (positive )?integer.*\. Got"):
        COUNTS[name](MATRIX, **{name: value})


@pytest.mark.parametrize("call", [th.top_eigenpairs, th.spectral_density, th.trace])
def test_a_mapping_without_operators_is_refused(call):
    with pytest.raises(ValueError, match="mapping of operators is empty"):
        call({})


def test_a_start_may_be_an_array():
    start = th.top_eigenpairs(MATRIX, 2).vectors.numpy()
    assert th.top_eigenpairs(MATRIX, 2, start=start).values.tolist() == pytest.approx([5.0, 4.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda s: th.top_eigenpairs(MATRIX, 2, seed=s),
        lambda s: th.trace(MATRIX, seed=s),
        lambda s: th.spectral_density(MATRIX, seed=s),
    ],
)
def test_seeds_fit_a_generator(call):
    for seed in (2**70, 2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"seed must lie between -2\^63 and 2\^64 - 1"):
            call(seed)
    for seed in (2**64 - 1, -(2**63)):
        call(seed)


def test_a_complex_start_is_refused():
    with pytest.raises(ValueError, match=r"start must be real.*complex128; pass its \.real"):
        th.top_eigenpairs(MATRIX, 2, start=1j * torch.ones(5, 2).double())


def test_overlaps_of_arrays():
    e = torch.eye(4)
    assert th.subspace_overlap(e[:, :2].numpy(), e[:, 1:3]) == 0.5
    assert th.overlap_curve(e[:, :2].numpy(), e[:, [1, 0]].numpy()).tolist() == [0.0, 1.0]
    assert th.subspace_overlap(e[:, :2].double(), e[:, 1:3].int().numpy()) == 0.5
    with pytest.raises(ValueError, match=r"V holds NaN or inf"):
        th.overlap_curve(e, e * float("nan"))
    with pytest.raises(ValueError, match=r"U must be a real matrix .* Got list"):
        th.subspace_overlap([[1.0]], e)
    with pytest.raises(ValueError, match=r"V must be a real matrix .* Got torch\.complex64 numbers"):
        th.subspace_overlap(e, e * 1j)
