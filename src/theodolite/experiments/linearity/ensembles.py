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

#: Weights (S, P) -> one number for each network, (S,).
Scalar = Callable[[Tensor], Tensor]
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


class Networks:
    """S networks of equal layer sizes, from the matrices (S, rows, columns) of their layers.

    `weights` (S, P) are those of all layers one after the other, and `mask` is 0 where a network has none.
    """

    def __init__(self, matrices: Sequence[Tensor], mask: Tensor | float = 1.0) -> None:
        self.shapes = [matrix.shape[1:] for matrix in matrices]
        self.weights, self.mask = _flat(matrices), mask

    def matrices(self, weights: Tensor) -> list[Tensor]:
        """The weights as matrices of the layers."""
        parts = weights.split([shape.numel() for shape in self.shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def at(self, distance: float, seed: int) -> Tensor:
        """The weights at a distance from the start, in a random direction for each network."""
        draw = normals(seed)
        step = _flat([draw(len(self.weights), *shape) for shape in self.shapes]) * self.mask
        return self.weights + distance * normalize(step)


def _flat(matrices: Iterable[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten(1) for matrix in matrices], dim=1)


class Ensemble(Networks):
    """Networks that compute as `DagNetwork` does."""

    @classmethod
    def of(cls, graph: Callable[[int], Graph], seeds: Sequence[int], **activations: Any) -> Ensemble:
        """The networks of these seeds, each with its graph."""
        return cls([DagNetwork(graph(seed), seed=seed, **activations) for seed in seeds])

    def __init__(self, networks: Sequence[DagNetwork]) -> None:
        model = networks[0]
        if model.graph.weight_of is not None:
            raise ValueError("Networks with shared weights are stacked by Convolutions.")
        self.depth, self.widths = len(model.layers), [network.width for network in networks]
        self.activation, self.output_activation = model.activation, model.output_activation
        stacks = zip(*(network.layers for network in networks), strict=True)
        self.layers, weights = zip(*map(_layer, stacks), strict=True)
        masks = (torch.ones_like(w) if layer.mask is None else layer.mask for layer, w in zip(self.layers, weights, strict=True))
        super().__init__(weights, _flat(masks))

    def forward(self, weights: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs (S, n, d) -> pre-activations and values of each layer, (S, n, rows); the values begin with the inputs."""
        found, values = [], [x]
        matrices = self.matrices(weights * self.mask)
        for i, (layer, matrix) in enumerate(zip(self.layers, matrices, strict=True), start=1):
            computed = torch.cat(values, dim=2) if len(values) > 1 else x
            pre = computed[..., layer.first : layer.last] @ matrix.mT * layer.scale[:, None]
            value = (self.output_activation if i == self.depth else self.activation)(pre)
            if len(layer.skips[0]):
                value = value.index_add(2, layer.skips[1], computed[..., layer.skips[0]])
            found.append(pre)
            values.append(value)
        return found, values

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        """Outputs (S, n, outputs)."""
        return self.forward(weights, x)[1][-1]

    def kernel(self, weights: Tensor, x: Tensor) -> Tensor:
        """Tangent kernels of the first output, (S, n, n); no per-sample gradient is written out.

        With A the layer's inputs and D the derivatives at its pre-activations, a layer adds
        `Σ_ab M_ab (D_ia D_ja) (A_ib A_jb)`: M all ones is the product of two Gram matrices.
        """
        with torch.enable_grad():
            found, values = self.forward(weights.detach().requires_grad_(), x)
            derivatives = torch.autograd.grad(values[-1][..., 0].sum(), found)
        total = x.new_zeros(len(x), x.shape[1], x.shape[1])
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
        super().__init__([draw(size, *shape) for shape in shapes])

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        """Inputs (S, n, length) -> outputs (S, n, 1)."""
        value = x[:, :, None]  # (S, n, channels, length)
        *hidden, last = self.matrices(weights)
        for w in hidden:
            padded = pad(value, (self.kernel // 2, self.kernel // 2))
            windows = padded.unfold(3, self.kernel, 1).transpose(2, 3).flatten(3)  # (S, n, length, channels · kernel)
            value = torch.tanh(windows @ w[:, None].mT * w.shape[2] ** -0.5).mT
        flat = value.flatten(2)
        out: Tensor = flat @ last.mT * flat.shape[2] ** -0.5
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


def gradients(scalar: Scalar, weights: Tensor) -> Tensor:
    """Gradients of S scalars by the weights of their networks, (S, P)."""
    leaves = weights.detach().requires_grad_()
    return torch.autograd.grad(scalar(leaves).sum(), leaves)[0]


def hessian_norms(scalar: Scalar, weights: Tensor, *, first: int = 0, steps: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Spectral norms of the Hessians of S scalars, (S,), and what the last Lanczos step leaves open, (S,).

    The Hessian is by the weights from the place `first` on. All networks go through one Lanczos recursion; the products are
    double backward on one graph.
    """
    leaves = weights[:, first:].detach().requires_grad_()
    whole = torch.cat([weights[:, :first].detach(), leaves], dim=1)
    (gradient,) = torch.autograd.grad(scalar(whole).sum(), leaves, create_graph=True)

    def product(v: Tensor) -> Tensor:
        if not gradient.requires_grad:  # it is constant
            return torch.zeros_like(v)
        return torch.autograd.grad(gradient, leaves, v, retain_graph=True)[0]

    return _lanczos(product, leaves.shape, steps, seed)


def _lanczos(product: Callable[[Tensor], Tensor], shape: torch.Size, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Largest |eigenvalue| and its residual, (S,). Without reorthogonalisation: copies of Ritz values do no harm here."""
    count, size = shape
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
