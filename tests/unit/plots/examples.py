"""Every kind of drawing, for the tests of the SVG writer: `python -m tests.unit.plots.examples` prints their hashes."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from matplotlib.figure import Figure

from theodolite import plots


def every_kind() -> dict[str, Figure]:
    rng = np.random.default_rng(0)
    runs = [
        {"step": step, "loss": float(np.exp(-step / (5 + 5 * m)) * rng.lognormal(0, 0.1)), "model": name, "seed": seed}
        for m, name in enumerate(("network", "linear"))
        for seed in range(4)
        for step in range(12)
    ]
    curve = plots.curves(runs, "step", "loss", by="model", log="y")
    plots.reference(curve, x=4.0, label="critical")
    plots.span(curve, x=(6.0, 8.0), label="window")
    pairs = [{"eigenvalue": 10.0 / (i + 1), "residual": 0.1} for i in range(10)]
    grid = [{"eigenvalue": v, "density": float(np.exp(-v * v)), "stderr": 0.01} for v in np.linspace(-2, 2, 50)]
    power = [{"n": 2.0**i, "gap": 3.0 * 2.0 ** (-0.7 * i) * (1 + 0.1 * (-1) ** i)} for i in range(6)]
    figure, axes = plots.panels(6, title="Panels")
    plots.scatter(runs, "step", "loss", by="model", correlation="spearman", ax=axes[0])
    plots.histogram(runs, "loss", by="model", ax=axes[1])
    plots.matrix(rng.normal(size=(12, 12)), blocks=[4, 8], ax=axes[2])
    plots.eigenvalues(pairs, ax=axes[3])
    plots.density(grid, nodes=[-1.0, 0.5], ax=axes[4])
    plots.log_log(power, "n", "gap", guides=[-1], ax=axes[5])
    return {"curves": curve.figure, "heatmap": plots.heatmap(runs, "step", "seed", "loss").figure, "panels": figure}


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for name, figure in every_kind().items():
        sys.stdout.write(f"{name} {hash_of(plots.to_svg(figure))}\n")
    sys.stdout.write(f"pyplot loaded: {'matplotlib.pyplot' in sys.modules}\n")
