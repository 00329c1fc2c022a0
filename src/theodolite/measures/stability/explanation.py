"""Whether uniform stability is strong enough to explain how the generalisation gap falls with the size of the training set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from theodolite.measures.stability.power_law import (
    PowerFit,
    fit_power_law,
    percentile_interval,
    resampled_exponents,
    signed,
    with_interval,
)
from theodolite.results import Outcome, Result, Row
from theodolite.text import nearest

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
        raise TypeError(f"explains takes the rows of a stability study, a DataFrame or its result. Got {type(rows).__name__}.")
    table = [dict(row) for row in rows]
    if not table:
        raise ValueError("There are no rows, so there is nothing to compare.")
    for name in ("m", *columns):
        missing = [row for row in table if name not in row]
        if missing:
            known = [str(column) for column in missing[0]]
            raise ValueError(f"A row has no column {name!r}. Nearest: {', '.join(nearest(name, known))}.")
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
