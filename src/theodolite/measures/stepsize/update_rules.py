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

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> Tensor:
        """A T for rows (k, 1 + columns, p) of tangents and products (k, p) of the Hessian with their first parts."""

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Tensor:
        """b (1 + columns, p) of the setting `name`, which moves by `slope`."""


@dataclass(frozen=True)
class Descent:
    """Gradient descent with momentum, dampening and Nesterov's form: g̃ = g + λw, v' = μv + (1−d)g̃, w' = w − η(v' or g̃ + μv')."""

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
        pulled = _decayed(gradient, weights, at["weight_decay"])
        kept = {"weights": weights}
        update, new = pulled, []
        if self.velocity:
            velocity = at["momentum"] * columns[0] + self._share(count) * pulled
            kept |= {"before": columns[0], "velocity": velocity}
            update = pulled + at["momentum"] * velocity if self.nesterov else velocity
            new = [velocity]
        return Moved(weights - at["lr"] * update, new, {**kept, "update": update})

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> Tensor:
        out = torch.empty_like(tangents)
        self._through(out, tangents, _decayed(products, tangents[:, 0], at["weight_decay"]), at, count)
        return out

    def _through(self, out: Tensor, tangents: Tensor | None, pulled: Tensor, at: Settings, count: int) -> None:
        """What the tangents (None: zero) and a change of g̃ become, written into `out`."""
        update = pulled
        if self.velocity:
            velocity = torch.mul(pulled, self._share(count), out=out[:, 1])
            if tangents is not None:
                _add(velocity, tangents[:, 1], at["momentum"])
            update = pulled + at["momentum"] * velocity if self.nesterov else velocity
        torch.mul(update, -at["lr"], out=out[:, 0])
        if tangents is not None:
            out[:, 0] += tangents[:, 0]

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Tensor:
        kept = moved.kept
        out = moved.weights.new_zeros(1, 1 + len(self.columns), len(moved.weights))
        if name == "lr":
            out[:, 0] = -slope * kept["update"]
        elif name == "weight_decay":
            self._through(out, None, (slope * kept["weights"])[None], at, count)
        else:
            out[:, 1] = slope * kept["before"]
            update = out[:, 1] * at["momentum"] + slope * kept["velocity"] if self.nesterov else out[:, 1]
            out[:, 0] = -at["lr"] * update
        return out[0]


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
        pulled = gradient if self.decoupled else _decayed(gradient, weights, decay)
        mean = first * columns[0] + (1 - first) * pulled
        square = second * columns[1] + (1 - second) * pulled * pulled
        root = safe_sqrt(square / (1 - second ** (count + 1)))
        scale = root + self.eps
        update = mean / (1 - first ** (count + 1)) / scale
        start = weights * (1 - at["lr"] * decay) if self.decoupled else weights
        kept = {"weights": weights, "gradient": pulled, "mean": columns[0], "square": columns[1]}
        kept |= {"root": root, "scale": scale, "update": update, "new_mean": mean, "new_square": square}
        return Moved(start - at["lr"] * update, [mean, square], kept)

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> Tensor:
        pulled = products if self.decoupled else _decayed(products, tangents[:, 0], at["weight_decay"])
        first, second = at["beta1"], at["beta2"]
        mean = first * tangents[:, 1] + (1 - first) * pulled
        square = second * tangents[:, 2] + 2 * (1 - second) * moved.kept["gradient"] * pulled
        shift = self._update(mean / _correction(first, count), square / _correction(second, count), moved)
        start = tangents[:, 0] * (1 - at["lr"] * at["weight_decay"]) if self.decoupled else tangents[:, 0]
        return torch.stack([start - at["lr"] * shift, mean, square], dim=1)

    def _update(self, mean: Value, square: Value, moved: Moved) -> Tensor:
        """The derivative of m̂/(√ŝ + ε) where m̂ and ŝ move."""
        kept = moved.kept
        found: Tensor = (mean - kept["update"] * _root_slope(kept["root"]) * square) / kept["scale"]
        return found

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Tensor:
        kept, first, second = moved.kept, at["beta1"], at["beta2"]
        nothing = torch.zeros_like(moved.weights)
        mean, square, corrected_mean, corrected_square = nothing, nothing, nothing, nothing
        start = nothing
        if name == "lr":
            decay = at["weight_decay"] * kept["weights"] if self.decoupled else nothing
            return torch.stack([-slope * (kept["update"] + decay), nothing, nothing])
        if name == "weight_decay" and self.decoupled:
            return torch.stack([-at["lr"] * slope * kept["weights"], nothing, nothing])
        if name == "weight_decay":
            pulled = slope * kept["weights"]
            mean, square = (1 - first) * pulled, 2 * (1 - second) * kept["gradient"] * pulled
            corrected_mean, corrected_square = mean / _correction(first, count), square / _correction(second, count)
        elif name == "beta1":
            mean = slope * (kept["mean"] - kept["gradient"])
            corrected_mean = _corrected(mean, kept["new_mean"], first, slope, count)
        else:
            square = slope * (kept["square"] - kept["gradient"].square())
            corrected_square = _corrected(square, kept["new_square"], second, slope, count)
        return torch.stack([start - at["lr"] * self._update(corrected_mean, corrected_square, moved), mean, square])


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
        pulled = _decayed(gradient, weights, at["weight_decay"])
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
        return Moved(weights - at["lr"] * update, new, {**kept, "update": update})

    def carry(self, tangents: Tensor, products: Tensor, moved: Moved, at: Settings, count: int) -> Tensor:
        pulled = _decayed(products, tangents[:, 0], at["weight_decay"])
        square = at["alpha"] * tangents[:, 1] + 2 * (1 - at["alpha"]) * moved.kept["gradient"] * pulled
        return self._through(tangents, pulled, square, moved, at)

    def _through(self, tangents: Tensor, pulled: Value, square: Tensor, moved: Moved, at: Settings) -> Tensor:
        """What the tangents become where g̃ and s' move."""
        kept = moved.kept
        update = (pulled - kept["quotient"] * _root_slope(kept["root"]) * square) / kept["scale"]
        if not self.velocity:
            return torch.stack([tangents[:, 0] - at["lr"] * update, square], dim=1)
        update = at["momentum"] * tangents[:, 2] + update
        return torch.stack([tangents[:, 0] - at["lr"] * update, square, update], dim=1)

    def source(self, name: str, slope: Value, moved: Moved, at: Settings, count: int) -> Tensor:
        kept = moved.kept
        out = moved.weights.new_zeros(1, 1 + len(self.columns), len(moved.weights))
        if name == "lr":
            out[:, 0] = -slope * kept["update"]
        elif name == "momentum":
            out[:, 2] = slope * kept["before"]
            out[:, 0] = -at["lr"] * out[:, 2]
        elif name == "alpha":
            square = slope * (kept["square"] - kept["gradient"].square())
            return self._through(out, 0.0, square[None], moved, at)[0]
        else:
            pulled = (slope * kept["weights"])[None]
            return self._through(out, pulled, 2 * (1 - at["alpha"]) * kept["gradient"] * pulled, moved, at)[0]
        return out[0]


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


def _decayed(gradient: Tensor, weights: Tensor, decay: Value) -> Tensor:
    return gradient if isinstance(decay, float) and decay == 0.0 else gradient + decay * weights


def _add(to: Tensor, what: Tensor, times: Value) -> None:
    """`to += times * what` in one pass over memory."""
    if isinstance(times, Tensor):
        to.addcmul_(what, times.expand_as(what))
    else:
        to.add_(what, alpha=times)


def _correction(beta: Value, count: int) -> Value:
    """What an average that began at zero is divided by."""
    return 1 - beta ** (count + 1)


def _corrected(moving: Tensor, average: Tensor, beta: Value, slope: Value, count: int) -> Tensor:
    """The derivative of average / (1 − β^(t+1)) where the average moves and β by `slope`."""
    correction = _correction(beta, count)
    return moving / correction + average * ((count + 1) * beta**count * slope / correction**2)
