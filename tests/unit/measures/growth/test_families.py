"""`grow` on Hugging Face models: they are what their configuration says, load as they were saved, and generate with a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.growth import GrowthOperator, find_body
from theodolite.testing import model_state, same

from .families import CAUSAL, FAMILIES, POST_NORM, TEXT, inputs_of, model_of

pytest.importorskip("transformers")

#: Families of the quick tests: the oldest one, and one with two kinds of attention, norms behind projections and a tied head.
QUICK = ("gpt2", "gemma3")
EACH = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


def operator(init="copy", start=1, block=1, layers=4, added=2):
    return GrowthOperator(start, block, init, layers=layers, added=added)


def output_of(model, family):
    with torch.no_grad():
        return model(**inputs_of(family)).logits


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


@pytest.mark.parametrize("family", EACH)
def test_a_grown_model_saves_loads_and_generates(family, tmp_path):
    model = model_of(family)
    body = find_body(model)
    block = sum(p.numel() for p in body.blocks(model)[1].parameters())
    for init in ("copy", "random") if family in QUICK else ("copy", "random", "scaled"):
        found = th.grow(model, operator(init, block=2), inputs=inputs_of(family))
        assert found.parameters - found.parameters_before == 2 * block
        grown = found.model
        assert grown.config.num_hidden_layers == 6
        assert torch.equal(output_of(saved_and_loaded(grown, tmp_path / init), family), output_of(grown, family))
        if family in CAUSAL:
            given = {**inputs_of(family), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(grown.generate(**given, use_cache=True), grown.generate(**given, use_cache=False))


@pytest.mark.parametrize("family", EACH)
def test_check_07_identities(family):
    """Outputs are equal for every start and block of pre-norm models; all new parameters move within two steps."""
    model = model_of(family)
    for op in th.growth_operators(4, 2, inits=["identity"])[:: 3 if family in QUICK else 1]:
        found = th.grow(model, op, inputs=inputs_of(family))
        if family in POST_NORM:
            assert found.preservation.outputs > 1e-5
            assert "no identity block" in found.sentence()
        else:
            assert found.preservation.outputs < 1e-5
    grown = found.model
    before = copy.deepcopy(grown)
    optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        logits = grown(**inputs_of(family)).logits
        nn.functional.cross_entropy(logits.flatten(0, -2), torch.arange(logits.flatten(0, -2).shape[0]) % 3).backward()
        optimizer.step()
    new = [i for i, origin in enumerate(op.layer_map()) if origin.is_new]
    body = find_body(grown)
    for place in new:
        pairs = zip(body.blocks(grown)[place].named_parameters(), body.blocks(before)[place].parameters(), strict=True)
        assert [name for (name, p), q in pairs if torch.equal(p, q)] == []


@pytest.mark.parametrize("family", EACH)
def test_layers_are_where_the_operator_puts_them(family):
    """Old and copied ones are equal bit by bit, drawn ones differ from all; ties stay, and the old model is as it was."""
    model = model_of(family)
    before = model_state(model)
    for init in ("copy", "random"):
        op = operator(init, block=2)
        grown = th.grow(model, op).model
        body, blocks = find_body(grown), find_body(model).blocks(model)
        for layer, (source, _) in zip(body.blocks(grown), op.layer_map(), strict=True):
            equal = [same(layer.state_dict(), old.state_dict()) for old in blocks]
            assert equal == [source == i for i in range(4)]
        drawn = [
            layer.state_dict() for layer, (source, _) in zip(body.blocks(grown), op.layer_map(), strict=True) if source is None
        ]
        assert len(drawn) != 2 or not same(*drawn)
        assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in grown.parameters()}
        tied = [len(list(m.named_parameters(remove_duplicate=False))) - len(list(m.parameters())) for m in (model, grown)]
        assert tied[0] == tied[1]
    assert same(before, model_state(model))


def test_lists_with_one_entry_a_layer_follow_the_layers():
    model = model_of("gemma3")
    kinds = model.config.layer_types
    op = operator(start=0, block=2)
    grown = th.grow(model, op).model
    assert grown.config.layer_types == [kinds[source] for source, _ in op.layer_map()]
    assert [layer.self_attn.layer_idx for layer in grown.model.layers] == list(range(6))
    assert model.config.layer_types == kinds
    assert len(kinds) == model.config.num_hidden_layers == 4


def test_the_optimizer_of_a_tied_model_grows():
    model = model_of("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for m, o in ((model, optimizer), _grown_pair(model, optimizer)):
        o.zero_grad()
        m(**inputs_of("gpt2"), labels=inputs_of("gpt2")["input_ids"]).loss.backward()
        o.step()
    grown, after = _grown_pair(model, optimizer)
    assert grown.lm_head.weight is grown.transformer.wte.weight
    assert len(after.state) == len(list(grown.parameters())) == len(list(model.parameters())) + 2 * 12


def _grown_pair(model, optimizer):
    found = th.grow(model, operator("random"), optimizer=optimizer)
    return found.model, found.optimizer


def test_random_layers_are_drawn_by_the_initialiser_of_the_model():
    """GPT-2 divides the projections into the stream by √(2 · depth), here that of the grown model."""
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=64, n_layer=2, n_head=2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(7.0)
    layer = th.grow(model, operator("random", 0, layers=2)).model.transformer.h[1]
    assert float(layer.mlp.c_fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(layer.mlp.c_proj.weight.detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert layer.ln_1.weight.tolist() == [1.0] * 64


def test_a_first_block_of_another_shape_stays_and_is_not_copied():
    model = model_of("t5")
    with pytest.raises(ValueError, match=r"2 lists of blocks: encoder.block .4 × T5Block., decoder.block .3 × T5Block."):
        th.grow(model, operator())
    assert find_body(model, "decoder.block").fixed == (0,)
    with pytest.raises(ValueError, match=r"repeats layer 0 of decoder.block.*Take one that repeats others: 1, 2"):
        th.grow(model, operator(start=0, layers=3), body="decoder.block")
    ids = inputs_of("gpt2")["input_ids"]
    for path, layers in (("encoder.block", 4), ("decoder.block", 3)):
        given = {"input_ids": ids, "decoder_input_ids": ids}
        found = th.grow(model, operator("identity", layers=layers), body=path, inputs=given)
        assert found.preservation.outputs < 1e-5
        assert [len(found.model.encoder.block), len(found.model.decoder.block)] == ([6, 3] if layers == 4 else [4, 5])
    drawn = th.grow(model, operator("random", 0, layers=3), body="decoder.block").model.decoder.block
    assert [sum("relative" in name for name, _ in block.named_parameters()) for block in drawn] == [1, 0, 0, 0, 0]


def test_modernbert_and_albert():
    model = model_of("modernbert")
    assert find_body(model).fixed == (0,)
    found = th.grow(model, operator("identity"), inputs=inputs_of("bert"))
    assert found.preservation.outputs < 1e-5
    kinds = model.config.layer_types
    assert found.model.config.layer_types == [kinds[source] for source in found.source]
    with pytest.raises(ValueError, match="share 1 body, as ALBERT's do"):
        th.grow(model_of("albert"), [0, 0])


class Wrapped(nn.Module):
    """A Hugging Face model inside of another, with a head that is tied to its embedding."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.embedding = inner, inner.get_input_embeddings()
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner.transformer(ids)[0])


def test_a_model_inside_of_another_is_built_anew():
    model = Wrapped(model_of("gpt2")).eval()
    found = th.grow(model, operator("identity"), inputs=inputs_of("gpt2")["input_ids"])
    grown = found.model
    assert found.preservation.outputs < 1e-5
    assert grown.embedding is grown.inner.get_input_embeddings()
    assert grown.head.weight is grown.embedding.weight
    assert grown.head.weight is not model.head.weight
    assert grown.inner.config.n_layer == 6


def test_models_that_their_configuration_does_not_make_are_refused():
    replaced = model_of("gpt2")
    for block in replaced.transformer.h:
        block.mlp.act = nn.ReLU()
    with pytest.raises(ValueError, match=r"was changed since it was built from its configuration, at transformer.h.0.mlp.act"):
        th.grow(replaced, operator())
    spliced = model_of("gpt2")
    spliced.transformer.h = nn.ModuleList(list(spliced.transformer.h)[:3])
    with pytest.raises(ValueError, match="could not be built from its configuration with 4 layers"):
        th.grow(spliced, [0, 0, 1, 2])
    quantised = model_of("gpt2")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantised weights"):
        th.grow(quantised, operator())


def test_layers_of_kinds_that_depend_on_their_number():
    """Every second layer has experts: a layer cannot move by one, and moves by two. Each kind has projections of its own."""
    import transformers

    sizes = {"num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3MoeConfig(**TEXT, **sizes, decoder_sparse_step=2)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"layers of several kinds, by their number.*multiple of the period"):
        th.grow(model, GrowthOperator.of([0, 1, None, 2, 3]))
    found = th.grow(model, operator("identity", 0, 2), inputs=inputs_of("llama"))
    assert found.preservation.outputs == 0.0
    assert found.model.model.layers[2].mlp.gate_proj.weight.all()
    assert found.model.model.layers[3].mlp.experts.gate_up_proj.any()
