"""What drawing batches at random does to training: gradient noise, and spikes of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.measures.dynamics import (
    BatchCriticalRates,
    GradientNoise,
    Proportion,
    Regime,
    batch_critical_rates,
    gradient_noise,
)
from theodolite.results import Finding, Row, Severity, number

#: Size of random batches where the data comes as one batch.
USUAL = 32


class Noise(Instrument):
    name = "noise"
    order = 50
    title = "The gradient and its noise"
    question = "How long is the gradient, and how large must a batch be to see it?"
    how = (
        "The data is cut into groups; the spread of their gradients gives the variance of one sample's gradient, tr Σ. The noise "
        "scale is tr Σ / ‖g‖², with ‖g‖² freed of its own noise. Errors by the jackknife over the groups."
    )
    source = "McCandlish, Kaplan, Amodei and others (2018), An Empirical Model of Large-Batch Training."
    efforts = ({"groups": 32}, {"groups": 8})

    def applies(self, context: SurveyContext) -> str:
        if len(context.problem.data) > 1:
            return ""
        return "there is only one sample" if context.problem.samples < 2 else _uncut(context)

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        small = 1e-3 * effort["groups"]  # small groups use the machine badly
        return Work(gradients=2.5, seconds=small + 2e-8 * context.problem.size * effort["groups"])

    @inapplicable(ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> GradientNoise:
        return gradient_noise(context.problem, **effort, gradient=context.gradient, seed=context.seed)

    def rows(self, result: GradientNoise) -> list[Row]:
        names = {"loss": "loss", "norm": "gradient norm", "noise": "variance of one sample's gradient, tr Σ"}
        names |= {"noise_scale": "noise scale in samples"}
        return [
            {"quantity": quantity, "value": getattr(result, name), "error": getattr(result, f"{name}_error")}
            for name, quantity in names.items()
        ]

    def findings(self, context: SurveyContext, result: GradientNoise) -> list[Finding]:
        length = number(result.norm, result.norm_error)
        measured = ("gradient norm", result.norm, result.norm_error)
        if result.norm <= 1e-12 * max(1.0, abs(result.loss)):
            text = f"The gradient is zero ({result.norm:.1e}): a stationary point."
            return [self.found(Severity.NOTE, text, "stationary", *measured)]
        if math.isinf(result.noise_scale):
            text = f"The gradient has norm {length}, no more than its noise alone would make with {result.samples} samples."
            return [self.found(Severity.NOTE, text, "gradient lost in noise", *measured, advice="Average over more samples.")]
        text = f"The gradient has norm {length}; its noise scale is {_scale(result)}{_against(context, result)}."
        advice = "Batches far below the noise scale mostly average noise; batches far above it repeat what is known."
        measured = ("noise scale in samples", result.noise_scale, result.noise_scale_error)
        return [self.found(Severity.NOTE, text, "noise scale", *measured, advice=advice)]

    def figure(self, results: Results) -> Picture:
        rows = results[self.name].rows()
        if len(rows) < 4:
            return None
        title = "Loss and gradient of each group of samples"
        return th.plots.scatter(rows, x="loss", y="gradient_norm", title=title, ylabel="gradient norm")


def _scale(result: GradientNoise) -> str:
    """The noise scale with its error, or the admission that so few samples do not show it."""
    if not result.noise > 0:
        return "0 samples: all samples have the same gradient"
    if result.noise_scale_error >= result.noise_scale:
        return f"of the order of {result.noise_scale:.1g} samples, poorly known from {result.samples}"
    return f"{number(result.noise_scale, result.noise_scale_error)} samples"


def _against(context: SurveyContext, result: GradientNoise) -> str:
    """The noise scale beside the user's own batches."""
    if len(context.problem.data) < 2:
        return ""
    size = sorted(context.problem.data.sizes)[len(context.problem.data) // 2]
    ratio = result.noise_scale / size
    word = "noise wins" if ratio > 2 else "signal wins" if ratio < 0.5 else "both count"
    return f", {ratio:.2g} times your batches of {size} ({word})"


class Spikes(Instrument):
    name = "spikes"
    order = 200
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

    def applies(self, context: SurveyContext) -> str:
        if context.lr is None:
            return "no learning rate was given to compare with (lr=, --lr, or an optimizer)"
        if context.problem.samples < 2:
            return "there is one sample only, so every step sees all the data"
        return context.no_law or ("" if len(context.problem.data) > 1 else _uncut(context))

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        samples, size = context.problem.samples, _size(context)
        batches = effort["batches"] if size else min(effort["batches"], len(context.problem.data))
        share = batches * (size or samples / len(context.problem.data)) / samples
        return Work(gradients=5.0 + 4 * share, products=8 * share, seconds=0.02 * batches, bytes=24 * context.problem.size)

    @inapplicable(TheodoliteError, NotImplementedError)
    def run(self, context: SurveyContext, **effort: Any) -> BatchCriticalRates:
        size = _size(context)
        found = batch_critical_rates(
            context.problem, optimizer=context.optimizer, own=size is None, batch_size=size, **effort, seed=context.seed
        )
        assert context.lr is not None  # `applies` looked
        # The rate asked about may differ from the optimizer's own.
        share = Proportion(int((found.rates < context.lr).sum()), len(found.rates))
        return replace(found, rate=context.lr, below=share.value, below_error=share.error)

    def rows(self, result: BatchCriticalRates) -> list[Row]:
        names = {0.0: "smallest", 0.05: "5 %", 0.25: "25 %", 0.5: "median", 0.75: "75 %", 0.95: "95 %", 1.0: "largest"}
        return [{"share of batches": name, "critical rate at most": result.quantile(q)} for q, name in names.items()]

    def findings(self, context: SurveyContext, result: BatchCriticalRates) -> list[Finding]:
        assert result.below is not None and result.below_error is not None and result.rate is not None  # noqa: PT018
        count = len(result.rates)
        hits = round(result.below * count)
        if _size(context):
            looked = f"{count} random batches of {result.batch_size}"
        else:
            looked = f"{'all' if count == len(context.problem.data) else 'a random choice of'} {count} batches"
        lowest, middle = number(result.quantile(0.0)), number(result.median)
        measured = ("share of batches whose critical rate is exceeded", result.below, result.below_error)
        lies = f"exceeds the critical rate of {hits} of" if hits else "lies below the critical rate of"
        text = f"Your learning rate {result.rate:.4g} {lies} {looked} (smallest {lowest}, median {middle})"
        if not hits:
            text += ": no batch overshoots at these weights."
            return [self.found(Severity.NOTE, text, "batches below the edge", *measured)]
        rate = context.results.get("rate")
        if isinstance(rate, Regime) and rate.regime == "edge is no limit":
            text += ". On all the data a trial has shown the edge to be no limit here."
            return [self.found(Severity.NOTE, text, "edge is no limit", *measured)]
        text += ": single batches overshoot in their sharpest direction; whether that does harm, the trials of rates say."
        return [self.found(Severity.NOTE, text, "batches above the edge", *measured)]

    def figure(self, results: Results) -> Picture:
        result: BatchCriticalRates = results[self.name]
        finite = sorted(rate for rate in result.rates.tolist() if rate < float("inf"))
        if len(finite) < 2 or result.rate is None:
            return None
        rows = [{"batches": (i + 1) / len(result.rates), "critical rate": rate} for i, rate in enumerate(finite)]
        ylabel = "share of batches below"
        axes = th.plots.curves(rows, x="critical rate", y="batches", markers=False, ylabel=ylabel, title="Batches")
        return th.plots.reference(axes, x=result.rate, label="your rate")


def _uncut(context: SurveyContext) -> str:
    """Why one batch of data cannot stand for many of training."""
    why = context.problem.coupled
    return f"the data is one batch, and {why}. Give it in the batches of training" if why else ""


def _size(context: SurveyContext) -> int | None:
    """The size of random batches: that of the user's; None where the data comes in batches of its own."""
    if len(context.problem.data) > 1:
        return None
    return min(context.batch_size or USUAL, max(1, context.problem.samples // 2))
