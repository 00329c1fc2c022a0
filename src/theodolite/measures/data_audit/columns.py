"""On what scale are the inputs, as the first layer gets them, and what does that do to gradient descent?

The curvature of the loss along the weights of the first layer is the second moment of its inputs, `E[(1, x)(1, x)ᵀ]`, times what
comes from behind. Its largest eigenvalue bounds the rate; a column of spread s is then learned `λ_max / s²` times slower
than the fastest direction. Standardised columns are the yardstick.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from theodolite.arguments import checked, count, seed
from theodolite.measures.data_audit.views import SAMPLES, chosen_rows, labels_of, numbers_of, part_of, sample_tensors
from theodolite.problem import Problem
from theodolite.problem.activations import Call, Hooks
from theodolite.problem.arguments import a_problem
from theodolite.results import Cost, Outcome, Result, Row

#: Layers that read inputs through weights, or normalise them.
FIRST = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, _BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm,
         nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)  # fmt: skip
#: Columns of tables that are this wide are told apart by number; their collinearity is not looked at.
WIDE = 200
#: Numbers that are looked at, of long inputs; a hundred samples are the least.
HELD = 2 * 10**6
#: Observations by which columns of a layer's input are recognised among those of the model's.
COMPARED = 256
#: Steps of gradient descent, at the inverse of the largest eigenvalue, after which a linear model is judged.
STEPS = 1000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ColumnAudit(Result):
    """The columns (or channels) of the input as the layer `layer` gets them.

    `table` has a row for each: its name, mean, spread, smallest and largest value, kind ("plain", "constant", "few values" for
    flags, one-hot and sparse columns), and `slower`: how many times slower gradient descent learns along it than it would if
    all were standardised.
    `size` is the root of the mean square of all inputs. `normalised`: the layer takes the scale of each column away itself.

    `explained` is the share of the targets' variance that a line in the inputs explains, `reached` what gradient descent has
    of it after 1000 steps at the largest safe rate, `reached_standardised` the same with standardised columns; NaN where
    there are too few samples to say. `pairs` are columns that are nearly the same up to shift and scale, with their correlation.
    """

    table: tuple[Row, ...]
    layer: str
    axis: int
    samples: int
    size: float
    normalised: bool
    channels: bool
    explained: float
    reached: float
    reached_standardised: float
    pairs: tuple[Row, ...]
    shift: Tensor
    scale: Tensor
    mixing: Tensor

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.table]

    @property
    def plain(self) -> list[Row]:
        """The columns that have a scale: neither constant nor of few values."""
        return [row for row in self.table if row["kind"] == "plain"]

    @property
    def smallest(self) -> float:
        """The smallest value of all inputs."""
        return float(min(row["smallest"] for row in self.table))

    @property
    def largest(self) -> float:
        """The largest value of all inputs."""
        return float(max(row["largest"] for row in self.table))

    @property
    def slowest(self) -> Row | None:
        return max(self.plain, key=lambda row: row["slower"], default=None)

    @property
    def usually_slower(self) -> float:
        """How many times slower the middle one of the plain columns is learned."""
        slower = sorted(row["slower"] for row in self.plain)
        return float(slower[len(slower) // 2]) if slower else 1.0

    def sentence(self) -> str:
        what = "channels" if self.channels else "columns"
        if not self.plain:
            return f"None of the {len(self.table)} {what} of the input has a scale of its own."
        spreads = [row["spread"] for row in self.plain]
        if len(spreads) == 1:
            return f"The spread of {'the' if len(self.table) == 1 else 'one'} {what.removesuffix('s')} is {spreads[0]:.3g}."
        return f"The spreads of {len(self.plain)} {what} lie between {min(spreads):.3g} and {max(spreads):.3g}."


@checked(problem=a_problem, most=count, seed=seed)
def audit_columns(problem: Problem, *, most: int = SAMPLES, seed: int = 0) -> ColumnAudit:
    """Means and spreads of the inputs of the first layer, and what their differences cost gradient descent.

    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1000.0])
    >>> found = audit_columns(Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (x, x[:, :1])))
    >>> found.slowest["column"], found.reached < 0.1, found.reached_standardised > 0.99
    ('0', True, True)
    """
    began = time.perf_counter()
    first = next(iter(problem.data))
    per_sample = max(1, sum(t.numel() for t in sample_tensors(first)) // first.size)
    rows = chosen_rows(problem, min(most, max(100, HELD // per_sample)), seed)
    part = part_of(problem, rows)
    seen = first_inputs(part)
    if seen is None:
        raise ValueError("audit_columns needs a first layer that reads one floating-point input, of one shape in all batches.")
    x = seen.columns()
    names = _names(problem, seen, x.shape[1])
    whole = _Columns(x)
    targets = None if len(x) != len(rows) or x.shape[1] > WIDE else _linear_targets(problem, rows)
    pairs = () if x.shape[1] > WIDE or seen.channels else whole.pairs(names)
    return ColumnAudit(
        table=tuple(whole.table(names)),
        layer=seen.layer,
        axis=seen.axis,
        samples=len(rows),
        size=float(x.square().mean().sqrt()),
        normalised=isinstance(seen.module, _BatchNorm | _InstanceNorm),
        channels=seen.channels,
        **(_UNKNOWN if targets is None else whole.reached(targets)),
        pairs=tuple(pairs),
        shift=whole.mean,
        scale=whole.spread,
        mixing=whole.mixing() if x.shape[1] <= WIDE else torch.zeros(0),
        outcome=Outcome.FINISHED if len(rows) == problem.samples else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(seconds=time.perf_counter() - began, route="moments of the inputs of the first layer", notes=problem.notes),
    )


_UNKNOWN: dict[str, Any] = dict.fromkeys(("explained", "reached", "reached_standardised"), math.nan)


# What the first layer gets


@dataclass(frozen=True)
class FirstInputs:
    """The input of the first layer that reads it: which `layer` that is (None: none is known), and the `axis` of its columns.

    `places` says which columns of the model's own input they are, where that is known.
    """

    tensor: Tensor
    layer: str
    module: nn.Module | None
    axis: int
    places: tuple[int, ...] | None = None

    @property
    def channels(self) -> bool:
        """Whether the columns are channels of images or signals."""
        return self.tensor.ndim > 2 and self.axis == 1

    def columns(self) -> Tensor:
        """(observations, columns) in float64: positions of images and sequences are observations too, a part of them."""
        x = self.tensor.movedim(self.axis, -1)
        x = x.reshape(-1, x.shape[-1])
        most = max(len(self.tensor), HELD // x.shape[1])
        if len(x) > most:
            x = x[torch.linspace(0, len(x) - 1, most).round().long()]
        return x.double()


def first_inputs(problem: Problem) -> FirstInputs | None:
    """What the first layer that reads a floating-point input gets, on all data of a problem; None for tokens."""
    calls: list[Call] = []
    modules = {n: m for n, m in problem.model.named_modules() if isinstance(m, FIRST) or type(m).__name__ == "Conv1D"}
    found: list[Tensor] = []
    layer, places = None, None
    with problem.session(second=False), torch.no_grad(), Hooks(modules, calls.append, before=True):
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, batch in enumerate(problem.data):
            calls.clear()
            placed = problem.placed(batch)
            problem.output(tensors, placed, i, check=False)
            if not found and calls:
                layer, places = _first_reader(calls, sample_tensors(placed))
            call = next((call for call in calls if call.name == layer), None)
            given = call.input if call is not None else _only_input(sample_tensors(batch))
            if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim < 2:
                return None
            found.append(given.detach().cpu())
    if not found or len({t.shape[1:] for t in found}) > 1:
        return None
    module = None if layer is None else modules[layer]
    ahead = isinstance(module, _ConvNd | _BatchNorm | _InstanceNorm | nn.GroupNorm) or (module is None and found[0].ndim > 3)
    return FirstInputs(torch.cat(found), layer or "", module, 1 if ahead else -1, places)


def _first_reader(calls: list[Call], inputs: list[Tensor]) -> tuple[str, tuple[int, ...] | None]:
    """The layer that reads most columns of the inputs as they are, and which: a model may give each of its parts some of them.

    Where none does, as behind a normalisation in the model's own code, it is the layer that is called first.
    """
    tables = [t for t in inputs if t.is_floating_point() and t.ndim > 1 and t.shape[-1] <= WIDE]
    read = [(call.name, places) for call in calls for t in tables if (places := _places(call.input, t)) is not None]
    return max(read, key=lambda pair: len(pair[1]), default=(calls[0].name, None))


def _places(given: Any, whole: Tensor) -> tuple[int, ...] | None:
    """Which columns of a table or of sequences another tensor consists of; None where it holds something else."""
    if not isinstance(given, Tensor) or given.dtype != whole.dtype or given.shape[:-1] != whole.shape[:-1]:
        return None
    if not 0 < given.shape[-1] <= whole.shape[-1]:
        return None
    some, of = (t.reshape(-1, t.shape[-1])[:COMPARED] for t in (given, whole))
    same = (some[:, :, None] == of[:, None, :]).all(0)
    return tuple(same.int().argmax(1).tolist()) if bool(same.any(1).all()) else None


def _only_input(inputs: list[Tensor]) -> Tensor | None:
    floating = [t for t in inputs if t.is_floating_point()]
    return floating[0] if len(floating) == 1 else None


def _names(problem: Problem, seen: FirstInputs, width: int) -> list[str]:
    known = problem.data.columns
    if seen.channels:
        return [f"channel {i}" for i in range(width)]
    places = range(width) if seen.places is None else seen.places
    if known is not None and (len(known) == width or (seen.places is not None and max(places) < len(known))):
        return [known[i] for i in places]
    return [str(i) for i in places]


def _linear_targets(problem: Problem, rows: Tensor) -> Tensor | None:
    """Targets (n, k) that a line is fitted to: numbers, or classes as columns of 0 and 1."""
    labels = labels_of(problem)
    if labels is None:
        return numbers_of(problem, rows)
    values = labels.at(rows)
    return None if bool((values < 0).any()) or len(labels.names) > 50 else functional.one_hot(values, len(labels.names)).double()


# What their scale does


class _Columns:
    """Moments of columns (n, d) in float64."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.mean = x.mean(0)
        self.centred = x - self.mean
        self.spread = self.centred.square().mean(0).sqrt()
        largest = x.abs().amax(0)
        self.constant = self.centred.abs().amax(0) <= 1e-6 * largest
        usual = x.median(0).values
        often = (x == usual).double().mean(0)
        ends = (x == x.amin(0)) | (x == x.amax(0))
        # Flags, one-hot columns and counts that are mostly zero have no scale to speak of, unless they are large or tiny.
        few = (ends.all(0) | (often > 0.5)) & (largest <= 10) & (largest >= 0.01)
        self.plain = ~self.constant & ~few
        self.standardised = torch.where(self.plain, self.centred / self.spread.clamp_min(1e-300), x)

    def table(self, names: list[str]) -> list[Row]:
        raw, standard = (largest_eigenvalue(x) for x in (self.x, self.standardised))
        slower = (raw / self.spread.square().clamp_min(1e-300) / max(standard, 1e-300)).tolist()
        kinds = ["constant" if c else "plain" if p else "few values" for c, p in zip(self.constant, self.plain, strict=True)]
        slower = [max(1.0, times) if kind == "plain" else None for times, kind in zip(slower, kinds, strict=True)]
        ends = self.x.amin(0).tolist(), self.x.amax(0).tolist()
        columns = zip(names, self.mean.tolist(), self.spread.tolist(), *ends, kinds, slower, strict=True)
        keys = ("column", "mean", "spread", "smallest", "largest", "kind", "slower")
        return [dict(zip(keys, values, strict=True)) for values in columns]

    def pairs(self, names: list[str], least: float = 0.999) -> list[Row]:
        """Pairs of plain columns whose correlation is at least `least`, and not 1, which is a copy."""
        places = torch.nonzero(self.plain).flatten()
        if len(places) < 2 or len(self.x) < 20:
            return []
        z = self.standardised[:, places]
        r = z.T @ z / len(z)
        found = torch.nonzero(torch.triu(r.abs(), 1) >= least).tolist()
        rows: list[Row] = [
            {"first": names[places[i]], "second": names[places[j]], "correlation": float(r[i, j])} for i, j in found
        ]
        return [row for row in rows if abs(row["correlation"]) < 1 - 1e-9]

    def mixing(self) -> Tensor:
        """What makes standardised columns uncorrelated: the inverse root of their correlations, (d, d)."""
        z = torch.where(self.plain, self.standardised, 0.0)
        values, vectors = torch.linalg.eigh(z.T @ z / len(z))
        root = vectors * values.clamp_min(1e-6 * float(values[-1])).rsqrt() @ vectors.T
        return torch.where(self.plain[:, None] & self.plain, root, torch.eye(len(root), dtype=root.dtype))

    def reached(self, targets: Tensor) -> dict[str, Any]:
        """The share of the targets' variance that a line explains, and what descent has of it, raw and standardised."""
        n, d = self.x.shape
        if n < 5 * (d + 1):
            return _UNKNOWN
        y = targets.double() - targets.double().mean(0)
        variance = float(y.square().sum())
        if variance <= 0:
            return _UNKNOWN
        full = _descended(self.standardised, y, math.inf) / variance
        full = 1 - (1 - full) * (n - 1) / (n - d - 1)  # what chance explains is taken off
        raw, standard = (_descended(x, y, STEPS) / variance for x in (self.x, self.standardised))
        return {"explained": max(0.0, full), "reached": raw, "reached_standardised": standard}


def largest_eigenvalue(x: Tensor, steps: int = 30) -> float:
    """Of the second moment `E[(1, x)(1, x)ᵀ]` of rows (n, d), by the power method.

    >>> round(largest_eigenvalue(torch.tensor([[3.0], [-3.0]]).double()), 6)
    9.0
    """
    with_one = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], dim=1)
    scale = float(with_one.abs().max())  # squares of time stamps would do, those of anything do
    with_one = with_one / scale
    v = torch.randn(with_one.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    value = 0.0
    for _ in range(steps):
        v = with_one.T @ (with_one @ (v / v.norm())) / len(x)
        value = float(v.norm())
    return value * scale**2


def _descended(x: Tensor, y: Tensor, steps: float) -> float:
    """By how much the squared error of a line falls in so many steps of descent at the rate 1/λ_max; `inf`: the least squares.

    Along an eigenvector of eigenvalue λ the error falls by `b² (1 - (1 - λ/λ_max)^(2t)) / λ`, with b the gradient at zero.
    """
    phi = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], dim=1)
    values, vectors = torch.linalg.eigh(phi.T @ phi)
    top = float(values[-1])
    b = (vectors.T @ (phi.T @ y)).square().sum(1)
    share = (values / top).clamp(1e-12, 1.0)
    if math.isinf(steps):
        kept = share > 1e-10
        return float((b[kept] / (share[kept] * top)).sum())
    return float((b * -torch.expm1(2 * steps * torch.log1p(-share.clamp_max(1 - 1e-15))) / (share * top)).sum())


# The remedy


@dataclass(frozen=True)
class Standardise:
    """A hook before a layer that shifts and scales its input along an axis, and mixes its columns where that is asked for."""

    shift: Tensor
    scale: Tensor
    axis: int
    mixing: Tensor | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args and isinstance(args[0], Tensor):
            return (self._changed(args[0]), *args[1:]), kwargs
        name = next((key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()), None)
        return args, kwargs if name is None else {**kwargs, name: self._changed(kwargs[name])}

    def _changed(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        shape = [1] * x.ndim
        shape[self.axis] = -1
        # In double precision: a time stamp less its mean is what single precision has rounded away.
        y = (x.double() - self.shift.reshape(shape).to(x.device)) / self.scale.reshape(shape).to(x.device)
        if self.mixing is not None:
            y = (y.movedim(self.axis, -1) @ self.mixing.to(x.device)).movedim(-1, self.axis)
        return y.to(x.dtype)


def standardiser(found: ColumnAudit) -> Standardise:
    """What standardises plain columns, each by itself where their scales differ, else all alike."""
    plain = torch.tensor([row["kind"] == "plain" for row in found.table])
    shift, scale = found.shift, found.scale
    if not found.channels and bool(plain.any()) and float(scale[plain].max() / scale[plain].min()) < 100 and len(plain) > 20:
        shift = shift[plain].mean().expand_as(shift)
        scale = scale[plain].square().mean().sqrt().expand_as(scale)
        plain = torch.ones_like(plain)
    ones = torch.ones_like(scale)
    return Standardise(torch.where(plain, shift, 0 * shift), torch.where(plain, scale.clamp_min(1e-30), ones), found.axis)


def whitener(found: ColumnAudit) -> Standardise:
    """What standardises plain columns and makes them uncorrelated."""
    plain = torch.tensor([row["kind"] == "plain" for row in found.table])
    shift, scale = (torch.where(plain, t, other) for t, other in ((found.shift, 0.0), (found.scale.clamp_min(1e-30), 1.0)))
    return Standardise(shift, scale, found.axis, found.mixing)
