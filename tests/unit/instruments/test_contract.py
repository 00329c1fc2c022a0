"""Every registered instrument keeps the contract on small problems: a classifier, a regression, a language model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import SurveyContext, names
from theodolite.instruments.registry import get
from theodolite.models.transformers import gpt
from theodolite.testing import InstrumentContract

FINDINGS = Path(__file__).parents[3] / "docs" / "guide" / "findings.rst"
LABELS = frozenset(re.findall(r"^   \* - ``([^`]+)``$", FINDINGS.read_text(encoding="utf-8"), flags=re.MULTILINE))


def classifier() -> SurveyContext:
    """Two batches of different sizes, three classes, with validation data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    problem = th.Problem(model, nn.CrossEntropyLoss(), [(x[:25], y[:25]), (x[25:], y[25:])])
    return SurveyContext(problem, lr=0.1, valid=problem.on((torch.randn(20, 4), torch.randint(3, (20,)))))


def regression() -> SurveyContext:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    x = torch.randn(30, 3).double()
    problem = th.Problem(model, nn.MSELoss(), (x, x[:, :1] * x[:, 1:2]))
    return SurveyContext(problem, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), population=1000)


def language_model() -> SurveyContext:
    torch.manual_seed(0)
    tokens = torch.randint(20, (6, 9))
    loss = lambda z, y: nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())  # noqa: E731
    return SurveyContext(th.Problem(gpt(vocabulary=20, depth=1, dim=16), loss, (tokens[:, :-1], tokens[:, 1:])), lr=0.01)


def small_batches() -> SurveyContext:
    """Enough samples for sets that differ in one, batches of four, and a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(100, 4), torch.randint(3, (100,))
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
    state = {name: t + 0.01 for name, t in model.state_dict().items()}
    more = {"valid": problem.on((torch.randn(60, 4), torch.randint(3, (60,)))), "batch_size": 4, "checkpoints": [state]}
    return SurveyContext(problem, lr=0.1, **more)


PROBLEMS: dict[str, Callable[[], SurveyContext]] = {f.__name__: f for f in (classifier, regression, language_model)}
#: For those that ask for more than the three have.
FURTHER = {"path", "stability", "batch_size", "certificate"}


def suite(instrument: str, problem: str) -> type[InstrumentContract]:
    def make(self: InstrumentContract) -> tuple[th.instruments.Instrument, SurveyContext]:
        torch.manual_seed(0)
        return get(instrument), PROBLEMS[problem]()

    return type(
        f"Test{instrument.capitalize()}Of{problem.title().replace('_', '')}",
        (InstrumentContract,),
        {"make": make, "labels": LABELS},
    )


for _instrument in names():
    PROBLEMS["small_batches"] = small_batches
    for _problem in PROBLEMS if _instrument not in FURTHER else ["small_batches"]:
        if _problem == "small_batches" and _instrument not in FURTHER:
            continue
        _suite = suite(_instrument, _problem)
        globals()[_suite.__name__] = _suite


@pytest.mark.parametrize("instrument", names())
def test_every_instrument_applies_to_one_of_the_problems(instrument):
    """Otherwise its contract would hold for want of a result."""
    assert any(not get(instrument).applies(build()) for build in PROBLEMS.values())
