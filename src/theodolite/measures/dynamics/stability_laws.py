"""At which learning rate an optimizer leaves a quadratic bowl, rule by rule.

On a quadratic loss with Hessian H an optimizer is a linear recursion; along an eigenvector with eigenvalue λ it becomes
unstable where a root of its characteristic polynomial passes −1. The rules below are those roots solved for the rate η.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.operators import LinearOperator
from theodolite.operators.algebra import DiagonalOperator, congruent
from theodolite.problem import Problem


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
    optimizer = plain_optimizer(optimizer)
    if optimizer is None:
        return StabilityLaw("2/λ", lambda x: 2.0 / x)
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("The optimizer maximizes; a critical learning rate belongs to minimizing.")
    for kind, law in _LAWS.items():
        if isinstance(optimizer, kind):
            return law(optimizer, problem, coming_step)
    known = ", ".join(kind.__name__ for kind in _LAWS)
    raise ValueError(f"No stability law is known for {type(optimizer).__name__}. Known: {known}, or None for plain descent.")


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside wrappers that hold it as `.optimizer`, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return plain_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def _sgd(optimizer: Optimizer, problem: Problem, coming_step: bool) -> StabilityLaw:
    group = _common(optimizer, "momentum", "dampening", "nesterov")
    beta, damp = float(group["momentum"]), float(group["dampening"])
    scale, decay = _relative_rates(optimizer, problem), weight_decay(optimizer, problem)
    shown = "λ" if decay is None else "(λ+wd)"
    if not beta:
        return StabilityLaw(f"2/{shown}", lambda x: 2.0 / x, _root(scale), decay)
    if group["nesterov"]:
        rule = f"2(1+β)/((1+2β){shown}), β = {beta:g}"
        return StabilityLaw(rule, lambda x: 2.0 * (1.0 + beta) / ((1.0 + 2.0 * beta) * x), _root(scale), decay)
    if damp >= 1.0:
        raise ValueError(f"With dampening {damp:g} the gradient never enters the momentum: there is no edge.")
    damped = f"(1−τ){shown}, τ = {damp:g}" if damp else shown
    rule = f"2(1+β)/{damped}, β = {beta:g}"
    return StabilityLaw(rule, lambda x: 2.0 * (1.0 + beta) / ((1.0 - damp) * x), _root(scale), decay)


def _adam(optimizer: Optimizer, problem: Problem, coming_step: bool) -> StabilityLaw:
    """At the edge `2(1+β) I − η[(1−β) P⁻¹H + (1+β) W]` is singular, with W the decoupled decay of each parameter."""
    group = _common(optimizer, "betas", "eps", "amsgrad", "decoupled_weight_decay")
    beta = float(group["betas"][0])
    preconditioner, note = _second_moment(optimizer, problem, coming_step)
    rates = _relative_rates(optimizer, problem)
    scale = _root(1.0 / preconditioner if rates is None else rates / preconditioner)
    decay = weight_decay(optimizer, problem)
    floored = preconditioner <= 100 * float(group["eps"])
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))

    def rate(x: float) -> float:
        return 2.0 * (1 + beta) / ((1 - beta) * x)

    if decoupled and decay is not None:
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


def _root(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.sqrt()
