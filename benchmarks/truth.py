"""Answers to compare with, by plain double backward in float64. Nothing here uses any of the contenders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from networks import Task


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector, zeros where a parameter was not used."""
    return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in zip(tensors, like, strict=True)])


def split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of the parameters."""
    pieces = vector.split([p.numel() for p in like])
    return [piece.view_as(p) for piece, p in zip(pieces, like, strict=True)]


def gradient_graph(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The flat gradient, differentiable once more."""
    return flat(torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True), parameters)


def total_loss(task: Task) -> Tensor:
    """The mean over all samples, as one number: uneven batches are joined."""
    inputs = torch.cat([x for x, _ in task.batches])
    targets = torch.cat([y for _, y in task.batches])
    value: Tensor = task.loss(task.model(inputs), targets)
    return value


def hessian_product(task: Task, vector: Tensor) -> Tensor:
    """H v in float64."""
    double = task.double()
    with sdpa_kernel(SDPBackend.MATH):
        gradient = gradient_graph(total_loss(double), double.parameters)
        return flat(
            torch.autograd.grad(gradient @ vector.double(), double.parameters, allow_unused=True), double.parameters
        ).detach()


def dense_hessian(task: Task) -> Tensor:
    """The whole matrix, row by row; the task must be small and float64."""
    gradient = gradient_graph(total_loss(task), task.parameters)
    rows = [flat(torch.autograd.grad(g, task.parameters, retain_graph=True), task.parameters) for g in gradient]
    return torch.stack(rows).detach()


def dense_gauss_newton(task: Task) -> Tensor:
    """`Σ_n J_nᵀ (diag(p_n) − p_n p_nᵀ) J_n / N` for a cross-entropy, from the Jacobian's rows."""
    assert isinstance(task.loss, nn.CrossEntropyLoss)
    output = task.model(torch.cat([x for x, _ in task.batches]))
    rows = [flat(torch.autograd.grad(z, task.parameters, retain_graph=True), task.parameters) for z in output.flatten()]
    jacobian = torch.stack(rows).view(*output.shape, -1).detach()
    p = output.detach().softmax(1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    weighted = torch.einsum("nij,njp->nip", curvature, jacobian)
    return torch.einsum("nip,niq->pq", jacobian, weighted) / len(output)


def gauss_newton_product(output: Tensor, loss: Tensor, parameters: Sequence[Tensor], vector: Tensor) -> Tensor:
    """Jᵀ (∇²loss) J v for a given evaluation of the model."""
    probe = torch.zeros_like(output, requires_grad=True)
    pulled = flat(torch.autograd.grad(output, parameters, probe, create_graph=True, allow_unused=True), parameters)
    pushed = torch.autograd.grad(pulled @ vector, probe, retain_graph=True)[0]
    slope = torch.autograd.grad(loss, output, create_graph=True)[0]
    bent = torch.autograd.grad(slope, output, pushed, retain_graph=True)[0]
    return flat(torch.autograd.grad(output, parameters, bent, allow_unused=True), parameters).detach()


def relative_error(found: Tensor, true: Tensor) -> float:
    """Euclidean, relative to the truth."""
    return float((found.detach().double() - true).norm() / true.norm())


def eigenvalue_error(found: Tensor | Sequence[float], true: Tensor) -> float:
    """Largest relative error of eigenvalues, both sides in descending order."""
    found = torch.as_tensor(found, dtype=torch.float64).sort(descending=True).values
    true = true.sort(descending=True).values
    return float(((found - true).abs() / true.abs()).max())


def subspace_overlap(found: Tensor, true: Tensor) -> float:
    """Mean squared cosine of the angles between two subspaces given by columns."""
    q = torch.linalg.qr(found.detach().double()).Q
    return float((q.T @ true).square().sum()) / true.shape[1]


def top(matrix: Tensor, k: int, which: str = "LA") -> tuple[Tensor, Tensor]:
    """The k largest eigenpairs of a dense matrix (largest in magnitude for "LM"), largest first."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    order = (values.abs() if which == "LM" else values).argsort(descending=True)[:k]
    return values[order], vectors[:, order]
