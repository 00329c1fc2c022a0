"""Initialisations have the law their name says; seeds repeat and leave the global generator alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite import models
from theodolite.models.initialisation import LAYER_INITS, TOKEN_INITS, initialise

IMAGE_MODELS = ["F-20^2", "LeNet5", "VGG11-W8", "ResNet18-W8", "ResNet20", "WRN-10-1", "Myrtle-5", "CNN-4-6", "ViT-4"]
TOKEN_MODELS = ["GPT-small", "BERT-small", "stories260k"]
NTK_MODELS = {"NTK-FCN-3": {"inputs": 6, "width": 5}, "NTK-CNN-2": {"image": (3, 4, 4), "width": 5}}
DEFAULTS = {
    **dict.fromkeys(["F-20^2", "LeNet5", "VGG11-W8", "ResNet18-W8", "ViT-4"], "xavier"),
    **dict.fromkeys(["WRN-10-1", "CNN-4-6"], "kaiming_normal"),
    **dict.fromkeys(["Myrtle-5", *NTK_MODELS], "ntk"),
    **dict.fromkeys(["BERT-small", "stories260k"], "normal_0.02"),
    "ResNet20": "kaiming_fan_out",
    "GPT-small": "gpt2",
}


def build(name: str, **arguments) -> nn.Module:
    return models.build(name, **NTK_MODELS.get(name, {}), **arguments)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_model_knows_its_initialisation(name):
    assert build(name).initialisation == DEFAULTS[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_seeds_repeat_and_leave_the_generator_alone(name):
    state = torch.get_rng_state()
    first, again, other = (build(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_without_a_seed_the_global_generator_is_used_as_torch_does():
    torch.manual_seed(5)
    ours = models.fcn(6, [4], 3, init="torch")
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    assert torch.equal(ours.fc1.weight, plain[1].weight)
    assert torch.equal(ours.fc2.bias, plain[3].bias)


@pytest.mark.parametrize("name", [*IMAGE_MODELS, *TOKEN_MODELS, *NTK_MODELS])
def test_a_wrong_name_lists_those_accepted(name):
    with pytest.raises(ValueError, match=r"init must be one of '\w.*. Got 'orthogonal'"):
        build(name, init="orthogonal")


@pytest.mark.parametrize("init", LAYER_INITS)
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_accepted_initialisation_gives_finite_outputs(name, init):
    x = torch.randn((2, 784) if name.startswith("F-") else (2, 3, 32, 32))
    arguments = {"width": 8} if name in ("ResNet20", "Myrtle-5") else {"dim": 12} if name == "ViT-4" else {}
    model = models.build(name, init=init, seed=0, **arguments)
    assert model.initialisation == init
    assert model(x).isfinite().all()


# Standard deviations for a layer of 200 inputs and 300 outputs, and for 8 -> 16 channels of 5×5 filters.
STANDARD = {
    "torch": (1 / math.sqrt(3 * 200), 1 / math.sqrt(3 * 200)),
    "xavier": (math.sqrt(2 / 500), math.sqrt(2 / 600)),
    "xavier_normal": (math.sqrt(2 / 500), math.sqrt(2 / 600)),
    "kaiming_normal": (math.sqrt(2 / 200), math.sqrt(2 / 200)),
    "kaiming_fan_out": (1 / math.sqrt(3 * 200), math.sqrt(2 / 400)),
    "lecun_normal": (math.sqrt(1 / 200), math.sqrt(1 / 200)),
    "normal_1.2": (1.2 / math.sqrt(200), 1.2 / math.sqrt(200)),
    "normal_0.02": (0.02, 0.02),
    "ntk": (1.0, 1.0),
}


@pytest.mark.parametrize("init", STANDARD)
def test_standard_deviations(init):
    torch.manual_seed(0)
    model = initialise(nn.Sequential(nn.Linear(200, 300), nn.Conv2d(8, 16, 5)), init)
    for layer, expected in zip(model, STANDARD[init], strict=True):
        # 60000 and 3200 draws: four standard errors of an estimated deviation
        assert layer.weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * layer.weight.numel()))
        assert abs(layer.weight.mean().item()) < 4 * expected / math.sqrt(layer.weight.numel())
        if init not in ("torch", "normal_1.2") and not (init == "kaiming_fan_out" and isinstance(layer, nn.Linear)):
            assert layer.bias.abs().max() == 0
    if init == "normal_1.2":
        assert model[0].bias.std().item() == pytest.approx(1.2 / math.sqrt(300), rel=0.2)


def test_xavier_is_uniform():
    weight = initialise(nn.Linear(200, 300), "xavier").weight
    bound = math.sqrt(6 / 500)
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.999 * bound


def test_redrawing_as_torch_does():
    layer = nn.Linear(4, 4)
    before = layer.weight.clone()
    assert not torch.equal(initialise(layer, "torch").weight, before)


def test_residual_projections_shrink_with_depth():
    shallow, deep = (models.gpt(dim=64, depth=depth, seed=0) for depth in (1, 4))
    for model, count in ((shallow, 2), (deep, 8)):
        block = model.layers[0]
        for layer in (block.attention.out, block.mlp.down):
            assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(count), rel=0.05)
        for layer in (block.attention.query, block.mlp.up):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # One fresh block of a deeper network: the count is named.
    block = initialise(shallow.layers[0], "gpt2", residuals=12)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.05)


@pytest.mark.parametrize("init", TOKEN_INITS)
def test_token_models_accept_their_initialisations(init):
    ids = torch.randint(60, (2, 7))
    for name in TOKEN_MODELS:
        model = models.build(name, init=init, seed=0)
        assert model(ids).isfinite().all()
        assert model.initialisation == init
