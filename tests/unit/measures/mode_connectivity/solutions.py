"""Small networks on four overlapping classes, and solutions that belong together."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional


def blobs(samples: int, seed: int = 0, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Four overlapping classes around the corners of a square, in six dimensions."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (samples,), generator=g)
    corners = torch.tensor([[1, 1, 0, 0, 0, 0], [-1, 1, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 0], [1, -1, 0, 0, 0, 0]], dtype=dtype)
    return 1.5 * corners[labels] + torch.randn(samples, 6, generator=g, dtype=dtype), labels


def mlp(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)).double()


def train(model: nn.Module, data, steps: int, lr: float = 0.1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    x, y = data
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def permuted(model: nn.Sequential, seed: int = 3) -> nn.Sequential:
    """The same function with hidden units in another order."""
    g = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    first, second, last = other[0], other[2], other[4]
    one, two = (torch.randperm(len(layer.bias), generator=g) for layer in (first, second))
    with torch.no_grad():
        first.weight.copy_(first.weight[one])
        first.bias.copy_(first.bias[one])
        second.weight.copy_(second.weight[two][:, one])
        second.bias.copy_(second.bias[two])
        last.weight.copy_(last.weight[:, two])
    return other


def direct(model: nn.Module, data) -> tuple[float, float]:
    """Loss and accuracy by one plain call."""
    x, y = data
    with torch.no_grad():
        out = copy.deepcopy(model).eval()(x)
    return float(functional.cross_entropy(out.double(), y)), float((out.argmax(1) == y).double().mean())
