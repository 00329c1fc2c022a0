"""What would other learning rates do: fall, catapult, or diverge?"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import OnSubset, moving_subset, of_samples, subset
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import CriticalRate, catapult_sweep, classify_run, critical_learning_rate
from theodolite.measures.dynamics.optimizers import descend, run_trial, stability_law
from theodolite.measures.dynamics.sweep import whole_data
from theodolite.measures.kernel import squared_loss_curvature
from theodolite.operators import tangent_kernel_operator
from theodolite.problem import Problem
from theodolite.results import Cost, Finding, Result, Row, Severity, number

#: Learning rates in units of the critical one, for each effort.
GRIDS = {
    13: (0.2, 0.5, 0.8, 0.95, 1.05, 1.2, 1.5, 1.8, 2.2, 2.7, 3.5, 5.0, 8.0),
    9: (0.3, 0.8, 0.95, 1.1, 1.5, 2.0, 2.7, 4.0, 7.0),
    6: (0.5, 0.95, 1.2, 1.7, 2.5, 5.0),
}

#: The user's own rate joins the grid if it is not farther off than these, in units of the critical one.
NEAR, FAR = 0.02, 20.0

#: What a run may do, from calm to wild.
WORDS = ("monotone", "uneven", "spike", "catapult", "unsettled", "divergent")

#: A run this little above the edge may lower the loss without saying anything.
SOFT = 1.1


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RegimeDiagram(Result):
    """Trial runs at a grid of learning rates.

    `runs` has a row for each: model ("network", or its quadratic twin), rate, ratio (over the critical rate), regime, first, peak
    and final loss. Regimes are "monotone"; "uneven": falls, but not in every step; "catapult"; "spike": the same without a fall
    of the kernel; "unsettled"; "divergent". `example` is the catapult that ended lowest, with the norm of its tangent kernel
    before and after, None where there is none. `optimizer` names what was stepped with, `instead` why that is not the user's.
    """

    runs: tuple[Row, ...]
    critical: CriticalRate
    steps: int
    samples: int
    optimizer: str
    rate: float | None
    example: Row | None = None
    instead: str = ""

    def network(self) -> list[Row]:
        """The runs of the network itself, by rate."""
        return sorted((row for row in self.runs if row["model"] == "network"), key=lambda row: row["ratio"])

    @property
    def catapults(self) -> list[Row]:
        """The runs above the edge that catapulted, by rate."""
        return [row for row in self.network() if row["regime"] == "catapult" and row["ratio"] > 1]

    @property
    def window(self) -> tuple[float, ...]:
        """The smallest and largest ratio at which a run above the edge catapulted; empty where none did."""
        ratios = [row["ratio"] for row in self.catapults]
        return (ratios[0], ratios[-1]) if ratios else ()

    @property
    def divergent_from(self) -> float:
        """The smallest ratio from which on every run diverged; infinity where the last did not."""
        divergent = itertools.takewhile(lambda row: row["regime"] == "divergent", reversed(self.network()))
        return min((row["ratio"] for row in divergent), default=math.inf)

    @property
    def best(self) -> Row | None:
        """The run with the lowest loss in the end."""
        ended = [row for row in self.network() if row["regime"] != "divergent"]
        return min(ended, key=lambda row: row["final_loss"], default=None)

    def above(self, ratio: float) -> float:
        """The next larger ratio that was tried; infinity beyond the last."""
        return min((row["ratio"] for row in self.network() if row["ratio"] > ratio), default=math.inf)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.runs]

    def sentence(self) -> str:
        spans = []
        for word in WORDS:
            ratios = [row["ratio"] for row in self.network() if row["regime"] == word]
            if ratios:
                at = f"at {ratios[0]:.3g}" if len(ratios) == 1 else f"from {min(ratios):.3g} to {max(ratios):.3g}"
                spans.append(f"{word} {at}")
        return (
            f"{len(self.network())} runs of {self.steps} steps, rates in units of {self.critical.value:.3g}: {', '.join(spans)}."
        )


def regime_diagram(
    problem: Problem,
    ratios: Sequence[float],
    *,
    steps: int = 60,
    rate: float | None = None,
    optimizer: Optimizer | None = None,
    twin: bool = False,
    seed: int = 0,
) -> RegimeDiagram:
    """Full-batch trial runs on copies at `ratios` times the critical rate, and at the user's own `rate`.

    Plain descent on data that can be joined runs as one fleet, with the quadratic `twin` beside it where that is asked for; else
    the optimizer steps as it is, one run after the other.
    """
    began = time.perf_counter()
    critical = critical_learning_rate(problem, optimizer=optimizer, seed=seed, progress=False)
    if not math.isfinite(critical.value):
        raise InapplicableError("no direction curves upwards, so no learning rate is critical and there is no diagram")
    grid = sorted({*ratios, *_own(rate, critical.value, ratios)})
    fleet = critical.rule == "2/λ" and _one_batch(problem)
    runs = _sweep(problem, critical, grid, steps, twin) if fleet else _trials(problem, critical, grid, steps, optimizer)
    found = RegimeDiagram(
        runs=tuple(runs),
        critical=critical,
        steps=steps,
        samples=problem.samples,
        optimizer=critical.optimizer,
        rate=rate,
        seed=seed,
    )
    cost = Cost(time.perf_counter() - began, "fleet" if fleet else "trial runs", 0, problem.notes)
    return replace(found, example=_example(problem, found, optimizer), cost=cost)


def _one_batch(problem: Problem) -> bool:
    """Whether the mean over all data is that of one batch: shapes fit, and no weights of the user's come in."""
    try:
        whole_data(problem)
    except ValueError:
        return False
    return problem.weighting.rule != "given"


def _own(rate: float | None, critical: float, ratios: Sequence[float]) -> list[float]:
    """The user's rate in units of the critical one, where it belongs into the picture and is not there yet."""
    own = 0.0 if rate is None else rate / critical
    return [own] if NEAR <= own <= FAR and all(abs(own / ratio - 1) >= 0.02 for ratio in ratios) else []


def _sweep(problem: Problem, critical: CriticalRate, grid: Sequence[float], steps: int, twin: bool) -> list[Row]:
    """Plain descent, all rates as one program."""
    sweep = catapult_sweep(
        problem,
        [ratio * critical.value for ratio in grid],
        models=("network", "quadratic") if twin else ("network",),
        steps=steps,
        by="hessian",
        progress=False,
    )
    keep = ("model", "rate", "first_loss", "peak_loss", "final_loss")
    return [
        {**{k: row[k] for k in keep}, "ratio": row["rate"] / critical.value, "regime": _word(row["regime"], row)}
        for row in sweep.runs
    ]


def _trials(
    problem: Problem, critical: CriticalRate, grid: Sequence[float], steps: int, optimizer: Optimizer | None
) -> list[Row]:
    """The optimizer's own runs."""
    rows = []
    for ratio in grid:
        losses = run_trial(problem, ratio * critical.value, optimizer=optimizer, steps=steps)
        ends = {"first_loss": losses[0], "peak_loss": max(losses), "final_loss": losses[-1]}
        word = _word(classify_run(losses), ends)
        if word == "catapult":
            word = _word(classify_run(losses, kernel=_kernels(problem, ratio * critical.value, steps, optimizer)), ends)
        rows.append({"model": "network", "rate": ratio * critical.value, **ends, "ratio": ratio, "regime": word})
    return rows


def _word(regime: str, ends: Mapping[str, Any]) -> str:
    """What a run did: "other" is split by its losses."""
    if regime != "other":
        return regime
    first, peak, final = (ends[name] for name in ("first_loss", "peak_loss", "final_loss"))
    if final >= first:
        return "unsettled"
    if peak <= first + 0.05 * abs(first):
        return "uneven"
    return "spike" if peak - final > 0.5 * abs(peak) else "unsettled"


def _kernels(problem: Problem, rate: float, steps: int, optimizer: Optimizer | None) -> tuple[float, float]:
    """The norm of the tangent kernel before and after a run."""
    *_, (_, _, trial) = descend(problem, rate, steps, optimizer)
    before, after = (top_eigenpairs(tangent_kernel_operator(p), 1, tol=1e-3, progress=False) for p in (problem, trial))
    return float(before.values[0]), float(after.values[0])


def _example(problem: Problem, found: RegimeDiagram, optimizer: Optimizer | None) -> Row | None:
    """The catapult that ended lowest, run again for the norm of its kernel before and after."""
    if not found.catapults:
        return None
    best = min(found.catapults, key=lambda row: row["final_loss"])
    before, after = _kernels(problem, best["rate"], found.steps, optimizer)
    return {**best, "kernel_before": before, "kernel_after": after}


class Regimes(OnSubset):
    name = "regimes"
    order = 190
    title = "Regimes of the learning rate"
    question = "At which learning rates does this model fall smoothly, catapult, or diverge?"
    how = (
        "Copies of the model are trained for some full-batch steps at multiples of the critical rate, on a part of the data. A "
        "run is monotone if no step raises the loss, uneven if it falls on the whole, a catapult if the loss first rose by more "
        "than 5 %, then ended below its start and below half its peak and the tangent kernel fell, a spike if the kernel did "
        "not fall, divergent if it blew up, and else unsettled. For the catapult that ended lowest the norm of the tangent "
        "kernel is measured before and after. Plain descent is run for plain SGD; other optimizers are copied with their state."
    )
    source = "Lewkowycz and others (2020), the large learning rate phase; Zhu and others (2022), quadratic models."
    efforts = (
        {"rates": 13, "steps": 60, "samples": 256},
        {"rates": 9, "steps": 40, "samples": 128},
        {"rates": 6, "steps": 25, "samples": 64},
    )

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        runs = effort["rates"] * effort["steps"]
        share = _samples(context, effort["samples"]) / context.problem.samples
        plain = _plain(context)
        aside = 2e-4 if plain else 2e-3  # seconds of the interpreter for each step of each run
        twin = 6.0 if plain and effort["rates"] == max(GRIDS) and _squared(context) else 1.0
        size = 16 * effort["rates"] * context.problem.size
        gradients = 1.2 * runs * share * twin
        return Work(gradients=gradients, products=60.0 * share, seconds=0.1 + aside * runs * twin**0.5, bytes=size)

    @inapplicable(TheodoliteError, NotImplementedError)
    def run(self, context: SurveyContext, **effort: Any) -> RegimeDiagram:
        instead = context.no_law
        optimizer = None if instead else context.optimizer
        part = moving_subset(context.problem, _samples(context, effort["samples"]))
        if part.half_precision and _plain(context):  # small steps get lost in half precision
            part, optimizer = part.in_float64(), None
        found = regime_diagram(
            part,
            GRIDS[effort["rates"]],
            steps=effort["steps"],
            rate=None if instead else context.lr,
            optimizer=optimizer,
            twin=effort["rates"] == max(GRIDS) and _squared(context),
            seed=context.seed,
        )
        return replace(found, instead=instead)

    def rows(self, result: RegimeDiagram) -> list[Row]:
        names = {"model": "model", "rate": "rate", "ratio": "over the critical rate", "regime": "regime"}
        losses = {"peak_loss": "highest loss", "final_loss": f"loss after {result.steps} steps"}
        return [{name: row[key] for key, name in {**names, **losses}.items()} for row in result.runs]

    def findings(self, context: SurveyContext, result: RegimeDiagram) -> list[Finding]:
        critical = result.critical
        samples = of_samples(result.samples, context.problem.samples)
        edge = f"the critical rate of {critical.optimizer}, {number(critical.value, critical.error)} on {samples}"
        aside = " The diagram is that of plain gradient descent, because there is no law for yours: " if result.instead else ""
        aside += result.instead
        if result.window:
            return [self._catapult(result, edge, aside)]
        last = max((row["ratio"] for row in result.network() if row["final_loss"] < row["first_loss"]), default=0.0)
        from_on = result.divergent_from
        diverged = "" if math.isinf(from_on) else f", and from {from_on:.3g} times it on training diverges"
        label = "no catapult window"
        if critical.quadratic and critical.linear:
            ends = "training diverges, as the loss is quadratic in the weights: there is no catapult window"
        elif last <= SOFT:
            beyond = f" beyond {last:.3g} times it" if last > 1 else ""
            ends = f"no run catapults and none{beyond} lowers the loss{diverged}: there is no catapult window"
        else:
            label = "soft edge"
            spikes = any(row["regime"] == "spike" for row in result.network())
            after = ", after spikes that do not lower the tangent kernel" if spikes else ""
            ends = f"no run catapults; up to {last:.3g} times it the loss still ends below its start{after}{diverged}"
        measured = ("largest rate that lowered the loss over the critical one", last, _gap(result, last))
        return [self.found(Severity.NOTE, f"Above {edge}, {ends}.{aside}", label, *measured)]

    def _catapult(self, result: RegimeDiagram, edge: str, aside: str) -> Finding:
        low, high = result.window
        shown = result.example
        assert shown is not None
        at = f"At {low:.3g}" if low == high else f"Between {low:.3g} and {high:.3g}"
        maximum = result.critical.predicted_maximum
        theory = f" (a quadratic twin: 1 to {maximum / result.critical.value:.2g})" if maximum is not None else ""
        fall = 1 - shown["kernel_after"] / shown["kernel_before"]
        text = (
            f"{at} times {edge}, training catapults{theory}: at {shown['ratio']:.3g} times it the loss rises to "
            f"{shown['peak_loss'] / shown['first_loss']:.3g} times its start, then falls to {shown['final_loss']:.3g} within "
            f"{result.steps} steps, and the norm of the tangent kernel falls by {100 * fall:.3g} %.{aside}"
        )
        measured = ("largest rate that catapults over the critical one", high, _gap(result, high))
        return self.found(Severity.NOTE, text, "catapult window", *measured)

    def figure(self, results: Results) -> Picture:
        result: RegimeDiagram = results[self.name]
        own = None if result.rate is None else result.rate / result.critical.value
        return th.plots.regime_diagram(result.rows(), own=own, steps=result.steps, optimizer=result.optimizer)


def _gap(result: RegimeDiagram, ratio: float) -> float | None:
    """How far the next rate tried is."""
    gap = result.above(ratio) - ratio
    return gap if math.isfinite(gap) else None


def _samples(context: SurveyContext, most: int) -> int:
    """A sum over a part of the data has another scale, so it is taken whole, as are samples that belong together."""
    total = context.problem.samples
    return total if context.problem.weighting.rule == "sum" or context.problem.coupled else min(total, most)


def _plain(context: SurveyContext) -> bool:
    return bool(context.no_law) or stability_law(context.optimizer, context.problem).rule == "2/λ"


def _squared(context: SurveyContext) -> bool:
    """Whether the loss is a squared one of one tensor, by a look at a few samples."""
    return not context.problem.loss_takes_structure and squared_loss_curvature(subset(context.problem, 8)) is not None
