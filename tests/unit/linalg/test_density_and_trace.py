"""Estimators are unbiased and their error bars honest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

import theodolite as th
from theodolite.operators import DiagonalOperator
from theodolite.testing import random_symmetric

N = 120
SPECTRA = {
    "flat": torch.linspace(0.5, 1.5, N).double(),
    "decaying": torch.arange(1, N + 1).double() ** -1.5,
    "outliers": torch.cat([torch.tensor([50.0, 20.0, 10.0]), 0.1 * torch.linspace(-2, 2, N - 3)]).double(),
}
every_spectrum = pytest.mark.parametrize("name", list(SPECTRA))


@every_spectrum
@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
@pytest.mark.parametrize("rotated", [True, False])
def test_trace_error_bars_are_honest(name, method, rotated):
    values = SPECTRA[name]
    matrix = random_symmetric(values) if rotated else torch.diag(values)
    truth = float(values.sum())
    found = [th.trace(matrix, matvecs=48, method=method, seed=seed) for seed in range(200)]
    z = torch.tensor([(e.value - truth) / e.stderr for e in found])
    assert abs(float(z.mean())) < 4 * float(z.std()) / 200**0.5 + 0.15
    assert 0.75 < float(z.std()) < 1.35
    assert all(e.matvecs <= 48 for e in found)


@every_spectrum
def test_density_error_bars_are_honest(name):
    values = SPECTRA[name]
    matrix = random_symmetric(values)
    z = []
    for seed in range(200):
        density = th.spectral_density(matrix, probes=32, steps=40, points=64, seed=seed)
        truth = density.smooth(values)
        seen = truth > 0.02 * truth.max()
        z.append(((density.density - truth) / density.stderr)[seen])
    z = torch.cat(z)
    assert 0.75 < float(z.std()) < 1.35
    assert abs(float(z.mean())) < 0.3


@every_spectrum
def test_density_is_near_the_true_spectrum(name):
    values = SPECTRA[name]
    density = th.spectral_density(random_symmetric(values), probes=16, steps=40)
    spread = float(values.max() - values.min())
    assert wasserstein_distance(density.nodes, values, density.weights) < 0.03 * spread
    assert float(density.weights.sum()) == pytest.approx(1.0)
    width = float(density.grid[1] - density.grid[0])
    assert float(density.density.sum()) * width == pytest.approx(1.0, abs=1e-3)


@every_spectrum
@pytest.mark.parametrize(("n", "steps", "bandwidth"), [(1000, 1000, None), (120, 1000, None), (120, 40, 1e-3)])
def test_density_integrates_to_one_however_narrow_the_kernel(name, n, steps, bandwidth):
    values = torch.as_tensor(np.interp(np.linspace(0, 1, n), np.linspace(0, 1, N), SPECTRA[name].sort().values))
    density = th.spectral_density(DiagonalOperator(values), probes=2, steps=steps, bandwidth=bandwidth)
    assert float(torch.trapezoid(density.density, density.grid)) == pytest.approx(1.0, abs=1e-3)
    assert float(torch.trapezoid(density.smooth(values), density.grid)) == pytest.approx(1.0, abs=1e-3)


def test_a_bandwidth_that_no_grid_resolves_is_refused():
    with pytest.raises(ValueError, match=r"bandwidth must be at least 1e-05 for eigenvalues between 0\.5 and 1\.5.* Got 1e-09"):
        th.spectral_density(torch.diag(SPECTRA["flat"]), bandwidth=1e-9)


@every_spectrum
@pytest.mark.parametrize("probes", [2, 8])
def test_a_band_covers_as_often_as_it_says(name, probes):
    values = SPECTRA[name]
    inside = {0.95: [], 0.8: []}
    for seed in range(100):
        density = th.spectral_density(DiagonalOperator(values), probes=probes, steps=40, points=64, seed=seed)
        truth = density.smooth(values)
        seen = truth > 0.02 * truth.max()
        for level, found in inside.items():
            low, high = density.interval(level)
            found.append(float(((low <= truth) & (truth <= high))[seen].double().mean()))
    # Points of one density lean on one another: the means are known to about 0.01.
    assert np.mean(inside[0.95]) == pytest.approx(0.95, abs=0.025)
    assert 0.77 < np.mean(inside[0.8]) < 0.87  # two probes make it a little wide


def test_bands_where_nothing_is_seen_and_where_nothing_is_random():
    gap = th.spectral_density(torch.diag(torch.tensor([0.0, 0.0, 1.0]).double()), bandwidth=1e-3).interval()
    one = th.spectral_density(torch.eye(20).double())
    for low, high in (gap, one.interval()):
        assert bool(((low <= high) & torch.isfinite(high) & (low >= 0)).all())
    torch.testing.assert_close(torch.stack(one.interval()), one.density.expand(2, -1), rtol=1e-4, atol=0)


def test_quadrature_is_exact_for_small_matrices():
    """Once the Krylov space is the whole space, the nodes are the eigenvalues themselves."""
    values = torch.tensor([3.0, 1.0, 0.5, -2.0]).double()
    density = th.spectral_density(random_symmetric(values), probes=3, steps=10)
    assert density.matvecs == 4
    torch.testing.assert_close(density.nodes, values.sort().values)


def test_moments_are_those_of_the_probes():
    """A rule of m steps integrates polynomials up to degree 2m − 1 exactly against the probes' measure."""
    matrix = random_symmetric(SPECTRA["decaying"])
    density = th.spectral_density(matrix, probes=3, steps=4, seed=5)
    z = torch.randn(N, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z /= z.norm(dim=0)
    for degree in range(8):
        power = torch.linalg.matrix_power(matrix, degree) @ z
        expected = float((z * power).sum()) / 3
        assert float((density.weights * density.nodes**degree).sum()) == pytest.approx(expected, rel=1e-9)


def test_degenerate_spectra():
    for matrix in (torch.eye(20).double(), torch.zeros(20, 20).double()):
        density = th.spectral_density(matrix, probes=4, steps=10)
        assert float(density.weights.sum()) == pytest.approx(1.0)
        assert float((density.nodes * density.weights).sum()) == pytest.approx(float(matrix[0, 0]), abs=1e-12)


def test_large_operators_go_by_short_recurrences(monkeypatch):
    from theodolite.linalg import density as module

    values = SPECTRA["outliers"]
    matrix = random_symmetric(values)
    full = th.spectral_density(matrix, probes=4, steps=20)
    monkeypatch.setattr(module, "PROBE_BYTES", 0)
    short = th.spectral_density(matrix, probes=4, steps=20)
    assert "short recurrences" in short.cost.notes[0]
    assert short.matvecs == full.matvecs == 80
    spread = float(values.max() - values.min())
    assert wasserstein_distance(full.nodes, short.nodes, full.weights, short.weights) < 0.01 * spread
    monkeypatch.setattr(module, "PROBE_BYTES", 2 * 20 * N * 8)  # two probes at a time
    pairs = th.spectral_density(matrix, probes=4, steps=20)
    assert wasserstein_distance(full.nodes, pairs.nodes, full.weights, pairs.weights) < 0.01 * spread


def test_trace_of_multiples_of_the_identity_is_exact():
    for method in ("hutchinson", "hutch++", "xtrace"):
        assert th.trace(3 * torch.eye(20).double(), matvecs=12, method=method).value == pytest.approx(60.0, abs=1e-9)


def test_low_rank_traces_are_exact():
    values = torch.cat([torch.tensor([5.0, 3.0, 1.0]), torch.zeros(60)]).double()
    for method in ("hutch++", "xtrace"):
        assert th.trace(random_symmetric(values), matvecs=30, method=method).value == pytest.approx(9.0, abs=1e-8)


def test_sharper_methods_are_more_accurate_on_decaying_spectra():
    values = SPECTRA["decaying"]
    matrix = random_symmetric(values)

    def error(method: str) -> float:
        return sum(abs(th.trace(matrix, matvecs=48, method=method, seed=s).value - float(values.sum())) for s in range(30))

    assert error("xtrace") < error("hutchinson") / 3
    assert error("hutch++") < error("hutchinson") / 3


def test_interval_covers():
    values = SPECTRA["flat"]
    matrix = random_symmetric(values)
    inside = 0
    for seed in range(200):
        low, high = th.trace(matrix, matvecs=9, method="hutchinson", seed=seed).interval(0.9)
        inside += low <= float(values.sum()) <= high
    assert 0.83 < inside / 200 < 0.97


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: th.trace(a, method="exact"), "method must be one of"),
        (lambda a: th.trace(a, matvecs=3), "at least 6"),
        (lambda a: th.trace(a[:, :3]), "square"),
        (lambda a: th.spectral_density(a, probes=1), "probes must be"),
        (lambda a: th.spectral_density(a, steps=0), "steps must be"),
        (lambda a: th.spectral_density(a, bandwidth=-1.0), "bandwidth"),
        (lambda a: th.spectral_density(a.triu()), "symmetric"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(5, 5).double())
