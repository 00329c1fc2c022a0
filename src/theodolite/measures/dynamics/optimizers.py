"""An optimizer at a learning rate: where it leaves a quadratic bowl, rule by rule, and what a short run on a copy does.

On a quadratic loss with Hessian H an optimizer is a linear recursion; along an eigenvector with eigenvalue λ it becomes
unstable where a root of its characteristic polynomial passes −1. The rules below are those roots solved for the rate η.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from theodolite.errors import NonFiniteError
from theodolite.operators import LinearOperator
from theodolite.operators.algebra import DiagonalOperator, congruent
from theodolite.problem import Problem
from theodolite.progress import Advance


@dataclass(frozen=True)
class StabilityLaw:
    """The edge of an optimizer: `rate(λ)` with λ the largest eigenvalue of `S (H + W) S`.

    `scale` is S (one number per parameter: square roots of relative learning rates and of a frozen preconditioner),
    `decay` is W (coupled weight decay); None where they do not matter. `shift` is added after the scaling (decoupled decay).
    `linear` says whether the optimizer really is a linear recursion on a quadratic loss: Adam is not, its preconditioner
    moves. `floored` marks parameters whose second moment is so small that eps decides.
    """

    rule: str
    rate: Callable[[float], float]
    scale: Tensor | None = None
    decay: Tensor | None = None
    note: str = ""
    shift: Tensor | None = None
    linear: bool = True
    floored: Tensor | None = None

    @property
    def even_decay(self) -> bool:
        """Whether all parameters decay alike, or none does."""
        return self.decay is None or bool((self.decay == self.decay[0]).all())

    def effective(self, op: LinearOperator) -> LinearOperator:
        """The operator whose largest eigenvalue sets the edge."""
        if self.decay is not None:
            op = op + DiagonalOperator(self.decay.to(op.device, op.dtype))
        if self.scale is not None:
            op = congruent(op, self.scale.to(op.device, op.dtype))
        return op if self.shift is None else op + DiagonalOperator(self.shift.to(op.device, op.dtype))


def stability_law(optimizer: Optimizer | None, problem: Problem, *, coming_step: bool = False) -> StabilityLaw:
    """The law of an optimizer as it stands, its state included; None means plain gradient descent.

    `coming_step` takes Adam's second moment as the coming step will use it, with the gradients that lie ready in `.grad`.
    """
    if optimizer is None:
        return StabilityLaw("2/λ", lambda x: 2.0 / x)
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("The optimizer maximizes; a critical learning rate belongs to minimizing.")
    for kind, law in _LAWS.items():
        if isinstance(optimizer, kind):
            return law(optimizer, problem, coming_step)
    known = ", ".join(kind.__name__ for kind in _LAWS)
    raise ValueError(f"No stability law is known for {type(optimizer).__name__}. Known: {known}, or None for plain descent.")


def _sgd(optimizer: Optimizer, problem: Problem, coming_step: bool) -> StabilityLaw:
    group = _common(optimizer, "momentum", "dampening", "nesterov")
    beta, damp = float(group["momentum"]), float(group["dampening"])
    rates, decay = _relative_rates(optimizer, problem), weight_decay(optimizer, problem)
    scale = None if rates is None else rates.sqrt()
    shown = "λ" if decay is None else "(λ+wd)"
    if not beta:
        return StabilityLaw(f"2/{shown}", lambda x: 2.0 / x, scale, decay)
    if group["nesterov"]:
        rule = f"2(1+β)/((1+2β){shown}), β = {beta:g}"
        return StabilityLaw(rule, lambda x: 2.0 * (1.0 + beta) / ((1.0 + 2.0 * beta) * x), scale, decay)
    if damp >= 1.0:
        raise ValueError(f"With dampening {damp:g} the gradient never enters the momentum: there is no edge.")
    damped = f"(1−τ){shown}, τ = {damp:g}" if damp else shown
    rule = f"2(1+β)/{damped}, β = {beta:g}"
    return StabilityLaw(rule, lambda x: 2.0 * (1.0 + beta) / ((1.0 - damp) * x), scale, decay)


def _adam(optimizer: Optimizer, problem: Problem, coming_step: bool) -> StabilityLaw:
    """At the edge `2(1+β) I − η[(1−β) P⁻¹H + (1+β) W]` is singular, with W the decoupled decay of each parameter."""
    group = _common(optimizer, "betas", "eps", "amsgrad", "decoupled_weight_decay")
    beta = float(group["betas"][0])
    preconditioner, note = _second_moment(optimizer, problem, coming_step)
    rates = _relative_rates(optimizer, problem)
    scale = (1.0 / preconditioner if rates is None else rates / preconditioner).sqrt()
    decay = weight_decay(optimizer, problem)
    floored = preconditioner <= 100 * float(group["eps"])

    def rate(x: float) -> float:
        return 2.0 * (1 + beta) / ((1 - beta) * x)

    if decay is not None and decoupled(optimizer):
        shift = (1 + beta) / (1 - beta) * (decay if rates is None else decay * rates)
        rule = f"2(1+β₁)/((1−β₁)λ), λ of P⁻¹H + (1+β₁)/(1−β₁) wd, β₁ = {beta:g}"
        return StabilityLaw(rule, rate, scale, None, note, shift, linear=False, floored=floored)
    shown = "λ(P⁻¹H)" if decay is None else "λ(P⁻¹(H+wd))"
    rule = f"2(1+β₁)/((1−β₁){shown}), β₁ = {beta:g}"
    return StabilityLaw(rule, rate, scale, decay, note, linear=False, floored=floored)


_LAWS: dict[type[Optimizer], Callable[[Optimizer, Problem, bool], StabilityLaw]] = {
    torch.optim.SGD: _sgd,
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
}


def _common(optimizer: Optimizer, *names: str) -> dict[str, Any]:
    """The first group, if all groups agree on these settings."""
    first = optimizer.param_groups[0]
    for name in names:
        if any(group.get(name) != first.get(name) for group in optimizer.param_groups):
            raise ValueError(f"The optimizer's groups differ in {name}; a critical learning rate needs one value.")
    return first


def _per_parameter(optimizer: Optimizer, problem: Problem, value: Callable[[dict[str, Any], Tensor], Any]) -> Tensor:
    """A flat vector over the problem's parameters: a number or a tensor for each, from its group."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = []
    for name, p in zip(problem.names, problem.parameters, strict=True):
        if id(p) not in groups:
            raise ValueError(f"The optimizer does not train {name}. Select what it trains: Problem(..., params=...).")
        found = value(groups[id(p)], p)
        parts.append(torch.as_tensor(found, dtype=torch.float64, device=p.device).detach().expand(p.shape).reshape(-1))
    return torch.cat(parts)


def _relative_rates(optimizer: Optimizer, problem: Problem) -> Tensor | None:
    """Learning rates in units of the first group's; None where all are equal."""
    first = float(optimizer.param_groups[0]["lr"])
    if all(float(group["lr"]) == first for group in optimizer.param_groups):
        _per_parameter(optimizer, problem, lambda group, p: 1.0)  # for its check
        return None
    if not first:
        raise ValueError("The learning rate of the first group is 0; the others cannot be measured by it.")
    return _per_parameter(optimizer, problem, lambda group, p: float(group["lr"]) / first)


def weight_decay(optimizer: Optimizer, problem: Problem) -> Tensor | None:
    """The decay of each parameter as a flat vector; None where there is none."""
    if not any(float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups):
        return None
    return _per_parameter(optimizer, problem, lambda group, p: float(group["weight_decay"]))


def _second_moment(optimizer: Optimizer, problem: Problem, coming_step: bool) -> tuple[Tensor, str]:
    """`sqrt(v̂) + eps` per parameter, from the optimizer's state or, before its first step, from the gradient."""
    if not any(optimizer.state.values()) and not coming_step:
        gradient = problem.gradient().double().abs()
        eps = _per_parameter(optimizer, problem, lambda group, p: group["eps"])
        return gradient + eps.to(gradient), "its second moment is that of a first step here, for it has taken none yet"

    def root(group: dict[str, Any], p: Tensor) -> Tensor:
        moment, steps = _moment_of(optimizer, group, p, coming_step)
        correction = 1.0 - float(group["betas"][1]) ** steps
        root_of: Tensor = (moment / correction).sqrt() + float(group["eps"])
        return root_of

    return _per_parameter(optimizer, problem, root), "its second moment is held as it stands; live Adam adapts and tolerates more"


def _moment_of(optimizer: Optimizer, group: dict[str, Any], p: Tensor, coming_step: bool) -> tuple[Tensor, float]:
    """The second moment of a parameter and the number of steps behind it."""
    state = optimizer.state.get(p)
    if not state and p.grad is None:  # nothing depends on it so far: any scale will do
        return torch.ones_like(p, dtype=torch.float64), 1.0
    if not state and not coming_step:
        raise ValueError("The optimizer has stepped some parameters and not others; take one more step with all of them.")
    steps = float(state["step"]) if state else 0.0
    moment = state["exp_avg_sq"].double() if state else torch.zeros_like(p, dtype=torch.float64)
    if coming_step and p.grad is not None:
        beta = float(group["betas"][1])
        moment, steps = beta * moment + (1.0 - beta) * p.grad.double().square(), steps + 1.0
    if group.get("amsgrad") and state:
        moment = torch.maximum(moment, state["max_exp_avg_sq"].double())
    return moment, max(steps, 1.0)


#: A loss this many times the first one has diverged.
BLOWN_UP = 1e8


def run_trial(
    problem: Problem, rate: float, *, optimizer: Optimizer | None = None, steps: int = 60, advance: Advance | None = None
) -> tuple[float, ...]:
    """Losses before each of `steps` full-batch steps on a copy of the model, and after the last.

    The run ends early, with infinity as its last loss, once it has diverged. Coupled weight decay is part of what descends,
    so the losses hold ½ Σ wd w² too; decoupled decay, which descends nothing, is left out. Nothing of the user's is touched.
    """
    decay = None if optimizer is None or decoupled(optimizer) else weight_decay(optimizer, problem)
    losses: list[float] = []
    for taken, loss, trial in descend(problem, rate, steps, optimizer, decoupled_decay=False):
        if decay is not None:
            loss += 0.5 * float((decay * trial.vector.double().square()).sum())
        losses.append(loss if not losses or abs(loss) <= BLOWN_UP * max(abs(losses[0]), 1e-30) else math.inf)
        if taken and advance is not None:
            advance(1)
        if not math.isfinite(losses[-1]):
            return tuple(losses)
    return tuple(losses) if len(losses) == steps + 1 else (*losses, math.inf)


def descend(
    problem: Problem, rate: float, steps: int, optimizer: Optimizer | None = None, *, decoupled_decay: bool = True
) -> Iterator[tuple[int, float, Problem]]:
    """Full-batch steps on a copy: (steps taken, loss, the copy as it stands) before each step and after the last.

    The optimizer is copied with its state; its groups keep the ratio of their rates to the first. `decoupled_decay=False`
    leaves the decay of AdamW out. The run ends early where the loss is not finite. Half-precision models are trained in
    float64, where small steps do not get lost.
    """
    trial = problem.in_float64() if problem.half_precision else problem.copied()
    stepper = copy_optimizer(optimizer, problem, trial, rate)
    if decoupled(optimizer) and not decoupled_decay:
        for group in stepper.param_groups:
            group["weight_decay"] = 0.0
    for taken in range(steps + 1):
        try:
            loss, gradient = trial.loss_and_gradient() if taken < steps else (trial.loss(), None)
        except NonFiniteError:
            return
        yield taken, loss, trial
        if gradient is None:
            return
        for p, g in zip(trial.parameters, trial.split(gradient).values(), strict=True):
            p.grad = g.to(p.dtype).reshape(p.shape)
        stepper.step()


def decoupled(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer shrinks the weights beside the gradient step."""
    groups = [] if optimizer is None else optimizer.param_groups
    return isinstance(optimizer, AdamW) or any(group.get("decoupled_weight_decay") for group in groups)


def copy_optimizer(optimizer: Optimizer | None, problem: Problem, trial: Problem, rate: float) -> Optimizer:
    """The optimizer with its settings and state, for the parameters of a copy, its first group at `rate`."""
    if optimizer is None:
        return SGD(trial.parameters, lr=rate)
    twin = {id(p): q for p, q in zip(problem.parameters, trial.parameters, strict=True)}
    first = float(optimizer.param_groups[0]["lr"]) or 1.0
    state = copy.deepcopy(optimizer.state_dict())
    # Parameters that are not measured do not move; dummies keep the numbering of the state.
    groups = [
        {"params": [twin[id(p)] if id(p) in twin else p.detach().clone() for p in group["params"]], "lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    fresh: Optimizer = kind(groups, lr=rate)
    fresh.load_state_dict(state)
    for group in fresh.param_groups:
        group["lr"] = float(group["lr"]) / first * rate
    return fresh
