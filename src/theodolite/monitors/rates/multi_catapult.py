"""`MultiCatapult`: raise the learning rate above the critical one on purpose, several times, and come back safely."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import also_called, checked, count, number_in, whole
from theodolite.arguments import seed as a_seed
from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.optimizers import BLOWN_UP
from theodolite.monitors.rates.critical_rate import EdgeProbe
from theodolite.operators.matrices import MatrixName
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_loss, a_model, an_optimizer
from theodolite.problem.calling import Loss
from theodolite.problem.state_guard import cuda_devices, random_states_kept
from theodolite.results import Outcome, Result, Row, fields_of

#: Failed tries of one raise, each with half the excess of the one before, after which no more raises are tried.
TRIES = 5
#: The loss over the one before a raise from which there was a spike.
SPIKE = 1.05


@dataclass(frozen=True, kw_only=True)
class RaiseEvent:
    """One raise of the learning rate: when, to what, and what came of it.

    `kernel_before` and `kernel_after` are the largest eigenvalues of the matrix that sets the edge (the Gauss-Newton matrix,
    which for a squared loss is the tangent kernel up to a constant), `height` the highest loss over the one before the raise.
    `end` is the step at which the catapult was over: the loss below its value before the raise and the rate below the edge.
    """

    step: int
    rate: float
    ratio: float
    loss_before: float
    kernel_before: float
    height: float = 1.0
    end: int | None = None
    kernel_after: float | None = None
    rolled_back: bool = False

    def row(self) -> Row:
        raised = {"step": self.step, "raised_to": self.rate, **fields_of(self, "ratio loss_before kernel_before kernel_after")}
        return {**raised, "spike_height": self.height, "end": self.end, "rolled_back": self.rolled_back}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CatapultReport(Result):
    """What a `MultiCatapult` did: a row for each raise, the failed ones included."""

    events: tuple[Row, ...]
    wanted: int
    steps: int
    first_critical_rate: float
    last_critical_rate: float
    final_rate: float

    @property
    def catapults(self) -> int:
        """Raises that made a spike and ended well: the loss fell below its value before, at a smaller kernel."""
        ended = [row for row in self.events if row["end"] is not None and row["spike_height"] > SPIKE]
        return sum(row["kernel_after"] < row["kernel_before"] for row in ended)

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.events]

    def sentence(self) -> str:
        failed = sum(row["rolled_back"] for row in self.events)
        undone = f", {failed} undone" if failed else ""
        waiting = sum(row["end"] is None and not row["rolled_back"] for row in self.events)
        pending = f", {waiting} not settled" if waiting else ""
        return (
            f"{self.catapults} of {self.wanted} catapults in {self.steps} steps{undone}{pending}; the critical rate went from "
            f"{self.first_critical_rate:.3g} to {self.last_critical_rate:.3g}, the learning rate ended at {self.final_rate:.3g}."
        )


class MultiCatapult:
    """A learning-rate driver that triggers `raises` catapults, one after the other.

    It looks at the model before every step. Once the loss is below its value before the last raise, and the rate has been
    below 0.95 of the critical one for `patience` steps (or, where the kernel has grown back to the edge, below the critical
    one for three times as long), the rate is set to `ratio` times the critical rate. A raise that diverges or kills the network
    is undone: model and optimizer go back to the state before it, and half the excess is tried. After the last catapult the
    rate is taken to 0.9 of the critical one wherever it would exceed it.

    In a loop of your own::

        driver = MultiCatapult(model, loss, (x, y), optimizer, raises=3)
        for batch in batches:
            driver.step()                       # looks, and sets the learning rate
            optimizer.zero_grad(); loss(model(batch.x), batch.y).backward(); optimizer.step()
        print(driver.report())

    With `train`, pass it as the schedule: `train(model, loss, data, optimizer, schedule=driver, steps=500)`. `observe` fits
    `train(..., observe=driver.observe)` and monitors that look between backward and step.

    Args:
        data: what loss and critical rate are measured on: all the data, or a part that stands for it.
        ratio: of a raised rate over the critical one, above 1; it must lie below what the model survives (2 for wide quadratic
            models, several times that for ReLU networks).
        by: (or `matrix`) the matrix of the critical rate, "kernel", "gauss_newton" or "hessian"; None: the kernel or the
            Gauss-Newton matrix, whichever is cheaper.
        settle: steps a raise may take to bring the loss below its value before, or it counts as diverged.
    """

    @also_called(matrix="by")
    @checked(
        model=a_model, loss=a_loss, optimizer=an_optimizer, raises=whole, ratio=number_in(above=1), patience=count, settle=count,
        seed=a_seed,
    )  # fmt: skip
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        optimizer: Optimizer,
        *,
        raises: int = 3,
        ratio: float = 1.6,
        patience: int = 10,
        by: MatrixName | None = None,
        settle: int = 300,
        mode: Any = "eval",
        seed: int = 0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.problem = Problem(model, loss, data, mode=mode)
        self.probe = EdgeProbe(self.problem, optimizer, by=by, seed=seed)
        self.raises, self.ratio, self.patience, self.settle = raises, ratio, patience, settle
        self.critical_rate = self.first_critical_rate = math.nan
        self.steps = 0
        self._events: list[RaiseEvent] = []
        self._flying = False
        self._calm = self._below = 0  # steps in a row below 0.95 of the critical rate, and below it
        self._tried = ratio  # the ratio of the next raise: smaller after a failed one
        self._gave_up = False
        self._saved: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def events(self) -> tuple[RaiseEvent, ...]:
        """The raises so far, those that were undone included."""
        return tuple(self._events)

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def done(self) -> bool:
        """Whether no further raise will come."""
        kept = sum(not event.rolled_back for event in self._events)
        return self._gave_up or (kept >= self.raises and not self._flying)

    def step(self) -> float:
        """Look at the model as it stands and set the rate of the next step, which is returned."""
        with random_states_kept(cuda_devices(self.model)):
            self._look()
        self.steps += 1
        return self.rate

    def __call__(self, step: int) -> float:
        """The same as a schedule of `train`; the step is the driver's own."""
        return self.step()

    def observe(self, step: int, model: nn.Module, batch: Batch, optimizer: Optimizer) -> None:
        """The same between backward and the optimizer's step; after going back, gradients of the lost weights are dropped."""
        undone = sum(event.rolled_back for event in self._events)
        self.step()
        if sum(event.rolled_back for event in self._events) > undone:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def report(self) -> CatapultReport:
        """What happened so far."""
        return CatapultReport(
            events=tuple(event.row() for event in self._events),
            wanted=self.raises,
            steps=self.steps,
            first_critical_rate=self.first_critical_rate,
            last_critical_rate=self.critical_rate,
            final_rate=self.rate,
            outcome=Outcome.FINISHED,
            seed=self.probe.seed,
        )

    # What one look decides

    def _look(self) -> None:
        loss = self._loss()
        event = self._events[-1] if self._flying else None
        if event is not None and self._failed(event, loss):
            self._undo(event)
            return
        if not math.isfinite(loss):  # diverged without a raise: there is no state to go back to
            return
        self.critical_rate = self.probe.measure()
        if event is not None and math.isinf(self.critical_rate) and loss >= event.loss_before:
            self._undo(event)  # nothing curves any more: the units have died
            return
        if math.isnan(self.first_critical_rate):
            self.first_critical_rate = self.critical_rate
        if event is not None:
            event = replace(event, height=max(event.height, loss / event.loss_before if event.loss_before > 0 else math.inf))
            self._events[-1] = event
        fallen = event is None or loss < event.loss_before
        self._calm = self._calm + 1 if self.rate < 0.95 * self.critical_rate else 0
        self._below = self._below + 1 if self.rate < self.critical_rate else 0
        calm = self._calm >= self.patience or self._below >= 3 * self.patience
        if event is not None and fallen and calm:
            self._events[-1] = replace(event, end=self.steps, kernel_after=self.probe.sharpness)
            self._flying, self._saved, self._tried = False, None, self.ratio
        if self.done:
            if self.rate > self.critical_rate:
                self._set(0.9 * self.critical_rate)
        elif not self._flying and calm and math.isfinite(self.critical_rate):
            self._raise(loss)

    def _loss(self) -> float:
        try:
            return self.problem.loss()
        except NonFiniteError:
            return math.inf

    def _failed(self, event: RaiseEvent, loss: float) -> bool:
        """Whether the catapult does not come back."""
        if not loss < BLOWN_UP * max(event.loss_before, 1e-30):
            return True
        return self.steps - event.step >= self.settle and loss >= event.loss_before

    def _raise(self, loss: float) -> None:
        self._saved = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        rate = self._tried * self.critical_rate
        self._events.append(
            RaiseEvent(step=self.steps, rate=rate, ratio=self._tried, loss_before=loss, kernel_before=self.probe.sharpness)
        )
        self._set(rate)
        self._flying, self._calm, self._below = True, 0, 0

    def _undo(self, event: RaiseEvent) -> None:
        """Back to the state before a raise that failed, and another with half the excess."""
        assert self._saved is not None
        weights, state = self._saved
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self._events[-1] = replace(event, rolled_back=True)
        self._flying = False
        self._tried = 1.0 + (self._tried - 1.0) / 2.0
        self.probe.start = None
        self.critical_rate = self.probe.measure()
        failed = itertools.takewhile(lambda past: past.rolled_back, reversed(self._events))
        if len(list(failed)) >= TRIES:
            self._gave_up, self._saved = True, None
        else:
            self._raise(self._loss())

    def _set(self, rate: float) -> None:
        """The rate of the first group; the others keep their ratio to it."""
        first = self.rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (float(group["lr"]) / first if first else 1.0)
