"""Small language models: GPT (a causal decoder) and BERT (an encoder with a masked-token head). No dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from theodolite.arguments import positive_integers
from theodolite.models.attention import Block, check_heads
from theodolite.models.choices import activation as make_activation
from theodolite.models.initialisation import TOKEN_INITS, construct


def positions_of(ids: Tensor, context: int) -> Tensor:
    """0..T−1 for ids (B, T), which must fit into the context."""
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"ids must be whole numbers of shape (batch, tokens). Got {ids.dtype} of shape {tuple(ids.shape)}.")
    if ids.shape[1] > context:
        raise ValueError(f"{ids.shape[1]} tokens do not fit into a context of {context}.")
    return torch.arange(ids.shape[1], device=ids.device)


class GPT(nn.Module):
    """Token and position embeddings, pre-norm causal blocks `layers`, norm, and a head without bias.

    A tied head shares the token embedding. Called with ids (B, T), it returns logits (B, T, vocabulary).
    """

    def __init__(
        self, vocabulary: int, context: int, dim: int, depth: int, heads: int, hidden: int, tied: bool, activation: str
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden, causal=True, activation=activation) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(positions_of(ids, self.context)) + self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt(
    vocabulary: int = 65,
    context: int = 64,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    *,
    hidden: int | None = None,
    tied: bool = True,
    activation: str = "gelu",
    init: str = "gpt2",
    seed: int | None = None,
) -> GPT:
    """A GPT; the defaults are GPT-small, a character model with `hidden` = 4 · dim.

    >>> model = gpt(vocabulary=1000, depth=2)
    >>> sum(p.numel() for p in model.parameters())  # (1000 + 64)·64 + 2·(12·64² + 13·64) + 2·64
    168192
    """
    hidden = 4 * dim if hidden is None else hidden
    positive_integers(vocabulary=vocabulary, context=context, dim=dim, depth=depth, heads=heads, hidden=hidden)
    check_heads(dim, heads)
    return construct(lambda: GPT(vocabulary, context, dim, depth, heads, hidden, tied, activation), init, seed, TOKEN_INITS)


class BERT(nn.Module):
    """Embeddings with their norm, bidirectional blocks `layers`, and a head: linear, GELU, norm, tied decoder with bias.

    One segment only, so there is no segment embedding. Called with ids (B, T), it returns logits (B, T, vocabulary).
    """

    def __init__(
        self, vocabulary: int, context: int, dim: int, depth: int, heads: int, hidden: int, norm_first: bool, activation: str
    ) -> None:
        super().__init__()
        eps = 1e-12  # as the original has it
        self.context = context
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.layers = nn.ModuleList(
            Block(dim, heads, hidden, causal=False, norm_first=norm_first, activation=activation, eps=eps) for _ in range(depth)
        )
        self.transform = nn.Linear(dim, dim)
        self.transform_act = make_activation(activation)
        self.transform_norm = nn.LayerNorm(dim, eps=eps)
        self.head = nn.Linear(dim, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (B, T) is 0 or False at padding."""
        x = self.norm(self.positions(positions_of(ids, self.context)) + self.tokens(ids))
        visible = None if mask is None else mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, visible)
        return self.head(self.transform_norm(self.transform_act(self.transform(x))))


def bert(
    vocabulary: int = 66,
    context: int = 64,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    *,
    hidden: int | None = None,
    norm_first: bool = False,
    activation: str = "gelu",
    init: str = "normal_0.02",
    seed: int | None = None,
) -> BERT:
    """A BERT for masked tokens, post-norm like the original unless `norm_first`; the defaults are BERT-small.

    >>> model = bert(vocabulary=100, depth=1)  # 100·64 + 64·64 + 2·64 + 12·64² + 13·64 + 64² + 3·64 + 100
    >>> sum(p.numel() for p in model.parameters())
    64996
    """
    hidden = 4 * dim if hidden is None else hidden
    positive_integers(vocabulary=vocabulary, context=context, dim=dim, depth=depth, heads=heads, hidden=hidden)
    check_heads(dim, heads)
    return construct(
        lambda: BERT(vocabulary, context, dim, depth, heads, hidden, norm_first, activation), init, seed, TOKEN_INITS
    )
