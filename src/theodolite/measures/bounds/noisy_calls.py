"""Networks drawn anew for every sample: calls of affine layers and embeddings get noise instead of drawn weights.

What a layer `W = U C Vᵀ` with independent coordinates C ~ N(mean, s) does to one input x is itself Gaussian: `Uᵀz` has mean
`mean · Vᵀx` and variance `s · (Vᵀx)²`, independent along its entries. Drawing it is the same in law as drawing weights for
that sample, and costs two products instead of a weight for each sample (local reparametrisation, Kingma and others 2015). A
layer that meets a sample at several positions (patches, tokens, several calls) must use one draw at all of them: there the
coordinates themselves are drawn, sample by sample.

Weights and biases of normalisations are few: they are drawn as they are, sample by sample, and applied to what was normalised.

The calls are met where torch computes them, so that it does not matter which module makes them. A parameter that is used in any
other way cannot be drawn sample by sample: `OtherUseError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from theodolite.operators.kronecker.affine import AffineLayer

#: Numbers drawn for one batch at the most where weights are drawn sample by sample.
MOST_DRAWN = 2**27
_LEAST = 1e-20  # of a variance: its root has a slope

Normal = Callable[[Sequence[int]], Tensor]


class OtherUseError(Exception):
    """A parameter is used in a way that has no draw for each sample."""


@dataclass
class Inputs:
    """Inputs of a layer (..., n) along its basis: `turned` (..., r), and where r < n what the other directions give.

    That is `start` (..., m), their part of the outputs, and `rest` (...), their squared length.
    """

    turned: Tensor
    start: Tensor | None = None
    rest: Tensor | None = None

    @cached_property
    def squares(self) -> Tensor:
        return self.turned.square()

    def at(self, rows: Tensor) -> Inputs:
        """Those of some samples."""
        return Inputs(self.turned[rows], *(None if t is None else t[rows] for t in (self.start, self.rest)))


@dataclass
class NoisyBias:
    """Mean and variance (m,) in the basis `left`, and what was drawn (B, m) for the batch at hand.

    The weight of a normalisation is one too: it is drawn as it is, sample by sample, whatever its shape.
    """

    mean: Tensor
    variance: Tensor
    left: Tensor | None = None
    drawn: Tensor | None = field(default=None, repr=False)

    def draw(self, samples: int, normal: Normal) -> Tensor:
        """One for each sample of the batch, the same at all calls; in the coordinates of the outputs."""
        if self.drawn is None:
            drawn = self.mean + self.variance.sqrt() * normal((samples, *self.mean.shape))
            self.drawn = drawn if self.left is None else drawn @ self.left.T
        return self.drawn


@dataclass
class NoisyLayer:
    """One weight in rotated coordinates: `mean` and `variance` (m, r).

    `left` (m, m) and `right` (n, r) are the bases, None where coordinates are kept. Where r < n, the remaining directions of the
    input keep the prior: their weights are those of `start`, the weight (m, n) at the centre of the prior, with variance
    `rest`. `shared`: one draw for all positions of a sample. `alike`: its inputs are the same for all samples. `known` are its
    inputs, where they are known beforehand. `recipe` is None for an embedding.
    """

    recipe: AffineLayer | None
    mean: Tensor
    variance: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    start: Tensor | None = None
    rest: float = 0.0
    shared: bool = True
    alike: bool = False
    known: Inputs | None = None
    drawn: Tensor | None = field(default=None, repr=False)  # for the batch at hand, where weights are drawn sample by sample

    def inputs(self, x: Tensor) -> Inputs:
        """Inputs (..., n) along the basis."""
        if self.known is not None:
            return self.known
        turned = x if self.right is None else x @ self.right
        if self.start is None:
            return Inputs(turned)
        assert self.right is not None
        rest = (x.square().sum(-1) - turned.square().sum(-1)).clamp(min=0.0)
        return Inputs(turned, x @ self.start.T - turned @ (self.right.T @ self.start.T), rest)

    def moments(self, x: Inputs, bias: NoisyBias | None) -> tuple[Tensor, Tensor]:
        """Mean and variance (B, m) of the outputs in their basis; the part of `start` is not in it."""
        mean, variance = x.turned @ self.mean.T, x.squares @ self.variance.T
        if x.rest is not None:
            variance = variance + self.rest * x.rest[:, None]
        if bias is not None:
            mean, variance = mean + bias.mean, variance + bias.variance
        return mean, variance

    def outputs(self, z: Tensor, x: Inputs) -> Tensor:
        """Outputs (..., m) in their basis as the layer gives them."""
        z = z if self.left is None else z @ self.left.T
        return z if x.start is None else z + x.start

    def at_once(self, x: Inputs, bias: NoisyBias | None, normal: Normal) -> Tensor:
        """Outputs (B, m), each sample at one position only."""
        mean, variance = self.moments(x, bias)
        return self.outputs(mean + variance.clamp(min=_LEAST).sqrt() * normal(mean.shape), x)

    def position_by_position(self, x: Inputs, normal: Normal) -> Tensor:
        """Outputs (B, P, m) of inputs (B, P, n), with one draw of all weights for each sample."""
        samples = len(x.turned)
        if samples * self.mean.numel() > MOST_DRAWN:
            raise OtherUseError("drawing its weights for each sample would take too much memory")
        if self.drawn is None:
            self.drawn = self.mean + self.variance.sqrt() * normal((samples, *self.mean.shape))
        return self.outputs(x.turned @ self.drawn.transpose(1, 2), x)

    def looked_up(self, tokens: Tensor, normal: Normal) -> Tensor:
        """Rows (B, T, d) of an embedding for tokens (B, T): a token has one row in all of a sample."""
        noise = normal((*tokens.shape, self.mean.shape[1]))
        first = (tokens[:, :, None] == tokens[:, None, :]).int().argmax(2)  # (B, T): where the same token stands first
        noise = noise.gather(1, first[..., None].expand_as(noise))
        return self.mean[tokens] + self.variance[tokens].sqrt() * noise


@dataclass(frozen=True)
class NoisyCall:
    """One call as it was made: the layer, its input and its output."""

    layer: NoisyLayer
    input: Tensor
    output: Tensor
    plain: bool  # a linear layer that meets each sample once


class NoisyCalls(TorchFunctionMode):
    """While it is entered, calls with a placeholder for a layer's weight are made with noise.

    `layers` and `biases` are known by their placeholders. Of the layer `last`, whose outputs are the network's, only the mean is
    given out; `moments` keeps mean and variance. `calls` are noted where a list is given.
    """

    def __init__(
        self,
        layers: Mapping[int, NoisyLayer],
        biases: Mapping[int, NoisyBias],
        samples: int,
        generator: torch.Generator,
        *,
        last: NoisyLayer | None = None,
        calls: list[NoisyCall] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.biases, self.samples, self.generator = layers, biases, samples, generator
        self.last, self.calls = last, calls
        self.moments: tuple[Tensor, Tensor, Inputs] | None = None
        parts: tuple[NoisyLayer | NoisyBias, ...] = (*layers.values(), *biases.values())
        for part in parts:
            part.drawn = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if func in _CALLS:
            named = {**dict(zip(_CALLS[func], args, strict=False)), **given}
            layer = self.layers.get(id(named.get("weight")))
            if layer is not None:
                found = self._called(func, layer, named)
                if self.calls is not None:
                    self.calls.append(NoisyCall(layer, named["input"], found, func is F.linear and named["input"].ndim == 2))
                return found
        if func in _NORMS:
            named = {**dict(zip(_NORMS[func], args, strict=False)), **given}
            if self._has_placeholder((named.get("weight"), named.get("bias"))):
                return self._normalised(func, named)
        found = func(*args, **given)
        if isinstance(found, Tensor | tuple | list) and func not in _FACTS and self._has_placeholder((*args, *given.values())):
            raise OtherUseError(f"it is used by {getattr(func, '__name__', func)}")
        return found

    def _called(self, func: Any, layer: NoisyLayer, named: dict[str, Any]) -> Tensor:
        x, bias = named["input"], self._bias(layer, named.get("bias"))
        if func is F.embedding and x.ndim:
            x = self._for_each(layer, x)
        if not x.ndim or len(x) != self.samples:
            raise OtherUseError("the first size of its inputs is not the number of samples")
        if func is F.embedding:
            return layer.looked_up(x.reshape(self.samples, -1), self._normal).reshape(*x.shape, -1)
        assert layer.recipe is not None
        if func is F.linear and not layer.shared:
            return self._once(layer, layer.inputs(x), bias)
        features = x.reshape(self.samples, -1, x.shape[-1])
        if func is not F.linear:
            _check_convolution(layer.recipe.module, named)
            features = layer.recipe.input_features(x)
        z = layer.position_by_position(layer.inputs(features), self._normal)  # (B, P, m)
        if bias is not None:
            z = z + bias.draw(self.samples, self._normal)[:, None]
        if func is F.linear:
            return z.reshape(*x.shape[:-1], -1)
        return z.transpose(1, 2).reshape(self.samples, -1, *_output_sizes(layer.recipe.module, x))

    def _for_each(self, layer: NoisyLayer, x: Tensor) -> Tensor:
        """Rows (T,) or (1, T) that are looked up for all samples alike, as positions are, for each of them (B, T)."""
        if len(x) != self.samples and self.calls is not None and (x.ndim == 1 or (x.ndim == 2 and len(x) == 1)):
            layer.alike = True
        return x.reshape(1, -1).expand(self.samples, -1) if layer.alike else x

    def _once(self, layer: NoisyLayer, inputs: Inputs, bias: NoisyBias | None) -> Tensor:
        """The only call of a linear layer; a bias in the same basis adds to its mean and variance."""
        if bias is not None and bias.left is not layer.left:
            return layer.at_once(inputs, None, self._normal) + bias.draw(self.samples, self._normal)
        if layer is not self.last:
            return layer.at_once(inputs, bias, self._normal)
        self.moments = (*layer.moments(inputs, bias), inputs)
        return layer.outputs(self.moments[0], inputs)

    def _normalised(self, func: Any, named: dict[str, Any]) -> Tensor:
        """A normalisation without weight and bias, which are then applied sample by sample."""
        x = named["input"]
        if not x.ndim or len(x) != self.samples:
            raise OtherUseError("the first size of its inputs is not the number of samples")
        found: Tensor = func(**{name: value for name, value in named.items() if name not in ("weight", "bias")})
        for name, join in (("weight", torch.mul), ("bias", torch.add)):
            p = named.get(name)
            if p is None:
                continue
            noisy = self.biases.get(id(p))
            drawn = p[None] if noisy is None else noisy.draw(self.samples, self._normal)
            last = func in _OVER_LAST  # of the sizes; else channels stand second
            room = (1,) * (x.ndim - 1 - p.ndim)
            found = join(found, drawn.reshape(len(drawn), *(room if last else ()), *p.shape, *(() if last else room)))
        return found

    def _bias(self, layer: NoisyLayer, bias: Tensor | None) -> NoisyBias | None:
        """The noise of a bias; one that is not measured has none."""
        if bias is None or id(bias) in self.biases:
            return self.biases.get(id(bias))
        turned = bias if layer.left is None else bias @ layer.left
        return NoisyBias(turned, torch.zeros_like(turned), layer.left)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        like = next(iter(self.layers.values())).mean
        return torch.randn(*shape, generator=self.generator, dtype=like.dtype).to(like.device)

    def _has_placeholder(self, values: Sequence[Any]) -> bool:
        tensors = [value for value in values if isinstance(value, Tensor)]
        inside = [value for value in values if isinstance(value, list | tuple)]
        return any(id(t) in self.layers or id(t) in self.biases for t in tensors) or any(map(self._has_placeholder, inside))


def _check_convolution(module: Any, named: Mapping[str, Any]) -> None:
    """Raise unless a call is the one that the module makes."""
    own = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}
    same = all(named[name] == own[name] for name in own if name in named)
    if module.padding_mode != "zeros" or module.groups > 1 or not same:
        raise OtherUseError("it is a convolution of another kind")


def _output_sizes(module: Any, x: Tensor) -> list[int]:
    """Height and width, or the length, of what a convolution gives."""
    stub, weight = torch.empty(1, *x.shape[1:], device="meta"), torch.empty(module.weight.shape, device="meta")
    return list(module._conv_forward(stub, weight, None).shape[2:])


#: Functions that a layer may be called by, and how their arguments are called.
_CALLS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.conv1d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.embedding: ("input", "weight"),
}
#: Normalisations, by how their arguments are called; and those whose weight has the last sizes of the input.
_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}
_OVER_LAST = {F.layer_norm, F.rms_norm}
#: What asks a tensor for facts that do not depend on its values.
_FACTS = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]
