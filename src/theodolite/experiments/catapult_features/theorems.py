"""Statements on critical rates, the split of the loss and batches that can be checked by numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, at_least, at_most, between, equal, rows, sizes
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.fits import power_of
from theodolite.experiments.lab.panels import curves, draw_panels, labelled, log_log
from theodolite.experiments.query import select, values_of
from theodolite.experiments.study import grid
from theodolite.linalg import top_eigenpairs
from theodolite.measures.dynamics import batch_critical_rates, split_loss
from theodolite.models import ntk_fcn
from theodolite.operators import gauss_newton, hessian, tangent_kernel
from theodolite.problem import Problem
from theodolite.results import Row

#: Points of the segment of a step at which the sharpness is taken.
SEGMENT = 9


def gaussian(n: int, dim: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, outputs, generator=generator, dtype=torch.float64)


def moved(problem: Problem, step: Tensor) -> Problem:
    """The problem on a copy whose weights are moved by a flat vector."""
    other = problem.with_model(copy.deepcopy(problem.model))
    with torch.no_grad():
        for p, s in zip(other.parameters, problem.split(step).values(), strict=True):
            p.add_(s)
    return other


def sharpness(problem: Problem) -> float:
    return float(top_eigenpairs(hessian(problem), 1, tol=1e-8, progress=False).values[0])


def descent_lemma(job: Mapping[str, Any]) -> Iterator[Row]:
    """G1: L(w − ηg) ≤ L(w) − η(1 − ηβ/2)‖g‖² with β the largest sharpness on the way; what is left over, relative to L(w)."""
    data = gaussian(job["n"], job["dim"], 1, job["seed"])
    model = ntk_fcn(job["dim"], 32, 3, activation="tanh", seed=job["seed"]).double()
    problem = Problem(model, nn.MSELoss(), data)
    loss, gradient = problem.loss_and_gradient()
    critical = 2.0 / sharpness(problem)
    for ratio in (0.25, 0.5, 1.0, 1.5, 2.0):
        rate = ratio * critical
        way = [sharpness(moved(problem, -rate * t / (SEGMENT - 1) * gradient)) for t in range(SEGMENT)]
        bound = loss - rate * (1 - rate * max(way) / 2) * float(gradient @ gradient)
        yield {"ratio": ratio, "left": (bound - moved(problem, -rate * gradient).loss()) / loss, "case": "network"}
    # A linear model whose gradient lies along the sharpest direction: equality.
    line = Problem(nn.Linear(job["dim"], 1, bias=False).double(), nn.MSELoss(), (data[0], 0 * data[1]))
    top = top_eigenpairs(hessian(line), 1, tol=1e-12, progress=False)
    with torch.no_grad():
        line.parameters[0].copy_(top.vectors[:, 0].reshape(1, -1))
    loss, gradient = line.loss_and_gradient()
    beta = float(top.values[0])
    for ratio in (0.5, 1.0, 1.5):
        rate = ratio * 2.0 / beta
        bound = loss - rate * (1 - rate * beta / 2) * float(gradient @ gradient)
        yield {"ratio": ratio, "left": (bound - moved(line, -rate * gradient).loss()) / loss, "case": "equality"}


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


PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "lemma": descent_lemma,
    "identities": identities,
    "widths": widths,
    "batches": batches,
}


#: Parts of the rows.
lemma, identity, by_width, by_batch = (rows(part=part) for part in ("lemma", "identities", "widths", "batches"))


def falls_with_size(rows: list[Row]) -> bool:
    """Whether the spread, mean over the seeds, falls from each batch size to the next."""
    means = [fmean(row["spread"] for row in select(rows, size=size)) for size in sorted(values_of(rows, "size"))]
    return means == sorted(means, reverse=True)


class Theorems(Experiment):
    """Critical rates, the split of the loss and batches: what the chapter states and numbers can check.

    The descent lemma with the sharpness on the way (G1), the sum of the parts of the loss and the edge of the Gauss-Newton
    matrix (G2, G3), how Hessian and kernel rate approach each other with the width (G3), what the linear recursion of the
    residuals leaves over (G4), and how the critical rates of batches spread as batches shrink (G12).
    """

    id, where = "catapult-features/theorems", "Zhu 2024, sections 4.2 and 4.3, appendix C.1"
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
    claims = (
        {
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
        },
        {
            f"distance of Hessian and kernel rate by width, {depth} layers (exponent)": at_most(
                -0.3, power_of(by_width(depth=depth), "m", "gap"), **zhu(-0.5, "appendix C.1: Õ(1/√m)", "theory")
            )
            for depth in (2, 3)
        },
        {
            f"what the linear recursion leaves over by width, {depth} layers (exponent)": at_most(
                bound, power_of(by_width(depth=depth), "m", "remainder"), **zhu("-1/2 or faster", "section 4.3", "theory")
            )
            for depth, bound in ((2, -0.5), (3, -0.3))
        },
        {
            "the spread of λ₁(K)/b falls with the batch size": equal(
                True, by_batch.measure(falls_with_size), **zhu("smaller batches, more catapults", "section 4.4", "theory")
            ),
            "share of batches of five below half the critical rate of all points": between(
                0.5, 0.8, by_batch(size=5).mean("exceeded")
            ),
            "share of larger batches below it (largest)": at_most(0.02, by_batch(size=lambda size: size >= 10).max("exceeded")),
            "share of batches of any size below a fortieth of it (largest)": equal(0.0, by_batch.max("small")),
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, "n", "dim", part=["widths"], seed=range(p.seeds), m=p.widths, depth=(2, 3))
        yield from grid(p, "n", "dim", part=["lemma", "identities"], seed=[0])
        yield {"part": "batches", "points": p.batch_points, "width": p.batch_width, "sizes": list(p.batches), "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in PARTS[job["part"]](job):
            yield {"part": job["part"], "seed": job["seed"], **row}

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
