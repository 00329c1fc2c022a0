"""The theorems on gradient descent for random least-squares tasks, each checked on its own; those on SGD beside them.

The constants of the proofs (L = 100) make most thresholds empty at these sizes. L here is the smallest that the drawn tasks
allow: the largest of λ₁, 1/λₙ, σ₁(X)²/d and d/σₙ(X)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from theodolite.experiments import at_least, at_most, equal, within
from theodolite.experiments.lab.panels import curves
from theodolite.experiments.query import select
from theodolite.experiments.step_size import paper
from theodolite.experiments.step_size.sgd_theorems import SGD_CLAIMS, SGD_PARTS, SGD_SIZES, Job, constant, of, one, slope, three
from theodolite.experiments.study import grid
from theodolite.measures.fits import log_log_fit
from theodolite.measures.stepsize import (
    draw_tasks,
    interpolation_error,
    least_squares_curves,
    population_rates,
    population_risk,
)
from theodolite.measures.stepsize.quadratics.least_squares import LeastSquaresTasks, descend_tasks, diagonalise, train_loss
from theodolite.results import Row

#: The constant of the proofs.
PROVEN = 100.0

# T7: both rates for few samples


def scaling(job: Job) -> Iterator[Row]:
    """The best rates by the formulas, over the number of steps."""
    d, n = job["dim"], job["samples"]
    lam = diagonalise(draw_tasks(d, n, job["spectra"], seed=job["seed"])).eigenvalues
    for sigma in (1.0, 2.0, 5.0):
        for t in job["steps"]:
            best = population_rates(lam, t, dim=d, samples=n, sigma=sigma)
            risk = population_risk(lam, [best["train"], best["valid"]], t, dim=d, samples=n, sigma=sigma).error.mean(0)
            ends = dict(zip(("error_train", "error_valid"), risk.tolist(), strict=True))
            yield {"sigma": sigma, "t": t, **best, "product": t * best["valid"], **ends, "ends": interpolation_error(d, n, sigma)}


# T8 to T10: the training loss falls, and diverging runs are truncated


def decreasing(job: Job) -> Iterator[Row]:
    """The mean training loss on [0, 1/L] and what it comes to at the end."""
    eigen = diagonalise(draw_tasks(job["dim"], job["dim"] // 2, job["tasks"], seed=job["seed"]))
    sigma, t = 3.0, job["steps"]
    for name, bound in (("proven", PROVEN), ("empirical", constant(eigen))):
        rates = torch.linspace(0, 1 / bound, 200, dtype=torch.float64)
        w, _ = descend_tasks(eigen, rates, t, one(sigma))
        loss = train_loss(eigen, w, one(sigma))[:, 0].mean(0)
        ceiling = 2 * bound**2 * sigma**2 * (1 - bound**-2) ** t
        yield {"constant": name, "L": bound, "step": float((loss[1:] / loss[:-1]).max()), "ratio": float(loss[-1]) / ceiling}


def spectrum(job: Job) -> Iterator[Row]:
    """Eigenvalues of random inputs beside the edges of Marchenko and Pastur, and the smallest L."""
    d = job["dim"]
    for share in (0.25, 0.5, 0.75):
        n = round(share * d)
        eigen = diagonalise(draw_tasks(d, n, job["draws"], seed=job["seed"]))
        low, high = ((math.sqrt(1 / share) + sign) ** 2 for sign in (-1, 1))
        lam = eigen.eigenvalues
        edges = {"lowest": float(lam[:, 0].mean()) / low, "highest": float(lam[:, -1].mean()) / high}
        yield {"share": share, "L": constant(eigen), **edges}


def truncation(job: Job) -> Iterator[Row]:
    """Which runs are truncated, over the rate: from some rate on every one; and the loss of those that are."""
    d, sigma, t = job["dim"], job["sigma"], job["steps"]
    eigen = diagonalise(draw_tasks(d, d // 2, job["tasks"], seed=job["seed"]))
    bound = constant(eigen)
    rates = torch.cat([torch.linspace(0, 2, job["rates"]), torch.linspace(2, 3 * bound, job["rates"] // 4)]).double()
    w, cut = descend_tasks(eigen, rates, t, one(sigma))
    loss = train_loss(eigen, w, one(sigma))[:, 0]
    cut, lam = cut[:, 0], eigen.eigenvalues
    back = int((cut[:, :-1] & ~cut[:, 1:]).sum())
    stable = rates <= 2 / lam[:, -1:]  # (m, E), for each task
    share = (loss * cut).mean(0)
    edge = float(rates[int((share >= sigma**2 / bound**6).nonzero()[0])])
    beyond = loss.mean(0)[rates > edge]
    yield {
        "L": bound,
        "back": back,
        "cut_below": int((cut & (rates <= 2 / bound)).sum()),
        "cut_stable": int((cut & stable).sum()),
        "kept_above": int((~cut & (rates >= 2.5 * bound)).sum()),
        "lowest_cut_loss": float(loss[cut].min()) / sigma**2,
        "edge": edge,
        "beyond": float(beyond.min()) * 10 * bound**8 / sigma**2,
    }


def parity(job: Job) -> Iterator[Row]:
    """How far ‖w_t‖ falls below what it was at a lower rate, for odd and even t; and one eigenvalue, λ = 1, at η = 2."""
    eigen = diagonalise(draw_tasks(job["dim"], job["dim"] // 2, 20, seed=job["seed"]))
    single = diagonalise(LeastSquaresTasks(*(torch.ones(1, 1, *more, dtype=torch.float64) for more in ((1,), (), ()))))
    rates = torch.linspace(0, 1, 400, dtype=torch.float64)
    for t in (1, 2, 5, 6, 11, 12):
        norms = descend_tasks(eigen, rates, t, one(1.0))[0].norm(dim=-1)[:, 0]  # (m, E)
        at_two = float(descend_tasks(single, one(2.0), t, one(1.0))[0].abs())
        yield {"t": t, "odd": t % 2 == 1, "fall": float((norms.cummax(1).values - norms).max()), "at_two": at_two}


# T11: empirical and population objectives


def concentration(job: Job) -> Iterator[Row]:
    """The largest distance over rates between means of m tasks and of all of them."""
    d = job["dim"]
    few = diagonalise(draw_tasks(d, d // 2, 50, seed=job["seed"]))
    top = 1 / float(few.eigenvalues.max())
    low, high = [top * k / 20 for k in range(1, 21)], [top * (1 + k / 20) for k in range(1, 20)]  # [0, 1/L] and [1/L, 2/L)
    found = least_squares_curves(
        d, d, sigmas=[2.0], rates=low + high, steps=job["steps"], tasks=job["tasks"], seed=job["seed"], progress=False
    )
    for split, losses in (("train", found.losses[0, 0, 20:]), ("valid", found.losses[1, 0, :20])):  # (E, m)
        for m in job["ms"]:
            groups = losses[:, : losses.shape[1] // m * m].unflatten(1, (-1, m)).mean(-1)
            away = (groups - losses.mean(1, keepdim=True)).abs().amax(0)
            yield {"split": split, "m": m, "away": float(away.mean())}


# T12, T13: the validated objective


def signal_and_noise(job: Job) -> Iterator[Row]:
    """What small rates gain, linear in ηt, and what they pay, quadratic in it."""
    d = job["dim"]
    eigen = diagonalise(draw_tasks(d, d // 2, job["tasks"], seed=job["seed"]))
    bound, sigma, t = constant(eigen), job["sigma"], job["steps"]
    for eta_t in torch.logspace(-3, -1, 9, dtype=torch.float64).tolist():
        grown = 1 - (1 - eta_t / t * eigen.eigenvalues) ** t
        gain = (grown * eigen.true.square()).sum(1)
        price = 0.5 * ((grown * eigen.true).square().sum(1) + sigma**2 * (grown * eigen.noise).square().sum(1))
        yield {
            "eta_t": eta_t,
            "gain": float(gain.mean()),
            "price": float(price.mean()),
            "gain_ratio": float(gain.min()) / (eta_t / (16 * bound)) if eta_t <= bound else math.inf,
            "price_ratio": float(price.max()) / (bound**3 * eta_t**2 * sigma**2),
        }


def ordering(job: Job) -> Iterator[Row]:
    """η₁ ≤ η* ≤ η₃ and η₁ < η₂ < η₃, and what Q is at and beyond them."""
    d, sigma, t = job["dim"], job["sigma"], job["steps"]
    n = d // 2
    eigen = diagonalise(draw_tasks(d, n, job["spectra"], seed=job["seed"]))
    bound = constant(eigen)
    c = 1 / (1280 * bound**5 * sigma**2)
    first, second, third = c / (4 * bound * t), 1 / (32 * bound**4 * sigma**2 * t), math.log(2) * bound / t
    best = population_rates(eigen.eigenvalues, t, dim=d, samples=n, sigma=sigma)["valid"]
    outside = [*torch.linspace(first / 20, first, 20).tolist(), *torch.linspace(third, 1 / bound, 20).tolist()]
    risk = population_risk(eigen.eigenvalues, [second, *outside], t, dim=d, samples=n, sigma=sigma).error.mean(0) / 2
    yield {
        "L": bound,
        "long": t / (math.log(2) * bound**2),
        "ordered": min(second / first, third / second, best / first, third / best),
        "best_t": best * t,
        "at_second": float(0.5 - risk[0]) / c,
        "outside": float(0.5 - risk[1:].min()) / c,
    }


def high_rates(job: Job) -> Iterator[Row]:
    """The validated objective at high rates, beside its lowest value."""
    sigma = 5.0
    found = least_squares_curves(
        job["dim"], job["dim"], sigmas=[sigma], steps=40, tasks=job["tasks"], seed=job["seed"], progress=False
    )
    curve = found.objective[1, 0]
    high = min(float(v) for v, rate in zip(curve, found.rates, strict=True) if rate >= 0.15)
    yield {"lowest": float(curve.min()) / sigma**2, "high": high / sigma**2}


# T14: the spread of eigenvalues


def spread(job: Job) -> Iterator[Row]:
    """`E[(1/n) Σ λ² − λ̄²] = d/n + d/n² − 2d/n³` and the two means that it is the difference of."""
    d, n = 40, 20
    lam = torch.cat([diagonalise(draw_tasks(d, n, 500, seed=job["seed"] + k)).eigenvalues for k in range(job["draws"] // 500)])
    squares, mean = lam.square().mean(1), lam.mean(1).square()
    yield {
        "variance": float((squares - mean).mean()) / (d / n + d / n**2 - 2 * d / n**3),
        "mean": float(mean.mean()) / (d**2 / n**2 + 2 * d / n**3),
        "squares": float(squares.mean()) / (d**2 / n**2 + d / n + d / n**2),
        "least": d / n + d / n**2 - 2 * d / n**3,
    }


# T15: many samples


def many_samples(job: Job) -> Iterator[Row]:
    """The error of train-by-train's rate over dσ²/n."""
    d, sigma, t = 50, 1.0, 40
    for n in (500, 1000, 2000, 5000):
        lam = diagonalise(draw_tasks(d, n, job["spectra"], seed=job["seed"])).eigenvalues
        rate = population_rates(lam, t, dim=d, samples=n, sigma=sigma)["train"]
        error = float(population_risk(lam, [rate], t, dim=d, samples=n, sigma=sigma).error.mean())
        yield {"n": n, "rate": rate, "ratio": error * n / (d * sigma**2), "solution": n / (n - d - 1)}


def many_lemmas(job: Job) -> Iterator[Row]:
    """Eigenvalues in [1 − ε, 1 + ε] for n ≥ 10 d/ε², the bound at rate 2/3, truncation never to 4/3 and always from 6 on."""
    d, sigma, t, eps = 10, 1.0, 40, 0.5
    n = 144 * d
    eigen = diagonalise(draw_tasks(d, n, job["tasks"], seed=job["seed"]))
    wide = diagonalise(draw_tasks(d, round(10 * d / eps**2), job["tasks"], seed=job["seed"])).eigenvalues
    rates = torch.cat([torch.linspace(0.01, 4 / 3, 60), torch.tensor([2 / 3]), torch.linspace(6, 20, 40)]).double()
    w, cut = descend_tasks(eigen, rates, t, one(sigma))
    above = train_loss(eigen, w, one(sigma))[:, 0] - sigma**2 * eigen.unfitted[:, None]  # what the best weights leave is shared
    ceiling = 20 * (2 / 3) ** (2 * t) * sigma**2 + eps**2 * d * sigma**2 / (20 * n)
    yield {
        "eigenvalue": float((wide - 1).abs().max()) / eps,
        "at_two_thirds": float(above[:, 60].mean()) / ceiling,
        "cut_low": int(cut[:, 0, :61].sum()),
        "kept_high": int((~cut[:, 0, 61:]).sum()),
    }


PARTS: dict[str, Callable[[Job], Iterator[Row]]] = {
    "T7": scaling,
    "T8": decreasing,
    "T9": spectrum,
    "T10": truncation,
    "T10 parity": parity,
    "T11": concentration,
    "T12": signal_and_noise,
    "T12 order": ordering,
    "T13": high_rates,
    "T14": spread,
    "T15": many_samples,
    "T15 lemmas": many_lemmas,
    **SGD_PARTS,
}
#: Parameters of each part, at tiny, laptop and paper size.
SIZES: dict[str, tuple[Any, Any, Any]] = {
    "T7": three({"dim": 200, "samples": 100, "spectra": k, "steps": [10, 20, 40, 80, 160, 320, 640]} for k in (4, 20, 100)),
    "T8": three({"dim": d, "tasks": m, "steps": 40} for d, m in ((40, 20), (200, 100), (400, 300))),
    "T9": three({"dim": d, "draws": m} for d, m in ((200, 10), (200, 200), (200, 1000))),
    "T10": three(
        {"dim": d, "tasks": m, "rates": r, "sigma": 60.0, "steps": 41}
        for d, m, r in ((40, 40, 200), (80, 200, 400), (200, 200, 400))
    ),
    "T10 parity": ({"dim": 20}, {"dim": 40}, {"dim": 200}),
    "T11": three(
        {"dim": 16, "steps": 40, "tasks": m, "ms": ms}
        for m, ms in ((2000, [10, 30, 100]), (20_000, [10, 30, 100, 300, 1000]), (40_000, [10, 30, 100, 300, 1000]))
    ),
    "T12": three({"dim": d, "tasks": m, "sigma": 3.0, "steps": 640} for d, m in ((100, 10), (200, 50), (400, 100))),
    "T12 order": three({"dim": d, "spectra": m, "sigma": 30.0, "steps": 2000} for d, m in ((100, 4), (200, 20), (400, 50))),
    "T13": three({"dim": 200, "tasks": m} for m in (20, 100, 300)),
    "T14": three({"draws": m} for m in (2000, 10_000, 50_000)),
    "T15": three({"spectra": m} for m in (4, 20, 100)),
    "T15 lemmas": three({"tasks": m} for m in (20, 100, 300)),
    **SGD_SIZES,
}


def jobs(p: Any) -> Iterator[dict[str, Any]]:
    """One for each part."""
    for part in PARTS:
        yield from grid(p, **{name: [value] for name, value in {"part": part, "seed": 0, **p[part]}.items()})


def per_sigma(x: str, y: str) -> Any:
    """The exponent of y in x at each noise of T7."""
    return of("T7").by("sigma").each(lambda found: log_log_fit([r[x] for r in found], [r[y] for r in found]).slope)


CLAIMS = {
    # Few samples
    "T7: t η*_valid is constant (exponent of η*_valid in t, farthest from −1)": at_most(
        0.03, abs(per_sigma("t", "valid") + 1).max(), **paper("Θ(1/t)", "Theorem 5")
    ),
    "T7: η*_train does not depend on t (smallest)": at_least(0.29, of("T7").min("train"), **paper("Θ(1)", "Theorem 5")),
    "T7: η*_train does not depend on t (largest)": at_most(0.35, of("T7").max("train"), **paper("Θ(1)", "Theorem 5")),
    "T7: with η*_train the error becomes that of interpolation (largest relative distance, t ≥ 160)": at_most(
        0.03,
        of("T7", t=lambda t: t >= 160).column(lambda row: abs(row["error_train"] / row["ends"] - 1)).max(),
        **paper("Ω(1) σ²", "Theorem 5"),
    ),
    "T7: which is worse than predicting 0 (smallest error)": at_least(
        1.0, of("T7").min("error_train"), **paper("Ω(1) σ²", "Theorem 5")
    ),
    "T7: with η*_valid it is better, at every σ (largest error)": at_most(
        0.99, of("T7").max("error_valid"), **paper("‖w*‖² − Ω(1)", "Theorem 5")
    ),
    "T7: t η*_valid at σ = 2 (largest distance from 0.1075, relative)": at_most(
        0.05, of("T7", sigma=2.0).column(lambda row: abs(row["product"] / 0.1075 - 1)).max()
    ),
    "T8: the mean training loss falls on [0, 1/L] (largest ratio of neighbours)": at_most(
        1 - 1e-9, of("T8").max("step"), **paper("strictly decreasing", "Lemma 2")
    ),
    "T8: and ends below 2L²σ²(1 − 1/L²)ᵗ (largest ratio)": at_most(1.0, of("T8").max("ratio"), **paper("at most", "Lemma 2")),
    "T9: L = 100 covers the spectra (largest L needed)": at_most(PROVEN, of("T9").max("L"), **paper(100, "Lemma 1")),
    "T9: the extreme eigenvalues are at the edges of Marchenko and Pastur (farthest ratio)": at_most(
        0.2, of("T9").column(lambda row: max(abs(row["lowest"] - 1), abs(row["highest"] - 1))).max()
    ),
    "T10: no run that is truncated is whole again at a higher rate (runs)": equal(
        0, of("T10").only("back"), **paper("none", "Lemma 5")
    ),
    "T10: none is truncated up to 2/L (runs)": equal(0, of("T10").only("cut_below"), **paper("never", "Lemma 3")),
    "T10: nor up to 2/λ₁ of its own task (runs)": equal(0, of("T10").only("cut_stable"), **paper("never", "Lemma 3")),
    "T10: every one is from 2.5 L on (runs that are whole)": equal(0, of("T10").only("kept_above"), **paper("always", "Lemma 3")),
    "T10: a truncated run has a high training loss (smallest, in σ²)": at_least(
        100.0, of("T10").only("lowest_cut_loss"), says="the loss is high", where="Wang et al. 2021, section 4"
    ),
    "T10: the edge η̃ of divergence lies in (1/L, 3L) (smaller ratio to an end)": at_least(
        1.0,
        of("T10").column(lambda row: min(row["edge"] * row["L"], 3 * row["L"] / row["edge"])).only(),
        **paper("in (1/L, 3L)", "Lemma 6"),
    ),
    "T10: beyond it the mean training loss is above σ²/10L⁸ (smallest ratio)": at_least(
        1.0, of("T10").only("beyond"), **paper("at least", "Lemma 3")
    ),
    "T10: for odd t the norm never falls with the rate (largest fall)": at_most(
        1e-9, of("T10 parity", odd=True).max("fall"), **paper("non-decreasing", "Lemma 5")
    ),
    "T10: for even t it can: one eigenvalue at η = 2/λ leads back to 0 (largest norm)": at_most(
        1e-12, of("T10 parity", odd=False).max("at_two")
    ),
    "T10: and to twice the solution for odd t (smallest norm, solution 2)": within(
        1e-9, 4.0, of("T10 parity", odd=True).min("at_two")
    ),
    "T11: distance of empirical to mean objective, train-by-train (exponent in m)": within(
        0.15, -0.5, slope("T11", "m", "away", split="train"), **paper("uniform convergence", "Lemma 4")
    ),
    "T11: and train-by-validation (exponent in m)": within(
        0.15, -0.5, slope("T11", "m", "away", split="valid"), **paper("exp(−Ω(ε² m))", "Lemma 11")
    ),
    "T12: the signal is at least ηt/16L (smallest ratio)": at_least(
        1.0, of("T12").min("gain_ratio"), **paper("at least", "Lemma 15")
    ),
    "T12: signal and noise together cost at most L³η²t²σ² (largest ratio)": at_most(
        1.0, of("T12").max("price_ratio"), **paper("at most", "Lemma 15")
    ),
    "T12: the signal is linear in ηt (exponent)": within(0.05, 1.0, slope("T12", "eta_t", "gain"), **paper("linear", "Lemma 15")),
    "T12: the cost is quadratic (exponent)": within(0.1, 2.0, slope("T12", "eta_t", "price"), **paper("quadratic", "Lemma 15")),
    "T12: η₁ < η₂ < η₃ and η₁ ≤ η*_valid ≤ η₃ (smallest ratio)": at_least(
        1.0, of("T12 order").only("ordered"), **paper("yes", "Lemmas 10, 13")
    ),
    "T12: t ≥ log(2) L², as the lemma asks (ratio)": at_least(1.0, of("T12 order").only("long")),
    "T12: at η₂ the distance to the truth is below ½ − C (what is gained, over C)": at_least(
        1.0, of("T12 order").only("at_second"), **paper(1, "Lemma 13")
    ),
    "T12: up to η₁ and from η₃ on it is above ½ − C/2 (what is gained, over C)": at_most(
        0.5, of("T12 order").only("outside"), **paper("at most 1/2", "Lemma 13")
    ),
    "T13: the validated objective at rates above 0.15 minus its lowest value (in σ²)": at_least(
        0.1, of("T13").only("high") - of("T13").only("lowest"), **paper("(1/2 + C′) σ²", "Lemma 12")
    ),
    "T14: the variance of eigenvalues is d/n + d/n² − 2d/n³ (ratio)": within(
        0.02, 1.0, of("T14").only("variance"), **paper(1, "Lemma 21")
    ),
    "T14: E λ̄² is d²/n² + 2d/n³ (ratio)": within(0.02, 1.0, of("T14").only("mean")),
    "T14: E (1/n) Σ λ² is d²/n² + d/n + d/n² (ratio)": within(0.02, 1.0, of("T14").only("squares")),
    "T14: the variance is at least 4/3": at_least(4 / 3, of("T14").only("least"), **paper("at least 4/3", "Lemma 21")),
    # Many samples
    "T15: the error of train-by-train is (1 + ε) dσ²/n (ratio minus n/(n − d − 1), farthest)": at_most(
        0.03, of("T15").column(lambda row: abs(row["ratio"] - row["solution"])).max(), **paper("(1 + ε) dσ²/n", "Theorem 6")
    ),
    "T15: and ε falls with n (ratio at 5,000 samples)": within(0.03, 1.011, of("T15", n=5000).only("ratio")),
    "T15: eigenvalues lie within ε of 1 for n ≥ 10 d/ε² (largest distance over ε)": at_most(
        1.0, of("T15 lemmas").only("eigenvalue"), **paper("at most 1", "Lemma 27")
    ),
    "T15: the training loss at rate 2/3, above that of the solution, is below its bound (ratio)": at_most(
        1.0, of("T15 lemmas").only("at_two_thirds"), **paper("at most", "Lemma 24")
    ),
    "T15: no run is truncated up to 4/3 (runs)": equal(0, of("T15 lemmas").only("cut_low"), **paper("never", "Lemma 29")),
    "T15: every one is from 6 on (runs that are whole)": equal(
        0, of("T15 lemmas").only("kept_high"), **paper("always", "Lemma 29")
    ),
    **SGD_CLAIMS,
}


def panels(table: list[Row]) -> list[Any]:
    """The pictures of the sheet."""
    two = [
        {**row, "of": f"{split}, σ = {row['sigma']:g}", "rate": row[split]}
        for row in select(table, part="T7")
        for split in ("train", "valid")
    ]
    terms = [{**row, "of": name, "value": row[name]} for row in select(table, part="T12") for name in ("gain", "price")]
    look: dict[str, Any] = {"log": "xy", "labels": "legend"}
    return [
        curves(two, "t", "rate", by="of", **look, xlabel="steps t", ylabel="best step size", title="T7: few samples"),
        curves(terms, "eta_t", "value", by="of", **look, xlabel="ηt", ylabel="", title="T12: linear gain, quadratic price"),
        curves(
            select(table, part="T11"), "m", "away", by="split", **look, xlabel="tasks m", ylabel="largest distance", title="T11"
        ),
        curves(
            select(table, part="T15"),
            "n",
            "ratio",
            log="x",
            xlabel="samples n",
            ylabel="error / (dσ²/n)",
            title="T15: many samples",
        ),
        curves(select(table, part="T17"), "t", "rate", log="xy", xlabel="steps t", ylabel="best step size", title="T17: SGD"),
    ]
