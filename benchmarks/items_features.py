"""The average gradient outer product of a convolutional network against written-out Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import networks
from harness import Row, Settings, one_shot, try_row
from memory import usage
from theodolite.measures.features import agop

OUTPUTS, CHUNK = 10, 100


def _cnn() -> nn.Sequential:
    """Four convolutions, global average pooling: 65 thousand parameters, 17 million multiplications a sample."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, OUTPUTS))


def _tasks(settings: Settings) -> Iterator[networks.Task]:
    n = settings.pick(1000, 20)
    torch.manual_seed(0)
    images, labels = torch.randn(n, 3, 32, 32), torch.randint(0, OUTPUTS, (n,))
    yield networks.Task(f"CNN 32-32-64-64, n = {n}", _cnn(), nn.CrossEntropyLoss(), [(images, labels)])
    lenet = networks.lenet5(n)
    yield networks.Task(f"LeNet5, n = {n}", lenet.model, lenet.loss, lenet.batches)


def outer_product(settings: Settings) -> Iterator[Row]:
    """The average gradient outer product (3072 x 3072) of 1000 images, ten outputs; the aim is three times faster than
    vmap(jacrev) of all samples at once, as it is usually written; chunks of 100 are faster. `error` is the largest difference
    from the sum over samples in float64 on the first 20 images, relative to the largest entry; memory in training steps."""
    for task in _tasks(settings):
        few = networks.Task(task.name, task.model, task.loss, [(x[:20], y[:20]) for x, y in task.batches])
        truth = _one_by_one(few.double())
        unit, _ = usage(task.gradient)
        for who, way in WAYS.items():
            row = Row("agop", task.name, who)
            yield try_row(row, partial(_fill, way=way, task=task, few=few, truth=truth, unit=unit.peak, settings=settings))


def _fill(
    row: Row,
    *,
    way: Callable[[networks.Task], Tensor],
    task: networks.Task,
    few: networks.Task,
    truth: Tensor,
    unit: int,
    settings: Settings,
) -> None:
    row.error = float((way(few).double() - truth).abs().max() / truth.abs().max())
    row.memory = usage(partial(way, task))[0].peak / unit
    timing, _ = one_shot(task.gradient, partial(way, task), settings, most=3)
    row.charge(timing)


def _ours(task: networks.Task) -> Tensor:
    return agop(task.model, task.batches[0][0])


def _vectorised(task: networks.Task, chunk_size: int = CHUNK) -> Tensor:
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    images = task.batches[0][0]

    def outputs(sample: Tensor) -> Tensor:
        return functional_call(task.model, parameters, (sample[None],))[0]

    total = torch.zeros(images[0].numel(), images[0].numel())
    for chunk in images.split(chunk_size):
        jacobian = vmap(jacrev(outputs))(chunk).flatten(2).flatten(0, 1)
        total += jacobian.T @ jacobian
    return total / len(images)


def _one_by_one(task: networks.Task) -> Tensor:
    """The truth: a Jacobian for each sample in turn."""
    images = task.batches[0][0]
    jacobians = [torch.autograd.functional.jacobian(task.model, x[None]).reshape(OUTPUTS, -1) for x in images]
    rows = torch.cat(jacobians)  # type: ignore[arg-type]
    return rows.T @ rows / len(images)


WAYS: dict[str, Callable[[networks.Task], Tensor]] = {
    "ours": _ours,
    "vmap(jacrev)": partial(_vectorised, chunk_size=10**6),
    "vmap(jacrev), chunks of 100": _vectorised,
}
