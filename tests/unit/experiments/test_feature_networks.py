"""Stacked networks: every product against autograd and the tangent kernel operator, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from theodolite.experiments.catapult_features.stacked_networks import StackedNetworks
from theodolite.experiments.catapult_features.tasks import agops
from theodolite.measures.features import agop
from theodolite.models import fcn, ntk_cnn, ntk_fcn
from theodolite.operators.tangent_kernels import tangent_kernel
from theodolite.problem import Problem

REPLICAS, SAMPLES = 3, 7
IMAGE = (2, 4, 4)


def plain_cnn(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1))


CASES = {
    "two layers": (lambda s: ntk_fcn(6, 8, 2, seed=s), None),
    "four layers with biases": (lambda s: ntk_fcn(6, 8, 4, seed=s, bias="all", bias_init="normal"), None),
    "torch's own": (lambda s: fcn(6, [8, 5], 1, init="torch", seed=s), None),
    "convolutions": (lambda s: ntk_cnn(IMAGE, 5, 4, seed=s), IMAGE),
    "convolutions with biases": (lambda s: ntk_cnn(IMAGE, 5, 3, seed=s, bias="all", bias_init="normal"), IMAGE),
    "torch's convolutions": (plain_cnn, IMAGE),
}


@pytest.fixture(params=CASES)
def case(request):
    make, image = CASES[request.param]
    models = [make(seed).double() for seed in range(REPLICAS)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(REPLICAS, SAMPLES, 6 if image is None else 32, dtype=torch.float64, generator=generator)
    c = torch.randn(REPLICAS, SAMPLES, dtype=torch.float64, generator=generator)
    return models, StackedNetworks(models, image), x, c


def shaped(model, x):
    return x.reshape(-1, *IMAGE) if any(isinstance(m, nn.Conv2d) or hasattr(m, "kernel") for m in model) else x


def jacobian(model, x):
    outputs = model(shaped(model, x))[:, 0]
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs]
    return outputs.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_check_02_kernel_by_gram_products_is_that_of_the_jacobian(case):
    models, networks, x, _ = case
    passes = networks.passes(x)
    kernels = networks.kernel(passes)
    for r, model in enumerate(models):
        outputs, j = jacobian(model, x[r])
        torch.testing.assert_close(passes.outputs[r], outputs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(kernels[r], j @ j.T, rtol=1e-10, atol=1e-10)
        problem = Problem(model, nn.MSELoss(), (shaped(model, x[r]), x[r, :, :1]))
        torch.testing.assert_close(kernels[r], tangent_kernel(problem), rtol=1e-10, atol=1e-10)


def test_gradients_and_products_with_the_kernel(case):
    models, networks, x, c = case
    found, times = networks.gradients(networks.passes(x), c), networks.kernel_times(x, c)
    for r, model in enumerate(models):
        _, j = jacobian(model, x[r])
        mine = torch.cat([g[r].flatten() for g in found])
        torch.testing.assert_close(mine, c[r] @ j, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(times[r], j @ (j.T @ c[r]), rtol=1e-10, atol=1e-10)


def test_adding_a_combination_of_gradients_in_place(case):
    _, networks, x, c = case
    passes = networks.passes(x)
    wanted = [t + g for t, g in zip(networks.tensors, networks.gradients(passes, c), strict=True)]
    networks.add_(passes, c)
    for tensor, there in zip(networks.tensors, wanted, strict=True):
        torch.testing.assert_close(tensor, there, rtol=1e-12, atol=1e-12)


def test_input_gradients_make_the_agop(case):
    models, networks, x, _ = case
    matrices = agops(networks, x)
    for r, model in enumerate(models):
        torch.testing.assert_close(matrices[r], agop(model, shaped(model, x[r])), rtol=1e-10, atol=1e-12)


def test_top_of_the_kernel_by_power_iteration(case):
    _, networks, x, _ = case
    exact = torch.linalg.eigvalsh(networks.kernel(networks.passes(x)))[:, -1]
    value, vector = networks.top_kernel(x, iterations=400)
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=0.0)
    again, _ = networks.top_kernel(x, vector, iterations=1)
    torch.testing.assert_close(again, exact, rtol=1e-5, atol=0.0)


def test_a_model_comes_out_as_it_went_in(case):
    models, networks, _, _ = case
    for r, model in enumerate(models):
        there = networks.model(r)
        for mine, theirs in zip(there.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_copies_and_rows():
    networks = StackedNetworks([ntk_fcn(4, 3, 2, seed=s) for s in range(2)])
    other = copy.deepcopy(networks)
    for tensor in other.tensors:
        tensor.add_(1.0)
    networks.take(torch.tensor([False, True]), other)
    for mine, theirs in zip(networks.tensors, other.tensors, strict=True):
        assert torch.equal(mine[1], theirs[1])
        assert not torch.equal(mine[0], theirs[0])


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(TypeError, match="Tanh"):
        StackedNetworks([nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))])
    with pytest.raises(ValueError, match="image="):
        StackedNetworks([ntk_cnn(IMAGE, 2, 2, seed=0)])
