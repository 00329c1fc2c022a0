"""The parts transformers are made of: attention, feed-forward, and the residual block of the two."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.models.choices import activation as make_activation


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads · size) -> (B, heads, T, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def check_heads(dim: int, heads: int) -> None:
    """Raise where the heads do not share the width evenly."""
    if dim % heads:
        raise ValueError(f"heads must divide dim. Got {heads} heads for dim {dim}.")


class SelfAttention(nn.Module):
    """Multi-head attention through torch's `scaled_dot_product_attention`; layers query, key, value, out."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (B, 1, 1, T) is True where a token may be looked at."""
        q, k, v = (split_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """up, activation, down."""

    def __init__(self, dim: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.act = make_activation(activation)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream.

    `norm_first` normalises the input of each part (GPT, ViT), otherwise the sum after each part (BERT).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        causal: bool,
        norm_first: bool = True,
        activation: str = "gelu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attention = SelfAttention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = FeedForward(dim, hidden, activation)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))
