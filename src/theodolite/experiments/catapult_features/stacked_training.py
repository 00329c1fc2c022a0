"""Training of stacked networks, kept at the point of best validation.

SGD with the critical rate of every batch, and gradient descent whose rate is raised above the critical one on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.experiments.catapult_features.stacked_networks import StackedNetworks
from theodolite.measures.dynamics import catapult_count
from theodolite.results import Row
from theodolite.training.schedules import epoch_order

#: A step is supercritical when its rate is above the critical one of its batch by more than this.
MARGIN = 1e-8
#: Training stops once the loss on all training points is below this, and a network is lost above `BLOW_UP`.
UNTIL, BLOW_UP = 1e-3, 1e6
#: Batches up to this size have their kernel formed; larger ones are asked for its top eigenvalue by power iteration.
LARGEST_KERNEL = 250

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class Points:
    """Inputs (R, n, d) and labels (R, n)."""

    x: Tensor
    y: Tensor

    @property
    def size(self) -> int:
        return self.y.shape[1]

    def loss(self, networks: StackedNetworks) -> Tensor:
        """Mean square error (R,), summed in float64."""
        return (networks.outputs(self.x) - self.y).double().square().mean(1)

    def error(self, networks: StackedNetworks) -> Tensor:
        """Share of outputs with the wrong sign (R,)."""
        return (networks.outputs(self.x) * self.y <= 0).double().mean(1)


@dataclass(frozen=True)
class Splits:
    """The points to train on, to choose the weights by, and to judge them by."""

    train: Points
    validation: Points
    test: Points


@dataclass
class History:
    """What R networks did, and where their validation loss was least."""

    best: StackedNetworks
    best_loss: Tensor  # (R,), on the validation points
    best_step: Tensor
    steps: Tensor  # taken before the loss was small enough, or in all
    running: Tensor  # (R,) bool
    diverged: Tensor
    final_loss: Tensor
    exceeded: list[Tensor] = field(default_factory=list)  # for each step (R,) bool: its rate was supercritical
    curves: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, networks: StackedNetworks) -> History:
        zero = torch.zeros(networks.replicas, dtype=torch.long)
        away = torch.full((networks.replicas,), torch.inf, dtype=torch.float64)
        none = torch.zeros(networks.replicas, dtype=torch.bool)
        return cls(networks.copy(), away, zero, zero.clone(), ~none, none, away.clone())

    def check(self, step: int, networks: StackedNetworks, splits: Splits, until: float | Tensor) -> None:
        """Look at all training and validation points, keep the best weights, and say who goes on."""
        loss, validation = splits.train.loss(networks), splits.validation.loss(networks)
        lost = self.running & ~(loss < BLOW_UP)
        better = self.running & (validation < self.best_loss) & ~lost
        self.best.take(better, networks)
        self.best_loss = torch.where(better, validation, self.best_loss)
        self.best_step = torch.where(better, torch.full_like(self.best_step, step), self.best_step)
        self.steps[self.running] = step
        self.final_loss = torch.where(self.running, loss, self.final_loss)
        for r in self.running.nonzero()[:, 0].tolist():
            self.curves.append({"replica": r, "step": step, "loss": float(loss[r]), "validation": float(validation[r])})
        self.diverged |= lost
        for tensor in networks.tensors:  # numbers that are none would be carried on for nothing
            tensor[lost] = 0.0
        self.running &= ~lost & ~(loss < until)

    def row(self, r: int) -> Row:
        """How run r went."""
        return {
            "validation": float(self.best_loss[r]),
            "best_step": int(self.best_step[r]),
            "steps": int(self.steps[r]),
            "final_loss": float(self.final_loss[r]),
            "diverged": bool(self.diverged[r]),
        }

    def catapults(self, replica: int) -> tuple[int, int]:
        """Supercritical steps up to the best validation loss, and in all."""
        if not self.exceeded:
            return 0, 0
        flags = torch.stack(self.exceeded)[:, replica].tolist()
        return tuple(catapult_count(flags, int(at[replica])) for at in (self.best_step, self.steps))  # type: ignore[return-value]


def train(
    networks: StackedNetworks,
    splits: Splits,
    *,
    rates: Tensor | None = None,
    optimizer: MakeOptimizer | None = None,
    batch: int,
    steps: int,
    check: int,
    seeds: Sequence[int],
    until: float = UNTIL,
    kernel_every: int = 1,
) -> History:
    """Train in place with `rates` (R,) of SGD, or with a torch optimizer, whose rules act on each number alone.

    Every `check` steps the losses on all points are taken. Critical rates are counted for SGD: of each batch, or every
    `kernel_every` steps where the batch is all data, and then for the steps up to the next time.
    """
    history = History.of(networks)
    history.check(0, networks, splits, until)
    feed = Feed(splits.train, batch, seeds)
    rule = None if optimizer is None else optimizer(networks.tensors)
    critical = CriticalRates(kernel_every)
    for step in range(steps):
        x, y = feed.next()
        if rule is not None:
            loss_gradient(networks, x, y)
            rule.step()
        else:
            assert rates is not None
            edge = sgd_step(networks, x, y, rates * history.running, critical)  # who has stopped stays where it is
            history.exceeded.append(rates - edge > MARGIN)
        if (step + 1) % check == 0 or step + 1 == steps:
            history.check(step + 1, networks, splits, until)
            if not history.running.any():
                break
    return history


class Feed:
    """Batches of every network's points in its own order, all of them once in each epoch."""

    def __init__(self, points: Points, batch: int, seeds: Sequence[int]) -> None:
        self.points, self.batch, self.seeds = points, min(batch, points.size), list(seeds)
        self._epoch, self._place = 0, points.size
        self._shuffled = points

    def next(self) -> tuple[Tensor, Tensor]:
        if self.batch == self.points.size:
            return self.points.x, self.points.y
        if self._place >= self.points.size:
            self._shuffle()
        part = slice(self._place, self._place + self.batch)
        self._place += self.batch
        return self._shuffled.x[:, part], self._shuffled.y[:, part]

    def _shuffle(self) -> None:
        orders = torch.stack([epoch_order(seed, self._epoch, self.points.size) for seed in self.seeds])
        x, y = self.points.x, self.points.y
        self._shuffled = Points(x.gather(1, orders[:, :, None].expand_as(x)), y.gather(1, orders))
        self._epoch, self._place = self._epoch + 1, 0


class CriticalRates:
    """b / λ₁ of the tangent kernel of each batch; for large batches looked at now and then, from the last top vector on."""

    def __init__(self, every: int = 1) -> None:
        self.every, self._asked = every, 0
        self._vector: Tensor | None = None
        self._last = torch.empty(0)

    def of_kernel(self, kernel: Tensor) -> Tensor:
        """(R, b, b) to (R,)."""
        values = torch.linalg.eigvalsh(kernel.nan_to_num(0.0, 0.0, 0.0))
        edges: Tensor = kernel.shape[1] / values[:, -1].clamp_min(torch.finfo(values.dtype).tiny)
        return edges

    def of_points(self, networks: StackedNetworks, x: Tensor) -> Tensor:
        """(R,), for all points at once."""
        if self._asked % self.every == 0:
            value, vector = networks.top_kernel(x, self._vector, iterations=30 if self._vector is None else 1)
            self._vector = torch.where(vector.isfinite() & (vector != 0), vector, torch.ones_like(vector))
            self._last = x.shape[1] / value
        self._asked += 1
        return self._last


def sgd_step(networks: StackedNetworks, x: Tensor, y: Tensor, rates: Tensor, critical: CriticalRates) -> Tensor:
    """One step on a batch (R, b, d); the batch's critical rates (R,) at the weights before it."""
    size = x.shape[1]
    if size <= LARGEST_KERNEL:
        passes = networks.passes(x)
        edge = critical.of_kernel(networks.kernel(passes))
        networks.add_(passes, (passes.outputs - y) * (-2.0 / size * rates)[:, None])
        return edge
    edge = critical.of_points(networks, x)
    loss_gradient(networks, x, y)
    gradient_step(networks, rates)
    return edge


def gradient_step(networks: StackedNetworks, rates: Tensor) -> None:
    """Each network against its `.grad` with its own rate (R,)."""
    for tensor in networks.tensors:
        assert tensor.grad is not None
        tensor.addcmul_(tensor.grad, -rates.view(-1, *(1,) * (tensor.ndim - 1)))


def loss_gradient(networks: StackedNetworks, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the mean square error of each network into `.grad`; the losses (R,)."""
    for tensor in networks.tensors:
        tensor.grad = None
    total, size = y.new_zeros(len(y), dtype=torch.float64), y.shape[1]
    for part, labels in zip(x.split(networks.chunk, 1), y.split(networks.chunk, 1), strict=True):
        passes = networks.passes(part)
        residual = passes.outputs - labels
        total += residual.double().square().sum(1)
        for tensor, gradient in zip(networks.tensors, networks.gradients(passes, residual * (2.0 / size)), strict=True):
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
    return total / size


def critical_rate(networks: StackedNetworks, x: Tensor) -> Tensor:
    """n / λ₁(K) on all points (R,)."""
    return x.shape[1] / networks.top_kernel(x)[0]


# Raises of the rate

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
        table: Steps of the raises with the rate as a multiple of the critical one at the start. None raises by itself, to
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


def descend_with_raises(
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
        for tensor in networks.tensors:
            assert tensor.grad is not None
            tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
        gradient_step(networks, raises.rates * (history.running & ~too_far))
        raises.soften(too_far)
    else:
        history.check(steps, networks, splits, raises.until(until))
    return history, torch.stack(losses)
