"""How sharp are the sharpest directions?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.linalg.eigenpairs import BASIS_BYTES
from theodolite.measures.audit import BatchAudit
from theodolite.results import Finding, Row, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def basis_bytes(site: Site, k: int) -> int:
    """Memory of a solver's basis, which restarts rather than grow beyond its limit."""
    return min(BASIS_BYTES, site.problem.size * (4 * k + 60) * 12)


def eigen_work(site: Site, k: int, *, smallest: bool = False) -> Work:
    """What k eigenpairs take, verification included: the mean over networks of many kinds, good to a factor of 1.6.

    The lower end of a spectrum is crowded, so its pairs take longer.
    """
    size, k = site.problem.size, min(k, site.problem.size)
    products = 30.0 + 15 * k if smallest else 20.0 + 6 * k
    return Work(products=min(size + 8.0, products), bytes=basis_bytes(site, k))


def eigen_rows(pairs: Eigenpairs) -> list[Row]:
    """The table of eigenpairs as a page shows it."""
    columns = zip(pairs.values.tolist(), pairs.residuals.tolist(), pairs.unresolved.tolist(), strict=True)
    return [
        {"rank": i + 1, "eigenvalue": value, "residual": residual, "told from zero": not unresolved}
        for i, (value, residual, unresolved) in enumerate(columns)
    ]


class Curvature(Instrument):
    name = "curvature"
    title = "The sharpest directions"
    question = "How strongly does the loss curve, and in how many directions?"
    how = (
        "Exact eigenpairs of the loss Hessian by restarted Lanczos with full reorthogonalisation on exact products; the error is "
        "the true residual ‖Hv − λv‖, and a certificate bounds the chance that an eigenvalue was missed."
    )
    source = "Sagun and others (2017) and Papyan (2018): one sharp direction per class, less one, stands out of the bulk."
    efforts = ({"k": 12}, {"k": 5}, {"k": 1})

    def cost(self, site: Site, **effort: Any) -> Work:
        return eigen_work(site, effort["k"])

    def run(self, site: Site, **effort: Any) -> Eigenpairs:
        k = min(effort["k"], site.problem.size)
        return top_eigenpairs(site.hessian, k, max_matvecs=site.affordable(500 + 100 * k), seed=site.seed, progress=False)

    def rows(self, result: Eigenpairs) -> list[Row]:
        return eigen_rows(result)

    def findings(self, site: Site, result: Eigenpairs) -> list[Finding]:
        top, error = float(result.values[0]), float(result.residuals[0])
        fields: dict[str, Any] = {"quantity": "largest Hessian eigenvalue", "value": top, "error": error}
        if not result.converged:
            text = (
                f"The sharpest direction curves by about {number(top, error)}, but the search did not "
                f"finish: {result.outcome.value}."
            )
            return [self.found(Severity.WARNING, text, label="not converged", advice="Allow a larger budget.", **fields)]
        if top <= result.tol * result.scale:
            text = f"No direction curves upwards (largest eigenvalue {number(top, error)})."
            return [self.found(Severity.NOTE, text, label="no curvature", **fields)]
        text = f"The sharpest direction has curvature {number(top, error)}{self._outliers(site, result)}."
        return [self.found(Severity.NOTE, text, label="sharpness", **fields)]

    def _outliers(self, site: Site, result: Eigenpairs) -> str:
        """How many eigenvalues stand out: those before the widest relative gap, if it is wide."""
        values = [v for v in result.values.tolist() if v > result.tol * result.scale]
        if len(values) < 4:
            return ""
        gaps = [a / b for a, b in itertools.pairwise(values)]
        place = max(range(len(gaps)), key=gaps.__getitem__)
        if gaps[place] < 1.5:
            return "; the eigenvalues below it follow without a gap"
        audit = site.results.get("batches")
        classes = audit.classes if isinstance(audit, BatchAudit) else 0
        known = f", as expected of {classes} classes" if classes == place + 2 else ""
        return (
            f"; {place + 1} direction{'s stand' if place else ' stands'} out (the next is {gaps[place]:.2g} times flatter{known})"
        )

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        drawn = plots.eigenvalues(results[self.name], title="Largest eigenvalues of the Hessian")
        return drawn
