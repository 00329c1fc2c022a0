"""The budget of a survey while other processes take every core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import theodolite as th

BUDGET = 12.0


@pytest.fixture
def no_free_core() -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    time.sleep(0.5)
    yield
    for process in burning:
        process.kill()
        process.wait()


def image_problem() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, nn.CrossEntropyLoss(), (torch.randn(1500, 3, 32, 32), torch.randint(10, (1500,)))


@pytest.mark.slow
@pytest.mark.parametrize("depth", ["quick", "normal"])
def test_a_budget_is_kept_within_a_fifth(no_free_core, depth):
    model, loss, data = image_problem()
    began = time.perf_counter()
    survey = th.survey(model, loss, data, lr=0.05, depth=depth, budget=f"{BUDGET:g}s", progress=False)
    assert time.perf_counter() - began < 1.2 * BUDGET
    assert survey.sentences
