"""Bad values for every argument of every public function: refused in one clear line, or allowed by a table."""

from __future__ import annotations

import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import theodolite
from tests.faults.baselines import BASELINES, WITHOUT, public_callables, resolve
from theodolite.errors import TheodoliteError

PACKAGE = str(Path(theodolite.__file__).parent)
#: Seconds after which a call counts as endless.
PATIENCE = 10.0

#: What is put in the place of an argument, by name.
BAD: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: -float("inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "2.5": lambda: 2.5,
    "huge": lambda: 10**30,
    "text": lambda: "text",
    "none": lambda: None,
    "empty": lambda: [],
    "module": lambda: nn.Linear(1, 1),
    "meta": lambda: torch.empty(2, 2, device="meta"),
    "shape": lambda: torch.ones(5, 7, 3, dtype=torch.float64),
    "nan tensor": lambda: torch.full((4,), float("nan"), dtype=torch.float64),
    "inference": lambda: in_inference_mode(),
}


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)
