"""Meta-gradients: runs that carry the derivative of a score in the learning rate, beside plain runs of the same length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import networks
from harness import Row, Settings, Work, race, try_row, with_ratios
from memory import usage
from theodolite.measures.stepsize.meta_gradients.forward import run_forward
from theodolite.measures.stepsize.meta_gradients.reverse import run_reverse
from theodolite.measures.stepsize.meta_gradients.unrolled import Task, Unrolled

LOSS = nn.CrossEntropyLoss()
RATE, MOMENTUM, BATCH = 0.01, 0.9, 128
#: Five hyperparameters of one run.
FIVE = ("lr", "momentum", "weight_decay", "lr:0", "lr:2")
Batches = list[tuple[Tensor, Tensor]]
Widths = tuple[int, ...]


def _data(widths: Widths, steps: int) -> Batches:
    torch.manual_seed(0)
    return [(torch.rand(BATCH, widths[0]), torch.randint(widths[-1], (BATCH,))) for _ in range(steps)]


def _model(widths: Widths) -> nn.Module:
    torch.manual_seed(0)
    return networks.stack(*widths)


def _plain(widths: Widths, data: Batches) -> None:
    """The training itself, as everybody writes it: the unit of all costs."""
    model = _model(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for x, y in data:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()


def _unrolled(widths: Widths, data: Batches, hyper: tuple[str, ...]) -> Unrolled:
    settings = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": 1e-4 if "weight_decay" in hyper else None}
    task = Task(lambda seed: _model(widths), "sgd", data, data[:1], LOSS, len(data), hyper, settings, "valid")
    return Unrolled(task)


def _ours(run: Callable[..., Any], widths: Widths, data: Batches, hyper: tuple[str, ...] = ("lr",)) -> Work:
    """One run with its derivative; what is set up once for many runs is not counted."""
    return partial(run, _unrolled(widths, data, hyper), "last", torch.zeros(len(hyper), dtype=torch.float64))


def _torchopt(widths: Widths, data: Batches) -> Tensor:
    import torchopt

    model, rate = _model(widths), torch.tensor(RATE, requires_grad=True)
    names = [name for name, _ in model.named_parameters()]
    weights = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    optimizer = torchopt.sgd(lr=rate, momentum=MOMENTUM, moment_requires_grad=True)
    state = optimizer.init(weights)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return LOSS(torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,)), y)

    for x, y in data:
        gradient = torch.autograd.grad(loss_of(x, y), weights, create_graph=True)
        updates, state = optimizer.update(gradient, state, inplace=False)
        weights = torchopt.apply_updates(weights, updates, inplace=False)
    return torch.autograd.grad(loss_of(*data[0]), rate)[0]


def _higher(widths: Widths, data: Batches) -> Tensor:
    import higher

    model, rate = _model(widths), torch.tensor(RATE, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    with higher.innerloop_ctx(model, optimizer, override={"lr": [rate]}) as (unrolled, steps):
        for x, y in data:
            steps.step(LOSS(unrolled(x), y))
        x, y = data[0]
        return torch.autograd.grad(LOSS(unrolled(x), y), rate)[0]


def meta_steps(settings: Settings) -> Iterator[Row]:
    """A run of SGD with momentum that also yields the derivative of its last loss in the learning rate, in plain runs of the
    same steps (forward mode: the closed form of a linear stack, and double backward as for any model; reverse mode and peers keep
    the graph of the run). The aims are 2.7 for one hyperparameter and 5 for five at once on 784-256-256-10, and to be level with
    torchopt on 64-32-10."""
    for widths, steps in (((784, 256, 256, 10), 20), ((64, 32, 10), 50)):
        small = widths if not settings.quick else (8, 6, 5, 3)[-len(widths) :]
        yield from with_ratios(list(_race(small, settings.pick(steps, 3), settings)))


def _race(widths: Widths, steps: int, settings: Settings) -> Iterator[Row]:
    name, data = "-".join(map(str, widths)), _data(widths, steps)
    traced = _unrolled(widths, data, ("lr",))
    traced._stack = None
    works: dict[str, Work] = {
        "ours, forward": _ours(run_forward, widths, data),
        "ours, forward by double backward": partial(run_forward, traced, "last", torch.zeros(1, dtype=torch.float64)),
        "ours, reverse": _ours(run_reverse, widths, data),
        "ours, five at once": _ours(run_forward, widths, data, FIVE),
        "torchopt": partial(_torchopt, widths, data),
        "higher": partial(_higher, widths, data),
    }
    ready: dict[str, Work] = {}
    rows = {who: Row("meta-steps", f"{steps} steps of {name}, batch {BATCH}", who) for who in works}
    for who, row in rows.items():

        def fill(found: Row, who: str = who) -> None:
            works[who]()
            ready[who] = works[who]

        try_row(row, fill)
    timings = race(partial(_plain, widths, data), ready, settings)
    for who, row in rows.items():
        if who in timings:
            row.charge(timings[who])
            row.say(f"{1000 * row.details['gradient_seconds'] / steps:.3g} ms a plain step")
        yield row


def meta_memory(settings: Settings) -> Iterator[Row]:
    """Peak memory of the derivative of a run in the learning rate, in peaks of a plain step: forward mode at 100 and at
    10 000 steps, the aim being 1.1 times at most between them; torchopt keeps the graph of the run, here of 100 and 1000."""
    widths = (64, 32, 10)
    few = settings.pick(100, 5)
    unit = usage(partial(_plain, widths, _data(widths, 1)))[0].peak
    batches = _data(widths, 4)

    def ours(steps: int) -> Work:
        unrolled = _unrolled(widths, batches * (steps // 4), ("lr",))
        return partial(run_forward, unrolled, "last", torch.zeros(1, dtype=torch.float64))

    plans: list[tuple[str, int, Callable[[int], Work]]] = [
        ("ours, forward", few, ours),
        ("ours, forward", few * settings.pick(100, 4), ours),
        ("torchopt", few, lambda steps: partial(_torchopt, widths, batches * (steps // 4))),
        ("torchopt", few * settings.pick(10, 4), lambda steps: partial(_torchopt, widths, batches * (steps // 4))),
    ]
    for who, steps, make in plans:

        def fill(row: Row, make: Callable[[int], Work] = make, steps: int = steps) -> None:
            peak = usage(make(steps))[0].peak
            row.memory = peak / unit
            row.say(f"{peak / 2**20:.2f} MB")

        yield try_row(Row("meta-memory", f"{steps} steps of 64-32-10, batch {BATCH}", who), fill)
