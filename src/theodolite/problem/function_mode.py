"""Function modes that Ctrl-C cannot leave on torch's stack, nor take off it twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class FunctionMode(TorchFunctionMode):
    """A `TorchFunctionMode` that ends where it is still on the stack, with what an interruption left above it."""

    def __exit__(self, *exception: Any) -> None:
        while any(mode is self for mode in _get_current_function_mode_stack()):
            torch._C._pop_torch_function_stack()


def inside_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is under way: it takes no `autograd.Function` of the usual kind."""
    return torch._C._functorch.peek_interpreter_stack() is not None
