"""What is measured of all replicas during a run: test loss, accuracy, and functions of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from theodolite.training.fleets.data import FleetBatch
from theodolite.training.fleets.routes import Route
from theodolite.training.fleets.state import FleetState

Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]  # (parameters, buffers) of one replica -> number

#: Samples times replicas in one evaluation; larger data is evaluated in parts.
EVALUATED_AT_ONCE = 2**15


class Gauges:
    """Columns that grow by one entry per measurement, NaN for replicas that are not there."""

    def __init__(self, replicas: int, measure: Mapping[str, Measure], test: FleetBatch | None, loss: Any) -> None:
        self.replicas, self.measure, self.test, self.loss = replicas, measure, test, loss
        self.steps: list[int] = []
        self.columns: dict[str, list[Tensor]] = {}
        self._looped: set[str] = set()

    @property
    def needed(self) -> bool:
        return bool(self.measure) or self.test is not None

    @torch.no_grad()
    def read(self, step: int, state: FleetState, route: Route, resting: Tensor | None) -> None:
        """Measure the replicas of `state` that do not rest."""
        values = {name: self._value(name, state) for name in self.measure}
        if self.test is not None:
            losses, outputs = full_loss(route, state, self.test, self.loss)
            values["test_loss"] = finite_or_inf(losses)
            accuracy = None if outputs is None else accuracies(outputs, self.test)
            values |= {} if accuracy is None else {"test_accuracy": accuracy}
        self.steps.append(step)
        rows = torch.tensor(state.ids)
        for name, value in values.items():
            value = value.detach().cpu()
            column = torch.full((self.replicas, *value.shape[1:]), torch.nan, dtype=torch.float64)
            column[rows] = value.double()
            if resting is not None:
                column[rows[resting.cpu()]] = torch.nan
            self.columns.setdefault(name, []).append(column)

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


@torch.no_grad()
def full_loss(route: Route, state: FleetState, batch: FleetBatch, loss: Any) -> tuple[Tensor, Tensor | None]:
    """Losses (R,) on all samples of a batch in eval mode, and outputs (R, n, ...).

    Large batches go in parts; a loss is taken to be a mean over samples unless its `reduction` is "sum".
    """
    parts = list(batch.parts(max(1, EVALUATED_AT_ONCE // state.replicas)))
    with eval_mode(state.module):
        found = [(*route.evaluate(state, part), part.size) for part in parts]
    weights = [1.0 if getattr(loss, "reduction", "mean") == "sum" else size / batch.size for *_, size in found]
    losses = torch.stack([weight * losses for weight, (losses, _, _) in zip(weights, found, strict=True)]).sum(0)
    return losses, torch.cat([outputs for _, outputs, _ in found], dim=1) if found[0][1].ndim > 1 else None


def finite_or_inf(losses: Tensor) -> Tensor:
    """Infinity for NaN: a loss that is no number is the worst of all."""
    return torch.where(torch.isnan(losses), torch.inf, losses)


def accuracies(outputs: Tensor, batch: FleetBatch) -> Tensor | None:
    """Share of right classes (R,) for labels (n,) or one-hot targets (n, C); None for other targets.

    A single output is right where its sign is that of a target in {-1, 1}.
    """
    targets = batch.leaves[-1]
    if not isinstance(targets, Tensor) or outputs.ndim != 3:
        return None
    own = batch.dims[-1] == 0
    if not targets.is_floating_point():
        return (outputs.argmax(-1) == targets).double().mean(1) if targets.ndim == 1 + own and outputs.shape[-1] > 1 else None
    if targets.ndim != 2 + own or targets.shape[-1] != outputs.shape[-1]:
        return None
    if outputs.shape[-1] == 1:
        signs = bool((targets.abs() == 1).all())
        return ((outputs > 0) == (targets > 0)).double().mean((1, 2)) if signs else None
    one_hot = bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(-1) == 1).all())
    return (outputs.argmax(-1) == targets.argmax(-1)).double().mean(1) if one_hot else None


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode, given back afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
