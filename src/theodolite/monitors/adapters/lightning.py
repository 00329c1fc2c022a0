"""A `Monitor` as a callback of Lightning's `Trainer`.

The monitor's loss is computed from what the module's `forward` returns and the target of the batch::

    callback = MonitorCallback(Monitor(nn.CrossEntropyLoss()))
    lightning.Trainer(callbacks=[callback]).fit(module, loader)
    callback.monitor.report()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from torch import nn
from torch.optim import Optimizer

from theodolite.monitors.monitor import Monitor


class MonitorCallback(lightning.Callback):
    """Observes every optimizer step, with all batches whose gradients it holds.

    `model` picks what is called with the inputs of a batch, for modules without a `forward` of their own:
    `model=lambda module: module.network`.
    """

    def __init__(self, monitor: Monitor, *, model: Callable[[Any], nn.Module] | None = None) -> None:
        self.monitor, self._model = monitor, model or (lambda module: module)
        self._batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batches.append(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        batches, self._batches = self._batches, []
        if batches:  # a second optimizer of the same batch is not observed
            whole = batches if len(batches) > 1 else batches[0]
            self.monitor.observe(trainer.global_step, self._model(pl_module), whole, optimizer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.monitor.close()
