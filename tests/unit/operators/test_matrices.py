"""Matrices by name, and the two names of the argument that chooses one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.dynamics import batch_critical_rates
from theodolite.measures.hessian import track_eigenpairs
from theodolite.operators.matrices import MATRICES, ON_PARAMETERS


@pytest.fixture(scope="module")
def problem() -> th.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1)).double()
    return th.Problem(model, nn.MSELoss(), (x, x[:, :1]))


def test_every_name_gives_a_symmetric_operator(problem):
    for name, make in MATRICES.items():
        op = make(problem)
        assert op.symmetric
        assert op.shape[0] == (problem.size if name in ON_PARAMETERS else problem.samples)


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_and_by_are_one_argument(problem, name):
    rates = [th.critical_learning_rate(problem, **{argument: name}) for argument in ("by", "matrix")]
    assert rates[0].value == rates[1].value
    assert rates[0].by == rates[1].by == name


def test_batches_and_sweeps_take_both_names(problem):
    for argument in ("by", "matrix"):
        found = batch_critical_rates(problem, batch_size=2, batches=3, **{argument: "hessian"})
        assert found.by == "hessian"
        settings = {"steps": 3, "progress": False, argument: "gauss_newton"}
        sweep = th.catapult_sweep(problem, ratios=[0.5], models=["network"], **settings)
        assert len(sweep.rows()) == 1


def test_tracking_takes_a_name_or_a_function(problem):
    state = problem.model.state_dict()
    by_name = track_eigenpairs(problem, [state], k=2, matrix="gauss_newton", progress=False)
    by_function = track_eigenpairs(problem, [state], k=2, matrix=th.gauss_newton, progress=False)
    assert str(by_name.rows()) == str(by_function.rows())
    with pytest.raises(ValueError, match=r"matrix must be one of 'hessian'.*did you mean 'gauss_newton'"):
        track_eigenpairs(problem, [state], k=2, matrix="gaus_newton")


def test_an_unknown_name_is_refused_with_the_nearest(problem):
    with pytest.raises(ValueError, match=r"by must be one of .*'kernel'. Got 'hesian'; did you mean 'hessian'"):
        th.critical_learning_rate(problem, by="hesian")
    with pytest.raises(ValueError, match=r"by must be one of"):
        th.critical_learning_rate(problem, matrix="fisher")
    with pytest.raises(ValueError, match=r"by must be 'kernel', 'gauss_newton', 'hessian' or None. Got 'fisher'"):
        batch_critical_rates(problem, batch_size=2, by="fisher")
