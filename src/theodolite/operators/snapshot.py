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
        self._samples = _grouped([_sample(t) for t in tensors if t.is_floating_point() and t.numel()])
        self._values = [_bits(group) for group in self._samples]

    def check(self) -> None:
        """Raise if anything changed."""
        stamps = [(t._version, t.data_ptr()) for t in self._tensors()]
        if stamps != self._stamps or not all(map(torch.equal, map(_bits, self._samples), self._values)):
            raise StaleOperatorError(
                "The model's parameters or buffers changed after this operator was built (an optimizer step, load_state_dict, "
                "a move to another device). An operator is a snapshot: build a new one from the same Problem."
            )

    def _tensors(self) -> list[Tensor]:
        found = (owner.get(name) for owner, name in self._places)
        return [t for t in found if t is not None]


def _sample(t: Tensor) -> Tensor:
    """A flat view of at most about `SAMPLE` entries, spread over the tensor; it follows the tensor's memory."""
    t = t.detach()
    if t.is_contiguous():
        return t.view(-1)[:: max(1, t.numel() // SAMPLE)]
    while t.ndim > 1:
        t = t.select(0, t.shape[0] // 2)
    return t[:SAMPLE] if t.ndim else t[None]


def _grouped(samples: list[Tensor]) -> list[list[Tensor]]:
    """By dtype and device, so that each group can be joined."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in samples:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def _bits(group: list[Tensor]) -> Tensor:
    """The samples side by side as whole numbers: NaN must equal itself."""
    return torch.cat(group).view(_WHOLE[group[0].element_size()])


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
