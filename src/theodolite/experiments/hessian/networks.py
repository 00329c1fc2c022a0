"""Trained networks that the experiments of this chapter share; each is trained once per process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.data import load
from theodolite.models import build
from theodolite.problem import Problem
from theodolite.training import train

#: Settings of the source's training that a job may change.
ALTERNATIVES: dict[str, dict[str, float]] = {
    "default": {},
    "small rate": {"rate": 0.2},  # in units of the default rate
    "momentum": {"momentum": 0.9, "weight_decay": 5e-4},
}


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

    def at_init(self) -> Setup:
        return replace(self, epochs=0)


@lru_cache(maxsize=64)
def trained(setup: Setup, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network in float64 and eval mode, and the samples for curvature; the same for the same arguments."""
    x, y = _data(setup, seed)
    model = _build(setup, x, seed)
    if setup.epochs:
        _train(setup, model, x, y, seed)
    model, samples = model.double().eval(), x[: setup.samples].double()
    return model, (_in_span(model, samples) if setup.span else samples, y[: setup.samples])


def problem_of(setup: Setup, seed: int) -> Problem:
    """The trained network as a problem with cross-entropy."""
    model, data = trained(setup, seed)
    return Problem(model, nn.CrossEntropyLoss(), data)


def _data(setup: Setup, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs less their mean over their deviation (per channel), as the spec scales them, unless raw ones are asked for."""
    data = load(setup.data)
    mean, std = data.statistics()
    images = data.scaled() if setup.pixels == "raw" else data.scaled(mean.tolist(), std.tolist())
    images = images.flat() if setup.flat else images
    y = images.y_train
    if setup.labels == "random":
        y = torch.randint(0, len(images.classes), y.shape, generator=torch.Generator().manual_seed(1000 + seed))
    return images.x_train, y


def _build(setup: Setup, x: Tensor, seed: int) -> nn.Module:
    """Xavier with zero bias, the source's second statement of its initialisation."""
    classes = len(load(setup.data).classes)
    if setup.network.startswith("F-"):
        return build(setup.network, inputs=x.shape[1], outputs=classes, seed=seed)
    sizes: dict[str, Any] = (
        {"channels": x.shape[1]} if setup.network.startswith(("VGG", "ResNet")) else {"image": tuple(x.shape[1:])}
    )
    return build(setup.network, classes=classes, seed=seed, **sizes)


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
    change = ALTERNATIVES[setup.training]
    sgd = torch.optim.SGD(
        model.parameters(),
        lr=setup.rate * change.get("rate", 1.0),
        momentum=change.get("momentum", 0.0),
        weight_decay=change.get("weight_decay", 0.0),
    )
    loss = nn.CrossEntropyLoss()
    epochs = round(setup.epochs / change.get("rate", 1.0))
    for epoch in range(0, epochs, 5):
        trace = train(
            model,
            loss,
            (x, y),
            sgd,
            epochs=min(5, epochs - epoch),
            batch_size=setup.batch,
            seed=1000 * seed + epoch,
            progress=False,
        )
        last = trace.loss[-max(1, len(trace.loss) // 5) :]
        if sum(last) / len(last) < setup.until:
            break
