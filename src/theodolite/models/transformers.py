"""Transformers without dropout: GPT (a causal decoder), BERT (an encoder with a masked-token head), a small ViT, Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.arguments import checked, number_in, positive, positive_integers
from theodolite.models.initialisation import LAYER_INITS, TOKEN_INITS, DrawsBlocks, construct, image_sizes
from theodolite.models.initialisation import activation as make_activation

# The parts transformers are made of: attention, feed-forward, and the residual block of the two.


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


# Small language models: GPT (a causal decoder) and BERT (an encoder with a masked-token head). No dropout.


def positions_of(ids: Tensor, context: int) -> Tensor:
    """0..T−1 for ids (B, T), which must fit into the context."""
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"ids must be whole numbers of shape (batch, tokens). Got {ids.dtype} of shape {tuple(ids.shape)}.")
    if ids.shape[1] > context:
        raise ValueError(f"{ids.shape[1]} tokens do not fit into a context of {context}.")
    return torch.arange(ids.shape[1], device=ids.device)


class GPT(DrawsBlocks, nn.Module):
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
    return construct(lambda: GPT(vocabulary, context, dim, depth, heads, hidden, tied, activation), init, seed, TOKEN_INITS)


class BERT(DrawsBlocks, nn.Module):
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
    return construct(
        lambda: BERT(vocabulary, context, dim, depth, heads, hidden, norm_first, activation), init, seed, TOKEN_INITS
    )


# A small vision transformer.


class ViT(DrawsBlocks, nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks `layers`, norm, and a linear head on the class token.

    The class token and the positions start at N(0, 0.02²) whatever the initialisation of the layers.
    """

    def __init__(
        self, image: tuple[int, int, int], patch: int, dim: int, depth: int, heads: int, hidden: int, classes: int
    ) -> None:
        super().__init__()
        channels, height, width = image
        self.patches = nn.Conv2d(channels, dim, patch, stride=patch)
        self.token = nn.Parameter(0.02 * torch.randn(dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + (height // patch) * (width // patch), dim))
        self.layers = nn.ModuleList(Block(dim, heads, hidden, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, patches, dim)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


@checked(image=image_sizes, mlp_ratio=number_in(above=0, most=1000))
def vision_transformer(
    image: tuple[int, int, int] = (3, 32, 32),
    patch: int = 4,
    dim: int = 192,
    depth: int = 4,
    heads: int = 3,
    classes: int = 10,
    *,
    mlp_ratio: float = 4,
    init: str = "xavier",
    seed: int | None = None,
) -> ViT:
    """A ViT for images (channels, height, width) cut into squares of `patch` pixels; ViT-4 has depth 4 and patch 4.

    >>> model = vision_transformer((1, 8, 8), patch=2, dim=64, depth=1, heads=4)
    >>> sum(p.numel() for p in model.parameters())  # patches 320, token 64, positions 17·64, block 12·64² + 13·64, ...
    52234
    """
    positive_integers(patch=patch, dim=dim, depth=depth, heads=heads, classes=classes)
    if len(image) != 3:
        raise ValueError(f"image must be (channels, height, width). Got {image}.")
    if image[1] % patch or image[2] % patch:
        raise ValueError(f"patch must divide the image. Got patch {patch} for {image[1]}×{image[2]} pixels.")
    hidden = max(1, round(mlp_ratio * dim))
    return construct(lambda: ViT(image, patch, dim, depth, heads, hidden, classes), init, seed, (*LAYER_INITS, "normal_0.02"))


# A Llama-style decoder: RMSNorm, rotary positions, shared key/value heads, SwiGLU. Layer names as Hugging Face has them.


def rotary_angles(positions: Tensor, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, size/2) of the angles position · base^(−2i/size).

    >>> cosine, sine = rotary_angles(torch.tensor([0]), 4, 10000.0, torch.float32)
    >>> cosine.tolist(), sine.tolist()
    ([[1.0, 1.0]], [[0.0, 0.0]])
    """
    exact = torch.promote_types(dtype, torch.float32)  # half precision cannot hold the angles
    frequencies = base ** (-torch.arange(0, size, 2, dtype=exact, device=positions.device) / size)
    angles = positions.to(exact)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + size/2}) of each head, the half-split convention; x is (B, heads, T, size)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class RotaryAttention(nn.Module):
    """Causal attention without biases in which neighbouring query heads share one key and value head."""

    def __init__(self, dim: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, base
        size = dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = split_heads(self.q_proj(x), self.heads)
        k, v = (split_heads(layer(x), self.kv_heads) for layer in (self.k_proj, self.v_proj))
        cosine, sine = rotary_angles(positions, q.shape[-1], self.base, x.dtype)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        share = self.heads // self.kv_heads
        k, v = (z.repeat_interleave(share, dim=1) for z in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) · up(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each on the normalised stream."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, base: float, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim, eps=eps)
        self.self_attn = RotaryAttention(dim, heads, kv_heads, base)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaBody(nn.Module):
    """Embedding, blocks, norm: ids (B, T) -> hidden states (B, T, dim)."""

    def __init__(
        self, vocabulary: int, context: int, dim: int, hidden: int, depth: int, heads: int, kv_heads: int, base: float, eps: float
    ) -> None:
        super().__init__()
        self.context = context
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, hidden, heads, kv_heads, base, eps) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=eps)

    def forward(self, ids: Tensor) -> Tensor:
        positions = positions_of(ids, self.context)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)


class Llama(DrawsBlocks, nn.Module):
    """The body `model` and the head `lm_head`, which shares the embedding where tied: ids (B, T) -> logits (B, T, vocabulary)."""

    def __init__(self, body: LlamaBody, vocabulary: int, dim: int, tied: bool) -> None:
        super().__init__()
        self.model = body
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = body.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


@checked(rotary_base=positive, eps=positive)
def llama_decoder(
    vocabulary: int = 512,
    context: int = 512,
    dim: int = 64,
    hidden: int = 172,
    depth: int = 5,
    heads: int = 8,
    kv_heads: int = 4,
    *,
    rotary_base: float = 10000.0,
    eps: float = 1e-5,
    tied: bool = True,
    init: str = "normal_0.02",
    seed: int | None = None,
) -> Llama:
    """A Llama; the defaults are stories260k, a model of 260 thousand parameters for children's stories.

    >>> sum(p.numel() for p in llama_decoder().parameters())  # 512·64 + 5·(2·64² + 2·32·64 + 3·64·172 + 2·64) + 64
    260032
    """
    positive_integers(vocabulary=vocabulary, context=context, dim=dim, hidden=hidden, depth=depth, heads=heads, kv_heads=kv_heads)
    check_heads(dim, heads)
    if heads % kv_heads or (dim // heads) % 2:
        raise ValueError(f"kv_heads must divide heads, and dim/heads must be even. Got {kv_heads}, {heads}, {dim}.")

    def make() -> Llama:
        body = LlamaBody(vocabulary, context, dim, hidden, depth, heads, kv_heads, rotary_base, eps)
        return Llama(body, vocabulary, dim, tied)

    return construct(make, init, seed, TOKEN_INITS)


# Hugging Face's names -> ours.
_CONFIG = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "eps",
    "tie_word_embeddings": "tied",
}


def llama_from_config(config: Mapping[str, Any], *, init: str = "normal_0.02", seed: int | None = None) -> Llama:
    """A Llama of the sizes in a Hugging Face configuration (a mapping, as its config.json has it).

    >>> llama_from_config({})
    Traceback (most recent call last):
    ValueError: config lacks vocab_size, max_position_embeddings, hidden_size, intermediate_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads, rope_theta, rms_norm_eps, tie_word_embeddings.
    """
    lacking = [key for key in _CONFIG if key not in config]
    if lacking:
        raise ValueError(f"config lacks {', '.join(lacking)}.")
    return llama_decoder(**{ours: config[theirs] for theirs, ours in _CONFIG.items()}, init=init, seed=seed)
