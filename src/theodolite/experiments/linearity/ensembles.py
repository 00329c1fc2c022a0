"""Several networks of one shape as one program: seeds stand in the first dimension of every tensor.

Each network computes as `DagNetwork` does. Where their graphs differ (edges dropped at random) a mask per network keeps
the removed weights at zero; those have no derivative and count in no norm, Hessian or kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from theodolite.measures.linearity import Graph
from theodolite.models.dag import DagNetwork, fcn_graph
from theodolite.results import Row

Weights = list[Tensor]
#: Weights -> one number for each network, (S,).
Scalar = Callable[[Weights], Tensor]
#: Inputs of the networks, Gaussian with ‖x‖² = INPUTS.
INPUTS = 10


def normals(seed: int) -> Callable[..., Tensor]:
    """A source of Gaussian tensors of the shapes it is called with, one drawn after the other."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian_inputs(seeds: Sequence[int], samples: int, features: int = INPUTS) -> Tensor:
    """(S, samples, features), each scaled to ‖x‖² = features."""
    drawn = torch.stack([normals(10_000 + seed)(samples, features) for seed in seeds])
    return normalize(drawn, dim=2) * math.sqrt(features)


def job_seeds(job: Mapping[str, Any], count: str = "seeds") -> range:
    """The seeds of a job, as many as it says under `count`, from its own on."""
    return range(job["seed"], job["seed"] + job[count])


def seed_rows(shared: Row, seeds: Sequence[int], **columns: Tensor | Sequence[Any]) -> Iterator[Row]:
    """A row for each network: what all have, its seed, and its own entry of each column (S,)."""
    lists = [column.tolist() if isinstance(column, Tensor) else column for column in columns.values()]
    for seed, *values in zip(seeds, *lists, strict=True):
        yield {**shared, "seed": seed, **dict(zip(columns, values, strict=True))}


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


class Networks:
    """S networks. `weights` holds one tensor per layer, seeds first; `masks` are 1 where there is a weight."""

    weights: Weights
    masks: Sequence[Tensor | float]

    def at(self, distance: float, seed: int) -> Weights:
        """The weights at a distance from the start, in a random direction for each network."""
        draw = normals(seed)
        steps = [draw(*w.shape) * mask for w, mask in zip(self.weights, self.masks, strict=True)]
        return [w + step for w, step in zip(self.weights, scaled(steps, distance / norms(steps)), strict=True)]


class Ensemble(Networks):
    """S networks of `DagNetwork` with equal layer sizes."""

    @classmethod
    def of(cls, graph: Callable[[int], Graph], seeds: Sequence[int], **activations: Any) -> Ensemble:
        """The networks of these seeds, each with its graph."""
        return cls([DagNetwork(graph(seed), seed=seed, **activations) for seed in seeds])

    def __init__(self, networks: Sequence[DagNetwork]) -> None:
        model = networks[0]
        if model.graph.weight_of is not None:
            raise ValueError("Networks with shared weights are stacked by Convolutions.")
        self.size, self.depth = len(networks), len(model.layers)
        self.activation, self.output_activation = model.activation, model.output_activation
        stacks = zip(*(network.layers for network in networks), strict=True)
        self.layers, weights = zip(*map(_layer, stacks), strict=True)
        self.weights = list(weights)
        self.masks = [1.0 if layer.mask is None else layer.mask for layer in self.layers]
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
    return Ensemble.of(lambda seed: graph, seeds, output_activation=output)


class Convolutions(Networks):
    """S one-dimensional convolutional networks (stride 1, zero padding, linear output), as `cnn_graph` describes them."""

    def __init__(self, size: int, length: int, widths: Sequence[int], *, kernel: int = 3, seed: int = 0) -> None:
        shapes = [(after, before * kernel) for before, after in zip((1, *widths), widths, strict=False)]
        shapes.append((1, widths[-1] * length))
        self.kernel = kernel
        draw = normals(seed)
        self.weights = [draw(size, *shape) for shape in shapes]
        self.masks = [1.0] * len(shapes)

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """Inputs (S, n, length) -> outputs (S, n, 1)."""
        value = x[:, :, None]  # (S, n, channels, length)
        for w in weights[:-1]:
            padded = pad(value, (self.kernel // 2, self.kernel // 2))
            windows = padded.unfold(3, self.kernel, 1).transpose(2, 3).flatten(3)  # (S, n, length, channels · kernel)
            value = torch.tanh(windows @ w[:, None].mT * w.shape[2] ** -0.5).mT
        flat = value.flatten(2)
        out: Tensor = flat @ weights[-1].mT * flat.shape[2] ** -0.5
        return out


def _layer(stack: Sequence[Any]) -> tuple[Layer, Tensor]:
    """A layer of each of the networks as one, and its weights."""
    first, last = min(each.first for each in stack), max(each.last for each in stack)
    model = stack[0]

    def framed(matrices: Iterable[Tensor]) -> Tensor:
        """Matrices of these layers, with zeros in the columns that a network does not read."""
        padded = [pad(a, (each.first - first, last - each.last)) for a, each in zip(matrices, stack, strict=True)]
        return torch.stack(padded)

    mask = None
    if not all(each.full and (each.first, each.last) == (first, last) for each in stack):
        mask = framed(
            each.weight.new_zeros(math.prod(each.shape)).index_fill(0, each.place, 1.0).view(each.shape) for each in stack
        )
    scale = torch.stack([each.scale for each in stack])
    layer = Layer(first, last, mask, scale, (model.skip_from, model.skip_to))
    return layer, framed(each.matrix().detach() for each in stack)


def norms(parts: Weights) -> Tensor:
    """Euclidean norm over all layers, (S,)."""
    lengths: Tensor = torch.linalg.vector_norm(torch.cat([p.flatten(1) for p in parts], dim=1), dim=1)
    return lengths


def scaled(parts: Weights, factor: Tensor | float) -> Weights:
    """Each network's weights times its own factor (S,)."""
    factor = torch.as_tensor(factor, dtype=parts[0].dtype).expand(len(parts[0]))
    return [p * factor.view(-1, *[1] * (p.ndim - 1)) for p in parts]


def gradients(scalar: Scalar, weights: Weights) -> Weights:
    """Gradients of S scalars by the weights of their networks."""
    leaves = [w.detach().clone().requires_grad_() for w in weights]
    return list(torch.autograd.grad(scalar(leaves).sum(), leaves))


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
    first = torch.autograd.grad(scalar(leaves).sum(), wanted, create_graph=True, allow_unused=True)
    sizes = [w[0].numel() for w in wanted]
    roots = [(g, i) for i, g in enumerate(first) if g is not None and g.requires_grad]

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
    v = normals(seed)(count, size)
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
