"""Do labels fit their inputs: how the classes are shared out, whether inputs say anything of them, which labels they contradict.

What inputs say of a sample's label is predicted from all other samples (`LeaveOneOut`); the label itself takes no part.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from theodolite.arguments import checked, count, seed, sequence, series, whole
from theodolite.measures.data_audit.discreteness import coincide
from theodolite.measures.data_audit.neighbours import (
    LeaveOneOut,
    column_skill,
    few_directions,
    linear_skill,
    permutation_test,
    permuted_copies,
    with_products,
)
from theodolite.measures.data_audit.views import (
    Answers,
    Labels,
    SampleVectors,
    answers_on,
    chosen_rows,
    label_losses,
    labels_of,
    middle_and_width,
    numbers_of,
    part_of,
)
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem
from theodolite.results import Cost, Outcome, Result, Row

#: Samples that are predicted from one another.
SAMPLES = 1000
#: Samples that are looked through for wrong labels once there are known to be many.
SEARCHED = 20_000
#: Numbers farther from the median than this many spreads count as if they were there.
CLIPPED = 4.0
#: Of these the ten with the largest losses are listed.
LISTED = 200
#: Fewer samples, or fewer of them per class, tell nothing.
FEWEST, FEWEST_PER_CLASS = 100, 5
#: A model that takes away this share of the error has a say in which samples are suspected.
LEARNED = 0.2
#: Random orders of the labels that chance is judged by.
ORDERS = 99
#: A class is rare below this share of an equal one.
RARE = 0.2


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LabelAudit(Result):
    """What is known of the targets without trusting them.

    `classes` and `counts` cover all samples that have a label; `recalls` says how often the model is right, by class, and
    `predicted_recalls` how often a prediction from the inputs is, both on `samples` of them. `agreement` is the share of labels
    that this prediction gives, `chance` that of the largest class. `skill` is the share of the variance of the targets that
    it predicts, `p_value` how often random orders of the targets give as much; `model_skill` is the share of the loss (of the
    variance) that the model takes away, on validation data where there are some (`validated`).

    `noise` is the share of wrong labels, with its standard error; `noise_told` whether it could be told from inputs that do not
    determine their labels. `suspects` are the samples whose labels are contradicted, the worst first.
    """

    classes: tuple[str, ...]
    counts: tuple[int, ...]
    recalls: tuple[float, ...]
    predicted_recalls: tuple[float, ...]
    samples: int
    agreement: float
    chance: float
    skill: float
    p_value: float
    model_skill: float
    validated: bool
    few_values: bool
    noise: float
    noise_error: float
    noise_told: bool
    suspects: tuple[Row, ...]
    suspected: Tensor

    @property
    def rare(self) -> tuple[int, ...]:
        """Classes with less than a fifth of an equal share."""
        total, equal = sum(self.counts), len(self.counts)
        return tuple(i for i, n in enumerate(self.counts) if n * equal < RARE * total)

    @checked(of=series, classes=lambda name, value: [whole(f"{name}[{i}]", c) for i, c in enumerate(sequence(name, value))])
    def recall(self, of: tuple[float, ...], classes: tuple[int, ...]) -> float:
        """How often some classes are recognised, each counted alike; NaN where it is not known."""
        known = [of[i] for i in classes if i < len(of) and not math.isnan(of[i])]
        return sum(known) / len(known) if known else math.nan

    def rows(self) -> list[Row]:
        shares = [n / max(1, sum(self.counts)) for n in self.counts]
        columns = zip(self.classes, self.counts, shares, self.recalls, self.predicted_recalls, strict=True)
        names = ("class", "samples", "share", "model_is_right", "predicted_from_inputs")
        return [dict(zip(names, values, strict=True)) for values in columns]

    def sentence(self) -> str:
        if not self.classes:
            return f"The inputs predict {max(0.0, 100 * self.skill):.3g} % of the variance of the targets."
        text = f"{len(self.classes)} classes, {min(self.counts)} to {max(self.counts)} samples each"
        return text + (f"; the inputs alone give {100 * self.agreement:.3g} % of the labels." if self.samples else ".")


@checked(problem=a_problem, valid=a_problem, most=count, seed=seed)
def audit_labels(problem: Problem, *, valid: Problem | None = None, most: int = SAMPLES, seed: int = 0) -> LabelAudit:
    """Class counts, how well inputs predict the targets, and labels that they contradict.

    Args:
        valid: the same problem on validation data: what the model has learned is judged there.
        most: samples that are predicted from one another.

    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> found = audit_labels(Problem(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), (x, (x[:, 0] > 0).long())))
    >>> found.classes, found.agreement > 0.9, found.p_value
    (('0', '1'), True, 0.01)
    """
    began = time.perf_counter()
    labels = labels_of(problem)
    rows = _looked_at(problem, labels, most, seed)
    targets = _targets(problem, labels, rows)
    if targets is None and labels is None:
        raise ValueError("audit_labels needs one class or a vector of numbers per sample as target.")
    found: dict[str, object] = dict(_UNKNOWN)
    if labels is not None:
        found |= {"classes": labels.names, "counts": tuple(labels.counts.tolist())}
        found |= dict.fromkeys(("recalls", "predicted_recalls"), (math.nan,) * len(labels.names))
    if targets is not None:
        found |= _model(problem, valid, labels, rows, targets, seed)
    if targets is not None and len(rows) >= FEWEST:
        skill = found["model_skill"]
        told = targets if labels is not None else _clipped(targets)
        found |= _inputs(problem, labels, rows, told, seed, learned=isinstance(skill, float) and skill > LEARNED)
    return LabelAudit(
        **found,  # type: ignore[arg-type]
        outcome=Outcome.FINISHED if problem.samples <= most else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="leave-one-out predictions", notes=problem.notes),
    )


_UNKNOWN: dict[str, object] = {
    **dict.fromkeys(("classes", "counts", "recalls", "predicted_recalls", "suspects"), ()),
    **dict.fromkeys(("agreement", "chance", "skill", "p_value", "model_skill", "noise", "noise_error"), math.nan),
    **dict.fromkeys(("validated", "few_values", "noise_told"), False),
    "samples": 0,
    "suspected": torch.zeros(0, dtype=torch.long),
}


def _looked_at(problem: Problem, labels: Labels | None, most: int, seed: int) -> Tensor:
    """Which samples are looked at: a random choice of those that have a target."""
    if labels is None:
        return chosen_rows(problem, most, seed)
    order = torch.randperm(len(labels.rows), generator=torch.Generator().manual_seed(seed))[:most]
    return labels.rows[order].sort().values


def _targets(problem: Problem, labels: Labels | None, rows: Tensor) -> Tensor | None:
    """Classes as rows of 0 and 1, numbers standardised, (n, k) in float64."""
    if labels is not None:
        return functional.one_hot(labels.at(rows), len(labels.names)).double() if len(labels.names) > 1 else None
    numbers = numbers_of(problem, rows)
    if numbers is None or numbers.shape[1] > 64 or not bool((numbers.std(0) > 0).any()):
        return None
    return _standardised(numbers)


def _standardised(numbers: Tensor) -> Tensor:
    spread = numbers.std(0)
    return (numbers - numbers.mean(0)) / torch.where(spread > 0, spread, 1.0)


def _clipped(numbers: Tensor) -> Tensor:
    """Numbers of which a few that lie far out do not decide; a model was trained on them as they are."""
    middle, width = middle_and_width(numbers)
    return _standardised(torch.where(width > 0, numbers.clamp(middle - CLIPPED * width, middle + CLIPPED * width), numbers))


# What the model makes of them


def _model(
    problem: Problem, valid: Problem | None, labels: Labels | None, rows: Tensor, targets: Tensor, seed: int
) -> dict[str, object]:
    """How often it is right, and how much of the loss of a constant answer it takes away."""
    answers = answers_on(part_of(problem, rows))
    if answers is None:
        return {}
    found: dict[str, object] = {"model_skill": _skill_of(answers, targets, labels is not None)}
    if labels is not None and answers.right is not None:
        found["recalls"] = _by_class(answers.right, labels.at(rows), len(labels.names))
    if valid is not None:
        other = labels_of(valid) if labels is not None else None
        places = _looked_at(valid, other, SAMPLES, seed)
        values = _targets(valid, other, places) if (other is None) == (labels is None) else None
        judged = None if values is None else answers_on(part_of(valid, places))
        if judged is not None and values is not None:
            found |= {"model_skill": _skill_of(judged, values, labels is not None), "validated": True}
    return found


def _skill_of(answers: Answers, targets: Tensor, classes: bool) -> float:
    """1 - error / error of the best constant: of the answers that are right, or of the squared distance to numbers."""
    if classes:
        if answers.right is None:
            return math.nan
        constant = float(targets.mean(0).max())
        return (float(answers.right.double().mean()) - constant) / max(1 - constant, 1e-12)
    # Outputs are compared up to shift and scale: what was standardised here is not what the model was trained on.
    outputs = answers.outputs
    if outputs.shape[1] != targets.shape[1] or len(outputs) < 3:
        return math.nan
    x, y = outputs - outputs.mean(0), targets - targets.mean(0)
    products = (x * y).sum(0)
    explained = products.clamp_min(0.0).square() / x.square().sum(0).clamp_min(1e-300)
    return float(explained.sum() / y.square().sum().clamp_min(1e-300))


def _by_class(right: Tensor, values: Tensor, classes: int) -> tuple[float, ...]:
    """The share of right answers in each class, NaN where there is no sample of it."""
    counts = torch.bincount(values, minlength=classes).double()
    hits = torch.bincount(values, weights=right.double(), minlength=classes)
    return tuple((hits / torch.where(counts > 0, counts, torch.nan)).tolist())


# What the inputs say of them


def _inputs(
    problem: Problem, labels: Labels | None, rows: Tensor, targets: Tensor, seed: int, *, learned: bool
) -> dict[str, object]:
    view = SampleVectors(problem, rows, seed=seed)
    vectors = view.seen
    if vectors is None:
        return {}
    near = LeaveOneOut(vectors)
    few = few_directions(targets, seed)
    orders = permuted_copies(few, ORDERS, seed)
    columns = with_products(vectors)
    p_values = [
        permutation_test(near.skill(few), near.skill(orders)),
        permutation_test(column_skill(columns, few), column_skill(columns, orders)),
        permutation_test(linear_skill(vectors, few), linear_skill(vectors, orders)),
    ]
    predicted = near.predictions(targets)
    found: dict[str, object] = {
        "samples": len(rows),
        "skill": float(1 - (targets - predicted).square().sum() / (targets - targets.mean(0)).square().sum()),
        "p_value": min(p_values),
        "few_values": coincide(problem, rows),
    }
    if labels is None:
        return found
    values = labels.at(rows)
    right = predicted.argmax(1) == values
    found |= {
        "agreement": float(right.double().mean()),
        "chance": float(targets.mean(0).max()),
        "predicted_recalls": _by_class(right, values, len(labels.names)),
    }
    noise = label_noise(predicted, values)
    if noise is None:
        return found
    found |= {"noise": noise.share, "noise_error": noise.error, "noise_told": noise.told}
    if noise.told and noise.share - 2 * noise.error > 0.01:
        found |= _suspects(problem, labels, rows, _Predictor(view, near, targets), noise, seed, learned=learned)
    return found


@dataclass(frozen=True)
class Noise:
    """The share of wrong labels with its error, and whether it is `told` from labels that inputs do not determine.

    Of two predicted shares that differ by more than `sure` the inputs are sure.
    """

    share: float
    error: float
    told: bool
    sure: float


def label_noise(predicted: Tensor, values: Tensor) -> Noise | None:
    """The share of wrong labels among samples that were predicted without their own label, (n, classes) and (n,).

    Among the third of the samples that inputs are surest of, a prediction errs because labels are wrong, or because it knows no
    better. In the first case it errs as often among the surest tenth as among the others, hardly more often in the next third,
    and it is about equally sure of most samples; where inputs do not determine their labels, errors grow as certainty falls, from
    the first tenth on.
    """
    n, classes = predicted.shape
    if n < 3 * FEWEST or n < 2 * FEWEST_PER_CLASS * classes:
        return None
    top = predicted.topk(2, dim=1)
    margin = top.values[:, 0] - top.values[:, 1]
    order = margin.argsort(descending=True, stable=True)
    wrong = (top.indices[:, 0] != values)[order].double()
    tenth, third = n // 10, n // 3
    first, rest, share, later = (
        float(part.mean()) for part in (wrong[:tenth], wrong[tenth:third], wrong[:third], wrong[third : 2 * third])
    )
    # The surest samples are a little more often those with a wrong label, whose own label is not missed: up to a tenth more.
    error = math.hypot(math.sqrt(max(share * (1 - share), 1 / third) / third), 0.1 * share)
    between = math.sqrt(share * (1 - share) * (1 / tenth + 1 / (third - tenth)))
    sure = float(margin.quantile(0.9))
    alike = float(margin.median()) / max(sure, 1e-300)
    flat = rest - first <= 1.5 * between and later - share <= 0.08 + 0.5 * math.sqrt(2 * share * (1 - share) / third)
    known = 1 - float(wrong.mean()) >= 0.78 * (1 - share)  # most samples are as clear as the surest third
    told = share < 0.5 and flat and known and alike >= (0.55 if classes == 2 else 0.4 if n >= 600 else 0.44)
    return Noise(share, error, told or share + 2 * error < 0.05, 0.5 * sure)


@dataclass(frozen=True)
class _Predictor:
    """What inputs say of samples: of those it knows the targets of, without the own one of each, and of others."""

    view: SampleVectors
    near: LeaveOneOut
    targets: Tensor

    def __call__(self, problem: Problem, more: Tensor) -> Tensor:
        """Predictions for the samples it knows, followed by those for `more`."""
        own = self.near.predictions(self.targets)
        vectors = self.view.of(problem, more) if len(more) else None
        return own if vectors is None else torch.cat([own, self.near.others(vectors, self.targets)])


def _suspects(
    problem: Problem, labels: Labels, rows: Tensor, predict: _Predictor, noise: Noise, seed: int, *, learned: bool
) -> dict[str, object]:
    """Samples whose label is contradicted for sure: those looked at, and others up to a limit.

    Of a model that has `learned` something the largest losses stand first, else those that the inputs are surest of.
    """
    more = labels.rows[~torch.isin(labels.rows, rows)]
    more = more[torch.randperm(len(more), generator=torch.Generator().manual_seed(seed))[: SEARCHED - len(rows)]].sort().values
    predicted = predict(problem, more)
    rows = torch.cat([rows, more])[: len(predicted)]
    values = labels.at(rows)
    gap = predicted.amax(1) - predicted.gather(1, values[:, None])[:, 0]
    guilty = torch.nonzero(gap > noise.sure).flatten()
    worst = guilty[gap[guilty].argsort(descending=True, stable=True)][:LISTED]
    losses = _losses(problem, labels, rows[worst])
    suspects: list[Row] = [
        {
            "sample": int(rows[i]),
            "label": labels.names[int(values[i])],
            "inputs_say": labels.names[int(predicted[i].argmax())],
            "certainty": float(gap[i]),
            "loss": loss,
        }
        for i, loss in zip(worst.tolist(), losses, strict=True)
    ]
    if learned:
        suspects.sort(key=lambda row: (0.0 if math.isnan(row["loss"]) else -row["loss"], -row["certainty"]))
    return {"suspects": tuple(suspects[:10]), "suspected": rows[guilty].sort().values}


def _losses(problem: Problem, labels: Labels, rows: Tensor) -> list[float]:
    """The model's loss on each of these samples, NaN where it is not known."""
    unknown = [math.nan] * len(rows)
    if not len(rows):
        return unknown
    order = rows.argsort()
    answers = answers_on(part_of(problem, rows[order]))
    losses = None if answers is None else label_losses(answers.outputs, labels.at(rows[order]))
    return unknown if losses is None else losses[order.argsort()].tolist()
