"""Meta-gradients against runs of torch's own optimizers, against each other, and where the answer is known on paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import ArgumentError, NotRepeatableError
from theodolite.measures.stepsize.meta_gradients.meta_gradient import MetaObjective
from theodolite.measures.stepsize.meta_gradients.unrolled import Task
from theodolite.testing import ResultContract, model_state, same

from .trainings import MODELS, SETTINGS, as_arguments, data, mlp, trained_score

CE = nn.CrossEntropyLoss()


def found(make=mlp, optimizer="sgd", train=None, valid=None, **more):
    return th.meta_gradient(make, optimizer, train or data(), valid, **{"loss": CE, "steps": 20, "progress": False, **more})


# Against what it is the derivative of


@pytest.mark.parametrize("name", SETTINGS)
def test_every_hyperparameter_is_the_slope_of_torchs_own_run(name):
    """Central differences over runs of `th.train` with torch's optimizers: the data order is the same too."""
    train, valid, steps = data(), data(40, seed=1), 12
    settings = SETTINGS[name]
    got = found(mlp, name, train, valid, steps=steps, batch_size=16, hyper=tuple(settings), units="natural",
        check=False, **as_arguments(settings))  # fmt: skip

    def score(setting, value):
        return trained_score(
            mlp, name, {**settings, setting: value}, train, valid, "log_last", steps, batch_size=16, progress=False
        )

    assert got.value == pytest.approx(score("lr", settings["lr"]), rel=1e-12)
    for setting, value in settings.items():
        h = 1e-5 * min(value, 1 - value)
        slope = (score(setting, value + h) - score(setting, value - h)) / (2 * h)
        assert got.gradient[setting] == pytest.approx(slope, rel=1e-6, abs=1e-8), setting


@pytest.mark.parametrize("objective", ["last", "log_last", "segment_mean"])
@pytest.mark.parametrize("model", MODELS)
def test_models_of_every_kind(model, objective):
    make, width = MODELS[model]
    train, valid, steps = data(width=width), data(30, width=width, seed=1), 8
    settings = {**SETTINGS["sgd"], "lr": 0.1}
    got = found(make, "sgd", train, valid, steps=steps, batch_size=20, objective=objective, hyper=("lr", "momentum"),
        check=False, **settings)  # fmt: skip

    def score(rate):
        return trained_score(make, "sgd", {**settings, "lr": rate}, train, valid, objective, steps, batch_size=20, progress=False)

    slope = (score(0.1 * math.exp(1e-5)) - score(0.1 * math.exp(-1e-5))) / 2e-5
    assert got.gradient["lr"] == pytest.approx(slope, rel=1e-6)
    back = found(make, "sgd", train, valid, steps=steps, batch_size=20, objective=objective, hyper=("lr", "momentum"),
        check=False, mode="reverse", segment=3, **settings)  # fmt: skip
    for name in got.gradient:
        assert got.gradient[name] == pytest.approx(back.gradient[name], rel=1e-10)


def test_forward_is_reverse_is_a_plain_unrolled_run():
    """100 steps with momentum: forward, reverse and autograd through a loop that shares nothing with either."""
    train = data()
    got, back = (
        found(mlp, "sgd", train, steps=100, lr=0.1, momentum=0.9, mode=mode, check=False) for mode in ("forward", "reverse")
    )
    torch.manual_seed(0)
    model = mlp()
    names, rate = [n for n, _ in model.named_parameters()], torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    velocity = [torch.zeros_like(p) for p in weights]
    for _ in range(100):
        loss = CE(torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (train[0],)), train[1])
        gradient = torch.autograd.grad(loss, weights, create_graph=True)
        velocity = [0.9 * v + g for v, g in zip(velocity, gradient, strict=True)]
        weights = [w - rate * v for w, v in zip(weights, velocity, strict=True)]
    loss = CE(torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (train[0],)), train[1])
    truth = 0.1 * float(torch.autograd.grad(loss.log() / 100, rate)[0])
    assert got.gradient["lr"] == pytest.approx(truth, rel=1e-10)
    assert back.gradient["lr"] == pytest.approx(truth, rel=1e-10)
    assert got.gradient["lr"] == pytest.approx(truth, rel=1e-10)


def test_closed_forms_and_double_backward_agree():
    """A Sequential takes the closed form; the same network in a module of its own does not."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x)

    how = {"batch_size": 16, "hyper": ("lr", "momentum", "weight_decay"), **SETTINGS["sgd"], "check": False}
    closed, traced = found(**how), found(lambda seed: Own(), **how)
    assert "closed form" in closed.cost.route
    assert traced.cost.route == "double backward"
    for name in closed.gradient:
        assert closed.gradient[name] == pytest.approx(traced.gradient[name], rel=1e-11)


def test_layers_groups_and_knots_add_up_to_the_whole():
    """In units of log lr the derivatives of all layers, of all groups, and of all knots sum to that of the rate."""
    hyper = ("lr", "lr:0", "lr:1", "lr:2", "schedule", "weight_decay:2", "weight_decay:0", "weight_decay")

    def groups(parameters):
        first, rest = parameters[:2], parameters[2:]
        return torch.optim.SGD([{"params": first, "lr": 0.2}, {"params": rest}], lr=0.1, momentum=0.5, weight_decay=0.01)

    got = found(mlp, groups, hyper=hyper, batch_size=16, schedule=lambda step: 1 / (1 + step / 10), check=False).gradient
    # A layer named as a group is the layer's; "1" is the second group alone.
    assert sum(got[f"schedule[{k}]"] for k in range(5)) == pytest.approx(got["lr"], rel=1e-10)
    assert got["lr:0"] + got["lr:1"] == pytest.approx(got["lr"], rel=1e-10)
    assert got["lr:2"] == pytest.approx(got["lr:1"], rel=1e-10)
    assert got["weight_decay:0"] + got["weight_decay:2"] == pytest.approx(got["weight_decay"], rel=1e-10)


def test_settings_of_layers_and_knots_in_reverse_and_by_differences():
    hyper = ("lr:0", "schedule[1]", "momentum:2", "weight_decay")
    training = MetaObjective(_task(hyper, knots=3), "last")
    got = training.at()
    back = MetaObjective(_task(hyper, knots=3), "last", mode="reverse").at()
    for i, name in enumerate(hyper):
        assert got.gradient[name] == pytest.approx(back.gradient[name], rel=1e-9)
        ends = []
        for way in (-1e-5, 1e-5):
            shift = torch.zeros(len(hyper), dtype=torch.float64)
            shift[i] = way
            ends.append(training.evaluate(shift).value)
        assert got.gradient[name] == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-6)


def _task(hyper, **more):
    settings = {"lr": 0.2, "momentum": 0.6, "weight_decay": 0.01}
    return Task(mlp, "sgd", data(), None, CE, 10, hyper, settings, "train", batch_size=16, **more)


def test_the_derivative_at_other_values_is_that_of_an_optimizer_with_them():
    training = MetaObjective(_task(("lr", "momentum")))
    there = training.at({"lr": 0.1, "momentum": 0.9})
    other = found(steps=10, batch_size=16, hyper=("lr", "momentum"), lr=0.1, momentum=0.9, weight_decay=0.01, check=False)
    assert there.values == pytest.approx({"lr": 0.1, "momentum": 0.9})
    assert there.value == pytest.approx(other.value, rel=1e-12)
    for name in there.gradient:
        assert there.gradient[name] == pytest.approx(other.gradient[name], rel=1e-10)
    again = training.at()
    assert again.value != there.value
    assert training.at().gradient == again.gradient


def test_float32_is_close_to_float64():
    def single(seed):
        torch.manual_seed(seed)
        return mlp(seed).float()

    x, y = data()
    narrow = found(single, train=(x.float(), y), lr=0.2, momentum=0.5, batch_size=16, check=False)
    wide = found(lambda seed: single(seed).double(), lr=0.2, momentum=0.5, batch_size=16, check=False)
    assert narrow.gradient["lr"] == pytest.approx(wide.gradient["lr"], rel=1e-3)


def test_smoothed_runs_find_the_same_slope():
    hyper = ("lr", "momentum", "weight_decay")
    how = {"batch_size": 16, "hyper": hyper, **SETTINGS["sgd"]}
    exact = found(**how, check=False)
    fleet = found(**how, mode="smoothed", pairs=12, spread=0.003)
    for name in hyper:
        assert fleet.gradient[name] == pytest.approx(exact.gradient[name], rel=2e-3, abs=5 * fleet.error[name] + 1e-6)
    assert fleet.value == pytest.approx(exact.value, rel=1e-9)
    assert fleet.products == 0


# Where the answer is known


class Quadratic(nn.Module):
    """½ ‖Xᵀw‖² as a sum of squares."""

    def __init__(self, x, start):
        super().__init__()
        self.w = nn.Parameter(start.clone())
        self.register_buffer("x", x)

    def forward(self, ones):
        return (self.w @ self.x)[None] * ones


def quadratic(size=6, seed=0, dtype=torch.float64):
    """X (d, 2d), the start, and the eigenvalues and squared coordinates that the closed form takes."""
    generator = torch.Generator().manual_seed(seed)
    x, start = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((size, 2 * size), (size,)))
    values, vectors = torch.linalg.eigh(x @ x.T)
    ones = torch.ones(1, 1, dtype=dtype)
    batch = (ones, torch.zeros(1, 2 * size, dtype=dtype))
    return (lambda seed: Quadratic(x.to(dtype), start.to(dtype))), batch, values, (vectors.T @ start).square()


def half_sum(output, target):
    return (output - target).square().sum() / 2


def closed_form(rate, steps, values, squares):
    """F and dF/dη of (1/t) log f(w_t), both scaled by the largest |1 − ηλ|."""
    z = 1 - rate * values
    scale = z.abs().max()
    q = z / scale
    even, odd = q.abs() ** (2 * steps), q.sign() * q.abs() ** (2 * steps - 1)
    f = (squares * values * even).sum()
    return float(2 * scale.log() + (f / 2).log() / steps), float(-2 / scale * (squares * values**2 * odd).sum() / f)


@pytest.mark.parametrize("share", [0.5, 1.5, 2.4])
def test_a_quadratic_by_the_closed_form(share):
    make, batch, values, squares = quadratic()
    rate = share / float(values[-1])
    got = found(make, "sgd", batch, loss=half_sum, steps=60, lr=rate, units="natural")
    value, slope = closed_form(rate, 60, values, squares)
    assert got.value == pytest.approx(value, rel=1e-10)
    assert got.gradient["lr"] == pytest.approx(slope, rel=1e-9)
    if share < 2:
        assert got.health == "ok"
        assert got.horizon == math.inf
    else:
        assert got.health == "explodes"
        assert got.growth == pytest.approx(math.log(share - 1), rel=0.01)
        assert got.horizon == pytest.approx(1 / math.log(share - 1), rel=0.01)
        assert "explodes" in got.sentence()


def test_reverse_mode_sees_the_same_growth():
    make, batch, values, _ = quadratic()
    got = found(make, "sgd", batch, loss=half_sum, steps=80, lr=2.4 / float(values[-1]), mode="reverse", check=False)
    assert got.health == "explodes"
    assert got.growth == pytest.approx(math.log(1.4), rel=0.01)


@pytest.mark.long
def test_float32_is_right_where_plain_autograd_gives_nan():
    """A well-conditioned quadratic, t = 2000: the loss falls below what float32 holds."""
    make, batch, values, squares = quadratic(20, dtype=torch.float32)
    rate, steps = 1.0 / float(values[-1]), 2000
    got = found(make, "sgd", batch, loss=half_sum, steps=steps, lr=rate, units="natural", check=False)
    assert got.gradient["lr"] == pytest.approx(closed_form(rate, steps, values, squares)[1], rel=1e-5)
    assert any("float64" in note for note in got.cost.notes)
    assert not math.isfinite(_plain_autograd(make(0), batch, rate, steps))


def _plain_autograd(model, batch, rate, steps):
    eta = torch.tensor(rate, requires_grad=True)
    w, matrix = model.w.detach(), model.x @ model.x.T
    for _ in range(steps):
        w = w - eta * (matrix @ w)
    return float(torch.autograd.grad((half_sum((w @ model.x)[None], batch[1])).log() / steps, eta)[0])


def test_memory_does_not_grow_with_the_steps():
    """Peaks of torch's own allocations, counted by the profiler."""

    def peak(steps):
        from torch.profiler import ProfilerActivity, profile

        def wide(seed):
            return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)).double()

        task = Task(wide, "sgd", data(), None, CE, steps, ("lr", "momentum"), {"lr": 0.1, "momentum": 0.5}, "train")
        training = MetaObjective(task)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            training.at()
        events = recorded.profiler.kineto_results.events()
        total = most = 0
        for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            total += change
            most = max(most, total)
        return most

    assert peak(150) <= 1.1 * peak(15)


# Health


def test_a_run_that_diverges_is_said_to():
    x = data()[0]
    got = found(lambda seed: nn.Linear(5, 1).double(), train=(x, x[:, :1]), loss=nn.MSELoss(), steps=400, lr=50.0)
    assert got.health == "diverged"
    assert "diverges" in got.sentence()
    assert not got.outcome.good
    assert math.isnan(got.gradient["lr"])
    assert not got.usable


def test_a_derivative_may_vanish():
    """The last loss of a quadratic that has long been solved no longer feels the rate; its logarithm does."""
    make, batch, values, _ = quadratic()
    how = {"loss": half_sum, "steps": 400, "lr": 1.0 / float(values[-1]), "check": False}
    assert found(make, "sgd", batch, objective="last", **how).health == "vanishes"
    assert found(make, "sgd", batch, objective="log_last", **how).health == "ok"


class Logistic(nn.Module):
    """A loss f whose step at rate 1 is the logistic map, w − f'(w) = 4w(1 − w): chaotic, bounded, Lyapunov exponent log 2."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.3]], dtype=torch.float64))

    def forward(self, x):
        return (2 - 1.5 * self.w**2 + 4 / 3 * self.w**3) * x


@pytest.mark.long
def test_gradients_beyond_floats_are_kept_by_their_logarithm():
    x, steps = torch.ones(1, 1).double(), 1100
    got = found(lambda seed: Logistic(), train=(x, x), loss=lambda out, _: out.mean(), steps=steps, lr=1.0, check=False)
    assert math.isinf(got.gradient["lr"])
    assert got.log_scale["lr"] == pytest.approx(steps * math.log(2), rel=0.05)
    # Exponents of some hundred steps of a chaotic map scatter by a few percent.
    assert got.growth == pytest.approx(math.log(2), rel=0.06)
    assert got.horizon == pytest.approx(1 / math.log(2), rel=0.06)
    assert got.health == "explodes"
    assert "10^" in got.sentence()
    back = found(
        lambda seed: Logistic(), train=(x, x), loss=lambda out, _: out.mean(), steps=steps, lr=1.0, mode="reverse", check=False
    )
    assert back.log_scale["lr"] == pytest.approx(got.log_scale["lr"], rel=1e-3)
    assert back.growth == pytest.approx(math.log(2), rel=0.06)


def deep(activation):
    """A small network whose units switch all the time where the activation has a kink."""
    return lambda seed: nn.Sequential(nn.Linear(5, 24), activation(), nn.Linear(24, 24), activation(), nn.Linear(24, 3)).double()


@pytest.mark.long
def test_relu_is_kinked_where_gelu_is_not():
    """The derivative is the slope over 1e-7 for both; over one percent ReLU's is another, GELU's the same."""
    how = {"train": data(64, seed=3), "steps": 200, "lr": 0.3, "objective": "last", "batch_size": 16}
    relu, gelu = (found(deep(activation), **how) for activation in (nn.ReLU, nn.GELU))
    assert relu.health == "kinked"
    assert relu.agreement["lr"] < 0.8
    assert "kinked" in relu.sentence()
    assert gelu.health == "ok"
    assert gelu.agreement["lr"] > 0.95
    task = Task(deep(nn.ReLU), "sgd", how["train"], None, CE, 200, ("lr",), {"lr": 0.3}, "train", batch_size=16)
    training = MetaObjective(task, "last")
    low, high = (training.evaluate(torch.tensor([way * 1e-7]).double()).value for way in (-1, 1))
    assert relu.gradient["lr"] == pytest.approx((high - low) / 2e-7, rel=1e-3)


@pytest.mark.long
def test_a_high_rate_with_momentum_explodes():
    how = {"train": data(64, seed=3), "steps": 400, "objective": "last", "batch_size": 16, "momentum": 0.9, "check": False}
    wild = found(deep(nn.ReLU), lr=0.3, **how)
    assert wild.health == "explodes"
    assert wild.log_scale["lr"] > math.log(1e4)
    assert not wild.usable
    assert found(deep(nn.ReLU), lr=0.003, **how).health == "ok"


# What is refused, and what is left alone


class Dropped(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Dropout(rate), nn.Linear(7, 3)).double()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"make": lambda seed: Dropped(0.5)}, NotRepeatableError, "nn.Dropout"),
        ({"make": lambda seed: batchnormed()}, ValueError, "BatchNorm"),
        ({"lr": -0.1}, ValueError, "lr must be at least 0"),
        ({"lr": None}, ValueError, "lr is missing"),
        ({"lr": 0.0}, ValueError, "no logarithm"),
        ({"hyper": "momentun"}, ValueError, "nearest: momentum"),
        ({"hyper": "lr:3"}, ValueError, "nearest: lr"),
        ({"hyper": ("lr", "lr")}, ValueError, "twice"),
        ({"hyper": "lr:0", "lr": None,
          "optimizer": lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1)}, ValueError, "lr:group0"),
        ({"hyper": ()}, ValueError, "hyper must be a sequence"),
        ({"hyper": "beta1"}, ValueError, "SGD has no hyperparameter"),
        ({"hyper": "weight_decay"}, ValueError, "units='natural'"),
        ({"split": "valid"}, ValueError, "needs validation data"),
        ({"valid": data()}, ArgumentError, "also in train"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)}, ValueError, "update rules of SGD, Adam, AdamW and RMSprop"),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), "lr": None}, ValueError, "amsgrad"),
        ({"optimizer": "sdg"}, ValueError, "did you mean 'sgd'"),
        ({"optimizer": lambda p: torch.optim.SGD(p[:1], lr=0.1)}, ValueError, "in no group"),
        ({"betas": (0.9, 0.99)}, ValueError, "no setting betas"),
        ({"make": lambda seed: mlp().half()}, ValueError, "float32"),
        ({"objective": "lst"}, ValueError, "objective must be"),
    ],
)  # fmt: skip
def test_bad_input_is_explained(given, error, words):
    with pytest.raises(error, match=words):
        found(**{"lr": 0.1, "steps": 3, **given})


def test_other_values_must_be_hyperparameters_in_their_range():
    training = MetaObjective(_task(("lr", "momentum")))
    with pytest.raises(ValueError, match="not among the hyperparameters"):
        training.at({"lrr": 0.1})
    with pytest.raises(ValueError, match="below 1"):
        training.at({"momentum": 1.5})


def batchnormed():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def test_batchnorm_may_be_smoothed():
    got = found(lambda seed: batchnormed(), lr=0.1, steps=5, mode="smoothed", pairs=4)
    assert math.isfinite(got.gradient["lr"])
    assert got.cost.route == "one fleet"


def test_the_model_and_the_random_state_are_left_as_found():
    model = mlp()
    before, random = model_state(model), torch.get_rng_state()
    for mode in ("forward", "reverse", "smoothed"):
        found(lambda seed: model, lr=0.1, steps=4, mode=mode, pairs=2)
        assert same(model_state(model), before)
        assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match="broken"):
        found(lambda seed: model, lr=0.1, steps=4, loss=_Broken())
    assert same(model_state(model), before)


class _Broken(nn.CrossEntropyLoss):
    calls = 0

    def forward(self, output, target):
        type(self).calls += 1
        if type(self).calls > 12:
            raise RuntimeError("broken")
        return super().forward(output, target)


def test_a_loader_and_a_list_are_taken_in_their_order():
    x, y = data()
    batches = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20)
    a, b = (found(train=given, lr=0.1, steps=7, check=False) for given in (batches, loader))
    assert a.gradient == b.gradient


class TestMetaGradient(ResultContract):
    def make(self):
        return found(lr=0.1, momentum=0.5, hyper=("lr", "momentum"), steps=6, batch_size=16)


class TestSmoothedMetaGradient(ResultContract):
    def make(self):
        return found(lr=0.1, steps=6, mode="smoothed", pairs=3)


class TestDivergedMetaGradient(ResultContract):
    def make(self):
        x = data()[0]
        return found(lambda seed: nn.Linear(5, 1).double(), train=(x, x[:, :1]), loss=nn.MSELoss(), steps=400, lr=50.0)
