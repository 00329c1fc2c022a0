"""The optimizer of a grown model: same groups and settings, and a state for each of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import shown
from theodolite.errors import ArgumentError, ClosureError
from theodolite.problem.optimizers import needs_closure
from theodolite.text import plural

#: What becomes of the state of new layers: copied from the layers they are copies of, zero, or no state for any layer.
STATES = ("copy", "zero_new", "reset")

#: Entries of states that begin at zero in torch's optimizers and in those of transformers.
_BEGIN_AT_ZERO = {
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col", "RMS",
}  # fmt: skip


@dataclass(frozen=True)
class Descent:
    """A parameter of the grown model: the old one it has the shape of, whether it is new, and whether its values are fresh."""

    parameter: nn.Parameter
    source: nn.Parameter
    is_new: bool
    fresh: bool


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise where an optimizer moves parameters that are not the model's, or has one state for all of them."""
    if needs_closure(optimizer):
        raise ClosureError(
            f"optimizer: {type(optimizer).__name__} has one history of all parameters together, which fits no deeper model. Grow "
            "without it (optimizer=None) and make one from the grown model's parameters."
        )
    known = {id(p) for p in model.parameters()}
    groups: list[dict[str, Any]] = optimizer.param_groups
    foreign = sum(id(p) not in known for group in groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"optimizer moves {plural(foreign, 'parameter')} that model does not have. Give the optimizer that was made from "
            "model.parameters() of this very model (a model that was loaded or copied since has new ones), or none."
        )


def grow_optimizer(optimizer: Optimizer, descents: Sequence[Descent], state: str) -> tuple[Optimizer, list[str]]:
    """An optimizer of the same class and groups for the grown model, and notes.

    A new parameter joins the group of the one it has the shape of. `state="copy"`: old and copied parameters have a copy of that
    one's moments and step, those with fresh values (random, or set to zero) begin at zero with a step of their own.
    `"zero_new"`: all new ones begin at zero. `"reset"`: none has a state, as before the first step.
    """
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, **_members(group, descents)}
        for group in optimizer.param_groups
    ]
    grown = _same_kind(optimizer, groups)
    notes = []
    if state != "reset":
        lazy = False
        for descent in descents:
            held: Mapping[str, Any] | None = optimizer.state.get(descent.source)
            if held:
                begins = descent.is_new and (descent.fresh or state == "zero_new")
                lazy |= begins and not _zeroable(optimizer, held)
                if not begins or _zeroable(optimizer, held):
                    grown.state[descent.parameter] = {key: _state_of(value, zero=begins) for key, value in held.items()}
        if lazy:
            notes.append(f"{type(optimizer).__name__} begins the state of new parameters by itself.")
    if any("step" in group or "k" in group for group in optimizer.param_groups):
        notes.append(f"{type(optimizer).__name__} counts steps per group, so new layers have the count of the old ones.")
    return grown, notes


def _members(group: Mapping[str, Any], descents: Sequence[Descent]) -> dict[str, Any]:
    """The parameters of a group, in the order of the grown model as saved states have them; names too, where there are some."""
    old = {id(p) for p in group["params"]}
    members = [descent for descent in descents if id(descent.source) in old]
    found: dict[str, Any] = {"params": [descent.parameter for descent in members]}
    if "param_names" in group:
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        times: dict[str, int] = {}
        found["param_names"] = []
        for descent in members:
            name = names[id(descent.source)]
            times[name] = times.get(name, -1) + 1
            found["param_names"].append(f"{name}.copy{times[name]}" if times[name] else name)
    return found


def _same_kind(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        made: Optimizer = kind(groups, **settings)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"optimizer: {type(optimizer).__name__} cannot be made again from its groups and settings ({error}). Grow without it "
            f"(optimizer=None) and make one from the grown model's parameters. Got {shown(optimizer)}."
        ) from error
    return made


def _zeroable(optimizer: Optimizer, held: Mapping[str, Any]) -> bool:
    """Whether zero is what this optimizer's state begins with."""
    damped = any(group.get("dampening") for group in optimizer.param_groups)  # the first buffer is then the gradient itself
    return held.keys() <= _BEGIN_AT_ZERO and not damped


def _state_of(value: Any, *, zero: bool) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if zero else value.detach().clone()
    return type(value)(0) if zero and isinstance(value, int | float) else value
