"""The average gradient outer product (AGOP): which directions of its input a model's output depends on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from theodolite.arguments import checked, choice, instance, optional_integer, random_seed, shown
from theodolite.errors import ArgumentError, BatchCoupledError
from theodolite.interrupts import unbroken_context
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.operators.tangent_kernels.tangent_kernel import CHECKED
from theodolite.problem import Batch, Problem
from theodolite.problem.activations import Call, Hooks, recorded_calls
from theodolite.problem.arguments import a_finite_tensor, a_model, some_inputs
from theodolite.problem.derivatives.second_order import plain_second_order_errors, refuse_first_order_layers
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.text import nearest

# What is differentiated with respect to what: the model behind a `Problem`, its inputs or the value of one of its layers.

QUANTITY = "An average gradient outer product"

#: How far the output of a sample taken alone may be from that in a batch, relative to the largest output.
COUPLING = 1e-3


class Function(nn.Module):
    """A function of a batch, or a module with nothing to train, as a module with one (unused) parameter."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def as_source(model_or_problem: Any, inputs: Any, *, check: bool = True) -> Problem:
    """A problem as it is; a module or function on `inputs`, in eval mode, with a loss that nobody looks at."""
    if isinstance(model_or_problem, Problem):
        return model_or_problem
    if not callable(model_or_problem) or isinstance(model_or_problem, type):
        kind = f"the class {model_or_problem.__name__}" if isinstance(model_or_problem, type) else type(model_or_problem).__name__
        raise ArgumentError(f"model_or_problem must be a torch.nn.Module, a function of a batch or a Problem. Got {kind}.")
    if isinstance(model_or_problem, nn.Module):
        a_model("model_or_problem", model_or_problem)
    if inputs is None:
        raise ValueError("inputs is missing: only a Problem brings inputs of its own.")
    problem = Problem(
        _module(model_or_problem, inputs),
        lambda output, target: output.sum(),
        [(inputs, torch.zeros(1))],
        batch_weight=lambda batch: float(batch.size),
        check=False,
    )
    if check:
        problem.with_batches([problem.few(CHECKED)]).check_repeatable()
    return problem


def _module(model: Any, inputs: Any) -> nn.Module:
    if isinstance(model, nn.Module) and any(p.requires_grad and p.is_floating_point() for p in model.parameters()):
        return model
    own = list(model.parameters()) if isinstance(model, nn.Module) else []
    floating = [t for _, t in named_tensors([own, inputs]) if t.is_floating_point()]
    return Function(model, floating[0].dtype if floating else torch.float32)


def batches_of(problem: Problem, inputs: Any) -> Iterator[Batch]:
    """The given inputs, or the problem's own."""
    return iter(problem.data) if inputs is None else iter([problem.batch_of(inputs)])


class Point:
    """Where the gradient is taken: the floating inputs of a batch, or what the submodule `at` returns."""

    def __init__(self, problem: Problem, at: str | None) -> None:
        problem.output_choice()
        self.problem, self.at = problem, at
        self.module = None if at is None else _submodule(problem.model, at)

    def outputs(self, tensors: dict[str, Tensor], batch: Batch, index: int) -> tuple[Tensor, list[Tensor]]:
        """The outputs (n, k) of a batch of n samples and the tensors they are to be differentiated with respect to."""
        batch = replace(batch, args=map_tensors(_own, batch.args), kwargs=map_tensors(_own, batch.kwargs))
        if self.module is None:
            batch, places = _with_leaves(batch)
            output = self.problem.output(tensors, batch, index)
        else:
            with _watched(self.module, str(self.at)) as places:
                output = self.problem.output(tensors, batch, index)
            if len(places) != 1:
                raise ValueError(
                    f"at={self.at!r} must be called once per forward pass, and was called {len(places)} times. "
                    "Name another submodule."
                )
            if places[0].shape[0] != batch.size:
                raise ValueError(
                    f"at={self.at!r} must return one part per sample. Batch {index} has {batch.size} samples, but it returned "
                    f"shape {tuple(places[0].shape)}."
                )
        # Several rows per sample are those of its tokens, one sample after the other: `refuse_coupling` sees to that.
        if batch.size > 1 and (output.ndim == 0 or output.shape[0] % batch.size):
            raise ValueError(
                f"The gradient of each sample needs its own outputs. Batch {index} has {batch.size} samples, but the output has "
                f"shape {tuple(output.shape)}."
            )
        if not output.requires_grad:
            what = "the inputs" if self.at is None else f"what {self.at!r} returns"
            raise ValueError(f"The model's output does not depend on {what} in a way that can be differentiated.")
        return output.reshape(batch.size, -1), places

    def rows(self, values: Sequence[Tensor]) -> Tensor:
        """What belongs to the places (they themselves, or gradients) as (samples, d); for `at`, positions are samples."""
        if self.module is None:
            flat = [v.reshape(v.shape[0], -1) for v in values]
            return torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
        (value,) = values
        channels_first = value.ndim > 3 or (value.ndim == 3 and isinstance(self.module, _ConvNd | _BatchNorm))
        value = value.movedim(1, -1) if channels_first else value
        return value.reshape(-1, value.shape[-1])


def refuse_coupling(flat: Tensor, alone: Tensor) -> None:
    """Raise if the first of n samples has other outputs in its batch, `flat` (n, k), than alone, (1, k)."""
    flat, alone = flat.detach(), alone.detach()
    alike = alone.shape[1] == flat.shape[1]
    gap = float((flat[:1] - alone).abs().max()) if alike else float("inf")
    if gap > COUPLING * float(flat.abs().max()):
        raise _coupled(len(flat), f"they differ by {gap:.2e}" if alike else f"{alone.shape[1]} against {flat.shape[1]}")


def _coupled(n: int, how: str) -> BatchCoupledError:
    return BatchCoupledError(
        f"{QUANTITY} is taken sample by sample, but the first sample has other outputs alone than in a batch of {n} ({how}): (a) "
        "an output depends on the other samples (in-batch contrast, nodes of one graph): give a model whose outputs belong to "
        f"one sample each (one tower of two); (b) an input whose first size happens to be {n} is not per sample: take another "
        "number of samples."
    )


def _own(t: Tensor) -> Tensor:
    """The same numbers, of no graph, and such that they may be in one."""
    return t.clone() if t.is_inference() else t.detach()


def _with_leaves(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The batch with its floating per-sample inputs as leaves that require grad, and these."""
    places: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        if not (t.is_floating_point() and t.ndim and t.shape[0] == batch.size):
            return t
        places.append(t.detach().requires_grad_())
        return places[-1]

    batch = replace(batch, args=map_tensors(leaf, batch.args), kwargs=map_tensors(leaf, batch.kwargs))
    if not places:
        kinds = ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')}" for name, t in named_tensors(batch.inputs))
        raise TypeError(
            f"The inputs hold no floating tensor to differentiate with respect to ({kinds}). Name the layer that turns them into "
            "numbers, such as the embedding of a token model: at='embedding'."
        )
    return batch, places


@unbroken_context
def _watched(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Collects what the module returns, made a leaf where no graph leads to it."""
    seen: list[Tensor] = []

    def watch(call: Call) -> Any:
        first = next((t for _, t in named_tensors(call.output) if t.is_floating_point()), None)
        if first is None or first.ndim < 2:
            raise ValueError(f"at={name!r} must return a floating tensor (samples, ..., features).")
        place = first if first.requires_grad else first.detach().requires_grad_()
        seen.append(place)
        return map_tensors(lambda t: place if t is first else t, call.output)

    with Hooks({name: module}, watch):
        yield seen


def token_embedding(problem: Problem, batch: Batch) -> Call | None:
    """The call of the first embedding that turns each sample of a batch into numbers, for `at`; None where there is none."""
    problem.output_choice()
    embeddings = {name: m for name, m in problem.model.named_modules() if isinstance(m, nn.Embedding) and name}
    with recorded_calls(embeddings) as calls, problem.session(second=False), torch.no_grad():
        problem.output(problem.tensors(problem.leaves(grad=False)), batch, 0)
    # Positions are embedded too, but without a sample dimension, or after the tokens.
    times = Counter(call.name for call in calls)
    return next((call for call in calls if times[call.name] == 1 and call.output.shape[0] == batch.size), None)


def _submodule(model: nn.Module, name: str) -> nn.Module:
    root = model.function if isinstance(model, Function) and isinstance(model.function, nn.Module) else model
    known: dict[str, nn.Module] = dict(root.named_modules())
    if not name or name not in known:
        near = ", ".join(nearest(name, [k for k in known if k])) or "none"
        raise ValueError(f"at={name!r} is no submodule of {type(root).__name__}. Nearest names: {near}.")
    return known[name]


# Gradients of all outputs with respect to the inputs, sample by sample: the factor of the average gradient outer product.

#: Numbers in the gradients that are held at once, and samples at once: enough to keep matrix products busy.
NUMBERS, SAMPLES = 2**21, 4096
#: Few outputs do not make chunks larger than this many would: the activations of the forward pass take memory too.
FEW = 8


@dataclass(frozen=True, eq=False)
class InputGradients:
    """The rows Γ (m, d) with `G = ΓᵀΓ / count`, m = count × outputs: the low-memory form of an AGOP where m < d."""

    rows: Tensor
    count: int

    @property
    def dim(self) -> int:
        """The number of input coordinates, d."""
        return self.rows.shape[1]

    def matrix(self) -> Tensor:
        """The average gradient outer product itself, (d, d)."""
        return self.rows.T @ self.rows / self.count


class Options(TypedDict, total=False):
    """The keywords of `agop`, which all that gathers gradients takes; see there."""

    at: str | None
    batch_size: int | None
    projections: int | None
    seed: int


@checked(inputs=some_inputs)
def input_gradients(model_or_problem: Any, inputs: Any = None, **options: Unpack[Options]) -> InputGradients:
    """The gradients behind `agop` (see there for the arguments), kept as rows instead of being summed to d × d.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> gradients = input_gradients(model, torch.zeros(2, 2).double())
    >>> gradients.rows, gradients.count
    (tensor([[3., 4.],
            [3., 4.]], dtype=torch.float64), 2)
    """
    problem = as_source(model_or_problem, inputs)
    found = list(chunks(problem, inputs, Settings(**options)))
    return InputGradients(torch.cat([chunk.rows for chunk in found]), sum(chunk.count for chunk in found))


@dataclass(frozen=True)
class Settings:
    """Where and how gradients are taken; see `agop`."""

    at: str | None = None
    batch_size: int | None = None
    projections: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        random_seed(self.seed)
        if self.at is not None:
            instance(str)("at", self.at)
        for name in ("batch_size", "projections"):
            optional_integer(name, getattr(self, name), least=1, wanted="a whole number of at least 1, or None")

    def passes(self, outputs: int) -> int:
        """Backward passes for so many outputs."""
        return outputs if self.projections is None else min(self.projections, outputs)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Gradients (passes, positions, d) of some samples, and what they were taken at, (positions, d).

    The passes of many outputs come in several chunks, of which only the first counts its samples.
    """

    gradients: Tensor
    values: Tensor
    samples: int
    outputs: int
    first: bool

    @property
    def rows(self) -> Tensor:
        return self.gradients.reshape(-1, self.gradients.shape[-1])

    @property
    def count(self) -> int:
        return self.gradients.shape[1] if self.first else 0


def chunks(problem: Problem, inputs: Any, settings: Settings) -> Iterator[Chunk]:
    """The gradients of all samples, as many at once as make good use of memory.

    One forward pass serves a backward pass for each output, and only the place asks for gradients, so none of the weights'
    are computed. Batched backward passes (vmap) are no faster and not defined for all layers.
    """
    problem.refuse_batch_coupling(QUANTITY)
    point = Point(problem, settings.at)
    generator = torch.Generator().manual_seed(settings.seed)
    index = 0
    for batch in batches_of(problem, inputs):
        alone, size, group = _survey(point, batch, settings)
        for start in range(0, batch.size, size):
            part = batch.part(slice(start, start + size)) if batch.size > size else batch
            flat, places = _forward(point, part, index)
            if start == 0:
                refuse_coupling(flat, alone)
            weights = cotangents(flat, settings, generator)
            values = point.rows(places).detach()
            for first in range(0, settings.passes(flat.shape[1]), group):
                with problem.session(second=False):  # left before each yield: who takes the chunk may fail
                    gradients = pulled_back(point, flat, places, islice(weights, group))
                yield Chunk(gradients, values, part.size, flat.shape[1], first == 0)
            index += 1


def _forward(point: Point, batch: Batch, index: int) -> tuple[Tensor, list[Tensor]]:
    problem = point.problem
    with problem.session(second=False):
        return point.outputs(problem.tensors(problem.leaves(grad=False)), problem.placed(batch), index)


def _survey(point: Point, batch: Batch, settings: Settings) -> tuple[Tensor, int, int]:
    """The outputs of the first sample alone; how many samples to take at once, and how many passes."""
    try:
        alone, places = _forward(point, batch.part(slice(0, 1)) if batch.size > 1 else batch, 0)
    except ValueError as error:
        if batch.size == 1 or not str(error).startswith("The model refused"):
            raise
        raise _coupled(batch.size, "none") from error
    numbers, passes = sum(p.numel() for p in places), settings.passes(alone.shape[1])
    size = settings.batch_size or max(1, min(SAMPLES, NUMBERS // (max(passes, FEW) * numbers)))
    return alone.detach(), size, max(1, min(passes, NUMBERS // (min(size, batch.size) * numbers)))


def cotangents(flat: Tensor, settings: Settings, generator: torch.Generator) -> Iterator[Tensor]:
    """Weights (n, k) of the outputs, one for each backward pass: each output in turn, or random signs."""
    n, k = flat.shape
    passes = settings.passes(k)
    if passes == k:
        for j in range(k):
            one = torch.zeros_like(flat)
            one[:, j] = 1.0
            yield one
        return
    # Signs of their own for each sample: E[s sᵀ] = 1, so the mean of (Jᵀs)(Jᵀs)ᵀ is JᵀJ.
    signs = torch.randint(0, 2, (n, passes, k), generator=generator, dtype=torch.int8)
    for j in range(passes):
        yield (2 * signs[:, j].to(flat) - 1) / passes**0.5


def pulled_back(
    point: Point, flat: Tensor, places: list[Tensor], weights: Iterator[Tensor], *, create_graph: bool = False
) -> Tensor:
    """Gradients (passes, positions, d) of the weighted outputs."""
    rows = []
    for weight in weights:
        found = torch.autograd.grad(flat, places, weight, retain_graph=True, create_graph=create_graph, allow_unused=True)
        rows.append(point.rows([torch.zeros_like(p) if g is None else g for g, p in zip(found, places, strict=True)]))
    return torch.stack(rows)


#: From this many input coordinates on, only one half of the symmetric matrix is multiplied out, in blocks of this size.
BLOCK = 512


@checked(inputs=some_inputs)
def agop(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    at: str | None = None,
    batch_size: int | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> Tensor:
    """`G = (1/n) Σᵢ JᵢᵀJᵢ` (d × d) with Jᵢ the derivative of all outputs of sample i in its d input numbers, flattened.

    Memory is d × d and the gradients of one chunk; sums over chunks are kept in float64.

    Args:
        model_or_problem: a module or function of a batch (in eval mode), or a Problem (its mode, and its inputs by default).
        inputs: what the model is called with: a tensor, a tuple of arguments, a mapping. Several floating inputs are joined in
            order; integer inputs need `at`.
        at: name of a submodule: the derivative is taken in what it returns, features last (channels of images), and every
            position (token, pixel) counts as a sample.
        batch_size: samples taken at once.
        projections: this many random sign combinations of the outputs in place of each output: unbiased, for many outputs.

    Returns:
        The matrix (d, d), symmetric and positive semi-definite, in the order of the flattened input.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> agop(model, torch.zeros(5, 2).double())
    tensor([[ 9., 12.],
            [12., 16.]], dtype=torch.float64)
    """
    total = AGOP(at=at, batch_size=batch_size, projections=projections, seed=seed)
    return total.update(model_or_problem, inputs).compute()


class AGOP:
    """An AGOP gathered batch by batch: `update` with each, `merge` those of several workers, `compute` at the end."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self.settings = Settings(**options)
        self.count = 0
        self.total: Tensor | None = None  # float64 (d, d), upper blocks only
        self.dtype = torch.float32
        self._updates = 0

    @checked(inputs=some_inputs)
    def update(self, model_or_problem: Any, inputs: Any = None) -> AGOP:
        """Add the samples of one batch (for a Problem: of all its data)."""
        settings = replace(self.settings, seed=self.settings.seed + self._updates)
        self._updates += 1
        for chunk in chunks(as_source(model_or_problem, inputs), inputs, settings):
            self.add(chunk.rows, chunk.count)
        return self

    def add(self, rows: Tensor, count: int) -> None:
        """Add the gradients (m, d) of `count` samples."""
        if self.total is None:
            self.total, self.dtype = _zeros(rows), rows.dtype
        self._expect(rows.shape[1])
        add_outer(self.total, rows)
        self.count += count

    def merge(self, other: AGOP) -> AGOP:
        """Add what another one gathered."""
        if other.total is None:
            return self
        if self.total is None:
            self.total, self.dtype = torch.zeros_like(other.total), other.dtype
        self._expect(other.total.shape[0])
        self.total += other.total.to(self.total.device)
        self.count += other.count
        return self

    def compute(self) -> Tensor:
        """The mean over all samples so far, (d, d), in the dtype of the gradients."""
        if self.total is None:
            raise ValueError("Nothing gathered yet: call update(model, inputs) first.")
        return _mirrored(self.total.to(self.dtype, copy=True).div_(self.count))

    def _expect(self, dim: int) -> None:
        assert self.total is not None
        if self.total.shape[0] != dim:
            raise ValueError(f"Inputs of {dim} numbers cannot join an AGOP of {self.total.shape[0]}: all must have one size.")


def _zeros(rows: Tensor) -> Tensor:
    d = rows.shape[1]
    if 16 * d * d > available_bytes(rows.device):
        raise ValueError(
            f"The AGOP of inputs with {d} numbers is a {d} × {d} matrix, which does not fit into memory. input_gradients keeps "
            "the gradients instead, and agop_alignment takes them; at= measures at a narrower layer."
        )
    return torch.zeros(d, d, dtype=torch.float64, device=rows.device)


def add_outer(total: Tensor, rows: Tensor) -> None:
    """Add `rowsᵀ rows` to the blocks of `total` (d, d) on and above its diagonal."""
    for start in range(0, rows.shape[1], BLOCK):
        total[start : start + BLOCK, start:] += rows[:, start : start + BLOCK].T @ rows[:, start:]


def _mirrored(matrix: Tensor) -> Tensor:
    """What lies on and above the diagonal copied below it, in place."""
    for start in range(0, len(matrix), BLOCK):
        stop = min(start + BLOCK, len(matrix))
        upper = matrix[start:stop, start:stop].triu()
        matrix[start:stop, start:stop] = upper + upper.triu(1).T
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T
    return matrix


#: Rows of a Gram matrix made at once.
ROWS = 4096


def a_gram(name: str, value: Any) -> Tensor | InputGradients:
    """An average gradient outer product, written out or as the gradients it is made of."""
    if not isinstance(value, InputGradients) and (
        not isinstance(value, Tensor) or value.ndim != 2 or value.shape[0] != value.shape[1]
    ):
        raise ArgumentError(f"{name} must be a d × d tensor or InputGradients. Got {shown(value)}.")
    return value if isinstance(value, InputGradients) else a_finite_tensor(name, value)


@checked(a=a_gram, b=a_gram)
def agop_alignment(a: Tensor | InputGradients, b: Tensor | InputGradients) -> float:
    """`Tr(AᵀB) / (‖A‖ ‖B‖)`, in [0, 1] for average gradient outer products; 1 where they are alike up to scale.

    Each is a d × d matrix or `InputGradients`, in any mix; two sets of gradients need no d × d matrix.

    Returns:
        The cosine of the two matrices as a float.

    >>> round(agop_alignment(torch.diag(torch.tensor([2.0, 0.0])), torch.eye(2)), 4)
    0.7071
    """
    require_same_inputs(a, b)
    sizes = inner(a, a), inner(b, b)
    if min(sizes) == 0.0:
        which = "first" if sizes[0] == 0.0 else "second"
        raise ValueError(f"The {which} matrix is zero, so it has no direction: that model does not depend on its inputs.")
    if not all(map(math.isfinite, sizes)):
        raise ValueError("Alignment needs finite matrices. Got NaN or inf.")
    cosine = inner(a, b) / sizes[0] * math.sqrt(sizes[0] / sizes[1])
    return min(1.0, cosine)


def inner(a: Tensor | InputGradients, b: Tensor | InputGradients) -> float:
    """`Tr(AᵀB)`: products in the wider precision of the two, their sum in float64."""
    a, b = _smaller(a), _smaller(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return float((a.double() * b.to(a.device).double()).sum())
    if isinstance(a, Tensor):
        a, b = b, a
    assert isinstance(a, InputGradients)
    other = b if isinstance(b, Tensor) else b.rows
    dtype = torch.promote_types(a.rows.dtype, other.dtype)
    other = other.to(a.rows.device, dtype)
    total = 0.0
    for part in a.rows.to(dtype).split(ROWS):
        if isinstance(b, Tensor):
            total += float(((part @ other) * part).sum(dtype=torch.float64))
        else:
            total += sum(float((part @ rows.T).square().sum(dtype=torch.float64)) for rows in other.split(ROWS)) / b.count
    return total / a.count


def _smaller(a: Tensor | InputGradients) -> Tensor | InputGradients:
    """The matrix where there are more gradients than coordinates."""
    return a if isinstance(a, Tensor) or len(a.rows) <= a.dim else a.matrix()


def require_same_inputs(*matrices: Tensor | InputGradients) -> None:
    """Raise unless both are over the same d coordinates."""
    dims = [m.dim if isinstance(m, InputGradients) else m.shape[0] for m in matrices]
    if dims[0] != dims[1]:
        raise ValueError(f"Both must be over the same inputs. Got {dims[0]} and {dims[1]} coordinates.")


# A regulariser on the average gradient outer product: fewer or weaker directions of the input that the output depends on.

Norm = Literal["frobenius", "trace", "nuclear", "spectral"]


@checked(inputs=some_inputs)
def agop_penalty(
    model_or_problem: Any,
    inputs: Any = None,
    *,
    norm: Norm = "frobenius",
    at: str | None = None,
    projections: int | None = None,
    seed: int = 0,
) -> Tensor:
    """A norm of `agop(model, inputs)` that can be differentiated with respect to the model's parameters.

    Add it to a loss, on a batch: it costs a backward pass for each output, and as many again when it is differentiated.
    With n samples and k outputs no matrix larger than min(n k, d) squared is formed. As `agop`, it sees a module in eval
    mode, whatever mode it is in; the model's mode, buffers and gradients stay as they are.

    Args:
        norm: `"frobenius"` ‖G‖; `"trace"`, which is also the `"nuclear"` norm, G having no negative eigenvalue: the mean squared
            length of the gradients; `"spectral"`, the largest eigenvalue.
        projections: random sign combinations of the outputs, for many outputs; "trace" stays unbiased, the others are raised.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> penalty = agop_penalty(model, torch.zeros(4, 2).double(), norm="trace")
    >>> penalty.backward()
    >>> round(penalty.item(), 6), model.weight.grad
    (25.0, tensor([[6., 8.]], dtype=torch.float64))
    """
    choice("norm", norm, get_args(Norm))
    problem = as_source(model_or_problem, inputs, check=False)
    rows, count = _rows(problem, inputs, Settings(at, None, projections, seed))
    if norm in ("trace", "nuclear"):
        return rows.square().sum() / count
    gram = (rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows) / count
    found: Tensor = gram.norm() if norm == "frobenius" else torch.linalg.eigvalsh(gram)[-1]
    return found


def _rows(problem: Problem, inputs: Any, settings: Settings) -> tuple[Tensor, int]:
    """The gradients (m, d) with their graph to the model's own parameters, and how many samples they are of."""
    problem.refuse_batch_coupling(QUANTITY)
    refuse_first_order_layers(problem.model)
    point = Point(problem, settings.at)
    generator = torch.Generator().manual_seed(settings.seed)
    found, count = [], 0
    with problem.session(second=True), plain_second_order_errors():
        own = [p.float() if problem.half_precision else p for p in problem.parameters]
        for index, batch in enumerate(batches_of(problem, inputs)):
            flat, places = point.outputs(problem.tensors(own), problem.placed(batch), index)
            pulled = pulled_back(point, flat, places, cotangents(flat, settings, generator), create_graph=True)
            found.append(pulled.reshape(-1, pulled.shape[-1]))
            count += pulled.shape[1]
    return torch.cat(found), count
