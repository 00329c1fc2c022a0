"""Experiments for tests: one that is right, one with a wrong claim, one whose jobs fail, one that takes its time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from theodolite.experiments import Claim, Experiment, Reported

Row = dict[str, Any]


def mean(rows: list[Row]) -> float:
    return sum(row["value"] for row in rows) / len(rows)


class Right(Experiment):
    """A right claim <script>alert(1)</script>.

    With a second paragraph.
    """

    id = "samples/right"
    where = "a test"
    sizes = {"tiny": {"count": 6, "pause": 0.0}, "laptop": {"count": 60, "pause": 0.0}, "paper": {"count": 600, "pause": 0.0}}
    claims = [Claim("the mean lies in [0, 1]", mean, rule="between", expected=(0.0, 1.0), reported=Reported(0.5, "line 1"))]

    def jobs(self, p: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for seed in range(p["count"]):
            yield {"seed": seed, "pause": p["pause"]}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        time.sleep(job["pause"])
        draw = torch.rand(50, generator=torch.Generator().manual_seed(job["seed"]))
        matrix = torch.randn(61, 37, generator=torch.Generator().manual_seed(job["seed"]))
        yield {"seed": job["seed"], "part": 0, "value": float(draw.mean()), "norm": float((matrix.T @ matrix).norm())}
        yield {"seed": job["seed"], "part": 1, "value": float(draw.median()), "draw": draw}

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        return plots.curves(rows, "seed", "value", by="part").figure


class Wrong(Right):
    """A claim that is wrong on purpose."""

    id = "samples/wrong"
    claims = [
        Claim("the mean is 7", mean, rule="within", tolerance=0.1, reported=Reported(7.0, "Table 1", read_from="plot")),
        Claim("seen only at laptop size", mean, rule="at least", expected=2.0, since="laptop"),
        Claim("only measured", mean),
        Claim("cannot be measured", lambda rows: rows[0]["nosuch"], rule="equal", expected=1),
    ]


class Failing(Right):
    """Jobs with odd seeds raise."""

    id = "samples/failing"

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        if job["seed"] % 2:
            raise RuntimeError(f"seed {job['seed']} is odd")
        yield from super().run(job)


class Deadly(Right):
    """The job with seed 2 kills its worker."""

    id = "samples/deadly"

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        if job["seed"] == 2:
            os._exit(9)
        yield from super().run(job)


class Undrawn(Right):
    """A figure that raises."""

    id = "samples/undrawn"

    def draw(self, rows: list[Row]) -> Any:
        raise RuntimeError("no ink")


class Slow(Right):
    """Jobs that take their time; SLOW_PAUSE says how much."""

    id = "samples/slow"
    _pause = float(os.environ.get("SLOW_PAUSE", "0.3"))
    sizes = {
        "tiny": {"count": 10, "pause": _pause},
        "laptop": {"count": 20, "pause": _pause},
        "paper": {"count": 30, "pause": _pause},
    }
