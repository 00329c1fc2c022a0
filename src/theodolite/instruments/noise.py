"""How low is the loss, how long the gradient, and how loud its noise?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from theodolite.instruments.base import InapplicableError, Instrument, Site, Work
from theodolite.measures.audit import BatchAudit
from theodolite.measures.dynamics import GradientNoise, gradient_noise
from theodolite.results import Finding, Row, Severity, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Noise(Instrument):
    name = "noise"
    title = "Loss, gradient and its noise"
    question = "How low is the loss, how long is the gradient, and how large must a batch be to see it?"
    how = (
        "The data is cut into groups; the spread of their gradients gives the variance of one sample's gradient, tr Σ. The noise "
        "scale is tr Σ / ‖g‖², with ‖g‖² freed of its own noise. Errors by the jackknife over the groups."
    )
    source = "McCandlish, Kaplan, Amodei and others (2018), An Empirical Model of Large-Batch Training."
    efforts = ({"groups": 32}, {"groups": 8})

    def applies(self, site: Site) -> str:
        return "" if site.problem.samples > 1 or len(site.problem.data) > 1 else "there is only one sample"

    def cost(self, site: Site, **effort: Any) -> Work:
        small = 1e-3 * effort["groups"]  # small groups use the machine badly
        return Work(gradients=2.5, seconds=small + 2e-8 * site.problem.size * effort["groups"])

    def run(self, site: Site, **effort: Any) -> GradientNoise:
        try:
            return gradient_noise(site.problem, groups=effort["groups"], gradient=site.gradient, seed=site.seed)
        except ValueError as error:
            raise InapplicableError(str(error)) from error

    def rows(self, result: GradientNoise) -> list[Row]:
        return [
            {"quantity": "loss", "value": result.loss, "error": result.loss_error},
            {"quantity": "gradient norm", "value": result.norm, "error": result.norm_error},
            {"quantity": "variance of one sample's gradient, tr Σ", "value": result.noise, "error": result.noise_error},
            {"quantity": "noise scale in samples", "value": result.noise_scale, "error": result.noise_scale_error},
        ]

    def findings(self, site: Site, result: GradientNoise) -> list[Finding]:
        return [self._loss(site, result), *self._noise(site, result)]

    def _loss(self, site: Site, result: GradientNoise) -> Finding:
        text = f"The loss is {number(result.loss, result.loss_error)}"
        fields: dict[str, Any] = {"quantity": "loss", "value": result.loss, "error": result.loss_error}
        guess = _guessing(site)
        if guess is None:
            return self.found(Severity.NOTE, f"{text}.", label="loss", **fields)
        if result.loss > guess - 2 * result.loss_error - 0.02 * guess:
            advice = "Nothing has been learned yet, or the labels do not fit the inputs."
            text += f", no better than always predicting the frequencies of the classes ({guess:.4g})."
            return self.found(Severity.NOTE, text, label="chance level", advice=advice, **fields)
        return self.found(
            Severity.GOOD, f"{text}; predicting the frequencies of the classes would give {guess:.4g}.", label="loss", **fields
        )

    def _noise(self, site: Site, result: GradientNoise) -> list[Finding]:
        length = number(result.norm, result.norm_error)
        fields = {"quantity": "gradient norm", "value": result.norm, "error": result.norm_error}
        if result.norm <= 1e-12 * max(1.0, abs(result.loss)):
            return [
                self.found(
                    Severity.NOTE, f"The gradient is zero ({result.norm:.1e}): a stationary point.", label="stationary", **fields
                )
            ]
        if math.isinf(result.noise_scale):
            text = f"The gradient has norm {length}, no more than its noise alone would make with {result.samples} samples."
            return [
                self.found(Severity.NOTE, text, label="gradient lost in noise", advice="Average over more samples.", **fields)
            ]
        text = f"The gradient has norm {length}; its noise scale is {_scale(result)}{_against(site, result)}."
        advice = "Batches far below the noise scale mostly average noise; batches far above it repeat what is known."
        fields = {"quantity": "noise scale in samples", "value": result.noise_scale, "error": result.noise_scale_error}
        return [self.found(Severity.NOTE, text, label="noise scale", advice=advice, **fields)]

    def figure(self, results: Mapping[str, Any]) -> Axes | None:
        from theodolite import plots

        rows = results[self.name].rows()
        if len(rows) < 4:
            return None
        drawn = plots.scatter(
            rows, x="loss", y="gradient_norm", title="Loss and gradient of each group of samples", ylabel="gradient norm"
        )
        return drawn


def _scale(result: GradientNoise) -> str:
    """The noise scale with its error, or the admission that so few samples do not tell it."""
    if not result.noise > 0:
        return "0 samples: all samples have the same gradient"
    if result.noise_scale_error >= result.noise_scale:
        return f"of the order of {result.noise_scale:.1g} samples, poorly known from {result.samples}"
    return f"{number(result.noise_scale, result.noise_scale_error)} samples"


def _guessing(site: Site) -> float | None:
    """The cross-entropy of predicting the class frequencies; None where the loss is another or weighs the classes."""
    loss, audit = site.problem.loss_function, site.results.get("batches")
    if not isinstance(loss, nn.CrossEntropyLoss) or loss.weight is not None or loss.label_smoothing:
        return None
    if not isinstance(audit, BatchAudit) or audit.classes < 2:
        return None
    return audit.label_entropy * (audit.labels if loss.reduction == "sum" else 1)


def _against(site: Site, result: GradientNoise) -> str:
    """The noise scale beside the user's own batches."""
    if len(site.problem.data) < 2:
        return ""
    size = sorted(batch.size for batch in site.problem.data)[len(site.problem.data) // 2]
    ratio = result.noise_scale / size
    word = "noise wins" if ratio > 2 else "signal wins" if ratio < 0.5 else "both count"
    return f", {ratio:.2g} times your batches of {size} ({word})"
