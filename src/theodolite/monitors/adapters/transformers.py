"""A `Monitor` as a callback of the Hugging Face `Trainer`.

>>> from theodolite.monitors import Monitor
>>> from theodolite.monitors.adapters.transformers import MonitorCallback
>>> callback = MonitorCallback(Monitor(None))       # Trainer(..., callbacks=[callback]); then callback.monitor.report()

Alerts go to the logger of `transformers`; validation losses are those of the trainer's evaluations, of several sets the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from theodolite.interrupts import unbroken_call, unbroken_context
from theodolite.monitors.monitor import Monitor
from theodolite.monitors.watching.watched_model import StepLoss, loss_of
from theodolite.problem.state_guard import attributes_kept, being_measured

LOGGER = logging.get_logger("transformers.theodolite")


class MonitorCallback(TrainerCallback):
    """Observes every optimizer step: the loss watched is the one that the trainer's `compute_loss` returns.

    So label smoothing, `compute_loss_func` and an own `compute_loss` are part of it. The monitor is made with
    `Monitor(None, ...)`. Where the trainer that calls is not found, the loss that the model returns is watched.
    """

    def __init__(self, monitor: Monitor) -> None:
        if monitor.loss is not None:
            raise ValueError("The Trainer computes the loss: use Monitor(None, ...).")
        self.monitor = monitor
        self._recorder: _TrainerRecorder | None = None
        self._validation = ""  # the name of the loss of the set that was evaluated first
        monitor.show_alerts_by(LOGGER.warning)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.monitor.quietly("the trainer is not listened to"):
            if self._recorder is not None:  # of a training that was broken off
                self._recorder.close()
            trainer = _calling_trainer(self)
            if trainer is None:
                self.monitor.listen(kwargs["model"], kwargs["optimizer"])
            else:
                self._recorder = _TrainerRecorder(trainer, kwargs["model"])
                self._recorder.open()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.monitor.quietly("a step was not observed"):
            if self._recorder is None:
                self.monitor.observe(state.global_step, kwargs["model"], None, kwargs["optimizer"])
                return
            batches, value = self._recorder.take()
            clip = self._recorder.clip
            self.monitor.observe(state.global_step, self._recorder.loss, batches, kwargs["optimizer"], value=value, clip=clip)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        losses = {name: value for name, value in (metrics or {}).items() if name.startswith("eval_") and name.endswith("_loss")}
        self._validation = self._validation or ("eval_loss" if "eval_loss" in losses else next(iter(losses), ""))
        if self._validation in losses:
            self.monitor.validated(state.global_step, losses[self._validation])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self.monitor.close()


class _TrainerRecorder:
    """What goes into a trainer's `compute_loss` and what comes out of its `training_step`, which is what is minimised."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.loss = trainer, StepLoss(model, self._again)
        self._compute_loss, self._training_step = trainer.compute_loss, trainer.training_step
        self._had = {name: vars(trainer)[name] for name in ("compute_loss", "training_step") if name in vars(trainer)}
        self._batches: list[dict[str, Any]] = []
        self._values: list[Tensor] = []
        self._options: dict[str, Any] = {}
        self.clip = 1.0
        self._clip_grad_norm = trainer.accelerator.clip_grad_norm_

    @unbroken_call
    def open(self) -> None:
        """Put our functions before the trainer's own; `close` takes them away."""
        self.trainer.accelerator.clip_grad_norm_ = self._on_clip
        self.trainer.compute_loss, self.trainer.training_step = self._on_compute_loss, self._on_training_step

    def take(self) -> tuple[list[dict[str, Any]], Tensor]:
        """The batches whose gradients the coming step holds, and their loss."""
        batches, values = self._batches, self._values
        self._batches, self._values = [], []
        return batches, torch.stack([v.float().reshape(()) for v in values]).sum()

    @unbroken_call
    def close(self) -> None:
        for name in ("compute_loss", "training_step"):
            vars(self.trainer).pop(name, None)
        vars(self.trainer).update(self._had)
        vars(self.trainer.accelerator).pop("clip_grad_norm_", None)

    def _on_compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training and torch.is_grad_enabled() and not being_measured():
            with suppress(Exception):
                self._batches.append(dict(inputs))  # as they come: compute_loss may take the labels out
            self._options = kwargs
        return self._compute_loss(model, inputs, *args, **kwargs)

    def _on_training_step(self, *args: Any, **kwargs: Any) -> Any:
        found = self._training_step(*args, **kwargs)
        if isinstance(found, Tensor):
            self._values.append(found.detach())
        return found

    def _on_clip(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        norm = self._clip_grad_norm(parameters, max_norm, *args, **kwargs)
        with suppress(TypeError, ValueError):  # some backends return none
            self.clip = min(1.0, float(max_norm) / (float(norm) + 1e-6))
        return norm

    def _again(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a batch once more; items are counted in this batch, which may be a part of the step."""
        options = {name: value for name, value in self._options.items() if name != "return_outputs"}
        if options.get("num_items_in_batch") is not None and hasattr(self.trainer, "_get_num_items_in_batch"):
            options["num_items_in_batch"] = self.trainer._get_num_items_in_batch([inputs], next(model.parameters()).device)
        with _left_alone(self.trainer):
            found: Tensor = loss_of(self._compute_loss(model, dict(inputs), **options))
        return found


@unbroken_context
def _left_alone(trainer: Any) -> Iterator[None]:
    """A `compute_loss` may log, count and collect: nothing of that stays."""
    kept = vars(trainer).copy()
    small: Any = SimpleNamespace(**{name: value for name, value in kept.items() if not name.endswith("dataset")})
    with attributes_kept([small]):
        trainer.log = lambda *args, **kwargs: None
        try:
            yield
        finally:
            vars(trainer).clear()
            vars(trainer).update(kept)


def _calling_trainer(callback: TrainerCallback) -> Any:
    """The trainer from which a callback is called, which hands over everything but itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callback in getattr(getattr(owner, "callback_handler", None), "callbacks", ()) and hasattr(owner, "compute_loss"):
            return owner
        frame = frame.f_back
    return None
