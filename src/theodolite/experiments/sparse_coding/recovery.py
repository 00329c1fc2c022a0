"""Figures 2.1 to 2.3: recovery of planted atoms by both objectives, by learned atoms, dimension and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, pstdev
from typing import Any, ClassVar

from theodolite.experiments import Claim, Figure, Params, Reported, at_least, at_most, cited, rows, within
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel, curves, draw_panels
from theodolite.experiments.query import Column, Measured, Query, Value, chosen
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Init, OnTrained, Setting, job_of
from theodolite.results import Row

PANELS: dict[str, Init] = {"a": "samples", "b": "local"}
STARTS = {"samples": "sample initialisation", "local": "local initialisation"}
NAMES: dict[str, str] = {"reconstruction": "baseline", "masked": "masking"}
CURVES = [*NAMES.values(), "start"]
#: How far from a value read off a plot we may end, and from an initial error of the specification.
READ_OFF, INITIAL = 0.03, 0.015
READ: dict[str, Any] = {"read_from": "plot", "since": "laptop"}
INITIAL_ERRORS = "initial errors of the setting, mean of 5 draws"

DEPARTS = (
    "Both objectives see the same dictionary, signals and start of each seed, and seeds share theirs over the axis of the "
    "figure; batches keep their order. Values of the source stand in no text: they were read from the authors' plots. At laptop "
    "size there are fewer settings and two seeds."
)

#: By the place on the axis.
Settings = tuple[tuple[float, Setting], ...]
#: Reported final errors by the place on the axis: (panel, objective) -> {place: value}.
Table = Mapping[tuple[str, str], Mapping[float, float]]


class Recovery(OnTrained):
    """Recovery error after training with both objectives, (a) started at samples and (b) at the true atoms.

    Parameters: settings by their place on the axis of the figure, seeds, and whether both starts of a seed train as one fleet.
    `place` marks the same point of the figure at every size.
    """

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        pairs = [tuple((init, seed) for init in PANELS.values()) for seed in range(p.seeds)]
        fleets = pairs if p.get("fleet") else [(run,) for pair in pairs for run in pair]
        for (place, setting), fleet, objective in product(p.settings, fleets, OBJECTIVES):
            yield job_of(setting, objective, fleet, place=place)

    def run(self, job: Mapping[str, Any], trained: list[Row]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        shape = {name: getattr(setting, name) for name in ("dim", "atoms", "learned", "sparsity", "samples", "epochs")}
        for row in trained:
            panel = next(panel for panel, init in PANELS.items() if init == row["init"])
            yield {"panel": panel, **row, "place": job["place"], **shape, "noise": setting.deviation}


def recovery(tiny: Settings, laptop: Settings, paper: Settings, tiny_seeds: int = 2) -> Recovery:
    """The study with these settings at the three sizes."""
    tiny_size = Params(settings=tiny, seeds=tiny_seeds, fleet=True)
    return Recovery(
        sizes={"tiny": tiny_size, "laptop": Params(settings=laptop, seeds=2), "paper": Params(settings=paper, seeds=5)}
    )


class RecoveryFigure(Figure):
    """Both panels: `axis` is the column drawn, `reported` holds the values read from the authors' plots by `place`."""

    axis: ClassVar[tuple[str, str]]
    reported: ClassVar[Table]

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(*(self._panel(chosen(rows, panel=panel), panel) for panel in PANELS), size=(4.6, 3.6))

    def _panel(self, rows: list[Row], panel: str) -> Panel:
        column, name = self.axis
        lines = [{**row, "curve": NAMES[row["objective"]], "error": row["final"]} for row in rows]
        lines += [{**row, "curve": "start", "error": row["initial"]} for row in rows if row["objective"] == "masked"]
        names = {"xlabel": name, "ylabel": "recovery error (cosine)", "title": STARTS[PANELS[panel]]}
        drawn = curves(lines, column, "error", by="curve", band="std", order=CURVES, labels="none", **names)
        if all(row["samples"] == 1000 and row["epochs"] == 500 for row in rows):  # the source's own settings
            drawn.then(lambda ax: self._mark_reported(ax, panel, {row["place"]: row[column] for row in rows}))
        drawn.then(lambda ax: ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0])))
        return drawn.legend(loc="best") if panel == "a" else drawn

    def _mark_reported(self, ax: Any, panel: str, at: Mapping[float, float]) -> None:
        """Crosses at the source's values; `at` are the places that were run, on the axis."""
        from theodolite import plots

        for look, objective in zip(plots.looks(CURVES), OBJECTIVES, strict=False):
            known = {at[place]: value for place, value in self.reported[panel, objective].items() if place in at}
            label = "read from the authors' plots" if objective == "masked" else "_read"
            ax.plot(list(known), list(known.values()), "x", color=look.colour, markersize=8, mew=1.6, label=label)


# Readings


def mean_and_spread(values: Sequence[float]) -> Measured:
    """The mean over the seeds, with their standard deviation."""
    return Measured(fmean(values), pstdev(values) if len(values) > 1 else None)


def by_place(column: str = "final", among: Query = rows) -> Column:
    """Mean errors over the seeds by the place on the axis, in its order."""
    return among.by("place").each(rows.mean(column))


def errors(panel: str, objective: str, column: str = "final", among: Query = rows) -> Column:
    """One curve of a figure."""
    return by_place(column, among(panel=panel, objective=objective))


def gaps(panel: str, among: Query = rows) -> Column:
    """By how much masking ends below the baseline."""
    return errors(panel, "reconstruction", among=among) - errors(panel, "masked", among=among)


def rises(panel: str, objective: str, among: Query = rows) -> Column:
    """Final minus initial errors."""
    return errors(panel, objective, "final", among) - errors(panel, objective, "initial", among)


def farthest(column: str, table: Mapping[float, float], **where: Any) -> Value:
    """The largest distance of a mean over seeds from a table's value, over the places that were run."""
    wanted = rows["place"].first().then(table.__getitem__)
    return abs(rows(**where).by("place").each(rows.mean(column) - wanted)).max()


# Claims


def table_claims(table: Table, initial: Mapping[float, float]) -> Claims:
    """Both curves of both panels beside the values read from the authors' plots, and the errors of the sample start."""
    for (panel, objective), values in table.items():
        yield at_most(
            READ_OFF,
            f"({panel}) {NAMES[objective]}: errors read from the authors' plots (largest distance from them)",
            farthest("final", values, panel=panel, objective=objective),
            reported=", ".join(f"{value:g}" for value in values.values()),
            **READ,
        )
    yield at_most(
        INITIAL,
        "(a) errors before training, of the noisy samples themselves (largest distance from the setting's)",
        farthest("initial", initial, panel="a", objective="masked"),
        reported=Reported.theory(", ".join(f"{value:g}" for value in initial.values()), INITIAL_ERRORS),
        since="laptop",
    )


def value_claims(table: Table, place: float, words: str) -> Claims:
    """One point of each curve of a figure."""
    return {
        f"({panel}) {NAMES[objective]} {words} (read from the authors' plots)": within(
            READ_OFF,
            None,
            rows(panel=panel, objective=objective, place=place)["final"].reduce(mean_and_spread),
            reported=table[panel, objective][place],
            **READ,
        )
        for panel in PANELS
        for objective in OBJECTIVES
    }


def by_panel(claims: Mapping[str, Callable[[str], Claim]]) -> dict[str, Claim]:
    """Statements about each of the two panels."""
    return {f"({panel}) {text}": claim(panel) for text, claim in claims.items() for panel in PANELS}


#: By p'/p.
TABLE_21: Table = {
    ("a", "reconstruction"): {1: 0.468, 2: 0.449, 3: 0.465, 4: 0.510, 5: 0.533},
    ("a", "masked"): {1: 0.433, 2: 0.376, 3: 0.381, 4: 0.379, 5: 0.384},
    ("b", "reconstruction"): {1: 0.126, 2: 0.156, 3: 0.202, 4: 0.270, 5: 0.330},
    ("b", "masked"): {1: 0.153, 2: 0.149, 3: 0.153, 4: 0.158, 5: 0.158},
}
INITIAL_21: dict[float, float] = {1: 0.5135, 2: 0.4426, 3: 0.4095, 4: 0.389, 5: 0.3757}
#: Every learned atom has a sample of its own: p' = n.
FULL = 5

TINY = Setting(dim=50, atoms=100, sparsity=3, samples=500, batch=100, epochs=100)


def over_realized(setting: Setting, *ratios: int) -> Settings:
    """A setting with p' that many times p."""
    return tuple((ratio, replace(setting, learned=ratio * setting.atoms)) for ratio in ratios)


def spread(objective: str) -> Value:
    """Largest less smallest error of a curve of panel (b)."""
    return errors("b", objective).max() - errors("b", objective).min()


#: By how much both curves of (a) fall from p' = p to p' = 2p, the smaller.
first_improvement = rows(panel="a", place=[1, 2]).by("objective").each((0 - by_place().steps()).only()).min()
full, beyond_first = rows(place=FULL), rows(place=lambda place: place > 1)
fewer_than_samples = rows.where(lambda row: row["learned"] < row["samples"])


class Figure21(RecoveryFigure):
    """More learned atoms than true ones: the baseline gets worse than its start, masking does not.

    Recovery error of 200 planted atoms in 100 dimensions after 500 passes over 1000 noisy signals, by the number p' of learned
    atoms. Panel (a) starts at noisy samples, (b) at the true atoms and samples.
    """

    item, where = "wu-2023 Figure 2.1", "section 2.4.1"
    axis = ("learned", "learned atoms p'")
    reported = TABLE_21
    study = recovery(over_realized(TINY, 1, 2, 5), over_realized(Setting(), 1, 2, 5), over_realized(Setting(), 1, 2, 3, 4, 5))
    departs = (
        f"{DEPARTS} At tiny size there are 100 atoms in 50 dimensions, 3 per signal, 500 signals in batches of 100, and "
        "100 passes instead of 500."
    )
    claims = (
        value_claims(TABLE_21, FULL, "at p' = n"),
        by_panel(
            {
                "masking ends below the baseline at p' = n (difference)": lambda panel: at_least(
                    0.05, gaps(panel, full).only(), reported={"a": 0.149, "b": 0.172}[panel], read_from="plot"
                )
            }
        ),
        {
            "(b) at p' = p, where nothing is over-realized, the baseline is better (masking less baseline)": at_least(
                0.0, (0 - gaps("b", rows(place=1))).only(), reported=0.027, **READ
            )
        },
        cited(
            "Wu 2023, section 2.4.1",
            by_panel(
                {
                    "masking is better from p' = 2p on (smallest difference)": lambda panel: at_least(
                        0.0, gaps(panel, beyond_first).min(), says="yes"
                    ),
                    "the gap widens with p' (smallest change from one p' to the next)": lambda panel: at_least(
                        0.0, gaps(panel).steps().min(), says="yes", since="laptop"
                    ),
                    "the baseline ends above its own start for every p' > p (smallest rise)": lambda panel: at_least(
                        0.0, rises(panel, "reconstruction", beyond_first).min(), says="yes", since="laptop"
                    ),
                }
            ),
        ),
        {
            "(a) at p' = n the baseline ends above its start (rise)": at_least(
                0.08, rises("a", "reconstruction", full).only(), reported=0.157, **READ
            ),
            "(a) masking improves on its start for every p' < n (smallest improvement)": at_least(
                0.0, (0 - rises("a", "masked", fewer_than_samples)).min(), says="yes", where="Wu 2023, section 2.4.1"
            ),
            "(a) both improve from p' = p to p' = 2p (smaller improvement)": at_least(
                0.0, first_improvement, says="yes", where="Wu 2023, section 2.4.1"
            ),
            "(b) masking hardly depends on p' (largest less smallest error)": at_most(
                0.02, spread("masked"), reported=0.009, read_from="plot"
            ),
            "(b) masking varies less than half as much over p' as the baseline (ratio of the ranges)": at_most(
                0.5, spread("masked") / spread("reconstruction"), reported=0.044, read_from="plot"
            ),
        },
        table_claims(TABLE_21, INITIAL_21),
    )


#: By the dimension over the smallest one.
TABLE_22: Table = {
    ("a", "reconstruction"): {1: 0.443, 1.5: 0.582, 2: 0.697, 2.5: 0.741},
    ("a", "masked"): {1: 0.386, 1.5: 0.509, 2: 0.613, 2.5: 0.663},
    ("b", "reconstruction"): {1: 0.158, 1.5: 0.266, 2: 0.400, 2.5: 0.460},
    ("b", "masked"): {1: 0.149, 1.5: 0.204, 2: 0.256, 2.5: 0.290},
}
INITIAL_22: dict[float, float] = {1: 0.4418, 1.5: 0.4847, 2: 0.5301, 2.5: 0.5541}
SINGLE_ATOM = {"tiny": "−0.023 at d = 25, where a signal has a single atom"}


def scaled(setting: Setting, sparsities: Mapping[int, int]) -> Settings:
    """d dimensions, 2d true and 4d learned atoms; `sparsities`: d -> atoms per signal, the smallest d first."""
    first = next(iter(sparsities))
    return tuple((d / first, replace(setting, dim=d, atoms=2 * d, learned=4 * d, sparsity=k)) for d, k in sparsities.items())


class Figure22(RecoveryFigure):
    """All parameters grow, the signals stay 1000: masking stays ahead.

    d dimensions, 2d true and 4d learned atoms, ⌊d/20⌋ atoms per signal, noise as strong as the signal. Panel (a) starts at noisy
    samples, (b) at the true atoms and samples.
    """

    item, where = "wu-2023 Figure 2.2", "section 2.4.2"
    axis = ("dim", "dimension d (p = 2d, p' = 4d)")
    reported = TABLE_22
    study = recovery(
        scaled(TINY, {25: 2, 50: 3}), scaled(Setting(), {100: 5, 200: 10}), scaled(Setting(), {100: 5, 150: 7, 200: 10, 250: 12})
    )
    departs = (
        f"{DEPARTS} At tiny size the dimension is 25 and 50 with 2 and 3 atoms per signal, there are 500 signals in batches of "
        "100, and 100 passes instead of 500."
    )
    claims = (
        value_claims(TABLE_22, 1, "at the smallest dimension"),
        by_panel(
            {
                "masking is better at every size (smallest difference)": lambda panel: at_least(
                    0.0, gaps(panel).min(), says="yes", where="Wu 2023, section 2.4.2", fails=SINGLE_ATOM if panel == "a" else {}
                ),
                "the gap widens (at the largest dimension less at the smallest)": lambda panel: at_least(
                    0.0, gaps(panel).last() - gaps(panel).first(), reported={"a": 0.021, "b": 0.161}[panel], read_from="plot"
                ),
                "both get worse with the dimension (smallest rise)": lambda panel: at_least(
                    0.0,
                    rows(panel=panel).by("objective").each(by_place().steps().min()).min(),
                    says="yes",
                    where="Wu 2023, section 2.4.2",
                ),
            }
        ),
        [
            at_least(
                0.0,
                f"(a) {name} ends above its start at all but the smallest dimension: 1000 signals are too few (smallest rise)",
                rises("a", objective, beyond_first).min(),
                reported=value,
                where="Wu 2023, Figure 2.2, not said in the text",
                **READ,
            )
            for objective, name, value in (("reconstruction", "the baseline", 0.097), ("masked", "masking", 0.024))
        ],
        table_claims(TABLE_22, INITIAL_22),
    )


#: By the place of the standard deviation between 1/d and 1/√d.
TABLE_23: Table = {
    ("a", "reconstruction"): {0: 0.007, 0.25: 0.136, 0.5: 0.304, 0.75: 0.439, 1: 0.535},
    ("a", "masked"): {0: 0.005, 0.25: 0.061, 0.5: 0.166, 0.75: 0.275, 1: 0.383},
    ("b", "reconstruction"): {0: 0.003, 0.25: 0.055, 0.5: 0.176, 0.75: 0.273, 1: 0.335},
    ("b", "masked"): {0: 0.004, 0.25: 0.037, 0.5: 0.082, 0.75: 0.122, 1: 0.158},
}
INITIAL_23: dict[float, float] = {0: 0.1488, 0.25: 0.1843, 0.5: 0.2421, 0.75: 0.3086, 1: 0.3712}


def noisy(setting: Setting, *places: float) -> Settings:
    """Standard deviations between 1/d and 1/√d; the last is the setting's own."""
    low, high = 1 / setting.dim, 1 / math.sqrt(setting.dim)
    return tuple((at, setting if at == 1 else replace(setting, noise=low + at * (high - low))) for at in places)


halfway, lowest = rows(place=0.5), rows(place=0)


class Figure23(RecoveryFigure):
    """Without noise the objectives agree; the gap opens with the noise.

    As many learned atoms as signals, the standard deviation of the noise between 1/d and 1/√d, where it is as strong as the
    signal. Panel (a) starts at noisy samples, (b) at the true atoms and samples.
    """

    item, where = "wu-2023 Figure 2.3", "section 2.4.3"
    axis = ("noise", "standard deviation of the noise")
    reported = TABLE_23
    study = recovery(
        noisy(replace(TINY, learned=FULL * TINY.atoms), 0, 0.5, 1),
        noisy(Setting(), 0, 0.5, 1),
        noisy(Setting(), 0, 0.25, 0.5, 0.75, 1),
        tiny_seeds=1,
    )
    departs = (
        f"{DEPARTS} The text says that the variance grows linearly; it is the standard deviation. At tiny size there are "
        "100 atoms in 50 dimensions, 3 per signal, 500 signals in batches of 100, 100 passes "
        "instead of 500, and one seed."
    )
    claims = (
        {
            "(a) at the lowest noise both find the truth from noisy samples (larger error)": at_most(
                0.03, lowest(panel="a").by("objective").each(rows.mean("final")).max(), reported=0.007, **READ
            ),
            "(a) at the lowest noise they do not differ (baseline less masking)": within(
                0.01, 0.0, gaps("a", lowest).only(), reported=0.002, **READ
            ),
        },
        by_panel(
            {
                "halfway up, masking's error over the baseline's": lambda panel: at_most(
                    0.65,
                    (errors(panel, "masked", among=halfway) / errors(panel, "reconstruction", among=halfway)).only(),
                    reported={"a": 0.546, "b": 0.466}[panel],
                    **READ,
                ),
                "the gap opens with the noise (smallest change from one level to the next)": lambda panel: at_least(
                    0.0, gaps(panel).steps().min(), says="yes", where="Wu 2023, section 2.4.3"
                ),
            }
        ),
        value_claims(TABLE_23, 0.5, "halfway up"),
        table_claims(TABLE_23, INITIAL_23),
    )
