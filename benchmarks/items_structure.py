"""Kronecker factors of all layers, and the structure report of LeNet5."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import networks
import peers
import theodolite as th
from harness import Row, Settings, clock, race, try_row


def _task(settings: Settings) -> networks.Task:
    """F-200^2 on MNIST-like inputs: the time does not depend on what the pixels show."""
    torch.manual_seed(0)
    samples = settings.pick(10_000, 500)
    x, y = torch.rand(samples, 784), torch.randint(0, 10, (samples,))
    batches = list(zip(x.split(1000), y.split(1000), strict=True))
    return networks.Task("F-200^2, 10 000 inputs of 784", networks.stack(784, 200, 200, 10), nn.CrossEntropyLoss(), batches)


def factors(settings: Settings) -> Iterator[Row]:
    """Output Hessian and input auto-correlation of all layers, exact for 10 outputs; the aim is at most 13 gradients (c + 3) and
    less than curvlinops' KFAC of type 2 on the same work. `error` is the distance of its input factor from ours."""
    task = _task(settings)
    ours = lambda: th.kronecker_factors(peers.problem(task))  # noqa: E731
    works = {"ours": ours, "curvlinops": partial(_curvlinops, task)}
    rows = {who: Row("factors", task.name, who) for who in works}
    for who, row in rows.items():
        yield try_row(row, partial(_time, task=task, work=works[who], settings=settings))


def _curvlinops(task: networks.Task) -> object:
    from curvlinops import FisherType, KFACLinearOperator

    operator = KFACLinearOperator(
        task.model, task.loss, task.parameters, task.batches, fisher_type=FisherType.TYPE2, check_deterministic=False
    )
    operator.compute_kronecker_factors()
    return operator


def _time(row: Row, *, task: networks.Task, work: object, settings: Settings) -> None:
    row.charge(race(task.gradient, {"work": work}, settings)["work"])  # type: ignore[dict-item]


def structure(settings: Settings) -> Iterator[Row]:
    """The structure report of LeNet5 on 2000 images, k = 200 per layer, tol 1e-3, float32 network with a float64 basis; the aim
    is below 300 seconds on two cores."""
    task = networks.lenet5(settings.pick(2000, 60))
    yield try_row(
        Row("structure", f"LeNet5, k = {settings.pick(200, 10)}", "ours"), partial(_structure, task=task, settings=settings)
    )


def _structure(row: Row, *, task: networks.Task, settings: Settings) -> None:
    settings.patience.wait()
    began = time.perf_counter()
    report = th.hessian_structure(peers.problem(task), k=settings.pick(200, 10), progress=False)
    took = time.perf_counter() - began
    row.gradients = took / clock(task.gradient, 3)
    row.products = float(max(layer.pairs.matvecs for layer in report.values()))
    unresolved = sum(int(layer.pairs.unresolved.sum()) for layer in report.values())
    row.say(
        f"{took:.0f} s; {unresolved} pairs below the resolution; converged: {all(s.pairs.converged for s in report.values())}"
    )
    row.details.update(seconds=took)
