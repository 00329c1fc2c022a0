"""Starts and limits of the eigensolver: trusted, suggested and verified starts, a full basis, a zero operator."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import theodolite as th

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(11, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (11,), generator=GENERATOR)
CE = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_facts_of_a_mapping_reach_its_results():
    blocks = th.layer_hessians(th.Problem(network().to(torch.bfloat16), CE, (X.to(torch.bfloat16), Y)))
    cost = th.top_eigenpairs(blocks, 2).cost
    assert "kept graph" in cost.route
    assert cost.peak_bytes > 0
    assert "float32 copy" in cost.notes[0]


def test_the_basis_never_overflows():
    matrix = torch.diag(torch.linspace(0, 1, 300).double())
    for k, seed in ((5, 4), (5, 16), (3, 21), (5, 29), (3, 35)):
        assert th.top_eigenpairs(matrix, k, seed=seed).converged
    assert th.top_eigenpairs(matrix, 1, start=torch.randn(300, 64).double()).converged
    small = torch.diag(torch.linspace(1, 2, 10))
    assert th.top_eigenpairs(small, 3, tol=1e-9).outcome.name in ("PRECISION", "CONVERGED")


def test_a_zero_operator_is_certain_at_once():
    pairs = th.top_eigenpairs(torch.zeros(3000, 3000), 3)
    assert pairs.converged
    assert pairs.matvecs < 20


def test_a_trusted_start_is_said_to_be_trusted():
    values = torch.cat([torch.linspace(10, 5, 12), torch.rand(188) * 4.8]).double()
    matrix = torch.diag(values)
    trusted = th.top_eigenpairs(matrix, 10, start=th.top_eigenpairs(matrix, 10))
    assert trusted.miss_probability > 1e-3  # a few products after the start certify nothing, and it says so
    assert "trusted" in str(trusted)
    assert trusted.rows()[0]["miss_probability"] > 1e-3
    missing_one = torch.eye(200).double()[:, [i for i in range(12) if i != 4][:10]]
    verified = th.top_eigenpairs(matrix, 10, start=missing_one)
    assert "trusted" not in str(verified)
    assert float((verified.values - values.sort(descending=True).values[:10]).abs().max()) < 0.01


def test_a_suggested_start_is_verified():
    class Suggestive(th.operators.DenseOperator):
        def suggest_start(self, k):
            return torch.eye(self.shape[0], dtype=self.dtype)[:, 5 : 5 + k]

    values = torch.cat([torch.linspace(10, 5, 12), torch.rand(188) * 4.8]).double()
    pairs = th.top_eigenpairs(Suggestive(torch.diag(values)), 2)
    assert float((pairs.values - values[:2]).abs().max()) < 0.02


def test_whole_numbers_of_any_type():
    assert len(th.top_eigenpairs(torch.eye(4).double(), np.int64(2)).values) == 2
    assert th.trace(torch.eye(1).double(), matvecs=6, method="xtrace").value == 1.0
