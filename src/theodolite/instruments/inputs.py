"""Do all input features say something, and something of their own?"""

from __future__ import annotations

from typing import Any

from theodolite.instruments.base import Instrument, Site, Work
from theodolite.measures.audit import InputAudit, audit_inputs
from theodolite.measures.audit.data import SAMPLES, has_main_input
from theodolite.problem.tensors import named_tensors
from theodolite.results import Finding, Severity


class Inputs(Instrument):
    name = "inputs"
    title = "Input features"
    question = "Which inputs never change, and which say the same as another?"
    how = "Features of up to 2000 samples are centred and scaled; those without spread are constant, equal ones are duplicates."
    source = "Along the difference of the weights of two equal features the loss is flat, whatever the model."

    def applies(self, site: Site) -> str:
        if site.problem.samples < 3:
            return "two samples do not tell which features vary"
        return "" if has_main_input(site.problem) else "the data has no single floating-point input"

    def cost(self, site: Site, **effort: Any) -> Work:
        first = next(iter(site.problem.data))
        numbers = sum(t.numel() for _, t in named_tensors(first.inputs)) // first.size * min(SAMPLES, site.problem.samples)
        return Work(seconds=5e-8 * numbers, bytes=12 * numbers)

    def run(self, site: Site, **effort: Any) -> InputAudit:
        return audit_inputs(site.problem)

    def findings(self, site: Site, result: InputAudit) -> list[Finding]:
        found = []
        if result.duplicated:
            first = " = ".join(map(str, result.duplicated[0][:4]))
            found.append(
                self.found(
                    Severity.WARNING,
                    f"{result.redundant} of {result.features} inputs repeat another up to shift and scale (feature {first}).",
                    label="duplicated feature",
                    quantity="redundant inputs",
                    value=float(result.redundant),
                    advice="Remove the copies: the loss is flat along the difference of their weights, and "
                    "weight decay alone decides.",
                )
            )
        if result.constant:
            found.append(
                self.found(
                    Severity.NOTE,
                    f"{len(result.constant)} of {result.features} inputs never change on these samples.",
                    label="constant feature",
                    quantity="constant inputs",
                    value=float(len(result.constant)),
                    advice="The weights on them act as biases, or not at all where they are zero.",
                )
            )
        return found or [self.found(Severity.GOOD, result.sentence(), label="inputs vary")]
