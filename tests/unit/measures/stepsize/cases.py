"""The reference quadratic of the specification, R0, and others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: η* of R0 by horizon.
BEST = {1: 0.0229219, 2: 0.0249833, 5: 0.0285486, 10: 0.0305471, 20: 0.0309083, 40: 0.0311834, 80: 0.0314306, 160: 0.0315719,
        200: 0.0316068, 1000: 0.0318064}  # fmt: skip
RATES = (0.0, 0.001, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)
#: F' of R0 at these rates, by horizon.
SLOPES = {
    10: (-71.643478, -62.080493, -12.300218, -6.909854, -2.504156, 62.319125, 24.392577, 7.093365, 2.036781),
    40: (-71.643478, -30.520602, -2.971073, -1.019979, -0.823052, 58.738279, 23.797074, 7.041607, 2.032492),
    80: (-71.643478, -15.137895, -1.028657, -0.769180, -0.689695, 58.737827, 23.795471, 7.041024, 2.032418),
}


def reference(seed: int = 0, columns: int = 20) -> tuple[Tensor, Tensor]:
    """H = XᵀX with X of 20 columns, and w₀ on the sphere; R0 for seed 0."""
    generator = np.random.default_rng(seed)
    x, w = generator.standard_normal((columns, 20)), generator.standard_normal(20)
    return torch.from_numpy(x.T @ x), torch.from_numpy(w / np.linalg.norm(w))


def in_eigenvectors(hessian: Tensor, w0: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and the coefficients of the start."""
    values, vectors = torch.linalg.eigh(hessian)
    return values, vectors.T @ w0


#: Eigenvalues 1 to 4 with equal parts of the start.
EVEN = torch.tensor([1.0, 1.75, 2.5, 3.25, 4.0], dtype=torch.float64), torch.full((5,), 0.2, dtype=torch.float64).sqrt()
