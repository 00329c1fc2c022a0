"""Eigenvectors of a layer as matrices: their rank, and how they correspond to the eigenvectors of the factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.operators import KroneckerFactors


def matricised(vectors: Tensor, m: int, n: int, *, transposed: bool = False) -> Tensor:
    """Columns (m·n, k) of a flattened weight as matrices (k, m, n): outputs down, inputs across."""
    if vectors.shape[0] != m * n:
        raise ValueError(f"vectors must have {m}·{n} = {m * n} rows. Got {vectors.shape[0]}.")
    matrices = vectors.T.double()
    return matrices.reshape(-1, n, m).transpose(1, 2) if transposed else matrices.reshape(-1, m, n)


def rank_ratios(vectors: Tensor, m: int, n: int, *, transposed: bool = False) -> Tensor:
    """`‖Mat(h)‖₂ / ‖Mat(h)‖_F` of each column: 1 for rank one, 1/√min(m, n) for a flat spectrum.

    >>> u, v = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 0.0, 4.0]).double()
    >>> round(float(rank_ratios(torch.outer(u, v).reshape(-1, 1), 2, 3)), 9)
    1.0
    """
    singular: Tensor = torch.linalg.svdvals(matricised(vectors, m, n, transposed=transposed))
    return singular[:, 0] / singular.square().sum(1).sqrt()


@dataclass(frozen=True)
class Correspondence:
    """`inputs[i, j] = ‖Mat(h_j) v_i‖²` (n, k) and `outputs[i, j] = ‖Mat(h_j)ᵀ u_i‖²` (m, k): columns sum to 1."""

    inputs: Tensor
    outputs: Tensor


def correspondence(vectors: Tensor, factors: KroneckerFactors) -> Correspondence:
    """How the eigenvectors h of a layer's block lie in the eigenvectors u of `E[M]` and v of `E[x xᵀ]`.

    Where the block is a Kronecker product every column is 0 but for a single 1.
    """
    u, v = torch.linalg.eigh(factors.output)[1].flip(1), torch.linalg.eigh(factors.input)[1].flip(1)
    matrices = matricised(vectors, len(u), len(v), transposed=factors.transposed)
    squares = (u.T @ matrices @ v).square()  # (k, m, n): shares of u_i ⊗ v_j
    return Correspondence(squares.sum(1).T, squares.sum(2).T)


def kronecker_overlap(vectors: Tensor, factors: KroneckerFactors) -> Tensor:
    """Overlap of the first k eigenvectors with the first k of the Kronecker product, for k = 1, 2, ...; nothing is formed."""
    k = vectors.shape[1]
    pairs = factors.top_eigenpairs(k)
    m, n = len(pairs.left), len(pairs.right)
    matrices = matricised(vectors, m, n, transposed=factors.transposed)
    shares = (pairs.left.T @ matrices @ pairs.right).square()  # (k, m, n)
    chosen = shares[:, pairs.left_index, pairs.right_index]  # (h, product)
    total = chosen.cumsum(0).cumsum(1).diagonal()
    return total / torch.arange(1, k + 1, dtype=total.dtype)
