"""Networks with frozen gates: ReLU units stay on or off as they were at the expansion point.

With its gates frozen a ReLU network is a polynomial in its weights of the degree of its depth. For two weight layers that
is a quadratic, so it is its own second order Taylor model, at the price of the network itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_IN_PLACE = {torch.relu_, Tensor.relu_}
_RELU = {torch.relu, Tensor.relu, F.relu, *_IN_PLACE}


class Recorded(TorchFunctionMode):
    """Notes which units of each ReLU are on, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _RELU:
            self.gates.append((_input(args, kwargs) > 0).to(_input(args, kwargs).dtype))
        return func(*args, **(kwargs or {}))


class Replayed(TorchFunctionMode):
    """Multiplies by the gates noted before instead of calling ReLU."""

    def __init__(self, gates: list[Tensor]) -> None:
        super().__init__()
        self._gates = iter(gates)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _RELU:
            x, gate = _input(args, kwargs), next(self._gates)
            # Somebody may have dropped what the in-place form returns, and rely on its argument.
            return x.mul_(gate) if func in _IN_PLACE or (kwargs or {}).get("inplace") or args[1:] == (True,) else x * gate
        return func(*args, **(kwargs or {}))


def _input(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    found: Tensor = args[0] if args else (kwargs or {})["input"]
    return found
