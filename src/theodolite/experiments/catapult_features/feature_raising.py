"""Gradient descent whose rate is raised above the critical one on purpose, several times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from theodolite.experiments.catapult_features.feature_networks import StackedNetworks
from theodolite.experiments.catapult_features.feature_training import (
    UNTIL,
    CriticalRates,
    History,
    Splits,
    loss_gradient,
)

#: Rates before the first raise and after the last, over the critical one.
QUIET = 0.9
#: A raise by itself waits until the rate has been below this share of the critical one for so many steps.
CALM, PATIENCE = 0.95, 10
#: The critical rate is looked at every so many steps.
KERNEL_EVERY = 5


class Raises:
    """Rates (R,) of gradient descent: each network's is raised as often as it is told to, then kept subcritical.

    Parameters
    ----------
    wanted : (R,), how many raises.
    critical : (R,), critical rates at the start.
    table : steps of the raises with the rate as a multiple of the critical one at the start. None raises by itself, to
        `factor` times the critical rate of the moment, once the last catapult is over and the rate calm.
    """

    def __init__(
        self, wanted: Tensor, critical: Tensor, *, table: Sequence[tuple[int, float]] | None = None, factor: float = 1.6
    ) -> None:
        self.wanted, self.critical, self.factor = wanted, critical, factor
        self.table = None if table is None else dict(table)
        self.rates = QUIET * critical
        self.done = torch.zeros_like(wanted)
        self._before = torch.full_like(critical, torch.inf)  # loss at the last raise
        self._calm = torch.zeros_like(wanted)

    def __call__(self, step: int, loss: Tensor, critical: Tensor) -> Tensor:
        """The rates of this step, at a loss (R,) and critical rates (R,) of now."""
        over = loss < self._before
        due, height = self._due(step, over, critical)
        due &= self.done < self.wanted
        settle = ~due & over & (self.done == self.wanted) & (self.rates > critical)
        self.rates = torch.where(due, height, torch.where(settle, QUIET * critical, self.rates))
        self._before = torch.where(due, loss.to(self._before), self._before)
        self.done += due
        return self.rates

    def _due(self, step: int, over: Tensor, critical: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            return torch.full_like(over, step in self.table), self.table.get(step, 0.0) * self.critical
        quiet = over & (self.rates < CALM * critical)
        self._calm = torch.where(quiet, self._calm + 1, torch.zeros_like(self._calm))
        due = self._calm >= PATIENCE
        self._calm[due] = 0
        return due, self.factor * critical


def descend(
    networks: StackedNetworks, splits: Splits, raises: Raises, *, steps: int, check: int, until: float = UNTIL
) -> tuple[History, Tensor]:
    """Gradient descent in place; the history, and the training loss before every step (T, R), NaN after a network stopped."""
    history, critical = History.of(networks), CriticalRates(KERNEL_EVERY)
    losses: list[Tensor] = []
    for step in range(steps):
        if step % check == 0:
            history.check(step, networks, splits, until)
        if not history.running.any():
            break
        edge = critical.of_points(networks, splits.train.x)
        loss = loss_gradient(networks, splits.train.x, splits.train.y)
        losses.append(loss.where(history.running, torch.full_like(loss, torch.nan)))
        rates = raises(step, loss, edge) * history.running
        for tensor in networks.tensors:
            assert tensor.grad is not None
            tensor.addcmul_(tensor.grad.nan_to_num_(), -rates.view(-1, *(1,) * (tensor.ndim - 1)))
    else:
        history.check(steps, networks, splits, until)
    return history, torch.stack(losses)
