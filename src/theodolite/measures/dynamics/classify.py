"""What a training run did: fall, catapult, or diverge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from theodolite.measures.dynamics.trials import BLOWN_UP
from theodolite.training import Trace

Word = Literal["monotone", "catapult", "divergent", "other"]

#: A wide quadratic model climbs further than others before it settles.
BLOWN_UP_QUADRATIC = 1e12
#: Columns of a trace in which the norm of the tangent kernel may stand.
KERNEL_COLUMNS = ("lambda_1", "kernel_norm")


def classify_run(
    trace: Trace | Iterable[float],
    *,
    kernel: Iterable[float | None] | None = None,
    quadratic: bool = False,
    blown_up: float | None = None,
    rise: float = 0.05,
    settled: float = 0.5,
    kernel_fall: float = 0.01,
    slack: float = 1e-6,
) -> Word:
    """The regime of a run in one word.

    "divergent": a loss is not finite, or above `blown_up` times the first one. "monotone": no loss exceeds the one before
    by more than the share `slack`. "catapult": the loss rose by more than the share `rise` over the first one, ended below
    the first one and below the share `settled` of its peak, and the largest kernel eigenvalue fell by more than the share
    `kernel_fall`. "other": none of these.

    The eigenvalue is read from `kernel`, or from the column "lambda_1" or "kernel_norm" of a trace, first entry against
    last. Where it was not measured the loss alone decides, and a rise for another reason also reads "catapult".

    Parameters
    ----------
    trace : a `Trace` (its final loss counts as the last one) or losses in order.
    quadratic : the model is a quadratic one: `blown_up` is then 1e12 by default and not 1e8.

    >>> classify_run([2.0, 1.0, 0.5]), classify_run([1.0, 30.0, 0.2], kernel=[4.0, 2.0, 1.5])
    ('monotone', 'catapult')
    >>> classify_run([1.0, 30.0, 0.2], kernel=[4.0, 4.0, 4.0]), classify_run([1.0, 30.0, float("inf")])
    ('other', 'divergent')
    """
    losses, measured = _read(trace, kernel)
    limit = (BLOWN_UP_QUADRATIC if quadratic else BLOWN_UP) if blown_up is None else blown_up
    word = classify_losses(losses, blown_up=limit, rise=rise, settled=settled, slack=slack)
    if word == "catapult" and measured and not measured[-1] < (1.0 - kernel_fall) * measured[0]:
        return "other"
    return word


def classify_losses(
    losses: Sequence[float], *, blown_up: float = BLOWN_UP, rise: float = 0.05, settled: float = 0.5, slack: float = 1e-6
) -> Word:
    """The same word from the losses alone.

    >>> classify_losses([1.0, 2.0, 1.5])
    'other'
    """
    first, last, most = losses[0], losses[-1], max(losses)
    scale = max(abs(first), 1e-30)
    if not all(map(math.isfinite, losses)) or most > blown_up * scale:
        return "divergent"
    # Below a millionth of the first loss the slack no longer shrinks: rounding there is no rise.
    if all(b <= a + slack * max(abs(a), 1e-6 * scale) for a, b in itertools.pairwise(losses)):
        return "monotone"
    if rose(losses, rise) and last < first and most - last > (1.0 - settled) * abs(most):
        return "catapult"
    return "other"


def rose(losses: Sequence[float], rise: float = 0.05) -> bool:
    """Whether the loss was once above the first one by more than this share of it."""
    return max(losses) > losses[0] + rise * max(abs(losses[0]), 1e-30)


def _read(trace: Trace | Iterable[float], kernel: Iterable[float | None] | None) -> tuple[list[float], list[float]]:
    """Losses and kernel norms as plain numbers, None taken out of the latter."""
    column: Any = kernel
    if isinstance(trace, Trace):
        losses = [*trace.loss, *([] if trace.final_loss is None else [trace.final_loss])]
        if column is None:
            column = next((trace.measured[name] for name in KERNEL_COLUMNS if name in trace.measured), None)
    else:
        losses = [float(value) for value in trace]
    if not losses:
        raise ValueError("classify_run needs at least one loss. Got none; train for at least one step.")
    return losses, [float(value) for value in column if value is not None] if column is not None else []
