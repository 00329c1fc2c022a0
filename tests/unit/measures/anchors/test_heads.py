"""Heads of all kinds of models: h Wᵀ + b is the logits, or there is a clear word about it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.errors import NumericalWarning
from theodolite.measures.anchors import anchor_probe, find_head
from theodolite.measures.anchors.probing.heads import states_of
from theodolite.models import bert, gpt
from theodolite.models.transformers import llama_decoder

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}


def hugging_face(name):
    tf = pytest.importorskip("transformers")
    llama_like = {**SMALL, **LAYERS, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    makers = {
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL, n_positions=32, n_embd=16, n_layer=2, n_head=2)),
        "opt": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(**SMALL, **LAYERS, hidden_size=16, ffn_dim=32, word_embed_proj_dim=8, max_position_embeddings=32)
        ),
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama_like, max_position_embeddings=32)),
        "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**llama_like, logit_scale=0.25)),
        "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**llama_like, final_logit_softcapping=0.5)),
        "bert": lambda: tf.BertForMaskedLM(
            tf.BertConfig(**SMALL, **LAYERS, hidden_size=16, intermediate_size=32, max_position_embeddings=32)
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        "bart": lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(**SMALL, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16,
                          decoder_attention_heads=2, decoder_ffn_dim=16, max_position_embeddings=32)
        ),
    }  # fmt: skip
    model = makers[name]()
    if name == "bart":
        model.final_logits_bias.normal_()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:  # away from logits near zero
                p.mul_(3)
    return model.eval()


def example(name):
    ids = torch.randint(3, VOCABULARY, (2, 12))
    if name in ("t5", "bart"):
        return (), {"input_ids": ids, "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    return (ids,), {}


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "bert", "t5", "cohere", "bart"])
def test_check_15_states_times_weight_are_the_logits(name):
    model = hugging_face(name)
    args, kwargs = example(name)
    with torch.no_grad():
        head = find_head(model, args, kwargs)
        states = head.states(states_of(model, head.module, args, kwargs))
        logits = model(*args, **kwargs).logits.reshape(-1, VOCABULARY)
        own = states @ head.weight.mT + (0 if head.bias is None else head.bias)
    assert float((own - logits).abs().max()) <= 1e-4 * max(1.0, float(logits.abs().max()))
    assert (head.bias is not None) == (name in ("bert", "bart"))
    assert states.shape[1] == (8 if name == "opt" else 16)  # OPT projects before the head, as OPT-350M does
    assert (head.scale == pytest.approx(0.25)) if name == "cohere" else head.scale == 1.0


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "bert", "t5"])
def test_probe_of_each_kind_and_the_model_is_left_as_found(name):
    model = hugging_face(name).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    ids = torch.randint(3, VOCABULARY, (460,), generator=torch.Generator().manual_seed(1))
    mask = {"mask_token": 4} if name == "bert" else {}
    probe = anchor_probe(model, ids, context=16, top=(0, 5), **mask)
    assert probe.positions == (230 if name == "t5" else 460)  # the encoder reads the other half
    assert probe.perplexity > 1
    assert model.training
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_check_16_a_capped_head_is_analysed_before_the_cap_with_a_warning():
    model = hugging_face("gemma2")
    with pytest.warns(NumericalWarning, match=r"not log-linear: logits capped at ±0\.5 .* before the cap"):
        probe = anchor_probe(model, torch.randint(3, VOCABULARY, (300,)), context=16, top=0)
    assert any("capped" in note for note in probe.notes)


def test_other_nonlinearities_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 20), nn.Softplus())
    with pytest.raises(
        ValueError, match=r"The head of Sequential is not log-linear: the model's logits differ from h Wᵀ \+ b by"
    ):
        anchor_probe(model, torch.randn(64, 4))


def test_log_probabilities_are_as_good_as_logits():
    body = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 20)]
    x = torch.randn(200, 4)
    plain, normalised = (anchor_probe(nn.Sequential(*body, *end), x, top=(0, 3)) for end in ([], [nn.LogSoftmax(-1)]))
    assert plain.mse == normalised.mse
    assert any("log-probabilities" in note for note in normalised.notes)


def test_our_own_models_and_plain_modules():
    ids = torch.randint(65, (500,), generator=torch.Generator().manual_seed(0))
    for model, more in (
        (gpt(depth=1, dim=16), {}),
        (gpt(depth=1, dim=16, tied=False), {}),
        (bert(vocabulary=65, depth=1, dim=16), {"mask_token": 3}),
        (llama_decoder(vocabulary=65, context=32, dim=16, hidden=32, depth=1, heads=2, kv_heads=1), {}),
        (nn.Sequential(nn.Embedding(65, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 65)), {"context": 50}),
    ):
        probe = anchor_probe(model, ids, top=(0, 3), **more)
        assert probe.positions == 500
        assert probe.vocabulary == 65


def test_the_head_can_be_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7)

        def forward(self, x):
            return {"logits": self.first(x) + 0 * self.second(x), "other": self.second(x)}

    model, x = Two(), torch.randn(80, 5)
    assert find_head(model, (x,), {}, "first").module is model.first
    assert find_head(model, (x,), {}, model.first).module is model.first
    with pytest.raises(ValueError, match=r"head='frist' is no submodule of Two\. Nearest names: first"):
        find_head(model, (x,), {}, "frist")


def test_no_linear_head():
    model = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(1, 6, 1), nn.Flatten())
    with pytest.raises(
        ValueError, match=r"has no linear output head: its output is .* '0' \(.*, 3\)\. Name the layer with head="
    ):
        anchor_probe(model, torch.randn(64, 1, 4))


def test_half_precision_is_widened_and_said():
    model = gpt(vocabulary=80, depth=1, dim=16, seed=0)
    ids = torch.randint(80, (600,))
    wide = anchor_probe(model, ids, top=(0, 8))
    narrow = anchor_probe(model.bfloat16(), ids, top=(0, 8))
    assert narrow.vectors.dtype == torch.float64
    assert any("bfloat16 weights widened to float32" in note for note in narrow.notes)
    assert narrow.mean[0] == pytest.approx(wide.mean[0], abs=0.02)
    values = narrow.sampled_values[:, 0]
    assert len(values.unique()) > 0.9 * len(values)  # not on the grid of bfloat16


def test_hooks_are_gone_after_an_exception():
    class Failing(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 30)

        def forward(self, x):
            Failing.calls += 1
            if Failing.calls == 3:
                raise RuntimeError("on purpose")
            return self.head(self.body(x))

    model = Failing().train()
    with pytest.raises(ValueError, match="on purpose"):
        anchor_probe(model, [torch.randn(10, 4) for _ in range(4)])
    assert model.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Several(nn.Module):
    """A head that is called more than once; `use` says which calls make the logits, or how."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.use = nn.Embedding(30, 6), nn.Linear(6, 30), use

    def forward(self, x):
        h = self.table(x)
        found = [self.head(h), self.head(torch.tanh(2 * h)), self.head(input=h + 1)]
        return found[self.use] if isinstance(self.use, int) else self.use(found)


@pytest.mark.parametrize("named", [None, "head"])
@pytest.mark.parametrize("use", [0, 1, 2])
def test_of_several_calls_of_the_head_the_one_that_makes_the_logits(use, named):
    model, ids = Several(use), torch.randint(30, (600,), generator=torch.Generator().manual_seed(0))
    probe = anchor_probe(model, ids, context=20, top=0, head=named)
    logits = model(ids).detach()
    torch.testing.assert_close(probe.sampled_log_z, logits.double().logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert probe.perplexity == pytest.approx(float(nn.functional.cross_entropy(logits[:-1], ids[1:]).exp()), rel=1e-5)


def test_calls_of_the_head_that_make_no_logits_or_the_same():
    ids = torch.arange(30).repeat(5)
    with pytest.raises(ValueError, match=r"not log-linear.* at the nearest of 3 calls"):
        anchor_probe(Several(lambda found: found[0] * found[1]), ids, context=10)
    model = Several(0)
    nn.init.zeros_(model.head.weight)
    with pytest.raises(ValueError, match="is called 3 times in a forward pass of Several, and different states give the same"):
        anchor_probe(model, ids, context=10)


def test_the_same_states_twice_are_no_riddle():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 6), nn.Linear(6, 30)

        def forward(self, x):
            self.head(self.table(x))
            return self.head(self.table(x))

    assert anchor_probe(Twice(), torch.arange(30).repeat(5), context=10, top=0).positions == 150


def test_an_embedding_that_is_announced_as_the_head():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, 6)

        def get_output_embeddings(self):
            return self.table

        def forward(self, x):
            return nn.functional.linear(self.table(x).tanh(), self.table.weight)

    for named in (None, "table"):
        with pytest.raises(ValueError, match=r"The head Embedding was called with whole numbers .* it reads tokens, no states"):
            anchor_probe(Tied(), torch.arange(30).repeat(5), context=10, head=named)


def test_the_perplexity_of_a_capped_model_is_its_own():
    model = hugging_face("gemma2")
    ids = torch.randint(3, VOCABULARY, (20, 16), generator=torch.Generator().manual_seed(0))
    with pytest.warns(NumericalWarning, match="capped"):
        probe = anchor_probe(model, ids, top=0)
    with torch.no_grad():
        logits = model(ids).logits
    assert float(logits.abs().max()) <= 0.5
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    assert probe.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert any("the perplexity is with it" in note for note in probe.notes)
