"""The theorems on neural quadratic models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from theodolite.data.generators import mixture_1d
from theodolite.experiments import Experiment, at_least, at_most, equal, relative, rows, sizes, within
from theodolite.experiments.catapult.regimes import TARGET, draw_networks, words
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.panels import curves, draw_panels, labelled, log_log
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import InParts, grid
from theodolite.measures import quadratic_models as quadratic
from theodolite.measures.dynamics import classify_run
from theodolite.results import Row


def linear(job: Mapping[str, Any]) -> Iterator[Row]:
    """F1: a linear model, step by step on its weights, against powers of I − ηK."""
    generator = torch.Generator().manual_seed(job["seed"])
    features = torch.randn(8, 30, generator=generator, dtype=torch.float64)
    y = torch.randn(8, generator=generator, dtype=torch.float64)
    kernel = features @ features.T
    for ratio in (0.5, 0.95, 1.05):
        rate = ratio * 2 / float(torch.linalg.eigvalsh(kernel)[-1])
        w = torch.zeros(30, dtype=torch.float64)
        predicted = -y
        losses, gap = [], 0.0
        for _ in range(job["steps"]):
            residual = features @ w - y
            gap = max(gap, float((residual - predicted).norm() / torch.maximum(predicted.norm(), y.norm())))
            losses.append(float(0.5 * residual.square().sum()))
            w = w - rate * features.T @ residual
            predicted = predicted - rate * kernel @ predicted
        yield {"ratio": 2 * ratio, "gap": gap, "word": classify_run(losses)}


def exact(job: Mapping[str, Any]) -> Iterator[Row]:
    """F2: gradient descent on the weights of a gated network against one step of the recursion."""
    start = draw_networks(job["m"], 3, job["seed"], d=5)
    y = torch.tensor([TARGET], dtype=torch.float64)
    for ratio in (1.5, 2.5, 3.5):
        found = quadratic.descend(start.u, start.v, start.x, y, ratio / start.kernel, job["steps"])
        g, kernel = found.output[..., 0], found.kernel_norm
        after, next_kernel = quadratic.one_example_step(g[:-1], kernel[:-1], TARGET, 1 / job["m"], found.rate)
        size = torch.maximum(g.abs(), torch.ones_like(g))[1:]
        yield {
            "ratio": ratio,
            "output_gap": float(((after - g[1:]) / size).abs().max()),
            "kernel_gap": float(((next_kernel - kernel[1:]) / kernel[1:]).abs().max()),
        }


def regimes(job: Mapping[str, Any]) -> Iterator[Row]:
    """F4 to F8: what many networks do over the learning rates."""
    m = job["m"]
    start = draw_networks(m, job["draws"], job["seed"])
    for ratio in job["ratios"]:
        orbit = quadratic.one_example(start.output, start.kernel, TARGET, 1 / m, ratio / start.kernel, job["steps"])
        loss = orbit.loss
        ends = (orbit.rate * orbit.kernel_norm[-1]).tolist()
        growth = early_growth(orbit, ratio) if 2 < ratio < 4 else [None] * job["draws"]
        for run, word in enumerate(words(orbit)):
            below = (loss[:, run] < 1e-12).nonzero()
            blown = word == "divergent"
            settled = {"peak": float(loss[:, run].max()) / m, "last": float(loss[-1, run]), "end": ends[run]}
            yield {
                **{"m": m, "ratio": ratio, "run": run, "word": word, "first": float(loss[0, run])},
                **(dict.fromkeys(settled) if blown else settled),
                "steps": int(below[0]) if len(below) else None,
                "growth": growth[run],
                "blown_up": int(loss[:, run].isfinite().sum()) if blown else None,
            }


def early_growth(orbit: quadratic.Orbit, ratio: float) -> list[float | None]:
    """F5: largest relative distance of |r(t+1)/r(t)| from 1 + δ before the loss has reached 1 % of its peak."""
    loss, size = orbit.loss, orbit.residual[..., 0].abs()
    peak, at = loss.max(0)
    times = torch.arange(1, len(loss))[:, None]
    early = (times <= at) & (loss[1:] <= 0.01 * peak)
    gaps = (size[1:] / size[:-1] / (ratio - 1) - 1).abs()
    largest = torch.where(early, gaps, -1.0).amax(0).tolist()
    return [value if value >= 0 else None for value in largest]


def drift(job: Mapping[str, Any]) -> Iterator[Row]:
    """F3: below the critical rate the kernel moves by O(1/(mδ)), and the loss contracts."""
    m = job["m"]
    start = draw_networks(m, job["draws"], job["seed"])
    for ratio in (0.5, 1.0, 1.5):
        orbit = quadratic.one_example(start.output, start.kernel, TARGET, 1 / m, ratio / start.kernel, job["steps"])
        delta = min(ratio, 2 - ratio)
        size = orbit.residual[..., 0].abs()
        seen = size[1:] > 1e-6 * size[0]  # below, the rounding of g − y shows
        factor = torch.where(seen, size[1:] / size[:-1], 0.0).amax(0)
        moved = (orbit.kernel_norm - orbit.kernel_norm[0]).abs().amax(0)
        yield {
            "m": m,
            "ratio": ratio,
            "moved": float(moved.median()),
            "excess": float((factor - (1 - delta)).median()) * m * delta,
            "word": "monotone" if set(words(orbit)) == {"monotone"} else "other",
        }


def equilibria(job: Mapping[str, Any]) -> Iterator[Row]:
    """F7: eigenvalues of the linearised map at (u, v) = (0, v*), against 1 and (1 − v*)²."""
    for v_star in (0.2, 0.8, 1.5, 1.9, 2.1, 3.0):
        point = (torch.zeros((), dtype=torch.float64), torch.tensor(v_star, dtype=torch.float64))
        rows: Any = torch.autograd.functional.jacobian(quadratic.reduced_step, point)
        jacobian = torch.stack([torch.stack(row) for row in rows])
        found = torch.linalg.eigvals(jacobian).real.sort().values
        expected = torch.tensor([1.0, (1 - v_star) ** 2], dtype=torch.float64).sort().values
        yield {"v": v_star, "gap": float((found - expected).abs().max()), "stable": float(found[-1]) <= 1.0}


def scale(job: Mapping[str, Any]) -> Iterator[Row]:
    """F12 and F13: the first kernel lies between 1/2 and 3/2 of its mean."""
    kernel = draw_networks(job["m"], job["draws"], job["seed"]).kernel
    x, y = mixture_1d(64, seed=job["seed"], dtype=torch.float64)
    classes = quadratic.sign_classes(x, y)
    start = draw_networks(job["m"], job["draws"], job["seed"] + 1)
    top = quadratic.class_eigenvalues(start.u, start.v, start.u, classes).amax(-1)
    inside, line_inside = ((each - 1).abs() <= 0.5 for each in (kernel, top / classes.norms.square().max()))
    shares = {"inside": float(inside.double().mean()), "line_inside": float(line_inside.double().mean())}
    yield {"m": job["m"], "mean": float(kernel.mean()), **shares}


def line(job: Mapping[str, Any]) -> Iterator[Row]:
    """F9: catapults along p₁ and p₂. Inputs of one sign are shrunk, which sets λ₂/λ₁ near the square of `shrink`."""
    x, y = mixture_1d(64, seed=job["seed"], dtype=torch.float64)
    y = y - 0.5  # each class then has a residual to catapult from
    for shrink in (0.8, 0.6):
        classes = quadratic.sign_classes(torch.where(x < 0, shrink * x, x), y)
        start = draw_networks(job["m"], job["draws"], job["seed"])
        first = quadratic.class_eigenvalues(start.u, start.v, start.u, classes)
        order = first.argsort(dim=-1, descending=True)
        upper, lower = first.gather(-1, order).unbind(-1)
        for place, rate in _rates_on_the_line(upper, lower).items():
            orbit, _ = quadratic.class_orbit(start.u, start.v, classes, rate, job["steps"])
            found = words(orbit)
            for run in range(job["draws"]):
                pair = [found[2 * run + int(order[run, i])] for i in (0, 1)]
                numbers = {"ratio": float(rate[run] * upper[run]), "gap": float(upper[run] / lower[run])}
                yield {"shrink": shrink, "place": place, "run": run, "word_1": pair[0], "word_2": pair[1], **numbers}


def _rates_on_the_line(upper: Tensor, lower: Tensor) -> dict[str, Tensor]:
    """Between 2/λ₁ and 2/λ₂, and between 2/λ₂ and 4/λ₁ where that exists; else over the whole window of λ₁."""
    if bool((2 / lower < 4 / upper).all()):
        return {"between": 1 / upper + 1 / lower, "above": 1 / lower + 2 / upper}
    return {"low": 2.4 / upper, "middle": 3.0 / upper, "high": 3.8 / upper}


def rank(job: Mapping[str, Any]) -> Iterator[Row]:
    """F10 and F11: eigenvectors, rank and the constant part of the loss, along gradient descent on all points."""
    x, y = mixture_1d(24, seed=job["seed"], dtype=torch.float64)
    classes = quadratic.sign_classes(x, y)
    start = draw_networks(400, 1, job["seed"])
    top = float(quadratic.class_eigenvalues(start.u, start.v, start.u, classes).max())
    for ratio in (1.5, 2.6):
        orbit = quadratic.descend(start.u[0], start.v[0], x, y, ratio / top, 60)
        p = (classes.directions / classes.norms[:, None]).T  # (n, 2)
        image = orbit.kernel @ p
        values = (p * image).sum(-2, keepdim=True)
        largest = values.amax()
        rest = classes.rest(orbit.residual)
        yield {
            "ratio": ratio,
            "eigen_gap": float((image - values * p).abs().max() / largest),
            "third": float(torch.linalg.eigvalsh(orbit.kernel)[..., :-2].abs().max() / largest),
            "rest_gap": float((rest / classes.floor - 1).abs().max()),
        }


def pure(job: Mapping[str, Any]) -> Iterator[Row]:
    """F14: φ = 0, y = 0, Σ² = ‖x‖² I, in the form of two-layer linear networks."""
    m = job["m"]
    generator = torch.Generator().manual_seed(job["seed"])
    a, v = torch.randn(2, job["draws"], m, generator=generator, dtype=torch.float64)  # a = Ux with ‖x‖ = 1
    output, kernel = (a * v).sum(-1) / m**0.5, (a.square() + v.square()).sum(-1) / m
    for ratio in (2.2, 2.6, 3.0, 3.6, 4.2):
        orbit = quadratic.pure_quadratic(output, kernel, m**-0.5, 1.0, ratio / kernel, job["steps"])
        for run, word in enumerate(words(orbit)):
            yield {"m": m, "ratio": ratio, "run": run, "word": word}


def decrease(job: Mapping[str, Any]) -> Iterator[Row]:
    """F15: random (u, v, w) above the threshold; how often the kernel does not fall."""
    generator = torch.Generator().manual_seed(job["seed"])
    count, m = 200_000, 1000.0
    u, v, share, constant = torch.rand(4, count, generator=generator, dtype=torch.float64)
    u, v, constant = 10 ** (4 * u - 4), 4 * v, 0.1 + 3 * constant
    w = (2 * share - 1) * constant * (u / m).sqrt()
    _, after = quadratic.reduced_step(u, v, w)
    corrected = u > 16 * constant**2 / (m * (4 - v) ** 2)
    printed = u > 4 * constant / (m * (4 - v) ** 2)
    yield {
        "tried": int(corrected.sum()),
        "violations": int((corrected & (after >= v)).sum()),
        "printed_violations": int((printed & (after >= v)).sum()),
    }


# What is claimed

CATAPULTS = (2.2, 2.5, 3.0, 3.5, 3.9)
catapults = rows(part="regimes", ratio=CATAPULTS)
at_ten_thousand = rows(part="regimes", m=10_000)
peaks = rows(part="regimes", ratio=2.5).by("m").each(rows.median("peak"))
on_the_line = rows(part="line", ratio=lambda ratio: ratio > 0)
apart = on_the_line(shrink=0.6, gap=lambda gap: gap > 2)
as_predicted = rows(part="equilibria", v=lambda v: not math.isnan(v)).column(lambda row: row["stable"] == (row["v"] < 2))


def share(part: str, word: str, *ratios: float) -> Value:
    """The share of runs with that word, smallest over the ratios (and widths, where there are several)."""
    names = ("ratio",) if part == "linear" else ("m", "ratio")
    return rows(part=part, ratio=ratios).by(*names).each(rows.share(word=word)).min()


def early(m: int) -> Value:
    """F5: largest distance of the growth from 1 + δ over starts and rates with an early phase: half of them at least."""

    def largest(found: list[float | None]) -> float:
        seen = [value for value in found if value is not None]
        if 2 * len(seen) < len(found) or not seen:
            raise ValueError(f"an early phase was seen in {len(seen)} of {len(found)} runs only")
        return max(seen)

    return rows(part="regimes", m=m, ratio=(2.2, 2.5, 3.0))["growth"].reduce(largest)


LINEAR = "F1: a linear model: the residual is that of (I − ηK)ᵗ r(0) (largest distance over the larger of it and the start)"
ENDS_BELOW = "F6: after a catapult the loss is below its start (largest ratio; so F4 defines a catapult: a check of the code)"


class Theorems(InParts, Experiment):
    """Theorems on neural quadratic models: three regimes, a peak that grows with the width, a kernel that ends below 2/η.

    The quadratic model of a two-layer ReLU network is the network with the gates of its start; on one example its gradient
    descent is a map of two numbers, output and kernel, and on points of a line two such maps. F1 to F15: the linear model,
    the exact recursion, drift below the critical rate, catapult between 2/λ and 4/λ, equilibria, divergence, several examples
    on a line, the scale of the first kernel, pure quadratics, and when the kernel falls.
    """

    id, where = "catapult/theorems", "Zhu 2024, sections 3.2 and 3.3, appendix B.3 to B.13"
    parts = {part.__name__: part for part in (linear, exact, regimes, drift, equilibria, scale, line, rank, pure, decrease)}
    sizes = sizes(
        widths=(1000, 10_000, 100_000),
        ratios=(0.5, 1.0, 1.8, 2.2, 2.5, 3.0, 3.5, 3.9, 4.2),
        steps=500,
        drift_draws=100,
        scale_draws=2000,
        exact_steps=200,
        tiny={"drift_widths": (100, 1000, 10_000), "drift_draws": 60, "scale_draws": 1000, "draws": 20, "exact_steps": 60},
        laptop={"drift_widths": (100, 1000, 10_000, 100_000), "draws": 50},
        paper={
            "widths": (1000, 10_000, 100_000, 1_000_000),
            "drift_widths": (100, 1000, 10_000, 100_000, 1_000_000),
            "draws": 100,
        },
    )
    departs = (
        "(3.12) is used without its division by g − y. Proposition B.5.2 needs u > 16C²/(m(4−v)²), not 4C/(m(4−v)²); B.13 has γ "
        "where γ² belongs and leaves out one η; M of Proposition B.11.2 is the larger sum of squares. On a line the two sign "
        "classes are treated as two exact problems of one example, which avoids the slips of B.11 and B.12."
    )
    claims = {
        LINEAR: at_most(1e-8, rows(part="linear").max("gap"), **zhu("r(t+1) = (I − ηK) r(t)", "(3.7)")),
        "F1: it falls at 0.5 and 0.95 of 2/λ (share of runs)": equal(
            1.0, share("linear", "monotone", 1.0, 1.9), **zhu("monotone", "below (3.8)")
        ),
        "F1: it diverges at 1.05 of 2/λ, with no catapult (share of runs)": equal(
            1.0, share("linear", "divergent", 2.1), **zhu("divergence", "below (3.8)")
        ),
        "F2: gradient descent on the gated network follows the recursion: output (largest relative distance of a step)": at_most(
            1e-10, rows(part="exact").max("output_gap"), **zhu("equality", "(3.11)")
        ),
        "F2: the same, kernel": at_most(1e-10, rows(part="exact").max("kernel_gap"), **zhu("equality", "(3.12)")),
        **{
            f"F3: below the critical rate the kernel moves by O(1/m) (exponent), ηλ₀ = {ratio:g}": within(
                0.1, -1.0, rows(part="drift", ratio=ratio).power("m", "moved"), **zhu("O(1/(mδ))", "Theorem B.3.1")
            )
            for ratio in (0.5, 1.0, 1.5)
        },
        "F3: a step contracts the residual by 1 − δ + O(1/(mδ)) (largest excess times mδ, medians)": at_most(
            4.0, rows(part="drift").max("excess"), **zhu("O(1)", "Theorem B.3.1", "theory")
        ),
        "F3: at ηλ₀ = 1, 1.8 no run catapults: all fall monotonically (smallest share)": equal(
            1.0, share("regimes", "monotone", 1.0, 1.8), **zhu("monotone", "Theorem B.3.1")
        ),
        "F4: at ηλ₀ = 2.2, 2.5, 3, 3.5, 3.9 all runs catapult (smallest share)": equal(
            1.0, share("regimes", "catapult", *CATAPULTS), **zhu("catapult", "Theorem 3.3.1")
        ),
        **{
            f"F4: peak of the loss over m at ηλ₀ = 2.5, m = {m}": relative(
                0.2, 0.0134, rows(part="regimes", ratio=2.5, m=m).median("peak"), **zhu("Ω(m δ²/log m)", "Theorem 3.3.1")
            )
            for m in (1000, 10_000, 100_000)
        },
        "F4: the peak is proportional to m: largest peak/m over smallest, ηλ₀ = 2.5": at_most(
            1.25, peaks.max() / peaks.min(), **zhu("Ω(m δ²/log m)", "Theorem 3.3.1")
        ),
        "F5: early growth of |g − y| per step over 1 + δ (largest relative distance), m = 100000": at_most(
            0.05, early(100_000), **zhu("1 + δ − O(δ/log m)", "Lemma 3.3.2")
        ),
        ENDS_BELOW: at_most(1.0, (catapults["last"] / catapults["first"]).max(), **zhu("O(1)", "Lemma 3.3.3")),
        "F7: ηλ after a catapult, smallest (positive by definition: a check of the code)": at_least(
            1e-9, catapults.min("end"), **zhu("above 0", "Theorem 3.3.4")
        ),
        "F7: ηλ after a catapult, largest (descent settles only below 2: a check of the code)": at_most(
            2.0, catapults.max("end"), **zhu("below 2", "Theorem 3.3.4")
        ),
        **{
            f"F7: ηλ at the end of a catapult at ηλ₀ = {ratio:g}, m = 10000": within(
                0.05, value, at_ten_thousand(ratio=ratio).median("end"), **zhu("between 0 and 2", "Theorem 3.3.4")
            )
            for ratio, value in ((2.2, 1.77), (2.5, 1.28))
        },
        (
            "F7: the map linearised at (0, v*) has the eigenvalues 1 and (1 − v*)² "
            "(largest distance; algebra: a check of the code)"
        ): at_most(1e-12, rows(part="equilibria").max("gap"), **zhu("stable for v* in (0, 2)", "Theorem 3.3.4", "theory")),
        "F7: equilibria are stable below v* = 2 and unstable above (algebra: a check of the code)": equal(
            True, as_predicted.reduce(all), **zhu("λ in [ε, 2/η − ε]", "Theorem 3.3.4")
        ),
        "F8: at ηλ₀ = 4.2 all runs diverge (smallest share)": equal(
            1.0, share("regimes", "divergent", 4.2), **zhu("divergence", "Theorem B.7.1")
        ),
        "F9: between 2/λ₁ and 2/λ₂ the catapult is along p₁ only (share of networks)": equal(
            1.0, on_the_line(place="between").share(word_1="catapult", word_2="monotone"), **zhu("only p₁", "Theorem 3.3.6")
        ),
        "F9: between 2/λ₂ and 4/λ₁ it is along both (share of networks)": equal(
            1.0, on_the_line(place="above").share(word_1="catapult", word_2="catapult"), **zhu("p₁ and p₂", "Theorem 3.3.6")
        ),
        "F9: where 2/λ₂ > 4/λ₁ it is never along p₂ (share of runs along p₁ only)": equal(
            1.0, apart.share(word_1="catapult", word_2="monotone"), **zhu("only p₁", "before Theorem 3.3.6", "theory")
        ),
        "F10: p₁ and p₂ stay eigenvectors of the kernel (largest residual)": at_most(
            1e-10, rows(part="rank").max("eigen_gap"), **zhu("eigenvectors for all t", "Proposition B.11.1")
        ),
        "F10: the kernel has rank two (third eigenvalue over the first)": at_most(
            1e-10, rows(part="rank").max("third"), **zhu("rank at most 2", "Proposition B.11.1")
        ),
        "F11: the loss off p₁ and p₂ does not change (largest relative change)": at_most(
            1e-10, rows(part="rank").max("rest_gap"), **zhu("constant", "Proposition B.11.3")
        ),
        "F12: λ(0) lies within a half of ‖x‖²/d, m = 50 (share of draws)": at_least(
            0.97, rows(part="scale", m=50).only("inside"), **zhu("with high probability", "Proposition B.9.1")
        ),
        "F12: the same, m = 200": equal(
            1.0, rows(part="scale", m=200).only("inside"), **zhu("with high probability", "Proposition B.9.1")
        ),
        "F13: the largest eigenvalue lies within a half of M, m = 200 (share of draws)": equal(
            1.0, rows(part="scale", m=200).only("line_inside"), **zhu("with high probability", "Proposition B.11.2")
        ),
        "F14: pure quadratics catapult at ηλ₀ = 2.2, 2.6, 3, 3.6 (smallest share)": equal(
            1.0, share("pure", "catapult", 2.2, 2.6, 3.0, 3.6), **zhu("catapult", "Proposition B.13.1")
        ),
        "F15: above the corrected threshold the kernel falls (violations)": equal(
            0, rows(part="decrease").max("violations"), **zhu(0, "Proposition B.5.2, corrected", "theory")
        ),
        "F15: the printed threshold is not enough (violations)": at_least(
            1, rows(part="decrease").max("printed_violations"), **zhu(0, "Proposition B.5.2")
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for part in ("equilibria", "decrease", "rank"):
            yield {"part": part, "seed": 0}
        yield {"part": "linear", "steps": 400, "seed": 0}
        yield {"part": "exact", "m": 1000, "steps": p.exact_steps, "seed": 0}
        yield from grid(p, "draws", "ratios", "steps", part=["regimes"], m=p.widths, seed=[0])
        yield from grid(p.but(draws=p.drift_draws, steps=200), "draws", "steps", part=["drift"], m=p.drift_widths, seed=[0])
        yield from grid(p.but(draws=p.scale_draws), "draws", part=["scale"], m=(10, 50, 200), seed=[0])
        for part in ("line", "pure"):
            yield {"part": part, "m": 10_000, "draws": min(p.draws, 20), "steps": p.steps, "seed": 0}

    def draw(self, rows: list[Row]) -> Any:
        settled = labelled(select(rows, part="regimes", peak=lambda peak: peak is not None), width="m = {m:,}")
        risen, done = select(settled, ratio=lambda ratio: ratio > 2), select(settled, steps=lambda steps: steps is not None)
        drift = labelled(select(rows, part="drift"), start="ηλ₀ = {ratio:g}")
        against_rate = partial(curves, by="width", band="quantiles", labels="legend", xlabel="ηλ₀")
        ends = against_rate(settled, "ratio", "end", ylabel="ηλ at the end").legend(loc="lower left")
        return draw_panels(
            against_rate(risen, "ratio", "peak", log="y", ylabel="peak loss / m"),
            ends.line(y=2.0, label="2: critical").line(x=2.0),
            log_log(drift, "m", "moved", by="start", xlabel="width m", ylabel="largest change of λ, median"),
            against_rate(done, "ratio", "steps", log="y", ylabel="steps to a loss of 1e-12"),
            size=(4.4, 3.2),
        )
