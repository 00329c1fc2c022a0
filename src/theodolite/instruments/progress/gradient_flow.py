"""Do gradients reach every layer?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work
from theodolite.instruments.remedies import best_remedy
from theodolite.measures.audit import ParameterAudit
from theodolite.measures.progress import GradientFlow, LearningProgress, gradient_flow
from theodolite.measures.progress.gradient_flow import module_path
from theodolite.measures.progress.new_weights import draw_at_scale
from theodolite.measures.trials import Remedy, Setup
from theodolite.results import Finding, Severity
from theodolite.text import listed

#: Gradients of the first layers, over their weights, below this share of those of the last ones have vanished.
VANISHED = 3e-3
#: And above so many times those of the last ones they have exploded.
EXPLODED = 1e3
#: So do activations that grow by this factor from input to output, where the loss is above so many times the constant one.
GROWN, ABOVE = 30.0, 2.0
#: Half the layers have more than this share of their values where the activation is flat.
FLAT = 0.4
#: A layer stands still where a step changes it by less than this share, while the others move by so much.
STILL, MOVES = 1e-7, 1e-5
#: Gradient norm at which clipping is tried.
CLIP = 1.0


class GradientsByLayer(Instrument):
    name = "gradients"
    order = 34
    depth = "quick"
    title = "Gradients layer by layer"
    question = "Do gradients reach every layer, and how far does a step move it?"
    how = (
        "The gradient of all the data, and one step of your optimizer with it on a copy (for Adam with its second moments), each "
        "over the norm of the layer's weights. Activations of up to 256 samples: their scale before and behind each layer, the "
        "share of values at which sigmoid, tanh or softmax are flat, the share of units that are open on some sample."
    )
    source = "Glorot and Bengio (2010); He and others (2015): variances that stay the same from layer to layer."
    work = Work(gradients=1.5)
    columns: ClassVar[Mapping[str, str]] = {
        "layer": "layer",
        "weight_norm": "weight norm",
        "growth": "over that of new weights",
        "gradient_ratio": "gradient over weights",
        "update_ratio": "update over weights",
        "output_scale": "scale of outputs",
        "activation": "activation",
        "saturated": "saturated",
        "alive": "units alive",
    }

    def applies(self, context: SurveyContext) -> str:
        matrices = any(p.ndim >= 2 for p in context.problem.parameters)
        return "" if matrices else "no layer has a weight matrix"

    def run(self, context: SurveyContext, **effort: Any) -> GradientFlow:
        given: dict[str, Any] = {"lr": context.lr, "optimizer": context.optimizer, "gradient": context.gradient}
        return gradient_flow(context.problem, **given)

    def findings(self, context: SurveyContext, result: GradientFlow) -> list[Finding]:
        cause = fault(context, result)
        if cause == "vanishing gradients":
            assert result.first_to_last is not None
            weak = [row["layer"] for row in result.layers[: len(result.layers) // 3]]
            text = (
                f"Gradients vanish on the way back: relative to the weights, those of the first layers ({listed(weak, 3)}) are "
                f"{result.first_to_last:.1g} times those of the last."
            )
            measured = ("gradient of the first layers over that of the last", result.first_to_last)
        elif cause == "saturation":
            text = f"In half of the layers {100 * (result.saturation or 0):.0f} % of the values lie where the activation is flat."
            measured = ("share of saturated values, median over layers", result.saturation or 0.0)
        elif cause == "exploding gradients":
            text, measured = _growth(result)
        else:
            return [self._as_it_should(context, result), *self._still(context, result)]
        advice = f"{_START[0].upper()}{_START[1:].format(at=_scale_of(result))}."
        return [self.found(Severity.WARNING, text, cause, *measured, cause=cause, advice=advice)]

    def _as_it_should(self, context: SurveyContext, result: GradientFlow) -> Finding:
        ratios = [row["update_ratio"] for row in result.layers if row["update_ratio"] is not None]
        if not ratios:
            low, high = (f(row["gradient_ratio"] for row in result.layers) for f in (min, max))
            text = f"Layer by layer the gradient is {low:.2g} to {high:.2g} times the weights."
            return self.found(Severity.NOTE, text, "gradient flow", "smallest gradient over weights", low)
        low, high = min(ratios), max(ratios)
        text = f"A step changes the weights of each layer by {_percent(low)} to {_percent(high)}."
        measured = ("smallest update over weights", low)
        if high > 1e4 * max(low, 1e-30) or high > 0.3 or blocked(context):
            return self.found(Severity.NOTE, text, "gradient flow", *measured)
        return self.found(Severity.GOOD, f"Gradients reach every layer. {text}", "gradients reach all layers", *measured)

    def _still(self, context: SurveyContext, result: GradientFlow) -> list[Finding]:
        moved = {row["layer"]: row["update_ratio"] for row in result.layers if row["update_ratio"] is not None}
        still = [layer for layer, ratio in moved.items() if ratio < STILL and layer not in blocked(context)]
        if not still or max(moved.values()) < MOVES:
            return []
        text = f"A step hardly moves {listed(still, 4)}: by less than {STILL:g} of the weights."
        return [self.found(Severity.NOTE, text, "still layers", "layers that stand still", float(len(still)))]

    def remedies(self, context: SurveyContext, result: GradientFlow) -> Mapping[str, Remedy]:
        cause = fault(context, result)
        if not cause:
            return {}
        names = {module_path(context.problem, row["layer"]): row["activation"] for row in result.layers}

        def draw(setup: Setup) -> None:
            draw_at_scale(setup.model, names, context.seed)
            setup.optimizer.state.clear()

        def clip(setup: Setup) -> None:
            setup.clip = CLIP

        def to_relu(setup: Setup) -> None:
            _replace_sigmoids(setup.model)
            draw_at_scale(setup.model, {n: "relu" if a == "sigmoid" else a for n, a in names.items()}, context.seed)
            setup.optimizer.state.clear()

        options = [Remedy(_START.format(at=_scale_of(result)), draw)]
        if cause == "exploding gradients":
            options.append(Remedy(f"clip the norm of the gradient at {CLIP:g} (torch.nn.utils.clip_grad_norm_)", clip))
        if any(isinstance(module, nn.Sigmoid) for module in context.problem.model.modules()):
            options.append(Remedy("use ReLU instead of sigmoid, with weights from nn.init.kaiming_normal_", to_relu))
        return {cause: best_remedy(context, options)}

    def figure(self, results: Results) -> Picture:
        result: GradientFlow = results[self.name]
        return result.plot() if len(result.layers) > 1 else None


_START = "start from weights {at}"


def _scale_of(result: GradientFlow) -> str:
    """Which initialisation suits most of the layers."""
    found = [row["activation"] for row in result.layers if row["activation"] in ("relu", "tanh", "sigmoid")]
    most = max(sorted(set(found)), key=found.count, default="")
    return {
        "relu": "of He's scale (nn.init.kaiming_normal_, biases zero)",
        "tanh": "of Xavier's scale (nn.init.xavier_normal_ with gain 5/3, biases zero)",
        "sigmoid": "four times Xavier's scale (nn.init.xavier_normal_ with gain 4, biases −½ the sum of a unit's weights)",
    }.get(most, "of Xavier's scale (nn.init.xavier_normal_, biases zero)")


def _replace_sigmoids(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Sigmoid):
                setattr(parent, name, nn.ReLU())


def fault(context: SurveyContext, result: GradientFlow) -> str:
    """Which of the faults it is, if any; none where the model has learned something all the same."""
    progress = context.results.get("progress")
    if not _stuck(progress) or blocked(context):
        return ""
    ratio, growth, flat = result.first_to_last, result.amplification, result.saturation
    if flat is not None and flat > FLAT:
        return "saturation"
    if ratio is not None and ratio < VANISHED:
        return "vanishing gradients"
    if ratio is not None and ratio > EXPLODED:
        return "exploding gradients"
    known = isinstance(progress, LearningProgress) and progress.trivial is not None and progress.loss > ABOVE * progress.trivial
    return "exploding gradients" if known and growth is not None and growth > GROWN else ""


def _stuck(progress: Any) -> bool:
    """Whether the loss is no better than that of a constant prediction, as far as that is known."""
    if not isinstance(progress, LearningProgress):
        return True
    if progress.trivial is None:
        return progress.state != "learning"
    return not progress.below


def blocked(context: SurveyContext) -> set[str]:
    """Layers that no gradient reaches for a reason of its own: dead, waiting for one that starts at zero, or unused."""
    audit = context.results.get("parameters")
    if not isinstance(audit, ParameterAudit):
        return set()
    unused = {name.rpartition(".")[0] for name in audit.unreached}
    every = {str(row["layer"]) for row in audit.layers} if audit.motionless else set()
    return {*audit.dead_layers, *audit.waiting, *unused, *every}


def _growth(result: GradientFlow) -> tuple[str, tuple[str, float]]:
    if result.first_to_last is not None and result.first_to_last > EXPLODED:
        text = (
            f"Gradients explode on the way back: relative to the weights, those of the first layers are "
            f"{result.first_to_last:.1g} times those of the last."
        )
        return text, ("gradient of the first layers over that of the last", result.first_to_last)
    assert result.amplification is not None
    text = f"Values grow {result.amplification:.0f} times from the first layer to the last, and gradients with them."
    return text, ("scale of the last output over that of the input", result.amplification)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %"
