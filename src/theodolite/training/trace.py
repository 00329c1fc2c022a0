"""`Trace`: what a training run did, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from theodolite.results import Result, Row

Column = tuple[float | None, ...]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Trace(Result):
    """A training run, one entry per optimizer step.

    `loss[t]` is the loss of the batch before step t was taken, `rate[t]` the learning rate of that step (of the first
    parameter group). `measured` holds further columns by name, None where a step was not measured. `final_loss` is the
    loss on the whole data after the last step, None where it was not asked for.
    """

    loss: tuple[float, ...]
    rate: tuple[float, ...]
    epoch: tuple[int, ...]
    measured: dict[str, Column]
    final_loss: float | None = None
    stopped: str = "all steps were taken"

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
        pairs = [(step, value) for step, value in enumerate(self.measured[name]) if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def rows(self) -> list[Row]:
        return [
            {
                "step": step,
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
