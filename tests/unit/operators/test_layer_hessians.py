"""Layer blocks: exact, in lockstep, row-major."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.cases import PLAIN, make, mlp, mlp_tanh_mse
from theodolite.testing import dense_hessian


@pytest.mark.parametrize("builder", PLAIN, ids=lambda b: b.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_diagonal_blocks_of_the_hessian(builder, bias):
    case = make(builder)
    dense = dense_hessian(case.objective, case.parameters())
    blocks = th.layer_hessians(case.problem(), bias=bias)
    generator = torch.Generator().manual_seed(0)
    vectors = {name: torch.randn(op.shape[0], 2, generator=generator, dtype=torch.float64) for name, op in blocks.items()}
    images = blocks.products(vectors)
    for name, image in images.items():
        where = blocks.positions(name)
        assert float((image - dense[where][:, where] @ vectors[name]).abs().max()) <= 1e-8 * float(dense.abs().max())
    if bias:
        covered = torch.cat([blocks.positions(name) for name in blocks])
        assert covered.sort().values.tolist() == list(range(len(dense)))


def test_blocks_are_row_major():
    """For squared loss the block of a linear layer is I ⊗ XᵀX: a swapped order gives XᵀX ⊗ I."""
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    problem = th.Problem(nn.Sequential(nn.Linear(3, 2)).double(), nn.MSELoss(), (x, y))
    block = th.layer_hessians(problem)["0"].to_dense()
    right = torch.kron(torch.eye(2).double(), x.T @ x / 6)
    swapped = torch.kron(x.T @ x / 6, torch.eye(2).double())
    torch.testing.assert_close(block, right)
    assert not torch.allclose(block, swapped)


def test_lockstep_equals_layer_by_layer():
    case = make(mlp_tanh_mse)
    blocks = th.layer_hessians(case.problem())
    together = th.top_eigenpairs(blocks, k=3, tol=1e-8)
    for name, op in blocks.items():
        alone = th.top_eigenpairs(op, k=3, tol=1e-8)
        torch.testing.assert_close(together[name].values, alone.values)
        assert together[name].matvecs == alone.matvecs
    densities = th.spectral_density(blocks, probes=2, steps=5)
    for name, op in blocks.items():
        torch.testing.assert_close(densities[name].nodes, th.spectral_density(op, probes=2, steps=5).nodes)
    assert {row["layer"] for row in together.rows()} == set(blocks)


def test_uneven_batches_and_selection():
    case = make(mlp)
    x, y = case.data
    whole = th.layer_hessians(case.problem())
    parts = th.layer_hessians(th.Problem(case.model, case.loss, [(x[:2], y[:2]), (x[2:], y[2:])]), ["0"], keep="never")
    assert list(parts) == ["0"]
    torch.testing.assert_close(parts["0"].to_dense(), whole["0"].to_dense(), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="fits no layer"):
        th.layer_hessians(case.problem(), "nosuch")


# The closed form of piecewise-linear stacks


def stack(activation=nn.ReLU):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 5), activation(), nn.Linear(5, 4)).double()
    return model, (torch.randn(7, 3).double(), torch.randint(4, (7,)))


def farthest(model, loss, data):
    """The largest error of a block over the largest number of the Hessian, and the route."""
    dense = dense_hessian(lambda: loss(model(data[0]), data[1]), list(model.parameters()))
    blocks = th.layer_hessians(th.Problem(model, loss, data))
    errors = []
    for name, block in blocks.items():
        where = blocks.positions(name)
        errors.append(float((block.to_dense() - dense[where][:, where]).abs().max()))
    return max(errors) / float(dense.abs().max()), blocks.cost().route


@pytest.mark.parametrize("slope", [0.3, 0.01])
def test_a_slope_below_zero_has_the_precision_of_the_model(slope):
    model, data = stack(lambda: nn.LeakyReLU(slope))
    error, route = farthest(model, nn.CrossEntropyLoss(), data)
    assert route.startswith("closed form")
    assert error <= 1e-12


def replace_forward(module):
    plain = module.forward
    module.forward = lambda *inputs: plain(*inputs).sin()


@pytest.mark.parametrize("part", ["linear", "relu", "container", "loss"])
def test_a_replaced_forward_gets_no_closed_form(part):
    model, data = stack()
    loss = nn.CrossEntropyLoss()
    replace_forward({"linear": model[2], "relu": model[1], "container": model, "loss": loss}[part])
    error, route = farthest(model, loss, data)
    assert error <= 1e-12
    assert route.startswith("double backward")


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all modules", "one module"])
def test_hooks_get_no_closed_form(kind, everywhere):
    model, data = stack()

    def bend(module, *tensors):
        last = tensors[-1][0] if isinstance(tensors[-1], tuple) else tensors[-1]
        return last.sin() if isinstance(module, nn.Linear) else None

    place = torch.nn.modules.module if everywhere else model[2]
    handle = getattr(place, f"register_module_{kind}" if everywhere else f"register_{kind}")(bend)
    try:
        error, route = farthest(model, nn.CrossEntropyLoss(), data)
    finally:
        handle.remove()
    assert error <= 1e-12
    assert route.startswith("double backward")
    assert farthest(model, nn.CrossEntropyLoss(), data)[1].startswith("closed form")
