"""What is known of torch's own losses: which of them compare numbers, element by element."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

#: Modules that compare each number of the output with one of the target.
ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss,
)  # fmt: skip

#: Functions that do so, and broadcast what does not fit.
BROADCASTING = (
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss, functional.poisson_nll_loss,
)  # fmt: skip

#: Losses of a probability, whose targets lie between 0 and 1.
BINARY = (nn.BCELoss, nn.BCEWithLogitsLoss, functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits)


def compares_numbers(loss: Any) -> bool:
    """Whether a loss is known to take real numbers as targets, not the numbers of classes.

    >>> compares_numbers(nn.MSELoss()), compares_numbers(functional.l1_loss), compares_numbers(nn.CrossEntropyLoss())
    (True, True, False)
    """
    return isinstance(loss, ELEMENTWISE) or any(loss is known for known in (*BROADCASTING, *BINARY))
