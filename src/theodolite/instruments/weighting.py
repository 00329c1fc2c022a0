"""Does every sample count the same?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.measures.audit import BatchAudit
from theodolite.results import Finding, Row, Severity


class Weighting(Instrument):
    name = "weighting"
    title = "What each sample weighs"
    question = "Do batches of different size, ignored labels or rare classes tilt the objective?"
    how = "From the pass over the batches: each batch weighs what its loss divides by; labels are counted."
    source = "A mean over batches is the mean over samples only if all batches weigh the same."
    needs = ("batches",)

    def cost(self, site: Site, **effort: Any) -> Work:
        return Work()

    def run(self, site: Site, **effort: Any) -> BatchAudit:
        audit = site.results["batches"]
        assert isinstance(audit, BatchAudit)
        return audit

    def rows(self, result: BatchAudit) -> list[Row]:
        sizes = result.sizes
        return [
            {"quantity": "batches", "value": len(sizes)},
            {"quantity": "samples", "value": sum(sizes)},
            {"quantity": "smallest batch", "value": min(sizes)},
            {"quantity": "largest batch", "value": max(sizes)},
            {"quantity": f"loss, weighted by {result.rule}", "value": result.loss},
            {"quantity": "loss, plain mean of batches", "value": result.naive_loss},
            {"quantity": "labels that count", "value": result.labels},
            {"quantity": "labels ignored", "value": result.ignored},
            {"quantity": "classes seen", "value": result.classes},
        ]

    def findings(self, site: Site, result: BatchAudit) -> list[Finding]:
        found = [*self._uneven(result), *self._ignored(result), *self._classes(site, result)]
        return found or [self.found(Severity.GOOD, "Every sample weighs the same.", label="even")]

    def _uneven(self, result: BatchAudit) -> list[Finding]:
        weights = [row["weight"] for row in result.batches if row["weight"]]
        if result.rule == "sum" or len(weights) < 2 or max(weights) <= 1.001 * min(weights):
            return []
        shift = result.naive_loss - result.loss
        return [
            self.found(
                Severity.NOTE,
                f"Batches are uneven ({min(weights):g} to {max(weights):g} {result.rule}): a plain "
                "mean over batches would give a loss "
                f"of {result.naive_loss:.4g} instead of {result.loss:.4g}.",
                label="uneven batches",
                quantity="shift of the loss by a plain mean over batches",
                value=shift,
                advice="The survey weighs batches rightly. In your own evaluation weigh them by their size, "
                "or drop the last one.",
            )
        ]

    def _ignored(self, result: BatchAudit) -> list[Finding]:
        total = result.labels + result.ignored
        if not result.ignored:
            return []
        return [
            self.found(
                Severity.NOTE,
                f"{result.ignored} of {total} labels are ignored ({100 * result.ignored / total:.3g} "
                "%); the mean is over the others.",
                label="ignored labels",
                quantity="share of labels ignored",
                value=result.ignored / total,
                advice="Right for padding and for masked positions; if that is not what they are, look at the labels.",
            )
        ]

    def _classes(self, site: Site, result: BatchAudit) -> list[Finding]:
        weights = getattr(site.problem.loss_function, "weight", None)
        if isinstance(weights, Tensor) and weights.numel() > 1 and bool((weights != weights.flatten()[0]).any()):
            text = f"The loss weighs its classes, between {float(weights.min()):.3g} and {float(weights.max()):.3g}."
            spread = float(weights.max() / weights.min().clamp_min(1e-30))
            return [self.found(Severity.NOTE, text, label="class weights", quantity="largest over smallest weight", value=spread)]
        if not result.labels:
            return []
        if result.classes == 1:
            text = "All labels are one class: the loss falls to zero without anything being learned."
            return [self.found(Severity.WARNING, text, label="one class", advice="Look at how the data was chosen or sorted.")]
        if result.majority > 0.8:
            return [
                self.found(
                    Severity.NOTE,
                    f"{100 * result.majority:.3g} % of the labels are one class of {result.classes}.",
                    label="unbalanced classes",
                    quantity="share of the largest class",
                    value=result.majority,
                    advice="Judge the model by more than its accuracy, or weigh the classes in the loss.",
                )
            ]
        return []
