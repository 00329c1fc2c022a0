"""The models and data of the golden surveys; small, seeded, and of the kinds that users bring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _seed(number: int) -> torch.Generator:
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number)


def cnn() -> nn.Module:
    _seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def images() -> tuple[Tensor, Tensor]:
    generator = _seed(2)
    labels = torch.arange(120) % 10
    means = torch.randn(10, 1, 12, 12, generator=generator)
    return means[labels] + torch.randn(120, 1, 12, 12, generator=generator), labels


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    _seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def tokens() -> list[dict[str, Any]]:
    ids = torch.randint(0, 64, (16, 24), generator=_seed(4))
    return [{"input_ids": part, "labels": part} for part in ids.split(8)]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    _seed(5)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3)
    )


def masked_tokens() -> list[dict[str, Any]]:
    generator = _seed(6)
    ids = torch.randint(1, 64, (24, 16), generator=generator)
    mask = (torch.arange(16) < torch.randint(6, 17, (24, 1), generator=generator)).long()
    return [{"input_ids": ids, "attention_mask": mask, "labels": torch.arange(24) % 3}]


def regression() -> nn.Module:
    _seed(7)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def table() -> tuple[Tensor, Tensor]:
    generator = _seed(8)
    x = torch.randn(200, 6, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(200, 1, generator=generator))
