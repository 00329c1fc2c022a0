"""Coherence and restricted isometry against dense matrices, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.data.generators import planted_dictionary
from theodolite.measures.dictionary import structure
from theodolite.measures.dictionary.structure import all_supports, coherence, gershgorin_bound, restricted_isometry
from theodolite.results import Outcome


def test_check_09_gershgorin_bounds_the_isometry_constant() -> None:
    for seed in range(200):
        atoms = planted_dictionary(12, 20, seed=seed)
        mu = coherence(atoms)
        deltas = [restricted_isometry(atoms, s).value for s in range(1, 5)]
        assert all(delta <= (s - 1) * mu + 1e-12 for s, delta in enumerate(deltas, start=1))
        assert deltas == sorted(deltas)
        assert deltas[1] == pytest.approx(mu, abs=1e-12)  # two unit atoms: 1 ± their cosine


def test_the_isometry_constant_is_the_extreme_eigenvalue_over_supports() -> None:
    g = torch.Generator().manual_seed(0)
    atoms = torch.randn(7, 5, generator=g, dtype=torch.float64)  # not of unit length
    for s in (1, 2, 3, 6, 7):
        sets = itertools.combinations(range(7), s)
        norms = [float(torch.linalg.matrix_norm(atoms[list(i)] @ atoms[list(i)].T - torch.eye(s), 2)) for i in sets]
        found = restricted_isometry(atoms, s)
        assert found.value == pytest.approx(max(norms), rel=1e-12)
        assert found.exact
        assert found.outcome is Outcome.FINISHED
        assert found.supports == math.comb(7, s)
        assert found.value <= found.gershgorin + 1e-12


def test_random_supports_bound_the_constant_from_below() -> None:
    atoms = planted_dictionary(30, 20)
    exact = restricted_isometry(atoms, 3)
    drawn = restricted_isometry(atoms, 3, samples=500, seed=1)
    assert drawn.value <= exact.value
    assert drawn.value > 0.7 * exact.value
    assert (drawn.exact, drawn.supports, drawn.outcome, drawn.seed) == (False, 500, Outcome.ESTIMATED, 1)
    assert "at least" in str(drawn)
    assert "at least" not in str(exact)
    assert restricted_isometry(atoms, 3, samples=500, seed=1).value == drawn.value
    assert restricted_isometry(atoms, 3, samples=500, seed=2).value != drawn.value
    many = restricted_isometry(planted_dictionary(200, 100), 5, samples=300)
    assert not many.exact
    assert many.value <= many.gershgorin


def test_more_samples_than_supports_is_exact() -> None:
    atoms = planted_dictionary(6, 4)
    assert restricted_isometry(atoms, 2, samples=15).exact
    assert not restricted_isometry(atoms, 2, samples=14).exact


@settings(max_examples=50, deadline=None)
@given(p=st.integers(2, 12), d=st.integers(2, 8), seed=st.integers(0, 1000))
def test_coherence_is_the_largest_cosine(p: int, d: int, seed: int) -> None:
    atoms = (1 + seed) * planted_dictionary(p, d, seed=seed)
    visible = torch.rand(d, generator=torch.Generator().manual_seed(seed)) < 0.6
    visible[0] = True
    for mask in (None, visible):
        rows = atoms if mask is None else atoms[:, mask]
        cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).abs()
        assert coherence(atoms, mask) == pytest.approx(float(cosines.fill_diagonal_(0).max()), abs=1e-12)


def test_coherence_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    atoms = planted_dictionary(11, 5)
    whole = coherence(atoms), gershgorin_bound(atoms, 4)
    monkeypatch.setattr(structure, "BLOCK", 30)
    assert (coherence(atoms), gershgorin_bound(atoms, 4)) == pytest.approx(whole, abs=1e-14)


def test_known_coherences() -> None:
    assert coherence(torch.eye(3)) == 0
    assert coherence(torch.ones(1, 3)) == 0
    assert coherence(torch.tensor([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(1)
    assert coherence(torch.tensor([[1.0, 2.0], [0.0, 0.0]])) == 0
    assert coherence([[1, 0], [1, 1]]) == pytest.approx(math.sqrt(0.5))
    assert gershgorin_bound(torch.eye(3), 3) == 0


def test_supports_come_in_order_and_in_batches() -> None:
    batches = list(all_supports(6, 3, size=7))
    assert [len(b) for b in batches] == [7, 7, 6]
    assert torch.cat(batches).tolist() == [list(s) for s in itertools.combinations(range(6), 3)]


@pytest.mark.parametrize("s", [0, 4])
def test_an_impossible_order_is_refused(s: int) -> None:
    for measure in (restricted_isometry, gershgorin_bound):
        with pytest.raises(ValueError, match="between 1 and 3"):
            measure(torch.eye(3), s)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1"):
        restricted_isometry(torch.eye(3), 2, samples=0)
    with pytest.raises(ValueError, match="dictionary holds NaN"):
        coherence(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        coherence(torch.eye(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="booleans"):
        coherence(torch.eye(3), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="at least one coordinate to see"):
        coherence(torch.eye(3), torch.zeros(3, dtype=torch.bool))
