"""The overfitting dictionary and the oracle's formulas: geometry, closed forms against draws, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.measures.dictionary import theory as overfitting
from theodolite.measures.dictionary.recovery import recovery_error
from theodolite.measures.dictionary.theory import (
    chi_square_max_bound,
    noise_cross_term,
    omp_success_bound,
    omp_threshold,
    oracle_codes,
    oracle_risks,
    overfitting_dictionary,
)

VISIBLE = torch.arange(8) < 6


@settings(max_examples=30, deadline=None)
@given(p=st.integers(2, 7), d=st.integers(2, 6), angles=st.integers(1, 9), radius=st.floats(0, 0.3), seed=st.integers(0, 999))
def test_mixtures_are_unit_and_keep_their_distance(p: int, d: int, angles: int, radius: float, seed: int) -> None:
    true = planted_dictionary(p, d, seed=seed)
    net = overfitting_dictionary(true, angles)
    assert net.shape == (p * (p - 1) // 2 * angles, d)
    assert torch.allclose(net.norm(dim=1), torch.ones(len(net)).double(), atol=1e-12)
    away = 2 - 2 * (net @ true.T).abs().amax(1) >= radius**2
    if not away.any():
        with pytest.raises(ValueError, match="within"):
            overfitting_dictionary(true, angles, radius)
        return
    kept = overfitting_dictionary(true, angles, radius)
    assert torch.allclose(kept, net[away], atol=1e-12)
    assert recovery_error(true, kept, "euclidean") >= radius**2 - 1e-12


def test_the_directions_of_a_plane() -> None:
    net = overfitting_dictionary(torch.eye(2).double(), angles=4)
    theta = torch.tensor([0.5, 1.5, 2.5, 3.5]).double() * math.pi / 4
    assert torch.allclose(net, torch.stack([theta.cos(), theta.sin()], 1), atol=1e-15)


def test_parallel_atoms_have_no_plane_and_lengths_do_not_matter() -> None:
    true = torch.tensor([[1.0, 0, 0], [-2.0, 0, 0], [0, 3.0, 0], [0, 0, 0]]).double()
    assert len(overfitting_dictionary(true, angles=5)) == 10  # two planes: both copies with the third
    assert torch.allclose(overfitting_dictionary(true[[0, 2]], 5), overfitting_dictionary(torch.eye(3).double()[:2], 5))


def test_blocks_do_not_change_the_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    true = planted_dictionary(6, 5)
    whole = overfitting_dictionary(true, 8, 0.2)
    monkeypatch.setattr(overfitting, "BLOCK", 100)
    assert torch.allclose(overfitting_dictionary(true, 8, 0.2), whole, atol=1e-15)


def test_bad_mixtures_are_refused() -> None:
    for true, angles, radius, said in (
        (torch.eye(3)[:1], 4, 0.0, "at least two atoms"),
        (torch.eye(3), 0, 0.0, "angles must be"),
        (torch.eye(3), 4, -1.0, "radius must be"),
        (torch.eye(3), 4, math.nan, "radius must be"),
        (torch.eye(3), 4, 1.0, "Every mixture"),
        (torch.ones(3, 2), 4, 0.0, "parallel"),
    ):
        with pytest.raises(ValueError, match=said):
            overfitting_dictionary(true, angles, radius)


# Oracle


def test_closed_form_risks_equal_those_of_draws() -> None:
    atoms = planted_dictionary(5, 8)
    noise, scale = 0.7, 1.3
    sample = planted_samples(atoms, 60_000, 2, noise=noise, scale=scale, normalize=False)
    supports = sample.codes.abs().topk(2).indices
    clean = sample.signals - sample.noise
    risks = oracle_risks(atoms, 2, VISIBLE, noise=noise, scale=scale)
    for ridge, expected in ((0.0, risks.least_squares), ((noise / scale) ** 2, risks.bayes)):
        codes = oracle_codes(sample.signals, atoms, supports, VISIBLE, ridge=ridge)
        squares = (codes.reconstruct(atoms) - clean)[:, ~VISIBLE].square().sum(1)
        assert abs(float(squares.mean()) - expected) < 4 * float(squares.std()) / math.sqrt(len(squares))
    assert risks.floor == pytest.approx(2 * noise**2)
    # the ridge parameter 1/scale² is right for unit noise only
    other = oracle_codes(sample.signals, atoms, supports, VISIBLE, ridge=1 / scale**2)
    worse = (other.reconstruct(atoms) - clean)[:, ~VISIBLE].square().sum(1) - squares
    assert float(worse.mean()) > 4 * float(worse.std()) / math.sqrt(len(worse))


def test_least_squares_codes_are_the_projection() -> None:
    atoms = planted_dictionary(5, 8)
    y = planted_samples(atoms, 3, 2).signals
    supports = torch.tensor([[0, 1], [2, 4], [3, 0]])
    codes = oracle_codes(y, atoms, supports, VISIBLE)
    for row, support, values in zip(y, supports, codes.values, strict=True):
        left = row - values @ atoms[support]
        assert float((atoms[support][:, VISIBLE] @ left[VISIBLE]).abs().max()) < 1e-12


def test_risks_over_chosen_supports() -> None:
    atoms = planted_dictionary(5, 8)
    parts = [oracle_risks(atoms, 1, VISIBLE, noise=1, scale=2, supports=torch.tensor([[i]])).bayes for i in range(5)]
    assert oracle_risks(atoms, 1, VISIBLE, noise=1, scale=2).bayes == pytest.approx(sum(parts) / 5)
    with pytest.raises(ValueError, match="pass a sample"):
        oracle_risks(planted_dictionary(100, 8), 5, VISIBLE, noise=1, scale=1)


def test_thresholds() -> None:
    assert omp_threshold(0.5, 2, 50, 0.18, 1.0) == pytest.approx(
        2 * 0.5 * math.sqrt(2) * math.sqrt(2 * 2 * math.log(50)) / (1 - 3 * 0.18)
    )
    assert omp_threshold(0.5, 2, 50, 0.4) == math.inf
    assert omp_threshold(0.0, 2, 50, 0.1) == 0
    assert omp_success_bound(2, 50, 1.0) == pytest.approx(1 - 2 / (50 * math.sqrt(2 * math.log(50))))
    assert omp_success_bound(3, 2) == 0
    assert chi_square_max_bound(100) == pytest.approx(15.46, abs=0.005)


def test_bad_oracle_arguments_are_refused() -> None:
    atoms = planted_dictionary(5, 8)
    y = torch.ones(3, 8)
    calls = {
        "noise must be a positive": lambda: oracle_risks(atoms, 2, VISIBLE, noise=0, scale=1),
        "scale must be a positive": lambda: oracle_risks(atoms, 2, VISIBLE, noise=1, scale=math.inf),
        "at least one coordinate hidden": lambda: oracle_risks(atoms, 2, VISIBLE | True, noise=1, scale=1),
        "visible coordinates, 1": lambda: oracle_risks(atoms, 2, torch.arange(8) < 1, noise=1, scale=1),
        "between 1 and 5": lambda: oracle_risks(atoms, 6, VISIBLE, noise=1, scale=1),
        r"supports must be \(m, 2\)": lambda: oracle_risks(
            atoms, 2, VISIBLE, noise=1, scale=1, supports=torch.zeros(2, 1).long()
        ),
        r"supports must be \(3, k\)": lambda: oracle_codes(y, atoms, torch.zeros(2, 1).long(), VISIBLE),
        "ridge must be": lambda: oracle_codes(y, atoms, torch.zeros(3, 1).long(), VISIBLE, ridge=-1),
        "one row per signal": lambda: noise_cross_term(y, y[:2]),
        "theory needs": lambda: omp_threshold(1.0, 1, 1, 0.1),
        "must be at least 0": lambda: omp_threshold(-1.0, 1, 5, 0.1),
        "n must be a positive integer": lambda: chi_square_max_bound(0),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match=said):
            call()
