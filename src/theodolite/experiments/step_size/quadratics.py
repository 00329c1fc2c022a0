"""Tuning the step size of gradient descent on one fixed quadratic: a stable meta-gradient, and what autograd makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.experiments import Figure, at_least, at_most, between, equal, measured, rows, sizes, within
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Value, select, split
from theodolite.experiments.step_size import paper
from theodolite.experiments.study import Study, grid
from theodolite.measures.stepsize import RateDescent, descend_rate, descend_unrolled, optimal_rate
from theodolite.results import Row

#: Of the source's quadratic, and the factor of 1/√k and of the others' meta-optimizers.
DIMENSION, OURS, THEIRS = 20, 0.01, 0.001
#: The settings of both tables: horizons at the first rate 0.1, first rates at the horizon 40.
HORIZONS, HORIZON, STARTS, START = (10, 20, 40, 80), 40, (0.001, 0.01, 0.1, 1.0), 0.1
#: How a table calls the three ways of tuning.
NAMES = {"ours": "stable meta-gradient", "sgd": "autograd, gradient descent", "rmsprop": "autograd, RMSProp"}


def quadratic(seed: int, d: int = DIMENSION) -> tuple[Tensor, Tensor]:
    """`H = XᵀX` with X Gaussian (d, d), and w₀ on the sphere; the source's quadratics, of which it takes one."""
    generator = np.random.default_rng(seed)
    x, w = generator.standard_normal((d, d)), generator.standard_normal(d)
    return torch.from_numpy(x.T @ x), torch.from_numpy(w / np.linalg.norm(w))


# The rate as it is tuned


class TunedRates(Study):
    """The step size of gradient descent tuned by its meta-gradient, over horizons, first rates and ways to differentiate.

    Of the first quadratic there are rows along the way, of others only how it ended.
    """

    sizes = sizes(
        tiny={"updates": 150, "instances": 1, "detached": ()},
        laptop={"updates": 1000, "instances": 3, "detached": (False, True)},
        paper={"updates": 1000, "instances": 10, "detached": (False, True)},
        ours=1000,
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for seed in range(p.instances):
            for steps in HORIZONS:
                starts = list(STARTS) if steps == HORIZON else [START]
                yield {"how": "ours", "steps": steps, "starts": starts, "updates": p.ours, "detach": False, "seed": seed}
                for how in ("sgd", "rmsprop"):
                    for detach in (False, True) if seed == 0 and p.detached else (False,):
                        shared = {"steps": steps, "starts": starts, "updates": p.updates, "detach": detach, "seed": seed}
                        yield {"how": how, **shared}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        found = tuned(job)
        shared = {name: job[name] for name in ("how", "steps", "detach", "seed")}
        for i, start in enumerate(job["starts"]):
            path, gradients = found.rates[:, i].tolist(), found.gradients[:, i]
            yield {
                **{"kind": "end", **shared, "start": start, "optimum": found.optimum, "end": found.ends[i]},
                "first": float(gradients[0]),
                "largest": float(gradients[:-1].abs().nan_to_num(math.inf).max()),
                "moves": sum(before != after for before, after in pairwise(path)),
                "outside": found.outside(1e-2)[i],
                "outside_closely": found.outside(1e-3)[i],
                "settles": found.settles,
            }
            for k, rate in enumerate(path):
                if job["seed"] == 0 and (k <= 300 or k % 5 == 0):
                    yield {"kind": "path", **shared, "start": start, "update": k, "rate": rate}


def tuned(job: Mapping[str, Any]) -> RateDescent:
    """One way of tuning on one quadratic."""
    hessian, w0 = quadratic(job["seed"])
    asked: dict[str, Any] = {"updates": job["updates"], "progress": False}
    if job["how"] == "ours":
        return descend_rate(hessian, w0, job["starts"], job["steps"], meta_rate=OURS, **asked)
    asked |= {"meta_rate": THEIRS, "meta_optimizer": job["how"], "detach_inner_grad": job["detach"]}
    return descend_unrolled(hessian, w0, job["starts"], job["steps"], **asked)


ends, paths = rows(kind="end", detach=False), rows(kind="path", detach=False)
first_quadratic, others = ends(seed=0), ends(seed=lambda seed: seed != 0)


def away(row: Row) -> float:
    """How far the last hundred rates are from the best, as a share of it: their median."""
    return float(abs(row["end"] / row["optimum"] - 1))


def word(row: Row) -> str:
    """Whether it has converged: within 5 %."""
    return "unknown" if math.isnan(away(row)) else "yes" if away(row) <= 0.05 else "no"


def words(how: str, **cells: Any) -> Value:
    """A row of a table: yes or no for each of its cells."""
    return first_quadratic(how=how, **cells).measure(lambda found: ", ".join(map(word, found)))


#: What both tables print for the stable gradient and for RMSProp.
ALL, HALF = "yes, yes, yes, yes", "yes, yes, no, no"


def usable(row: Row) -> str:
    """Whether the first meta-gradient is neither 0 nor NaN."""
    return "yes" if math.isfinite(row["first"]) and row["first"] else "no"


def as_printed(found: list[Row]) -> float:
    """The share of the cells of other quadratics that are as the table's row of RMSProp."""
    groups = split(found, "seed").values()
    return fmean(a == b for group in groups for a, b in zip(map(word, group), HALF.split(", "), strict=True))


def table_claims(**cells: Any) -> dict[str, Claim]:
    """What both tables state of the stable meta-gradient and of RMSProp."""
    ours, rmsprop = first_quadratic(how="ours", **cells), first_quadratic(how="rmsprop", **cells)
    stuck, free = rmsprop.where(lambda row: word(row) == "no"), rmsprop.where(lambda row: word(row) == "yes")
    no_issues = paper("no numerical issues", "appendix F.2")
    return {
        "the stable meta-gradient converges": equal(ALL, words("ours", **cells), says=ALL),
        "its rates end at the best one (largest relative distance)": at_most(1e-3, ours.column(away).max(), **no_issues),
        "all of its meta-gradients are finite (largest)": at_most(1e4, ours.max("largest"), **no_issues),
        "autograd in float32 with RMSProp converges": equal(HALF, words("rmsprop", **cells), says=HALF),
        "its first meta-gradient is neither 0 nor NaN": equal(
            HALF, rmsprop.measure(lambda found: ", ".join(map(usable, found))), **paper("treated as zero", "appendix F.2")
        ),
        "where it is, the rate never moves (most updates that moved it)": at_most(
            0.0, stuck.max("moves"), **paper("stuck", "appendix F.2")
        ),
        "where it is not, the rate ripples around the best one (largest relative distance)": at_most(
            0.02, free.column(away).max()
        ),
        "RMSProp without second derivatives converges": measured(
            rows(kind="end", detach=True, how="rmsprop", **cells).if_any(lambda found: ", ".join(map(word, found))), says=HALF
        ),
        "the stable meta-gradient on other quadratics (share of the settings that converge)": measured(
            others(how="ours", **cells).if_any(lambda found: fmean(word(row) == "yes" for row in found)), says="always"
        ),
        "RMSProp on other quadratics (share of the settings that are as printed)": measured(
            others(how="rmsprop", **cells).if_any(as_printed)
        ),
    }


#: Where the tables follow another reading than the source's own.
DEPARTS = (
    "Converged means that the median of the last 100 rates is within 5 % of the best; the source does not say. Autograd keeps "
    "second derivatives: without them, as the source ran it, it computes another number, whose root is 18 % away for 10 steps."
)


def along_the_way(rows: list[Row], by: str, title: str, **cells: Any) -> Any:
    """The rate as it is tuned, a panel for each setting, with the best one as a line."""
    shown = [{**row, "of": NAMES[row["how"]]} for row in paths(**cells).of(rows)]
    look: dict[str, Any] = {"by": "of", "markers": False, "xlabel": "meta steps", "ylabel": "learning rate η"}
    found = []
    for value, group in split(shown, by).items():
        best = select(rows, kind="end", steps=group[0]["steps"], seed=0)[0]["optimum"]
        found.append(curves(group, "update", "rate", **look).line(y=best, label="best").set(title=title.format(value)))
    return draw_panels(*found, columns=2, size=(4.2, 3.0))


class Figure1(Figure):
    """The step size along its tuning: the stable meta-gradient finds the best one, autograd never moves.

    A 20-dimensional quadratic, 80 steps of gradient descent, first rate 0.1. The rate is first thrown to 0, then far beyond the
    best one, and comes back slowly. The meta-gradient of autograd in single precision is not a number, so the rate stays where it
    is.
    """

    study, item = TunedRates(), ("step-size-2021 Figure 1", "wu-2023 Figure 5.1")
    only = {"steps": 80, "seed": 0, "detach": False}
    ours, theirs = paths(how="ours", steps=80), paths(how=("sgd", "rmsprop"), steps=80)
    end = first_quadratic(how="ours", steps=80)
    soon = "converges quickly within 300 steps"
    # After about 120 updates the rate ripples, and the last bits of every sum decide where it is: no digits are claimed of it.
    claims = {
        "the best rate": within(1e-6, 0.0314306, end.only("optimum"), **paper("around 0.03", "appendix F.2")),
        "after one update the rate is 0": equal(0.0, ours(update=1).only("rate"), **paper("reset to zero", "Theorem 4")),
        "after two it is far above the best": within(1e-5, 0.506596, ours(update=2).only("rate")),
        "after 20": within(1e-5, 0.131041, ours(update=20).only("rate")),
        "after 100": within(1e-5, 0.036325, ours(update=100).only("rate")),
        "after 300 (relative distance from the best)": at_most(
            0.06, ours(update=300).only("rate").then(lambda rate: abs(rate / 0.0314306 - 1)), says=soon
        ),
        "the last update at which it is further than 0.01 from the best": within(1, 111, end.only("outside"), says=soon),
        "the last update at which it is further than 0.001 from the best": between(
            290, 360, end.only("outside_closely"), says=soon
        ),
        "after 1000": between(0.0311, 0.0318, ours(update=1000).only("rate")),
        "autograd leaves the rate at 0.1 (largest distance, gradient descent and RMSProp)": at_most(
            1e-8, abs(theirs["rate"] - START).max(), says="stuck at the initial value"
        ),
        "its first meta-gradient is not a number (of gradient descent and RMSProp)": equal(
            2, first_quadratic(how=("sgd", "rmsprop"), steps=80)["first"].count(math.isnan), says="explodes and gives NaN"
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        shown = [
            {**row, "of": NAMES[row["how"]]} for row in paths(how=("ours", "sgd"), steps=80).of(rows) if row["update"] <= 300
        ]
        panel = curves(shown, "update", "rate", by="of", markers=False, xlabel="meta steps", ylabel="learning rate η")
        return draw_panels(
            panel.line(y=select(rows, kind="end")[0]["optimum"], label="best").set(ylim=(0, None)), size=(4.6, 3.4)
        )


class Table1(Figure):
    """Whether tuning the step size converges, for several horizons.

    First rate 0.1. Autograd works in single precision and unrolls; with RMSProp it converges while loss and weights stay within
    its range, with gradient descent hardly ever: log f without the factor 1/t has gradients of hundreds, which throw the rate
    away.
    The paper and the thesis disagree about gradient descent at the horizon 10.
    """

    study, item = TunedRates(), ("step-size-2021 Table 1", "wu-2023 Table D.1")
    departs = DEPARTS
    claims = {
        **table_claims(start=START),
        "gradient descent on float32 meta-gradients converges (horizons 20, 40, 80)": equal(
            "no, no, no", words("sgd", start=START, steps=HORIZONS[1:]), says="no, no, no"
        ),
        "and at the horizon 10": measured(words("sgd", start=START, steps=10), says="yes in the paper, no in the thesis"),
    }

    def draw(self, rows: list[Row]) -> Any:
        return along_the_way(rows, "steps", "{} steps of gradient descent", start=START)


class Table2(Figure):
    """Whether tuning the step size converges, from several first rates.

    40 steps of gradient descent. From 0.1 and 1 the loss after them is 10^55 and 10^141, which single precision cannot hold.
    """

    study, item = TunedRates(), ("step-size-2021 Table 2", "wu-2023 Table D.2")
    departs = DEPARTS
    only = {"steps": HORIZON}
    claims = {
        **table_claims(steps=HORIZON),
        "gradient descent on float32 meta-gradients converges": equal(
            "no, no, no, no", words("sgd", steps=HORIZON), says="no, no, no, no"
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        return along_the_way(rows, "start", "first rate {}", steps=HORIZON)


# The best rate against the horizon

#: η* of the first quadratic by bisection in closed form.
BEST = {1: 0.0229219, 2: 0.0249833, 5: 0.0285486, 10: 0.0305471, 20: 0.0309083, 40: 0.0311834, 80: 0.0314306, 160: 0.0315719,
        200: 0.0316068, 1000: 0.0318064}  # fmt: skip
LONG = 1_000_000


class BestRates(Study):
    """The best step size of random quadratics for several horizons, of the first one for many."""

    sizes = sizes({"instances": (20, 100, 300)})

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, seed=range(p.instances))

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        hessian, w0 = quadratic(job["seed"])
        drawn = range(5, 201, 5) if job["seed"] == 0 else ()
        for steps in sorted({*BEST, LONG, *drawn}):
            found = optimal_rate(hessian, w0, steps, progress=False)
            yield {"seed": job["seed"], "steps": steps, "rate": found.value, "limit": found.limit}


best = rows(steps=lambda steps: steps <= 200)


def rises(*horizons: int) -> Value:
    """The share of the quadratics on which the best rate grows with each of these horizons."""

    def grows(found: list[Row]) -> bool:
        by_steps = {row["steps"]: row["rate"] for row in found}
        return all(by_steps[a] < by_steps[b] for a, b in pairwise(horizons))

    return rows.by("seed").each(grows).mean()


def over(row: Row) -> float:
    """The best rate over its limit."""
    return float(row["rate"] / row["limit"])


def one(steps: int, seed: int = 0) -> Value:
    return rows(seed=seed, steps=steps).only("rate")


class Figure2(Figure):
    """The best step size grows with the number of steps.

    By bisection, to all digits. The curve rises, flattens, and ends at 2/(λ_max + λ_min).
    """

    study, item = BestRates(), "step-size-2021 Figure 2"
    claims = {
        "the best rates of the first quadratic, for 1 to 1000 steps (largest distance)": at_most(
            1e-6, rows(seed=0, steps=[*BEST]).column(lambda row: abs(row["rate"] - BEST[row["steps"]])).max()
        ),
        "after 200 steps it is larger than after 10 (share of the quadratics)": at_least(
            0.9, rises(10, 200), says="depends on the training length"
        ),
        "it grows from 10 to 20, 40, 80, 160 and 200 steps (share of the quadratics)": at_least(
            0.8, rises(10, 20, 40, 80, 160, 200)
        ),
        "for 160 and 200 steps it is never above 2/(λ_max + λ_min) (largest ratio)": at_most(
            1.0, rows(steps=[160, 200]).column(over).max()
        ),
        "for 10 to 80 steps it may be (largest ratio)": measured(rows(steps=[10, 20, 40, 80]).column(over).max()),
        "it reaches that after a million steps (distance, first quadratic)": at_most(
            1e-6, rows(seed=0, steps=LONG).column(lambda row: abs(row["rate"] - row["limit"])).only()
        ),
        "it flattens: the rise from 160 to 200 steps over that from 10 to 50": between(
            0.0, 0.2, (one(200) - one(160)) / (one(50) - one(10))
        ),
        "the best rate for 200 steps (median over the quadratics)": between(
            0.025, 0.04, rows(steps=200).median("rate"), **paper("usually around 0.03", "appendix F.2")
        ),
        "that of the first quadratic": measured(one(200), reported=Reported(0.031, read_from="plot")),
    }

    def draw(self, rows: list[Row]) -> Any:
        shown = [row for row in best(seed=0).of(rows) if row["steps"] >= 5]
        panel = curves(
            shown, "steps", "rate", markers=False, xlabel="steps of gradient descent t", ylabel="best learning rate η*"
        )
        return draw_panels(panel.line(y=shown[0]["limit"], label="2/(λ_max + λ_min)"), size=(4.6, 3.4))
