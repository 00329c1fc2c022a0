"""NTK-parameterised networks: scale in the forward pass, outputs of order one, the kernel of the theory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from theodolite import models
from theodolite.models.initialisation import NTKConv, NTKLinear, ntk_layers


def tangent_kernel(model: nn.Module, x: Tensor) -> Tensor:
    """⟨∇f(x_i), ∇f(x_j)⟩ of a network with one output."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(lambda p, z: functional_call(model, p, (z[None],)).squeeze()), (None, 0))(parameters, x)
    rows = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
    return rows @ rows.T


def test_layers_divide_by_the_root_of_the_fan_in():
    linear, conv = NTKLinear(9, 4), NTKConv(4, 5, (3, 3), stride=2, padding=1)
    x, image = torch.randn(2, 9), torch.randn(2, 4, 6, 6)
    nn.init.normal_(linear.bias)
    nn.init.normal_(conv.bias)
    torch.testing.assert_close(linear(x), x @ linear.weight.T / 3 + linear.bias)
    expected = nn.functional.conv2d(image, conv.weight, None, 2, 1) / 6 + conv.bias[:, None, None]
    torch.testing.assert_close(conv(image), expected)


@pytest.mark.parametrize("depth", [2, 4])
def test_outputs_have_one_variance_at_every_width(depth):
    """2^-(hidden layers) for ReLU and inputs of norm √d."""
    x = torch.randn(1, 32)
    x = x * math.sqrt(32) / x.norm()
    seeds, outputs = 40, 100
    for width in (64, 512):
        squares = [models.ntk_fcn(32, width, depth, outputs, seed=seed)(x).square().mean().item() for seed in range(seeds)]
        # A hidden layer's mean of relu² fluctuates by √(5/width) of itself, the mean over outputs by √(2/outputs).
        error = math.sqrt((5 * (depth - 1) / width + 2 / outputs) / seeds)
        assert sum(squares) / seeds == pytest.approx(0.5 ** (depth - 1), rel=4 * error)


def test_outputs_of_convolutional_networks_stay_of_order_one():
    """Padding takes something at the border, so the variance is a little below 2^-(hidden layers), at every width."""
    x = torch.ones(1, 3, 12, 12)
    variances = []
    for width in (32, 128):
        model = models.ntk_cnn((3, 12, 12), width, 3, outputs=512, seed=width)
        variances.append(model(x).var().item())
    assert all(0.1 < v < 0.3 for v in variances)


def test_one_dimensional_convolutions():
    model = models.ntk_cnn((3, 7), 4, 3, outputs=2, kernel=5, activation="tanh", bias="hidden", seed=0)
    assert model(torch.randn(6, 3, 7)).shape == (6, 2)
    assert model.conv2.weight.shape == (4, 4, 5)
    assert model.fc1.in_features == 4 * 7


def test_kernel_of_a_wide_two_layer_network_is_the_closed_form():
    x = torch.randn(6, 10, dtype=torch.float64)
    model = models.ntk_fcn(10, 20000, 2, seed=0).double()
    norms = x.norm(dim=1)
    angle = (x @ x.T / norms[:, None] / norms).clamp(-1, 1).acos()
    scale = norms[:, None] * norms / 10
    exact = scale * (angle.sin() + 2 * (math.pi - angle) * angle.cos()) / (2 * math.pi)
    assert (tangent_kernel(model, x) - exact).abs().max() < 0.05 * exact.diagonal().max()


@pytest.mark.parametrize(
    ("bias", "bias_init", "rate"),
    [("none", "zero", 6.0), ("hidden", "zero", 2.4), ("hidden", "normal", 1.05), ("all", "zero", 0.70)],
)
def test_critical_rates_of_the_bias_conventions(bias, bias_init, rate):
    """n/λ_1 of a two-layer network on 128 Gaussian points in 100 dimensions: the values known at infinite width."""
    x = torch.randn(128, 100, generator=torch.Generator().manual_seed(1))
    model = models.ntk_fcn(100, 1024, 2, bias=bias, bias_init=bias_init, seed=2)
    largest = torch.linalg.eigvalsh(tangent_kernel(model, x))[-1].item()
    assert 128 / largest == pytest.approx(rate, rel=0.1)


def test_biases_stand_where_they_are_asked_for():
    def biased(**arguments):
        return [layer.bias is not None for layer in ntk_layers(models.ntk_fcn(5, 6, 3, **arguments))]

    assert biased() == [False, False, False]
    assert biased(bias="hidden") == [True, True, False]
    assert biased(bias="all") == [True, True, True]
    assert models.ntk_fcn(5, 6, 3, bias="all").fc1.bias.abs().max() == 0
    assert models.ntk_fcn(5, 600, 2, bias="all", bias_init="normal").fc1.bias.std().item() == pytest.approx(1, rel=0.15)


def test_named_laws_of_the_weights():
    sign = models.ntk_fcn(50, 200, 2, init="ntk_sign", seed=0)
    assert sign.fc2.weight.abs().eq(1).all()
    assert abs(sign.fc2.weight.mean().item()) < 0.3
    assert sign.fc1.weight.std().item() == pytest.approx(1, rel=0.05)
    small = models.ntk_fcn(50, 200, 2, init="ntk_small", seed=0)
    assert small.fc1.weight.std().item() == pytest.approx(0.1, rel=0.05)


def test_any_network_can_be_turned_into_its_ntk_form():
    model = models.build("WRN-10-1", init="ntk", norm=None, seed=0)
    assert not any(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    plain = models.build("WRN-10-1", norm=None)
    assert models.count_parameters(model) == models.count_parameters(plain)
    assert isinstance(models.ntk_parameterise(nn.Linear(3, 2)), NTKLinear)
    with pytest.raises(ValueError, match="no NTK form"):
        models.ntk_parameterise(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)))


def test_redrawing_keeps_the_parameterisation():
    model = models.ntk_fcn(5, 6, 2, bias="all", bias_init="normal", seed=1)
    before = model.fc1.weight.clone()
    models.initialise(model, "ntk")
    assert not torch.equal(model.fc1.weight, before)
    assert model.fc1.bias.abs().max() == 0
    with pytest.raises(ValueError, match="init must be 'ntk' for a network with NTK layers"):
        models.initialise(model, "xavier")


def test_the_ntk_form_is_the_plain_network_with_scaled_weights():
    scaled = models.build("LeNet5", init="ntk", seed=0)
    plain = models.build("LeNet5", seed=0)
    with torch.no_grad():
        for name, layer in scaled.named_children():
            if isinstance(layer, NTKLinear | NTKConv):
                plain.get_submodule(name).weight.copy_(layer.weight * layer.scale)
                plain.get_submodule(name).bias.copy_(layer.bias)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(scaled(x), plain(x))
