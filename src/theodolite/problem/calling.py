"""How the user's model and loss are called: wrappers, outputs, errors in plain words."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from theodolite.errors import TheodoliteError
from theodolite.problem.batches import Batch
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import ELEMENTWISE

Loss = Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True)
class Evaluation:
    """One batch through the model: the loss as the user's function reduces it, and what it was computed from."""

    loss: Tensor
    output: Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and "DataParallel" in type(model).__name__:
        inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy, also where old-style weight norm and the like left computed tensors behind as plain attributes."""
    loose = {
        id(t): t.detach().clone()
        for module in model.modules()
        for t in vars(module).values()
        if isinstance(t, Tensor) and t.grad_fn is not None
    }
    return copy.deepcopy(model, loose)


class _Measuring(threading.local):
    depth = 0


_MEASURING = _Measuring()


def being_measured() -> bool:
    """Whether the calls of a model that are under way belong to a measurement and not to its training."""
    return _MEASURING.depth > 0


@contextmanager
def left_as_found(model: nn.Module, mode: str | None) -> Iterator[None]:
    """Enter eval or train mode; on the way out restore each module's mode and the random state.

    Parameters and buffers are never touched: the model is always called with stand-ins for both. Where a trainer has wrapped
    `forward` into mixed precision, the plain one is called.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Old-style weight norm and the like leave computed tensors behind as plain attributes.
    loose = [(module, {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}) for module in model.modules()]
    wrapped = [(m, vars(m)["forward"]) for m in model.modules() if {"forward", "_original_forward"} <= set(vars(m))]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=sorted({d.index for d in devices})):
        _MEASURING.depth += 1
        try:
            if mode is not None:
                model.train(mode == "train")
            for module, _ in wrapped:
                module.forward = cast(Any, module._original_forward)
            yield
        finally:
            _MEASURING.depth -= 1
            for module, forward in wrapped:
                module.forward = forward
            for module, training in modes:
                module.training = training
            for module, attributes in loose:
                vars(module).update(attributes)


class ModelCall:
    """`(tensors, batch) -> Evaluation`; `loss=None` for models that return their own loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._raw_output: bool | None = False if isinstance(loss, nn.modules.loss._Loss) else None
        self._extra = _quiet_arguments(model) if loss is None else {}

    def __call__(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Evaluation:
        raw = self._forward(tensors, batch, index)
        output = main_output(raw)
        if self.loss is None:
            loss = _own_loss(raw, self.model)
        else:
            _check_elementwise(self.loss, output, batch.target, index)
            with _plain_errors("loss", batch, index):
                loss = self._apply_loss(raw, output, batch.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss must return one number for a batch. Got {shape}; use reduction='mean' or 'sum'.")
        return Evaluation(loss.reshape(()), output)

    def output(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Tensor:
        """The model's main output; the loss is not called."""
        return main_output(self._forward(tensors, batch, index))

    def loss_input(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Any:
        """What the loss function is given: the model's output as it is, or its main tensor."""
        raw = self._forward(tensors, batch, index)
        if self.loss is not None and self._raw_output is None:
            self._raw_output = self._wants_raw(raw, batch.target)
        return raw if self._raw_output else main_output(raw)

    def _forward(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Any:
        with _plain_errors("model", batch, index):
            return functional_call(self.model, dict(tensors), batch.args, {**batch.kwargs, **self._extra})

    def _apply_loss(self, raw: Any, output: Tensor, target: Any) -> Tensor:
        assert self.loss is not None
        if self._raw_output is None:
            self._raw_output = self._wants_raw(raw, target)
        return self.loss(raw if self._raw_output else output, target)

    def _wants_raw(self, raw: Any, target: Any) -> bool:
        """Whether a loss function wants the model's tuple or `ModelOutput` itself, found out by trying."""
        assert self.loss is not None
        if isinstance(raw, Tensor):
            return False
        try:
            self.loss(raw, target)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError):
            return False
        return True


def main_output(raw: Any) -> Tensor:
    """The tensor that the loss is a function of: the output, its `.logits`, or the first floating tensor."""
    if isinstance(raw, Tensor):
        return raw
    logits = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    found = [t for _, t in named_tensors(raw) if t.is_floating_point()]
    several = [t for t in found if t.ndim > 0]
    if not found:
        raise ValueError(f"The model must return a tensor, a tuple or a mapping with one. Got {type(raw).__name__}.")
    return (several or found)[0]


def _check_elementwise(loss: Any, output: Tensor, target: Any, index: int) -> None:
    """Squared error and the like broadcast silently: (B, 1) against (B,) becomes B × B."""
    if type(loss) in ELEMENTWISE and isinstance(target, Tensor) and output.shape != target.shape:
        raise ValueError(
            f"{type(loss).__name__} compares element by element, but the output of batch {index} has shape {tuple(output.shape)} "
            f"and the target {tuple(target.shape)}. Reshape the target, for instance y.view(-1, 1)."
        )


def _own_loss(raw: Any, model: nn.Module) -> Tensor:
    loss = raw.get("loss") if isinstance(raw, Mapping) else getattr(raw, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(raw, tuple) and raw and isinstance(raw[0], Tensor) and raw[0].ndim == 0:
        return raw[0]
    if isinstance(raw, Tensor) and raw.ndim == 0:
        return raw
    raise ValueError(
        f"loss=None needs a model that returns its own loss, but {type(model).__name__} returned none. "
        "Put 'labels' into each batch, or pass a loss function."
    )


def _quiet_arguments(model: nn.Module) -> dict[str, Any]:
    """Language models would also return key/value caches, which only cost memory here."""
    accepts = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in accepts else {}


@contextmanager
def _plain_errors(who: str, batch: Batch, index: int) -> Iterator[None]:
    """Turn torch's shape and range errors into one sentence that names the batch and what came."""
    try:
        yield
    except (TheodoliteError, torch.OutOfMemoryError):
        raise
    except (IndexError, ValueError, TypeError, RuntimeError) as error:
        shapes = ", ".join(
            f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named_tensors(batch.inputs)
        )
        target = batch.target
        if isinstance(target, Tensor):
            shapes += f", target {tuple(target.shape)} {str(target.dtype).removeprefix('torch.')}"
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, RuntimeError) and "not implemented" in text:
            raise
        text = text.rstrip(".")
        hint = ""
        if "out of bounds" in text and isinstance(target, Tensor) and target.numel():
            hint = f" The targets run from {int(target.min())} to {int(target.max())}: class labels must lie in 0 .. classes-1."
        raise ValueError(f"The {who} refused batch {index} ({shapes}): {text}.{hint}") from error
