"""Autograd's derivatives beside differences: what is wrong is found, what is right is left in peace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import DerivativeError, DerivativeWarning


class WrongSecond(torch.autograd.Function):
    """x³/3: its backward is right, its double backward drops a part but stays symmetric."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.detach() ** 2


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx, g):
        return g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


class Layered(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(3, 6), nn.Linear(6, 2), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def problem(between, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = Layered(between).to(dtype)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(12, 3, generator=generator).to(dtype), torch.arange(12) % 2
    return th.Problem(model, nn.CrossEntropyLoss(), data, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_double_backward_is_refused(dtype):
    wrong = problem(WrongSecond.apply, dtype)
    with pytest.raises(DerivativeError, match=r"off by \d+%"):
        th.hessian(wrong) @ torch.ones(wrong.size)
    with pytest.raises(DerivativeError):
        th.top_eigenpairs(th.layer_hessians(problem(WrongSecond.apply, dtype)), 1)
    with pytest.raises(DerivativeError):
        problem(WrongSecond.apply, dtype, check="full")


def test_it_is_measured_as_it_is_where_that_is_asked():
    wrong = problem(WrongSecond.apply, check=False)
    assert (th.hessian(wrong) @ torch.ones(wrong.size)).shape == (wrong.size,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("between", [StraightThrough.apply, Reversed.apply, lambda x: x * x.detach()])
def test_a_gradient_that_is_not_that_of_the_loss_is_said(between, dtype):
    with pytest.warns(DerivativeWarning, match="not that of the loss"):
        found = problem(between, dtype)
    assert "what the optimizer follows" in found.notes[0]


SMOOTH_AND_KINKED = {
    "relu": torch.relu,
    "hard": nn.functional.hardtanh,
    "max": lambda x: torch.max(x, x.flip(-1)),
    "abs": torch.abs,
    "gelu": nn.functional.gelu,
    "steep": lambda x: torch.tanh(50 * x),
    "saturated": lambda x: torch.tanh(1e3 * x),
    "tiny": lambda x: 1e-9 * x,
    "large": lambda x: 1e3 * x,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("between", SMOOTH_AND_KINKED.values(), ids=SMOOTH_AND_KINKED)
def test_right_derivatives_pass(between, dtype):
    right = problem(between, dtype, check="full")
    assert right.notes == ()
    assert torch.isfinite(th.hessian(right) @ torch.ones(right.size)).all()


@pytest.mark.parametrize("seed", range(20))
def test_units_at_their_kink_pass(seed):
    """Zero inputs and zero biases put every unit of a ReLU network exactly where two slopes meet."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    for layer in model[::2]:
        nn.init.zeros_(layer.bias)
    x = torch.randn(16, 5) * (torch.arange(16) % 2)[:, None]
    assert th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(16) % 3), check="full").notes == ()


def test_it_is_looked_at_once(monkeypatch):
    calls = []
    found = problem(torch.tanh)
    from theodolite.problem import problem as module

    monkeypatch.setattr(module, "refuse_wrong_products", lambda *args, **kwargs: calls.append(1))
    for _ in range(3):
        th.hessian(found, closed_form=False) @ torch.ones(found.size)
    th.layer_hessians(found)["first"] @ torch.ones(18)
    assert calls == [1]


def test_the_form_of_the_check_is_checked():
    with pytest.raises(ValueError, match="check must be True, False or 'full'"):
        problem(torch.tanh, check="half")


def test_the_row_that_an_embedding_pads_with_does_not_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)).double()
    tokens = torch.arange(24).reshape(8, 3) % 6
    found = th.Problem(model, nn.CrossEntropyLoss(), (tokens, torch.arange(8) % 3), check="full")
    assert found.notes == ()
    assert not (th.hessian(found) @ torch.ones(found.size).double())[:4].any()


def test_a_parameter_with_a_domain_is_left_in_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 2).double(), nn.Parameter(torch.full((), 1e-6).double())

        def forward(self, x):
            return torch.distributions.Normal(self.linear(x), self.scale).mean

    assert th.Problem(Scaled(), nn.MSELoss(), (torch.ones(4, 3).double(), torch.ones(4, 2).double())).notes == ()
