"""The networks of the chapter by name, several seeds of each at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.experiments.linearity.ensembles import Convolutions, Ensemble, Scalar, Weights
from theodolite.measures.linearity import Graph
from theodolite.models.dag import (
    DagNetwork,
    densenet_graph,
    fcn_graph,
    with_bottlenecks,
    with_connections,
    with_drops,
    with_skips,
)

#: Inputs of the networks, Gaussian with ‖x‖² = INPUTS.
INPUTS = 10


@dataclass(frozen=True)
class Architecture:
    """A family of networks: `graph(m, seed)`; None is the convolutional network.

    `layers` are those whose block of the Hessian is taken; `layer` is the one whose first pre-activation stands for the
    output; `outputs` counts output neurons.
    """

    graph: Callable[[int, int], Graph] | None
    layers: tuple[int, ...] | None = None
    output_activation: str = "identity"
    layer: int | None = None
    outputs: int = 1


def _fcn(*powers: float | int, outputs: int = 1) -> Callable[[int, int], Graph]:
    """Hidden widths: `1.0` stands for m, `2.0` for m², whole numbers for themselves."""

    def graph(m: int, seed: int) -> Graph:
        widths = [round(m**p) if isinstance(p, float) else p for p in powers]
        return fcn_graph(INPUTS, widths, outputs)

    return graph


#: What the claims and figures call them.
ARCHITECTURES: dict[str, Architecture] = {
    "two layers": Architecture(_fcn(1.0)),
    "three layers": Architecture(_fcn(1.0, 1.0)),
    "m, m²": Architecture(_fcn(1.0, 2.0)),
    "skip": Architecture(lambda m, seed: with_skips(fcn_graph(INPUTS, [m, m]))),
    "dense": Architecture(lambda m, seed: densenet_graph(INPUTS, [m, m])),
    "dropped edges": Architecture(lambda m, seed: with_drops(densenet_graph(INPUTS, [m, m]), 0.5, seed=seed)),
    "convolution": Architecture(None),
    "three outputs": Architecture(_fcn(1.0, 1.0, outputs=3), outputs=3),
    "hidden pre-activation": Architecture(_fcn(1.0, 1.0), layer=2),
    "first pre-activation": Architecture(_fcn(1.0, 1.0), layer=1),
    "two bottlenecks": Architecture(lambda m, seed: with_bottlenecks(fcn_graph(INPUTS, [m, m]), 2, 2, seed=seed)),
    "half bottlenecks": Architecture(lambda m, seed: with_bottlenecks(fcn_graph(INPUTS, [m, m]), 2, m // 2, seed=seed)),
    "narrow first": Architecture(_fcn(2, 1.0)),
    "narrow first, upper blocks": Architecture(_fcn(2, 1.0), layers=(1, 2)),
    "narrow second": Architecture(_fcn(1.0, 2)),
    "output block": Architecture(_fcn(1.0, 1.0), layers=(2,)),
    "tanh output": Architecture(_fcn(1.0), output_activation="tanh"),
    "m, 2, m": Architecture(_fcn(1.0, 2, 1.0)),
    "m, 2, m restored": Architecture(lambda m, seed: with_connections(fcn_graph(INPUTS, [m, 2, m]), 1, 3)),
}


def gaussian_inputs(seeds: Sequence[int], samples: int, features: int) -> Tensor:
    """(S, samples, features), each scaled to ‖x‖² = features."""
    drawn = [
        torch.randn(samples, features, generator=torch.Generator().manual_seed(10_000 + seed), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.nn.functional.normalize(torch.stack(drawn), dim=2) * math.sqrt(features)


def built(name: str, m: int, seeds: Sequence[int], activation: str = "tanh") -> Ensemble | Convolutions:
    """The networks of these seeds."""
    architecture = ARCHITECTURES[name]
    if architecture.graph is None:
        return Convolutions(len(seeds), INPUTS, [m, m], seed=seeds[0])
    return Ensemble(
        [
            DagNetwork(
                architecture.graph(m, seed),
                activation=activation,
                output_activation=architecture.output_activation,
                seed=seed,
            )
            for seed in seeds
        ]
    )


def scalar_of(name: str, networks: Ensemble | Convolutions, x: Tensor, output: int = 0) -> Scalar:
    """What the Hessian is taken of: an output for the first sample, or a pre-activation."""
    layer = ARCHITECTURES[name].layer

    def scalar(weights: Weights) -> Tensor:
        if layer is not None and isinstance(networks, Ensemble):
            return networks.preactivations(weights, x)[layer - 1][:, 0, 0]
        return networks(weights, x)[:, 0, output]

    return scalar
