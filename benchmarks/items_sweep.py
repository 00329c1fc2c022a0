"""A sweep of learning rates: a network and its Taylor twins, all rates and seeds as one program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import theodolite as th
from harness import Row, Settings, one_shot, try_row
from networks import Task
from theodolite.data.generators import two_class_images
from theodolite.measures.dynamics.sweep import GRID
from theodolite.models import ntk_fcn

SEEDS, POINTS, TESTS, EVERY = 3, 64, 1000, 20
#: Seconds that the whole sweep may take on two cores.
AIM = 300.0


def sweep(settings: Settings) -> Iterator[Row]:
    """Two-layer ReLU network of width 512 on 64 images of 192 numbers, 1000 test images looked at every 20 steps, 14 rates, 3
    seeds. First all three models for 400 steps: `error` is the time over five minutes, less one, and should be negative.
    Then the network alone for 100 steps against one run after the other in plain torch: `error` is the largest relative
    distance of the final losses of runs that did not diverge."""
    task, test = _task(settings)
    steps = settings.pick(400, 20)
    yield try_row(Row("sweep", f"3 models, {steps} steps", "ours"), partial(_whole, task=task, test=test, steps=steps))
    steps = settings.pick(100, 10)
    rates = _rates(task)
    plain = Row("sweep", f"network, {steps} steps", "plain torch, run by run")
    ours = Row("sweep", f"network, {steps} steps", "ours")
    finals: dict[str, list[float]] = {}
    common: dict[str, Any] = {"task": task, "test": test, "steps": steps, "settings": settings, "finals": finals}
    yield try_row(ours, partial(_ours, **common))
    yield try_row(plain, partial(_plain, rates=rates, **common))


def _task(settings: Settings) -> tuple[Task, tuple[Tensor, Tensor]]:
    made = two_class_images(POINTS + TESTS, 8, 3, label_noise=0.1)
    x, y = made.x, made.y[:, None]
    model = _network(0, settings.pick(512, 64))
    return Task("two-layer ReLU", model, nn.MSELoss(), [(x[:POINTS], y[:POINTS])]), (x[POINTS:], y[POINTS:])


def _network(seed: int, width: int) -> nn.Module:
    return ntk_fcn(192, width, 2, init="ntk_sign", seed=seed)


def _sweep(task: Task, test: tuple[Tensor, Tensor], steps: int, **more: Any) -> th.measures.dynamics.CatapultSweep:
    width = len(task.parameters[0])
    problem = th.Problem(task.model, task.loss, task.batches)
    return th.catapult_sweep(
        problem,
        steps=steps,
        seeds=SEEDS,
        test=test,
        every=EVERY,
        factory=partial(_network, width=width),
        progress=False,
        **more,
    )


def _whole(row: Row, *, task: Task, test: tuple[Tensor, Tensor], steps: int) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = _sweep(task, test, steps)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    row.error = took / AIM - 1
    row.say(f"{took:.0f} s, {used:.0f} s of processor time, {len(found.rows())} runs")
    row.details.update(seconds=took, cpu_seconds=used)


def _ours(row: Row, *, task: Task, test: tuple[Tensor, Tensor], steps: int, settings: Settings, finals: dict[str, Any]) -> None:
    timing, found = one_shot(task.gradient, lambda: _sweep(task, test, steps, models=["network"]), settings, most=3)
    row.charge(timing)
    finals["ours"] = [r["final_loss"] for r in found.rows()]


def _rates(task: Task) -> list[tuple[int, float]]:
    """(seed, rate) of all runs."""
    width = len(task.parameters[0])
    pairs = []
    for seed in range(SEEDS):
        problem = th.Problem(_network(seed, width), task.loss, task.batches)
        critical = th.critical_learning_rate(problem, by="kernel", progress=False).value
        pairs += [(seed, ratio * critical) for ratio in GRID]
    return pairs


def _plain(
    row: Row,
    *,
    task: Task,
    test: tuple[Tensor, Tensor],
    steps: int,
    rates: list[tuple[int, float]],
    settings: Settings,
    finals: dict[str, Any],
) -> None:
    def loop() -> list[float]:
        return [_run(task, test, seed, rate, steps) for seed, rate in rates]

    timing, found = one_shot(task.gradient, loop, settings, most=3)
    row.charge(timing)
    pairs = [(a, b) for a, b in zip(finals["ours"], found, strict=True) if a < 1e3 and b < 1e3]
    row.error = max(abs(a - b) / b for a, b in pairs)


def _run(task: Task, test: tuple[Tensor, Tensor], seed: int, rate: float, steps: int) -> float:
    """One run as a user would write it; returns its final loss."""
    ((x, y),) = task.batches
    model = _network(seed, len(task.parameters[0]))
    parameters = list(model.parameters())
    best = torch.inf
    for step in range(steps):
        if step % EVERY == 0:
            with torch.no_grad():
                best = min(best, float(task.loss(model(test[0]), test[1])))
        gradients = torch.autograd.grad(task.loss(model(x), y), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(rate * g)
    return float(task.loss(model(x), y).detach())
