"""The anchor probe: planted anchors, the Gaussian world, streaming, the forms of data, bad input, a trained model."""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from theodolite import data
from theodolite.data.generators.word_models import exact_anchor_world, gaussian_dictionary_world
from theodolite.errors import NonFiniteError, NumericalWarning
from theodolite.measures.anchors import AnchorProbe, NormalEquations, anchor_probe, probe_states
from theodolite.measures.anchors.bulk import log_bulk_partition
from theodolite.measures.anchors.reading import read, windows_for
from theodolite.measures.anchors.reservoir import Reservoir
from theodolite.measures.anchors.stream import ProbeStream
from theodolite.models import gpt
from theodolite.models.pretrained import stories260k_from

# Least squares


def test_check_03_normal_equations_are_least_squares():
    states = 5 * torch.randn(3000, 20, dtype=torch.float64) @ torch.randn(20, 20, dtype=torch.float64) + 2
    atoms = 0.2 * torch.randn(400, 20, dtype=torch.float64) / 5
    top = (0, 10, 80)
    values = log_bulk_partition(states @ atoms.mT, top).bulk
    sums = NormalEquations(20, 3)
    for part in range(0, 3000, 700):
        sums.update(states[part : part + 700], values[part : part + 700])
    vectors = sums.solve()
    exact = torch.linalg.lstsq(states, values).solution
    difference = (states @ (vectors - exact)).norm() / (states @ exact).norm()
    assert float(difference) <= 1e-6
    residuals = (values - states @ vectors).square().mean(0)
    assert float((sums.mse(vectors) - residuals).abs().max()) <= 1e-8
    with_intercept = torch.linalg.lstsq(torch.cat([states, torch.ones(3000, 1).double()], 1), values)
    torch.testing.assert_close(sums.solve(intercept=True), with_intercept.solution, rtol=1e-5, atol=1e-8)
    probe = probe_states(states, atoms, top=top, sample=100)  # from the sums alone
    assert not probe.exact
    assert probe.mse == pytest.approx(residuals.tolist(), rel=1e-7)


def test_directions_that_the_states_do_not_hold():
    states = torch.randn(200, 5, dtype=torch.float64)
    states[:, 3] = states[:, 0]  # twice the same
    states[:, 4] = 0
    values = (states @ torch.arange(5.0).double())[:, None]
    sums = NormalEquations(5, 1)
    sums.update(states, values)
    vector = sums.solve()
    assert float((states @ vector - values).abs().max()) < 1e-9
    assert float(vector[4, 0]) == 0.0


def test_an_ill_conditioned_fit_is_as_exact_as_one_on_the_states():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    states[:, 5] = states[:, 0] + 1e-5 * states[:, 5]  # the Gram matrix has the condition 4e10
    values = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    exact = torch.linalg.lstsq(states, values).solution
    sums = NormalEquations(6, 1)
    sums.update(states, values)
    found = sums.solve(rows=(states, values))
    assert float((found - exact).norm() / exact.norm()) < 1e-8  # the sums alone: 1e-6
    atoms = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    probe = probe_states(states, atoms, top=0)
    anchor = torch.linalg.lstsq(states, (states @ atoms.mT).logsumexp(1, keepdim=True)).solution[:, 0]
    assert float((probe.vector(0) - anchor).norm() / anchor.norm()) < 1e-7


def test_variances_far_from_zero():
    values = 1e8 + 8 * torch.randn(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.cat([values, values - 1e8], dim=1)
    parts = [NormalEquations(1, 2) for _ in range(3)]
    for part, rows in zip(parts, values.split(1500), strict=True):
        part.update(torch.ones(len(rows), 1), rows)
    for sums in (parts[0] + parts[1] + parts[2], NormalEquations(1, 2) + parts[2] + (parts[1] + parts[0])):
        assert sums.mean.tolist() == pytest.approx(values.mean(0).tolist(), rel=1e-12)
        assert sums.variance.tolist() == pytest.approx(values.var(0, correction=0).tolist(), rel=1e-6)
        assert float(sums.constant_mse(torch.tensor([1e8, 0.0]).double())[0]) == pytest.approx(64, rel=0.1)


def test_check_04_an_exact_anchor_is_found():
    world = exact_anchor_world(seed=1)
    probe = probe_states(world.states, world.atoms, top=0, exclude=world.labels)
    assert probe.mse[0] <= 1e-18
    assert probe.max_error[0] <= 1e-12
    bulk = [j for j in range(len(world.atoms)) if j not in world.labels.tolist()]
    log_bulk = (world.states @ world.atoms[bulk].mT).logsumexp(-1)
    assert float((world.states @ probe.vector(0) - log_bulk).abs().max()) < 1e-9
    torch.testing.assert_close(probe.vector(0), world.anchor, rtol=1e-9, atol=1e-9)
    assert probe.excluded == 4


TABLE = {  # radius: mean square errors for top 0, 1, 8, 80, 800, and the variance for 80
    1: ((0.00039, 0.00030, 0.00021, 0.00010, 0.00005), 0.075),
    2: ((0.0166, 0.0077, 0.0035, 0.0012, 0.0003), 0.295),
    3: ((0.166, 0.056, 0.017, 0.0043, 0.0009), 0.692),
    4: ((0.619, 0.193, 0.049, 0.011, 0.0020), 1.197),
}


@pytest.mark.parametrize("radius", TABLE)
def test_check_05_the_gaussian_dictionary(radius):
    world = gaussian_dictionary_world(4000, 32, 6000, float(radius), seed=0)
    probe = probe_states(world.states.float(), world.atoms.float(), top=(0, 1, 8, 80, 800), geometry=False)
    mse, variance = TABLE[radius]
    for measured, reference in zip(probe.mse, mse, strict=True):
        assert reference / 2 <= measured <= 2 * reference
    assert variance / 2 <= probe.variance[3] <= 2 * variance
    assert all(b < a for a, b in zip(probe.mse, probe.mse[1:], strict=False))


def test_check_05_no_anchor_where_the_norm_varies():
    world = gaussian_dictionary_world(4000, 32, 6000, (0.5, 4.0), law="uniform", seed=0)
    probe = probe_states(world.states.float(), world.atoms.float(), top=(0, 80), geometry=False)
    assert probe.r2[1] < 0.3


# The stream


def small_world(count=900):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    states[:, -1] = 1
    return states, torch.randn(120, 6, generator=generator, dtype=torch.float64)


def test_streaming_equals_one_shot():
    states, atoms = small_world()
    bias = torch.randn(120, dtype=torch.float64)
    once = probe_states(states, atoms, bias, top=(0, 4, 30))
    for other in (
        probe_states(states, atoms, bias, top=(0, 4, 30), chunk=7),
        probe_states(states.split(37), atoms, bias, top=(0, 4, 30), chunk=10),
    ):
        torch.testing.assert_close(other.vectors, once.vectors)
        assert other.mse == pytest.approx(once.mse, rel=1e-9)
        assert other.max_error == pytest.approx(once.max_error, rel=1e-6)
    assert once.vectors.shape == (3, 7)  # [h; 1]
    assert once.intercept_mse == once.mse


def test_every_number_against_its_definition():
    states, atoms = small_world()
    probe = probe_states(states, atoms, top=(0, 5, 25), held_out=0.3)
    values = log_bulk_partition(states @ atoms.mT, (0, 5, 25)).bulk
    first, rest = values[:630], values[630:]
    vector = torch.linalg.lstsq(states[:630], first).solution
    outside = (rest - states[630:] @ vector).square().mean(0)
    everywhere = torch.linalg.lstsq(states, values).solution
    errors = (values - states @ everywhere).abs()
    mass = (values - values[:, :1]).exp()
    expected = {
        "mse": errors.square().mean(0),
        "variance": values.var(0, correction=0),
        "mean": values.mean(0),
        "low": values.amin(0),
        "high": values.amax(0),
        "held_out_mse": outside,
        "held_out_r2": 1 - outside / rest.var(0, correction=0),
        "max_error": errors.amax(0),
        "error_99": errors.quantile(0.99, dim=0),
        "constant_mse": torch.stack([(values[:, i] - math.log(120 - k)).square().mean() for i, k in enumerate((0, 5, 25))]),
        "mass_mean": mass.mean(0),
        "mass_1": mass.quantile(0.01, dim=0),
        "mass_min": mass.amin(0),
    }
    for name, exact in expected.items():
        assert getattr(probe, name) == pytest.approx(exact.tolist(), rel=1e-6), name
    assert probe.split == "the last 30 % of all positions"
    assert (probe.positions, probe.held_out_positions) == (900, 270)
    counts, edges = probe.histogram(5, bins=20)
    assert int(counts.sum()) == 900
    assert float(edges[0]) == pytest.approx(probe.low[1])
    assert len(probe.rows()) == 3


def test_unknown_length_holds_out_of_every_batch():
    states, atoms = small_world(1000)
    probe = probe_states((part for part in states.split(100)), atoms, top=0)
    assert probe.held_out_positions == 200
    assert probe.split == "the last 20 % of the positions of every batch"
    assert math.isnan(probe_states(states, atoms, top=0, held_out=0.0).held_out_mse[0])


def test_parts_of_batches_are_rounded_in_favour_of_the_fit():
    states, atoms = small_world(70)
    probe = probe_states((part for part in states.split(7)), atoms, top=0)
    assert probe.held_out_positions == 10  # of 7 positions 5.6, so 6, are for the fit
    assert probe.split == "the last 14.3 % of the positions of every batch"
    single = probe_states((part for part in states.split(1)), atoms, top=0)
    assert (single.held_out_positions, single.split) == (0, "nothing held out")


def test_targets_of_states():
    states, atoms = small_world(300)
    words = torch.randint(120, (300,))
    whole = probe_states(states, atoms, top=0, targets=words)
    assert whole.perplexity == pytest.approx(float(nn.functional.cross_entropy(states @ atoms.mT, words).exp()), rel=1e-9)
    arrays = probe_states(states.numpy(), atoms.numpy(), top=0, targets=words.numpy())
    in_parts = probe_states(states.split(70), atoms, top=0, targets=words)
    assert in_parts.perplexity == pytest.approx(whole.perplexity) == arrays.perplexity
    for wrong in (words[:299], words[:, None], words.double()):
        with pytest.raises(ValueError, match=r"targets must be whole numbers \(300,\), one word per state"):
            probe_states(states, atoms, top=0, targets=wrong)
    for wrong in (words[:299], torch.cat([words, words])):
        with pytest.raises(ValueError, match="targets must hold one word per state"):
            probe_states(states.split(70), atoms, top=0, targets=wrong)


def test_the_reservoir_is_a_uniform_sample():
    hits = torch.zeros(60)
    for seed in range(400):
        reservoir = Reservoir(12, seed)
        for part in torch.arange(60).split(7):
            reservoir.offer(part, 2 * part)
        held, doubled = reservoir.rows()
        assert torch.equal(doubled, 2 * held)
        assert len(held.unique()) == 12
        hits[held] += 1
    assert not reservoir.complete
    assert float(hits.min()) > 80 - 5 * math.sqrt(64)  # binomial(400, 1/5): 80 ± 8
    assert float(hits.max()) < 80 + 5 * math.sqrt(64)


def bytes_held(*roots):
    """Bytes of all tensors that an object refers to, through its attributes and lists."""
    seen, todo = {}, list(roots)
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            seen[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, list | tuple):
            todo += one
        elif type(one).__module__.startswith("theodolite."):
            todo += vars(one).values()
    return sum(seen.values())


def test_memory_does_not_grow_with_the_positions():
    stream = ProbeStream(torch.randn(50, 8), None, (0, 5), sample=300)
    held, alive = [], []
    for count in range(1, 81):
        states = torch.randn(500, 8)
        alive.append(weakref.ref(states))
        stream.add(states, torch.randint(50, (500,)), torch.arange(500))
        if count in (4, 80):
            held.append(bytes_held(stream))
    del states
    assert held[0] == held[1] < 500_000
    assert not any(ref() is not None for ref in alive)
    stream.train.rest = torch.zeros(1000)  # what was kept besides would be counted
    assert bytes_held(stream) == held[1] + 4000


def test_no_batch_outlives_its_turn():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 50))
    refs = []

    def batches():
        for _ in range(20):
            refs.append(weakref.ref(batch := torch.randn(100, 6)))
            yield batch
            del batch
            assert sum(ref() is not None for ref in refs) <= 3  # the first is looked at twice

    assert anchor_probe(model, batches(), top=0, sample=50).positions == 2000


# Data in all forms


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
    with pytest.raises(ValueError, match=r"restrict_vocab must be 1 \.\. 70"):
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
        ({"held_out": 1.0}, "held_out is a share"),
        ({"max_positions": 0}, "max_positions must be"),
        ({"chunk": 0}, "chunk and sample"),
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


def test_few_positions_and_numbers_that_are_none():
    states, atoms = small_world(50)
    with pytest.warns(NumericalWarning, match="50 positions for 6 dimensions: the in-sample error is too small by about 12%"):
        probe_states(states, atoms, top=0)
    states, atoms = small_world(100)
    states[40, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="position 40"):
        probe_states(states, atoms, top=0)


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


# A trained model


def test_stories260k():
    """What was measured once on the first 25,000 characters, frozen: numbers of a fixed model on a fixed text."""
    folder = Path(os.environ.get("THEODOLITE_DATA", ""))
    if not all((folder / name).is_file() for name in ("stories260k.npz", "tinystories_sample.txt.gz")):
        pytest.skip("needs stories260k and tinystories_sample in $THEODOLITE_DATA")
    net = stories260k_from(data.weights("stories260k", folder=folder), data.stories260k_config(folder=folder))
    text = data.load("tinystories_sample", folder=folder).train
    probe = anchor_probe(net, text[:25_000], tokenizer=data.stories260k_tokenizer(folder=folder))
    assert probe.top == (0, 1, 10, 102)
    assert probe.positions == 11_871
    assert all(b < a for a, b in zip(probe.mse, probe.mse[1:], strict=False))
    assert probe.mse == pytest.approx((13.362, 6.980, 4.057, 0.4587), rel=0.01)
    assert probe.held_out_mse == pytest.approx((13.771, 6.984, 4.060, 0.4648), rel=0.01)
    assert probe.intercept_mse == pytest.approx((2.096, 1.316, 0.7512, 0.1127), rel=0.01)
    assert probe.r2[3] == pytest.approx(0.649, abs=0.005)
    assert max(probe.r2[:3]) < 0  # without an intercept, worse than the mean until a fifth of the words is gone
    assert probe.perplexity == pytest.approx(4.191, rel=0.005)
    assert probe.geometry.cosine_mean == pytest.approx(0.3125, abs=0.002)


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
