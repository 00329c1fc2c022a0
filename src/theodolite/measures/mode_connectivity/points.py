"""Points of a straight path through the weights: its data, its ends, and loss and answers at one point."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from theodolite.measures.hessian.tracking import load
from theodolite.problem import Batch, Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.problem.calling import Evaluation, Loss, ModelCall, unwrap

BatchNormPolicy = Literal["interpolate", "recompute", "batch"]
Accuracy = Callable[[Tensor, Any], Tensor] | Literal["auto"] | None
Norms = dict[str, nn.modules.batchnorm._NormBase]
State = nn.Module | Mapping[str, Tensor] | Tensor | str | PathLike[str]

#: Where training scripts keep the weights inside a saved file.
_NESTS = ("state_dict", "model_state_dict", "model", "module")
# A counter BatchNorm needs only where its momentum is None.
_MAY_LACK = "num_batches_tracked"


# The data along a path: whatever its form, as batches of bounded size, with the loss that fits them.


def problem_of(model: nn.Module, loss: Loss, data: Any, batch_size: int, name: str) -> Problem:
    """The data with the model; a `Dataset` is read in batches. Without a loss it is the model's own, or cross entropy."""
    inferred = loss is None
    if inferred:
        taken = inspect.signature(unwrap(model).forward).parameters.values()
        inferred = not any(p.name == "labels" or (p.kind is p.VAR_KEYWORD and hasattr(model, "config")) for p in taken)
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size)
    problem = Problem(model, nn.CrossEntropyLoss() if inferred else loss, data, params="*", check=False)
    target = next(iter(problem.data)).target
    if inferred and not (isinstance(target, Tensor) and not target.is_floating_point()):
        kind = f"of {target.dtype}" if isinstance(target, Tensor) else f"a {type(target).__name__}"
        raise ValueError(
            f"loss=None takes integer class labels as targets. Those of {name} are {kind}: name a loss, nn.MSELoss() say."
        )
    return problem


def in_parts(problem: Problem, batch_size: int) -> Problem:
    """The problem in batches of at most `batch_size`, where they are held in memory."""
    if not problem.data.held or all(batch.size <= batch_size for batch in problem.data):
        return problem
    return problem.with_batches([part for batch in problem.data for part in _parts(batch, batch_size)])


def _parts(batch: Batch, most: int) -> Iterator[Batch]:
    """A batch cut into parts of about equal size: a rest of one sample would have no batch statistics."""
    count = -(-batch.size // most)
    edges = [batch.size * i // count for i in range(count + 1)]
    yield from (batch if count == 1 else batch.part(slice(low, high)) for low, high in itertools.pairwise(edges))


# The two ends of a straight path through the weights, and the points between and beyond them.


def interpolate_states(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """`alpha * state_a + (1 - alpha) * state_b`, tensor by tensor, as new tensors; bitwise the ends at 1 and 0.

    Sums are formed in double precision and rounded once, so equal entries stay as they are. Entries that are no real or
    complex numbers (counters, masks) come from `state_a`, and from `state_b` at alpha = 0.

    >>> a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}
    >>> interpolate_states(a, b, 0.25)
    {'w': tensor([2.5000, 2.0000])}
    """
    if alpha in (0.0, 1.0):
        return {name: t.detach().clone() for name, t in (state_a if alpha == 1.0 else state_b).items()}
    return {name: _between(a.detach(), state_b[name].detach(), alpha) for name, a in state_a.items()}


def _between(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    if not (a.is_floating_point() or a.is_complex()):
        return a.clone()
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.lerp(b.to(wide), a.to(wide), alpha).to(a.dtype)


def end_tensors(problem: Problem, twin: Problem, state: State, label: str) -> dict[str, Tensor]:
    """All parameters and buffers of an end by name, tied ones once; `twin`, a copy of `problem`, is loaded with them.

    Half-precision weights come as float32, in which they are evaluated.
    """
    if isinstance(state, str | PathLike):
        state = _read(Path(state).expanduser(), label)
    if isinstance(state, Mapping):
        state = _completed(problem.model, state)
    load(state, twin, problem, label)
    return {name: t.clone() for name, t in twin.tensors(twin.leaves(grad=False)).items()}


def _completed(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the names that files leave out: all but one of tied tensors, and counters."""
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]): value for name, value in state.items() if name in own}
    lacking = {name: t for name, t in own.items() if name not in state}
    tied = {name: given[id(t)] for name, t in lacking.items() if id(t) in given}
    counters = {name: t for name, t in lacking.items() if name.endswith(_MAY_LACK)}
    return {**state, **counters, **tied}


def _read(path: Path, label: str) -> Any:
    """The weights in a .safetensors file, or in one of torch's that holds nothing but tensors and plain values."""
    if not path.is_file():
        raise FileNotFoundError(f"{label}: there is no file {path}.")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{label}: {path} could not be read as weights. Accepted: .safetensors, or what torch.load(weights_only=True) reads."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{label}: {path} holds a {type(content).__name__}, not weights by name. Save model.state_dict().")
    return next((content[key] for key in _NESTS if isinstance(content.get(key), Mapping)), content)


# One point of a path: BatchNorm statistics by policy, the loss, and which answers are right there.


class Meter:
    """Loss and right answers of one data set at any weights; `passes` counts the forward passes over it."""

    def __init__(self, problem: Problem, accuracy: Accuracy) -> None:
        self.problem, self.accuracy = problem, accuracy
        self.passes = 0
        self._call = ModelCall(problem.model, _in_float64(problem.loss_function))
        self._shift: int | None = 0 if problem.loss_function is not None else None  # None: not known yet

    def read(self, tensors: Mapping[str, Tensor]) -> tuple[float, Tensor | None]:
        """The loss, infinite where it is no number, and for each label whether the answer is right; inside a session."""
        total, bits = 0.0, []
        for i, share, batch in self.problem.iterate():
            found = self._call(tensors, batch, i)
            total += share * float(found.loss.double())
            bits.append(self._right(found, batch.target))
        self.passes += 1
        whole = [b for b in bits if b is not None]
        return total if math.isfinite(total) else math.inf, torch.cat(whole).cpu() if len(whole) == len(bits) else None

    def chance(self) -> float | None:
        """The share of the most frequent answer, which needs no model; None where that is not known."""
        if self.accuracy != "auto":
            return None
        found = [answers(batch.target, self.problem.loss_function, self._shift or 0) for batch in self.problem.data]
        known = [a for a in found if a is not None]
        if not known or len(known) < len(found):
            return None
        counts = torch.cat(known).unique(return_counts=True)[1]
        return int(counts.max()) / int(counts.sum())

    def _right(self, found: Evaluation, target: Any) -> Tensor | None:
        if self.accuracy is None:
            return None
        if self.accuracy != "auto":
            return self.accuracy(found.output, target).detach().reshape(-1).bool()
        if self._shift is None:
            self._shift = _label_shift(found, target)
            if self._shift is None:
                self.accuracy = None  # which label an output answers is not known
                return None
        return right_answers(found.output, target, self.problem.loss_function, shift=self._shift)


def _label_shift(found: Evaluation, target: Any) -> int | None:
    """How many places ahead the labels of a model with its own loss stand: that is the cross entropy with its loss's value."""
    output = found.output.double()
    if not isinstance(target, Tensor) or target.ndim < 2 or output.shape[:-1] != target.shape:
        return 0
    for shift in (0, 1):
        logits, labels = output[:, : output.shape[1] - shift].flatten(0, -2), target[:, shift:].flatten()
        if math.isclose(float(functional.cross_entropy(logits, labels)), float(found.loss), rel_tol=1e-3):
            return shift
    return None


def _in_float64(loss: Loss) -> Loss:
    """torch's own losses of widened outputs: the log-softmax of confident networks needs it. Other losses as they are."""
    plain = isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss"
    if loss is None or not (plain or getattr(loss, "__module__", "") == "torch.nn.functional"):
        return loss
    wide: Any = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss

    def widened(output: Any, target: Any) -> Tensor:
        floats = isinstance(target, Tensor) and target.is_floating_point()
        value: Tensor = wide(output.double(), target.double() if floats else target)
        return value

    return widened


def statistics_of(model: nn.Module) -> Norms:
    """The normalisations that keep running statistics, by name."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
    }


@contextmanager
def batch_statistics(norms: Norms, *, cumulative: bool = False) -> Iterator[None]:
    """Let normalisations use the statistics of each batch; everything else stays in its mode.

    Their running statistics move too, to the plain average over the batches if `cumulative`.
    """
    before = [(norm, norm.training, norm.momentum) for norm in norms.values()]
    try:
        for norm in norms.values():
            norm.training = True
            norm.momentum = None if cumulative else norm.momentum
        yield
    finally:
        for norm, training, own in before:
            norm.training, norm.momentum = training, own


def recompute_statistics(tensors: Mapping[str, Tensor], norms: Norms, meter: Meter) -> None:
    """Estimate running statistics anew, in place, as the plain average over the batches of the data; inside a session."""
    for name in norms:
        start = f"{name}." if name else ""
        for part, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            tensors[f"{start}{part}"].fill_(value)
    with batch_statistics(norms, cumulative=True):
        for i, _, batch in meter.problem.iterate():
            meter.problem.output(dict(tensors), batch, i, check=False)
    meter.passes += 1
