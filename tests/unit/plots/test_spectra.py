"""Eigenvalues, densities, histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import theodolite as th
from theodolite import plots
from theodolite.plots.axes_style import notes


def points(ax) -> dict[str, list]:
    return {line.get_label(): line.get_xydata().tolist() for line in ax.lines if line.get_marker() not in ("None", "", "_")}


def test_results_can_be_drawn_as_they_are():
    matrix = torch.diag(torch.linspace(-1, 5, 40).double())
    pairs = th.top_eigenpairs(matrix, k=3)
    ax = plots.eigenvalues(pairs)
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), pairs.values)
    assert ax.lines[-1].get_xdata().tolist() == [1, 2, 3]
    found = th.spectral_density(matrix, probes=4, steps=20)
    ax = plots.density(found, nodes=pairs.values)
    assert ax.lines[0].get_xdata() == pytest.approx(found.grid.numpy())
    np.testing.assert_allclose(ax.lines[1].get_xdata(), pairs.values)
    assert notes(ax) == ["band: ± 2 standard errors"]


def test_error_bars_are_the_residuals():
    ax = plots.eigenvalues([{"eigenvalue": 4.0, "residual": 0.5}, {"eigenvalue": 2.0, "residual": None}])
    (bars,) = [c for c in ax.collections if hasattr(c, "get_segments")]
    assert bars.get_segments()[0][:, 1].tolist() == [3.5, 4.5]
    assert ax.get_ylabel() == "eigenvalue ± residual"
    with pytest.raises(ValueError, match="'residual' must not be negative"):
        plots.eigenvalues([{"eigenvalue": 4.0, "residual": -0.5}])


def test_magnitudes_on_a_log_axis_with_negative_ones_hollow():
    rows = [{"v": v} for v in (10.0, 1.0, -0.1, 0.0, math.nan)]
    ax = plots.eigenvalues(rows, value="v", log=True, label="H")
    assert ax.get_yscale() == "log"
    assert points(ax) == {"H": [[1.0, 10.0], [2.0, 1.0]], "H, negative": [[3.0, 0.1]]}
    assert ax.lines[-1].get_markerfacecolor() == "white"
    assert notes(ax) == ["1 of 5 values not finite", "1 of 5 values not positive, not on the log axis"]


def test_layers_and_stems():
    rows = [{"layer": layer, "eigenvalue": v, "i": i} for layer in ("fc1", "fc2") for i, v in enumerate((3.0, -1.0))]
    ax = plots.eigenvalues(rows, by="layer", index="i", kind="stems")
    assert ax.get_xlabel() == "i"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["fc1", "fc2"]
    assert ax.collections[0].get_segments()[1].tolist() == [[1.0, 0.0], [1.0, -1.0]]
    with pytest.raises(ValueError, match="kind must be"):
        plots.eigenvalues(rows, kind="bars")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no column 'eigenvalu'. Nearest: eigenvalue"):
        plots.eigenvalues(rows, value="eigenvalu")


def test_density_band_and_floor():
    rows = [{"eigenvalue": float(g), "density": d, "stderr": 0.1} for g, d in enumerate((1.0, 0.5, 0.0, 1e-30, math.nan))]
    ax = plots.density(rows, width=1.0, floor=1e-4)
    assert ax.get_ylim()[0] == pytest.approx(1e-4)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.0, 0.5, 1e-5, 1e-5, math.nan])
    band = np.concatenate([p.vertices for p in ax.collections[0].get_paths()])
    assert {0.9, 1.1} <= set(band[band[:, 0] == 0, 1].round(9))
    assert (band[:, 1] > 0).all()
    assert notes(ax) == ["band: ± 1 standard errors", "1 of 5 values not finite"]
    linear = plots.density(rows, log=False, nodes=[0.5, math.inf])
    assert linear.get_yscale() == "linear"
    assert "1 of 2 nodes not finite" in notes(linear)


def test_histogram_integrates_to_one():
    rng = np.random.default_rng(0)
    rows = [{"g": g, "v": float(v)} for g in ("a", "b") for v in rng.normal(size=300)]
    ax = plots.histogram(rows, "v", by="g")
    for i in (1, 3):
        data = ax.patches[i].get_data()
        assert float((data.values * np.diff(data.edges)).sum()) == pytest.approx(1.0)
    assert ax.patches[1].get_data().edges.tolist() == ax.patches[3].get_data().edges.tolist()
    assert ax.get_ylabel() == "density"


def test_histograms_of_awkward_samples():
    tail = [{"v": 1.0}] * 50 + [{"v": 1e12}]
    assert len(plots.histogram(tail, "v").patches[0].get_data().values) <= 120
    rng = np.random.default_rng(0)
    cauchy = [{"v": float(v)} for v in rng.standard_cauchy(3000)]
    assert len(plots.histogram(cauchy, "v").patches[0].get_data().values) == 120
    plots.histogram([{"v": 3.0}], "v")
    ax = plots.histogram([{"v": v} for v in (0.1, 10.0, 100.0, -1.0, math.nan)], "v", log="x", bins=3, density=False)
    assert ax.patches[0].get_data().edges == pytest.approx([0.1, 1.0, 10.0, 100.0])
    decades = plots.histogram([{"v": v} for v in (0.1, 10.0, 100.0)], "v", log="x", bins=3)
    assert decades.patches[0].get_data().values == pytest.approx([1 / 3, 0, 2 / 3])
    assert decades.get_ylabel() == "density per decade"
    assert notes(ax) == ["1 of 5 values not finite", "1 of 5 values not positive, not on the log axis"]
    ax = plots.histogram(tail, "v", bins=[0, 2])
    assert notes(ax) == ["1 of 51 values outside the bins"]
    assert notes(plots.histogram([{"v": math.nan}], "v")) == ["1 of 1 values not finite"]
    for bins in (0, [1.0], [2.0, 1.0]):
        with pytest.raises(ValueError, match="bins must be"):
            plots.histogram(tail, "v", bins=bins)
