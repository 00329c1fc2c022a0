"""Language models: shapes, causality, agreement with Hugging Face's Llama, GPT-2 and BERT."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from theodolite import models

BUILDERS = {
    "gpt": lambda **k: models.gpt(20, 12, 16, 2, 4, **k),
    "gpt untied": lambda **k: models.gpt(20, 12, 16, 2, 4, tied=False, **k),
    "bert": lambda **k: models.bert(20, 12, 16, 2, 4, **k),
    "bert norm first": lambda **k: models.bert(20, 12, 16, 2, 4, norm_first=True, **k),
    "llama": lambda **k: models.llama_decoder(20, 12, 16, 24, 2, 4, 2, **k),
    "llama untied": lambda **k: models.llama_decoder(20, 12, 16, 24, 2, 4, 2, tied=False, **k),
}
every_model = pytest.mark.parametrize("make", BUILDERS.values(), ids=BUILDERS.keys())


@every_model
def test_logits_for_every_token_and_gradients_everywhere(make):
    model = make(seed=0)
    ids = torch.arange(12).repeat(2, 1) + torch.tensor([[0], [8]])  # the whole context, every token
    logits = model(ids)
    assert logits.shape == (2, 12, 20)
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("key.bias"):  # adds the same to all scores of a query: the softmax forgets it
            assert parameter.grad.abs().sum() > 0, name


@every_model
def test_only_encoders_see_what_comes_later(make):
    model = make(seed=0).double()
    ids = torch.randint(20, (2, 9))
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 20
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[6:].min() > 0
    assert difference[:6].max() == 0 if not isinstance(model, type(models.bert())) else difference[:6].min() > 0


@every_model
def test_second_derivatives_exist(make):
    """Inside the kernel that has them, which `Problem` enters by itself."""
    model = make(seed=0)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        loss = model(torch.randint(20, (2, 5))).square().sum()
        parameters = [p for name, p in model.named_parameters() if "q" in name and name.endswith("weight")]
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    assert all(g.abs().sum() > 0 for g in second)


@every_model
def test_bad_ids_are_named(make):
    model = make(seed=0)
    with pytest.raises(ValueError, match="13 tokens do not fit into a context of 12"):
        model(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="whole numbers"):
        model(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"\(batch, tokens\)"):
        model(torch.zeros(4, dtype=torch.long))


def test_tied_heads_share_the_embedding():
    for model, head, embedding in (
        (models.gpt(), "head", "tokens"),
        (models.bert(), "head", "tokens"),
        (models.llama_decoder(), "lm_head", "model.embed_tokens"),
    ):
        assert model.get_submodule(head).weight is model.get_submodule(embedding).weight
    untied = models.gpt(tied=False)
    assert untied.head.weight is not untied.tokens.weight
    assert models.count_parameters(untied) - models.count_parameters(models.gpt()) == 65 * 64


def test_padding_is_not_looked_at():
    model = models.bert(20, 12, 16, 2, 4, seed=0)
    ids = torch.randint(20, (2, 8))
    mask = torch.ones(2, 8)
    mask[:, 5:] = 0
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 3) % 20
    torch.testing.assert_close(model(ids, mask)[:, :5], model(changed, mask)[:, :5])
    torch.testing.assert_close(model(ids, mask)[:, :5], model(ids[:, :5]))


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_llama_agrees_with_hugging_face(tied):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 40,
        "max_position_embeddings": 16,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    theirs = transformers.LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = models.llama_from_config({**sizes, "rope_theta": 500.0})
    models.load_weights(ours, {name: p.detach() for name, p in theirs.named_parameters()})
    ids = torch.randint(40, (3, 16))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def gpt2_names(depth: int, dim: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's GPT-2 (fused, transposed projections) under our names."""
    out = {"tokens.weight": state["wte.weight"], "positions.weight": state["wpe.weight"]}
    out |= {f"norm.{kind}": state[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for i in range(depth):
        for kind in ("weight", "bias"):
            old, new = f"h.{i}.", f"layers.{i}."
            out[f"{new}norm1.{kind}"], out[f"{new}norm2.{kind}"] = state[f"{old}ln_1.{kind}"], state[f"{old}ln_2.{kind}"]
            fused = state[f"{old}attn.c_attn.{kind}"].split(dim, dim=-1)
            for name, part in zip(("query", "key", "value"), fused, strict=True):
                out[f"{new}attention.{name}.{kind}"] = part.T if kind == "weight" else part
            for name, source in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                value = state[f"{old}{source}.{kind}"]
                out[f"{new}{name}.{kind}"] = value.T if kind == "weight" else value
    return out


@pytest.mark.oracle
def test_gpt_agrees_with_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4, activation_function="gelu", bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = dict(theirs.transformer.named_parameters())
    ours = models.load_weights(models.gpt(40, 16, 32, 2, 4), gpt2_names(2, 32, state))
    ids = torch.randint(40, (3, 16))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def bert_names(depth: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's BERT under our names; its first segment vector goes into the positions."""
    there, head = "bert.embeddings.", "cls.predictions."
    out = {
        "tokens.weight": state[f"{there}word_embeddings.weight"],
        "positions.weight": state[f"{there}position_embeddings.weight"] + state[f"{there}token_type_embeddings.weight"][0],
        "head.bias": state[f"{head}bias"],
    }
    parts = {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.out": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    pairs = {"norm": f"{there}LayerNorm", "transform": f"{head}transform.dense", "transform_norm": f"{head}transform.LayerNorm"}
    for i in range(depth):
        pairs |= {f"layers.{i}.{ours}": f"bert.encoder.layer.{i}.{theirs}" for ours, theirs in parts.items()}
    for ours, theirs in pairs.items():
        out |= {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    return out


@pytest.mark.oracle
def test_bert_agrees_with_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        max_position_embeddings=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    theirs = transformers.BertForMaskedLM(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = dict(theirs.named_parameters())
    ours = models.load_weights(models.bert(40, 16, 32, 2, 4, hidden=64), bert_names(2, state))
    ids = torch.randint(40, (3, 16))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
