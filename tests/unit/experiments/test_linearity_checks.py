"""Acceptance checks of the transition to linearity that run in seconds, numbered as in the spec; larger sizes are claims.

1 and 2 are in tests/unit/models/test_dag.py; 3, 11, 12 and 16 in tests/unit/measures/test_linearity.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from theodolite.data import Dataset
from theodolite.experiments.catapult import regimes
from theodolite.experiments.catapult.theorems import Theorems, early
from theodolite.experiments.linearity import bounds, training
from theodolite.experiments.linearity.ensembles import INPUTS, Ensemble, gaussian_inputs
from theodolite.experiments.linearity.hessian import HessianNorms, HessianScaling, at_512, narrow_over_plain, slope
from theodolite.experiments.linearity.training import descend
from theodolite.models.dag import DagNetwork, fcn_graph

WIDTHS = (16, 64, 256)


@functools.cache
def norms(family, widths=WIDTHS, seeds=10, distance=0.0):
    jobs = [{"family": family, "m": m, "distance": distance, "seeds": seeds, "steps": 24, "seed": 0} for m in widths]
    return [row for job in jobs for row in HessianNorms().run(job)]


def test_check_04_the_hessian_shrinks_with_the_width():
    rows = norms("three layers")
    assert -0.65 <= slope("three layers")(rows) <= -0.33
    assert 0.08 <= at_512(rows) <= 0.16


def test_check_05_also_away_from_the_initialisation():
    assert -0.65 <= slope("three layers", 1.0)(norms("three layers", distance=1.0)) <= -0.30


def test_check_06_the_smallest_in_degree_rules():
    assert -0.65 <= slope("m, m²")(norms("m, m²", (8, 16, 24))) <= -0.20


@pytest.mark.parametrize(
    ("family", "widths"), [("skip", WIDTHS), ("dense", WIDTHS), ("dropped edges", (32, 512)), ("convolution", WIDTHS)]
)
def test_check_07_other_architectures(family, widths):
    """Ten inputs are read by every layer of the dense ones: in-degrees with dropped edges hardly grow below 100."""
    assert slope(family)(norms(family, widths, seeds=5)) <= -0.25


def test_check_08_bottlenecks():
    narrow = norms("narrow first")
    assert -0.15 <= slope("narrow first")(narrow) <= 0.15
    assert slope("two bottlenecks")(norms("two bottlenecks")) <= -0.3


@pytest.mark.slow
def test_check_08_a_narrow_layer_beside_none():
    assert narrow_over_plain(norms("narrow first", (512,)) + norms("three layers", (512,))) >= 4.0


def test_check_09_blocks():
    assert slope("narrow first, upper blocks")(norms("narrow first, upper blocks")) <= -0.25
    assert slope("narrow first")(norms("narrow first")) >= -0.15


def test_check_10_an_activation_on_the_output():
    assert slope("tanh output")(norms("tanh output")) > -0.2
    assert slope("two layers")(norms("two layers")) < -0.3


def test_check_13_the_gradient_bound():
    rows = [
        {"part": "gradient", **row}
        for depth in (2, 3, 4)
        for row in training._gradient({"depth": depth, "m": 512, "networks": 5, "samples": 200, "seed": 0})
    ]
    assert all(row["squared"] >= 2.0 ** -row["depth"] for row in rows)
    assert training.last_layer(rows) <= 0.1


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_check_14_the_kernel_drifts_less_in_wide_networks(activation):
    experiment = training.Figure22()
    p = experiment.parameters("tiny").but(widths=(8, 32, 128, 512), seeds=3, steps=2000, every=50)
    rows = [row for job in experiment.jobs(p) if job["activation"] == activation for row in experiment.run(job)]
    assert training.spearman(activation)(rows) <= -0.9
    assert -1.2 <= training.drift_slope(activation)(rows) <= -0.35


def test_check_15_wide_networks_descend_as_their_kernel_says():
    rows = [
        {"part": "descent", **row}
        for m in (128, 1024)
        for row in training._descent(
            {"m": m, "hidden": 1, "output": "identity", "samples": 10, "seeds": 3, "steps": 3000, "seed": 0}
        )
        if "part" not in row
    ]
    assert training.widest_gap(rows) <= 0.1
    assert training.spread_of_ways(rows) < 2.0


def test_check_17_the_matrix_gaussian_series():
    experiment = bounds.Lemmas()
    p = experiment.parameters("tiny")
    rows = [row for job in experiment.jobs(p) if job["part"] == "series" for row in experiment.run(job)]
    assert p.draws >= 2000
    assert len(rows) >= 3
    assert all(row["frequency"] <= row["bound"] + 3 * row["error"] for row in rows if row["part"] == "tail")


# What a run is measured on


def test_a_network_is_measured_up_to_its_own_convergence():
    """In company a network that is done first keeps descending, but its drift, way and end are those it has alone."""
    networks = [DagNetwork(fcn_graph(INPUTS, [m]), seed=s) for s, m in ((0, 24), (1, 24))]
    x = gaussian_inputs(range(2), 6, INPUTS)
    y = torch.ones(2, 6, dtype=torch.float64)
    y[1, ::2] = -1.0
    settings = {"steps": 4000, "until": 1e-4, "every": 10}
    together = descend(Ensemble(networks), x, y, **settings)
    assert len(set(together.ended.tolist())) == 2
    for i, network in enumerate(networks):
        alone = descend(Ensemble([network]), x[i : i + 1], y[i : i + 1], **settings)
        assert int(alone.ended[0]) == int(together.ended[i])
        for name in ("drift", "moved", "lambda_min"):
            assert float(getattr(alone, name)[0]) == pytest.approx(float(getattr(together, name)[i]), rel=1e-9), name


def test_images_have_the_size_asked_for(monkeypatch):
    pixels = torch.randint(0, 256, (60, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    labels = torch.arange(60) % 3
    files = Dataset(pixels, labels, pixels[:6], labels[:6], classes=("airplane", "automobile", "bird"), name="cifar10")
    monkeypatch.setattr(regimes.data, "load", lambda name: files)
    x, y, origin = regimes.twenty_images("either", 8, 0)
    assert origin == "cifar10"
    assert x.shape == (20, 3 * 8 * 8)
    assert set(y.tolist()) == {-1.0, 1.0}
    assert regimes.twenty_images("either", 32, 0)[0].shape == (20, 3 * 32 * 32)


def test_an_early_phase_must_have_been_seen():
    runs = [{"part": "regimes", "m": 10, "ratio": 2.2, "growth": growth} for growth in (0.01, None, None)]
    with pytest.raises(ValueError, match="seen in 1 of 3 runs"):
        early(10)(runs)
    assert early(10)(runs[:2]) == 0.01


def test_claims_that_hold_by_algebra_say_so():
    texts = [claim.text for sheet in (Theorems, training.PolyakLojasiewicz, HessianScaling) for claim in sheet.claims]
    for start in ("F6: after", "F7: ηλ after", "F7: the map", "F7: equilibria", "T12: |Δλ_min|", "T4: the norm of the third"):
        found = [text for text in texts if text.startswith(start)]
        assert found
        assert all("check" in text and "code" in text for text in found), start
