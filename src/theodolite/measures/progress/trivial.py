"""What a model loses that knows nothing of its inputs: the best prediction that is the same for all samples.

The kind of loss decides which that is: class frequencies under a cross entropy, the mean of the targets under a squared error,
their median under an absolute one, the base rate of each output under a binary cross entropy. It is scored by the user's own
loss function, so that class weights, label smoothing, ignored labels and sums count as they do in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.arguments import checked, instance
from theodolite.problem import Batch, Problem
from theodolite.problem.accuracy import answers, class_axis
from theodolite.problem.arguments import a_problem
from theodolite.problem.calling import Evaluation
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import ignored_label

Kind = Literal["cross entropy", "squared error", "absolute error", "binary cross entropy"]

_MODULES: dict[type[nn.Module], Kind] = {
    nn.CrossEntropyLoss: "cross entropy",
    nn.NLLLoss: "cross entropy",
    nn.MSELoss: "squared error",
    nn.L1Loss: "absolute error",
    nn.SmoothL1Loss: "absolute error",
    nn.HuberLoss: "absolute error",
    nn.BCEWithLogitsLoss: "binary cross entropy",
    nn.BCELoss: "binary cross entropy",
}
#: Labels for each class below which their frequencies are predicted from the other labels, not from themselves too.
PER_CLASS = 50
#: Made-up outputs by which an unknown loss function is recognised must give the same ratio to a known one, to this share.
SAME = 1e-3


@dataclass(frozen=True)
class LossKind:
    """What a loss function computes: `scale` times the mean of a known loss.

    `axis` is where the classes stand in the output, `shift` how many places ahead of the outputs the labels stand; `logits`
    whether the loss takes any numbers, or probabilities (their logarithms, for `log_probabilities`).
    """

    name: Kind
    scale: float = 1.0
    axis: int = -1
    shift: int = 0
    logits: bool = True
    log_probabilities: bool = False


@dataclass(frozen=True)
class Trivial:
    """The best constant prediction: its `name`, and the `outputs` that make it (several, where the best one has to be tried).

    `loss` is given where it follows from the labels alone, and no outputs are needed.
    """

    name: str
    outputs: tuple[Callable[[Tensor], Tensor], ...] = ()
    loss: float | None = None


def first_loss(problem: Problem, samples: int) -> tuple[LossKind | None, Evaluation, Batch]:
    """The kind of loss, judged by the first so many samples, with what the model makes of them."""
    batch = problem.placed(next(iter(problem.data)).part(slice(0, samples)))
    with problem.session(second=False), torch.no_grad():
        found = problem.evaluate(problem.tensors(problem.leaves(grad=False)), batch, -1)
        return loss_kind(problem, found, batch), found, batch


@checked(problem=a_problem, found=instance(Evaluation), batch=instance(Batch))
def loss_kind(problem: Problem, found: Evaluation, batch: Batch) -> LossKind | None:
    """Which known loss the problem's is, from its type or by trying it on made-up outputs; inside a session."""
    loss, target, output = problem.loss_function, batch.target, found.output.detach()
    if not isinstance(target, Tensor) or problem.loss_takes_structure or not output.is_floating_point():
        return None
    if loss is None:
        return _own_kind(found, target)
    name = _MODULES.get(type(loss)) if isinstance(loss, nn.Module) else None  # a subclass may compute anything
    if name is None:
        return _recognised(problem, output, target)
    axis = 1 if output.ndim > 1 else 0
    return LossKind(name, axis=axis, logits=not isinstance(loss, nn.BCELoss), log_probabilities=isinstance(loss, nn.NLLLoss))


def _own_kind(found: Evaluation, target: Tensor) -> LossKind | None:
    """A model with its own loss: the cross entropy with the labels in place, or one place ahead as language models have them."""
    output, value = found.output.detach(), float(found.loss.detach())
    if target.is_floating_point():
        references = _references(output, target, None)
        return next((LossKind(name) for name, ref in references if _close(float(ref(output)), value)), None)
    for shift in (1, 0):
        if shift and (target.ndim < 2 or output.shape[:2] != target.shape[:2] or target.shape[1] < 2):
            continue
        shown, labels = (output[:, :-1], target[:, 1:]) if shift else (output, target)
        axis = class_axis(shown, labels, None)
        if axis is not None and _close(float(_cross_entropy(shown, labels, axis, ignored_label(None))), value):
            return LossKind("cross entropy", axis=axis, shift=shift)
    return None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME)


def _recognised(problem: Problem, output: Tensor, target: Tensor) -> LossKind | None:
    """A loss function of the user's own: it is a known one where both have the same ratio on outputs that differ strongly."""
    loss = problem.loss_function
    assert loss is not None
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output) for _ in range(2)]
    spread = max(1.0, float(output.std()) if output.numel() > 1 else 1.0)
    if target.is_floating_point() and target.shape == output.shape:  # seen from outputs that lie together all errors are alike
        spread = max(spread, float((target - output).abs().max()))
    made_up = [output + factor * spread * n for factor, n in zip((1.0, 3.0), noise, strict=True)]
    axis = class_axis(output, target, loss)
    for name, reference in _references(output, target, loss):
        try:
            ratios = [float(loss(z, target).detach()) / float(reference(z)) for z in made_up]
        except (ValueError, RuntimeError, IndexError, ZeroDivisionError):
            continue
        if 0 < ratios[0] < math.inf and _close(*ratios):
            return LossKind(name, scale=ratios[0], axis=-1 if axis is None else axis)
    return None


def _references(output: Tensor, target: Tensor, loss: Any) -> Iterator[tuple[Kind, Callable[[Tensor], Tensor]]]:
    """Known losses that could be meant, as functions of the output."""
    if not target.is_floating_point():
        axis = class_axis(output, target, loss)
        if axis is not None and target.dtype != torch.bool:
            yield "cross entropy", lambda z: _cross_entropy(z, target, axis, ignored_label(loss))
        return
    if output.shape == target.shape:
        yield "squared error", lambda z: functional.mse_loss(z, target)
        yield "absolute error", lambda z: functional.l1_loss(z, target)
        if bool(((target >= 0) & (target <= 1)).all()):
            yield "binary cross entropy", lambda z: functional.binary_cross_entropy_with_logits(z, target)


def _cross_entropy(output: Tensor, labels: Tensor, axis: int, ignored: int) -> Tensor:
    classes = output.shape[axis]
    flat = output.movedim(axis, -1).reshape(-1, classes).double()
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=ignored)


@checked(problem=a_problem, kind=instance(LossKind), found=instance(Evaluation))
def trivial_prediction(problem: Problem, kind: LossKind, found: Evaluation) -> Trivial | None:
    """The best prediction that is the same for all samples, from the targets of all the data."""
    targets = [batch.target for batch in problem.data]
    if not all(isinstance(t, Tensor) for t in targets):
        return None
    if kind.name == "cross entropy":
        return _class_frequencies(problem, kind, found.output.shape[kind.axis], targets)
    alike = len({t.shape[1:] for t in targets}) == 1 and targets[0].ndim > 0
    every = torch.cat([t.double() if alike else t.double().reshape(-1) for t in targets])
    mean = every.mean(0)
    if kind.name == "squared error":
        return Trivial("always predicting the mean of the targets", (_constant(mean),))
    if kind.name == "absolute error":
        median = every.quantile(0.5, dim=0) if len(every) < 1000 else every.median(0).values
        return Trivial("always predicting the median of the targets", (_constant(median), _constant(mean)))
    weight = getattr(problem.loss_function, "pos_weight", None)
    rate = mean if weight is None else weight.double().cpu() * mean / (weight.double().cpu() * mean + 1 - mean)
    rate = rate.clamp(1e-12, 1 - 1e-12)
    name = "always predicting the base rate" + (" of each output" if mean.numel() > 1 else "")
    return Trivial(name, (_constant(torch.logit(rate) if kind.logits else rate),))


def _constant(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: value.to(output).expand(output.shape)


def _class_frequencies(problem: Problem, kind: LossKind, classes: int, targets: Sequence[Tensor]) -> Trivial | None:
    loss = problem.loss_function
    counts = torch.zeros(classes, dtype=torch.float64)
    for target in targets:
        if target.is_floating_point():  # probabilities of the classes
            counts += target.double().cpu().movedim(1 if target.ndim > 1 else 0, 0).reshape(classes, -1).sum(1)
            continue
        labels = answers(target, loss, kind.shift)
        if labels is None or (labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
            return None
        counts += labels.reshape(-1).cpu().bincount(minlength=classes)
    name = f"always predicting the {'token' if _of_tokens(problem) else 'class'} frequencies"
    weight, smoothing = getattr(loss, "weight", None), float(getattr(loss, "label_smoothing", 0.0))
    plain = weight is None and not smoothing
    few = counts.sum() < PER_CLASS * classes
    if loss is None or (plain and few and not targets[0].is_floating_point()):
        summed = problem.weighting.rule == "sum" and loss is not None
        return Trivial(name, loss=label_entropy(counts) * (float(counts.sum()) if summed else kind.scale))
    shares = (1 - smoothing) * counts + smoothing * counts.sum() / classes
    shares = shares if weight is None else shares * weight.double().cpu()
    logs = (shares / shares.sum()).log().clamp_min(-60.0)

    def spread(output: Tensor) -> Tensor:
        along = [1] * output.ndim
        along[kind.axis] = classes
        return logs.to(output).reshape(along).expand(output.shape)

    return Trivial(name, (spread,))


def _of_tokens(problem: Problem) -> bool:
    """Whether whole numbers are predicted from whole numbers, place by place."""
    batch = next(iter(problem.data))
    inputs = [t for _, t in named_tensors(batch.inputs)]
    return bool(inputs) and not inputs[0].is_floating_point() and batch.target.ndim > 1


def label_entropy(counts: Tensor) -> float:
    """The entropy of frequencies in nats; where there are few labels for each class, what the others predict of each one.

    Frequencies that were counted on a few labels flatter themselves. Each label is predicted from all others then, with the same
    small number added to each count, the best one of a few.

    >>> round(label_entropy(torch.tensor([600.0, 600.0])), 4), round(label_entropy(torch.tensor([2.0, 2.0])), 4)
    (0.6931, 0.6981)
    """
    total, classes = float(counts.sum()), len(counts)
    seen = counts[counts > 0]
    if total >= PER_CLASS * classes or total < 2:
        return float(-(seen / total * (seen / total).log()).sum())
    added = [10.0**k for k in range(-4, 3)]
    left_out = [-(seen * ((seen - 1 + a) / (total - 1 + a * classes)).log()).sum() / total for a in added]
    return float(min(left_out))
