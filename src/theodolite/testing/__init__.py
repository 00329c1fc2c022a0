"""Contracts for authors of operators, results, instruments and experiments, and tiny problems with known answers."""

from theodolite.testing.dense import dense_gauss_newton, dense_hessian, finite_difference_product
from theodolite.testing.equality import model_state, same
from theodolite.testing.experiment_contract import ExperimentContract
from theodolite.testing.instrument_contract import InstrumentContract
from theodolite.testing.operator_contract import OperatorContract
from theodolite.testing.problems import (
    KnownProblem,
    bilinear_problem,
    known_problems,
    quadratic_problem,
    random_symmetric,
    softmax_problem,
    squared_loss_problem,
)
from theodolite.testing.result_contract import ResultContract

__all__ = [
    "ExperimentContract",
    "InstrumentContract",
    "KnownProblem",
    "OperatorContract",
    "ResultContract",
    "bilinear_problem",
    "dense_gauss_newton",
    "dense_hessian",
    "finite_difference_product",
    "known_problems",
    "model_state",
    "quadratic_problem",
    "random_symmetric",
    "same",
    "softmax_problem",
    "squared_loss_problem",
]
