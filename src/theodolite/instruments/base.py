"""`Instrument`: one question about a problem; `SurveyContext`: the problem with all that instruments share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.arguments import checked, count, positive, sequence
from theodolite.arguments import seed as a_seed
from theodolite.errors import TheodoliteError
from theodolite.instruments.timings import Timings, Work, columns_for, measure_timings, quickest
from theodolite.measures.dynamics.optimizers import first_rate, stability_law
from theodolite.measures.trials import Remedy, usual_batch_size
from theodolite.operators import LayerHessians, LinearOperator, hessian, layer_hessians
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, an_optimizer
from theodolite.results import Finding, Result, Row, Severity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Depth", "InapplicableError", "Instrument", "Picture", "Results", "SurveyContext", "Work", "inapplicable"]

#: How far a survey goes: what answers the question, what explains it too, everything that applies.
Depth = Literal["quick", "normal", "deep"]
#: What was measured, by the name of the instrument.
Results: TypeAlias = Mapping[str, Any]
#: One picture, or several beside each other; None where there is nothing to draw.
Picture: TypeAlias = "Axes | Figure | None"


class InapplicableError(TheodoliteError, ValueError):
    """An instrument found out at work that its question has no answer here; it is skipped, not failed."""


@contextmanager
def inapplicable(*errors: type[Exception]) -> Iterator[None]:
    """These errors mean that the question has no answer here; usable as a decorator of `run`."""
    try:
        yield
    except errors as error:
        raise InapplicableError(str(error)) from error


class SurveyContext:
    """What is surveyed: the problem, the user's learning rate and optimizer, and what has been measured so far.

    `valid` is the same problem on validation data, `batch_size` the size of the batches that the user trains with, None where
    they are not known; `checkpoints` are other states of the model. `findings` and `remedies` are those of the instruments that
    have run. The Hessian, the gradient and the timings are made once and shared. `budget` is what the whole survey may
    take and `allowance` what the instrument at work may, in seconds; None where there is no budget.
    """

    @checked(
        problem=a_problem,
        lr=positive,
        optimizer=an_optimizer,
        population=count,
        valid=a_problem,
        batch_size=count,
        checkpoints=sequence,
        seed=a_seed,
    )
    def __init__(
        self,
        problem: Problem,
        *,
        lr: float | None = None,
        optimizer: Optimizer | None = None,
        population: int | None = None,
        valid: Problem | None = None,
        batch_size: int | None = None,
        checkpoints: Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        self.valid, self.batch_size, self.checkpoints = valid, batch_size, tuple(checkpoints)
        self.findings: list[Finding] = []
        self.remedies: dict[str, Remedy] = {}
        self.problem, self.optimizer, self.population, self.seed = problem, optimizer, population, seed
        given = first_rate(optimizer) if lr is None and optimizer is not None else lr
        self.lr = given or None  # a warm-up begins at 0, which is no rate to try
        self.results: dict[str, Any] = {}
        self.allowance: float | None = None
        self.budget: float | None = None

    @property
    def usual_batch_size(self) -> int:
        """The size of the batches that the user trains with; where it is not known, that of the problem's or of usual ones."""
        return self.batch_size or usual_batch_size(self.problem)

    @cached_property
    def timings(self) -> Timings:
        return measure_timings(self.problem, self.budget)

    @cached_property
    def hessian(self) -> LinearOperator:
        """The Hessian, with the graph that the timings built where it covered all the data."""
        return hessian(self.problem) if self.timings.operator is None else self.timings.operator

    @cached_property
    def gradient(self) -> Tensor:
        return self.problem.gradient()

    @property
    def no_law(self) -> str:
        """Why the optimizer has no law of stability; empty where it has one."""
        try:
            stability_law(self.optimizer, self.problem)
        except ValueError as error:
            return str(error)
        return ""

    @cached_property
    def layer_blocks(self) -> LayerHessians:
        """The Hessian blocks of all layers."""
        return layer_hessians(self.problem)

    @cached_property
    def layer_round(self) -> float:
        """Seconds of one product with every layer's block: timed where that is quick, else guessed from the depth."""
        if self.timings.operator is None or self.timings.refused:
            return self.timings.product * max(2.0, len(self.problem.layers) / 4)
        generator = torch.Generator().manual_seed(0)
        columns = {name: columns_for(op, 1, generator) for name, op in self.layer_blocks.items()}
        self.layer_blocks.products(columns)  # the first one builds the graph
        return quickest(lambda: self.layer_blocks.products(columns), least=0.0)

    def affordable(self, products: int) -> int:
        """How many single products the instrument at work may make: `products`, or what its allowance pays for."""
        if self.allowance is None:
            return products
        one = self.timings.seconds(Work(products=1.0))
        return max(4, min(products, int(self.allowance / max(one, 1e-9))))


class Instrument(ABC):
    """One question: does it apply, what does it cost, run it, what did it find?

    `efforts` are settings for `cost` and `run`, the fullest first; with a budget a later, cheaper one may be chosen.
    `needs` names instruments whose results it uses; it is skipped where one of them is missing. `work` is the cost where that
    is always the same. `columns` are those of the result's rows that the table shows, and what it calls them; empty: all.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    how: ClassVar[str]
    source: ClassVar[str] = ""
    order: ClassVar[float] = 1000  # instruments run in ascending order; ours have multiples of 10
    needs: ClassVar[tuple[str, ...]] = ()
    efforts: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    work: ClassVar[Work]
    columns: ClassVar[Mapping[str, str]] = {}
    depth: ClassVar[Depth] = "normal"  # from which depth of a survey on it takes part
    first: ClassVar[bool] = False  # runs before anything is timed; if it finds something critical, nothing else runs

    def concerns(self, context: SurveyContext) -> bool:
        """Whether the question is one for this kind of model at all; if not, a survey does not speak of it unless asked."""
        return True

    def applies(self, context: SurveyContext) -> str:
        """Empty where the instrument applies, else the reason why it does not."""
        return ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        """What a run will need."""
        return self.work

    @abstractmethod
    def run(self, context: SurveyContext, **effort: Any) -> Result:
        """Measure."""

    @abstractmethod
    def findings(self, context: SurveyContext, result: Any) -> list[Finding]:
        """What the result means."""

    def remedies(self, context: SurveyContext, result: Any) -> Mapping[str, Remedy]:
        """For causes that `findings` names, a change of the training that takes them away; it is tried on a copy."""
        return {}

    def figure(self, results: Results) -> Picture:
        """A picture of the result (`results[self.name]`), or None."""
        return None

    def rows(self, result: Any) -> list[Row]:
        """The table below the picture."""
        found: list[Row] = result.rows()
        return [{name: row[key] for key, name in self.columns.items()} for row in found] if self.columns else found

    def found(
        self,
        severity: Severity,
        sentence: str,
        label: str = "",
        quantity: str = "",
        value: float | None = None,
        error: float | None = None,
        **fields: Any,
    ) -> Finding:
        """A finding of this instrument: what it says, its label, and the number behind it."""
        said: dict[str, Any] = {"severity": severity, "sentence": sentence, "label": label}
        number: dict[str, Any] = {"quantity": quantity, "value": value, "error": error}
        return Finding(instrument=self.name, **said, **number, **{"source": self.source, **fields})
