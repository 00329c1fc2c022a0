"""What is known of torch's own losses: which of them compare numbers, element by element."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
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


def is_binary(loss: Any) -> bool:
    """Whether a loss is known to be one of probabilities, whose targets lie between 0 and 1."""
    return isinstance(loss, BINARY[:2]) or any(loss is known for known in BINARY[2:])


def best_rate(mean: Tensor, loss: Any) -> Tensor:
    """The probability that loses least where targets have this mean: `w m / (w m + 1 - m)`, with `w` the loss's `pos_weight`.

    >>> best_rate(Tensor([0.1]), nn.BCEWithLogitsLoss(pos_weight=Tensor([9.0])))
    tensor([0.5000])
    """
    weight = getattr(loss, "pos_weight", None)
    if not isinstance(weight, Tensor):
        return mean
    weighted = weight.detach().to(mean) * mean
    return weighted / (weighted + 1 - mean)
