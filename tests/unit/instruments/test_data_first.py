"""What is wrong with the data is found by its name, its advice helps on a copy, and healthy data raise no alarm."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import data as data_sets
from theodolite.instruments import Survey, SurveyContext
from theodolite.instruments.data.labels import Labels, balanced_loss
from theodolite.instruments.remedies import leave_out
from theodolite.instruments.timings import Work
from theodolite.measures.data_audit import audit_labels
from theodolite.measures.trials import copied_setup
from theodolite.results import CAUSES, Finding, Severity

DATA = ["columns", "targets", "labels", "samples", "validation", "inputs", "weighting"]
Pair = tuple[Any, Any]


def look(model: nn.Module, loss: Any, data: Any, *, trials: bool = False, **given: Any) -> Survey:
    only = [*(name for name in DATA if name != "validation" or "valid" in given), *(["trials"] if trials else [])]
    return th.survey(model, loss, data, only=only, progress=False, **given)


def serious(survey: Survey) -> list[Finding]:
    found = [f for f in survey.findings if f.severity.rank >= Severity.WARNING.rank]
    assert all(f.cause in CAUSES and f.advice for f in found), found
    return found


def one(survey: Survey, label: str) -> Finding:
    (found,) = [f for f in survey.findings if f.label == label]
    return found


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), *[part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    )


@cache
def digits() -> tuple[Pair, Pair]:
    found = data_sets.load("digits").scaled()
    order = torch.randperm(len(found.y_train), generator=torch.Generator().manual_seed(0))
    x, y = found.x_train[order].flatten(1), found.y_train[order]
    return (x[:800], y[:800]), (x[800:1200], y[800:1200])


def table(n: int = 600, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Standardised columns, and a smooth target of order one."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.normal(size=(n, 4)), columns=["age", "income", "ratio", "timestamp"])
    y = np.sin(frame["age"]) + 0.5 * frame["income"] * frame["ratio"] + 0.3 * frame["timestamp"] + 0.1 * rng.normal(size=n)
    return frame, y.to_frame("price")


# What is planted is found


def raw(frame: pd.DataFrame) -> pd.DataFrame:
    return frame * [12, 41_000, 0.1, 9e6] + [40, 52_000, 0.3, 1.6e9]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_raw_columns_are_named_and_standardising_them_helps(optimizer):
    frame, y = table()
    found = look(mlp(4, 32, 1), nn.MSELoss(), (raw(frame), y), optimizer=optimizer, lr=3e-3, trials=True)
    scale = one(found, "input scale")
    assert [f.cause for f in serious(found)] == ["input scale"]
    assert "'timestamp' has mean 1.6e+09" in scale.sentence
    assert "'ratio' a spread of 0." in scale.sentence
    assert "'income' (48 900, 38 500)" in scale.advice
    assert found.results["trials"].of("input scale")["better"]
    assert found.causes == ("input scale",)


def test_images_in_bytes_are_too_large_unless_the_model_divides_them():
    (x, y), _ = digits()
    found = look(mlp(64, 32, 10), nn.CrossEntropyLoss(), (255 * x, y), lr=0.1, trials=True)
    assert one(found, "input scale").advice == "Divide the inputs by 255."
    assert found.results["trials"].of("input scale")["better"]

    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(64, 32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x / 255)

    for model in (Divides(), nn.Sequential(nn.BatchNorm1d(64), mlp(64, 32, 10))):
        assert "inputs scaled" in look(model, nn.CrossEntropyLoss(), (255 * x, y)).labels()


def test_a_tiny_column_matters_where_the_targets_depend_on_it():
    frame, _ = table()
    tiny = frame * [1, 1, 1, 1e-4]
    model = mlp(4, 16, 1)
    assert serious(look(model, nn.MSELoss(), (tiny, frame[["timestamp"]])))[0].label == "input scale"
    note = one(look(model, nn.MSELoss(), (tiny, frame[["age"]])), "input scale")
    assert note.severity is Severity.NOTE


def test_columns_that_are_nearly_the_same_cost_where_their_difference_counts():
    frame, _ = table()
    twin = frame.assign(income=frame["age"] + 1e-3 * frame["income"])
    model = mlp(4, 16, 1)
    note = one(look(model, nn.MSELoss(), (twin, frame[["age"]])), "collinear inputs")
    assert note.severity is Severity.NOTE
    assert "'age' and 'income' are nearly the same" in note.sentence
    difference = (1e3 * (twin["income"] - twin["age"])).to_frame()
    found = look(model, nn.MSELoss(), (twin, difference), optimizer="adamw", lr=3e-3, trials=True)
    assert [f.label for f in serious(found)] == ["collinear inputs"]
    assert found.results["trials"].of("collinear inputs")["better"]


def test_targets_far_from_the_outputs_are_standardised():
    frame, y = table()
    found = look(mlp(4, 32, 1), nn.MSELoss(), (frame, 250_000 + 40_000 * y), optimizer="adamw", lr=3e-3, trials=True)
    scale = one(found, "target scale")
    assert serious(found) == [scale]
    assert scale.advice.startswith("Train on (target - 251 000) / 34 700")
    assert found.results["trials"].of("target scale")["better"]


@pytest.mark.parametrize("shape", [(24, 1), (2, 12), (24,), ()])
def test_targets_of_any_shape_are_standardised(shape):
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = 5e4 + 300 * x.sum(1)[(..., *[None] * len(shape))].expand(-1, *shape)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, y[0].numel()), nn.Unflatten(1, shape) if shape else nn.Flatten(0))
    found = look(model, nn.MSELoss(), (x, y), optimizer="adamw", lr=3e-3, trials=True)
    trial = found.results["trials"].of("target scale")
    assert trial["better"], trial["not_tried"]


def test_a_few_targets_far_outside_the_others_are_left_out():
    frame, y = table()
    spoilt = y.copy()
    spoilt.iloc[[3, 50], 0] = [4e3, -6e3]
    found = look(mlp(4, 32, 1), nn.MSELoss(), (frame, spoilt), optimizer="adamw", lr=3e-3, trials=True)
    outliers = one(found, "outliers")
    assert serious(found) == [outliers]
    assert "2 samples of" in outliers.sentence
    assert "(50, 3)" in outliers.sentence
    assert outliers.value > 0.99
    assert found.results["trials"].of("outliers")["better"]


def own_squares(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return ((z - t) ** 2).sum() / len(t)


@pytest.mark.parametrize(
    ("loss", "squared"),
    [
        (own_squares, True),
        (nn.HuberLoss(), False),
        (lambda z, t: (z - t).abs().mean(), False),
        (nn.PoissonNLLLoss(), False),
        (lambda z, t: torch.log1p((z - t) ** 2).mean(), False),
    ],
)
def test_outliers_decide_where_errors_are_squared(loss, squared):
    frame, y = table()
    y.iloc[[3, 50], 0] = [4e3, 6e3]
    assert ("outliers" in look(mlp(4, 32, 1), loss, (frame, y)).labels()) is squared


def test_large_targets_that_the_model_fits_are_no_outliers():
    x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0))
    x[:4, 0] = torch.tensor([300.0, -400.0, 500.0, 450.0])
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.99, 0.0]]))
        model.bias.zero_()
    found = look(model, nn.MSELoss(), (x, x[:, :1]))
    assert found.results["targets"].outlier_share > 0.9
    assert "outliers" not in found.labels()


def noisy(share: float) -> tuple[Pair, torch.Tensor]:
    (x, y), _ = digits()
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=generator) < share
    return (x, torch.where(wrong, (y + torch.randint(1, 10, (len(y),), generator=generator)) % 10, y)), wrong


def test_wrong_labels_are_found_and_leaving_them_out_helps():
    data, wrong = noisy(0.3)
    model = mlp(64, 64, 10)
    th.train(
        model, nn.CrossEntropyLoss(), data, lambda p: torch.optim.AdamW(p, lr=3e-3), steps=200, batch_size=32, progress=False
    )
    found = look(model, nn.CrossEntropyLoss(), data, optimizer="adamw", lr=3e-3, valid=digits()[1], trials=True)
    noise = one(found, "label noise")
    assert [f.label for f in serious(found)] == ["label noise"]
    assert abs(noise.value - float(wrong.double().mean())) < 3 * noise.error
    named = [int(word.strip(",;")) for word in noise.advice.split("samples ")[1].split(";")[0].split()]
    assert len(named) == 10
    assert float(wrong[named].double().mean()) >= 0.9
    assert found.results["trials"].of("label noise")["better"]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_shuffled_targets_do_not_fit(kind):
    if kind == "classes":
        ((x, y), _), loss, model = digits(), nn.CrossEntropyLoss(), mlp(64, 32, 10)
    else:
        frame, prices = table()
        x, y = (torch.tensor(part.to_numpy()).float() for part in (frame, prices))
        loss, model = nn.MSELoss(), mlp(4, 16, 1)
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    (found,) = serious(look(model, loss, (x, shuffled)))
    assert found.label == "labels do not fit"
    assert found.severity is (Severity.CRITICAL if kind == "classes" else Severity.WARNING)


def test_labels_are_priced_with_validation_data_and_classes():
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))

    def work(classes: int, **given: Any) -> Work:
        problem = th.Problem(nn.Linear(3, classes), nn.CrossEntropyLoss(), (x, torch.arange(1000) % classes))
        valid = {name: problem.on(data) for name, data in given.items()}
        return Labels().cost(SurveyContext(problem, **valid))

    assert work(2, valid=(x[:500], torch.arange(500) % 2)).gradients == pytest.approx(1.5 * work(2).gradients)
    assert work(200).seconds > 2 * work(2).seconds
    assert work(200).bytes > work(2).bytes


def test_a_parity_of_bits_is_no_alarm():
    bits = torch.randint(2, (500, 12), generator=torch.Generator().manual_seed(0)).float()
    found = look(mlp(12, 16, 2), nn.CrossEntropyLoss(), (bits, bits[:, :5].sum(1).long() % 2))
    assert serious(found) == []


def test_a_rare_class_is_called_as_the_user_calls_it_and_weights_help():
    (x, y), _ = digits()
    rows = torch.cat([torch.nonzero(y != 8).flatten(), torch.nonzero(y == 8).flatten()[:8]])
    kinds = pd.Series(pd.Categorical.from_codes((y[rows] == 8).long().tolist(), ["fine", "fraud"]))
    found = look(mlp(64, 32, 2), nn.CrossEntropyLoss(), (x[rows], kinds), lr=0.05, trials=True)
    rare = one(found, "class imbalance")
    assert rare.severity is Severity.WARNING
    assert rare.sentence.startswith(f"Class 'fraud' has 8 of {len(rows)} samples")
    assert found.results["trials"].of("class imbalance")["better"]
    loss = nn.CrossEntropyLoss()
    look(mlp(64, 32, 2), loss, (x[rows], kinds), lr=0.05, trials=True)
    assert loss.weight is None
    weighed = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 90.0]))
    assert "class imbalance" not in look(mlp(64, 32, 2), weighed, (x[rows], kinds)).labels()
    one_class = look(mlp(64, 32, 2), loss, (x[:50], torch.zeros(50).long()))
    assert "one class" in [f.label for f in serious(one_class)]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("make", [nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_a_balanced_loss_keeps_its_settings(make, reduction):
    binary = make is nn.BCEWithLogitsLoss
    y = (torch.arange(200) % 20 == 0).long()
    target = y[:, None].float() if binary else y
    problem = th.Problem(nn.Linear(2, 1 if binary else 2), make(reduction=reduction), (torch.randn(200, 2), target))
    loss = balanced_loss(problem, audit_labels(problem))
    assert loss.reduction == reduction
    weights = [1.0, float(loss.pos_weight)] if binary else loss.weight.tolist()
    assert weights[1] / weights[0] == pytest.approx(19)


def several_labels() -> Pair:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(800, 30, generator=generator), 0.3 * torch.randn(800, 4, generator=generator)
    return x, (x @ torch.randn(30, 4, generator=generator) / 30**0.5 + noise > 1.3).float()


@pytest.mark.parametrize("factor", [200.0, None])
def test_a_wrong_pos_weight_is_named_and_the_right_one_tried(factor):
    x, y = several_labels()
    right = (1 - y).sum(0) / y.sum(0)
    loss = nn.BCEWithLogitsLoss(pos_weight=1 / right if factor is None else factor * right)
    found = look(mlp(30, 32, 4), loss, (x, y), lr=3e-3, optimizer="adamw", trials=True)
    wrong = one(found, "pos_weight")
    assert [f.cause for f in serious(found)] == ["pos_weight"]
    assert f"times too {'small' if factor is None else 'large'}" in wrong.sentence
    assert found.results["trials"].of("pos_weight")["better"]
    assert found.causes == ("pos_weight",)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 1.5])
def test_a_pos_weight_between_none_and_the_balanced_one_is_no_alarm(share):
    x, y = several_labels()
    loss = nn.BCEWithLogitsLoss(pos_weight=((1 - y).sum(0) / y.sum(0)) ** share)
    assert serious(look(mlp(30, 32, 4), loss, (x, y))) == []


def test_validation_samples_from_the_training_data_and_from_elsewhere():
    (x, y), (vx, vy) = digits()
    leaked = look(
        mlp(64, 32, 10), nn.CrossEntropyLoss(), (x, y), valid=(torch.cat([vx[:100], x[:100]]), torch.cat([vy[:100], y[:100]]))
    )
    (found,) = serious(leaked)
    assert (found.label, found.value) == ("leaked validation", 0.5)
    assert "100, 101, 102" in found.sentence
    frame, prices = table()
    later = (frame[400:].assign(income=lambda f: f["income"] + 2), prices[400:])
    shifted = look(mlp(4, 16, 1), nn.MSELoss(), (frame[:400], prices[:400]), valid=later)
    (found,) = serious(shifted)
    assert found.label == "validation shift"
    assert "'income' is shifted by 2" in found.sentence


def test_copies_that_contradict_each_other():
    (x, y), _ = digits()
    data = torch.cat([x, x[:60]]), torch.cat([y, (y[:60] + 3) % 10])
    found = look(mlp(64, 32, 10), nn.CrossEntropyLoss(), data)
    assert "contradictory labels" in [f.label for f in serious(found)]
    first, label, second, other = map(int, re.findall(r"(\d+)[:,)]", one(found, "contradictory labels").sentence)[:4])
    assert (second - first, label, other) == (800, int(y[first]), int(y[first] + 3) % 10)
    assert one(found, "duplicated samples").severity is Severity.NOTE


def test_validation_text_that_speaks_of_other_things_is_no_alarm():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(low, low + 8, (200, 20), generator=generator) for low in (0, 4))
    found = look(Tagger(), nn.CrossEntropyLoss(), (first, first), valid=(second, second))
    assert one(found, "validation shift").severity is Severity.NOTE
    assert serious(found) == []


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).movedim(-1, 1)


def tokens(longest: int) -> Pair:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 12, (60, 16), generator=generator)
    ids = torch.where(torch.arange(16) < torch.randint(3, longest, (60, 1), generator=generator), ids, 0)
    return ids, torch.where(ids > 0, ids, -100)


def test_padding_above_a_half():
    found = serious(look(Tagger(), nn.CrossEntropyLoss(), tokens(8)))
    assert [f.label for f in found] == ["padding"]
    assert serious(look(Tagger(), nn.CrossEntropyLoss(), tokens(17))) == []


def test_of_a_single_sample_nothing_is_praised():
    found = look(nn.Linear(2, 1), nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
    assert "samples differ" not in found.labels()
    assert "All 1" not in found.results["samples"].sentence()


def test_constant_and_copied_columns_are_named():
    frame, y = table(100)
    found = look(mlp(6, 8, 1), nn.MSELoss(), (frame.assign(year=2020, years=3 * frame["age"] + 1), y))
    assert "('year')" in one(found, "constant feature").sentence
    assert "('age' = 'years')" in one(found, "duplicated feature").sentence
    used = th.survey(mlp(4, 8, 1), nn.MSELoss(), (frame, y), only=["features"], progress=False)
    assert any(f"'{name}' (" in one(used, "input directions").sentence for name in frame.columns)


# Healthy data raise no alarm


def image_set(name: str) -> Callable[[], tuple[nn.Module, Any, Pair, Pair]]:
    def make() -> tuple[nn.Module, Any, Pair, Pair]:
        try:
            found = data_sets.load(name).subset(900, 0, seed=0).scaled()
        except data_sets.MissingDataError as error:
            pytest.skip(str(error))
        x, y = found.x_train, found.y_train
        torch.manual_seed(0)
        channels, side = x.shape[1], x.shape[2]
        model = nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * ((side - 1) // 2) ** 2, 10)
        )
        return model, nn.CrossEntropyLoss(), (x[:600], y[:600]), (x[600:], y[600:])

    return make


def flat_digits() -> tuple[nn.Module, Any, Pair, Pair]:
    return mlp(64, 32, 10), nn.CrossEntropyLoss(), *digits()


def standard_table() -> tuple[nn.Module, Any, Pair, Pair]:
    frame, y = table()
    return mlp(4, 16, 1), nn.MSELoss(), (frame[:400], y[:400]), (frame[400:], y[400:])


def one_hot_table() -> tuple[nn.Module, Any, Pair, Pair]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.integers(0, 5, 600).astype(str) for name in ("kind", "place", "day")})
    x = pd.get_dummies(frame)
    y = pd.Series(((frame["kind"] == "1") | (frame["place"] == "2") | (rng.random(600) < 0.2)).astype(int))
    return mlp(15, 16, 2), nn.CrossEntropyLoss(), (x[:400], y[:400]), (x[400:], y[400:])


def weak_signal() -> tuple[nn.Module, Any, Pair, Pair]:
    x = torch.randn(900, 8, generator=torch.Generator().manual_seed(0))
    y = (torch.rand(900, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(x[:, 0] - x[:, 1])).long()
    return mlp(8, 16, 2), nn.CrossEntropyLoss(), (x[:600], y[:600]), (x[600:], y[600:])


def token_data() -> tuple[nn.Module, Any, Pair, Pair]:
    ids, labels = tokens(17)
    return Tagger(), nn.CrossEntropyLoss(), (ids[:40], labels[:40]), (ids[40:], labels[40:])


HEALTHY = {
    "digits": flat_digits,
    "mnist": image_set("mnist"),
    "fashion_mnist": image_set("fashion_mnist"),
    "cifar10": image_set("cifar10"),
    "standardised table": standard_table,
    "one-hot table": one_hot_table,
    "weak signal": weak_signal,
    "tokens": token_data,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("fashion_mnist", "cifar10") else ()) for name in HEALTHY]
)
def test_healthy_data_raise_no_alarm(name):
    model, loss, data, valid = HEALTHY[name]()
    found = look(model, loss, data, valid=valid)
    assert serious(found) == []
    assert [row["instrument"] for row in found.plan if row["state"] == "failed"] == []


def test_what_is_left_out_is_judged_by_a_part_of_the_others():
    seen = []
    model = nn.Linear(4, 2)
    x = torch.randn(2000, 4)
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(2000) % 2))
    for judge in (None, problem):
        remedy = leave_out(SurveyContext(problem, lr=0.1), [0, 1], "leave them out", judge=judge)
        hook = model.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        assert math.isfinite(remedy.score(model))
        hook.remove()
        assert max(map(len, seen)) <= 500
    trained = copied_setup(problem, 0.1, None, 8)
    remedy.change(trained)
    assert torch.equal(torch.cat([batch.args[0] for batch in trained.problem.data]), x[2:])
