"""Per-sample gradients of one parameter in the form that makes their inner products cheapest, and which form that is.

A tangent kernel is a sum over parameters of Gram matrices of per-sample gradients. Those of a weight are outer products
of what goes into its layer and what is pulled back to it, so they need not be written out: each class here holds what is
needed of a block of samples and knows how to take inner products with another block. Shapes: n samples, c outputs, P
positions at which a sample uses the weight (pixels, tokens).

A recipe is a guess at the form, judged by what goes into a module and comes out of it: `z = W x` for a weight with two
dimensions, a convolution for one with more, a scaled normalisation for one that has the output's last or second dimension.
Each guess is compared with the gradient that plain backward gives, up to a factor (layers in the NTK parameterisation divide
by √inputs), and dropped where it does not fit: a weight that is also used elsewhere, or a module that does something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.interrupts import unbroken
from theodolite.operators.kronecker.affine import AffineLayer, affine_layer

#: Gradients are written out in slabs of at most so many numbers.
SLAB = 2**22


class Features(ABC):
    """Gradients of all outputs of a block of samples with respect to one parameter, up to `factor`."""

    factor: float
    by_output: ClassVar[str] = "pulled"  # what holds numbers of every output, (n, c, ...)

    @abstractmethod
    def add_gram(self, other: Any, total: Tensor) -> None:
        """Add the inner products with another block's features: (n c, n' c')."""

    @abstractmethod
    def summed(self, cotangent: Tensor) -> Tensor:
        """The parameter's gradient Σ_ia cotangent[i, a] · gradient_ia, flat: what plain backward would give."""

    @abstractmethod
    def written_out(self) -> Rows:
        """The gradients themselves, in the parameter's own order."""

    def with_outputs(self, others: list[Any]) -> Self:
        """These and those of further outputs of the same samples."""
        parts = [getattr(one, self.by_output) for one in (self, *others)]
        return replace(self, **{self.by_output: torch.cat(parts, dim=1)}) if others else self  # type: ignore[type-var]

    def numel(self) -> int:
        """Numbers held."""
        return sum(value.numel() for value in vars(self).values() if isinstance(value, Tensor))

    def to(self, dtype: torch.dtype) -> Features:
        """In the precision of the kernel, where a layer has another one."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
                setattr(self, name, value.to(dtype))
        return self


@dataclass
class Rows(Features):
    """The gradients themselves, for parameters that are smaller than the activations around them."""

    rows: Tensor  # (n, c, q)
    factor: float = 1.0
    by_output = "rows"

    def add_gram(self, other: Rows, total: Tensor) -> None:
        if self is other:
            _add_own_gram(self.rows.flatten(0, 1), total, self.factor**2)
        else:
            total.addmm_(self.rows.flatten(0, 1), other.rows.flatten(0, 1).T, alpha=self.factor * other.factor)

    def summed(self, cotangent: Tensor) -> Tensor:
        return cotangent.reshape(-1) @ self.rows.flatten(0, 1)

    def written_out(self) -> Rows:
        return self


@dataclass
class Positions(Features):
    """Many positions and a large weight: gradients `Σ_p pulled[i, a, p] ⊗ inputs[i, p]`, written out slab by slab."""

    inputs: Tensor  # (n, P, k)
    pulled: Tensor  # (n, c, P, m)
    transposed: bool = False
    factor: float = 1.0

    def add_gram(self, other: Positions, total: Tensor) -> None:
        n, c, _, m = self.pulled.shape
        widest = max(n * c, other.pulled.shape[0] * other.pulled.shape[1]) * self.inputs.shape[2]
        width = max(1, SLAB // widest)
        for start in range(0, m, width):
            part = slice(start, start + width)
            left, right = self.written(part), other.written(part)
            total.addmm_(left.flatten(0, 1), right.flatten(0, 1).T, alpha=self.factor * other.factor)

    def written(self, part: slice) -> Tensor:
        """The gradients of some output units, (n, c, units · k)."""
        return outer_over_positions(self.inputs, self.pulled[..., part])

    def summed(self, cotangent: Tensor) -> Tensor:
        rows = torch.einsum("nc,ncpm->npm", cotangent, self.pulled)
        gradient = rows.flatten(0, 1).T @ self.inputs.flatten(0, 1)
        return (gradient.T if self.transposed else gradient).reshape(-1)

    def written_out(self) -> Rows:
        rows = self.written(slice(None)).unflatten(2, (self.pulled.shape[3], self.inputs.shape[2]))
        return Rows((rows.transpose(2, 3) if self.transposed else rows).flatten(2), self.factor)


class Outer(Positions):
    """One position: the gradient of sample i is `pulled[i, a] ⊗ inputs[i]`, so Gram matrices multiply entry by entry."""

    def add_gram(self, other: Positions, total: Tensor) -> None:
        left = self.inputs[:, 0] @ other.inputs[:, 0].T
        right = self.pulled.flatten(0, 2) @ other.pulled.flatten(0, 2).T
        view = right.view(*self.pulled.shape[:2], *other.pulled.shape[:2])
        view.mul_(left[:, None, :, None]).mul_(self.factor * other.factor)
        total.add_(right)


@dataclass
class Tokens(Features):
    """An embedding: position p of sample i touches the row `tokens[i, p]` alone."""

    tokens: Tensor  # (n, P)
    pulled: Tensor  # (n, c, P, m)
    entries: int
    factor: float = 1.0

    def add_gram(self, other: Tokens, total: Tensor) -> None:
        shared = self.tokens.unique()
        shared = shared[torch.isin(shared, other.tokens)]
        rows = max(self.pulled.shape[:2].numel(), other.pulled.shape[:2].numel()) * self.pulled.shape[3]
        for part in shared.split(max(1, SLAB // rows)):
            left, right = self.written(part), other.written(part)
            total.addmm_(left.flatten(0, 1), right.flatten(0, 1).T, alpha=self.factor * other.factor)

    def written(self, entries: Tensor) -> Tensor:
        """The gradients of some rows of the embedding, (n, c, rows · m)."""
        return outer_over_positions((self.tokens[..., None] == entries).to(self.pulled.dtype), self.pulled)

    def summed(self, cotangent: Tensor) -> Tensor:
        rows = torch.einsum("nc,ncpm->npm", cotangent, self.pulled).flatten(0, 1)
        return rows.new_zeros(self.entries, rows.shape[1]).index_add_(0, self.tokens.flatten(), rows).reshape(-1)

    def written_out(self) -> Rows:
        entries = torch.arange(self.entries, device=self.tokens.device)
        rows = self.written(entries).unflatten(2, (self.pulled.shape[3], self.entries)).transpose(2, 3)
        return Rows(rows.flatten(2), self.factor)


def _add_own_gram(rows: Tensor, total: Tensor, factor: float, parts: int = 8) -> None:
    """Add `factor · rows rowsᵀ`, of which the part below the diagonal is copied."""
    width = -(-len(rows) // parts)
    for start in range(0, len(rows), width):
        here = slice(start, start + width)
        product = torch.mm(rows[here], rows[start:].T).mul_(factor)  # from the diagonal on
        total[here, start:] += product
        total[start + width :, here] += product[:, width:].T


def outer_over_positions(inputs: Tensor, pulled: Tensor) -> Tensor:
    """`Σ_p pulled[i, a, p] ⊗ inputs[i, p]` as (n, c, m k): one matrix product per sample."""
    n, c, _, m = pulled.shape
    left = pulled.transpose(2, 3).reshape(n, c * m, -1)
    return torch.bmm(left, inputs).reshape(n, c, -1)


def affine_features(inputs: Tensor, pulled: Tensor, *, groups: int, transposed: bool) -> Features:
    """Features of a weight from its layer's inputs (n, P, k) and what was pulled back (n, c, P, m)."""
    n, c, positions, m = pulled.shape
    k = inputs.shape[2]
    if positions == 1 and groups == 1:
        return Outer(inputs, pulled, transposed)
    written = m * k // groups
    if groups > 1 or written <= 2 * positions * m:  # a gradient takes little more memory than what was pulled back
        parts = [
            outer_over_positions(a, d).reshape(n, c, m // groups, k // groups)
            for a, d in zip(inputs.chunk(groups, dim=2), pulled.chunk(groups, dim=3), strict=True)
        ]
        rows = parts[0] if groups == 1 else torch.cat(parts, dim=2)  # (n, c, m, k / groups)
        return Rows((rows.transpose(2, 3) if transposed else rows).flatten(2))
    return Positions(inputs, pulled, transposed)


#: What was pulled back to each call of a module, (c, *output.shape) -> features of these c outputs.
Form = Callable[[list[Tensor]], Features]


@dataclass(frozen=True)
class Use:
    """The calls of one module on a block of n samples: inputs and outputs, call by call."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    samples: int

    @classmethod
    def of(cls, module: nn.Module, inputs: list[Tensor], outputs: list[Tensor], samples: int) -> Use:
        """Only calls that the output can depend on: not those under `no_grad`."""
        followed = [(x, z) for x, z in zip(inputs, outputs, strict=True) if z.requires_grad]
        return cls(module, [x for x, _ in followed], [z for _, z in followed], samples)


def guesses(use: Use, name: str) -> Iterator[Form]:
    """Forms that the gradients of the parameter `name` of a module may have, likeliest first."""
    parameter = use.module._parameters[name]
    assert parameter is not None
    if name == "bias" and parameter.ndim == 1:
        yield from _along_outputs(use, parameter, None)
    elif name == "weight" and isinstance(use.module, nn.Embedding):
        yield _embedding(use, parameter)
    elif name == "weight" and parameter.ndim >= 2:
        yield from _affine(use, parameter)
    elif name == "weight":
        yield from _along_outputs(use, parameter, _normed(use, parameter))


def _by_position(parts: list[Tensor]) -> Tensor:
    """Several calls side by side: (n, P, ·) or (n, c, P, ·) joined along P."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _affine(use: Use, weight: Tensor) -> Iterator[Form]:
    layer = affine_layer("", use.module) or _linear_like(use, weight) or _convolution_like(use.module, weight)
    if layer is None:
        return
    inputs = _by_position([layer.input_features(x).reshape(use.samples, -1, layer.n) for x in use.inputs])

    def form(pulled: list[Tensor]) -> Features:
        parts = [layer.output_features(g.flatten(0, 1)).reshape(len(g), use.samples, -1, layer.m) for g in pulled]
        return affine_features(inputs, _by_position(parts).transpose(0, 1), groups=layer.groups, transposed=layer.transposed)

    yield form


def _linear_like(use: Use, weight: Tensor) -> AffineLayer | None:
    """A module of its own making with a matrix between the last dimensions of its input and output."""
    fits = weight.ndim == 2 and use.inputs[0].is_floating_point()
    if not fits or weight.shape != (use.outputs[0].shape[-1], use.inputs[0].shape[-1]):
        return None
    m, n = weight.shape
    return AffineLayer("", use.module, int(m), int(n))


def _convolution_like(module: nn.Module, weight: Tensor) -> AffineLayer | None:
    """A module of its own making with the stride and padding of a plain convolution."""
    if weight.ndim not in (3, 4) or not hasattr(module, "stride") or not hasattr(module, "padding"):
        return None
    kind = nn.Conv1d if weight.ndim == 3 else nn.Conv2d
    m, channels, *kernel = weight.shape
    with unbroken(torch.device("meta")):  # only its geometry is read
        geometry = kind(channels, m, tuple(kernel), module.stride, module.padding, bias=False)  # type: ignore[arg-type]
    return affine_layer("", geometry)


def _along_outputs(use: Use, parameter: Tensor, factors: list[Tensor] | None) -> Iterator[Form]:
    """A vector along a dimension of the output (last, or channels) that is added to it, or multiplies `factors` call by call."""

    def form(pulled: list[Tensor], dim: int) -> Features:
        parts = pulled if factors is None else [g * x for g, x in zip(pulled, factors, strict=True)]
        found = [_kept(g, dim, use.samples) for g in parts]
        return Rows(found[0] if len(found) == 1 else torch.stack(found).sum(0))

    for dim in (-1, 1):
        if parameter.ndim == 1 and all(z.ndim > 1 and z.shape[dim] == len(parameter) for z in use.outputs):
            yield partial(form, dim=dim)


def _normed(use: Use, weight: Tensor) -> list[Tensor]:
    """Normalisation layers: the output is the weight times this, what the layer gives with weight one and no bias."""
    plain = {"weight": torch.ones_like(weight)}
    if use.module._parameters.get("bias") is not None:
        plain["bias"] = torch.zeros_like(weight)
    with unbroken(torch.no_grad()):
        return [functional_call(use.module, plain, (x,)) for x in use.inputs]


def _kept(g: Tensor, dim: int, samples: int) -> Tensor:
    """(c, n, ..., m, ...) summed over all dimensions but the first two and `dim` of the output: (n, c, m)."""
    kept = g.movedim(dim if dim < 0 else dim + 1, -1)
    return kept.reshape(g.shape[0], samples, -1, kept.shape[-1]).sum(2).transpose(0, 1)


def _embedding(use: Use, weight: Tensor) -> Form:
    tokens = torch.cat([x.reshape(use.samples, -1) for x in use.inputs], dim=1)

    def form(pulled: list[Tensor]) -> Features:
        parts = [g.reshape(len(g), use.samples, -1, g.shape[-1]) for g in pulled]
        return Tokens(tokens, _by_position(parts).transpose(0, 1), len(weight))

    return form
