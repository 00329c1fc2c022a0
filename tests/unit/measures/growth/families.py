"""Tiny Hugging Face models of four layers, with random weights in all parameters, and something to call them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
TEXT = {**_TOKENS, **_SIZES, "max_position_embeddings": 32}
_GROUPED = {**TEXT, "num_key_value_heads": 1}
_GEMMA = {**_GROUPED, "head_dim": 8, "sliding_window": 4}
_T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0}

#: Class, configuration and its arguments, by family.
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {**{k: v for k, v in TEXT.items() if k != "intermediate_size"}, "ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, "max_position_embeddings": 40}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "num_layers": 4, "num_decoder_layers": 3}),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**TEXT, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1, "local_attention": 4},
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 8}),
}  # fmt: skip
FAMILIES = list(CONFIGURATIONS)[:12]
POST_NORM = ("bert", "roberta")
CAUSAL = FAMILIES[:9]


def model_of(family: str) -> nn.Module:
    import transformers

    kind, config, settings = CONFIGURATIONS[family]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases and scales too
    return model.eval()


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(2, 50, (2, 8), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
