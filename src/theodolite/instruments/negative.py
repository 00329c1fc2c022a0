"""Does the loss curve downwards anywhere: a saddle?"""

from __future__ import annotations

from typing import Any

import torch

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.instruments.curvature import eigen_rows, eigen_work
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.results import Finding, Row, Severity, number


class NegativeCurvature(Instrument):
    name = "negative"
    title = "Negative curvature"
    question = "Are there directions in which the loss curves downwards, so that this is no minimum?"
    how = "The smallest eigenpairs of the Hessian, by the same search as the largest; the error is the true residual."
    source = "Dauphin and others (2014): high-dimensional losses have saddles rather than bad minima."
    efforts = ({"k": 3}, {"k": 1})

    def applies(self, site: Site) -> str:
        return "" if site.problem.size > 1 else "there is only one parameter"

    def cost(self, site: Site, **effort: Any) -> Work:
        return eigen_work(site, effort["k"], smallest=True)

    def run(self, site: Site, **effort: Any) -> Eigenpairs:
        k = min(effort["k"], site.problem.size)
        cap = site.affordable(500 + 100 * k)
        return top_eigenpairs(site.hessian, k, which="smallest", max_matvecs=cap, seed=site.seed, progress=False)

    def rows(self, result: Eigenpairs) -> list[Row]:
        return eigen_rows(result)

    def findings(self, site: Site, result: Eigenpairs) -> list[Finding]:
        low, error = float(result.values[-1]), float(result.residuals[-1])
        fields: dict[str, Any] = {"quantity": "smallest Hessian eigenvalue", "value": low, "error": error}
        rounding = 20 * torch.finfo(site.problem.dtype).eps * result.scale
        if low >= -max(2 * error, rounding):
            sure = "" if result.converged else " as far as the search went"
            text = f"No direction curves downwards{sure}: the smallest eigenvalue is {number(low, error)}."
            return [self.found(Severity.GOOD, text, label="no negative curvature", **fields)]
        share = f"{abs(low) / result.scale:.2g} of the sharpest"
        if -low < result.tol * result.scale:
            text = f"The loss curves downwards very slightly: smallest eigenvalue {number(low, error)}, {share}."
            return [self.found(Severity.NOTE, text, label="negative curvature", **fields)]
        if self._stationary(site, result):
            text = (
                "This is a saddle: the gradient is nearly zero, but a direction curves downwards by "
                f"{number(low, error)} ({share})."
            )
            advice = "Training lingers here; a little noise, momentum or a step along that eigenvector leaves it."
            return [self.found(Severity.WARNING, text, label="saddle", advice=advice, **fields)]
        text = f"The loss curves downwards along some direction: smallest eigenvalue {number(low, error)}, {share}."
        advice = "Usual on the way down; at the end of training it says that there is a way further down."
        return [self.found(Severity.NOTE, text, label="negative curvature", advice=advice, **fields)]

    @staticmethod
    def _stationary(site: Site, result: Eigenpairs) -> bool:
        """Whether a step of the critical size would change the loss by less than a thousandth."""
        square = float(site.gradient.double().square().sum())
        return square / (2 * result.scale) <= 1e-3 * abs(site.problem.loss())
