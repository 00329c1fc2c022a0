"""The geometry of atoms against the singular value decomposition and against Gaussian dictionaries."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.errors import NonFiniteError
from theodolite.measures.anchors import AtomGeometry, atom_geometry


def test_singular_values_are_those_of_the_decomposition():
    weight = torch.randn(300, 13, dtype=torch.float64) * torch.logspace(0, -3, 13, dtype=torch.float64)
    found = atom_geometry(weight)
    exact = torch.linalg.svdvals(weight)
    torch.testing.assert_close(found.singular_values, exact, rtol=1e-8, atol=0)
    shares = exact.square() / exact.square().sum()
    assert found.stable_rank == pytest.approx(float(exact.square().sum() / exact[0] ** 2))
    assert found.effective_rank == pytest.approx(math.exp(float(-(shares * shares.log()).sum())))
    torch.testing.assert_close(found.norms, weight.norm(dim=1))


def test_check_19_cosines_of_a_gaussian_dictionary():
    d, pairs = 64, 100_000
    found = atom_geometry(torch.randn(5000, d), pairs=pairs)
    assert abs(found.cosine_mean) < 4 / math.sqrt(d * pairs)
    assert found.cosine_std == pytest.approx(found.sphere_std, rel=0.02)
    low, high = found.sphere_singular_values  # of unit atoms; these have the norm √d
    assert (
        0.95 * low * math.sqrt(d)
        < float(found.singular_values[-1])
        < float(found.singular_values[0])
        < 1.05 * high * math.sqrt(d)
    )
    assert "cone" not in found.sentence()


def test_a_cone():
    found = atom_geometry(torch.randn(2000, 50) + 1)
    assert found.cosine_mean == pytest.approx(0.5, abs=0.02)
    assert "they lie in a cone" in found.sentence()
    assert int(found.cosine_counts.sum()) == found.pairs == 100_000


def test_zero_and_equal_atoms(tmp_path):
    weight = torch.zeros(4, 3)
    assert atom_geometry(weight).stable_rank == atom_geometry(weight).effective_rank == 0.0
    weight[:2] = 1.0
    found = atom_geometry(weight, pairs=500)
    assert found.cosine_mean == pytest.approx(1.0)
    assert found.pairs < 500  # pairs with a zero atom say nothing
    found.save(tmp_path / "atoms")
    again = AtomGeometry.load(tmp_path / "atoms")
    assert again.rows() == found.rows()
    assert len(again.rows()) == 3


def test_bad_dictionaries():
    with pytest.raises(ValueError, match="two or more atoms"):
        atom_geometry(torch.randn(5))
    with pytest.raises(ValueError, match="pairs must be a positive integer"):
        atom_geometry(torch.randn(5, 2), pairs=0)
    with pytest.raises(NonFiniteError, match="1 of 5 atoms"):
        atom_geometry(torch.full((5, 2), 1.0).index_fill(0, torch.tensor([2]), torch.nan))
