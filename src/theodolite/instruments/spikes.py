"""Will the loss spike: on how many batches does the learning rate exceed the critical one?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Instrument, Site, Work
from theodolite.measures.dynamics import BatchCriticalRates, Proportion, batch_critical_rates
from theodolite.measures.dynamics.stability_laws import stability_law
from theodolite.results import Finding, Row, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Size of random batches where the data comes as one batch.
USUAL = 32
#: Share of batches from which on the loss rises more often than it falls.
MOST = 0.5


class Spikes(Instrument):
    name = "spikes"
    title = "Spikes of the loss"
    question = "On how many of your batches does the learning rate exceed the critical one?"
    how = (
        "The critical rate of each batch comes from the tangent kernel of its samples (squared losses) or from the largest "
        "eigenvalue of its Gauss-Newton matrix, preconditioned as the optimizer does. A step on a batch whose critical rate lies "
        "below the learning rate overshoots in the sharpest direction: the loss spikes, and mostly comes back in a flatter "
        "place. The batches are yours, as the data gives them; where it gives one only, random ones of 32 samples."
    )
    source = "Zhu and others (2023), catapults in SGD: spikes in the training loss."
    efforts = ({"batches": 100}, {"batches": 30}, {"batches": 10})

    def applies(self, site: Site) -> str:
        if site.lr is None:
            return "no learning rate was given to compare with (lr=, --lr, or an optimizer)"
        if site.problem.samples < 2:
            return "there is one sample only, so every step sees all the data"
        try:
            stability_law(site.optimizer, site.problem)
        except ValueError as error:
            return str(error)
        return ""

    def cost(self, site: Site, **effort: Any) -> Work:
        samples, size = site.problem.samples, _size(site)
        batches = effort["batches"] if size else min(effort["batches"], len(site.problem.data))
        share = batches * (size or samples / len(site.problem.data)) / samples
        return Work(gradients=5.0 + 4 * share, products=8 * share, seconds=0.02 * batches, bytes=24 * site.problem.size)

    def run(self, site: Site, **effort: Any) -> BatchCriticalRates:
        try:
            found = batch_critical_rates(
                site.problem,
                optimizer=site.optimizer,
                own=_size(site) is None,
                batch_size=_size(site),
                batches=effort["batches"],
                seed=site.seed,
            )
        except (TheodoliteError, NotImplementedError) as error:
            raise InapplicableError(str(error)) from error
        assert site.lr is not None  # `applies` looked
        # The rate asked about may differ from the optimizer's own.
        share = Proportion(int((found.rates < site.lr).sum()), len(found.rates))
        return replace(found, rate=site.lr, below=share.value, below_error=share.error)

    def rows(self, result: BatchCriticalRates) -> list[Row]:
        names = {0.0: "smallest", 0.05: "5 %", 0.25: "25 %", 0.5: "median", 0.75: "75 %", 0.95: "95 %", 1.0: "largest"}
        return [{"share of batches": name, "critical rate at most": result.quantile(q)} for q, name in names.items()]

    def findings(self, site: Site, result: BatchCriticalRates) -> list[Finding]:
        assert result.below is not None and result.below_error is not None and result.rate is not None  # noqa: PT018
        count = len(result.rates)
        hits = round(result.below * count)
        if _size(site):
            looked = f"{count} random batches of {result.batch_size}"
        else:
            looked = f"{'all' if count == len(site.problem.data) else 'a random choice of'} {count} batches"
        lowest, middle = number(result.quantile(0.0)), number(result.median)
        fields: dict[str, Any] = {
            "quantity": "share of batches whose critical rate is exceeded",
            "value": result.below,
            "error": result.below_error,
        }
        if not hits:
            text = (
                f"Your learning rate {result.rate:.4g} lies below the critical rate of {looked} (smallest {lowest}, median "
                f"{middle}): no spikes expected at these weights."
            )
            return [self.found(Severity.GOOD, text, label="no spikes expected", **fields)]
        severity = Severity.WARNING if result.below >= MOST else Severity.NOTE
        text = (
            f"Your learning rate {result.rate:.4g} exceeds the critical rate of {hits} of {looked} (smallest {lowest}, median "
            f"{middle}): spikes of the loss expected."
        )
        advice = (
            f"A spike that settles is a short catapult and leaves a flatter place. For a smooth descent go below {lowest}, or "
            "use larger batches, whose critical rates lie closer to that of all the data."
        )
        return [self.found(severity, text, label="spikes expected", advice=advice, **fields)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        result: BatchCriticalRates = results[self.name]
        finite = sorted(rate for rate in result.rates.tolist() if rate < float("inf"))
        if len(finite) < 2 or result.rate is None:
            return None
        rows = [{"batches": (i + 1) / len(result.rates), "critical rate": rate} for i, rate in enumerate(finite)]
        axes = plots.curves(rows, x="critical rate", y="batches", markers=False, ylabel="share of batches below", title="Batches")
        return plots.reference(axes, x=result.rate, label="your rate")


def _size(site: Site) -> int | None:
    """The size of random batches, None where the data comes in batches of its own."""
    return min(USUAL, site.problem.samples // 2) if len(site.problem.data) == 1 else None
