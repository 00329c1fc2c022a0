"""Codes over all supports and the losses made of them: brute force, orthonormal atoms, masks, degenerate atoms, refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.measures.dictionary import losses as exhaustive
from theodolite.measures.dictionary.losses import (
    CodingLoss,
    exhaustive_codes,
    exhaustive_search,
    masked_loss,
    reconstruction_loss,
)
from theodolite.measures.dictionary.matching_pursuit import orthogonal_matching_pursuit


def brute_force(y: Tensor, atoms: Tensor, k: int) -> Tensor:
    """Smallest squared residual of one signal over all supports."""
    squares = []
    for support in itertools.combinations(range(len(atoms)), k):
        chosen = atoms[list(support)].T
        fit = chosen @ torch.linalg.lstsq(chosen, y[:, None], driver="gelsd").solution
        squares.append((y - fit[:, 0]).square().sum())
    return torch.stack(squares).min()


def hide(d: int, *hidden: int) -> Tensor:
    visible = torch.ones(d, dtype=torch.bool)
    visible[list(hidden)] = False
    return visible


@pytest.fixture(scope="module")
def problem() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.rand(9, 1, generator=g, dtype=torch.float64) + 0.5
    return torch.randn(12, 6, generator=g, dtype=torch.float64), lengths * planted_dictionary(9, 6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_residual_is_the_smallest_over_all_supports(problem: tuple[Tensor, Tensor], k: int) -> None:
    y, atoms = problem
    codes = exhaustive_codes(y, atoms, k)
    assert codes.shape == (12, 9)
    assert ((codes != 0).sum(1) == k).all()
    residuals = (y - codes @ atoms).square().sum(1)
    assert residuals.numpy() == pytest.approx([float(brute_force(row, atoms, k)) for row in y], rel=1e-10)
    pursued = (y - orthogonal_matching_pursuit(y, atoms, k, selection="normalized") @ atoms).square().sum(1)
    assert (residuals <= pursued + 1e-12).all()


@pytest.mark.parametrize("k", [1, 2])
def test_blocks_do_not_change_the_codes(problem: tuple[Tensor, Tensor], k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exhaustive_codes(*problem, k)
    monkeypatch.setattr(exhaustive, "BLOCK", 40)
    assert torch.allclose(exhaustive_codes(*problem, k), whole, atol=1e-13)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pursuit_is_exact_for_orthonormal_atoms(k: int) -> None:
    g = torch.Generator().manual_seed(1)
    atoms = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64)).Q
    y = torch.randn(20, 6, generator=g, dtype=torch.float64)
    assert torch.allclose(exhaustive_codes(y, atoms, k), orthogonal_matching_pursuit(y, atoms, k), atol=1e-12)


def test_visible_coordinates_alone_are_fitted(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    first, second = hide(6, 1), hide(6, 0, 4)
    shared = exhaustive_codes(y, atoms, 2, visible=first)
    assert torch.allclose(shared, exhaustive_codes(y[:, first], atoms[:, first], 2), atol=1e-12)
    mixed = exhaustive_codes(y, atoms, 2, visible=torch.stack([first, second] * 6))
    assert torch.allclose(mixed[::2], shared[::2], atol=1e-12)
    assert torch.allclose(mixed[1::2], exhaustive_codes(y[1::2], atoms, 2, visible=second), atol=1e-12)


def test_dependent_atoms_span_no_more_than_they_do() -> None:
    atoms = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 0, 0], [0, 0, 1.0]]).double()
    y = torch.tensor([[2.0, 5.0, 1.0], [0, 0, 0]]).double()
    codes = exhaustive_codes(y, atoms, 2)
    assert (y - codes @ atoms).square().sum(1).numpy() == pytest.approx([25, 0])
    assert torch.isfinite(codes).all()


def test_arrays_and_single_precision(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    exact = exhaustive_codes(y, atoms, 2)
    assert torch.equal(exhaustive_codes(y.numpy(), atoms.numpy(), 2), exact)
    single = exhaustive_codes(y.float(), atoms.float(), 2)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), exact, atol=1e-4)


def test_one_atom_of_many_costs_no_matrix() -> None:
    atoms = planted_dictionary(5000, 10)
    y = planted_samples(atoms, 300, 1, noise=0.3).signals
    largest = (y @ atoms.T).square().amax(1)
    loss = reconstruction_loss(y, atoms, 1, decoder="exhaustive")
    assert loss.value == pytest.approx(float((y.square().sum(1) - largest).mean()), rel=1e-12)
    assert exhaustive_search(y, atoms, 1).support.shape == (300, 1)


@pytest.mark.parametrize("k", [0, 7])
def test_an_impossible_sparsity_is_refused(problem: tuple[Tensor, Tensor], k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 6"):
        exhaustive_codes(*problem, k)


def test_bad_input_is_refused(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    with pytest.raises(ValueError, match="use orthogonal_matching_pursuit"):
        exhaustive_codes(planted_dictionary(5, 100), planted_dictionary(200, 100), 5)
    with pytest.raises(ValueError, match="visible coordinates, 2"):
        exhaustive_codes(y, atoms, 3, visible=hide(6, 0, 1, 2, 3))
    with pytest.raises(ValueError, match="signals holds NaN"):
        exhaustive_codes(y * torch.nan, atoms, 1)
    with pytest.raises(ValueError, match="transpose"):
        exhaustive_codes(y, atoms.T, 1)


# Losses


def test_losses_are_sums_over_coordinates_and_means_over_signals(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    visible = hide(6, 2, 5)
    for decoder, codes in (
        ("omp", lambda **where: orthogonal_matching_pursuit(y, atoms, 2, **where)),
        ("exhaustive", lambda **where: exhaustive_codes(y, atoms, 2, **where)),
    ):
        errors = (y - codes() @ atoms).square().sum(1)
        loss = reconstruction_loss(y, atoms, 2, decoder=decoder)
        assert torch.allclose(loss.per_signal, errors, atol=1e-12)
        assert loss.value == pytest.approx(float(errors.mean()), rel=1e-12)
        assert loss.error == pytest.approx(float(errors.std()) / math.sqrt(12), rel=1e-12)
        hidden = (y - codes(visible=visible) @ atoms)[:, ~visible].square().sum(1)
        masked = masked_loss(y, atoms, 2, visible, decoder=decoder)
        assert torch.allclose(masked.per_signal, hidden, atol=1e-12)
        assert masked.coordinates == 2
        rows = masked_loss(y, atoms, 2, visible.expand_as(y).clone(), decoder=decoder)
        assert rows.value == pytest.approx(masked.value, rel=1e-12)


def test_the_selection_rule_reaches_the_pursuit(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    for rule in ("raw", "normalized"):
        codes = orthogonal_matching_pursuit(y, atoms, 1, selection=rule)
        errors = (y - codes @ atoms).square().sum(1)
        assert torch.allclose(reconstruction_loss(y, atoms, 1, selection=rule).per_signal, errors, atol=1e-12)
    assert (
        reconstruction_loss(y, atoms, 1, selection="raw").value != reconstruction_loss(y, atoms, 1, selection="normalized").value
    )


def test_the_error_is_honest() -> None:
    atoms = planted_dictionary(10, 8)
    losses = [reconstruction_loss(planted_samples(atoms, 200, 2, seed=seed).signals, atoms, 2) for seed in range(40)]
    spread = np.std([loss.value for loss in losses], ddof=1)
    assert spread == pytest.approx(np.mean([loss.error for loss in losses]), rel=0.35)


def test_a_loss_speaks(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    loss = masked_loss(y, atoms, 2, hide(6, 0))
    assert isinstance(loss, CodingLoss)
    assert "masked loss of 9 atoms" in str(loss)
    assert "1 hidden coordinates" in str(loss)
    assert "reconstruction loss" in str(reconstruction_loss(y, atoms, 2))
    assert loss.rows()[0]["value"] == loss.value
    assert math.isnan(reconstruction_loss(y[:1], atoms, 2).error)


def test_bad_losses_are_refused(problem: tuple[Tensor, Tensor]) -> None:
    y, atoms = problem
    with pytest.raises(ValueError, match="'omp', 'exhaustive'"):
        reconstruction_loss(y, atoms, 1, decoder="lasso")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden; reconstruction_loss"):
        masked_loss(y, atoms, 1, hide(6))
    with pytest.raises(ValueError, match=r"\(6,\) or \(12, 6\)"):
        masked_loss(y, atoms, 1, hide(5))
    with pytest.raises(ValueError, match="k must be"):
        masked_loss(y, atoms, 6, hide(6, 1))
