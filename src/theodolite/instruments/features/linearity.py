"""How linear is the model in its weights: up to which radius, and does training at the user's rate leave it?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Picture, Results, SurveyContext, Work
from theodolite.instruments.subset import OnSubset, moving_subset, of_samples, outputs_of, subset
from theodolite.measures.dynamics import CriticalRate, Regime, critical_learning_rate
from theodolite.measures.dynamics.weight_linearity import LOOKS, OUTPUTS, RADII, TRUSTED, WeightLinearity, weight_linearity
from theodolite.results import Finding, Severity, number
from theodolite.text import listed

#: Change of the kernel by the time the loss would be gone: up to the first it is a kernel regime, from the second on features
#: move. Of order 1/√width in theory, so there is no sharp border.
KERNEL, FEATURES = 0.1, 0.3

#: A trial in which the loss falls by a smaller share says nothing.
LEAST_FALL = 0.01


class Linearity(OnSubset):
    name = "linearity"
    order = 180
    title = "Linear in its weights?"
    question = "Up to which radius does the linear twin hold, and does training stay in the kernel regime or learn features?"
    how = (
        "The linear twin is f(w₀) + J(w − w₀), exact products with the Jacobian. A copy is trained for some full-batch steps at "
        "your rate and with your optimizer (without one: plain descent at half the critical rate), on a part of the data; the "
        "tangent kernel, on a few samples and at most ten outputs of each, and the twin are looked at on the way. Then the "
        "outputs are compared with the twin's at many radii, downhill and towards where the trial went. Errors are jackknife "
        "errors over samples. The kernel regime is one in which the kernel would change by at most 10 % by the time the loss "
        "is gone, if it went on as in the trial; from 30 % on it is a feature regime."
    )
    source = (
        "Chizat and others (2019), lazy training; Liu, Zhu and Belkin (2020), Zhu and others (2022): transition to linearity."
    )
    efforts = (
        {"samples": 256, "rows": 200, "steps": 50},
        {"samples": 64, "rows": 100, "steps": 20},
        {"samples": 16, "rows": 40, "steps": 10},
    )
    columns: ClassVar[Mapping[str, str]] = {
        "step": "step", "loss": "loss", "drift": "kernel drift", "distance": "distance over ‖w‖", "missed": "missed by the twin",
    }  # fmt: skip

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        outputs = outputs_of(context.problem)
        total = context.problem.samples
        share, few = min(total, effort["samples"]) / total, _rows(context, effort["rows"]) / total
        kernels = (LOOKS + 2) * 2.0 * min(outputs, OUTPUTS) * few
        radii = 2 * len(RADII) * 1.5 * share
        seconds = 0.15 + 3e-3 * effort["steps"] + 20 * 5e-10 * effort["rows"] ** 3
        size = 3 * 8 * context.problem.size
        return Work(gradients=2.0 + kernels + radii + 1.2 * share * effort["steps"], seconds=seconds, bytes=size)

    def run(self, context: SurveyContext, **effort: Any) -> WeightLinearity:
        try:
            part = moving_subset(context.problem, effort["samples"])
            rate = context.lr or _usual_rate(context)
            if context.problem.weighting.rule == "sum":  # the same step as the sum over all the data makes
                rate *= context.problem.samples / part.samples
            optimizer = context.optimizer if context.lr is not None else None
            few = subset(part, _rows(context, effort["rows"]))
            return weight_linearity(part, rate, steps=effort["steps"], optimizer=optimizer, kernel_on=few, seed=context.seed)
        except InapplicableError:
            raise
        except (TheodoliteError, NotImplementedError) as error:  # torch refuses to differentiate some layers in the ways needed
            raise InapplicableError(f"the tangent kernel or the linear twin cannot be made here: {error}") from error

    def findings(self, context: SurveyContext, result: WeightLinearity) -> list[Finding]:
        if result.linear:
            advice = (
                "Its tangent kernel never changes: a squared loss is then quadratic, and above the critical rate it diverges."
            )
            missed = ("largest share missed by the linear twin", max(row["missed"] for row in result.misses))
            return [self.found(Severity.NOTE, result.sentence(), "linear model", *missed, advice=advice)]
        whose = "your rate" if context.lr is not None else "half the critical rate"
        on = of_samples(result.samples, context.problem.samples)
        return [self._radius(result, whose), self._regime(result, whose, on), *self._bottleneck(result)]

    def _radius(self, result: WeightLinearity, whose: str) -> Finding:
        end = result.path[-1]
        text = result.sentence()
        if end["step"]:
            text += (
                f" {end['step']} steps at {whose} go {100 * end['distance']:.3g} % of that norm far, where "
                f"the twin misses {number(100 * end['missed'], 100 * result.missed_error)} %."
            )
        radius, error = result.radius
        reach = ("radius of the linear twin over the weights' norm", radius if 0 < radius < math.inf else None, error)
        return self.found(Severity.NOTE, text, "linear radius", *reach)

    def _regime(self, result: WeightLinearity, whose: str, on: str) -> Finding:
        first, end = result.path[0], result.path[-1]
        run = f"in {end['step']} steps at {whose} on {on}"
        drift = ("relative change of the tangent kernel", result.drift, result.drift_error)
        if not result.fall >= LEAST_FALL or result.blew_up:
            went = f"went from {first['loss']:.3g} to {end['loss']:.3g} {run}"
            went = f"blew up within {result.steps} steps at {whose}" if result.blew_up else went
            text = f"The loss {went}, which does not tell a kernel regime from a feature regime."
            advice = "Name a learning rate at which training moves downhill (lr=, --lr), or survey another point of the run."
            if not result.blew_up and end["loss"] < min(0.0, first["loss"]):
                changed = f"changed by {number(100 * result.drift, 100 * result.drift_error)} % of its norm"
                text = (
                    f"The tangent kernel {changed} while the loss {went}. A loss below 0 has no end to compare with, so this "
                    "does not tell a kernel regime from a feature regime."
                )
                advice = "Subtract the least value that the loss can take, where there is one."
            return self.found(Severity.NOTE, text, "regime not told", *drift, advice=advice)
        if result.projected <= KERNEL:
            label, name = "kernel regime", "Kernel regime"
            advice = (
                "Training is close to kernel regression with the kernel of this moment: features hardly move. A larger rate (a "
                "catapult), a smaller initialisation or a narrower network lets them."
            )
        elif result.projected >= FEATURES:
            label, name = "feature regime", "Feature regime"
            advice = (
                "Features are learned on the way: what linear theory says, critical rates included, holds near this point only."
            )
        else:
            label, name = "between regimes", "Between kernel and feature regime"
            advice = "Linear theory is a guide here, not a law: measure again as training goes on."
        text = (
            f"{name}: the tangent kernel changed by {number(100 * result.drift, 100 * result.drift_error)} % of its norm {run} "
            f"while the loss fell by {100 * result.fall:.3g} %; in proportion that is {100 * result.projected:.3g} % by the time "
            "the loss is gone."
        )
        return self.found(Severity.NOTE, text, label, *drift, advice=advice)

    def _bottleneck(self, result: WeightLinearity) -> list[Finding]:
        narrow = result.in_degrees
        if not narrow.bottlenecks or narrow.width is None:
            return []
        several = len(narrow.bottlenecks) > 1
        text = (
            f"The units of {listed(narrow.bottlenecks, 4)} read few inputs, {'at least ' if several else ''}{narrow.width}, far "
            "below the other layers: however wide the rest, such a layer keeps the model from becoming linear."
        )
        advice = (
            "Harmless where a small code is wanted; where linear theory is, widen what feeds it or lead a wide layer past it."
        )
        return [self.found(Severity.NOTE, text, "bottleneck", "smallest in-degree", float(narrow.width), advice=advice)]

    def figure(self, results: Results) -> Picture:
        plots = th.plots
        result: WeightLinearity = results[self.name]
        if result.linear:
            return None
        figure, (left, right) = plots.panels(2, letters=False, size=(4.4, 3.4))
        rows = [row for row in result.misses if row["direction"] in result.trusted and 0 < row["missed"] < 10]
        plots.curves(
            rows,
            "radius",
            "missed",
            by="direction",
            log="xy",
            labels="legend",
            title="Missed by the linear twin",
            xlabel="radius over the norm of the weights",
            ylabel="share of the change of the outputs",
            ax=left,
        )
        plots.reference(left, y=TRUSTED, label="10 %")
        if result.path[-1]["distance"] > 0:
            plots.reference(left, x=result.path[-1]["distance"], label="end of the trial")
        plots.curves(result.path, "step", "drift", title="Kernel drift in the trial", ylabel="‖K − K₀‖ / ‖K₀‖", ax=right)
        right.set_ylim(bottom=0)
        return figure


def _rows(context: SurveyContext, rows: int) -> int:
    """As many samples as give a kernel of so many rows."""
    return min(context.problem.samples, max(4, rows // min(outputs_of(context.problem), OUTPUTS)))


def _usual_rate(context: SurveyContext) -> float:
    """Half the critical rate of plain descent, where the user named none."""
    known = context.results.get("rate")
    if isinstance(known, Regime):
        known = known.critical
    if not isinstance(known, CriticalRate) or known.rule != "2/λ":
        known = critical_learning_rate(context.problem, operator=context.hessian, tol=1e-2, seed=context.seed, progress=False)
    if not math.isfinite(known.value):
        raise InapplicableError("no learning rate was named, and no direction curves upwards to choose one by")
    return known.value / 2
