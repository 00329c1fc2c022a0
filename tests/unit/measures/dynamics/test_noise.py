"""Gradient noise against per-sample gradients, and its error bars over many draws of the data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th


def data(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator).double(), torch.randn(samples, 1, generator=generator).double() + 1


def linear() -> nn.Module:
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.weight, 0.3)
    nn.init.constant_(model.bias, 0.1)
    return model


def per_sample(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = []
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.mse_loss(model(a[None]), b[None])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def test_with_one_sample_a_group_it_is_the_sample_covariance():
    x, y = data(40)
    model = linear()
    g = per_sample(model, x, y)
    noise = th.measures.dynamics.gradient_noise(th.Problem(model, nn.MSELoss(), (x, y)), groups=40)
    trace = float(g.var(0).sum())
    assert noise.noise == pytest.approx(trace)
    assert noise.norm == pytest.approx(float(g.mean(0).norm()))
    signal = noise.norm**2 - trace / 40
    assert noise.noise_scale == pytest.approx(trace / signal)
    assert noise.loss == pytest.approx(float(nn.functional.mse_loss(model(x), y).detach()))
    losses = (model(x) - y).detach().square()[:, 0]
    assert noise.loss_error == pytest.approx(float(losses.std()) / math.sqrt(40))


def test_batches_and_reductions_do_not_matter():
    x, y = data(60)
    whole = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), (x, y)), groups=60)
    cut = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), [(x[:33], y[:33]), (x[33:], y[33:])]), groups=60)
    assert cut.noise == pytest.approx(whole.noise)
    assert cut.noise_scale == pytest.approx(whole.noise_scale)
    summed = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(reduction="sum"), (x, y)), groups=60)
    assert summed.noise_scale == pytest.approx(whole.noise_scale, rel=1e-6)


@pytest.mark.parametrize("name", ["loss", "noise", "noise_scale"])
def test_error_bars_are_honest_over_draws_of_the_data(name):
    x, y = data(200_000, seed=1)
    g = per_sample_linear(linear(), x, y)
    trace, signal = float(g.var(0).sum()), float(g.mean(0).square().sum())
    truth = {"loss": float((linear()(x) - y).detach().square().mean()), "noise": trace, "noise_scale": trace / signal}[name]
    scores = []
    for seed in range(100):
        draw = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), data(256, seed=10 + seed)), groups=32)
        scores.append((getattr(draw, name) - truth) / getattr(draw, f"{name}_error"))
    assert 0.7 <= float(torch.tensor(scores).std()) <= 1.4
    assert abs(float(torch.tensor(scores).mean())) <= 0.5


def per_sample_linear(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradients of squared errors of a linear model, written out: 2 (z − y) (x, 1)."""
    residual = (model(x) - y).detach()
    return 2 * residual * torch.cat([x, torch.ones(len(x), 1).double()], dim=1)


def test_a_vanishing_gradient_is_lost_in_noise():
    x, y = data(64)
    model = linear()
    design = torch.cat([x, torch.ones(64, 1).double()], dim=1)
    best = torch.linalg.lstsq(design, y).solution[:, 0]
    with torch.no_grad():
        model.weight.copy_(best[None, :4])
        model.bias.copy_(best[4:])
    noise = th.measures.dynamics.gradient_noise(th.Problem(model, nn.MSELoss(), (x, y)))
    assert math.isinf(noise.noise_scale)
    assert "no more than its noise would make" in str(noise)


def test_coupled_samples_are_taken_batch_by_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    x, y = data(60)
    batches = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    noise = th.measures.dynamics.gradient_noise(th.Problem(model, nn.MSELoss(), batches, mode="train"))
    assert len(noise.group_sizes) == 3


def test_the_order_of_the_data_does_not_matter():
    """Sorted by target the groups must not become unlike; per-sample gradients are the truth."""
    x, y = data(600)
    order = y[:, 0].argsort()
    truth = float(per_sample_linear(linear(), x, y).var(0).sum())
    noise = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), (x[order], y[order])))
    assert abs(noise.noise - truth) <= 4 * noise.noise_error
    batches = [(x[order][i : i + 150], y[order][i : i + 150]) for i in range(0, 600, 150)]
    cut = th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), batches))
    assert abs(cut.noise - truth) <= 4 * cut.noise_error


def test_a_single_sample_has_no_noise():
    x, y = data(1)
    with pytest.raises(ValueError, match="at least two samples"):
        th.measures.dynamics.gradient_noise(th.Problem(linear(), nn.MSELoss(), (x, y)))
