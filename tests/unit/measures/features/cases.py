"""Small models in float64 with their inputs, and the average gradient outer product written out for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.models.transformers import SelfAttention


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(outputs: int = 3, inputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(12, 4)).double()


class Attending(nn.Module):
    """Self-attention, then the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = SelfAttention(6, 2).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(x + self.attention(x)).mean(1))
        return out


class Tokens(nn.Module):
    """Embedding, attention, one row of outputs per sequence, or one for each token."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6).double()
        self.attention, self.head = SelfAttention(6, 2, causal=True).double(), nn.Linear(6, 3).double()
        self.flat = flat

    def embedded(self, e: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(e + self.attention(e)))
        return out.flatten(0, 1) if self.flat else out.mean(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedded(self.embedding(ids))


CASES = {"mlp": (mlp, (7, 5)), "cnn": (cnn, (6, 2, 4, 4)), "attention": (Attending, (5, 3, 6))}


def dense(function: nn.Module, x: Tensor) -> Tensor:
    """G from the Jacobians of single samples."""
    training = function.training
    function.eval()
    with sdpa_kernel(SDPBackend.MATH):
        jacobians = vmap(jacrev(lambda one: function(one[None])[0]))(x)  # (n, k, *input)
    function.train(training)
    rows = jacobians.detach().reshape(len(x), -1, x[0].numel())
    return torch.einsum("nki,nkj->ij", rows, rows) / len(x)
