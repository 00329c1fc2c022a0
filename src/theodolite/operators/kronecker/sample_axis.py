"""Which dimension of a tensor counts the samples: found out by sending a signal into some samples only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleAxis:
    """The samples' dimension of tensors (..., features): `dim`, where `split` has cut the first into two.

    With `split` the first dimension holds samples and something else (frames, windows) together: samples outside for
    dim 0, inside for dim 1.
    """

    dim: int
    split: bool = False

    def by_sample(self, t: Tensor, samples: int) -> Tensor:
        """(..., f) as (B, P, f).

        >>> SampleAxis(1).by_sample(torch.zeros(7, 3, 2), 3).shape
        torch.Size([3, 7, 2])
        """
        f = t.shape[-1]
        if samples == 1:
            return t.reshape(1, -1, f)
        if self.split:
            t = t.unflatten(0, (samples, -1) if self.dim == 0 else (-1, samples))
        return t.movedim(self.dim, 0).reshape(samples, -1, f)


def possible_axes(lead: torch.Size, samples: int) -> Iterator[SampleAxis]:
    """Dimensions of the leading shape that may count the samples, the likeliest first."""
    if samples == 1:
        yield SampleAxis(0)
        return
    yield from (SampleAxis(dim) for dim, size in enumerate(lead) if size == samples)
    if lead and lead[0] != samples and lead[0] % samples == 0:
        yield SampleAxis(0, split=True)
        yield SampleAxis(1, split=True)


def find_axis(signal: Tensor, lit: Tensor) -> SampleAxis | None:
    """The dimension along which a signal (..., f) is dark wherever a sample is not `lit` (B,); None where none is."""
    tolerance = 1e-9 if signal.dtype == torch.float64 else 1e-5
    for axis in possible_axes(signal.shape[:-1], len(lit)):
        rows = axis.by_sample(signal, len(lit))
        if float(rows[~lit].norm()) <= tolerance * float(rows.norm()):
            return axis
    return None


def some_samples(samples: int, device: torch.device) -> Tensor:
    """A mask (B,) that is neither empty nor full (but full for one sample), with no period."""
    lit = torch.rand(samples, generator=torch.Generator().manual_seed(0)) < 0.5
    lit[0], lit[-1] = False, True
    return lit.to(device)
