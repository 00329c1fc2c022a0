"""The anchor probe on every form of data, and on what it must refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from theodolite.errors import NumericalWarning
from theodolite.measures.anchors import AnchorProbe, anchor_probe, probe_states
from theodolite.measures.anchors.probing.inputs import read, windows_for
from theodolite.models import gpt


@pytest.fixture(scope="module")
def model():
    return gpt(vocabulary=70, context=24, dim=12, depth=1, heads=2, seed=0)


IDS = torch.randint(70, (500,), generator=torch.Generator().manual_seed(2))


def all_values(model, ids, context):
    """log Z at every position, the plain way."""
    with torch.no_grad():
        return torch.cat([model(part[None])[0].double().logsumexp(-1) for part in ids.split(context)])


def test_text_is_cut_into_windows_and_every_position_counts(model):
    probe = anchor_probe(model, IDS, top=(0, 3))
    values = all_values(model, IDS, 24)
    assert probe.positions == 500
    torch.testing.assert_close(probe.sampled_log_z, values, rtol=1e-5, atol=0)
    assert torch.equal(probe.sampled_places, torch.arange(500) % 24)
    with torch.no_grad():
        logits = torch.cat([model(part[None])[0] for part in IDS.split(24)])
    loss = nn.functional.cross_entropy(logits[:-1], IDS[1:])
    assert probe.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)


def test_tokenizers_of_three_kinds(model):
    text = "a rose is a rose is a rose. " * 12

    class Encoder:
        def encode(self, text):
            return [ord(c) % 70 for c in text]

    probes = [anchor_probe(model, text, tokenizer=tokenizer, top=0) for tokenizer in (Encoder(), Encoder().encode)]
    assert probes[0].mse == probes[1].mse
    assert probes[0].positions == len(text)
    with pytest.raises(ValueError, match="Text needs tokenizer="):
        anchor_probe(model, text)
    with pytest.raises(ValueError, match="text is empty"):
        anchor_probe(model, "  ", tokenizer=Encoder())


def test_hugging_face_tokenizer(model):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {chr(97 + i): i for i in range(26)} | {"[UNK]": 26}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=8)
    probe = anchor_probe(model, "a b c d e f g " * 40, tokenizer=tokenizer, top=0)
    assert probe.positions == 280
    big = gpt(vocabulary=20, context=24, dim=12, depth=1, heads=2)
    with pytest.raises(ValueError, match=r"The tokenizer knows 27 tokens, but the output layer has 20 rows"):
        anchor_probe(big, "a b c d e f g " * 40, tokenizer=tokenizer)


def test_batches_of_all_forms_give_the_same(model):
    rows = IDS[:480].reshape(20, 24)
    reference = anchor_probe(model, rows, top=(0, 3))
    loader = DataLoader(TensorDataset(rows, rows), batch_size=6)
    forms = [rows.split(7), [(part, part) for part in rows.split(5)], loader, (rows, rows), list(loader)]
    for form in forms:
        probe = anchor_probe(model, form, top=(0, 3))
        assert probe.positions == 480
        assert probe.mse == pytest.approx(reference.mse, rel=1e-6)


def test_mappings_and_padding():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=70, n_positions=24, n_embd=12, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    rows = IDS[:480].reshape(20, 24)
    seen = torch.ones_like(rows)
    seen[:, 20:] = 0
    probe = anchor_probe(model, [{"input_ids": rows, "attention_mask": seen, "labels": rows}], top=0)
    assert probe.positions == 400
    with torch.no_grad():
        logits = model(rows[:, :20]).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 70), rows[:, 1:20].reshape(-1))
    assert probe.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert anchor_probe(model, {"input_ids": rows}, top=0).positions == 480


def test_windows_that_overlap_count_each_position_once(model):
    probe = anchor_probe(model, IDS, stride=10, top=0)
    assert probe.positions == 500
    readings = list(read(model, IDS, windows_for(model, stride=10)))
    kept = torch.cat([(r.args[0] if r.keep is None else r.args[0][r.keep]).reshape(-1) for r in readings])
    assert torch.equal(kept, IDS)  # in order, none twice
    assert anchor_probe(model, IDS, drop_first=1, top=0).positions == 500 - 21


def test_masked_positions_are_hidden_once_each():
    model = gpt(vocabulary=70, context=24, dim=12, depth=1, heads=2)
    windows = windows_for(model, mask_token=69)
    assert windows.kind == "masked"
    seen = []
    for reading in read(model, IDS[:48], replace(windows, batch_size=4)):
        (shown,) = reading.args
        assert bool((shown[reading.keep] == 69).all())
        assert torch.equal(shown[~reading.keep], reading.targets[~reading.keep])
        assert len(shown) <= 4
        seen.append(reading.keep)
    rows = torch.cat(seen).view(2, 7, 24)  # all rows of a window, then those of the next
    assert torch.equal(rows.long().sum(1), torch.ones(2, 24, dtype=torch.int64))


def test_max_positions_exclude_and_restrict(model):
    probe = anchor_probe(model, IDS, max_positions=333, top=(0, 3), exclude=[1, 2], restrict_vocab=60)
    assert (probe.positions, probe.vocabulary, probe.excluded) == (333, 60, 2)
    assert probe.held_out_positions == 66
    assert any("first 60 of 70" in note for note in probe.notes)
    assert probe.mass_mean[0] < 1
    with pytest.raises(ValueError, match=r"restrict_vocab: words must be one of 1 \.\. 70"):
        anchor_probe(model, IDS, restrict_vocab=71)


def test_save_and_load(model, tmp_path):
    probe = anchor_probe(model, IDS, top=(0, 3), anchors=2)
    probe.save(tmp_path / "probe")
    again = AnchorProbe.load(tmp_path / "probe")
    assert again.rows() == probe.rows()
    assert torch.equal(again.vectors, probe.vectors)
    assert again.geometry.dim == 12
    assert "log bulk partition function (top 3 removed)" in str(again)


# Bad input


def test_tokens_that_the_model_does_not_know(model):
    wrong = r"The data hold tokens from 0 to 70, but GPT embeds 0 \.\. 69: the tokenizer is not that of this model"
    for form in (torch.arange(71), torch.arange(71)[None, 50:], [torch.tensor([[0, 70]])]):
        with pytest.raises(ValueError, match=wrong.replace("from 0", r"from \d+")):
            anchor_probe(model, form)


def test_bad_arguments(model):
    for wrong, message in (
        ({"context": 25}, r"context must be 1 \.\. 24"),
        ({"stride": 30}, r"stride must be 1 \.\. context=24"),
        ({"held_out": 1.0}, "held_out must be a number"),
        ({"max_positions": 0}, "max_positions must be"),
        ({"chunk": 0}, "(chunk|sample) must be"),
        ({"top": 70}, "leaves no bulk"),
        ({"drop_first": 24}, "drop_first"),
        ({"exclude": [70]}, "exclude must hold"),
    ):
        with pytest.raises(ValueError, match=message):
            anchor_probe(model, IDS, **wrong)
    with pytest.raises(TypeError, match="data must be text"):
        anchor_probe(model, 3)
    with pytest.raises(TypeError, match="model must be"):
        anchor_probe(torch.randn(3, 3), IDS)
    for empty in ([], torch.empty(0, dtype=torch.int64), iter(())):
        with pytest.raises(ValueError, match="data is empty"):
            anchor_probe(model, empty)
    with pytest.raises(ValueError, match=r"states must be tensors \(N, 4\)"):
        probe_states([torch.randn(5, 3)], torch.randn(9, 4))
    with pytest.raises(ValueError, match=r"bias must be \(9,\)"):
        probe_states(torch.randn(50, 4), torch.randn(9, 4), torch.zeros(4))


def test_a_sentence_on_few_positions_speaks_of_those_held_out():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(45, 50, generator=generator, dtype=torch.float64)
    atoms = torch.randn(200, 50, generator=generator, dtype=torch.float64)
    with pytest.warns(NumericalWarning):
        probe = probe_states(states, atoms, top=0)
    assert probe.r2[0] > 0.999
    assert not probe.enough
    assert f"{100 * probe.r2[0]:.3g} %" not in probe.sentence()
    expected = f"explains {100 * probe.held_out_r2[0]:.3g} %" if probe.held_out_r2[0] > 0 else "No anchor vector predicts"
    assert expected in probe.sentence()
    assert "at the positions held out" in probe.sentence()
    with pytest.warns(NumericalWarning):
        probe = probe_states(states, atoms, top=0, held_out=0.0)
    assert "is open, 45 positions are too few for 50 dimensions" in probe.sentence()


def test_tokens_beyond_an_embedding_that_does_not_name_itself():
    with pytest.raises(ValueError, match=r"outside the embeddings of GPT .*tokens 10, positions 64"):
        anchor_probe(gpt(vocabulary=10, context=64, dim=16, depth=1), torch.full((500,), 12))


@pytest.mark.parametrize("form", ["equal", "ragged", "padded", "targets"])
def test_a_fifth_is_held_out_whatever_the_batches_look_like(form):
    generator = torch.Generator().manual_seed(0)
    widths = [40, 8, 8, 40, 16] * 4 if form == "ragged" else [24] * 20
    ids = [torch.randint(9, (3, width), generator=generator) for width in widths]
    model = gpt(vocabulary=9, context=64, dim=8, depth=1)
    batches = ids
    if form == "targets":
        hidden = [torch.rand(b.shape, generator=generator) < 0.7 for b in ids]
        batches = [(b, b.masked_fill(h, -100)) for b, h in zip(ids, hidden, strict=True)]
    if form == "padded":
        transformers = pytest.importorskip("transformers")
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=64, **ends)
        model = transformers.GPT2LMHeadModel(config)
        batches = [{"input_ids": b, "attention_mask": (torch.arange(24) < 10).long().expand_as(b)} for b in ids]
    probe = anchor_probe(model, batches, top=(0, 2))
    assert probe.held_out_positions == pytest.approx(probe.positions / 5, abs=20)
    if form != "ragged":
        assert "of all positions" in probe.split
