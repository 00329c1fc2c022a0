"""Does the `pos_weight` of a binary cross entropy belong to the data: negatives over positives, output by output?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import checked
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem

#: A weight is wrong where it is no compromise between none and the balanced one, and so many times off: what makes a class that
#: has a tenth of the samples rarer still is so.
FAR = 9.0


def positive_weight(loss: Any) -> Tensor | None:
    """The weights of the positives in a loss; None where they weigh as much as the negatives.

    >>> positive_weight(nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))), positive_weight(nn.BCEWithLogitsLoss())
    (None, None)
    """
    weight = getattr(loss, "pos_weight", None)
    return weight.detach().double().cpu() if isinstance(weight, Tensor) and bool((weight != 1).any()) else None


@dataclass(frozen=True)
class PositiveWeights:
    """For each output: the `weight` of its positives, and how many `positives` and `negatives` the data has."""

    weight: Tensor
    positives: Tensor
    negatives: Tensor

    @property
    def balanced(self) -> Tensor:
        """The weights under which positives and negatives count the same; 1 where one of them is missing."""
        both = (self.positives > 0) & (self.negatives > 0)
        return torch.where(both, self.negatives / self.positives.clamp_min(1e-30), torch.ones_like(self.weight))

    @property
    def off(self) -> Tensor:
        """How many times too large each weight is, or too small (below 1); 1 where it is one that can be meant."""
        one, times = torch.ones_like(self.weight), self.weight / self.balanced
        beyond = (self.weight - 1) * (self.weight - self.balanced) > 0
        both = (self.positives > 0) & (self.negatives > 0)
        return torch.where(beyond & both & ((times >= FAR) | (times <= 1 / FAR)), times, one)


@checked(problem=a_problem)
def positive_weights(problem: Problem) -> PositiveWeights | None:
    """The weights of the positives against the targets of all data; None where the loss has none, or targets are not 0 and 1.

    >>> y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    >>> loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1e-9]))
    >>> found = positive_weights(Problem(nn.Linear(1, 2), loss, (y[:, :1], y)))
    >>> found.balanced.tolist(), [round(times, 9) for times in found.off.tolist()]
    ([3.0, 0.3333333333333333], [1.0, 3e-09])
    """
    weight = positive_weight(problem.loss_function)
    if weight is None or not isinstance(problem.loss_function, nn.BCEWithLogitsLoss):
        return None
    positives, numbers = torch.zeros_like(weight), torch.zeros_like(weight)
    for batch in problem.data:
        if not isinstance(batch.target, Tensor) or not bool(((batch.target == 0) | (batch.target == 1)).all()):
            return None
        target = batch.target.detach().double().cpu()
        with suppress(RuntimeError):  # of a shape that the loss would not take either
            positives += target.sum_to_size(weight.shape)
            numbers += torch.ones_like(target).sum_to_size(weight.shape)
    return PositiveWeights(weight, positives, numbers - positives) if bool((numbers > 0).all()) else None
