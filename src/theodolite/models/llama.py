"""A Llama-style decoder: RMSNorm, rotary positions, shared key/value heads, SwiGLU. Layer names as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.arguments import positive_integers
from theodolite.models.initialisation import TOKEN_INITS, construct
from theodolite.models.transformers import check_heads, positions_of, split_heads


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


class Llama(nn.Module):
    """The body `model` and the head `lm_head`, which shares the embedding where tied: ids (B, T) -> logits (B, T, vocabulary)."""

    def __init__(self, body: LlamaBody, vocabulary: int, dim: int, tied: bool) -> None:
        super().__init__()
        self.model = body
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = body.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


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
