"""Whether two solutions share a basin: the loss on the straight line between them."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from theodolite.arguments import about, checked, positive_integers, shown
from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken_context
from theodolite.measures.hessian.tracking import load
from theodolite.problem import Batch, Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.problem.arguments import a_loss, a_model, a_plain_function
from theodolite.problem.calling import Evaluation, Loss, ModelCall, unwrap
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row, fields_of, number
from theodolite.text import nearest, plural

__all__ = ["LinearPath", "linear_path"]

BatchNormPolicy = Literal["interpolate", "recompute", "batch"]
Accuracy = Callable[[Tensor, Any], Tensor] | Literal["auto"] | None
Norms = dict[str, nn.modules.batchnorm._NormBase]
State = nn.Module | Mapping[str, Tensor] | Tensor | str | PathLike[str]

POLICIES: tuple[BatchNormPolicy, ...] = ("interpolate", "recompute", "batch")
POINTS, LOW, HIGH = 76, -1.0, 2.0
#: As fast as any for an MLP 784-256-256-10 on one core, and twice as fast as 1024 for a small convolutional network.
BATCH_SIZE = 256
#: Accuracy may fall this far below the weaker end between two connected solutions (a share, so 2 percentage points).
ALLOWED_DROP = 0.02
#: Where there is no accuracy: the loss may lie this share of the worse end's loss above it.
ALLOWED_RISE = 0.02
#: Points between the ends lie at most this far apart, or a barrier could stand unseen between two of them.
WIDEST_GAP = 0.2
#: Where training scripts keep the weights inside a saved file.
_NESTS = ("state_dict", "model_state_dict", "model", "module")
# A counter BatchNorm needs only where its momentum is None.
_MAY_LACK = "num_batches_tracked"


@dataclass(frozen=True)
class Barrier:
    """How high a barrier is, where, and its standard error over samples (None where it is not known)."""

    value: float
    alpha: float
    error: float | None = None


def accuracy_barrier(alphas: Any, accuracy: Any, right: Sequence[Tensor] | None = None) -> Barrier:
    """min(acc(0), acc(1)) - min over [0, 1] of acc, and where that smallest accuracy is.

    `right` holds the bits of the right answers at the points inside [0, 1], in order; the error is then the standard error of
    the paired difference between the weaker end and the lowest point, which takes that point as given.

    >>> accuracy_barrier([-1, 0, 0.5, 1], [0.1, 0.9, 0.6, 0.8])
    Barrier(value=0.20000000000000007, alpha=0.5, error=None)
    """
    at, values = inside(alphas, accuracy)
    end = 0 if values[0] <= values[-1] else len(values) - 1
    lowest = int(values.argmin())
    error = None
    if right is not None:
        fallen = right[end].double() - right[lowest].double()
        error = float(fallen.std()) / math.sqrt(len(fallen)) if len(fallen) > 1 else 0.0
    return Barrier(float(values[end] - values[lowest]), float(at[lowest]), error)


def loss_barrier(alphas: Any, loss: Any) -> Barrier:
    """max over [0, 1] of the loss - max(loss(0), loss(1)), and where that largest loss is.

    >>> loss_barrier([0, 0.5, 1], [1.0, 3.0, 2.0])
    Barrier(value=1.0, alpha=0.5, error=None)
    """
    at, values = inside(alphas, loss)
    highest = int(values.argmax())
    return Barrier(float(values[highest] - torch.maximum(values[0], values[-1])), float(at[highest]))


def loss_excess(alphas: Any, loss: Any) -> Barrier:
    """The largest height in [0, 1] of the loss above the straight line between its values at the ends, and where.

    >>> loss_excess([0, 0.5, 1], [1.0, 3.0, 2.0])
    Barrier(value=1.5, alpha=0.5, error=None)
    """
    at, values = inside(alphas, loss)
    above = values - torch.lerp(values[0], values[-1], at)
    above[0] = above[-1] = 0.0
    highest = int(above.argmax())
    return Barrier(float(above[highest]), float(at[highest]))


def inside(alphas: Any, values: Any) -> tuple[Tensor, Tensor]:
    """The part of a profile with 0 <= alpha <= 1, in order; both ends must be there."""
    at, numbers = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (alphas, values))
    order = at.argsort()
    at, numbers = at[order], numbers[order]
    kept = (at >= -1e-12) & (at <= 1 + 1e-12)
    at, numbers = at[kept], numbers[kept]
    if len(at) < 2 or abs(float(at[0])) > 1e-12 or abs(float(at[-1]) - 1) > 1e-12:
        raise ValueError("A barrier needs the values at both ends, alpha = 0 and alpha = 1.")
    return at, numbers


def _height(barrier: Callable[[Any, Any], Barrier], column: str) -> property:
    """The height of a barrier in a column of a path, None where the path does not have it."""

    def height(path: LinearPath) -> float | None:
        values = getattr(path, column)
        return None if values is None else barrier(path.alphas, values).value

    return property(height)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LinearPath(Result):
    """Profile along W(alpha) = alpha * A + (1 - alpha) * B: losses and accuracies at each of `alphas` (A,), test ones if given.

    Alpha = 1 is the first state, alpha = 0 the second. Accuracies are None where the targets name no classes. `barrier_train`
    and `barrier_test` say how far accuracy falls between the ends below the weaker one; their errors are paired standard errors
    over samples, with the lowest point taken as given. `loss_barrier_...` is the largest loss between the ends above the worse
    end, `loss_excess_...` that above the straight line between their losses. `connected` holds if accuracy on the training
    data falls by no more than 0.02, or, where there is no accuracy, if the loss rises by no more than 2 % of the worse end's.
    Losses that are no numbers count as infinite. `chance` is the share of the most frequent training label: where the weaker
    end is no better than that, nothing could have fallen, and `conclusive` is false; so it is where nothing was seen on points
    more than 0.2 apart. `forward_passes` are those over one data set.
    """

    alphas: Tensor
    train_loss: Tensor
    train_accuracy: Tensor | None
    test_loss: Tensor | None
    test_accuracy: Tensor | None
    train_samples: int
    test_samples: int
    barrier_train_error: float | None
    barrier_test_error: float | None
    batchnorm: str
    forward_passes: int
    chance: float | None = None

    barrier_train, barrier_test = _height(accuracy_barrier, "train_accuracy"), _height(accuracy_barrier, "test_accuracy")
    loss_barrier_train, loss_barrier_test = _height(loss_barrier, "train_loss"), _height(loss_barrier, "test_loss")
    loss_excess_train, loss_excess_test = _height(loss_excess, "train_loss"), _height(loss_excess, "test_loss")

    @property
    def connected(self) -> bool:
        """Whether the ends lie in one basin of the training data."""
        return self._is_connected(self.barrier("train"), self.train_loss)

    @property
    def connected_test(self) -> bool | None:
        """The same on the test data, None without them."""
        return None if self.test_loss is None else self._is_connected(self.barrier("test"), self.test_loss)

    def _is_connected(self, barrier: Barrier | None, loss: Tensor) -> bool:
        if barrier is not None:
            return barrier.value <= ALLOWED_DROP
        return loss_barrier(self.alphas, loss).value <= ALLOWED_RISE * abs(max(self._ends(loss)))

    @property
    def conclusive(self) -> bool:
        """Whether a barrier would show: the points lie near one another, or one was found, and both ends are good enough."""
        if self.connected and self._unseen:
            return False
        if self.train_accuracy is None or self.chance is None:
            return True
        return min(self._ends(self.train_accuracy)) > self.chance + ALLOWED_DROP

    @property
    def _unseen(self) -> str:
        """What a grid too coarse to see a barrier leaves open; empty for one that is fine enough."""
        at = self.alphas[(self.alphas >= 0) & (self.alphas <= 1)]
        gap = float(at.diff().max())
        if gap <= WIDEST_GAP + 1e-6:
            return ""
        seen = f"only {plural(len(at) - 2, 'point')} between the ends"
        return f"{seen}, up to {gap:.2g} apart, so a barrier may stand unseen. Take alphas at most {WIDEST_GAP:g} apart."

    def _ends(self, values: Tensor) -> tuple[float, float]:
        """Values at alpha = 1 and alpha = 0."""
        return float(values[self.alphas == 1.0][0]), float(values[self.alphas == 0.0][0])

    def barrier(self, data: str = "train") -> Barrier | None:
        """Height, place and error of the barrier in accuracy on "train" or "test"; None where there is no accuracy."""
        accuracy, error = self.accuracy(data), self.barrier_train_error if data == "train" else self.barrier_test_error
        return None if accuracy is None else replace(accuracy_barrier(self.alphas, accuracy), error=error)

    def accuracy(self, data: str = "train") -> Tensor | None:
        """Accuracies (A,) on "train" or "test"."""
        return self.train_accuracy if data == "train" else self.test_accuracy

    def accuracy_error(self, data: str = "train") -> Tensor | None:
        """Binomial standard errors (A,) of the accuracies, sqrt(p (1 - p) / n)."""
        p, n = self.accuracy(data), self.train_samples if data == "train" else self.test_samples
        return None if p is None else (p * (1 - p) / n).sqrt()

    def rows(self) -> list[Row]:
        columns = {
            "alpha": self.alphas,
            "train_loss": self.train_loss,
            "train_accuracy": self.train_accuracy,
            "train_accuracy_error": self.accuracy_error("train"),
            "test_loss": self.test_loss,
            "test_accuracy": self.test_accuracy,
            "test_accuracy_error": self.accuracy_error("test"),
        }
        return [
            {**{name: None if t is None else t[i].item() for name, t in columns.items()}, "batchnorm": self.batchnorm}
            for i in range(len(self.alphas))
        ]

    def summary(self) -> Row:
        """The barriers as one flat dictionary."""
        barriers = "barrier_train barrier_train_error barrier_test barrier_test_error"
        losses = "loss_barrier_train loss_barrier_test loss_excess_train loss_excess_test"
        return fields_of(self, f"connected conclusive {barriers} {losses} batchnorm")

    def sentence(self) -> str:
        return self._by_loss() if self.train_accuracy is None else self._by_accuracy()

    def _by_accuracy(self) -> str:
        train, test, accuracy = self.barrier("train"), self.barrier("test"), self.train_accuracy
        assert train is not None
        assert accuracy is not None
        ends = "ends: {:.1f} % and {:.1f} %".format(*(100 * end for end in self._ends(accuracy)))
        beside = "" if test is None else f"; test: {_points(test)}" + (f" at alpha {test.alpha:.2f}" if test.value > 0 else "")
        border = ""
        if train.error and abs(train.value - ALLOWED_DROP) < 2 * train.error:
            border = f" The border of {100 * ALLOWED_DROP:g} points lies within two standard errors."
        if self.connected and self.chance is not None and min(self._ends(accuracy)) <= self.chance + ALLOWED_DROP:
            most = 100 * self.chance
            return f"No verdict ({ends}): always giving the most frequent answer is right on {most:.1f} %, so nothing could fall."
        if self.connected and self._unseen:
            return f"No verdict ({ends}): {self._unseen}"
        if not self.connected:
            where = f"A barrier of {_points(train)} of train accuracy at alpha {train.alpha:.2f}"
            return f"{where} ({ends}{beside}): do not average these two.{border}"
        falls = f"falls by {_points(train)}" if train.value > 0 else "does not fall"
        text = f"between the ends train accuracy {falls} below the weaker one ({ends}{beside})"
        if self.connected_test is False:
            return f"One basin on the training data, but not on the test data: {text}. Test the average before using it.{border}"
        return f"One basin: {text}, so averaging these two is safe.{border}"

    def _by_loss(self) -> str:
        found = loss_barrier(self.alphas, self.train_loss)
        ends = "ends: {:.4g} and {:.4g}".format(*self._ends(self.train_loss))
        beside = "" if self.loss_barrier_test is None else f"; test: {number(self.loss_barrier_test)}"
        rule = f"judged by the loss, which may rise by {100 * ALLOWED_RISE:g} % of the worse end"
        if not self.connected:
            where = f"A loss barrier of {number(found.value)} at alpha {found.alpha:.2f}"
            return f"{where} ({ends}{beside}; {rule}): do not average these two."
        if self._unseen:
            return f"No verdict ({ends}): {self._unseen}"
        rises = f"rises by {number(found.value)}" if found.value > 0 else "does not rise"
        return (
            f"One basin: between the ends train loss {rises} above the worse one ({ends}{beside}; {rule}), "
            "so averaging these two is safe."
        )


@checked(model=a_model, loss=a_loss)
def linear_path(
    model: nn.Module,
    state_a: State,
    state_b: State,
    train: Any,
    test: Any = None,
    *,
    batchnorm: BatchNormPolicy = "interpolate",
    loss: Loss = None,
    alphas: Any = None,
    accuracy: Accuracy = "auto",
    batch_size: int = BATCH_SIZE,
    progress: bool | None = None,
) -> LinearPath:
    """Loss and accuracy along the straight line through two states of a model, and the barrier between them.

    W(alpha) = alpha * state_a + (1 - alpha) * state_b. The model gives the architecture; it is evaluated in eval mode, and
    left as found.

    Args:
        state_a, state_b: state dicts, modules, flat vectors, or files (.safetensors, or what weights_only loads).
        train, test: `(inputs, targets)`, a mapping, a list of batches, a `DataLoader` or a `Dataset`; test may be None.
        batchnorm: running statistics are `"interpolate"`d like the weights, `"recompute"`d at each point as the average over the
            training batches, or those of each evaluated `"batch"` itself. Interpolated beyond [0, 1] a running variance may
            become negative, and the outputs no numbers: there the loss is inf and the accuracy 0. The other two have no such
            points.
        loss: `(output, target) -> scalar`; None is cross entropy, or the model's own loss if its forward takes `labels`.
        alphas: points of the path, some between 0 and 1; 0 and 1 are added. None is 76 from -1 to 2. Where neighbours lie more
            than 0.2 apart, a path without a barrier gets no verdict.
        accuracy: `"auto"`, None for no accuracy, or `(output, target) -> bits`, one per label: whether the answer is right.
        batch_size: larger batches are evaluated in parts of about equal size, this at most.

    Returns:
        A `LinearPath`: losses and accuracies along it, `barrier` with its error, and `.plot()`.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> a, b = {"weight": torch.tensor([[1.0], [-1.0]])}, {"weight": torch.tensor([[3.0], [1.0]])}
    >>> data = torch.tensor([[1.0], [-2.0]]), torch.tensor([0, 1])
    >>> path = linear_path(model, a, b, data)
    >>> path.barrier_train, path.connected, len(path.alphas)
    (0.0, True, 76)
    """
    _check_words(batchnorm, batch_size)
    if accuracy is not None and not (isinstance(accuracy, str) and accuracy == "auto"):
        a_plain_function("accuracy", accuracy)
    with about("train"):
        problem = problem_of(model, loss, train, batch_size, "train")
    with about("test"):
        other = None if test is None else problem_of(model, loss, test, batch_size, "test")
    return path_between(
        problem,
        state_a,
        state_b,
        other,
        batchnorm=batchnorm,
        alphas=alphas,
        accuracy=accuracy,
        batch_size=batch_size,
        progress=progress,
    )


def path_between(
    train: Problem,
    state_a: State,
    state_b: State,
    test: Problem | None = None,
    *,
    batchnorm: BatchNormPolicy = "interpolate",
    alphas: Any = None,
    accuracy: Accuracy = "auto",
    batch_size: int = BATCH_SIZE,
    progress: bool | None = None,
) -> LinearPath:
    """`linear_path` for data that are in a `Problem` already."""
    began = time.perf_counter()
    _check_words(batchnorm, batch_size)
    at = _checked(alphas)
    twin = in_parts(train, batch_size).copied()
    a, b = (end_tensors(train, twin, state, label) for state, label in ((state_a, "state_a"), (state_b, "state_b")))
    with about("train"):
        twin.check_repeatable()
    problems = {"train": twin} | ({} if test is None else {"test": in_parts(test, batch_size).with_model(twin.model)})
    meters = {name: Meter(problem, accuracy) for name, problem in problems.items()}
    norms = statistics_of(twin.model) if batchnorm != "interpolate" else {}
    losses = {name: torch.zeros(len(at), dtype=torch.float64) for name in meters}
    right: dict[str, dict[int, Tensor | None]] = {name: {} for name in meters}
    ends = [int((at == alpha).nonzero()) for alpha in (1.0, 0.0)]
    rest = [i for i in range(len(at)) if i not in ends]
    with twin.session(second=False), torch.no_grad(), counting("path", progress=progress, total=len(at)) as advance:
        for i in (*ends, *rest):  # the ends first: an error there shows at once
            tensors = interpolate_states(a, b, float(at[i]))
            for name, (value, bits) in _point(tensors, meters, norms, batchnorm):
                losses[name][i], right[name][i] = value, bits
                if i in ends and math.isinf(value):
                    raise NonFiniteError(
                        f"The loss of state_{'ab'[ends.index(i)]} on the {name} data is not finite: the run has diverged there. "
                        "Take an earlier checkpoint."
                    )
            advance(1)
    passes = {name: meter.passes for name, meter in meters.items()}
    columns = _columns("train", at, losses, right["train"], twin)
    return LinearPath(
        alphas=at,
        **columns,
        **_columns("test", at, losses, right.get("test", {}), problems.get("test")),
        batchnorm=batchnorm if statistics_of(twin.model) else "none in the model",
        forward_passes=sum(passes.values()),
        chance=None if columns["train_accuracy"] is None else meters["train"].chance(),
        outcome=Outcome.FINISHED,
        cost=Cost(
            time.perf_counter() - began,
            "one functional call per batch and point",
            notes=tuple(f"{n} forward passes over the {name} data, a third of a gradient each" for name, n in passes.items()),
        ),
    )


def _point(
    tensors: dict[str, Tensor], meters: Mapping[str, Meter], norms: Norms, policy: BatchNormPolicy
) -> Iterator[tuple[str, tuple[float, Tensor | None]]]:
    """Loss and right answers on each data set at one point."""
    if norms and policy == "recompute":
        recompute_statistics(tensors, norms, meters["train"])
    with batch_statistics(norms) if policy == "batch" else nullcontext():
        for name, meter in meters.items():
            with about(name):
                found = meter.read(tensors)
            yield name, found


def _columns(
    name: str, alphas: Tensor, losses: Mapping[str, Tensor], right: Mapping[int, Tensor | None], problem: Problem | None
) -> dict[str, Any]:
    """The fields of one data set; nothing where there is no `problem`."""
    accuracy, error, samples = None, None, 0 if problem is None else problem.samples
    bits = [b for i in sorted(right) if (b := right[i]) is not None]
    if len(bits) == len(alphas):
        accuracy, samples = torch.stack([b.double().mean() for b in bits]), len(bits[0])
        between = [b for b, alpha in zip(bits, alphas.tolist(), strict=True) if 0 <= alpha <= 1]
        error = accuracy_barrier(alphas, accuracy, between).error
    return {
        f"{name}_loss": losses.get(name),
        f"{name}_accuracy": accuracy,
        f"{name}_samples": samples,
        f"barrier_{name}_error": error,
    }


def _checked(alphas: Any) -> Tensor:
    """The points in order (float64), with exact ends."""
    alphas = torch.linspace(LOW, HIGH, POINTS, dtype=torch.float64) if alphas is None else alphas
    try:
        given = torch.as_tensor(alphas, dtype=torch.float64).detach().cpu().flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"alphas must be numbers, such as torch.linspace(-1, 2, 76). Got {type(alphas).__name__}.") from error
    if not bool(torch.isfinite(given).all()):
        raise ValueError("alphas must be finite numbers; one of them is NaN or infinite.")
    if not isinstance(alphas, Iterable) or not bool(((given > 0) & (given < 1)).any()):
        raise ValueError(
            "alphas must be points of the path, at least one of them between 0 and 1, where a barrier would stand, such as "
            f"torch.linspace(-1, 2, 76). Got {shown(alphas)}."
        )
    at = torch.cat([given, torch.tensor([0.0, 1.0], dtype=torch.float64)])
    for end in (0.0, 1.0):
        at[(at - end).abs() < 1e-12] = end
    rising: Tensor = torch.unique(at)
    return rising


def _check_words(batchnorm: str, batch_size: int) -> None:
    if batchnorm not in POLICIES:
        near = nearest(str(batchnorm), POLICIES, count=1)[0]
        raise ValueError(f"batchnorm must be one of {', '.join(map(repr, POLICIES))}. Got {shown(batchnorm)}; nearest: {near!r}.")
    positive_integers(batch_size=batch_size)


def _points(barrier: Barrier) -> str:
    """A barrier in percentage points."""
    return f"{number(100 * barrier.value, None if barrier.error is None else 100 * barrier.error)} percentage points"


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
    if not problem.data.held or all(batch.size <= batch_size for batch in problem.data) or problem.coupled:
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


@unbroken_context
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
