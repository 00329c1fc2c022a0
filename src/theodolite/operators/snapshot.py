"""An operator is a snapshot of the parameters: it notices when they move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.errors import StaleOperatorError

#: Entries of each tensor that are looked at; a change by way of `.data` leaves no version behind.
SAMPLE = 128


class Snapshot:
    """Remembers versions, places and sampled values of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        # The dictionaries rather than the tensors: a replaced parameter must be noticed too.
        self._places = [
            (owner, name) for module in model.modules() for owner in (module._parameters, module._buffers) for name in owner
        ]
        tensors = self._tensors()
        self._stamps = [(t._version, t.data_ptr()) for t in tensors]
        self._samples = [_sample(t) for t in tensors if t.is_floating_point() and t.numel()]
        self._norms = _norms(self._samples)

    def check(self) -> None:
        """Raise if anything changed."""
        stamps = [(t._version, t.data_ptr()) for t in self._tensors()]
        if stamps != self._stamps or not torch.equal(_norms(self._samples), self._norms):
            raise StaleOperatorError(
                "The model's parameters or buffers changed after this operator was built (an optimizer step, load_state_dict, "
                "a move to another device). An operator is a snapshot: build a new one from the same Problem."
            )

    def _tensors(self) -> list[Tensor]:
        found = (owner.get(name) for owner, name in self._places)
        return [t for t in found if t is not None]


def _sample(t: Tensor) -> Tensor:
    """A view of at most about `SAMPLE` entries, spread over the tensor; it follows the tensor's memory."""
    t = t.detach()
    return t.view(-1)[:: max(1, t.numel() // SAMPLE)] if t.is_contiguous() else t


def _norms(samples: list[Tensor]) -> Tensor:
    norms = list(torch._foreach_norm(samples)) if samples else []
    if len({(n.dtype, n.device) for n in norms}) > 1:
        norms = [n.double().cpu() for n in norms]
    return torch.stack(norms) if norms else torch.empty(0)
