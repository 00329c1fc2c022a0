"""Tiny problems whose answers are known on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, count, each, finite, nonnegative
from theodolite.arguments import seed as a_seed
from theodolite.problem import Problem
from theodolite.problem.arguments import of_dimensions


@dataclass(frozen=True)
class KnownProblem:
    """A problem with its exact Hessian and Gauss-Newton matrix."""

    name: str
    problem: Problem
    hessian: Tensor
    gauss_newton: Tensor


@checked(eigenvalues=each(nonnegative))
def quadratic_problem(eigenvalues: Sequence[float]) -> KnownProblem:
    """A linear model with squared loss whose Hessian is `diag(eigenvalues)` (all non-negative).

    >>> quadratic_problem([4.0, 1.0]).hessian
    tensor([[4., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    n = len(spectrum)
    model = nn.Linear(n, 1, bias=False).double()
    x = torch.diag((spectrum * n / 2).sqrt())
    problem = Problem(model, nn.MSELoss(), (x, torch.zeros(n, 1, dtype=torch.float64)))
    return KnownProblem("quadratic", problem, torch.diag(spectrum), torch.diag(spectrum))


@checked(samples=count, inputs=count, outputs=count, seed=a_seed)
def squared_loss_problem(samples: int = 7, inputs: int = 3, outputs: int = 2, seed: int = 0) -> KnownProblem:
    """A linear layer with mean squared error: `H = 2/(outputs) · I ⊗ XᵀX / samples`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, outputs, generator=generator, dtype=torch.float64)
    problem = Problem(nn.Linear(inputs, outputs, bias=False).double(), nn.MSELoss(), (x, y))
    matrix = 2 / outputs * torch.kron(torch.eye(outputs, dtype=torch.float64), x.T @ x / samples)
    return KnownProblem("squared loss", problem, matrix, matrix)


@checked(samples=count, inputs=count, classes=count, seed=a_seed)
def softmax_problem(samples: int = 9, inputs: int = 3, classes: int = 4, seed: int = 0) -> KnownProblem:
    """Softmax regression at zero weights: `H = (I/c − 11ᵀ/c²) ⊗ XᵀX / samples`, whatever the labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (samples,), generator=generator)
    model = nn.Linear(inputs, classes, bias=False).double()
    nn.init.zeros_(model.weight)
    curvature = torch.eye(classes, dtype=torch.float64) / classes - torch.full(
        (classes, classes), 1 / classes**2, dtype=torch.float64
    )
    matrix = torch.kron(curvature, x.T @ x / samples)
    return KnownProblem("softmax", Problem(model, nn.CrossEntropyLoss(), (x, y)), matrix, matrix)


class _Product(nn.Module):
    """`f(x) = u v x`, the smallest network that is not linear in its weights."""

    def __init__(self, u: float, v: float) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.tensor([u], dtype=torch.float64))
        self.v = nn.Parameter(torch.tensor([v], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.u * self.v * x


@checked(u=finite, v=finite, target=finite)
def bilinear_problem(u: float = 2.0, v: float = 3.0, target: float = 1.0) -> KnownProblem:
    """`(u v − t)²`: `H = [[2v², 4uv − 2t], [4uv − 2t, 2u²]]`, indefinite near the saddle; G drops the residual part."""
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), target, dtype=torch.float64)
    cross = 4 * u * v - 2 * target
    hessian = torch.tensor([[2 * v * v, cross], [cross, 2 * u * u]], dtype=torch.float64)
    gauss_newton = 2 * torch.tensor([[v * v, u * v], [u * v, u * u]], dtype=torch.float64)
    return KnownProblem("bilinear", Problem(_Product(u, v), nn.MSELoss(), (x, y)), hessian, gauss_newton)


def known_problems() -> list[KnownProblem]:
    """One of each."""
    return [quadratic_problem([5.0, 3.0, 3.0, 0.5]), squared_loss_problem(), softmax_problem(), bilinear_problem()]


@checked(eigenvalues=of_dimensions(1), seed=a_seed)
def random_symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix with the given spectrum and random eigenvectors."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    matrix = (q * eigenvalues.double()) @ q.T
    return (matrix + matrix.T) / 2
