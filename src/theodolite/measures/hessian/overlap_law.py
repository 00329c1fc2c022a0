"""How far the sharp subspaces of two models overlap, predicted from their Kronecker factors."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.operators import KroneckerFactors


def rank_one_count(factors: KroneckerFactors) -> int:
    """K*: how many leading eigenvectors of the Kronecker product have the form u_i ⊗ v₁, i.e. `τ_i γ₁ > τ₁ γ₂`.

    >>> from theodolite.operators.kronecker import factors_of
    >>> flat = torch.diag(torch.tensor([1.0, 0.9, 0.8, 0.05])).double()
    >>> rank_one_count(factors_of(flat, torch.diag(torch.tensor([1.0, 0.1])).double()))
    3
    """
    tau = torch.linalg.eigvalsh(factors.output).flip(0)
    gamma = torch.linalg.eigvalsh(factors.input).flip(0)
    second = gamma[1] if len(gamma) > 1 else gamma.new_zeros(())
    return int((tau * gamma[0] > tau[0] * second).sum())


def predicted_overlap(a: KroneckerFactors, b: KroneckerFactors, k: int, *, permuted: bool = False) -> Tensor:
    """The overlap curve, for 1..k, of the top eigenspaces of two Kronecker products.

    `Overlap(k) = (1/k) Σ_{T_a(k)} Σ_{T_b(k)} (u_i·u'_i')² (v_j·v'_j')²` with T(k) the k largest τ_i γ_j. `permuted` replaces
    (u·u')² by 1/m: hidden units have no common order, so on average over orders that is what they share.
    """
    if (a.output.shape, a.input.shape) != (b.output.shape, b.input.shape):
        sizes = " and ".join(f"{f.layer} with {len(f.output)} outputs and {len(f.input)} inputs" for f in (a, b))
        raise ValueError(f"An overlap needs two layers of the same size. Got {sizes}.")
    first, second = a.top_eigenpairs(k), b.top_eigenpairs(k)
    m = len(first.left)
    outputs = (first.left.T @ second.left).square()
    if permuted:
        outputs = torch.full_like(outputs, 1.0 / m)
    inputs = (first.right.T @ second.right).square()
    shared = outputs[first.left_index][:, second.left_index] * inputs[first.right_index][:, second.right_index]
    total = shared.cumsum(0).cumsum(1).diagonal()
    return total / torch.arange(1, k + 1, dtype=total.dtype)


def outlier_count(values: Tensor, classes: int) -> int:
    """How many eigenvalues stand out: those before the widest step in ratio among the first `3 classes`.

    0 where no step stands out: the widest is at most twice the mean of the others. Values within rounding of zero do not count.

    >>> outlier_count(torch.tensor([9.0, 8.0, 7.0, 0.5, 0.4, 0.3]).double(), 4)
    3
    >>> outlier_count(0.8 ** torch.arange(12).double(), 4)
    0
    """
    top = values[: 3 * classes].double()
    top = top[top > 1e-12 * top.max()]
    if len(top) < 2:
        return 0
    steps = (top[:-1] / top[1:]).log()
    place = int(steps.argmax())
    others = torch.cat([steps[:place], steps[place + 1 :]])
    usual = float(others.mean()) if len(others) else 0.0
    return place + 1 if float(steps[place]) > max(2 * usual, 1e-9) else 0
