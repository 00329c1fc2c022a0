"""SGD, Adam, AdamW and RMSprop on flat vectors, each with its derivative: one place for a rule and its tangent.

A step takes weights w, state columns c and the gradient g to w', c'. Its derivative along a tangent T = (ẇ, ċ) and in a
hyperparameter θ is affine,

    T' = A T + b,    A T = ∂(w', c')/∂(w, c) T + ∂(w', c')/∂g Hẇ,    b = ∂(w', c')/∂θ,

with H the Hessian of the batch: `advance` takes the step, `carry` is A, and `source` is b for one setting. Settings are numbers,
or vectors (p,) where parameters have different ones; everything in `advance` can be differentiated by autograd too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Value = float | Tensor
Settings = Mapping[str, Value]
#: What is added to a tangent: (place, vector, factor), place 0 for the weights and 1, 2, ... for the columns.
Source = list[tuple[int, Tensor, Value]]


@dataclass(frozen=True)
class Moved:
    """What a step made of the weights and the columns, and what its derivative needs, by name."""

    weights: Tensor
    columns: list[Tensor]
    kept: dict[str, Tensor] = field(default_factory=dict)


class Rule(Protocol):
    """A rule of an optimizer and its derivative; `count` are the steps taken before this one."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the hyperparameters."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the vectors that are kept from step to step; they start at zero."""

    def advance(self, weights: Tensor, columns: list[Tensor], gradient: Tensor, at: Settings, count: int) -> Moved:
        """The step, out of place."""

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> None:
        """T ← A T in place, for rows (k, 1 + columns, p); `products` (k, p) are those of the Hessian with their first parts."""

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Source:
        """b of the setting `name`, which moves by `slope`."""


@dataclass(frozen=True)
class Descent:
    """Descent with momentum, dampening and Nesterov's form: g̃ = g + λw, v' = μv + (1−d)g̃, w' = w − η(v' or g̃ + μv')."""

    dampening: float = 0.0
    nesterov: bool = False
    velocity: bool = True  # whether there is a momentum, or its derivative is wanted

    settings = ("lr", "momentum", "weight_decay")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("velocity",) if self.velocity else ()

    def _share(self, count: int) -> float:
        """How much of a gradient enters the velocity: the first enters undamped."""
        return 1.0 - self.dampening if count else 1.0

    def advance(self, weights: Tensor, columns: list[Tensor], gradient: Tensor, at: Settings, count: int) -> Moved:
        pulled = _plus(gradient, weights, at["weight_decay"])
        kept = {"weights": weights}
        update, new = pulled, []
        if self.velocity:
            share = self._share(count)
            velocity = _plus(pulled if share == 1.0 else share * pulled, columns[0], at["momentum"])
            kept |= {"before": columns[0], "velocity": velocity}
            update = _plus(pulled, velocity, at["momentum"]) if self.nesterov else velocity
            new = [velocity]
        return Moved(_plus(weights, update, -at["lr"]), new, {**kept, "update": update})

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> None:
        weights = tangents[:, 0]
        pulled = update = _plus(products, weights, at["weight_decay"])
        if self.velocity:
            share, velocity = self._share(count), tangents[:, 1]
            _plus(pulled if share == 1.0 else share * pulled, velocity, at["momentum"], out=velocity)
            update = _plus(pulled, velocity, at["momentum"]) if self.nesterov else velocity
        _plus(weights, update, -at["lr"], out=weights)

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Source:
        kept, rate = moved.kept, at["lr"]
        if name == "lr":
            return [(0, kept["update"], -slope)]
        if name == "weight_decay" and not self.velocity:
            return [(0, kept["weights"], -rate * slope)]
        if name == "weight_decay":
            share = self._share(count)
            in_step = 1.0 + at["momentum"] * share if self.nesterov else share
            return [(1, kept["weights"], slope * share), (0, kept["weights"], -rate * slope * in_step)]
        if self.nesterov:
            step = [(0, kept["before"], -rate * slope * at["momentum"]), (0, kept["velocity"], -rate * slope)]
            return [(1, kept["before"], slope), *step]
        return [(1, kept["before"], slope), (0, kept["before"], -rate * slope)]


@dataclass(frozen=True)
class AdaptiveMoments:
    """Adam: m' = β₁m + (1−β₁)g, s' = β₂s + (1−β₂)g², w' = w − η m̂/(√ŝ + ε); `decoupled` weight decay makes it AdamW.

    √ŝ is zero only where every gradient so far was, and m̂ with it: taking its derivative as zero there leaves that of the
    step, ṁ/ε, as it is.
    """

    eps: float = 1e-8
    decoupled: bool = False

    settings = ("lr", "beta1", "beta2", "weight_decay")
    columns = ("mean", "square")

    def advance(self, weights: Tensor, columns: list[Tensor], gradient: Tensor, at: Settings, count: int) -> Moved:
        first, second, decay = at["beta1"], at["beta2"], at["weight_decay"]
        pulled = gradient if self.decoupled else _plus(gradient, weights, decay)
        mean = first * columns[0] + (1 - first) * pulled
        square = second * columns[1] + (1 - second) * pulled * pulled
        root = safe_sqrt(square / (1 - second ** (count + 1)))
        scale = root + self.eps
        update = mean / (1 - first ** (count + 1)) / scale
        start = weights * (1 - at["lr"] * decay) if self.decoupled else weights
        kept = {"weights": weights, "gradient": pulled, "mean": columns[0], "square": columns[1]}
        kept |= {"root": root, "scale": scale, "update": update, "new_mean": mean, "new_square": square}
        return Moved(_plus(start, update, -at["lr"]), [mean, square], kept)

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> None:
        weights, mean, square = tangents.unbind(1)
        pulled = products if self.decoupled else _plus(products, tangents[:, 0], at["weight_decay"])
        first, second = at["beta1"], at["beta2"]
        add_to(mean.mul_(first), pulled, 1 - first)
        square.mul_(second).add_(2 * (1 - second) * moved.kept["gradient"] * pulled)
        update = self._update(mean / _correction(first, count), square / _correction(second, count), moved)
        if self.decoupled:
            weights.mul_(1 - at["lr"] * at["weight_decay"])
        add_to(weights, update, -at["lr"])

    def _update(self, mean: Value, square: Value, moved: Moved) -> Tensor:
        """The derivative of m̂/(√ŝ + ε) where m̂ and ŝ move."""
        kept = moved.kept
        found: Tensor = (mean - kept["update"] * _root_slope(kept["root"]) * square) / kept["scale"]
        return found

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Source:
        kept, first, second, rate = moved.kept, at["beta1"], at["beta2"], at["lr"]
        if name == "lr":
            decay: Source = [(0, kept["weights"], -slope * at["weight_decay"])] if self.decoupled else []
            return [(0, kept["update"], -slope), *decay]
        if name == "weight_decay" and self.decoupled:
            return [(0, kept["weights"], -rate * slope)]
        if name == "beta1":
            mean = slope * (kept["mean"] - kept["gradient"])
            step = self._update(_corrected(mean, kept["new_mean"], first, slope, count), 0.0, moved)
            return [(0, step, -rate), (1, mean, 1.0)]
        if name == "beta2":
            square = slope * (kept["square"] - kept["gradient"].square())
            step = self._update(0.0, _corrected(square, kept["new_square"], second, slope, count), moved)
            return [(0, step, -rate), (2, square, 1.0)]
        pulled = slope * kept["weights"]
        mean, square = (1 - first) * pulled, 2 * (1 - second) * kept["gradient"] * pulled
        step = self._update(mean / _correction(first, count), square / _correction(second, count), moved)
        return [(0, step, -rate), (1, mean, 1.0), (2, square, 1.0)]


@dataclass(frozen=True)
class RootMeanSquare:
    """RMSprop: s' = αs + (1−α)g², q = g/(√s' + ε), with momentum b' = μb + q; w' = w − η(b' or q)."""

    eps: float = 1e-8
    velocity: bool = False

    settings = ("lr", "alpha", "momentum", "weight_decay")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("square", "velocity") if self.velocity else ("square",)

    def advance(self, weights: Tensor, columns: list[Tensor], gradient: Tensor, at: Settings, count: int) -> Moved:
        pulled = _plus(gradient, weights, at["weight_decay"])
        square = at["alpha"] * columns[0] + (1 - at["alpha"]) * pulled * pulled
        root = safe_sqrt(square)
        scale = root + self.eps
        quotient = pulled / scale
        kept = {"weights": weights, "gradient": pulled, "square": columns[0], "root": root, "scale": scale, "quotient": quotient}
        new = [square]
        update = quotient
        if self.velocity:
            update = at["momentum"] * columns[1] + quotient
            kept["before"] = columns[1]
            new = [square, update]
        return Moved(_plus(weights, update, -at["lr"]), new, {**kept, "update": update})

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> None:
        weights, square = tangents[:, 0], tangents[:, 1]
        pulled = _plus(products, weights, at["weight_decay"])
        square.mul_(at["alpha"]).add_(2 * (1 - at["alpha"]) * moved.kept["gradient"] * pulled)
        update = self._quotient(pulled, square, moved)
        if self.velocity:
            velocity = tangents[:, 2]
            update = _plus(update, velocity, at["momentum"], out=velocity)
        add_to(weights, update, -at["lr"])

    def _quotient(self, pulled: Value, square: Tensor, moved: Moved) -> Tensor:
        """The derivative of q where g̃ and s' move."""
        kept = moved.kept
        found: Tensor = (pulled - kept["quotient"] * _root_slope(kept["root"]) * square) / kept["scale"]
        return found

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Source:
        kept = moved.kept
        if name == "lr":
            return [(0, kept["update"], -slope)]
        if name == "momentum":
            return [(2, kept["before"], slope), (0, kept["before"], -at["lr"] * slope)]
        pulled: Value = 0.0
        if name == "alpha":
            square = slope * (kept["square"] - kept["gradient"].square())
        else:
            pulled = slope * kept["weights"]
            square = 2 * (1 - at["alpha"]) * kept["gradient"] * pulled
        quotient = self._quotient(pulled, square, moved)
        return [(0, quotient, -at["lr"]), (1, square, 1.0), *([(2, quotient, 1.0)] if self.velocity else [])]


def safe_sqrt(x: Tensor) -> Tensor:
    """√x whose derivative at zero is zero and not infinite.

    >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> torch.autograd.grad(safe_sqrt(x).sum(), x)
    (tensor([0.0000, 0.2500]),)
    """
    above = x > 0
    return torch.where(above, torch.where(above, x, 1.0).sqrt(), 0.0)


def _root_slope(root: Tensor) -> Tensor:
    """The derivative of √x from its value, zero at zero."""
    return torch.where(root > 0, 0.5 / root, 0.0)


def _plus(to: Tensor, what: Tensor, times: Value, out: Tensor | None = None) -> Tensor:
    """`to + times * what` in one pass over memory."""
    if isinstance(times, Tensor):
        return torch.addcmul(to, what, times, out=out)
    return to if times == 0.0 and out is None else torch.add(to, what, alpha=times, out=out)


def add_to(to: Tensor, what: Tensor, times: Value) -> None:
    """The same in place."""
    if isinstance(times, Tensor):
        to.addcmul_(what, times)
    else:
        to.add_(what, alpha=times)


def _correction(beta: Value, count: int) -> Value:
    """What an average that began at zero is divided by."""
    return 1 - beta ** (count + 1)


def _corrected(moving: Tensor, average: Tensor, beta: Value, slope: Value, count: int) -> Tensor:
    """The derivative of average / (1 − β^(t+1)) where the average moves and β by `slope`."""
    correction = _correction(beta, count)
    return moving / correction + average * ((count + 1) * beta**count * slope / correction**2)
