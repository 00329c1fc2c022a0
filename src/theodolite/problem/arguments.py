"""Rules for arguments that are problems, models, losses, tensors, data or optimizers: what `arguments.checked` calls."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import finite, number_in, shown
from theodolite.errors import ArgumentError, NonFiniteError
from theodolite.problem.tensors import named_tensors

if TYPE_CHECKING:
    from theodolite.problem.problem import Problem

P = ParamSpec("P")
R = TypeVar("R")


def a_problem(name: str, value: Any) -> Problem:
    """A `Problem`, which a bare model is not."""
    from theodolite.problem.problem import Problem

    if not isinstance(value, Problem):
        raise ArgumentError(
            f"{name} takes a theodolite.Problem, which holds model, loss and data: Problem(model, loss, data). {_got(value)}"
        )
    return value


def a_module(name: str, value: Any) -> nn.Module:
    """A module, whatever its weights are."""
    if not isinstance(value, nn.Module):
        raise ArgumentError(f"{name} must be a torch.nn.Module. {_got(value)}")
    return value


def a_model(name: str, value: Any) -> nn.Module:
    """A module whose weights have values."""
    empty = next((key for key, p in a_module(name, value).named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(f"{name}: {empty} lies on the meta device and has no values: load the weights first.")
    return value  # type: ignore[no-any-return]


def a_model_or_problem(name: str, value: Any) -> Any:
    """A module or a `Problem`."""
    from theodolite.problem.problem import Problem

    if not isinstance(value, Problem | nn.Module):
        raise ArgumentError(f"{name} must be a torch.nn.Module or a theodolite.Problem. {_got(value)}")
    return value if isinstance(value, Problem) else a_model(name, value)


def a_loss(name: str, value: Any) -> Any:
    """A function of output and target, or None for models that return their own loss."""
    if isinstance(value, type):
        raise ArgumentError(f"{name} is the class {value.__name__}: pass an instance of it, {value.__name__}().")
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a callable (output, target) -> scalar, or None. {_got(value)}")
    return value


def a_plain_function(name: str, value: Any) -> Any:
    """Something that can be called, and is neither a model nor a class."""
    if not callable(value) or isinstance(value, nn.Module | type):
        raise ArgumentError(f"{name} must be a function. {_got(value)}")
    return value


def a_factory(name: str, value: Any) -> Any:
    """A function that makes models, or a class of them; a model itself makes none."""
    if not callable(value) or isinstance(value, nn.Module):
        raise ArgumentError(f"{name} must be a function that makes a model, such as lambda seed: nn.Linear(2, 1). {_got(value)}")
    return value


def an_optimizer(name: str, value: Any) -> Optimizer:
    """A torch optimizer, which knows its parameters; a name or a class does not."""
    if not isinstance(value, Optimizer):
        raise ArgumentError(
            f"{name} must be a torch optimizer such as torch.optim.SGD(model.parameters(), lr=0.1). {_got(value)}"
        )
    return value


def some_data(name: str, value: Any) -> Any:
    """Data as `Problem` takes them; tensors at hand hold finite numbers, and loaders are not read."""
    parts = value if isinstance(value, tuple | list) else ()
    loose = value == [] or any(part is None or isinstance(part, str | int | float) for part in parts)
    if loose or isinstance(value, str | nn.Module | Tensor) or not isinstance(value, Iterable):
        raise ArgumentError(f"{name} must be (inputs, targets), a mapping, a list of batches or a DataLoader. {_got(value)}")
    _refuse_without_values(name, value)
    return value


def some_inputs(name: str, value: Any) -> Any:
    """What a model is called with: a tensor, a tuple of arguments or a mapping, with finite numbers in them."""
    if isinstance(value, str | nn.Module) or (
        not isinstance(value, Tensor | tuple | list | Mapping) and not hasattr(value, "__array__")
    ):
        raise ArgumentError(f"{name} must be a tensor, a tuple of arguments or a mapping. {_got(value)}")
    if isinstance(value, tuple | list | Mapping) and not any(named_tensors(value)) and not _arrays(value):
        raise ValueError(f"{name} must hold at least one tensor. Got {shown(value)}.")
    _refuse_without_values(name, value)
    return value


def _arrays(value: Any) -> bool:
    return any(hasattr(part, "__array__") for part in (value.values() if isinstance(value, Mapping) else value))


def _refuse_without_values(name: str, tree: Any) -> None:
    """Raise for a tensor that has no values, or none that are finite."""
    for part, t in named_tensors(tree):
        which = f"its tensor {part} " if part else ""
        if t.is_meta:
            raise ValueError(f"{name}: {which}lies on the meta device and has no values; load the data first.")
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise NonFiniteError(f"{name}: {which}holds NaN or infinity; remove or impute such samples.")


def _got(value: Any) -> str:
    """What came, and what is usually meant by it."""
    from theodolite.problem.problem import Problem

    if isinstance(value, Problem):
        return "Got a Problem; its model is `problem.model`."
    if isinstance(value, type):
        return f"Got the class {value.__name__}; pass an instance of it."
    if isinstance(value, nn.Module):
        return f"Got {type(value).__name__}, a model."
    if isinstance(value, str | os.PathLike):
        return f"Got {shown(value)}, a text; build or load what it names first."
    if isinstance(value, Mapping) and value and all(isinstance(t, Tensor) for t in value.values()):
        return "Got a state dict; load it into the model with model.load_state_dict(state)."
    return f"Got {type(value).__name__}."


def a_tensor(name: str, value: Any) -> Tensor:
    """A tensor that holds numbers, NaN and infinity among them.

    >>> a_tensor("states", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ValueError: states must hold numbers. Got a Tensor of shape (2,) on the meta device.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor. Got {shown(value)}.")
    if value.is_meta:
        raise ValueError(f"{name} must hold numbers. Got {shown(value)}.")
    return value


def without_nan(name: str, value: Any) -> Tensor:
    """A tensor that may hold infinity, such as the logits of words that are never said, and no NaN."""
    tensor = a_tensor(name, value)
    if bool(torch.isnan(tensor).any()):
        raise ValueError(f"{name} must hold numbers. Got {shown(tensor)} with NaN in it.")
    return tensor


def as_finite_tensor(name: str, value: Any) -> Tensor:
    """A tensor, an array or nested lists of finite numbers, as a tensor."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentError(f"{name} must be a tensor or an array. Got {shown(value)}.") from None
    return a_finite_tensor(name, tensor)


def a_finite_tensor(name: str, value: Any) -> Tensor:
    """A tensor that holds finite numbers."""
    tensor = a_tensor(name, value)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must hold finite numbers. Got {shown(tensor)} with NaN or infinity in it.")
    return tensor


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


def numbers_in(**ends: float) -> Callable[[str, Any], Any]:
    """A rule as `number_in` for a number, or for every entry of an array or a tensor, none of which is empty.

    >>> numbers_in(least=1)("m", [100, 0])
    Traceback (most recent call last):
    ValueError: m must hold numbers of at least 1. Got [100, 0].
    """
    rule = number_in(**ends)

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | list | tuple) and not hasattr(value, "__array__"):
            return rule(name, value)
        try:
            entries = a_tensor(name, value).detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must hold numbers. Got {shown(value)}.") from None
        if 0 in entries.shape:
            raise ValueError(f"{name} must hold at least one number. Got {shown(value)}.")
        for extreme in (float(entries.min()), float(entries.max())):  # both are NaN where an entry is
            try:
                rule(name, extreme)
            except ValueError as error:
                raise ValueError(
                    f"{str(error).split('. Got')[0].replace('be a number', 'hold numbers')}. Got {shown(value)}."
                ) from None
        return value

    return check


def a_device(name: str, value: Any) -> torch.device:
    """What torch takes for a device."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a device of torch, such as 'cpu' or 'cuda:0'. Got {shown(value)}.") from None
