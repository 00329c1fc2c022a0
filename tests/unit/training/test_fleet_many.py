"""Fleets over pools, in chunks, with schedules, checkpoints and records of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.training.feeding import epoch_order

SIZE, WIDTH, R = 23, 8, 6
X = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (SIZE,), generator=torch.Generator().manual_seed(1))
LOSS = nn.CrossEntropyLoss()
INDEX = torch.stack([torch.randperm(SIZE, generator=torch.Generator().manual_seed(r))[:14] for r in range(R)])


def mlp(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def normed(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()


def fleet_of(make=mlp, replicas=R, rate=0.1, **options) -> th.Fleet:
    return th.Fleet(make, replicas, loss=LOSS, rate=rate, momentum=0.9, **options)


def plain_loop(make, seed, x, y, *, steps, batch, order_seed, drop_last=False, rate=lambda step: 0.1):
    """A training loop written out, with torch's own optimizer."""
    torch.manual_seed(seed)
    model = make(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = len(x) // batch if drop_last else -(-len(x) // batch)
    for step in range(steps):
        epoch, place = divmod(step, batches)
        rows = epoch_order(order_seed, epoch, len(x))[place * batch : (place + 1) * batch]
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        LOSS(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def assert_is(fleet: th.Fleet, r: int, model: nn.Module, tol: float = 1e-10) -> None:
    for name, t in fleet.model(r).state_dict().items():
        torch.testing.assert_close(t, model.state_dict()[name], rtol=tol, atol=tol)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [mlp, normed])
def test_each_replica_trains_on_its_samples_of_the_pool(make, drop_last):
    fleet = fleet_of(make)
    run = fleet.train((X, Y), index=INDEX, steps=9, batch_size=4, drop_last=drop_last, progress=False)
    assert run.epoch == tuple(step // (3 if drop_last else 4) for step in range(9))
    for r in (0, R - 1):
        x, y = X[INDEX[r]], Y[INDEX[r]]
        assert_is(fleet, r, plain_loop(make, r, x, y, steps=9, batch=4, order_seed=r, drop_last=drop_last))


def test_one_order_for_all_samples_of_the_pool():
    fleet = fleet_of()
    fleet.train((X, Y), index=INDEX, steps=7, batch_size=4, order_seeds=3, progress=False)
    assert_is(fleet, 2, plain_loop(mlp, 2, X[INDEX[2]], Y[INDEX[2]], steps=7, batch=4, order_seed=3))


def test_a_list_of_samples_for_all_is_that_part_of_the_data():
    few = [4, 1, 17, 8]
    one, other = fleet_of(), fleet_of()
    a = one.train((X, Y), index=few, steps=5, evaluate=True, progress=False)
    b = other.train((X[few], Y[few]), steps=5, evaluate=True, progress=False)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.final_loss, b.final_loss, rtol=1e-12, atol=0)


def test_outputs_of_the_pool_are_those_of_the_models():
    fleet = fleet_of(normed)
    fleet.train((X, Y), index=INDEX, steps=5, batch_size=4, progress=False)
    some = fleet.outputs((X, Y), index=INDEX[[1, 4]], replicas=[1, 4])
    for row, r in enumerate((1, 4)):
        torch.testing.assert_close(some[row], fleet.model(r).eval()(X[INDEX[r]]).detach(), rtol=1e-12, atol=1e-12)
    assert fleet.outputs((X, Y)).shape == (R, SIZE, 3)


def test_each_replica_has_its_schedule():
    schedules = [None, {0: 1.0, 3: 0.1}, lambda step: 1 / (1 + step), 0.5, {0: 1.0}, {0: 0.0}]
    fleet = fleet_of()
    run = fleet.train((X, Y), steps=6, batch_size=WIDTH, schedule=schedules, progress=False)
    assert run.factors.shape == (R, 6)
    rates = {1: lambda step: 0.1 if step < 3 else 0.01, 2: lambda step: 0.1 / (1 + step), 3: lambda step: 0.05}
    for r, rate in rates.items():
        assert_is(fleet, r, plain_loop(mlp, r, X, Y, steps=6, batch=WIDTH, order_seed=r, rate=rate))
        assert run[r].rate == pytest.approx([rate(step) for step in range(6)])
    torch.manual_seed(5)
    assert_is(fleet, 5, mlp(5))


def test_checkpoints_are_the_weights_of_a_shorter_run():
    whole = fleet_of(normed)
    run = whole.train((X, Y), steps=8, batch_size=WIDTH, checkpoints=[0, 5, 8], progress=False)
    assert sorted(run.checkpoints) == [0, 5, 8]
    short = fleet_of(normed)
    short.train((X, Y), steps=5, batch_size=WIDTH, progress=False)
    model = normed(0)
    model.load_state_dict(run.state(5, 3))
    assert_is(short, 3, model, tol=0)
    assert_is(whole, 3, _loaded(normed(0), run.state(8, 3)), tol=0)
    with pytest.raises(ValueError, match=r"no checkpoint after 4 steps; there are: 0, 5, 8"):
        run.state(4, 0)


def _loaded(model: nn.Module, state) -> nn.Module:
    model.load_state_dict(state)
    return model


def test_a_record_sees_the_fleet_at_the_steps_asked_for():
    fleet = fleet_of(rate=[0.1, 0.1, 1e12, 0.1, 0.1, 0.1])
    seen = []

    def record(step, fleet):
        seen.append(step)
        return {"size": sum(p.flatten(1).square().sum(1) for p in fleet.parameters.values()), "out": fleet.outputs((X, Y))[:, 0]}

    run = fleet.train((X, Y), steps=7, batch_size=WIDTH, record=record, every=[2, 5], progress=False)
    assert seen == [2, 5, 7] == list(run.measured_at)
    assert run.measured["out"].shape == (R, 3, 3)
    assert run.diverged[2]
    short = fleet_of()
    short.train((X, Y), steps=5, batch_size=WIDTH, progress=False)
    expected = sum(float(p[1].square().sum()) for p in short.parameters.values())
    assert float(run.measured["size"][1, 1]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("make", "tol"), [(mlp, 0.0), (normed, 1e-12)])  # batch norm rounds the end of a stack in its own way
def test_chunks_give_the_same_numbers(make, tol):
    rates = [0.1, 0.2, 1e9, 0.05, 0.1, 0.3]
    whole, parts = fleet_of(make, rate=rates), fleet_of(make, rate=rates, memory=8e3)
    options = {"steps": 12, "batch_size": 4, "test": (X, Y), "every": 5, "checkpoints": [6], "progress": False, "index": INDEX}
    a = whole.train((X, Y), **options)
    b = parts.train((X, Y), **options)
    assert any("chunks" in note for note in b.cost.notes)
    assert not a.cost.notes
    assert a.diverged_at == b.diverged_at
    assert a.diverged_at[2] is not None
    torch.testing.assert_close(a.loss, b.loss, rtol=tol, atol=tol)
    torch.testing.assert_close(a.test_loss, b.test_loss, rtol=tol, atol=tol, equal_nan=True)
    for name, t in a.checkpoints[6].items():
        torch.testing.assert_close(t, b.checkpoints[6][name], rtol=tol, atol=tol, equal_nan=True)


def test_a_stop_sees_each_chunk_with_all_places():
    whole, parts = fleet_of(), fleet_of(memory=8e3)
    rule = lambda step, losses: torch.arange(R) < step  # noqa: E731
    a = whole.train((X, Y), steps=12, stop=rule, progress=False)
    b = parts.train((X, Y), steps=12, stop=rule, progress=False)
    assert a.stopped_at == b.stopped_at == (1, 2, 3, 4, 5, 6)
    assert a.steps == b.steps == 7
    torch.testing.assert_close(a.loss, b.loss, rtol=0, atol=0)


def test_a_factory_may_take_nothing():
    torch.manual_seed(2)
    expected = nn.Linear(3, 2).weight
    fleet = th.Fleet(lambda: nn.Linear(3, 2), [1, 2], loss=nn.MSELoss(), rate=0.1)
    assert torch.equal(fleet.parameters["weight"][1], expected)
    assert not torch.equal(fleet.parameters["weight"][0], expected)


def test_a_trace_with_checkpoints_is_kept_on_disk(tmp_path):
    run = fleet_of().train((X, Y), steps=4, checkpoints=[2], schedule=[1.0] * R, progress=False)
    run.save(tmp_path / "run")
    again = th.FleetTrace.load(tmp_path / "run")
    assert torch.equal(again.state(2, 1)["0.weight"], run.state(2, 1)["0.weight"])
    assert torch.equal(again.factors, run.factors)


WRONG = [
    ({"index": [[0, SIZE]] * R}, rf"index must lie in 0\.\.{SIZE - 1}"),
    ({"index": [[0, -1]] * R}, r"index must lie in"),
    ({"index": INDEX.double()}, r"index must hold whole numbers"),
    ({"index": INDEX[:2]}, rf"one list of samples per replica: {R}\. Got 2"),
    ({"index": INDEX, "shared": False}, r"leave shared at True"),
    ({"schedule": [1.0, 0.5]}, rf"one per replica: {R}\. Got 2"),
    ({"checkpoints": [9]}, r"checkpoints must list steps of the run, 0\.\.3\. Got 9"),
    ({"every": [1.5]}, r"every must list steps"),
    ({"record": lambda step, fleet: {"wrong": torch.zeros(2)}}, rf"'wrong' must have one entry per replica, {R}"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fleet_of().train((X, Y), steps=3, progress=False, **options)


def test_memory_must_be_positive():
    with pytest.raises(ValueError, match=r"memory must be a positive number of bytes"):
        fleet_of(memory=0)
