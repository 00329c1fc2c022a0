"""Libraries that unroll optimizers agree on the derivative of a training in its learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.measures.stepsize.trainings import data, mlp

pytestmark = pytest.mark.oracle
LOSS, RATE, MOMENTUM, STEPS = nn.CrossEntropyLoss(), 0.1, 0.9, 100


def start() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def ours(mode: str) -> float:
    found = th.meta_gradient(
        mlp, "sgd", data(), steps=STEPS, loss=LOSS, lr=RATE, momentum=MOMENTUM, mode=mode, objective="last", units="natural",
        check=False, progress=False,
    )  # fmt: skip
    return found.gradient["lr"]


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_torchopt_agrees(mode):
    torchopt = pytest.importorskip("torchopt", reason="torchopt is not installed")
    model, (x, y) = start(), data()
    names = [name for name, _ in model.named_parameters()]
    rate = torch.tensor(RATE, dtype=torch.float64, requires_grad=True)
    weights = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    optimizer = torchopt.sgd(lr=rate, momentum=MOMENTUM, moment_requires_grad=True)
    state = optimizer.init(weights)

    def loss(at):
        return LOSS(torch.func.functional_call(model, dict(zip(names, at, strict=True)), (x,)), y)

    for _ in range(STEPS):
        gradient = torch.autograd.grad(loss(weights), weights, create_graph=True)
        updates, state = optimizer.update(gradient, state, inplace=False)
        weights = torchopt.apply_updates(weights, updates, inplace=False)
    assert ours(mode) == pytest.approx(float(torch.autograd.grad(loss(weights), rate)[0]), rel=1e-10)


def test_higher_agrees():
    higher = pytest.importorskip("higher", reason="higher is not installed")
    model, (x, y) = start(), data()
    rate = torch.tensor(RATE, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    with higher.innerloop_ctx(model, optimizer, override={"lr": [rate]}) as (unrolled, steps):
        for _ in range(STEPS):
            steps.step(LOSS(unrolled(x), y))
        (theirs,) = torch.autograd.grad(LOSS(unrolled(x), y), rate)
    assert ours("forward") == pytest.approx(float(theirs), rel=1e-10)
