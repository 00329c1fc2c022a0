"""The computations behind the theorems on neural quadratic models, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from theodolite.data.generators import mixture_1d
from theodolite.experiments.catapult.starts import draw, words
from theodolite.measures.dynamics import classify_run
from theodolite.measures.quadratic_models import (
    Orbit,
    class_eigenvalues,
    class_orbit,
    descend,
    one_example,
    one_example_step,
    pure_quadratic,
    reduced_step,
    sign_classes,
)
from theodolite.results import Row

#: Target of the one example.
TARGET = 1.0


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
    start = draw(job["m"], 3, job["seed"], d=5)
    y = torch.tensor([TARGET], dtype=torch.float64)
    for ratio in (1.5, 2.5, 3.5):
        found = descend(start.u, start.v, start.x, y, ratio / start.kernel, job["steps"])
        g, kernel = found.output[..., 0], found.kernel_norm
        after, next_kernel = one_example_step(g[:-1], kernel[:-1], TARGET, 1 / job["m"], found.rate)
        size = torch.maximum(g.abs(), torch.ones_like(g))[1:]
        yield {
            "ratio": ratio,
            "output_gap": float(((after - g[1:]) / size).abs().max()),
            "kernel_gap": float(((next_kernel - kernel[1:]) / kernel[1:]).abs().max()),
        }


def regimes(job: Mapping[str, Any]) -> Iterator[Row]:
    """F4 to F8: what many networks do over the learning rates."""
    m = job["m"]
    start = draw(m, job["draws"], job["seed"])
    for ratio in job["ratios"]:
        orbit = one_example(start.output, start.kernel, TARGET, 1 / m, ratio / start.kernel, job["steps"])
        loss = orbit.loss
        ends = (orbit.rate * orbit.kernel_norm[-1]).tolist()
        growth = early_growth(orbit, ratio) if 2 < ratio < 4 else [None] * job["draws"]
        for run, word in enumerate(words(orbit)):
            below = (loss[:, run] < 1e-12).nonzero()
            blown = word == "divergent"
            yield {
                "m": m,
                "ratio": ratio,
                "run": run,
                "word": word,
                "peak": None if blown else float(loss[:, run].max()) / m,
                "first": float(loss[0, run]),
                "last": None if blown else float(loss[-1, run]),
                "end": None if blown else ends[run],
                "steps": int(below[0]) if len(below) else None,
                "growth": growth[run],
                "blown_up": int(loss[:, run].isfinite().sum()) if blown else None,
            }


def early_growth(orbit: Orbit, ratio: float) -> list[float | None]:
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
    start = draw(m, job["draws"], job["seed"])
    for ratio in (0.5, 1.0, 1.5):
        orbit = one_example(start.output, start.kernel, TARGET, 1 / m, ratio / start.kernel, job["steps"])
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
        rows: Any = torch.autograd.functional.jacobian(reduced_step, point)
        jacobian = torch.stack([torch.stack(row) for row in rows])
        found = torch.linalg.eigvals(jacobian).real.sort().values
        expected = torch.tensor([1.0, (1 - v_star) ** 2], dtype=torch.float64).sort().values
        yield {"v": v_star, "gap": float((found - expected).abs().max()), "stable": float(found[-1]) <= 1.0}


def scale(job: Mapping[str, Any]) -> Iterator[Row]:
    """F12 and F13: the first kernel lies between 1/2 and 3/2 of its mean."""
    kernel = draw(job["m"], job["draws"], job["seed"]).kernel
    x, y = mixture_1d(64, seed=job["seed"], dtype=torch.float64)
    classes = sign_classes(x, y)
    start = draw(job["m"], job["draws"], job["seed"] + 1)
    top = class_eigenvalues(start.u, start.v, start.u, classes).amax(-1)
    yield {
        "m": job["m"],
        "inside": _inside(kernel, 1.0),
        "mean": float(kernel.mean()),
        "line_inside": _inside(top, float(classes.norms.square().max())),
    }


def _inside(values: Tensor, middle: float) -> float:
    return float(((values >= 0.5 * middle) & (values <= 1.5 * middle)).double().mean())


def line(job: Mapping[str, Any]) -> Iterator[Row]:
    """F9: catapults along p₁ and p₂. Inputs of one sign are shrunk, which sets λ₂/λ₁ near the square of `shrink`."""
    x, y = mixture_1d(64, seed=job["seed"], dtype=torch.float64)
    y = y - 0.5  # each class then has a residual to catapult from
    for shrink in (0.8, 0.6):
        classes = sign_classes(torch.where(x < 0, shrink * x, x), y)
        start = draw(job["m"], job["draws"], job["seed"])
        first = class_eigenvalues(start.u, start.v, start.u, classes)
        order = first.argsort(dim=-1, descending=True)
        upper, lower = first.gather(-1, order).unbind(-1)
        for place, rate in _rates_on_the_line(upper, lower).items():
            orbit, _ = class_orbit(start.u, start.v, classes, rate, job["steps"])
            found = words(orbit)
            for run in range(job["draws"]):
                pair = [found[2 * run + int(order[run, i])] for i in (0, 1)]
                yield {
                    "shrink": shrink,
                    "place": place,
                    "run": run,
                    "word_1": pair[0],
                    "word_2": pair[1],
                    "ratio": float(rate[run] * upper[run]),
                    "gap": float(upper[run] / lower[run]),
                }


def _rates_on_the_line(upper: Tensor, lower: Tensor) -> dict[str, Tensor]:
    """Between 2/λ₁ and 2/λ₂, and between 2/λ₂ and 4/λ₁ where that exists; else over the whole window of λ₁."""
    if bool((2 / lower < 4 / upper).all()):
        return {"between": 1 / upper + 1 / lower, "above": 1 / lower + 2 / upper}
    return {"low": 2.4 / upper, "middle": 3.0 / upper, "high": 3.8 / upper}


def rank(job: Mapping[str, Any]) -> Iterator[Row]:
    """F10 and F11: eigenvectors, rank and the constant part of the loss, along gradient descent on all points."""
    x, y = mixture_1d(24, seed=job["seed"], dtype=torch.float64)
    classes = sign_classes(x, y)
    start = draw(400, 1, job["seed"])
    top = float(class_eigenvalues(start.u, start.v, start.u, classes).max())
    for ratio in (1.5, 2.6):
        orbit = descend(start.u[0], start.v[0], x, y, ratio / top, 60)
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
        orbit = pure_quadratic(output, kernel, m**-0.5, 1.0, ratio / kernel, job["steps"])
        for run, word in enumerate(words(orbit)):
            yield {"m": m, "ratio": ratio, "run": run, "word": word}


def decrease(job: Mapping[str, Any]) -> Iterator[Row]:
    """F15: random (u, v, w) above the threshold; how often the kernel does not fall."""
    generator = torch.Generator().manual_seed(job["seed"])
    count, m = 200_000, 1000.0
    u, v, share, constant = torch.rand(4, count, generator=generator, dtype=torch.float64)
    u, v, constant = 10 ** (4 * u - 4), 4 * v, 0.1 + 3 * constant
    w = (2 * share - 1) * constant * (u / m).sqrt()
    _, after = reduced_step(u, v, w)
    corrected = u > 16 * constant**2 / (m * (4 - v) ** 2)
    printed = u > 4 * constant / (m * (4 - v) ** 2)
    yield {
        "tried": int(corrected.sum()),
        "violations": int((corrected & (after >= v)).sum()),
        "printed_violations": int((printed & (after >= v)).sum()),
    }
