"""How quantities fall with the size of the training set: power laws `a m^b`, and whether stability explains the gap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import (
    a_mapping,
    checked,
    choice,
    count,
    fraction,
    instance,
    nonnegative,
    sequence,
    series,
    shown,
    whole,
)
from theodolite.measures.fits import straight_line
from theodolite.results import Outcome, Result, Row, fields_of
from theodolite.text import nearest

Array = NDArray[np.float64]
Reduce = Literal["max", "mean", "median"]

_REDUCE: dict[str, Callable[..., Any]] = {"max": np.max, "mean": np.mean, "median": np.median}
_NAMES = {"max": "maximum", "mean": "mean", "median": "median"}
# Coverage of the nominal 95 % for b = −1/2, each 500 repeats of 400 resamples, so ± 0.02. For 5 sizes with 8, 12 and 90 pairs
# and 8 sizes with 40, pairs log-normal (σ = 0.3): 0.81, 0.82, 0.84, 0.87; exponential: 0.76, 0.83, 0.81, 0.85; uniform: 0.84,
# 0.82, 0.87, 0.90. "mean", log-normal, 8 and 12 pairs: 0.90, 0.90. Alternatives in the same four cases (300 repeats of 300
# resamples, ± 0.03): log-normal maxima, percentiles 0.76 to 0.86, basic interval 0.56 to 0.61, bias-corrected 0.64 to 0.78; with
# σ = 1: 0.74 to 0.84, 0.59 to 0.64, 0.68 to 0.81. For uniform pairs the basic interval is as good: 0.86 to 0.95 against 0.84 to
# 0.94. The hull of percentile and basic interval covers 0.79 to 0.98 and is a quarter to a third longer.
_STEPS = 200  # of the least squares; a few suffice unless one value dwarfs all others


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PowerFit(Result):
    """`a m^b` fitted to `g`, the maximum (or mean, or median) over the pairs at each of the sizes `ms`.

    `b` is from least squares in raw space, `b_loglog` the slope of the straight line through the logarithms, `r2` the share of
    the variance of g explained (NaN where g is constant). `b_low` and `b_high` are the bootstrap interval over pairs, NaN
    where there is none. `pairs` counts the values behind each size, `left_out` the sizes without a positive g. `reason` says
    why b is NaN, `note` everything else worth knowing.
    """

    a: float
    b: float
    b_loglog: float
    r2: float
    b_low: float
    b_high: float
    ms: tuple[float, ...]
    g: tuple[float, ...]
    pairs: tuple[int, ...]
    reduce: str
    level: float
    left_out: int = 0
    reason: str = ""
    note: str = ""

    def curve(self, ms: Any) -> Array:
        """The fitted law at `ms`."""
        return np.asarray(self.a * np.asarray(ms, dtype=np.float64) ** self.b)

    def rows(self) -> list[Row]:
        fitted = fields_of(self, "a b b_low b_high b_loglog r2 level reduce left_out reason note seed")
        return [{"sizes": len(self.ms), "pairs": min(self.pairs, default=0), **fitted}]

    def sentence(self) -> str:
        what = f"The {_NAMES[self.reduce]} over pairs"
        note = f" Note: {self.note}." if self.note else ""
        if self.reason:
            return f"{what} has no power law: {self.reason}.{note}"
        used = len(self.ms) - self.left_out
        fitted = f"fitted to {used} sizes, log-log slope {signed(self.b_loglog)}"
        return f"{what} goes like m^{self.exponent()} ({fitted}).{note}"

    def exponent(self) -> str:
        """b with its interval, as text.

        >>> fit_power_law([1, 2, 4], [8.0, 4.0, 2.0]).exponent()
        '−1.00'
        """
        return with_interval(self.b, self.b_low, self.b_high)


@checked(ms=sequence, values_per_pair=sequence, resamples=whole, level=fraction, seed=whole)
def fit_power_law(
    ms: Any, values_per_pair: Any, *, reduce: Reduce = "max", resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> PowerFit:
    """Fit `a m^b` to the maxima over pairs, by least squares in raw space, with a bootstrap interval for b.

    Args:
        ms: the sizes, each once.
        values_per_pair: for each size the values of its pairs, as a sequence of sequences or an array (sizes, pairs); or one
            value per size, which gives no interval.
        reduce: what stands for a size: "max", "mean" or "median" over its pairs.
        resamples, level, seed: of the bootstrap, which draws pairs anew within each size, independently between sizes.

    Least squares in raw space weighs the large values most, which for a falling law are those of small m. The minimum is that
    of `scipy.optimize.curve_fit` started from the log-log line. Sizes whose g is not positive are left out. Two sizes give the
    line through both.

    The interval holds the middle `level` of the resampled exponents, stretched to hold b itself. It is too short for maxima: a
    resample keeps the maximum of a size in two of three draws and never exceeds it. Measured, a nominal 95 % covers the true
    exponent in 74 to 94 % of cases for "max", least for widely scattered pairs, and in 90 % for "mean". Read it as the least
    that is uncertain.

    >>> fit = fit_power_law([100, 200, 400], [[1.0, 0.8], [0.5, 0.4], [0.25, 0.2]])
    >>> round(fit.b, 9), round(fit.a, 6), fit.g
    (-1.0, 100.0, (1.0, 0.5, 0.25))
    """
    sizes, values, single = read_values(ms, values_per_pair, reduce)
    finite = [v[np.isfinite(v)] for v in values]
    g = np.array([_REDUCE[reduce](v) if len(v) else math.nan for v in finite])
    used = np.nan_to_num(g) > 0
    counts = tuple(len(v) for v in finite)
    t, middle = _log_sizes(sizes)
    level_log, b, b_loglog = (float(x[0]) for x in raw_least_squares(t, np.where(used, g, 0.0)[None]))
    reason = _reason(int(used.sum()), len(sizes), reduce) or ("" if math.isfinite(b) else "the least squares did not settle")
    notes = _notes(values, counts, int(used.sum()), reduce)
    low = high = math.nan
    if not reason and single:
        notes.append("one value per size, so no interval")
    elif not reason and min((n for n, use in zip(counts, used, strict=True) if use), default=0) < 2:
        notes.append("a size with a single pair, so no interval")
    elif not reason and resamples:
        drawn = resampled_exponents(sizes, finite, reduce=reduce, resamples=resamples, seed=seed)
        low, high = percentile_interval(drawn, b, level)
    return PowerFit(
        a=math.exp(level_log - b * middle) if math.isfinite(b) else math.nan,
        b=b,
        b_loglog=b_loglog,
        r2=_explained(t[used], g[used], level_log, b),
        b_low=low,
        b_high=high,
        ms=tuple(sizes.tolist()),
        g=tuple(g.tolist()),
        pairs=counts,
        reduce=reduce,
        level=level,
        left_out=int((~used).sum()),
        reason=reason,
        note="; ".join(notes),
        seed=seed,
        outcome=Outcome.ESTIMATED,
    )


def resampled_exponents(ms: Any, values_per_pair: Any, *, reduce: Reduce = "max", resamples: int = 1000, seed: int = 0) -> Array:
    """(resamples,) exponents of as many resampled sets of pairs; NaN where fewer than two sizes stay positive.

    The draws depend on the seed and the numbers of pairs alone. Two quantities of the same pairs are so resampled together,
    and the difference of their exponents has a joint distribution.
    """
    sizes, values, _ = read_values(ms, values_per_pair, reduce)
    rng = np.random.default_rng(seed)
    g = np.zeros((resamples, len(sizes)))
    for k, v in enumerate(values):
        if len(v):
            g[:, k] = _REDUCE[reduce](v[rng.integers(0, len(v), (resamples, len(v)))], axis=1)
    return raw_least_squares(_log_sizes(sizes)[0], g)[1]


def percentile_interval(drawn: Array, point: float, level: float) -> tuple[float, float]:
    """The middle `level` of the resampled values, stretched to hold the point estimate."""
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn) or not math.isfinite(point):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), point), max(float(high), point)


def raw_least_squares(t: Array, g: Array) -> tuple[Array, Array, Array]:
    """Minimise `Σ (g − exp(c + b t))²` for each row of g (rows, sizes) at once; gives c, b and the log-log slope, each (rows,).

    Levenberg and Marquardt's method, started from the straight line through the logarithms. Entries of g that are not positive
    are left out; rows with fewer than two others, and those that do not settle, give NaN.
    """
    weight = (g > 0).astype(np.float64)
    enough = weight.sum(1) > 1
    weight[~enough] = 1.0
    logs = np.log(np.where((g > 0) & enough[:, None], g, 1.0))
    shift = (weight * logs).sum(1) / np.maximum(weight.sum(1), 1.0)
    slope, start = straight_line(t, logs, weight)
    y = weight * np.exp(np.where(weight > 0, logs - shift[:, None], 0.0))  # geometric mean 1
    c, b, settled = _descend(t, y, weight, start - shift, slope)
    found = enough & settled
    return np.where(found, c + shift, math.nan), np.where(found, b, math.nan), np.where(enough, slope, math.nan)


def _descend(t: Array, y: Array, weight: Array, c: Array, b: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Damped Gauss-Newton steps from (c, b), one damping per row; a step that makes a row worse is taken back."""

    def residual(c: Array, b: Array) -> tuple[Array, Array, Array]:
        f = weight * np.exp(np.clip(c[:, None] + b[:, None] * t, -300.0, 300.0))
        return f, y - f, np.square(y - f).sum(1)

    damping = np.full(len(y), 1e-3)
    f, r, loss = residual(c, b)
    settled = np.zeros(len(y), dtype=bool)
    for _ in range(_STEPS):
        ft = f * t
        cc, cb, bb = (f * f).sum(1), (f * ft).sum(1), (ft * ft).sum(1)
        on_c, on_b = (f * r).sum(1), (ft * r).sum(1)
        cc, bb = cc * (1 + damping), bb * (1 + damping)
        scale = np.maximum(cc * bb - cb * cb, 1e-300)
        dc, db = (bb * on_c - cb * on_b) / scale, (cc * on_b - cb * on_c) / scale
        settled = np.abs(db) + np.abs(dc) <= 1e-11 * (1 + np.abs(b))
        if settled.all():
            break
        next_f, next_r, next_loss = residual(c + dc, b + db)
        better = next_loss <= loss
        c, b, loss = np.where(better, c + dc, c), np.where(better, b + db, b), np.where(better, next_loss, loss)
        f, r = np.where(better[:, None], next_f, f), np.where(better[:, None], next_r, r)
        damping = np.clip(np.where(better, damping / 10, damping * 10), 1e-12, 1e12)
    return c, b, settled


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SlopeWindows(Result):
    """Local log-log slopes between neighbouring sizes, and the widest window in which they hardly vary.

    `slopes[k]` belongs to `ms[k]` and `ms[k+1]`, NaN where a g is not positive; `widest` is the window as (smallest, largest)
    size, None where there is no slope at all.
    """

    ms: tuple[float, ...]
    slopes: tuple[float, ...]
    widest: tuple[float, float] | None
    spread: float

    def rows(self) -> list[Row]:
        low, high = self.widest or (math.nan, math.nan)
        ends = zip(self.ms[:-1], self.ms[1:], self.slopes, strict=True)
        return [{"m_from": m, "m_to": n, "slope": s, "in_widest": low <= m and n <= high} for m, n, s in ends]

    def sentence(self) -> str:
        if self.widest is None:
            return "No two neighbouring sizes have positive values, so there is no local slope."
        inside = [row["slope"] for row in self.rows() if row["in_widest"]]
        ends = f"from m = {self.widest[0]:g} to {self.widest[1]:g}"
        share = f"they vary by at most {100 * self.spread:g} % of their mean"
        return f"Local slopes run from {signed(min(inside))} to {signed(max(inside))} {ends}, the widest window in which {share}."


@checked(ms=sequence, g=series, spread=nonnegative)
def slope_windows(ms: Any, g: Any, *, spread: float = 0.2) -> SlopeWindows:
    """Slopes of log g between neighbouring sizes, and the widest window with `max − min ≤ spread · |mean|` among its slopes.

    The widest window has the largest log range; among equal ones that with more sizes, then that of the smaller m. A pair of
    neighbours alone always qualifies.

    >>> found = slope_windows([1, 2, 4, 8], [8.0, 4.0, 2.0, 1.9])
    >>> [round(s, 2) for s in found.slopes], found.widest
    ([-1.0, -1.0, -0.07], (1.0, 4.0))
    """
    sizes, values, _ = read_values(ms, g, "max", name="g")
    y = np.concatenate(values)
    logs = np.log(np.where(np.nan_to_num(y, posinf=0.0) > 0, y, math.nan))
    slopes = np.diff(logs) / np.diff(np.log(sizes))

    def even(part: Array) -> bool:
        return bool(np.isfinite(part).all()) and not np.ptp(part) > spread * abs(part.mean()) + 1e-12

    windows = [(i, j) for i, j in itertools.combinations(range(len(sizes)), 2) if even(slopes[i:j])]
    best = max(windows, key=lambda ends: (round(math.log(sizes[ends[1]] / sizes[ends[0]]), 9), ends[1] - ends[0]), default=None)
    widest = None if best is None else (float(sizes[best[0]]), float(sizes[best[1]]))
    return SlopeWindows(ms=tuple(sizes.tolist()), slopes=tuple(slopes.tolist()), widest=widest, spread=spread)


def read_values(ms: Any, values: Any, reduce: str, *, name: str = "values_per_pair") -> tuple[Array, list[Array], bool]:
    """Sizes ascending, the values of each, and whether one value per size came."""
    choice("reduce", reduce, _REDUCE)
    sizes = _numbers(ms, "ms").reshape(-1)
    if not (np.isfinite(sizes) & (sizes > 0)).all() or len(np.unique(sizes)) < len(sizes):
        raise ValueError(f"ms must hold different positive sizes, each once. Got {sizes.tolist()}.")
    parts = [_numbers(part, name) for part in values]
    if len(parts) != len(sizes):
        raise ValueError(f"ms and {name} must be of one length, an entry per size. Got {len(sizes)} and {len(parts)}.")
    if any(part.ndim > 1 for part in parts):
        raise ValueError(f"{name} must be one value per size, or the values of the pairs of each size, not deeper.")
    order = np.argsort(sizes)
    return sizes[order], [parts[k].reshape(-1) for k in order], all(part.ndim == 0 for part in parts)


def _numbers(values: Any, name: str) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers. Got {shown(values)}.") from error


def _log_sizes(sizes: Array) -> tuple[Array, float]:
    """log m about its mean, which keeps the fit well scaled for any m, and that mean."""
    logs = np.log(sizes)
    middle = float(logs.mean()) if len(logs) else 0.0
    return logs - middle, middle


def _reason(used: int, total: int, reduce: str) -> str:
    if used > 1:
        return ""
    what = f"{total} sizes, of which {used} with a positive {_NAMES[reduce]}"
    return f"a power law needs two sizes with positive values, and there are {what}" if total else "there are no sizes"


def _notes(values: Sequence[Array], counts: Sequence[int], used: int, reduce: str) -> list[str]:
    notes = []
    lost = sum(map(len, values)) - sum(counts)
    if lost:
        notes.append(f"{lost} of {sum(map(len, values))} values are not finite and left out")
    if 1 < used < len(counts):
        notes.append(f"{len(counts) - used} of {len(counts)} sizes left out: their {_NAMES[reduce]} is not positive")
    if reduce == "max" and len(set(counts)) > 1:
        notes.append(f"between {min(counts)} and {max(counts)} pairs per size, and a maximum grows with their number")
    return notes


def _explained(t: Array, g: Array, level: float, b: float) -> float:
    """R² in raw space."""
    total = float(np.square(g - g.mean()).sum()) if len(g) else 0.0
    if not total > 0 or not math.isfinite(b):
        return math.nan
    return 1.0 - float(np.square(g - np.exp(level + b * t)).sum()) / total


def signed(value: float) -> str:
    """Two decimals and a true minus sign.

    >>> signed(-0.4812)
    '−0.48'
    """
    return f"{value:.2f}".replace("-", "−")


def with_interval(value: float, low: float, high: float) -> str:
    """A number with its interval in brackets, where it has one."""
    return f"{signed(value)} [{signed(low)}, {signed(high)}]" if math.isfinite(low) else signed(value)


Verdict = Literal["explains", "does not explain", "unclear"]

#: The bound of Eq. 2.1 cannot fall faster than m to this power, however stable the algorithm is.
BOUND_RATE = -0.5
#: Δb above this counts as stability falling too slowly, if it also exceeds `SIMILAR · |b_gap|`.
MARKED = 0.05
#: Rates are similar if they differ by at most this share of the gap's own: 0.3 where the gap falls like 1/m. The source gives no
#: threshold; this one was chosen so that its own exponents (logistic regression, three deep networks) read as it reads them.
SIMILAR = 0.3
#: Sizes from which a rate is read.
SIZES = 3

#: Further columns that are fitted where the rows have them.
QUANTITIES = ("gap_loss", "gap_01", "stab", "stab_excl_z", "dist", "ndist")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(Result):
    """The rates of gap and stability side by side, and what follows.

    `delta_b = b_stab − b_gap`, positive where stability falls too slowly; `delta_low` and `delta_high` its interval from
    resampling pairs, gap and stability of a pair together. `fits` holds the law of every quantity. `verdict` is "explains",
    "does not explain" or "unclear", `reason` why, `note` what to keep in mind.
    """

    b_gap: float
    b_stab: float
    delta_b: float
    delta_low: float
    delta_high: float
    b_dist: float
    fits: dict[str, PowerFit]
    verdict: Verdict
    reason: str
    gap: str = "gap_loss"
    stab: str = "stab"
    trial: int | None = None
    step: int | None = None
    note: str = ""

    def rows(self) -> list[Row]:
        shared = {"trial": self.trial, "step": self.step, "verdict": self.verdict, "delta_b": self.delta_b}
        return [{"quantity": name, **fit.rows()[0], **shared} for name, fit in self.fits.items()]

    def sentence(self) -> str:
        heads = {
            "explains": "Stability explains the generalisation gap's fall with m",
            "does not explain": "Stability does not explain the generalisation gap's fall with m",
            "unclear": "Whether stability explains the generalisation gap is unclear",
        }
        note = f" Note: {self.note}." if self.note else ""
        return f"{heads[self.verdict]}: {self.reason}.{self._rates()}{note}"

    def _rates(self) -> str:
        if not math.isfinite(self.delta_b):
            return ""
        gap, stab = self.fits[self.gap].exponent(), self.fits[self.stab].exponent()
        dist = f", the distance of the parameters like m^{self.fits['dist'].exponent()}" if math.isfinite(self.b_dist) else ""
        delta = with_interval(self.delta_b, self.delta_low, self.delta_high)
        return f" The gap goes like m^{gap}, stability like m^{stab}{dist}; Δb = {delta}."


@checked(trial=whole, step=whole, gap=instance(str), stab=instance(str), resamples=whole, level=fraction, seed=whole, pool=count)
def explains(
    rows_or_result: Any,
    *,
    trial: int | None = None,
    step: int | None = None,
    gap: str = "gap_loss",
    stab: str = "stab",
    reduce: Literal["max", "mean", "median"] = "max",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    pool: int | None = None,
) -> Explanation:
    """Compare the rates at which gap and stability fall with m, and say whether the one can explain the other.

    Eq. 2.1 bounds the gap by max{β, 1/√m} up to logarithms. With τ = max(MARKED, SIMILAR · abs(b_gap)) the verdict is

    - "does not explain" if the whole interval of Δb lies above `MARKED` and Δb itself above τ;
    - "explains" if the gap falls, and the whole interval of Δb lies below τ. Where the gap falls faster than m^(−1/2) this
      says only that stability follows the gap, as it does for logistic regression: the term 1/√m of the bound is then the
      slower one, and the bound itself promises no more than m^(−1/2);
    - "unclear" otherwise, and for gaps that are not positive or fewer than `SIZES` sizes.

    Args:
        rows_or_result: rows of a stability study (one per trial, size, pair and checkpoint), a DataFrame, or the study's result.
        trial, step: which seed-trial and checkpoint. None: the first trial, which the note says where there are more, since laws
            belong to one seed each; and the last checkpoint of each size.
        gap, stab: the columns compared.
        reduce, resamples, level, seed: as for `fit_power_law`.
        pool: size of the training pool, where known: at m = pool all training sets are the same set.

    The interval of Δb resamples the pairs of each size, the same for both columns. It is somewhat short, as those of the
    exponents are (see `fit_power_law`): a nominal 95 % covered 87 to 90 % for log-normal pairs.

    >>> rows = [{"m": m, "pair": k, "gap_loss": m**-0.4 * (1 - k / 50), "stab": 1.0 - k / 40} for m in (1e3, 2e3, 4e3, 8e3)
    ...         for k in range(8)]
    >>> found = explains(rows)
    >>> found.verdict, round(found.delta_b, 6)
    ('does not explain', 0.4)
    """
    table, chosen, notes = of_one_checkpoint(_table(rows_or_result, gap, stab), trial, step)
    usable = [row for row in table if math.isfinite(_number(row[gap])) and math.isfinite(_number(row[stab]))]
    if len(usable) < len(table):
        notes.append(f"{len(table) - len(usable)} of {len(table)} pairs left out: their gap or stability is not finite")
    ms = sorted({float(row["m"]) for row in usable})
    by_size = {m: [row for row in usable if float(row["m"]) == m] for m in ms}

    def values(name: str) -> list[list[float]]:
        return [[_number(row.get(name)) for row in by_size[m]] for m in ms]

    names = [gap, stab, *(n for n in QUANTITIES if n not in (gap, stab) and any(row.get(n) is not None for row in usable))]
    options: dict[str, Any] = {"reduce": reduce, "resamples": resamples, "seed": seed}
    fits = {name: fit_power_law(ms, values(name), level=level, **options) for name in names}
    b_gap, b_stab = fits[gap].b, fits[stab].b
    low = high = math.nan
    if math.isfinite(fits[gap].b_low) and math.isfinite(fits[stab].b_low):
        drawn = resampled_exponents(ms, values(stab), **options) - resampled_exponents(ms, values(gap), **options)
        low, high = percentile_interval(drawn, b_stab - b_gap, level)
    verdict, reason = _judge(fits[gap], fits[stab], low, high)
    notes += [f"{name}: {fits[name].note}" for name in (gap, stab) if fits[name].note]
    if pool is not None and any(m >= pool for m in ms):
        notes.append(f"at m = {pool} every training set is the whole pool; its pairs differ in the exchange and the order only")
    return Explanation(
        b_gap=b_gap,
        b_stab=b_stab,
        delta_b=b_stab - b_gap,
        delta_low=low,
        delta_high=high,
        b_dist=fits["dist"].b if "dist" in fits else math.nan,
        fits=fits,
        verdict=verdict,
        reason=reason,
        gap=gap,
        stab=stab,
        trial=chosen[0],
        step=chosen[1],
        note="; ".join(notes),
        seed=seed,
        outcome=Outcome.ESTIMATED,
    )


def _judge(gap: PowerFit, stab: PowerFit, low: float, high: float) -> tuple[Verdict, str]:
    """The reading rule: a verdict and its reason."""
    for name, fit in (("gap", gap), ("stability", stab)):
        if fit.reason:
            return "unclear", f"the {name} has no rate: {fit.reason}"
        if len(fit.ms) - fit.left_out < SIZES:
            return "unclear", f"the {name} is positive at {len(fit.ms) - fit.left_out} sizes, and a rate needs at least {SIZES}"
    if not gap.b < 0:
        return "unclear", "the gap does not fall with m, so there is no fall to explain"
    if not math.isfinite(low):
        return "unclear", "there is no interval without at least two pairs per size"
    delta = stab.b - gap.b
    similar = max(MARKED, SIMILAR * abs(gap.b))
    if low > MARKED and delta > similar:
        slow = "falls markedly more slowly than the gap" if stab.b < 0 else "shows no fall, and without one the bound is vacuous"
        return "does not explain", f"stability {slow}{_against_bound(gap, stab)}"
    if high <= similar and gap.b_high < 0:
        return "explains", f"stability falls at a similar rate or faster{_against_bound(gap, stab)}"
    if gap.b_high >= 0:
        return "unclear", "the interval of the gap's exponent reaches zero; more pairs or a wider range of m would narrow it"
    return "unclear", (
        f"the interval of Δb, {signed(low)} to {signed(high)}, holds both similar rates (up to {signed(similar)}) and "
        "marked differences; more pairs or a wider range of m would narrow it"
    )


def _against_bound(gap: PowerFit, stab: PowerFit) -> str:
    """How the gap's rate stands to the m^(−1/2) that the bound cannot beat."""
    if gap.b_low > BOUND_RATE:
        return ", and the gap falls more slowly than m^(−1/2), so stability is what decides the bound"
    if gap.b_high >= BOUND_RATE:
        return ", and the gap falls about as fast as m^(−1/2), the fastest the bound can"
    slower = "the slower one, and the bound promises no more than that" if stab.b < BOUND_RATE else "too slow as well"
    return f"; the gap falls faster than m^(−1/2), though, so the bound's own term 1/√m is {slower}"


def _table(rows: Any, *columns: str) -> list[Row]:
    """Rows with the columns asked for."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")
    elif callable(getattr(rows, "rows", None)):
        rows = rows.rows()
    if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
        raise TypeError(
            f"rows_or_result must be the rows of a stability study, a DataFrame or its result. Got {type(rows).__name__}."
        )
    table = [dict(a_mapping(f"rows_or_result[{i}]", row)) for i, row in enumerate(rows)]
    if not table:
        raise ValueError("rows_or_result holds no row, so there is nothing to compare.")
    for name in ("m", *columns):
        missing = [row for row in table if name not in row]
        if missing:
            known = [str(column) for column in missing[0]]
            raise ValueError(
                f"rows_or_result: gap and stab must be columns of the rows. One has no {name!r}. "
                f"Nearest: {', '.join(nearest(name, known))}."
            )
    return table


def of_one_checkpoint(
    table: list[Row], trial: int | None, step: int | None
) -> tuple[list[Row], tuple[int | None, int | None], list[str]]:
    """The rows of one trial and one checkpoint per size; the trial and the step they are of; and notes on the choice."""
    notes: list[str] = []
    trials = sorted({row["trial"] for row in table if row.get("trial") is not None})
    if trials:
        if trial is None and len(trials) > 1:
            notes.append(f"trial {trials[0]} of {len(trials)}; trial= chooses another")
        trial = known("trial", trials[0] if trial is None else trial, trials)
        table = [row for row in table if row.get("trial") == trial]
    steps = sorted({row["step"] for row in table if row.get("step") is not None})
    if not steps:
        return table, (trial, None), notes
    if step is not None:
        known("step", step, steps)
        return [row for row in table if row.get("step") == step], (trial, step), notes
    last = {m: max(row["step"] for row in table if row["m"] == m) for m in {row["m"] for row in table}}
    ends = set(last.values())
    if len(ends) > 1:
        notes.append(f"the sizes were trained for {min(ends)} to {max(ends)} steps")
    return [row for row in table if row["step"] == last[row["m"]]], (trial, ends.pop() if len(ends) == 1 else None), notes


def known(name: str, value: int, there: Sequence[int]) -> int:
    """The value, or an error that lists what the rows have."""
    if value not in there:
        raise ValueError(f"The rows have no {name} {value!r}. They have {', '.join(map(str, there))}.")
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
