"""Linear layers of stacked replicas, arranged so that batched matrix products run at full speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NarrowLinear(TorchFunctionMode):
    """Compute `linear` as (W xᵀ)ᵀ where it has no more outputs than samples.

    Batched products whose result has few columns (ten classes, say) run at a quarter of the speed of the transposed ones,
    in the forward and in the backward pass. The numbers are the same up to the order of summation.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.linear and not kwargs and _narrow(*args[:2]):
            inputs, weight, *bias = args
            outputs = torch.matmul(weight, inputs.t()).t()
            return outputs if not bias or bias[0] is None else outputs + bias[0]
        return function(*args, **(kwargs or {}))


def _narrow(inputs: Tensor, weight: Tensor) -> bool:
    return inputs.ndim == 2 and weight.ndim == 2 and weight.shape[0] <= inputs.shape[0]
