"""Optimizer words: `sgd`, `adamw:betas=0.9/0.95,weight_decay=0.1`, `module:attribute`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from theodolite.cli.loading.module_attribute import call, load_attribute, names_code, reason
from theodolite.problem.optimizers import NAMES as WORDS
from theodolite.problem.optimizers import SGD_RATE
from theodolite.text import listed, nearest


def make_optimizer(
    text: str | None, parameters: Iterable[nn.Parameter], lr: float | None, state: Mapping[str, Any] | None = None
) -> Optimizer | None:
    """The optimizer that a word names, on these parameters; `state` is one from a checkpoint, whose rate `lr` overrides.

    None is plain SGD where a rate is given, the kind a state belongs to where that is given, else None.

    >>> make_optimizer("sgd:momentum=0.9,nesterov=true", nn.Linear(1, 1).parameters(), 0.1).defaults["nesterov"]
    True
    """
    check_rate(lr)
    chosen = list(parameters)
    if text is None:
        text = kind_of(state) or (None if lr is None else "sgd")
    if text is None:
        return None
    word, _, settings = text.partition(":")
    word = word.strip().lower().replace("_", "-")
    if word in WORDS:
        optimizer = _from_word(text, word, settings, chosen, lr)
    elif names_code(text):
        optimizer = _own(text, chosen, lr)
    else:
        near = listed(nearest(word, WORDS, 2))
        raise ValueError(
            f"--optimizer {text!r} must be one of {listed(WORDS)}, with settings as in sgd:momentum=0.9, or module:attribute. "
            f"Nearest names: {near}."
        )
    if state is not None:
        load_state(optimizer, state, lr)
    return optimizer


def check_rate(lr: float | None) -> None:
    """Raise where a learning rate is no positive number."""
    if lr is not None and not (isinstance(lr, int | float) and math.isfinite(lr) and lr > 0):
        raise ValueError(f"--lr must be a positive number. Got {lr!r}.")


def kind_of(state: Mapping[str, Any] | None) -> str | None:
    """The word for the optimizer a state dict comes from, by the settings its groups have."""
    groups = state.get("param_groups") if state is not None else None
    group = groups[0] if groups else {}
    if {"momentum", "dampening"} <= set(group):
        return "sgd"
    if {"betas", "amsgrad"} <= set(group):
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    return None


def load_state(optimizer: Optimizer, state: Mapping[str, Any], lr: float | None = None) -> None:
    """Give an optimizer the state of a checkpoint; one that belongs to other parameters is refused."""
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        order = [i for group in state["param_groups"] for i in group["params"]]
        for index, parameter in zip(order, mine, strict=False):  # unequal numbers are refused by torch
            _check_shapes(state.get("state", {}).get(index, {}), parameter)
        optimizer.load_state_dict(dict(state))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The optimizer state of the checkpoint does not fit {type(optimizer).__name__} on these parameters: {reason(error)}."
        ) from error
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr


def _check_shapes(entry: Mapping[str, Any], parameter: nn.Parameter) -> None:
    for name, value in entry.items():
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")


def _from_word(text: str, word: str, settings: str, parameters: list[nn.Parameter], lr: float | None) -> Optimizer:
    kind, fixed = WORDS[word]
    given = _settings(text, kind, settings)
    if lr is not None and "lr" in given and given["lr"] != lr:
        raise ValueError(f"--optimizer {text!r} says lr={given['lr']:g} and --lr says {lr:g}. Give one of them.")
    rate = {"lr": lr} if lr is not None else {"lr": SGD_RATE} if kind is SGD else {}
    arguments = {**fixed, **rate, **given}
    check_rate(arguments.get("lr"))
    try:
        return kind(parameters, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"--optimizer {text!r} was refused by torch: {reason(error)}.") from error


def _settings(text: str, kind: type[Optimizer], settings: str) -> dict[str, Any]:
    """`name=value` pairs, each a setting of the optimizer and of the kind its default is."""
    accepted = {n: p.default for n, p in inspect.signature(kind).parameters.items() if n != "params"}
    found: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in settings.split(","))):
        name, equals, value = (s.strip() for s in part.partition("="))
        if name not in accepted:
            near = listed(nearest(name, accepted, 2))
            raise ValueError(
                f"--optimizer {text!r}: {kind.__name__} has no setting {name!r}. Nearest: {near}; all: {listed(accepted)}."
            )
        read = _value(value) if equals else None
        wants_flag = isinstance(accepted[name], bool) or accepted[name] is None  # foreach, fused and the like are None
        wants_pair = isinstance(accepted[name], tuple)
        wanted = "two numbers as in 0.9/0.95" if wants_pair else "true or false" if wants_flag else "a number"
        if wants_pair:
            right = isinstance(read, tuple) and len(read) == len(accepted[name])
        else:
            right = isinstance(read, bool if wants_flag else float)
        if not right:
            raise ValueError(f"--optimizer {text!r}: {name} must be {wanted}, as {name}=VALUE. Got {part!r}.")
        found[name] = read
    return found


def _value(text: str) -> float | bool | tuple[float, ...] | None:
    """A number, true or false, or numbers with slashes between them; None where it is none of these."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        return None
    return numbers if len(numbers) > 1 else numbers[0]


def _own(target: str, parameters: list[nn.Parameter], lr: float | None) -> Optimizer:
    """An Optimizer class, or a function of the parameters (and of lr, if it takes one)."""
    found = load_attribute(target, "--optimizer")
    if not callable(found):
        raise ValueError(
            f"--optimizer {target!r} must be a function of the parameters or an Optimizer class. It is a {type(found).__name__}."
        )
    rate = _rate(target, found, lr)
    made = call(target, lambda: found(parameters, **rate))
    if not isinstance(made, Optimizer):
        raise ValueError(f"--optimizer {target!r} must return a torch.optim.Optimizer. It returned a {type(made).__name__}.")
    own = {id(p) for p in parameters}
    if not any(id(p) in own for group in made.param_groups for p in group["params"]):
        raise ValueError(f"--optimizer {target!r} returned an optimizer of other parameters than the ones it was given.")
    return made


def _rate(target: str, found: Any, lr: float | None) -> dict[str, float]:
    try:
        part = inspect.signature(found).parameters.get("lr")
    except (TypeError, ValueError):
        part = None
    if part is None and lr is not None:
        raise ValueError(f"--optimizer {target!r} takes no argument lr, so --lr {lr:g} cannot be given to it.")
    if part is not None and part.default is part.empty and lr is None:
        raise ValueError(f"--optimizer {target!r} needs a learning rate: give --lr.")
    return {} if lr is None else {"lr": lr}
