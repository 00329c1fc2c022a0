"""What passes through a model while it trains: the loss of each step and the batch, without computing anything twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.problem.activations import Call, Hooks
from theodolite.problem.state_guard import being_measured
from theodolite.problem.tensors import named_tensors

#: The argument by which a trainer asks for a loss that is to be summed over the batches of a step; it is not data.
_SUMMED = "num_items_in_batch"


class Tap:
    """Listens to the forward calls of a model, and of a loss that is a module, while gradients are recorded.

    Nothing is changed: hooks only read, and `close` takes them away. `losses` are the losses since the last `take`, as far
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
        self._hooks = [Hooks({"model": model}, self.heard)]
        if isinstance(loss, nn.Module):
            self._hooks.append(Hooks({"loss": loss}, self.judged))

    def heard(self, call: Call) -> None:
        """A call of the model."""
        if not self._listens():
            return
        self.call = call.args, {k: v for k, v in call.kwargs.items() if k != _SUMMED}
        self._summed = call.kwargs.get(_SUMMED) is not None
        output = call.output
        if self.loss is not None:
            self.output = output
            return
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            self.losses.append(own.detach())

    def judged(self, call: Call) -> None:
        """A call of the loss."""
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

    def close(self) -> None:
        """Take the hooks away."""
        for hooks in self._hooks:
            hooks.close()
