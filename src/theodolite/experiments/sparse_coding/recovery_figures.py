"""What Figures 2.1 to 2.3 share: their jobs, rows, readings and panels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.claims import Claim, Measure, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured, chosen
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Init, Setting, job_of, rows_of
from theodolite.measures.dictionary.learning import Objective
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: dict[str, Init] = {"a": "samples", "b": "local"}
STARTS = {"samples": "sample initialisation", "local": "local initialisation"}
NAMES: dict[str, str] = {"reconstruction": "baseline", "masked": "masking"}
#: How far from a value read off a plot we may end, and from an initial error of the specification.
READ_OFF, INITIAL = 0.03, 0.015
INITIAL_ERRORS = "initial errors of the setting, mean of 5 draws"

DEPARTS = (
    "Both objectives see the same dictionary, signals and start of each seed, and seeds share theirs over the axis of the "
    "figure; batches keep their order. Values of the source stand in no text: they were read from the authors' plots. At laptop "
    "size there are fewer settings and two seeds."
)

#: Reported final errors by the place on the axis: (panel, objective) -> {place: value}.
Table = Mapping[tuple[str, str], Mapping[float, float]]


@dataclass(frozen=True)
class Params:
    """Settings by their place on the axis of the figure, seeds, and whether both starts of a seed train as one fleet."""

    settings: tuple[tuple[float, Setting], ...]
    seeds: int
    fleet: bool = False


class RecoveryFigure(Experiment):
    """Recovery error after training with both objectives, (a) started at samples and (b) at the true atoms.

    `axis` is the column drawn; `reported` holds the values read from the authors' plots by `place`, which marks the same point of
    the figure at every size.
    """

    axis: ClassVar[tuple[str, str]]
    reported: ClassVar[Table]

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        pairs = [tuple((init, seed) for init in PANELS.values()) for seed in range(p.seeds)]
        fleets = pairs if p.fleet else [(run,) for pair in pairs for run in pair]
        for place, setting in p.settings:
            for fleet in fleets:
                for objective in OBJECTIVES:
                    yield job_of(setting, objective, fleet, place=place)

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        shape = {name: getattr(setting, name) for name in ("dim", "atoms", "learned", "sparsity", "samples", "epochs")}
        for row in rows_of(job):
            panel = next(panel for panel, init in PANELS.items() if init == row["init"])
            yield {"panel": panel, **row, "place": job["place"], **shape, "noise": setting.deviation}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, axes = plots.panels(2, size=(4.6, 3.6), share_y=False)
        for ax, (panel, init) in zip(axes, PANELS.items(), strict=True):
            self._panel(ax, chosen(rows, panel=panel), STARTS[init], panel)
        return figure

    def _panel(self, ax: Axes, rows: list[Row], title: str, panel: str) -> None:
        from theodolite import plots

        column, name = self.axis
        lines = [{**row, "curve": NAMES[row["objective"]], "error": row["final"]} for row in rows]
        lines += [{**row, "curve": "start", "error": row["initial"]} for row in rows if row["objective"] == "masked"]
        order = [*NAMES.values(), "start"]
        plots.curves(lines, column, "error", by="curve", band="std", order=order, labels="none", xlabel=name, title=title, ax=ax)
        ax.set_ylabel("recovery error (cosine)")
        if paper_settings(rows):
            at = {row["place"]: row[column] for row in rows}
            for look, objective in zip(plots.looks(order), OBJECTIVES, strict=False):
                known = {at[place]: value for place, value in self.reported[panel, objective].items() if place in at}
                label = "read from the authors' plots" if objective == "masked" else "_read"
                ax.plot(list(known), list(known.values()), "x", color=look.colour, markersize=8, mew=1.6, label=label)
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        if panel == "a":
            ax.legend(loc="best")


def paper_settings(rows: list[Row]) -> bool:
    """Whether these are the source's own settings, where its values may stand beside ours."""
    return all(row["samples"] == 1000 and row["epochs"] == 500 for row in rows)


# Readings


def places(rows: list[Row]) -> list[float]:
    return sorted({row["place"] for row in rows})


def mean_of(rows: list[Row], column: str = "final", **where: Any) -> float:
    return fmean(row[column] for row in chosen(rows, **where))


def error_at(panel: str, objective: str, place: float) -> Measure:
    """Mean final error over the seeds, with their standard deviation."""

    def measure(rows: list[Row]) -> Measured:
        finals = [row["final"] for row in chosen(rows, panel=panel, objective=objective, place=place)]
        return Measured(fmean(finals), pstdev(finals) if len(finals) > 1 else None)

    return measure


def gap_at(rows: list[Row], panel: str, place: float) -> float:
    """By how much masking ends below the baseline."""
    base, masked = (mean_of(rows, panel=panel, objective=objective, place=place) for objective in OBJECTIVES)
    return base - masked


def gap_of(panel: str) -> Callable[[list[Row], float], float]:
    return lambda rows, place: gap_at(rows, panel, place)


def gap_in(panel: str, place: float) -> Measure:
    return lambda rows: gap_at(rows, panel, place)


def smallest(reading: Callable[[list[Row], float], float], keep: Callable[[Row], bool] = lambda row: True) -> Measure:
    """The smallest reading over the places whose rows are kept; there must be some."""

    def measure(rows: list[Row]) -> float:
        return least([reading(rows, place) for place in places([row for row in rows if keep(row)])])

    return measure


def least(values: Sequence[float]) -> float:
    """The smallest value, NaN where one is NaN."""
    return float("nan") if any(value != value for value in values) else min(values)


def steps_of(panel: str, reading: Callable[[list[Row], str, float], float]) -> Measure:
    """The smallest change of a reading from one place to the next."""

    def measure(rows: list[Row]) -> float:
        values = [reading(rows, panel, place) for place in places(rows)]
        return least([later - earlier for earlier, later in pairwise(values)])

    return measure


def rise_at(panel: str, objective: Objective) -> Callable[[list[Row], float], float]:
    """Final less initial error."""

    def reading(rows: list[Row], place: float) -> float:
        where = {"panel": panel, "objective": objective, "place": place}
        return mean_of(rows, "final", **where) - mean_of(rows, "initial", **where)

    return reading


def farthest(column: str, table: Mapping[float, float], **where: Any) -> Measure:
    """The largest distance of a mean over seeds from a table's value, over the places that were run."""

    def measure(rows: list[Row]) -> float:
        distances = [abs(mean_of(rows, column, place=place, **where) - table[place]) for place in places(rows)]
        return -least([-distance for distance in distances])

    return measure


# Claims


def table_claims(figure: str, table: Table, initial: Mapping[float, float]) -> Iterator[Claim]:
    """Both curves of both panels beside the values read from the authors' plots, and the errors of the sample start."""
    for (panel, objective), values in table.items():
        yield Claim(
            f"({panel}) {NAMES[objective]}: errors read from the authors' plots (largest distance from them)",
            farthest("final", values, panel=panel, objective=objective),
            rule="at most",
            expected=READ_OFF,
            reported=Reported(", ".join(f"{value:g}" for value in values.values()), f"000, {figure}", read_from="plot"),
            since="laptop",
        )
    yield Claim(
        "(a) errors before training, of the noisy samples themselves (largest distance from the setting's)",
        farthest("initial", initial, panel="a", objective="masked"),
        rule="at most",
        expected=INITIAL,
        reported=Reported(", ".join(f"{value:g}" for value in initial.values()), INITIAL_ERRORS, read_from="theory"),
        since="laptop",
    )


def value_claim(figure: str, table: Table, panel: str, objective: Objective, place: float, words: str) -> Claim:
    """One point of a figure."""
    return Claim(
        f"({panel}) {NAMES[objective]} {words} (read from the authors' plots)",
        error_at(panel, objective, place),
        tolerance=READ_OFF,
        reported=Reported(table[panel, objective][place], f"000, {figure}", read_from="plot"),
        since="laptop",
    )
