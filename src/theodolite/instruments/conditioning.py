"""How badly is the curvature conditioned?"""

from __future__ import annotations

from typing import Any

from theodolite.instruments.base import InapplicableError, Instrument, Site, Work
from theodolite.linalg import Density, Eigenpairs
from theodolite.measures.hessian import Conditioning, conditioning
from theodolite.results import Finding, Severity, number


class ConditionOfCurvature(Instrument):
    name = "conditioning"
    title = "Conditioning"
    question = "Do few directions hold all the curvature, and how flat are the others?"
    how = "From the quadrature of the whole spectrum and the largest eigenvalue; errors from the number of random vectors."
    source = "Ghorbani and others (2019); a quadratic's slow directions need about λ₁/λ steps at the critical rate."
    needs = ("curvature", "density")

    def cost(self, site: Site, **effort: Any) -> Work:
        return Work()

    def run(self, site: Site, **effort: Any) -> Conditioning:
        pairs, density = site.results["curvature"], site.results["density"]
        assert isinstance(pairs, Eigenpairs)
        assert isinstance(density, Density)
        if not bool(pairs.values.any()):
            raise InapplicableError("the curvature is zero in every direction")
        return conditioning(pairs, density)

    def findings(self, site: Site, result: Conditioning) -> list[Finding]:
        text = (
            f"{number(100 * result.flat, 100 * result.flat_error)} % of the {result.size} directions are flat, below "
            f"{100 * result.threshold:g} % of the sharpest; the curvature lives in about "
            f"{number(result.stable_rank, result.stable_rank_error)} directions."
        )
        advice = ""
        if result.spread > 30:
            advice = (
                f"Badly conditioned: the root mean square curvature is {result.spread:.2g} times below the sharpest. "
                "Adaptive rates, normalisation layers or scaled inputs help."
            )
        fields = {"quantity": "share of flat directions", "value": result.flat, "error": result.flat_error}
        return [self.found(Severity.NOTE, text, label="conditioning", advice=advice, **fields)]
