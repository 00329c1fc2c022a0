"""The theorems on random least-squares tasks that are trained with one sample a step, T16 and T17, and tools of the proofs, T18.

The constants of the proofs (L = 100) make most thresholds empty at these sizes. L here is the smallest that the drawn tasks
allow: the largest of λ₁, 1/λₙ, σ₁(X)²/d, d/σₙ(X)² and max ‖xᵢ‖²/d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import at_least, at_most, between, equal, rows, within
from theodolite.experiments.query import Query, Value
from theodolite.experiments.step_size import paper
from theodolite.measures.stepsize import draw_tasks, sgd_risk
from theodolite.measures.stepsize.quadratics.least_squares import EigenTasks, diagonalise
from theodolite.results import Row

Job = Mapping[str, Any]


def constant(eigen: EigenTasks, *, inputs: bool = False) -> float:
    """The smallest L that these tasks allow; `inputs`: with ‖xᵢ‖² ≤ Ld, which SGD needs."""
    d = eigen.tasks.x.shape[2]
    lam, squares = eigen.eigenvalues, eigen.singular.square()
    bounds = [lam.max(), 1 / lam.min(), squares.max() / d, d / squares.min()]
    if inputs:
        bounds.append(eigen.tasks.x.square().sum(-1).max() / d)
    return max(float(bound) for bound in bounds)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


# T16, T17: one sample a step


def sandwich(job: Job) -> Iterator[Row]:
    """`(1 − ηL)ᵗ ≤ E‖w_t − a‖² / ‖a‖² ≤ (1 − η/2L)ᵗ` at η = 1/(2L³d), and the error there."""
    d, n, sigma = job["dim"], job["dim"] // 2, 3.0
    for k in range(job["tasks"]):
        drawn = draw_tasks(d, n, 1, seed=job["seed"] + k)
        eigen = diagonalise(drawn)
        bound = constant(eigen, inputs=True)
        rate = 1 / (2 * bound**3 * d)
        found = sgd_risk(drawn, [rate], [100, 1000, 10_000], sigma=sigma)
        start = float(eigen.fit(one(sigma)).square().sum())
        for t, distance, error in zip(found.steps, found.distance[0, 0].tolist(), found.error[0, 0].tolist(), strict=True):
            low, high = (1 - rate * bound) ** t, (1 - rate / (2 * bound)) ** t
            yield {"task": k, "t": t, "L": bound, "low": distance / start / low, "high": distance / start / high, "error": error}


def sgd_train_rate(job: Job) -> Iterator[Row]:
    """The best rate by the training loss, among all rates, over the dimension."""
    for d in job["dims"]:
        n = d // 2
        drawn = draw_tasks(d, n, job["tasks"], seed=job["seed"])
        rates = torch.logspace(math.log10(0.3 / d), math.log10(3 / d), job["grid"], dtype=torch.float64).tolist()
        loss = sgd_risk(drawn, rates, 40 * d, sigma=3.0, averaged=True).train_loss[..., 0].mean(0)
        rate = lowest(rates, loss)
        error = float(sgd_risk(drawn, [rate], 40 * d, sigma=3.0, averaged=True).error.mean())
        yield {"d": d, "rate": rate, "scaled": rate * d, "error": error / 9.0}


def lowest(rates: list[float], values: Tensor) -> float:
    """Where a parabola through the lowest value and its neighbours, over log rate, has its minimum."""
    i = int(torch.nan_to_num(values, nan=math.inf).argmin())
    if not (0 < i < len(rates) - 1 and bool(values[i - 1 : i + 2].isfinite().all())):
        return rates[i]
    left, middle, right = values[i - 1 : i + 2].tolist()
    return rates[i] * math.pow(rates[i + 1] / rates[i], 0.5 * (left - right) / (left - 2 * middle + right))


def sgd_valid_rate(job: Job) -> Iterator[Row]:
    """The best rate by the error, over the number of steps: d = 24, n = 12, σ = 3."""
    d, n, sigma = 24, 12, 3.0
    drawn = draw_tasks(d, n, job["tasks"], seed=job["seed"])
    steps = [200, 400, 800, 1600]
    products = torch.logspace(-2, -0.5, job["grid"], dtype=torch.float64)
    for t in steps:
        rates = (products / t).tolist()
        error = sgd_risk(drawn, rates, t, sigma=sigma, averaged=True).error[..., 0].mean(0)
        rate = lowest(rates, error)
        yield {"t": t, "rate": rate, "product": rate * t, "error": float(error.min())}


def sgd_truncation(job: Job) -> Iterator[Row]:
    """Paths that are truncated at the highest rate of the theorem."""
    d, n = 24, 12
    rate = 1 / (d**2 * math.log(d) ** 2)
    drawn = draw_tasks(d, n, 1, seed=job["seed"])
    found = sgd_risk(drawn, [rate], job["steps"], sigma=3.0, paths=job["paths"], truncate=True, seed=job["seed"], progress=False)
    yield {"truncated": float(found.truncated.max()), "paths": job["paths"]}


# T18: the tools


def tools(job: Job) -> Iterator[Row]:
    """Norms of Gaussian vectors, singular values of Gaussian matrices, random projections."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(job["seed"]), dtype=torch.float64)
    n, big, draws, t, eps = 20, 80, job["draws"], 2.0, 0.3
    norms = normal(draws, 100).norm(dim=1)
    values = torch.linalg.svdvals(normal(draws, big, n))
    inside = (values[:, 0] <= big**0.5 + n**0.5 + t) & (values[:, -1] >= big**0.5 - n**0.5 - t)
    d, k = 200, 100
    onto = torch.linalg.qr(normal(draws // 10, d, k))[0]
    ratio = onto[:, 0].norm(dim=1) / math.sqrt(k / d)  # the projection of a fixed unit vector
    yield {
        "tail": float(((norms - 10).abs() > 2).double().mean()) / (2 * math.exp(-2.0)),
        "norm_spread": float(norms.std()) * 2**0.5,
        "edge": max(abs(float(values[:, k].mean()) / (big**0.5 + sign * n**0.5) - 1) for k, sign in ((0, 1), (-1, -1))),
        "outside": float((~inside).double().mean()),
        "allowed": 2 * math.exp(-(t**2) / 2),
        "projected": float((ratio - 1).abs().max()) / eps,
    }


def three(values: Iterable[Any]) -> tuple[Any, Any, Any]:
    """What a part has at tiny, laptop and paper size."""
    tiny, laptop, paper_size = values
    return tiny, laptop, paper_size


SGD_PARTS: dict[str, Callable[[Job], Iterator[Row]]] = {
    "T16": sandwich,
    "T16 rate": sgd_train_rate,
    "T17": sgd_valid_rate,
    "T17 paths": sgd_truncation,
    "T18": tools,
}
#: Parameters of each part, at tiny, laptop and paper size.
SGD_SIZES: dict[str, tuple[Any, Any, Any]] = {
    "T16": three({"dim": 24, "tasks": m} for m in (5, 20, 100)),
    "T16 rate": three(
        {"dims": dims, "tasks": m, "grid": g}
        for dims, m, g in (([8, 16, 32], 12, 30), ([8, 16, 32], 40, 60), ([8, 16, 32, 64], 40, 60))
    ),
    "T17": three({"tasks": m, "grid": g} for m, g in ((1, 120), (4, 120), (20, 120))),
    "T17 paths": three({"steps": t, "paths": p} for t, p in ((300, 200), (2000, 1000), (20_000, 1000))),
    "T18": three({"draws": m} for m in (300, 2000, 10_000)),
}


def of(part: str, **where: Any) -> Query:
    return rows(part=part, **where)


def slope(part: str, x: str, y: str, **where: Any) -> Value:
    """The exponent of y in x."""
    return of(part, **where).power(x, y)


SGD_CLAIMS = {
    "T16: SGD shrinks the distance to the fit no faster than (1 − ηL)ᵗ (smallest ratio)": at_least(
        1.0, of("T16").min("low"), **paper("at least", "Lemma 33")
    ),
    "T16: and at least as fast as (1 − η/2L)ᵗ (largest ratio)": at_most(
        1.0, of("T16").max("high"), **paper("at most", "Lemma 33")
    ),
    "T16: the best rate by the training loss is of order 1/d (exponent in d)": between(
        -1.3, -0.6, slope("T16 rate", "d", "rate"), **paper("Ω(1/d)", "Theorem 9")
    ),
    "T16: d η*_train does not vanish (smallest)": at_least(0.5, of("T16 rate").min("scaled"), **paper("Ω(1)", "Theorem 9")),
    "T16: nor is it the rate of full gradients (largest)": at_most(2.5, of("T16 rate").max("scaled")),
    "T16: with it the error is of order σ² (smallest, in σ²)": at_least(
        0.3, of("T16 rate").min("error"), **paper("Ω(σ²)", "Theorem 9")
    ),
    "T17: t η*_valid of SGD is constant (largest over smallest)": at_most(
        1.06, of("T17").max("product") / of("T17").min("product"), **paper("Θ(1/t)", "Theorem 10")
    ),
    "T17: the exponent of η*_valid in t": within(0.05, -1.0, slope("T17", "t", "rate"), **paper(-1, "Theorem 10")),
    "T17: with it the error is below that of predicting 0 (largest)": at_most(
        0.98, of("T17").max("error"), **paper("1 − Ω(1)", "Theorem 10")
    ),
    "T17: no path is truncated at η = 1/(d² log² d) (share)": equal(
        0.0, of("T17 paths").only("truncated"), **paper("1 − δ", "Lemma 44")
    ),
    "T18: norms of Gaussian vectors have sub-Gaussian tails (P(|‖x‖ − √n| > 2) over 2 exp(−2))": at_most(
        1.0, of("T18").only("tail")
    ),
    "T18: and a standard deviation of 1/√2 (ratio)": within(0.15, 1.0, of("T18").only("norm_spread")),
    "T18: extreme singular values are √N ± √n (largest relative distance of a mean)": at_most(0.1, of("T18").only("edge")),
    "T18: singular values leave √N ± √n by 2 no more often than 2 exp(−2) (share over that)": at_most(
        1.0, of("T18").only("outside") / of("T18").only("allowed")
    ),
    "T18: random projections keep norms within 30 % (largest distance over that)": at_most(1.0, of("T18").only("projected")),
}
