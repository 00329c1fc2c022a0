"""A `Monitor` as a callback of the Hugging Face `Trainer`.

>>> from theodolite.monitors import Monitor
>>> from theodolite.monitors.adapters.transformers import MonitorCallback
>>> callback = MonitorCallback(Monitor(None))       # Trainer(..., callbacks=[callback]); then callback.monitor.report()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from theodolite.monitors.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Observes every optimizer step; the batch and its loss are recorded as they pass through the model.

    The trainer's models return their own loss, so the monitor is made with `Monitor(None, ...)`.
    """

    def __init__(self, monitor: Monitor) -> None:
        if monitor.loss is not None:
            raise ValueError("The Trainer's models return their own loss: use Monitor(None, ...).")
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.listen(kwargs["model"], _plain(kwargs["optimizer"]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.observe(state.global_step, kwargs["model"], None, _plain(kwargs["optimizer"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.close()


def _plain(optimizer: Any) -> Any:
    """The torch optimizer inside the wrapper of `accelerate`."""
    return getattr(optimizer, "optimizer", optimizer)
