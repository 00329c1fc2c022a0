"""An experiment of one's own: does the trace of a random matrix come out right?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import theodolite as th
from theodolite.experiments import Claim, Experiment


@dataclass(frozen=True)
class Params:
    size: int
    seeds: int


def worst_miss(rows: list[dict[str, Any]]) -> float:
    """The largest distance between estimate and truth, in standard errors."""
    return max(abs(row["estimate"] - row["truth"]) / row["stderr"] for row in rows)


class TraceOfRandomMatrices(Experiment):
    """The trace of a random symmetric matrix lies within its error bar.

    Gaussian matrices, estimated from thirty products; the truth is the sum of the diagonal.
    """

    id = "mine/random-trace"
    source = "none: a check of the estimator"
    sizes: ClassVar = {"tiny": Params(60, 5), "laptop": Params(300, 20), "paper": Params(1000, 50)}
    claims = (Claim("the estimate is within five standard errors (the worst seed)", worst_miss, rule="at most", expected=5.0),)

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            yield {"size": p.size, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(job["seed"])
        square = torch.randn(job["size"], job["size"], generator=generator, dtype=torch.float64)
        matrix = square + square.T
        found = th.trace(matrix, matvecs=30, seed=job["seed"])
        return {"seed": job["seed"], "truth": float(matrix.trace()), "estimate": found.value, "stderr": found.stderr}

    def figure(self, rows: list[dict[str, Any]]) -> Any:
        return th.plots.scatter(rows, x="truth", y="estimate", identity=True).figure
