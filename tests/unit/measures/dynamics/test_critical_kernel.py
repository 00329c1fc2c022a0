"""The critical rate by the tangent kernel: four conventions of the squared loss, optimizers, and the window above it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.measures.quadratic_models import GatedBilinear

Loss = Callable[[Tensor, Tensor], Tensor]

#: Loss of residuals (n, k), and eta_crit · λ₁(K) by the table of the four conventions.
CONVENTIONS: dict[str, tuple[Loss, Callable[[int, int], float]]] = {
    "A: half the sum": (lambda f, y: 0.5 * (f - y).square().sum(), lambda n, k: 2.0),
    "B: sum over outputs, mean over samples": (lambda f, y: (f - y).square().sum(1).mean(), lambda n, k: float(n)),
    "C: half of it": (lambda f, y: 0.5 * (f - y).square().sum(1).mean(), lambda n, k: 2.0 * n),
    "D: MSELoss": (nn.MSELoss(), lambda n, k: float(n * k)),
}


def network(outputs: int = 3, width: int = 30) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_table_of_conventions(name: str, outputs: int) -> None:
    loss, times = CONVENTIONS[name]
    model, x, y = network(outputs), numbers(7, 4), numbers(7, outputs)
    largest = float(torch.linalg.eigvalsh(th.tangent_kernel(model, x))[-1])
    rate = th.critical_learning_rate(th.Problem(model, loss, (x, y)), by="kernel")
    assert rate.value == pytest.approx(times(7, outputs) / largest, rel=1e-4)
    assert rate.predicted_maximum == pytest.approx(2 * rate.value)
    assert "λ₁(K)" in rate.rule


@pytest.mark.parametrize("share", [0.95, 1.05])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_it_is_the_edge_of_the_linear_twin(name: str, share: float) -> None:
    loss, _ = CONVENTIONS[name]
    x, y = numbers(7, 4), numbers(7, 3)
    problem = th.Problem(network(), loss, (x, y))
    twin = th.linearize(network())
    sgd = torch.optim.SGD(twin.parameters(), lr=share * th.critical_learning_rate(problem, by="kernel").value)
    losses = []
    for _ in range(200):
        sgd.zero_grad()
        value = loss(twin(x), y)
        value.backward()
        sgd.step()
        losses.append(float(value.detach()))
    assert (losses[-1] < losses[0]) == (share < 1)
    assert (losses[-1] > 1e3 * losses[0]) == (share > 1)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3),
    "two rates": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.4}]),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_edge_of_the_gauss_newton_matrix(name: str) -> None:
    """For a squared loss c·K and the Gauss-Newton matrix have the same eigenvalues, also with a preconditioner."""
    problem = th.Problem(network(), nn.MSELoss(), [(numbers(5, 4), numbers(5, 3)), (2 * numbers(2, 4), numbers(2, 3))])
    optimizer = OPTIMIZERS[name](problem.parameters)
    kernel = th.critical_learning_rate(problem, by="kernel", optimizer=optimizer)
    matrix = th.critical_learning_rate(problem, by="gauss_newton", optimizer=optimizer)
    assert kernel.value == pytest.approx(matrix.value, rel=1e-4)
    assert kernel.rule.startswith(matrix.rule)


def test_a_population_adds_the_sampling_error() -> None:
    problem = th.Problem(network(), nn.MSELoss(), (numbers(40, 4), numbers(40, 3)))
    alone = th.critical_learning_rate(problem, by="kernel")
    sampled = th.critical_learning_rate(problem, by="kernel", population=1000)
    assert sampled.error > 100 * alone.error


def test_windows() -> None:
    """Empty for a quadratic loss, twice the edge for models quadratic in their weights, unknown for a network."""
    x, y = numbers(7, 4), numbers(7, 3)
    loss = nn.MSELoss()

    def rate(model: nn.Module, **options: object) -> th.measures.dynamics.CriticalRate:
        return th.critical_learning_rate(th.Problem(model, loss, (x, y)), by="kernel", **options)  # type: ignore[arg-type]

    linear = rate(th.linearize(network()))
    assert linear.window == ()
    assert linear.predicted_maximum == linear.value
    quadratic = rate(th.quadratize(network()))
    assert quadratic.window == (quadratic.value, 2 * quadratic.value)
    assert rate(network()).window is None
    bilinear = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False)).double()
    assert rate(bilinear).window == (rate(bilinear).value, 2 * rate(bilinear).value)
    momentum = torch.optim.SGD(bilinear.parameters(), lr=0.1, momentum=0.9)
    assert rate(bilinear, optimizer=momentum).predicted_maximum is None  # no theory


def test_a_gated_model_has_the_window_of_a_quadratic_one() -> None:
    u, v = numbers(50, 4), numbers(50).sign()
    problem = th.Problem(GatedBilinear(u, v), nn.MSELoss(), (numbers(6, 4), numbers(6)))
    found = th.critical_learning_rate(problem, by="kernel")
    assert found.window == (found.value, 2 * found.value)


def test_what_the_kernel_cannot_say_is_refused() -> None:
    x = numbers(7, 4)
    with pytest.raises(ValueError, match="gauss_newton"):
        th.critical_learning_rate(th.Problem(network(), nn.CrossEntropyLoss(), (x, torch.arange(7) % 3)), by="kernel")
    weighted = th.Problem(network(), lambda f, y: ((f - y).square() * torch.tensor([1.0, 2.0, 1.0])).mean(), (x, numbers(7, 3)))
    with pytest.raises(ValueError, match="squared loss"):
        th.critical_learning_rate(weighted, by="kernel")
    problem = th.Problem(network(), nn.MSELoss(), (x, numbers(7, 3)))
    uneven = torch.optim.SGD(
        [{"params": problem.parameters[:2], "weight_decay": 0.1}, {"params": problem.parameters[2:]}], lr=0.1
    )
    with pytest.raises(ValueError, match="weight decay that differs"):
        th.critical_learning_rate(problem, by="kernel", optimizer=uneven)
