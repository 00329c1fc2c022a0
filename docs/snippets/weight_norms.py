"""An instrument of one's own: is a layer's weight much longer than the others'?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import theodolite as th
from theodolite.instruments import Instrument, SurveyContext, Work


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightNorms(th.Result):
    """The norm of each measured parameter, by name."""

    norms: dict[str, float]

    def rows(self) -> list[dict[str, Any]]:
        return [{"parameter": name, "norm": norm} for name, norm in self.norms.items()]

    def sentence(self) -> str:
        return f"{len(self.norms)} parameters with norms up to {max(self.norms.values()):.3g}."


@th.instruments.register
class Norms(Instrument):
    name = "norms"
    title = "Norms of the parameters"
    question = "Is one parameter much longer than the others?"
    how = "The Euclidean norm of each parameter, as it stands."
    source = "Arithmetic."

    def applies(self, context: SurveyContext) -> str:
        return "" if len(context.problem.names) > 1 else "there is only one parameter"

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work(seconds=1e-8 * context.problem.size)

    def run(self, context: SurveyContext, **effort: Any) -> WeightNorms:
        parts = context.problem.split(context.problem.vector)
        return WeightNorms(norms={name: float(part.norm()) for name, part in parts.items()})

    def findings(self, context: SurveyContext, result: WeightNorms) -> list[th.Finding]:
        longest = max(result.norms, key=result.norms.__getitem__)
        total = sum(norm**2 for norm in result.norms.values()) ** 0.5
        share = result.norms[longest] / total
        severity = th.results.Severity.WARNING if share > 0.95 else th.results.Severity.NOTE
        return [
            self.found(
                severity,
                f"The longest parameter is {longest}: {100 * share:.3g} % of the norm of all.",
                label="longest parameter",
                quantity="share of the norm",
                value=share,
            )
        ]

    def figure(self, results: Mapping[str, Any]) -> Any:
        rows = [{"place": i + 1, **row} for i, row in enumerate(results[self.name].rows())]
        return th.plots.curves(rows, x="place", y="norm", markers=True, title="Norm of each parameter")
