"""What every step tells for next to nothing: gradient, update, learning rate, and how well Adam knows its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.problem.tensors import named_tensors


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """Facts of one step, before it is taken.

    `update_norm` is the length of the step before. `moment` is the root mean square of Adam's second moment and `surprise`
    the gradient's norm over what that moment expects: about 1 in steady training, large where it has become stale; both None
    for other optimizers. `input_size` is the root mean square of the batch's floating inputs, None where it has none.
    """

    step: int
    loss: float
    gradient_norm: float
    update_norm: float | None
    rate: float
    moment: float | None = None
    surprise: float | None = None
    input_size: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all entries, in float32 at least; 0 of nothing."""
    if not tensors:
        return 0.0
    kinds = {(t.device, t.dtype) for t in tensors}
    if len(kinds) > 1 or next(iter(kinds))[1].itemsize < 4:  # several devices, or half precision, whose norms overflow
        return math.sqrt(sum(float(t.detach().float().norm()) ** 2 for t in tensors))
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors)))))


def trained(optimizer: Optimizer) -> list[Tensor]:
    """All parameters an optimizer moves."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate of the first group; NaN for an optimizer that has none."""
    return float(optimizer.param_groups[0].get("lr", math.nan))


def input_size(inputs: Any) -> float | None:
    """Root mean square of all floating inputs together; None where there are none."""
    floats = [t.detach() for _, t in named_tensors(inputs) if t.is_floating_point() and t.numel()]
    return norm_of(floats) / math.sqrt(sum(t.numel() for t in floats)) if floats else None


def first_bad_gradient(named: Mapping[str, Tensor]) -> str | None:
    """The first parameter whose gradient holds NaN or infinity."""
    for name, p in named.items():
        if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
            return name
    return None


def second_moment(optimizer: Optimizer, gradient_norm: float) -> tuple[float | None, float | None]:
    """(`moment`, `surprise`) of an optimizer that keeps `exp_avg_sq`, bias-corrected where it counts its steps."""
    total, entries = 0.0, 0
    for group in optimizer.param_groups:
        states: list[dict[str, Any]] = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
        moments = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        if not moments:
            continue
        step = float(states[0].get("step", math.inf))
        correction = 1.0 - float(group["betas"][1]) ** step if "betas" in group else 1.0
        if correction <= 0.0:
            continue
        sums = torch._foreach_norm(moments, 1)  # entries are not negative
        total += sum(torch.stack(list(sums)).tolist()) / correction
        entries += sum(m.numel() for m in moments)
    if not entries or not total > 0.0:
        return None, None
    return math.sqrt(total / entries), gradient_norm / math.sqrt(total)


def second_beta(optimizer: Optimizer) -> float:
    """β₂ of the first group that has one; 0 where none does."""
    return next((float(group["betas"][1]) for group in optimizer.param_groups if "betas" in group), 0.0)


class Footprint:
    """The weights before the last step: how far it went, and a place to look back to."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def update(self, parameters: Sequence[Tensor]) -> float | None:
        """Length of the step since the last call, None at the first; the weights are then kept."""
        now = [p.detach() for p in parameters]
        if [w.shape for w in self.weights] != [p.shape for p in now]:
            self.weights = [p.clone() for p in now]
            return None
        return norm_of(torch._foreach_sub(now, self.weights))

    @contextmanager
    def before_the_step(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """The parameters as they were before the last step; on the way out they are those of now, bit by bit."""
        now = [p.data for p in parameters]
        try:
            for p, w in zip(parameters, self.weights, strict=True):
                p.data = w
            yield
        finally:
            for p, w in zip(parameters, now, strict=True):
                p.data = w

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Remember these weights as those before the coming step."""
        torch._foreach_copy_(self.weights, [p.detach() for p in parameters])
