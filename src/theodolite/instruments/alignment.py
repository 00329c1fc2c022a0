"""Does the gradient point along the sharp directions?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import InapplicableError, Instrument, Site, Work
from theodolite.linalg import Eigenpairs
from theodolite.measures.hessian import Alignment, gradient_alignment
from theodolite.results import Finding, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class GradientAlignment(Instrument):
    name = "alignment"
    title = "The gradient and the sharp directions"
    question = "How much of the gradient lies in the sharpest directions?"
    how = (
        "The gradient over all data is projected on the eigenvectors found above; the error follows from their residuals and gap."
    )
    source = "Gur-Ari, Roberts and Dyer (2018), Gradient Descent Happens in a Tiny Subspace."
    needs = ("curvature",)

    def cost(self, site: Site, **effort: Any) -> Work:
        return Work(gradients=0.0 if "gradient" in vars(site) else 1.0)

    def run(self, site: Site, **effort: Any) -> Alignment:
        pairs = site.results["curvature"]
        assert isinstance(pairs, Eigenpairs)
        if not bool(site.gradient.any()):
            raise InapplicableError("the gradient is zero and has no direction")
        if not float(pairs.values[0]) > pairs.tol * pairs.scale:
            raise InapplicableError("no direction curves upwards")
        return gradient_alignment(site.gradient, pairs)

    def findings(self, site: Site, result: Alignment) -> list[Finding]:
        text = (
            f"{number(100 * result.fraction, 100 * result.error)} % of the squared gradient lies in the "
            f"{result.k} sharpest directions; "
            f"a random vector would have {100 * result.chance:.2g} %."
        )
        advice = ""
        if result.fraction > 0.5 and result.chance < 0.1:
            advice = (
                "Most of each step goes across the valley, not along it: a smaller rate, momentum or "
                "preconditioning makes it useful."
            )
        fields = {"quantity": "share of the squared gradient", "value": result.fraction, "error": result.error}
        return [self.found(Severity.NOTE, text, label="gradient alignment", advice=advice, **fields)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        result = results[self.name]
        if result.k < 3:
            return None
        title = "Share of the squared gradient in the sharpest directions"
        axes = plots.curves(result.rows(), x="directions", y="fraction", markers=True, title=title, ylabel="share")
        axes.set_ylim(0, 1.05)
        return axes
