"""Replicas that see equal data stay bitwise equal, whatever their sizes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import theodolite as th

SIZE, R, STEPS = 99, 10, 12
LABELS = torch.randint(0, 3, (SIZE,), generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """A transformer block with odd sizes."""

    def __init__(self, width: int = 18, heads: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(13, width), nn.Parameter(0.1 * torch.randn(7, width))
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 37), nn.GELU(), nn.Linear(37, width))
        self.head, self.heads = nn.Linear(width, 3), heads

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return self.head((x + self.mlp(x)).mean(1))


def mlp(*sizes: int) -> nn.Module:
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int) -> nn.Module:
    wide = 2 * channels + 1
    stem = [nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
    body = [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, *body, nn.Linear(wide, 3))


MODELS = {
    "mlp 61-37-37-10": (lambda: mlp(61, 37, 37, 10), torch.randn(SIZE, 61)),
    "mlp 13-7-3": (lambda: mlp(13, 7, 3), torch.randn(SIZE, 13)),
    "cnn with batch norm, 16 channels": (lambda: cnn(16), torch.randn(SIZE, 1, 8, 8)),
    "cnn with batch norm, 5 channels": (lambda: cnn(5), torch.randn(SIZE, 1, 11, 11)),
    "mlp with batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)),
        torch.randn(SIZE, 5),
    ),
    "transformer": (Attention, torch.randint(0, 13, (SIZE, 7))),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("batch", [32, 33])
@pytest.mark.parametrize("name", MODELS)
def test_equal_data_keep_replicas_equal(name, batch, optimizer):
    make, inputs = MODELS[name]
    options = {"momentum": 0.9, "weight_decay": 1e-3} if optimizer == "sgd" else {}
    fleet = th.Fleet(
        lambda seed: make(), [3] * R, loss=nn.CrossEntropyLoss(), optimizer=optimizer, rate=0.02, bitwise=True, **options
    )
    index = torch.arange(SIZE - 7).repeat(R, 1)
    run = fleet.train((inputs, LABELS), index=index, steps=STEPS, batch_size=batch, order_seeds=1, progress=False)
    assert float(run.loss[0, -1]) != float(run.loss[0, 0])  # something was learnt
    assert run.route == "vmap" or run.cost.notes  # batch norm over vectors rounds the end of a stack in its own way
    for name_, t in {**fleet.parameters, **fleet.buffers, "outputs": fleet.outputs((inputs, LABELS))}.items():
        assert torch.equal(t, t[:1].expand_as(t)), name_


def test_one_other_example_sets_its_replica_apart_and_no_other():
    make, inputs = MODELS["mlp 61-37-37-10"]
    index = torch.arange(SIZE - 7).repeat(R, 1)
    index[4, 50] = SIZE - 1
    fleet = th.Fleet(lambda seed: make(), [3] * R, loss=nn.CrossEntropyLoss(), rate=0.02, bitwise=True)
    fleet.train((inputs, LABELS), index=index, steps=STEPS, batch_size=33, order_seeds=1, progress=False)
    weight = fleet.parameters["0.weight"]
    apart = [r for r in range(R) if not torch.equal(weight[r], weight[0])]
    assert apart == [4]


WARM = """
import torch
torch.randn(64, 64) @ torch.randn(64, 64)  # MKL has begun before theodolite could ask it to be exact
import theodolite as th
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(66, 13), torch.randint(0, 3, (66,))
make = lambda seed: nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 3))
fleet = th.Fleet(make, [0] * 14, loss=nn.CrossEntropyLoss(), rate=0.1, bitwise=True)
run = fleet.train((x, y), steps=20, batch_size=33, index=torch.arange(66).repeat(14, 1), order_seeds=1, progress=False)
print(run.route, all(torch.equal(p, p[:1].expand_as(p)) for p in fleet.parameters.values()), run.matrix_products, sep="\\n")
"""


def outside(script: str, **variables: str) -> list[str]:
    """The last words that a script prints in a process of its own, without the settings of the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parent, env=environment
    )
    return done.stdout.strip().splitlines()


def test_kernels_that_were_not_asked_in_time_are_found_out():
    route, equal, said = outside(WARM)
    assert route in ("vmap", "loop")  # by vmap where the kernels are exact anyway, by the loop elsewhere
    assert equal == "True"
    assert "MKL had begun before" in said or "without MKL" in said


def test_kernels_are_asked_by_the_fleet_and_not_by_the_import():
    equal, said = outside(WARM.replace("torch.randn(64, 64) @ torch.randn(64, 64)", "pass"))[1:]
    assert equal == "True"
    assert "alike wherever" in said or "without MKL" in said
    assert outside("import os, theodolite as th; th.Fleet; print(os.environ.get('MKL_CBWR'))") == ["None"]


def test_what_the_environment_says_is_left_alone():
    assert "MKL_CBWR=COMPATIBLE" in outside(WARM, MKL_CBWR="COMPATIBLE")[-1] or not torch.backends.mkl.is_available()


def test_a_fleet_that_does_not_insist_says_nothing_of_products():
    make, inputs = MODELS["mlp 13-7-3"]
    run = th.Fleet(lambda seed: make(), 2, loss=nn.CrossEntropyLoss(), rate=0.02).train((inputs, LABELS), steps=1)
    assert run.matrix_products == ""
