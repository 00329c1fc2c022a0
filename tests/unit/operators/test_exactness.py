"""Hessian and Gauss-Newton products against the dense matrix, on every kind of model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import theodolite as th
from tests.unit.cases import HUGGING_FACE, PLAIN, Case, make, weightnorm
from theodolite.problem.calling import KeepFloat64
from theodolite.testing import dense_gauss_newton, dense_hessian, finite_difference_product

every_model = pytest.mark.parametrize("builder", [*PLAIN, *HUGGING_FACE], ids=lambda b: b.__name__)


@cache
def truth(builder) -> tuple[Case, torch.Tensor]:
    case = make(builder)
    return case, dense_hessian(case.objective, case.parameters())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@every_model
def test_dense_truth_agrees_with_finite_differences(builder):
    case, dense = truth(builder)
    v = torch.randn(len(dense), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v /= v.norm()
    steps = (1e-5, 1e-6, 1e-7)  # the best step depends on how curved the model is
    products = [finite_difference_product(case.objective, case.parameters(), v, step) for step in steps]
    assert min(relative_error(dense @ v, product) for product in products) < 1e-6


@every_model
@pytest.mark.parametrize("keep", ["always", "never"])
def test_hessian_is_exact(builder, keep):
    case, dense = truth(builder)
    op = th.hessian(case.problem(), keep=keep)
    assert op.shape == tuple(dense.shape)
    x = torch.randn(len(dense), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert relative_error(op @ x, dense @ x) < 1e-8
    assert relative_error(op @ x[:, 0], dense @ x[:, 0]) < 1e-8


@every_model
def test_gauss_newton_is_exact(builder):
    case, _ = truth(builder)
    if case.loss is None:
        dense = _language_model_gauss_newton(case)
    else:
        dense = dense_gauss_newton(case.output, case.loss_of, case.parameters())
    x = torch.randn(len(dense), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert relative_error(th.gauss_newton(case.problem()) @ x, dense @ x) < 1e-8


def _language_model_gauss_newton(case: Case) -> torch.Tensor:
    labels = case.data["labels"]
    causal = "MaskedLM" not in type(case.model).__name__

    def loss(logits: torch.Tensor) -> torch.Tensor:
        z, y = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
        return torch.nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1))

    with torch.no_grad(), KeepFloat64():
        assert abs(float(loss(case.output().logits)) - float(case.objective())) < 1e-12
    return dense_gauss_newton(lambda: case.output().logits, loss, case.parameters())


@every_model
def test_single_precision_agrees(builder):
    case, dense = truth(builder)
    op = th.hessian(case.to(torch.float32).problem())
    assert op.dtype == torch.float32
    x = torch.randn(len(dense), 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert relative_error(op @ x, dense @ x) < 1e-4


@every_model
def test_jacobian_is_exact(builder):
    case, _ = truth(builder)
    if case.mode == "train":
        pytest.skip("batch-coupled: refused, see test_left_as_found")
    with KeepFloat64():
        z = case.output() if case.loss is not None else case.output().logits
    parameters = case.parameters()
    op = th.operators.jacobian(case.problem())
    assert op.shape == (z.numel(), sum(p.numel() for p in parameters))
    generator = torch.Generator().manual_seed(5)
    u = torch.randn(z.numel(), generator=generator, dtype=torch.float64)
    v = torch.randn(op.shape[1], generator=generator, dtype=torch.float64)
    pulled = torch.autograd.grad(z, parameters, u.view_as(z), allow_unused=True)
    expected = torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(pulled, parameters, strict=True)]
    )
    assert relative_error(op.T @ u, expected) < 1e-8
    assert abs(float(u @ (op @ v)) - float(expected @ v)) < 1e-8 * float(expected.norm() * v.norm())


def test_weight_norm_is_exact_where_torch_is_not():
    """torch's own double backward through the fused weight norm is wrong; the reference is finite differences."""
    case = make(weightnorm)
    v = torch.randn(case.problem().size, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    expected = finite_difference_product(case.objective, case.parameters(), v, step=1e-6)
    assert relative_error(th.hessian(case.problem()) @ v, expected) < 1e-6
