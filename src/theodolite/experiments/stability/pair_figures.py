"""What the figures of pairs share: their sizes, jobs, rows and panels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from theodolite.experiments.figure import Experiment
from theodolite.experiments.stability.configurations import DEEP, LAPTOP, LOGISTIC_SIZES, PAPER, TINY, Setting
from theodolite.experiments.stability.laws import chosen
from theodolite.experiments.stability.trained_pairs import measured
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The first three seed-trials; the main text shows the first.
TRIALS = (0, 1, 2)

DEPARTS = (
    "Below paper size fully connected networks with two hidden layers (256 units on Fashion-MNIST, 32 on digits of "
    "scikit-learn) stand for ResNet-20: 1a has rate 0.05 and small batches, 2a and 2b rate 0.1, larger batches and a tenth "
    "of the rate from T/2 and from 3T/4 on. T is 3000 updates at laptop and 160 at tiny size, not 100,000."
)


@dataclass(frozen=True)
class Study:
    """Algorithms, sizes m, and pairs at each; seed-trials after the first have `further` pairs.

    Figures that compare seed-trials take that many of all, for a maximum grows with their number.
    """

    settings: tuple[Setting, ...]
    sizes: tuple[int, ...]
    pairs: int
    further: int


@dataclass(frozen=True)
class Params:
    """What a figure shows."""

    studies: tuple[Study, ...]


DEEP_STUDY = {
    "tiny": Study(TINY, (100, 200, 400, 800), pairs=4, further=4),
    "laptop": Study(LAPTOP, (500, 1000, 2000, 4000, 8000), pairs=8, further=4),
    "paper": Study(PAPER, tuple(range(15_000, 50_001, 5_000)), pairs=40, further=40),
}
REGRESSION = {
    "tiny": Study((LOGISTIC_SIZES["tiny"],), (200, 400, 800, 1600, 3200), pairs=12, further=12),
    "laptop": Study((LOGISTIC_SIZES["laptop"],), (800, 1600, 3200, 6400, 12_800), pairs=12, further=12),
    "paper": Study((LOGISTIC_SIZES["paper"],), (800, 1600, 3200, 6400, 12_800), pairs=90, further=90),
}


class PairFigure(Experiment):
    """Pairs of some configurations and seed-trials at some checkpoints.

    The same runs serve all figures: they are trained once per process, to 3T/2.
    """

    sizes = {size: Params((study,)) for size, study in DEEP_STUDY.items()}
    configurations: ClassVar[tuple[str, ...]] = DEEP
    trials: ClassVar[tuple[int, ...]] = (0,)
    times: ClassVar[tuple[str, ...]] = ("T",)
    quantities: ClassVar[tuple[str, ...]] = ("gap_01", "gap_loss", "stab")
    departs = DEPARTS

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for study in p.studies:
            named = [setting for setting in study.settings if setting.name in self.configurations]
            for setting, trial, m in product(named, self.trials, study.sizes):
                yield {
                    "setting": asdict(setting),
                    "trial": trial,
                    "m": m,
                    "pairs": study.further if trial else study.pairs,
                    "shown": study.further if len(self.trials) > 1 else study.pairs,
                    "seed": trial,
                }

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting.of(job["setting"])
        for row in measured(setting, job["trial"], job["m"], job["pairs"]):
            time = setting.checkpoints[row["step"]]
            if time in self.times and row["pair"] < job["shown"]:
                yield {**row, "time": time}

    def draw(self, rows: list[Row]) -> Figure:
        """A line of panels for each configuration, a column for each quantity."""
        lines = [
            [Cell(chosen(rows, configuration=name), quantity, named(name, rows)) for quantity in self.quantities]
            for name in self.configurations
        ]
        return grid(lines)


class TrialsFigure(PairFigure):
    """One configuration: a line of panels for each quantity, a column for each seed-trial."""

    trials = TRIALS

    def draw(self, rows: list[Row]) -> Figure:
        columns = [(f"{named(self.configurations[0], rows)}, trial {t + 1}", t) for t in self.trials]
        return grid([[Cell(chosen(rows, trial=t), q, title) for title, t in columns] for q in self.quantities])


class Cell(NamedTuple):
    """A panel: rows of one configuration, seed-trial and checkpoint, and the quantity drawn."""

    rows: list[Row]
    quantity: str
    title: str
    log: bool = True
    window: bool = False


def grid(lines: Sequence[Sequence[Cell]]) -> Figure:
    """Lines of panels with pairs, maxima and the law through them; the first has the key."""
    from theodolite import plots

    cells = [cell for line in lines for cell in line]
    figure, axes = plots.panels(len(cells), columns=len(lines[0]), size=(3.7, 2.9))
    for ax, cell in zip(axes, cells, strict=True):
        plots.pairs_and_maxima(
            cell.rows, cell.quantity, log=cell.log, window=cell.window, title=cell.title, key=ax is axes[0], ax=ax
        )
    return figure


def named(configuration: str, rows: list[Row]) -> str:
    """A configuration with its data set."""
    origin = next((row["data"] for row in rows if row["configuration"] == configuration), "")
    return f"{configuration} ({origin})"
