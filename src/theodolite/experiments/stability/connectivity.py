"""Figures 2.4, A.14 and A.15: accuracy on the straight line through both solutions of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from theodolite.experiments import Claim, Figure, at_least, at_most, rows
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel, draw_panels
from theodolite.experiments.query import Column, Value, chosen
from theodolite.experiments.stability.main_text import DEPARTS, named
from theodolite.experiments.stability.pairs import DEEP, Paths
from theodolite.results import Row

ENDS = ("smallest", "largest")
#: Accuracy may be so much below that of the weaker end.
ALLOWED = 0.02
#: Share of the pairs of 1a that must be connected.
MOST = 0.8
#: More than nothing: less than one example of the largest set.
MORE = 1e-6


def barriers(name: str, end: str) -> Column:
    """In train accuracy, of all pairs of a configuration at the "smallest" or "largest" size, one each."""
    return rows(configuration=name, size=end).by("trial", "pair").each(rows["barrier_train"].first())


def connected(name: str, end: str) -> Value:
    """Share of the pairs whose barrier is at most two points."""
    return barriers(name, end).share(lambda barrier: barrier <= ALLOWED)


def higher(name: str, other: str, end: str) -> Value:
    """The median barrier of one configuration minus that of another."""
    return barriers(name, end).median() - barriers(other, end).median()


def _connected_claim(name: str, end: str, said: str) -> Claim:
    return at_least(
        MOST,
        f"{name}, {end} m: the solutions lie in one basin (share of the pairs with a train barrier of at most {ALLOWED:g})",
        connected(name, end),
        says=said,
    )


def _main_claims(end: str) -> Claims:
    return (
        _connected_claim("1a", end, "accuracy does not decrease"),
        {
            f"2b, {end} m: a larger barrier than {other} (difference of the median train barriers)": at_least(
                MORE, higher("2b", other, end), says=f"significant decrease in 2b, {said} in {other}", since="laptop"
            )
            for other, said in (("1a", "none"), ("2a", "slight decrease"))
        },
    )


class Connectivity(Figure):
    """Train and test accuracy at α W_S + (1 − α) W_S' for α from −1 to 2, a column for each configuration or seed-trial."""

    study = Paths()
    only: Mapping[str, Any] = {"configuration": DEEP, "trial": (0,)}
    departs = (
        f"{DEPARTS} 2 pairs are joined at tiny, 4 at laptop size. Pairs are drawn at random, so the first are taken. "
        "Running statistics of BatchNorm are interpolated like the weights; the source does not say."
    )

    def draw(self, rows: list[Row]) -> Any:
        columns = list(product(self.only["configuration"], self.only["trial"]))
        panels = [self._panel(rows, end, *column) for end, column in product(ENDS, columns)]
        return draw_panels(*panels, columns=len(columns), size=(4.2, 3.1))

    def _panel(self, rows: list[Row], end: str, name: str, trial: int) -> Panel:
        mine = chosen(rows, configuration=name, trial=trial, size=end)
        seeds = f", trial {trial + 1}" if len(self.only["trial"]) > 1 else ""
        title = f"{named(name, rows)}{seeds}, m = {mine[0]['m']}"
        return Panel("linear_path", mine, "accuracy", ends=("S", "S'"), title=title)


class Figure24(Connectivity):
    """Linear mode connectivity: no barrier in 1a, a slight one in 2a, a large one in 2b."""

    item, where = "karp-2024 Figure 2.4", "section 2.4.2"
    claims = tuple(map(_main_claims, ENDS))


class FigureA14(Connectivity):
    """Linear mode connectivity of configuration 1a with further seeds."""

    item, where = "karp-2024 Figure A.14", "appendix A.3"
    only: Mapping[str, Any] = {"configuration": ("1a",), "trial": (1, 2)}
    claims = tuple(_connected_claim("1a", end, "roughly nondecreasing accuracy") for end in ENDS)


class FigureA15(Connectivity):
    """Linear mode connectivity of configuration 2a with further seeds."""

    item, where = "karp-2024 Figure A.15", "appendix A.3"
    only: Mapping[str, Any] = {"configuration": ("2a",), "trial": (1, 2)}
    claims = {
        f"2a, {end} m: accuracy falls only slightly between the ends (median train barrier)": at_most(
            ALLOWED, barriers("2a", end).median(), says="slightly decreasing accuracy"
        )
        for end in ENDS
    }
