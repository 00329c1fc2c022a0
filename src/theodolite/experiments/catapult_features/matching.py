"""Does the loss rise just when the rate exceeds the critical one of the batch? Figures 4.6 and C.1, Table 4.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from theodolite.experiments.catapult_features.descent import constant, descend
from theodolite.experiments.catapult_features.gd_catapult import DEPARTS
from theodolite.experiments.catapult_features.networks import LAPTOP, PAPER, TINY, Widths, network
from theodolite.experiments.catapult_features.panels import draw_parts, events, finished, share_of_spikes
from theodolite.experiments.catapult_features.samples import points
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import Source
from theodolite.experiments.query import Measured
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import MatchTable, batch_critical_rates, match_table
from theodolite.operators import hessian
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Rates of the three networks: a quantile of the batches' critical rates, or a multiple of that of all points.
QUANTILE = 0.3
RATIOS = {"5-FCN": 1.67, "5-CNN": 1.78}
#: Match rates in per cent, with their spread over three runs.
REPORTED = {"2-FCN": 97.32, "5-FCN": 96.17, "5-CNN": 94.67}
#: Random batches by which a quantile of their critical rates is set.
DRAWS = 200


@dataclass(frozen=True)
class Params:
    """Sizes; batches are a quarter of the points; every so many steps the Hessian of the batch is looked at."""

    widths: Widths
    n: int
    slow_n: int
    steps: int
    slow_steps: int
    side: int
    source: Source
    seeds: int
    hessian_every: int = 5


SIZES = {
    "tiny": Params(
        replace(TINY, fcn=256), n=32, slow_n=16, steps=70, slow_steps=40, side=8, source="stand-in", seeds=1, hessian_every=10
    ),
    "laptop": Params(LAPTOP, n=128, slow_n=64, steps=600, slow_steps=250, side=8, source="either", seeds=3),
    "paper": Params(PAPER, n=128, slow_n=128, steps=5000, slow_steps=5000, side=32, source="files", seeds=3, hessian_every=1),
}


def trained(job: Mapping[str, Any], rate: Callable[[Problem, int], Any], **settings: Any) -> Iterator[Row]:
    """The rows of a run of SGD in batches of a quarter of the points, until a loss of 1e-3."""
    sample = points("cifar10", job["n"], side=job["side"], source=job["source"], seed=job["seed"])
    shape = tuple(sample.x.shape[1:])
    model = network(job["kind"], shape, 1, Widths(**job["widths"]), seed=job["seed"])
    problem = Problem(model, nn.MSELoss(), (sample.x, sample.y), check=False)
    batch = job["n"] // 4
    chosen = rate(problem, batch)
    shared = {"kind": job["kind"], "panel": job["kind"], "data": sample.origin, "seed": job["seed"]}
    every = settings.pop("hessian_every", 0)
    for row in descend(model, sample, chosen, steps=job["steps"], batch_size=batch, until=1e-3, seed=job["seed"], **settings):
        if every and "rate" in row and row["step"] % every == 0:
            row = {**row, **_by_hessian(problem, row["step"], job)}
        yield {**shared, **row}


def _by_hessian(problem: Problem, step: int, job: Mapping[str, Any]) -> Row:
    """Critical rates of a batch drawn for this step: by the Hessian of its loss, and by the kernel."""
    generator = torch.Generator().manual_seed(1000 * job["seed"] + step)
    rows = torch.randperm(job["n"], generator=generator)[: job["n"] // 4]
    [whole] = list(problem.data)
    part = problem.with_batches([whole.part(rows)])
    sharpest = float(top_eigenpairs(hessian(part), 1, tol=1e-3, progress=False).values[0])
    by_kernel = batch_critical_rates(part, batch_size=len(rows), batches=1, by="kernel").median
    return {"by_hessian": 2.0 / sharpest if sharpest > 0 else None, "by_kernel": by_kernel}


def quantile_rate(share: float, factor: float = 1.0) -> Callable[[Problem, int], Any]:
    """A constant rate: a quantile of the critical rates of random batches at the start, times a factor."""

    def rate(problem: Problem, batch: int) -> Any:
        found = factor * batch_critical_rates(problem, batch_size=batch, batches=DRAWS).quantile(share)
        return lambda step, critical: found

    return rate


def table(rows: list[Row], slack: float = 0.0) -> MatchTable:
    """The counts of all runs among the rows; rises below the share `slack` of the loss do not count."""
    parts = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        run = [row for row in rows if row["seed"] == seed]
        losses = [float("inf") if row["diverged"] else row["loss"] for row in run]
        parts.append(match_table([row["exceeded"] for row in run[: len(losses) - 1]], losses, slack=slack))
    names = ("both", "only_up", "only_exceeded", "neither", "unsampled")
    return MatchTable(**{name: sum(getattr(part, name) for part in parts) for name in names})


class Figure46(Experiment):
    """Below the critical rate of every batch the loss of SGD falls; above that of some it spikes.

    A two-layer network in batches of a quarter of the points. The lower rate is a tenth of the smallest critical rate of 200
    random batches, the higher one their 30 % quantile.
    """

    id = "catapult-features/figure-4.6"
    source = "003, section 4.3, Figure 4.6"
    item = "zhu-2024 Figure 4.6"
    sizes = SIZES
    departs = (
        DEPARTS + " The rates 0.1 and 0.8 become a tenth of the smallest and the 30 % quantile of the batches' critical rates."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        sizes = {"n": p.n, "steps": p.steps, "side": p.side, "source": p.source, "widths": asdict(p.widths)}
        for which in ("low", "high"):
            yield {"kind": "2-FCN", "which": which, **sizes, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        rate = quantile_rate(0.0, 0.1) if job["which"] == "low" else quantile_rate(QUANTILE)
        for row in trained(job, rate, ranks=(1, 5)):
            yield {**row, "panel": f"{job['which']} rate", "which": job["which"]}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(4, columns=2, size=(4.2, 2.8))
        for column, which in enumerate(("low", "high")):
            mine = [row for row in rows if row["which"] == which and not row["diverged"]]
            rate = mine[0]["rate"]
            draw_parts(axes[column], mine, 5, f"2-FCN, rate {rate:.2g}")
            known = [row for row in mine if row.get("batch_critical")]
            plots.curves(known, "step", "batch_critical", ylabel="critical rate of the batch", markers=False, ax=axes[column + 2])
            plots.reference(axes[column + 2], y=rate, label="rate")
        return figure

    claims = (
        Claim(
            "at the low rate no batch's critical rate is exceeded (steps that do)",
            lambda rows: sum(not row["batch_critical"] > row["rate"] for row in rows if row["which"] == "low" and "rate" in row),
            rule="equal",
            expected=0,
            reported=Reported("below all critical rates", "003, Figure 4.6"),
        ),
        Claim(
            "and the loss has no spike",
            lambda rows: len(events(finished([row for row in rows if row["which"] == "low"]))),
            rule="equal",
            expected=0,
            reported=Reported("decreases monotonically", "003, Figure 4.6"),
        ),
        Claim(
            "at the high rate the loss spikes (spikes)",
            lambda rows: len(events(finished([row for row in rows if row["which"] == "high"]))),
            rule="at least",
            expected=2,
            reported=Reported("many spikes", "003, Figure 4.6", read_from="plot"),
        ),
        Claim(
            "and the spikes lie in the top five directions (median share)",
            lambda rows: share_of_spikes(5)([row for row in rows if row["which"] == "high"]),
            rule="at least",
            expected=0.8,
            reported=Reported("spikes occur in the top eigenspace", "003, Figure 4.6"),
        ),
    )


def match_rate(kind: str) -> Callable[[list[Row]], Measured]:
    def measure(rows: list[Row]) -> Measured:
        found = table([row for row in rows if row["kind"] == kind]).match_rate
        return Measured(100 * found.value, 100 * found.error)

    return measure


def over_base(kind: str) -> Callable[[list[Row]], float]:
    """Match rate minus base rate, in per cent."""

    def measure(rows: list[Row]) -> float:
        found = table([row for row in rows if row["kind"] == kind])
        return 100 * (found.match_rate.value - found.base_rate.value)

    return measure


def given(kind: str, exceeded: bool) -> Callable[[list[Row]], Measured]:
    def measure(rows: list[Row]) -> Measured:
        counts = table([row for row in rows if row["kind"] == kind])
        found = counts.up_given_exceeded if exceeded else counts.up_given_not
        return Measured(100 * found.value, 100 * found.error)

    return measure


def large_rises(kind: str) -> Callable[[list[Row]], Measured]:
    """The match rate of steps that raise the loss by more than half of it, in per cent."""

    def measure(rows: list[Row]) -> Measured:
        found = table([row for row in rows if row["kind"] == kind], slack=0.5).match_rate
        return Measured(100 * found.value, 100 * found.error)

    return measure


def off_diagonal(rows: list[Row]) -> float:
    """Median distance of the two critical rates, relative."""
    return median(abs(float(row["by_kernel"] / row["by_hessian"]) - 1) for row in rows if row.get("by_hessian"))


class Table42(Experiment):
    """How often a rising loss goes with a rate above the critical one of the batch; and how well the kernel gives that rate.

    Of the steps that raise the loss on all points, the match rate is the share whose rate exceeds the critical rate of their
    batch. It is high for free where most steps exceed it: the base rate stands beside it. Close to the edge the noise of
    batches alone raises the loss often, so steps that raise it by half are counted apart. The second picture compares the
    batches' critical rates by the Hessian with those by the kernel along training.
    """

    id = "catapult-features/table-4.2"
    source = "003, section 4.3, Table 4.2, appendix C.1, Figure C.1"
    item = ("zhu-2024 Table 4.2", "zhu-2024 Figure C.1")
    sizes = SIZES
    departs = (
        DEPARTS
        + " The rate of the two-layer network is the 30 % quantile of the critical rates of random batches. The errors are "
        "binomial, not the spread over runs. Hessian and kernel are compared every fifth step below paper size."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for kind in REPORTED:
            slow = kind == "5-CNN"
            sizes = {"n": p.slow_n if slow else p.n, "steps": p.slow_steps if slow else p.steps}
            for seed in range(p.seeds):
                shared = {"side": p.side, "source": p.source, "widths": asdict(p.widths), "every": p.hessian_every}
                yield {"kind": kind, **sizes, **shared, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        kind = job["kind"]
        rate = quantile_rate(QUANTILE) if kind == "2-FCN" else lambda problem, batch: constant(RATIOS[kind])
        yield from trained(job, rate, ranks=(1,), hessian_every=job["every"])

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, (left, right) = plots.panels(2, size=(4.4, 3.2))
        tables = [table([row for row in rows if row["kind"] == kind]) for kind in REPORTED]
        shown = {
            "match rate P(e|up)": [t.match_rate for t in tables],
            "base rate P(e)": [t.base_rate for t in tables],
            "P(up|e)": [t.up_given_exceeded for t in tables],
        }
        places = torch.arange(len(REPORTED))
        for i, (name, shares) in enumerate(shown.items()):
            values, errors = ([100 * getattr(p, part) for p in shares] for part in ("value", "error"))
            left.errorbar(places + 0.12 * (i - 1), values, errors, fmt="so^"[i], color=f"C{i}", capsize=2, label=name)
        left.plot(places, list(REPORTED.values()), "_", color="black", markersize=22, label="reported match rate")
        left.set_xticks(range(len(REPORTED)), list(REPORTED))
        left.set_ylim(-5, 105)
        left.set_ylabel("per cent")
        left.legend(fontsize=7)
        pairs = [row for row in rows if row.get("by_hessian")]
        names: dict[str, Any] = {"xlabel": "2/λ of the Hessian", "ylabel": "b/λ₁ of the kernel"}
        plots.scatter(pairs, "by_hessian", "by_kernel", by="kind", identity=True, log="xy", ax=right, **names)
        return figure

    claims = (
        *(
            Claim(
                f"match rate of the {kind}, per cent",
                match_rate(kind),
                rule="at least",
                expected=85.0,
                reported=Reported(value, "003, Table 4.2"),
            )
            for kind, value in REPORTED.items()
        ),
        *(
            Claim(
                f"{kind}: the match rate is above the base rate (difference in per cent)",
                over_base(kind),
                rule="at least",
                expected=0.0,
            )
            for kind in REPORTED
        ),
        *(Claim(f"{kind}: match rate of rises by more than half of the loss, per cent", large_rises(kind)) for kind in REPORTED),
        *(Claim(f"{kind}: share of exceeding steps that raise the loss, per cent", given(kind, True)) for kind in REPORTED),
        *(Claim(f"{kind}: share of the other steps that raise the loss, per cent", given(kind, False)) for kind in REPORTED),
        Claim(
            "critical rates by Hessian and kernel agree (median distance, relative)",
            off_diagonal,
            rule="at most",
            expected=0.1,
            reported=Reported("close to the diagonal", "003, Figure C.1", read_from="plot"),
        ),
    )
