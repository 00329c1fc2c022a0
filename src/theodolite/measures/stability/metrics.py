"""What two solutions do on the same examples: stability, gap, distance, all in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from theodolite.problem.accuracy import right_answers

#: Quantiles of the differences of losses, by the name of their column.
QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}


def example_losses(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every example in float64, never clipped: (n,) from `outputs` (n, ...) and `targets` (n, ...).

    Their mean is the loss of all. Where labels have weights (0 for those ignored) that is sum l / sum w, so an example has its
    own sum of l over the mean of the examples' sums of w. A loss without `reduction` is taken of each example alone.

    >>> example_losses(nn.CrossEntropyLoss(), torch.tensor([[0.0, 0.0], [200.0, 0.0]]), torch.tensor([0, 1]))
    tensor([  0.6931, 200.0000], dtype=torch.float64)
    """
    outputs = outputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) in ("mean", "sum", "none"):
        each: Any = copy.deepcopy(loss).double()
        each.reduction = "none"
        found: Tensor = each(outputs, targets)
        if found.ndim and len(found) == len(outputs):  # others have a reduction of their own
            weights = label_weights(each, targets)
            found = found.reshape(len(found), -1)
            return found.mean(1) if weights is None else found.sum(1) / mean(weights)
    found = vmap(lambda output, target: loss(output[None], target[None]))(outputs, targets)
    return found.reshape(len(outputs), -1).mean(1)


def label_weights(loss: Any, targets: Tensor) -> Tensor | None:
    """What the labels of each example (n, ...) count for in torch's mean, summed to (n,); None where all count alike.

    >>> label_weights(nn.CrossEntropyLoss(), torch.tensor([[0, 1, -100], [2, 2, 2]]))
    tensor([2., 3.], dtype=torch.float64)
    """
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or targets.is_floating_point():
        return None
    ignored = targets == loss.ignore_index
    each = torch.ones_like(targets, dtype=torch.float64)
    if loss.weight is not None:
        each = loss.weight.double()[targets.masked_fill(ignored, 0).long()]
    return each.masked_fill(ignored, 0.0).reshape(len(targets), -1).sum(1)


def mean(losses: Tensor) -> float:
    """The mean, rounded once: it does not depend on the order of the examples."""
    return math.fsum(losses.tolist()) / len(losses) if bool(torch.isfinite(losses).all()) else float(losses.mean())


def error_rate(loss: Any, outputs: Tensor, targets: Tensor) -> float:
    """Share of wrong answers, NaN where the targets name no classes."""
    right = right_answers(outputs, targets, loss)
    return float("nan") if right is None else 1.0 - float(right.double().mean())


def differences(first: Tensor, second: Tensor, z: int | None = None) -> dict[str, float]:
    """Stability of a pair from the losses (n,) of both solutions on the evaluation examples; `z` is left out of `stab_excl_z`.

    >>> found = differences(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 4.0]), z=2)
    >>> found["stab"], found["stab_excl_z"], found["worst"]
    (1.0, 0.5, 2)
    """
    gaps = (first - second).abs()
    others = gaps if z is None else torch.cat([gaps[:z], gaps[z + 1 :]])
    worst = int(gaps.argmax())
    levels = torch.quantile(gaps, gaps.new_tensor(list(QUANTILES.values())))
    return {
        "stab": float(gaps[worst]),
        "stab_excl_z": float(others.max()) if len(others) else 0.0,
        "worst": worst,
        **dict(zip(QUANTILES, levels.tolist(), strict=True)),
    }


def distances(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distance and norms of the parameters of all pairs, (P,) each, from stacks (2P, *shape) whose rows 2p, 2p+1 are a pair.

    Buffers (running statistics) do not belong to them.
    """
    flat = [p.detach().double().flatten(1) for p in parameters.values()]
    squares = [
        sum((part(p) ** 2).sum(1) for p in flat) for part in (lambda p: p[::2], lambda p: p[1::2], lambda p: p[::2] - p[1::2])
    ]
    norm, other, apart = (torch.as_tensor(square).sqrt() for square in squares)
    middle = (norm + other) / 2
    relative = torch.where(apart == 0, torch.zeros_like(apart), apart / middle)
    return {"dist": apart, "norm_S": norm, "norm_S2": other, "ndist": relative}
