"""Exceptions and warnings. Each has a builtin parent, so `except ValueError` keeps working."""

from __future__ import annotations


class TheodoliteError(Exception):
    """Parent of every exception raised on purpose by this package."""


class ArgumentError(TheodoliteError, TypeError, ValueError):
    """An argument is of the wrong kind: a model where a problem is expected, a class, a text."""


class NonFiniteError(TheodoliteError, ArithmeticError):
    """NaN or infinity in the data, the loss, a gradient or a product."""


class NotRepeatableError(TheodoliteError, RuntimeError):
    """Two identical evaluations gave different numbers (dropout, augmentation, moving data)."""


class BatchCoupledError(TheodoliteError, RuntimeError):
    """A per-sample quantity was asked of a model whose outputs mix the samples of a batch."""


class SecondOrderError(TheodoliteError, RuntimeError):
    """A layer of the model has no second derivative in torch."""


class StaleOperatorError(TheodoliteError, RuntimeError):
    """The parameters changed after the operator was built."""


class SymmetryError(TheodoliteError, ArithmeticError):
    """An operator that calls itself symmetric is not."""


class DerivativeError(TheodoliteError, ArithmeticError):
    """What autograd returns is not the derivative it stands for."""


class OutputLossError(TheodoliteError, ValueError):
    """A quantity of a model's output and a loss of it was asked of a loss that has none: it depends on more, or mixes samples."""


class ClosureError(TheodoliteError, TypeError):
    """A run on a copy was asked of an optimizer whose step needs a closure (LBFGS)."""


class ParameterSelectionError(TheodoliteError, ValueError):
    """No parameter, or no layer, fits the selection."""


class WeightingError(TheodoliteError, ValueError):
    """What a batch weighs in the mean could not be established."""


class OutOfTimeError(TheodoliteError, TimeoutError):
    """A measurement was stopped because its time is over."""


class DerivativeWarning(UserWarning):
    """Autograd's gradient is not that of the loss (straight-through estimators, stopped gradients): it is measured as it is."""


class NumericalWarning(UserWarning):
    """The numbers are usable but less exact than asked for."""
