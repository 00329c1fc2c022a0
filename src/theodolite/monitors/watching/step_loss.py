"""The loss that a trainer minimises, whatever it is made of, as a model that returns its own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from theodolite.problem.activations import Call, recorded_calls
from theodolite.problem.calling import main_output

#: `(model, batch) -> loss`, the trainer's own way: class weights, smoothed labels, penalties and all.
ComputeLoss = Callable[[nn.Module, dict[str, Any]], Tensor]


class StepLoss(nn.Module):
    """`compute(model, batch)` as the loss of a batch, with the output it was computed from; `observe` takes it as the model.

    >>> mean = StepLoss(nn.Identity(), lambda model, batch: model(batch["x"]).mean())
    >>> float(mean(x=Tensor([1.0, 3.0]))["loss"])
    2.0
    """

    def __init__(self, model: nn.Module, compute: ComputeLoss) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *args: Any, **batch: Any) -> dict[str, Tensor]:
        if args:  # a probe of the user's, which came as a pair
            batch = {"batch": (*args, *batch.values())}
        with recorded_calls(dict(self.model.named_modules())) as calls:
            loss = self.compute(self.model, batch)
        return {"loss": loss, "logits": _output(self.model, calls, loss)}


def _output(model: nn.Module, calls: list[Call], loss: Tensor) -> Tensor:
    """What the loss seems to be a function of: the model's one output, else what the last of its parts returned.

    Whether it is one, the Gauss-Newton matrix finds out; where nothing comes into question, a number that no loss depends on.
    """
    whole = [call.output for call in calls if call.module is model]
    if len(whole) == 1 and isinstance(whole[0], Tensor | tuple | list | Mapping):
        return main_output(whole[0])
    parts = [call.output for call in calls if isinstance(call.output, Tensor)]
    found = [t for t in parts if t.is_floating_point() and t.ndim > 0]
    return found[-1] if found else loss.new_zeros(1).requires_grad_()


def loss_of(found: Any) -> Any:
    """The loss in what a training step returns: itself, or under its name, or first."""
    if isinstance(found, Mapping):
        return found.get("loss")
    return found[0] if isinstance(found, tuple) and found else found
