"""What the three kinds of model words give, before checkpoint, loss and batches are settled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.problem import Problem


@dataclass(frozen=True)
class Parts:
    """A model with what belongs to it; `own_loss` where the model returns its own, `task` for Hugging Face models."""

    model: nn.Module
    name: str
    data: Any = None
    data_name: str = ""
    loss: Any = None
    own_loss: bool = False
    task: str = ""
    optimizer: Optimizer | None = None
    lr: float | None = None
    problem: Problem | None = None
    population: int | None = None
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
