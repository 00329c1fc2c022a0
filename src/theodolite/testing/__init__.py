"""Contracts for authors of operators and experiments, and tiny problems with known answers."""

from theodolite.testing.contracts import OperatorContract
from theodolite.testing.dense import dense_gauss_newton, dense_hessian, finite_difference_product
from theodolite.testing.experiment_contract import ExperimentContract
from theodolite.testing.problems import (
    KnownProblem,
    bilinear_problem,
    known_problems,
    quadratic_problem,
    random_symmetric,
    softmax_problem,
    squared_loss_problem,
)

__all__ = [
    "ExperimentContract",
    "KnownProblem",
    "OperatorContract",
    "bilinear_problem",
    "dense_gauss_newton",
    "dense_hessian",
    "finite_difference_product",
    "known_problems",
    "quadratic_problem",
    "random_symmetric",
    "softmax_problem",
    "squared_loss_problem",
]
