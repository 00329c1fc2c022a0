"""Planted faults of training are found with their cause, their remedies help on a copy, and healthy trainings raise no alarm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import theodolite as th
from theodolite.instruments import SurveyContext
from theodolite.instruments.registry import get
from theodolite.instruments.remedies import best_remedy
from theodolite.measures.trials import Remedy, try_changes
from theodolite.results import CAUSES, Finding, Severity

Data = tuple[Tensor, Tensor]
LOSS = nn.CrossEntropyLoss()


def classes(count: int = 400, seed: int = 0) -> Data:
    """Eight clusters in twelve dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 8
    return torch.randn(count, 12, generator=generator) + 2.5 * functional.one_hot(y, 12), y


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*parts[:-1])


def trained(model: nn.Module, optimizer: Optimizer, steps: int, data: Data | None = None, loss: Any = LOSS, schedule: Any = None):
    x, y = data or classes()
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(y), (32,), generator=generator)
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    model.eval()
    return model


class Look:
    """What the instruments say of a training, and what becomes of their remedies."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, data: Any = None, loss: Any = LOSS, valid: Any = None) -> None:
        data = classes() if data is None else data
        problem = th.Problem(model, loss, data)
        held = None if valid is None else problem.on(valid)
        self.context = SurveyContext(problem, optimizer=optimizer, valid=held, batch_size=32)
        self.findings: list[Finding] = []
        self.remedies: dict[str, Remedy] = {}
        for name in ("progress", "settings", "parameters", "gradients"):
            instrument = get(name)
            result = instrument.run(self.context, **instrument.efforts[0])
            self.findings += instrument.findings(self.context, result)
            self.remedies |= instrument.remedies(self.context, result)
            self.context.results[name] = result

    @property
    def serious(self) -> dict[str, Finding]:
        return {f.cause: f for f in self.findings if f.severity.rank >= Severity.WARNING.rank}

    def helps(self, cause: str) -> bool:
        """Whether the remedy was tried and is better."""
        context = self.context
        lr = context.lr or self.remedies[cause].lr
        given: dict[str, Any] = {"optimizer": context.optimizer, "batch_size": 32, "steps": 60}
        (row,) = try_changes(context.problem, {cause: self.remedies[cause]}, lr=lr, **given).trials
        assert row["not_tried"] == ""
        return row["better"]


def sgd(model: nn.Module, lr: float = 0.2, **more: Any) -> Optimizer:
    return SGD(model.parameters(), lr=lr, **more)


def as_it_was(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    with torch.no_grad():
        change(model)
    return model


# Faults


def dead_layer():
    model = trained(m := mlp(12, 16, 16, 8), sgd(m), 30)
    return Look(as_it_was(model, lambda m: m[2].bias.fill_(-50.0)), sgd(model))


def deep_sigmoid():
    model = mlp(12, *[24] * 8, 8, activation=nn.Sigmoid)
    return Look(model, sgd(model))


def large_weights():
    model = mlp(12, *[24] * 5, 8)
    return Look(as_it_was(model, lambda m: [p.mul_(8.0) for p in m.parameters() if p.ndim > 1]), sgd(model, 0.05))


def flat_tanh():
    model = mlp(12, 24, 24, 24, 8, activation=nn.Tanh)
    return Look(as_it_was(model, lambda m: [p.mul_(12.0) for p in m.parameters() if p.ndim > 1]), sgd(model, 0.05))


def softmax_twice():
    model = nn.Sequential(*mlp(12, 16, 8), nn.Softmax(-1))
    return Look(model, sgd(model))


def sigmoid_before_logits():
    x, y = classes()
    model = nn.Sequential(*mlp(12, 16, 8), nn.Sigmoid())
    return Look(model, sgd(model, 1.0), (x, functional.one_hot(y, 8).float()), nn.BCEWithLogitsLoss())


def without_the_first_layer():
    model = mlp(12, 16, 8)
    return Look(model, SGD(model[2].parameters(), lr=0.2))


def frozen_but_given():
    model = trained(m := mlp(12, 16, 16, 8), sgd(m), 10)
    model[2].requires_grad_(False)
    return Look(model, sgd(model))


def frozen_at_random():
    model = mlp(12, 32, 8)
    model[0].requires_grad_(False)
    return Look(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))


def decayed():
    model = mlp(12, 16, 8)
    optimizer = sgd(model, weight_decay=0.3)
    return Look(trained(model, optimizer, 100), optimizer)


def decayed_beside():
    model = mlp(12, 16, 8)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=20.0)
    return Look(trained(model, optimizer, 100), optimizer)


def dropped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.9), nn.Linear(64, 8))
    optimizer = sgd(model)
    return Look(trained(model, optimizer, 60), optimizer)


def stale_schedule():
    model = mlp(12, 16, 8)
    optimizer = sgd(model)
    trained(model, optimizer, 60, schedule=LambdaLR(optimizer, lambda step: 0.8**step))
    return Look(model, optimizer)


def summed():
    model = mlp(12, 32, 32, 8)
    loss = nn.CrossEntropyLoss(reduction="sum")
    optimizer = sgd(model, 0.5)
    return Look(model, optimizer, loss=loss)


def frozen_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32, momentum=1e-4), nn.ReLU(), nn.Linear(32, 8))
    x, y = classes()
    optimizer = sgd(model)
    return Look(trained(model, optimizer, 200, (5 * x + 20, y)), optimizer, (5 * x + 20, y))


def overfitted():
    x, y = classes(60)
    model = mlp(12, 128, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    noisy = torch.where(torch.arange(60) % 4 == 0, (y + 3) % 8, y)
    return Look(trained(model, optimizer, 300, (x, noisy)), optimizer, (x, noisy), valid=classes(300, seed=1))


FAULTS = {
    "dead layer": dead_layer,
    "vanishing gradients": deep_sigmoid,
    "exploding gradients": large_weights,
    "saturation": flat_tanh,
    "double softmax": softmax_twice,
    "missing parameters": without_the_first_layer,
    "frozen layer": frozen_but_given,
    "weight decay": decayed,
    "dropout": dropped,
    "schedule ended": stale_schedule,
    "summed loss": summed,
    "batch statistics": frozen_statistics,
    "overfitting": overfitted,
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_planted_fault_is_found_and_its_remedy_helps(cause):
    found = FAULTS[cause]()
    assert cause in found.serious, found.findings
    others = set(found.serious) - {cause, "not learning", *CAUSES[cause]}
    assert others == set(), found.serious
    assert found.serious[cause].advice
    assert found.helps(cause)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(sigmoid_before_logits, "double softmax"), (frozen_at_random, "frozen layer"), (decayed_beside, "weight decay")],
)
def test_the_same_in_another_form(fault, cause):
    found = fault()
    assert cause in found.serious
    assert found.helps(cause)


def test_a_rate_of_zero_for_some_layers_is_a_frozen_layer():
    model = mlp(12, 16, 8)
    optimizer = SGD([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.2}], lr=0.2)
    found = Look(model, optimizer)
    assert found.serious["frozen layer"].sentence == "The learning rate of layer 0 is 0, while others train."


def test_statistics_that_saw_no_batch_are_named_with_what_they_cost():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    x, y = classes()
    optimizer = sgd(model)
    trained(model, optimizer, 200, (5 * x + 20, y))
    model[1].reset_running_stats()
    found = Look(model, optimizer, (5 * x + 20, y))
    assert "they have seen no batch" in found.serious["batch statistics"].sentence
    assert "measured instead" in found.remedies["batch statistics"].why_not


def test_statistics_of_momentum_zero_are_named_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32, momentum=0.0), nn.ReLU(), nn.Linear(32, 8))
    x, y = classes()
    optimizer = sgd(model)
    found = Look(trained(model, optimizer, 200, (5 * x + 20, y)), optimizer, (5 * x + 20, y)).serious["batch statistics"]
    assert "their momentum is 0" in found.sentence
    assert "Set their momentum to 0.1" in found.advice


def test_at_a_training_loss_of_zero_no_lower_rate_is_tried_against_overfitting():
    x, y = classes(40)
    model = mlp(12, 128, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    labels = y[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    found = Look(trained(model, optimizer, 600, (x, labels)), optimizer, (x, labels), valid=classes(300, seed=1))
    assert found.context.results["progress"].loss < 0.01
    assert "overfitting" in found.serious
    assert "learning rate" not in found.remedies["overfitting"].advice + found.serious["overfitting"].advice
    assert "step of the lowest validation loss" in found.serious["overfitting"].advice


def of_many_units(lr: float) -> tuple[SurveyContext, Remedy, Remedy]:
    model = mlp(12, 16, 8)
    context = SurveyContext(th.Problem(model, LOSS, classes()), optimizer=sgd(model, lr), batch_size=32)
    milder = Remedy("change nothing", lambda setup: None)
    return context, milder, Remedy("lower the rate", lambda setup: setup.set_lr(0.1), lr=0.1)


def test_a_lower_rate_is_advised_only_where_it_is_clearly_better_than_yours():
    context, milder, lower = of_many_units(0.11)
    assert best_remedy(context, [milder, lower]) is milder
    context, milder, lower = of_many_units(300.0)
    assert best_remedy(context, [milder, lower]) is lower


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that differ at each reading."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(12), self.y[index]


def test_random_transforms_are_a_fault_in_validation_data_only():
    model = trained(m := mlp(12, 16, 8), sgd(m), 100)
    moving, still = DataLoader(Jittered(*classes()), batch_size=32), DataLoader(TensorDataset(*classes(200, 1)), batch_size=50)
    state = torch.get_rng_state()
    found = Look(model, sgd(model), valid=moving)
    assert torch.equal(state, torch.get_rng_state())
    assert set(found.serious) == {"augmented validation"}
    found = Look(model, sgd(model), moving, valid=still)
    assert found.serious == {}
    assert "augmented samples" in {f.label for f in found.findings}


def test_a_run_that_blows_up_is_critical():
    model = mlp(12, 16, 8)
    found = Look(model, sgd(model, 1e4))
    assert found.serious["rate too high"].severity is Severity.CRITICAL
    assert found.context.results["progress"].state == "diverges"


def test_what_stands_still_without_a_known_cause_says_what_to_look_at():
    x, y = classes()
    found = Look(model := mlp(12, 16, 8), sgd(model, 1e-30), (x, y))
    assert found.serious["not learning"].severity is Severity.CRITICAL
    assert "16 samples" in found.remedies["not learning"].advice
    assert found.remedies["not learning"].change is None


# Healthy trainings


def normed() -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8))
    return nn.Sequential(nn.Unflatten(1, (1, 12)), *parts)


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.body(x), -1)


def healthy(model: nn.Module, optimizer: Optimizer, steps: int, data: Data | None = None, loss: Any = LOSS, **more: Any) -> Look:
    return Look(trained(model, optimizer, steps, data, loss), optimizer, data, loss, **more)


def finished_schedule() -> Look:
    model = mlp(12, 16, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, 300, schedule=CosineAnnealingLR(optimizer, 300))
    return Look(model, optimizer, valid=classes(300, seed=1))


def warm_up_begins() -> Look:
    model = mlp(12, 16, 8)
    optimizer = sgd(model)
    LambdaLR(optimizer, lambda step: (step + 1) / 1000)
    return Look(model, optimizer)


def warm_up_of_trained_weights() -> Look:
    model = trained(m := mlp(12, 16, 8), sgd(m), 60)
    optimizer = sgd(model)
    LambdaLR(optimizer, lambda step: min(1.0, step / 1000))
    return Look(model, optimizer)


def head_alone(*, freeze: bool) -> Look:
    model = trained(m := mlp(12, 16, 16, 8), sgd(m), 300)
    torch.manual_seed(1)
    model[4] = nn.Linear(16, 8)
    if freeze:
        model[:4].requires_grad_(False)
    return Look(model, SGD(model[4].parameters(), lr=0.2))


def regression(loss: Any) -> Look:
    x, _ = classes()
    model = mlp(12, 16, 1)
    return healthy(model, AdamW(model.parameters(), lr=1e-2), 60, (x, x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()), loss)


def summed_at_its_own_rate() -> Look:
    model = mlp(12, 16, 8)
    return healthy(model, sgd(model, 0.2 / 32), 60, loss=nn.CrossEntropyLoss(reduction="sum"))


HEALTHY: dict[str, Callable[[], Look]] = {
    "at the start": lambda: healthy(m := mlp(12, 16, 8), sgd(m), 0),
    "on its way, with momentum": lambda: healthy(m := mlp(12, 16, 8), sgd(m, 0.03, momentum=0.9, weight_decay=5e-4), 60),
    "near the end": lambda: healthy(m := mlp(12, 32, 8), AdamW(m.parameters(), lr=3e-3), 400, valid=classes(300, seed=1)),
    "a plateau": lambda: healthy(m := mlp(12, *[16] * 4, 8), sgd(m, 0.1), 0),
    "tanh": lambda: healthy(m := mlp(12, 16, 16, 8, activation=nn.Tanh), sgd(m), 60),
    "batch norm": lambda: healthy(m := normed(), sgd(m, 0.05, momentum=0.9), 100),
    "batch norm, at the start": lambda: healthy(m := normed(), sgd(m, 0.05, momentum=0.9), 0),
    "log softmax": lambda: healthy(m := LogProbabilities(), sgd(m), 60, loss=nn.NLLLoss()),
    "a sum at its own rate": summed_at_its_own_rate,
    "a finished schedule": finished_schedule,
    "a warm-up": warm_up_begins,
    "a warm-up from 0 of trained weights": warm_up_of_trained_weights,
    "the head alone": lambda: head_alone(freeze=False),
    "the head alone, frozen": lambda: head_alone(freeze=True),
    "squares": lambda: regression(nn.MSELoss()),
    "absolute values": lambda: regression(nn.L1Loss()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_raises_no_alarm(name):
    found = HEALTHY[name]()
    assert found.serious == {}
    assert {f.cause for f in found.findings} == {""}
