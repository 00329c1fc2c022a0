"""Losses and models that hold the model's parameters themselves: an L2 penalty, a loss that calls the model, a list of weights.

A model is always called with stand-ins for its parameters and buffers, which `functional_call` puts into the modules. Who
holds the tensors by another way would go on reading the model's own ones, and that part of the objective would be lost to every
derivative. Here each operation on such a tensor is given its stand-in instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class StandIns(TorchFunctionMode):
    """Operations on a model's own parameters and buffers are given those of the same name in `tensors`.

    `used` tells whether that ever happened.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> with StandIns(tensors_of(model), {"weight": Tensor([[3.0]])}) as mode:
    ...     model.weight.square().item(), mode.used
    (9.0, True)
    """

    def __init__(self, own: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._instead = {id(t): tensors[name] for name, t in own if name in tensors}
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _FACTS:  # the user's own tensor is asked whether it trains, and not what stands in for it
            return func(*args, **(kwargs or {}))
        return func(*map(self._swapped, args), **{name: self._swapped(value) for name, value in (kwargs or {}).items()})

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            instead = self._instead.get(id(value))
            self.used |= instead is not None
            return value if instead is None else instead
        if type(value) in (list, tuple):
            return type(value)(map(self._swapped, value))
        return value


_FACTS = [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")]


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's own parameters and buffers by name."""
    return [*model.named_parameters(), *model.named_buffers()]


class LossOfParameters:
    """A loss that reads the parameters of `model` besides the output, told what stands in for them.

    It is called and asked for its attributes like the loss inside. It knows the user's model, whose tensors it reads, and theirs
    by name, so that it can also be the loss of a copy. `used` tells whether it has ever read one.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], model: nn.Module) -> None:
        self.loss, self.model = loss, model
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)
        self.used = False

    def widened(self) -> LossOfParameters:
        """With its own buffers in float64, where it has any; the model that it may hold stays the user's."""
        wide = LossOfParameters(self.loss, self.model)
        if isinstance(self.loss, nn.Module) and self.model not in self.loss.modules():
            wide.loss = copy.deepcopy(self.loss).double()
        return wide

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self.loss(output, target)

    def at(self, tensors: Mapping[str, Tensor], output: Any, target: Any) -> Tensor:
        """The loss where the model's parameters are these."""
        with StandIns(tensors_of(self.model), tensors) as mode:
            value = self.loss(output, target)
        self.used |= mode.used
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("loss", "model"):
            raise AttributeError(name)
        return getattr(self.loss, name)


def users_own(loss: object) -> object:
    """The loss as the user gave it."""
    return loss.loss if isinstance(loss, LossOfParameters) else loss


def bound(loss: Callable[[Any, Any], Tensor] | None, model: nn.Module) -> Callable[[Any, Any], Tensor] | None:
    """A loss that may read the parameters of `model`, made to read what stands in for them; torch's own losses cannot."""
    if loss is None or isinstance(loss, LossOfParameters):
        return loss
    plain = loss in vars(nn.functional).values() or type(loss) in vars(nn.modules.loss).values()
    return loss if plain and not getattr(loss, "_forward_hooks", None) else LossOfParameters(loss, model)
