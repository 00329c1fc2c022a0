"""What watching a training run costs: our monitor, cockpit, and a cold eigen-solve every so many steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import networks
import theodolite as th
from harness import Row, Settings, try_row

#: A cold solver looks this often, as scripts that track sharpness do.
COLD_EVERY = 50


def _resnet20() -> networks.Task:
    torch.manual_seed(0)
    model = th.models.resnet20(seed=0)
    batches = [(torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))) for _ in range(4)]
    return networks.Task("ResNet20, batch 128", model.train(), nn.CrossEntropyLoss(), batches)


def _gpt() -> networks.Task:
    torch.manual_seed(0)
    ids = [torch.randint(0, 65, (32, 65)) for _ in range(4)]
    batches = [(x[:, :-1], x[:, 1:]) for x in ids]
    return networks.Task("GPT small, 32 x 64 tokens", th.models.gpt(seed=0).train(), _TokenLoss(), batches)


def _lenet5() -> networks.Task:
    task = networks.lenet5(512)
    [(x, y)] = task.batches
    return networks.Task("LeNet5, batch 128", task.model.train(), task.loss, list(zip(x.split(128), y.split(128), strict=True)))


class _TokenLoss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


Before = Callable[[int, Any, Tensor], None]


def _train(task: networks.Task, steps: int, before_step: Before | None = None) -> float:
    """Seconds of a plain loop, with a visitor before each step."""
    optimizer = torch.optim.SGD(task.parameters, lr=0.02, momentum=0.9)
    began = time.perf_counter()
    for step in range(steps):
        x, y = task.batches[step % len(task.batches)]
        optimizer.zero_grad()
        loss = task.loss(task.model(x), y)
        loss.backward()
        if before_step is not None:
            before_step(step, (x, y), optimizer)
        optimizer.step()
    return time.perf_counter() - began


def monitoring(settings: Settings) -> Iterator[Row]:
    """Share of the training time that watching adds (`error` holds it: 0.25 means 25 % more), over one short run each; the aim is
    at most 0.25 with the default budget, 0.10 as a goal. `products` are those spent; the note says what was seen."""
    for make, steps in ((_resnet20, settings.pick(240, 6)), (_gpt, settings.pick(600, 10)), (_lenet5, settings.pick(1000, 10))):
        task = make()
        for who, watch in WATCHERS.items():
            row = Row("monitor", f"{task.name}, {steps} steps", who)
            try_row(row, lambda row, watch=watch, task=task, steps=steps: watch(row, task.copy(), steps))
            yield row


def _ours(row: Row, task: networks.Task, steps: int, budget: float = 0.25) -> None:
    with th.Monitor(task.loss, budget=budget) as monitor:
        _train(task, steps, lambda step, batch, optimizer: monitor.observe(step, task.model, batch, optimizer))
    report = monitor.report()
    row.error, row.products = report.overhead, float(sum(look["matvecs"] for look in report.looks))
    on = {name: sum(look["on"] == name for look in report.looks) for name in ("batch", "probe")}
    row.say(
        f"critical rate of {on['batch']} batches, sharpness, loss split and features at {on['probe']} looks, every step's norms"
    )


def _thrifty(row: Row, task: networks.Task, steps: int) -> None:
    _ours(row, task, steps, budget=0.1)


def _cold(row: Row, task: networks.Task, steps: int) -> None:
    """The top eigenvalue from nothing every so many steps."""
    spent, products = 0.0, 0

    def look(step: int, batch: Any, optimizer: Any) -> None:
        nonlocal spent, products
        if step % COLD_EVERY == COLD_EVERY - 1:
            began = time.perf_counter()
            problem = th.Problem(task.model, task.loss, batch, mode="train", check=False)
            products += th.top_eigenpairs(th.hessian(problem), 1, tol=1e-2, progress=False).matvecs
            spent += time.perf_counter() - began

    whole = _train(task, steps, look)
    row.error, row.products = spent / (whole - spent), float(products)
    row.say(f"sharpness of one batch at {steps // COLD_EVERY} looks, nothing else")


def _cockpit(row: Row, task: networks.Task, steps: int) -> None:
    """cockpit's own "full" quantities at every step; individual losses need an extended model."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    steps = min(steps, 30)
    plain = _train(task.copy(), steps)
    model, loss = extend(task.model), extend(task.loss)
    single = type(task.loss)(reduction="none") if isinstance(task.loss, nn.CrossEntropyLoss) else task.loss
    watching = Cockpit(model.parameters(), quantities=configuration("full"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            x, y = task.batches[step % len(task.batches)]
            optimizer.zero_grad()
            output = model(x)
            value = loss(output, y)
            facts = {"batch_size": len(x), "individual_losses": single(output, y), "loss": value, "optimizer": optimizer}
            with watching(step, info=facts):
                value.backward(create_graph=watching.create_graph(step))
            optimizer.step()
    row.error = (time.perf_counter() - began) / plain - 1.0
    row.say(f'its "full" quantities over {steps} steps')


WATCHERS: dict[str, Callable[[Row, networks.Task, int], None]] = {
    "theodolite": _ours,
    "theodolite, budget 10 %": _thrifty,
    "top eigenvalue from nothing": _cold,
    "cockpit": _cockpit,
}
