"""Taylor twins where a short-cut would be wrong: special first inputs, in-place ReLU, names, dtypes, twins of twins."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite.measures.kernel.twins import taylor
from theodolite.problem.derivatives.second_order import functional_transforms


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shake(twin: nn.Module, size: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in twin.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p))


def true_value(twin: Any, x: Tensor) -> Tensor:
    """Nested forward mode, which takes no short-cut."""
    moved = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}
    anchor = twin.anchor()
    with functional_transforms():
        function = twin.taylor.function(twin._fixed(), ((x,), {}))
        return taylor(function, anchor, {n: moved[n] - anchor[n] for n in anchor}, twin.taylor.order)


def assert_expands(twin: Any, x: Tensor, tolerance: float = 1e-9) -> None:
    found, true = twin(x).detach(), true_value(twin, x)
    assert float((found - true).norm()) <= tolerance * float(true.norm())


def three_layers(width: int = 4, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    layers = [nn.Linear(3, width, bias), activation(), nn.Linear(width, width, bias), activation(), nn.Linear(width, 2, bias)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_one_sample_does_not_decide_for_all(seed: int, activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(seed)
    twin = th.quadratize(three_layers(activation=activation))
    twin(numbers(1, 3, seed=seed))
    shake(twin)
    assert not twin.taylor.gated
    assert_expands(twin, numbers(20, 3))


@pytest.mark.parametrize(
    "build",
    [
        lambda: three_layers(bias=False),
        lambda: nn.Sequential(nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False)).double(),
    ],
)
def test_zeros_as_first_inputs_decide_nothing(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    twin = th.quadratize(build())
    twin(torch.zeros(5, 3, dtype=torch.float64))
    shake(twin)
    assert_expands(twin, numbers(20, 3))


@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_large_constants_and_small_inputs_hide_nothing(size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].bias.fill_(1e4)
    twin = th.quadratize(model)
    twin(size * numbers(5, 3).float())
    assert not twin.taylor.gated


class InPlace(nn.Module):
    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 9), nn.Linear(9, 1), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.how(h)  # what it returns is dropped
        return self.b(h)


@pytest.mark.parametrize("how", [torch.relu_, Tensor.relu_, lambda h: F.relu(h, inplace=True), lambda h: F.relu(h, True)])
@pytest.mark.parametrize("expand", [th.linearize, th.quadratize])
def test_in_place_relu_counts(how: Callable[[Tensor], Any], expand: Any) -> None:
    torch.manual_seed(0)
    twin = expand(InPlace(how).double())
    shake(twin)
    assert_expands(twin, numbers(20, 3))


@pytest.mark.parametrize("outer", [th.linearize, th.quadratize])
def test_twin_of_a_moved_twin_begins_where_that_one_is(outer: Any) -> None:
    torch.manual_seed(0)
    inner = th.quadratize(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    shake(inner)
    twin = outer(inner)
    x = numbers(6, 3)
    assert torch.allclose(twin(x), inner(x), rtol=1e-12)
    before = inner(x).detach()
    shake(twin)
    assert torch.equal(inner(x), before)
    if outer is th.quadratize:  # a quadratic is its own expansion
        moved = dict(twin.named_parameters())
        assert torch.allclose(twin(x), torch.func.functional_call(inner, moved, (x,)), rtol=1e-9)


@pytest.mark.parametrize("expand", [th.linearize, th.quadratize])
def test_gradients_reach_the_inputs(expand: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = numbers(6, 3).requires_grad_()
    expand(model)(x).sum().backward()
    found = x.grad
    x.grad = None
    model(x).sum().backward()
    assert torch.allclose(found, x.grad, rtol=1e-10)


def test_later_shapes_are_looked_at_too() -> None:
    torch.manual_seed(0)
    twin = th.quadratize(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2)).double())
    twin(numbers(4, 2, 6, 6))
    shake(twin)
    assert_expands(twin, numbers(2, 6, 6))  # one image without a batch
    assert_expands(twin, numbers(3, 2, 8, 8))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(F.pad(self.a(x), (0, 3), value=0.7)))


def test_padding_is_a_constant() -> None:
    torch.manual_seed(0)
    twin = th.quadratize(Padded().double()).prepare(numbers(4, 3))
    assert twin.taylor.jets
    shake(twin)
    assert_expands(twin, numbers(6, 3))


class Named(nn.Module):
    """Parts with names that a careless twin would use itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.anchor_, self.gated, self.jets = (nn.Linear(3, 3) for _ in range(4))
        self.order = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.order * torch.tanh(self.value(self.gated(x)) + self.jets(self.anchor_(x)))


def test_the_networks_names_are_free() -> None:
    torch.manual_seed(0)
    twin = th.quadratize(Named().double())
    shake(twin)
    assert_expands(twin, numbers(5, 3))
    clash = nn.Module()
    clash.taylor = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Rename it"):
        th.linearize(clash)


def test_a_network_on_a_graph_has_twins() -> None:
    twin = th.quadratize(th.DagNetwork([(0, 2), (1, 2), (0, 3), (2, 3), (3, 4), (2, 4)], seed=1))
    shake(twin)
    assert_expands(twin, numbers(5, 2))


def test_dtype_may_change_before_the_first_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).eval()
    model[0].requires_grad_(False)
    twin = th.quadratize(model).double()
    assert torch.allclose(twin(numbers(4, 3)), model.double()(numbers(4, 3)))


def test_thawed_parameters_are_refused_and_copies_agree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model[0].requires_grad_(False)
    twin = th.quadratize(model)
    shake(twin)
    x = numbers(4, 3)
    assert torch.equal(copy.deepcopy(twin)(x), twin(x))
    assert torch.equal(pickle.loads(pickle.dumps(twin))(x), twin(x))
    twin.get_submodule("0").requires_grad_(True)
    with pytest.raises(ValueError, match="was frozen when the twin was made"):
        twin(x)


def test_buffers_that_are_not_saved_stay_so() -> None:
    model = nn.Linear(3, 1).double()
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    twin = th.linearize(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    twin.load_state_dict(model.state_dict())


def test_gated_linear_units() -> None:
    torch.manual_seed(0)
    twin = th.quadratize(nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 1)).double())
    shake(twin)
    assert_expands(twin, numbers(5, 3))
