"""Figures A.2 to A.10: further seeds of start and data order, and other stopping times."""

from __future__ import annotations

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.stability.deep import REPORTED
from theodolite.experiments.stability.laws import over_trials, unexplained
from theodolite.experiments.stability.pair_figures import TrialsFigure

#: Δb from which stability falls too slowly to explain the gap.
TOO_SLOW = 0.05


def slower_claim(name: str, time: str, where: str) -> Claim:
    """In how many of three seed-trials stability falls more slowly than the gap."""
    return Claim(
        f"{name} at {time}: stability falls more slowly than the gap (seed-trials of three with Δb of at least {TOO_SLOW:g})",
        unexplained(TOO_SLOW, configuration=name),
        rule="at least",
        expected=2,
        reported=Reported("in all trials", where),
    )


def falling_claim(name: str, time: str, where: str) -> Claim:
    return Claim(
        f"{name} at {time}: the gap of the cross-entropy falls (exponent, largest of the seed-trials)",
        over_trials(max, "gap_loss", configuration=name),
        rule="at most",
        expected=0.0,
        reported=Reported(REPORTED[name][0], where) if time == "T" else Reported("falls", where),
    )


def seeds_claims(name: str, where: str) -> tuple[Claim, ...]:
    return (
        slower_claim(name, "T", where),
        Claim(
            f"{name}: stability hardly falls (exponent, smallest of the seed-trials)",
            over_trials(min, "stab", configuration=name),
            rule="at least",
            expected=-0.4,
            reported=Reported(REPORTED[name][1], where),
            since="laptop",
        ),
        falling_claim(name, "T", where),
    )


def time_claims(name: str, time: str, where: str) -> tuple[Claim, ...]:
    return slower_claim(name, time, where), falling_claim(name, time, where)


class FigureA2(TrialsFigure):
    """Configuration 1a, three seeds: stability never falls like the gap."""

    id = "stability/figure-A.2"
    source = "004, appendix A.2, Figure A.2"
    item = "karp-2024 Figure A.2"
    configurations = ("1a",)
    claims = seeds_claims("1a", "004, Figure A.2")


class FigureA3(TrialsFigure):
    """Configuration 2a, three seeds: stability never falls like the gap."""

    id = "stability/figure-A.3"
    source = "004, appendix A.2, Figure A.3"
    item = "karp-2024 Figure A.3"
    configurations = ("2a",)
    claims = seeds_claims("2a", "004, Figure A.3")


class FigureA4(TrialsFigure):
    """Configuration 2b, three seeds: stability never falls like the gap."""

    id = "stability/figure-A.4"
    source = "004, appendix A.2, Figure A.4"
    item = "karp-2024 Figure A.4"
    configurations = ("2b",)
    claims = seeds_claims("2b", "004, Figure A.4")


class EarlyFigure(TrialsFigure):
    """Gap and stability after half the updates."""

    times = ("T/2",)
    quantities = ("gap_loss", "stab")


class FigureA5(EarlyFigure):
    """Configuration 1a after half the updates."""

    id = "stability/figure-A.5"
    source = "004, appendix A.2, Figure A.5"
    item = "karp-2024 Figure A.5"
    configurations = ("1a",)
    claims = time_claims("1a", "T/2", "004, Figure A.5")


class FigureA6(EarlyFigure):
    """Configuration 2a after half the updates."""

    id = "stability/figure-A.6"
    source = "004, appendix A.2, Figure A.6"
    item = "karp-2024 Figure A.6"
    configurations = ("2a",)
    claims = time_claims("2a", "T/2", "004, Figure A.6")


class FigureA7(EarlyFigure):
    """Configuration 2b after half the updates."""

    id = "stability/figure-A.7"
    source = "004, appendix A.2, Figure A.7"
    item = "karp-2024 Figure A.7"
    configurations = ("2b",)
    claims = time_claims("2b", "T/2", "004, Figure A.7")


class LateFigure(TrialsFigure):
    """Gap and stability after half as many updates again."""

    times = ("3T/2",)
    quantities = ("gap_loss", "stab")


class FigureA8(LateFigure):
    """Configuration 1a after half as many updates again."""

    id = "stability/figure-A.8"
    source = "004, appendix A.2, Figure A.8"
    item = "karp-2024 Figure A.8"
    configurations = ("1a",)
    claims = time_claims("1a", "3T/2", "004, Figure A.8")


class FigureA9(LateFigure):
    """Configuration 2a after half as many updates again."""

    id = "stability/figure-A.9"
    source = "004, appendix A.2, Figure A.9"
    item = "karp-2024 Figure A.9"
    configurations = ("2a",)
    claims = time_claims("2a", "3T/2", "004, Figure A.9")


class FigureA10(LateFigure):
    """Configuration 2b after half as many updates again."""

    id = "stability/figure-A.10"
    source = "004, appendix A.2, Figure A.10"
    item = "karp-2024 Figure A.10"
    configurations = ("2b",)
    claims = time_claims("2b", "3T/2", "004, Figure A.10")
