"""Learning rates of squared losses: the factor between conventions, the critical rate, the largest that converges."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from theodolite.arguments import also_called
from theodolite.text import nearest

# Squared losses differ by a factor, and with it every critical rate.


#: Name of a loss -> its gradient in the outputs over the residual: 1 for ½ Σ r², whose step is r ← (I − ηK) r.
CONVENTIONS: Mapping[str, Callable[[int], float]] = {
    "half sum": lambda outputs: 1.0,
    "mean": lambda outputs: 2.0 / outputs,
    "half mean": lambda outputs: 1.0 / outputs,
}


@also_called(lr="rate")
def half_sum_rate(rate: float, convention: str, outputs: int) -> float:
    """The rate for ½ Σ r² that takes the steps which `rate` takes for another squared loss.

    `outputs` counts all numbers that a mean runs over: samples, times outputs per sample.

    >>> half_sum_rate(0.5, "mean", 10), half_sum_rate(0.5, "half mean", 10), half_sum_rate(0.5, "half sum", 10)
    (0.1, 0.05, 0.5)
    """
    if convention not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(
            f"convention must be one of {known}; the nearest is {nearest(convention, CONVENTIONS, 1)[0]!r}. Got {convention!r}."
        )
    return rate * CONVENTIONS[convention](outputs)


def critical_rate(lambda_1: float, convention: str, outputs: int) -> float:
    """2/λ₁ in the given convention: n/λ₁ for a mean over n outputs; the quadratic model allows up to twice that.

    >>> critical_rate(4.0, "half sum", 10), critical_rate(4.0, "mean", 10), critical_rate(4.0, "half mean", 10)
    (0.5, 2.5, 5.0)
    """
    return 2.0 / (lambda_1 * half_sum_rate(1.0, convention, outputs))


# The largest learning rate at which training still converges, by bisection.


def largest_rate(converges: Callable[[float], bool], low: float, high: float, *, tol: float = 0.01, expansions: int = 3) -> float:
    """The upper end of the rates that converge, to the share `tol`: the last one tried that did.

    `converges` says of a rate whether all runs at it converge (let it look at several seeds: near the edge some do, some
    do not). `low` must converge; where `high` does too it is doubled, at most `expansions` times.

    >>> 0.99 * 3.0 <= largest_rate(lambda rate: rate < 3.0, 1.0, 8.0) < 3.0
    True
    """
    if not 0 < low < high:
        raise ValueError(f"low and high must be positive rates, the lower first. Got {low!r} and {high!r}.")
    if not converges(low):
        raise ValueError(f"Training must converge at low = {low:.4g}, and did not. Name a lower rate.")
    while converges(high):
        if expansions == 0:
            raise ValueError(f"Training still converges at {high:.4g}. Name a higher rate, or allow more expansions.")
        low, high, expansions = high, 2 * high, expansions - 1
    while high - low > tol * low:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if converges(middle) else (low, middle)
    return low
