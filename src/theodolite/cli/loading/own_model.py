"""`Subject`: a model with its loss and data, and how it is read from the user's own code, `module:attribute`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.cli.loading.module_attribute import call, load_attribute
from theodolite.cli.loading.optimizers import check_rate
from theodolite.problem import Batch, Problem
from theodolite.text import listed, nearest

KEYS = ("model", "loss", "data", "optimizer", "lr")
FORMS = "a torch.nn.Module, (model, loss), (model, loss, optimizer), a dict with the keys " + ", ".join(KEYS) + ", or a Problem"


@dataclass(frozen=True)
class Subject:
    """What is to be surveyed, and where it came from.

    `loss` is None and `own_loss` true where the model returns its own. `facts` says what was loaded from where, `notes` what the
    user must know. `population` is the size of the full data where these are a part of it. `optimizer`, `lr` and `problem` are
    there where the user's own code gave them, `optimizer_state` where the checkpoint held one.
    """

    model: nn.Module
    name: str
    data: Any = None
    data_name: str = ""
    loss: Any = None
    own_loss: bool = False
    optimizer: Optimizer | None = None
    lr: float | None = None
    problem: Problem | None = None
    population: int | None = None
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optimizer_state: dict[str, Any] | None = None


def own_model(target: str, seed: int) -> Subject:
    """The module, problem or builder that `module:attribute` names; a builder is called, under the seed."""
    found = load_attribute(target, "--model", seed)
    built = isinstance(found, type) or (callable(found) and not isinstance(found, nn.Module))
    if built:
        found = call(target, found, seed)
    subject = _understood(target, found)
    facts = {
        "model": f"{type(subject.model).__name__} from {target}",
        "weights": f"as {target} {'made' if built else 'holds'} them",
    }
    return replace(subject, facts=facts)


def returns_own_loss(model: nn.Module) -> bool:
    """Whether a model takes labels and so returns its own loss, as those of Hugging Face do."""
    parameters = inspect.signature(model.forward).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "labels" in parameters or (loose and hasattr(model, "config") and hasattr(model, "base_model"))


def _understood(target: str, found: Any) -> Subject:
    name = target.rpartition(":")[2]
    if isinstance(found, Problem):
        return _from_problem(name, found)
    if isinstance(found, nn.Module):
        return _checked(target, name, {"model": found})
    if isinstance(found, Mapping):
        odd = [key for key in found if key not in KEYS]
        if odd:
            near = listed(nearest(str(odd[0]), KEYS, 1))
            raise ValueError(
                f"--model {target!r} gave a dict with the key {odd[0]!r}; the keys are {listed(KEYS)}. Nearest: {near}."
            )
        return _checked(target, name, dict(found))
    if isinstance(found, tuple | list) and len(found) in (2, 3):
        return _checked(target, name, dict(zip(("model", "loss", "optimizer"), found, strict=False)))
    raise ValueError(f"--model {target!r} must give {FORMS}. It gave a {type(found).__name__}.")


def _checked(target: str, name: str, parts: dict[str, Any]) -> Subject:
    model, loss, optimizer, lr = (parts.get(key) for key in ("model", "loss", "optimizer", "lr"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {target!r} must give {FORMS}. Its model is a {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise ValueError(
            f"--model {target!r}: the loss must be a function (output, target) -> scalar or None. It is a {type(loss).__name__}."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"--model {target!r}: the optimizer must be a torch.optim.Optimizer. It is a {type(optimizer).__name__}."
        )
    check_rate(lr)
    own = loss is None and returns_own_loss(model)
    return Subject(model, name, parts.get("data"), loss=loss, own_loss=own, optimizer=optimizer, lr=lr)


def _from_problem(name: str, problem: Problem) -> Subject:
    own = problem.loss_function is None
    data = [_raw(batch, own_loss=own) for batch in problem.data]
    return Subject(problem.model, name, data, "its own", loss=problem.loss_function, own_loss=own, problem=problem)


def _raw(batch: Batch, *, own_loss: bool) -> Any:
    """A parsed batch in a form that `Problem` would read the same way again."""
    if own_loss and not batch.args:
        return dict(batch.kwargs)
    if batch.target is None:
        return batch.args[0]
    return (*batch.args, batch.target) if batch.args else (dict(batch.kwargs), batch.target)
