"""TensorBoard's writer for a monitor: `Monitor(loss, writer=scalar_writer("runs/one"))`."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any


def scalar_writer(folder: str | PathLike[str]) -> Any:
    """A `SummaryWriter` on this folder; needs the package `tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "The TensorBoard writer needs the package tensorboard: pip install 'theodolite[tensorboard]'."
        ) from error
    return SummaryWriter(fspath(folder))
