"""The plan of a survey: which instruments, with how much effort, at what price; and how it fits a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from theodolite.instruments.base import Instrument, SurveyContext
from theodolite.instruments.timings import Work
from theodolite.results import Result, Row
from theodolite.text import duration

NO_PRICE, NO_PRODUCTS, NEEDS = "its price could not be found", "there are no Hessian products here", "it needs"
#: How the reasons begin for which an instrument that concerns a problem cannot be asked.
IMPOSSIBLE = (NO_PRICE, NO_PRODUCTS, NEEDS)


@dataclass(frozen=True)
class Price:
    """What one effort of an instrument is expected to take."""

    effort: Mapping[str, Any]
    seconds: float
    gradients: float
    bytes: int


@dataclass(frozen=True)
class Step:
    """One instrument in the plan: the prices of its efforts, fullest first, and which one is chosen.

    `reason` says why it will not run, and is empty if it will; `deferred` marks one that is too expensive as far as is known,
    and may yet run if the others take less than expected.
    """

    instrument: Instrument
    prices: tuple[Price, ...]
    choice: int = 0
    reason: str = ""
    deferred: bool = False

    @property
    def price(self) -> Price:
        return self.prices[self.choice]

    @property
    def cheapest(self) -> Price:
        return self.prices[-1]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan(Result):
    """What a survey will do and what it will take: one row per instrument, in gradients, seconds and bytes."""

    steps: tuple[Row, ...]
    seconds: float
    gradients: float
    peak_bytes: int
    gradient_seconds: float
    budget: float | None
    partial: float = 1.0
    timing_seconds: float = 0.0

    def rows(self) -> list[Row]:
        return [dict(step) for step in self.steps]

    def sentence(self) -> str:
        within = "" if self.budget is None else f" within a budget of {duration(self.budget)}"
        part = "" if self.partial == 1.0 else f"; timed on {100 * self.partial:.2g} % of the data"
        running = sum(step["state"] == "planned" for step in self.steps)
        return (
            f"{running} of {len(self.steps)} instruments{within}: about {duration(self.seconds)}, that is {self.gradients:.3g} "
            f"gradients of {1000 * self.gradient_seconds:.3g} ms, and {self.peak_bytes / 2**20:.3g} MiB of memory{part}."
        )


def price_steps(context: SurveyContext, instruments: Sequence[Instrument]) -> list[Step]:
    """Each instrument with the prices of its efforts, or the reason why it does not apply."""
    steps = []
    missing: dict[str, str] = {}
    _ = context.timings.gradient  # what is wrong with the problem itself ends the survey here
    for instrument in instruments:
        works: list[tuple[Mapping[str, Any], Work]] = []
        lost = [name for name in instrument.needs if name in missing]
        try:
            reason = instrument.applies(context)
            if not reason and lost:
                reason = f"{NEEDS} {lost[0]}, which will not run"
            if not reason:
                works = [(effort, instrument.cost(context, **effort)) for effort in instrument.efforts]
        except Exception as error:  # of this instrument alone
            reason = f"{NO_PRICE}: {type(error).__name__}: {error}"
        if reason:
            missing[instrument.name] = reason
            steps.append(Step(instrument, (), reason=reason))
            continue
        if context.timings.refused and any(work.products or work.block_products for _, work in works):
            missing[instrument.name] = context.timings.refused
            steps.append(Step(instrument, (), reason=f"{NO_PRODUCTS}: {context.timings.refused}"))
            continue
        steps.append(Step(instrument, tuple(_price(context, effort, work) for effort, work in works)))
    return steps


def _price(context: SurveyContext, effort: Mapping[str, Any], work: Work) -> Price:
    timings = context.timings
    graph = timings.graph_bytes if work.products or work.block_products else 0
    return Price(effort, timings.seconds(work), timings.gradients(work), work.bytes + graph)


def fit_memory(steps: Sequence[Step], limit: float) -> list[Step]:
    """Drop the efforts that would need more memory than `limit` bytes, and the instruments that have no other."""
    fitted = []
    for step in steps:
        prices = tuple(price for price in step.prices if price.bytes <= limit)
        if step.reason or prices == step.prices:
            fitted.append(step)
        elif prices:
            fitted.append(replace(step, prices=prices))
        else:
            need = f"{step.cheapest.bytes / 2**30:.2g} GiB of memory, {limit / 2**30:.2g} GiB may be used"
            fitted.append(replace(step, prices=step.prices[-1:], reason=f"it would need {need}"))
    return fitted


def fit(steps: Sequence[Step], budget: float | None) -> list[Step]:
    """Choose efforts so that the sum fits the budget.

    First every instrument as cheaply as it goes, then more effort, both in the order of the instruments; what does not fit even
    so is left out. What has run already costs nothing.
    """
    if budget is None:
        return list(steps)
    fitted: list[Step] = []
    left = max(0.0, budget)
    dropped: set[str] = set()
    for step in steps:
        if not step.reason and not step.instrument.first:
            step = replace(step, choice=len(step.prices) - 1)
            lost = [name for name in step.instrument.needs if name in dropped]
            if lost:
                step = replace(step, reason=f"beyond the budget: it needs {lost[0]}, which will not run", deferred=True)
            elif (needed := step.cheapest.seconds) > left:
                why = f"it would take about {duration(needed)} of {duration(left)} left"
                step = replace(step, reason=f"beyond the budget: {why}", deferred=True)
            else:
                left -= needed
        dropped |= {step.instrument.name} if step.reason else set()
        fitted.append(step)
    return _spend(fitted, left)


def _spend(steps: list[Step], left: float) -> list[Step]:
    """Raise efforts, instrument by instrument, while seconds are left."""
    for place, step in enumerate(steps):
        if step.reason:
            continue
        for choice in range(len(step.prices)):
            extra = step.prices[choice].seconds - step.cheapest.seconds
            if extra <= left:
                steps[place] = replace(step, choice=choice)
                left -= extra
                break
    return steps


def as_plan(context: SurveyContext, steps: Sequence[Step], budget: float | None) -> Plan:
    """The plan as a result that can be shown."""
    timings = context.timings
    running = [step for step in steps if not step.reason]
    seconds = timings.spent + sum(step.price.seconds for step in running)
    return Plan(
        steps=tuple(row_of(step) for step in steps),
        seconds=seconds,
        gradients=seconds / timings.gradient,
        peak_bytes=max((step.price.bytes for step in running), default=0),
        gradient_seconds=timings.gradient,
        budget=budget,
        timing_seconds=timings.spent,
        partial=timings.share,
        seed=context.seed,
    )


def row_of(step: Step) -> Row:
    """One line of the plan."""
    row: Row = {"instrument": step.instrument.name, "state": "skipped" if step.reason else "planned"}
    if step.reason:
        return {**row, "effort": "", "gradients": None, "seconds": None, "MiB": None, "reason": step.reason}
    price = step.price
    effort = ", ".join(f"{k}={v}" for k, v in price.effort.items())
    numbers = {"gradients": price.gradients, "seconds": price.seconds, "MiB": price.bytes / 2**20}
    return {**row, "effort": effort, **numbers, "reason": ""}
