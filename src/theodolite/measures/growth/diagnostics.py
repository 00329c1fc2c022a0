"""What loss curves of candidates say: when early ranks agree with late ones, and what choosing early would have cost.

`losses` is a table (candidates, steps) of validation losses, one column per step that was looked at; a loss that is not finite
counts as infinite. Nothing here knows a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from theodolite.arguments import a_number, checked, count, finite, nonnegative, number_in, one_of, series, whole

Array = NDArray[np.float64]

#: The rank correlation from which on two columns are said to agree, and the window over which curves are smoothed.
AGREEMENT, WINDOW = 0.8, 11
#: A difference is told apart from none by this many of its errors, a ranking from chance by this many of the noise.
ERRORS, SPREADS = 2.0, 3.0


def a_table(name: str, value: Any) -> Array:
    """Losses as (candidates, steps), infinite where they are not finite."""
    try:
        table = np.array([series(f"{name}[{i}]", row) for i, row in enumerate(value)], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a table of losses, one row per candidate, one column per step: {error}") from error
    if table.ndim != 2 or not table.size:
        raise ValueError(f"{name} must be a table with at least one candidate and one step. Got shape {table.shape}.")
    return np.where(np.isfinite(table), table, np.inf)


def a_column(name: str, value: Any) -> Array:
    """One loss per candidate, infinite where it is not finite."""
    column = np.array(series(name, value), dtype=np.float64)
    if not column.size:
        raise ValueError(f"{name} must hold at least one loss.")
    return np.where(np.isfinite(column), column, np.inf)


# Correlations


@checked(x=a_column, y=a_column)
def spearman(x: Any, y: Any) -> float:
    """The rank correlation, ties with their mean rank; NaN where one side is constant.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    _same_length(x, y)
    return _correlation(rankdata(x), rankdata(y))


@checked(x=a_column, y=a_column)
def pearson(x: Any, y: Any) -> float:
    """The linear correlation over the candidates that have both finite; NaN where one side is constant.

    >>> round(pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), 12)
    1.0
    """
    _same_length(x, y)
    kept = np.isfinite(x) & np.isfinite(y)
    return _correlation(x[kept], y[kept])


def _same_length(x: Array, y: Array) -> None:
    if len(x) != len(y):
        raise ValueError(f"x and y must have one value per candidate each. Got {len(x)} and {len(y)}.")


def _correlation(x: Array, y: Array) -> float:
    x, y = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(np.clip(x @ y / size, -1.0, 1.0)) if size > 0 else math.nan


@checked(losses=a_table)
def heat_map(losses: Any) -> Array:
    """`H[t, t'] = Spearman(ℓ_t, ℓ_t')` over the candidates, (steps, steps).

    >>> heat_map([[1.0, 2.0], [2.0, 1.0]]).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    ranks = rankdata(losses, axis=0)
    ranks = ranks - ranks.mean(axis=0)
    squares = (ranks**2).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = np.clip((ranks.T @ ranks) / np.sqrt(np.outer(squares, squares)), -1.0, 1.0)
    found = (found + found.T) / 2
    np.fill_diagonal(found, 1.0)
    return found


@checked(losses=a_table, final=a_column, kind=one_of("spearman", "pearson"))
def final_correlation(losses: Any, final: Any = None, kind: Literal["spearman", "pearson"] = "spearman") -> Array:
    """`h(t)`, the correlation of the losses at each step with the final ones, by default the last column.

    >>> final_correlation([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]]).tolist()
    [-1.0, 1.0]
    """
    last = _final(losses, final)
    of = spearman if kind == "spearman" else pearson
    return np.array([of(column, last) for column in losses.T])


def _final(losses: Array, final: Array | None) -> Array:
    if final is None:
        return losses[:, -1]
    if len(final) != len(losses):
        raise ValueError(f"final must have one loss for each of the {len(losses)} candidates. Got {len(final)}.")
    return final


@checked(steps=series, losses=a_table, agreement=number_in(above=0, most=1))
def transition(steps: Sequence[float], losses: Any, *, agreement: float = AGREEMENT) -> float | None:
    """`min t: Spearman(ℓ_t', ℓ_end) ≥ 0.8 for all t' ≥ t`: from here on the ranks agree with those at the end of the window.

    None where only the last step agrees with itself.

    >>> transition([0, 10, 20, 30], [[2.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 2.0]])
    10.0
    """
    if len(steps) != losses.shape[1]:
        raise ValueError(f"steps must name each of the {losses.shape[1]} columns of losses. Got {len(steps)}.")
    h = final_correlation(losses)
    late = len(h)
    while late > 0 and h[late - 1] >= agreement:
        late -= 1
    return float(steps[late]) if late < len(h) - 1 else None


@checked(losses=a_table, window=count)
def smoothed(losses: Any, window: int = WINDOW) -> Array:
    """The mean over a centred window of so many columns (an odd number), which is cut off at the ends.

    >>> smoothed([[0.0, 3.0, 6.0]], window=3).tolist()
    [[1.5, 3.0, 4.5]]
    """
    if window % 2 == 0:
        raise ValueError(f"window must be odd, for it is centred. Got {window}.")
    half, width = window // 2, losses.shape[1]
    ends = [(max(0, t - half), min(width, t + half + 1)) for t in range(width)]
    return np.stack([losses[:, a:b].mean(axis=1) for a, b in ends], axis=1)


# What choosing early costs


@checked(losses=a_table, r=count, final=a_column)
def recall(losses: Any, r: int = 1, final: Any = None) -> Array:
    """Recall@r: 1 at the steps where the finally best candidate is among the r with the smallest loss, else 0.

    Ties go to the candidate that stands first.

    >>> losses = [[3.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    >>> recall(losses, 1).tolist(), recall(losses, 3).tolist()
    ([0.0, 1.0], [1.0, 1.0])
    """
    best = int(np.argmin(_final(losses, final)))
    places = np.argsort(losses, axis=0, kind="stable")
    found: Array = (places[:r] == best).any(axis=0).astype(np.float64)
    return found


@checked(loss=finite, least=finite, largest=a_number)
def relative_regret_of(loss: float, least: float, largest: float) -> float:
    """`(ℓ − ℓ_min)/(ℓ_max − ℓ_min)` of one final loss; 0 where all are equal.

    >>> relative_regret_of(1.5, 1.0, 2.0)
    0.5
    """
    if not least <= loss <= largest:
        raise ValueError(f"loss must lie between least and largest. Got {loss}, {least}, {largest}.")
    return (loss - least) / (largest - least) if largest > least else 0.0


@checked(losses=a_table, final=a_column)
def regret(losses: Any, final: Any = None) -> Array:
    """`ℓ(G^t) − ℓ_min`, what the choice of each step, `G^t = argmin ℓ_t`, loses in the end.

    >>> regret([[3.0, 1.0], [2.0, 2.5]]).tolist()
    [1.5, 0.0]
    """
    last = _final(losses, final)
    lost: Array = last[np.argmin(losses, axis=0)] - last.min()
    return lost


@checked(losses=a_table, final=a_column)
def relative_regret(losses: Any, final: Any = None) -> Array:
    """The regret over the range `ℓ_max − ℓ_min` of the final losses that are finite, from 0 to 1.

    It depends on the worst candidate: of two pools it says nothing.

    >>> relative_regret([[3.0, 1.0], [2.0, 2.5], [4.0, 4.0]]).tolist()
    [0.5, 0.0]
    """
    last = _final(losses, final)
    ends = last[np.isfinite(last)]
    spread = float(ends.max() - ends.min()) if len(ends) else 0.0
    lost = regret(losses, last)
    return np.asarray(np.clip(lost / spread, 0.0, 1.0) if spread > 0 else lost > 0, dtype=np.float64)


# Errors


@checked(differences=series, weights=series)
def paired_error(differences: Any, weights: Any = None) -> float:
    """The standard error of a weighted mean of differences, one per batch that both candidates saw; infinite for a single one.

    >>> round(paired_error([1.0, 3.0]), 12), paired_error([2.0, 2.0]), paired_error([2.0])
    (1.0, 0.0, inf)
    """
    d = np.array(differences, dtype=np.float64)
    w = np.ones_like(d) if weights is None else np.array(weights, dtype=np.float64)
    if len(d) != len(w):
        raise ValueError(f"weights must be one for each of the {len(d)} differences. Got {len(w)}.")
    if len(d) < 2 or not np.isfinite(d).all():
        return math.inf
    w = w / w.sum()
    n = len(d)
    with np.errstate(over="ignore"):  # of losses that are about to blow up
        return math.sqrt(n / (n - 1) * float((w**2 * (d - w @ d) ** 2).sum()))


@checked(difference=a_number, error=a_number)
def told_apart(difference: float, error: float) -> bool:
    """Whether a difference is at least twice its error; none at all never is.

    >>> told_apart(0.03, 0.005), told_apart(0.009, 0.005), told_apart(0.0, 0.0)
    (True, False, False)
    """
    return difference != 0 and abs(difference) >= ERRORS * error


@checked(final=a_column, noise=nonnegative)
def ranks_mean_something(final: Any, noise: float) -> bool:
    """Whether the spread of the losses is at least three times the noise; below, no rank statistic is given.

    >>> ranks_mean_something([1.0, 1.3], 0.1), ranks_mean_something([1.0, 1.2], 0.1)
    (True, False)
    """
    ends = final[np.isfinite(final)]
    spread = float(ends.max() - ends.min()) if len(ends) > 1 else 0.0
    return spread > 0 and spread * (1 + 1e-12) >= SPREADS * noise


def over_seeds(losses: Array) -> tuple[Array, Array, float]:
    """Mean and standard error over seeds of losses (seeds, candidates, steps), and the noise of a single run at the end.

    The noise is the standard deviation over seeds within a candidate, what all candidates of a seed share taken out: they see the
    same data. With one seed the errors are infinite and the noise is NaN.
    """
    seeds = len(losses)
    mean: Array = losses.mean(axis=0)
    if seeds < 2:
        return mean, np.full_like(mean, math.inf), math.nan
    whole_runs = np.isfinite(losses).all(axis=(0, 2))  # candidates that never diverged share what is shared
    shared = losses[:, whole_runs].mean(axis=1, keepdims=True) if whole_runs.any() else np.zeros((seeds, 1, losses.shape[2]))
    with np.errstate(over="ignore", invalid="ignore"):  # of runs that blew up
        deviations = np.nan_to_num((losses - shared).std(axis=0, ddof=1), nan=math.inf, posinf=math.inf)
    last = deviations[np.isfinite(deviations[:, -1]), -1]
    return mean, deviations / math.sqrt(seeds), float(math.sqrt((last**2).mean())) if len(last) else math.nan


# Cost


@checked(strategies=count, lag=whole)
def trial_steps(strategies: int, lag: int) -> int:
    """Steps that trying so many strategies for `lag` steps takes; those of the winner are kept.

    >>> trial_steps(30, 200), trial_steps(30, 2000)
    (6000, 60000)
    """
    return strategies * lag


def stacking_trial_steps(strategies: Sequence[int], lag: int) -> tuple[int, int]:
    """Trial steps of all stages, and those of them that are thrown away.

    >>> stacking_trial_steps([3, 15, 27, 21, 27], 200)
    (18600, 17600)
    """
    counts = [count(f"strategies[{i}]", number) for i, number in enumerate(strategies)]
    lag = whole("lag", lag)
    return sum(counts) * lag, sum(number - 1 for number in counts) * lag
