"""Gaussians in rotated coordinates: dense formulas, invariance, and the law of what is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import theodolite as th
from theodolite.measures.bounds import Block, GaussianPosterior


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(n: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def block(m: int = 5, n: int = 6, **more) -> Block:
    return Block("w", "layer", (m, n), normal(m, n), 0.3 * normal(m, n, seed=1) - 2, normal(m, n, seed=2), **more)


def posterior(*blocks: Block, variance: float = 0.07) -> GaussianPosterior:
    return GaussianPosterior(blocks=blocks, variances={b.group: variance for b in blocks}, basis="test")


def test_check_05_the_divergence_is_that_of_torch_distributions():
    one = block()
    expected = kl_divergence(Normal(one.mean, one.log_std.exp()), Normal(one.start, math.sqrt(0.07))).sum()
    assert posterior(one).kl() == pytest.approx(float(expected), rel=1e-10)


def test_check_05_the_divergence_does_not_depend_on_the_basis():
    plain = block()
    turned = plain.turned(orthogonal(5, 3), orthogonal(6, 4))
    assert posterior(turned).kl() == pytest.approx(posterior(plain).kl(), rel=1e-10)
    rotation = torch.kron(turned.left, turned.right)  # row-major
    covariance = rotation @ torch.diag((2 * turned.log_std).exp().flatten()) @ rotation.T
    mean, start = (turned.parameter(t).flatten() for t in (turned.mean, turned.start))
    dense = kl_divergence(MultivariateNormal(mean, covariance), MultivariateNormal(start, 0.07 * torch.eye(30).double()))
    assert posterior(turned).kl() == pytest.approx(float(dense), rel=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
def test_check_07_there_and_back(transposed):
    shape = (6, 5) if transposed else (5, 6)
    one = Block("w", "w", shape, normal(5, 6), normal(5, 6), normal(5, 6), orthogonal(5, 1), orthogonal(6, 2), None, transposed)
    weight = normal(*shape, seed=7)
    there = one.coordinates(weight)
    assert float((one.parameter(there) - weight).norm()) < 1e-12
    assert float(there.norm()) == pytest.approx(float(weight.norm()), rel=1e-12)
    plain = Block("w", "w", shape, normal(5, 6), normal(5, 6), normal(5, 6), transposed=transposed)
    assert torch.equal(plain.parameter(plain.coordinates(weight)), weight)


def test_directions_that_keep_the_prior_cost_nothing():
    kept = block(rank=2).turned(None, orthogonal(6, 5))
    rounded, penalty = posterior(kept, variance=0.05).rounded()
    variance = rounded.variances["layer"]
    (inside,) = rounded.blocks
    assert torch.equal(inside.mean[:, 2:], inside.start[:, 2:])
    assert torch.allclose(inside.log_std[:, 2:], torch.tensor(0.5 * math.log(variance)).double())
    every = kl_divergence(Normal(inside.mean, inside.log_std.exp()), Normal(inside.start, math.sqrt(variance))).sum()
    assert rounded.kl() == pytest.approx(float(every), rel=1e-10)
    assert penalty["layer"] > 0


def test_drawn_networks_have_the_covariance_of_the_posterior():
    one = block(2, 3).turned(orthogonal(2, 1), orthogonal(3, 2))
    found = posterior(one)
    draws = torch.stack([found.sample(seed)["w"].flatten() for seed in range(4000)])
    rotation = torch.kron(one.left, one.right)
    covariance = rotation @ torch.diag((2 * one.log_std).exp().flatten()) @ rotation.T
    assert float((draws.mean(0) - one.parameter(one.mean).flatten()).abs().max()) < 5 * math.sqrt(float(covariance.max()) / 4000)
    assert float((torch.cov(draws.T) - covariance).norm() / covariance.norm()) < 0.12


def test_the_module_draws_and_leaves_the_model_as_it_is():
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    one = Block("weight", "w", (2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    drawn = posterior(one).module(model)
    x = torch.ones(1, 3)
    assert not torch.equal(drawn(x), drawn(x))
    assert torch.equal(model.weight, before)


def test_a_posterior_is_saved_and_read_back(tmp_path):
    found = posterior(block().turned(orthogonal(5, 1), orthogonal(6, 2), normal(5, 6).abs()))
    found.save(tmp_path / "q")
    again = th.load(tmp_path / "q")
    assert again.kl() == pytest.approx(found.kl(), rel=1e-12)
    assert again.variance_by_eigenvalue("layer") == found.variance_by_eigenvalue("layer")
