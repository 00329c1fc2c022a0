"""Trained networks that the figures of this chapter look at, and how they are stored and read back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from theodolite.data import load
from theodolite.experiments.study import Computation, Params, Study
from theodolite.models import build
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import Trace, train

#: Trainings that a job may ask for: the rate in units of the default one, and settings of SGD.
ALTERNATIVES: dict[str, tuple[float, dict[str, Any]]] = {
    "default": (1.0, {}),
    "small rate": (0.2, {}),
    "momentum": (1.0, {"momentum": 0.9, "weight_decay": 5e-4}),
}
#: Data sets as the tables of the source call them.
NAMES = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@dataclass(frozen=True)
class Setup:
    """How a network is made: plain values only, so that it can be part of a job.

    `network` is a name of `theodolite.models`; `data` a data set; `labels` are "true" or "random"; `epochs` at most, or until
    the mean loss of an epoch is below `until`; `samples` are those that curvature is measured on. 0 epochs is the
    initialisation. `pixels` are "standard" (mean 0, deviation 1 per channel) or "raw" (in [0, 1]). With `span` the flat
    samples are written in an orthonormal basis of their span: the first layer has fewer weights and the same curvature.
    """

    network: str
    data: str = "digits"
    labels: str = "true"
    epochs: int = 60
    until: float = 0.05
    rate: float = 0.05
    batch: int = 32
    samples: int = 1437
    training: str = "default"
    flat: bool = True
    pixels: str = "standard"
    span: bool = False

    @property
    def title(self) -> str:
        """The network, and the data where they are not prepared as usual."""
        return self.network if self.pixels == "standard" else f"{self.network} on {self.pixels} {self.data}"

    @property
    def line(self) -> str:
        """The line of the source's tables that it stands in; "-R" marks random labels."""
        return f"{NAMES[self.data]}{'-R' if self.labels == 'random' else ''} {self.network}"

    def but(self, **changes: Any) -> Setup:
        """The same with other values."""
        return replace(self, **changes)

    def networks(self, *names: str) -> list[Setup]:
        """The same training of other networks."""
        return [self.but(network=name) for name in names]


#: Small networks on digits, and those of the laptop size.
DIGITS = Setup("F-40^2")
MINI = Setup("LeNet-mini", samples=500, flat=False)
CIFAR = Setup("LeNet5", data="cifar10", epochs=15, rate=0.05, batch=64, samples=1000, flat=False)
MNIST = Setup("F-200^2", data="mnist", epochs=5, rate=0.05, batch=32, samples=2000)


def as_printed(line: str, samples: int | None = None) -> Setup:
    """The source's training for a line of its tables: 1000 epochs whatever the loss, curvature on all images or on `samples`."""
    data, network = line.split(" ", 1)
    return Setup(
        network,
        data=data.removesuffix("-R").lower(),
        labels="random" if data.endswith("-R") else "true",
        epochs=1000,
        until=0.0,
        rate=0.01,
        batch=128,
        samples=samples or (60000 if data.startswith("MNIST") else 50000),
        flat=network.startswith("F-"),
    )


# Training, and what it left


class Training(Study):
    """A network trained as its setup says; its row holds the weights by name."""

    def run(self, job: Mapping[str, Any]) -> Row:
        setup = Setup(**{name: value for name, value in job.items() if name != "seed"})
        x, y = _data(setup, job["seed"])
        model = _build(setup, x, job["seed"])
        if setup.epochs:
            _train(setup, model, x, y, job["seed"])
        return dict(model.state_dict())


def training_of(setup: Setup, seed: int) -> Computation:
    """The training that a network needs; it does not depend on what is looked at afterwards."""
    how = {name: value for name, value in asdict(setup).items() if name not in ("samples", "span")}
    return Training().job(**how, seed=seed)


def network_of(setup: Setup, seed: int, weights: Sequence[Row] | None = None) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network in float64 and eval mode, and the samples that curvature is measured on.

    `weights` are the rows of its training; without them it is trained here.
    """
    if weights is None:
        weights = [Training().run(training_of(setup, seed).job)]
    x, y = _data(setup, seed)
    model = _build(setup, x, seed)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in weights[0].items()})
    model, samples = model.double().eval(), x[: setup.samples].double()
    return model, (_in_span(model, samples) if setup.span else samples, y[: setup.samples])


def problem_of(setup: Setup, seed: int, weights: Sequence[Row] | None = None) -> Problem:
    """The same as a problem with cross-entropy."""
    model, data = network_of(setup, seed, weights)
    return Problem(model, nn.CrossEntropyLoss(), data)


class NetworkStudy(Study):
    """A study of trained networks. A size is a list of `cases`: one job for each of them and each of its seeds."""

    @classmethod
    def of(cls, **sizes: list[dict[str, Any]]) -> Self:
        """The study with other cases."""
        return cls(sizes=sizes)

    def parameters(self, size: str) -> Params:
        return Params(cases=super().parameters(size))

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for case in p.cases:
            for seed in range(case["seeds"]):
                yield {**{name: value for name, value in case.items() if name != "seeds"}, "seed": seed}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [training_of(*model) for model in models_of(job)]

    def problems(self, job: Mapping[str, Any], weights: Iterable[Sequence[Row]]) -> list[Problem]:
        """The models of a job, from the rows of their trainings."""
        return [problem_of(*model, found) for model, found in zip(models_of(job), weights, strict=True)]


def cases(*setups: Setup | str, seeds: int = 1, **looked_at: Any) -> list[dict[str, Any]]:
    """Networks, or lines of the source's tables as printed; how many seeds of each, and what is looked at, as plain values."""
    made = [as_printed(setup) if isinstance(setup, str) else setup for setup in setups]
    return [{"setup": asdict(setup), **looked_at, "seeds": seeds} for setup in made]


def models_of(job: Mapping[str, Any]) -> list[tuple[Setup, int]]:
    """Setups and seeds of a job's models: one, or those that `models` counts by training, such as [["default", 5]]."""
    setup = Setup(**job["setup"])
    if "models" not in job:
        return [(setup, job["seed"])]
    return [(setup.but(training=name), job["seed"] + i) for name, count in job["models"] for i in range(count)]


def farthest(ratios: Sequence[float]) -> float:
    """The ratio farthest from 1, up or down; NaN if one of them is."""
    if any(not ratio > 0 for ratio in ratios):
        return math.nan
    return max(ratios, key=lambda ratio: max(ratio, 1.0 / ratio))


# How networks are made


def _data(setup: Setup, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs minus their mean over their deviation (per channel), as the source scales them, unless raw ones are asked for."""
    data = load(setup.data)
    mean, std = data.statistics()
    images = data.scaled() if setup.pixels == "raw" else data.scaled(mean.tolist(), std.tolist())
    images = images.flat() if setup.flat else images
    y = images.y_train
    return images.x_train, random_labels(y, len(images.classes), seed) if setup.labels == "random" else y


def random_labels(like: Tensor, classes: int, seed: int) -> Tensor:
    """Labels that know nothing of the images."""
    return torch.randint(0, classes, like.shape, generator=torch.Generator().manual_seed(1000 + seed))


def _build(setup: Setup, x: Tensor, seed: int) -> nn.Module:
    """Xavier with zero bias, the source's second statement of its initialisation."""
    classes = len(load(setup.data).classes)
    if setup.network.startswith("F-"):
        return build(setup.network, inputs=x.shape[1], outputs=classes, seed=seed)
    if setup.network.startswith(("VGG", "ResNet")):
        return build(setup.network, classes=classes, channels=x.shape[1], seed=seed)
    return build(setup.network, classes=classes, image=tuple(x.shape[1:]), seed=seed)


def _in_span(model: nn.Module, x: Tensor) -> Tensor:
    """Inputs (N, d) as coordinates (N, r) in their span; the first layer's weights (m, d) become (m, r), its outputs stay."""
    _, sizes, right = torch.linalg.svd(x, full_matrices=False)
    basis = right[sizes > 1e-10 * sizes[0]]
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    first.weight = nn.Parameter(first.weight.detach() @ basis.T)
    first.in_features = len(basis)
    inside: Tensor = x @ basis.T
    return inside


def _train(setup: Setup, model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    rate, settings = ALTERNATIVES[setup.training]
    sgd = torch.optim.SGD(model.parameters(), lr=setup.rate * rate, **settings)
    epochs = round(setup.epochs / rate)
    for epoch in range(0, epochs, 5):
        trace = train_on(model, (x, y), sgd, setup, range(epoch, min(epoch + 5, epochs)), seed)
        last = trace.loss[-max(1, len(trace.loss) // 5) :]
        if sum(last) / len(last) < setup.until:
            break


def train_on(
    model: nn.Module, data: tuple[Tensor, Tensor], sgd: torch.optim.SGD, setup: Setup, epochs: range, seed: int
) -> Trace:
    """Some epochs of a training, with an order of the samples of their own."""
    settings: dict[str, Any] = {"epochs": len(epochs), "batch_size": setup.batch, "seed": 1000 * seed + epochs.start}
    return train(model, nn.CrossEntropyLoss(), data, sgd, **settings, progress=False)
