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

#: Rates before the first raise and after a catapult, over the critical one.
QUIET = 0.8
#: A raise by itself waits until the rate has been subcritical for so many steps, and a raised rate waits so long for its spike.
PATIENCE, LATEST = 10, 40
#: The critical rate is looked at every so many steps.
KERNEL_EVERY = 2
#: A raise went too far when the loss is this many times the first one: the weights before it are restored, its rate halved.
TOO_FAR = 1e4


class Raises:
    """Rates (R,) of gradient descent: each network's is raised as often as it is told to, and kept subcritical in between.

    Args:
        wanted: (R,), how many raises.
        critical: (R,), critical rates at the start.
        table: steps of the raises with the rate as a multiple of the critical one at the start. None raises by itself, to
            `factor` times the critical rate of the moment, once the last catapult is over and the rate subcritical for a while.
    """

    def __init__(
        self, wanted: Tensor, critical: Tensor, *, table: Sequence[tuple[int, float]] | None = None, factor: float = 1.6
    ) -> None:
        self.wanted, self.critical, self.factor = wanted, critical, factor
        self.table = None if table is None else dict(table)
        self.rates = QUIET * critical
        self.done = torch.zeros_like(wanted)
        self.restored = torch.zeros_like(wanted)
        self._before = torch.full_like(critical, torch.inf)  # loss at the last raise
        self._risen = torch.zeros_like(wanted, dtype=torch.bool)  # above it since then
        self._since, self._calm = torch.full_like(wanted, LATEST), torch.zeros_like(wanted)

    def due(self, step: int, loss: Tensor, critical: Tensor) -> Tensor:
        """Set the rates of this step, at a loss (R,) and critical rates (R,) of now; which networks were raised (R,)."""
        self._risen |= loss > self._before
        over = (loss < self._before) & (self._risen | (self._since >= LATEST))  # the last catapult
        due, height = self._next(step, over, critical)
        due &= self.done < self.wanted
        settle = ~due & over & (self.rates > critical)
        self.rates = torch.where(due, height, torch.where(settle, QUIET * critical, self.rates))
        self._before = torch.where(due, loss.to(self._before), self._before)
        self._risen &= ~due
        self._since = torch.where(due, torch.zeros_like(self._since), self._since + 1)
        self.done += due
        return due

    def _next(self, step: int, over: Tensor, critical: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            return torch.full_like(over, step in self.table), self.table.get(step, 0.0) * self.critical
        self._calm = torch.where(over & (self.rates < critical), self._calm + 1, torch.zeros_like(self._calm))
        due = self._calm >= PATIENCE
        self._calm[due] = 0
        return due, self.factor * critical

    def until(self, loss: float) -> Tensor:
        """The loss to stop at (R,): none while raises are still to come."""
        return torch.where(self.done < self.wanted, torch.full_like(self.critical, -1.0), torch.full_like(self.critical, loss))

    def soften(self, rows: Tensor) -> None:
        """Half the rate for networks whose weights were put back."""
        self.rates = torch.where(rows, self.rates / 2, self.rates)
        self.restored += rows


def descend(
    networks: StackedNetworks, splits: Splits, raises: Raises, *, steps: int, check: int, until: float = UNTIL
) -> tuple[History, Tensor]:
    """Gradient descent in place; the history, and the training loss before every step (T, R), NaN after a network stopped."""
    history, critical, saved = History.of(networks), CriticalRates(KERNEL_EVERY), networks.copy()
    losses: list[Tensor] = []
    for step in range(steps):
        edge = critical.of_points(networks, splits.train.x)
        loss = loss_gradient(networks, splits.train.x, splits.train.y)
        losses.append(loss.where(history.running, torch.full_like(loss, torch.nan)))
        too_far = history.running & ~(loss < TOO_FAR * losses[0])
        networks.take(too_far, saved)
        if step % check == 0:
            history.check(step, networks, splits, raises.until(until))
        if not history.running.any():
            break
        saved.take(raises.due(step, loss, edge) & ~too_far, networks)
        _step(networks, raises.rates * (history.running & ~too_far))
        raises.soften(too_far)
    else:
        history.check(steps, networks, splits, raises.until(until))
    return history, torch.stack(losses)


def _step(networks: StackedNetworks, rates: Tensor) -> None:
    for tensor in networks.tensors:
        assert tensor.grad is not None
        tensor.addcmul_(tensor.grad.nan_to_num_(0.0, 0.0, 0.0), -rates.view(-1, *(1,) * (tensor.ndim - 1)))
