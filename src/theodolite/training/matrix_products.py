"""Matrix products whose last bits do not depend on where a matrix lies in memory: a mode of MKL, chosen before its first product.

Without it replicas of a fleet that see equal data may part by rounding. The mode costs no measurable time and holds for the
whole process, so it is asked for where it is needed (a fleet with `bitwise=True`, a worker of a run), and results tell of it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

VARIABLE, WANTED = "MKL_CBWR", "AUTO,STRICT"
_AUTO, _STRICT, _ALL = 2, 0x10000, -1  # as in MKL's header: the branch, the flag, and the question for both


def fix_matrix_products() -> str:
    """Ask MKL for products that do not depend on memory, where it can still be asked; says how it stands now.

    A value that the environment variable MKL_CBWR already has is left alone.
    """
    if not torch.backends.mkl.is_available():
        return "torch multiplies matrices without MKL, as they come"
    library = ctypes.CDLL(torch._C.__file__)
    ask, answer = (_function(library, name) for name in ("set", "get"))
    if ask is None or answer is None:
        os.environ.setdefault(VARIABLE, WANTED)  # MKL reads it before its first product
        return f"MKL was asked by {VARIABLE}={os.environ[VARIABLE]}, and cannot say whether it was in time"
    if VARIABLE not in os.environ:
        ask(_AUTO | _STRICT)  # refused once there has been a product
    if answer(_ALL) & _STRICT:
        return "MKL multiplies matrices alike wherever they lie in memory"
    if VARIABLE in os.environ:
        return f"MKL works as {VARIABLE}={os.environ[VARIABLE]} has it, and products may depend on where matrices lie in memory"
    return (
        "MKL had begun before it could be asked, and products may depend on where matrices lie in memory; "
        f"{VARIABLE}={WANTED} in the environment of Python asks in time"
    )


def _function(library: Any, verb: str) -> Any:
    """MKL's own function: inside torch under its inner name, beside torch under the documented one."""
    return getattr(library, f"mkl_serv_cbwr_{verb}", None) or getattr(library, f"MKL_CBWR_{verb.capitalize()}", None)
