"""The curvature of the loss in the model's output, in the cheapest form that is true of it.

A softmax cross-entropy has `w (diag p − p pᵀ)` in every row, an elementwise loss (squared error, logistic) a diagonal; any other
convex loss is decomposed row by row. Each form is compared with a product by the true second derivative and dropped where it
does not fit. A row is one sample, or one position of a sample (a token, a pixel).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.errors import OutputLossError
from theodolite.problem.calling import Output

#: Up to so many backward passes a batch is treated exactly by default.
EXACT_PASSES = 128

#: Memory that the roots of a loss without a special form may take.
ROOT_BYTES = 2**30

NOT_CONVEX = (
    "The loss is not convex in the model's output: its Gauss-Newton factors do not exist. kronecker_factors and "
    "hessian_structure take mode='exact'."
)
FLAT = (
    "The loss has no curvature in the model's output (log-probabilities with NLLLoss, an absolute error): its Gauss-Newton "
    "part is zero whatever the network. Let the model end at the logits and use cross-entropy; kronecker_factors and "
    "hessian_structure also take mode='exact'."
)


def derivative(value: Tensor, of: Tensor) -> Tensor | None:
    """`∂value/∂of` on a graph that stays alive; None where there is no dependence."""
    return torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)[0] if value.requires_grad else None


@dataclass(frozen=True)
class RowLayout:
    """How an output is read as rows (B, R, c): R rows to a sample with c entries each.

    `shape` is the output's, cut open so that one dimension `samples_dim` counts the samples; `axis` is the one along a row,
    None where a sample is one row.
    """

    shape: tuple[int, ...]
    samples_dim: int
    axis: int | None

    @property
    def samples(self) -> int:
        return self.shape[self.samples_dim]

    @property
    def classes(self) -> int:
        return math.prod(self.shape) // self.samples if self.axis is None else self.shape[self.axis]

    @property
    def per_sample(self) -> int:
        return math.prod(self.shape) // (self.samples * self.classes)

    def rows(self, t: Tensor) -> Tensor:
        """A tensor of the output's shape as (B, R, c)."""
        t = t.reshape(self.shape)
        t = t.movedim(self.samples_dim, 0) if self.axis is None else t.movedim((self.samples_dim, self.axis), (0, -1))
        return t.reshape(self.samples, self.per_sample, self.classes)

    def back(self, rows: Tensor, output: Tensor) -> Tensor:
        """The inverse of `rows`, in the output's shape and dtype."""
        order = [self.samples_dim, *(d for d in range(len(self.shape)) if d not in (self.samples_dim, self.axis))]
        order += [] if self.axis is None else [self.axis]
        t = rows.reshape([self.shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        return t.reshape(output.shape).to(output.dtype)


def row_layouts(shape: torch.Size, samples: int) -> list[RowLayout]:
    """Readings of an output of this shape: classes last, classes second, a sample as one row."""
    opened, dim = tuple(shape), 0
    if len(shape) > 1 and shape[0] != samples and shape[1] == samples:
        dim = 1  # positions first
    elif opened and opened[0] != samples and opened[0] % samples == 0:
        opened = (samples, opened[0] // samples, *opened[1:])
    if not opened or opened[dim] != samples:
        raise ValueError(
            f"There must be outputs for each of the {samples} samples of a batch. The model's output has shape {tuple(shape)}."
        )
    opened = opened if len(opened) > 1 else (*opened, 1)
    axes = [len(opened) - 1, *([1] if len(opened) > 2 and dim == 0 else []), *([None] if len(opened) > 2 else [])]
    return [RowLayout(opened, dim, axis) for axis in axes]


@dataclass(frozen=True)
class LossCurvature(ABC):
    """Roots q of `∇²_z loss = Σ_j q_j q_jᵀ`, row by row; `flat` where the loss has a gradient and no curvature."""

    output: Tensor
    layout: RowLayout
    flat: bool

    @property
    def passes(self) -> int:
        """Backward passes of the exact treatment."""
        return self.layout.per_sample * self.layout.classes

    @abstractmethod
    def root(self, row: int, j: int) -> Tensor | None:
        """Root j (B, c) of row `row` of every sample; None where it is zero throughout."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Tensor:
        """Random rows (B, R, c) with mean 0 and covariance `∇²loss`, independent of one another."""

    def exact(self) -> Iterator[Tensor]:
        """Cotangents of the output's shape, one backward pass each; those of different rows of a sample come one by one."""
        for row in range(self.layout.per_sample):
            for j in range(self.layout.classes):
                root = self.root(row, j)
                if root is not None:
                    rows = root.new_zeros(self.layout.samples, self.layout.per_sample, self.layout.classes)
                    rows[:, row] = root
                    yield self.layout.back(rows, self.output)

    def sampled(self, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Random cotangents whose covariances add up to `∇²loss`."""
        for _ in range(draws):
            yield self.layout.back(self.draw(generator) / math.sqrt(draws), self.output)


@dataclass(frozen=True)
class SoftmaxCurvature(LossCurvature):
    """`w (diag p − p pᵀ)` with roots `√(w p_j) (e_j − p)`; drawn as `√w (e_ŷ − p)`, ŷ from p."""

    p: Tensor  # (B, R, c)
    weight: Tensor  # (B, R)

    def root(self, row: int, j: int) -> Tensor:
        p = self.p[:, row]
        e = torch.zeros_like(p)
        e[:, j] = 1.0
        return (e - p) * (self.weight[:, row] * p[:, j]).sqrt()[:, None]

    def draw(self, generator: torch.Generator) -> Tensor:
        flat = self.p.flatten(0, 1)
        drawn = torch.multinomial(flat.cpu(), 1, generator=generator).to(flat.device)
        q = (-flat).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=flat.dtype))
        return q.reshape(self.p.shape) * self.weight.sqrt()[..., None]


@dataclass(frozen=True)
class ElementwiseCurvature(LossCurvature):
    """A diagonal: every entry of the output has its own loss. Drawn with random signs."""

    diagonal: Tensor  # (B, R, c)

    def root(self, row: int, j: int) -> Tensor | None:
        here = self.diagonal[:, row, j]
        if not bool(here.any()):
            return None
        root = torch.zeros_like(self.diagonal[:, row])
        root[:, j] = here.sqrt()
        return root

    def draw(self, generator: torch.Generator) -> Tensor:
        return self.diagonal.sqrt() * signs(self.diagonal.shape, generator).to(self.diagonal)


@dataclass(frozen=True)
class DenseCurvature(LossCurvature):
    """Roots by eigenvectors, row by row. Drawn as the sum of the roots with random signs."""

    roots: Tensor  # (B, R, j, c)

    def root(self, row: int, j: int) -> Tensor | None:
        root = self.roots[:, row, j]
        return root if bool(root.any()) else None

    def draw(self, generator: torch.Generator) -> Tensor:
        return (self.roots * signs(self.roots.shape[:3], generator).to(self.roots)[..., None]).sum(2)


def signs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random signs ±1 in float64."""
    return torch.randint(0, 2, shape, generator=generator).mul_(2).sub_(1).double()


class Recogniser:
    """Finds the form of the curvature of one batch's loss, given the gradient at the output with its graph."""

    def __init__(self, measured: Output, gradient: Tensor, samples: int) -> None:
        self.measured, self.gradient = measured, gradient
        self.output = output = measured.tensor
        self.layouts = row_layouts(output.shape, samples)
        self.layout = self.layouts[0]
        self.tolerance = 1e-8 if output.dtype == torch.float64 else 3e-5
        self.probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        self.image = self.product(self.probe)

    def product(self, v: Tensor) -> Tensor:
        """`∇²loss v`, both in the output's shape."""
        if not self.gradient.requires_grad:
            return torch.zeros_like(self.output)
        value, parts = (self.gradient * v).sum(), self.measured.moving
        found = self.measured.join_moving(torch.autograd.grad(value, parts, retain_graph=True, allow_unused=True))
        return torch.zeros_like(self.output) if found is None else found.detach()

    def curvature(self) -> LossCurvature:
        """The form that fits; raises where the loss is not convex or mixes samples."""
        if not bool(self.image.any()):
            zero = torch.zeros_like(self.layout.rows(self.image), dtype=torch.float64)
            return ElementwiseCurvature(self.output, self.layout, bool(self.gradient.any()), zero)
        return self.softmax() or self.elementwise() or self.dense()

    def softmax(self) -> SoftmaxCurvature | None:
        """The classes' dimension and weights of a softmax cross-entropy; None where the loss is none."""
        for layout in self.layouts:
            p = layout.rows(self.output.detach()).double().softmax(-1)
            v, image = layout.rows(self.probe).double(), layout.rows(self.image).double()
            softmax = p * v - p * (p * v).sum(-1, keepdim=True)
            weight = (image * softmax).sum(-1) / softmax.square().sum(-1).clamp_min(1e-300)
            scale = float(image.norm())
            if float((image - weight[..., None] * softmax).norm()) > self.tolerance * scale:
                continue
            ones = float(self.product(torch.ones_like(self.output)).norm())  # a constant along a row is no change
            if ones <= self.tolerance * scale and float(weight.min()) >= -self.tolerance * float(weight.max()):
                return SoftmaxCurvature(self.output, layout, False, p, weight.clamp_min(0.0))
        return None

    def elementwise(self) -> ElementwiseCurvature | None:
        diagonal = self.product(torch.ones_like(self.output))
        if float((self.image - diagonal * self.probe).norm()) > self.tolerance * float(self.image.norm()):
            return None
        rows = self.layout.rows(diagonal).double()
        _refuse_negative(rows)
        return ElementwiseCurvature(self.output, self.layout, False, rows.clamp_min(0.0))

    def dense(self) -> DenseCurvature:
        """Any other loss: the first reading in which rows do not mix."""
        smallest = min(_root_bytes(layout) for layout in self.layouts)
        for layout in self.layouts:
            if _root_bytes(layout) > ROOT_BYTES:
                continue
            matrices = self._matrices(layout)
            product = (matrices @ layout.rows(self.probe).double()[..., None])[..., 0]
            gap = float((product - layout.rows(self.image).double()).norm())
            if gap <= 10 * self.tolerance * float(self.image.norm()):
                values, vectors = torch.linalg.eigh(0.5 * (matrices + matrices.mT))
                _refuse_negative(values)
                kept = torch.where(values > 1e-14 * values.abs().max(), values, 0.0)
                return DenseCurvature(self.output, layout, False, (vectors * kept.sqrt()[..., None, :]).mT)
        if smallest > ROOT_BYTES:
            raise ValueError(
                f"The loss is neither a softmax cross-entropy nor elementwise, and the roots of its curvature would take "
                f"{smallest / 2**30:.1f} GiB a batch. Use smaller batches."
            )
        raise OutputLossError(
            "The loss mixes samples (a contrastive or ranking loss), or the entries of a sample beyond its rows: it is no sum "
            "over samples, so there is no output Hessian of a sample. theodolite.hessian measures it."
        )

    def _matrices(self, layout: RowLayout) -> Tensor:
        """`∂²loss/∂z²` of every row, (B, R, c, c): one small pass for each entry of a row."""
        columns = []
        for j in range(layout.classes):
            rows = torch.zeros(layout.samples, layout.per_sample, layout.classes, dtype=torch.float64)
            rows[..., j] = 1.0
            unit = layout.back(rows.to(self.output.device), self.output)
            columns.append(layout.rows(self.product(unit)).double())
        return torch.stack(columns, dim=-1)


def _root_bytes(layout: RowLayout) -> int:
    return 8 * layout.samples * layout.per_sample * layout.classes**2


def _refuse_negative(values: Tensor) -> None:
    if float(values.min()) < -1e-5 * float(values.abs().max()):
        raise OutputLossError(NOT_CONVEX)
