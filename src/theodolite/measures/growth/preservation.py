"""How much growing changes what a model does: its outputs and its loss, before and after."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.interrupts import called_within
from theodolite.problem import Problem
from theodolite.problem.calling import main_output
from theodolite.problem.state_guard import left_as_found, own_random_state
from theodolite.results import Result, Row, fields_of
from theodolite.text import number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Preservation(Result):
    """The change of a model's outputs and loss by growing, on some inputs and in eval mode.

    Attributes:
        outputs: the largest change of an output.
        relative: the same over the largest output before.
        loss_before: the loss of the model as it was; None where none was asked for.
        loss_after: the loss of the grown model, before any step.
    """

    outputs: float
    relative: float
    loss_before: float | None = None
    loss_after: float | None = None

    def rows(self) -> list[Row]:
        return [fields_of(self, "outputs relative loss_before loss_after")]

    def sentence(self) -> str:
        size = f"by {number(self.outputs)} at most, {number(100 * self.relative)} % of the largest one"
        change = f"Outputs change {size}." if self.outputs else "Outputs do not change."
        if self.loss_before is None or self.loss_after is None:
            return change
        return f"The loss is {number(self.loss_after)} after growing, {number(self.loss_before)} before. {change}"


@dataclass(frozen=True)
class Inputs:
    """What a model is called with: `model(*args, **kwargs)`; and data with a loss, where there are some."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    data: Any = None
    loss: Any = None

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, data: Any, loss: Any) -> Inputs | None:
        """From what the user gave; from data the first batch. None where nothing was given."""
        if data is not None:
            problem = Problem(model, loss, data, check=False)
            if inputs is None:
                batch = problem.placed(problem.few(8))
                return cls(batch.args, _quiet(model, batch.kwargs), data, loss)
        if inputs is None:
            return None
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        parts = inputs if isinstance(inputs, Mapping | tuple) else (inputs,)
        if isinstance(parts, Mapping):
            return cls((), _quiet(model, {name: _placed(part, device) for name, part in parts.items()}), data, loss)
        return cls(tuple(_placed(part, device) for part in parts), _quiet(model, {}), data, loss)

    @called_within(torch.no_grad)
    def call(self, model: nn.Module) -> Any:
        """What the model returns, in eval mode, left as found."""
        with left_as_found(model, "eval"):
            try:
                return model(*self.args, **self.kwargs)
            except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
                first = (str(error).splitlines() or [""])[0]
                raise ValueError(
                    f"inputs: {type(model).__name__} cannot be called with them: {type(error).__name__}: {first}"
                ) from error

    def loss_of(self, model: nn.Module) -> float | None:
        """The loss on the data, or the one that the model returns for these inputs."""
        if self.data is not None:
            return Problem(model, self.loss, self.data, check=False).loss()
        own = getattr(self.call(model), "loss", None)
        return float(own) if isinstance(own, Tensor) and own.ndim == 0 else None


def sample_inputs(model: nn.Module, seed: int) -> Inputs | None:
    """Random tokens or pixels for a Hugging Face model, by its configuration; None for any other model."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", "")
    if config is None or not name:
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with own_random_state(seed):
        if name == "input_ids":
            words = getattr(config.get_text_config(), "vocab_size", 2)
            kwargs: dict[str, Any] = {"input_ids": torch.randint(words, (2, 8))}
            if getattr(config, "is_encoder_decoder", False):
                kwargs["decoder_input_ids"] = torch.randint(words, (2, 8))
        elif name == "pixel_values" and isinstance(side := getattr(config, "image_size", None), int):
            kwargs = {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)}
        else:
            return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    placed = {key: t.to(device, dtype if t.is_floating_point() else t.dtype) for key, t in kwargs.items()}
    return Inputs((), _quiet(model, placed))


def preservation(before: nn.Module, after: nn.Module, inputs: Inputs) -> Preservation:
    """The change from one model to another on the same inputs."""
    old, new = (main_output(inputs.call(model)).double() for model in (before, after))
    change, largest = float((new - old).abs().max()), float(old.abs().max())
    relative = change / largest if largest else float(change > 0)
    return Preservation(
        outputs=change, relative=relative, loss_before=inputs.loss_of(before), loss_after=inputs.loss_of(after)
    )  # fmt: skip


def _placed(part: Any, device: torch.device) -> Any:
    if isinstance(part, Tensor):
        return part.to(device)
    return torch.as_tensor(part, device=device) if hasattr(part, "__array__") else part


def _quiet(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords, without a cache of keys and values where the model knows that word."""
    knows = getattr(getattr(model, "config", None), "use_cache", None) is not None
    takes = knows and "use_cache" in inspect.signature(model.forward).parameters
    return {**kwargs, **({"use_cache": False} if takes else {})}
