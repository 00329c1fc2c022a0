"""A float64 model is computed in float64 throughout.

Many models (Hugging Face losses, RMSNorm, softmax in eager attention) cast to float32 inside, whatever the precision
of their parameters. Against half precision that is a safeguard; in a float64 model it would cost half the digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Ignores casts of float64 tensors to float32.

    >>> with KeepFloat64():
    ...     torch.zeros(1, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
