"""Figures 2.4, A.14 and A.15: accuracy on the straight line through both solutions of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.stability.configurations import DEEP, Setting
from theodolite.experiments.stability.laws import Measure, chosen
from theodolite.experiments.stability.pair_figures import DEEP_STUDY, DEPARTS, named
from theodolite.experiments.stability.trained_pairs import profiles
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Accuracy may be so much below that of the weaker end.
ALLOWED = 0.02
#: Share of the pairs of 1a that must be connected.
MOST = 0.8
#: More than nothing: less than one example of the largest set.
MORE = 1e-6


@dataclass(frozen=True)
class Params:
    """Pairs that are joined at the smallest and the largest size."""

    settings: tuple[Setting, ...]
    sizes: tuple[int, int]
    pairs: int


_PAIRS = {"tiny": 2, "laptop": 4, "paper": 10}


def barriers(rows: list[Row], name: str, end: str, column: str = "barrier_train") -> list[float]:
    """Of all pairs of a configuration at the "smallest" or "largest" size, one each."""
    table = chosen(rows, configuration=name, size=end)
    return list({(row["trial"], row["pair"]): row[column] for row in table}.values())


def connected(name: str, end: str) -> Measure:
    """Share of the pairs whose barrier in train accuracy is at most two points."""
    return lambda rows: fmean(barrier <= ALLOWED for barrier in barriers(rows, name, end))


def middle(name: str, end: str) -> Measure:
    """Median barrier in train accuracy."""
    return lambda rows: median(barriers(rows, name, end))


def higher(name: str, other: str, end: str) -> Measure:
    """The median barrier of one configuration less that of another."""
    return lambda rows: median(barriers(rows, name, end)) - median(barriers(rows, other, end))


def _connected_claim(name: str, end: str, where: str, said: str) -> Claim:
    return Claim(
        f"{name}, {end} m: the solutions lie in one basin (share of the pairs with a train barrier of at most {ALLOWED:g})",
        connected(name, end),
        rule="at least",
        expected=MOST,
        reported=Reported(said, where),
    )


def _main_claims(end: str) -> tuple[Claim, ...]:
    where = "004, section 2.4.2, Figure 2.4"
    return (
        _connected_claim("1a", end, where, "accuracy does not decrease"),
        *(
            Claim(
                f"2b, {end} m: a larger barrier than {other} (difference of the median train barriers)",
                higher("2b", other, end),
                rule="at least",
                expected=MORE,
                reported=Reported(f"significant decrease in 2b, {said} in {other}", where),
                since="laptop",
            )
            for other, said in (("1a", "none"), ("2a", "slight decrease"))
        ),
    )


class Connectivity(Experiment):
    """Train and test accuracy at α W_S + (1 − α) W_S' for α from −1 to 2, a column for each configuration or seed-trial."""

    configurations: ClassVar[tuple[str, ...]] = DEEP
    trials: ClassVar[tuple[int, ...]] = (0,)
    sizes = {
        size: Params(study.settings, (min(study.sizes), max(study.sizes)), _PAIRS[size]) for size, study in DEEP_STUDY.items()
    }
    departs = (
        f"{DEPARTS} 2 pairs are joined at tiny, 4 at laptop size. Pairs are drawn at random, so the first are taken. "
        "Running statistics of BatchNorm are interpolated like the weights; the source does not say."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        named = [setting for setting in p.settings if setting.name in self.configurations]
        for setting, trial, (end, m) in product(named, self.trials, zip(("smallest", "largest"), p.sizes, strict=True)):
            yield {"setting": asdict(setting), "trial": trial, "m": m, "size": end, "pairs": p.pairs, "seed": trial}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        found = profiles(Setting.of(job["setting"]), job["trial"], job["m"], job["pairs"])
        yield from ({**row, "size": job["size"]} for row in found)

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        columns = list(product(self.configurations, self.trials))
        figure, axes = plots.panels(2 * len(columns), columns=len(columns), size=(4.2, 3.1))
        for ax, (end, (name, trial)) in zip(axes, product(("smallest", "largest"), columns), strict=True):
            mine = chosen(rows, configuration=name, trial=trial, size=end)
            seeds = f", trial {trial + 1}" if len(self.trials) > 1 else ""
            title = f"{named(name, rows)}{seeds}, m = {mine[0]['m']}"
            plots.linear_path(mine, "accuracy", ends=("S", "S'"), title=title, ax=ax)
        return figure


class Figure24(Connectivity):
    """Linear mode connectivity: no barrier in 1a, a slight one in 2a, a large one in 2b."""

    id = "stability/figure-2.4"
    source = "004, section 2.4.2, Figure 2.4"
    item = "karp-2024 Figure 2.4"
    claims = tuple(claim for end in ("smallest", "largest") for claim in _main_claims(end))


class FigureA14(Connectivity):
    """Linear mode connectivity of configuration 1a with further seeds."""

    id = "stability/figure-A.14"
    source = "004, appendix A.3, Figure A.14"
    item = "karp-2024 Figure A.14"
    configurations = ("1a",)
    trials = (1, 2)
    claims = tuple(
        _connected_claim("1a", end, "004, Figure A.14", "roughly nondecreasing accuracy") for end in ("smallest", "largest")
    )


class FigureA15(Connectivity):
    """Linear mode connectivity of configuration 2a with further seeds."""

    id = "stability/figure-A.15"
    source = "004, appendix A.3, Figure A.15"
    item = "karp-2024 Figure A.15"
    configurations = ("2a",)
    trials = (1, 2)
    claims = tuple(
        Claim(
            f"2a, {end} m: accuracy falls only slightly between the ends (median train barrier)",
            middle("2a", end),
            rule="at most",
            expected=ALLOWED,
            reported=Reported("slightly decreasing accuracy", "004, Figure A.15"),
        )
        for end in ("smallest", "largest")
    )
