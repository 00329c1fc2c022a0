"""What a layer's Kronecker factors say about its sharp directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.operators import KroneckerFactors, LinearOperator

# How far the sharp subspaces of two models overlap, predicted from their Kronecker factors.


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


# Eigenvectors of a layer as matrices: their rank, and how they correspond to the eigenvectors of the factors.


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


# Is a layer's input nearly one direction? The mean against the auto-correlation.


@dataclass(frozen=True)
class Autocorrelation:
    """`squared_dot` is (v₁·μ̂)², `ratio` γ₁/γ₂, `bound` ‖μ‖²/‖Σ‖, which `ratio` never falls below."""

    squared_dot: float
    ratio: float
    bound: float
    values: Tensor


def autocorrelation(factors: KroneckerFactors) -> Autocorrelation:
    """How dominant the leading eigenvector of `E[x xᵀ]` is, and how near to the mean input.

    γ₁ >= ‖μ‖² because μ̂ is a test vector, and γ₂ <= ‖Σ‖ by interlacing; so γ₁/γ₂ >= ‖μ‖²/‖Σ‖, always.

    >>> from theodolite.operators.kronecker import factors_of
    >>> mean = torch.tensor([2.0, 0.0]).double()
    >>> found = autocorrelation(factors_of(torch.eye(1).double(), torch.outer(mean, mean) + 0.5 * torch.eye(2).double(), mean))
    >>> found.squared_dot, found.ratio, found.bound
    (1.0, 9.0, 8.0)
    """
    values, vectors = torch.linalg.eigh(factors.input)
    values, vectors = values.flip(0), vectors.flip(1)
    norm = float(factors.mean.norm())
    dot = float(vectors[:, 0] @ factors.mean) / norm if norm > 0 else 0.0
    spread = float(torch.linalg.matrix_norm(factors.covariance, 2))
    second = float(values[1]) if len(values) > 1 else 0.0
    return Autocorrelation(
        squared_dot=dot * dot,
        ratio=float(values[0]) / second if second > 0 else float("inf"),
        bound=norm * norm / spread if spread > 0 else float("inf"),
        values=values,
    )


# How far a layer's block is from the product of its factors.


def decoupling_error(
    block: LinearOperator, factors: KroneckerFactors, *, tol: float = 1e-3, seed: int = 0, max_matvecs: int | None = None
) -> float:
    """`‖E[M] ⊗ E[x xᵀ] − E[M ⊗ x xᵀ]‖ / ‖E[M ⊗ x xᵀ]‖` in the spectral norm, by Lanczos on the difference.

    >>> import torch
    >>> from theodolite.operators import DenseOperator
    >>> from theodolite.operators.kronecker import factors_of
    >>> factors = factors_of(torch.eye(2).double(), torch.eye(3).double())
    >>> round(decoupling_error(DenseOperator(torch.eye(6).double() * 2), factors), 6)
    0.5
    """
    settings = {"which": "magnitude", "tol": tol, "seed": seed, "max_matvecs": max_matvecs, "progress": False}
    whole = top_eigenpairs(block, 1, **settings)  # type: ignore[call-overload]
    gap = top_eigenpairs(block - factors.operator(), 1, **settings)  # type: ignore[call-overload]
    return relative_norm(gap, whole)


def relative_norm(gap: Eigenpairs, whole: Eigenpairs) -> float:
    """The spectral norm of one symmetric matrix over that of another, by their eigenvalues of largest magnitude."""
    size = abs(float(whole.values[0]))
    return abs(float(gap.values[0])) / size if size > 0 else 0.0
