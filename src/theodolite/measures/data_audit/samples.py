"""Samples that stand twice, with other labels or in the validation data too; validation data of another kind; padding."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, seed
from theodolite.measures.data_audit.discreteness import coincide, sample_keys
from theodolite.measures.data_audit.views import SampleVectors, chosen_rows, labels_of, numbers_of, sample_tensors
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import ignored_label
from theodolite.results import Cost, Outcome, Result, Row

#: Samples of which exact copies are looked for, validation samples whose nearest neighbours are, training samples among which.
SAMPLES, NEAR, AMONG = 1000, 400, 20_000
#: A near copy lies at less than this share of the usual distance to the nearest sample.
CLOSE = 0.1
#: Numbers of regression contradict each other where they differ by this share of their spread.
APART = 0.5


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SampleAudit(Result):
    """Copies among the samples.

    `repeated` is the share of samples that are an exact copy of an earlier one, `contradicted` the share that no model of these
    inputs can get right, because a copy has another label (`contradictions` lists some). `few_values`: the inputs take so
    few values that samples coincide by chance. `padding` is the share of tokens that only fill up, NaN where none are known.
    """

    samples: int
    repeated: float
    contradicted: float
    contradictions: tuple[Row, ...]
    contradicting: Tensor
    few_values: bool
    padding: float
    padding_known_by: str

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.contradictions]

    def sentence(self) -> str:
        if self.samples == 1:
            return "There is one sample."
        if not self.repeated:
            return f"All {self.samples} samples are different."
        return f"{100 * self.repeated:.3g} % of {self.samples} samples are copies of another."


@checked(problem=a_problem, seed=seed)
def audit_samples(problem: Problem, *, seed: int = 0) -> SampleAudit:
    """Exact copies of samples, labels of copies that differ, and the share of padding.

    >>> x = torch.tensor([[1.0], [2.0], [1.0], [1.0]])
    >>> found = audit_samples(Problem(torch.nn.Linear(1, 2), torch.nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 0, 1]))))
    >>> found.repeated, found.contradicted
    (0.5, 0.25)
    """
    began = time.perf_counter()
    keys = sample_keys(problem)
    _, group, counts = keys.unique(return_inverse=True, return_counts=True)
    contradicting, lost = _contradictions(problem, group, counts)
    share, known_by = _padding(problem)
    return SampleAudit(
        samples=len(keys),
        repeated=1 - len(counts) / len(keys),
        contradicted=lost / len(keys),
        contradictions=tuple(_listed(problem, group, contradicting)),
        contradicting=contradicting,
        few_values=coincide(problem, chosen_rows(problem, SAMPLES, seed)),
        padding=share,
        padding_known_by=known_by,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="comparison of samples", notes=problem.notes),
    )


def _contradictions(problem: Problem, group: Tensor, counts: Tensor) -> tuple[Tensor, float]:
    """The samples with a copy of another label, and how many of them no answer that is the same for all copies gets right."""
    nothing = torch.zeros(0, dtype=torch.long), 0.0
    if len(counts) == len(group):
        return nothing
    labels = labels_of(problem)
    if labels is not None:
        pairs = group[labels.rows] * len(labels.names) + labels.values
        cells, members = pairs.unique(return_counts=True)
        places = cells // len(labels.names)
        most, total = (torch.zeros(len(counts), dtype=torch.long) for _ in range(2))
        most.scatter_reduce_(0, places, members, "amax")
        total.scatter_add_(0, places, members)
        guilty = total > most
        return torch.nonzero(guilty[group]).flatten(), float((total - most)[guilty].sum())
    numbers = numbers_of(problem, torch.arange(problem.samples))
    if numbers is None or len(numbers) != len(group):
        return nothing
    spread = (numbers - numbers.mean(0)).square().mean(0).sqrt().clamp_min(1e-300)
    means = torch.zeros(len(counts), numbers.shape[1], dtype=torch.float64).index_add_(0, group, numbers) / counts[:, None]
    apart = ((numbers - means[group]).abs() > 0.5 * APART * spread).any(1)
    return torch.nonzero(apart).flatten(), float(apart.sum())


def _listed(problem: Problem, group: Tensor, contradicting: Tensor, most: int = 10) -> list[Row]:
    """Some samples with the labels of their copies, copies side by side."""
    labels = labels_of(problem)
    numbers = None if labels is not None or not len(contradicting) else numbers_of(problem, contradicting)
    order = contradicting[group[contradicting].argsort(stable=True)][:most]
    if labels is not None:
        names = [labels.names[i] if i >= 0 else "ignored" for i in labels.at(order).tolist()] if len(order) else []
    elif numbers is not None:
        place = {int(row): i for i, row in enumerate(contradicting)}
        names = [f"{float(numbers[place[int(row)], 0]):.4g}" for row in order]
    else:
        names = []
    return [{"sample": int(row), "copies": int(group[row]), "label": name} for row, name in zip(order, names, strict=True)]


# Padding


def _padding(problem: Problem) -> tuple[float, str]:
    """The share of tokens that only fill up, and how that is known; NaN where it is not."""
    ids = {m.padding_idx for m in problem.model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    pad = ids.pop() if len(ids) == 1 else None
    filled = total = 0
    known_by = ""
    for batch in problem.data:
        found = _filling(batch, pad, ignored_label(problem.loss_function))
        if found is None:
            return math.nan, ""
        mask, known_by = found
        filled, total = filled + int(mask.sum()), total + mask.numel()
    return (filled / total, known_by) if total else (math.nan, "")


def _filling(batch: Batch, pad: int | None, ignored: int) -> tuple[Tensor, str] | None:
    """Which tokens (n, t) of a batch only fill up: by its attention mask, the padding index of the embedding, or the labels."""
    inputs = dict(named_tensors(batch.inputs))
    mask = next((t for name, t in inputs.items() if "attention_mask" in name and t.ndim == 2), None)
    if mask is not None:
        return mask == 0, "attention_mask"
    tokens = [t for t in inputs.values() if not t.is_floating_point() and t.ndim == 2 and t.dtype != torch.bool]
    if not tokens or tokens[0].shape[1] < 2:
        return None
    ids = tokens[0]
    if pad is not None:
        return ids == pad, "padding_idx"
    target = batch.target
    if isinstance(target, Tensor) and target.shape == ids.shape and not target.is_floating_point():
        return _trailing(ids, target == ignored), "ignore_index"
    return None


def _trailing(ids: Tensor, ignored: Tensor) -> Tensor:
    """Positions at the end (or the beginning) of a sequence that are ignored and hold one and the same token everywhere."""
    ends: list[Tensor] = [ignored.flip(1).cumprod(1).flip(1).bool(), ignored.cumprod(1).bool()]
    for mask in ends:
        values = ids[mask].unique()
        if len(values) == 1:
            filling: Tensor = mask & (ids == values[0])
            return filling
    return torch.zeros_like(ignored)


# Validation data


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ValidationAudit(Result):
    """Validation data beside training data.

    `copied` is the share of validation samples that stand in the training data too, `near` the share that nearly do, and
    `near_in_training` the share of training samples that nearly equal another one, which is what to expect without a leak.
    `leaked` are the numbers of validation samples. `tokens`: the inputs are text or the like. `separable` is how well a linear
    rule tells the two sets apart on samples it was not made from, as an area under the curve: 1/2 is not at all, 1 without error.
    `shifts` are the columns with the largest difference of means, in spreads; `class_shift` the share of validation samples
    whose class would have to change for the classes to be shared out as in training.
    """

    samples: int
    copied: float
    near: float
    near_in_training: float
    leaked: Tensor
    few_values: bool
    tokens: bool
    separable: float
    separable_error: float
    shifts: tuple[Row, ...]
    class_shift: float
    class_shift_error: float

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.shifts]

    def sentence(self) -> str:
        return f"{100 * max(self.copied, self.near):.3g} % of {self.samples} validation samples are in the training data."


@checked(problem=a_problem, valid=a_problem, seed=seed)
def audit_validation(problem: Problem, valid: Problem, *, seed: int = 0) -> ValidationAudit:
    """Copies of training samples among validation samples, and differences between the two sets.

    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> problem = Problem(torch.nn.Linear(3, 1), torch.nn.MSELoss(), (x, torch.zeros(60, 1)))
    >>> audit_validation(problem, problem.on((x[:6], torch.zeros(6, 1)))).copied
    1.0
    """
    began = time.perf_counter()
    keys, other = sample_keys(problem), sample_keys(valid)
    copies = torch.isin(other, keys)
    rows, valid_rows = chosen_rows(problem, SAMPLES, seed), chosen_rows(valid, SAMPLES, seed)
    view = SampleVectors(problem, rows, seed=seed)
    theirs = None if view.seen is None else view.of(valid, valid_rows)
    separable, separable_error, shifts = math.nan, math.nan, []
    if view.seen is not None and theirs is not None and min(len(rows), len(valid_rows)) >= 40:
        separable, separable_error = two_sample_test(view.seen, theirs, seed)
        shifts = _shifts(problem, view, theirs)
    tokens = any(not t.is_floating_point() for t in sample_tensors(next(iter(problem.data))))  # counts know no order
    near = None if view.seen is None or tokens else _near_copies(problem, valid, view, seed)
    class_shift, class_error = _class_shift(problem, valid)
    leaked = copies.clone()
    if near is not None:
        leaked[near.rows[near.close]] = True
    return ValidationAudit(
        samples=len(other),
        copied=float(copies.double().mean()),
        near=float(copies.double().mean()) if near is None else float((near.close | copies[near.rows]).double().mean()),
        near_in_training=math.nan if near is None else near.usual,
        leaked=torch.nonzero(leaked).flatten(),
        few_values=coincide(problem, rows),
        tokens=tokens,
        separable=separable,
        separable_error=separable_error,
        shifts=tuple(shifts),
        class_shift=class_shift,
        class_shift_error=class_error,
        outcome=Outcome.FINISHED if len(other) <= NEAR else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="comparison of samples", notes=problem.notes),
    )


@dataclass(frozen=True)
class _Near:
    """Which of the validation samples `rows` are `close` to a training sample, and the share of training samples that are so."""

    rows: Tensor
    close: Tensor
    usual: float


def _near_copies(problem: Problem, valid: Problem, view: SampleVectors, seed: int) -> _Near | None:
    rows, mine = chosen_rows(valid, NEAR, seed), chosen_rows(problem, AMONG, seed)
    theirs, ours = view.of(valid, rows), view.of(problem, mine)
    if theirs is None or ours is None or len(mine) < 20:
        return None
    some = torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))[:NEAR]
    among = torch.cat([_nearest(ours[part], ours, part) for part in some.split(100)])
    usual = float(among[among > 0].median()) if bool((among > 0).any()) else 0.0
    nearest = torch.cat([_nearest(part, ours, None) for part in theirs.split(100)])
    return _Near(rows, nearest <= CLOSE * usual, float((among <= CLOSE * usual).double().mean()))


def _nearest(vectors: Tensor, among: Tensor, own: Tensor | None) -> Tensor:
    """Distances to the nearest of other vectors, not to themselves; by differences, for a product of rows rounds."""
    distances = torch.cdist(vectors, among, compute_mode="donot_use_mm_for_euclid_dist")
    if own is not None:
        distances[torch.arange(len(own)), own] = math.inf
    return distances.amin(1)


def two_sample_test(first: Tensor, second: Tensor, seed: int = 0) -> tuple[float, float]:
    """How well a linear rule tells two samples (n, d) and (m, d) apart: area under the curve on held-out halves, and its error.

    The error is that of two samples of one distribution, `√((n + m + 1) / (12 n m))`.

    >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    >>> two_sample_test(x[:100], x[100:] + 3.0)[0] > 0.99
    True
    """
    x = torch.cat([first, second]).double()
    x = torch.cat([x - x.mean(0), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    y = torch.cat([torch.full((len(first),), -1.0 / len(first)), torch.full((len(second),), 1.0 / len(second))]).double()
    generator = torch.Generator().manual_seed(seed)
    half = torch.cat([torch.randperm(len(part), generator=generator) % 2 for part in (first, second)])
    areas = []
    for side in (0, 1):
        a, b = x[half != side], y[half != side]
        square = a.T @ a
        ridge = 0.1 * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
        scores = x[half == side] @ torch.linalg.solve(square + ridge, a.T @ b)
        areas.append(_area(scores, y[half == side] > 0))
    return sum(areas) / 2, math.sqrt((len(x) + 1) / (12 * len(first) * len(second)))


def _area(scores: Tensor, positive: Tensor) -> float:
    """The probability that a positive has the higher score than a negative; ties count half."""
    low, high = scores[~positive].sort().values, scores[positive]
    below = torch.searchsorted(low, high) + torch.searchsorted(low, high, right=True)
    return float(below.double().mean()) / (2 * max(1, len(low)))


def _shifts(problem: Problem, view: SampleVectors, theirs: Tensor, most: int = 5) -> list[Row]:
    """Named columns whose mean is another, in units of their spread in training, the largest difference first."""
    names = problem.data.columns
    seen = view.seen
    if names is None or seen is None or seen.shape[1] != len(names):
        return []
    spread = seen.std(0).clamp_min(1e-30)
    moved = ((theirs.mean(0) - seen.mean(0)) / spread).tolist()
    rows: list[Row] = [{"column": name, "shift_in_spreads": shift} for name, shift in zip(names, moved, strict=True)]
    return sorted(rows, key=lambda row: -abs(row["shift_in_spreads"]))[:most]


def _class_shift(problem: Problem, valid: Problem) -> tuple[float, float]:
    """The total variation between the shares of the classes, and what chance alone makes of it."""
    mine, theirs = labels_of(problem), labels_of(valid)
    if mine is None or theirs is None:
        return math.nan, math.nan
    names = list(dict.fromkeys([*mine.names, *theirs.names]))
    shares = torch.zeros(2, len(names), dtype=torch.float64)
    for row, labels in zip(shares, (mine, theirs), strict=True):
        row[[names.index(name) for name in labels.names]] = labels.counts.double() / len(labels.values)
    pooled = shares.mean(0)
    sizes = 1 / len(mine.values) + 1 / len(theirs.values)
    chance = float((pooled * (1 - pooled) * sizes * 2 / math.pi).sqrt().sum()) / 2  # the mean of |difference| over classes
    return float((shares[0] - shares[1]).abs().sum()) / 2, chance
