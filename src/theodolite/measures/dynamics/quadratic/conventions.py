"""Squared losses differ by a factor, and with it every critical rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from theodolite.errors import nearest

#: Name of a loss -> its gradient in the outputs over the residual: 1 for ½ Σ r², whose step is r ← (I − ηK) r.
CONVENTIONS: Mapping[str, Callable[[int], float]] = {
    "half sum": lambda outputs: 1.0,
    "mean": lambda outputs: 2.0 / outputs,
    "half mean": lambda outputs: 1.0 / outputs,
}


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
