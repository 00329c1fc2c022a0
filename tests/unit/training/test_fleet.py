"""A fleet gives the numbers of a plain loop over its replicas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import theodolite as th

SIZE, WIDTH = 23, 8
X = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.randint(0, 3, (SIZE,), generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(2)).double()
RATES = [0.02, 0.05, 0.1]


def factory(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def alone(seed: int, loss, data, optimizer, **kwargs):
    """One replica by `th.train`."""
    torch.manual_seed(seed)
    model = factory(seed)
    return model, th.train(model, loss, data, optimizer, seed=seed, progress=False, **kwargs)


def assert_same(
    fleet: th.Fleet, run: th.training.FleetTrace, r: int, model: nn.Module, trace: th.training.Trace, tol: float = 1e-10
) -> None:
    assert run[r].loss == pytest.approx(trace.loss, rel=tol, abs=tol)
    for name, p in model.named_parameters():
        torch.testing.assert_close(fleet.parameters[name][r], p.detach(), rtol=tol, atol=tol)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd damped": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {}),
    "adam with decay": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw with decay": (torch.optim.AdamW, {"betas": (0.7, 0.9), "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_numbers_of_torch(name):
    kind, options = OPTIMIZERS[name]
    fleet = th.Fleet(factory, [3, 4, 5], loss=nn.CrossEntropyLoss(), optimizer=kind.__name__.lower(), rate=RATES, **options)
    run = fleet.train((X, LABELS), epochs=5, batch_size=WIDTH, progress=False)
    assert run.route == "vmap"
    assert run.loss.shape == (3, 15)
    for r, seed in enumerate(fleet.seeds):
        make = lambda p, r=r: kind(p, lr=RATES[r], **options)  # noqa: E731
        assert_same(fleet, run, r, *alone(seed, nn.CrossEntropyLoss(), (X, LABELS), make, epochs=5, batch_size=WIDTH))


def test_a_function_that_makes_a_torch_optimizer_is_read():
    fleet = th.Fleet(factory, 2, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    run = fleet.train((X, VALUES), steps=6, progress=False)
    assert run.rates.tolist() == [0.1, 0.1]
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    assert_same(fleet, run, 1, *alone(1, nn.MSELoss(), (X, VALUES), make, steps=6))


LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), LABELS),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), LABELS),
    "cross entropy, weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double()), LABELS),
    "cross entropy, some labels ignored": (nn.CrossEntropyLoss(), torch.where(torch.arange(SIZE) % 5 == 0, -100, LABELS)),
    "cross entropy, class 0 ignored": (nn.CrossEntropyLoss(ignore_index=0), LABELS),
    "cross entropy, soft labels": (nn.CrossEntropyLoss(), VALUES.softmax(1)),
    "squared error": (nn.MSELoss(), VALUES),
    "squared error, summed": (nn.MSELoss(reduction="sum"), VALUES),
    "a function": (lambda output, target: F.smooth_l1_loss(output, target), VALUES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_give_the_numbers_of_a_loop(name):
    loss, targets = LOSSES[name]
    fleet = th.Fleet(factory, [0, 1], loss=loss, rate=0.01)
    run = fleet.train((X, targets), steps=8, batch_size=9, progress=False)
    assert run.route == "vmap"
    for r in range(2):
        make = lambda p: torch.optim.SGD(p, lr=0.01)  # noqa: E731
        assert_same(fleet, run, r, *alone(r, loss, (X, targets), make, steps=8, batch_size=9))


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(2, 5)),
    replicas=st.integers(1, 4),
    batch=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 10**6),
)
def test_any_sizes_give_the_numbers_of_a_loop(sizes, replicas, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(11, sizes[0], generator=generator).double()
    y = torch.randint(0, sizes[2], (11,), generator=generator)
    make = lambda s: nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2])).double()  # noqa: E731
    fleet = th.Fleet(make, range(seed, seed + replicas), loss=nn.CrossEntropyLoss(), rate=0.1, momentum=0.5)
    run = fleet.train((x, y), steps=5, batch_size=batch, progress=False)
    r = seed % replicas
    torch.manual_seed(seed + r)
    model = make(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    trace = th.train(model, nn.CrossEntropyLoss(), (x, y), sgd, steps=5, batch_size=batch, seed=seed + r, progress=False)
    assert_same(fleet, run, r, model, trace)


def test_own_data_per_replica():
    x = torch.stack([X, X.flip(0), 2 * X])
    y = torch.stack([LABELS, LABELS, (LABELS + 1) % 3])
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    for data in ((x, y), [(x[r], y[r]) for r in range(3)]):
        for width in (None, WIDTH):
            fleet = th.Fleet(factory, 3, loss=nn.CrossEntropyLoss(), rate=0.1)
            run = fleet.train(data, steps=7, batch_size=width, shared=False, progress=False)
            for r in range(3):
                assert_same(fleet, run, r, *alone(r, nn.CrossEntropyLoss(), (x[r], y[r]), make, steps=7, batch_size=width))


def test_own_targets_for_shared_inputs():
    y = torch.stack([LABELS, (LABELS + 1) % 3])
    fleet = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), rate=0.1)
    run = fleet.train((X, y), steps=7, batch_size=WIDTH, shared="inputs", order_seeds=9, progress=False)
    both = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), rate=0.1)
    same = both.train((X.expand(2, -1, -1), y), steps=7, batch_size=WIDTH, shared=False, order_seeds=[9, 9], progress=False)
    torch.testing.assert_close(run.loss, same.loss, rtol=1e-12, atol=0)


def test_equal_orders_share_the_batch():
    from theodolite.problem.batches import BatchParser
    from theodolite.training.fleets.data import FleetFeed

    parse = BatchParser(own_loss=False, target_key="labels")
    options = {"shared": True, "batch_size": 4, "parse": parse, "device": torch.device("cpu")}
    shared = FleetFeed((X, LABELS), 3, order_seeds=[5, 5, 5], **options).batch(0, 0)
    assert shared.dims == [None, None]
    assert shared.leaves[0].shape == (4, 5)
    own = FleetFeed((X, LABELS), 3, order_seeds=[5, 6, 7], **options)
    assert own.batch(0, 0).leaves[0].shape == (3, 4, 5)
    assert own.batch(0, own.batches - 1).size == SIZE % 4
    torch.testing.assert_close(own.batch(0, 0).leaves[0][0], shared.leaves[0])
    # Every sample once per epoch, in another order in the next.
    seen = torch.cat([own.batch(0, place).leaves[1][1] for place in range(own.batches)])
    assert sorted(seen.tolist()) == sorted(LABELS.tolist())
    assert not torch.equal(own.batch(0, 0).leaves[0], own.batch(1, 0).leaves[0])


def test_a_further_call_goes_on():
    once = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), optimizer="adam", rate=0.05)
    whole = once.train((X, LABELS), epochs=6, batch_size=WIDTH, progress=False)
    twice = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), optimizer="adam", rate=0.05)
    parts = [twice.train((X, LABELS), epochs=epochs, batch_size=WIDTH, progress=False) for epochs in (2, 4)]
    torch.testing.assert_close(torch.cat([part.loss for part in parts], dim=1), whole.loss, rtol=1e-12, atol=0)
    assert parts[1].epoch[0] == 2


def test_the_schedule_multiplies_the_rates():
    fleet = th.Fleet(factory, 2, loss=nn.MSELoss(), rate=[0.1, 0.2])
    run = fleet.train((X, VALUES), steps=4, schedule={0: 1.0, 2: 0.5}, progress=False)
    assert run[1].rate == (0.2, 0.2, 0.1, 0.1)
    model, trace = alone(1, nn.MSELoss(), (X, VALUES), torch.optim.SGD, steps=4, schedule={0: 0.2, 2: 0.1})
    assert_same(fleet, run, 1, model, trace)


def test_replicas_are_modules_of_their_own():
    fleet = th.Fleet(factory, 3, loss=nn.MSELoss(), rate=0.1)
    model = fleet.model(2)
    torch.manual_seed(2)
    for mine, made in zip(model.parameters(), factory(2).parameters(), strict=True):
        assert torch.equal(mine, made)
        mine.data.zero_()
    assert bool((fleet.parameters["0.weight"][2] != 0).any())
    assert len(fleet) == 3
    with pytest.raises(ValueError, match=r"replica must be one of 0 \.\. 2\. Got 3"):
        fleet.model(3)


def test_measures_test_data_and_the_final_loss():
    def norm(parameters, buffers):
        return sum(p.square().sum() for p in parameters.values()).sqrt()

    def rank(parameters, buffers):
        return float(torch.linalg.matrix_rank(parameters["0.weight"]))  # needs a number: cannot be vectorised

    fleet = th.Fleet(factory, [0, 1], loss=nn.CrossEntropyLoss(), rate=0.1)
    before = fleet.model(1)
    run = fleet.train(
        (X, LABELS),
        steps=7,
        batch_size=WIDTH,
        test=(X[:10], LABELS[:10]),
        measure={"norm": norm, "rank": rank, "bias": lambda p, b: p["2.bias"]},
        every=3,
        evaluate=True,
        progress=False,
    )
    after = fleet.model(1)
    assert run.measured_at == (0, 3, 6, 7)
    for place, model in ((0, before), (-1, after)):
        outputs = model(X[:10])
        assert run.test_loss[1, place].item() == pytest.approx(F.cross_entropy(outputs, LABELS[:10]).item())
        assert run.test_accuracy[1, place].item() == pytest.approx((outputs.argmax(1) == LABELS[:10]).double().mean().item())
        assert run.measured["norm"][1, place].item() == pytest.approx(norm(dict(model.named_parameters()), {}).item())
    assert run.measured["rank"].tolist() == [[5.0] * 4] * 2
    assert run.measured["bias"].shape == (2, 4, 3)
    assert run.final_loss[1].item() == pytest.approx(F.cross_entropy(after(X), LABELS).item())
    steps, values = run[1].column("test_loss")
    assert steps == [0, 3, 6]
    assert values == run.test_loss[1, :3].tolist()


def test_accuracy_of_one_hot_and_signed_targets():
    one_hot = F.one_hot(LABELS, 3).double()
    fleet = th.Fleet(factory, 2, loss=nn.MSELoss(), rate=0.1)
    run = fleet.train((X, one_hot), steps=2, test=(X, one_hot), progress=False)
    right = (fleet.model(0)(X).argmax(1) == LABELS).double().mean().item()
    assert run.test_accuracy[0, -1].item() == pytest.approx(right)
    signs = torch.where(LABELS[:, None] > 0, 1.0, -1.0).double()
    single = th.Fleet(lambda seed: nn.Linear(5, 1).double(), 2, loss=nn.MSELoss(), rate=0.1)
    run = single.train((X, signs), steps=2, test=(X, signs), progress=False)
    right = ((single.model(0)(X) > 0) == (signs > 0)).double().mean().item()
    assert run.test_accuracy[0, -1].item() == pytest.approx(right)
    assert th.Fleet(factory, 2, loss=nn.MSELoss(), rate=0.1).train((X, VALUES), steps=1, test=(X, VALUES)).test_accuracy is None


def test_large_test_sets_are_evaluated_in_parts(monkeypatch):
    from theodolite.training.fleets import recorder

    whole = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), rate=0.1).train((X, LABELS), steps=1, test=(X, LABELS))
    monkeypatch.setattr(recorder, "EVALUATED_AT_ONCE", 10)
    parts = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), rate=0.1).train((X, LABELS), steps=1, test=(X, LABELS))
    torch.testing.assert_close(parts.test_loss, whole.test_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.test_accuracy, whole.test_accuracy)


def test_the_trace_prints_becomes_rows_and_comes_back(tmp_path):
    fleet = th.Fleet(factory, [7, 8], loss=nn.CrossEntropyLoss(), rate=[0.1, 1e12])
    run = fleet.train((X, LABELS), steps=5, test=(X, LABELS), every=2, progress=False)
    assert len(run) == 2
    assert "1 diverged" in str(run)
    rows = run.rows()
    assert [row["seed"] for row in rows] == [7, 8]
    assert rows[1]["diverged_at"] == 1
    assert len(run.step_rows()) == 5 + 2
    assert [trace.seed for trace in run] == [7, 8]
    run.save(tmp_path / "run")
    back = th.training.FleetTrace.load(tmp_path / "run")
    assert torch.equal(back.loss, run.loss)
    assert back.rows() == rows
    assert back.diverged_at == run.diverged_at
