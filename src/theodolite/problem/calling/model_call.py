"""How the user's model and loss are called: wrappers, outputs, precision, errors in plain words."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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


class ModelCall:
    """`(tensors, batch) -> Evaluation`; `loss=None` for models that return their own loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._raw_output: bool | None = False if isinstance(loss, nn.modules.loss._Loss) else None
        self._extra = _quiet_arguments(model) if loss is None else {}
        self.note: str | None = None  # which of several outputs the loss is given

    def __call__(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Evaluation:
        raw = self._forward(tensors, batch, index)
        output = main_output(raw)
        if self.loss is None:
            loss = _own_loss(raw, self.model)
        else:
            _check_elementwise(self.loss, output, batch.target, index)
            with _plain_errors("loss", batch, index):
                loss = self._apply_loss(raw, output, batch.target)
            if not self._raw_output and self.note is None:
                self.note = _chosen_output(raw, output)
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
        with _NoAccidentalBroadcast():
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
    found = _possible_outputs(raw)
    if not found:
        raise ValueError(f"The model must return a tensor, a tuple or a mapping with one. Got {type(raw).__name__}.")
    return found[0]


def _possible_outputs(raw: Any) -> list[Tensor]:
    """What could be the main output of a structure, the most likely first: `.logits` alone where there are any."""
    logits = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if isinstance(logits, Tensor):
        return [logits]
    found = [t for _, t in named_tensors(raw) if t.is_floating_point()]
    return [t for t in found if t.ndim > 0] or found


def _chosen_output(raw: Any, output: Tensor) -> str | None:
    """What to tell the reader where the model returned several tensors and the loss is given one."""
    found = [] if isinstance(raw, Tensor) else _possible_outputs(raw)
    if len(found) < 2:
        return None
    return (
        f"the model returns {len(found)} tensors and the loss is given the first, of shape {tuple(output.shape)}: "
        "return another one first, or write a loss of the whole output"
    )


def _check_elementwise(loss: Any, output: Tensor, target: Any, index: int) -> None:
    """Squared error and the like broadcast silently: (B, 1) against (B,) becomes B × B."""
    known = type(loss) in ELEMENTWISE or loss in _BROADCASTING
    if known and isinstance(target, Tensor) and output.shape != target.shape:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"{name} compares element by element, but the output of batch {index} has shape {tuple(output.shape)} "
            f"and the target {tuple(target.shape)}. Reshape the target, for instance y.view(-1, 1)."
        )


_BROADCASTING = (
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss, functional.poisson_nll_loss,
)  # fmt: skip


class _NoAccidentalBroadcast(TorchFunctionMode):
    """Finds the same inside losses of the user's own (a subclass, a lambda), which may have brought the shapes together."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BROADCASTING:
            pair = [*args, *(kwargs[name] for name in ("input", "target") if name in kwargs)][:2]
            # Pairs that grow beyond both are meant by nobody; one number for all, or one row, may be.
            shapes = [tuple(t.shape) for t in pair]
            if torch.broadcast_shapes(*shapes).numel() > max(t.numel() for t in pair):
                raise ValueError(
                    f"{func.__name__} compares element by element and would broadcast {shapes[0]} against {shapes[1]} to more "
                    "than either. Reshape the target, for instance y.view(-1, 1)"
                )
        return func(*args, **kwargs)


def _own_loss(raw: Any, model: nn.Module) -> Tensor:
    loss = raw.get("loss") if isinstance(raw, Mapping) else getattr(raw, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = raw[0] if isinstance(raw, tuple) and raw else raw
    if isinstance(first, Tensor) and first.ndim == 0:
        return first
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


class KeepFloat64(TorchFunctionMode):
    """Ignores casts of float64 tensors to float32.

    >>> with KeepFloat64():
    ...     torch.zeros(1, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
