"""Rules for arguments that are problems, models, tensors or optimizers: what `theodolite.arguments.checked` calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from theodolite.arguments import finite, shown
from theodolite.problem.problem import Problem

P = ParamSpec("P")
R = TypeVar("R")


def a_problem(name: str, value: Any) -> Problem:
    """A `Problem`, which a bare model is not."""
    if not isinstance(value, Problem):
        raise TypeError(
            f"{name} takes a theodolite.Problem, which holds model, loss and data: Problem(model, loss, data). "
            f"Got {type(value).__name__}."
        )
    return value


def a_model(name: str, value: Any) -> nn.Module:
    """A module whose weights have values."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module. Got {type(value).__name__}.")
    empty = next((key for key, p in value.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(f"{name}: {empty} lies on the meta device and has no values: load the weights first.")
    return value


def a_tensor(name: str, value: Any) -> Tensor:
    """A tensor that holds numbers, NaN and infinity among them.

    >>> a_tensor("states", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ValueError: states must hold numbers. Got a Tensor of shape (2,) on the meta device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor. Got {shown(value)}.")
    if value.is_meta:
        raise ValueError(f"{name} must hold numbers. Got {shown(value)}.")
    return value


def a_finite_tensor(name: str, value: Any) -> Tensor:
    """A tensor that holds finite numbers."""
    tensor = a_tensor(name, value)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must hold finite numbers. Got {shown(tensor)} with NaN or infinity in it.")
    return tensor


def finite_if_tensor(name: str, value: Any) -> Any:
    """Anything, but of tensors only finite ones."""
    return a_finite_tensor(name, value) if isinstance(value, Tensor) else value


def of_dimensions(*counts: int, finite: bool = True) -> Callable[[str, Any], Tensor]:
    """A rule for tensors of so many dimensions, finite ones where nothing else is said.

    >>> of_dimensions(2)("weight", torch.ones(3))
    Traceback (most recent call last):
    ValueError: weight must be a tensor of 2 dimensions, none of them empty. Got a Tensor of shape (3,).
    """

    def check(name: str, value: Any) -> Tensor:
        tensor = (a_finite_tensor if finite else a_tensor)(name, value)
        if tensor.ndim not in counts or not tensor.numel():
            words = f"{' or '.join(map(str, counts))} dimension{'s' if counts != (1,) else ''}"
            raise ValueError(f"{name} must be a tensor of {words}, none of them empty. Got {shown(value)}.")
        return tensor

    return check


def tensors_fit(function: Callable[P, R]) -> Callable[P, R]:
    """For formulas of tensors: where torch finds that their shapes do not go together, say so in one line, with the shapes."""
    names = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items() if isinstance(t, Tensor))
            raise ValueError(f"{function.__qualname__}: the tensors must have shapes that go together. Got {shapes}.") from error

    return called


def numbers(name: str, value: Any) -> Any:
    """A finite number, or a tensor of such."""
    return a_finite_tensor(name, value) if isinstance(value, Tensor) else finite(name, value)


def a_device(name: str, value: Any) -> torch.device:
    """What torch takes for a device."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a device of torch, such as 'cpu' or 'cuda:0'. Got {shown(value)}.") from None
