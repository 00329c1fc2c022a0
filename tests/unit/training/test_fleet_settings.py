"""Momentum, weight decay, betas and the rates of groups differ between the replicas of a fleet; RMSprop; states with an axis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.training.fleets.optimizers import SGD, Adam, RMSprop

SIZE = 23
X = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.randint(0, 3, (SIZE,), generator=torch.Generator().manual_seed(1))
RATES = [0.02, 0.05, 0.1]


def factory(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def assert_alone(fleet: th.Fleet, run, r: int, make, tol: float = 1e-10) -> None:
    """Replica r has the numbers of `th.train` with a torch optimizer."""
    torch.manual_seed(fleet.seeds[r])
    model = factory(fleet.seeds[r])
    trace = th.train(model, nn.CrossEntropyLoss(), (X, LABELS), make, seed=fleet.seeds[r], steps=12, batch_size=8, progress=False)
    assert run[r].loss == pytest.approx(trace.loss, rel=tol, abs=tol)
    for name, p in model.named_parameters():
        torch.testing.assert_close(fleet.parameters[name][r], p.detach(), rtol=tol, atol=tol)


def trained(optimizer: str, **settings):
    fleet = th.Fleet(factory, [3, 4, 5], loss=nn.CrossEntropyLoss(), optimizer=optimizer, **settings)
    return fleet, fleet.train((X, LABELS), steps=12, batch_size=8, progress=False)


OWN = {
    "sgd": (torch.optim.SGD, [{"momentum": 0.0, "weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.0}, {"momentum": 0.5}]),
    "damped": (torch.optim.SGD, [{"momentum": m, "dampening": 0.3} for m in (0.0, 0.9, 0.5)]),
    "nesterov": (torch.optim.SGD, [{"momentum": m, "nesterov": True, "weight_decay": 0.01} for m in (0.3, 0.9, 0.5)]),
    "adam": (torch.optim.Adam, [{"betas": b, "weight_decay": 0.1 * b[0]} for b in ((0.0, 0.9), (0.9, 0.999), (0.5, 0.99))]),
    "adamw": (torch.optim.AdamW, [{"betas": (0.9, b), "weight_decay": 1 - b} for b in (0.9, 0.999, 0.99)]),
    "rmsprop": (torch.optim.RMSprop, [{"alpha": a, "momentum": 0.9 - a / 2, "weight_decay": 0.1 * a} for a in (0.9, 0.99, 0.5)]),
}


@pytest.mark.parametrize("name", OWN)
def test_each_replica_has_the_settings_of_its_own(name):
    kind, own = OWN[name]
    defaults = kind([torch.zeros(1, requires_grad=True)], lr=0.1).defaults
    full = [{key: one.get(key, defaults[key]) for key in {k for each in own for k in each}} for one in own]
    settings = {key: [one[key] for one in full] for key in full[0]}
    if "betas" in settings:
        settings["betas"] = tuple(zip(*settings["betas"], strict=True))
    settings |= {key: settings[key][0] for key in ("nesterov", "dampening") if key in settings}  # of the whole fleet
    fleet, run = trained(kind.__name__.lower(), rate=RATES, **settings)
    assert run.route == "vmap"
    for r in range(3):
        assert_alone(fleet, run, r, lambda p, r=r: kind(p, lr=RATES[r], **full[r]))


@pytest.mark.parametrize("options", [{}, {"centered": True, "momentum": 0.8}, {"alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1}])
def test_rmsprop_gives_the_numbers_of_torch(options):
    fleet, run = trained("rmsprop", rate=0.01, **options)
    assert_alone(fleet, run, 1, lambda p: torch.optim.RMSprop(p, lr=0.01, **options))
    made = th.Fleet(factory, 2, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01, **options))
    assert made.rule == fleet.rule
    assert made.rates.tolist() == [0.01, 0.01]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_groups_of_parameters_have_rates_of_their_own(kind):
    rates = {"0.*": RATES, "*.bias": 0.0, "*": 0.03}
    fleet, run = trained(kind.__name__.lower(), rate=rates)
    for r in range(3):

        def make(parameters, r=r):
            first, second, third, last = parameters
            groups = [{"params": [first, second], "lr": RATES[r]}, {"params": [last], "lr": 0.0}, {"params": [third], "lr": 0.03}]
            return kind(groups, lr=1.0)

        assert_alone(fleet, run, r, make)
    assert run.rates.tolist() == RATES
    assert {name: t.tolist() for name, t in run.group_rates.items()} == {"0.*": RATES, "*.bias": [0.0] * 3, "*": [0.03] * 3}


def test_equal_settings_give_equal_bits_and_plain_numbers_the_same_program():
    both = {"momentum": [0.9, 0.9, 0.3], "weight_decay": [0.01, 0.01, 0.0]}
    fleet = th.Fleet(factory, [3, 3, 3], loss=nn.CrossEntropyLoss(), rate=0.05, bitwise=True, **both)
    run = fleet.train((X, LABELS), steps=12, batch_size=8, order_seeds=0, progress=False)
    assert torch.equal(run.loss[0], run.loss[1])
    assert not torch.equal(run.loss[0], run.loss[2])
    assert all(torch.equal(p[0], p[1]) for p in fleet.parameters.values())
    assert th.Fleet(factory, 3, loss=None, rate=0.1, momentum=0.9).rule == SGD(momentum=0.9)


def test_settings_follow_the_replicas_that_stay():
    """The first two diverge and leave the stack: the third keeps its own momentum, decay and group rates."""
    options = {"momentum": [0.9, 0.9, 0.3], "weight_decay": [0.0, 0.0, 0.1]}
    rates = {"0.*": [1e9, 1e9, 0.05], "*": [1e9, 1e9, 0.02]}
    fleet = th.Fleet(factory, [3, 4, 5], loss=nn.CrossEntropyLoss(), rate=rates, **options)
    run = fleet.train((X, LABELS), steps=12, batch_size=8, blow_up=10.0, progress=False)
    assert run.diverged == (True, True, False)

    def make(parameters):
        first, second, *rest = parameters
        groups = [{"params": [first, second], "lr": 0.05}, {"params": rest, "lr": 0.02}]
        return torch.optim.SGD(groups, lr=1.0, momentum=0.3, weight_decay=0.1)

    assert_alone(fleet, run, 2, make)


@pytest.mark.parametrize("memory", [1.0, 2.0**32])
def test_chunks_have_their_own_settings(memory):
    fleet, run = trained("adam", rate=RATES, betas=((0.9, 0.5, 0.0), 0.99), memory=memory)
    assert_alone(fleet, run, 1, lambda p: torch.optim.Adam(p, lr=RATES[1], betas=(0.5, 0.99)))


class Averages:
    """A rule that keeps three averages of each gradient and steps along their mean."""

    columns = {"averages": 3}

    def step(self, parameters, gradients, state, rate, count):
        decays = torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64)
        for name, g in gradients.items():
            m = state["averages"][name]
            m.lerp_(g[..., None].expand_as(m), 1 - decays.expand_as(m))
            parameters[name] -= rate.view(-1, *[1] * (g.ndim - 1)) * m.mean(-1)


def test_a_state_may_have_a_trailing_axis():
    fleet, run = trained(Averages(), rate=[0.1, 0.2, 1e9])

    def gradient(weights: dict[str, Tensor], rows: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, X[rows]), LABELS[rows])
        return list(torch.autograd.grad(loss, list(weights.values())))

    torch.manual_seed(4)
    model = factory(4)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    means = [torch.zeros(*p.shape, 3, dtype=torch.float64) for p in weights.values()]
    decays = torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64)
    from theodolite.training.schedules import epoch_order

    for step in range(12):
        rows = epoch_order(4, step // 3, SIZE)[8 * (step % 3) : 8 * (step % 3) + 8]
        found = gradient(weights, rows)
        means = [decays * m + (1 - decays) * g[..., None] for m, g in zip(means, found, strict=True)]
        with torch.no_grad():
            for p, m in zip(weights.values(), means, strict=True):
                p -= 0.2 * m.mean(-1)
    for name, p in weights.items():
        torch.testing.assert_close(fleet.parameters[name][1], p.detach(), rtol=1e-10, atol=1e-10)
    assert run.loss.shape == (3, 12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": [0.1, 0.2]}, "momentum must be one number or one per replica: 3. Got 2."),
        ({"momentum": [0.1, 0.2, 1.0]}, r"momentum\[2\] must be a number of at least 0 and below 1. Got 1.0."),
        ({"weight_decay": [0.1, -0.1, 0.0]}, r"weight_decay\[1\] must be at least 0"),
        ({"momentum": [0.5, 0.0, 0.5], "nesterov": True}, "nesterov needs a momentum"),
        ({"optimizer": "adam", "betas": (0.9, [0.9, 0.99])}, "betas must be one number or one per replica: 3. Got 2."),
        ({"optimizer": "adam", "betas": [0.9, 0.99, 0.5]}, "betas must be two numbers"),
        ({"optimizer": "rmsprop", "alpha": 1.5}, "alpha must be a number of at least 0 and below 1"),
        ({"alpha": 0.9}, "'sgd' has no setting alpha"),
        ({"rate": {"fc.*": 0.1}}, r"rate\['fc.\*'\] fits no parameter that the patterns before it left. Nearest names: "),
        ({"rate": {"0.*": 0.1}}, r"rate has no pattern for 2.weight, 2.bias. Add \"\*\""),
        ({"rate": {"*": [0.1, 0.2]}}, r"rate\['\*'\] must be one number or one per replica: 3. Got 2."),
        ({"rate": {"*": -0.1}}, r"rate\['\*'\] must be at least 0"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        th.Fleet(factory, 3, loss=nn.CrossEntropyLoss(), **{"rate": 0.1, **options})


def test_rules_give_those_of_some_replicas():
    rows = torch.tensor([2, 0])
    assert SGD(momentum=[0.1, 0.2, 0.3], weight_decay=0.5).rows(rows) == SGD(momentum=(0.3, 0.1), weight_decay=0.5)
    assert Adam(betas=(0.5, [0.1, 0.2, 0.3])).rows(slice(1, 3)) == Adam(betas=(0.5, (0.2, 0.3)))
    assert Adam(betas=(0.5, 0.9)).rows(rows) == Adam(betas=(0.5, 0.9))
    assert RMSprop(alpha=(0.5, 0.6, 0.7)).rows(rows) == RMSprop(alpha=(0.7, 0.5))
