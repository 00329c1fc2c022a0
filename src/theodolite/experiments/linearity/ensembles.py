"""Several networks of one shape as one program: seeds stand in the first dimension of every tensor.

Each network computes as `DagNetwork` does. Where their graphs differ (edges dropped at random) a mask per network keeps
the removed weights at zero; those have no derivative and count in no norm, Hessian or kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.models.dag import DagNetwork, fcn_graph

Weights = list[Tensor]
#: Weights -> one number for each network, (S,).
Scalar = Callable[[Weights], Tensor]
#: Inputs of the networks, Gaussian with ‖x‖² = INPUTS.
INPUTS = 10


def gaussian_inputs(seeds: Sequence[int], samples: int, features: int) -> Tensor:
    """(S, samples, features), each scaled to ‖x‖² = features."""
    drawn = [
        torch.randn(samples, features, generator=torch.Generator().manual_seed(10_000 + seed), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.nn.functional.normalize(torch.stack(drawn), dim=2) * math.sqrt(features)


@dataclass(frozen=True)
class Layer:
    """One layer of S networks: matrices (S, rows, columns) that read columns `first` .. `last` of what came before."""

    first: int
    last: int
    mask: Tensor | None  # (S, rows, columns)
    scale: Tensor  # (S, rows)
    skips: tuple[Tensor, Tensor]  # from, to

    def matrix(self, weights: Tensor) -> Tensor:
        """The matrices the weights stand for."""
        return weights if self.mask is None else weights * self.mask


class Ensemble:
    """S networks with equal layer sizes. `weights` holds one tensor per layer, seeds first."""

    def __init__(self, networks: Sequence[DagNetwork]) -> None:
        model = networks[0]
        if model.graph.weight_of is not None:
            raise ValueError("Networks with shared weights are stacked by Convolutions.")
        self.size, self.depth = len(networks), len(model.layers)
        self.activation, self.output_activation = model.activation, model.output_activation
        stacks = [[network.layers[i] for network in networks] for i in range(self.depth)]
        self.layers = [_layer(stack) for stack in stacks]
        self.weights: Weights = [_weights(stack, layer) for stack, layer in zip(stacks, self.layers, strict=True)]
        self.widths = [network.width for network in networks]

    def forward(self, weights: Weights, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs (S, n, d) -> pre-activations and values of each layer, (S, n, rows); the values begin with the inputs."""
        found, values = [], [x]
        for i, (layer, weight) in enumerate(zip(self.layers, weights, strict=True), start=1):
            computed = torch.cat(values, dim=2) if len(values) > 1 else x
            pre = computed[..., layer.first : layer.last] @ layer.matrix(weight).mT * layer.scale[:, None]
            value = (self.output_activation if i == self.depth else self.activation)(pre)
            if len(layer.skips[0]):
                value = value.index_add(2, layer.skips[1], computed[..., layer.skips[0]])
            found.append(pre)
            values.append(value)
        return found, values

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """Outputs (S, n, outputs)."""
        return self.forward(weights, x)[1][-1]

    def direction(self, generator: torch.Generator) -> Weights:
        """A random direction for each network, of unit length over all its weights."""
        steps = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in self.weights]
        steps = [s if layer.mask is None else s * layer.mask for s, layer in zip(steps, self.layers, strict=True)]
        return scaled(steps, 1.0 / norms(steps))

    def kernel(self, weights: Weights, x: Tensor) -> Tensor:
        """Tangent kernels of the first output, (S, n, n); no per-sample gradient is written out.

        With A the layer's inputs and D the derivatives at its pre-activations, a layer adds
        `Σ_ab M_ab (D_ia D_ja) (A_ib A_jb)`: M all ones is the product of two Gram matrices.
        """
        with torch.enable_grad():
            leaves = [w.detach().requires_grad_() for w in weights]
            found, values = self.forward(leaves, x)
            derivatives = torch.autograd.grad(values[-1][..., 0].sum(), found)
        total = x.new_zeros(self.size, x.shape[1], x.shape[1])
        rows, columns = torch.triu_indices(x.shape[1], x.shape[1])
        for i, (layer, d) in enumerate(zip(self.layers, derivatives, strict=True)):
            a = torch.cat(values[: i + 1], dim=2)[..., layer.first : layer.last].detach()
            d = d * layer.scale[:, None]
            if layer.mask is None:
                total += (a @ a.mT) * (d @ d.mT)
                continue
            pairs = ((d[:, rows] * d[:, columns]) @ layer.mask * (a[:, rows] * a[:, columns])).sum(2)
            total[:, rows, columns] += pairs
            total[:, columns, rows] += pairs * (rows != columns)
        return total


def fully_connected(m: int, seeds: Sequence[int], *, hidden: int = 2, output: str = "identity") -> Ensemble:
    """Tanh networks with hidden layers of m neurons, `output` the activation behind the last layer."""
    graph = fcn_graph(INPUTS, [m] * hidden)
    return Ensemble([DagNetwork(graph, output_activation=output, seed=seed) for seed in seeds])


class Convolutions:
    """S one-dimensional convolutional networks (stride 1, zero padding, linear output), as `cnn_graph` describes them."""

    def __init__(self, size: int, length: int, widths: Sequence[int], *, kernel: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(after, before * kernel) for before, after in zip((1, *widths), widths, strict=False)]
        shapes.append((1, widths[-1] * length))
        self.kernel = kernel
        self.weights: Weights = [torch.randn(size, *shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """Inputs (S, n, length) -> outputs (S, n, 1)."""
        value = x[:, :, None]  # (S, n, channels, length)
        for w in weights[:-1]:
            padded = torch.nn.functional.pad(value, (self.kernel // 2, self.kernel // 2))
            windows = padded.unfold(3, self.kernel, 1).transpose(2, 3).flatten(3)  # (S, n, length, channels · kernel)
            value = torch.tanh(windows @ w[:, None].mT * w.shape[2] ** -0.5).mT
        flat = value.flatten(2)
        out: Tensor = flat @ weights[-1].mT * flat.shape[2] ** -0.5
        return out

    def direction(self, generator: torch.Generator) -> Weights:
        """A random direction for each network, of unit length over all its weights."""
        steps = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in self.weights]
        return scaled(steps, 1.0 / norms(steps))


def _layer(stack: Sequence[Any]) -> Layer:
    first, last = min(each.first for each in stack), max(each.last for each in stack)
    model = stack[0]
    scale = torch.stack([each.scale for each in stack])
    skips = (model.skip_from, model.skip_to)
    if all(each.full and (each.first, each.last) == (first, last) for each in stack):
        return Layer(first, last, None, scale, skips)
    return Layer(first, last, torch.stack([_framed(each, first, last, ones=True) for each in stack]), scale, skips)


def _weights(stack: Sequence[Any], layer: Layer) -> Tensor:
    return torch.stack([_framed(each, layer.first, layer.last, ones=False) for each in stack])


def _framed(layer: Any, first: int, last: int, *, ones: bool) -> Tensor:
    """A layer's matrix, or its mask, within the columns `first` .. `last`."""
    rows, span = layer.shape
    flat: Tensor = layer.weight.new_zeros(rows * span).detach()
    flat[layer.place] = 1.0 if ones else layer.weight.detach()
    framed = flat.new_zeros(rows, last - first)
    framed[:, layer.first - first : layer.last - first] = flat.view(rows, span)
    return framed


def norms(parts: Weights) -> Tensor:
    """Euclidean norm over all layers, (S,)."""
    lengths: Tensor = torch.linalg.vector_norm(torch.cat([p.flatten(1) for p in parts], dim=1), dim=1)
    return lengths


def scaled(parts: Weights, factor: Tensor | float) -> Weights:
    """Each network's weights times its own factor (S,)."""
    factor = torch.as_tensor(factor, dtype=parts[0].dtype).expand(len(parts[0]))
    return [p * factor.view(-1, *[1] * (p.ndim - 1)) for p in parts]


def added(first: Weights, second: Weights) -> Weights:
    """The sum, layer by layer."""
    return [a + b for a, b in zip(first, second, strict=True)]


def hessian_norms(
    scalar: Scalar, weights: Weights, *, layers: Sequence[int] | None = None, steps: int = 24, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Spectral norms of the Hessians of S scalars, (S,), and what the last Lanczos step leaves open, (S,).

    `layers` restricts rows and columns to some layers' weights. All networks go through one Lanczos recursion; the products
    are double backward on one graph.
    """
    chosen = range(len(weights)) if layers is None else layers
    leaves = [w.detach().requires_grad_(i in chosen) for i, w in enumerate(weights)]
    wanted = [leaves[i] for i in chosen]
    gradients = torch.autograd.grad(scalar(leaves).sum(), wanted, create_graph=True, allow_unused=True)
    sizes = [w[0].numel() for w in wanted]
    roots = [(g, i) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

    def product(v: Tensor) -> Tensor:
        if not roots:
            return torch.zeros_like(v)
        parts = [part.reshape(w.shape) for part, w in zip(v.split(sizes, dim=1), wanted, strict=True)]
        images = torch.autograd.grad(
            [g for g, _ in roots], wanted, [parts[i] for _, i in roots], retain_graph=True, allow_unused=True
        )
        flat = [(torch.zeros_like(w) if h is None else h).flatten(1) for h, w in zip(images, wanted, strict=True)]
        return torch.cat(flat, dim=1)

    return _lanczos(product, len(weights[0]), sum(sizes), steps, seed)


def _lanczos(product: Callable[[Tensor], Tensor], count: int, size: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Largest |eigenvalue| and its residual, (S,). Without reorthogonalisation: copies of Ritz values do no harm here."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(count, size, generator=generator, dtype=torch.float64)
    v /= v.norm(dim=1, keepdim=True)
    before, alphas, betas = torch.zeros_like(v), [], [v.new_zeros(count)]
    for _ in range(min(steps, size)):
        w = product(v)
        alphas.append((w * v).sum(1))
        w = w - alphas[-1][:, None] * v - betas[-1][:, None] * before
        betas.append(w.norm(dim=1))
        before, v = v, w / betas[-1].clamp(min=1e-300)[:, None]
    k = len(alphas)
    matrix = torch.diag_embed(torch.stack(alphas, 1))
    off = torch.stack(betas, 1)[:, 1:k]
    matrix[:, range(k - 1), range(1, k)] = off
    matrix[:, range(1, k), range(k - 1)] = off
    values, vectors = torch.linalg.eigh(matrix)
    best = values.abs().argmax(1)
    rows = torch.arange(count)
    return values.abs()[rows, best], betas[-1] * vectors[rows, -1, best].abs()
