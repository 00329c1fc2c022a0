"""Subspace overlap: bounds, invariance, and the curve."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import theodolite as th


def frame(n: int, k: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q


@given(n=st.integers(3, 30), k=st.integers(1, 3), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_overlap_is_a_share_and_does_not_depend_on_the_basis(n, k, seed):
    u, v = frame(n, k, seed), frame(n, k, seed + 1)
    overlap = th.subspace_overlap(u, v)
    assert -1e-12 <= overlap <= 1 + 1e-12
    assert overlap == pytest.approx(th.subspace_overlap(u @ frame(k, k, seed + 2), v))
    assert th.subspace_overlap(u, u) == pytest.approx(1.0)
    curve = th.overlap_curve(u, v)
    torch.testing.assert_close(curve, torch.tensor([th.subspace_overlap(u[:, :i], v[:, :i]) for i in range(1, k + 1)]).double())


def test_random_subspaces_overlap_by_k_over_n():
    mean = sum(th.subspace_overlap(frame(50, 5, s), frame(50, 5, s + 1000)) for s in range(300)) / 300
    assert mean == pytest.approx(0.1, abs=0.01)


def test_bad_input():
    u = frame(6, 2, 0)
    with pytest.raises(ValueError, match="orthonormal"):
        th.subspace_overlap(2 * u, u)
    with pytest.raises(ValueError, match="same number of rows"):
        th.subspace_overlap(u, frame(5, 2, 0))
    with pytest.raises(ValueError, match="same dimension"):
        th.subspace_overlap(u, frame(6, 3, 0))
    with pytest.raises(ValueError, match="matrix"):
        th.overlap_curve(u[:, 0], u)
