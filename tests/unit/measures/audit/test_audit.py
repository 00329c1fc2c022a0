"""Audits of batches, inputs and parameters; alignment and conditioning against dense spectra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.audit import duplicate_rows


def test_equal_rows_finds_all_groups_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 7, generator=generator)
    rows[[3, 60, 190]] = rows[3].clone()
    rows[[10, 11]] = rows[10].clone()
    rows[50] = rows[51] * (1 + 1e-9)
    rows[80] = rows[81] + 1e-2
    assert duplicate_rows(rows) == [[3, 60, 190], [10, 11], [50, 51]]
    assert duplicate_rows(rows[:1]) == []


def test_convolution_filters_and_their_dead_channels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 2))
    with torch.no_grad():
        model[0].bias[2] = -1e4
        model[0].weight[4], model[0].bias[4] = model[0].weight[1], model[0].bias[1]
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(20, 1, 4, 4), torch.arange(20) % 2))
    audit = th.measures.audit.audit_parameters(problem)
    rows = {row["layer"]: row for row in audit.rows()}
    assert (rows["0"]["dead"], rows["0"]["duplicated"], rows["0"]["units"]) == (1, 1, 6)
    assert rows["3"]["silent_inputs"] == 4
    assert audit.dead_layers == ()


def test_unused_parameters_and_embeddings():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.spare = nn.Embedding(10, 3), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(0)
    audit = th.measures.audit.audit_parameters(th.Problem(Net(), nn.CrossEntropyLoss(), (torch.arange(6), torch.arange(6) % 2)))
    assert audit.unreached == ("spare.weight", "spare.bias")
    assert audit.dead_layers == ()
    assert next(row["unused_rows"] for row in audit.rows() if row["layer"] == "embed") == 4


@pytest.mark.parametrize(("padding", "unused"), [(0, 4), (9, 3), (-1, 3)])
def test_a_row_that_pads_is_not_one_that_nobody_asks_for(padding, unused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, padding_idx=padding), nn.Linear(3, 2))
    audit = th.measures.audit.audit_parameters(th.Problem(model, nn.CrossEntropyLoss(), (torch.arange(6), torch.arange(6) % 2)))
    assert audit.total("unused_rows") == unused  # 6, 7, 8 and 9 never occur; row 0 gets no gradient where it pads


def test_zero_biases_hold_nothing_back():
    """Units shut by zero weights and zero bias stay shut: no gradient reaches them, now or later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[0].bias)
    with torch.no_grad():
        model[0].weight[:4] = 0.0
    audit = th.measures.audit.audit_parameters(
        th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(50, 10), torch.arange(50) % 3))
    )
    assert audit.rows()[0]["dead"] == 4
    assert audit.waiting == ()


def test_units_of_transposed_layers_are_their_outputs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer = transformers.pytorch_utils.Conv1D(8, 5)
    with torch.no_grad():
        layer.bias[:4] = -1e4
        layer.weight[:, 6] = layer.weight[:, 7]
        layer.bias[6] = layer.bias[7]
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 2))
    audit = th.measures.audit.audit_parameters(
        th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(30, 5), torch.arange(30) % 2))
    )
    row = audit.rows()[0]
    assert (row["units"], row["dead"], row["duplicated"]) == (8, 4, 1)
    up = nn.Sequential(nn.ConvTranspose2d(2, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 2))
    with torch.no_grad():
        up[0].bias[:3] = -1e4
    audit = th.measures.audit.audit_parameters(
        th.Problem(up, nn.CrossEntropyLoss(), (torch.randn(10, 2, 3, 3), torch.arange(10) % 2))
    )
    assert (audit.rows()[0]["units"], audit.rows()[0]["dead"]) == (6, 3)


def test_a_vanishing_loss_does_not_look_like_death():
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(10, 3).double()
    problem = th.Problem(model, nn.MSELoss(), (x, model(x).detach()))
    assert float(problem.gradient().abs().max()) == 0.0
    audit = th.measures.audit.audit_parameters(problem)
    assert audit.dead_layers == ()
    assert audit.total("dead") == 0


def test_recurrent_and_packed_layers_are_judged_as_a_whole():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    audit = th.measures.audit.audit_parameters(
        th.Problem(Net(), nn.CrossEntropyLoss(), (torch.randn(6, 5, 3), torch.arange(6) % 2))
    )
    assert {row["layer"]: row["dead"] for row in audit.rows()} == {"rnn": 0, "head": 0}


def test_constant_and_duplicated_inputs_of_images():
    generator = torch.Generator().manual_seed(0)
    grey = torch.rand(50, 1, 3, 3, generator=generator)
    grey[:, :, 0, 0] = 0.5
    x = grey.expand(-1, 3, -1, -1).clone()
    model = nn.Sequential(nn.Flatten(), nn.Linear(27, 2))
    audit = th.measures.audit.audit_inputs(th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(50) % 2)))
    assert audit.constant == (0, 9, 18)
    assert audit.redundant == 16
    assert audit.duplicated[0] == (1, 10, 19)


def test_tokens_have_no_features():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match="floating-point input"):
        th.measures.audit.audit_inputs(
            th.Problem(model, nn.CrossEntropyLoss(), (torch.zeros(4, 2, dtype=torch.long), torch.arange(4) % 2))
        )


def test_batches_are_listed_with_loss_gradient_and_weight():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(30, 3).double(), torch.arange(30) % 2
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    audit = th.measures.audit.audit_batches(th.Problem(model, nn.CrossEntropyLoss(), batches))
    for row, (a, b) in zip(audit.rows(), batches, strict=True):
        loss = nn.functional.cross_entropy(model(a), b)
        norm = math.sqrt(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters()))))
        assert row["loss"] == pytest.approx(float(loss.detach()))
        assert row["gradient_norm"] == pytest.approx(norm)
    assert audit.loss == pytest.approx(float(nn.functional.cross_entropy(model(x), y).detach()))
    assert (audit.classes, audit.majority, audit.labels) == (2, 0.5, 30)


def test_alignment_is_the_share_in_the_dense_eigenspace_and_its_error_holds():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.tensor([9.0, 7.0, 5.0]), torch.linspace(1.0, 0.0, 57)]).double()
    matrix = basis @ torch.diag(values) @ basis.T
    g = torch.randn(60, generator=generator, dtype=torch.float64)
    truth = float((basis[:, :3].T @ g).square().sum() / g.square().sum())
    for tol in (1e-8, 1e-2):
        found = th.measures.hessian.gradient_alignment(g, th.top_eigenpairs(matrix, 3, tol=tol))
        assert abs(found.fraction - truth) <= found.error + 1e-12
        assert found.chance == pytest.approx(3 / 60)
    assert [row["directions"] for row in found.rows()] == [1, 2, 3]


def test_a_large_negative_eigenvalue_counts_as_sharp():
    values = torch.cat([torch.tensor([-1000.0]), torch.linspace(9.0, 1.0, 39)]).double()
    matrix = torch.diag(values)
    found = th.measures.hessian.conditioning(th.top_eigenpairs(matrix, 5), th.spectral_density(matrix, probes=8, steps=30))
    assert found.sharpness == pytest.approx(1000.0, rel=1e-6)
    assert found.stable_rank <= 3


def test_conditioning_error_bars_are_honest_over_seeds():
    values = torch.cat(
        [torch.tensor([10.0, 8.0, 5.0]), torch.full((40,), 0.5), torch.full((157,), 1e-3), torch.full((20,), -1.0)]
    )
    matrix = torch.diag(values.double())
    pairs = th.top_eigenpairs(matrix, 3)
    truth = {"flat": 157 / 220, "negative": 20 / 220, "stable_rank": float(values.double().square().sum()) / 100}
    for name, value in truth.items():
        scores = []
        for seed in range(100):
            found = th.measures.hessian.conditioning(pairs, th.spectral_density(matrix, probes=8, steps=20, seed=seed))
            scores.append((getattr(found, name) - value) / getattr(found, f"{name}_error"))
        assert 0.7 <= float(torch.tensor(scores).std()) <= 1.35, name
        assert abs(float(torch.tensor(scores).mean())) <= 0.5, name
