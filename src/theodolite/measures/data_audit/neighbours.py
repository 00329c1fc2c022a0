"""What the inputs alone say of a target: each sample predicted from all the others, by kernel ridge regression in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

#: What is added to the diagonal of the kernel; the one that predicts best is taken.
RIDGES = (0.03, 0.3, 3.0)
#: Directions of targets that permutations are judged by.
DIRECTIONS = 32


class LeaveOneOut:
    """Kernel ridge regression on n vectors (n, d) with the kernel `exp(-‖x - y‖/s)`, s the median distance.

    With C = (K + λI)⁻¹, the prediction for sample i from all others is y_i - (C y)_i / C_ii: no model is fitted twice.

    >>> x = torch.linspace(0, 1, 50)[:, None]
    >>> float(LeaveOneOut(x).skill(torch.sin(6 * x))) > 0.95
    True
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors.float()
        distances = torch.cdist(self.vectors, self.vectors)
        positive = distances[distances > 0]
        self.scale = float(positive.median()) if len(positive) else 1.0
        kernel = torch.exp(-distances.double() / self.scale)
        eye = torch.eye(len(vectors), dtype=torch.float64)
        self.inverses = [torch.cholesky_inverse(torch.linalg.cholesky(kernel + ridge * eye)) for ridge in RIDGES]

    def predictions(self, targets: Tensor) -> Tensor:
        """Of targets (n, k), at the ridge that predicts them best."""
        best = min(range(len(RIDGES)), key=lambda i: float((targets - self._at(i, targets)).square().mean()))
        return self._at(best, targets)

    def others(self, vectors: Tensor, targets: Tensor, *, chunk: int = 2000) -> Tensor:
        """Predictions (m, k) for m other vectors, from all n targets."""
        best = min(range(len(RIDGES)), key=lambda i: float((targets - self._at(i, targets)).square().mean()))
        mean = targets.double().mean(0)
        weights = self.inverses[best] @ (targets.double() - mean)
        parts = (torch.exp(-torch.cdist(part.float(), self.vectors) / self.scale).double() for part in vectors.split(chunk))
        return torch.cat([part @ weights + mean for part in parts])

    def skill(self, targets: Tensor, ridge: int = 1) -> Tensor:
        """The share of the variance that is predicted, `1 - Σ(y - ŷ)² / Σ(y - ȳ)²`, of targets (..., n, k), summed over k."""
        error = (targets - self._at(ridge, targets)).square().sum((-2, -1))
        variance = (targets - targets.mean(-2, keepdim=True)).square().sum((-2, -1))
        return 1 - error / variance.clamp_min(1e-300)

    def _at(self, ridge: int, targets: Tensor) -> Tensor:
        """Predictions at one of the ridges, for targets (..., n, k)."""
        inverse = self.inverses[ridge]
        targets = targets.double()
        centred = targets - targets.mean(-2, keepdim=True)
        return targets - (inverse @ centred) / inverse.diagonal()[:, None]


def permutation_test(statistic: Tensor, permuted: Tensor) -> float:
    """The p-value `(1 + #{permuted ≥ statistic}) / (1 + #permuted)`.

    >>> permutation_test(torch.tensor(3.0), torch.tensor([1.0, 2.0, 4.0]))
    0.5
    """
    return (1 + int((permuted >= statistic).sum())) / (1 + len(permuted))


def few_directions(targets: Tensor, seed: int, most: int = DIRECTIONS) -> Tensor:
    """Targets (n, k) along at most so many random directions: a permutation test of these is as true, and costs less.

    >>> few_directions(torch.eye(50, dtype=torch.float64), 0).shape
    torch.Size([50, 32])
    """
    k = targets.shape[1]
    generator = torch.Generator().manual_seed(seed)
    return targets if k <= most else targets @ torch.randn(k, most, generator=generator, dtype=targets.dtype)


def permuted_copies(targets: Tensor, copies: int, seed: int) -> Tensor:
    """Targets (n, k) in so many random orders, (copies, n, k)."""
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(len(targets), generator=generator) for _ in range(copies)])
    return targets[orders]


def column_skill(columns: Tensor, targets: Tensor) -> Tensor:
    """The largest share of the variance of targets (..., n, k) that a line in a single column of (n, d) explains.

    For wide data of which one column matters, where distances say nothing.
    """
    x = columns.double() - columns.double().mean(0)
    x = x / x.norm(dim=0).clamp_min(1e-300)
    y = targets.double() - targets.double().mean(-2, keepdim=True)
    explained: Tensor = (x.T @ y).square().sum(-1)  # (..., d)
    share: Tensor = explained.amax(-1) / y.square().sum((-2, -1)).clamp_min(1e-300)
    return share


def with_products(columns: Tensor, most: int = 64) -> Tensor:
    """Columns (n, d) beside the products of each two of them, where they are few: what an exclusive or depends on."""
    d = columns.shape[1]
    if d > most:
        return columns
    i, j = torch.triu_indices(d, d)
    return torch.cat([columns, columns[:, i] * columns[:, j]], dim=1)


def linear_skill(columns: Tensor, targets: Tensor) -> Tensor:
    """The share of the variance of targets (..., n, k) that a line in all columns (n, d) explains; 0 where these are too many.

    Least squares see what lies in a direction of little variance, which distances do not.
    """
    n, d = columns.shape
    y = targets.double() - targets.double().mean(-2, keepdim=True)
    if d > n // 3:
        return torch.zeros(y.shape[:-2], dtype=torch.float64)
    values, sizes, _ = torch.linalg.svd(columns.double() - columns.double().mean(0), full_matrices=False)
    basis = values[:, sizes > 1e-6 * float(sizes[0])]
    explained: Tensor = (basis.T @ y).square().sum((-2, -1)) / y.square().sum((-2, -1)).clamp_min(1e-300)
    return explained
