"""Does descent on the step size find the best one for random least-squares tasks, by the log loss and by the loss itself?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes, within
from theodolite.experiments.lab.panels import Panel, curves, draw_panels
from theodolite.experiments.query import Column, Value, select
from theodolite.experiments.step_size import paper
from theodolite.experiments.study import InParts, grid
from theodolite.measures.stepsize.quadratics.least_squares import diagonalise, draw_tasks
from theodolite.results import Row


def log_objective(fit: Fitted, rates: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(1/t) log` of the mean loss at w_t and its derivative in the rate, both (E,), in a form that never overflows.

    With s = max(1, max |1 − ηλ|) residuals and their derivatives are divided by sᵗ, which the logarithm gives back; tasks are
    weighted by their share of the sum of losses.
    """
    z = 1 - rates[:, None] * fit.eigenvalues[:, None]  # (m, E, r)
    s = z.abs().amax(-1, keepdim=True).clamp(min=1)
    q = z / s
    residual = fit.rest[:, None] * s**-steps + (fit.weights[:, None] * q**steps) @ fit.samples.mT  # (m, E, n)
    slope = -steps / s * ((fit.weights * fit.eigenvalues)[:, None] * q ** (steps - 1)) @ fit.samples.mT
    squares = residual.square().mean(-1)
    values = 2 * steps * s[..., 0].log() + (0.5 * squares).log()
    slopes = 2 * (residual * slope).mean(-1) / squares
    share = values.softmax(0)
    return (values.logsumexp(0) - math.log(len(values))) / steps, (share * slopes).sum(0) / steps


def last_objective(fit: Fitted, rates: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss at the last step and its derivative, which explode and vanish with the number of steps."""
    z = 1 - rates[:, None] * fit.eigenvalues[:, None]
    residual = fit.rest[:, None] + (fit.weights[:, None] * z**steps) @ fit.samples.mT
    slope = -steps * ((fit.weights * fit.eigenvalues)[:, None] * z ** (steps - 1)) @ fit.samples.mT
    return 0.5 * residual.square().mean(-1).mean(0), (residual * slope).mean(-1).mean(0)


OBJECTIVES = {"log": log_objective, "last": last_objective}
#: How panels call them.
TITLES = {"log": "log of the loss", "last": "the loss itself"}


class Fitted(NamedTuple):
    """Tasks as the objectives see them: the residuals of samples that judge are `rest + samples (weights (1 − ηλ)ᵗ)`."""

    eigenvalues: torch.Tensor  # (m, r)
    weights: torch.Tensor  # (m, r), those that fit the training samples
    samples: torch.Tensor  # (m, n, r), −1 times the samples that judge, along the eigenvectors
    rest: torch.Tensor  # (m, n), what such weights leave of their targets


def fitted(dim: int, samples: int, tasks: int, sigma: float, judged_by: str, seed: int) -> Fitted:
    """Random tasks, trained with all samples and judged by them, or with half of them and judged by the others."""
    drawn = draw_tasks(dim, samples, tasks, seed=seed)
    half = samples // 2
    training = drawn if judged_by == "train" else drawn.part(slice(half))
    judging = drawn if judged_by == "train" else drawn.part(slice(half, None))
    eigen = diagonalise(training)
    weights = eigen.fit(torch.tensor([sigma], dtype=torch.float64))[:, 0]
    targets = (judging.x @ judging.true[..., None])[..., 0] + sigma * judging.noise
    along = eigen.weights(torch.eye(weights.shape[1], dtype=torch.float64).expand(tasks, -1, -1))  # (m, r, d): the eigenvectors
    seen = judging.x @ along.mT
    return Fitted(eigen.eigenvalues, weights, -seen, (seen @ weights[..., None])[..., 0] - targets)


def descend_on_rate(fit: Fitted, objective: str, starts: list[float], steps: int, updates: int, a: float) -> torch.Tensor:
    """Rates (updates + 1, E) of `η ← max(0, η − a/√k F′(η))`; NaN from where the derivative is not finite."""
    rate = torch.tensor(starts, dtype=torch.float64)
    path = [rate]
    for k in range(1, updates + 1):
        rate = (rate - a / math.sqrt(k) * OBJECTIVES[objective](fit, rate, steps)[1]).clamp(min=0)  # NaN stays NaN
        path.append(rate)
    return torch.stack(path)


#: Name -> samples per weight, and what judges.
SETTINGS = {"train, n < d": (0.5, "train"), "train, n > d": (4.0, "train"), "valid, n < d": (1.0, "valid")}
STARTS = [0.001, 0.01, 0.1, 1.0]


def descent(job: Mapping[str, Any]) -> Iterator[Row]:
    """The objective over rates, and descent on the rate from each start."""
    ratio, judge = SETTINGS[job["setting"]]
    fit = fitted(job["dim"], round(ratio * job["dim"]), job["tasks"], job["sigma"], judge, job["seed"])
    shared = {"setting": job["setting"], "objective": job["objective"]}
    rates = torch.logspace(-5, 0, job["grid"], dtype=torch.float64)
    values, slopes = _in_parts(fit, job["objective"], rates, job["steps"])
    turns = int((slopes[1:].sign() != slopes[:-1].sign()).sum())
    optimum, lowest = float(rates[int(values.argmin())]), float(values.min())
    span = float(slopes.abs().max() / slopes[0].abs())
    yield {**shared, "kind": "shape", "best": optimum, "turns": turns, "span": span}
    paths = descend_on_rate(fit, job["objective"], STARTS, job["steps"], job["updates"], job["a"])
    for start, path in zip(STARTS, paths.T, strict=True):
        off = (path[-100:] / optimum - 1).abs()
        last = job["steps"] * float(log_objective(fit, path[-100:].median(dim=0, keepdim=True).values, job["steps"])[0])
        excess = math.expm1(last - (job["steps"] * lowest if job["objective"] == "log" else math.log(lowest)))
        found = {"end": float(path[-1]), "median_off": float(off.median()), "largest_off": float(off.max()), "excess": excess}
        yield {**shared, "kind": "end", "start": start, **found, "converges": found["median_off"] < 0.05, "as_low": excess < 0.01}
        shown = [*range(0, 100, 2), *range(100, len(path), 25)]
        yield from ({**shared, "kind": "path", "start": start, "update": k, "rate": float(path[k])} for k in shown)


def _in_parts(fit: Fitted, objective: str, rates: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective at many rates, a few at a time."""
    width = max(1, 2**22 // fit.rest.numel())
    values, slopes = zip(*(OBJECTIVES[objective](fit, some, steps) for some in rates.split(width)), strict=True)
    return torch.cat(values), torch.cat(slopes)


def start_overlap(job: Mapping[str, Any]) -> Iterator[Row]:
    """The smaller overlap of a random start with the two extreme eigenvectors, and the extreme eigenvalues of XXᵀ, X d × 2d."""
    for d in job["dims"]:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(job["seed"] + d), dtype=torch.float64)
        x, w = normal(job["draws"], d, 2 * d), normal(job["draws"], d)
        lam, vectors = torch.linalg.eigh(x @ x.mT)
        start = w / w.norm(dim=1, keepdim=True)
        overlaps = (start[:, None] @ vectors[:, :, [0, -1]])[:, 0].abs().amin(1)
        gaps = lam[:, -1] - lam[:, 0]
        yield {
            "d": d,
            "overlap": float(overlaps.median()),
            "alpha": float(lam[:, 0].median()),
            "gap": float(gaps.median()),
            "often": float(((overlaps >= 0.1 / d**0.5) & (lam[:, 0] >= 0.1 * d) & (gaps >= d)).double().mean()),
        }


class LogObjective(InParts):
    """Descent on the step size of random least-squares tasks by the derivative of the log loss, and of the loss itself."""

    sizes = sizes(
        {
            "dim": (20, 100, 200),
            "tasks": (8, 30, 100),
            "dims": ([16, 32, 64], [16, 32, 64, 128], [16, 32, 64, 128, 256]),
            "draws": (150, 400, 1000),
        },
        updates=1000,
        steps=40,
        sigma=2.0,
        a=0.01,
        grid=800,
    )
    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]]] = {"descent": descent, "start": start_overlap}

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        named = ("dim", "tasks", "updates", "steps", "sigma", "a", "grid")
        yield from grid(p, *named, part=["descent"], setting=SETTINGS, objective=OBJECTIVES, seed=[0])
        yield from grid(p, "dims", "draws", part=["start"], seed=[0])


ends, shape, start = rows(kind="end"), rows(kind="shape"), rows(part="start")


class LogLeastSquares(Figure):
    """The log loss as objective on random least-squares tasks: does descent on the step size converge?

    The source proves it for one quadratic and leaves least squares open. Steps of 1/(100√k), 1,000 of them, from four rates; it
    converges where the median of the last hundred rates is within 5 % of the best one; where the loss hardly depends on the rate
    it may be as low without. The mean loss itself as objective stands beside it, and so do two statements on the random start and
    the curvature of the quadratic.
    """

    study, id, where = LogObjective(), "step-size/log-least-squares", "Wang et al. 2021, sections 3 and 6"
    departs = "The logarithm of the mean over tasks, as the source suggests. The criterion of convergence is ours: it has none."
    claims = {
        **{
            f"{setting}: the derivative of the log loss changes sign once (changes)": equal(
                1,
                shape(setting=setting, objective="log").only("turns"),
                says="one, for a single quadratic",
                where="Wang et al. 2021, Theorem 4",
            )
            for setting in SETTINGS
        },
        **{
            f"{setting}: starts from which the log loss leads to its best rate (of {len(STARTS)})": measured(
                ends(setting=setting, objective="log").count(converges=True), says="open"
            )
            for setting in SETTINGS
        },
        **{
            f"{setting}: starts from which it leads to a loss within 1 % of the lowest (of {len(STARTS)})": measured(
                ends(setting=setting, objective="log").count(as_low=True)
            )
            for setting in SETTINGS
        },
        **{
            f"{setting}: the loss itself leads to its best rate (of {len(STARTS)})": measured(
                ends(setting=setting, objective="last").count(converges=True), says="explodes or vanishes"
            )
            for setting in SETTINGS
        },
        "with the log loss every rate stays finite (largest)": at_most(1e3, ends(objective="log").max("end")),
        "the derivative of the loss grows over rates by far more than that of its log (least ratio of the two)": at_least(
            1e6,
            Value(lambda table: min(_spans(table))),
            **paper("exponential against polynomial", "Theorems 3, 4"),
        ),
        "both have the same best rate (largest distance of a ratio from 1)": at_most(
            0.0,
            Column.of(
                *(
                    abs(shape(setting=s, objective="log").only("best") / shape(setting=s, objective="last").only("best") - 1)
                    for s in SETTINGS
                )
            ).max(),
            says="the logarithm does not change the minimizer",
            where="Wang et al. 2021, section 6",
        ),
        "a random start overlaps the extreme eigenvectors by 1/√d (exponent of the median)": within(
            0.15, -0.5, start.power("d", "overlap"), **paper("Ω(1/√d)", "section 3")
        ),
        "the smallest eigenvalue of XXᵀ, X d × 2d, is of order d (least median of α/d, (√2 − 1)² in the limit)": at_least(
            0.15, start.column(lambda row: row["alpha"] / row["d"]).min(), **paper("Ω(d)", "section 3")
        ),
        "and so is the distance to the largest (least median of (L − α)/d, 4√2 in the limit)": at_least(
            4.0, start.column(lambda row: row["gap"] / row["d"]).min(), **paper("Ω(d)", "section 3")
        ),
        "all three at once with constant probability: overlap ≥ 0.1/√d, α ≥ 0.1 d, L − α ≥ d (smallest share)": at_least(
            0.5, start.min("often"), **paper("constant probability", "section 3")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        pairs = [(objective, setting) for objective in OBJECTIVES for setting in SETTINGS]
        return draw_panels(*(_paths(rows, *pair) for pair in pairs), columns=len(SETTINGS), size=(3.8, 2.8))


def _paths(table: list[Row], objective: str, setting: str) -> Panel:
    """The rates along the descent, beside the best one."""
    here: dict[str, Any] = {"objective": objective, "setting": setting}
    look: dict[str, Any] = {"by": "start", "ylabel": "step size η", "xlabel": "update", "markers": False, "log": "y"}
    best_rate = select(table, kind="shape", **here)[0]["best"]
    panel: Panel = curves(select(table, kind="path", **here), "update", "rate", **look, title=f"{TITLES[objective]}: {setting}")
    return panel.line(y=best_rate, label="best")


def _spans(table: list[Row]) -> list[float]:
    """How much farther the derivative of the loss grows over the rates, in each setting."""
    spans = {(row["setting"], row["objective"]): row["span"] for row in select(table, kind="shape")}
    return [spans[setting, "last"] / spans[setting, "log"] for setting in SETTINGS]
