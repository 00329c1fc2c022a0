"""What training runs did, step by step: the `Trace` of one model, the `FleetTrace` of many replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from theodolite.arguments import place, whole
from theodolite.results import Outcome, Result, Row

Column = tuple[float | None, ...]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Trace(Result):
    """A training run, one entry per optimizer step.

    `loss[t]` is the loss of the batch before step t was taken, `rate[t]` the learning rate of that step (of the first
    parameter group). `measured` holds further columns by name, None where a step was not measured. `final_loss` is the
    loss on the whole data after the last step, None where it was not asked for. `first` is the number of the first step; a column
    that was also measured after the last step is one longer than the run.
    """

    loss: tuple[float, ...]
    rate: tuple[float, ...]
    epoch: tuple[int, ...]
    measured: dict[str, Column]
    final_loss: float | None = None
    stopped: str = "all steps were taken"
    first: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return len(self.loss)

    @property
    def diverged(self) -> bool:
        """Whether the loss became NaN or infinite."""
        return any(not math.isfinite(value) for value in self.loss[-1:])

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps at which a measured column has a value, and the values."""
        if name not in self.measured:
            known = ", ".join(map(repr, self.measured)) or "none"
            raise ValueError(f"The trace has no column {name!r}; measured were: {known}.")
        pairs = [(step, value) for step, value in enumerate(self.measured[name], self.first) if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def rows(self) -> list[Row]:
        return [
            {
                "step": self.first + step,
                "epoch": self.epoch[step],
                "loss": self.loss[step],
                "rate": self.rate[step],
                **{name: column[step] for name, column in self.measured.items()},
                "seed": self.seed,
            }
            for step in range(self.steps)
        ]

    def sentence(self) -> str:
        if not self.loss:
            return "No step was taken."
        after = f", {self.final_loss:.4g} on all data at the end" if self.final_loss is not None else ""
        first, last = self.loss[0], self.loss[-1]
        return f"{self.steps} steps: loss {first:.4g} at the start, {last:.4g} in the last step{after}; {self.stopped}."


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FleetTrace(Result):
    """A fleet's training run: R replicas, T steps; `run[r]` is the `Trace` of one replica.

    Attributes:
        loss: (R, T), the loss of the replica's batch before step t. From the step at which a replica diverged on it is inf; after
            it converged or was stopped it stays at its last value.
        rates: (R,), learning rates, those of the first group of parameters where groups have their own; `group_rates` are those
            of each group by its pattern, "*" for all parameters. `factors` is what the schedule multiplied them with, (1, T) or,
            with a schedule per replica, (R, T).
        seeds, order_seeds: of the weights and of the order of the data.
        diverged_at, stopped_at: per replica the step at which it diverged, or was stopped by `until` or `stop`; None otherwise.
            Its weights are those at which that step's loss was seen.
        measured_at: steps before which was measured; the last one is T, after the run, when also the frozen replicas are
            measured.
        measured: (R, M) or (R, M, ...) by name; NaN where a replica was frozen.
        test_loss, test_accuracy: (R, M), None without test data (accuracy: without labels).
        checkpoints: parameters and buffers of all replicas, (R, *shape) by name, after so many steps; see `state`.
        final_loss: (R,), on the whole data after the last step, None where it was not asked for.
        matrix_products: whether products depended on where matrices lie in memory; empty where equal bits were not asked for.
    """

    loss: Tensor
    rates: Tensor
    factors: Tensor
    seeds: tuple[int, ...]
    order_seeds: tuple[int, ...]
    epoch: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    stopped_at: tuple[int | None, ...]
    measured_at: tuple[int, ...]
    measured: dict[str, Tensor]
    checkpoints: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    group_rates: dict[str, Tensor] = field(default_factory=dict)
    test_loss: Tensor | None = None
    test_accuracy: Tensor | None = None
    final_loss: Tensor | None = None
    matrix_products: str = ""

    @property
    def replicas(self) -> int:
        return len(self.seeds)

    @property
    def steps(self) -> int:
        """Steps of the replica that went farthest."""
        return self.loss.shape[1]

    @property
    def diverged(self) -> tuple[bool, ...]:
        return tuple(step is not None for step in self.diverged_at)

    @property
    def route(self) -> str:
        """How the gradients were computed: "vmap" for all at once, "loop" for one after the other."""
        return self.cost.route

    @property
    def columns(self) -> dict[str, Tensor]:
        """All that was measured during the run, (R, M, ...) by name."""
        test = {"test_loss": self.test_loss, "test_accuracy": self.test_accuracy}
        return {**{name: t for name, t in test.items() if t is not None}, **self.measured}

    def __len__(self) -> int:
        return self.replicas

    def __iter__(self) -> Iterator[Trace]:
        return (self[r] for r in range(self.replicas))

    def __getitem__(self, replica: int) -> Trace:
        """The trace of one replica, up to the step at which it was frozen."""
        r = range(self.replicas)[replica]
        lost, done = self.diverged_at[r], self.stopped_at[r]
        frozen, ending = (
            (done, "the rule to stop was met") if lost is None else (lost, "the loss became NaN, infinite or too large")
        )
        length = self.steps if frozen is None else frozen + 1
        rate = float(self.rates[r])
        return Trace(
            loss=tuple(self.loss[r, :length].tolist()),
            rate=tuple((rate * self.factors[min(r, len(self.factors) - 1), :length]).tolist()),
            epoch=self.epoch[:length],
            measured={name: self._column(t[r], length) for name, t in self.columns.items() if t.ndim == 2},
            final_loss=None if self.final_loss is None else float(self.final_loss[r]),
            stopped="all steps were taken" if frozen is None else ending,
            outcome=Outcome.FINISHED if lost is None else Outcome.DIVERGED,
            seed=self.seeds[r],
            cost=replace(self.cost, seconds=self.cost.seconds / self.replicas),
        )

    def state(self, step: int, replica: int) -> dict[str, Tensor]:
        """Parameters and buffers of one replica after `step` steps, tied ones once; `Fleet.model` makes a module of them."""
        if whole("step", step) not in self.checkpoints:
            known = ", ".join(map(str, self.checkpoints)) or "none; ask with train(..., checkpoints=[...])"
            raise ValueError(f"step must be one that has a checkpoint: {known}. Got {step}.")
        r = place("replica", replica, self.replicas)
        return {name: t[r].clone() for name, t in self.checkpoints[step].items()}

    def _column(self, values: Tensor, length: int) -> tuple[float | None, ...]:
        """(M,) spread over the steps."""
        column: list[float | None] = [None] * length
        for step, value in zip(self.measured_at, values.tolist(), strict=True):
            if step < length and not math.isnan(value):
                column[step] = value
        return tuple(column)

    def rows(self) -> list[Row]:
        """One row per replica."""
        return [
            {
                "replica": r,
                "seed": self.seeds[r],
                "order_seed": self.order_seeds[r],
                "rate": float(self.rates[r]),
                "first_loss": float(self.loss[r, 0]),
                "last_loss": float(self.loss[r, -1]),
                "final_loss": None if self.final_loss is None else float(self.final_loss[r]),
                "diverged_at": self.diverged_at[r],
                "stopped_at": self.stopped_at[r],
                **{name: float(t[r, -1]) for name, t in self.columns.items() if t.ndim == 2},
            }
            for r in range(self.replicas)
        ]

    def step_rows(self) -> list[Row]:
        """One row per replica and step."""
        return [{"replica": r, **row} for r, trace in enumerate(self) for row in trace.rows()]

    def sentence(self) -> str:
        count = sum(self.diverged)
        lost = f"{count} diverged" if count else "none diverged"
        last = self.loss[:, -1]
        kept = last[last.isfinite()]
        ends = f"; the others end at losses {float(kept.min()):.4g} to {float(kept.max()):.4g}" if len(kept) else ""
        return f"{self.replicas} replicas, {self.steps} steps by {self.route}: {lost}{ends}."
