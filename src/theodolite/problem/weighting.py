"""What a batch weighs in the mean over the data.

A mean loss divides by something: samples, elements, labels that are not ignored, class weights. Batches must be
weighted by that same number, or uneven batches bias every result. Where the loss does not say what it divides by,
the possible answers are tried on two parts of one batch: the whole must be their weighted mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.arguments import about, shown
from theodolite.errors import NonFiniteError, WeightingError
from theodolite.problem.batches import Batch, join_trees
from theodolite.problem.losses import ELEMENTWISE
from theodolite.problem.tensors import map_tensors

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem

IGNORED = -100

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
    """The number of samples of a batch."""
    target = batch.target
    return float(target.shape[0] if isinstance(target, Tensor) and target.ndim else batch.size)


def ignored_label(loss: Any) -> int:
    """The label that a loss passes over: its own `ignore_index`, or torch's usual one.

    >>> ignored_label(nn.CrossEntropyLoss(ignore_index=255)), ignored_label(None)
    (255, -100)
    """
    own = getattr(loss, "ignore_index", None)
    return int(own) if isinstance(own, Integral) else IGNORED


def counts(batch: Batch, ignored: int = IGNORED) -> bool:
    """Whether a batch has a label that is not ignored."""
    target = batch.target
    return not isinstance(target, Tensor) or target.is_floating_point() or bool((target != ignored).any())


def elements(batch: Batch) -> float:
    """The number of elements of a batch's target."""
    return float(batch.target.numel()) if isinstance(batch.target, Tensor) else float(batch.size)


def labels(batch: Batch, ignored: int = IGNORED) -> float:
    """Labels that count."""
    return float((batch.target != ignored).sum())


def shifted_labels(batch: Batch, ignored: int = IGNORED) -> float:
    """Labels that count when position t predicts position t + 1."""
    return float((batch.target[..., 1:] != ignored).sum())


def known_weigher(loss: Any) -> tuple[str, Weigher] | None:
    """The rule of a torch loss module, or None where it has to be found out."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):  # a subclass may divide by anything
        return "labels", lambda batch: _class_weight(batch, loss)
    if type(loss) in ELEMENTWISE:
        return "elements", elements
    if type(loss) is nn.KLDivLoss:
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
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= len(loss.weight)):
        raise ValueError(
            f"Class labels must lie in 0 .. {len(loss.weight) - 1}, one per class weight. "
            f"The targets run from {int(counted.min())} to {int(counted.max())}."
        )
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
    if callable(batch_weight) and not isinstance(batch_weight, nn.Module | type):
        weights = tuple(_number(batch_weight(b)) for b in batches)
    elif isinstance(batch_weight, Iterable) and not isinstance(batch_weight, str | bytes | Mapping):
        weights = tuple(_number(w) for w in batch_weight)
    else:
        raise _no_weight(batch_weight)
    if len(weights) != count:
        raise ValueError(f"batch_weight must give one weight per batch, {count}. Got {len(weights)}.")
    with about("batch_weight"):
        return check_weights(weights)


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_weight(weight) from error


def _no_weight(given: Any) -> ValueError:
    return ValueError(
        "batch_weight must be a function of the batch that returns a number, or one number per batch. "
        f"Got {shown(given)}; for samples give lambda batch: batch.size."
    )


def check_weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    """The weights, or an error that names the first bad one."""
    bad = next((i for i, w in enumerate(weights) if not (math.isfinite(w) and w >= 0)), None)
    if bad is not None:
        raise ValueError(
            f"Batch weights must be finite and non-negative. Batch {bad} weighs {weights[bad]}: give what its loss divides by "
            "(samples, labels), or 0 to leave the batch out."
        )
    if not 0 < sum(weights) < math.inf:
        raise ValueError(f"Batch weights must have a positive and finite sum. Got {weights[:10]}: are all labels ignored?")
    return weights


def candidates(batch: Batch, *, own_loss: bool, causal: bool, ignored: int = IGNORED) -> dict[str, Weigher]:
    """What a loss could divide by, the most likely first."""
    target = batch.target
    if not isinstance(target, Tensor):
        return {"samples": samples}
    if target.is_floating_point():
        return {"elements": elements, "samples": samples}
    rules: dict[str, Weigher] = {"labels": partial(labels, ignored=ignored), "elements": elements, "samples": samples}
    if own_loss and target.ndim >= 2:
        shifted: dict[str, Weigher] = {"shifted labels": partial(shifted_labels, ignored=ignored)}
        rules = {**shifted, **rules} if causal else {**rules, **shifted}
    return rules


def judge(
    rules: dict[str, Weigher], whole: float, parts: tuple[float, float], batches: tuple[Batch, Batch], tolerance: float
) -> list[str]:
    """The rules (and possibly `"sum"`) by which the loss of two batches together follows from their own losses."""
    scale = max(abs(whole), *map(abs, parts), 1e-30)
    fitting = []
    for name, weigh in rules.items():
        w = [weigh(b) for b in batches]
        if sum(w) > 0 and abs((w[0] * parts[0] + w[1] * parts[1]) / sum(w) - whole) <= tolerance * scale:
            fitting.append(name)
    if abs(parts[0] + parts[1] - whole) <= tolerance * scale:
        fitting.append("sum")
    return fitting


def unclear(weights: dict[str, tuple[float, ...]]) -> WeightingError:
    """The error for a loss whose division is not recognised."""
    shown = "; ".join(f"by {name}: {', '.join(f'{w:g}' for w in ws[:4])}" for name, ws in weights.items())
    return WeightingError(
        "The loss is no mean over samples, elements or labels that could be recognised, so batches cannot be joined "
        f"({shown}). Say what each batch weighs with Problem(..., batch_weight=...), a function of the batch or a list."
    )


def establish_weighting(problem: Problem, batch_weight: BatchWeight) -> Weighting:
    """The weights of a problem's batches: given, known from the loss module, or recognised by trial."""
    count = len(problem.data)
    summed = reduction_of(problem.loss_function) == "sum"
    if summed and batch_weight is not None:
        raise ValueError("batch_weight weighs means; a loss with reduction='sum' keeps the sum. Give one or the other.")
    if summed:
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
    causal = "CausalLM" in name or "LMHead" in name
    ignored = ignored_label(problem.loss_function)
    rules = candidates(first, own_loss=problem.loss_function is None, causal=causal, ignored=ignored)
    if len(problem.data) == 1:
        return Weighting((1.0,), next(iter(rules)))
    table = [[weigh(b) for weigh in rules.values()] for b in problem.data]
    weights = dict(zip(rules, (tuple(column) for column in zip(*table, strict=True)), strict=True))
    fitting = _fitting_rules(problem, rules)
    if fitting is None:  # nothing could be tried
        fitting = list(rules) if len({_shares(column) for column in weights.values()}) == 1 else []
    if fitting == ["sum"]:
        return Weighting((1.0,) * len(problem.data), "sum")
    for rule in fitting:
        if rule != "sum":
            return Weighting(check_weights(weights[rule]), rule)
    _refuse_non_finite_losses(problem, ignored)
    raise unclear(weights)


def _refuse_non_finite_losses(problem: Problem, ignored: int) -> None:
    """Raise for the first batch whose loss is NaN or inf: no rule explains such a loss, so that is what to say."""
    with problem.session(second=False):
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, batch in enumerate(problem.data):
            if counts(batch, ignored):
                try:
                    problem.evaluate(tensors, problem.placed(batch), i)
                except NonFiniteError as error:
                    remedy = "give it the weight 0 with Problem(..., batch_weight=...)"
                    raise NonFiniteError(f"{error} If the loss ignores every label of this batch, {remedy}.") from None


def coupling(problem: Problem, batch_weight: BatchWeight) -> str:
    """Why batches must not be cut into parts, empty where they may: the loss of one is then the weighted mean of its parts'.

    In eval mode: that normalisation over the batch and dropout see other samples is another matter, told by other probes.
    """
    ignored = ignored_label(problem.loss_function)
    batch = next((b for b in problem.data if b.size > 1 and counts(b, ignored)), None)
    parts = None if batch is None else _halves(batch)
    if batch is None or parts is None:
        return ""
    with problem.session(second=False), torch.no_grad():
        tensors = problem.tensors(problem.leaves(grad=False))
        losses: list[float] = []
        for one in (batch, *parts):
            try:
                losses.append(problem.raw_loss(tensors, one))
            except (ValueError, RuntimeError, LookupError, TypeError) as error:
                return UNCUT.format(error=str(error.__cause__ or error).splitlines()[0]) if losses else ""
    if not math.isfinite(losses[0]):
        return ""
    known = known_weigher(problem.loss_function)
    rules = candidates(batch, own_loss=problem.loss_function is None, causal=False, ignored=ignored)
    rules = dict([known]) if known is not None else rules
    if callable(batch_weight):
        rules["given"] = lambda part: _number(batch_weight(part))
    first, second = (x if math.isfinite(x) else 0.0 for x in losses[1:])  # the mean over nothing is NaN, and weighs nothing
    tolerance = 1e-7 if problem.dtype == torch.float64 else 1e-4
    return "" if judge(rules, losses[0], (first, second), parts, tolerance) else BELONG_TOGETHER


BELONG_TOGETHER = (
    "the samples of a batch belong together: its loss is not the mean over its parts (in-batch contrast, nodes of one graph, a "
    "balancing term, a score of the whole batch)"
)
UNCUT = (
    "a part of a batch cannot be evaluated without the rest (nodes of one graph with their edges, a fixed batch size): {error}"
)


def _shares(weights: tuple[float, ...]) -> tuple[float, ...]:
    total = sum(weights) or 1.0
    return tuple(round(w / total, 12) for w in weights)


def _fitting_rules(problem: Problem, rules: dict[str, Weigher]) -> list[str] | None:
    """Rules that explain the joint loss of the first batch with each other one; None where none could be joined."""
    fitting: list[str] | None = None
    tolerance = 1e-9 if problem.dtype == torch.float64 else 3e-5
    ignored = ignored_label(problem.loss_function)
    with problem.session(second=False):
        tensors = problem.tensors(problem.leaves(grad=False))
        anchor: Batch | None = None
        for batch in problem.data:
            # The first batch that counts is compared with itself cut in two, every other one with that first.
            if anchor is None and counts(batch, ignored):
                anchor = batch
                parts = _halves(batch)
            else:
                parts = None if anchor is None else (anchor, batch)
            trial = None if parts is None else _joint_losses(problem, tensors, parts)
            if trial is None or parts is None:
                continue
            fits = judge(rules, trial[0], (trial[1], trial[2]), parts, tolerance)
            fitting = fits if fitting is None else [rule for rule in fitting if rule in fits]
    return fitting


def _halves(batch: Batch) -> tuple[Batch, Batch] | None:
    cut = max(1, batch.size // 3)
    return (batch.part(slice(0, cut)), batch.part(slice(cut, batch.size))) if batch.size > 1 else None


def _joint_losses(problem: Problem, tensors: dict[str, Tensor], parts: tuple[Batch, Batch]) -> tuple[float, float, float] | None:
    """Losses of two batches together and alone; None if they cannot be joined or one of them counts nothing."""
    for shake in (_add_noise, _scale_down):
        try:
            if problem.loss_function is None:
                losses = [problem.raw_loss(tensors, b) for b in (parts[0].joined(parts[1]), *parts)]
            else:
                # Made-up outputs that differ strongly: near an initialisation all losses are alike and tell nothing.
                outputs = [shake(problem.raw_output(tensors, part), seed) for seed, part in enumerate(parts)]
                joint = join_trees(*outputs, sizes=[part.size for part in parts], shared=False)
                losses = problem.losses_of(joint, outputs, parts)
        except (ValueError, RuntimeError, IndexError):
            continue
        if math.isfinite(losses[0]):
            # The mean over nothing is NaN: such a part must weigh nothing, which the rules then have to say.
            return losses[0], *(x if math.isfinite(x) else 0.0 for x in losses[1:3])  # type: ignore[return-value]
    return None


def _add_noise(output: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def shake(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t + (1 + 2 * seed) * noise.to(t) if t.is_floating_point() else t

    return map_tensors(shake, output)


def _scale_down(output: Any, seed: int) -> Any:
    """For losses of probabilities, which must stay between 0 and 1."""
    return map_tensors(lambda t: t * (0.9 - 0.5 * seed) if t.is_floating_point() else t, output)
