"""Models of many kinds in a fleet: what vmap runs, what falls back to a loop, and what the result says about it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, jvp

import theodolite as th

SIZE = 20
X = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (SIZE,), generator=torch.Generator().manual_seed(1))
LOSS = nn.CrossEntropyLoss()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.cell(x.view(len(x), 3, 2))[0][:, -1])


class Twin(nn.Module):
    """First-order Taylor model f(w0) + J (w - w0); the base weights are buffers."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "base", base)  # its own parameters are not part of the twin
        self.names = [name for name, _ in base.named_parameters()]
        for i, p in enumerate(base.parameters()):
            self.register_parameter(f"w{i}", nn.Parameter(p.detach().clone()))
            self.register_buffer(f"base{i}", p.detach().clone())

    def forward(self, x):
        start = {name: getattr(self, f"base{i}") for i, name in enumerate(self.names)}
        moved = {name: getattr(self, f"w{i}") - start[name] for i, name in enumerate(self.names)}
        value, change = jvp(lambda w: functional_call(self.base, w, (x,)), (start,), (moved,))
        return value + change


def mlp(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def convolutional(seed: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)
    ).double()


def layer_normed(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3, bias=False)).double()


MODELS = {
    "mlp": (mlp, "vmap"),
    "batch norm": (normed, "vmap"),
    "convolution": (convolutional, "vmap"),
    "layer norm": (layer_normed, "vmap"),
    "taylor twin": (lambda seed: Twin(mlp(seed)), "vmap"),
    "frozen layer": (lambda seed: nn.Sequential(mlp(seed).requires_grad_(False), nn.Linear(3, 3).double()), "vmap"),
    "lstm": (lambda seed: Recurrent().double(), "loop"),
    "dropout": (lambda seed: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)).double(), "loop"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_numbers_of_a_loop_by_either_route(name):
    make, route = MODELS[name]
    fleet = th.Fleet(make, [0, 4], loss=LOSS, rate=[0.1, 0.2], momentum=0.9)
    run = fleet.train((X, Y), steps=9, batch_size=8, test=(X, Y), progress=False)
    assert run.route == route
    assert (route == "loop") == bool(run.cost.notes)
    looped = th.Fleet(make, [0, 4], loss=LOSS, rate=[0.1, 0.2], momentum=0.9, route="loop")
    same = looped.train((X, Y), steps=9, batch_size=8, test=(X, Y), progress=False)
    torch.testing.assert_close(run.test_loss, same.test_loss, rtol=1e-10, atol=0)
    for r, seed in enumerate((0, 4)):
        torch.manual_seed(seed)
        model = make(seed)
        sgd = torch.optim.SGD(model.parameters(), lr=[0.1, 0.2][r], momentum=0.9)
        trace = th.train(model, LOSS, (X, Y), sgd, steps=9, batch_size=8, seed=seed, progress=False)
        for each in (run, same):
            assert each[r].loss == pytest.approx(trace.loss, rel=1e-10)
        mine = fleet.model(r).state_dict()
        for key, value in model.state_dict().items():  # also what batch norm keeps
            torch.testing.assert_close(mine[key], value, rtol=1e-10, atol=1e-10)


def test_eval_mode_stills_dropout_and_batch_norm():
    make = lambda seed: nn.Sequential(normed(seed), nn.Dropout(0.9))  # noqa: E731
    fleet = th.Fleet(make, 2, loss=LOSS, rate=0.1, mode="eval")
    run = fleet.train((X, Y), steps=3, progress=False)
    assert run.route == "vmap"
    assert fleet.buffers["0.1.num_batches_tracked"].tolist() == [0, 0]
    assert not fleet.model(0).training


def test_choosing_a_route_leaves_no_trace():
    """Batch norm sees as many batches as steps were taken, not those of the trial."""
    fleet = th.Fleet(normed, 3, loss=LOSS, rate=0.1)
    fleet.train((X, Y), steps=4, progress=False)
    assert fleet.buffers["1.num_batches_tracked"].tolist() == [4, 4, 4]
    assert fleet.buffers["1.running_mean"].shape == (3, 5)


def test_vmap_on_demand_refuses_with_the_reason():
    for name, text in (("lstm", "lstm"), ("dropout", "random numbers")):
        fleet = th.Fleet(MODELS[name][0], 2, loss=LOSS, rate=0.1, route="vmap")
        with pytest.raises(ValueError, match=text):
            fleet.train((X, Y), steps=1)


def test_the_work_of_convolutions_is_that_of_one_pass(monkeypatch):
    work = SIZE * 4 * 6 * 3  # outputs times the weights behind each
    for limit, route in ((work, "vmap"), (work - 1, "loop")):
        monkeypatch.setattr("theodolite.training.fleets.route_selection.CONVOLUTION_WORK", limit)
        assert th.Fleet(convolutional, 2, loss=LOSS, rate=0.1).train((X, Y), steps=1, progress=False).route == route


def test_large_convolutions_take_the_loop(monkeypatch):
    monkeypatch.setattr("theodolite.training.fleets.route_selection.CONVOLUTION_WORK", 100)
    run = th.Fleet(convolutional, 2, loss=LOSS, rate=0.1).train((X, Y), steps=1, progress=False)
    assert run.route == "loop"
    assert "convolutions" in run.cost.notes[0]


def test_wrong_numbers_under_vmap_are_found(monkeypatch):
    from theodolite.training.fleets.routes import VmapRoute

    honest = VmapRoute.__call__

    def wrong(self, *args):
        losses, gradients = honest(self, *args)
        return losses, {name: 1.01 * g for name, g in gradients.items()}

    monkeypatch.setattr(VmapRoute, "__call__", wrong)
    run = th.Fleet(mlp, 2, loss=LOSS, rate=0.1).train((X, Y), steps=1, progress=False)
    assert run.route == "loop"
    assert "differ" in run.cost.notes[0]


def test_a_vanishing_gradient_is_no_reason_for_the_loop():
    line = lambda seed: nn.Linear(6, 1)  # noqa: E731
    fleet = th.Fleet(line, 3, loss=nn.MSELoss(), rate=0.1)
    x = X.float()
    run = fleet.train((x, fleet.model(0)(x).detach()), steps=2, progress=False)  # replica 0 fits from the start
    assert run.route == "vmap"


def test_the_result_says_why_it_looped():
    alone = th.Fleet(mlp, 1, loss=LOSS, rate=0.1).train((X, Y), steps=1, progress=False)
    assert (alone.route, alone.cost.notes) == ("loop", ("there is one replica only",))
    asked = th.Fleet(mlp, 2, loss=LOSS, rate=0.1, route="loop").train((X, Y), steps=1, progress=False)
    assert "asked" in asked.cost.notes[0]
    with pytest.raises(ValueError, match="route must be"):
        th.Fleet(mlp, 2, loss=LOSS, rate=0.1, route="jit").train((X, Y), steps=1)


@pytest.mark.parametrize("route", ["vmap", "loop"])
def test_a_gradient_of_ones_own(route):
    calls = []

    def gradient(module, parameters, buffers, batch):
        calls.append(batch.size)
        objective = lambda p: LOSS(functional_call(module, {**p, **buffers}, batch.args), batch.target)  # noqa: E731
        gradients, loss = grad_and_value(objective)(dict(parameters))
        return loss, gradients

    own = th.Fleet(mlp, 2, loss=LOSS, rate=0.1, gradient=gradient, route=route)
    plain = th.Fleet(mlp, 2, loss=LOSS, rate=0.1, route=route)
    runs = [fleet.train((X, Y), steps=5, batch_size=8, progress=False) for fleet in (own, plain)]
    assert set(calls) == {8, 4}
    torch.testing.assert_close(runs[0].loss, runs[1].loss, rtol=1e-10, atol=0)


class Quadratic(nn.Module):
    """|w|²/2 with a gradient that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3).double())

    def forward(self, x):
        return self.w.square().sum().expand(len(x)) / 2

    def fleet_gradient(self, parameters, buffers, batch, loss):
        return parameters["w"].square().sum() / 2, {"w": parameters["w"].clone()}


def test_a_module_may_bring_its_gradient():
    fleet = th.Fleet(lambda seed: Quadratic(), 3, loss=lambda output, target: output.mean(), rate=[0.5, 0.1, 1.0])
    start = fleet.parameters["w"].clone()
    fleet.train((X, Y), steps=3, progress=False)
    torch.testing.assert_close(fleet.parameters["w"], start * torch.tensor([[0.5], [0.9], [0.0]]).double() ** 3)


def test_models_with_their_own_loss():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(0)

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.net(x), labels), "logits": self.net(x)}

    fleet = th.Fleet(lambda seed: Own(), 2, loss=None, rate=0.1)
    run = fleet.train({"x": X, "labels": Y}, steps=5, batch_size=8, progress=False)
    plain = th.Fleet(mlp, 2, loss=LOSS, rate=0.1).train((X, Y), steps=5, batch_size=8, progress=False)
    assert run.route == "vmap"
    torch.testing.assert_close(run.loss, plain.loss, rtol=1e-10, atol=0)


def test_tied_weights_and_parameters_out_of_use():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())[:, :3]

    make = lambda seed: Tied().double()  # noqa: E731
    fleet = th.Fleet(make, 2, loss=LOSS, rate=0.1, weight_decay=0.1)
    before = fleet.parameters["idle.weight"].clone()
    run = fleet.train((X, Y), steps=5, progress=False)
    torch.manual_seed(1)
    model = make(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    trace = th.train(model, LOSS, (X, Y), sgd, steps=5, seed=1, progress=False)
    assert run[1].loss == pytest.approx(trace.loss, rel=1e-10)
    assert torch.equal(fleet.parameters["idle.weight"], before)  # as in torch: no gradient, no decay
