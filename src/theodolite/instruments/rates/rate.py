"""Which learning rates are stable, and what will the user's own do?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import theodolite as th
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.curvature.spectrum import basis_bytes
from theodolite.linalg import Eigenpairs
from theodolite.measures.dynamics import CriticalRate, Regime, critical_learning_rate, expected_regime
from theodolite.measures.trials import Remedy
from theodolite.results import Finding, Row, Severity, number


class Rate(Instrument):
    name = "rate"
    order = 70
    title = "Learning rate and stability"
    question = "Up to which learning rate is training stable, and what will yours do?"
    how = (
        "The largest eigenvalue of the Hessian (preconditioned and shifted as the optimizer does) gives the rate at which the "
        "sharpest direction becomes unstable. Unless the loss is quadratic, the rate is then tried: full-batch steps on a copy "
        "of the model."
    )
    source = (
        "Stability of linear recursions; catapults: Lewkowycz and others (2020), Zhu and others (2022); edge of stability: "
        "Cohen and others (2021)."
    )
    efforts = ({"steps": 60}, {"steps": 20}, {"steps": 0})

    def applies(self, context: SurveyContext) -> str:
        return context.no_law

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        steps = effort["steps"] if context.lr is not None else 0
        products = min(40.0 if _reshaped(context) else 20.0, context.problem.size + 8.0)
        work = Work(gradients=10 + 1.15 * steps, products=products, bytes=basis_bytes(context, 1))
        # The sampling error measures five times again, on four fifths of the data.
        return work + Work(gradients=5 * 12, products=4 * products) if self._sampling(context, effort) else work

    @staticmethod
    def _sampling(context: SurveyContext, effort: Mapping[str, Any]) -> bool:
        return context.population is not None and effort["steps"] == 60 and not context.problem.coupled

    def run(self, context: SurveyContext, **effort: Any) -> CriticalRate | Regime:
        pairs = context.results.get("curvature")
        plain = isinstance(pairs, Eigenpairs) and pairs.converged and not _reshaped(context)
        critical = critical_learning_rate(
            context.problem,
            optimizer=context.optimizer,
            operator=context.hessian,
            start=pairs.most_extreme(1) if plain and pairs is not None else None,
            population=context.population if self._sampling(context, effort) else None,
            max_matvecs=context.affordable(600),
            seed=context.seed,
            progress=False,
        )
        if context.lr is None:
            return critical
        return expected_regime(
            context.problem,
            context.lr,
            optimizer=context.optimizer,
            critical=critical,
            steps=effort["steps"],
            seed=context.seed,
            progress=False,
        )

    def rows(self, result: CriticalRate | Regime) -> list[Row]:
        critical = result.critical if isinstance(result, Regime) else result
        if critical.rule != "2/λ" or math.isinf(critical.value):
            return critical.rows()
        factors = {
            "gradient descent, 2/λ": 1.0,
            "heavy ball β = 0.9, 2(1+β)/λ": 1.9,
            "Nesterov β = 0.9, 2(1+β)/((1+2β)λ)": 1.9 / 2.8,
        }
        return [{"optimizer": k, "critical rate": f * critical.value, "error": f * critical.error} for k, f in factors.items()]

    def findings(self, context: SurveyContext, result: CriticalRate | Regime) -> list[Finding]:
        critical = result.critical if isinstance(result, Regime) else result
        quantity = "critical learning rate"
        if math.isinf(critical.value):
            text = f"No direction curves upwards (λ = {critical.sharpness:.3g}): no learning rate is critical at this point."
            return [self.found(Severity.NOTE, text, "no critical rate", quantity, None, critical.error)]
        edge = f"{number(critical.value, critical.error)} ({critical.rule})"
        if not isinstance(result, Regime):
            name = "Gradient descent" if critical.optimizer == "gradient descent" else critical.optimizer
            text = f"{name} is stable up to a learning rate of {edge} at this point.{_caveat(critical)}"
            return [self.found(Severity.NOTE, text, "critical rate", quantity, critical.value, critical.error)]
        text = (
            f"Your learning rate {result.rate:.4g} is {number(result.ratio, result.error)} times the critical rate of "
            f"{critical.optimizer}, {edge}: {_expectation(result)}{_caveat(critical)}"
        )
        measured = ("learning rate over the critical one", result.ratio, result.error)
        if result.regime != "divergence expected":
            return [self.found(Severity.NOTE, text, result.regime, *measured)]
        advice = f"Set lr={critical.value / 2:.2g}, half the critical rate."
        return [self.found(Severity.CRITICAL, text, result.regime, *measured, cause="rate too high", advice=advice)]

    def remedies(self, context: SurveyContext, result: CriticalRate | Regime) -> Mapping[str, Remedy]:
        if not isinstance(result, Regime) or result.regime != "divergence expected" or "rate too high" in context.remedies:
            return {}
        lr = result.critical.value / 2
        return {"rate too high": Remedy(f"set lr={lr:.2g}, half the critical rate", lambda setup: setup.set_lr(lr), lr=lr)}

    def figure(self, results: Results) -> Picture:
        result = results[self.name]
        if not isinstance(result, Regime) or len(result.losses) < 3:
            return None
        rows = [row for row in result.rows() if math.isfinite(row["loss"])]
        losses = [row["loss"] for row in rows]
        scale = "y" if min(losses) > 0 and max(losses) > 20 * min(losses) else ""
        axes = th.plots.curves(rows, x="step", y="loss", log=scale, title=f"Trial run on a copy at your rate, {result.rate:g}")
        return th.plots.reference(axes, y=result.losses[0], label="start")


def _reshaped(context: SurveyContext) -> bool:
    """Whether the optimizer's matrix is not the Hessian itself (up to a shift)."""
    return context.optimizer is not None and "adam" in type(context.optimizer).__name__.lower()


def _caveat(critical: CriticalRate) -> str:
    if critical.linear:
        return ""
    floor = f" Beware: {critical.note.partition('; ')[2]}." if "eps decides" in critical.note else ""
    return f"{floor} The edge holds with the second moment frozen as it stands; live Adam adapts it and tolerates more."


def _expectation(result: Regime) -> str:
    losses = result.losses
    run = f" ({len(losses) - 1} steps on a copy: loss {losses[0]:.3g} to {losses[-1]:.3g})" if len(losses) > 1 else ""
    peak = (
        f"{max(losses) / losses[0]:.2g} times its start" if losses and losses[0] > 0 and math.isfinite(max(losses)) else "a peak"
    )
    confirmed = f" (confirmed on a copy: it blew up after {len(losses) - 1} steps)"
    texts = {
        "monotone": f"monotone descent expected{run}.",
        "stable": f"stable; oscillations fade{run}.",
        "catapult": f"a catapult: the loss rises to {peak}, then settles in a flatter place{run}.",
        "uneven": f"below the edge; the loss falls, but not in every step{run}.",
        "edge of stability": f"above the edge, yet the loss stays below its start and goes on falling{run}.",
        "edge is no limit": f"the trial says that the edge is no limit here: the loss never rose{run}.",
        "unstable": f"unstable: the loss rose to {peak} and had not settled{run}.",
        "unknown": "above the edge; whether it catapults or diverges was not tried.",
        "divergence expected": f"divergence expected{', as the loss is quadratic' if result.exact else confirmed}.",
    }
    if _surprising(result):
        return f"below the edge at this point, yet the trial did not simply descend: {result.regime}{run}."
    return texts[result.regime]


def _surprising(result: Regime) -> bool:
    """Whether a run below the edge did not simply descend: the edge moves while training moves."""
    return result.ratio <= 1 and result.regime in ("catapult", "unstable", "divergence expected")
