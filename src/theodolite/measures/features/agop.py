"""The average gradient outer product (AGOP): which directions of its input a model's output depends on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import choice
from theodolite.measures.features.gradients import (
    QUANTITY,
    InputGradients,
    Point,
    Settings,
    as_source,
    batches_of,
    chunks,
    cotangents,
    pulled_back,
)
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem import Problem
from theodolite.problem.derivatives.second_order import plain_second_order_errors, refuse_first_order_layers

#: From this many input coordinates on, only one half of the symmetric matrix is multiplied out, in blocks of this size.
BLOCK = 512


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

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> agop(model, torch.zeros(5, 2).double())
    tensor([[ 9., 12.],
            [12., 16.]], dtype=torch.float64)
    """
    total = AGOP(at=at, batch_size=batch_size, projections=projections, seed=seed)
    total.update(model_or_problem, inputs)
    return total.compute()


class AGOP:
    """An AGOP gathered batch by batch: `update` with each, `merge` those of several workers, `compute` at the end."""

    def __init__(
        self, *, at: str | None = None, batch_size: int | None = None, projections: int | None = None, seed: int = 0
    ) -> None:
        self.settings = Settings(at, batch_size, projections, seed)
        self.count = 0
        self.total: Tensor | None = None  # float64 (d, d), upper blocks only
        self.dtype = torch.float32
        self._updates = 0

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


# How alike two average gradient outer products are: the cosine between them as vectors.

#: Rows of a Gram matrix made at once.
ROWS = 4096


def agop_alignment(a: Tensor | InputGradients, b: Tensor | InputGradients) -> float:
    """`Tr(AᵀB) / (‖A‖ ‖B‖)`, in [0, 1] for average gradient outer products; 1 where they are alike up to scale.

    Each is a d × d matrix or `InputGradients`, in any mix; two sets of gradients need no d × d matrix.

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
    """Raise unless both are d × d matrices, or gradients, over the same d coordinates."""
    dims = []
    for m in matrices:
        if isinstance(m, InputGradients):
            dims.append(m.dim)
        elif isinstance(m, Tensor) and m.ndim == 2 and m.shape[0] == m.shape[1]:
            dims.append(m.shape[0])
        else:
            got = f"shape {tuple(m.shape)}" if isinstance(m, Tensor) else type(m).__name__
            raise ValueError(f"agop_alignment takes d × d tensors or InputGradients. Got {got}.")
    if dims[0] != dims[1]:
        raise ValueError(f"Both must be over the same inputs. Got {dims[0]} and {dims[1]} coordinates.")


# A regulariser on the average gradient outer product: fewer or weaker directions of the input that the output depends on.

Norm = Literal["frobenius", "trace", "nuclear", "spectral"]


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
