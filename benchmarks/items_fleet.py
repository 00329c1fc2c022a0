"""Many small trainings: a fleet, a plain loop with torch.optim, and vmap written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import networks
import theodolite as th
from harness import Row, Settings, Work, race, try_row
from memory import usage
from theodolite.training.fleets.data import FleetFeed

RATE, MOMENTUM, BATCH, POOL = 0.01, 0.9, 32, 10_000
LOSS = nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Case:
    """R replicas; every replica has a batch of its own, gathered beforehand."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    replicas: int
    steps: int = 10  # in one timed section

    def batches(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.replicas, BATCH, *self.shape, generator=generator)
        return x, torch.randint(0, 10, (self.replicas, BATCH), generator=generator)


def cnn(side: int) -> nn.Sequential:
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    features = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(16 * (side // 4) ** 2, 10))


CASES = [
    Case("80 logistic regressions 784-10", lambda: nn.Linear(784, 10), (784,), 80),
    Case("64 MLPs 64-32-10", lambda: networks.stack(64, 32, 10), (64,), 64),
    Case("16 MLPs 784-256-256-10", lambda: networks.stack(784, 256, 256, 10), (784,), 16),
    Case("16 CNNs on 8x8", lambda: cnn(8), (1, 8, 8), 16),
    Case("16 CNNs on 16x16", lambda: cnn(16), (1, 16, 16), 16),
    Case("16 CNNs on 28x28", lambda: cnn(28), (1, 28, 28), 16),
    Case("16 LeNet5 on 32x32", lambda: networks.lenet5(1).model, (3, 32, 32), 16),
]


def fleet(settings: Settings) -> Iterator[Row]:
    """Training steps of many small networks, SGD with momentum, batch 32, data gathered beforehand; the row "gathering" is what
    taking every replica's batch from a shared pool of 10 000 samples costs beside. Cost: over one gradient of all replicas, one
    after the other. The ratio to ours is the speed-up; the aim is 6, 12, 1.3 and 1.3 over the plain loop for the first four
    (goals 8, 15, 2, 2), and nowhere below 1."""
    for case in CASES:
        rows = {who: Row("fleet", case.name, who) for who in CONTENDERS}
        ready: dict[str, Work] = {}
        steps = settings.pick(case.steps, 2)
        for who, row in rows.items():
            try_row(row, partial(_line_up, case=case, who=who, ready=ready, steps=steps))
        for who, timing in race(gradients(case, steps), ready, settings).items():
            rows[who].charge(timing)
        yield from rows.values()


def _line_up(row: Row, *, case: Case, who: str, ready: dict[str, Work], steps: int) -> None:
    work = CONTENDERS[who](case, steps, row)
    work()
    ready[who] = work


def _models(case: Case) -> list[nn.Module]:
    models = []
    for seed in range(case.replicas):
        torch.manual_seed(seed)
        models.append(case.build())
    return models


def ours(case: Case, steps: int, row: Row) -> Work:
    trained = th.Fleet(lambda seed: case.build(), case.replicas, loss=LOSS, rate=RATE, momentum=MOMENTUM)
    data = case.batches()
    run = trained.train(data, steps=1, shared=False, progress=False)
    row.say(f"route {run.route}")
    return lambda: trained.train(data, steps=steps, shared=False, progress=False)


def plain_loop(case: Case, steps: int, row: Row) -> Work:
    x, y = case.batches()
    models = _models(case)
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM) for model in models]

    def work() -> None:
        for _ in range(steps):
            for model, optimizer, inputs, targets in zip(models, optimizers, x, y, strict=True):
                optimizer.zero_grad()
                LOSS(model(inputs), targets).backward()
                optimizer.step()

    return work


def vmap_by_hand(case: Case, steps: int, row: Row) -> Work:
    models = _models(case)
    stacked, buffers = stack_module_state(models)
    parameters = {name: p.detach() for name, p in stacked.items()}
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    x, y = case.batches()

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return LOSS(functional_call(models[0], (p, b), (inputs,)), targets)

    gradient = vmap(grad_and_value(loss))

    def work() -> None:
        for _ in range(steps):
            gradients, _ = gradient(parameters, buffers, x, y)
            for name, g in gradients.items():
                velocity[name].mul_(MOMENTUM).add_(g)
                parameters[name].add_(velocity[name], alpha=-RATE)

    return work


def gradients(case: Case, steps: int) -> Work:
    """The unit: gradients of all replicas, one after the other, as often as steps are taken."""
    models, (x, y) = _models(case), case.batches()

    def work() -> None:
        for _ in range(steps):
            for model, inputs, targets in zip(models, x, y, strict=True):
                torch.autograd.grad(LOSS(model(inputs), targets), list(model.parameters()))

    return work


def gathering(case: Case, steps: int, row: Row) -> Work:
    """What a fleet pays beside its steps when each replica owns a list of samples of one pool."""
    pool = torch.randn(POOL, *case.shape), torch.randint(0, 10, (POOL,))
    index = torch.randint(0, POOL, (case.replicas, 1000))
    options = {"shared": True, "order_seeds": [0] * case.replicas, "own_loss": False, "target": "labels", "index": index}
    feed = FleetFeed(pool, case.replicas, batch_size=BATCH, drop_last=True, device=torch.device("cpu"), **options)

    def work() -> None:
        for step in range(steps):
            feed.batch(*divmod(step, feed.batches))

    return work


def fleet_memory(settings: Settings) -> Iterator[Row]:
    """Peak memory of a training step of a fleet, in gradients of one network alone: it grows with the replicas and with nothing
    else (no p x p, no n x p), and `memory=` bounds all but the weights by training in chunks."""
    case = CASES[1]
    model, (x, y) = case.build(), case.batches()
    alone = usage(lambda: torch.autograd.grad(LOSS(model(x[0]), y[0]), list(model.parameters())))[0].peak
    for replicas in (8, 32, 128, 512):
        for budget in (math.inf, 2.0**22):
            row = Row("fleet memory", f"{replicas} MLPs 64-32-10", "ours" if budget == math.inf else "ours, 4 MiB at once")
            peak = _peak(Case(case.name, case.build, case.shape, replicas), budget)
            row.memory = peak / alone
            row.say(f"{peak / alone / replicas:.2f} for each replica")
            yield row


def _peak(case: Case, budget: float) -> int:
    pool = torch.randn(2 * BATCH, *case.shape), torch.randint(0, 10, (2 * BATCH,))
    index = torch.randint(0, 2 * BATCH, (case.replicas, 2 * BATCH))
    fleet = th.Fleet(case.build, case.replicas, loss=LOSS, rate=RATE, momentum=MOMENTUM, route="vmap", memory=budget)
    train = partial(fleet.train, pool, index=index, batch_size=BATCH, steps=2, progress=False)
    train()
    return usage(train)[0].peak


CONTENDERS: dict[str, Callable[[Case, int, Row], Work]] = {
    "ours": ours,
    "torch.optim, a plain loop": plain_loop,
    "vmap(grad_and_value) by hand": vmap_by_hand,
    "gathering": gathering,
}
