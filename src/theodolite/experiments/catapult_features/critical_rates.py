"""Critical rates: what can be checked about them by numbers, and whether the loss of SGD rises just above that of the batch.

The latter are Figures 4.5, 4.6 and C.1 and Table 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import ge
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, Params, at_least, at_most, between, equal, measured, relative, rows, sizes
from theodolite.experiments.catapult_features import runs
from theodolite.experiments.catapult_features.catapults import DEPARTS, RATIOS, of_runs, parts, share_of_spikes, spikes
from theodolite.experiments.catapult_features.runs import LAPTOP, PAPER, TINY, squared_error
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.panels import Panel, curves, draw_columns, draw_panels, labelled, log_log, split
from theodolite.experiments.query import Measured, Value, select
from theodolite.experiments.study import InParts, grid
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import MatchTable, Proportion, batch_critical_rates, match_table, split_loss
from theodolite.measures.kernel.problem_views import moved
from theodolite.models import ntk_fcn
from theodolite.operators import gauss_newton, hessian, tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

# One steep sample

#: The rate over the critical one of the steep sample, how much longer that sample is, and a rise that counts.
RATIO, LONGER, RISE = 1.3, 2.0, 1e-3
GATES_FLIP = (
    "after one visit the doubled sample's critical rate has risen above the rate, as gates flip, and the noise of batches remains"
)


def rises_at_the_sample(rows: list[Row]) -> Measured:
    """Of the steps that raise the loss by more than a thousandth, the share that visits the steep sample."""
    up = [row for row in rows if row["after"] - row["loss"] > RISE]
    found = Proportion(sum(row["steep"] for row in up), len(up))
    return Measured(found.value, found.error)


class Figure45(Experiment):
    """One steep sample: SGD of batch size one rises exactly when it is visited.

    Points on the unit sphere with targets 1; one of them, with its target, is doubled, which makes its critical rate four
    times smaller. The rate lies between that and the critical rates of the others. The output layer is fixed.
    """

    item, where = "zhu-2024 Figure 4.5", "section 4.3"
    sizes = sizes(n=100, steps=1000, tiny={"width": 2000}, laptop={"width": 8000}, paper={"width": 20_000})
    departs = "Width, steps and rate are not stated; ours is 1.3 times the critical rate of the doubled sample at the start."
    claims = {
        "rises of the loss by more than 0.001 that happen at the doubled sample (share)": at_least(
            0.98, rises_at_the_sample, says="the loss rises exactly at the visits", read_from="plot", fails={"tiny": GATES_FLIP}
        ),
        "its critical rate is a quarter of the others'": relative(
            0.1,
            0.25,
            rows["critical_steep"].first() / rows["critical_others"].first(),
            **zhu("four times smaller", "appendix C.6"),
        ),
        "visits of other samples whose critical rate was exceeded": equal(
            0,
            rows(steep=False).column(lambda row: not row["critical"] >= row["rate"]).sum(),
            **zhu("no catapult on the other samples", "appendix C.6"),
        ),
        "visits of the doubled sample that raise the loss (share)": measured(
            rows(steep=True).column(lambda row: row["after"] > row["loss"]).mean()
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, "width", "n", "steps", seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        generator = torch.Generator().manual_seed(job["seed"])
        x = torch.nn.functional.normalize(torch.randn(job["n"], job["n"], generator=generator), dim=1)
        y = torch.ones(job["n"])
        x[0] *= LONGER
        y[0] *= LONGER
        model = ntk_fcn(job["n"], job["width"], 2, seed=job["seed"])
        hidden = model.get_parameter("fc1.weight")
        criticals = [_critical(model, hidden, x[i])[0] for i in range(job["n"])]
        rate = RATIO * criticals[0]
        start = {"critical_steep": criticals[0], "critical_others": median(criticals[1:]), "rate": rate, "seed": job["seed"]}
        loss = squared_error(model, x, y)
        for step in range(job["steps"]):
            i = int(torch.randint(job["n"], (), generator=generator))
            critical, output, gradient = _critical(model, hidden, x[i])
            with torch.no_grad():
                hidden.sub_(2 * rate * (output - y[i]) * gradient)
            after = squared_error(model, x, y)
            seen = {"step": step, "loss": loss, "after": after, "steep": i == 0, "critical": critical}
            yield {**start, **seen, "exceeded": rate - critical > 1e-8}
            loss = after

    def draw(self, rows: list[Row]) -> Any:
        def ticks(ax: Any) -> None:
            floor = min(row["loss"] for row in rows)
            for exceeded, colour in ((False, "grey"), (True, "C3")):
                steps = [row["step"] for row in select(rows, steep=True, exceeded=exceeded)]
                ax.plot(steps, [floor] * len(steps), "|", color=colour, markersize=10, markeredgewidth=1.6, clip_on=False)
            ax.set_title("ticks: visits of the doubled sample, red where the rate exceeds its critical one", fontsize=9)

        losses = curves(rows, "step", "loss", log="y", markers=False, labels="none", ylabel="loss on all points")
        return draw_panels(losses.then(ticks), size=(6.4, 3.2))


def _critical(model: nn.Module, hidden: Tensor, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """1/‖∇f‖², the critical rate of a batch of one sample, with output and gradient by the trained layer."""
    output = model(x[None])[0, 0]
    [gradient] = torch.autograd.grad(output, hidden)
    return 1.0 / float(gradient.square().sum()), output.detach(), gradient


# Batches of a quarter of the points

#: The rate of the two-layer network as a quantile of the batches' critical rates; the others have that of `RATIOS`.
QUANTILE = 0.3
#: Match rates in per cent, with their spread over three runs.
REPORTED = {"2-FCN": 97.32, "5-FCN": 96.17, "5-CNN": 94.67}
#: Random batches by which a quantile of their critical rates is set.
DRAWS = 200
#: Every so many steps the Hessian of a batch is looked at.
SIZES = sizes(
    side=8,
    seeds=3,
    hessian_every=5,
    n=128,
    tiny=Params(widths=TINY.but(fcn=256), n=32, slow_n=16, steps=70, slow_steps=40, source="stand-in", seeds=1, hessian_every=10),
    laptop=Params(widths=LAPTOP, slow_n=64, steps=600, slow_steps=250, source="either"),
    paper=Params(widths=PAPER, slow_n=128, steps=5000, slow_steps=5000, side=32, source="files", hessian_every=1),
)


def trained(
    job: Mapping[str, Any], ranks: tuple[int, ...], quantile: float | None, factor: float = 1.0, every: int = 0
) -> Iterator[Row]:
    """The rows of a run of SGD in batches of a quarter of the points, until a loss of 1e-3.

    The rate is that of `RATIOS`, or a quantile of the critical rates of random batches at the start, times a factor.
    """
    sample = runs.points("cifar10", job["n"], side=job["side"], source=job["source"], seed=job["seed"])
    model = runs.network(job["kind"], sample.shape, 1, job["widths"], seed=job["seed"])
    problem = Problem(model, nn.MSELoss(), (sample.x, sample.y), check=False)
    batch = job["n"] // 4
    settings = {"steps": job["steps"], "batch_size": batch, "ranks": ranks, "until": 1e-3, "seed": job["seed"]}
    shared = {"kind": job["kind"], "panel": job["kind"], "data": sample.origin, "seed": job["seed"]}
    fixed = None
    if quantile is not None:
        fixed = factor * batch_critical_rates(problem, batch_size=batch, batches=DRAWS).quantile(quantile)

    def rate(step: int, critical: float) -> float:
        return RATIOS[job["kind"]] * critical if fixed is None else fixed

    for row in runs.descend(model, sample, rate, **settings):
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


low, high = rows(which="low"), rows(which="high")


class Figure46(Experiment):
    """Below the critical rate of every batch the loss of SGD falls; above that of some it spikes.

    A two-layer network in batches of a quarter of the points. The lower rate is a tenth of the smallest critical rate of 200
    random batches, the higher one their 30 % quantile.
    """

    item, where = "zhu-2024 Figure 4.6", "section 4.3"
    sizes = SIZES
    departs = (
        DEPARTS + " The rates 0.1 and 0.8 become a tenth of the smallest and the 30 % quantile of the batches' critical rates."
    )
    claims = {
        "at the low rate no batch's critical rate is exceeded (steps that do)": equal(
            0,
            low.where(lambda row: "rate" in row).column(lambda row: not row["batch_critical"] > row["rate"]).sum(),
            says="below all critical rates",
        ),
        "and the loss has no spike": equal(0, of_runs(spikes, low).map(len).only(), says="decreases monotonically"),
        "at the high rate the loss spikes (spikes)": at_least(
            2, of_runs(spikes, high).map(len).only(), says="many spikes", read_from="plot"
        ),
        "and the spikes lie in the top five directions (median share)": at_least(
            0.8, share_of_spikes(5, high), says="spikes occur in the top eigenspace"
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, "side", "source", "widths", "n", "steps", kind=["2-FCN"], which=["low", "high"], seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in trained(job, (1, 5), *((0.0, 0.1) if job["which"] == "low" else (QUANTILE,))):
            yield {**row, "panel": f"{job['which']} rate", "which": job["which"]}

    def draw(self, rows: list[Row]) -> Any:
        def column(which: str) -> Iterator[Panel]:
            mine = select(rows, which=which, diverged=False)
            rate = mine[0]["rate"]
            yield parts(mine, 5, f"2-FCN, rate {rate:.2g}")
            known = [row for row in mine if row.get("batch_critical")]
            yield curves(known, "step", "batch_critical", ylabel="critical rate of the batch").line(y=rate, label="rate")

        return draw_columns(column("low"), column("high"), size=(4.2, 2.8), markers=False)


def table(rows: list[Row], slack: float = 0.0) -> MatchTable:
    """The counts of all runs among the rows; rises below the share `slack` of the loss do not count."""
    parts = []
    for run in split(rows, "seed").values():
        losses = [float("inf") if row["diverged"] else row["loss"] for row in run]
        parts.append(match_table([row["exceeded"] for row in run[:-1]], losses, slack=slack))
    names = ("both", "only_up", "only_exceeded", "neither", "unsampled")
    return MatchTable(**{name: sum(getattr(part, name) for part in parts) for name in names})


def per_cent(kind: str, share: str, slack: float = 0.0) -> Value:
    """A share of the table of one network in per cent, with its error."""

    def measure(rows: list[Row]) -> Measured:
        found = getattr(table(rows, slack), share)
        return Measured(100 * found.value, 100 * found.error)

    return rows(kind=kind).measure(measure)


NOISE = "near the edge the noise of batches alone raises the full loss in some 40 % of the steps, at rates below the edge"
compared = rows.where(lambda row: bool(row.get("by_hessian")))


class Table42(Experiment):
    """How often a rising loss goes with a rate above the critical one of the batch; and how well the kernel gives that rate.

    Of the steps that raise the loss on all points, the match rate is the share whose rate exceeds the critical rate of their
    batch. It is high for free where most steps exceed it: the base rate stands beside it. Close to the edge the noise of
    batches alone raises the loss often, so steps that raise it by half are counted apart. The second picture compares the
    batches' critical rates by the Hessian with those by the kernel along training.
    """

    item, where = ("zhu-2024 Table 4.2", "zhu-2024 Figure C.1"), "section 4.3, appendix C.1"
    sizes = SIZES
    departs = (
        DEPARTS
        + " The rate of the two-layer network is the 30 % quantile of the critical rates of random batches. The errors are "
        "binomial, not the spread over runs. Hessian and kernel are compared every fifth step below paper size."
    )
    claims = {
        **{
            f"match rate of the {kind}, per cent": at_least(
                85.0, per_cent(kind, "match_rate"), reported=value, fails={"tiny": NOISE}
            )
            for kind, value in REPORTED.items()
        },
        **{
            f"{kind}: the match rate is above the base rate (difference in per cent)": at_least(
                0.0, per_cent(kind, "match_rate") - per_cent(kind, "base_rate")
            )
            for kind in REPORTED
        },
        **{
            f"{kind}: {text}, per cent": measured(per_cent(kind, *share))
            for text, share in (
                ("match rate of rises by more than half of the loss", ("match_rate", 0.5)),
                ("share of exceeding steps that raise the loss", ("up_given_exceeded",)),
                ("share of the other steps that raise the loss", ("up_given_not",)),
            )
            for kind in REPORTED
        },
        "critical rates by Hessian and kernel agree (median distance, relative)": at_most(
            0.1,
            (compared["by_kernel"] / compared["by_hessian"]).change().median(),
            **zhu("close to the diagonal", "Figure C.1", "plot"),
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        names = ("n", "steps", "side", "source", "widths", "every")
        for kind in REPORTED:
            mine = p.but(n=p.slow_n, steps=p.slow_steps) if kind == "5-CNN" else p
            yield from grid(mine.but(every=p.hessian_every), *names, kind=[kind], seed=range(p.seeds))

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        return trained(job, (1,), QUANTILE if job["kind"] == "2-FCN" else None, every=job["every"])

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        figure, (left, right) = plots.panels(2, size=(4.4, 3.2))
        tables = [table(select(rows, kind=kind)) for kind in REPORTED]
        shown = {"match_rate": "match rate P(e|up)", "base_rate": "base rate P(e)", "up_given_exceeded": "P(up|e)"}
        places = torch.arange(len(REPORTED))
        for i, (share, name) in enumerate(shown.items()):
            values, errors = ([100 * getattr(getattr(t, share), part) for t in tables] for part in ("value", "error"))
            left.errorbar(places + 0.12 * (i - 1), values, errors, fmt="so^"[i], color=f"C{i}", capsize=2, label=name)
        left.plot(places, list(REPORTED.values()), "_", color="black", markersize=22, label="reported match rate")
        left.set_xticks(range(len(REPORTED)), list(REPORTED))
        left.set_ylim(-5, 105)
        left.set_ylabel("per cent")
        left.legend(fontsize=7)
        names: dict[str, Any] = {"xlabel": "2/λ of the Hessian", "ylabel": "b/λ₁ of the kernel"}
        plots.scatter(compared.of(rows), "by_hessian", "by_kernel", by="kind", identity=True, log="xy", ax=right, **names)
        return figure


# Statements on critical rates, the split of the loss and batches

#: Points of the segment of a step at which the sharpness is taken.
SEGMENT = 9


def gaussian(n: int, dim: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, outputs, generator=generator, dtype=torch.float64)


def sharpness(problem: Problem) -> float:
    return float(top_eigenpairs(hessian(problem), 1, tol=1e-8, progress=False).values[0])


def descent_lemma(job: Mapping[str, Any]) -> Iterator[Row]:
    """G1: L(w − ηg) ≤ L(w) − η(1 − ηβ/2)‖g‖² with β the largest sharpness on the way; what is left over, relative to L(w)."""
    data = gaussian(job["n"], job["dim"], 1, job["seed"])
    model = ntk_fcn(job["dim"], 32, 3, activation="tanh", seed=job["seed"]).double()
    problem = Problem(model, nn.MSELoss(), data)
    critical, gradient = 2.0 / sharpness(problem), problem.gradient()

    def left(problem: Problem, rate: float, beta: float) -> float:
        loss, gradient = problem.loss_and_gradient()
        bound = loss - rate * (1 - rate * beta / 2) * float(gradient @ gradient)
        return (bound - moved(problem, -rate * gradient).loss()) / loss

    for ratio in (0.25, 0.5, 1.0, 1.5, 2.0):
        rate = ratio * critical
        way = [sharpness(moved(problem, -rate * t / (SEGMENT - 1) * gradient)) for t in range(SEGMENT)]
        yield {"ratio": ratio, "left": left(problem, rate, max(way)), "case": "network"}
    # A linear model whose gradient lies along the sharpest direction: equality.
    line = Problem(nn.Linear(job["dim"], 1, bias=False).double(), nn.MSELoss(), (data[0], 0 * data[1]))
    top = top_eigenpairs(hessian(line), 1, tol=1e-12, progress=False)
    with torch.no_grad():
        line.parameters[0].copy_(top.vectors[:, 0].reshape(1, -1))
    for ratio in (0.5, 1.0, 1.5):
        beta = float(top.values[0])
        yield {"ratio": ratio, "left": left(line, ratio * 2.0 / beta, beta), "case": "equality"}


def identities(job: Mapping[str, Any]) -> Iterator[Row]:
    """G2 and G3: the parts of the loss sum to it; λ_max of (2/m) JᵀJ is (2/m) λ₁(K), m the numbers of the residual."""
    for outputs in (1, 3):
        data = gaussian(job["n"], job["dim"], outputs, job["seed"])
        model = ntk_fcn(job["dim"], 64, 3, outputs, seed=job["seed"]).double()
        problem = Problem(model, nn.MSELoss(), data)
        kernel = tangent_kernel(problem)
        with torch.no_grad():
            split = split_loss(kernel, model(data[0]) - data[1], ranks=(1, 2, 5), outputs=outputs)
        matrix = float(top_eigenpairs(gauss_newton(problem), 1, tol=1e-11, progress=False).values[0])
        predicted = 2.0 / data[1].numel() * float(split.eigenvalues[0])
        apart = max(abs(split.total - split.top[s] - split.rest[s]) for s in split.top)
        yield {"outputs": outputs, "split": apart / split.total, "edge": abs(matrix / predicted - 1)}


def widths(job: Mapping[str, Any]) -> Iterator[Row]:
    """G3 and G4 by width: how far Hessian and kernel rate differ at the start, and what (4.3) leaves over in one step."""
    data = gaussian(job["n"], job["dim"], 1, job["seed"])
    model = ntk_fcn(job["dim"], job["m"], job["depth"], seed=job["seed"]).double()
    problem = Problem(model, nn.MSELoss(), data)
    kernel = tangent_kernel(problem)
    largest = float(torch.linalg.eigvalsh(kernel)[-1])
    by_kernel, by_hessian = job["n"] / largest, 2.0 / sharpness(problem)
    with torch.no_grad():
        before = (model(data[0]) - data[1])[:, 0]
        gradient = problem.gradient()
        after = (moved(problem, -0.5 * by_kernel * gradient).model(data[0]) - data[1])[:, 0]
    linear = before - (2 * 0.5 * by_kernel / job["n"]) * kernel @ before
    remainder = float((after - linear).norm() / before.norm())
    yield {"m": job["m"], "depth": job["depth"], "gap": abs(by_kernel / by_hessian - 1), "remainder": remainder}


def batches(job: Mapping[str, Any]) -> Iterator[Row]:
    """G12: critical rates of random batches by their size, against half the critical rate of all points."""
    data = gaussian(job["points"], 100, 1, job["seed"])
    model = ntk_fcn(100, job["width"], 2, seed=job["seed"])
    problem = Problem(model, nn.MSELoss(), (data[0].float(), data[1].float()))
    whole = batch_critical_rates(problem, batch_size=job["points"], batches=1).median
    for size in job["sizes"]:
        found = batch_critical_rates(problem, batch_size=size, batches=200, seed=job["seed"])
        edges = 1.0 / found.rates  # λ₁/b
        exceeded = float((found.rates < 0.5 * whole).double().mean())
        small = float((found.rates < whole / 40).double().mean())
        spread = float(edges.std() / edges.mean())
        yield {"size": size, "median": found.median, "spread": spread, "exceeded": exceeded, "small": small, "whole": whole}


#: Parts of the rows.
lemma, identity, by_width, by_batch = (rows(part=part) for part in ("lemma", "identities", "widths", "batches"))


falls_with_size = by_batch.by("size").each(rows.mean("spread")).steps(ge).reduce(all)


class Theorems(InParts, Experiment):
    """Critical rates, the split of the loss and batches: what the chapter states and numbers can check.

    The descent lemma with the sharpness on the way (G1), the sum of the parts of the loss and the edge of the Gauss-Newton
    matrix (G2, G3), how Hessian and kernel rate approach each other with the width (G3), what the linear recursion of the
    residuals leaves over (G4), and how the critical rates of batches spread as batches shrink (G12).
    """

    id, where = "catapult-features/theorems", "Zhu 2024, sections 4.2 and 4.3, appendix C.1"
    parts = {"lemma": descent_lemma, "identities": identities, "widths": widths, "batches": batches}
    sizes = sizes(
        n=32,
        dim=20,
        batches=(1, 5, 10, 50, 100),
        batch_width=1024,
        batch_points=2000,
        tiny={"widths": (64, 256, 1024), "seeds": 3, "batch_width": 512, "batch_points": 400},
        laptop={"widths": (64, 256, 1024, 4096), "seeds": 5},
        paper={"widths": (64, 256, 1024, 4096, 16_384), "seeds": 10},
    )
    departs = "(4.3) leaves out the factor ½ before the second-order term; only the size of the whole term is used here."
    claims = {
        "descent lemma: what is left over, relative to the loss (smallest)": at_least(
            0.0, lemma(case="network").min("left"), **zhu("not negative", "Lemma 4.2.2", "theory")
        ),
        "nothing is left over for a quadratic loss along its sharpest direction (largest)": at_most(
            1e-9, abs(lemma(case="equality")["left"]).max(), **zhu("equality", "Lemma 4.2.2", "theory")
        ),
        "the parts of the loss sum to it (largest relative distance)": at_most(
            1e-10, identity.max("split"), **zhu("identity", "(4.2)", "theory")
        ),
        "λ_max of the Gauss-Newton matrix is (2/m) λ₁(K) (largest relative distance)": at_most(
            1e-8, identity.max("edge"), **zhu("identity", "appendix C.1", "theory")
        ),
        **{
            f"distance of Hessian and kernel rate by width, {depth} layers (exponent)": at_most(
                -0.3, by_width(depth=depth).power("m", "gap"), **zhu(-0.5, "appendix C.1: Õ(1/√m)", "theory")
            )
            for depth in (2, 3)
        },
        **{
            f"what the linear recursion leaves over by width, {depth} layers (exponent)": at_most(
                bound, by_width(depth=depth).power("m", "remainder"), **zhu("-1/2 or faster", "section 4.3", "theory")
            )
            for depth, bound in ((2, -0.5), (3, -0.3))
        },
        "the spread of λ₁(K)/b falls with the batch size": equal(
            True, falls_with_size, **zhu("smaller batches, more catapults", "section 4.4", "theory")
        ),
        "share of batches of five below half the critical rate of all points": between(
            0.5, 0.8, by_batch(size=5).mean("exceeded")
        ),
        "share of larger batches below it (largest)": at_most(0.02, by_batch(size=lambda size: size >= 10).max("exceeded")),
        "share of batches of any size below a fortieth of it (largest)": equal(0.0, by_batch.max("small")),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, "n", "dim", part=["widths"], seed=range(p.seeds), m=p.widths, depth=(2, 3))
        yield from grid(p, "n", "dim", part=["lemma", "identities"], seed=[0])
        yield {"part": "batches", "points": p.batch_points, "width": p.batch_width, "sizes": list(p.batches), "seed": 0}

    def draw(self, rows: list[Row]) -> Any:
        widths, sizes = labelled(by_width.of(rows), layers="{depth} layers"), by_batch.of(rows)
        left = labelled(lemma.of(rows), model="{case}")
        rates = curves(sizes, "size", "median", log="x", labels="none", xlabel="batch size", ylabel="critical rate, median")
        return draw_panels(
            log_log(widths, "m", "gap", by="layers", xlabel="width", ylabel="Hessian against kernel rate"),
            log_log(widths, "m", "remainder", by="layers", xlabel="width", ylabel="left over by (4.3)"),
            rates.line(y=sizes[0]["whole"] / 2, label="half of all points'"),
            curves(left, "ratio", "left", by="model", xlabel="η/η_crit", ylabel="left over in the descent lemma"),
            size=(4.2, 3.0),
        )
