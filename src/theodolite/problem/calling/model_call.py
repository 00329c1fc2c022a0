"""How the user's model and loss are called: wrappers, outputs, precision, errors in plain words."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from theodolite.errors import TheodoliteError
from theodolite.interrupts import unbroken
from theodolite.problem.batches import Batch
from theodolite.problem.calling.outputs import Output, OutputChoice, main_output, possible_outputs, read_by_loss, read_in_graph
from theodolite.problem.calling.stand_ins import LossOfParameters, StandIns, tensors_of
from theodolite.problem.derivatives.exact_derivatives import GROUPED, grouped_matmul
from theodolite.problem.losses import BROADCASTING, ELEMENTWISE
from theodolite.problem.tensors import inside_transform, map_tensors, named_tensors

Loss = Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True)
class Evaluation:
    """One batch through the model: the loss as the user's function reduces it, and what it was computed from.

    `loss_of` is the loss at another value of the output; None for models that return their own.
    """

    loss: Tensor
    _choose: Callable[[], Output]
    loss_of: Callable[[Tensor], Tensor] | None

    @cached_property
    def measured(self) -> Output:
        """The tensors that the loss reads."""
        return self._choose()

    @property
    def output(self) -> Tensor:
        """All of them as one."""
        return self.measured.tensor

    @property
    def with_output(self) -> tuple[Tensor, Tensor]:
        return self.loss, self.output

    def through_output(self) -> tuple[Tensor, Output]:
        """The loss, and the output as it stands in the loss's graph.

        Of several tensors one may be computed from another. The loss function is then called once more, on all of them as one.
        """
        if self.loss_of is None or len(self.measured.parts) == 1:
            return self.loss, self.measured
        return self.loss_of(self.output).reshape(()), Output((self.output,))


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and "DataParallel" in type(model).__name__:
        inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def copy_model(model: nn.Module, shared: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """A deep copy, also where old-style weight norm and the like left computed tensors behind as plain attributes.

    `shared` says by `id` what stands in the place of an object of the model instead of a copy of it.
    """
    loose = {
        id(t): t.detach().clone()
        for module in model.modules()
        for t in vars(module).values()
        if isinstance(t, Tensor) and t.grad_fn is not None
    }
    with unbroken(nullcontext()):  # torch copies tensors in contexts of its own, which Ctrl-C must not break off
        return copy.deepcopy(model, {**loose, **shared})


class ModelCall:
    """`(tensors, batch) -> Evaluation`; `loss=None` for models that return their own loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._raw_output: bool | None = False if isinstance(loss, nn.modules.loss._Loss) else None
        self._extra = _quiet_arguments(model) if loss is None else {}
        self._holds_tensors = False  # whether the model reads its parameters by other ways than its modules'
        self._seen: set[int] = set()  # batches that were looked at for that
        self.choice = OutputChoice()
        self.settled = False  # whether it was asked for
        self._given: str | None = None  # which of several outputs the loss is given

    @property
    def note(self) -> str | None:
        """What to tell the reader about which of several outputs is measured."""
        return self._given or self.choice.note

    def __call__(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Evaluation:
        raw = self._forward(tensors, batch, index)
        if self.loss is None:
            loss = _own_loss(raw, self.model)
        else:
            _check_elementwise(self.loss, raw, batch.target, index)
            with _plain_errors("loss", batch, index):
                loss = self._apply_loss(raw, batch.target, tensors)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss must return one number for a batch. Got {shape}; use reduction='mean' or 'sum'.")

        def choose() -> Output:
            return self._measured(raw, loss, tensors, batch, index)

        def loss_of(output: Tensor) -> Tensor:
            return self._loss_elsewhere(raw, choose(), output, batch.target, tensors)

        return Evaluation(loss.reshape(()), choose, None if self.loss is None else loss_of)

    @property
    def takes_structure(self) -> bool:
        """Whether the loss is given the model's tuple or mapping as it is; known once it was called."""
        return bool(self._raw_output)

    def output(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Tensor:
        """What the loss reads of the model's output; the loss itself is not called where that is known."""
        return self._measured(self._forward(tensors, batch, index), None, tensors, batch, index).tensor

    def loss_input(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Any:
        """What the loss function is given: the model's output as it is, or its main tensor."""
        raw = self._forward(tensors, batch, index)
        return raw if self._takes_raw(raw, batch.target, tensors) else main_output(raw)

    def _measured(self, raw: Any, loss: Tensor | None, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Output:
        """The tensors of `raw` that the loss reads."""
        self.settled = True
        if isinstance(raw, Tensor):
            return Output((raw,))

        def read(found: dict[str, Tensor]) -> list[str] | None:
            if inside_transform():
                return None
            if self.loss is None:
                return self._read_by_own_loss(loss, found, tensors, batch, index)
            if self._takes_raw(raw, batch.target, tensors):
                return read_by_loss(lambda given: self._loss_of(given, batch.target, tensors), raw)
            self._given = _chosen_output(found)
            return []

        return self.choice.of(raw, read)

    def _read_by_own_loss(
        self, loss: Tensor | None, found: dict[str, Tensor], tensors: Mapping[str, Tensor], batch: Batch, index: int
    ) -> list[str] | None:
        """What the model's own loss reads, from its graph; it is called again where that does not lead to the parameters."""
        own = {name for name, _ in self.model.named_parameters()}
        if loss is None or not loss.requires_grad or not any(t.requires_grad for name, t in tensors.items() if name in own):
            leaves = {
                name: t.detach().requires_grad_(t.is_floating_point()) if name in own else t.clone()
                for name, t in tensors.items()
            }
            with unbroken(torch.enable_grad()):
                raw = self._forward(leaves, batch, index)
                found = possible_outputs(raw)
                try:
                    loss = _own_loss(raw, self.model)
                except ValueError:  # there are no labels
                    return None
        return read_in_graph(loss, found)

    def _loss_elsewhere(self, raw: Any, measured: Output, output: Tensor, target: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss function where the measured tensors have other values."""
        if not self._takes_raw(raw, target, tensors):
            return self._loss_of(output, target, tensors)
        instead = {id(t): value for t, value in zip(measured.parts, measured.split(output), strict=True)}
        return self._loss_of(map_tensors(lambda t: instead.get(id(t), t), raw), target, tensors)

    def _forward(self, tensors: Mapping[str, Tensor], batch: Batch, index: int) -> Any:
        places = _by_place(self.model, tensors) if tensors else {}
        arguments = (self.model, places, batch.args, {**batch.kwargs, **self._extra})
        with _plain_errors("model", batch, index, "" if self.loss else " With loss=None the target goes to the model too."):
            if not tensors:  # a training of the model as it is
                with DoubleExperts() if _in_double(self.model) else nullcontext():
                    return functional_call(*arguments, tie_weights=False)
            if index in self._seen and not self._holds_tensors:
                return functional_call(*arguments, tie_weights=False)
            with StandIns(tensors_of(self.model), tensors) as mode:
                raw = functional_call(*arguments, tie_weights=False)
        self._seen.add(index)
        self._holds_tensors |= mode.used
        return raw

    def _apply_loss(self, raw: Any, target: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        given = raw if self._takes_raw(raw, target, tensors) else main_output(raw)
        with _NoAccidentalBroadcast():
            return self._loss_of(given, target, tensors)

    def _takes_raw(self, raw: Any, target: Any, tensors: Mapping[str, Tensor]) -> bool:
        if self.loss is not None and self._raw_output is None:
            self._raw_output = self._wants_raw(raw, target, tensors)
        return bool(self._raw_output)

    def _loss_of(self, given: Any, target: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        assert self.loss is not None
        if isinstance(self.loss, LossOfParameters):
            return self.loss.at(tensors or dict(tensors_of(self.model)), given, target)
        return self.loss(given, target)

    def for_model(self, model: nn.Module, loss: Loss) -> ModelCall:
        """The same for another model of this kind: which output the loss takes is known already."""
        other = ModelCall(model, loss)
        other._raw_output, other._given = self._raw_output, self._given
        other.choice, other.settled = self.choice.copy(), self.settled
        return other

    def _wants_raw(self, raw: Any, target: Any, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a loss function wants the model's tuple or `ModelOutput` itself, found out by trying."""
        assert self.loss is not None
        if isinstance(raw, Tensor):
            return False
        try:
            self._loss_of(raw, target, tensors)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError):
            return False
        return True


def _by_place(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors for every place of a module that holds them: a tied weight has several, a module used twice is one place.

    torch's own tying names such a module twice and then fails to take the tensors out again.
    """
    names = {id(t): name for name, t in tensors_of(model)}
    found = {}
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, t in own.items():
                key = names.get(id(t))
                if key is not None and key in tensors:
                    found[f"{prefix}.{name}" if prefix else name] = tensors[key]
    return found


def _chosen_output(found: Mapping[str, Tensor]) -> str | None:
    """What to tell the reader where the model returned several tensors and the loss is given one."""
    if len(found) < 2 or "logits" in found:
        return None
    first = next(iter(found.values()))
    return (
        f"the model returns {len(found)} tensors and the loss is given the first, of shape {tuple(first.shape)}: "
        "return another one first, or write a loss of the whole output"
    )


def _check_elementwise(loss: Any, raw: Any, target: Any, index: int) -> None:
    """Squared error and the like broadcast silently: (B, 1) against (B,) becomes B × B."""
    known = type(loss) in ELEMENTWISE or loss in BROADCASTING
    if known and isinstance(target, Tensor) and (output := main_output(raw)).shape != target.shape:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"{name} compares element by element, but the output of batch {index} has shape {tuple(output.shape)} "
            f"and the target {tuple(target.shape)}. Reshape the target, for instance y.view(-1, 1), of a Series y.to_frame()."
        )


class _NoAccidentalBroadcast(TorchFunctionMode):
    """Finds the same inside losses of the user's own (a subclass, a lambda), which may have brought the shapes together."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in BROADCASTING:
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
def _plain_errors(who: str, batch: Batch, index: int, hint: str = "") -> Iterator[None]:
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
        if who == "loss" and "out of bounds" in text and isinstance(target, Tensor) and target.numel():
            hint = f" The targets run from {int(target.min())} to {int(target.max())}: class labels must lie in 0 .. classes-1."
        raise ValueError(f"The {who} refused batch {index} of the data (inputs: {shapes}): {text}.{hint}") from error


def _in_double(model: nn.Module) -> bool:
    first = next(model.parameters(), None)
    return first is not None and first.dtype == torch.float64


class DoubleExperts(TorchFunctionMode):
    """Multiplies the rows of each expert by its matrix in float64, which torch's fused product refuses."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is GROUPED and args and args[0].dtype == torch.float64:
            func = grouped_matmul
        return func(*args, **(kwargs or {}))


class KeepFloat64(DoubleExperts):
    """Ignores casts of float64 tensors to float32 as well.

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
        return super().__torch_function__(func, types, args, kwargs)
