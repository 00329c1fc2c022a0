"""The average gradient outer product (AGOP): which directions of its input a model's output depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.features.gradients import Settings, chunks
from theodolite.measures.features.source import as_source
from theodolite.operators.autograd.graphs import available_bytes

#: From this many input coordinates on, only one half of the symmetric matrix is multiplied out, in blocks of this size.
BLOCK = 512


def agop(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> Tensor:
    """`G = (1/n) Σᵢ JᵢᵀJᵢ` (d × d) with Jᵢ the derivative of all outputs of sample i in its d input numbers, flattened.

    Memory is d × d and the gradients of one chunk; sums over chunks are kept in float64.

    Parameters
    ----------
    model_or_problem : a module or function of a batch (in eval mode), or a Problem (its mode, and its inputs by default).
    inputs : what the model is called with: a tensor, a tuple of arguments, a mapping. Several floating inputs are joined in
        order; integer inputs need `at`.
    at : name of a submodule: the derivative is taken in what it returns, features last (channels of images), and every
        position (token, pixel) counts as a sample.
    batch_size : samples taken at once.
    projections : this many random sign combinations of the outputs in place of each output: unbiased, for many outputs.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> agop(model, torch.zeros(5, 2).double())
    tensor([[ 9., 12.],
            [12., 16.]], dtype=torch.float64)
    """
    total = AGOP(at=at, batch_size=batch_size, projections=projections, seed=seed)
    total.update(model_or_problem, inputs)
    return total.compute()


class AGOP:
    """An AGOP gathered batch by batch: `update` with each, `merge` those of several workers, `compute` at the end."""

    def __init__(
        self, *, at: str | None = None, batch_size: int | None = None, projections: int | None = None, seed: int = 0
    ) -> None:
        self.settings = Settings(at, batch_size, projections, seed)
        self.count = 0
        self.total: Tensor | None = None  # float64 (d, d), upper blocks only
        self.dtype = torch.float32
        self._updates = 0

    def update(self, model_or_problem: Any, inputs: Any = None) -> AGOP:
        """Add the samples of one batch (for a Problem: of all its data)."""
        settings = replace(self.settings, seed=self.settings.seed + self._updates)
        self._updates += 1
        for chunk in chunks(as_source(model_or_problem, inputs), inputs, settings):
            self.add(chunk.rows, chunk.count)
        return self

    def add(self, rows: Tensor, count: int) -> None:
        """Add the gradients (m, d) of `count` samples."""
        if self.total is None:
            self.total, self.dtype = _zeros(rows), rows.dtype
        self._expect(rows.shape[1])
        add_outer(self.total, rows)
        self.count += count

    def merge(self, other: AGOP) -> AGOP:
        """Add what another one gathered."""
        if other.total is None:
            return self
        if self.total is None:
            self.total, self.dtype = torch.zeros_like(other.total), other.dtype
        self._expect(other.total.shape[0])
        self.total += other.total.to(self.total.device)
        self.count += other.count
        return self

    def compute(self) -> Tensor:
        """The mean over all samples so far, (d, d), in the dtype of the gradients."""
        if self.total is None:
            raise ValueError("Nothing gathered yet: call update(model, inputs) first.")
        return _mirrored(self.total.to(self.dtype, copy=True).div_(self.count))

    def _expect(self, dim: int) -> None:
        assert self.total is not None
        if self.total.shape[0] != dim:
            raise ValueError(f"Inputs of {dim} numbers cannot join an AGOP of {self.total.shape[0]}: all must have one size.")


def _zeros(rows: Tensor) -> Tensor:
    d = rows.shape[1]
    if 16 * d * d > available_bytes(rows.device):
        raise ValueError(
            f"The AGOP of inputs with {d} numbers is a {d} × {d} matrix, which does not fit into memory. input_gradients keeps "
            "the gradients instead, and agop_alignment takes them; at= measures at a narrower layer."
        )
    return torch.zeros(d, d, dtype=torch.float64, device=rows.device)


def add_outer(total: Tensor, rows: Tensor) -> None:
    """Add `rowsᵀ rows` to the blocks of `total` (d, d) on and above its diagonal."""
    for start in range(0, rows.shape[1], BLOCK):
        total[start : start + BLOCK, start:] += rows[:, start : start + BLOCK].T @ rows[:, start:]


def _mirrored(matrix: Tensor) -> Tensor:
    """What lies on and above the diagonal copied below it, in place."""
    for start in range(0, len(matrix), BLOCK):
        stop = min(start + BLOCK, len(matrix))
        upper = matrix[start:stop, start:stop].triu()
        matrix[start:stop, start:stop] = upper + upper.triu(1).T
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T
    return matrix
