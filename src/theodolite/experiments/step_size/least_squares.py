"""Step sizes for random least-squares tasks: the training loss chooses rates that fit noise, held-out samples do not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes, within
from theodolite.experiments.claims import Reported
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Query, Value, select, split
from theodolite.experiments.study import Study
from theodolite.measures.stepsize import least_squares_curves, least_squares_scores, population_risk
from theodolite.measures.stepsize.quadratics.least_squares import RATES, diagonalise, draw_tasks
from theodolite.results import Row

#: What the rows call the two ways to choose.
NAMES = {"train": "train-by-train", "valid": "train-by-validation"}
#: The largest rate of the grid at which descent on half as many samples as weights is stable: 10^(-1/2).
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
                formula = {"train": float(risk.train_rmse.mean()), "test": float(risk.test_rmse.mean())}
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
        means = {key: statistics.fmean(row[f"{column}_rmse"] for row in group) for key, group in found.items()}
        return float(max(abs(mean - expected[key]) / key[1] for key, mean in means.items()))

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
        return _errors(rows, "sigma", "noise σ")


def _slopes(gap: Mapping[float, float]) -> list[float]:
    keys = sorted(gap)
    return [(gap[b] - gap[a]) / (b - a) for a, b in pairwise(keys)]


def _first_over_last(table: list[Row]) -> float:
    ordered = sorted(table, key=lambda row: row["sigma"])
    return float(ordered[0]["rate"] / ordered[-1]["rate"])


def _errors(table: list[Row], x: str, xlabel: str) -> Any:
    """Errors against noise or samples, beside the mean losses over rates."""
    shown = [{**row, "chosen by": NAMES[row["split"]]} for row in select(table, kind="test", trained_on="all")]
    look: dict[str, Any] = {"by": "chosen by", "band": "range", "xlabel": xlabel, "labels": "legend"}
    losses = [
        {**row, "of": f"{row['split']}, {x} {row[x]:g}"} for row in select(table, kind="curve", rate=lambda rate: rate < 0.4)
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
        return _errors(rows, "samples", "samples n")


def _neighbours(values: list[float]) -> list[tuple[float, float]]:
    return list(pairwise(values))
