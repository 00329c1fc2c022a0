"""When an example is seen: the batches of the common order that hold a given place of the training set."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.training.feeding import epoch_order


def batches_per_epoch(m: int, batch_size: int, drop_last: bool) -> int:
    """Batches in which m examples are seen once; one that is incomplete counts unless it is left out.

    >>> batches_per_epoch(23, 5, drop_last=True), batches_per_epoch(23, 5, drop_last=False)
    (4, 5)
    """
    width = min(batch_size, m)
    return m // width if drop_last else -(-m // width)


def visiting_steps(places: Tensor, m: int, batch_size: int, steps: int, *, order_seed: int, drop_last: bool = True) -> Tensor:
    """Whether step t sees place i of the training set: bool (P, T) for `places` (P,), t = 0 .. T-1.

    The order is that of a fleet with the same seed. An example left out by `drop_last` is not seen in that epoch.

    >>> visiting_steps(torch.tensor([0]), 4, 2, 4, order_seed=0).sum()        # two epochs of two batches: seen twice
    tensor(2)
    """
    width = min(batch_size, m)
    batches = batches_per_epoch(m, batch_size, drop_last)
    seen = torch.zeros(len(places), batches * (-(-steps // batches)), dtype=torch.bool)
    if width == m:
        seen[:] = True
        return seen[:, :steps]
    rows = torch.arange(len(places))
    for epoch in range(-(-steps // batches)):
        slot = torch.argsort(epoch_order(order_seed, epoch, m))[places] // width  # the batch of each place, (P,)
        kept = slot < batches
        seen[rows[kept], epoch * batches + slot[kept]] = True
    return seen[:, :steps]
