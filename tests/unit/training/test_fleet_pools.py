"""Fleets over pools, in chunks, with schedules, checkpoints and records of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.training.fleets.data import FleetFeed
from theodolite.training.schedules import epoch_order

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
    with pytest.raises(ValueError, match=r"step must be one that has a checkpoint: 0, 5, 8\. Got 4"):
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
    again = th.training.FleetTrace.load(tmp_path / "run")
    assert torch.equal(again.state(2, 1)["0.weight"], run.state(2, 1)["0.weight"])
    assert torch.equal(again.factors, run.factors)


WRONG = [
    ({"index": [[0, SIZE]] * R}, rf"index must lie in 0\.\.{SIZE - 1}"),
    ({"index": [[0, -1]] * R}, r"index must lie in"),
    ({"index": INDEX.double()}, r"index must hold whole numbers"),
    ({"index": INDEX[:2]}, rf"one list of samples per replica: {R}\. Got 2"),
    ({"index": INDEX, "shared": False}, r"leave shared at True"),
    ({"schedule": [1.0, 0.5]}, rf"one per replica: {R}\. Got 2"),
    ({"checkpoints": [9]}, r"checkpoints\[\d\] must be one of 0 \.\. 3\. Got 9"),
    ({"every": [1.5]}, r"every.* must be one of 0 \.\. 3"),
    ({"record": lambda step, fleet: {"wrong": torch.zeros(2)}}, rf"'wrong' must have one entry per replica, {R}"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fleet_of().train((X, Y), steps=3, progress=False, **options)


def test_memory_must_be_positive():
    with pytest.raises(ValueError, match="memory must be a positive number"):
        fleet_of(memory=0)


class Skipping(nn.Module):
    """A layer that is left out at random."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.first, self.extra, self.last, self.share = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3), share

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.training and torch.rand(()) < self.share:
            x = x + self.extra(x)
        return self.last(x)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.05}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_left_out_stays_as_it_is(kind):
    make, options = OPTIMIZERS[kind]
    fleet = th.Fleet(lambda seed: Skipping().double(), 3, loss=LOSS, optimizer=kind, rate=0.05, **options)
    run = fleet.train((X, Y), steps=12, progress=False)
    assert run.route == "loop"
    for r in range(3):
        torch.manual_seed(r)
        model = Skipping().double()
        optimizer = make(model.parameters(), lr=0.05, **options)
        torch.manual_seed(r)
        for _ in range(12):
            optimizer.zero_grad()  # to None, as torch does by default
            LOSS(model(X), Y).backward()
            optimizer.step()
        assert_is(fleet, r, model)


def test_steps_are_counted_for_each_parameter():
    """A head that joins at the third step has Adam's bias correction of a first step there."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.late = nn.Linear(5, 3), nn.Linear(5, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            return self.body(x) + (self.late(x) if x.shape[1] == 5 and len(x) == SIZE else 0)

    few = (X[:9], Y[:9])
    fleet = th.Fleet(lambda seed: Late().double(), 2, loss=LOSS, optimizer="adam", rate=0.05)
    fleet.train(few, steps=3, progress=False)
    run = fleet.train((X, Y), steps=3, progress=False)
    assert run.route == "vmap"
    torch.manual_seed(1)
    model = Late().double()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in [few] * 3 + [(X, Y)] * 3:
        adam.zero_grad()
        LOSS(model(x), y).backward()
        adam.step()
    assert_is(fleet, 1, model)


def test_settings_that_differ_between_replicas_are_refused():
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(5, 3), scale

        def forward(self, x):
            return self.scale * self.layer(x)

    with pytest.raises(
        ValueError, match=r"same architecture, but 'the model' is Scaled\(scale=1.0\) for seed 0 and Scaled\(scale=2.0\)"
    ):
        th.Fleet(lambda seed: Scaled(1.0 + seed), 2, loss=LOSS, rate=0.1)


def test_random_numbers_go_on_when_the_data_change():
    """Masks of a second call are those that follow, with other batches and other orders too."""
    make = lambda seed: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)).double()  # noqa: E731
    fleet = th.Fleet(make, [4], loss=LOSS, rate=0.1)
    fleet.train((X, Y), steps=2, progress=False)
    fleet.train((X[:11], Y[:11]), steps=2, order_seeds=9, progress=False)
    torch.manual_seed(4)
    model = make(4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    for x, y in [(X, Y)] * 2 + [(X[:11], Y[:11])] * 2:
        sgd.zero_grad()
        LOSS(model(x), y).backward()
        sgd.step()
    assert_is(fleet, 0, model)


@pytest.mark.parametrize("route", ["vmap", "loop"])
def test_whole_sets_of_a_pool_in_chunks(route):
    whole, parts = fleet_of(route=route), fleet_of(route=route, memory=8e3)
    a = whole.train((X, Y), index=INDEX, steps=6, progress=False)
    b = parts.train((X, Y), index=INDEX, steps=6, progress=False)
    assert any("chunks" in note for note in b.cost.notes)
    torch.testing.assert_close(a.loss, b.loss, rtol=0, atol=0)


def test_evaluation_in_parts_gives_the_same_outputs(monkeypatch):
    fleet = fleet_of(normed)
    fleet.train((X, Y), steps=3, progress=False)
    whole = fleet.outputs((X, Y))
    monkeypatch.setattr("theodolite.training.fleets.recorder.EVALUATED_BYTES", 20_000)
    parts = []
    original = FleetFeed.parts
    monkeypatch.setattr(FleetFeed, "parts", lambda self, width: parts.append(width) or original(self, width))
    torch.testing.assert_close(fleet.outputs((X, Y)), whole, rtol=1e-12, atol=1e-12)
    assert parts[0] < SIZE


def test_schedules_and_records_of_those_who_stay():
    """When the frozen have left the stack the others keep their own schedules, and a record sees all as they are."""
    rates = [1e12, 0.1, 1e12, 0.1, 0.1, 0.1]
    schedules = [{0: 1.0, 3: 0.1 * (r + 1)} for r in range(R)]
    fleet, seen = fleet_of(rate=rates), {}

    def record(step, fleet):
        seen[step] = {name: p.clone() for name, p in fleet.parameters.items()}
        return {}

    run = fleet.train((X, Y), steps=8, batch_size=WIDTH, schedule=schedules, record=record, every=[0, 6], progress=False)
    assert run.diverged == (True, False, True, False, False, False)
    assert sorted(seen) == [0, 6, 8]
    for r in (1, 4):
        rate = lambda step, r=r: 0.1 if step < 3 else 0.01 * (r + 1)  # noqa: E731
        assert_is(fleet, r, plain_loop(mlp, r, X, Y, steps=8, batch=WIDTH, order_seed=r, rate=rate))
        at_six = plain_loop(mlp, r, X, Y, steps=6, batch=WIDTH, order_seed=r, rate=rate)
        torch.testing.assert_close(seen[6]["0.weight"][r], at_six[0].weight.detach(), rtol=1e-10, atol=1e-10)


def test_a_stop_sees_nan_for_the_frozen():
    seen = []

    def stop(step, losses):
        seen.append(losses.isnan().tolist())
        return torch.tensor([step == 2, False, False])

    fleet_of(replicas=3, rate=[0.1, 1e12, 0.1]).train((X, Y), steps=6, stop=stop, progress=False)
    lost = next(i for i, row in enumerate(seen) if row[1])
    assert all(row[1] for row in seen[lost:])
    assert [row[0] for row in seen] == [False] * 3 + [True] * 3
    assert not any(row[2] for row in seen)


def test_a_number_of_steps_counts_from_zero_and_keeps_the_end():
    run = fleet_of().train((X, Y), steps=7, every=3, test=(X, Y), checkpoints=3, progress=False)
    assert run.measured_at == (0, 3, 6, 7)
    assert sorted(run.checkpoints) == [0, 3, 6, 7]
    ended = fleet_of().train((X, Y), steps=9, checkpoints=4, stop=lambda step, losses: step == 5, progress=False)
    assert sorted(ended.checkpoints) == [0, 4, ended.steps]


def test_a_checkpoint_with_tied_weights_becomes_a_module():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :3]

    fleet = th.Fleet(lambda seed: Tied().double(), 2, loss=LOSS, rate=0.1)
    run = fleet.train((X, Y), steps=5, checkpoints=[2], progress=False)
    model = fleet.model(1, run.checkpoints[2])
    assert model.b.weight is model.a.weight
    assert torch.equal(model.a.weight, run.checkpoints[2]["a.weight"][1])
    assert not torch.equal(model.a.weight, fleet.model(1).a.weight)
