"""What a batch weighs in the mean over the data.

A mean loss divides by something: samples, elements, labels that are not ignored, class weights. Batches must be
weighted by that same number, or uneven batches bias every result. Where the loss does not say what it divides by,
the possible answers are tried on two parts of one batch: the whole must be their weighted mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.errors import WeightingError
from theodolite.problem.batches import Batch

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem

IGNORED = -100

_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss,
)  # fmt: skip

Weigher = Callable[[Batch], float]
BatchWeight = Callable[[Any], float] | Sequence[float] | None


@dataclass(frozen=True)
class Weighting:
    """Weight of each batch, and the rule they come from; the objective is `Σ w_b loss_b / divisor`."""

    weights: tuple[float, ...]
    rule: str

    @property
    def divisor(self) -> float:
        return 1.0 if self.rule == "sum" else sum(self.weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """What each batch's loss is multiplied by."""
        return tuple(w / self.divisor for w in self.weights)


def samples(batch: Batch) -> float:
    target = batch.target
    return float(target.shape[0] if isinstance(target, Tensor) and target.ndim else batch.size)


def elements(batch: Batch) -> float:
    return float(batch.target.numel()) if isinstance(batch.target, Tensor) else float(batch.size)


def labels(batch: Batch, ignored: int = IGNORED) -> float:
    """Labels that count."""
    return float((batch.target != ignored).sum())


def shifted_labels(batch: Batch) -> float:
    """Labels that count when position t predicts position t + 1."""
    return float((batch.target[..., 1:] != IGNORED).sum())


def known_weigher(loss: Any) -> tuple[str, Weigher] | None:
    """The rule of a torch loss module, or None where it has to be found out."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return "labels", lambda batch: _class_weight(batch, loss)
    if isinstance(loss, _ELEMENTWISE):
        return "elements", elements
    if isinstance(loss, nn.KLDivLoss):
        return ("samples", samples) if loss.reduction == "batchmean" else ("elements", elements)
    return None


def _class_weight(batch: Batch, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> float:
    target = batch.target
    if not isinstance(target, Tensor):
        return samples(batch)
    if target.is_floating_point():  # class probabilities (N, C, ...): torch divides by all but the classes
        return float(target.numel() / (target.shape[1] if target.ndim > 1 else target.shape[0]))
    counted = target[target != loss.ignore_index]
    if loss.weight is None:
        return float(counted.numel())
    return float(loss.weight.to(counted.device)[counted].double().sum())


def reduction_of(loss: Any) -> str | None:
    """The `reduction` a loss declares, or None."""
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        return None
    if reduction == "none":
        raise ValueError("loss has reduction='none': it must return one number for a batch. Use reduction='mean' or 'sum'.")
    return str(reduction)


def given_weights(batches: Iterable[Batch], count: int, batch_weight: BatchWeight) -> tuple[float, ...]:
    """Weights that the user gave: a number per batch, or a function of the batch."""
    if callable(batch_weight):
        weights = tuple(float(batch_weight(b)) for b in batches)
    else:
        assert batch_weight is not None
        weights = tuple(float(w) for w in batch_weight)
    if len(weights) != count:
        raise ValueError(f"batch_weight must give one weight per batch, {count}. Got {len(weights)}.")
    return check_weights(weights)


def check_weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    if any(not w >= 0 for w in weights) or not sum(weights) > 0:
        raise ValueError(f"Batch weights must be non-negative with a positive sum. Got {weights[:10]}: are all labels ignored?")
    return weights


def candidates(batch: Batch, *, own_loss: bool, causal: bool) -> dict[str, Weigher]:
    """What a loss could divide by, the most likely first."""
    target = batch.target
    if not isinstance(target, Tensor):
        return {"samples": samples}
    if target.is_floating_point():
        return {"elements": elements, "samples": samples}
    rules: dict[str, Weigher] = {"labels": labels, "elements": elements, "samples": samples}
    if own_loss and target.ndim >= 2:
        shifted: dict[str, Weigher] = {"shifted labels": shifted_labels}
        rules = {**shifted, **rules} if causal else {**rules, **shifted}
    return rules


def judge(rules: dict[str, Weigher], whole: float, parts: tuple[float, float], batches: tuple[Batch, Batch]) -> list[str]:
    """The rules (and possibly `"sum"`) by which the loss of a batch follows from the losses of its two parts."""
    scale = max(abs(whole), *map(abs, parts), 1e-30)
    fitting = []
    for name, weigh in rules.items():
        w = [weigh(b) for b in batches]
        if sum(w) > 0 and abs((w[0] * parts[0] + w[1] * parts[1]) / sum(w) - whole) <= 1e-4 * scale:
            fitting.append(name)
    if abs(parts[0] + parts[1] - whole) <= 1e-4 * scale and scale > 1e-12:
        fitting.append("sum")
    return fitting


def unclear(weights: dict[str, tuple[float, ...]]) -> WeightingError:
    shown = "; ".join(f"by {name}: {', '.join(f'{w:g}' for w in ws[:4])}" for name, ws in weights.items())
    return WeightingError(
        "The batches are uneven and the loss is no mean over samples, elements or labels that could be recognised "
        f"({shown}). Say what each batch weighs with Problem(..., batch_weight=...), a function of the batch or a list."
    )


def establish_weighting(problem: Problem, batch_weight: BatchWeight) -> Weighting:
    """The weights of a problem's batches: given, known from the loss module, or recognised by trial."""
    count = len(problem.data)
    if reduction_of(problem.loss_function) == "sum":
        return Weighting((1.0,) * count, "sum")
    if batch_weight is not None:
        return Weighting(given_weights(problem.data, count, batch_weight), "given")
    known = known_weigher(problem.loss_function)
    if known is not None:
        rule, weigh = known
        return Weighting(check_weights(tuple(weigh(b) for b in problem.data)), rule)
    return _recognise(problem)


def _recognise(problem: Problem) -> Weighting:
    first = next(iter(problem.data))
    name = type(problem.model).__name__
    rules = candidates(first, own_loss=problem.loss_function is None, causal="CausalLM" in name or "LMHead" in name)
    if len(problem.data) == 1:
        return Weighting((1.0,), next(iter(rules)))
    table = [[weigh(b) for weigh in rules.values()] for b in problem.data]
    weights = dict(zip(rules, (tuple(column) for column in zip(*table, strict=True)), strict=True))
    fitting = _fitting_rules(problem, rules)
    if fitting == ["sum"]:
        return Weighting((1.0,) * len(problem.data), "sum")
    for rule in fitting:
        if rule != "sum":
            return Weighting(check_weights(weights[rule]), rule)
    if all(len(set(column)) == 1 for column in weights.values()):
        return Weighting((1.0,) * len(problem.data), "equal batches")
    raise unclear(weights)


def _fitting_rules(problem: Problem, rules: dict[str, Weigher], trials: int = 4) -> list[str]:
    """Rules that explain the loss of each tried batch from the losses of two uneven parts of it."""
    fitting = [*rules, "sum"]
    tried = 0
    for batch in problem.data:
        if batch.size < 2 or tried == trials:
            continue
        tried += 1
        fits = _fits(problem, rules, batch)
        fitting = [rule for rule in fitting if rule in fits]
    return fitting if tried else list(rules)


def _fits(problem: Problem, rules: dict[str, Weigher], batch: Batch) -> list[str]:
    cut = max(1, batch.size // 3)
    parts = (batch.part(slice(0, cut)), batch.part(slice(cut, batch.size)))
    with problem.session(second=False), torch.no_grad():
        tensors = problem.tensors(problem.leaves(grad=False))
        try:
            losses = [problem.raw_loss(tensors, b) for b in (batch, *parts)]
        except ValueError:  # the model cannot take a part of the batch: nothing to learn here
            return list(rules)
    # A part whose labels are all ignored has no mean; it weighs nothing.
    whole, *of_parts = (x if math.isfinite(x) else 0.0 for x in losses)
    return judge(rules, whole, (of_parts[0], of_parts[1]), parts)
