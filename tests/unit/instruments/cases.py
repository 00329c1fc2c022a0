"""Problems that several tests of the instruments share."""

from __future__ import annotations

import torch
from torch import nn

import theodolite as th


def bowl(values: list[float], start: float = 1.0) -> th.Problem:
    """`½ Σ λ_i w_i²` as a linear model: its Hessian is diag(λ)."""
    model = nn.Linear(len(values), 1, bias=False).double()
    nn.init.constant_(model.weight, start)
    x = torch.diag(torch.tensor(values).double().sqrt())
    return th.Problem(model, lambda z, y: 0.5 * z.square().sum(), (x, torch.zeros(len(values), 1).double()))
