"""The survey: are its estimates near what it takes, is a budget kept, and how light is `--help`?"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import networks
import theodolite as th
from harness import Row, Settings, clock, try_row


def _tasks(settings: Settings) -> list[networks.Task]:
    return [
        networks.mlp(settings.pick(256, 64)),
        networks.lenet5(settings.pick(500, 50)),
        networks.gpt(settings.pick(8, 2)),
    ]


def _problem(task: networks.Task) -> th.Problem:
    return th.Problem(task.model, task.loss, task.batches)


def estimates(settings: Settings) -> Iterator[Row]:
    """A dry run's estimate of a whole survey against what the survey took. `error` is the estimate over the real time, less
    one; the aim is a factor of two either way (-0.5 to 1)."""
    for task in _tasks(settings):
        yield try_row(Row("survey, estimate", task.name, "ours"), partial(_estimate, task=task, settings=settings))


def _estimate(row: Row, *, task: networks.Task, settings: Settings) -> None:
    settings.patience.wait()
    plan = th.instruments.plan_survey(_problem(task), lr=1e-3)
    settings.patience.wait()
    began = time.perf_counter()
    th.survey(_problem(task), lr=1e-3, progress=False)
    took = time.perf_counter() - began
    row.gradients = took / clock(task.gradient, 5)
    row.error = plan.seconds / took - 1
    row.say(f"expected {plan.seconds:.3g} s, took {took:.3g} s: a factor of {plan.seconds / took:.2f}")
    row.details.update(expected=plan.seconds, took=took)


def budgets(settings: Settings) -> Iterator[Row]:
    """A survey given about a third of the time it would like. `error` is the time taken over the budget, less one; the aim is
    at most 0.2."""
    for task in _tasks(settings):
        yield try_row(Row("survey, budget", task.name, "ours"), partial(_budget, task=task, settings=settings))


def _budget(row: Row, *, task: networks.Task, settings: Settings) -> None:
    settings.patience.wait()
    budget = th.instruments.plan_survey(_problem(task), lr=1e-3).seconds / 3
    began = time.perf_counter()
    found = th.survey(_problem(task), lr=1e-3, budget=budget, progress=False)
    took = time.perf_counter() - began
    row.gradients = took / clock(task.gradient, 5)
    row.error = took / budget - 1
    left_out = [step["instrument"] for step in found.plan if step["state"] == "skipped" and "budget" in step["reason"]]
    row.say(f"budget {budget:.3g} s, took {took:.3g} s; left out: {', '.join(left_out) or 'nothing'}")
    row.details.update(budget=budget, took=took)


def help_time(settings: Settings) -> Iterator[Row]:
    """CPU seconds of `theodolite --help`, the least of several; the aim is below 0.5."""
    yield try_row(Row("survey, help", "theodolite --help", "ours"), partial(_help, rounds=settings.pick(7, 2)))


def _help(row: Row, *, rounds: int) -> None:
    seconds = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", "from theodolite.cli import main; main(['--help'])"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    row.say(f"{min(seconds):.2f} s CPU")
    row.details.update(cpu_seconds=min(seconds))
