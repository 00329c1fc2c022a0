"""Step sizes for random least-squares tasks: the training loss chooses rates that fit noise, held-out samples do not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes, within
from theodolite.experiments.claims import Reported
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Column, Query, Value, select, split
from theodolite.experiments.study import Study, grid
from theodolite.measures.stepsize import least_squares_curves, least_squares_scores, population_risk
from theodolite.measures.stepsize.least_squares import RATES, diagonalise, draw_tasks
from theodolite.results import Row

#: What the rows call the two ways to choose.
NAMES = {"train": "train-by-train", "valid": "train-by-validation"}
#: The constant of the grid at which descent on half as many samples as weights is still stable: 10^(-1/2).
STABLE = RATES[22]


class RandomTasks(Study):
    """The best rate of a grid for 40 steps, by each of the two mean losses, and what it does on ten new tasks."""

    sizes = sizes(
        steps=40,
        tests=10,
        tiny={"dim": 100, "samples": [50, 100, 200, 400, 1000], "sigmas": [1.0, 2.0, 4.0], "tasks": [60, 40, 40, 40, 40]},
        laptop={
            "dim": 400,
            "samples": [200, 400, 800, 1600, 4000],
            "sigmas": [1.0, 2.0, 3.0, 4.0, 5.0],
            "tasks": [300, 100, 100, 100, 30],
        },
        paper={
            "dim": 1000,
            "samples": [500, 1000, 2000, 4000, 5000, 7500, 10_000],
            "sigmas": [1.0, 2.0, 3.0, 4.0, 5.0],
            "tasks": [300, 300, 100, 100, 100, 100, 30],
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for samples, tasks in zip(p.samples, p.tasks, strict=True):
            few = samples == p.samples[0]  # the noise varies there alone
            sigmas = list(p.sigmas) if few else [1.0]
            yield {
                "dim": p.dim,
                "samples": samples,
                "sigmas": sigmas,
                "tasks": tasks,
                "steps": p.steps,
                "tests": p.tests,
                "seed": 0,
            }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        dim, samples, steps = job["dim"], job["samples"], job["steps"]
        shared = {"dim": dim, "samples": samples, "seed": job["seed"]}
        found = least_squares_curves(
            dim, samples, sigmas=job["sigmas"], steps=steps, tasks=job["tasks"], seed=job["seed"], progress=False
        )
        yield from ({**shared, "kind": "curve", **row} for row in found.rows())
        spectra = {n: _spectra(dim, n, job["seed"] + 2) for n in (samples, found.train_samples)}
        for sigma, by_train, by_valid in zip(found.sigmas, *found.best.tolist(), strict=True):
            best = {"train": by_train, "valid": by_valid}
            predicted = {
                "train": _best_of_grid(spectra[samples], steps, dim, samples, sigma)["train"],
                "valid": _best_of_grid(spectra[found.train_samples], steps, dim, found.train_samples, sigma)["valid"],
            }
            for name, rate in best.items():
                risk = population_risk(spectra[samples], [rate], steps, dim=dim, samples=samples, sigma=sigma)
                formula = {"train": float(risk.train_rmse().mean()), "test": float(risk.test_rmse(sigma).mean())}
                chosen = {"rate": rate, "rate_formula": predicted[name], **{f"{of}_formula": v for of, v in formula.items()}}
                yield {**shared, "kind": "best", "sigma": sigma, "split": name, **chosen}
            yield from self._tests(job, sigma, best, shared, found.train_samples)

    def _tests(self, job: Mapping[str, Any], sigma: float, best: Mapping[str, float], shared: Row, part: int) -> Iterator[Row]:
        """Errors on new tasks, trained with all samples; at the validated rate also with as many as when it was chosen."""
        given: dict[str, Any] = {"sigma": sigma, "steps": job["steps"], "tasks": job["tests"], "seed": job["seed"] + 1}
        for trained_on, n, names in (("all", job["samples"], list(best)), ("part", part, ["valid"])):
            scores = least_squares_scores(job["dim"], n, [best[name] for name in names], **given)
            for name, train, test in zip(names, scores.train_rmse.tolist(), scores.test_rmse.tolist(), strict=True):
                for k, errors in enumerate(zip(train, test, strict=True)):
                    row = {"kind": "test", "sigma": sigma, "split": name, "trained_on": trained_on, "task": k, "rate": best[name]}
                    yield {**shared, **row, **dict(zip(("train_rmse", "test_rmse"), errors, strict=True))}


def _spectra(dim: int, samples: int, seed: int, draws: int = 2) -> torch.Tensor:
    """Eigenvalues of a few tasks: (draws, min(n, d))."""
    return diagonalise(draw_tasks(dim, samples, draws, seed=seed)).eigenvalues


def _best_of_grid(spectra: torch.Tensor, steps: int, dim: int, samples: int, sigma: float) -> dict[str, float]:
    """The rates of the grid that the formulas would choose."""
    risk = population_risk(spectra, RATES, steps, dim=dim, samples=samples, sigma=sigma)
    return {name: RATES[int(values.mean(0).argmin())] for name, values in (("train", risk.train_loss), ("valid", risk.error))}


# What both figures measure

best, tests = rows(kind="best"), rows(kind="test", trained_on="all")
curve = rows(kind="curve")
#: The formulas are ours: the source shows curves without numbers.
FORMULA = "the mean over w* and the noise for given eigenvalues, not in the source"


def formula(value: Any) -> dict[str, Any]:
    """Keywords of a claim on what the exact means say."""
    return {"reported": Reported(value, FORMULA, "theory")}


def few(row: Row) -> bool:
    """Whether there are half as many samples as weights."""
    return bool(2 * row["samples"] == row["dim"])


def gaps(table: list[Row], by: str) -> dict[float, float]:
    """Mean test error by training samples minus that by held-out ones, for each noise or number of samples."""
    means = {
        key: {name: statistics.fmean(row["test_rmse"] for row in group) for name, group in split(part, "split").items()}
        for key, part in sorted(split(table, by).items())
    }
    return {key: value["train"] - value["valid"] for key, value in means.items()}


def off_formula(query: Query, name: str, column: str) -> Value:
    """The largest distance of a mean error from the formula, in σ."""

    def measure(table: list[Row]) -> float:
        expected = {(row["samples"], row["sigma"]): row[f"{column}_formula"] for row in select(table, kind="best", split=name)}
        found = split(select(table, kind="test", trained_on="all", split=name), "samples", "sigma")
        return max(abs(statistics.fmean(r[f"{column}_rmse"] for r in found[key]) - expected[key]) / key[1] for key in found)

    return query.measure(measure)


def grid_steps_apart(query: Query) -> Value:
    """By how many steps of the grid the rates found are off those of the formulas, the most."""
    return query.column(lambda row: abs(4 * math.log10(row["rate"] / row["rate_formula"]))).max()


# Figure 3

noisy = rows.where(few)
noise_gaps = noisy(kind="test", trained_on="all").measure(gaps, "sigma")
noise_best = noisy(kind="best")


class Figure3(Figure):
    """Chosen by the training loss the rate fits the noise at every noise level; chosen by held-out samples it does not.

    Half as many samples as weights, 40 steps of descent, 25 rates from 1e-6 to 1. Means and ranges over ten new tasks, trained
    with all samples. The same tasks judge every rate.
    """

    study, item = RandomTasks(), "step-size-2021 Figure 3"
    only = staticmethod(lambda job: 2 * job["samples"] == job["dim"])
    view = rows.where(few)
    departs = (
        "The source names no values of σ: 1 to 5 (1, 2 and 4 at the smallest size). All rates are judged by the same tasks; "
        "an author's code draws new ones for each. A run that diverges is frozen along its own direction: along one that the "
        "samples do not see, as the text allows, it would count as a run that never moved."
    )
    claims = {
        "train-by-train interpolates: its training error over σ (largest mean)": at_most(
            0.02,
            noisy(kind="test", trained_on="all", split="train")
            .by("sigma")
            .each(rows.column(lambda row: row["train_rmse"] / row["sigma"]).mean())
            .max(),
            **formula("0.011 to 0.012 (d = 1000)"),
        ),
        "and overfits at every σ: test error above that of train-by-validation (least gap)": at_least(
            0.1, noise_gaps.then(lambda gap: min(gap.values())), says="overfits easily"
        ),
        "the gap grows with σ (least growth per unit of σ)": at_least(
            0.2, noise_gaps.then(lambda gap: min(_slopes(gap))), says="the difference becomes more significant"
        ),
        "at σ = 4 the gap is far beyond that": at_least(1.0, noise_gaps.then(lambda gap: gap[4.0]), **formula(1.549)),
        "train-by-validation does not overfit: at σ = 1 it beats predicting 0 (test error minus √2)": at_most(
            -0.02,
            noisy(kind="test", trained_on="all", split="valid", sigma=1.0).mean("test_rmse") - math.sqrt(2),
            **formula(-0.073),
        ),
        "nor does it at any σ (largest test error over that of predicting 0)": at_most(
            1.02,
            noisy(kind="test", trained_on="all", split="valid")
            .by("sigma")
            .each(rows.column(lambda row: row["test_rmse"] / math.sqrt(1 + row["sigma"] ** 2)).mean())
            .max(),
            says="does not overfit",
        ),
        "train-by-train's rate is the largest of the grid that is stable, at every σ": equal(
            [round(STABLE, 3)],
            noise_best(split="train")["rate"].reduce(lambda found: sorted({round(rate, 3) for rate in found})),
            **formula([0.316]),
        ),
        "train-by-validation's is that of the formula within a factor of about 3 (steps of the grid, 4 a decade)": at_most(
            2.01, grid_steps_apart(noise_best(split="valid")), **formula(0)
        ),
        "and falls with σ (ratio of the rates at the smallest and the largest σ)": at_least(
            3.0,
            noise_best(split="valid").measure(lambda table: _first_over_last(table)),
            **formula("5.6e-3 at σ = 1, 1.8e-4 at σ = 5"),
        ),
        "test errors of train-by-validation are those of the formula (largest distance, in σ)": at_most(
            0.1, off_formula(noisy, "valid", "test"), **formula("1.341, 2.223, 3.157, 4.121, 5.098 (d = 1000)")
        ),
        "so are those of train-by-train": at_most(
            0.1, off_formula(noisy, "train", "test"), **formula("1.574, 2.901, 4.278, 5.670, 7.068 (d = 1000)")
        ),
        "at rate 1 every run diverges and is truncated (share)": equal(1.0, noisy(kind="curve", rate=1.0).min("truncated")),
        "up to rate 0.1 none is": equal(0.0, noisy(kind="curve", rate=lambda rate: rate < 0.11).max("truncated")),
        "how many times higher train-by-train's rate is (largest)": measured(
            (noise_best(split="train")["rate"] / noise_best(split="valid")["rate"]).max()
        ),
        "trained with the half that the rate was chosen with, train-by-validation's test error (σ = 1)": measured(
            noisy(kind="test", trained_on="part", sigma=1.0).mean("test_rmse"), **formula(1.374)
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        return _errors(rows, "sigma", "noise σ", rows)


def _slopes(gap: Mapping[float, float]) -> list[float]:
    keys = sorted(gap)
    return [(gap[b] - gap[a]) / (b - a) for a, b in pairwise(keys)]


def _first_over_last(table: list[Row]) -> float:
    ordered = sorted(table, key=lambda row: row["sigma"])
    return float(ordered[0]["rate"] / ordered[-1]["rate"])


def _errors(table: list[Row], x: str, xlabel: str, curve_rows: list[Row]) -> Any:
    """Errors against noise or samples, beside the mean losses over rates."""
    shown = [{**row, "chosen by": NAMES[row["split"]]} for row in select(table, kind="test", trained_on="all")]
    look: dict[str, Any] = {"by": "chosen by", "band": "range", "xlabel": xlabel, "labels": "legend"}
    losses = [
        {**row, "of": f"{row['split']}, {x} {row[x]:g}"} for row in select(curve_rows, kind="curve", rate=lambda rate: rate < 0.4)
    ]
    ends = sorted({row[x] for row in losses})
    losses = select(losses, **{x: [ends[0], ends[-1]]})
    return draw_panels(
        curves(shown, x, "train_rmse", ylabel="RMSE on training samples", **look).set(ylim=(0, None)),
        curves(shown, x, "test_rmse", ylabel="RMSE on new samples", **look).set(ylim=(0, None)),
        curves(
            losses,
            "rate",
            "objective",
            by="of",
            log="xy",
            error="stderr",
            xlabel="step size η",
            ylabel="mean loss",
            labels="legend",
        ),
        size=(4.2, 3.4),
    )


# Figure 4

plain = rows(sigma=1.0)
sample_gaps = plain(kind="test", trained_on="all").measure(gaps, "samples")
sample_best = plain(kind="best")


def _ratio_gap(gap: Mapping[float, float], table: list[Row], ratio: float) -> float:
    return gap[ratio * table[0]["dim"]]


def gap_at(ratio: float) -> Value:
    """The gap where there are so many samples per weight."""
    return plain(kind="test", trained_on="all").measure(lambda table: _ratio_gap(gaps(table, "samples"), table, ratio))


def _beyond_solution(table: list[Row]) -> float:
    """Test error of train-by-train at the most samples minus that of the least-squares solution."""
    most = max(row["samples"] for row in table)
    d = table[0]["dim"]
    errors = [row["test_rmse"] for row in select(table, samples=most, split="train")]
    return statistics.fmean(errors) - math.sqrt(1 + d / (most - d - 1))


def _falls(gap: Mapping[float, float]) -> float:
    """The largest change of the gap from one number of samples to the next, from twice the number of weights on."""
    values = [value for _, value in sorted(gap.items())][2:]
    return max(b - a for a, b in pairwise(values))


class Figure4(Figure):
    """With more samples the gap between the two ways to choose a rate closes.

    Noise σ = 1, 40 steps. Where there are as many samples as weights the gap is largest: there the solution that fits the samples
    is at its worst. Means and ranges over ten new tasks, trained with all samples.
    """

    study, item = RandomTasks(), "step-size-2021 Figure 4"
    view = rows(sigma=1.0)
    departs = (
        "The source's axis ends at 10,000 and names no values: 500, 1,000, 2,000, 4,000, 5,000, 7,500 and 10,000. From 2,000 on "
        "100 tasks choose the rates and at 10,000 30, not 300: the means hardly vary there. The same tasks judge all rates."
    )
    claims = {
        "with half as many samples as weights the gap is wide": at_least(0.1, gap_at(0.5), **formula(0.233)),
        "with ten times as many it is closed": at_most(0.03, gap_at(10), **formula(0.004)),
        "from twice as many on it falls (largest step up)": at_most(
            0.01, sample_gaps.then(_falls), says="the gap is decreasing as we use more data"
        ),
        "at as many samples as weights it is above both neighbours (least difference)": at_least(
            0.0,
            plain(kind="test", trained_on="all").measure(
                lambda table: (
                    _ratio_gap(gaps(table, "samples"), table, 1)
                    - max(_ratio_gap(gaps(table, "samples"), table, r) for r in (0.5, 2))
                )
            ),
            **formula("0.447 between 0.233 and 0.195"),
        ),
        "train-by-train's rate stays large (smallest)": at_least(
            0.3, sample_best(split="train").min("rate"), **formula("0.316 to 1")
        ),
        "train-by-validation's never falls with more samples (smallest ratio of neighbours)": at_least(
            1.0,
            sample_best(split="valid").measure(
                lambda table: min(b / a for a, b in _neighbours([r["rate"] for r in sorted(table, key=lambda r: r["samples"])]))
            ),
            **formula("0.0056 to 0.0562"),
        ),
        "and grows in all (last over first)": at_least(
            3.0,
            sample_best(split="valid").measure(lambda table: max(r["rate"] for r in table) / min(r["rate"] for r in table)),
            **formula(10.0),
        ),
        "with the most samples train-by-train is as good as the least-squares solution (difference)": within(
            0.05, 0.0, plain(kind="test", trained_on="all").measure(_beyond_solution), **formula(0.0)
        ),
        "test errors of train-by-validation are those of the formula (largest distance)": at_most(
            0.08, off_formula(plain, "valid", "test"), **formula("1.341, 1.286, 1.208, 1.123, 1.107, 1.065, 1.050 (d = 1000)")
        ),
        "so are those of train-by-train": at_most(
            0.12, off_formula(plain, "train", "test"), **formula("1.574, 1.733, 1.403, 1.155, 1.118, 1.074, 1.054 (d = 1000)")
        ),
        "training errors of train-by-train are those of the formula (largest distance)": at_most(
            0.03, off_formula(plain, "train", "train"), **formula("0.012, 0.337, 0.707, 0.866, 0.894, 0.931, 0.949 (d = 1000)")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        return _errors(rows, "samples", "samples n", rows)


def _neighbours(values: list[float]) -> list[tuple[float, float]]:
    return list(pairwise(values))


# The logarithm of the loss as objective


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


class LogObjective(Study):
    """Descent on the step size of random least-squares tasks by the derivative of the log loss, and of the loss itself."""

    sizes = sizes(
        {"dim": (20, 100, 1000), "tasks": (8, 30, 300), "updates": (1000, 1000, 1000)}, steps=40, sigma=2.0, a=0.01, grid=800
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        named = ("dim", "tasks", "updates", "steps", "sigma", "a", "grid")
        yield from grid(p, *named, setting=SETTINGS, objective=OBJECTIVES, seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        ratio, judge = SETTINGS[job["setting"]]
        fit = fitted(job["dim"], round(ratio * job["dim"]), job["tasks"], job["sigma"], judge, job["seed"])
        shared = {name: job[name] for name in ("setting", "objective", "seed")}
        rates = torch.logspace(-5, 0, job["grid"], dtype=torch.float64)
        values, slopes = _in_parts(fit, job["objective"], rates, job["steps"])
        turns = int((slopes[1:].sign() != slopes[:-1].sign()).sum())
        optimum = float(rates[int(values.argmin())])
        yield {
            **shared,
            "kind": "shape",
            "best": optimum,
            "turns": turns,
            "range": float(slopes.abs().max() / slopes.abs().min()),
        }
        paths = descend_on_rate(fit, job["objective"], STARTS, job["steps"], job["updates"], job["a"])
        for start, path in zip(STARTS, paths.T, strict=True):
            off = (path[-100:] / optimum - 1).abs()
            row = {"start": start, "end": float(path[-1]), "median_off": float(off.median()), "largest_off": float(off.max())}
            yield {**shared, "kind": "end", **row, "converges": bool(off.median() < 0.05)}
            shown = [*range(0, 100, 2), *range(100, len(path), 25)]
            yield from ({**shared, "kind": "path", "start": start, "update": k, "rate": float(path[k])} for k in shown)


def _in_parts(fit: Fitted, objective: str, rates: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective at many rates, a few at a time."""
    width = max(1, 2**22 // fit.rest.numel())
    values, slopes = zip(*(OBJECTIVES[objective](fit, some, steps) for some in rates.split(width)), strict=True)
    return torch.cat(values), torch.cat(slopes)


ends, shape = rows(kind="end"), rows(kind="shape")


class LogLeastSquares(Figure):
    """The log loss as objective on random least-squares tasks: does descent on the step size converge?

    The source proves it for one quadratic and leaves least squares open. Steps of 1/(100√k), 1,000 of them, from four rates; it
    converges where the median of the last hundred rates is within 5 % of the best one. The mean loss itself stands beside it.
    """

    study, id, where = LogObjective(), "step-size/log-least-squares", "Wang et al. 2021, section 6: left open"
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
            f"{setting}: the loss itself does (of {len(STARTS)})": measured(
                ends(setting=setting, objective="last").count(converges=True), says="explodes or vanishes"
            )
            for setting in SETTINGS
        },
        "with the log loss every rate stays finite (largest)": at_most(1e3, ends(objective="log").max("end")),
        "over rates the derivative of the loss varies far more than that of its log (least ratio of the ranges)": at_least(
            10.0,
            Value(lambda table: min(_spans(table))),
            says="polynomial against exponential",
            where="Wang et al. 2021, Theorems 3, 4",
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
    }

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"by": "start", "ylabel": "step size η", "xlabel": "update", "markers": False}
        return draw_panels(
            *(
                curves(
                    select(rows, kind="path", objective=objective, setting=setting),
                    "update",
                    "rate",
                    **look,
                    title=f"{objective}: {setting}",
                )
                for objective in OBJECTIVES
                for setting in SETTINGS
            ),
            columns=len(SETTINGS),
            size=(3.8, 2.8),
        )


def _spans(table: list[Row]) -> list[float]:
    """How much farther the derivative of the loss varies over the rates, in each setting."""
    spans = {(row["setting"], row["objective"]): row["range"] for row in select(table, kind="shape")}
    return [spans[setting, "last"] / spans[setting, "log"] for setting in SETTINGS]
