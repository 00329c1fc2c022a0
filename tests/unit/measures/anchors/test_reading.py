"""Data in all forms: what is read of them, in which order, and which positions are held out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from theodolite.measures.anchors import anchor_probe
from theodolite.measures.anchors.probing.inputs import read, windows_for
from theodolite.models import gpt

WORDS = 40
IDS = torch.randint(WORDS, (480,), generator=torch.Generator().manual_seed(3))
ROWS = IDS.view(20, 24)


@pytest.fixture(scope="module")
def model():
    return gpt(vocabulary=WORDS, context=24, dim=8, depth=1, heads=2, seed=0)


class Pooled(nn.Module):
    """One state per sequence."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


# What is held out


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_one_state_per_sequence(batch_size):
    ids = torch.randint(WORDS, (40, 6), generator=torch.Generator().manual_seed(0))
    probe = anchor_probe(Pooled(), ids, top=0, batch_size=batch_size)
    assert (probe.positions, probe.held_out_positions) == (40, 8)
    assert probe.split == "the last 20 % of all positions"
    assert torch.equal(probe.sampled_numbers, torch.arange(40))
    with pytest.raises(ValueError, match=r"drop_first=1 leaves out positions of sequences .* not a state for each"):
        anchor_probe(Pooled(), ids, drop_first=1)


def test_one_state_per_window_of_running_text():
    probe = anchor_probe(Pooled(), IDS[:471], context=8, top=0, max_positions=50)
    assert (probe.positions, probe.held_out_positions) == (50, 10)


def test_a_generator_of_batches_whose_length_nobody_knows(model):
    probe = anchor_probe(model, (part for part in ROWS.split(4)), top=0)
    assert probe.held_out_positions == 5 * 19  # of 96 positions 76.8, so 77, are for the fit
    assert probe.split == "the last 19.8 % of the positions of every batch"


@pytest.mark.parametrize("limit", [None, 333])
@pytest.mark.parametrize("form", ["text", "rows", "overlapping"])
def test_windows_of_a_masked_model_are_held_out_as_a_whole(model, form, limit):
    data, more = (ROWS if form == "rows" else IDS), {"stride": 10} if form == "overlapping" else {}
    probes = [anchor_probe(model, data, mask_token=0, top=0, batch_size=b, max_positions=limit, **more) for b in (1, 5, 64)]
    assert len({probe.held_out_positions for probe in probes}) == 1
    for probe in probes[1:]:
        torch.testing.assert_close(probe.sampled_values, probes[0].sampled_values, rtol=1e-4, atol=1e-5)
        assert torch.equal(probe.sampled_places, probes[0].sampled_places)
    total, held = probes[0].positions, probes[0].held_out_positions
    assert total == (limit or 480)
    assert held == pytest.approx(total / 5, abs=12)
    window = 10 if form == "overlapping" else 24
    first = 24 if form == "overlapping" else 0
    assert (total - held - first) % window == 0  # the border is where a window ends


# What is read


def test_numbers_in_lists_and_arrays(model):
    reference, text = anchor_probe(model, ROWS, top=0), anchor_probe(model, IDS, top=0)
    rows = (ROWS.tolist(), ROWS.numpy(), ROWS.numpy().astype(np.uint16), [ROWS.numpy()], [part.numpy() for part in ROWS.split(6)])
    for form in rows:
        probe = anchor_probe(model, form, top=0)
        assert probe.mse == pytest.approx(reference.mse, rel=1e-6)
        assert probe.perplexity == pytest.approx(reference.perplexity, rel=1e-6)
    for form in (IDS.tolist(), IDS.numpy(), tuple(IDS.tolist())):
        assert anchor_probe(model, form, top=0).mse == text.mse
    pair = anchor_probe(model, (ROWS.numpy(), ROWS.numpy()), top=0)
    assert pair.mse == anchor_probe(model, (ROWS, ROWS), top=0).mse


def test_a_list_of_texts(model):
    parts = [IDS[:100], IDS[100:103], IDS[103:]]
    for form in (parts, [part.tolist() for part in parts], (part for part in parts)):
        probe = anchor_probe(model, form, top=0)
        assert probe.positions == 480
        assert probe.held_out_positions == pytest.approx(96, abs=20)
    values = []
    with torch.no_grad():
        for part in parts:
            values += [model(window[None])[0].double().logsumexp(-1) for window in part.split(24)]
    torch.testing.assert_close(probe.sampled_log_z, torch.cat(values), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="The data hold tokens from"):
        anchor_probe(model, [IDS, IDS + WORDS])


def test_a_loader_without_targets_has_a_perplexity(model):
    reference = anchor_probe(model, ROWS, top=0)
    probe = anchor_probe(model, DataLoader(TensorDataset(ROWS), batch_size=5), top=0)
    assert probe.perplexity == pytest.approx(reference.perplexity, rel=1e-6)


def test_targets_of_a_pair_are_taken_as_they_are(model):
    after = torch.cat([ROWS[:, 1:], torch.full((20, 1), -100)], dim=1)
    shifted = anchor_probe(model, (ROWS, after), top=0)
    assert shifted.positions == 460
    assert shifted.perplexity == pytest.approx(anchor_probe(model, ROWS, top=0).perplexity, rel=1e-6)
    halves = anchor_probe(model, (ROWS[:10], ROWS[10:]), top=0)
    assert halves.positions == 240
    assert anchor_probe(model, [ROWS[:10], ROWS[10:]], top=0).positions == 480


def hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_positions=24, n_embd=8, n_layer=1, n_head=2, **ends)
    )


def test_mappings_of_lists():
    model = hugging_face()
    encoding = pytest.importorskip("transformers").BatchEncoding
    reference = anchor_probe(model, {"input_ids": ROWS}, top=0)
    seen = torch.ones_like(ROWS).tolist()
    one = {"input_ids": ROWS[0].tolist(), "attention_mask": seen[0]}
    for form in (
        {"input_ids": ROWS.tolist()},
        encoding({"input_ids": ROWS.tolist(), "attention_mask": seen}),
        [{"input_ids": row.tolist()} for row in ROWS],
    ):
        probe = anchor_probe(model, form, top=0)
        assert probe.mse == pytest.approx(reference.mse, rel=1e-6)
        assert probe.perplexity == pytest.approx(reference.perplexity, rel=1e-6)
    with pytest.warns(Warning, match="24 positions for 8 dimensions"):
        assert anchor_probe(model, encoding(one), top=0).positions == 24
    with pytest.raises(ValueError, match=r"'input_ids' of batch 0 holds sequences of different lengths\. Pad them"):
        anchor_probe(model, {"input_ids": [[1, 2, 3], [4, 5]]})


@pytest.mark.parametrize("form", ["rows", "batches", "pair", "mapping", "padded"])
def test_first_positions_are_left_out_of_every_form(model, form):
    after = torch.cat([ROWS[:, 1:], torch.full((20, 1), -100)], dim=1)
    seen = (torch.arange(24) >= 4).long().expand(20, 24)  # padding on the left
    data, per_row = {
        "rows": (ROWS, 21),
        "batches": (list(ROWS.split(6)), 21),
        "pair": ((ROWS, after), 20),
        "mapping": ({"input_ids": ROWS}, 21),
        "padded": ({"input_ids": ROWS, "attention_mask": seen}, 17),
    }[form]
    net = hugging_face() if form in ("mapping", "padded") else model
    probe = anchor_probe(net, data, top=0, drop_first=3)
    assert probe.positions == 20 * per_row
    assert int(probe.sampled_places.min()) == (7 if form == "padded" else 3)
    assert probe.held_out_positions == probe.positions // 5


def test_first_positions_of_what_has_none():
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 20))
    with pytest.raises(ValueError, match=r"drop_first=1 leaves out the first positions of sequences .* batch 0 has none"):
        anchor_probe(plain, torch.randn(50, 4), drop_first=1)


def test_readings_can_be_read_again(model):
    for data in (IDS, ROWS, [IDS, IDS[:50]], [ROWS, ROWS[:3]]):
        source = read(model, data, windows_for(model, drop_first=2))
        assert [r.samples for r in source] == [r.samples for r in source]
