"""Raising the learning rate on purpose: when, how far, and the way back."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.data.generators import two_class_images
from theodolite.measures.dynamics import spike_events
from theodolite.models.ntk import ntk_fcn
from theodolite.monitors.rates.multi_catapult import MultiCatapult
from theodolite.results import load


def images(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    made = two_class_images(n, 4, 3, seed=0)
    return made.x.double(), made.y.double().reshape(-1, 1)


def ready(*, raises: int = 3, width: int = 256, **settings) -> tuple[nn.Module, torch.optim.Optimizer, MultiCatapult, tuple]:
    """A network below its critical rate, and its driver."""
    data = images()
    model = ntk_fcn(48, width, 3, seed=0).double()
    critical = th.critical_learning_rate(th.Problem(model, nn.MSELoss(), data), by="gauss_newton").value
    sgd = torch.optim.SGD(model.parameters(), lr=0.9 * critical)
    return model, sgd, MultiCatapult(model, nn.MSELoss(), data, sgd, raises=raises, **settings), data


@pytest.fixture(scope="module")
def flown():
    model, sgd, driver, data = ready()
    trace = th.train(model, nn.MSELoss(), data, sgd, schedule=driver, steps=260)
    return driver, trace


def test_check_08_three_raises_three_spikes_and_a_smaller_kernel_each_time(flown):
    driver, trace = flown
    assert [event.rolled_back for event in driver.events] == [False] * 3
    assert all(event.end is not None and event.kernel_after < event.kernel_before for event in driver.events)
    spikes = spike_events(trace.loss)
    for event in driver.events:
        assert any(event.step <= spike.peak <= event.end and spike.height > 1.2 for spike in spikes)
    assert driver.rate > driver.first_critical_rate
    assert driver.report().catapults == 3
    assert trace.loss[-1] < 0.1 * trace.loss[0]


def test_a_raise_waits_for_a_calm_rate_and_a_fallen_loss(flown):
    driver, trace = flown
    for event, after in itertools.pairwise(driver.events):
        assert trace.loss[event.end] < event.loss_before
        assert after.step == event.end
        assert event.end - event.step >= driver.patience
    for event in driver.events:
        assert event.rate == pytest.approx(1.6 * 2.0 / event.kernel_before, rel=1e-9)
        assert trace.rate[event.step] == event.rate
        assert trace.rate[event.step - 1] < event.rate
        assert event.height == pytest.approx(max(trace.loss[event.step : event.end + 1]) / event.loss_before, rel=1e-6)


def test_after_the_last_catapult_the_rate_stays_below_the_edge(flown):
    driver, _ = flown
    assert driver.done
    assert driver.rate <= driver.critical_rate * (1 + 1e-9)


def test_the_report_is_a_result(flown, tmp_path):
    driver, _ = flown
    report = driver.report()
    report.save(tmp_path / "report")
    assert load(tmp_path / "report").rows() == report.rows()
    assert "3 of 3 catapults" in str(report)
    assert {"step", "raised_to", "ratio", "kernel_before", "kernel_after", "spike_height", "rolled_back"} <= set(report.rows()[0])


def test_a_plain_loop_gives_the_same_run():
    rates = []
    for plain in (True, False):
        model, sgd, driver, (x, y) = ready(raises=1, width=64)
        if plain:
            mine = []
            for _ in range(60):
                mine.append(driver.step())
                sgd.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                sgd.step()
        else:
            mine = list(th.train(model, nn.MSELoss(), (x, y), sgd, schedule=driver, steps=60).rate)
        rates.append(mine)
    assert rates[0] == rates[1]
    assert max(rates[0]) > rates[0][0]


def linear() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator).double()
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    data = x, torch.zeros(20, 1).double()
    critical = th.critical_learning_rate(th.Problem(model, nn.MSELoss(), data)).value
    return model, data, torch.optim.SGD(model.parameters(), lr=0.1 * critical, momentum=0.0)


@pytest.mark.parametrize("as_observer", [False, True])
def test_a_model_that_cannot_catapult_is_brought_back(as_observer):
    """Above the edge a linear model only diverges: every raise is undone, each with half the excess, and training goes on."""
    model, data, sgd = linear()
    before = float(sgd.param_groups[0]["lr"])
    driver = MultiCatapult(model, nn.MSELoss(), data, sgd, raises=2, patience=2, settle=20)
    use = {"observe": driver.observe} if as_observer else {"schedule": driver}
    trace = th.train(model, nn.MSELoss(), data, sgd, steps=120, **use)
    assert [event.ratio for event in driver.events] == pytest.approx([1.6, 1.3, 1.15, 1.075, 1.0375])
    assert all(event.rolled_back for event in driver.events)
    assert driver.done
    assert driver.report().catapults == 0
    assert "5 undone" in str(driver.report())
    assert float(sgd.param_groups[0]["lr"]) == before
    assert math.isfinite(trace.loss[-1])
    assert trace.loss[-1] < driver.events[0].loss_before


def test_a_network_that_died_in_flight_is_brought_back():
    model, sgd, driver, (x, y) = ready(raises=1, width=64)
    while not driver.events:
        driver.step()
        sgd.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        sgd.step()
    alive = driver._saved[0]["fc1.weight"].clone()
    with torch.no_grad():
        model.fc1.weight.fill_(-1.0)  # images are not negative on average: every unit is shut
        model.fc2.weight.zero_()
    driver.step()
    assert driver.events[0].rolled_back
    assert torch.equal(model.fc1.weight, alive)
    assert driver.events[1].ratio == pytest.approx(1.3)


def test_undoing_brings_back_weights_and_optimizer_exactly():
    model, data, sgd = linear()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    driver = MultiCatapult(model, nn.MSELoss(), data, sgd, raises=1, patience=1)

    def state() -> list[torch.Tensor]:
        return [model.weight.detach().clone(), *(s["momentum_buffer"].clone() for s in sgd.state.values())]

    seen = {}
    for step in range(80):
        seen[step] = state()
        undone = sum(event.rolled_back for event in driver.events)
        driver.step()
        if sum(event.rolled_back for event in driver.events) > undone:
            first = driver.events[0]
            assert all(torch.equal(a, b) for a, b in zip(state(), seen[first.step], strict=True))
            break
        sgd.zero_grad()
        nn.functional.mse_loss(model(data[0]), data[1]).backward()
        sgd.step()
    else:
        pytest.fail("nothing was undone")


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-4),
    lambda p: torch.optim.Adam(p, lr=1e-4),
])  # fmt: skip
def test_raises_follow_the_law_of_the_optimizer(make):
    data = images(16)
    model = ntk_fcn(48, 16, 2, seed=0).double()
    optimizer = make(model.parameters())
    driver = MultiCatapult(model, nn.MSELoss(), data, optimizer, raises=1, patience=3)
    problem = th.Problem(model, nn.MSELoss(), data)
    for _ in range(20):
        driver.step()
        if driver.events:
            edge = th.critical_learning_rate(problem, by="gauss_newton", optimizer=optimizer).value
            assert driver.rate == pytest.approx(1.6 * edge, rel=0.02)
            return
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    pytest.fail("nothing was raised")


def test_groups_keep_their_ratio_and_random_state_is_left_alone():
    data = images(16)
    model = ntk_fcn(48, 16, 2, seed=0).double()
    first, second = (list(part.parameters()) for part in (model.fc1, model.fc2))
    sgd = torch.optim.SGD([{"params": first, "lr": 0.02}, {"params": second, "lr": 0.01}], lr=0.02)
    driver = MultiCatapult(model, nn.MSELoss(), data, sgd, raises=1, patience=1)
    state = torch.get_rng_state()
    driver.step()
    driver.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(driver.events) == 1
    assert sgd.param_groups[0]["lr"] == pytest.approx(2 * sgd.param_groups[1]["lr"])


@pytest.mark.parametrize("wrong", [{"ratio": 1.0}, {"raises": -1}, {"patience": 0}, {"by": "guess"}])
def test_wrong_settings_are_refused(wrong):
    model, data, sgd = linear()
    with pytest.raises(ValueError, match="Got"):
        MultiCatapult(model, nn.MSELoss(), data, sgd, **wrong)
