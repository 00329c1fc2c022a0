"""The settings of a stability study as plain values, enough to repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.stability.arguments import StabilityConfig, Stopping
from theodolite.measures.stability.coupled import Bench, Recipe


def settings_of(
    recipe: Recipe, config: StabilityConfig, bench: Bench, *, stop: Stopping, epochs: int | None = None
) -> dict[str, Any]:
    """What was trained, how long, on what, from which seeds.

    `optimizer` is the name given, or the rule that was read from a function, with all its settings; `optimizer_settings` are
    those given beside it, `rate` the learning rate of either.
    """
    fleet = recipe.fleet(1)
    given = {name: value for name, value in recipe.settings.items() if name != "rate" and value is not None}
    found = {
        "factory": recipe.factory,
        "optimizer": recipe.optimizer if isinstance(recipe.optimizer, str) else fleet.rule,
        "rate": float(fleet.rates[0]),
        "optimizer_settings": given,
        "schedule": recipe.schedule,
        "loss": getattr(recipe.loss, "__name__", type(recipe.loss).__name__),
        "batch_size": recipe.batch_size,
        "drop_last": recipe.drop_last,
        "stop": stop,
        "steps": None if stop == "epochs" else recipe.steps,
        "epochs": epochs if stop == "epochs" else None,
        "loss_target": recipe.loss_target if stop == "train_loss" else None,
        "sizes": config.sizes,
        "pairs": config.pairs,
        "trials": config.trials,
        "checkpoints": config.checkpoints,
        "pool": len(bench.train),
        "eval_size": len(bench.eval_rows),
        "init_seed": recipe.init_seed,
        "order_seed": recipe.order_seed,
        "pair_seed": config.pair_seed,
        "paths": config.paths,
        "batchnorm": config.batchnorm,
        "check_steps": config.check_steps,
        "threads": torch.get_num_threads(),
    }
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Numbers, words, lists and dictionaries of them; anything else by its name or description, without addresses.

    >>> plain({0: 1.0, 50: torch.tensor(0.1, dtype=torch.float64)}), plain(len)
    ({'0': 1.0, '50': 0.1}, 'len')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(one) for one in value]
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
