"""Stand-ins for slow functions compute the same, also at the ends of the number line."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.problem.derivatives.exact_derivatives import ExactDerivatives
from theodolite.testing import dense_hessian

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 1, 0, 2])


class Masked(nn.Module):
    """Some units are switched off by -inf before the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        off = torch.tensor([True, False, False, True])
        return self.second(self.first(x).masked_fill(off, -math.inf).relu())


@pytest.mark.parametrize("columns", [1, 5])
def test_relu_of_minus_infinity_has_a_hessian(columns):
    model = Masked()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (X, Y))
    dense = dense_hessian(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    assert bool(torch.isfinite(dense).all())
    v = torch.randn(problem.size, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(th.hessian(problem) @ v, dense @ v, rtol=1e-12, atol=1e-14)
    assert float(dense.abs().max()) > 1e-2


@pytest.mark.parametrize("relu", [torch.relu, Tensor.relu, F.relu])
@pytest.mark.parametrize("odd", [0.0, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_is_relu(relu, odd, dtype):
    x = torch.tensor([[-2.0, 0.0, 3.0, odd]], dtype=dtype).expand(2, 4)
    with ExactDerivatives():
        mine = relu(x)
    torch.testing.assert_close(mine, relu(x), rtol=0, atol=0, equal_nan=True)


def test_relu_inside_a_transform():
    x = torch.tensor([[-1.0, 2.0, -math.inf], [1.0, 0.5, 3.0]])
    with ExactDerivatives():
        found = torch.func.vmap(torch.func.hessian(lambda row: torch.relu(row).pow(3).sum()))(x)
    torch.testing.assert_close(found, torch.diag_embed(6 * x.clamp(min=0)))


SMOOTH = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1.0, inplace=True),
}


class Residual(nn.Module):
    """A smooth function whose result is changed in place, and which is used on a transposed tensor too."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(self.first(x))
        h += x
        return self.second(self.function(h.T).T)


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH)
def test_smooth_functions_have_their_hessian(function, columns):
    model = Residual(function)
    problem = th.Problem(model, nn.CrossEntropyLoss(), (X, Y))
    dense = dense_hessian(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    v = torch.randn(problem.size, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(th.hessian(problem) @ v, dense @ v, rtol=1e-12, atol=1e-14)
    ggn, expected = th.gauss_newton(problem) @ v, th.gauss_newton(problem, batched=False) @ v
    torch.testing.assert_close(ggn, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [F.gelu, F.silu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_functions_agree_with_torch(function, dtype):
    x = torch.linspace(-30, 30, 61, dtype=dtype, requires_grad=True)
    g = torch.linspace(1, 2, 61, dtype=dtype, requires_grad=True)
    v = torch.linspace(-1, 3, 61, dtype=dtype)

    def both_derivatives() -> list[Tensor]:
        y = function(x)
        (first,) = torch.autograd.grad(y, x, g, create_graph=True)
        return [y, first, *torch.autograd.grad(first, (x, g), v)]

    expected = both_derivatives()
    with ExactDerivatives():
        found = both_derivatives()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-7)


def test_a_third_derivative_is_refused_rather_than_wrong():
    x = torch.tensor([0.3], requires_grad=True)
    with ExactDerivatives():
        y = F.gelu(x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert float(torch.autograd.grad(first, x, retain_graph=True)[0]) == pytest.approx(0.7284, abs=1e-3)  # φ(x)(2 - x²)
    with pytest.raises(RuntimeError, match="not three"):
        torch.autograd.grad(first, x, create_graph=True)


def test_smooth_functions_inside_a_transform():
    x = torch.tensor([[-1.0, 2.0], [0.5, 3.0]])
    expected = torch.func.vmap(torch.func.grad(lambda row: F.gelu(row).pow(3).sum()))(x)
    with ExactDerivatives():
        found = torch.func.vmap(torch.func.grad(lambda row: F.gelu(row).pow(3).sum()))(x)
    torch.testing.assert_close(found, expected)
