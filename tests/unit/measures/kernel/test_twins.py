"""Taylor twins against finite differences, closed forms, and plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import theodolite as th
from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.models import ntk_cnn


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(tokens))[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens)))).mean(1)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


TOKENS = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.InstanceNorm2d(4, affine=True), nn.SiLU(), nn.Conv2d(4, 4, 2, groups=2),
        nn.BatchNorm2d(4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


ACTIVATIONS = (nn.SiLU, nn.Mish, nn.GELU, nn.Softplus, nn.Sigmoid, nn.ELU, nn.LogSigmoid)

SMOOTH: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tanh": (lambda: Normed(nn.Identity()), numbers(5, 4)),
    "layer norm": (lambda: Normed(nn.LayerNorm(6)), numbers(5, 4)),
    "rms norm": (lambda: Normed(nn.RMSNorm(6)), numbers(5, 4)),
    "group norm": (lambda: Normed(nn.GroupNorm(2, 6)), numbers(5, 4)),
    "batch norm": (lambda: Normed(nn.BatchNorm1d(6)), numbers(5, 4)),
    **{kind.__name__: (lambda kind=kind: Normed(kind()), numbers(5, 4)) for kind in ACTIVATIONS},  # type: ignore[misc]
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), numbers(5, 4)),
    "convolutions": (convolutional, numbers(3, 2, 7, 7)),
    "attention": (Attention, numbers(3, 4, 8)),
    "recurrent": (Recurrent, TOKENS),
    "tied": (Tied, TOKENS),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, x = SMOOTH[name]
    return build().double().eval(), x


def move(twin: nn.Module, model: nn.Module, direction: dict[str, Tensor], radius: float) -> None:
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(model.get_parameter(name) + radius * direction[name])


def plain_value(twin: Any, moved: dict[str, Tensor], x: Tensor) -> Tensor:
    """The twin's value by differentiable operations, without its cheap gradient."""
    return twin.taylor.value(moved, twin.anchor(), twin._fixed(), ((x,), {}))


def directions(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SMOOTH)
def test_error_falls_with_the_square_and_the_cube_of_the_radius(name: str) -> None:
    """Order test: halving the radius divides the error of the linear twin by 4, of the quadratic one by 8."""
    model, x = made(name)
    direction = directions(model)
    for twin, power in ((th.linearize(model), 2), (th.quadratize(model), 3)):
        errors = []
        for radius in (2e-3, 1e-3):
            move(twin, model, direction, radius)
            true = functional_call(model, dict(twin.named_parameters()), (x,))
            errors.append(float((twin(x) - true).detach().abs().max()))
        assert errors[0] / errors[1] == pytest.approx(2**power, rel=0.1)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("expand", [th.linearize, th.quadratize])
def test_cheap_gradient_is_the_gradient(name: str, expand: Callable[[nn.Module], nn.Module]) -> None:
    model, x = made(name)
    twin = expand(model)
    move(twin, model, directions(model), 0.1)
    weights = numbers(*twin(x).shape)
    cheap = torch.autograd.grad((twin(x).square() * weights).sum(), list(twin.parameters()), allow_unused=True)
    plain = plain_value(twin, dict(twin.named_parameters()), x)
    true = torch.autograd.grad((plain.square() * weights).sum(), list(twin.parameters()), allow_unused=True)
    for a, b in zip(cheap, true, strict=True):
        assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("expand", [th.linearize, th.quadratize])
def test_second_derivatives_and_functional_transforms(expand: Callable[[nn.Module], nn.Module]) -> None:
    """The twin is a module like any other: its Hessian, its kernel, grad, vmap."""
    model, x = made("layer norm")
    twin = expand(model)
    move(twin, model, directions(model), 0.1)
    y = numbers(5, 2)
    problem = th.Problem(twin, nn.MSELoss(), (x, y))
    found = th.hessian(problem).to_dense()
    names = [name for name, _ in twin.named_parameters()]
    sizes = [p.numel() for p in twin.parameters()]
    shapes = [p.shape for p in twin.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return nn.functional.mse_loss(plain_value(twin, dict(zip(names, parts, strict=True)), x), y)

    flat = torch.cat([p.detach().reshape(-1) for p in twin.parameters()])
    step = 1e-4
    v = numbers(flat.numel())
    slopes = [torch.func.grad(loss)(flat + sign * step * v) for sign in (1, -1)]
    assert torch.allclose(found @ v, (slopes[0] - slopes[1]) / (2 * step), rtol=1e-5, atol=1e-7)
    inside = torch.func.grad(lambda p: nn.functional.mse_loss(functional_call(twin, p, (x,)), y))(dict(twin.named_parameters()))
    outside = torch.autograd.grad(nn.functional.mse_loss(twin(x), y), list(twin.parameters()))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(inside.values(), outside, strict=True))


def test_linear_twin_keeps_the_kernel_of_the_network() -> None:
    model, x = made("tanh")
    twin = th.linearize(model)
    start = th.tangent_kernel(model, x)
    move(twin, model, directions(model), 0.5)
    assert torch.allclose(th.tangent_kernel(twin, x), start, rtol=1e-10)
    quadratic = th.quadratize(model)
    move(quadratic, model, directions(model), 0.5)
    assert not torch.allclose(th.tangent_kernel(quadratic, x), start, rtol=1e-2)


def test_check_14_linear_dynamics() -> None:
    """Gradient descent on f_lin: r(t) = (I − ηK)ᵗ r(0); it converges at 0.95 and diverges at 1.05 of the critical rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x, y = numbers(6, 3), numbers(6, 1)
    kernel = th.tangent_kernel(model, x)
    critical = 2 / float(torch.linalg.eigvalsh(kernel)[-1])  # ½ Σ r²
    for share in (0.95, 1.05):
        twin = th.linearize(model)
        sgd = torch.optim.SGD(twin.parameters(), lr=share * critical)
        residual = (model(x) - y).detach()[:, 0]
        losses = []
        for _ in range(300):
            sgd.zero_grad()
            found = twin(x) - y
            assert torch.allclose(found.detach()[:, 0], residual, rtol=1e-8, atol=1e-8 * float(residual.norm()))
            (0.5 * found.square().sum()).backward()
            sgd.step()
            losses.append(float(found.detach().square().sum()))
            residual = residual - share * critical * (kernel @ residual)
        assert (losses[-1] < losses[0]) == (share < 1)
        assert (losses[-1] > 1e6 * losses[0]) == (share > 1)


def test_names_states_and_frozen_parameters_are_those_of_the_network() -> None:
    model, x = made("batch norm")
    model.get_submodule("last").requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    twin = th.quadratize(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, p in twin.named_parameters() if p.requires_grad] == [
        name for name, p in model.named_parameters() if p.requires_grad
    ]
    assert torch.allclose(twin(x), model(x))
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    twin(x).square().sum().backward()
    sgd.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # the network is not the twin
    again = th.quadratize(model)
    again.load_state_dict(twin.state_dict())
    assert torch.equal(again(x), twin(x))
    assert torch.equal(copy.deepcopy(twin)(x), twin(x))


def test_twin_of_a_problem_moves_its_parameters_only() -> None:
    model, x = made("tanh")
    twin = th.linearize(th.Problem(model, nn.MSELoss(), (x, numbers(5, 2)), params="last.*"))
    assert [name for name, p in twin.named_parameters() if p.requires_grad] == ["last.weight", "last.bias"]


GATED: dict[str, tuple[Callable[[], nn.Module], Tensor, bool]] = {
    "two layers": (lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)), numbers(5, 4), True),
    "two layers, in place": (lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(inplace=True), nn.Linear(9, 2)), numbers(5, 4), True),
    "convolution and linear": (lambda: ntk_cnn((1, 5, 5), 4, 2), numbers(5, 1, 5, 5), True),
    "three layers": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1)),
        numbers(5, 4),
        False,
    ),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 1)),
        numbers(5, 1, 5, 5),
        False,
    ),
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)), numbers(5, 4), False),
}


@pytest.mark.parametrize("name", GATED)
def test_frozen_gates_are_used_where_they_are_the_expansion(name: str) -> None:
    build, x, expected = GATED[name]
    torch.manual_seed(0)
    model = build().double()
    twin = th.quadratize(model).prepare(x)
    assert twin.taylor.gated is expected
    move(twin, model, directions(model), 0.5)  # far enough for units to change sides in the network
    found = twin(x)
    gradient = torch.autograd.grad(found.square().sum(), list(twin.parameters()))
    twin.taylor.gated = False
    true = twin(x)
    assert torch.allclose(found, true, rtol=1e-11)
    for a, b in zip(gradient, torch.autograd.grad(true.square().sum(), list(twin.parameters())), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_taylor_arithmetic_agrees_with_nested_forward_mode(name: str) -> None:
    model, x = made(name)
    twin = th.quadratize(model).prepare(x)
    move(twin, model, directions(model), 0.3)
    fast, slow = [], []
    for found, jets in ((fast, True), (slow, False)):
        twin.taylor.jets = jets
        value = twin(x)
        found += [value.detach(), *torch.autograd.grad(value.square().sum(), list(twin.parameters()))]
    assert all(float((a - b).abs().max()) <= 1e-11 * float(b.abs().max() + 1) for a, b in zip(fast, slow, strict=True))


def test_most_networks_take_jets() -> None:
    """The five-pass route is no decoration: all but recurrent layers and attention, whose fused parts are one operation."""
    taken = {name: th.quadratize(made(name)[0]).prepare(made(name)[1]).taylor.jets for name in SMOOTH}
    assert {name for name, jets in taken.items() if not jets} <= {"recurrent", "attention"}


def test_recurrent_layers_work_in_float32() -> None:
    model, x = made("recurrent")
    model = model.float()
    twin = th.quadratize(model)
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


class Counting(nn.Module):
    """Keeps a state between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.layer(x) * self.calls


def test_what_has_no_expansion_is_refused_with_the_remedy() -> None:
    with pytest.raises(BatchCoupledError, match=r"model\.eval"):
        th.linearize(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    with pytest.raises(NotRepeatableError, match="dropout is active"):
        th.quadratize(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)))
    with pytest.raises(NotRepeatableError, match="state between calls"):
        th.quadratize(Counting().double().eval())(numbers(3, 4))
    with pytest.raises(ValueError, match="no parameter requires"):
        th.linearize(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="model must be a torch"):
        th.linearize(lambda x: x)  # type: ignore[arg-type]
    model, x = made("batch norm")
    with pytest.raises(BatchCoupledError):
        th.linearize(th.Problem(model, nn.MSELoss(), (x, numbers(5, 2)), mode="train"))


def test_fleet_trains_twins_as_plain_loops_do() -> None:
    x, y = numbers(6, 4), numbers(6, 2)

    def factory(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return th.quadratize(Normed(nn.LayerNorm(6)).double())

    run = th.Fleet(factory, [0, 1], loss=nn.MSELoss(), optimizer="sgd", rate=[0.005, 0.01]).train((x, y), steps=5, progress=False)
    assert run.route == "vmap"
    for i, rate in enumerate((0.005, 0.01)):
        twin = factory(i)
        sgd = torch.optim.SGD(twin.parameters(), lr=rate)
        for step in range(5):
            sgd.zero_grad()
            loss = nn.functional.mse_loss(twin(x), y)
            loss.backward()
            sgd.step()
            assert float(run.loss[i, step]) == pytest.approx(float(loss.detach()), rel=1e-10)
