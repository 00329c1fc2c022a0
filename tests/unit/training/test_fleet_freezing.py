"""Replicas that diverge or converge are frozen; their neighbours do not notice, to the last bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.results import Outcome
from theodolite.training.fleets.run import FleetRun

SIZE = 48
X = torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 8, (SIZE,), generator=torch.Generator().manual_seed(1))


def factory(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def crashing(seed: int) -> nn.Module:
    """Seed 9 starts with weights that give NaN at once."""
    model = factory(seed)
    if seed == 9:
        nn.init.constant_(model[0].weight, math.nan)
    return model


def fly(seeds, rates, make=factory, **kwargs):
    options = {"optimizer": "sgd", "momentum": 0.9} | {
        k: kwargs.pop(k) for k in ("optimizer", "route", "momentum") if k in kwargs
    }
    fleet = th.Fleet(make, seeds, loss=nn.CrossEntropyLoss(), rate=rates, **options)
    return fleet, fleet.train((X, Y), **{"steps": 24, "batch_size": 16, "progress": False} | kwargs)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("batch_size", [16, None])
def test_neighbours_of_a_diverging_replica_stay_bitwise_intact(kind, batch_size):
    momentum = 0.9 if kind == "sgd" else None
    calm, reference = fly([0, 1, 2, 3], [0.1, 0.1, 0.05, 0.2], optimizer=kind, momentum=momentum, batch_size=batch_size)
    wild, run = fly([0, 1, 2, 3], [0.1, 1e30, 0.05, 0.2], optimizer=kind, momentum=momentum, batch_size=batch_size)
    fewer, without = fly([0, 2, 3], [0.1, 0.05, 0.2], optimizer=kind, momentum=momentum, batch_size=batch_size)
    assert run.diverged == (False, True, False, False)
    assert torch.equal(run.loss[[0, 2, 3]], reference.loss[[0, 2, 3]])
    assert torch.equal(run.loss[[0, 2, 3]], without.loss)
    for name, p in wild.parameters.items():
        assert torch.equal(p[[0, 2, 3]], calm.parameters[name][[0, 2, 3]])
        assert torch.equal(p[[0, 2, 3]], fewer.parameters[name])


def test_odd_sizes_do_not_let_a_neighbour_in():
    """At the same place in the stack the bits are the same, whatever stands beside."""
    odd = lambda seed: nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Linear(37, 9))  # noqa: E731
    _, calm = fly(range(5), 0.1, make=odd, batch_size=11)
    _, run = fly(range(5), [0.1, 1e30, 0.1, 0.1, 1e30], make=odd, batch_size=11)
    kept = [0, 2, 3]
    assert run.diverged == (False, True, False, False, True)
    assert torch.equal(run.loss[kept], calm.loss[kept])


def test_a_diverged_replica_keeps_the_weights_at_which_that_was_seen():
    fleet, run = fly([0, 1], [0.1, 1e30])
    at = run.diverged_at[1]
    assert at == 1
    assert run.diverged_at[0] is None
    short, _ = fly([0, 1], [0.1, 1e30], steps=at)
    for name, p in fleet.parameters.items():
        assert torch.equal(p[1], short.parameters[name][1])
    assert bool(torch.isinf(run.loss[1, at:]).all())
    assert not bool(torch.isnan(run.loss).any())
    assert run[1].outcome is Outcome.DIVERGED
    assert run[1].diverged
    assert run[1].steps == at + 1
    assert run.outcome is Outcome.FINISHED


def test_nan_from_the_start():
    _, run = fly([0, 9, 2], 0.1, make=crashing, test=(X, Y), every=6)
    assert run.diverged_at == (None, 0, None)
    assert bool(torch.isinf(run.loss[1]).all())
    assert torch.isnan(run.test_loss[1, 1:-1]).all()
    assert math.isinf(run.test_loss[1, -1])  # a loss that is no number is reported as infinite
    _, without = fly([0, 2], 0.1, make=crashing)
    assert torch.equal(run.loss[[0, 2]], without.loss)


def test_a_large_but_finite_loss_counts_as_diverged():
    x = torch.ones(1, 1)
    fleet = th.Fleet(lambda seed: nn.Linear(1, 1, bias=False), 2, loss=nn.MSELoss(), rate=[0.25, 2.0])
    run = fleet.train((x, 0 * x), steps=20, blow_up=1e3, progress=False)
    assert run.diverged_at == (None, 4)  # the weight triples, the loss grows ninefold: 9⁴ > 1000
    again = fleet.train((x, 0 * x), steps=3, progress=False)  # what is lost stays lost
    assert again.diverged_at == (None, 0)
    assert again.loss[0, 0] < run.loss[0, -1]


def test_frozen_replicas_leave_the_stack_unnoticed(monkeypatch):
    sizes: list[int] = []
    original = FleetRun.step
    monkeypatch.setattr(FleetRun, "step", lambda self, *a: (original(self, *a), sizes.append(len(self.live.rate)))[0])
    rates = [0.1, 1e30, 0.2, 1e30, 0.05, 1e30]
    dropped, run = fly(range(6), rates)
    monkeypatch.setattr("theodolite.training.fleets.run.DROP_SHARE", 2.0)
    held, same = fly(range(6), rates)
    assert sizes[0] == 6
    assert sizes[23] == 3, "three replicas of these sizes should have left the stack"
    assert sizes[24:] == [6] * 24
    assert torch.equal(run.loss, same.loss)
    for name, p in dropped.parameters.items():
        assert torch.equal(p, held.parameters[name])


def test_nobody_leaves_where_it_would_be_noticed(monkeypatch):
    monkeypatch.setattr("theodolite.training.fleets.run.same_bits_without", lambda *a: False)
    _, run = fly(range(4), [0.1, 1e30, 0.2, 1e30])
    assert run.diverged == (False, True, False, True)
    _, without = fly([0, 2], [0.1, 0.2])
    assert torch.equal(run.loss[[0, 2]], without.loss)


def test_the_loop_freezes_too():
    _, run = fly(range(4), [0.1, 1e30, 0.2, 1e30], route="loop")
    _, without = fly([0, 2], [0.1, 0.2], route="loop")
    assert run.route == "loop"
    assert run.diverged == (False, True, False, True)
    assert torch.equal(run.loss[[0, 2]], without.loss)


def test_until_and_stop():
    x = torch.ones(1, 1)
    line = lambda seed: nn.Linear(1, 1, bias=False)  # noqa: E731
    fleet = th.Fleet(line, 3, loss=nn.MSELoss(), rate=[0.25, 0.05, 0.25])
    run = fleet.train((x, 0 * x), steps=50, until=1e-3, progress=False)
    assert run.stopped_at == (5, 33, 5)  # the loss falls by 1/4 and by 0.81 a step
    assert run.steps == 34  # all are frozen: no further step
    assert torch.equal(run.loss[0, 5:], run.loss[0, 5].expand(29))
    assert run[0].steps == 6
    assert "rule" in run[0].stopped
    fleet = th.Fleet(line, 3, loss=nn.MSELoss(), rate=0.25)
    run = fleet.train((x, 0 * x), steps=50, stop=lambda step, losses: torch.tensor([step >= 2, step >= 4, False]), progress=False)
    assert run.stopped_at == (2, 4, None)
    assert run.steps == 50
    run = fleet.train((x, 0 * x), steps=50, stop=lambda step, losses: step == 3, progress=False)
    assert run.stopped_at == (3, 3, 3)
    assert run.steps == 4


def test_a_fleet_that_diverged_as_a_whole_says_so():
    fleet, run = fly([0, 1], 1e30)
    assert run.outcome is Outcome.DIVERGED
    assert run.steps == 2
    with pytest.raises(ValueError, match="make a new fleet"):
        fleet.train((X, Y), steps=1)


def test_equal_replicas_stay_bitwise_equal():
    fleet, run = fly([5] * 7, 0.1)
    assert torch.equal(run.loss, run.loss[:1].expand_as(run.loss))
    for p in fleet.parameters.values():
        assert torch.equal(p, p[:1].expand_as(p))


ODD = """
import torch, theodolite as th
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(100, 61), torch.randint(0, 10, (100,))
net = lambda seed: nn.Sequential(nn.Linear(61, 37), nn.ReLU(), nn.Linear(37, 37), nn.ReLU(), nn.Linear(37, 10))
for kind, more in (("sgd", {"momentum": 0.9, "weight_decay": 0.01}), ("adamw", {})):
    for shared in (True, False):
        seeds = [3] * 11
        data = (x, y) if shared else (x.repeat(11, 1, 1), y.repeat(11, 1))
        fleet = th.Fleet(net, seeds, loss=nn.CrossEntropyLoss(), optimizer=kind, rate=0.01, route="vmap", **more)
        run = fleet.train(data, steps=12, batch_size=33, shared=shared, progress=False)
        assert torch.equal(run.loss, run.loss[:1].expand_as(run.loss)), (kind, shared, "losses")
        for name, p in fleet.parameters.items():
            assert torch.equal(p, p[:1].expand_as(p)), (kind, shared, name)
rates = [0.1, 0.1, 1e30, 0.1, 1e30, 0.1, 1e30]
fleet = th.Fleet(net, [3] * 7, loss=nn.CrossEntropyLoss(), rate=rates, route="vmap")
run = fleet.train((x, y), steps=30, batch_size=33, progress=False)
assert torch.equal(run.loss[[0, 3, 5]], run.loss[1:2].expand(3, -1))
"""


def test_equal_replicas_of_odd_sizes_stay_bitwise_equal():
    """Sizes that fill no cache line: equal bits need MKL's strict mode, which must be set before torch starts."""
    environment = {**os.environ, "MKL_CBWR": "AUTO,STRICT", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ODD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
