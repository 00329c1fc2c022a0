"""Which of several models is better at what: loss, accuracy and flatness on the same samples, with errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.dynamics import CriticalRate, critical_learning_rate
from theodolite.measures.mode_connectivity import LinearPath, Meter, in_parts
from theodolite.problem import Problem
from theodolite.results import Row, number
from theodolite.text import listed

#: Groups of samples from whose scatter the error of a loss is taken, and of a curvature at least so many samples.
GROUPS, FEWEST = 64, 10
#: A difference counts where it is so many times its error.
CLEAR = 2.0


@dataclass(frozen=True)
class Measured:
    """One model: its loss, the `parts` of it that groups of samples make (G,), its right answers, and its critical rate."""

    loss: float
    parts: Tensor | None
    right: Tensor | None
    rate: CriticalRate


def measured(problem: Problem, *, tol: float, seed: int) -> Measured:
    """Loss, right answers and critical rate of one model; nothing of it is changed."""
    # Batch normalisation in training mode ties the samples of a batch together: leaving some out would change the others.
    whole = bool(problem.coupled) or problem.samples < FEWEST
    population = None if whole else 10**9 * problem.samples  # as good as infinite: the error is that of a sample
    return Measured(
        loss=problem.loss(),
        parts=_parts(problem),
        right=_right(problem),
        rate=critical_learning_rate(problem, population=population, tol=tol, seed=seed, progress=False),
    )


def _parts(problem: Problem) -> Tensor | None:
    """What each group of samples adds to the loss beyond its fair share, so that the scatter is the error of the loss."""
    cut = in_parts(problem, max(1, math.ceil(problem.samples / GROUPS)))
    with cut.session(second=False), torch.no_grad():
        tensors = cut.tensors(cut.leaves(grad=False))
        found = [(share * float(cut.evaluate(tensors, b, i).loss), b.size) for i, share, b in cut.iterate()]
    added, sizes = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    return None if len(added) < 2 else added - added.sum() * sizes / sizes.sum()


def _right(problem: Problem) -> Tensor | None:
    meter = Meter(problem, "auto")
    with problem.session(second=False), torch.no_grad():
        return meter.read(problem.tensors(problem.leaves(grad=False)))[1]


def _error_of_sum(parts: Tensor) -> float:
    return float(parts.std()) * math.sqrt(len(parts))


def _error_of_mean(values: Tensor) -> float:
    return float(values.double().std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def score_rows(models: Mapping[str, Measured]) -> list[Row]:
    """One row per model; None where a quantity or its error is not known."""
    return [
        {
            "model": name,
            "loss": m.loss,
            "loss_error": None if m.parts is None else _error_of_sum(m.parts),
            "accuracy": None if m.right is None else float(m.right.double().mean()),
            "accuracy_error": None if m.right is None else _error_of_mean(m.right),
            "sharpness": m.rate.sharpness,
            "sharpness_error": m.rate.error / m.rate.value * m.rate.sharpness,  # the rate is 2 over it
            "critical_lr": m.rate.value,
            "critical_lr_error": m.rate.error,
        }
        for name, m in models.items()
    ]


def contests(models: Mapping[str, Measured], rows: Sequence[Row]) -> list[Row]:
    """For each quantity that all models have: the best one, the next one, and whether the difference is more than its error.

    Errors of losses and accuracies are those of paired differences, sample by sample: samples that are hard for both count for
    neither. Those of two curvatures are added as if they had nothing in common, which is rather too much.
    """

    def loss_error(a: Measured, b: Measured) -> float | None:
        paired = a.parts is not None and b.parts is not None and len(a.parts) == len(b.parts)
        return _error_of_sum(a.parts - b.parts) if paired else None  # type: ignore[operator]

    def accuracy_error(a: Measured, b: Measured) -> float | None:
        return _error_of_mean(a.right.double() - b.right.double())  # type: ignore[union-attr]

    def sharpness_error(a: Measured, b: Measured) -> float | None:
        return math.hypot(*(m.rate.error / m.rate.value * m.rate.sharpness for m in (a, b)))

    asked: dict[str, tuple[int, Callable[[Measured, Measured], float | None]]] = {
        "loss": (1, loss_error),
        "accuracy": (-1, accuracy_error),
        "sharpness": (1, sharpness_error),
    }
    found = []
    for quantity, (sign, error_of) in asked.items():
        if any(row[quantity] is None for row in rows):
            continue
        best, following = sorted(rows, key=lambda row: sign * row[quantity] if math.isfinite(row[quantity]) else math.inf)[:2]
        difference = abs(best[quantity] - following[quantity])
        error = error_of(models[best["model"]], models[following["model"]])
        clear = difference > CLEAR * (error if error is not None and error == error else 0.0) and difference > 0
        found.append(
            {"quantity": quantity, "best": best["model"], "next": following["model"]}
            | {"difference": difference, "error": error, "clear": clear}
        )
    return found


def verdict(
    scores: Sequence[Row], found: Sequence[Row], paths: Sequence[tuple[tuple[str, str], LinearPath]], samples: str
) -> list[str]:
    """Sentences: which model is better, then loss, accuracy, flatness and what lies between the models, with numbers."""
    rows = {row["model"]: row for row in scores}
    contest = {row["quantity"]: row for row in found}
    lines = [_who(contest, f"on these {samples} samples", len(rows))] if contest else []
    said = {"loss": _loss, "accuracy": _accuracy, "sharpness": _flatness}
    lines += [said[name](row, rows[row["best"]], rows[row["next"]]) for name, row in contest.items()]
    return [*lines, *([_between(paths)] if paths else [])]


def _who(contest: Mapping[str, Row], where: str, models: int) -> str:
    judged = {name: contest[name] for name in ("loss", "accuracy") if name in contest}
    winners = {name: row["best"] for name, row in judged.items() if row["clear"]}
    words = {"loss": "lower loss", "accuracy": "higher accuracy"}
    if not winners and models > 2:
        return f"The best two by loss, {contest['loss']['best']} and {contest['loss']['next']}, cannot be told apart {where}."
    if not winners:
        return f"Neither model is clearly better {where}."
    if len(set(winners.values())) > 1:
        return f"It depends {where}: " + ", ".join(f"{winner} has the {words[name]}" for name, winner in winners.items()) + "."
    winner = next(iter(winners.values()))
    rest = [name for name in judged if name not in winners]
    beside = "; its {} is not clearly {}".format(*_LEVEL[rest[0]]) if rest else ""
    return f"{winner} is better {where}: {' and '.join(words[name] for name in winners)}{beside}."


_LEVEL = {"loss": ("loss", "lower"), "accuracy": ("accuracy", "higher")}


def _compared(name: str, better: str, row: Row, levels: Sequence[str], difference: str) -> str:
    """One quantity in one sentence; who is better only where that is clear. `levels` are those of the best and the next."""
    best, following = levels
    if row["clear"]:
        return f"{better}: {row['best']}, {best} against {following} of {row['next']} (difference {difference})."
    why = f"difference {difference}" if row["difference"] else "no difference at all"
    return f"{name}: no clear winner, {best} ({row['best']}) and {following} ({row['next']}), {why}."


def _loss(row: Row, best: Row, following: Row) -> str:
    levels = [number(one["loss"], one["loss_error"]) for one in (best, following)]
    unknown = "" if row["error"] is not None else ", error not known"
    return _compared("Loss", "Lower loss", row, levels, number(row["difference"], row["error"]) + unknown)


def _accuracy(row: Row, best: Row, following: Row) -> str:
    levels = [_percent(one["accuracy"], one["accuracy_error"]) + " %" for one in (best, following)]
    return _compared("Accuracy", "Higher accuracy", row, levels, f"{_percent(row['difference'], row['error'])} points")


def _percent(share: float, error: float | None) -> str:
    """A share in hundredths, with the digits that its error leaves."""
    if error is None or not error > 0:
        return f"{100 * share:.1f}"
    return f"{100 * share:.1f} ± {100 * error:.1f}"


def _flatness(row: Row, best: Row, following: Row) -> str:
    levels = [number(one["sharpness"], one["sharpness_error"]) for one in (best, following)]
    rates = [number(one["critical_lr"], one["critical_lr_error"]) for one in (best, following)]
    text = _compared("Sharpness", "Lower sharpness (flatter)", row, levels, number(row["difference"], row["error"]))
    return f"{text[:-1]}: plain SGD is stable up to lr {rates[0]} ({row['best']}) and {rates[1]} ({row['next']})."


def _between(paths: Sequence[tuple[tuple[str, str], LinearPath]]) -> str:
    """What lies on the straight lines between the models."""
    if len(paths) == 1:
        return f"Between them: {paths[0][1].sentence()}"
    joined = [f"{a} and {b}" for (a, b), path in paths if path.connected and path.conclusive]
    words = f"{len(joined)} of {len(paths)} pairs share a basin"
    (a, b), worst = max(paths, key=lambda item: item[1].barrier_train or item[1].loss_barrier_train)
    return f"Between them: {words}{f' ({listed(joined, 4)})' if joined else ''}. {a} to {b}: {worst.sentence()}"
