"""What does each layer do for the loss: without it, and with it twice in a row?"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import of_samples, subset
from theodolite.measures.growth import LayerAblation, ablate_layers, find_body
from theodolite.problem.calling import unwrap
from theodolite.results import Finding, Severity
from theodolite.text import number, the_layers

#: A forward pass in gradients.
FORWARD = 1 / 3
#: What Python takes for each layer that is changed, in seconds: eight parts of the data, and their hooks.
OVERHEAD = 0.02
#: What stands behind every number here.
NO_FORECAST = "This is no forecast of growing: what a change of the layers does before training says little about after it."


class Depth(Instrument):
    name = "depth"
    order = 207
    depth = "deep"
    title = "The layers one by one"
    question = "What does each layer do for the loss, and which could be left out or repeated?"
    how = (
        "Each layer of the body is left out once, so that the stream passes it by, and called twice in a row once, while all "
        "others stay as they are: two forward passes for each layer, in eval mode. Errors are paired, over parts of the data. "
        f"Nothing is trained. {NO_FORECAST}"
    )
    source = "Veit and others (2016): residual networks with layers left out; Karp (2024), chapter 5: growing by layers."
    efforts = ({"samples": 1024}, {"samples": 256}, {"samples": 64})
    columns: ClassVar = {
        "layer": "layer", "left_out": "rise without it", "left_out_error": "error", "repeated": "rise with it twice",
        "repeated_error": "error of that",
    }  # fmt: skip

    def concerns(self, context: SurveyContext) -> bool:
        return not _no_layers(context)

    def applies(self, context: SurveyContext) -> str:
        return _no_layers(context)

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        layers = find_body(unwrap(context.problem.model)).layers
        share = min(1.0, effort["samples"] / context.problem.samples)
        passes = 2 * layers + 2  # one as it is, and those of the layers that are called twice
        return Work(gradients=FORWARD * share * passes, seconds=OVERHEAD * passes)

    @inapplicable(TheodoliteError, ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> LayerAblation:
        return ablate_layers(subset(context.problem, effort["samples"]), progress=False)

    def findings(self, context: SurveyContext, result: LayerAblation) -> list[Finding]:
        on = of_samples(result.samples, context.problem.samples)
        return [self._use(result, on), *self._idle(result), self._repeated(result)]

    def _use(self, result: LayerAblation, on: str) -> Finding:
        rises = [rise for rise in result.left_out if math.isfinite(rise)]
        text = f"{result.sentence()} This is on {on}."
        return self.found(
            Severity.NOTE, text, "layers in use", "largest rise of the loss without a layer", max(rises, default=None)
        )  # fmt: skip

    def _idle(self, result: LayerAblation) -> list[Finding]:
        if not result.idle or len(result.left_out) < 2:
            return []
        text = f"Without {the_layers(result.idle)} the loss does not rise by twice its error: left out one at a time."
        advice = "Where speed counts, leave one out and look at the loss; where there are many, a deeper model may not pay yet."
        return [
            self.found(Severity.NOTE, text, "idle layers", "layers that do nothing measurable", len(result.idle), advice=advice)
        ]

    def _repeated(self, result: LayerAblation) -> Finding:
        layers = range(len(result.repeated))
        least, most = (pick(layers, key=lambda layer: result.repeated[layer]) for pick in (min, max))
        each = [
            f"{number(result.repeated[layer], result.repeated_error[layer])} for layer {layer}"
            for layer in dict.fromkeys((least, most))
        ]
        text = f"With a layer twice in a row the loss rises by {' to '.join(each)}. {NO_FORECAST}"
        advice = "Where new layers belong shows in a short trial: th.landscape_aware_growth, or theodolite grow."
        error = result.repeated_error[least]
        value = result.repeated[least] if math.isfinite(result.repeated[least]) else None
        rise = ("least rise of the loss with a layer repeated", value, error if math.isfinite(error) else None)
        return self.found(Severity.NOTE, text, "layers repeated", *rise, advice=advice)

    def figure(self, results: Results) -> Picture:
        return th.plots.plot_layer_ablation(results[self.name])


def _no_layers(context: SurveyContext) -> str:
    """Why there are no layers to leave out; empty where there are."""
    try:
        find_body(unwrap(context.problem.model))
    except ValueError as error:
        return str(error)
    return ""
