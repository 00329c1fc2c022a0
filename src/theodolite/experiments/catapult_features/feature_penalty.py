"""A penalty on the norm of the AGOP, which the source names as promising: what it does to the rank-2 task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.experiments.catapult_features.feature_tasks import Setting, prepare
from theodolite.experiments.catapult_features.feature_training import UNTIL, Feed, critical_rate
from theodolite.experiments.claims import Claim
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured
from theodolite.measures.features import agop, agop_alignment, agop_penalty
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECK = 20


@dataclass(frozen=True)
class Params:
    setting: Setting
    batch: int
    steps: int
    strengths: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1)
    seeds: int = 3


def change(column: str) -> Callable[[list[Row]], Measured]:
    """A column at the strength of the lowest mean validation loss less that without a penalty, by seed."""

    def measure(rows: list[Row]) -> Measured:
        strengths = sorted({row["strength"] for row in rows if row["strength"] > 0})
        best = min(strengths, key=lambda s: fmean(row["validation"] for row in rows if row["strength"] == s))
        value = {(row["strength"], row["seed"]): row[column] for row in rows}
        gains = [value[best, row["seed"]] - value[0.0, row["seed"]] for row in rows if row["strength"] == 0]
        spread = math.sqrt(fmean((g - fmean(gains)) ** 2 for g in gains) / max(len(gains) - 1, 1))
        return Measured(fmean(gains), spread)

    return measure


class AGOPPenalty(Experiment):
    """A penalty on the norm of the AGOP: alignment and test loss of rank-2 with and without.

    SGD at half the critical rate on the squared error plus a multiple of the Frobenius norm of the batch's AGOP. The source
    proposes such a term without trying it: there is nothing to compare with, the numbers are measured.
    """

    id = "catapult-features/agop-penalty"
    source = "003, chapter 5, future directions (line 1227)"
    sizes = {
        "tiny": Params(Setting("rank-2", 80, 300, 20, 64), batch=20, steps=100, strengths=(0.0, 0.03), seeds=2),
        "laptop": Params(Setting("rank-2", 500, 2000, 50, 512), batch=50, steps=1500),
        "paper": Params(Setting("rank-2", 2000, 5000, 100, 1024), batch=50, steps=6000),
    }
    claims = (
        Claim("alignment with the best strength (by validation) less that without", change("alignment")),
        Claim("test loss with the best strength (by validation) less that without", change("test_loss")),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for strength in p.strengths:
            for seed in range(p.seeds):
                yield {"setting": asdict(p.setting), "batch": p.batch, "steps": p.steps, "strength": strength, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Row:
        start = prepare(Setting(**job["setting"]), [job["seed"]])
        rate = 0.5 * float(critical_rate(start.networks, start.splits.train.x))
        model, splits = start.networks.model(0), start.splits
        feed, best = Feed(splits.train, job["batch"], [job["seed"]]), (math.inf, copy.deepcopy(model))
        parts = [(points.x[0], points.y[0]) for points in (splits.train, splits.validation, splits.test)]
        for step in range(job["steps"]):
            x, y = feed.next()
            _penalised_step(model, x[0], y[0], rate, job["strength"])
            if (step + 1) % CHECK == 0:
                loss, validation = _loss(model, *parts[0]), _loss(model, *parts[1])
                best = (validation, copy.deepcopy(model)) if validation < best[0] else best
                if not UNTIL <= loss < math.inf:
                    break
        matrix = agop(best[1], parts[0][0])
        return {
            "strength": job["strength"],
            "seed": job["seed"],
            "alignment": agop_alignment(matrix, start.target),
            "norm": float(matrix.norm()),
            "test_loss": _loss(best[1], *parts[2]),
            "validation": best[0],
            "steps": step + 1,
        }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(3, size=(3.6, 3.0))
        for ax, column, label in zip(
            axes, ("alignment", "test_loss", "norm"), ("AGOP alignment", "test loss", "‖AGOP‖"), strict=True
        ):
            plots.curves(
                rows, "strength", column, band="std", markers=True, xlabel="strength of the penalty", ylabel=label, ax=ax
            )
        return figure


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x)[:, 0] - y).double().square().mean())


def _penalised_step(model: nn.Module, x: Tensor, y: Tensor, rate: float, strength: float) -> None:
    loss = (model(x)[:, 0] - y).square().mean()
    if strength:
        loss = loss + strength * agop_penalty(model, x)
    weights = list(model.parameters())
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.sub_(gradient, alpha=rate)
