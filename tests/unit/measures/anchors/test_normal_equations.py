"""Least squares over a stream: sums that solve as well as the rows would."""

from __future__ import annotations

import pytest
import torch

from theodolite.measures.anchors import NormalEquations, probe_states
from theodolite.measures.anchors.probing.bulk import log_bulk_partition


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
