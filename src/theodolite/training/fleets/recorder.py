"""What is measured of all replicas during a run: test loss, accuracy, and functions of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from theodolite.interrupts import called_within, unbroken_context
from theodolite.problem.accuracy import right_answers
from theodolite.problem.state_guard import cuda_devices, modes_kept, random_states_kept
from theodolite.training.fleets.data import FleetFeed
from theodolite.training.fleets.routes import LoopRoute, Route
from theodolite.training.fleets.state import FleetState

Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]  # (parameters, buffers) of one replica -> number

#: Samples times replicas, and bytes of what a training step would keep of them, in one evaluation; the rest waits its turn.
EVALUATED_AT_ONCE, EVALUATED_BYTES = 2**15, 2**28


#: `(step, fleet) -> columns (R, ...)` of all replicas.
Record = Callable[[int, Any], Mapping[str, Tensor]]


class Recorder:
    """Columns that grow by one entry per measurement, NaN for replicas that are not there."""

    def __init__(self, replicas: int, measure: Mapping[str, Measure], test: FleetFeed | None, loss: Any) -> None:
        self.replicas, self.measure, self.test, self.loss = replicas, measure, test, loss
        self.steps: list[int] = []
        self.columns: dict[str, list[Tensor]] = {}
        self.sample_bytes = 0
        self._looped: set[str] = set()

    @called_within(torch.no_grad)
    def read(self, step: int, states: Sequence[tuple[FleetState, Tensor | None]], route: Route) -> None:
        """Measure the replicas of each state that do not rest."""
        self.steps.append(step)
        found: dict[str, Tensor] = {}
        for state, resting in states:
            rows = torch.tensor(state.ids)
            awake = rows if resting is None else rows[~resting.cpu()]
            for name, value in self._values(state, route).items():
                value = value.detach().cpu().double()
                column = found.setdefault(name, torch.full((self.replicas, *value.shape[1:]), torch.nan, dtype=torch.float64))
                column[awake] = value if resting is None else value[~resting.cpu()]
        self.add(found)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """One more entry, (R, ...), in each of these columns."""
        for name, value in values.items():
            if value.ndim < 1 or len(value) != self.replicas:
                raise ValueError(f"{name!r} must have one entry per replica, {self.replicas}. Got shape {tuple(value.shape)}.")
            self.columns.setdefault(name, []).append(value.detach().cpu().double())

    def _values(self, state: FleetState, route: Route) -> dict[str, Tensor]:
        values = {name: self._value(name, state) for name in self.measure}
        if self.test is None:
            return values
        losses, outputs = full_loss(route, state, self.test, self.loss, self.sample_bytes)
        values["test_loss"] = finite_or_inf(losses)
        accuracy = None if outputs is None else accuracies(outputs, self.test.target(0), self.loss)
        return values if accuracy is None else values | {"test_accuracy": accuracy}

    def _value(self, name: str, state: FleetState) -> Tensor:
        function = self.measure[name]
        parameters = {key: p.detach() for key, p in state.parameters.items()}
        if name not in self._looped:
            try:
                value: Tensor = vmap(function)(parameters, state.buffers)
                return value
            except Exception:  # not every function can be vectorised; if it fails alone too, that error is raised
                self._looped.add(name)
        each = [
            function({key: p[r] for key, p in parameters.items()}, {key: b[r] for key, b in state.buffers.items()})
            for r in range(state.replicas)
        ]
        return torch.stack([torch.as_tensor(one) for one in each])

    def stacked(self) -> dict[str, Tensor]:
        """(R, M, ...) by name."""
        return {name: torch.stack(column, dim=1) for name, column in self.columns.items()}


@called_within(torch.no_grad)
def full_loss(route: Route, state: FleetState, feed: FleetFeed, loss: Any, sample_bytes: int) -> tuple[Tensor, Tensor | None]:
    """Losses (R,) on all samples in eval mode, and outputs (R, n, ...).

    Large data goes through the models in parts; the loss is taken once, of all outputs of a replica, whatever it divides by.
    Models with a loss of their own give one for each part: those are averaged by samples.
    """
    width = evaluation_width(route, state.replicas, sample_bytes)
    with eval_mode(state.module):
        if loss is None and width < feed.size:
            found = [(*route.evaluate(state, part), part) for part in feed.parts(width)]
            losses = torch.stack([part.size / feed.size * losses for losses, _, part in found]).sum(0)
            return losses, _joined([(outputs, part.size) for _, outputs, part in found])
        outputs = all_outputs(route, state, feed, width) if width < feed.size else None
        if outputs is None:
            losses, outputs = route.evaluate(state, next(feed.parts(feed.size)))
            return losses, outputs if outputs.ndim > 1 else None
    return torch.stack([loss(outputs[r], feed.target(r)) for r in range(state.replicas)]), outputs


def evaluation_width(route: Route, replicas: int, sample_bytes: int) -> int:
    """Samples that go through the models at once."""
    busy = 1 if route.name == "loop" else replicas
    return max(1, min(EVALUATED_AT_ONCE // replicas, EVALUATED_BYTES // max(1, busy * sample_bytes)))


def all_outputs(route: Route, state: FleetState, feed: FleetFeed, width: int) -> Tensor | None:
    """Outputs (R, n, ...) on all samples, `width` at a time; None where they are no tensor with an axis over the samples."""
    return _joined([(route.outputs(state, part), part.size) for part in feed.parts(width)])


def _joined(pieces: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Outputs (R, n, ...) from those of all parts and their sizes; None where the second axis does not run over the samples."""
    whole = [piece for piece, size in pieces if piece is not None and piece.ndim > 1 and piece.shape[1] % size == 0]
    return torch.cat(whole, dim=1) if len(whole) == len(pieces) else None


def check_test(state: FleetState, feed: FleetFeed, loss: Any) -> None:
    """Raise, in the shapes the user knows, where one model alone refuses the test data."""
    first = torch.zeros(1, dtype=torch.long, device=state.device)
    with eval_mode(state.module), random_states_kept(cuda_devices(state.module)):
        try:
            LoopRoute(state.module, loss, None).evaluate(state.rows(first), next(feed.parts(64)))
        except ValueError as error:
            raise ValueError(f"The test data does not fit. {error}") from error


def finite_or_inf(losses: Tensor) -> Tensor:
    """Infinity for NaN: a loss that is no number is the worst of all."""
    return torch.where(torch.isnan(losses), torch.inf, losses)


def accuracies(outputs: Tensor, target: Any, loss: Any) -> Tensor | None:
    """Share of right answers (R,) of outputs (R, n, ...); None where the target names no classes.

    Labels to be ignored do not count.
    """
    if not isinstance(target, Tensor):
        return None
    replicas = len(outputs)
    right = right_answers(outputs.flatten(0, 1), target.expand(replicas, *target.shape).flatten(0, 1), loss)
    return None if right is None or not len(right) else right.view(replicas, -1).double().mean(1)


@unbroken_context
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode, given back afterwards."""
    with modes_kept(module):
        module.eval()
        yield
