"""Training of stacked networks: steps, orders, critical rates, the best point; raises of the rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.experiments.catapult_features.stacked_networks import (
    LATEST,
    PATIENCE,
    QUIET,
    CriticalRates,
    Points,
    Raises,
    Splits,
    StackedNetworks,
    batches,
    critical_rate,
    descend_with_raises,
    loss_gradient,
    sgd_step,
    train,
)
from theodolite.experiments.catapult_features.tasks import (
    ReferenceNetwork,
    Setting,
    TaskStudy,
    alignments,
    flipped,
    images,
    prepare,
)
from theodolite.models import ntk_fcn


def points(n, *, d=5, replicas=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(replicas, n, d, dtype=dtype, generator=generator)
    return Points(x, x[:, :, 0] * x[:, :, -1])


def stack(replicas=2, *, d=5, width=16, dtype=torch.float64):
    models = [ntk_fcn(d, width, 2, seed=s).to(dtype) for s in range(replicas)]
    return models, StackedNetworks(models)


def test_a_step_is_that_of_sgd_with_its_own_rate_for_each_network():
    models, networks = stack()
    batch, rates = points(6), torch.tensor([0.3, 0.05], dtype=torch.float64)
    edges = sgd_step(networks, batch.x, batch.y, rates, CriticalRates())
    for r, model in enumerate(models):
        loss = nn.functional.mse_loss(model(batch.x[r])[:, 0], batch.y[r])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        wanted = [p - rates[r] * g for p, g in zip(model.parameters(), gradients, strict=True)]
        for mine, there in zip(networks.model(r).parameters(), wanted, strict=True):
            torch.testing.assert_close(mine, there, rtol=1e-10, atol=1e-12)
        kernel = StackedNetworks([model]).kernel(StackedNetworks([model]).passes(batch.x[r : r + 1]))[0]
        assert float(edges[r]) == pytest.approx(6 / float(torch.linalg.eigvalsh(kernel)[-1]), rel=1e-10)


def test_large_batches_take_the_same_step_and_find_the_same_edge(monkeypatch):
    batch, rates = points(300), torch.tensor([0.3, 0.1], dtype=torch.float64)
    _, small = stack()
    _, large = stack()
    by_products = sgd_step(large, batch.x, batch.y, rates, CriticalRates())
    monkeypatch.setattr("theodolite.experiments.catapult_features.stacked_networks.LARGEST_KERNEL", 10**6)
    by_kernel = sgd_step(small, batch.x, batch.y, rates, CriticalRates())
    torch.testing.assert_close(by_products, by_kernel, rtol=1e-4, atol=0.0)
    for mine, theirs in zip(large.tensors, small.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_loss_and_gradient_over_chunks():
    models, networks = stack()
    batch = points(600)
    losses = loss_gradient(networks, batch.x, batch.y)
    for r, model in enumerate(models):
        loss = nn.functional.mse_loss(model(batch.x[r])[:, 0], batch.y[r])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert float(losses[r]) == pytest.approx(loss.item(), rel=1e-10)
        for tensor, gradient in zip(networks.tensors, gradients, strict=True):
            torch.testing.assert_close(tensor.grad[r], gradient, rtol=1e-9, atol=1e-11)


def test_an_epoch_holds_every_point_once_in_an_order_of_its_own():
    data = points(10, d=1)
    feed = batches(data, 3, [4, 5])
    parts = [next(feed)[0][:, :, 0] for _ in range(4)]
    assert [part.shape[1] for part in parts] == [3, 3, 3, 1]
    seen = torch.cat(parts, 1)
    assert torch.equal(seen.sort(1).values, data.x[:, :, 0].sort(1).values)
    assert not torch.equal(seen[0], data.x[0, :, 0])
    assert torch.equal(next(batches(data, 10, [4, 5]))[0], data.x)


def trained(**changes):
    _, networks = stack(width=32)
    splits = Splits(points(40), points(60, seed=1), points(60, seed=2))
    settings = {"rates": torch.tensor([1.0, 1.0], dtype=torch.float64), "batch": 5, "steps": 60, "check": 10, "seeds": [0, 1]}
    return networks, splits, train(networks, splits, **{**settings, **changes})


def test_the_best_weights_are_those_of_the_lowest_validation_loss():
    _, splits, history = trained()
    for r in range(2):
        mine = [row for row in history.curves if row["replica"] == r]
        best = min(mine, key=lambda row: row["validation"])
        assert (best["step"], best["validation"]) == (int(history.best_step[r]), float(history.best_loss[r]))
    torch.testing.assert_close(splits.validation.loss(history.best), history.best_loss)


def test_supercritical_steps_are_counted_up_to_the_best_point():
    _, _, history = trained()
    flags = torch.stack(history.exceeded)
    for r in range(2):
        to_best, in_all = history.catapults(r)
        assert to_best == int(flags[: history.best_step[r], r].sum())
        assert in_all == int(flags[:, r].sum())
    _, _, gentle = trained(rates=torch.full((2,), 1e-6, dtype=torch.float64))
    assert gentle.catapults(0) == (0, 0)


def test_a_run_stops_at_the_wanted_loss_and_a_lost_network_harms_nobody():
    _, _, done = trained(until=math.inf)
    assert done.steps.tolist() == [0, 0]
    _, _, history = trained(rates=torch.tensor([1e6, 0.5], dtype=torch.float64))
    _, _, alone = trained(rates=torch.tensor([0.1, 0.5], dtype=torch.float64))
    assert history.diverged.tolist() == [True, False]
    assert float(history.best_loss[1]) == pytest.approx(float(alone.best_loss[1]), rel=1e-12)


def test_a_network_that_has_stopped_stays_where_it_is():
    networks, splits, history = trained(steps=400, until=0.2, rates=torch.tensor([1.0, 1e-3], dtype=torch.float64))
    assert int(history.steps[0]) < int(history.steps[1])
    assert float(splits.train.loss(networks)[0]) == pytest.approx(float(history.final_loss[0]), rel=1e-12)


def test_torch_optimizers_act_on_each_network_alone():
    networks, _, _ = trained(rates=None, optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.01), batch=40, steps=5)
    models, _ = stack(width=32)
    data = points(40)
    for r, model in enumerate(models):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data.x[r])[:, 0], data.y[r]).backward()
            optimizer.step()
        for mine, there in zip(networks.model(r).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, there, rtol=1e-7, atol=1e-9)


# Raises


def two(values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_table_of_raises_is_followed_by_those_who_are_told_to():
    raises = Raises(torch.tensor([0, 1, 2]), two([1.0, 1.0, 1.0]), table=[(3, 2.0), (5, 4.0)])
    seen = []
    for step in range(7):  # the loss stays above that at the raise: no catapult is over
        raises.due(step, two([1.0 + step] * 3), two([10.0] * 3))
        seen.append(raises.rates.tolist())
    assert seen[2] == [QUIET] * 3
    assert seen[3] == [QUIET, 2.0, 2.0]
    assert seen[6] == [QUIET, 2.0, 4.0]
    assert raises.until(1e-3).tolist() == pytest.approx([1e-3] * 3)


def test_a_raise_by_itself_waits_and_a_catapult_that_is_over_is_calmed():
    raises = Raises(torch.tensor([1]), two([1.0]), factor=1.5)
    due = [bool(raises.due(step, two([1.0]), two([1.0]))) for step in range(PATIENCE)]
    assert due == [False] * (PATIENCE - 1) + [True]
    assert raises.rates.tolist() == [1.5]
    raises.due(PATIENCE, two([0.9]), two([1.0]))
    assert raises.rates.tolist() == [1.5]  # not risen yet: the catapult is still to come
    raises.due(PATIENCE + 1, two([9.0]), two([1.0]))
    raises.due(PATIENCE + 2, two([0.5]), two([1.2]))
    assert raises.rates.tolist() == [pytest.approx(QUIET * 1.2)]


def test_a_raise_without_a_spike_is_given_up_in_the_end():
    raises = Raises(torch.tensor([1]), two([1.0]), table=[(0, 3.0)])
    for step in range(LATEST):
        raises.due(step, two([1.0 / (step + 1)]), two([1.0]))
        assert raises.rates.tolist() == [3.0]
    for step in range(LATEST, LATEST + 2):
        raises.due(step, two([1e-3]), two([1.0]))
    assert raises.rates.tolist() == [QUIET]


def test_too_high_a_raise_is_taken_back():
    _, networks = stack(width=32)
    splits = Splits(points(40), points(60, seed=1), points(60, seed=2))
    raises = Raises(torch.tensor([0, 1]), critical_rate(networks, splits.train.x), table=[(5, 500.0)])
    history, losses = descend_with_raises(networks, splits, raises, steps=80, check=5)
    assert raises.restored.tolist()[0] == 0
    assert raises.restored.tolist()[1] > 0
    assert not bool(history.diverged.any())
    assert float(history.final_loss.max()) < float(losses[0].min())


# Tasks


def test_check_04_critical_rates_at_the_start():
    start = prepare(Setting("rank-2", 2000, 1, 100, 1024), [0])
    whole = float(critical_rate(start.networks, start.splits.train.x)[0])
    assert whole == pytest.approx(6.15, abs=0.3)
    rates = CriticalRates()
    for size, low, high in ((5, 0.5, 0.8), (10, 0.0, 0.02)):
        parts = start.splits.train.x[0].split(size)
        edges = [rates.of_kernel(start.networks.kernel(start.networks.passes(part[None]))) for part in parts]
        assert low <= float((torch.cat(edges) < whole / 2).double().mean()) <= high
    # A single start of four layers lies between 6.4 and 9.4 (measured): the value of infinite width is met by their mean, 8.0.
    deep = prepare(Setting("rank-3", 1000, 1, 100, 256), range(12))
    values, _ = deep.networks.top_kernel(deep.splits.train.x, iterations=6)
    assert float((1000 / values).mean()) == pytest.approx(7.4, abs=1.0)


def test_a_synthetic_task_has_fresh_points_for_each_seed_and_its_exact_target():
    start = prepare(Setting("rank-2", 20, 10, 4, 8), [3, 4], copies=2)
    x = start.splits.train.x
    assert x.shape == (4, 20, 4)
    assert torch.equal(x[0], x[2])
    assert not torch.equal(x[0], x[1])
    assert torch.equal(start.target, torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)))
    assert not torch.equal(start.splits.validation.x[0, :5], x[0, :5])


def test_images_of_a_task_are_scaled_split_and_named():
    setting = Setting("usps", 40, 500, 8, 8, "stand-in")
    found = images(setting)
    x, x_val, x_test = found.x
    y = found.y[0]
    assert found.origin == "digits of scikit-learn"
    assert found.shape == (1, 8, 8)
    assert float(x.square().mean().sqrt()) == pytest.approx(1.1, rel=1e-5)
    assert (len(x), len(x_val)) == (40, len(x_test))
    assert len(x) + 2 * len(x_val) in (354, 355)  # zeros and twos of scikit-learn
    assert set(y.tolist()) == {-1.0, 1.0}
    assert int((flipped(y, 0.25) != y).sum()) == 10


def test_the_reference_network_of_a_task_is_the_same_for_all_that_is_trained_on_it():
    setting = Setting("usps", 40, 500, 8, 8, "stand-in", 0.25)
    [needed] = TaskStudy.needs(None, {"setting": setting._asdict()})
    assert needed.job == ReferenceNetwork().of(setting._replace(width=64, noise=0.0)).job
    assert TaskStudy.needs(None, {"setting": Setting("rank-2", 20, 10, 4, 8)._asdict()}) == []
    row = needed.study.run(needed.job)
    assert row["target"].shape == (64, 64)
    assert row["error"] < 0.1  # the reference knows its digits
    start = prepare(setting, [0, 1], reference=[row])
    assert start.target is row["target"]
    assert start.splits.train.x.shape == (2, 40, 64)
    assert int((start.splits.train.y[0] != images(setting).y[0]).sum()) == 10


def test_a_dead_network_has_no_features():
    networks = StackedNetworks([ntk_fcn(3, 4, 2, seed=0)])
    networks.tensors[0].zero_()
    assert alignments(networks, torch.ones(1, 2, 3), torch.eye(3)) == [0.0]
