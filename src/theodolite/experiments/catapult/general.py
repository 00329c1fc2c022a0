"""General quadratic models and networks above the critical rate (Figure B.4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite import data
from theodolite.data.generators import two_class_images
from theodolite.experiments.catapult.starts import draw_quadratic, words
from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import features
from theodolite.measures.dynamics import classify_run
from theodolite.measures.quadratic_models import descend, gated_kernel, unit_sigma
from theodolite.measures.quadratic_models.models import gates
from theodolite.models import ntk_fcn
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 1.0
RISING = (2.2, 2.5, 2.8, 3.2, 3.6)
_WHERE = "003, Figure B.4"


@dataclass(frozen=True)
class Params:
    gammas: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    rates: tuple[float, ...] = (1.5, 2.2, 2.5, 2.8, 3.2, 3.6, 4.2)
    draws: int = 20
    steps: int = 400
    data: str = "images"  # or "cifar10": airplanes and birds where the files are there, else images
    side: int = 8
    widths: tuple[int, ...] = (256, 1024)
    ratios: tuple[float, ...] = (1.2, 1.4, 1.8)
    network_steps: int = 80
    seeds: int = 2


def of(rows: list[Row], part: str, **where: float) -> list[Row]:
    """The rows of a part with these values."""
    return [row for row in rows if row["part"] == part and all(row[name] == value for name, value in where.items())]


def share(word: str, rate: float) -> Callable[[list[Row]], float]:
    """Part (a): the share of starts with that word, over all γ."""
    return lambda rows: fmean(row["word"] == word for row in of(rows, "quadratic", rate=rate))


def worst_median(column: str, target: float) -> Callable[[list[Row]], float]:
    """Part (a): the median over the starts at η = 2.8 of the γ for which it is farthest from `target`."""

    def measure(rows: list[Row]) -> float:
        found = of(rows, "quadratic", rate=2.8)
        values = [median(row[column] for row in found if row["gamma"] == g) for g in {row["gamma"] for row in found}]
        return float(max(values, key=lambda value: abs(value - target)))

    return measure


def smallest_rise(rows: list[Row]) -> float:
    """Part (a): the smallest factor by which the median peak grows from one rate to the next."""
    factors = []
    for gamma in {row["gamma"] for row in rows if row["part"] == "quadratic"}:
        peaks = [median(row["peak"] for row in of(rows, "quadratic", rate=rate, gamma=gamma)) for rate in RISING]
        factors += [after / before for before, after in itertools.pairwise(peaks)]
    return float(min(factors))


def spread_over_gamma(rows: list[Row]) -> float:
    """Part (a): largest over smallest median kernel at the end, η = 2.8, of the γ."""
    found = of(rows, "quadratic", rate=2.8)
    values = [median(row["end"] for row in found if row["gamma"] == g) for g in {row["gamma"] for row in found}]
    return float(max(values) / min(values))


def falls_more(rows: list[Row]) -> float:
    """Part (a): the smallest fall of the median end kernel from 2.2 to 2.5, 2.8 and 3.2."""
    falls = []
    for gamma in {row["gamma"] for row in rows if row["part"] == "quadratic"}:
        ends = [median(row["end"] for row in of(rows, "quadratic", rate=rate, gamma=gamma)) for rate in (2.2, 2.5, 2.8, 3.2)]
        falls += [before - after for before, after in itertools.pairwise(ends)]
    return float(min(falls))


def network_mean(rows: list[Row], column: str, by: str, value: float, **where: float) -> float:
    return fmean(row[column] for row in of(rows, "network", **{by: value}, **where))


def network_steps_up(column: str, by: str, fixed: str) -> Callable[[list[Row]], float]:
    """Part (b): the smallest factor between neighbouring values of `by`, over the values of `fixed`, means over starts."""

    def measure(rows: list[Row]) -> float:
        found = of(rows, "network")
        values, others = sorted({row[by] for row in found}), sorted({row[fixed] for row in found})
        means = [[network_mean(rows, column, by, v, **{fixed: o}) for v in values] for o in others]
        return float(min(after / before for line in means for before, after in itertools.pairwise(line)))

    return measure


def network_spread(rows: list[Row]) -> float:
    """Part (b): the largest distance of λ₁(end)/λ₁(0) between the two largest widths at one rate, means over the starts."""
    found = of(rows, "network")
    widths, ratios = sorted({row["width"] for row in found})[-2:], sorted({row["ratio"] for row in found})
    ends = [[network_mean(rows, "end", "width", w, ratio=r) for w in widths] for r in ratios]
    return float(max(max(line) - min(line) for line in ends))


def network_falls_more(rows: list[Row]) -> float:
    """Part (b): the smallest fall of λ₁(end)/λ₁(0) from one rate to the next, means over widths and starts."""
    ratios = sorted({row["ratio"] for row in of(rows, "network")})
    ends = [network_mean(rows, "end", "ratio", ratio) for ratio in ratios]
    return float(min(before - after for before, after in itertools.pairwise(ends)))


class FigureB4(Experiment):
    """General quadratic models catapult as networks do: γ plays the part of the width.

    (a) g = wᵀφ + ½γ wᵀΣw with d = 100, φ a random unit vector, Σ = diag(±1), one example with target 1, at rates between
    1.5 and 4.2 (λ(0) is near 1, so 2 is critical). (b) A two-layer ReLU network on 20 images of two classes, rates in units
    of the critical one; 2.8 of the source is 1.4 of these.
    """

    id = "catapult/figure-B.4"
    source = "003, appendix B.14, Figure B.4"
    item = "zhu-2024 Figure B.4"
    sizes = {
        "tiny": Params(),
        "laptop": Params(data="cifar10", widths=(256, 1024, 4096), network_steps=100, steps=2000),
        "paper": Params(data="cifar10", widths=(1000, 10_000, 30_000), seeds=5, network_steps=200, steps=2000, side=32),
    }
    departs = (
        "The label of (a) is not stated; here 1. Rates of (b) are not in a stated convention; here multiples of 2/λ₁(0). With "
        "γ = 10⁻² and below the kernel at the end is monotone in the rate only up to about 3.2."
    )
    claims = (
        Claim(
            "(a) at η = 2.8 every start catapults, for every γ (share)",
            share("catapult", 2.8),
            rule="equal",
            expected=1.0,
            reported=Reported("catapult", _WHERE),
        ),
        Claim(
            "(a) peak of the loss times γ² at η = 2.8, median, of the γ farthest off",
            worst_median("scaled_peak", 0.032),
            rule="relative",
            expected=0.032,
            tolerance=0.25,
            reported=Reported("smaller γ, larger peak", _WHERE),
        ),
        Claim(
            "(a) kernel at the end at η = 2.8, median, of the γ farthest off",
            worst_median("end", 0.26),
            rule="within",
            expected=0.26,
            tolerance=0.05,
            reported=Reported("no effect of γ", _WHERE),
        ),
        Claim(
            "(a) γ has no effect on the kernel at the end (largest over smallest, η = 2.8)",
            spread_over_gamma,
            rule="at most",
            expected=1.25,
            reported=Reported("no effect", _WHERE),
        ),
        Claim(
            "(a) larger rates, larger peaks: smallest factor from one rate to the next, 2.2 to 3.6",
            smallest_rise,
            rule="at least",
            expected=1.0,
            reported=Reported("larger", _WHERE),
        ),
        Claim(
            "(a) larger rates, smaller kernel at the end: smallest fall from one rate to the next, 2.2 to 3.2",
            falls_more,
            rule="at least",
            expected=0.0,
            reported=Reported("decreases more", _WHERE),
        ),
        Claim(
            "(a) at η = 4.2 every start diverges (share)",
            share("divergent", 4.2),
            rule="equal",
            expected=1.0,
            reported=Reported("divergence", "003, section 3.3", read_from="theory"),
        ),
        Claim(
            "(b) every network catapults (share)",
            lambda rows: fmean(row["word"] == "catapult" for row in of(rows, "network") if row["ratio"] > 1),
            rule="equal",
            expected=1.0,
            reported=Reported("catapult", _WHERE),
        ),
        Claim(
            "(b) wider networks, larger peaks: smallest factor from one width to the next",
            network_steps_up("peak", "width", "ratio"),
            rule="at least",
            expected=1.5,  # widths grow fourfold; a peak proportional to the width would grow as much
            reported=Reported("larger", _WHERE),
        ),
        Claim(
            "(b) larger rates, larger peaks: smallest factor from one rate to the next",
            network_steps_up("peak", "ratio", "width"),
            rule="at least",
            expected=1.0,
            reported=Reported("larger", _WHERE),
        ),
        Claim(
            "(b) larger rates, smaller kernel at the end: smallest fall of λ₁(end)/λ₁(0) from one rate to the next",
            network_falls_more,
            rule="at least",
            expected=0.0,
            reported=Reported("decreases more", _WHERE),
        ),
        Claim(
            "(b) the width has no effect on the kernel at the end (distance of λ₁(end)/λ₁(0) between the two largest widths)",
            network_spread,
            rule="at most",
            expected=0.1,
            reported=Reported("no effect", _WHERE),
        ),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for gamma in p.gammas:
            yield {"part": "quadratic", "gamma": gamma, "rates": list(p.rates), "draws": p.draws, "steps": p.steps, "seed": 0}
        for seed in range(p.seeds):
            for width in p.widths:
                yield {
                    "part": "network",
                    "width": width,
                    "ratios": list(p.ratios),
                    "steps": p.network_steps,
                    "data": p.data,
                    "side": p.side,
                    "seed": seed,
                }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in (_quadratic if job["part"] == "quadratic" else _network)(job):
            yield {"seed": job["seed"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(6, columns=3, size=(3.7, 2.9))
        runs = [row for row in rows if row["part"] == "quadratic" and row["word"] != "divergent"]
        runs = [{**row, "γ": f"γ = {row['gamma']:g}"} for row in runs]
        shown = [row for row in rows if row["part"] == "quadratic step" and row["rate"] != 4.2]
        look: dict[str, Any] = {"labels": "legend", "markers": False}
        by_rate = [{**row, "η": f"{row['rate']:g}"} for row in shown if row["gamma"] == 1e-3]
        plots.curves(by_rate, "step", "loss", by="η", **look, log="y", ylabel="loss, γ = 0.001", ax=axes[0])
        quantiles: dict[str, Any] = {"band": "quantiles", "labels": "legend", "xlabel": "η"}
        plots.curves(runs, "rate", "peak", by="γ", **quantiles, log="y", ylabel="peak of the loss", ax=axes[1])
        plots.curves(runs, "rate", "end", by="γ", **quantiles, ylabel="kernel at the end", ax=axes[2])
        steps = [row for row in rows if row["part"] == "network step" and row["seed"] == 0]
        widest = max(row["width"] for row in steps)
        steps = [{**row, "rate": f"{row['ratio']:g} × critical"} for row in steps if row["width"] == widest]
        networks = [{**row, "m": f"width {row['width']}"} for row in rows if row["part"] == "network"]
        ratio = "η / critical rate"
        plots.curves(steps, "step", "loss", by="rate", **look, log="y", ylabel=f"loss, width {widest}", ax=axes[3])
        shared: dict[str, Any] = {"by": "m", "labels": "legend", "xlabel": ratio, "band": "range"}
        plots.curves(networks, "ratio", "peak", **shared, log="y", ylabel="peak of the loss", ax=axes[4])
        plots.curves(networks, "ratio", "end", **shared, ylabel="λ₁(end)/λ₁(0)", ax=axes[5])
        axes[0].legend(title="η", fontsize=7, ncols=2)
        return figure


def _quadratic(job: Mapping[str, Any]) -> Iterator[Row]:
    """Part (a), by the exact recursion for Σ² = I."""
    gamma = job["gamma"]
    start = draw_quadratic(job["draws"], gamma, job["seed"])
    for rate in job["rates"]:
        orbit = unit_sigma(start.output, start.kernel, TARGET, start.bend, gamma, rate, job["steps"])
        found, peaks, ends = words(orbit), orbit.loss.amax(0).tolist(), orbit.kernel_norm[-1].tolist()
        shared = {"gamma": gamma, "rate": rate}
        for run, word in enumerate(found):
            values = {"peak": peaks[run], "scaled_peak": gamma**2 * peaks[run], "end": ends[run]}
            yield {"part": "quadratic", **shared, "run": run, "word": word, **values}
        for step, loss in enumerate(orbit.loss[:40, 0].tolist()):
            yield {"part": "quadratic step", **shared, "step": step, "loss": loss}


def _network(job: Mapping[str, Any]) -> Iterator[Row]:
    """Part (b): full-batch descent on the weights of a network, all rates side by side."""
    x, y, origin = images(job["data"], job["side"], job["seed"])
    net: Any = ntk_fcn(x.shape[1], job["width"], 2, init="ntk_sign", seed=job["seed"]).to(x.dtype)
    u, v = net.fc1.weight.detach(), net.fc2.weight.detach()[0]
    top = float(torch.linalg.eigvalsh(gated_kernel(u, v, gates(u, x), x))[-1])
    for ratio in job["ratios"]:
        orbit = descend(u, v, x, y, ratio * 2 / top, job["steps"], frozen=False)
        losses, norms = orbit.loss.tolist(), orbit.kernel_norm.tolist()
        shared = {"width": job["width"], "ratio": ratio, "data": origin}
        word = classify_run(losses, kernel=norms)
        yield {"part": "network", **shared, "word": word, "peak": max(losses), "last": losses[-1], "end": norms[-1] / norms[0]}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            yield {"part": "network step", **shared, "step": step, "loss": loss, "kernel": norm / norms[0]}


def images(source: str, side: int, seed: int, count: int = 20) -> tuple[Tensor, Tensor, str]:
    """Twenty images of two classes (n, d), averaged down to `side` × `side` pixels, labels ±1, and where they come from.

    CIFAR images are airplanes and birds, values 0 to 1; where the files are not there, or are not asked for, generated ones.
    """
    if source == "cifar10":
        try:
            found = data.load("cifar10").classes_only((0, 2)).subset(count, 0, seed=seed).scaled(dtype=torch.float64)
            return features(found.x_train, side).flatten(1), found.y_train.double() * 2 - 1, "cifar10"
        except data.MissingDataError:
            pass
    made = two_class_images(count, side, 3, seed=seed, dtype=torch.float64)
    return made.x.flatten(1), made.y, "two_class_images"
