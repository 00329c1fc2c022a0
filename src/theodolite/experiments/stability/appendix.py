"""Figures A.1 to A.13 and the stopping rules: range of m, further seeds, other stopping times, distance of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from theodolite.experiments import Claim, Figure, Reported, at_least, at_most, between, cited, rows
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel
from theodolite.experiments.query import Value, chosen
from theodolite.experiments.stability.configurations import DEEP
from theodolite.experiments.stability.laws import delta, fitted, gain, over_trials, unexplained
from theodolite.experiments.stability.main_text import DEPARTS, REPORTED, PairFigure, grid, named, pairs
from theodolite.experiments.stability.pairs import DEEP_SIZES, TRIALS, Pairs, Stopped
from theodolite.measures.stability import SlopeWindows, slope_windows
from theodolite.measures.stability.study import STOPPING
from theodolite.results import Row

# A.1: the range of m

TIMES = ("T/2", "3T/2")
#: Slopes may vary by this share of their mean in a window.
ROUGHLY = 0.2


def windows(time: str) -> Value:
    """Local slopes of the largest gaps."""
    return fitted("gap_loss", time=time).then(lambda fit: slope_windows(fit.ms, fit.g, spread=ROUGHLY))


def spread(time: str) -> Value:
    """How much the local slopes vary over the whole range, as a share of their mean."""

    def measure(found: SlopeWindows) -> float:
        slopes = np.array(found.slopes)
        slopes = slopes[np.isfinite(slopes)]  # others touch a gap that is not positive
        return float(np.ptp(slopes) / abs(slopes.mean()))

    return windows(time).then(measure)


def sizes_in_window(time: str) -> Value:
    """Sizes in the widest window of roughly constant slope."""
    return windows(time).then(lambda found: 1 + sum(row["in_widest"] for row in found.rows()))


def _range_claims(time: str) -> dict[str, Claim]:
    return {
        f"{time}: regions of m with different slopes (spread of the local slopes of the gap over their mean)": at_least(
            ROUGHLY, spread(time), says="different regions of decrease"
        ),
        f"{time}: a window of at least three sizes in which the slope is roughly constant (sizes in the widest)": at_least(
            3, sizes_in_window(time), says="8 sizes, 15,000 to 50,000", where="Karp 2024, appendix A.1", since="laptop"
        ),
    }


class FigureA1(PairFigure):
    """The range of m: one power law fits the gap imperfectly over a wide one.

    The gap of configuration 1a after half the updates and after half as many again, on linear axes above and logarithmic ones
    below, where the widest window of roughly constant slope is shaded.
    """

    study = Pairs(
        sizes={
            "tiny": DEEP_SIZES["tiny"].but(ms=(25, 50, 100, 200, 400, 800)),
            "laptop": DEEP_SIZES["laptop"].but(ms=(125, 250, 500, 1000, 2000, 4000, 8000, 16_000)),
            "paper": DEEP_SIZES["paper"].but(ms=(1000, 2000, 4000, 8000, *DEEP_SIZES["paper"].ms), pairs=20, further=20),
        }
    )
    item, where = "karp-2024 Figure A.1", "appendix A.1"
    only: Mapping[str, Any] = {"configuration": "1a", "trial": 0}
    view = rows(time=TIMES)
    departs = f"{DEPARTS} The source does not list its sizes below 15,000."
    claims = tuple(map(_range_claims, TIMES))

    def draw(self, rows: list[Row]) -> Any:
        columns = {f"{named('1a', rows)} at {time}": chosen(rows, time=time) for time in TIMES}
        look = [{"log": log, "window": log} for log in (False, True)]
        return grid([[pairs(mine, "gap_loss", title, **line) for title, mine in columns.items()] for line in look])


# A.2 to A.10: further seeds of start and data order, and other stopping times

#: Δb from which stability falls too slowly to explain the gap.
TOO_SLOW = 0.05


def slower_claim(name: str, time: str, fails: Mapping[str, str]) -> Claim:
    """In how many of three seed-trials stability falls more slowly than the gap."""
    return at_least(
        2,
        f"{name} at {time}: stability falls more slowly than the gap (seed-trials of three with Δb of at least {TOO_SLOW:g})",
        unexplained(TOO_SLOW, configuration=name),
        says="in all trials",
        fails=fails,
    )


def falling_claim(name: str, time: str) -> Claim:
    return at_most(
        0.0,
        f"{name} at {time}: the gap of the cross-entropy falls (exponent, largest of the seed-trials)",
        over_trials(max, "gap_loss", configuration=name),
        reported=REPORTED[name][0] if time == "T" else "falls",
    )


def seeds_claims(name: str) -> Claims:
    hardly = at_least(
        -0.4,
        f"{name}: stability hardly falls (exponent, smallest of the seed-trials)",
        over_trials(min, "stab", configuration=name),
        reported=REPORTED[name][1],
        since="laptop",
    )
    return slower_claim(name, "T", {}), hardly, falling_claim(name, "T")


def time_claims(name: str, time: str, fails: Mapping[str, str] | None = None) -> Claims:
    return slower_claim(name, time, fails or {}), falling_claim(name, time)


def all_trials(*configurations: str) -> dict[str, Any]:
    """The jobs of some configurations."""
    return {"configuration": configurations, "trial": TRIALS}


class TrialsFigure(PairFigure):
    """One configuration: a line of panels for each quantity, a column for each seed-trial."""

    where = "appendix A.2"
    view = rows(time="T", compared=True)

    def draw(self, rows: list[Row]) -> Any:
        columns = {f"{named(self.only['configuration'][0], rows)}, trial {t + 1}": chosen(rows, trial=t) for t in TRIALS}
        return grid([[pairs(mine, q, title) for title, mine in columns.items()] for q in self.quantities])


class FigureA2(TrialsFigure):
    """Configuration 1a, three seeds: stability never falls like the gap."""

    item, only, claims = "karp-2024 Figure A.2", all_trials("1a"), seeds_claims("1a")


class FigureA3(TrialsFigure):
    """Configuration 2a, three seeds: stability never falls like the gap."""

    item, only, claims = "karp-2024 Figure A.3", all_trials("2a"), seeds_claims("2a")


class FigureA4(TrialsFigure):
    """Configuration 2b, three seeds: stability never falls like the gap."""

    item, only, claims = "karp-2024 Figure A.4", all_trials("2b"), seeds_claims("2b")


class EarlyFigure(TrialsFigure):
    """Gap and stability after half the updates."""

    view = rows(time="T/2", compared=True)
    quantities = ("gap_loss", "stab")


EARLY = "one seed of three: after 80 updates 1a has hardly fitted its sets, and four pairs leave Δb uncertain by half a unit"


class FigureA5(EarlyFigure):
    """Configuration 1a after half the updates."""

    item, only, claims = "karp-2024 Figure A.5", all_trials("1a"), time_claims("1a", "T/2", {"tiny": EARLY})


class FigureA6(EarlyFigure):
    """Configuration 2a after half the updates."""

    item, only, claims = "karp-2024 Figure A.6", all_trials("2a"), time_claims("2a", "T/2")


class FigureA7(EarlyFigure):
    """Configuration 2b after half the updates."""

    item, only, claims = "karp-2024 Figure A.7", all_trials("2b"), time_claims("2b", "T/2")


class LateFigure(TrialsFigure):
    """Gap and stability after half as many updates again."""

    view = rows(time="3T/2", compared=True)
    quantities = ("gap_loss", "stab")


class FigureA8(LateFigure):
    """Configuration 1a after half as many updates again."""

    item, only, claims = "karp-2024 Figure A.8", all_trials("1a"), time_claims("1a", "3T/2")


class FigureA9(LateFigure):
    """Configuration 2a after half as many updates again."""

    item, only, claims = "karp-2024 Figure A.9", all_trials("2a"), time_claims("2a", "3T/2")


class FigureA10(LateFigure):
    """Configuration 2b after half as many updates again."""

    item, only, claims = "karp-2024 Figure A.10", all_trials("2b"), time_claims("2b", "3T/2")


# A.11 to A.13: distance, norm and normalised distance of the parameters

#: An exponent below this would be a fall, for the distance and for what is left after normalising.
FALLS = -0.3


class ParametersFigure(PairFigure):
    """One quantity: a line of panels for each configuration, a column for each seed-trial."""

    where, only = "appendix A.3", all_trials(*DEEP)
    view = rows(time="T", compared=True)
    quantity: ClassVar[str]

    def draw(self, rows: list[Row]) -> Any:
        def panel(name: str, trial: int) -> Panel:
            mine = chosen(rows, configuration=name, trial=trial)
            return pairs(mine, self.quantity, f"{named(name, mine)}, trial {trial + 1}")

        return grid([[panel(name, trial) for trial in TRIALS] for name in DEEP])


class FigureA11(ParametersFigure):
    """Distance of the parameters of a pair against m, three seeds."""

    item, quantity = "karp-2024 Figure A.11", "dist"
    claims = {
        f"{name}: the distance hardly falls (exponent, smallest of the seed-trials)": at_least(
            FALLS,
            over_trials(min, "dist", configuration=name),
            says="does not fall fast enough, and rises in places",
            where="Karp 2024, section 2.4.1 and Figure A.11",
            since="laptop",
        )
        for name in DEEP
    }


class FigureA12(ParametersFigure):
    """Norm of the parameters against m, three seeds."""

    item, quantity = "karp-2024 Figure A.12", "norm_S"
    claims = {
        f"{name}: the norm grows with m (exponent, smallest of the seed-trials)": at_least(
            0.0,
            over_trials(min, "norm_S", configuration=name),
            says="norms grow with m",
            where="Karp 2024, Figures A.12 and A.13",
            since="laptop",
        )
        for name in DEEP
    }


def _normalised_claims(name: str) -> Claims:
    return (
        at_least(
            0.0,
            f"{name}: normalising takes growth with m away (exponent of D less that of the normalised D, median of seed-trials)",
            gain("dist", "ndist", configuration=name),
            says="largely mitigates the growth",
            since="laptop",
        ),
        {
            f"{name}: the normalised distance hardly falls (exponent, smallest of the seed-trials)": at_least(
                FALLS, over_trials(min, "ndist", configuration=name), says="no significant decrease", since="laptop"
            ),
            f"{name}: the normalised distance lies between 0 and 2 (largest of all pairs)": between(
                0.0,
                2.0,
                rows(configuration=name).max("ndist"),
                reported=Reported.theory((0.0, 2.0), "Karp 2024, Figure A.13: D over the mean of the norms"),
            ),
        },
    )


class FigureA13(ParametersFigure):
    """Distance over the mean norm of the two solutions against m, three seeds."""

    item, quantity = "karp-2024 Figure A.13", "ndist"
    claims = tuple(map(_normalised_claims, DEEP))


# Stopping

#: In words.
RULES = {"updates": "after T updates", "epochs": "after a number of epochs", "train_loss": "at a training loss"}


def harder(rule: str) -> Value:
    """Δb under a rule minus Δb after a number of updates."""
    return delta(rule=rule) - delta(rule="updates")


def longer(rule: str) -> Value:
    """Updates at the largest size over those at the smallest, means over the pairs."""
    updates = rows(rule=rule).by("m").each(rows.mean("steps_taken"))
    return updates.last() / updates.first()


def _rule_claims(rule: str) -> tuple[Claim, ...]:
    return cited(
        "Karp 2024, appendix A.1, on stopping criteria",
        {
            f"{RULES[rule]}: larger sets take more updates (largest over smallest m)": at_least(
                1.0, longer(rule), says="larger sets take more steps"
            ),
            f"{RULES[rule]}: stability explains less than with a fixed number of updates (difference of Δb)": at_least(
                0.0, harder(rule), says="easier to fail", since="laptop"
            ),
        },
    )


class StoppingRules(Figure):
    """Stopping by updates, epochs or training loss: which rule favours stability.

    The source holds that a fixed number of updates gives stability its best chance. A line of panels for each rule.
    """

    id, study, where = "stability/stopping", Stopped(), "Karp 2024, appendix A.1"
    departs = (
        f"{DEPARTS} The source gives neither epochs nor losses; runs stopped by their loss end after 5T updates at the latest."
    )
    claims = (
        {
            "after T updates: stability falls more slowly than the gap (Δb)": at_least(
                0.05, delta(rule="updates"), reported=0.09, where="Karp 2024, section 2.3.2"
            )
        },
        *_rule_claims("epochs"),
        *_rule_claims("train_loss"),
    )

    def draw(self, rows: list[Row]) -> Any:
        lines = {rule: chosen(rows, rule=rule) for rule in STOPPING}
        titles = {rule: f"by {rule.replace('_', ' ')} ({mine[0]['data']})" for rule, mine in lines.items()}
        return grid([[pairs(mine, q, titles[rule]) for q in ("gap_loss", "stab")] for rule, mine in lines.items()])
