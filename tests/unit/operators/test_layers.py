"""Layer blocks: exact, in lockstep, row-major."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.cases import PLAIN, make, mlp, mlp_tanh_mse
from theodolite.testing import dense_hessian


@pytest.mark.parametrize("builder", PLAIN, ids=lambda b: b.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_diagonal_blocks_of_the_hessian(builder, bias):
    case = make(builder)
    dense = dense_hessian(case.objective, case.parameters())
    blocks = th.layer_hessians(case.problem(), bias=bias)
    generator = torch.Generator().manual_seed(0)
    vectors = {name: torch.randn(op.shape[0], 2, generator=generator, dtype=torch.float64) for name, op in blocks.items()}
    images = blocks.products(vectors)
    for name, image in images.items():
        where = blocks.positions(name)
        assert float((image - dense[where][:, where] @ vectors[name]).abs().max()) <= 1e-8 * float(dense.abs().max())
    if bias:
        covered = torch.cat([blocks.positions(name) for name in blocks])
        assert covered.sort().values.tolist() == list(range(len(dense)))


def test_blocks_are_row_major():
    """For squared loss the block of a linear layer is I ⊗ XᵀX: a swapped order gives XᵀX ⊗ I."""
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    problem = th.Problem(nn.Sequential(nn.Linear(3, 2)).double(), nn.MSELoss(), (x, y))
    block = th.layer_hessians(problem)["0"].to_dense()
    right = torch.kron(torch.eye(2).double(), x.T @ x / 6)
    swapped = torch.kron(x.T @ x / 6, torch.eye(2).double())
    torch.testing.assert_close(block, right)
    assert not torch.allclose(block, swapped)


def test_lockstep_equals_layer_by_layer():
    case = make(mlp_tanh_mse)
    blocks = th.layer_hessians(case.problem())
    together = th.top_eigenpairs(blocks, k=3, tol=1e-8)
    for name, op in blocks.items():
        alone = th.top_eigenpairs(op, k=3, tol=1e-8)
        torch.testing.assert_close(together[name].values, alone.values)
        assert together[name].matvecs == alone.matvecs
    densities = th.spectral_density(blocks, probes=2, steps=5)
    for name, op in blocks.items():
        torch.testing.assert_close(densities[name].nodes, th.spectral_density(op, probes=2, steps=5).nodes)
    assert {row["layer"] for row in together.rows()} == set(blocks)


def test_uneven_batches_and_selection():
    case = make(mlp)
    x, y = case.data
    whole = th.layer_hessians(case.problem())
    parts = th.layer_hessians(th.Problem(case.model, case.loss, [(x[:2], y[:2]), (x[2:], y[2:])]), ["0"], keep="never")
    assert list(parts) == ["0"]
    torch.testing.assert_close(parts["0"].to_dense(), whole["0"].to_dense(), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="fits no layer"):
        th.layer_hessians(case.problem(), "nosuch")
