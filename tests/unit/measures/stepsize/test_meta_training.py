"""Meta-gradients against finite differences and a plain loop, lockstep against one by one, resuming bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import theodolite as th
from theodolite.data.generators import gaussian_mixture
from theodolite.measures.stability.training_pairs import read_pool
from theodolite.measures.stepsize import MetaTraining, OptimizerNetwork, meta_train
from theodolite.measures.stepsize.learned import meta_training as module
from theodolite.measures.stepsize.learned.meta_training import Pools, Recipe, Starts, Unroll, _Run, draw_problems, plan_of
from theodolite.results import Outcome
from theodolite.testing import ResultContract

DATA = gaussian_mixture(90, 6, 3, within=0.5)
X, Y = DATA.x, DATA.y
LOSS = nn.CrossEntropyLoss()
#: A meta-training of a moment.
SHORT = {"problems": 4, "together": 2, "segments": (2, 1.0), "length": (4, 2.0), "batch_size": 8, "progress": False}


def make(seed):
    """A smooth network, so that finite differences have a derivative to find."""
    return th.models.fcn(6, [4], 3, activation="tanh", seed=seed)


def recipe(**changes):
    usual = {"split": "valid", "size": (24, 20), "classes": 3, "problems": 3, "trajectories": 1, "together": 3}
    length = {"segments": (2, 0.0), "length": (3, 0.0), "batch_size": 8}
    settings = {"lr": 0.01, "decay": 0.9, "eps": 1e-10, "clip": 1e4, "detach": True, "seed": 0}
    return Recipe(**{**usual, **length, **settings, **changes})


def started(net=None, data=None, **changes):
    x, y = data or (X.double(), Y)
    pools = Pools(read_pool((x, y), "train"), None)
    net = net or OptimizerNetwork.new(seed=2, step_size=0.05)
    return _Run(lambda seed: make(seed).to(x.dtype), LOSS, pools, recipe(**changes), net)


def scored(run, steps, *, detach):
    """The mean losses of one segment and the meta-gradient, one vector."""
    losses, score = run.unroll.segment(run.network, steps, detach=detach)
    found = torch.autograd.grad(score, run.weights)
    return losses, torch.cat([g.flatten() for g in found])


def plain_objective(run, steps, *, detach):
    """The mean loss along a segment of each problem by a plain loop and autograd through all of it."""
    total = []
    inner, valid = draw_problems(run.pools, run.recipe, run.seeds.problems)
    for p, (seed, order) in enumerate(zip(run.seeds.weights[0], run.seeds.orders[0], strict=True)):
        torch.manual_seed(seed)
        model = make(seed).double()
        names, shapes = zip(*((name, q.shape) for name, q in model.named_parameters()), strict=True)
        sizes = [shape.numel() for shape in shapes]
        values = torch.cat([q.detach().flatten() for q in model.parameters()])[None].requires_grad_()
        means = squares = torch.zeros(5, *values.shape).double()
        losses = []

        def loss_at(values, x, y, sizes=sizes, names=names, shapes=shapes, model=model):
            pieces = zip(names, values[0].split(sizes), shapes, strict=True)
            return F.cross_entropy(functional_call(model, {n: v.view(s) for n, v, s in pieces}, (x,)), y)

        for k in range(steps):
            losses.append(loss_at(values, valid[0][p], valid[1][p]))
            rows = module_order(order, k // 3)[8 * (k % 3) : 8 * (k % 3) + 8]
            batch = inner[0][p][rows], inner[1][p][rows]
            (g,) = torch.autograd.grad(loss_at(values, *batch), values, create_graph=True)
            given = g.detach() if detach else g, means, squares
            change, means, squares = module.learned_step(run.network, values, *given, torch.tensor(k + 1), sizes)
            values = values - change
        total.append(torch.stack(losses).mean())
    return torch.stack(total)


def module_order(seed, epoch):
    from theodolite.training.schedules import epoch_order

    return epoch_order(seed, epoch, 24)


@pytest.mark.parametrize("detach", [True, False])
def test_the_meta_gradient_is_that_of_a_plain_loop(detach):
    run = started()
    wanted = plain_objective(run, 5, detach=detach)
    slopes = torch.cat([g.flatten() for g in torch.autograd.grad(wanted.mean(), run.weights)])
    losses, found = scored(run, 5, detach=detach)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-11, atol=0)
    torch.testing.assert_close(found, slopes, rtol=1e-8, atol=1e-12)
    assert found.norm() > 1e-3


def test_the_meta_gradient_is_that_of_finite_differences():
    """AC24: through three steps, in double precision, with second derivatives."""
    run = started()
    _, slope = scored(run, 3, detach=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        way = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in run.weights]
        ends = []
        for shift in (1e-6, -1e-6):
            moved = [w.detach() + shift * d for w, d in zip(run.weights, way, strict=True)]
            weights = dict(zip(run.network.weights, moved, strict=True))
            unroll = started().unroll
            ends.append(float(unroll.segment(replace(run.network, weights=weights), 3, detach=False)[0].mean()))
        along = float(slope @ torch.cat([d.flatten() for d in way]))
        assert abs((ends[0] - ends[1]) / 2e-6 - along) <= 1e-4 * abs(along)
    detached = scored(started(), 3, detach=True)[1]
    assert (detached - slope).norm() > 1e-3 * slope.norm()  # what is left out matters


@pytest.mark.parametrize("split", ["train", "valid"])
def test_lockstep_is_one_by_one(split):
    size = {"split": split, "size": (24, 20 if split == "valid" else 0)}
    together = started(**size)
    losses, slope = scored(together, 6, detach=True)
    alone = [started(**size) for _ in range(3)]
    for p, run in enumerate(alone):
        run.unroll = run.begin(replace(run.plan[0], first=p, end=p + 1))
    each = [scored(run, 6, detach=True) for run in alone]
    torch.testing.assert_close(losses, torch.cat([value for value, _ in each]), rtol=1e-11, atol=0)
    torch.testing.assert_close(slope, torch.stack([g for _, g in each]).mean(0), rtol=1e-8, atol=1e-13)
    again = [scored(run, 4, detach=True)[0] for run in (together, *alone)]  # the next segment goes on from there
    torch.testing.assert_close(again[0], torch.cat(again[1:]), rtol=1e-9, atol=0)


def test_features_that_are_computed_again_change_nothing(monkeypatch):
    kept = scored(started(), 5, detach=True)[1]
    monkeypatch.setattr(module, "RECOMPUTED_FROM", 1)
    torch.testing.assert_close(scored(started(), 5, detach=True)[1], kept)


# What is drawn


def test_problems_are_fresh_renamed_and_apart():
    pools = Pools(read_pool((torch.arange(90.0)[:, None], torch.arange(90) % 3), "train"), None)
    (x, y), (x_valid, y_valid) = draw_problems(pools, recipe(), [1, 2, 3, 4, 5])
    assert x.shape == (5, 24, 1)
    assert x_valid.shape == (5, 20, 1)
    for p in range(5):
        mine, others = set(x[p, :, 0].tolist()), set(x_valid[p, :, 0].tolist())
        assert (len(mine), len(others), mine & others) == (24, 20, set())
        names = {(int(a) % 3, int(b)) for a, b in zip(torch.cat([x[p], x_valid[p]]), torch.cat([y[p], y_valid[p]]), strict=True)}
        assert len(names) == len({b for _, b in names}) == 3  # one new name for each class, the same in both parts
    assert len({tuple(x[p, :, 0].tolist()) for p in range(5)}) == 5
    assert len({tuple(y[p][x[p, :, 0].argsort()].tolist()) for p in range(5)}) > 1
    (a, b), (c, d) = draw_problems(pools, recipe(split="train", classes=0), [1])
    assert torch.equal(a, c)
    assert torch.equal(b[0], a[0, :, 0].long() % 3)
    assert torch.equal(b, d)


def test_lengths_are_a_least_number_and_an_exponential_one():
    plan = plan_of(recipe(problems=4000, together=4, trajectories=2, segments=(3, 4.0), length=(5, 10.0)))
    lengths = torch.tensor([place.steps for place in plan]).double()
    assert lengths.min() >= 5
    assert abs(float(lengths.mean()) - 15) < 0.5
    assert abs(float((lengths - 5).std()) - 10) < 0.7  # of an exponential variable mean and deviation are alike
    segments = len(plan) / 2000
    assert abs(segments - 7) < 0.4
    assert plan[0] != plan[1]
    fixed = plan_of(recipe(trajectories=2))
    assert [(p.trajectory, p.segment, p.steps) for p in fixed] == [(0, 0, 3), (0, 1, 3), (1, 0, 3), (1, 1, 3)]


def test_starts_differ_between_problems_and_trajectories():
    seeds = Starts.of(recipe(trajectories=2))
    flat = [seed for row in (seeds.problems, *seeds.weights, *seeds.orders) for seed in row]
    assert len(set(flat)) == len(flat) == 15


# The whole


def test_it_learns_to_train():
    """From a random walk to a run whose mean loss is well below guessing."""
    size = {"samples": 60, "problems": 64, "segments": (4, 0), "length": (10, 0)}
    start = OptimizerNetwork.new(step_size=0.01)
    found = meta_train(make, (X, Y), loss=LOSS, split="train", network=start, progress=False, **size)
    first, last = found.objectives
    assert first > 1.0
    assert last < 0.6 * first
    fleet = th.Fleet(make, 3, loss=LOSS, optimizer=found.network, rate=1.0)
    trace = fleet.train((X, Y), steps=40, batch_size=32, progress=False)
    assert trace.loss[:, -1].mean() < 0.3 * trace.loss[:, 0].mean()
    model = make(5)
    th.train(model, LOSS, (X, Y), found.optimizer(model.parameters()), steps=40, batch_size=32, progress=False)
    assert float((model(X).argmax(1) == Y).double().mean()) > 0.9


def test_a_killed_run_goes_on_bit_by_bit(tmp_path, monkeypatch):
    whole = meta_train(make, (X, Y), loss=LOSS, **SHORT)
    taken, update = [], _Run._update

    def killed(self, place):
        taken.append(place)
        if len(taken) == 4:  # in the middle of a trajectory
            raise MemoryError("killed")
        return update(self, place)

    monkeypatch.setattr(_Run, "_update", killed)
    with pytest.raises(MemoryError):
        meta_train(make, (X, Y), loss=LOSS, checkpoint=tmp_path, checkpoint_every=1, **SHORT)
    assert taken[-1].segment > 0
    monkeypatch.setattr(_Run, "_update", update)
    with pytest.raises(ValueError, match="resume=True"):
        meta_train(make, (X, Y), loss=LOSS, checkpoint=tmp_path, **SHORT)
    with pytest.raises(ValueError, match="other data or settings"):
        meta_train(make, (X, Y), loss=LOSS, checkpoint=tmp_path, resume=True, **{**SHORT, "batch_size": 9})
    back = meta_train(make, (X, Y), loss=LOSS, checkpoint=tmp_path, resume=True, **SHORT)
    assert back.trace == whole.trace
    assert all(torch.equal(back.network.weights[name], w) for name, w in whole.network.weights.items())
    finished = meta_train(make, (X, Y), loss=LOSS, checkpoint=tmp_path, resume=True, **SHORT)
    assert finished.trace == whole.trace


def test_the_callers_random_state_and_modes_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad():
        meta_train(make, (X, Y), loss=LOSS, **SHORT)
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_steps_that_overflow_are_skipped_and_said():
    found = meta_train(make, (X, Y), loss=LOSS, network=OptimizerNetwork.new(step_size=1e38), **SHORT)
    assert found.skipped == len(found.trace) > 0
    assert found.outcome is Outcome.DIVERGED
    assert all(bool(w.isfinite().all()) for w in found.network.weights.values())
    assert "not finite" in found.sentence()


def test_regression_and_validation_data_of_its_own():
    line = X[:60], X[:60, :1]
    found = meta_train(lambda seed: nn.Linear(6, 1), line, (X[60:], X[60:, :1]), loss=nn.MSELoss(), **SHORT)
    assert (found.samples, found.valid_samples) == (60, 30)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return F.dropout(self.layer(x), training=self.training)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"split": "both"}, "split must be"),
        ({"samples": 80, "valid_samples": 20}, "fit into the 90 samples"),
        ({"samples": 90}, "fit into the 90 samples"),
        ({"split": "train", "valid": (X, Y)}, "valid is given"),
        ({"valid": (X[:10], Y[:10])}, "valid holds 10 samples of train"),
        ({"train": (X, X), "permute": True, "loss": nn.MSELoss()}, "permute renames classes"),
        ({"length": (1, 3.0)}, "length must be a pair"),
        ({"segments": 3}, "segments must be a pair"),
        ({"factory": make(0)}, "factory must be a function"),
        ({"factory": lambda seed: Dropped()}, "computed at once"),
        ({"factory": lambda seed: nn.LSTM(6, 3)}, "computed at once"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"problems": 0}, "problems must be"),
        ({"train": (X[:5], Y)}, "as many inputs as targets"),
        ({"decay": 1.0}, "decay must be"),
    ],
)
def test_bad_input(given, words):
    with pytest.raises((ValueError, TypeError), match=words):
        meta_train(**{"factory": make, "train": (X, Y), "loss": LOSS, **SHORT, **given})


class TestMetaTraining(ResultContract):
    def make(self):
        return meta_train(make, (X, Y), loss=LOSS, **SHORT)

    def test_what_is_saved_trains(self, tmp_path):
        found = self.make()
        found.save(tmp_path / "kept")
        back = MetaTraining.load(tmp_path / "kept")
        assert back.network.digest == found.network.digest
        assert found.plot().axes[0].get_ylabel() == "mean loss of a segment"


def test_an_unroll_starts_from_nothing():
    unroll = started().unroll
    assert isinstance(unroll, Unroll)
    assert (unroll.steps, float(unroll.means.abs().max()), float(unroll.squares.abs().max())) == (0, 0.0, 0.0)
