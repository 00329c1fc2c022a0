"""A pre-norm residual network of tiny blocks, its data, and a loss that can be told to fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import theodolite as th


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.into, self.drop, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.drop(torch.tanh(self.into(self.norm(x)))))


class Network(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def points(n: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0).long()


TRAIN, VALID = tuple(t[:64] for t in points()), tuple(t[64:] for t in points())
CRITERION = nn.CrossEntropyLoss()


def trained(layers: int = 2, dropout: float = 0.0, steps: int = 10) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model that has been trained a little, with its optimizer."""
    torch.manual_seed(0)
    model = Network(layers, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    th.train(model, CRITERION, TRAIN, optimizer, steps=steps, batch_size=16)
    return model, optimizer


def given(**more: Any) -> dict[str, Any]:
    """Arguments of a search, trained for ten steps so far."""
    model, optimizer = trained(**{name: more.pop(name) for name in ("dropout",) if name in more})
    found = {"model": model, "loss": CRITERION, "data": TRAIN, "optimizer": optimizer, "validation": VALID, "layers": 3}
    batch = {} if "data" in more else {"batch_size": 16}
    return {**found, "first": 10, "progress": False, **batch, **more}
