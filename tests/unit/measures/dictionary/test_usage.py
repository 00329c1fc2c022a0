"""What atoms are used for, against counting by hand."""

from __future__ import annotations

import pytest
import torch

from theodolite.measures.dictionary import pursue
from theodolite.measures.dictionary import structure as module
from theodolite.measures.dictionary.structure import atom_usage


def problem(p: int = 12, d: int = 7, n: int = 40, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    atoms = torch.randn(p, d, generator=random, dtype=torch.float64)
    return atoms / atoms.norm(dim=1, keepdim=True), torch.randn(n, d, generator=random, dtype=torch.float64)


def test_uses_and_energy_are_counts_over_the_codes():
    atoms, signals = problem()
    codes = pursue(signals, atoms, 3)
    found, dense = atom_usage(codes, atoms), codes.dense(len(atoms))
    assert found.uses.tolist() == (dense != 0).sum(0).tolist()
    torch.testing.assert_close(found.energy, dense.square().sum(0) / dense.square().sum())
    assert found.signals == 40
    same = atom_usage(dense, atoms)
    assert torch.equal(same.uses, found.uses)
    assert [row["share"] for row in found.rows()] == pytest.approx([uses / 40 for uses in found.uses.tolist()])


@pytest.mark.parametrize("block", [1 << 24, 30])
def test_the_twin_is_the_other_atom_with_the_largest_cosine(monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK", block)
    atoms, signals = problem()
    found = atom_usage(pursue(signals, atoms, 2), atoms)
    gram = atoms @ atoms.T
    others = gram.abs() - 2 * torch.eye(len(atoms), dtype=torch.float64)
    assert found.twin.tolist() == others.argmax(1).tolist()
    torch.testing.assert_close(found.cosine, gram.gather(1, found.twin[:, None])[:, 0])


def test_pairs_are_named_once_and_idle_atoms_found():
    atoms = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 1e-3, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    found = atom_usage(torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0]]).double(), atoms)
    assert [pair[:2] for pair in found.twins()] == [(0, 1)]
    assert found.twins()[0][2] == pytest.approx(-1, abs=1e-5)
    assert found.dead.tolist() == [1, 3]
    assert "2 of 4 atoms are used by none of 2 signals" in str(found)


def test_one_atom_has_no_twin_and_right_angles_are_no_self():
    assert atom_usage(torch.ones(2, 1), torch.ones(1, 3)).twin.tolist() == [-1]
    found = atom_usage(torch.ones(2, 3), torch.eye(3))
    assert all(twin != i for i, twin in enumerate(found.twin.tolist()))
    assert found.twins() == []


def test_stopped_codes_and_wrong_shapes():
    atoms = torch.eye(4, dtype=torch.float64)
    found = atom_usage(pursue(torch.tensor([[3.0, 0, 0, 0], [0, 0, 0, 0]]).double(), atoms, 2), atoms)
    assert found.uses.tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"codes must be \(n, 4\)"):
        atom_usage(torch.ones(2, 3), atoms)
