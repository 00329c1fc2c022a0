"""The largest learning rate at which training still converges, by bisection."""

from __future__ import annotations

from collections.abc import Callable


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
