"""An operator is a snapshot of the parameters: it notices when they move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.errors import StaleOperatorError


class Snapshot:
    """Remembers versions, places and norms of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        # The dictionaries rather than the tensors: a replaced parameter must be noticed too.
        self._places = [
            (owner, name) for module in model.modules() for owner in (module._parameters, module._buffers) for name in owner
        ]
        tensors = self._tensors()
        self._stamps = [(t._version, t.data_ptr()) for t in tensors]
        self._norms = _norms(tensors)

    def check(self) -> None:
        """Raise if anything changed, also by way of `.data`, which leaves no version behind."""
        tensors = self._tensors()
        stamps = [(t._version, t.data_ptr()) for t in tensors]
        if stamps != self._stamps or not torch.equal(_norms(tensors), self._norms):
            raise StaleOperatorError(
                "The model's parameters or buffers changed after this operator was built (an optimizer step, load_state_dict, "
                "a move to another device). An operator is a snapshot: build a new one from the same Problem."
            )

    def _tensors(self) -> list[Tensor]:
        found = (owner.get(name) for owner, name in self._places)
        return [t for t in found if t is not None]


def _norms(tensors: list[Tensor]) -> Tensor:
    floating = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    norms = list(torch._foreach_norm(floating)) if floating else []
    if len({(n.dtype, n.device) for n in norms}) > 1:
        norms = [n.double().cpu() for n in norms]
    return torch.stack(norms) if norms else torch.empty(0)
