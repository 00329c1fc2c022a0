"""What the spike figures are made of: points, networks, runs with their kernels, and what is measured on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.experiments import Params
from theodolite.experiments.catapult_features import catapults, critical_rates, runs
from theodolite.experiments.catapult_features.runs import RMS, Points, constant, descend, network, points

SMALL = Params(fcn=16, cnn=4, shallow=32, four=8, wrn=1, vit=8, patch=4, myrtle=4)


def test_points_are_balanced_scaled_and_say_where_they_come_from():
    pair = points("cifar10", 20, source="stand-in")
    assert pair.x.shape == (20, 3, 8, 8)
    assert pair.y.shape == (20, 1)
    assert float(pair.y.sum()) == 0
    assert pair.origin == "generated images"
    other = points("svhn", 20, source="stand-in")
    assert not torch.equal(pair.x, other.x)
    several = points("cifar10", 22, classes=4, source="stand-in")
    assert several.outputs == 4
    assert several.y.sum(0).tolist() == [6, 6, 5, 5]
    assert torch.equal(several.y.sum(1), torch.ones(22))
    for sample in (pair, several):
        assert float(sample.x.square().mean().sqrt()) == pytest.approx(RMS, rel=1e-5)
    target = points("rank-2", 10, dim=7, source="stand-in")
    assert target.x.shape == (10, 7)
    assert torch.equal(points("cifar10", 20, source="stand-in").x, pair.x)


@pytest.mark.parametrize("kind", ["2-FCN", "4-FCN", "5-FCN", "5-CNN", "WRN", "ViT", "Myrtle-5"])
@pytest.mark.parametrize("default", [False, True])
def test_networks_have_one_kernel_per_sample_and_no_output_bias_to_train(kind, default):
    sample = points("cifar10", 4, source="stand-in")
    model = network(kind, (3, 8, 8), 1, SMALL, default=default, seed=0)
    assert model(sample.x).shape == (4, 1)
    assert th.tangent_kernel(model, sample.x).shape == (4, 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if not default:
        assert not trained & {"fc1.bias", "head.bias", "fc2.bias", "fc4.bias", "fc5.bias"} or kind == "Myrtle-5"
    again = network(kind, (3, 8, 8), 1, SMALL, default=default, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_unknown_networks_are_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        network("6-FCN", (4,), 1, SMALL, seed=0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_run_is_that_of_plain_sgd_and_its_rows_are_those_of_the_weights(outputs):
    torch.manual_seed(0)
    sample = Points(torch.randn(12, 5).double(), torch.randn(12, outputs).double(), "here")
    model, twin = (network("2-FCN", (5,), outputs, SMALL, seed=0).double() for _ in range(2))
    rows = list(descend(model, sample, constant(0.7), steps=7, batch_size=4, ranks=(1, 2), seed=3))
    generator = torch.Generator().manual_seed(3)
    order = torch.cat([torch.randperm(12, generator=generator) for _ in range(3)]).split(4)
    whole = th.Problem(twin, nn.MSELoss(), (sample.x, sample.y))
    assert rows[0]["rate"] == pytest.approx(0.7 * th.critical_learning_rate(whole, by="gauss_newton", tol=1e-10).value, rel=1e-6)
    for row, batch in zip(rows, order, strict=False):
        assert row["loss"] == pytest.approx(whole.loss(), rel=1e-9)
        assert row["top_2"] + row["rest_2"] == pytest.approx(row["loss"], rel=1e-9)
        if "rate" not in row:
            break
        part = th.Problem(twin, nn.MSELoss(), (sample.x[batch], sample.y[batch]))
        critical = th.critical_learning_rate(part, by="gauss_newton", tol=1e-10).value
        assert row["batch_critical"] == pytest.approx(critical, rel=1e-6)
        assert row["exceeded"] == (row["rate"] > critical)
        gradient = part.gradient()
        with torch.no_grad():
            for p, g in zip(twin.parameters(), part.split(gradient).values(), strict=True):
                p.sub_(rows[0]["rate"] * g)
    assert len(rows) == 8
    assert "rate" not in rows[-1]


def test_a_run_stops_at_its_goal_and_says_when_it_diverged():
    torch.manual_seed(0)
    sample = Points(torch.randn(8, 3).double(), torch.zeros(8, 1).double(), "here")
    line = nn.Linear(3, 1, bias=False).double()
    rows = list(descend(line, sample, constant(2.0), steps=200, ranks=(1,)))
    assert rows[-1] == {"step": rows[-1]["step"], "loss": None, "diverged": True}
    good = list(descend(nn.Linear(3, 1, bias=False).double(), sample, constant(0.5), steps=500, ranks=(1,), until=1e-4))
    assert good[-1]["loss"] < 1e-4 <= good[-2]["loss"]


def test_large_kernels_are_split_by_their_top_vectors_only(monkeypatch):
    torch.manual_seed(0)
    kernel = torch.randn(30, 30).double()
    kernel, residual = kernel @ kernel.T, torch.randn(30, 1).double()
    rows = torch.arange(20)
    dense = runs.loss_and_kernel(kernel, residual, (1, 3)), runs.batch_critical(kernel, rows)
    monkeypatch.setattr(runs, "DENSE", 10)
    for a, b in zip(dense[0].values(), runs.loss_and_kernel(kernel, residual, (1, 3)).values(), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert runs.batch_critical(kernel, rows) == pytest.approx(dense[1], rel=1e-6)


def run_of(losses: list[float], tops: list[float], kernel: list[float], **shared) -> list[dict]:
    shared = {"panel": "p", "seed": 0, "ratio": 1.5, "diverged": False, **shared}
    return [
        {**shared, "step": i, "loss": x, "top_1": t, "rest_1": x - t, "kernel": k}
        for i, (x, t, k) in enumerate(zip(losses, tops, kernel, strict=True))
    ]


def test_the_share_of_a_rise_counts_from_the_lowest_loss_before_the_peak():
    rows = run_of([1.0, 0.5, 2.5, 0.4], [0.8, 0.4, 2.2, 0.1], [3.0, 3.0, 2.0, 1.0])
    assert catapults.share_of_rise(rows, 1) == pytest.approx(1.8 / 2.0)
    assert catapults.peak_over_start(rows) == 2.5
    assert catapults.end_over_start()(rows) == 0.4
    assert catapults.end_over_start("kernel")(rows) == pytest.approx(1 / 3)
    assert catapults.highest_spike(rows) == 5.0
    assert catapults.kernel_falls()(rows) == 1.0
    assert catapults.share_of_spikes(1)(rows) == pytest.approx(0.9)
    assert catapults.rises_of_rest(rows, 1) == 1  # 0.1 to 0.3
    with pytest.raises(ValueError, match="diverged"):
        catapults.of_runs(catapults.peak_over_start)(
            [*rows, {"panel": "p", "seed": 0, "ratio": 1.5, "step": 4, "loss": None, "diverged": True}]
        )


def test_the_match_table_of_several_runs_is_their_sum():
    first = [{**row, "exceeded": e} for row, e in zip(run_of([1, 2, 1], [0] * 3, [1] * 3), (True, False, None), strict=True)]
    second = [
        {**row, "exceeded": e} for row, e in zip(run_of([1, 3, 4], [0] * 3, [1] * 3, seed=1), (True, False, None), strict=True)
    ]
    found = critical_rates.table([*first, *second])
    assert (found.both, found.only_up, found.only_exceeded, found.neither) == (2, 1, 0, 1)
    assert critical_rates.table([*first, *second], slack=0.5).only_up == 0


def test_raises_are_measured_on_their_own_flights():
    run = run_of([1.0, 0.5, 0.5, 9.0, 0.4, 0.3], [0.5, 0.2, 0.2, 8.6, 0.1, 0.1], [4.0, 4.0, 4.0, 3.0, 2.0, 2.0])
    rows = [{"part": "run", **row, "top_10": row["top_1"]} for row in run]
    shared = {"part": "event", "panel": "p", "seed": 0, "first_critical": 2.0}
    undone = {**shared, "step": 0, "end": None, "rolled_back": True, "kernel_before": 2.0, "kernel_after": None, "raised_to": 9.0}
    good = {**shared, "step": 1, "end": 4, "rolled_back": False, "kernel_before": 2.0, "kernel_after": 1.0, "raised_to": 6.0}
    late = {**good, "step": 4, "end": None, "kernel_before": 1.5, "kernel_after": None, "raised_to": 8.0}
    assert catapults.spikes_of_raises([*rows, undone, good]) == 1
    _, kernel, final, _, _ = (claim.measure for claim in catapults.Figure44.claims)
    assert kernel([*rows, undone, good, late]) == 0.5  # the late one has not settled
    assert final([*rows, undone, good, late]) == 4.0
    assert catapults.shares_in_top([*rows, undone, good]) == [pytest.approx(8.4 / 8.5)]


def test_check_09_the_doubled_sample_is_four_times_steeper():
    rows = list(critical_rates.Figure45().run({"width": 2000, "n": 100, "steps": 1, "seed": 0}))
    assert rows[0]["critical_steep"] / rows[0]["critical_others"] == pytest.approx(0.25, rel=0.1)
    assert rows[0]["critical_others"] == pytest.approx(200, rel=0.05)  # K(x, x) = ‖x‖²/(2d)
