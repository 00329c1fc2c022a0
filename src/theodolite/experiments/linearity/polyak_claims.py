"""What PL* promises, as numbers that can be missed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.linearity.scaling_claims import log_slope
from theodolite.results import Row

Measure = Callable[[list[Row]], Any]
_PL, _P244, _AFTER = "003, (2.16)", "003, Proposition 2.4.4", "003, section 2.4"


def of(part: str) -> Callable[[list[Row]], list[Row]]:
    """The rows of a part."""
    return lambda rows: [r for r in rows if r["part"] == part]


def trained(output: str, hidden: int = 1) -> Callable[[list[Row]], list[Row]]:
    """The trained networks with some hidden layers and an activation on the output."""
    return lambda rows: [r for r in of("descent")(rows) if (r["output"], r["hidden"]) == (output, hidden)]


def slack(residual: str, choose: Callable[[list[float]], float]) -> Measure:
    """The relative slack of the inequality, the least or the largest."""
    return lambda rows: choose([r["slack"] for r in of("inequality")(rows) if r["residual"] == residual])


def ball(measure: Callable[[Row], float]) -> Measure:
    """The largest of a quantity over the networks on the ball."""
    return lambda rows: max(measure(r) for r in of("ball")(rows))


def ball_slope(rows: list[Row]) -> float:
    """Slope of the change of λ_min against the width."""
    mine = of("ball")(rows)
    widths = sorted({r["m"] for r in mine})
    return log_slope([(m, fmean(r["change"] for r in mine if r["m"] == m)) for m in widths])


def widest(column: str, hidden: int = 1) -> Measure:
    """The largest of a column over the seeds of the widest network that was trained."""

    def measure(rows: list[Row]) -> float:
        mine = trained("identity", hidden)(rows)
        m = max(r["m"] for r in mine)
        return float(max(r[column] for r in mine if r["m"] == m))

    return measure


def excess_contraction(rows: list[Row]) -> float:
    """The largest loss ratio of a step over the slowest mode's, in the widest network."""
    mine = trained("identity")(rows)
    m = max(r["m"] for r in mine)
    return max(float(r["contraction"] / r["slowest"]) for r in mine if r["m"] == m)


def spread_of_ways(rows: list[Row]) -> float:
    """The longest way gone over the shortest, means over seeds, across the widths."""
    mine = trained("identity")(rows)
    ways = [fmean(r["moved"] for r in mine if r["m"] == m) for m in {r["m"] for r in mine}]
    return max(ways) / min(ways)


def with_output(column: str, choose: Callable[[list[float]], float]) -> Measure:
    """The worst of a column over networks with an activation on the output."""
    return lambda rows: choose([r[column] for r in trained("tanh")(rows)])


def gradients(column: str, reference: Callable[[int], float]) -> Measure:
    """The ratio to the reference that is farthest below 1, over the depths."""
    return lambda rows: min(r[column] / reference(r["depth"]) for r in of("gradient")(rows))


def last_layer(rows: list[Row]) -> float:
    """Largest relative distance of the last layer's mean squared gradient from 2^−(L−1)."""
    return max(abs(float(r["last"] * 2 ** (r["depth"] - 1)) - 1) for r in of("gradient")(rows))


CLAIMS = (
    Claim(
        "T11: ‖∇L‖² − 2λ_min L at random weights and data, over ‖∇L‖² (smallest)",
        slack("random", min),
        rule="at least",
        expected=-1e-9,
        reported=Reported("at least 0", _PL),
    ),
    Claim(
        "T11: the same along the bottom eigenvector, where equality holds (largest)",
        slack("bottom", lambda found: max(map(abs, found))),
        rule="at most",
        expected=1e-8,
        reported=Reported(0, _PL, read_from="theory"),
    ),
    Claim(
        "T12: |Δλ_min| over ‖ΔK‖ at distance 1 (largest; Weyl's inequality: a check of the code)",
        ball(lambda r: r["change"] / r["kernel_change"]),
        rule="at most",
        expected=1.0 + 1e-9,
        reported=Reported("at most 1", _AFTER, read_from="theory"),
    ),
    Claim(
        "T12: ‖ΔJ‖_F over R√n max‖H‖ (largest)",
        ball(lambda r: r["jacobian_change"] / r["jacobian_bound"]),
        rule="at most",
        expected=1.0,
        reported=Reported("at most 1", _AFTER, read_from="theory"),
    ),
    Claim(
        "T12: the change of λ_min shrinks with the width (slope)",
        ball_slope,
        rule="at most",
        expected=-0.3,
        reported=Reported("of the order of sup‖H‖", _AFTER),
    ),
    Claim(
        "T13: mean ‖∇f‖² of ReLU networks over its bound 2^−L (smallest over the depths)",
        gradients("squared", lambda depth: 2.0**-depth),
        rule="at least",
        expected=1.0,
        reported=Reported("at least 2^−L", _P244),
    ),
    Claim(
        "T13: mean squared gradient of the last layer against 2^−(L−1) (largest relative distance)",
        last_layer,
        rule="at most",
        expected=0.1,
        reported=Reported("2^−(L−1)", _P244, read_from="theory"),
    ),
    Claim(
        "T14: two layers: loss of descent against the frozen kernel, until it has fallen by 1000 (largest relative distance)",
        widest("gap"),
        rule="at most",
        expected=0.1,  # calibrated, m = 1024, seeds 0 to 2: 0.076, 0.020, 0.013
        reported=Reported("½‖(I − ηK₀)ᵗ r₀‖²", _AFTER, read_from="theory"),
    ),
    # Three layers, m = 1024, seeds 0 to 2: 0.25, 0.10, 0.03. Small changes of the kernel add up over the steps.
    Claim(
        "T14: the same for three layers, at the largest width trained",
        widest("gap", hidden=2),
        rule="at most",
        expected=0.1,
        reported=Reported("½‖(I − ηK₀)ᵗ r₀‖²", _AFTER, read_from="theory"),
        since="laptop",
    ),
    Claim(
        "T14: loss ratio of a step over (1 − ηλ_min)², widest network (largest)",
        excess_contraction,
        rule="at most",
        expected=1.05,
        reported=Reported("at most 1", _AFTER),
    ),
    Claim(
        "T14: the way gone does not grow with the width (longest over shortest)",
        spread_of_ways,
        rule="at most",
        expected=2.0,
        reported=Reported("bounded", _AFTER),
    ),
    Claim(
        "T8, second half: tanh on the output: λ_min of the kernel on the way (smallest)",
        with_output("lambda_min", min),
        rule="at least",
        expected=1e-4,
        reported=Reported("PL* holds", _AFTER),
    ),
    Claim(
        "T8, second half: tanh on the output: the loss still falls to 1e-6 (largest final loss)",
        with_output("final", max),
        rule="at most",
        expected=1e-6,
        reported=Reported("converges", _AFTER),
    ),
    Claim(
        "T8, second half: and geometrically: the largest loss ratio of a step",
        with_output("contraction", max),
        rule="at most",
        expected=1.0 - 1e-4,
        reported=Reported("exponentially fast", _AFTER),
    ),
)
