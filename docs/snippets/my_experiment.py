"""An experiment of one's own: does the trace of a random matrix come out right?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import theodolite as th
from theodolite.experiments import Figure, Study, at_most, rows, sizes


class RandomTraces(Study):
    """The computation: traces of Gaussian matrices, estimated from thirty products."""

    sizes = sizes(tiny={"size": 60, "seeds": 5}, laptop={"size": 300, "seeds": 20}, paper={"size": 1000, "seeds": 50})

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            yield {"size": p.size, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(job["seed"])
        square = torch.randn(job["size"], job["size"], generator=generator, dtype=torch.float64)
        matrix = square + square.T
        found = th.trace(matrix, matvecs=30, seed=job["seed"])
        truth = float(matrix.trace())
        miss = abs(found.value - truth) / found.stderr
        return {"seed": job["seed"], "truth": truth, "estimate": found.value, "miss": miss}


class TraceOfRandomMatrices(Figure):
    """The trace of a random symmetric matrix lies within its error bar.

    Gaussian matrices, estimated from thirty products; the truth is the sum of the diagonal.
    """

    study, id, where = RandomTraces(), "mine/random-trace", "none: a check of the estimator"
    claims = {"the estimate is within five standard errors (the worst seed)": at_most(5.0, rows.max("miss"))}  # noqa: RUF012

    def draw(self, rows: list[dict[str, Any]]) -> Any:
        return th.plots.scatter(rows, x="truth", y="estimate", identity=True).figure
