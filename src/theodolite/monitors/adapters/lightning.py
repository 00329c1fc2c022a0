"""A `Monitor` as a callback of Lightning's `Trainer`.

The loss watched is the one that `training_step` returns, whatever its signature::

    callback = MonitorCallback(Monitor(None))
    lightning.Trainer(callbacks=[callback]).fit(module, loader)
    callback.monitor.report()

A loss that is given, `Monitor(nn.MSELoss())`, is computed from what the module's `forward` returns and the target of the batch;
where that is not what `training_step` returns, the monitor says so and watches the latter. Alerts go to Lightning's logger; the
validation loss is the metric that the module logs as `val_loss`, or by the name given as `validation=`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.monitors.monitor import Monitor
from theodolite.monitors.watching.recorder import norm_of, trained
from theodolite.monitors.watching.watched_model import StepLoss, loss_of, quiet_training_mode
from theodolite.problem import Problem
from theodolite.problem.state_guard import cuda_devices, random_states_kept

#: Lightning's own logger, and names under which modules log their validation loss.
LOGGER = logging.getLogger("lightning.pytorch")
VALIDATION = ("val_loss", "valid_loss", "validation_loss", "val/loss", "valid/loss", "validation/loss")
#: Relative difference from which two losses of one batch are not the same.
DIFFERENT = 1e-3


class MonitorCallback(lightning.Callback):
    """Observes every optimizer step, with all batches whose gradients it holds.

    `model` picks what is called with the inputs of a batch and compared by the monitor's loss, instead of `training_step`:
    `model=lambda module: module.network`. Of several optimizers, which a module steps by itself, the first one is observed, and
    its loss, gradients and steps are followed without curvature. `validation` names the logged metric that is the validation
    loss; None takes the first one of the usual names.
    """

    def __init__(
        self, monitor: Monitor, *, model: Callable[[Any], nn.Module] | None = None, validation: str | None = None
    ) -> None:
        self.monitor, self._pick = monitor, model
        self._validation = VALIDATION if validation is None else (validation,)
        monitor.show_alerts_by(LOGGER.warning)
        self._watched: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._batches: list[tuple[Any, int]] = []
        self._losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batches.append((batch, batch_idx))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of mixed precision, which has multiplied it already
        self._losses.append(loss.detach() / (1.0 if scaler is None else scaler.get_scale()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        batches, losses = self._batches, self._losses
        self._batches, self._losses = [], []
        self._optimizer = self._optimizer or optimizer
        if not batches or optimizer is not self._optimizer:
            return
        with self.monitor.quietly("a step was not observed"):
            if not pl_module.automatic_optimization:
                self.monitor.say("the module steps its optimizers itself: curvature is not measured, and one optimizer observed")
                self.monitor.observe(trainer.global_step, pl_module, [], optimizer, value=losses[-1])
                return
            if self._watched is None:
                self._watched = self._choose(pl_module, batches[0])
            raw = [{"batch": b, "index": i} if isinstance(self._watched, StepLoss) else b for b, i in batches]
            whole = raw if len(raw) > 1 else raw[0]
            # each is divided by the batches of a whole step; at the end of an epoch there may be fewer
            value = None if self._pick is not None else torch.stack(losses).mean() * trainer.accumulate_grad_batches
            clip = _clip_factor(trainer, optimizer)
            self.monitor.observe(trainer.global_step, self._watched, whole, optimizer, value=value, clip=clip, clipped=False)

    def _choose(self, module: nn.Module, first: tuple[Any, int]) -> nn.Module:
        """What is watched: the picked model, the module where the monitor's loss is that of the step, or else the step."""
        if self._pick is not None:
            return self._pick(module)
        step: nn.Module = StepLoss(module, _training_step)
        given = self.monitor.loss
        if given is None:
            return step
        batch, index = first
        with random_states_kept(cuda_devices(module)), quiet_training_mode(module):
            minimised = Problem(step, None, [{"batch": batch, "index": index}], mode=None, check=False).loss()
            with suppress(Exception):
                found = Problem(module, given, [batch], mode=None, check=False).loss()
                if abs(found - minimised) <= DIFFERENT * abs(minimised):
                    return module
        self.monitor.say("the monitor's loss of the module's output is not what training_step returns: the latter is watched")
        return step

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        found = next((name for name in self._validation if name in trainer.callback_metrics), None)
        if found is not None and not trainer.sanity_checking:
            self.monitor.validated(trainer.global_step, trainer.callback_metrics[found])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.monitor.close(type(exception).__name__)


def _clip_factor(trainer: Any, optimizer: Optimizer) -> float | None:
    """What the trainer is about to multiply the gradients by; None where only its own way of clipping knows."""
    most = trainer.gradient_clip_val
    if not most:
        return None
    if str(trainer.gradient_clip_algorithm or "norm").endswith("value"):
        return None
    return min(1.0, float(most) / (norm_of([p.grad for p in trained(optimizer) if p.grad is not None]) + 1e-6))


def _training_step(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss of a batch once more. What the module logs and its metrics collect is put back with its attributes."""
    for name in ("log", "log_dict"):
        vars(module)[name] = lambda *args, **kwargs: None
    for part in module.modules():  # metrics add to tensors in place
        vars(part).update({name: t.clone() for name, t in vars(part).items() if isinstance(t, Tensor)})
    step: Any = module.training_step
    takes_index = len(inspect.signature(step).parameters) > 1
    data = batch.get("batch", batch)  # a probe of mappings has no place in the epoch
    found: Tensor = loss_of(step(data, batch.get("index", 0)) if takes_index else step(data))
    return found
