"""Recovery errors: signed permutations, over-realised dictionaries, brute force, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from theodolite.data.generators import planted_dictionary
from theodolite.measures.dictionary import recovery
from theodolite.measures.dictionary.recovery import AtomMatches, atom_matches, permutation_error, recovery_error

sizes = st.integers(1, 9)
seeds = st.integers(0, 10_000)


def shuffled(atoms: Tensor, seed: int) -> Tensor:
    """The atoms in another order, some of them flipped."""
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(atoms), 1), generator=g) * 2 - 1
    return (signs * atoms)[torch.randperm(len(atoms), generator=g)]


# Acceptance checks 1 and 2


@settings(max_examples=100, deadline=None)
@given(p=sizes, more=sizes, d=sizes, seed=seeds)
def test_check_01_the_two_metrics_agree_on_unit_atoms(p: int, more: int, d: int, seed: int) -> None:
    true, learned = planted_dictionary(p, d, seed=seed), planted_dictionary(more, d, seed=seed + 1)
    cosine = recovery_error(true, learned)
    assert recovery_error(true, learned, "euclidean") == pytest.approx(2 * cosine, abs=1e-12)
    assert recovery_error(true, shuffled(learned, seed)) == pytest.approx(cosine, abs=1e-12)
    assert 0 <= cosine <= 1


@settings(max_examples=50, deadline=None)
@given(p=sizes, extra=st.integers(0, 9), d=sizes, seed=seeds)
def test_check_01_a_signed_permutation_is_no_error(p: int, extra: int, d: int, seed: int) -> None:
    true = planted_dictionary(p, d, seed=seed)
    learned = torch.cat([shuffled(true, seed), planted_dictionary(extra + 1, d, seed=seed + 1)])
    assert recovery_error(true, learned, "euclidean") == pytest.approx(0, abs=1e-15)
    assert recovery_error(true, learned) == pytest.approx(0, abs=1e-12)
    assert permutation_error(true, shuffled(true, seed)) == pytest.approx(0, abs=1e-15)


def test_check_02_the_nearest_atoms_are_nearer_than_any_assignment() -> None:
    for seed in range(100):
        p = 2 + seed % 7
        true, learned = (planted_dictionary(p, 4, seed=seed + i) for i in (0, 1000))
        assert recovery_error(true, learned, "euclidean") <= permutation_error(true, learned) / p + 1e-12


# Against brute force


@pytest.mark.parametrize("signed", [False, True])
def test_the_euclidean_error_is_the_minimum_over_atoms_and_signs(signed: bool) -> None:
    g = torch.Generator().manual_seed(0)
    true, learned = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (6, 4))
    signs = (1,) if signed else (1, -1)
    brute = [min(float((a - c * b).square().sum()) for b in learned for c in signs) for a in true]
    assert recovery_error(true, learned, "euclidean", signed=signed) == pytest.approx(np.mean(brute), rel=1e-12)


def test_the_permutation_error_is_the_minimum_over_signed_permutations() -> None:
    g = torch.Generator().manual_seed(1)
    true, learned = (torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(2))
    brute = min(
        float((true - torch.tensor(signs)[:, None] * learned[list(order)]).square().sum())
        for order in itertools.permutations(range(4))
        for signs in itertools.product((1, -1), repeat=4)
    )
    assert permutation_error(true, learned) == pytest.approx(brute, rel=1e-12)


def test_blocks_do_not_change_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    true, learned = planted_dictionary(11, 5), planted_dictionary(7, 5, seed=1)
    whole = [recovery_error(true, learned, metric) for metric in ("cosine", "euclidean")]
    monkeypatch.setattr(recovery, "BLOCK", 14)
    assert [recovery_error(true, learned, metric) for metric in ("cosine", "euclidean")] == pytest.approx(whole, abs=1e-15)


# Signs, lengths, zero atoms, kinds of input


def test_a_flipped_atom_is_the_same_atom_unless_signed() -> None:
    true = torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double()
    assert recovery_error(true, -true) == pytest.approx(0, abs=1e-15)
    assert recovery_error(true, -true, signed=True) == pytest.approx(1.6)
    assert recovery_error(true[:1], -true, "euclidean", signed=True) == pytest.approx(2 + 2 * 0.6)


def test_lengths_matter_to_the_euclidean_error_only() -> None:
    true = planted_dictionary(4, 6)
    assert recovery_error(true, 3 * true) == pytest.approx(0, abs=1e-12)
    assert recovery_error(true, 3 * true, "euclidean") == pytest.approx(4)


def test_zero_atoms_are_like_nothing() -> None:
    true = torch.eye(2).double()
    assert recovery_error(true, torch.zeros(3, 2)) == 1
    assert recovery_error(torch.zeros(2, 2), true) == 1
    assert recovery_error(true, torch.zeros(1, 2), "euclidean") == 1


def test_fewer_learned_atoms_than_true_ones() -> None:
    assert recovery_error(torch.eye(4), torch.eye(4)[:1]) == 0.75


def test_arrays_tensors_and_precisions() -> None:
    true, learned = planted_dictionary(5, 8), planted_dictionary(9, 8, seed=1)
    exact = recovery_error(true, learned)
    assert recovery_error(true.numpy(), learned.numpy()) == exact
    assert recovery_error(true.tolist(), learned.tolist()) == exact
    assert recovery_error(true.float(), learned.float()) == pytest.approx(exact, abs=1e-6)
    assert recovery_error(np.eye(2, dtype=int), np.eye(2, dtype=bool)) == 0
    assert recovery_error(true.clone().requires_grad_(), learned) == exact


def test_matches_name_the_nearest_atom() -> None:
    true = planted_dictionary(5, 8)
    order = [3, 0, 4, 1, 2]
    matches = atom_matches(true[order], torch.cat([-true, planted_dictionary(3, 8, seed=4)]))
    assert isinstance(matches, AtomMatches)
    assert matches.index.tolist() == order
    assert matches.cosine == pytest.approx(-np.ones(5))
    assert "5 of 5 true atoms" in str(matches)
    assert matches.rows()[0] == {"atom": 0, "match": 3, "cosine": pytest.approx(-1)}
    signed = atom_matches(true, -true, signed=True)
    assert (signed.index != torch.arange(5)).all()
    assert 1 - float(signed.cosine.mean()) == pytest.approx(recovery_error(true, -true, signed=True))


# What is refused


@pytest.mark.parametrize(
    ("true", "learned", "said"),
    [
        (torch.eye(3), torch.eye(4), "Got 3 and 4"),
        (torch.eye(3), torch.ones(3), "learned must be a matrix"),
        (torch.zeros(0, 3), torch.eye(3), "true must be a matrix"),
        (torch.eye(3), torch.full((2, 3), torch.nan), "learned holds NaN"),
        (torch.eye(3), torch.eye(3) * torch.inf, "learned holds NaN"),
        (torch.eye(3), torch.eye(3, dtype=torch.complex64), "real numbers"),
    ],
)
def test_bad_dictionaries_are_refused(true: Tensor, learned: Tensor, said: str) -> None:
    for measure in (recovery_error, permutation_error, atom_matches):
        with pytest.raises(ValueError, match=said):
            measure(true, learned)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'cosine', 'euclidean'"):
        recovery_error(torch.eye(2), torch.eye(2), "angle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recovery_error takes any number"):
        permutation_error(torch.eye(2), torch.eye(2)[:1])
