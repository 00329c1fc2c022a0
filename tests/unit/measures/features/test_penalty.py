"""The penalty on the AGOP: its value, its gradient by finite differences, and a model left as found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from tests.unit.measures.features.cases import CASES, Attending, Tokens, cnn, mlp, numbers
from theodolite.errors import BatchCoupledError, SecondOrderError
from theodolite.measures.features import agop, agop_penalty

NORMS = {
    "frobenius": lambda g: g.norm(),
    "trace": lambda g: g.trace(),
    "nuclear": lambda g: torch.linalg.matrix_norm(g, "nuc"),
    "spectral": lambda g: torch.linalg.eigvalsh(g)[-1],
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [1, 2, 9])  # fewer and more gradients than coordinates
def test_it_is_the_norm_of_the_agop(norm: str, n: int) -> None:
    model, x = mlp(outputs=2), numbers(n, 5)
    expected = NORMS[norm](agop(model, x))
    torch.testing.assert_close(agop_penalty(model, x, norm=norm).detach(), expected)  # type: ignore[arg-type]


def by_differences(model: nn.Module, x: Tensor, norm: str, step: float = 1e-5) -> Tensor:
    """The derivative along a fixed direction, from values on both sides."""
    direction = [numbers(*p.shape, seed=5 + i) for i, p in enumerate(model.parameters())]

    def moved(by: float) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(by * d)
        return float(agop_penalty(model, x, norm=norm).detach())  # type: ignore[arg-type]

    high, low = moved(step), moved(-2 * step)
    moved(step)
    gradients = torch.autograd.grad(agop_penalty(model, x, norm=norm), list(model.parameters()), allow_unused=True)  # type: ignore[arg-type]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    return torch.tensor([(high - low) / (2 * step), slope])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CASES)
def test_its_gradient_is_that_of_finite_differences(name: str, norm: str) -> None:
    make, shape = CASES[name]
    measured, slope = by_differences(make(), numbers(*shape), norm)
    assert float(slope) == pytest.approx(float(measured), rel=1e-5)
    assert abs(float(slope)) > 1e-8


def test_at_a_layer_the_layers_before_it_count_too() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = Tokens()
    penalty = agop_penalty(model, ids, at="embedding")
    torch.testing.assert_close(penalty.detach(), agop(model, ids, at="embedding").norm())
    penalty.backward()
    assert model.embedding.weight.grad is not None
    assert float(model.embedding.weight.grad.abs().sum()) > 0


def test_a_problem_brings_its_batches() -> None:
    model, x = mlp(outputs=1), numbers(7, 5)
    problem = th.Problem(model, nn.MSELoss(), [(x[:4], torch.zeros(4, 1).double()), (x[4:], torch.zeros(3, 1).double())])
    torch.testing.assert_close(agop_penalty(problem), agop_penalty(model, x))


def test_projections_keep_the_trace_on_the_mean() -> None:
    model, x = mlp(outputs=6), numbers(4, 5)
    found = torch.stack([agop_penalty(model, x, norm="trace", projections=2, seed=s).detach() for s in range(100)])
    assert abs(float(found.mean() - agop(model, x).trace())) < 4 * float(found.std()) / 10


def test_training_with_it_makes_gradients_smaller() -> None:
    model, x = mlp(outputs=1), numbers(30, 5)
    before = float(agop(model, x).trace())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        sgd.zero_grad()
        agop_penalty(model, x, norm="trace").backward()
        sgd.step()
    assert float(agop(model, x).trace()) < 0.8 * before


def test_the_model_is_left_as_found() -> None:
    model, x = cnn().train(), numbers(4, 2, 4, 4)
    statistics = model[1].running_mean.clone()  # type: ignore[index,operator,union-attr]
    state = torch.get_rng_state()
    agop_penalty(model, x)
    assert model.training
    assert torch.equal(statistics, model[1].running_mean)  # type: ignore[index,arg-type]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not x.requires_grad


def test_half_precision_gets_half_precision_gradients() -> None:
    model = mlp().bfloat16()
    agop_penalty(model, numbers(3, 5).bfloat16()).backward()
    assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="'frobenius', 'trace', 'nuclear', 'spectral'"):
        agop_penalty(mlp(), numbers(2, 5), norm="max")  # type: ignore[arg-type]
    with pytest.raises(BatchCoupledError):
        agop_penalty(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)).double(), numbers(4, 5))
    bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 1))
    with pytest.raises(SecondOrderError, match="EmbeddingBag"):
        agop_penalty(bag, torch.zeros(2, 4, dtype=torch.long), at="0")
    assert agop_penalty(Attending(), numbers(2, 3, 6)).requires_grad
