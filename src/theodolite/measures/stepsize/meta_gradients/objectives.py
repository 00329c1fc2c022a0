"""What a run is scored by, and its derivative where losses and tangents may be too large or too small for a float."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.arguments import one_of

Objective = Literal["log_last", "last", "segment_mean"]
OBJECTIVES: tuple[Objective, ...] = ("log_last", "last", "segment_mean")
an_objective = one_of(*OBJECTIVES)


@dataclass(frozen=True)
class Scaled:
    """Numbers (k,) as mantissa · e^exponent, both float64: sums of terms of any size.

    >>> huge = Scaled(torch.tensor([1.0]).double(), torch.tensor([900.0]).double())
    >>> total = huge.plus(huge)
    >>> total.logarithms().tolist() == [900.0 + math.log(2.0)], total.numbers()
    (True, [inf])
    """

    mantissa: Tensor
    exponent: Tensor

    @classmethod
    def zeros(cls, count: int) -> Scaled:
        return cls(torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64))

    def plus(self, other: Scaled) -> Scaled:
        """The sum; a zero has no say in the exponent."""
        mine = torch.where(self.mantissa == 0, -math.inf, self.exponent)
        theirs = torch.where(other.mantissa == 0, -math.inf, other.exponent)
        top = torch.maximum(mine, theirs)
        top = torch.where(top == -math.inf, 0.0, top)
        total = self.mantissa * (self.exponent - top).exp().nan_to_num(posinf=0.0)
        return Scaled(
            torch.where(mine == -math.inf, 0.0, total)
            + torch.where(theirs == -math.inf, 0.0, other.mantissa * (other.exponent - top).exp().nan_to_num(posinf=0.0)),
            top,
        )

    def times(self, factor: float) -> Scaled:
        return Scaled(self.mantissa * factor, self.exponent)

    def logarithms(self) -> Tensor:
        """Of the absolute values; −inf for zero."""
        return self.mantissa.abs().log() + self.exponent

    def numbers(self) -> list[float]:
        """As floats, infinite with their sign where they are too large."""
        return (self.mantissa.sign() * self.logarithms().exp()).tolist()


def score(objective: Objective, loss: float, steps: int) -> float:
    """F of the loss after the last step; `segment_mean` gives the mean itself.

    >>> score("log_last", math.e**3, 6), score("last", 2.0, 6)
    (0.5, 2.0)
    """
    if objective != "log_last":
        return loss
    return math.log(loss) / steps if loss > 0 else -math.inf if loss == 0 else math.nan


def score_slope(objective: Objective, loss: float, steps: int) -> float:
    """The derivative of F in the loss."""
    return 1.0 / (loss * steps) if objective == "log_last" and loss > 0 else 1.0
