"""Short trainings of copies: what is compared, and that nothing of the user's is touched."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import theodolite as th
from theodolite.measures import trials
from theodolite.measures.dynamics import choose_batch_size, choose_rate
from theodolite.measures.dynamics.noise import joined_parts
from theodolite.measures.progress import check_setup, learning_progress
from theodolite.measures.trials import Remedy, cannot_restart, copied_setup, random_batches, start_anew, try_changes
from theodolite.testing import ResultContract


def problem(norm=False):
    torch.manual_seed(0)
    parts = [nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Linear(16, 3)]
    x = torch.randn(120, 6)
    return th.Problem(nn.Sequential(*parts), nn.CrossEntropyLoss(), (x, x[:, :3].argmax(1)))


def rate(lr):
    return Remedy(f"set lr={lr}", lambda setup: setup.set_lr(lr), lr=lr)


class TestTrialRuns(ResultContract):
    def make(self):
        return try_changes(problem(), {"rate too low": rate(0.3)}, lr=1e-4, steps=10)


def test_a_better_rate_is_found_better_and_a_worse_one_is_not():
    found = try_changes(problem(), {"rate too low": rate(0.3), "other": rate(1e-5)}, lr=1e-4, steps=40)
    assert found.of("rate too low")["better"]
    assert not found.of("other")["better"]
    assert found.of("rate too low")["own"] == found.of("other")["own"]


def test_the_same_training_ends_in_the_same_loss():
    found = try_changes(problem(), {"nothing": Remedy("change nothing", lambda setup: None)}, lr=0.1, steps=15)
    row = found.of("nothing")
    assert row["own"] == row["changed"]
    assert not row["better"]


def test_a_run_that_blows_up_is_not_better_and_anything_is_better_than_it():
    found = try_changes(problem(), {"x": rate(1e9)}, lr=0.1, steps=15)
    assert found.of("x")["changed"] == math.inf
    assert not found.of("x")["better"]
    assert try_changes(problem(), {"x": rate(0.1)}, lr=1e9, steps=15).of("x")["better"]


@pytest.mark.parametrize("fresh", [False, True])
def test_the_users_model_and_optimizer_are_left_as_found(fresh):
    mine = problem(norm=True)
    optimizer = torch.optim.AdamW(mine.model.parameters(), lr=1e-2)
    mine.model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    before, state = copy.deepcopy(mine.model.state_dict()), copy.deepcopy(optimizer.state_dict())
    remedy = Remedy("change", lambda setup: setup.set_lr(0.1), fresh=fresh)
    random = torch.get_rng_state()
    try_changes(mine, {"x": remedy}, lr=1e-2, optimizer=optimizer, steps=10)
    assert torch.equal(random, torch.get_rng_state())
    after = mine.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert mine.model.training


class Drawing(nn.Module):
    """Draws from every global random state when it trains."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        noise = random.gauss(0, 1) + np.random.randn() + torch.randn(()) if self.training else 0.0  # noqa: NPY002
        return self.linear(x) + 1e-3 * noise


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def runs_of(mine):
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1)
    yield lambda: try_changes(mine, {"x": rate(0.3), "y": Remedy("", rate(0.3).change, fresh=True)}, lr=0.1, steps=8)
    yield lambda: th.lr_range_test(mine, optimizer, steps=8, sweeps=1, critical=False, progress=False)
    yield lambda: learning_progress(mine, lr=0.1, steps=8)
    yield lambda: check_setup(mine, optimizer=torch.optim.SGD(list(mine.model.parameters())[:1], lr=0.1))


def test_every_random_state_is_left_as_found():
    x = torch.randn(60, 6)
    mine = th.Problem(Drawing(), nn.CrossEntropyLoss(), (x, x[:, :3].argmax(1)))
    for run in runs_of(mine):
        before = random_states()
        run()
        assert random_states() == before


class Counting(nn.Module):
    """A loss with a parameter, a buffer and a counter."""

    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.ones(()))
        self.register_buffer("ema", torch.zeros(()))
        self.calls = 0

    def forward(self, output, target):
        value = nn.functional.cross_entropy(output * self.t, target)
        self.ema.mul_(0.9).add_(value.detach(), alpha=0.1)
        self.calls += 1
        return value


def test_the_users_loss_is_left_as_found():
    x, loss = torch.randn(60, 6), Counting()
    loss.t.grad = torch.tensor(3.0)
    mine = th.Problem(nn.Linear(6, 3), loss, (x, x[:, :3].argmax(1)))
    for run in runs_of(mine):
        run()
        assert (loss.t.grad.item(), loss.ema.item(), loss.calls) == (3.0, 0.0, 0)


def test_a_remedy_that_fails_is_not_tried_and_the_others_are():
    def broken(setup):
        raise RuntimeError("no such layer")

    found = try_changes(
        problem(), {"a": Remedy("break", broken), "b": rate(0.3), "c": Remedy("pray", why_not="no")}, lr=0.1, steps=10
    )
    assert "no such layer" in found.of("a")["not_tried"]
    assert found.of("b")["not_tried"] == ""
    assert found.of("c")["not_tried"] == "no"


def test_batches_are_drawn_without_repetition_within_an_epoch():
    batches = list(random_batches(problem(), 40, 3, seed=1))
    rows = torch.cat([batch.args[0] for batch in batches])
    assert len(torch.unique(rows, dim=0)) == 120


@pytest.mark.parametrize(("rates", "began", "expected"), [
    ([0.0, 0.05, 0.1], None, [0.0, 0.2, 0.4]),
    ([0.0, 0.0, 0.0], [0.0, 0.5, 1.0], [0.0, 0.2, 0.4]),
    ([0.0, 0.0, 0.0], None, [0.2, 0.2, 0.2]),
])  # fmt: skip
def test_rates_are_measured_by_the_first_group_that_moves(rates, began, expected):
    mine = problem()
    weight, bias, *others = mine.parameters
    optimizer = torch.optim.SGD([{"params": ps, "lr": lr} for ps, lr in zip([[weight], [bias], others], rates, strict=True)])
    for group, lr in zip(optimizer.param_groups, began or [], strict=False):
        group["initial_lr"] = lr
    setup = copied_setup(mine, 0.2, optimizer, 8)
    assert [group["lr"] for group in setup.optimizer.param_groups] == pytest.approx(expected)
    assert setup.lr == pytest.approx(0.2)
    setup.set_lr(0.4)
    assert [group["lr"] for group in setup.optimizer.param_groups] == pytest.approx([2 * lr for lr in expected])


class Counted(Dataset):
    """Samples that count how often they are read."""

    def __init__(self, size):
        self.x, self.read = torch.randn(size, 6), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        self.read += 1
        return self.x[place], self.x[place, :3].argmax()


def test_data_that_is_not_held_is_read_only_as_far_as_it_trains():
    samples = Counted(2000)
    mine = th.Problem(nn.Linear(6, 3), nn.CrossEntropyLoss(), DataLoader(samples, batch_size=10), hold_bytes=1)
    batches = {seed: [batch.args[0] for batch in random_batches(mine, 10, 5, seed)] for seed in (0, 1)}
    assert torch.equal(torch.cat(batches[0]), samples.x[:50])
    assert torch.equal(torch.cat(batches[1]), samples.x[50:100])
    assert len(list(random_batches(mine, 10, 450, 1))) == 450
    scored = mine.with_batches(list(random_batches(mine, 10, 1)))
    for run in (choose_batch_size, try_both):
        samples.read = 0
        run(mine, 0.1, score_on=scored, steps=8)
        assert samples.read < 2000


def try_both(mine, lr, **more):
    return try_changes(mine, {"x": rate(0.3), "y": rate(1.0)}, lr=lr, **more)


def test_held_batches_are_joined_once_for_all_runs(monkeypatch):
    x = torch.randn(60, 6)
    mine = th.Problem(nn.Linear(6, 3), nn.CrossEntropyLoss(), [(part, part[:, :3].argmax(1)) for part in x.split(10)])
    joins = []

    def joined(parts):
        joins.append(len(parts) > 1)
        return joined_parts(parts)

    monkeypatch.setattr(trials, "joined_parts", joined)
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1)
    for run in (
        lambda: try_both(mine, 0.1, steps=8),
        lambda: choose_rate(mine, 0.1, steps=8),
        lambda: choose_batch_size(mine, 0.1, steps=8),
        lambda: th.lr_range_test(mine, optimizer, steps=8, critical=False, progress=False),
        lambda: learning_progress(mine, lr=0.1, steps=8),
    ):
        joins.clear()
        run()
        assert sum(joins) == 1


def test_models_without_reset_parameters_cannot_start_anew():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    assert "Own" in cannot_restart(Own())
    with pytest.raises(ValueError, match="reset_parameters"):
        start_anew(Own(), 0)
