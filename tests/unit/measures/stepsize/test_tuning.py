"""Tuning: quadratics whose best rate is known, equal cost, training against held-out data, resuming, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from theodolite.errors import ArgumentError
from theodolite.measures.stepsize import tune_step_size
from theodolite.measures.stepsize.search import tuned_runs as room
from theodolite.testing import ResultContract

QUIET = {"progress": False}


def half_squares(output, target):
    return (output - target).square().mean() / 2


def bowl(eigenvalues, start):
    """½ Σ λᵢ wᵢ² as a linear model: factory and data."""
    n = len(eigenvalues)
    x = torch.diag((n * torch.tensor(eigenvalues, dtype=torch.float64)).sqrt())

    def factory(seed):
        model = nn.Linear(n, 1, bias=False).double()
        model.weight.data[:] = torch.tensor(start, dtype=torch.float64)
        return model

    return factory, (x, torch.zeros(n, 1, dtype=torch.float64))


def best_by_bisection(eigenvalues, start, steps):
    """Where Σ c²λ² z^(2t−1) changes its sign: the minimiser of the loss after t steps (spec A2)."""
    lam, c = torch.tensor(eigenvalues).double(), torch.tensor(start).double()
    low, high = 1 / float(lam.max()), 1 / float(lam.min())
    for _ in range(200):
        eta = (low + high) / 2
        z = 1 - eta * lam
        q = z / z.abs().max()
        if float((c**2 * lam**2 * q.sign() * q.abs() ** (2 * steps - 1)).sum()) > 0:
            low = eta
        else:
            high = eta
    return low


EIGENVALUES, START = [1.0, 1.75, 2.5, 3.25, 4.0], [0.2**0.5] * 5


@pytest.mark.parametrize("search", ["sweep", "gradient", "smoothed"])
def test_the_best_rate_of_a_quadratic_is_found(search):
    factory, data = bowl(EIGENVALUES, START)
    exact = best_by_bisection(EIGENVALUES, START, 5)
    assert exact == pytest.approx(0.36660, abs=1e-5)  # 2/(λ₁ + λ₅) = 0.4 in the long run
    found = tune_step_size(
        factory, "sgd", data, steps=5, loss=half_squares, seeds=1, budget=120, search=search, compare=False, **QUIET
    )
    assert found.best["lr"] == pytest.approx(exact, rel=0.05)
    assert found.critical == pytest.approx(0.5, rel=1e-4)
    assert found.split == "train"
    assert found.search == search
    assert found.by_valid is None


def test_momentum_and_layers_are_tuned_together():
    """A heavy ball on a quadratic: the best lr and momentum beat the best lr alone."""
    factory, data = bowl([1.0, 30.0], [1.0, 1.0])
    options = {"steps": 25, "loss": half_squares, "seeds": 1, "compare": False, **QUIET}
    plain = tune_step_size(factory, "sgd", data, budget=40, **options)
    ball = tune_step_size(factory, "sgd", data, hyper=["lr", "momentum"], budget=100, **options)
    assert ball.score < 0.1 * plain.score
    assert 0.3 <= ball.best["momentum"] < 0.98
    assert len(ball.curve) == 100
    assert plain.best["lr"] == pytest.approx(2 / 31, rel=0.1)


DATA = torch.Generator().manual_seed(0)
X, NOISE = torch.randn(60, 40, generator=DATA), torch.randn(60, 1, generator=DATA)
TEACHER = nn.functional.normalize(torch.randn(40, 1, generator=DATA), dim=0)


def zeros(seed):
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def noisy_task(seed):
    """30 noisy samples to train on, in 40 dimensions: what interpolates them is worse than nothing (spec 2.3)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 40, generator=generator)
    teacher = nn.functional.normalize(torch.randn(40, 1, generator=generator), dim=0)
    y = x @ teacher + 2 * torch.randn(60, 1, generator=generator)
    return (x[:30], y[:30]), (x[30:], y[30:])


def test_on_noisy_data_the_training_loss_asks_for_a_rate_that_overfits():
    found = tune_step_size(
        zeros, "sgd", tasks=noisy_task, steps=40, loss=nn.MSELoss(), seeds=8, budget=160, search="sweep", compare=False, **QUIET
    )
    assert found.overfits
    assert found.ratio > 5
    assert found.by_train["lr"] > 5 * found.by_valid["lr"]
    assert "Your tuning set overfits" in found.sentence()
    best = min(found.curve, key=lambda row: row["score"])
    assert found.best["lr"] == best["lr"] == found.by_valid["lr"]
    assert best["difference"] == best["difference_error"] == 0.0
    paired = [row for row in found.curve if 0 < row["difference"] < best["score"]]
    assert min(row["difference_error"] for row in paired) < 0.5 * best["error"]  # what the runs share does not count
    assert math.isfinite(found.fresh)
    two = {"lr": [found.by_train["lr"], found.by_valid["lr"]]}
    options = {"steps": 40, "loss": nn.MSELoss(), "seeds": 8, "search": "sweep", "compare": False}
    by_train = tune_step_size(zeros, "sgd", tasks=noisy_task, values=two, split="train", **options, **QUIET)
    assert by_train.best == found.by_train
    assert by_train.split == "train"


def test_without_noise_and_with_many_samples_both_agree():
    def task(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(800, 10, generator=generator)
        y = x @ torch.ones(10, 1) + 0.1 * torch.randn(800, 1, generator=generator)
        return (x[:400], y[:400]), (x[400:], y[400:])

    found = tune_step_size(
        lambda seed: nn.Linear(10, 1, bias=False), tasks=task, steps=10, loss=nn.MSELoss(), budget=60, compare=False, **QUIET
    )
    assert not found.overfits
    assert 1 / 3 < found.ratio < 3


def mlp(seed):
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))


def blobs(seed, n=60):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 8, generator=generator) + 2 * torch.eye(3, 8)[y], y


MLP = {"train": blobs(1), "valid": blobs(2), "steps": 12, "batch_size": 20, "loss": nn.CrossEntropyLoss(), **QUIET}


def test_searches_cost_the_same_and_fresh_seeds_decide():
    found = tune_step_size(mlp, "sgd", seeds=2, **MLP)
    spent = [row["gradients"] for row in found.compared]
    assert [row["search"] for row in found.compared] == ["sweep", "random", "gradient"]
    assert max(spent) <= 1.02 * min(spent)
    assert spent[0] == 27 * 2 * 12
    fresh = [row["fresh"] for row in found.compared]
    assert [row["won"] for row in found.compared] == [value == min(fresh) for value in fresh]
    won = next(row for row in found.compared if row["won"])
    assert found.best == {"lr": won["lr"]}
    assert found.search == won["search"]
    assert found.fresh == won["fresh"]
    assert found.health in ("ok", "explodes", "vanishes", "kinked", "diverged")
    assert all(not math.isnan(row["log_loss"]) for row in found.trace)
    assert "At the same number of gradients" in found.sentence()
    assert all(0 <= share <= 1 for share in found.truncated)


def test_five_hyperparameters_follow_the_gradient():
    hyper = ["lr:0", "lr:2", "beta1", "beta2", "weight_decay"]
    found = tune_step_size(mlp, "adamw", seeds=1, budget=81, hyper=hyper, compare=False, **MLP)
    assert found.search == "gradient"
    assert set(found.best) == set(hyper)
    assert found.trace[0]["lr:0"] == found.trace[0]["lr:2"]
    assert found.best["lr:0"] != found.best["lr:2"]
    start = found.trace[0]["log_loss"]
    assert math.log(found.score) < start
    assert found.health == "ok" or found.cost.notes


def test_an_exploding_gradient_is_never_stepped_along():
    """From a rate far above 2/λ, where the derivative explodes, the search walks back; no trace row of a step is unsound."""
    factory, data = bowl([1.0, 4.0], [1.0, 1.0])
    found = tune_step_size(
        factory, "sgd", data, steps=60, loss=half_squares, seeds=1, budget=40, search="gradient", lr=1.4, compare=False, **QUIET
    )
    assert found.health != "ok"
    rows = list(found.trace)
    for row, after in pairwise(rows):
        if row["health"] != "ok":
            assert after["lr"] < row["lr"]  # back, whatever the gradient says
    assert found.best["lr"] == pytest.approx(0.4, rel=0.15)


def test_all_rates_that_diverge_are_said_with_the_critical_one():
    factory, data = bowl([1.0, 4.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"diverges at every learning rate that was tried, from 2 to 9.*critical rate.* is 0\.5"):
        tune_step_size(
            factory, "sgd", data, steps=40, loss=half_squares, values={"lr": [2.0, 9.0]}, seeds=1, compare=False, **QUIET
        )


def test_values_that_are_given_are_swept_and_an_end_is_named():
    factory, data = bowl([1.0, 4.0], [1.0, 1.0])
    found = tune_step_size(
        factory, "sgd", data, steps=30, loss=half_squares, values={"lr": [0.3, 0.1, 0.2]}, seeds=1, compare=False, **QUIET
    )
    assert [row["lr"] for row in found.curve] == [0.1, 0.2, 0.3]
    assert found.at_an_end == ("lr",)
    assert found.best == {"lr": 0.3}


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long), 2])
def test_a_killed_search_goes_on_bitwise(stop, tmp_path, monkeypatch):
    options = {**MLP, "seeds": 2, "budget": 16}
    whole = tune_step_size(mlp, "sgd", **options)
    pieces = 0
    take = room.Ledger.piece

    def killed(self, work):
        nonlocal pieces
        if pieces == stop:
            raise KeyboardInterrupt
        pieces += 1
        return take(self, work)

    with monkeypatch.context() as patched:
        patched.setattr(room.Ledger, "piece", killed)
        with pytest.raises(KeyboardInterrupt):
            tune_step_size(mlp, "sgd", checkpoint=tmp_path, **options)
    with pytest.raises(ArgumentError, match="resume=True"):
        tune_step_size(mlp, "sgd", checkpoint=tmp_path, **options)
    with pytest.raises(ArgumentError, match="other data"):
        tune_step_size(mlp, "sgd", checkpoint=tmp_path, resume=True, **{**options, "steps": 11})
    again = tune_step_size(mlp, "sgd", checkpoint=tmp_path, resume=True, **options)
    assert again.curve == whole.curve
    assert again.compared == whole.compared
    assert again.trace == whole.trace
    assert again.fresh == whole.fresh


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hyper": ["momentun"]}, "no hyperparameter 'momentun'.*nearest: 'momentum'"),
        ({"hyper": ["lr:1"]}, "no hyperparameter 'lr:1'.*'lr:"),
        ({"hyper": ["lr:0", "lr:group0"]}, "both the rate of"),
        ({"hyper": 3}, "hyper must be a list of names"),
        ({"hyper": "lr,momentum"}, r"Give a list: \['lr', 'momentum'\]"),
        ({"hyper": ["lr", "schedule"]}, "th.meta_gradient takes their derivatives"),
        ({"optimizer": lambda p: torch.optim.AdamW([{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:]}])},
         "groups differ in 'weight_decay'"),
        ({"optimizer": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.0}, {"params": p[2:]}], lr=0.1)}, "has lr=0"),
        ({"optimizer": lambda p: torch.optim.SGD([{"params": p[:3]}, {"params": p[3:]}], lr=0.1), "hyper": ["lr:group0", "lr:2"]},
         "both the rate of"),
        ({"optimizer": lambda p: torch.optim.SGD([{"params": p[:3]}, {"params": p[3:]}], lr=0.1), "hyper": ["lr:0"]},
         "lr:0 is layer '0' and parameter group 0. Name the group lr:group0"),
        ({"hyper": ["lr", "lr"]}, "twice"),
        ({"hyper": ["lr", "lr:0"]}, "lr moves the rates of all layers"),
        ({"hyper": ["momentum"]}, "lr is missing"),
        ({"lr": -0.1}, "lr must be a positive number"),
        ({"values": {"lr": [0.1, -0.2]}}, r"values\['lr'\]\[1\] must be a positive number"),
        ({"hyper": ["lr", "momentum"], "values": {"momentum": [1.0]}}, "momentum.*below 1"),
        ({"values": {"momentum": [0.1]}}, "which hyper does not name"),
        ({"valid": None, "split": "valid"}, "needs held-out data"),
        ({"valid": blobs(1)}, "60 samples that are also in train"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)}, "SGD, Adam, AdamW and RMSprop"),
        ({"budget": 2}, "budget must pay for two settings"),
        ({"search": "grid"}, "search must be"),
        ({"tasks": [blobs(3)]}, "one of them"),
        ({"train": None, "valid": None, "tasks": []}, "tasks must be a list of pairs"),
        ({"train": None, "valid": None, "tasks": [blobs(3)[0]]}, "must be a pair"),
        ({"steps": 0}, "steps must be a positive integer"),
    ],
)  # fmt: skip
def test_what_is_refused(options, words):
    arguments = {"factory": mlp, "optimizer": "sgd", "seeds": 2, **MLP, **options}
    with pytest.raises((ValueError, TypeError), match=words):
        tune_step_size(**arguments)


def in_groups(parameters):
    """Two groups, the second at a tenth of the rate of the first."""
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.02, momentum=0.5)


def two_axes(seed):
    """½ (w₁² + 4 w₂²) with each weight a parameter of its own."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(()).double()), nn.Parameter(torch.ones(()).double())

        def forward(self, x):
            return torch.stack([self.a, 2 * self.b]).expand(len(x), 2)

    return Two()


def layers_of_two_axes(seed):
    """The same with each weight in a layer."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
            for layer in (self.a, self.b):
                nn.init.ones_(layer.weight)

        def forward(self, x):
            one = torch.ones_like(x)
            return torch.cat([self.a(one), 2 * self.b(one)], 1)

    return Layers()


BOWL = {"loss": lambda output, target: output.square().sum(1).mean() / 2, "steps": 3, "seeds": 1, "compare": False, **QUIET}
POINT = (torch.zeros(1, 1).double(), torch.zeros(1, 1).double())


def by_hand(first, second, momentum=0.5, steps=3):
    """The loss of `two_axes` after some steps of momentum with a rate for each weight."""
    loss = 0.0
    for rate, curvature in ((first, 1.0), (second, 4.0)):
        w, velocity = 1.0, 0.0
        for _ in range(steps):
            velocity = momentum * velocity + curvature * w
            w -= rate * velocity
        loss += curvature * w**2 / 2
    return loss


def test_groups_keep_the_ratio_of_their_rates():
    found = tune_step_size(two_axes, in_groups, POINT, values={"lr": [0.05, 0.3]}, **BOWL)
    assert [row["score"] for row in found.curve] == pytest.approx([by_hand(0.05, 0.005), by_hand(0.3, 0.03)], rel=1e-12)
    kept = tune_step_size(two_axes, in_groups, POINT, lr=0.4, hyper="momentum", values={"momentum": [0.1, 0.3]}, **BOWL)
    assert [row["score"] for row in kept.curve] == pytest.approx([by_hand(0.4, 0.04, 0.1), by_hand(0.4, 0.04, 0.3)], rel=1e-12)


def test_rates_of_groups_are_tuned_apart():
    """The best rate of the second weight is a fourth of that of the first; the gradient begins at the optimizer's own rates."""
    values = {"lr:0": [0.1, 0.2], "lr:1": [0.02, 0.1]}
    found = tune_step_size(two_axes, in_groups, POINT, hyper=["lr:0", "lr:1"], values=values, **BOWL)
    expected = [by_hand(a, b) for a in values["lr:0"] for b in values["lr:1"]]
    assert [row["score"] for row in found.curve] == pytest.approx(expected, rel=1e-12)
    one = tune_step_size(two_axes, in_groups, POINT, hyper=["lr:1"], values={"lr:1": [0.1, 0.2]}, **BOWL)
    assert [row["score"] for row in one.curve] == pytest.approx([by_hand(0.2, 0.1), by_hand(0.2, 0.2)], rel=1e-12)
    steps = tune_step_size(two_axes, in_groups, POINT, hyper=["lr:0", "lr:1"], search="gradient", budget=20, **BOWL).trace
    assert (steps[0]["lr:0"], steps[0]["lr:1"]) == pytest.approx((0.2, 0.02))
    assert math.exp(steps[0]["log_loss"]) == pytest.approx(by_hand(0.2, 0.02))
    assert steps[0]["slope of lr:1"] == pytest.approx(
        (math.log(by_hand(0.2, 0.02 * math.e**1e-5)) - math.log(by_hand(0.2, 0.02 * math.e**-1e-5))) / 2e-5, rel=1e-6
    )


def test_layers_that_are_not_named_keep_the_rate_to_start_from():
    """A tenth of the critical rate of descent, 2/4, where none is given."""
    options = {"hyper": ["lr:group0"], "values": {"lr:group0": [0.1, 0.2]}, **BOWL}
    one = {"optimizer": lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.3)}
    found = tune_step_size(two_axes, train=POINT, **one, **options)
    assert [row["score"] for row in found.curve] == pytest.approx([by_hand(a, 0.3, 0.0) for a in (0.1, 0.2)], rel=1e-12)
    layered = tune_step_size(layers_of_two_axes, "sgd", POINT, hyper=["lr:a"], values={"lr:a": [0.1, 0.2]}, **BOWL)
    expected = [by_hand(a, 0.1 * layered.critical, 0.0) for a in (0.1, 0.2)]
    assert layered.critical == pytest.approx(0.5)
    assert [row["score"] for row in layered.curve] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_one_beta_is_tuned_and_the_other_held(name):
    """As torch's Adam has it, with betas of its own."""
    values = {"beta1": [0.3, 0.8], "beta2": [0.9, 0.95]}[name]
    adam = lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.5, 0.7))  # noqa: E731
    found = tune_step_size(two_axes, adam, POINT, hyper=[name], values={name: values}, **BOWL)
    assert found.critical is None  # that of descent says little of Adam
    for row in found.curve:
        model = two_axes(0)
        own = {"beta1": 0.5, "beta2": 0.7, name: row[name]}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.3, betas=(own["beta1"], own["beta2"]))
        for _ in range(3):
            optimizer.zero_grad()
            BOWL["loss"](model(POINT[0]), POINT[1]).backward()
            optimizer.step()
        assert row["score"] == pytest.approx(float(BOWL["loss"](model(POINT[0]), POINT[1]).detach()), rel=1e-9)


def test_more_than_two_rates_are_followed_by_gradients():
    options = {"seeds": 1, "compare": False, **MLP, "steps": 4}
    assert tune_step_size(mlp, "sgd", hyper=["lr:0", "lr:2"], budget=9, **options).search == "sweep"
    found = tune_step_size(mlp, "sgd", hyper=["lr:0", "lr:2", "momentum"], budget=9, **options)
    assert found.search == "gradient"
    assert found.at_an_end == ()  # the places of a walk have no ends


def test_a_search_does_not_go_on_with_another_optimizer_or_start(tmp_path):
    """Two functions have one name, and a rate that is held is no range."""
    options = {"hyper": ["momentum"], "seeds": 1, "budget": 4, "compare": False, **MLP, "steps": 4}

    def made(**settings):
        return lambda p: torch.optim.SGD(p, **settings)

    tune_step_size(mlp, made(lr=0.1), checkpoint=tmp_path, **options)
    for other in (made(lr=0.2), made(lr=0.1, nesterov=True, momentum=0.5)):
        with pytest.raises(ArgumentError, match="other data, models or settings"):
            tune_step_size(mlp, other, checkpoint=tmp_path, resume=True, **options)


def dropped(seed):
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 3))


def test_with_dropout_there_is_no_meta_gradient_and_the_sweep_goes_on():
    with pytest.raises(ArgumentError, match=r"search='gradient' is not possible here.*random numbers"):
        tune_step_size(dropped, "sgd", search="gradient", seeds=1, **MLP)
    found = tune_step_size(dropped, "sgd", seeds=1, budget=8, **{**MLP, "steps": 4})
    assert [row["search"] for row in found.compared] == ["sweep", "random", "smoothed"]
    assert any("no meta-gradient was taken" in note for note in found.cost.notes)


def test_a_list_of_tasks_and_a_loader():
    tasks = [(blobs(1), blobs(2)), ([blobs(3, 30), blobs(4, 30)], blobs(5))]
    options = {key: value for key, value in MLP.items() if key not in ("train", "valid")}
    found = tune_step_size(mlp, "sgd", tasks=tasks, seeds=2, budget=16, compare=False, **options)
    assert found.runs == 4
    assert found.split == "valid"
    assert len(found.curve) == 4


class TestStepSizeChoice(ResultContract):
    def make(self):
        return tune_step_size(mlp, "sgd", seeds=2, budget=12, **{**MLP, "steps": 4})
