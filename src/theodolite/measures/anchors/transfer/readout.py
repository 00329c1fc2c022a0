"""Classifiers that read label words: f = Σ_j a_j max(u_j − b_j, 0), on anchored logits, and what a shift does to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import (
    checked,
    choice,
    count,
    each,
    fraction,
    instance,
    nonnegative,
    positive,
    seed,
    share,
    shown,
    whole,
)
from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken
from theodolite.measures.anchors.transfer.log_linear import LogLinear, shift_anchor, shift_log_linear
from theodolite.problem.arguments import a_finite_tensor, a_tensor, numbers, of_dimensions, tensors_fit
from theodolite.results import Result, Row

Method = Literal["logistic", "adam"]
NEWTON_STEPS = 50


@dataclass(frozen=True, eq=False)
class Readout:
    """Coefficients a (k,) and thresholds b (k,) of f = Σ a_j max(u_j − b_j, 0)."""

    a: Tensor
    b: Tensor

    def score(self, features: Tensor) -> Tensor:
        """f (...) at features (..., k); its sign is the class, 0 is undecided."""
        return thresholded_score(features, self.a, self.b)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ReadoutComparison(Result):
    """Accuracy on held-out contexts of four read-outs, and on the same contexts with shifted logits.

    Undecided contexts (f = 0) count as wrong; their shares are given. Per read-out, in the order of `names`.
    """

    names: tuple[str, ...]
    accuracy: tuple[float, ...]
    undecided: tuple[float, ...]
    accuracy_shifted: tuple[float, ...]
    undecided_shifted: tuple[float, ...]
    trained_on: int
    tested_on: int

    def rows(self) -> list[Row]:
        columns = ("accuracy", "undecided", "accuracy_shifted", "undecided_shifted")
        return [{"readout": name, **{c: getattr(self, c)[i] for c in columns}} for i, name in enumerate(self.names)]

    def sentence(self) -> str:
        parts = [f"{row['readout']} {row['accuracy']:.3g} → {row['accuracy_shifted']:.3g}" for row in self.rows()]
        return f"Accuracy on {self.tested_on} held-out contexts, before and after a shift of the logits: {', '.join(parts)}."


def label_ids(labels: Sequence[int] | Tensor, words: int, *, name: str = "labels") -> Tensor:
    """Distinct word ids below `words`, as an int64 tensor."""
    ids = torch.as_tensor(labels)
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be a list of at least one word id. Got {shown(labels)}.")
    ids = ids.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        raise ValueError(f"{name} must be ids from 0 to {words - 1}, the vocabulary. Got {int(ids.min())} to {int(ids.max())}.")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{name} must be distinct. Got {ids.tolist()[:16]}.")
    return ids


@checked(model=instance(LogLinear), anchor=a_tensor, labels=each(whole))
@tensors_fit
def anchored_logits(model: LogLinear, anchor: Tensor, labels: Sequence[int] | Tensor) -> Tensor:
    """u_j = ⟨h, v_j − v0⟩ (contexts, k), nearly log(p_j / p(bulk)), and free of any common shift of the logits."""
    ids = label_ids(labels, model.words)
    if anchor.shape != (model.dim,):
        more = " (with the coordinate of the bias)" if model.dim > 1 else ""
        raise ValueError(f"The anchor must be ({model.dim},), like the states{more}. Got shape {tuple(anchor.shape)}.")
    if not anchor.isfinite().all():
        raise NonFiniteError("The anchor vector holds NaN or infinity.")
    return model.states @ (model.weight[ids] - anchor.detach().to(model.weight)).mT


@checked(features=a_finite_tensor, a=a_finite_tensor, b=a_finite_tensor)
@tensors_fit
def thresholded_score(features: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a_j max(u_j − b_j, 0) over features u (..., k).

    >>> thresholded_score(torch.tensor([[2.0, 5.0], [0.0, 0.0]]), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 4.5]))
    tensor([0.5000, 0.0000])
    """
    return ((features - b).clamp(min=0) * a).sum(-1)


@checked(features=a_tensor, classes=a_tensor, quantile=share, ridge=nonnegative, steps=count, lr=positive)
def fit_readout(
    features: Tensor,
    classes: Tensor,
    *,
    method: Method = "logistic",
    quantile: float = 0.25,
    ridge: float = 1e-3,
    steps: int = 500,
    lr: float = 0.05,
) -> Readout:
    """Fit f = Σ a_j max(u_j − b_j, 0) to two classes, by logistic loss.

    features : (contexts, k), anchored logits or others. classes : (contexts,), True or positive for one class.
    b_j starts at the `quantile` of u_j. `"logistic"` keeps it and solves for a (convex, ridge relative to the mean loss);
    `"adam"` goes on from there and moves both.
    """
    choice("method", method, get_args(Method))
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile must lie in [0, 1), or no unit is ever active. Got {quantile}.")
    u, signs = _two_classes(features, classes)
    b = u.quantile(quantile, dim=0)
    a = logistic_regression((u - b).clamp(min=0), signs, ridge=ridge)
    if method == "logistic":
        return Readout(a, b)
    parameters = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    with unbroken(torch.enable_grad()):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.softplus(-signs * thresholded_score(u, *parameters)).mean()
            (loss + 0.5 * ridge * parameters[0].square().sum()).backward()
            optimizer.step()
    return Readout(parameters[0].detach(), parameters[1].detach())


def logistic_regression(features: Tensor, classes: Tensor, *, ridge: float = 1e-3) -> Tensor:
    """Coefficients (k,) that minimise the mean logistic loss + ridge ‖a‖²/2, without intercept, by damped Newton steps."""
    if not ridge > 0:
        raise ValueError(f"ridge must be positive: separable classes have no minimum without. Got {ridge}.")
    x, signs = _two_classes(features, classes)

    def objective(a: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-signs * (x @ a)).mean() + 0.5 * ridge * a.square().sum()

    a = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        p = torch.sigmoid(-signs * (x @ a))
        gradient = ridge * a - x.mT @ (signs * p) / len(x)
        curvature = (x * (p * (1 - p))[:, None]).mT @ x / len(x)
        curvature.diagonal().add_(ridge)
        step = torch.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-6 and objective(a - size * step) > objective(a):
            size /= 2
        a = a - size * step
        if float(gradient.norm()) <= 1e-10 * max(1.0, float(a.norm())):
            break
    return a


@checked(
    model=instance(LogLinear),
    classes=of_dimensions(1),
    labels=each(whole),
    anchor=a_finite_tensor,
    shift=numbers,
    train_shift=nonnegative,
    train_share=fraction,
    seed=seed,
)
def compare_readouts(
    model: LogLinear,
    classes: Tensor,
    *,
    labels: Sequence[int] | Tensor,
    anchor: Tensor,
    shift: float | Tensor = 50.0,
    train_shift: float = 0.0,
    train_share: float = 0.5,
    method: Method = "logistic",
    seed: int = 0,
) -> ReadoutComparison:
    """Four read-outs of the same contexts, fitted to a random part and tested on the rest, before and after a shift attack.

    "anchored": thresholded units on ⟨h, v_j − v0⟩; "raw logits" and "log-probabilities": the same units on z_j and log p_j;
    "state": logistic regression on the whole state and 1. The attack appends a coordinate c to the states, [h; c], and 1
    to all atoms, which changes no probability; the anchor becomes [v0; 1]. `shift` is the standard deviation of c at the test
    contexts, or its values (contexts,). In training c has the standard deviation `train_shift`: at 0 a regression on the state
    never sees the coordinate and leaves it alone.
    """
    if classes.shape != (model.contexts,):
        raise ValueError(f"classes must be ({model.contexts},), one per context. Got shape {tuple(classes.shape)}.")
    if not isinstance(shift, Tensor):
        nonnegative("shift", shift)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(model.contexts, generator=generator)
    train, test = order.tensor_split([round(train_share * model.contexts)])
    noise = torch.randn(model.contexts, generator=generator, dtype=torch.float64)
    before = shift_log_linear(model, train_shift * noise)
    after = shift_log_linear(model, shift if isinstance(shift, Tensor) else shift * noise)
    signs = torch.where(classes.cpu() > 0, 1.0, -1.0).double()
    ids, wide = label_ids(labels, model.words), shift_anchor(anchor.detach().double())
    views: dict[str, Callable[[LogLinear], Tensor]] = {  # what each read-out sees of a model: features (contexts, k)
        "anchored": lambda m: anchored_logits(m, wide, ids),
        "raw logits": lambda m: m.states @ m.weight[ids].mT,
        "log-probabilities": lambda m: m.states @ m.weight[ids].mT - m.log_partition()[:, None],
        "state": lambda m: torch.cat([m.states, m.states.new_ones(m.contexts, 1)], dim=1),
    }
    outcomes = []
    for name, view in views.items():
        seen = view(before)
        with _solvable():
            score = _fitted_score(name, seen[train], signs[train], method)
        scores = [score(at)[test] * signs[test] for at in (seen, view(after))]
        outcomes.append([float(part.double().mean()) for each in scores for part in (each > 0, each == 0)])
    accuracy, undecided, accuracy_shifted, undecided_shifted = zip(*outcomes, strict=True)
    return ReadoutComparison(
        names=tuple(views),
        accuracy=accuracy,
        undecided=undecided,
        accuracy_shifted=accuracy_shifted,
        undecided_shifted=undecided_shifted,
        trained_on=len(train),
        tested_on=len(test),
        seed=seed,
    )


@contextmanager
def _solvable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch.linalg
        raise ValueError(
            "train_shift, or the states themselves, are so large that the regression on the state has no solution in float64."
        ) from error


def _fitted_score(name: str, features: Tensor, signs: Tensor, method: Method) -> Callable[[Tensor], Tensor]:
    """Features → f, fitted: thresholded units, or a regression on the whole state."""
    if name != "state":
        return fit_readout(features, signs, method=method).score
    coefficients = logistic_regression(features, signs)
    return lambda seen: seen @ coefficients


def _two_classes(features: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, k) and signs (N,) in float64, both classes present."""
    if features.ndim != 2 or classes.shape != features.shape[:1] or not len(features):
        shapes = f"{tuple(features.shape)} and {tuple(classes.shape)}"
        raise ValueError(f"features must be (contexts, k) and classes (contexts,), at least one. Got {shapes}.")
    if not features.isfinite().all():
        raise NonFiniteError("The features hold NaN or infinity.")
    positive = classes.cpu() > 0
    if bool(positive.all()) or not bool(positive.any()):
        raise ValueError("classes holds one class only; a classifier needs examples of both (positive and not).")
    return features.detach().double().cpu(), torch.where(positive, 1.0, -1.0).double()
