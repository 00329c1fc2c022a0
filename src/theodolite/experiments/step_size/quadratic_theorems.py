"""The theorems on the step size of one quadratic, T1 to T6: what is computed for each, and what is claimed of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.experiments import at_least, at_most, equal, measured, rows, sizes, within
from theodolite.experiments.claims import Claim
from theodolite.experiments.lab.panels import curves, scatter
from theodolite.experiments.query import Column, Value, select
from theodolite.experiments.step_size import paper
from theodolite.experiments.step_size.quadratics import quadratic
from theodolite.experiments.study import grid
from theodolite.measures.fits import straight_line
from theodolite.measures.stepsize import descend_rate, meta_gradient_health, optimal_rate, stable_meta_gradient
from theodolite.results import Row

#: Eigenvalues 1 to 4 with equal parts of w₀: a quadratic whose theorems come true within a few thousand updates.
EVEN = torch.tensor([1.0, 1.75, 2.5, 3.25, 4.0], dtype=torch.float64), torch.full((5,), math.sqrt(0.2), dtype=torch.float64)
#: Horizons at which statements for all t are looked at.
HORIZONS = (1, 10, 80, 10_000)


def spectrum(seed: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and coefficients of w₀ of a random quadratic."""
    hessian, w0 = quadratic(seed)
    values, vectors = torch.linalg.eigh(hessian)
    return values, vectors.T @ w0


def _last_iterate(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1: bounds on |d f(w_t)/dη| below 2/L and above it, in logarithms; both margins are 0 or more where they hold."""
    values, c = spectrum(job["seed"])
    low, high = float(values[0]), float(values[-1])
    below = torch.linspace(0.01, 1.99, 60, dtype=torch.float64) / high
    above = 2 / high * torch.logspace(0.02, 2, 60, dtype=torch.float64)
    for steps in (1, 10, 80, 500):
        inside = stable_meta_gradient(values, c, below, steps, objective="last").log_gradient
        largest = torch.maximum((1 - below * low).abs(), (1 - below * high).abs()).log()
        upper = math.log(steps) + 2 * math.log(high) + (2 * steps - 1) * largest
        outside = stable_meta_gradient(values, c, above, steps, objective="last").log_gradient
        part = 2 * float(c[-1].abs().log()) + (2 * steps - 1) * (above * high - 1).log()  # of log(c₁² (ηL−1)^(2t−1))
        lower = math.log(steps) + 2 * math.log(high) + (-torch.exp(-part.clamp(min=0))).log1p() + part
        holds = part > 0  # below, the bound is negative
        margins = torch.where(holds, outside - lower, math.inf)
        yield {"steps": steps, "upper": float((upper - inside).min()), "lower": float(margins.min())}


def _exponents(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1 and T6: log |d f(w_t)/dη| − log t and log 1/(t f(w_t)) + log t are straight lines in t."""
    horizons = list(range(50, 501, 25))
    values, c = EVEN
    for ratio in (0.5, 2.5):
        rate = ratio / float(values[-1])
        found = [stable_meta_gradient(values, c, rate, steps, objective="last") for steps in horizons]
        gradients = np.array([float(each.log_gradient) - math.log(t) for each, t in zip(found, horizons, strict=True)])
        losses = np.array([-float(each.log_value) for each in found])
        t = np.array(horizons, dtype=np.float64)
        (slope, _), (inverse, at) = (straight_line(t, v, np.ones_like(t)) for v in (gradients, losses))
        factor = 2 * math.log(float((1 - rate * values).abs().max()))
        bend = np.abs(losses - at - inverse * t).max() / np.ptp(losses)
        yield {"ratio": ratio, "factor": factor, "slope": float(slope), "inverse": float(inverse), "bend": float(bend)}


def _shape(job: Mapping[str, Any]) -> Iterator[Row]:
    """F' over the rate, for the drawing."""
    rates = torch.linspace(0.05, 1.2, 120, dtype=torch.float64)
    for steps in (1, 2, 5, 80):
        slopes = stable_meta_gradient(*EVEN, rates, steps).gradient
        for rate, slope in zip(rates.tolist(), slopes.tolist(), strict=True):
            yield {"steps": steps, "rate": rate, "slope": slope}


def _one_sign_change(job: Mapping[str, Any]) -> Iterator[Row]:
    """T2: F' on a grid over [0, 2/α]: how often it changes sign, and whether in [1/L, 1/α]."""
    values, c = spectrum(job["seed"])
    low, high = float(values[0]), float(values[-1])
    rates = torch.linspace(0, 2 / low, job["points"], dtype=torch.float64)
    for steps in HORIZONS:
        rises = stable_meta_gradient(values, c, rates, steps).gradient > 0
        best = optimal_rate(values, c, steps, progress=False).value
        at = int(rises.nonzero()[0])
        yield {
            "steps": steps,
            "changes": int((rises[1:] != rises[:-1]).sum()),
            "starts": bool(rises[0]),
            "inside": float(min(best * high, 1 / (best * low))),
            "apart": float(max(rates[at - 1] - best, best - rates[at], torch.zeros(()))) / best,
        }


def _bounds(job: Mapping[str, Any]) -> Iterator[Row]:
    """T3 and T4: |F'| over D_max at any rate, and over D_min further than ε from the best one."""
    values, c = spectrum(job["seed"])
    low, high, squares = float(values[0]), float(values[-1]), c.square()
    first, last = float(squares[-1]), float(squares[0])  # along L and along α
    least = min(first, last)
    most = 4 * high**3 / (least * low * (high - low))
    ceiling = 2 / low
    everywhere = torch.cat([torch.zeros(1), torch.logspace(-6, 4, 600)]).double() / high
    near = torch.linspace(0, ceiling, 1000, dtype=torch.float64)
    for steps in HORIZONS:
        best = optimal_rate(values, c, steps, progress=False).value
        largest = float(stable_meta_gradient(values, c, torch.cat([everywhere, near]), steps).gradient.abs().max())
        far = stable_meta_gradient(values, c, 1e6 / high, steps)
        row = {"steps": steps, "largest": largest / most, "far": float(far.gradient) * (1e6 - 1) / (2 * high)}
        for share in (0.1, 0.9):
            margin = share / high
            rates = torch.cat([everywhere, near, torch.tensor([best - margin, best + margin]).double()])
            rates = rates[((rates - best).abs() >= margin * (1 - 1e-9)) & (rates <= ceiling)]
            found = float(stable_meta_gradient(values, c, rates, steps).gradient.abs().min())
            tight = min(2 * margin * last * low**3 / high, 2 * margin * first * high**2 / (ceiling * high - 1) ** 2)
            yield {
                **row,
                "share": share,
                "tight": found / tight,
                "loose": tight / (2 * margin * least * min(low**3 / high, ceiling**-2)),
            }


def _convergence(job: Mapping[str, Any]) -> Iterator[Row]:
    """T5: the descent with steps 1/√k, from far below the best rate and from far above."""
    found = descend_rate(*EVEN, [0.05, 2.0], job["steps"], updates=job["updates"], meta_rate=1.0, progress=False)
    for start, outside, end in zip((0.05, 2.0), found.outside(0.01 * found.optimum), found.ends, strict=True):
        yield {
            **{"steps": job["steps"], "start": start, "optimum": found.optimum, "settles": found.settles},
            **{"outside": outside, "end": abs(end / found.optimum - 1)},
        }


#: What float32 makes of the meta-gradient of the first random quadratic: rates 0.001, 0.01, 0.1 and 1, then 10, 20, 40, 80 steps.
SINGLE = {0.001: "ok ok ok ok", 0.01: "ok ok ok ok", 0.1: "ok ok zero nan", 1.0: "ok zero nan nan"}
#: And float64 for 40, 80, 160 and 320 steps.
DOUBLE = {0.001: "ok ok ok ok", 0.01: "ok ok ok ok", 0.1: "ok ok ok zero", 1.0: "ok ok zero nan"}


def _autograd(job: Mapping[str, Any]) -> Iterator[Row]:
    """T6: autograd through t steps on the first random quadratic, in its eigenvectors and with the matrix itself."""
    tried = ((torch.float32, [10, 20, 40, 80]), (torch.float64, [40, 80, 160, 320]))
    for form, (hessian, w0) in {"eigenvectors": spectrum(0), "matrix": quadratic(0)}.items():
        for dtype, horizons in tried:
            found = meta_gradient_health(hessian, w0, list(SINGLE), horizons, dtype=dtype, progress=False)
            for row in found.rows():
                agrees = (row["health"] == "ok") == (row["range"] == "inside")
                yield {**row, "form": form, "agrees": float(agrees)}


def _well_conditioned(job: Mapping[str, Any]) -> Iterator[Row]:
    """T6: `H = XXᵀ` with X of d × 2d at stable rates: the loss underflows, and float32 fails."""
    x = np.random.default_rng(job["seed"]).standard_normal((20, 40))
    w0 = np.random.default_rng(1000 + job["seed"]).standard_normal(20)
    hessian = torch.from_numpy(x @ x.T)
    high = float(torch.linalg.eigvalsh(hessian)[-1])
    rates = [ratio / high for ratio in (0.5, 1.0, 1.5)]
    for row in meta_gradient_health(hessian, w0, rates, [2000], dtype=torch.float32, progress=False).rows():
        stable = float(stable_meta_gradient(hessian, w0, row["rate"], 2000).gradient)
        lost = (row["health"] != "ok") == (row["range"] != "inside")
        yield {
            "health": row["health"],
            "log10_loss": row["log10_loss"],
            "finite": float(math.isfinite(stable)),
            "agrees": float(lost),
        }


def _constants(job: Mapping[str, Any]) -> Iterator[Row]:
    """The remark that for `H = XXᵀ`, X of d × 2d, the constants of the theory are harmless: c_min ~ 1/√d, α and L − α ~ d."""
    d = job["d"]
    generator = torch.Generator().manual_seed(job["seed"])
    x = torch.randn(job["draws"], d, 2 * d, generator=generator, dtype=torch.float64)
    w = torch.randn(job["draws"], d, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(x @ x.mT)
    c = (vectors.mT @ (w / w.norm(dim=1, keepdim=True))[..., None])[..., 0].abs()
    smallest = torch.minimum(c[:, 0], c[:, -1])
    for i in range(job["draws"]):
        yield {"d": d, "c_min": float(smallest[i]), "alpha": float(values[i, 0]), "gap": float(values[i, -1] - values[i, 0])}


PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "last iterate": _last_iterate,
    "exponents": _exponents,
    "shape": _shape,
    "one sign change": _one_sign_change,
    "bounds": _bounds,
    "convergence": _convergence,
    "autograd": _autograd,
    "well conditioned": _well_conditioned,
    "constants": _constants,
}

SIZES = sizes(
    tiny={"quadratics": 10, "points": 2000, "descents": ((2, 8000),), "seeds": 1, "draws": 200, "ds": (10, 20, 40)},
    laptop={
        "quadratics": 50,
        "points": 2000,
        "descents": ((2, 9000), (5, 17_000)),
        "seeds": 10,
        "draws": 300,
        "ds": (10, 20, 40, 80),
    },
    paper={
        "quadratics": 200,
        "points": 2000,
        "descents": ((2, 9000), (5, 17_000)),
        "seeds": 50,
        "draws": 1000,
        "ds": (10, 20, 40, 80),
    },
)


def jobs(p: Any) -> Iterator[dict[str, Any]]:
    """One for each quadratic or setting."""
    yield from grid(p, part=["last iterate", "bounds"], seed=range(p.quadratics))
    yield from grid(p, "points", part=["one sign change"], seed=range(p.quadratics))
    yield from grid(p, part=["exponents", "shape", "autograd"], seed=[0])
    for steps, updates in p.descents:
        yield {"part": "convergence", "steps": steps, "updates": updates, "seed": 0}
    yield from grid(p, part=["well conditioned"], seed=range(p.seeds))
    yield from grid(p, "draws", part=["constants"], d=p.ds, seed=[0])


last, slopes, signs, bounds = (rows(part=part) for part in ("last iterate", "exponents", "one sign change", "bounds"))
convergence, autograd, constants = (rows(part=part) for part in ("convergence", "autograd", "constants"))
well_conditioned = rows(part="well conditioned")


def classes(dtype: str, table: Mapping[float, str]) -> Value:
    """How many of the cells of a table of classes are as autograd has them, in the eigenvectors."""

    def count(found: list[Row]) -> int:
        return sum(
            row["health"] == table[row["rate"]].split()[place]
            for rate in table
            for place, row in enumerate(select(found, rate=rate))
        )

    return autograd(dtype=dtype, form="eigenvectors").measure(count)


def medians(column: str, power: float) -> Column:
    """The median of a column times a power of d, for each d."""
    return constants.by("d").each(lambda found: float(np.median([row[column] * row["d"] ** power for row in found])))


CLAIMS: dict[str, Claim] = {
    "T1: below 2/L, |d f(w_t)/dη| is at most t L² max(|1−ηα|, |1−ηL|)^(2t−1) (least log margin)": at_least(
        -1e-9, last.min("upper"), **paper("exponentially small", "Theorem 3")
    ),
    "T1: above 2/L it is at least c₁² L² t (ηL−1)^(2t−1) − L² t (least log margin)": at_least(
        -1e-9, last.min("lower"), **paper("exponentially large", "Theorem 3")
    ),
    "T1: its exponent in t is 2 log max|1−ηλ| (largest relative distance, η = 0.5/L and 2.5/L)": at_most(
        0.01, (slopes["slope"] / slopes["factor"]).change().max()
    ),
    "T1: and so it vanishes at 0.5/L (exponent)": at_most(-0.2, slopes(ratio=0.5).only("slope")),
    "T1: and explodes at 2.5/L (exponent)": at_least(0.2, slopes(ratio=2.5).only("slope")),
    "T2: F' changes sign once (most, and least, over quadratics and horizons)": equal(
        (1, 1),
        signs.measure(lambda found: (max(row["changes"] for row in found), min(row["changes"] for row in found))),
        **paper("one stationary point", "Claim 1"),
    ),
    "T2: at a rate in [1/L, 1/α] (least of η*L and 1/(η*α))": at_least(
        1 - 1e-9, signs.min("inside"), **paper("in [1/L, 1/α]", "Claim 1")
    ),
    "T2: which is where the bisection finds it (largest relative distance from the grid's interval)": at_most(
        1e-9, signs.max("apart")
    ),
    "T3: |F'| is at most D_max (largest ratio)": at_most(1.0, bounds.max("largest"), **paper("at most D_max", "Claim 2")),
    "T3: far out F' is 2L/(ηL−1) (largest relative distance)": at_most(1e-3, bounds.change("far").max()),
    "T4: further than ε from the best rate |F'| is at least D_min (least ratio)": at_least(
        1.0, bounds.min("tight"), **paper("at least D_min", "Claim 3")
    ),
    "T4: whose simpler form is smaller (least ratio)": at_least(1 - 1e-12, bounds.min("loose")),
    "T5: t = 2, the last update further than 1 % from the best rate (from below)": within(
        10, 7744, convergence(steps=2, start=0.05).only("outside"), **paper("converges", "Theorem 4")
    ),
    "T5: t = 2, the same from above": within(
        10, 7744, convergence(steps=2, start=2.0).only("outside"), **paper("converges", "Theorem 4")
    ),
    "T5: t = 5, the last update further than 1 % from the best rate (both starts)": within(
        10, 14_823, convergence(steps=5).if_any(lambda found: max(row["outside"] for row in found)), since="laptop"
    ),
    "T5: (F''(η*)/2)² foretells it for t = 2": within(2, 7739, convergence(steps=2).measure(lambda found: found[0]["settles"])),
    "T5: the best rate for t = 2": within(1e-5, 0.33141, convergence(steps=2).measure(lambda found: found[0]["optimum"])),
    "T5: the rate ends there (largest relative distance)": at_most(
        0.01, convergence.max("end"), **paper("converges", "Theorem 4")
    ),
    "T6: 1/f(w_t), which backpropagation passes through, has the exponent −2 log max|1−ηλ| (largest relative distance)": at_most(
        0.01,
        (slopes["inverse"] / slopes["factor"]).map(lambda ratio: abs(ratio + 1)).max(),
        **paper("exponential in t", "Corollary 1"),
    ),
    "T6: its logarithm is a straight line in t (largest distance from it, over its range)": at_most(1e-3, slopes.max("bend")),
    "T6: autograd in float32 is right, 0 or NaN (of 16 cells as foretold)": equal(16, classes("float32", SINGLE)),
    "T6: autograd in float64, for four times the steps (of 16 cells as foretold)": equal(16, classes("float64", DOUBLE)),
    "T6: it fails where loss or weights leave the range of the dtype, and only there (share of all cells)": equal(
        1.0,
        autograd.column(lambda row: row["agrees"] + 0 * row["log10_loss"]).mean(),
        **paper("exponentially large or small", "Corollary 1"),
    ),
    "T6: at stable rates of a well-conditioned quadratic too, apart from losses that lose digits (share that agrees)": equal(
        1.0, well_conditioned(log10_loss=lambda size: not -46 < size < -37.5).mean("agrees")
    ),
    "T6: where the loss underflows autograd gives NaN (cells)": at_least(
        1, well_conditioned.where(lambda row: row["log10_loss"] < -38)["log10_loss"].count(lambda loss: loss < -38)
    ),
    "T6: and the stable form is finite (share)": equal(1.0, well_conditioned.mean("finite")),
    "for H = XXᵀ with X of d × 2d, √d c_min does not depend on d (medians, the least, 0.376 for d → ∞)": within(
        0.15, 0.376, medians("c_min", 0.5).min(), **paper("Ω(1/√d)", "section 3")
    ),
    "√d c_min (the largest)": within(0.15, 0.376, medians("c_min", 0.5).max(), **paper("Ω(1/√d)", "section 3")),
    "α/d is at least (√2 − 1)² (medians, the least)": at_least(0.165, medians("alpha", -1).min(), **paper("Ω(d)", "section 3")),
    "(L − α)/d is near 4√2 (medians, the least)": at_least(4.0, medians("gap", -1).min(), **paper("Ω(d)", "section 3")),
    "T3: how far below D_max |F'| stays (largest ratio)": measured(bounds.max("largest")),
}


def panels(rows: list[Row]) -> list[Any]:
    """F' around its root at several horizons, and what single precision makes of it by the size of the loss."""
    lines = [{**row, "t": row["steps"]} for row in select(rows, part="shape")]
    cells = [row for row in select(rows, part="autograd", form="eigenvectors") if row["dtype"] == "float32"]
    look = {"xlabel": "steps of gradient descent t", "ylabel": "log₁₀ f(w_t)", "by": "health", "title": "T6: autograd in float32"}
    return [
        curves(
            lines, "rate", "slope", by="t", markers=False, xlabel="learning rate η", ylabel="F′(η)", title="T2: one root"
        ).line(y=0.0),
        scatter(cells, "steps", "log10_loss", **look).line(y=38.5, label="largest number of float32"),
    ]
