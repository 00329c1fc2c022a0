"""What the figures of training curves share: panels, sizes, runs, the drawing, and what is measured on a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.catapult_features.descent import Rate, constant, descend
from theodolite.experiments.catapult_features.networks import LAPTOP, PAPER, TINY, Widths, network
from theodolite.experiments.catapult_features.samples import NAMES, points
from theodolite.experiments.figure import Experiment
from theodolite.experiments.lab.datasets import Source
from theodolite.measures.dynamics import SpikeEvent, spike_events
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Networks whose kernel takes long: they get fewer points and steps.
SLOW = ("5-CNN", "WRN", "ViT", "Myrtle-5")


@dataclass(frozen=True)
class Panel:
    """A network on some data, at a rate in units of the critical one of its start."""

    kind: str
    data: str
    ratio: float
    many: bool = False  # more than two classes
    default: bool = False  # PyTorch's own parameterisation

    @property
    def title(self) -> str:
        which = "" if self.data.startswith("rank") else "-10" if self.many else "-2"
        return f"{self.kind} on {NAMES[self.data]}{which}, {self.ratio:g} η_crit"


@dataclass(frozen=True)
class Params:
    """Sizes; `slow_n` and `slow_steps` belong to networks whose kernel takes long."""

    widths: Widths
    n: int
    steps: int
    slow_n: int
    slow_steps: int
    side: int
    source: Source
    seeds: int = 1
    classes: int = 4
    dim: int = 100
    batch_share: float = 0.25  # batch size over points
    kinds: tuple[str, ...] = ()  # networks that are trained; empty: all of the figure


GD_TINY = Params(TINY, n=32, steps=50, slow_n=16, slow_steps=40, side=8, source="stand-in")
GD_LAPTOP = Params(LAPTOP, n=64, steps=150, slow_n=64, slow_steps=100, side=8, source="either", seeds=3)
GD_PAPER = Params(PAPER, n=128, steps=300, slow_n=128, slow_steps=300, side=32, source="files", seeds=3, classes=10)
GD_SIZES = {"tiny": GD_TINY, "laptop": GD_LAPTOP, "paper": GD_PAPER}


class PanelExperiment(Experiment):
    """Training curves of several networks, with the norm of the kernel and the loss in its top eigenspace."""

    panels: ClassVar[Sequence[Panel]]
    ranks: ClassVar[tuple[int, ...]] = (1, 3, 5)
    shown: ClassVar[int] = 5  # the rank that is drawn
    stochastic: ClassVar[bool] = False
    until: ClassVar[float] = 0.0

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for number, panel in enumerate(self.panels):
            if p.kinds and panel.kind not in p.kinds:
                continue
            slow = panel.kind in SLOW
            n = p.slow_n if slow else p.n
            for seed in range(p.seeds):
                yield {
                    "panel": number,
                    "widths": asdict(p.widths),
                    "n": n,
                    "steps": p.slow_steps if slow else p.steps,
                    "side": p.side,
                    "classes": p.classes if panel.many else 2,
                    "dim": p.dim,
                    "source": p.source,
                    "batch_size": max(1, round(p.batch_share * n)) if self.stochastic else None,
                    "seed": seed,
                }

    def rate(self, panel: Panel, job: Mapping[str, Any]) -> Rate:
        """The learning rate of a run."""
        return constant(panel.ratio)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        panel, seed = self.panels[job["panel"]], job["seed"]
        drawn = {name: job[name] for name in ("side", "dim", "classes", "source")}
        sample = points(panel.data, job["n"], **drawn, seed=seed)
        shape = tuple(sample.x.shape[1:])
        model = network(panel.kind, shape, sample.outputs, Widths(**job["widths"]), default=panel.default, seed=seed)
        settings = {"steps": job["steps"], "batch_size": job["batch_size"], "ranks": self.ranks, "until": self.until}
        shared = {"panel": panel.title, "kind": panel.kind, "ratio": panel.ratio, "data": sample.origin, "seed": seed}
        for row in descend(model, sample, self.rate(panel, job), seed=seed, **settings):
            yield {**shared, **row}

    def draw(self, rows: list[Row]) -> Figure:
        return draw(rows, self.shown)


def draw(rows: list[Row], rank: int) -> Figure:
    """The loss with its two parts above, the norm of the kernel below; the first seed of each panel."""
    from theodolite import plots

    first = [row for row in rows if row["seed"] == 0 and row["loss"] is not None]
    titles = list(dict.fromkeys(row["panel"] for row in first))
    figure, axes = plots.panels(2 * len(titles), columns=len(titles), size=(3.6, 2.7))
    for column, title in enumerate(titles):
        mine = [row for row in first if row["panel"] == title]
        draw_parts(axes[column], mine, rank, title)
        look: dict[str, Any] = {"markers": False, "labels": "none"}
        plots.curves(mine, "step", "kernel", ylabel="‖K‖", ax=axes[column + len(titles)], **look)
    return figure


def draw_parts(ax: Axes, run: list[Row], rank: int, title: str) -> None:
    """L, L≤s and L>s of one run."""
    from theodolite import plots

    names = {"loss": "L", f"top_{rank}": f"L≤{rank}", f"rest_{rank}": f"L>{rank}"}
    parts = [{"step": row["step"], "loss": max(row[key], 1e-12), "part": name} for key, name in names.items() for row in run]
    origin = run[0]["data"]
    named = f"{title}\n({origin})" if " " in origin else title  # stand-ins have longer names
    look: dict[str, Any] = {"markers": False, "labels": "legend", "band": None}
    plots.curves(parts, "step", "loss", by="part", log="y", ylabel="loss", title=named, ax=ax, **look)


# What is measured on the rows


def by_run(rows: list[Row], keep: Callable[[Row], bool] = lambda row: True) -> list[list[Row]]:
    """The steps of each panel and seed that `keep` wants."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if keep(row):
            found.setdefault((row["panel"], row["seed"]), []).append(row)
    if not found:
        raise ValueError("there is no such run")
    return list(found.values())


def finished(run: list[Row]) -> list[Row]:
    """A run's rows; one that diverged, or has a loss that is no number, cannot be measured."""
    if run[-1]["diverged"] or not all(math.isfinite(row["loss"]) for row in run):
        raise ValueError(f"{run[-1]['panel']}, seed {run[-1]['seed']}, diverged")
    return run


def above(row: Row) -> bool:
    """Whether a row belongs to a run above the critical rate."""
    return float(row["ratio"]) > 1.0


def only(keep: Callable[[Row], bool], measure: Callable[[list[Row]], Any]) -> Callable[[list[Row]], Any]:
    """The same measurement on some rows."""
    return lambda rows: measure([row for row in rows if keep(row)])


def peak_over_start(rows: list[Row]) -> float:
    """Peak over first loss, the smallest of the runs above the critical rate."""
    return min(float(max(row["loss"] for row in finished(run)) / run[0]["loss"]) for run in by_run(rows, above))


def highest_spike(rows: list[Row]) -> float:
    """The height of a run's highest spike over the loss before it, the smallest of the runs above the critical rate."""
    return min(max((event.height for event in events(finished(run))), default=1.0) for run in by_run(rows, above))


def end_over_start(rows: list[Row]) -> float:
    """Last over first loss, the largest of the runs above the critical rate."""
    return max(float(finished(run)[-1]["loss"] / run[0]["loss"]) for run in by_run(rows, above))


def kernel_end_over_start(rows: list[Row]) -> float:
    """Last over first norm of the kernel, the largest of the runs above the critical rate."""
    return max(float(finished(run)[-1]["kernel"] / run[0]["kernel"]) for run in by_run(rows, above))


def share_of_rise(rank: int) -> Callable[[list[Row]], float]:
    """The part of the rise that lies in the top eigenspace, from the lowest loss before the peak; the smallest of the runs."""

    def measure(rows: list[Row]) -> float:
        shares = []
        for run in by_run(rows, above):
            peak = max(range(len(finished(run))), key=lambda i, run=run: run[i]["loss"])  # type: ignore[misc]
            low = min(run[: peak + 1], key=lambda row: row["loss"])
            top, rise = run[peak][f"top_{rank}"] - low[f"top_{rank}"], run[peak]["loss"] - low["loss"]
            shares.append(top / rise if rise > 0 else 0.0)
        return float(min(shares))

    return measure


def rises_of_rest(rank: int, keep: Callable[[Row], bool] = above) -> Callable[[list[Row]], int]:
    """Steps in which the loss outside the top eigenspace rises by more than 2 % of the first loss; the most of the runs."""

    def measure(rows: list[Row]) -> int:
        name = f"rest_{rank}"
        return max(
            sum(bool(b[name] - a[name] > 0.02 * run[0]["loss"]) for a, b in itertools.pairwise(finished(run)))
            for run in by_run(rows, keep)
        )

    return measure


# Spikes of SGD


def events(run: list[Row]) -> tuple[SpikeEvent, ...]:
    """Spikes of the loss on all points."""
    kept = [row for row in run if not row["diverged"]]
    return spike_events([row["loss"] for row in kept], kernel=[row["kernel"] for row in kept])


def spikes_per_run(rows: list[Row]) -> int:
    """Spikes in the run that has fewest."""
    return min(len(events(finished(run))) for run in by_run(rows))


def kernel_falls(rows: list[Row], least: float = 1.0) -> float:
    """Share of the spikes that came back, of those at least so high, after which the kernel is smaller."""
    spikes = [event for run in by_run(rows) for event in events(finished(run)) if event.height >= least]
    known = [event.kernel_fell for event in spikes if event.kernel_fell is not None]
    return sum(known) / len(known)


def share_of_spikes(rank: int) -> Callable[[list[Row]], float]:
    """The part of a spike's rise that lies in the top eigenspace, the median of the spikes."""

    def measure(rows: list[Row]) -> float:
        name, shares = f"top_{rank}", []
        for run in by_run(rows):
            for event in events(finished(run)):
                before, peak = run[event.start - 1], run[event.peak]
                if peak["loss"] > before["loss"]:
                    shares.append((peak[name] - before[name]) / (peak["loss"] - before["loss"]))
        return float(median(shares))

    return measure
