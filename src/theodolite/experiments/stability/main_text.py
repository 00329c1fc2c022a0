"""Figures 2.1 to 2.4: in logistic regression stability falls like the gap, in deep networks it hardly falls.

Figures A.14 and A.15, views of the runs of Figure 2.4, stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from theodolite.experiments import Claim, Figure, Params, Reported, at_least, at_most, between, rows
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel, draw_panels, split
from theodolite.experiments.query import Column, Measured, Value, chosen, select
from theodolite.experiments.stability.pairs import DEEP, DEEP_SIZES, LOGISTIC, REGRESSION_SIZES, ConvexPairs, Pairs, Paths
from theodolite.measures.stability import PowerFit, explains, fit_power_law
from theodolite.results import Row

DEPARTS = (
    "Below paper size fully connected networks with two hidden layers (256 units on Fashion-MNIST, 32 on digits of "
    "scikit-learn) stand for ResNet-20: 1a has rate 0.05 and small batches, 2a and 2b rate 0.1, larger batches and a tenth "
    "of the rate from T/2 and from 3T/4 on. T is 3000 updates at laptop and 160 at tiny size, not 100,000."
)

# What the rows of pairs say: power laws of the maxima, compared between quantities, configurations and seed-trials

#: Sizes from which an exponent is read.
LEAST = 3


def law(rows: list[Row], quantity: str) -> PowerFit:
    """The power law of the maxima over pairs."""
    sizes = sorted({row["m"] for row in rows})
    if len(sizes) < LEAST:
        raise ValueError(f"an exponent needs {LEAST} sizes. There are {len(sizes)}")
    return fit_power_law(sizes, [[row[quantity] for row in rows if row["m"] == m] for m in sizes])


def half(low: float, high: float) -> float:
    """Half an interval, as an error."""
    return (high - low) / 2


def fitted(quantity: str, **where: Any) -> Value:
    """The law of the rows with these values."""
    return rows(**where).measure(law, quantity)


def slope(quantity: str, **where: Any) -> Value:
    """b, its exponent."""
    return fitted(quantity, **where).then(lambda fit: fit.b)


def exponent(quantity: str, **where: Any) -> Value:
    """b, with half its bootstrap interval."""
    return fitted(quantity, **where).then(lambda fit: Measured(fit.b, half(fit.b_low, fit.b_high)))


def upper_end(quantity: str, **where: Any) -> Value:
    """The upper end of the interval of b."""
    return fitted(quantity, **where).then(lambda fit: fit.b_high)


def difference(first: str, second: str, **where: Any) -> Value:
    """Distance between the exponents of two quantities."""
    return abs(slope(first, **where) - slope(second, **where))


def delta(**where: Any) -> Value:
    """Δb, the exponent of stability minus that of the gap, with half its interval."""
    found = rows(**where).measure(explains)
    return found.then(lambda reading: Measured(reading.delta_b, half(reading.delta_low, reading.delta_high)))


def kept(quantity: str, **where: Any) -> Value:
    """The maximum at the largest size over that at the smallest."""
    return fitted(quantity, **where).then(lambda fit: fit.g[-1] / fit.g[0])


# Over seed-trials


def by_trial(measure: Value, **where: Any) -> Column:
    """A value of each seed-trial."""
    return rows(**where).by("trial").each(measure)


def over_trials(reduce: Callable[[list[float]], float], quantity: str, **where: Any) -> Value:
    """The smallest, largest, ... exponent of the seed-trials, with half its distance to the other end as error."""
    found = by_trial(slope(quantity), **where)
    return found.reduce(lambda slopes: Measured(reduce(slopes), half(min(slopes), max(slopes))))


def unexplained(threshold: float, **where: Any) -> Value:
    """Seed-trials in which stability falls more slowly than the gap by at least so much."""
    return by_trial(delta(), **where).count(lambda difference: difference >= threshold)


def gain(first: str, second: str, **where: Any) -> Value:
    """The exponent of one quantity minus that of another, median of the seed-trials."""
    return by_trial(slope(first) - slope(second), **where).median()


# How they are drawn


def pairs(rows: list[Row], quantity: str, title: str, **look: Any) -> Panel:
    """Pairs, maxima and the law through them, of one configuration, seed-trial and checkpoint."""
    return Panel("pairs_and_maxima", rows, quantity, title=title, **look)


def grid(panels: Sequence[Panel], columns: int) -> Any:
    """Lines of panels; the first has the key."""
    panels[0].look["key"] = True
    return draw_panels(*panels, columns=columns, size=(3.7, 2.9), key=False)


def named(configuration: str, rows: list[Row]) -> str:
    """A configuration with its data set."""
    origin = next((row["data"] for row in select(rows, configuration=configuration)), "")
    return f"{configuration} ({origin})"


class PairFigure(Figure):
    """Pairs of some configurations: a panel for each configuration, quantity and seed-trial, several trials side by side."""

    study = Pairs()
    only: Mapping[str, Any] = {"configuration": DEEP, "trial": (0,)}
    view = rows(time="T")
    quantities: ClassVar[tuple[str, ...]] = ("gap_01", "gap_loss", "stab")
    departs = DEPARTS

    def draw(self, rows: list[Row]) -> Any:
        trials = self.only["trial"]
        several = len(trials) > 1

        def panel(name: str, quantity: str, trial: int) -> Panel:
            mine = chosen(rows, configuration=name, trial=trial)
            return pairs(mine, quantity, named(name, mine) + (f", trial {trial + 1}" if several else ""))

        panels = [panel(*shown) for shown in product(self.only["configuration"], self.quantities, trials)]
        return grid(panels, columns=len(trials if several else self.quantities))


# Logistic regression

END = {"time": "T"}
#: Relative rounding that the inequalities of the convex case are allowed.
ROUNDING = 1e-5
_THREE = Reported("−1.05 to −1.13 for all three", "Karp 2024, section 2.3.1")
_ALIKE = Reported("at most 0.08", "Karp 2024, section 2.3.1")
_BOUND = Reported(1.0, "Karp 2024, section 2.4.1, after Hardt et al. 2016", read_from="theory")


def farthest(*quantities: str) -> Value:
    """The exponent that lies farthest from −1.1."""
    slopes = Column.of(*(slope(quantity, **END) for quantity in quantities))
    return slopes.reduce(lambda found: max(found, key=lambda b: abs(b + 1.1)))


class Figure21(Figure):
    """Logistic regression: gap, stability and distance fall at the same rate.

    Two models are trained on sets that differ in one example; dots are pairs, diamonds the maxima at each size, and the law is
    fitted to these. The inequalities of the convex case are checked on every pair at every checkpoint.
    """

    study, item, where = ConvexPairs(), "karp-2024 Figure 2.1", "section 2.3.1"
    departs = (
        "Weights start at zero, which the source does not state. Below paper size there are fewer pairs and T is 10,000 updates "
        "at laptop size, 400 at tiny size, where two Gaussian classes in 50 dimensions stand for MNIST and m runs from 200 to "
        "3200. The smoothness of batches is computed for the first 500 of each pair."
    )
    claims = {
        **{
            f"exponent of the {name}": between(-1.3, -0.85, exponent(quantity, **END), reported=_THREE, since="laptop")
            for quantity, name in (
                ("gap_loss", "gap of the logistic loss"),
                ("stab", "stability"),
                ("dist", "distance of the parameters"),
            )
        },
        "exponents of stability and distance, the one farther from −1.1": between(
            -1.5, -0.7, farthest("stab", "dist"), reported=_THREE
        ),
        "exponent of the gap, in the wider range": between(-1.5, -0.7, exponent("gap_loss", **END), reported=_THREE),
        "stability falls like the gap (difference of the exponents)": at_most(
            0.3, difference("stab", "gap_loss", **END), reported=_ALIKE
        ),
        "the distance falls like stability (difference of the exponents)": at_most(
            0.3, difference("dist", "stab", **END), reported=_ALIKE
        ),
        "the gap of the 0-1 loss falls (exponent)": at_most(
            0.0, exponent("gap_01", **END), reported=-0.82, where="Karp 2024, section 2.3.1"
        ),
        "steps are non-expansive: the rate over 2/β of a batch (largest)": at_most(1.0, rows.max("rate_share"), reported=_BOUND),
        "distance over 2ηL/B times the visits of the exchanged example (largest of all pairs and checkpoints)": at_most(
            1.0, rows.max("distance_share"), tolerance=ROUNDING, reported=_BOUND
        ),
        "stability over the distance times the largest test input (largest of all pairs and checkpoints)": at_most(
            1.0, rows.max("stability_share"), tolerance=ROUNDING, reported=_BOUND
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        end, title = chosen(rows, **END), named(LOGISTIC, rows)
        panels = [pairs(end, q, "" if i else title) for i, q in enumerate(("gap_loss", "stab", "dist", "gap_01"))]
        return grid(panels, columns=4)


# Deep networks

#: Exponents of the gap of the cross-entropy and of its stability.
REPORTED: dict[str, tuple[float, Any]] = {"1a": (-0.18, -0.09), "2a": (-0.48, "does not fall"), "2b": (-0.35, -0.17)}


def reported_delta(name: str) -> Any:
    """Stability's exponent minus the gap's, from the two of the text."""
    gap, stab = REPORTED[name]
    return round(stab - gap, 2) if isinstance(stab, float) else f"at least {-gap:g}"


def _deep_claims(name: str) -> Claims:
    gap, stab = REPORTED[name]
    return {
        f"{name}: stability falls more slowly than the gap of the cross-entropy (Δb)": at_least(
            0.05, delta(configuration=name), reported=reported_delta(name)
        ),
        f"{name}: stability hardly falls (exponent)": at_least(
            -0.4, exponent("stab", configuration=name), reported=stab, since="laptop"
        ),
        f"{name}: stability at the largest m over that at the smallest": at_least(
            0.5,
            kept("stab", configuration=name),
            says=f"falls like m^{stab}" if isinstance(stab, float) else stab,
            since="laptop",
        ),
        f"{name}: the gap of the cross-entropy falls (upper end of the interval of its exponent)": at_most(
            0.0, upper_end("gap_loss", configuration=name), reported=gap
        ),
    }


class Figure22(PairFigure):
    """Deep networks: the gap falls with m, stability hardly does.

    A line for each configuration of Table 2.1: gaps of the 0-1 loss and of the cross-entropy, and stability, after T updates.
    """

    item, where, cites = "karp-2024 Figure 2.2", "section 2.3.2", "Karp 2024, section 2.3.2"
    claims = tuple(map(_deep_claims, DEEP))


def contrast(name: str) -> Value:
    """The exponent of the distance minus that of logistic regression."""
    return slope("dist", configuration=name) - slope("dist", configuration=LOGISTIC)


def _distance_claims(name: str) -> Claims:
    uncertain = "0.256 for four pairs, which leave the exponent of 2a uncertain by 0.25"
    return {
        f"{name}: the distance hardly falls (exponent)": at_least(
            -0.3,
            exponent("dist", configuration=name),
            says="does not fall fast enough, and rises in places",
            where="Karp 2024, section 2.4.1, Figure 2.3",
            since="laptop",
        ),
        f"{name}: in logistic regression the distance falls faster (difference of the exponents)": at_least(
            0.3,
            contrast(name),
            says="−1.05 to −1.13 in logistic regression",
            where="Karp 2024, sections 2.3.1 and 2.4.1",
            fails={"tiny": uncertain} if name == "2a" else {},
        ),
    }


class Figure23(PairFigure):
    """Deep networks: the distance between the parameters of a pair hardly falls with m.

    The runs of Figure 2.2; those of logistic regression stand beside them.
    """

    study = Pairs(sizes={size: Params(parts=(deep, REGRESSION_SIZES[size])) for size, deep in DEEP_SIZES.items()})
    item, where = "karp-2024 Figure 2.3", "section 2.4.1"
    only: Mapping[str, Any] = {"configuration": (*DEEP, LOGISTIC), "trial": (0,)}
    claims = tuple(map(_distance_claims, DEEP))

    def draw(self, rows: list[Row]) -> Any:
        return grid([pairs(mine, "dist", named(name, rows)) for name, mine in split(rows, "configuration").items()], columns=4)


# Accuracy on the straight line through both solutions of a pair

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
