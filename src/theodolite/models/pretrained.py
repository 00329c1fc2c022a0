"""Trained weights into our networks, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from theodolite.models.initialisation import named
from theodolite.models.llama import Llama, llama_from_config
from theodolite.models.resnet import CifarResNet, resnet20
from theodolite.text import listed, nearest

M = TypeVar("M", bound=nn.Module)

# A counter BatchNorm needs only where its momentum is None.
_MAY_LACK = "num_batches_tracked"


def load_weights(model: M, weights: Mapping[str, Tensor]) -> M:
    """Copy `weights` into the model, by state-dict name, and return it; `model.initialisation` is then "loaded".

    Every name and shape must fit; otherwise nothing is copied and a ValueError says what does not. Of tied parameters
    one name is enough.

    >>> load_weights(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bais": torch.zeros(1)})
    Traceback (most recent call last):
    ValueError: The weights do not fit the model: missing bias; unexpected bais (nearest: bias).
    """
    own = model.state_dict(keep_vars=True)
    _check(own, weights)
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return named(model, "loaded")


def _check(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights must map names to tensors; {name} is a {type(value).__name__} (torch.from_numpy helps).")
    given = {id(own[name]) for name in weights if name in own}
    missing = [name for name, value in own.items() if id(value) not in given and not name.endswith(_MAY_LACK)]
    unexpected = [name for name in weights if name not in own]
    misfits = [
        f"{name} is {tuple(value.shape)}, not {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    faults = []
    if missing:
        faults.append(f"missing {listed(missing, 5)}")
    if unexpected:
        faults.append(f"unexpected {listed(unexpected, 5)} (nearest: {', '.join(nearest(unexpected[0], own, count=1))})")
    if misfits:
        faults.append(f"wrong shapes: {listed(misfits, 5)}")
    if faults:
        raise ValueError(f"The weights do not fit the model: {'; '.join(faults)}.")


def resnet20_from(weights: Mapping[str, Tensor]) -> CifarResNet:
    """ResNet20 with the given weights, in eval mode.

    Those of `resnet20_cifar10.npz` want images in [0, 1] less (0.485, 0.456, 0.406), over (0.229, 0.224, 0.225).
    """
    return load_weights(resnet20(seed=0), weights).eval()


def stories260k_from(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Llama:
    """The Llama of a Hugging Face configuration with the given weights, in eval mode; the head may be left out if tied."""
    return load_weights(llama_from_config(config, seed=0), weights).eval()
