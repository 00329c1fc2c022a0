"""`survey`: the main job. Price the instruments, run them within the budget, judge, and say what was found."""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import A_NUMBER, a_mapping, a_text, about, checked, choice, count, each, positive, seed
from theodolite.arguments import shown as described
from theodolite.errors import (
    ArgumentError,
    ClosureError,
    NonFiniteError,
    OutOfTimeError,
    OutputLossError,
    ParameterSelectionError,
    SecondOrderError,
    WeightingError,
)
from theodolite.instruments.base import Depth, InapplicableError, Instrument, SurveyContext
from theodolite.instruments.planning import IMPOSSIBLE, Plan, Step, as_plan, fit, fit_memory, price_steps, row_of
from theodolite.instruments.registry import all_instruments, get
from theodolite.instruments.verdict import judge, shown
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem import Problem
from theodolite.problem.optimizers import as_optimizer
from theodolite.progress import Stage, TimeLimit, stages
from theodolite.results import Cost, Finding, Outcome, Result, Row, Severity
from theodolite.text import duration, nearest, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Budget = float | str | None
_NOT_GIVEN: Any = object()
#: Share of the free memory that an instrument may plan to use.
MEMORY_SHARE = 0.7
#: What is still at work when so many times the budget are over is stopped.
PATIENCE = 1.05
DEPTHS: tuple[Depth, ...] = get_args(Depth)
#: Errors with which an instrument is skipped and has not failed.
NOT_FOR_THIS_PROBLEM = (ClosureError, InapplicableError, OutOfTimeError, OutputLossError, SecondOrderError, WeightingError)
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Survey(Result):
    """What a survey found: the `verdict` in at most three sentences and the learning rate `lr` to set; then `findings`.

    `findings` are all of them, the worst first, and `shown` those that stand below the verdict; `causes` what is at fault;
    `learning` whether the run learns, None where that is not known. `results` are the measurements themselves by instrument
    (`results["curvature"]`), `plan` expected against real costs. `to_html(path)` writes the page.
    """

    title: str
    findings: tuple[Finding, ...]
    results: dict[str, Result]
    plan: tuple[Row, ...]
    facts: dict[str, str]
    budget: float | None = None
    sentences: tuple[str, ...] = ()
    lr: float | None = None
    causes: tuple[str, ...] = ()
    learning: bool | None = None

    @property
    def verdict(self) -> str:
        """Is it learning, what is wrong, what to change, how that is known: at most three sentences."""
        return " ".join(self.sentences)

    @property
    def sound(self) -> bool:
        """Whether nothing critical was found, no instrument failed, and more could be measured than was impossible.

        What a budget leaves out, or what does not concern this problem, does not count.
        """
        critical = any(f.severity is Severity.CRITICAL for f in self.findings)
        states = [row["state"] for row in self.plan]
        impossible = sum(str(row["reason"]).startswith(IMPOSSIBLE) for row in self.plan)
        return not critical and "failed" not in states and states.count("done") >= impossible

    @property
    def good(self) -> bool:
        """Whether it was shown to learn, and nothing was found that costs it something."""
        return self.sound and self.learning is True and not self.causes

    @property
    def shown(self) -> list[Finding]:
        """The findings that stand below the verdict, at most seven."""
        return shown(self.findings)

    def of(self, instrument: str) -> list[Finding]:
        """The findings of one instrument."""
        return [f for f in self.findings if f.instrument == instrument]

    def labels(self) -> list[str]:
        """The labels of all findings, for programs."""
        return [f.label for f in self.findings if f.label]

    def rows(self) -> list[Row]:
        return [finding.row() for finding in self.findings]

    def sentence(self) -> str:
        return "\n".join([f"Survey of {self.title}: {self.verdict}", *(f"  {finding}" for finding in self.shown)])

    def plot(self) -> Figure:
        """The picture that stands beside the verdict on the page."""
        from theodolite.instruments.page import first_picture

        figure = first_picture(self)
        if figure is None:
            raise ValueError(
                "This survey has no picture beside its verdict. Those of its instruments: survey.results[name].plot()."
            )
        return figure

    def _repr_html_(self) -> str:
        """The verdict with the few findings below it."""
        lines = "".join(f"<li><b>{html.escape(f.severity.value)}</b> {html.escape(f.sentence)}</li>" for f in self.shown)
        setting = "" if self.lr is None else f"<p><code>lr={self.lr:.3g}</code></p>"
        head = f"<p><small>Survey of {html.escape(self.title)}</small></p><p><b>{html.escape(self.verdict)}</b></p>{setting}"
        return f'<div style="border-left:4px solid #23588a;padding:0.2em 1em;max-width:60em">{head}<ul>{lines}</ul></div>'

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the survey as one self-contained page."""
        from theodolite.instruments.page import page_of
        from theodolite.report import write_page

        return write_page(page_of(self), path)


def _instruments(name: str, value: Any) -> list[str]:
    """Names of instruments, one or several."""
    return [value] if isinstance(value, str) else each(a_text)(name, value)


@checked(
    lr=partial(positive, wanted=A_NUMBER),
    batch_size=count,
    population=count,
    only=_instruments,
    name=a_text,
    facts=a_mapping,
    seed=seed,
)
def survey(
    problem: Problem | nn.Module,
    loss: Any = _NOT_GIVEN,
    data: Any = None,
    *,
    lr: float | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | str | None = None,
    budget: Budget = None,
    depth: Depth = "normal",
    only: Iterable[str] | None = None,
    valid: Any = None,
    batch_size: int | None = None,
    checkpoints: Sequence[Any] = (),
    name: str = "",
    population: int | None = None,
    facts: dict[str, str] | None = None,
    seed: int = 0,
    progress: bool | Stage | None = None,
) -> Survey:
    """Is it learning, what is wrong, what should I change? Measure what applies to a problem, try the advice, and judge.

    Args:
        problem: a `Problem`; or a model, followed by its loss and its data. In the second form data that hold NaN and models
            without trainable parameters become findings too, where building the `Problem` would raise.
        lr, optimizer: the learning rate and the optimizer you train with, or its name with `lr`; the survey then says what to
            expect of them.
        budget: seconds, or a text such as "60s" or "2m"; efforts are lowered and instruments left out to fit.
        depth: "quick" answers the question, "normal" explains it, "deep" measures everything that applies.
        only: names of instruments; those they need run too.
        valid: validation data, in any form that `data` takes.
        batch_size: of the batches you train with, where the data does not come in them.
        checkpoints: other states of the model (state dicts or files), to which the path from here is measured.
        name: what the page calls the subject; by default the model's class.
        population: size of the data set that the data is a sample of, for sampling errors.
        progress: True or False for a bar, None for one on a terminal only; or a function that is told what is going on.

    Returns:
        A `Survey`: print it, look at `.verdict`, `.lr` and `.findings`, or write the page with `.to_html(path)`. Ctrl-C raises
        `SurveyInterrupted`, whose `.survey` holds what was finished.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> found = survey(Problem(model, nn.MSELoss(), (x, torch.zeros(2, 1).double())), lr=0.5, only=["rate"])  # critical: 2/9
    >>> found.of("rate")[0].label
    'divergence expected'
    """
    began = time.perf_counter()
    allowed = seconds_of(budget)
    known = {"model": type(getattr(problem, "model", problem)).__name__, **(facts or {})}
    title = name or known["model"]
    given: dict[str, Any] = {"valid": valid, "batch_size": batch_size, "checkpoints": checkpoints, "population": population}
    opened = open_context(problem, loss, data, lr=lr, optimizer=optimizer, **given, seed=seed)
    if isinstance(opened, Finding):
        verdict, findings = judge([opened], {})
        said: dict[str, Any] = {"sentences": verdict.sentences, "causes": verdict.causes}
        return Survey(title=title, findings=findings, results={}, plan=(), facts=known, budget=allowed, seed=seed, **said)
    run = _Run(opened, _chosen(only, opened, depth), allowed, began)
    run.findings += other_gradient(opened.problem)
    try:
        with stages(len(run.instruments), progress=progress) as begin:
            run.all(begin)
        return _surveyed(run, title, known, seed)
    except KeyboardInterrupt as interrupt:
        raise SurveyInterrupted(_surveyed(run, title, known, seed)) from interrupt


class SurveyInterrupted(KeyboardInterrupt):
    """Ctrl-C during a survey; `survey` holds what was finished."""

    def __init__(self, survey: Survey) -> None:
        super().__init__("the survey was interrupted; what was finished is in .survey")
        self.survey = survey


def _surveyed(run: _Run, title: str, known: dict[str, str], seed: int) -> Survey:
    """What a run, whole or broken off, amounts to."""
    context = run.context
    verdict, findings = judge(run.findings, context.results, lr=context.lr)
    return Survey(
        title=title,
        findings=findings,
        results=context.results,
        plan=tuple(run.rows),
        facts={**known, **{k: v for k, v in _facts(context).items() if k not in known}},
        budget=run.budget,
        sentences=verdict.sentences,
        lr=verdict.lr,
        causes=verdict.causes,
        learning=verdict.learning,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(time.perf_counter() - run.began, run.route, run.peak_bytes, context.problem.notes),
    )


@checked(lr=partial(positive, wanted=A_NUMBER), only=_instruments, seed=seed)
def plan_survey(
    problem: Problem | nn.Module,
    loss: Any = _NOT_GIVEN,
    data: Any = None,
    *,
    lr: float | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | str | None = None,
    budget: Budget = None,
    depth: Depth = "normal",
    only: Iterable[str] | None = None,
    seed: int = 0,
) -> Plan:
    """What `survey` would do with the same arguments, and what it would take; only a gradient and a few products are made."""
    context = open_context(problem, loss, data, lr=lr, optimizer=optimizer, seed=seed)
    if isinstance(context, Finding):
        raise ValueError(context.sentence)
    began = time.perf_counter()
    run = _Run(context, _chosen(only, context, depth), seconds_of(budget), began)
    return as_plan(context, run.prepare(), run.budget)


def seconds_of(budget: Budget) -> float | None:
    """A budget in seconds.

    >>> seconds_of("60s"), seconds_of("1.5m"), seconds_of(20), seconds_of(None)
    (60.0, 90.0, 20.0, None)
    """
    if budget is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(budget).lower())
    try:
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"budget must be a positive time such as 60, '60s', '2m' or '1h'. Got {described(budget)}.")
    return seconds


def open_context(
    problem: Problem | nn.Module,
    loss: Any,
    data: Any,
    *,
    lr: float | None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | str | None,
    valid: Any = None,
    batch_size: int | None = None,
    checkpoints: Sequence[Any] = (),
    population: int | None = None,
    seed: int = 0,
) -> SurveyContext | Finding:
    """The context of a survey, or the finding that stands in its way."""
    if isinstance(problem, Problem) and (loss is not _NOT_GIVEN or data is not None):
        raise ValueError("A Problem has its own loss and data: survey(problem) or survey(model, loss, data).")
    if not isinstance(problem, Problem) and (loss is _NOT_GIVEN or data is None):
        raise ArgumentError(
            "problem must be a Problem, or a model with its loss and data: survey(model, loss, data). "
            f"Got {type(problem).__name__} alone."
        )
    try:
        problem = problem if isinstance(problem, Problem) else _build(problem, loss, data, optimizer)
        if valid is not None and not isinstance(valid, Problem):
            with about("valid"):
                valid = problem.on(valid)
    except NonFiniteError as error:
        return not_finite(str(error))
    optimizer = as_optimizer(optimizer, problem.parameters, lr=lr, needs_rate=True)
    problem = problem.limited(TimeLimit())
    given: dict[str, Any] = {
        "population": population, "batch_size": batch_size, "checkpoints": checkpoints,
        "valid": None if valid is None else valid.limited(problem.time_limit),
    }  # fmt: skip
    return SurveyContext(problem, lr=lr, optimizer=optimizer, **given, seed=seed)


def other_gradient(problem: Problem) -> list[Finding]:
    """The finding that autograd's gradient is not that of the loss, where it is not."""
    if problem.gradient_note is None:
        return []
    return [
        Finding(
            instrument="batches",
            severity=Severity.WARNING,
            label="gradient of another function",
            cause="gradient of another function",
            sentence=f"{problem.gradient_note[0].upper()}{problem.gradient_note[1:]}.",
            advice="If that is meant, read every number as one about the optimizer's own surface; if not, look for a .detach(), "
            "a rounding or a custom backward between the parameters and the loss.",
        )
    ]


def not_finite(sentence: str) -> Finding:
    """The finding that ends a survey before it begins."""
    return Finding(
        instrument="batches",
        severity=Severity.CRITICAL,
        label="not finite",
        cause="not finite",
        sentence=sentence,
        advice="Repair or leave out what is named here; until then no number about this model means anything.",
    )


def _build(model: nn.Module, loss: Any, data: Any, optimizer: Any) -> Problem:
    """The problem of the parameters that train: those that require a gradient and, if it is known, that the optimizer has."""
    params = None
    if isinstance(optimizer, Optimizer):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if trained and any(p.requires_grad and id(p) not in trained for p in model.parameters()):
            params = lambda name, p: id(p) in trained  # noqa: E731
    try:
        return Problem(model, loss, data, params=params)
    except WeightingError:  # what needs no weights can still be measured, and the rest says why it cannot
        problem = Problem(model, loss, data, params=params, check=False)
        problem.check_derivatives()
        return problem
    except ParameterSelectionError:
        if not any(p.is_floating_point() for p in model.parameters()):
            raise
        return Problem(model, loss, data, params="*")  # all frozen: the survey says so and measures them all the same


def _chosen(only: Iterable[str] | None, context: SurveyContext, depth: Depth) -> list[Instrument]:
    choice("depth", depth, DEPTHS)
    everything = all_instruments()
    if only is None:
        allowed = DEPTHS[: DEPTHS.index(depth) + 1]
        return [i for i in everything if i.depth in allowed and i.concerns(context)]
    known = {instrument.name for instrument in everything}
    wanted = {i.name for i in everything if i.first}
    pending = list(only)
    while pending:
        name = pending.pop()
        if name not in known:
            near = ", ".join(nearest(name, known, count=3))
            raise ValueError(f"only: no instrument is called {name!r}. Nearest: {near}.")
        if name not in wanted:
            wanted.add(name)
            pending += get(name).needs
    return [instrument for instrument in everything if instrument.name in wanted]


def _facts(context: SurveyContext) -> dict[str, str]:
    problem = context.problem
    loss = problem.loss_function
    layers = plural(len(problem.layers), "layer")
    facts = {
        "parameters": f"{problem.size:,} in {layers}".replace(",", " "),
        "loss": "the model's own" if loss is None else getattr(loss, "__name__", type(loss).__name__),
        "samples": f"{problem.samples} in {len(problem.data)} batch{'es' if len(problem.data) > 1 else ''}",
        "mode": str(problem.mode),
        "precision": "half, measured through a float32 copy"
        if problem.half_precision
        else str(problem.dtype).removeprefix("torch."),
        "optimizer": "gradient descent" if context.optimizer is None else type(context.optimizer).__name__,
        "learning rate": "not given, or 0" if context.lr is None else f"{context.lr:g}",
    }
    return facts


class _Run:
    """The instruments at work, one after the other."""

    def __init__(self, context: SurveyContext, instruments: Sequence[Instrument], budget: float | None, began: float) -> None:
        self.context, self.instruments, self.budget, self.began = context, list(instruments), budget, began
        if budget is not None:
            context.problem.time_limit.at = began + PATIENCE * budget
        context.budget = budget
        self.findings = context.findings
        self.rows: list[Row] = []
        self.peak_bytes = 0
        self.route = ""
        self.drift = 1.0  # what things took over what was expected
        self._first: dict[str, float] = {}

    @property
    def left(self) -> float | None:
        return None if self.budget is None else self.budget - (time.perf_counter() - self.began)

    def prepare(self) -> list[Step]:
        """Run what comes before anything can be timed, then price and fit the rest."""
        for instrument in self.instruments:
            if instrument.first:
                self._measure(instrument, {})
        if any(f.severity is Severity.CRITICAL for f in self.findings):
            return [
                Step(i, (), reason="nothing can be measured before that is repaired") for i in self.instruments if not i.first
            ]
        room = MEMORY_SHARE * available_bytes(self.context.problem.device)
        try:
            return fit(fit_memory(price_steps(self.context, self.instruments), room), self.left)
        except OutOfTimeError:
            late = f"beyond the budget: its {duration(self.budget or 0.0)} were over before anything could be timed"
            return [Step(i, (), reason=late) for i in self.instruments if not i.first]

    def all(self, begin: Stage) -> None:
        """Everything: the rows say what was expected, what it took, and what was left out."""
        try:
            steps = self.prepare()
        except KeyboardInterrupt:
            for instrument in self.instruments:
                if instrument.name in self._first:
                    row = row_of(Step(instrument, (), reason="before anything could be priced"))
                    self.rows.append({**row, "state": "done", "reason": "", "took": self._first[instrument.name]})
            raise
        for place, step in enumerate(steps):
            begin(step.instrument.title)
            self._one(step, steps[place + 1 :])

    def _one(self, step: Step, later: Sequence[Step]) -> None:
        instrument = step.instrument
        if instrument.name in self._first:
            self.rows.append({**row_of(step), "state": "done", "took": self._first[instrument.name]})
            return
        step = self._adjust(step, later)
        lost = [name for name in instrument.needs if name not in self.context.results]
        if not step.reason and lost:
            step = replace(step, reason=f"it needs {lost[0]}, which gave no result")
        if step.reason:
            self.rows.append({**row_of(step), "took": None})
            return
        state, failure, took = self._measure(instrument, dict(step.price.effort))
        self.rows.append({**row_of(step), "state": state, "reason": failure, "took": took})
        if step.price.seconds > 0.05:
            self.drift = 0.4 * self.drift + 0.6 * took / step.price.seconds

    def _adjust(self, step: Step, later: Sequence[Step]) -> Step:
        """With a budget: as much effort as is left once the others have what they need, and a hard limit in seconds.

        What was too expensive when it was planned gets another chance if things have taken less than expected since.
        """
        left = self.left
        if left is None or (step.reason and not step.deferred):
            return step
        waiting = [s for s in later if (not s.reason or s.deferred) and s.instrument.name not in self._first]
        others = self.drift * sum(s.cheapest.seconds for s in waiting)
        spare = max(left - others, 0.5 * left)
        affordable = [i for i, price in enumerate(step.prices) if self.drift * price.seconds <= spare]
        if not affordable:
            needed = self.drift * step.cheapest.seconds
            if needed > left:
                why = f"beyond the budget: it needs about {duration(needed)}, {duration(max(0.0, left))} were left"
                return replace(step, reason=why, deferred=False)
            affordable = [len(step.prices) - 1]
        self.context.allowance = spare
        return replace(step, choice=affordable[0], reason="", deferred=False)

    def _measure(self, instrument: Instrument, effort: dict[str, Any]) -> tuple[str, str, float]:
        """Run one instrument: its state, why it is not done, and the seconds. A failure does not stop the others."""
        began = time.perf_counter()
        state, reason = "done", ""
        try:
            result = instrument.run(self.context, **effort)
            self.context.results[instrument.name] = result
            self.peak_bytes = max(self.peak_bytes, result.cost.peak_bytes)
            self.route = self.route or (result.cost.route if "graph" in result.cost.route else "")
            found = instrument.findings(self.context, result)
            self.context.remedies |= instrument.remedies(self.context, result)
            self.findings += found  # last: of what fails on the way nothing else is said
        except NOT_FOR_THIS_PROBLEM as error:
            state, reason = "skipped", str(error)
        except Exception as error:
            state, reason = "failed", f"{type(error).__name__}: {error}"
            self.findings.append(
                instrument.found(Severity.WARNING, f"{instrument.title} could not be measured. {reason}", label="failed")
            )
        took = time.perf_counter() - began
        if instrument.first:
            self._first[instrument.name] = took
        return state, reason, took
