"""The anchor probe: planted anchors, the Gaussian world, streaming, a trained model."""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from theodolite import data
from theodolite.data.generators import exact_anchor_world, gaussian_dictionary_world
from theodolite.errors import NonFiniteError, NumericalWarning
from theodolite.measures.anchors import anchor_probe, probe_states
from theodolite.measures.anchors.probing.bulk import log_bulk_partition
from theodolite.measures.anchors.probing.streams import ProbeStream, Reservoir
from theodolite.models.pretrained import stories260k_from


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


def test_few_positions_and_numbers_that_are_none():
    states, atoms = small_world(50)
    with pytest.warns(NumericalWarning, match="50 positions for 6 dimensions: the in-sample error is too small by about 12%"):
        probe_states(states, atoms, top=0)
    states, atoms = small_world(100)
    states[40, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="position 40"):
        probe_states(states, atoms, top=0)


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
