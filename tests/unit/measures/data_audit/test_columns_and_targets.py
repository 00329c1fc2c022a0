"""Scales of inputs and targets: moments against dense ones, descent in closed form against descent, the first layer found."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.data_audit import audit_columns, audit_targets
from theodolite.measures.data_audit.columns import _descended, first_inputs, largest_eigenvalue, standardiser, whitener


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(x: torch.Tensor, y: torch.Tensor, *before: nn.Module) -> th.Problem:
    return th.Problem(nn.Sequential(*before, nn.Linear(x.shape[1], 1)), nn.MSELoss(), (x.float(), y.float()))


def test_the_largest_eigenvalue_is_that_of_the_dense_second_moment():
    x = normal(80, 5) * torch.tensor([1.0, 3.0, 0.1, 1.0, 20.0]) + 2.0
    phi = torch.cat([torch.ones(80, 1), x], dim=1)
    dense = torch.linalg.eigvalsh(phi.T @ phi / 80)[-1]
    assert largest_eigenvalue(x) == pytest.approx(float(dense), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 7, 200])
def test_descent_in_closed_form_is_descent(steps):
    x, y = normal(60, 3) * torch.tensor([1.0, 4.0, 0.3]) + 1.0, normal(60, 2, seed=1)
    phi = torch.cat([torch.ones(60, 1, dtype=torch.float64), x], dim=1)
    top = float(torch.linalg.eigvalsh(phi.T @ phi)[-1])
    w = torch.zeros(4, 2, dtype=torch.float64)
    for _ in range(steps):
        w = w - phi.T @ (phi @ w - y) / top
    fallen = float(y.square().sum() - (y - phi @ w).square().sum())
    assert _descended(x, y, steps) == pytest.approx(fallen, rel=1e-9)
    least = torch.linalg.lstsq(phi, y).solution
    assert _descended(x, y, float("inf")) == pytest.approx(float(y.square().sum() - (y - phi @ least).square().sum()), rel=1e-9)


def test_raw_columns_are_slow_by_what_the_second_moment_says():
    x = normal(400, 3) * torch.tensor([1.0, 1.0, 1000.0])
    found = audit_columns(linear(x, x[:, :1] + x[:, 1:2]))
    spread = x.std(0, correction=0)
    standard = (x - x.mean(0)) / spread
    expected = largest_eigenvalue(x) / spread[0] ** 2 / largest_eigenvalue(standard)
    assert found.table[0]["slower"] == pytest.approx(float(expected), rel=1e-4)
    assert found.table[2]["slower"] < 2
    assert found.reached < 0.01
    assert found.reached_standardised > 0.99


def test_flags_and_sparse_columns_have_no_scale_and_constant_ones_none():
    x = torch.cat([nn.functional.one_hot(torch.arange(60) % 3).double(), torch.ones(60, 1), normal(60, 1)], dim=1)
    kinds = [row["kind"] for row in audit_columns(linear(x, x[:, :1])).table]
    assert kinds == ["few values", "few values", "few values", "constant", "plain"]


@pytest.mark.parametrize(
    ("before", "layer", "normalised"),
    [((), "0", False), ((nn.BatchNorm1d(2),), "0", True), ((nn.Identity(), nn.Tanh()), "2", False)],
)
def test_what_the_first_layer_gets_is_judged(before, layer, normalised):
    x = 500 * normal(50, 2)
    found = audit_columns(linear(x, x[:, :1], *before))
    assert (found.layer, found.normalised) == (layer, normalised)
    assert found.size == pytest.approx(float(torch.tanh(x).square().mean().sqrt()) if layer == "2" else 500, rel=0.2)


def test_channels_of_images_are_columns_and_tokens_are_none():
    images = th.Problem(
        nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 2)),
        nn.CrossEntropyLoss(),
        (torch.rand(12, 3, 8, 8), torch.arange(12) % 2),
    )
    found = audit_columns(images)
    assert [row["column"] for row in found.table] == ["channel 0", "channel 1", "channel 2"]
    embedded = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 2))
    tokens = th.Problem(embedded, nn.CrossEntropyLoss(), (torch.randint(5, (12, 2)), torch.arange(12) % 2))
    assert first_inputs(tokens) is None


@pytest.mark.parametrize("make", [standardiser, whitener])
def test_the_hooks_standardise_and_whiten_what_the_layer_gets(make):
    x = normal(300, 2) * torch.tensor([1.0, 300.0]) + torch.tensor([0.0, 1e4])
    x = torch.stack([x[:, 0], x[:, 1] + 299 * x[:, 0]], dim=1)
    problem = linear(x, x[:, :1])
    hook = make(audit_columns(problem))
    (seen,), _ = hook(problem.model, (x.float(),), {})
    seen = seen.double()
    assert seen.mean(0).abs().max() < 1e-3
    moment = seen.T @ seen / len(seen)
    expected = torch.eye(2).double() if make is whitener else torch.corrcoef(x.T)
    torch.testing.assert_close(moment, expected, atol=2e-3, rtol=0)


def test_targets_are_compared_with_outputs():
    x = normal(90, 2)
    found = audit_targets(linear(x, 5e4 + 1e4 * x[:, :1]))
    assert found.means[0] == pytest.approx(5e4, rel=0.1)
    assert found.spreads[0] == pytest.approx(1e4, rel=0.2)
    assert found.distance > 1e3
    assert found.explained < 0
    with pytest.raises(ValueError, match="targets that are numbers"):
        audit_targets(th.Problem(nn.Linear(2, 2), nn.CrossEntropyLoss(), (x.float(), torch.arange(90) % 2)))


def test_targets_far_outside_the_others_are_outliers_where_they_are_few():
    x = normal(100, 2)
    y = x[:, :1].clone()
    y[[7, 20]] = torch.tensor([[300.0], [-900.0]], dtype=y.dtype)
    found = audit_targets(linear(x, y))
    assert found.outliers == (20, 7)
    assert found.outlier_share > 0.99
    y[:20] = 300.0
    assert audit_targets(linear(x, y)).outliers == ()  # a fifth of all: another kind of sample
    y[:60] = 0.0
    assert audit_targets(linear(x, y)).outliers == ()  # most targets are equal: there is no spread to measure with


def test_all_outliers_are_found_and_their_share_is_estimated():
    x = normal(6000, 2)
    y = x[:, :1].clone()
    wild = torch.randperm(6000, generator=torch.Generator().manual_seed(1))
    y[wild[:60]] = 300.0 + 10 * normal(60, 1, seed=2)
    problem = linear(x, y)
    found, exact = audit_targets(problem, most=500), audit_targets(problem, most=6000)
    assert sorted(found.outliers) == sorted(exact.outliers) == sorted(wild[:60].tolist())
    for name in ("outlier_share", "explained"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), abs=0.01)
    assert found.means == pytest.approx(exact.means, rel=0.1)
    y[wild[3:60]] = 0.0  # three in all: a sample of the samples misses them
    few = audit_targets(linear(x, y), most=500)
    assert sorted(few.outliers) == sorted(wild[:3].tolist())
    assert few.outlier_share > 0.9


class Film(nn.Module):
    """A table whose last column is a number of a kind; the others are shared out among two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.film = nn.Embedding(5, 4), nn.Linear(4, 8)
        self.few, self.most, self.out = nn.Linear(1, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.film(self.kinds(x[:, -1].long()))
        return self.out(torch.relu(scale * self.few(x[:, [1]]) + self.most(x[:, [0, 2, 3]])))


@pytest.mark.parametrize("names", [None, ["age", "income", "rooms", "lat", "kind"]])
def test_columns_are_read_where_a_model_slices_them_whatever_layer_is_called_first(names):
    x = torch.cat([normal(200, 4) * torch.tensor([1.0, 1.0, 1.0, 3000.0]), torch.arange(200)[:, None] % 5], dim=1).float()
    inputs = x if names is None else pd.DataFrame(x.numpy(), columns=names)
    found = audit_columns(th.Problem(Film(), nn.MSELoss(), (inputs, x[:, :1])))
    assert found.layer == "most"
    assert [row["column"] for row in found.table] == (["0", "2", "3"] if names is None else ["age", "rooms", "lat"])
    assert found.slowest["slower"] > 1e5
    assert found.table[2]["spread"] == pytest.approx(3000, rel=0.2)


def test_the_spread_of_a_single_column_is_one_number():
    x = 0.5 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    assert audit_columns(linear(x, x)).sentence().startswith("The spread of the column is 0.")
