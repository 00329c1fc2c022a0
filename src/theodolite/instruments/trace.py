"""How much curvature is there altogether?"""

from __future__ import annotations

from typing import Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.linalg import Eigenpairs, TraceEstimate, trace
from theodolite.results import Finding, Severity, number


class Trace(Instrument):
    name = "trace"
    title = "Total curvature"
    question = "What is the sum of all eigenvalues, and how is it shared out?"
    how = (
        "Hutch++: the trace on a sketched sharp subspace is exact, the rest is averaged over random "
        "vectors; the error is a standard error."
    )
    source = "Meyer, Musco, Musco and Woodruff (2021), Hutch++: Optimal Stochastic Trace Estimation."
    efforts = ({"matvecs": 96}, {"matvecs": 30})

    def applies(self, site: Site) -> str:
        return "" if site.problem.size >= 6 else "there are so few parameters that the eigenvalues say it all"

    def cost(self, site: Site, **effort: Any) -> Work:
        return Work(block_products=effort["matvecs"], bytes=site.problem.size * effort["matvecs"] * 8)

    def run(self, site: Site, **effort: Any) -> TraceEstimate:
        found: TraceEstimate = trace(site.hessian, matvecs=effort["matvecs"], seed=site.seed, progress=False)
        return found

    def findings(self, site: Site, result: TraceEstimate) -> list[Finding]:
        mean = result.value / site.problem.size
        text = f"The trace of the Hessian is {number(result.value, result.stderr)}, {mean:.2g} per parameter"
        pairs = site.results.get("curvature")
        if isinstance(pairs, Eigenpairs) and float(pairs.values[0]) > 0:
            text += f", {result.value / float(pairs.values[0]):.3g} times the sharpest direction"
        fields = {"quantity": "trace of the Hessian", "value": result.value, "error": result.stderr}
        return [self.found(Severity.NOTE, f"{text}.", label="trace", **fields)]
