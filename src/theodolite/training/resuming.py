"""What a training that goes on must have in common with the run that its folder holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.training.interruption import NAME
from theodolite.training.schedules import Schedule

#: Entries of parameter groups that change no step, or that have a check of their own.
_NO_SETTINGS = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
_REMEDY = (
    "Give the same to go on with that run. To train on from its weights otherwise, load them into the model "
    "and give another folder."
)


def refuse_existing(folder: Path) -> None:
    """Raise if a folder holds a run."""
    if (folder / NAME).exists():
        raise FileExistsError(
            f"{folder} already holds a training run. Go on with it by resume=True, give another folder, or remove {NAME} there."
        )


def optimizer_settings(optimizer: Optimizer, schedule: Any) -> dict[str, Any]:
    """What an optimizer was given: settings by name, one value for each parameter group."""
    groups = [{k: v for k, v in group.items() if k not in _NO_SETTINGS} for group in optimizer.param_groups]
    found = {name: [_plain(group.get(name)) for group in groups] for name in groups[0] if name != "lr"}
    rates: Any = [_plain(group.get("lr")) for group in optimizer.param_groups]
    if isinstance(schedule, LRScheduler):  # may turn other settings too; the rates it began with stand beside today's
        found, rates = {}, [_plain(group.get("initial_lr")) for group in optimizer.param_groups]
    elif schedule is not None:
        rates = "of a schedule"
    return {"optimizer": type(optimizer).__name__, "learning rate": rates, **found}


def _plain(value: Any) -> Any:
    """As it is read back from a checkpoint."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def check_same_settings(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise where a setting is not the one that the run in the folder began with."""
    others = [f"{name} {_shown(saved[name])}, not {_shown(here.get(name))}" for name in saved if saved[name] != here.get(name)]
    if others:
        raise ValueError(f"The run in {folder} was made with {'; '.join(others)}. {_REMEDY}")


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:  # of the only parameter group
        return _shown(value[0])
    return value if isinstance(value, str) else repr(value)


def check_same_rates(folder: Path, schedule: Schedule | None, rates: Sequence[float]) -> None:
    """Raise where a schedule, which is a function of the step, gives other rates than those of the steps taken.

    Objects that drive the rate and keep a state of their own are not asked about steps that are over.
    """
    if not isinstance(schedule, FunctionType) or not rates:
        return
    for step in sorted({0, len(rates) // 2, len(rates) - 1}):
        if not math.isclose(rate := float(schedule(step)), rates[step]):
            raise ValueError(
                f"The run in {folder} took step {step} with learning rate {rates[step]:g}; the schedule has {rate:g} there. "
                f"{_REMEDY}"
            )
