"""Contracts for authors of operators, results, instruments and experiments, and tiny problems with known answers."""

from theodolite._names import imported
from theodolite.testing.dense import dense_gauss_newton as dense_gauss_newton
from theodolite.testing.dense import dense_hessian as dense_hessian
from theodolite.testing.dense import finite_difference_product as finite_difference_product
from theodolite.testing.equality import model_state as model_state
from theodolite.testing.equality import same as same
from theodolite.testing.experiment_contract import DeclarationContract as DeclarationContract
from theodolite.testing.experiment_contract import ExperimentContract as ExperimentContract
from theodolite.testing.instrument_contract import InstrumentContract as InstrumentContract
from theodolite.testing.operator_contract import OperatorContract as OperatorContract
from theodolite.testing.problems import KnownProblem as KnownProblem
from theodolite.testing.problems import bilinear_problem as bilinear_problem
from theodolite.testing.problems import known_problems as known_problems
from theodolite.testing.problems import quadratic_problem as quadratic_problem
from theodolite.testing.problems import random_symmetric as random_symmetric
from theodolite.testing.problems import softmax_problem as softmax_problem
from theodolite.testing.problems import squared_loss_problem as squared_loss_problem
from theodolite.testing.result_contract import ResultContract as ResultContract

__all__ = sorted(imported(__file__))
