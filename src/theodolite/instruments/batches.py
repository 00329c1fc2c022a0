"""Is everything finite: data, parameters, losses, gradients?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.measures.audit import BatchAudit, audit_batches
from theodolite.results import Finding, Severity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ADVICE = "Repair or leave out what is named here; until then no number about this model means anything."


class Batches(Instrument):
    name = "batches"
    title = "Batch by batch"
    question = "Are the loss and its gradient finite everywhere, and is one batch unlike the others?"
    how = "One pass over the data, forward and backward, batch by batch; parameters and buffers are looked through as well."
    source = "Floating-point arithmetic: NaN and infinity spread to everything they touch."
    first = True

    def cost(self, site: Site, **effort: Any) -> Work:
        return Work(gradients=1.0)

    def run(self, site: Site, **effort: Any) -> BatchAudit:
        return audit_batches(site.problem)

    def findings(self, site: Site, result: BatchAudit) -> list[Finding]:
        if result.bad:
            return [self.found(Severity.CRITICAL, text, label="not finite", advice=_ADVICE) for text in result.bad[:10]]
        count = len(result.batches)
        return [
            self.found(
                Severity.GOOD,
                f"Loss and gradient are finite {'in all ' + str(count) + ' batches' if count > 1 else 'on all samples'}.",
                label="finite",
            )
        ]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        rows = [row for row in results[self.name].rows() if row["loss"] == row["loss"]]
        if len(rows) < 3:
            return None
        return plots.curves(rows, x="batch", y="loss", title="Loss of each batch", ylabel="loss")
