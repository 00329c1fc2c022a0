"""What does the whole spectrum look like?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.linalg import Density, Eigenpairs, spectral_density
from theodolite.linalg.density import PROBE_BYTES
from theodolite.results import Finding, Row, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Spectrum(Instrument):
    name = "density"
    title = "The whole spectrum"
    question = "How are all eigenvalues distributed, not only the largest?"
    how = (
        "Block Lanczos quadrature from random vectors, smoothed by a narrow Gaussian; the band is two "
        "standard errors over the vectors."
    )
    source = "Ghorbani, Krishnan and Xiao (2019); Golub and Welsch (1969) for the quadrature."
    efforts = ({"probes": 6, "steps": 32}, {"probes": 3, "steps": 20})

    def applies(self, site: Site) -> str:
        return "" if site.problem.size >= 10 else "there are so few parameters that the eigenvalues say it all"

    def cost(self, site: Site, **effort: Any) -> Work:
        products = effort["probes"] * min(effort["steps"], site.problem.size)
        orthogonal = 2.2e-10 * site.problem.size * products**2  # every vector against all before it, twice
        return Work(block_products=products, seconds=orthogonal, bytes=min(PROBE_BYTES, site.problem.size * products * 8))

    def run(self, site: Site, **effort: Any) -> Density:
        found: Density = spectral_density(site.hessian, **effort, seed=site.seed, progress=False)
        return found

    def rows(self, result: Density) -> list[Row]:
        """A coarse table: the share of directions between bounds."""
        nodes, weights = result.nodes, result.weights
        top = float(nodes.abs().max()) or 1.0
        edges = [-1.0, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1.0]
        rows = []
        for low, high in itertools.pairwise(edges):
            inside = (nodes > (low if low > -1 else -1.001) * top) & (nodes <= (high if high < 1 else 1.001) * top)
            rows.append({"from": low * top, "to": high * top, "share of directions": float(weights[inside].sum())})
        return rows

    def findings(self, site: Site, result: Density) -> list[Finding]:
        low, high = float(result.nodes.min()), float(result.nodes.max())
        mean = float((result.nodes * result.weights).sum())
        # The quadratic form of a random unit vector varies by 2 tr H² / n².
        square = float((result.nodes.square() * result.weights).sum())
        error = math.sqrt(2 * square / (site.problem.size * result.probes))
        text = f"The spectrum reaches from {low:.3g} to {high:.3g}; the mean eigenvalue is {number(mean, error)}."
        return [self.found(Severity.NOTE, text, label="spectrum", quantity="mean eigenvalue", value=mean, error=error)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        pairs = results.get("curvature")
        marks = pairs.values if isinstance(pairs, Eigenpairs) else None
        drawn = plots.density(results[self.name], nodes=marks, title="Density of the eigenvalues of the Hessian")
        return drawn
