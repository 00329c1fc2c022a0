"""A second, independent implementation agrees: two that agree are stronger evidence than either alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import nn

import theodolite as th
from theodolite.errors import SymmetryError
from theodolite.testing import random_symmetric

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
pytestmark = pytest.mark.oracle


def problem_and_parts(layers: list[nn.Module]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), *layers, nn.Linear(7, 3)).double()
    x, y = torch.randn(40, 5).double(), torch.randint(3, (40,))
    return (
        th.Problem(model, nn.CrossEntropyLoss(), [(x[:25], y[:25]), (x[25:], y[25:])]),
        model,
        [(x[:25], y[:25]), (x[25:], y[25:])],
    )


@pytest.mark.parametrize(
    ("ours", "theirs"), [(th.hessian, "HessianLinearOperator"), (th.gauss_newton, "GGNLinearOperator")], ids=["hessian", "ggn"]
)
def test_products_agree(ours, theirs):
    problem, model, data = problem_and_parts([nn.Tanh()])
    op = getattr(curvlinops, theirs)(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    v = torch.randn(problem.size, 3).double()
    torch.testing.assert_close(ours(problem) @ v, op @ v, rtol=1e-9, atol=1e-12)


def test_their_operators_are_accepted():
    problem, model, data = problem_and_parts([nn.Tanh()])
    theirs = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    torch.testing.assert_close(
        th.top_eigenpairs(theirs, 4, tol=1e-8).values, th.top_eigenpairs(th.hessian(problem), 4, tol=1e-8).values
    )


def test_their_error_through_layernorm_is_caught():
    _, model, data = problem_and_parts([nn.LayerNorm(7), nn.Tanh()])
    theirs = curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data, check_deterministic=False
    )
    with pytest.raises(SymmetryError, match="LayerNorm"):
        th.top_eigenpairs(theirs, 1)


@pytest.mark.parametrize("kind", ["flat", "decaying", "outliers"])
def test_density_is_no_worse_at_equal_products(kind):
    """Wasserstein-1 distance to the true spectrum, 8 probes of 40 steps each, mean over seeds."""
    n, probes, steps = 300, 8, 40
    values = {
        "flat": torch.linspace(0.5, 1.5, n).double(),
        "decaying": torch.arange(1, n + 1).double() ** -1.5,
        "outliers": torch.cat([torch.tensor([50.0, 20.0, 10.0]), 0.1 * torch.linspace(-2, 2, n - 3)]).double(),
    }[kind]
    from curvlinops.examples import TensorLinearOperator

    matrix = random_symmetric(values)
    ours, theirs = [], []
    for seed in range(40):
        density = th.spectral_density(matrix, probes=probes, steps=steps, seed=seed)
        ours.append(wasserstein_distance(density.nodes, values, density.weights))
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (they draw from the global generator)
        op = TensorLinearOperator(matrix)
        grid, height = curvlinops.lanczos_approximate_spectrum(op, ncv=steps, num_repeats=probes)
        theirs.append(wasserstein_distance(grid, values, height))
    assert sum(ours) <= sum(theirs)
