"""Normalisation over the batch, with buffers that a forward pass writes into: blocks are right, the rest is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import theodolite as th
from theodolite.errors import BatchCoupledError
from theodolite.testing import dense_hessian

KINDS = {
    "plain": lambda: nn.BatchNorm1d(5),
    "cumulative": lambda: nn.BatchNorm1d(5, momentum=None),
    "untracked": lambda: nn.BatchNorm1d(5, track_running_stats=False),
    "without weights": lambda: nn.BatchNorm1d(5, affine=False),
    "synchronised": lambda: nn.SyncBatchNorm(5),
}


def case(kind: str) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), KINDS[kind](), nn.Tanh(), nn.Linear(5, 3)).double()
    model(torch.randn(6, 4).double())  # statistics of other data
    x, y = torch.randn(11, 4).double(), torch.arange(11) % 3
    return model, [(x[:4], y[:4]), (x[4:], y[4:])]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_blocks_and_the_model_left_as_found(kind, mode):
    model, data = case(kind)
    before = copy.deepcopy(model.state_dict())
    problem = th.Problem(model, nn.CrossEntropyLoss(), data, mode=mode)
    blocks = th.layer_hessians(problem, bias=True)
    own = copy.deepcopy(model).train(mode == "train")
    dense = sum(len(y) / 11 * dense_hessian(lambda x=x, y=y: F.cross_entropy(own(x), y), list(own.parameters())) for x, y in data)
    for name, block in blocks.items():
        place = blocks.positions(name)
        assert torch.allclose(block.to_dense(), dense[place][:, place], atol=1e-10)
    th.gauss_newton(problem) @ torch.ones(problem.size, dtype=torch.float64)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measure", [th.tangent_kernel, th.tangent_kernel_operator, th.kronecker_factors, th.agop, th.linearize])
def test_quantities_of_a_sample_are_refused_with_a_remedy_that_helps(kind, measure):
    model, data = case(kind)
    problem = th.Problem(model, nn.CrossEntropyLoss(), data, mode="train")
    remedy = "track_running_stats=True" if kind == "untracked" else r"mode='eval'\) uses"
    with pytest.raises(BatchCoupledError, match=remedy):
        measure(problem)
    eval_mode = th.Problem(model, nn.CrossEntropyLoss(), data)
    if kind != "untracked":
        measure(eval_mode)
        return
    with pytest.raises(BatchCoupledError, match=remedy):
        measure(eval_mode)


def test_layers_that_wait_for_other_processes_are_refused(monkeypatch):
    model, data = case("synchronised")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match=r"waits for 3 other processes.*mode='eval'"):
        th.Problem(model, nn.CrossEntropyLoss(), data, mode="train")
    assert th.Problem(model, nn.CrossEntropyLoss(), data).size == 53
