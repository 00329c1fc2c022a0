"""An optimizer at a learning rate: where it leaves a quadratic bowl, rule by rule, and what a short run on a copy does.

On a quadratic loss with Hessian H an optimizer is a linear recursion; along an eigenvector with eigenvalue λ it becomes
unstable where a root of its characteristic polynomial passes −1. The rules below are those roots solved for the rate η.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from theodolite.errors import ClosureError, NonFiniteError
from theodolite.operators import LinearOperator
from theodolite.operators.algebra import DiagonalOperator, congruent
from theodolite.problem import Problem
from theodolite.problem.optimizers import needs_closure
from theodolite.progress import Advance


@dataclass(frozen=True)
class StabilityLaw:
    """The edge of an optimizer: `rate(λ)` with λ the largest eigenvalue of `S (H + W) S`.

    `scale` is S (one number per parameter: square roots of relative learning rates and of a frozen preconditioner),
    `decay` is W (coupled weight decay); None where they do not matter. `shift` is added after the scaling (decoupled decay).
    `linear` says whether the optimizer really is a linear recursion on a quadratic loss: Adam is not, its preconditioner
    moves. `floored` marks parameters whose second moment is so small that eps decides. `clip` scales H: the gradients that
    the optimizer sees over those of the loss.
    """

    rule: str
    rate: Callable[[float], float]
    scale: Tensor | None = None
    decay: Tensor | None = None
    note: str = ""
    shift: Tensor | None = None
    linear: bool = True
    floored: Tensor | None = None
    clip: float = 1.0

    def clipped(self, factor: float | None) -> StabilityLaw:
        """The law where gradients reach the optimizer times `factor`, as clipping by norm makes them: H becomes cH."""
        if factor is None or factor == 1.0:
            return self
        return replace(self, rule=f"{self.rule}, H times the clip factor c = {factor:.3g}", clip=factor)

    @property
    def even_decay(self) -> bool:
        """Whether all parameters decay alike, or none does."""
        return self.decay is None or bool((self.decay == self.decay[0]).all())

    def effective(self, op: LinearOperator) -> LinearOperator:
        """The operator whose largest eigenvalue sets the edge."""
        op = op if self.clip == 1.0 else self.clip * op
        if self.decay is not None:
            op = op + DiagonalOperator(self.decay.to(op.device, op.dtype))
        if self.scale is not None:
            op = congruent(op, self.scale.to(op.device, op.dtype))
        return op if self.shift is None else op + DiagonalOperator(self.shift.to(op.device, op.dtype))


def stability_law(
    optimizer: Optimizer | None, problem: Problem, *, coming_step: bool = False, ready: float = 1.0
) -> StabilityLaw:
    """The law of an optimizer as it stands, its state included; None means plain gradient descent.

    `coming_step` takes Adam's second moment as the coming step will use it, with `ready` times the gradients in `.grad`.
    """
    optimizer = plain_optimizer(optimizer)
    if optimizer is None:
        return StabilityLaw("2/λ", lambda x: 2.0 / x)
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("The optimizer maximizes; a critical learning rate belongs to minimizing.")
    for kind, law in _LAWS.items():
        if isinstance(optimizer, kind):
            return law(optimizer, problem, ready if coming_step else None)
    known = ", ".join(kind.__name__ for kind in _LAWS)
    raise ValueError(
        f"No stability law is known for {type(optimizer).__name__}. {_TRIAL} Known: {known}, or None for plain descent."
    )


def has_law(optimizer: Optimizer | None) -> bool:
    """Whether `stability_law` knows the kind of an optimizer."""
    centered = optimizer is not None and any(group.get("centered") for group in optimizer.param_groups)
    return optimizer is None or (isinstance(optimizer, tuple(_LAWS)) and not centered)


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside wrappers that hold it as `.optimizer`, such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return plain_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def _sgd(optimizer: Optimizer, problem: Problem, ready: float | None) -> StabilityLaw:
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


# Adaptive methods: a second moment per parameter, held as it stands, is a preconditioner P


@dataclass(frozen=True)
class _Adaptive:
    """`name`, the second moment (`key` of the state), what a gradient makes of it, the P it gives at step t, and the gain k.

    With P held, the edge is where `2 I − η k [P⁻¹H + W/k]` is singular, W the decoupled decay: η = 2/(kλ).
    """

    name: str
    key: str
    update: Callable[[dict[str, Any], Tensor, Tensor], Tensor]
    root: Callable[[dict[str, Any], Tensor, float], Tensor]
    gain: Callable[[dict[str, Any], dict[str, Any], float], tuple[float, str, str]]

    def law(self, optimizer: Optimizer, problem: Problem, ready: float | None) -> StabilityLaw:
        """The law of an optimizer of this kind."""
        group = _common(optimizer, "betas", "alpha", "momentum", "centered", "eps", "amsgrad", "decoupled_weight_decay")
        if group.get("centered"):
            raise ValueError(f"No stability law is known for centered {self.name}. {_TRIAL}")
        preconditioner, steps, note = _second_moment(optimizer, problem, ready, self)
        state: dict[str, Any] = next((state for state in optimizer.state.values() if state), {})
        gain, formula, symbols = self.gain(group, state, steps)
        rates, decay = _relative_rates(optimizer, problem), weight_decay(optimizer, problem)
        scale = (1.0 / preconditioner if rates is None else rates / preconditioner).sqrt()
        shift, shown = None, "λ(P⁻¹H)" if decay is None else "λ(P⁻¹(H+wd))"
        if decay is not None and decoupled(optimizer):
            shift, shown = (decay if rates is None else decay * rates) / gain, "λ"
            decay, symbols = None, f"λ of P⁻¹H + wd/k, k = {gain:.3g}, {symbols}"
        rule = ", ".join(filter(None, [formula.format(shown), symbols, self._correction(group, steps)]))
        floored = preconditioner <= 100 * float(group["eps"])
        return StabilityLaw(rule, lambda x: 2.0 / (gain * x), scale, decay, note, shift, linear=False, floored=floored)

    def _correction(self, group: dict[str, Any], steps: float) -> str:
        """The bias correction of the momentum, as far as it still counts."""
        left = 1.0 - _bias(group, steps) if "betas" in group and self.name != "NAdam" else 0.0
        return f"P with the bias correction 1−β₁ᵗ = {1.0 - left:.3g} of step t = {steps:g}" if left > 1e-3 else ""


def _bias(group: dict[str, Any], steps: float, which: int = 0) -> float:
    """1 − βᵗ: what an average of t steps that began at zero is divided by."""
    beta = float(group["betas"][which])
    return float(1.0 - beta**steps)


def _averaged(group: dict[str, Any], moment: Tensor, gradient: Tensor) -> Tensor:
    beta = float(group["betas"][1] if "betas" in group else group["alpha"])
    return beta * moment + (1.0 - beta) * gradient.square()


def _adam_root(group: dict[str, Any], moment: Tensor, steps: float) -> Tensor:
    """(1−β₁ᵗ)(√v̂ + ε), as Cohen et al. (2022) have it: early steps are longer than late ones by their bias correction."""
    return _bias(group, steps) * _nadam_root(group, moment, steps)


def _nadam_root(group: dict[str, Any], moment: Tensor, steps: float) -> Tensor:
    return (moment / _bias(group, steps, 1)).sqrt() + float(group["eps"])


def _radam_root(group: dict[str, Any], moment: Tensor, steps: float) -> Tensor:
    """Rectified: without the second moment as long as its variance is not tractable."""
    beta = float(group["betas"][1])
    longest = 2.0 / (1.0 - beta) - 1.0
    length = longest - 2.0 * steps * beta**steps / _bias(group, steps, 1)
    if length <= 5.0:
        return _bias(group, steps) * torch.ones_like(moment)
    wanted, most = (length - 4.0) * (length - 2.0) * longest, (longest - 4.0) * (longest - 2.0) * length
    root: Tensor = (moment.sqrt() + float(group["eps"])) / _bias(group, steps, 1) ** 0.5
    return root * float(_bias(group, steps) / (wanted / most) ** 0.5)


def _adam_gain(group: dict[str, Any], state: dict[str, Any], steps: float) -> tuple[float, str, str]:
    beta = float(group["betas"][0])
    return (1 - beta) / (1 + beta), "2(1+β₁)/((1−β₁){})", f"β₁ = {beta:g}"


def _nadam_gain(group: dict[str, Any], state: dict[str, Any], steps: float) -> tuple[float, str, str]:
    """a g + b m: the gradient itself and the momentum, weighted as at step t."""
    beta, decay = float(group["betas"][0]), float(group["momentum_decay"])
    now, after = (beta * (1.0 - 0.5 * 0.96 ** (t * decay)) for t in (steps, steps + 1.0))
    product = float(state.get("mu_product", 1.0)) * (now if float(state.get("step", 0.0)) < steps else 1.0)
    a, b = (1.0 - now) / (1.0 - product), after / (1.0 - product * after)
    formula = "2/((a + b(1−β₁)/(1+β₁)){})"
    return a + b * (1 - beta) / (1 + beta), formula, f"a = {a:.3g}, b = {b:.3g} of step t = {steps:g}, β₁ = {beta:g}"


def _rmsprop_gain(group: dict[str, Any], state: dict[str, Any], steps: float) -> tuple[float, str, str]:
    beta = float(group["momentum"])
    return (1.0 / (1.0 + beta), "2(1+β)/{}", f"β = {beta:g}") if beta else (1.0, "2/{}", "")


_ADAM = _Adaptive("Adam", "exp_avg_sq", _averaged, _adam_root, _adam_gain)
_NADAM = _Adaptive("NAdam", "exp_avg_sq", _averaged, _nadam_root, _nadam_gain)
_RADAM = _Adaptive("RAdam", "exp_avg_sq", _averaged, _radam_root, _adam_gain)
_ADAMAX = _Adaptive(
    "Adamax",
    "exp_inf",
    lambda group, moment, g: torch.maximum(float(group["betas"][1]) * moment, g.abs() + float(group["eps"])),
    lambda group, moment, steps: _bias(group, steps) * moment,
    _adam_gain,
)
_RMSPROP = _Adaptive(
    "RMSprop", "square_avg", _averaged, lambda group, moment, steps: moment.sqrt() + float(group["eps"]), _rmsprop_gain
)
_ADAGRAD = _Adaptive(
    "Adagrad",
    "sum",
    lambda group, moment, g: moment + g.square(),
    lambda group, moment, steps: (moment.sqrt() + float(group["eps"])) * (1.0 + (steps - 1.0) * float(group["lr_decay"])),
    lambda group, state, steps: (1.0, "2/{}", ""),
)

_LAWS: dict[type[Optimizer], Callable[[Optimizer, Problem, float | None], StabilityLaw]] = {
    torch.optim.SGD: _sgd,
    torch.optim.AdamW: _ADAM.law,
    torch.optim.Adam: _ADAM.law,
    torch.optim.NAdam: _NADAM.law,
    torch.optim.RAdam: _RADAM.law,
    torch.optim.Adamax: _ADAMAX.law,
    torch.optim.RMSprop: _RMSPROP.law,
    torch.optim.Adagrad: _ADAGRAD.law,
}

_TRIAL = "critical_learning_rate(..., trial=True) finds its edge by short runs on a copy."


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
    """Learning rates in units of that of the first group that moves; None where all are equal."""
    shares = {id(group): share for group, share in zip(optimizer.param_groups, rate_shares(optimizer), strict=True)}
    rates = _per_parameter(optimizer, problem, lambda group, p: shares[id(group)])
    return None if set(shares.values()) == {1.0} else rates


def weight_decay(optimizer: Optimizer, problem: Problem) -> Tensor | None:
    """The decay of each parameter as a flat vector; None where there is none."""
    if not any(float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups):
        return None
    return _per_parameter(optimizer, problem, lambda group, p: float(group["weight_decay"]))


def _second_moment(optimizer: Optimizer, problem: Problem, ready: float | None, kind: _Adaptive) -> tuple[Tensor, float, str]:
    """P per parameter, from the optimizer's state or, before its first step, from the gradient; the step t; a note.

    `ready` times the gradients at hand join it, unless it is None.
    """
    stepped = [float(state.get("step", 1.0)) for state in optimizer.state.values() if state]
    fresh = not any(stepped) and ready is None
    joining = [None if ready is None or p.grad is None else ready * p.grad for p in problem.parameters]
    if fresh:
        found = problem.split(problem.gradient()).values()
        joining = [g.reshape(p.shape) for p, g in zip(problem.parameters, found, strict=True)]
    gradients = {id(p): g for p, g in zip(problem.parameters, joining, strict=True)}

    def root(group: dict[str, Any], p: Tensor) -> Tensor:
        state, gradient = optimizer.state.get(p, {}), gradients[id(p)]
        steps = float(state.get("step", 0.0))
        if not steps and gradient is None:
            if p.grad is None:  # nothing depends on it so far: any scale will do
                return torch.ones_like(p, dtype=torch.float64)
            raise ValueError("The optimizer has stepped some parameters and not others; take one more step with all of them.")
        moment = state[kind.key].double() if kind.key in state else torch.zeros_like(p, dtype=torch.float64)
        if gradient is not None:
            pull = 0.0 if decoupled(optimizer) else float(group.get("weight_decay", 0.0))  # what it squares has the decay in it
            moment, steps = kind.update(group, moment, gradient.double() + pull * p.detach().double()), steps + 1.0
        if group.get("amsgrad") and "max_exp_avg_sq" in state:
            moment = torch.maximum(moment, state["max_exp_avg_sq"].double())
        return kind.root(group, moment, steps)

    note = f"its second moment is held as it stands; live {kind.name} adapts and tolerates more"
    if fresh:
        note = "its second moment is that of a first step here, for it has taken none yet"
    steps = max([*stepped, 0.0]) + (0.0 if ready is None and not fresh else 1.0)
    return _per_parameter(optimizer, problem, root), steps, note


#: A loss this many times the first one has diverged.
BLOWN_UP = 1e8


def never_rises(losses: Sequence[float], slack: float = 1e-6) -> bool:
    """Whether no loss exceeds the one before by more than the share `slack`.

    Below a millionth of the first loss the slack no longer shrinks: rounding there is no rise.

    >>> never_rises([1.0, 0.5, 0.5]), never_rises([1.0, 2.0]), never_rises([1.0, float("nan")])
    (True, False, False)
    """
    least = 1e-6 * max(abs(losses[0]), 1e-30)
    return all(b <= a + slack * max(abs(a), least) for a, b in itertools.pairwise(losses))


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
    trial = problem.copied_to_train()
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
    """The optimizer with its settings and state, for the parameters of a copy, at `rate` as `set_rate` sets it."""
    if optimizer is None:
        return SGD(trial.parameters, lr=rate)
    if needs_closure(optimizer):
        raise ClosureError(
            f"{type(optimizer).__name__} needs a closure for each step, and runs on copies make theirs without one."
        )
    twin = {id(p): q for p, q in zip(problem.parameters, trial.parameters, strict=True)}
    state = copy.deepcopy(optimizer.state_dict())
    # Parameters that are not measured do not move; dummies keep the numbering of the state.
    groups = [
        {"params": [twin[id(p)] if id(p) in twin else p.detach().clone() for p in group["params"]], "lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    fresh: Optimizer = kind(groups, lr=rate)
    fresh.load_state_dict(state)
    set_rate(fresh, rate)
    return fresh


def first_rate(optimizer: Optimizer) -> float:
    """The learning rate of the first group that moves, by which the others are measured; 0 where none does."""
    return next((lr for group in optimizer.param_groups if (lr := float(group["lr"])) > 0.0), 0.0)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Another learning rate for the first group that moves; the others keep their ratio to it."""
    for group, share in zip(optimizer.param_groups, rate_shares(optimizer), strict=True):
        group["lr"] = share * rate


def rate_shares(optimizer: Optimizer) -> list[float]:
    """The groups' learning rates over that of the first that moves.

    Where none moves, as at the start of a warm-up, those that their schedule began with; all alike where there is none.
    """
    for name in ("lr", "initial_lr"):
        rates = [float(group.get(name) or 0.0) for group in optimizer.param_groups]
        first = next((lr for lr in rates if lr > 0.0), None)
        if first is not None:
            return [lr / first for lr in rates]
    return [1.0] * len(optimizer.param_groups)
