"""What the loop passes by at every step: the batch, its loss, and the norms of gradient and update.

Nothing is computed twice and nothing is changed: hooks only read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.problem.activations import Call, Hooks
from theodolite.problem.state_guard import being_measured
from theodolite.problem.tensors import named_tensors
from theodolite.results import Row, fields_of

#: The argument by which a trainer asks for a loss that is to be summed over the batches of a step; it is not data.
_SUMMED = "num_items_in_batch"


class ForwardRecorder:
    """Listens to the forward calls of a model, and of a loss that is a module, while gradients are recorded.

    Nothing is changed: hooks, from `open` to `close`, only read. `losses` are the losses since the last `take`, as far
    as they passed by; `output` is the last output.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.model, self.loss = model, loss
        self._summed = False
        self.trains_in_train_mode = model.training
        self.losses: list[Tensor] = []
        self.output: Any = None
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.target: Any = None
        # Hooks run inside the user's forward pass: an output they cannot read is none for them, and no error there.
        self._hooks = [Hooks({"model": model}, _quiet(self._on_model_call))]
        if isinstance(loss, nn.Module):
            self._hooks.append(Hooks({"loss": loss}, _quiet(self._on_loss_call)))

    def _on_model_call(self, call: Call) -> None:
        if not self._listens():
            return
        self.call = call.args, {k: v for k, v in call.kwargs.items() if k != _SUMMED}
        self._summed = call.kwargs.get(_SUMMED) is not None
        if self.loss is not None:
            self.output = call.output
            return
        own = call.output.get("loss") if isinstance(call.output, Mapping) else getattr(call.output, "loss", None)
        if isinstance(own, Tensor):
            self.losses.append(own.detach())

    def _on_loss_call(self, call: Call) -> None:
        if not self._listens() or not isinstance(call.output, Tensor):
            return
        self.losses.append(call.output.detach().float().mean())
        self.target = call.args[1] if len(call.args) >= 2 else call.kwargs.get("target", self.target)

    def _listens(self) -> bool:
        """Not to measurements, nor to validation: without gradients, or in eval mode where training is not."""
        return torch.is_grad_enabled() and not being_measured() and self.model.training == self.trains_in_train_mode

    def take(self) -> float | None:
        """The mean of the losses since the last call, or their sum where they are parts of one; None where none passed by."""
        losses, self.losses = self.losses, []
        total = sum(float(loss) for loss in losses)
        return None if not losses else total if self._summed else total / len(losses)

    def batch(self) -> Any:
        """The last batch, as far as it can be put together from what passed by; None where it cannot.

        Targets that the loop has flattened, as for the tokens of a language model, get the samples back as their first dimension.
        """
        if self.call is None:
            return None
        args, kwargs = self.call
        if self.loss is None:
            return dict(kwargs) if not args else None
        if self.target is None:
            return None
        target = self.target
        size = next((t.shape[0] for _, t in named_tensors((args, kwargs)) if t.ndim), 1)
        if isinstance(target, Tensor) and target.ndim == 1 and len(target) != size and len(target) % size == 0:
            target = target.reshape(size, -1)
        return (dict(kwargs), target) if kwargs and not args else (*args, target)

    def open(self) -> None:
        """Begin to listen, if that has not been done."""
        for hooks in self._hooks:
            hooks.open()

    def close(self) -> None:
        """Take the hooks away."""
        for hooks in self._hooks:
            hooks.close()


def _quiet(visit: Callable[[Call], None]) -> Callable[[Call], None]:
    def visit_quietly(call: Call) -> None:
        with suppress(Exception):
            visit(call)

    return visit_quietly


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Facts of one step, before it is taken.

    `update_norm` is the length of the step before. `moment` is the root mean square of Adam's second moment and `surprise`
    the gradient's norm over what that moment expects: about 1 in steady training, large where it has become stale; both None
    for other optimizers. `input_size` is the root mean square of the batch's floating inputs, None where it has none. `seconds`
    is the time of training so far, without that of the monitor.
    """

    step: int
    loss: float
    gradient_norm: float
    update_norm: float | None
    rate: float
    moment: float | None = None
    surprise: float | None = None
    input_size: float | None = None
    seconds: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def row(self) -> Row:
        """What the log keeps of every step."""
        found = fields_of(self, "step loss gradient_norm update_norm rate")
        return found if self.seconds is None else {**found, "seconds": round(self.seconds, 4)}


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all entries, in float32 at least; 0 of nothing."""
    return joint_norm(norms_of(tensors))


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """The norm of each tensor, in float32 at least."""
    if not tensors:
        return []
    kinds = {(t.device, t.dtype) for t in tensors}
    if len(kinds) > 1 or next(iter(kinds))[1].itemsize < 4:  # several devices, or half precision, whose norms overflow
        return [float(t.detach().float().norm()) for t in tensors]
    found: list[float] = torch.stack(torch._foreach_norm(list(tensors))).tolist()
    return found


def joint_norm(norms: Iterable[float]) -> float:
    """The norm of all entries of tensors with these norms.

    >>> joint_norm([3.0, 4.0])
    5.0
    """
    return math.sqrt(sum(norm * norm for norm in norms))


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
    return next((name for name, p in named.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())), None)


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


class PreviousWeights:
    """Copies of the weights before the last step: how far it went, and values to measure at."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self.values: dict[str, Tensor] = {}
        self.lengths: list[float] = []  # of the last step, parameter by parameter

    def step_length(self) -> float | None:
        """Length of the step since `keep`; None at the first call, which keeps the weights."""
        now = [p.detach() for p in self._named.values()]
        if [w.shape for w in self.values.values()] != [p.shape for p in now]:
            self.values = {name: p.clone() for name, p in zip(self._named, now, strict=True)}
            self.lengths = []
            return None
        self.lengths = norms_of(torch._foreach_sub(now, list(self.values.values())))
        return joint_norm(self.lengths)

    def keep(self) -> None:
        """Copy the weights as they stand: those before the coming step."""
        torch._foreach_copy_(list(self.values.values()), [p.detach() for p in self._named.values()])
