"""What a fleet refuses, and that it leaves its surroundings alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))


def linear(seed: int) -> nn.Module:
    return nn.Linear(4, 3)


def make(factory=linear, seeds=2, **options):
    return th.Fleet(factory, seeds, **{"loss": nn.CrossEntropyLoss(), "rate": 0.1} | options)


def loose(seed: int) -> nn.Module:
    model = nn.Linear(4, 3)
    model.scale = torch.tensor(float(seed))
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": []}, "seeds must be a sequence with at least one entry"),
        ({"seeds": [-1]}, r"seeds\[0\] must be an integer of at least 0"),
        ({"optimizer": torch.optim.SGD, "rate": None}, "rate is missing"),
        ({"factory": lambda seed: None}, "factory must return an nn.Module"),
        ({"factory": lambda seed: nn.Linear(4, 3 + seed)}, "same architecture.*3x4.*4x4|out_features=3.*out_features=4"),
        ({"factory": lambda seed: nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1 * seed))}, "negative_slope"),
        ({"factory": loose}, "register_buffer"),
        ({"factory": lambda seed: nn.Linear(4, 3).requires_grad_(False)}, "nothing to train"),
        ({"rate": None}, "rate is missing"),
        ({"rate": [0.1, 0.2, 0.3]}, "one per replica: 2"),
        ({"rate": -0.1}, "rate must be at least 0"),
        ({"rate": float("nan")}, "finite"),
        ({"optimizer": "sdg"}, "'sgd'"),
        ({"optimizer": "adam", "momentum": 0.9}, "no setting momentum"),
        ({"optimizer": 3}, "must be a name"),
        ({"optimizer": torch.optim.Adam, "momentum": 0.9}, "Adam has no setting momentum; it has weight_decay, betas, eps"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)}, "Adagrad"),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True)}, "amsgrad"),
        ({"momentum": -1.0}, "momentum must be a number of at least 0 and below 1"),
        ({"nesterov": True}, "nesterov needs"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, r"betas\[1\] must be a number of at least 0 and below 1"),
        ({"mode": "test"}, "mode must be"),
    ],
)
def test_what_a_fleet_refuses(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((X, Y), {}, "Give steps or epochs"),
        ((X, Y), {"steps": 1, "epochs": 1}, "Give steps or epochs"),
        ((X, Y), {"steps": 0}, "steps must be a positive integer"),
        ((X, Y), {"steps": 1, "every": 0}, "every must be"),
        ((X, Y), {"steps": 1, "batch_size": 0}, "batch_size must be"),
        ((X, Y), {"steps": 1, "order_seeds": [1, 2, 3]}, "order_seeds must be"),
        ((X, Y), {"steps": 1, "shared": "targets"}, "shared must be"),
        ((X, Y), {"steps": 1, "shared": False}, "leading axis of 2 replicas"),
        ([(X, Y)], {"steps": 1, "shared": False}, "one data set per replica"),
        ([(X, Y), (X[:5], Y[:5])], {"steps": 1, "shared": False}, "equal shapes"),
        ((X[None].repeat(2, 1, 1), Y[None, :5].repeat(2, 1)), {"steps": 1, "shared": False}, "equally many samples"),
        ([(X, Y), (X, Y)], {"steps": 1}, "data must be tensors"),
        ((X[:, :2], Y), {"steps": 1}, "model refused"),
        ((X, Y + 3), {"steps": 1}, "out of bounds"),
        ((X / 0, Y), {"steps": 1}, "NaN or inf"),
        ((X[:0], Y[:0]), {"steps": 1}, "empty"),
    ],
)
def test_what_training_refuses(data, options, message):
    with pytest.raises((ValueError, ArithmeticError), match=message):
        make().train(data, **options)


def test_the_random_state_is_left_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fleet = make(lambda seed: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), seeds=3)
    fleet.train((X, Y), steps=3, batch_size=5, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_factory_may_hand_out_one_and_the_same_module():
    shared = nn.Linear(4, 3)

    def factory(seed: int) -> nn.Module:
        shared.reset_parameters()
        return shared

    fleet = make(factory, seeds=3)
    kept = shared.weight.detach().clone()
    assert not torch.equal(fleet.parameters["weight"][0], fleet.parameters["weight"][1])
    fleet.train((X, Y), steps=2, progress=False)
    assert torch.equal(shared.weight, kept)


def test_seeds_decide_the_weights():
    fleet = make(seeds=[5, 6, 5])
    assert torch.equal(fleet.parameters["weight"][0], fleet.parameters["weight"][2])
    assert not torch.equal(fleet.parameters["weight"][0], fleet.parameters["weight"][1])


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_a_schedule_gives_factors_that_are_rates(factor):
    with pytest.raises(ValueError, match=r"what schedule gives for step 1 must be at least 0, a finite number"):
        make().train((X, Y), steps=3, schedule=lambda step: factor if step else 1.0, progress=False)
