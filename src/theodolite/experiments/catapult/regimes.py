"""Fall, catapult, divergence: linear models, quadratic models and networks, many starts at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import sub
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite import data
from theodolite.data.generators import two_class_images
from theodolite.experiments import Claim, Experiment, at_least, at_most, equal, relative, rows, sizes, within
from theodolite.experiments.lab import zhu
from theodolite.experiments.lab.datasets import Source, features, load_or
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, labelled, log_log
from theodolite.experiments.query import Value, select, values_of
from theodolite.experiments.study import grid
from theodolite.measures import quadratic_models as quadratic
from theodolite.measures.dynamics import classify_run
from theodolite.measures.quadratic_models import gates
from theodolite.models import ntk_fcn
from theodolite.results import Row

#: Target of the one example.
TARGET = 1.0


class Start(NamedTuple):
    """Weights u (draws, m, d) ~ N(0, 1), v (draws, m) = ±1; outputs and kernels (draws) at one example with ‖x‖² = d."""

    u: Tensor
    v: Tensor
    x: Tensor
    output: Tensor
    kernel: Tensor


def draw_networks(m: int, draws: int, seed: int, d: int = 1) -> Start:
    """Networks of the source's parameterisation (3.9). On one example only u·x/‖x‖ acts, so d = 1 is every d."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(draws, m, d, generator=generator, dtype=torch.float64)
    v = torch.randint(0, 2, (draws, m), generator=generator).double() * 2 - 1
    x = torch.ones(1, d, dtype=torch.float64)
    gate = gates(u, x)
    return Start(u, v, x, quadratic.gated_output(u, v, gate, x)[:, 0], quadratic.gated_kernel(u, v, gate, x)[:, 0, 0])


def draw_quadratic(draws: int, gamma: float, seed: int) -> tuple[Tensor, Callable[..., quadratic.Orbit]]:
    """General quadratic models at one example: kernels ‖φ + γΣw‖² (draws) at their start, and their descent by rate and steps.

    φ is a random unit vector of 100 entries, Σ = diag(±1), w ~ N(0, I).
    """
    generator = torch.Generator().manual_seed(seed)
    phi, w = torch.randn(2, draws, 100, generator=generator, dtype=torch.float64)
    phi = phi / phi.norm(dim=1, keepdim=True)
    signs = torch.randint(0, 2, (draws, 100), generator=generator).double() * 2 - 1
    output = (w * phi).sum(1) + 0.5 * gamma * (signs * w.square()).sum(1)
    kernel, bend = (phi + gamma * signs * w).square().sum(1), (signs * phi.square()).sum(1)
    return kernel, partial(quadratic.unit_sigma, output, kernel, TARGET, bend, gamma)


def words(orbit: quadratic.Orbit, quadratic: bool = True) -> list[str]:
    """The regime of every run of an orbit, run axes flattened."""
    losses, norms = orbit.loss.flatten(1).T.tolist(), orbit.kernel_norm.flatten(1).T.tolist()
    return [classify_run(loss, kernel=norm, quadratic=quadratic) for loss, norm in zip(losses, norms, strict=True)]


# The regimes by learning rate

TITLES = {
    "linear": "linear model",
    "quadratic": "quadratic model of a network",
    "general quadratic": "general quadratic model",
    "network": "two-layer ReLU network",
}
WORDS = ("monotone", "catapult", "divergent", "other")


def orbits(job: Mapping[str, Any]) -> quadratic.Orbit:
    """Descent of a model from all starts at `ratio` times their critical rates."""
    model, width, draws, steps, seed = (job[name] for name in ("model", "width", "draws", "steps", "seed"))
    if model == "general quadratic":
        kernel, at_rate = draw_quadratic(draws, 1e-3, seed)
        return at_rate(2 * job["ratio"] / kernel, steps)
    if model == "network":
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 10, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 2, (8,), generator=generator).double() * 2 - 1
        start = draw_networks(width, draws, seed, d=10)
        kernels = quadratic.gated_kernel(start.u, start.v, gates(start.u, x), x)
        rate = 2 * job["ratio"] / torch.linalg.eigvalsh(kernels)[:, -1]
        return quadratic.descend(start.u, start.v, x, y, rate, steps, frozen=False, until=1e-10)
    start, c = draw_networks(width, draws, seed), 0.0 if model == "linear" else 1.0 / width  # with c = 0 the recursion is linear
    return quadratic.one_example(start.output, start.kernel, TARGET, c, 2 * job["ratio"] / start.kernel, steps)


def regime(model: str, text: str, word: str, low: float, high: float) -> Claim:
    """All runs at rates between `low` and `high` critical rates do that."""
    share = rows(model=model, word=word, ratio=lambda ratio: low < ratio < high).min("share")
    return equal(1.0, f"{TITLES[model]}: {text} (smallest share of runs)", share, says=word)


class Figure31(Experiment):
    """Which learning rates make a run fall, catapult or diverge: linear models, quadratic models, networks.

    Every run is named by what its loss and its kernel do. Rates are in units of the critical rate 2/λ(0). The first three
    models see one example with target 1, the network eight random ones in ten dimensions: on a single example all its
    units may die in the catapult. The general quadratic model has φ a unit vector of 100 entries, Σ = diag(±1) and γ = 10⁻³.
    The theorems leave a margin of order log m/√m at both ends of the window, 0.1 critical rates for the network.
    """

    item, where = "zhu-2024 Figure 3.1", "an illustration, here measured"
    sizes = sizes(
        ratios=(0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.2, 1.4, 1.6, 1.8, 1.9, 2.1, 2.4, 3.0, 4.0, 5.0),
        steps=1000,
        tiny={"width": 2000, "draws": 6, "steps": 150, "network_width": 1000},
        laptop={"width": 10_000, "draws": 20, "network_width": 4000},
        paper={"width": 100_000, "draws": 50, "network_width": 10_000},
    )
    claims = (
        regime("linear", "falls below the critical rate", "monotone", 0.0, 1.0),
        regime("linear", "diverges above", "divergent", 1.0, 5.5),
        regime("quadratic", "falls below the critical rate", "monotone", 0.0, 1.0),
        regime("quadratic", "catapults between one and two critical rates", "catapult", 1.0, 2.0),
        regime("quadratic", "diverges above two", "divergent", 2.0, 5.5),
        regime("general quadratic", "falls below the critical rate", "monotone", 0.0, 1.0),
        regime("general quadratic", "catapults between one and two critical rates", "catapult", 1.0, 2.0),
        regime("general quadratic", "diverges above two", "divergent", 2.0, 5.5),
        regime("network", "falls below the critical rate", "monotone", 0.0, 1.0),
        regime("network", "catapults from 1.15 to 1.95 critical rates", "catapult", 1.15, 1.95),
        regime("network", "diverges at four and five critical rates", "divergent", 3.5, 5.5),
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for model in TITLES:
            width = p.network_width if model == "network" else p.width
            yield from grid(p, "draws", "steps", model=[model], ratio=p.ratios, width=[width], seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        found = Counter(words(orbits(job), quadratic=job["model"] != "network"))
        shared = {"model": job["model"], "ratio": job["ratio"], "seed": job["seed"]}
        for word in WORDS:
            yield {**shared, "word": word, "share": found[word] / job["draws"]}

    def draw(self, rows: list[Row]) -> Any:
        def panel(model: str) -> Panel:
            seen = set(values_of(select(rows, model=model, share=lambda share: share > 0), "word"))
            shown = [word for word in WORDS if word in seen]
            mine = curves(select(rows, model=model, word=shown), "ratio", "share", order=shown, title=TITLES[model])
            mine = mine.legend(loc="center right").line(x=1.0)
            return mine if model == "linear" else mine.line(x=2.0)

        look: dict[str, Any] = {"xlabel": "learning rate / critical rate", "ylabel": "share of runs", "labels": "legend"}
        return draw_panels(*map(panel, TITLES), size=(4.2, 2.6), share=True, by="word", **look)


# General quadratic models beside networks

starts, networks = rows(part="quadratic"), rows(part="network")
ends, scaled_peaks = (starts(rate=2.8).by("gamma").each(rows.median(column)) for column in ("end", "scaled_peak"))


def factor(before: float, after: float) -> float:
    return after / before


def farthest(target: float) -> Callable[[list[float]], float]:
    return lambda values: max(values, key=lambda value: abs(value - target))


def along_rates(rates: list[float], column: str, step: Callable[[float, float], float]) -> Value:
    """Part (a): what becomes of the median over the starts from one rate to the next, the smallest of all steps and γ."""
    return starts(rate=rates).by("gamma").each(rows.by("rate").each(rows.median(column)).steps(step).min()).min()


#: Part (b): means over the starts by width at each rate, and by rate at each width, from small to large; smallest factors.
peaks_by_width = networks.by("ratio").each(rows.by("width").each(rows.mean("peak")).steps(factor).min()).min()
peaks_by_rate = networks.by("width").each(rows.by("ratio").each(rows.mean("peak")).steps(factor).min()).min()
ends_by_width = networks.by("ratio").each(abs(rows.by("width").each(rows.mean("end")).steps(sub).last()))


NO_EFFECT = "(b) the width has no effect on the kernel at the end (distance of λ₁(end)/λ₁(0) between the two largest widths)"
GATES_MOVE = "0.16 between widths of 256 and 1024: gates move, and these networks leave their quadratic models"


class FigureB4(Experiment):
    """General quadratic models catapult as networks do: γ plays the part of the width.

    (a) g = wᵀφ + ½γ wᵀΣw with d = 100, φ a random unit vector, Σ = diag(±1), one example with target 1, at rates between
    1.5 and 4.2 (λ(0) is near 1, so 2 is critical). (b) A two-layer ReLU network on 20 images of two classes, rates in units
    of the critical one; 2.8 of the source is 1.4 of these.
    """

    item, where = "zhu-2024 Figure B.4", "appendix B.14"
    sizes = sizes(
        gammas=(1e-2, 1e-3, 1e-4),
        rates=(1.5, 2.2, 2.5, 2.8, 3.2, 3.6, 4.2),
        draws=20,
        steps=2000,
        source="either",
        side=8,
        ratios=(1.2, 1.4, 1.8),
        seeds=2,
        tiny={"steps": 400, "source": "stand-in", "widths": (256, 1024), "network_steps": 80},
        laptop={"widths": (256, 1024, 4096), "network_steps": 100},
        paper={"widths": (1000, 10_000, 30_000), "network_steps": 200, "side": 32, "seeds": 5},
    )
    departs = (
        "The label of (a) is not stated; here 1. Rates of (b) are not in a stated convention; here multiples of 2/λ₁(0). With "
        "γ = 10⁻² and below the kernel at the end is monotone in the rate only up to about 3.2."
    )
    claims = {
        "(a) at η = 2.8 every start catapults, for every γ (share)": equal(
            1.0, starts(rate=2.8).share(word="catapult"), says="catapult"
        ),
        "(a) peak of the loss times γ² at η = 2.8, median, of the γ farthest off": relative(
            0.25, 0.032, scaled_peaks.reduce(farthest(0.032)), says="smaller γ, larger peak"
        ),
        "(a) kernel at the end at η = 2.8, median, of the γ farthest off": within(
            0.05, 0.26, ends.reduce(farthest(0.26)), says="no effect of γ"
        ),
        "(a) γ has no effect on the kernel at the end (largest over smallest, η = 2.8)": at_most(
            1.25, ends.max() / ends.min(), says="no effect"
        ),
        "(a) larger rates, larger peaks: smallest factor from one rate to the next, 2.2 to 3.6": at_least(
            1.0, along_rates([2.2, 2.5, 2.8, 3.2, 3.6], "peak", factor), says="larger"
        ),
        "(a) larger rates, smaller kernel at the end: smallest fall from one rate to the next, 2.2 to 3.2": at_least(
            0.0, along_rates([2.2, 2.5, 2.8, 3.2], "end", sub), says="decreases more"
        ),
        "(a) at η = 4.2 every start diverges (share)": equal(
            1.0, starts(rate=4.2).share(word="divergent"), **zhu("divergence", "section 3.3", "theory")
        ),
        "(b) every network catapults (share)": equal(
            1.0, networks(ratio=lambda ratio: ratio > 1).share(word="catapult"), says="catapult"
        ),
        "(b) wider networks, larger peaks: smallest factor from one width to the next": at_least(
            1.5, peaks_by_width, says="larger"
        ),
        "(b) larger rates, larger peaks: smallest factor from one rate to the next": at_least(1.0, peaks_by_rate, says="larger"),
        "(b) larger rates, smaller kernel at the end: smallest fall of λ₁(end)/λ₁(0) from one rate to the next": at_least(
            0.0, networks.by("ratio").each(rows.mean("end")).steps(sub).min(), says="decreases more"
        ),
        NO_EFFECT: at_most(0.1, ends_by_width.max(), says="no effect", fails={"tiny": GATES_MOVE}),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, "rates", "draws", "steps", part=["quadratic"], gamma=p.gammas, seed=[0])
        p = p.but(steps=p.network_steps)
        yield from grid(p, "ratios", "steps", "source", "side", part=["network"], seed=range(p.seeds), width=p.widths)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in (_quadratic_rows if job["part"] == "quadratic" else _network_rows)(job):
            yield {"seed": job["seed"], **row}

    def draw(self, rows: list[Row]) -> Any:
        widest = max(row["width"] for row in select(rows, part="network step"))
        models = labelled(select(rows, part="quadratic", word=lambda word: word != "divergent"), γ="γ = {gamma:g}")
        of_model = labelled(select(rows, part="quadratic step", gamma=1e-3, rate=lambda rate: rate != 4.2), η="{rate:g}")
        networks = labelled(select(rows, part="network"), m="width {width}")
        of_network = labelled(select(rows, part="network step", seed=0, width=widest), rate="{ratio:g} × critical")
        losses = partial(curves, markers=False, log="y")
        first = losses(of_model, "step", "loss", by="η", ylabel="loss, γ = 0.001").legend(title="η", fontsize=7, ncols=2)
        of_models = partial(curves, models, "rate", by="γ", band="quantiles", xlabel="η")
        of_networks = partial(curves, networks, "ratio", by="m", band="range", xlabel="η / critical rate")
        return draw_panels(
            *(first, of_models("peak", log="y", ylabel="peak of the loss"), of_models("end", ylabel="kernel at the end")),
            losses(of_network, "step", "loss", by="rate", ylabel=f"loss, width {widest}"),
            *(of_networks("peak", log="y", ylabel="peak of the loss"), of_networks("end", ylabel="λ₁(end)/λ₁(0)")),
            size=(3.7, 2.9),
            labels="legend",
        )


def _quadratic_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    """Part (a), by the exact recursion for Σ² = I."""
    gamma = job["gamma"]
    _, at_rate = draw_quadratic(job["draws"], gamma, job["seed"])
    for rate in job["rates"]:
        orbit = at_rate(rate, job["steps"])
        found, peaks, ends = words(orbit), orbit.loss.amax(0).tolist(), orbit.kernel_norm[-1].tolist()
        shared = {"gamma": gamma, "rate": rate}
        for run, word in enumerate(found):
            values = {"peak": peaks[run], "scaled_peak": gamma**2 * peaks[run], "end": ends[run]}
            yield {"part": "quadratic", **shared, "run": run, "word": word, **values}
        for step, loss in enumerate(orbit.loss[:40, 0].tolist()):
            yield {"part": "quadratic step", **shared, "step": step, "loss": loss}


def _network_rows(job: Mapping[str, Any]) -> Iterator[Row]:
    """Part (b): full-batch descent on the weights of a network, all rates side by side."""
    x, y, origin = twenty_images(job["source"], job["side"], job["seed"])
    net: Any = ntk_fcn(x.shape[1], job["width"], 2, init="ntk_sign", seed=job["seed"]).to(x.dtype)
    u, v = net.fc1.weight.detach(), net.fc2.weight.detach()[0]
    top = float(torch.linalg.eigvalsh(quadratic.gated_kernel(u, v, gates(u, x), x))[-1])
    for ratio in job["ratios"]:
        orbit = quadratic.descend(u, v, x, y, ratio * 2 / top, job["steps"], frozen=False)
        losses, norms = orbit.loss.tolist(), orbit.kernel_norm.tolist()
        shared = {"width": job["width"], "ratio": ratio, "data": origin}
        word = classify_run(losses, kernel=norms)
        yield {"part": "network", **shared, "word": word, "peak": max(losses), "last": losses[-1], "end": norms[-1] / norms[0]}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            yield {"part": "network step", **shared, "step": step, "loss": loss, "kernel": norm / norms[0]}


def twenty_images(source: Source, side: int, seed: int) -> tuple[Tensor, Tensor, str]:
    """Images of two classes (20, d), averaged down to `side` × `side` pixels, labels ±1, and where they come from.

    CIFAR images are airplanes and birds, values 0 to 1; where the files are not there, or are not asked for, generated ones.
    """

    def cifar() -> tuple[Tensor, Tensor, str]:
        found = data.load("cifar10").classes_only((0, 2)).subset(20, 0, seed=seed).scaled(dtype=torch.float64)
        return features(found.x_train, side).flatten(1), found.y_train.double() * 2 - 1, "cifar10"

    def generated() -> tuple[Tensor, Tensor, str]:
        made = two_class_images(20, side, 3, seed=seed, dtype=torch.float64)
        return made.x.flatten(1), made.y, "two_class_images"

    return load_or(cifar, generated, source)


# The window of catapults against the width

#: A run has converged when its loss has fallen by this factor.
CONVERGED = 1e-6
upper_ends = rows(kind="window", m=lambda m: m >= 1000)["edge"]


def travel(*ratios: float) -> Value:
    """The power of m that the way of the weights follows, mean over rates."""
    return rows(kind="travel", ratio=ratios).by("ratio").each(rows.power("m", "distance")).mean()


class Window(Experiment):
    """The catapult window [2/λ, 4/λ] at every width: the transition to linearity is not continuous in the learning rate.

    For quadratic models of two-layer networks on one example, the largest rate at which three starts converge is bisected
    with the exact recursion, in units of 1/λ₀, and the distance travelled by the weights is computed from it. F17.
    """

    id, where = "catapult/window", "Zhu 2024, section 3.1 (discontinuity) and Theorem 3.3.1"
    #: `together` starts must all converge for a rate to count.
    sizes = sizes(
        draws=100,
        together=3,
        steps=4000,
        ratios=(1.0, 1.5, 2.2, 2.5, 3.0),
        edge=(3.6, 3.7, 3.8, 3.9, 3.95, 4.05, 4.2),
        tiny={"widths": (1000, 10_000, 100_000), "draws": 20},
        laptop={"widths": (100, 1000, 10_000, 100_000)},
        paper={"widths": (100, 1000, 10_000, 100_000, 1_000_000), "together": 10},
    )
    claims = {
        "F17: the upper end of the window, ηλ₀, smallest over the widths": at_least(
            3.90, upper_ends.min(), **zhu("4 − Θ(log m/√m)", "Theorem 3.3.1")
        ),
        "F17: the same, largest": at_most(4.05, upper_ends.max(), says="4", where="Zhu 2024, Theorems 3.3.1 and B.7.1"),
        "F17: within the window the weights travel by m^(1/2) (exponent)": within(
            0.1, 0.5, travel(2.2, 2.5, 3.0), **zhu("outside any ball of fixed radius", "Figure 3.2", "theory")
        ),
        "F17: below it they travel as far at every width (exponent)": within(
            0.1, 0.0, travel(1.0, 1.5), **zhu("inside a ball of fixed radius", "Figure 3.2", "theory")
        ),
        "at m = 1000 and ηλ₀ = 3.95 the starts converge (share)": at_least(
            0.95, rows(kind="edge", m=1000, ratio=3.95).only("share"), **zhu("catapult", "Theorem 3.3.1")
        ),
        "at m = 1000 and ηλ₀ = 4.05 none does (share)": equal(
            0.0, rows(kind="edge", m=1000, ratio=4.05).only("share"), **zhu("divergence", "Theorem B.7.1")
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        return grid(p, "draws", "together", "steps", "ratios", "edge", m=p.widths, seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        m, few = job["m"], job["together"]
        start = draw_networks(m, job["draws"], job["seed"])

        def orbit(ratio: float, draws: int | None = None) -> quadratic.Orbit:
            kernel = start.kernel[:draws]
            return quadratic.one_example(start.output[:draws], kernel, TARGET, 1 / m, ratio / kernel, job["steps"], until=1e-14)

        def share(ratio: float, draws: int | None = None) -> float:
            loss = orbit(ratio, draws).loss
            return float((loss[-1] <= CONVERGED * loss[0]).double().mean())

        # At 100 units the edge is soft, and starts converge together only well below it.
        found = quadratic.largest_rate(lambda ratio: share(ratio, few) == 1.0, 2.05, 16.0, tol=1e-3)
        shared = {"m": m, "seed": job["seed"]}
        yield {"kind": "window", **shared, "edge": found}
        for ratio in job["edge"]:
            yield {"kind": "edge", **shared, "ratio": ratio, "share": share(ratio)}
        for ratio in job["ratios"]:
            way = quadratic.displacement(orbit(ratio), 1 / m)[-1]
            yield {"kind": "travel", **shared, "ratio": ratio, "distance": median(way.tolist())}

    def draw(self, rows: list[Row]) -> Any:
        window = curves(select(rows, kind="window"), "m", "edge", log="x", ylabel="largest ηλ₀ that converges", xlabel="width m")
        edge, ways = labelled(select(rows, kind="edge"), width="m = {m:,}"), select(rows, kind="travel")
        shares = curves(edge, "ratio", "share", by="width", labels="legend", xlabel="ηλ₀", ylabel="share that converges")
        ways = labelled(ways, rate="ηλ₀ = {ratio:g}")
        return draw_panels(
            window.set(ylim=(0, 4.5)).line(y=4.0, label="4").line(y=2.0, label="2: critical"),
            shares.line(x=4.0),
            log_log(ways, "m", "distance", by="rate", xlabel="width m", ylabel="‖w(end) − w(0)‖, median"),
        )
