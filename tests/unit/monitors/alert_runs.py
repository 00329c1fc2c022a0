"""Trainings for the monitor: healthy ones of usual kinds, and ones with a planted fault."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import theodolite as th

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Run:
    """A training: what is trained on what, how, for how long; `each` may spoil it before a step.

    For planted faults `alert` is the kind that must be raised and `causes` those that may be named.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int, int], Batches]
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss
    steps: int = 500
    batch: int = 64
    schedule: Callable[[float, int], float] | None = None  # of the share done and the step
    each: Callable[[nn.Module, int], None] | None = None
    alert: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    def play(self, seed: int = 0, **monitor: Any) -> th.monitors.MonitorReport:
        """Train with a monitor, as a user's loop would."""
        torch.manual_seed(seed)
        model, loss, data = self.model(), self.loss(), self.data(self.batch, seed)
        optimizer = self.optimizer(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        watching = th.Monitor(loss, **{"alerts": False, **monitor})
        for step in range(self.steps):
            x, y = next(data)
            if self.schedule is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * self.schedule(step / self.steps, step)
            if self.each is not None:
                self.each(model, step)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            watching.observe(step, model, (x, y), optimizer)
            optimizer.step()
        watching.close()
        return watching.report()


# Data


def epochs(x: Tensor, y: Tensor, batch: int, seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(x), generator=generator)
        for i in range(0, len(x) - batch + 1, batch):
            yield x[order[i : i + batch]], y[order[i : i + batch]]


@cache
def _digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


def digits(batch: int, seed: int) -> Batches:
    return epochs(*_digits(), batch, seed)


def digit_images(batch: int, seed: int) -> Batches:
    x, y = _digits()
    return epochs((x - x.mean()).reshape(-1, 1, 8, 8) * 1.3, y, batch, seed)


def fashion(batch: int, seed: int) -> Batches:
    data = th.data.load("fashion_mnist").scaled()
    return epochs(data.x_train[:3000].float().reshape(-1, 1, 28, 28), data.y_train[:3000], batch, seed)


def curve(noise: float = 0.1, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2000, 8, generator=generator), torch.randn(8, outputs, generator=generator) / math.sqrt(8)
    return x, torch.sin(2 * (x @ w)) + noise * torch.randn(2000, outputs, generator=generator)


def regression(noise: float = 0.1, outputs: int = 1) -> Callable[[int, int], Batches]:
    return lambda batch, seed: epochs(*curve(noise, outputs), batch, seed)


LETTERS = 27


def text(batch: int, seed: int, length: int = 32) -> Batches:
    """Words of a small language, letter by letter: each letter depends on the one before."""
    generator = torch.Generator().manual_seed(7)
    table = torch.rand(LETTERS, LETTERS, generator=generator).pow(6)
    generator.manual_seed(seed)
    while True:
        ids = [torch.randint(LETTERS, (batch // 4,), generator=generator)]
        for _ in range(length):
            ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
        rows = torch.stack(ids, 1)
        yield rows[:, :-1], rows[:, 1:]


def shuffled(data: Callable[[int, int], Batches]) -> Callable[[int, int], Batches]:
    def draw(batch: int, seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        for x, y in data(batch, seed):
            yield x, y[torch.randperm(len(y), generator=generator)]

    return draw


def with_nan(data: Callable[[int, int], Batches], at: int) -> Callable[[int, int], Batches]:
    def draw(batch: int, seed: int) -> Batches:
        for step, (x, y) in enumerate(data(batch, seed)):
            yield (torch.full_like(x, math.nan) if step == at else x), y

    return draw


# Models, losses, optimizers, schedules


def mlp(inputs: int = 64, width: int = 64, outputs: int = 10, depth: int = 2, act: Any = nn.ReLU, scale: float = 1.0) -> Any:
    def make() -> nn.Module:
        sizes = [inputs, *[width] * depth]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), act())]
        model = nn.Sequential(*layers, nn.Linear(width, outputs))
        with torch.no_grad():
            for layer in model:
                if isinstance(layer, nn.Linear):
                    layer.weight.mul_(scale)
        return model

    return make


def cnn(size: int = 28, norm: bool = False) -> Callable[[], nn.Module]:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]

    def make() -> nn.Module:
        head = [nn.Flatten(), nn.Linear(16 * (size // 4) ** 2, 32), nn.ReLU(), nn.Linear(32, 10)]
        return nn.Sequential(*block(1, 8), *block(8, 16), *head)

    return make


def gpt() -> nn.Module:
    return th.models.gpt(vocabulary=LETTERS, context=32, dim=32, depth=2, heads=2, seed=int(torch.initial_seed()))


class TokenLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())


def sgd(lr: float, momentum: float = 0.0, decay: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)


def adamw(lr: float, decay: float = 0.01) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW(model.parameters(), lr=lr, weight_decay=decay)


def cosine(share: float, step: int) -> float:
    return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * share))


def linear(share: float, step: int) -> float:
    return min(1.0, (step + 1) / 20) * (1 - share)


def kill(layer: int, at: int) -> Callable[[nn.Module, int], None]:
    def each(model: Any, step: int) -> None:
        if step == at:
            model[layer].bias.data.fill_(-100.0)

    return each


def only(*layers: int) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD([p for i in layers for p in model[i].parameters()], lr=0.1)  # type: ignore[index]


MSE, TOKENS = nn.MSELoss, TokenLoss
small = mlp(8, 32, 1)

HEALTHY: dict[str, Run] = {
    "mlp, SGD 0.1": Run(mlp(), digits, sgd(0.1)),
    "mlp, SGD 0.02": Run(mlp(), digits, sgd(0.02)),
    "mlp, SGD at the edge": Run(mlp(), digits, sgd(0.6), steps=600),
    "mlp, momentum": Run(mlp(), digits, sgd(0.05, 0.9)),
    "mlp, momentum, linear schedule": Run(mlp(), digits, sgd(0.05, 0.9, 5e-4), schedule=linear),
    "mlp, AdamW": Run(mlp(), digits, adamw(1e-3), steps=1200),
    "mlp, AdamW, warm-up and cosine": Run(mlp(), digits, adamw(3e-3), schedule=cosine),
    "mlp, batches of 4": Run(mlp(), digits, sgd(0.02), steps=1000, batch=4),
    "mlp, all data at once": Run(mlp(), digits, sgd(0.3), steps=400, batch=1700),
    "mlp, until it is flat": Run(mlp(width=24), digits, sgd(0.1, 0.0, 1e-3), steps=2500),
    "deep mlp, AdamW": Run(mlp(depth=8), digits, adamw(1e-3), steps=600),
    "tanh mlp, momentum": Run(mlp(depth=4, act=nn.Tanh), digits, sgd(0.05, 0.9)),
    "sigmoid mlp, AdamW": Run(mlp(act=nn.Sigmoid), digits, adamw(3e-3), steps=800),
    "mlp, smoothed and weighted loss": Run(
        mlp(), digits, sgd(0.1), lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 1.5, 10), label_smoothing=0.1)
    ),
    "cnn on digits, momentum": Run(cnn(8), digit_images, sgd(0.05, 0.9)),
    "cnn on images, momentum": Run(cnn(), fashion, sgd(0.05, 0.9), steps=300),
    "cnn on images, AdamW": Run(cnn(), fashion, adamw(1e-3), steps=300),
    "cnn with batch norm, cosine": Run(cnn(norm=True), fashion, sgd(0.1, 0.9, 5e-4), steps=300, schedule=cosine),
    "gpt, AdamW": Run(gpt, text, adamw(1e-3), TOKENS, steps=400),
    "gpt, AdamW, warm-up and cosine": Run(gpt, text, adamw(3e-3, 0.1), TOKENS, steps=400, schedule=cosine),
    "gpt, momentum": Run(gpt, text, sgd(0.1, 0.9), TOKENS, steps=400, schedule=linear),
    "regression, SGD": Run(small, regression(), sgd(0.05), MSE),
    "regression, AdamW": Run(small, regression(), adamw(1e-3), MSE, steps=600),
    "regression, AdamW, mostly noise": Run(small, regression(noise=1.6), adamw(1e-3), MSE, steps=1200),
    "regression, L1": Run(mlp(8, 32, 1, act=nn.Tanh), regression(), sgd(0.02, 0.9), nn.L1Loss),
    "regression, Huber, cosine": Run(mlp(8, 32, 5), regression(outputs=5), adamw(3e-3), nn.HuberLoss, schedule=cosine),
    "linear regression, all data": Run(mlp(8, 8, 1, depth=0), regression(), sgd(0.1), MSE, steps=300, batch=2000),
}

PLANTED: dict[str, Run] = {
    "rate 10 times too high, mlp": Run(
        mlp(depth=3), digits, sgd(3.0), steps=300,
            alert=("divergence coming", "dying units"), causes=("rate too high", "dead layer")
    ),
    "rate 10 times too high, cnn": Run(
        cnn(8), digit_images, sgd(0.6, 0.9), steps=400,
            alert=("divergence coming", "dying units"), causes=("rate too high", "dead layer")
    ),
    "rate 30 times too high, gpt": Run(
        gpt, text, adamw(0.1), TOKENS, steps=400,
            alert=("not learning", "loss floor", "divergence coming"), causes=("rate too high",)
    ),
    "rate 10 times too high, regression": Run(
        small, regression(), sgd(2.0), MSE, steps=100, alert=("divergence coming", "not finite"), causes=("rate too high",)
    ),
    "rate 100 times too low": Run(mlp(), digits, sgd(1e-3), steps=500, alert=("not learning",), causes=("rate too low",)),
    "dead layer from the start": Run(mlp(depth=3), digits, sgd(0.1), steps=120, each=kill(2, 0),
        alert=("dying units",), causes=("dead layer",)),
    "dead layer later": Run(mlp(depth=3), digits, adamw(1e-3), steps=300, each=kill(2, 150),
        alert=("dying units",), causes=("dead layer",)),
    "NaN in a batch": Run(mlp(), with_nan(digits, 120), sgd(0.1), steps=150, alert=("not finite",), causes=("not finite",)),
    "vanishing, sigmoid": Run(
        mlp(depth=10, act=nn.Sigmoid), digits, sgd(0.1), steps=120,
            alert=("vanishing gradients",), causes=("vanishing gradients",)
    ),
    "vanishing, small weights": Run(
        mlp(depth=12, act=nn.Tanh, scale=0.2), digits, sgd(0.1), steps=300,
            alert=("vanishing gradients",), causes=("vanishing gradients",)
    ),
    "exploding": Run(
        mlp(depth=10, scale=6.0), digits, sgd(0.01), steps=200,
            alert=("not finite", "divergence coming"), causes=("exploding gradients",)
    ),
    "shuffled labels": Run(mlp(), shuffled(digits), sgd(0.1), steps=451, alert=("not learning",), causes=("labels do not fit",)),
    "shuffled targets": Run(small, shuffled(regression()), adamw(1e-3), MSE, steps=600,
        alert=("not learning",), causes=("labels do not fit",)),
    "schedule at 0": Run(
        mlp(), digits, sgd(0.05), schedule=lambda share, step: max(0.0, 1 - step / 60), steps=150,
            alert=("not learning",), causes=("schedule ended",)
    ),
    "schedule by step and not by epoch": Run(
        gpt, text, adamw(1e-3), TOKENS, schedule=lambda share, step: 0.9**step, steps=300,
            alert=("not learning",), causes=("schedule ended",)
    ),
    "rate 0": Run(mlp(), digits, sgd(0.0), steps=200, alert=("not learning",), causes=("frozen model",)),
    "weight decay, SGD": Run(mlp(), digits, sgd(0.1, 0.0, 0.5), steps=251, alert=("not learning",), causes=("weight decay",)),
    "weight decay, AdamW": Run(gpt, text, adamw(1e-3, 20.0), TOKENS, steps=400,
        alert=("not learning",), causes=("weight decay",)),
    "only the last layer in the optimizer": Run(mlp(), digits, only(4), steps=200,
        alert=("missing parameters",), causes=("missing parameters",)),
    "last layer not in the optimizer": Run(mlp(), digits, only(0, 2), steps=200,
        alert=("missing parameters",), causes=("missing parameters",)),
}  # fmt: skip
