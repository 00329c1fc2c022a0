"""Tiny random models of Hugging Face families, each with one batch of three samples, in float64 and in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]

_TOKENS = {"vocab_size": 5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_TOWER = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_TOWER, "image_size": 4, "patch_size": 2}
_CAUSAL = {**_TOKENS, **_TOWER, "num_key_value_heads": 1, "max_position_embeddings": 8}
_TWO_WAY = {
    **_TOKENS, "d_model": 4, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 6, "decoder_ffn_dim": 6, "max_position_embeddings": 8, "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": 5, "d_model": 4, "d_kv": 2, "d_ff": 6, "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


def _ids(length: int, most: int = 5) -> Tensor:
    return torch.randint(2, most, (3, length), generator=torch.Generator().manual_seed(length))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _translation() -> dict[str, Any]:
    return {"input_ids": _ids(3), "labels": _ids(2)}


def _text() -> dict[str, Any]:
    return {"input_ids": _ids(3), "labels": _ids(3)}


def _pairs() -> dict[str, Any]:
    ids = _ids(5)
    ids[:, -1] = 1
    return {"input_ids": ids, "pixel_values": _normal(3, 3, 4, 4), "return_loss": True}


def t5(hf: Any) -> Made:
    return hf.T5ForConditionalGeneration(hf.T5Config(num_layers=1, num_decoder_layers=1, **_T5)), _translation()


def bart(hf: Any) -> Made:
    return hf.BartForConditionalGeneration(hf.BartConfig(**_TWO_WAY, forced_eos_token_id=None)), _translation()


def marian(hf: Any) -> Made:
    return hf.MarianMTModel(hf.MarianConfig(**_TWO_WAY, forced_eos_token_id=1)), _translation()


def whisper(hf: Any) -> Made:
    own = {**_TWO_WAY, "num_mel_bins": 3, "max_source_positions": 4, "max_target_positions": 6}
    own |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**own))
    return model, {"input_features": _normal(3, 3, 8), "labels": _ids(2)}


def clip(hf: Any) -> Made:
    text = {**_TOKENS, **_TOWER, "max_position_embeddings": 6, "projection_dim": 4}
    config = hf.CLIPConfig(
        text_config=text, vision_config={**_IMAGE, "projection_dim": 4}, projection_dim=4, logit_scale_init_value=0.5
    )
    return hf.CLIPModel(config), _pairs()


def siglip(hf: Any) -> Made:
    text = {**_TOKENS, **_TOWER, "max_position_embeddings": 6, "projection_size": 4}
    return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=_IMAGE)), _pairs()


def vit(hf: Any) -> Made:
    model = hf.ViTForImageClassification(hf.ViTConfig(**_IMAGE, num_labels=3))
    return model, {"pixel_values": _normal(3, 3, 4, 4), "labels": torch.tensor([0, 2, 1])}


def segformer(hf: Any) -> Made:
    blocks = {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [2], "hidden_sizes": [4], "num_attention_heads": [1]}
    config = hf.SegformerConfig(**blocks, patch_sizes=[3], strides=[2], mlp_ratios=[2], decoder_hidden_size=4, num_labels=2)
    labels = torch.randint(2, (3, 4, 4), generator=torch.Generator().manual_seed(0))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": _normal(3, 3, 4, 4), "labels": labels}


def llava(hf: Any) -> Made:
    vision = {**_IMAGE, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 4}
    text = {**_CAUSAL, "model_type": "llama", "vocab_size": 6, "max_position_embeddings": 16}
    model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))
    ids = torch.cat([torch.full((3, 4), 5), _ids(2)], dim=1)
    return model, {"input_ids": ids, "pixel_values": _normal(3, 3, 4, 4), "labels": ids.where(ids != 5, -100)}


def mamba(hf: Any) -> Made:
    config = hf.MambaConfig(
        **_TOKENS, hidden_size=4, state_size=2, num_hidden_layers=1, conv_kernel=2, time_step_rank=2, use_cache=False
    )
    return hf.MambaForCausalLM(config), _text()


def mixtral(hf: Any) -> Made:
    config = hf.MixtralConfig(**_CAUSAL, num_local_experts=4, num_experts_per_tok=2, output_router_logits=False)
    return hf.MixtralForCausalLM(config), _text()


def qwen_moe(hf: Any) -> Made:
    experts = {"moe_intermediate_size": 4, "shared_expert_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_CAUSAL, **experts, decoder_sparse_step=1)), _text()


def switch(hf: Any) -> Made:
    layers = {"num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 0}
    config = hf.SwitchTransformersConfig(**_T5, **layers, num_experts=3, expert_capacity=8)
    return hf.SwitchTransformersForConditionalGeneration(config), _translation()


def bert_for_answers(hf: Any) -> Made:
    """Two outputs, both read by the loss."""
    config = hf.BertConfig(**_TOWER, vocab_size=5, max_position_embeddings=6)
    ends = {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([2, 3, 3])}
    return hf.BertForQuestionAnswering(config), {"input_ids": _ids(4), **ends}


FAMILIES: dict[str, Callable[[Any], Made]] = {
    build.__name__: build
    for build in (
        t5, bart, marian, whisper, clip, siglip, vit, segformer, llava, mamba, mixtral, qwen_moe, switch, bert_for_answers,
    )
}  # fmt: skip
#: What the loss of a family reads, where that is not `logits`.
READ = {
    "clip": ("logits_per_text",),
    "siglip": ("logits_per_text",),
    "bert_for_answers": ("start_logits", "end_logits"),
}
#: In these every output depends on all samples of the batch.
COUPLED = ("clip", "siglip")


def make(name: str, dtype: torch.dtype = torch.float64) -> Made:
    """One of the families, its weights moved from zero biases and unit norms."""
    import transformers

    torch.manual_seed(0)
    model, batch = FAMILIES[name](transformers)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    floats = {key: v.to(dtype) for key, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return model.eval().to(dtype), {**batch, **floats}
