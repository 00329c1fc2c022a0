"""May the gradient of a whole training be believed? How fast a small change of the weights grows at the user's rate."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import subset
from theodolite.measures.dynamics.sweep import joined_data
from theodolite.measures.kernel.problem_views import measured_copy
from theodolite.measures.stepsize import MetaGradient, meta_gradient
from theodolite.measures.stepsize.meta_gradients.meta_gradient import EXPLODES
from theodolite.results import Finding, Severity
from theodolite.text import number

#: Samples that the copy trains on.
SAMPLES = 2000
#: What a step takes beside its gradient: the product of a tangent, and the runs one percent to either side.
PRODUCTS, RUNS = 1.0, 3.0
#: What Python takes for a step, in seconds.
OVERHEAD = 2e-3
_KINDS = (SGD, Adam, AdamW, RMSprop)


class StepSize(Instrument):
    name = "step_size"
    order = 205
    depth = "deep"
    title = "The gradient of a training"
    question = "Over how many steps may the gradient with respect to the learning rate be believed?"
    how = (
        "A copy trains at your learning rate with your optimizer, from a fresh state, and a tangent is carried along: how "
        "the weights would move with the rate. Its growth is that of any small change of the weights. The derivative is compared "
        "with the slope of the loss over rates one percent lower and higher."
    )
    source = "Metz and others (2019): exploding gradients of unrolled training; Wang and others (2021), section 3."
    efforts = ({"steps": 200}, {"steps": 80}, {"steps": 30})
    columns: ClassVar = {"hyper": "hyperparameter", "value": "value", "gradient": "derivative", "slope": "slope over 1 %"}

    def concerns(self, context: SurveyContext) -> bool:
        return context.lr is not None

    def applies(self, context: SurveyContext) -> str:
        if context.lr is None:
            return "it needs the learning rate: give lr= or the optimizer"
        if context.problem.loss_function is None:
            return "it takes models whose loss is a function of outputs and targets"
        if context.optimizer is not None and type(context.optimizer) not in _KINDS:
            return f"derivatives of {type(context.optimizer).__name__} are not known, of SGD, Adam, AdamW and RMSprop they are"
        return next(filter(None, map(_no_fixed_run, context.problem.model.modules())), "")

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        width = min(1.0, context.usual_batch_size / context.problem.samples)
        steps = effort["steps"]
        return Work(
            gradients=RUNS * steps * width + 3, products=PRODUCTS * steps * width, seconds=OVERHEAD * (1 + RUNS) * steps + 0.1
        )

    @inapplicable(TheodoliteError, ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> MetaGradient:
        problem = context.problem
        data = joined_data(subset(problem, SAMPLES))
        return meta_gradient(
            lambda seed: _trained_copy(context),
            lambda parameters: _like(context, parameters),
            data,
            steps=effort["steps"],
            loss=problem.loss_function,
            batch_size=min(context.usual_batch_size, problem.samples),
            seed=max(0, context.seed),
            progress=False,
        )

    def findings(self, context: SurveyContext, result: MetaGradient) -> list[Finding]:
        rate, steps = f"{result.values['lr']:.3g}", result.steps
        if result.health == "diverged":
            text = f"At your learning rate {rate} a copy diverges within {steps} steps, so its result has no derivative."
            return [self.found(Severity.WARNING, text, "training has no derivative")]
        grows = result.growth > 0
        measured = ("steps in which a small change grows e-fold", result.horizon if grows else None)
        if result.health == "explodes":
            text = (
                f"At your learning rate {rate} a small change of the weights grows e-fold in {number(result.horizon)} steps: "
                f"over {steps} steps the derivative of the loss in the rate explodes. It can be used up to some "
                f"{usable_steps(result.growth)} steps."
            )
            advice = "Do not tune by gradients through longer trainings: sweep (th.tune_step_size does both)."
            return [self.found(Severity.NOTE, text, "training gradient explodes", *measured, advice=advice)]
        if result.health == "kinked":
            derivative, slope = result.percents["lr"]
            text = (
                f"By its derivative 1 % more of your learning rate {rate} changes the loss after {steps} steps by "
                f"{number(derivative)} %, by runs over one percent to either side by "
                f"{number(slope)} %: the loss is kinked, by ReLU or the like, or bent, near the "
                "edge of stability."
            )
            advice = "Tune by a sweep, or by slopes over larger changes (th.tune_step_size does both)."
            return [self.found(Severity.NOTE, text, "training gradient kinked", *measured, advice=advice)]
        if result.health == "vanishes":
            text = f"The loss after {steps} steps at {rate} does not depend on the learning rate: its derivative has vanished."
            return [self.found(Severity.NOTE, text, "training gradient vanishes")]
        far = f"some {usable_steps(result.growth)} steps" if grows else f"{steps} steps and more"
        how = f"grows e-fold in {number(result.horizon)} steps" if grows else "does not grow"
        text = (
            f"At your learning rate {rate} a small change of the weights {how}: the gradient of the training with respect to the "
            f"rate can be used over {far}."
        )
        return [self.found(Severity.NOTE, text, "training gradient usable", *measured)]

    def figure(self, results: Results) -> Picture:
        result: MetaGradient = results[self.name]
        rows = [{"step": row["step"], "length": row["length of lr"]} for row in result.trace if "length of lr" in row]
        rows = [row for row in rows if math.isfinite(row["length"])]
        if len(rows) < 2:
            return None
        labels = {"ylabel": "logarithm of ‖dw / dlog lr‖", "title": "How far the weights move with the rate"}
        return th.plots.curves(rows, "step", "length", markers=False, **labels)  # type: ignore[arg-type]


def usable_steps(growth: float) -> int:
    """Steps over which a perturbation that grows by so much per step grows a thousandfold.

    >>> usable_steps(0.0693), usable_steps(1.0)
    (100, 7)
    """
    return round(EXPLODES / growth)


def _no_fixed_run(module: nn.Module) -> str:
    """Why a training with this module is no function of its start that has a derivative; empty where it is."""
    if getattr(module, "running_mean", None) is not None:
        return "derivatives do not follow the running averages of BatchNorm"
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return "dropout draws random numbers in training" if drops else ""


def _trained_copy(context: SurveyContext) -> nn.Module:
    return measured_copy(context.problem)


def _like(context: SurveyContext, parameters: list[Any]) -> Optimizer:
    """A new optimizer of the same kind, groups and settings, at the user's learning rate, which is that of the first group."""
    optimizer, lr = context.optimizer, context.lr or 0.0
    if optimizer is None:
        return SGD(parameters, lr=lr)
    kind: Any = type(optimizer)
    known = set(kind([nn.Parameter(parameters[0].detach().clone())], lr=0.1).defaults) - {"decoupled_weight_decay"}
    first = float(optimizer.param_groups[0]["lr"])
    groups = []
    for group in optimizer.param_groups:
        own = {id(p) for p in group["params"]}
        members = [new for new, old in zip(parameters, context.problem.parameters, strict=True) if id(old) in own]
        settings = {name: value for name, value in group.items() if name in known}
        rate = float(group["lr"]) * (lr / first) if first else lr
        groups += [{"params": members, **settings, "lr": rate}] if members else []
    return kind(groups)  # type: ignore[no-any-return]
