"""A contract that nothing can break says nothing: planted faults, each found by the test that should find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.instruments import Instrument, SurveyContext, Work
from theodolite.results import Finding, Result, Severity
from theodolite.testing import InstrumentContract, OperatorContract, ResultContract

MATRIX = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def broken(suite: object, test: str, *arguments: Any) -> bool:
    """Whether a test of a contract fails."""
    try:
        getattr(suite, test)(*arguments)
    except (AssertionError, RuntimeError, TypeError, AttributeError, pytest.fail.Exception):
        return True
    return False


# Operators


class Sound(th.LinearOperator):
    """A plain matrix."""

    def __init__(self, matrix: Tensor = MATRIX, **more: Any) -> None:
        super().__init__((matrix.shape[0], matrix.shape[1]), dtype=matrix.dtype, **more)
        self.matrix = matrix
        self.layer = nn.Linear(1, 1)

    def _matmat(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def _rmatmat(self, x: Tensor) -> Tensor:
        return self.matrix.T @ x


class WrongTranspose(Sound):
    def _rmatmat(self, x: Tensor) -> Tensor:
        return -self.matrix.T @ x


class ThroughNumPy(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix.numpy() @ x.numpy())


class MadeOnTheDefaultDevice(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        return self.matrix @ x + torch.zeros(1, dtype=x.dtype)


class ChangesTheModel(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        self.layer.eval()
        return self.matrix @ x


class ChangesTheVector(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        product = self.matrix @ x
        x.zero_()
        return product


class NotLinear(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        return self.matrix @ x + 1


class AlwaysDouble(Sound):
    def _matmat(self, x: Tensor) -> Tensor:
        return (self.matrix * (1 + 1e-3 * (x.dtype == torch.float32))) @ x


class OperatorSuite(OperatorContract):
    def __init__(self, kind: type[Sound]) -> None:
        self.kind = kind

    def make(self) -> tuple[Sound, Tensor]:
        op = self.kind(MATRIX.to(self.dtype))
        self.model = op.layer
        return op, MATRIX.to(self.dtype)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (WrongTranspose, "test_transposed_product"),
        (WrongTranspose, "test_scipy_round_trip"),
        (WrongTranspose, "test_products_of_operators"),
        (ThroughNumPy, "test_nothing_leaves_the_device"),
        (MadeOnTheDefaultDevice, "test_nothing_leaves_the_device"),
        (ChangesTheModel, "test_the_vector_and_the_model_are_left_as_found"),
        (ChangesTheVector, "test_the_vector_and_the_model_are_left_as_found"),
        (NotLinear, "test_linearity"),
        (NotLinear, "test_sums_and_scalings"),
        (AlwaysDouble, "test_float32"),
    ],
)
def test_a_faulty_operator_is_found(kind, test):
    assert not broken(OperatorSuite(Sound), test)
    assert broken(OperatorSuite(kind), test)


# Results


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Good(Result):
    value: float = 1.0
    numbers: Any = (1.0, 2.0)

    def rows(self) -> list[dict[str, Any]]:
        return [{"value": self.value}]

    def sentence(self) -> str:
        return f"The value is {self.value:.3g}."


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TensorInRows(Good):
    def rows(self) -> list[dict[str, Any]]:
        return [{"value": torch.ones(2)}]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NewColumns(Good):
    def rows(self) -> list[dict[str, Any]]:
        return [{"value": 1.0}, {"other": 2.0}]


class ResultSuite(ResultContract):
    def __init__(self, make: Callable[[], Result]) -> None:
        self.make = make


@pytest.mark.parametrize(
    ("make", "test"),
    [
        (TensorInRows, "test_rows_are_tidy"),
        (NewColumns, "test_rows_are_tidy"),
        (lambda: Good(value=float("nan")), "test_the_sentence_can_be_read"),
        (lambda: Good(numbers={1, 2}), "test_saving_and_loading_gives_the_same"),
        (lambda: Good(seed="x"), "test_it_is_a_frozen_record"),
    ],
)
def test_a_faulty_result_is_found(make, test, tmp_path):
    arguments = (tmp_path,) if "saving" in test else ()
    assert not broken(ResultSuite(Good), test, *arguments)
    for path in tmp_path.iterdir():
        path.unlink()
    assert broken(ResultSuite(make), test, *arguments)


# Instruments


class Fine(Instrument):
    name, title = "fine", "A fine instrument"
    question, how = "Is it fine?", "By looking."

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        return Work()

    def run(self, context: SurveyContext, **effort: Any) -> Result:
        return Good()

    def findings(self, context: SurveyContext, result: Any) -> list[Finding]:
        return [self.found(Severity.NOTE, "It is fine.", label="fine")]


class NoQuestion(Fine):
    question = "Tells whether it is fine."


class Costless(Fine):
    def cost(self, context: SurveyContext, **effort: Any) -> Any:
        return 0.0


class Unlabelled(Fine):
    def findings(self, context: SurveyContext, result: Any) -> list[Finding]:
        return [self.found(Severity.NOTE, "It is fine.")]


class Unknown(Fine):
    def findings(self, context: SurveyContext, result: Any) -> list[Finding]:
        return [self.found(Severity.NOTE, "It is fine.", label="nowhere explained")]


class Careless(Fine):
    def run(self, context: SurveyContext, **effort: Any) -> Result:
        context.problem.model.train(False)
        return Good()


class Rowless(Fine):
    def run(self, context: SurveyContext, **effort: Any) -> Any:
        return {"value": 1.0}


def instrument_suite(kind: type[Fine]) -> InstrumentContract:
    def make(self: InstrumentContract) -> tuple[Instrument, SurveyContext]:
        problem = th.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(4, 2), torch.randn(4, 1)))
        return kind(), SurveyContext(problem)

    suite: InstrumentContract = type("Suite", (InstrumentContract,), {"make": make, "labels": frozenset({"fine"})})()
    return suite


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (NoQuestion, "test_it_states_its_question"),
        (Costless, "test_every_effort_has_its_price"),
        (Unlabelled, "test_its_findings_can_be_relied_on"),
        (Unknown, "test_its_findings_can_be_relied_on"),
        (Careless, "test_the_model_is_left_as_found"),
        (Rowless, "test_it_measures_a_result"),
    ],
)
def test_a_faulty_instrument_is_found(kind, test):
    assert not broken(instrument_suite(Fine), test)
    assert broken(instrument_suite(kind), test)
