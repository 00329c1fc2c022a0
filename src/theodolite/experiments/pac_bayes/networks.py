"""Classifiers that the bounds of this chapter are about: data, weights before training, weights after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from theodolite.data import load
from theodolite.experiments.lab.datasets import in_halves
from theodolite.experiments.study import Computation, Study
from theodolite.measures.bounds import GaussianPosterior
from theodolite.models import build
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import train

#: Standard deviation of the untrained weights, cut off at two of them; biases are zero.
STD = 0.04
#: Samples of the generated data that are drawn beside those of the training, at least: they measure the error on new data.
FRESH = 5000
#: Networks that the error of a posterior on new data is measured with.
NETWORKS = 20


@dataclass(frozen=True)
class Setup:
    """How a network is made: plain values only, so that it can be part of a job.

    `data` is a name of `theodolite.data`, or "synthetic"; with 2 `classes` the first half of the classes stands against the
    second (digits 0 to 4 against 5 to 9, "MNIST-2"). `samples` is how many are taken at most, `side` what images are averaged
    down to, `labels` are "true" or "random". Of generated data at least so many `fresh` samples are drawn beside.
    """

    network: str
    data: str = "mnist"
    classes: int = 2
    labels: str = "true"
    samples: int = 60_000
    side: int = 28
    epochs: int = 20
    rate: float = 0.01
    momentum: float = 0.9
    batch: int = 128
    fresh: int = FRESH

    @property
    def title(self) -> str:
        """As the tables of the source call it: T-600, R-600 with random labels, T-200^2_10 with ten classes."""
        letter = "R" if self.labels == "random" else "T"
        return f"{letter}{self.network.removeprefix('F')}" + ("_10" if self.classes == 10 else "")

    def but(self, **changes: Any) -> Setup:
        """The same with other values."""
        return replace(self, **changes)


#: The source's networks at its own settings, and with twenty epochs; small ones on digits and on generated data.
PRINTED = Setup("F-600", epochs=1000, momentum=0.0)
MNIST = Setup("F-600")
DIGITS = Setup("F-40", data="digits", samples=1437, side=8, rate=0.05, batch=32, epochs=10)
SYNTHETIC = Setup("F-40", data="synthetic", samples=20_000, rate=0.05, momentum=0.0, batch=50)


class Parts(NamedTuple):
    """Training samples and new ones."""

    x: Tensor
    y: Tensor
    x_new: Tensor
    y_new: Tensor


def prototypes(n: int, seed: int, dim: int = 40, noise: float = 1.5) -> tuple[Tensor, Tensor]:
    """`x = c + noise · max(g, 0)`, c one of eight prototypes `max(N(0, I), 0)`, with the two labels in turn.

    Inputs are not negative, so that their second moments have one long axis, as those of images do.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, dim, generator=generator).clamp(min=0.0)
    which = torch.randint(8, (n,), generator=generator)
    x = centres[which] + noise * torch.randn(n, dim, generator=generator).clamp(min=0.0)
    return x, which % 2


def data_of(setup: Setup, seed: int) -> Parts:
    """The samples of a setup; random labels are random on new samples too."""
    parts = _generated(setup, seed) if setup.data == "synthetic" else _images(setup)
    if setup.labels == "true":
        return parts
    generator = torch.Generator().manual_seed(1000 + seed)
    y, y_new = (torch.randint(setup.classes, like.shape, generator=generator) for like in (parts.y, parts.y_new))
    return parts._replace(y=y, y_new=y_new)


def _generated(setup: Setup, seed: int) -> Parts:
    n = setup.samples
    x, y = prototypes(n + max(n, setup.fresh), seed)
    return Parts(x[:n], y[:n], x[n:], y[n:])


def _images(setup: Setup) -> Parts:
    found = load(setup.data).scaled()
    if setup.classes < len(found.classes):
        found = in_halves(found)
    x, x_new = (
        part if setup.side >= part.shape[-1] else F.adaptive_avg_pool2d(part, setup.side)
        for part in (found.x_train, found.x_test)
    )
    if setup.network.startswith("F-"):
        x, x_new = x.flatten(1), x_new.flatten(1)
    return Parts(x[: setup.samples], found.y_train[: setup.samples], x_new, found.y_test)


def untrained(setup: Setup, x: Tensor, seed: int) -> nn.Module:
    """The network with weights from N(0, 0.04²), cut off at two deviations, and zero biases.

    Convolutions have Xavier's: with 25 inputs each, weights so small would pass nothing on.
    """
    if not setup.network.startswith("F-"):
        return build(setup.network, classes=setup.classes, image=tuple(x.shape[1:]), seed=seed)
    model = build(setup.network, inputs=x.shape[1], outputs=setup.classes, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.trunc_normal_(p, std=STD, a=-2 * STD, b=2 * STD, generator=generator)
        else:
            nn.init.zeros_(p)
    return model


class Training(Study):
    """A network trained as its setup says: its rows hold the weights before and after."""

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        seed = job["seed"]
        setup = Setup(**{name: value for name, value in job.items() if name != "seed"})
        parts = data_of(setup, seed)
        model = untrained(setup, parts.x, seed)
        yield {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fit(model, setup, parts, seed)
        yield dict(model.state_dict())


def fit(model: nn.Module, setup: Setup, parts: Parts, seed: int) -> None:
    """Stochastic gradient descent on the cross-entropy."""
    sgd = torch.optim.SGD(model.parameters(), lr=setup.rate, momentum=setup.momentum)
    how: dict[str, Any] = {"epochs": setup.epochs, "batch_size": setup.batch, "seed": seed}
    train(model, nn.CrossEntropyLoss(), (parts.x, parts.y), sgd, **how, progress=False, every=10**9)


def training_of(setup: Setup, seed: int) -> Computation:
    """The training that a network needs."""
    return Training().job(**asdict(setup), seed=seed)


class Trained(NamedTuple):
    """A trained network as a problem on its training samples, its weights before training, and the samples."""

    problem: Problem
    start: dict[str, Tensor]
    parts: Parts

    def error(self) -> float:
        """The error rate of the network without noise on new samples."""
        return error_of(self.problem.model, self.parts.x_new, self.parts.y_new)


def trained(setup: Setup, seed: int, weights: Sequence[Row] | None = None) -> Trained:
    """The network from the rows of its training; without them it is trained here."""
    before, after = list(Training().run(training_of(setup, seed).job)) if weights is None else weights
    parts = data_of(setup, seed)
    model = untrained(setup, parts.x, seed)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in after.items()})
    problem = Problem(model.eval(), nn.CrossEntropyLoss(), (parts.x, parts.y))
    return Trained(problem, {name: torch.as_tensor(value) for name, value in before.items()}, parts)


@torch.no_grad()
def error_of(model: Any, x: Tensor, y: Tensor) -> float:
    """The share of samples that a network is wrong on."""
    wrong = sum(int((model(a).argmax(1) != b).sum()) for a, b in zip(x.split(5000), y.split(5000), strict=True))
    return wrong / len(y)


def drawn_error(model: nn.Module, posterior: GaussianPosterior, x: Tensor, y: Tensor, seed: int = 0) -> tuple[float, float]:
    """The mean error rate of networks drawn from a posterior, and its standard error over networks and samples."""
    errors = []
    for i in range(NETWORKS):
        weights = posterior.sample(10_000 + seed * NETWORKS + i)
        errors.append(error_of(lambda a, w=weights: functional_call(model, w, (a,)), x, y))
    rates = torch.tensor(errors, dtype=torch.float64)
    mean = float(rates.mean())
    return mean, float((rates.var() / NETWORKS + mean * (1 - mean) / len(y)).sqrt())
