"""Which directions and coordinates of its input a model looks at, and how far that is from a reference or a fresh network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from theodolite.arguments import checked, count
from theodolite.linalg import top_eigenpairs
from theodolite.measures.features.agop import (
    AGOP,
    Chunk,
    Function,
    InputGradients,
    Options,
    Settings,
    a_gram,
    as_source,
    chunks,
    inner,
    require_same_inputs,
)
from theodolite.measures.kernel.problem_views import reset_of
from theodolite.problem import Problem
from theodolite.problem.arguments import some_inputs
from theodolite.problem.calling import copy_model
from theodolite.problem.state_guard import cuda_devices, own_random_state
from theodolite.results import Cost, Outcome, Result, Row, number

#: Groups of samples that are left out in turn for the error bars.
GROUPS = 5
#: Errors below this share of the value are rounding, not sampling.
ROUNDING = 1e-6

Matrix = Tensor | InputGradients


@dataclass
class Group:
    """The AGOP of some samples: as gradients while they are fewer than coordinates, then as a matrix."""

    count: int = 0
    rows: list[Tensor] = field(default_factory=list)
    sums: AGOP | None = None

    def add(self, rows: Tensor, count: int) -> None:
        self.rows.append(rows)
        self.count += count
        if self.sums is not None or sum(map(len, self.rows)) > rows.shape[1]:
            self.sums = AGOP() if self.sums is None else self.sums
            self.sums.add(torch.cat(self.rows), 0)
            self.rows.clear()

    def matrix(self) -> Matrix:
        if self.sums is None:
            return InputGradients(torch.cat(self.rows), self.count)
        self.sums.count = self.count
        return self.sums.compute()


def gathered(source: Iterable[Chunk]) -> Matrix:
    """The AGOP of all chunks, in the smaller of its two forms."""
    group = Group()
    for chunk in source:
        group.add(chunk.rows, chunk.count)
    return group.matrix()


@dataclass
class Gathered:
    """Groups of samples, what their gradients were taken at, and the number of outputs."""

    groups: list[Group]
    values: Tensor  # (positions, d)
    outputs: int


def gather(source: Iterable[Chunk], seed: int) -> Gathered:
    """Samples at random into groups: sorted data must not make them unlike."""
    generator = torch.Generator().manual_seed(seed)
    groups = [Group() for _ in range(GROUPS)]
    values: list[Tensor] = []
    order = torch.empty(0, dtype=torch.long)
    outputs, start = 0, 0
    for chunk in source:
        if chunk.first:
            turn = (torch.arange(chunk.samples) + start) % GROUPS
            order = turn[torch.randperm(chunk.samples, generator=generator)]  # a group for each sample
            start += chunk.samples
            values.append(chunk.values)
            outputs = chunk.outputs
        place = order.repeat_interleave(chunk.gradients.shape[1] // chunk.samples).to(chunk.gradients.device)
        for i in order.unique().tolist():
            rows = chunk.gradients[:, place == i]
            groups[i].add(rows.reshape(-1, rows.shape[-1]), rows.shape[1] if chunk.first else 0)
    return Gathered(groups, torch.cat(values), outputs)


def weighted_mean(parts: list[Tensor], weights: list[float]) -> Tensor:
    """The mean of tensors with these weights."""
    return torch.stack([w * p for w, p in zip(weights, parts, strict=True)]).sum(0) / sum(weights)


def diagonal_of(matrix: Matrix) -> Tensor:
    """The diagonal of a matrix, written out or kept as rows."""
    return matrix.diagonal() if isinstance(matrix, Tensor) else matrix.rows.square().sum(0) / matrix.count


def inner_products(matrices: list[Matrix]) -> Tensor:
    """`Tr(AᵀB)` of all pairs, in float64."""
    found = torch.zeros(len(matrices), len(matrices), dtype=torch.float64)
    for i, a in enumerate(matrices):
        for j, b in enumerate(matrices[: i + 1]):
            found[i, j] = found[j, i] = inner(a, b)
    return found


class Moments:
    """Traces and inner products of the groups: all that the numbers of any weighted mean of them need."""

    def __init__(self, matrices: list[Matrix], vectors: Tensor, reference: Matrix | None) -> None:
        self.products = inner_products(matrices)
        self.traces = torch.tensor([float(diagonal_of(m).sum()) for m in matrices], dtype=torch.float64)
        self.compressed = torch.stack([_compressed(m, vectors) for m in matrices])  # (groups, r, r)
        self.with_reference = [] if reference is None else [inner(m, reference) for m in matrices]
        self.reference_size = 1.0 if reference is None else math.sqrt(inner(reference, reference))

    def size(self, w: Tensor) -> float:
        """‖G‖ of the mean with weights w."""
        return math.sqrt(float(w @ self.products @ w))

    def effective_rank(self, w: Tensor) -> float:
        """(Tr G)²/‖G‖², 0 where G vanishes."""
        squared = float(w @ self.products @ w)
        return float(w @ self.traces) ** 2 / squared if squared > 0 else 0.0

    def top_share(self, w: Tensor) -> float:
        """The largest eigenvalue, within the top directions of all samples, over the trace."""
        largest = torch.linalg.eigvalsh(torch.einsum("g,gij->ij", w, self.compressed))[-1]
        trace = float(w @ self.traces)
        return min(1.0, float(largest) / trace) if trace > 0 else 0.0

    def alignment(self, w: Tensor) -> float:
        """The cosine with the reference."""
        size = self.size(w) * self.reference_size
        return min(1.0, float(w @ torch.tensor(self.with_reference, dtype=torch.float64)) / size) if size > 0 else 0.0


def _compressed(matrix: Matrix, vectors: Tensor) -> Tensor:
    if isinstance(matrix, Tensor):
        return vectors.double().T @ matrix.double() @ vectors.double()
    seen = matrix.rows.double() @ vectors.double()
    return seen.T @ seen / matrix.count


def jackknife(weights: Tensor, quantity: Callable[[Tensor], float]) -> tuple[float, float]:
    """A number of all groups, and its error from leaving each out in turn."""
    g, value = len(weights), quantity(weights / weights.sum())
    if g < 2:
        return value, 0.0
    left = torch.tensor([quantity(w / w.sum()) for w in weights * (1 - torch.eye(g))], dtype=torch.float64)
    error = math.sqrt((g - 1) / g * float((left - left.mean()).square().sum()))
    return value, error if error > ROUNDING * abs(value) else 0.0


#: Top directions reported, and input coordinates named.
TOP = 10
#: Up to this size all eigenvalues are computed at once; beyond, the largest by iteration.
DENSE = 1000
#: A squared derivative below this many squared roundings of the largest is none.
ROUNDINGS = 16.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureReport(Result):
    """The average gradient outer product G of a model in numbers.

    `values` are its largest eigenvalues, `vectors` (d, r) the directions that belong to them, `diagonal` (d) the mean squared
    derivative in each coordinate. `effective_rank` is (Tr G)²/‖G‖²: 1 for a single direction, d for all alike. Alignments are
    cosines of G with a reference matrix (None where none was given), the identity (no preferred direction) and the covariance
    of the inputs (None where they do not vary); `chance` is that of the identity with the reference. Errors are the
    delete-a-group jackknife over samples, 0 for a single sample.
    """

    values: Tensor
    vectors: Tensor
    diagonal: Tensor
    trace: float
    effective_rank: float
    effective_rank_error: float
    top_share: float
    top_share_error: float
    identity: float
    covariance: float | None
    reference: float | None
    reference_error: float
    chance: float | None
    samples: int
    outputs: int
    at: str | None = None

    @property
    def dim(self) -> int:
        return len(self.diagonal)

    @property
    def shares(self) -> list[float]:
        """What each of the top directions has of the trace."""
        return (self.values / self.trace).tolist()

    @property
    def coordinates(self) -> list[tuple[int, float]]:
        """The most used coordinates with their share of the trace."""
        order = self.diagonal.argsort(descending=True, stable=True)[:TOP]
        return [(int(i), float(self.diagonal[i]) / self.trace) for i in order]

    @property
    def unused(self) -> list[int]:
        """Coordinates on which no output depends, at any of the samples."""
        least = ROUNDINGS * torch.finfo(self.diagonal.dtype).eps ** 2 * float(self.diagonal.max())
        return (self.diagonal <= least).nonzero().flatten().tolist()

    def rows(self) -> list[Row]:
        table: list[tuple[str, float | None, float | None]] = [
            ("effective rank", self.effective_rank, self.effective_rank_error),
            ("share of the top direction", self.top_share, self.top_share_error),
            ("unused coordinates", float(len(self.unused)), None),
            ("alignment with the identity", self.identity, None),
        ]
        if self.covariance is not None:
            table.append(("alignment with the input covariance", self.covariance, None))
        if self.reference is not None:
            table.append(("alignment with the reference", self.reference, self.reference_error))
            table.append(("alignment of the identity with the reference", self.chance, None))
        values = enumerate(zip(self.values.tolist(), self.shares, strict=True), 1)
        table += [row for i, (v, s) in values for row in ((f"eigenvalue {i}", v, None), (f"share of direction {i}", s, None))]
        table += [(f"share of coordinate {i}", share, None) for i, share in self.coordinates]
        return [{"quantity": name, "value": value, "error": error, "seed": self.seed} for name, value, error in table]

    def sentence(self) -> str:
        where = "inputs" if self.at is None else f"features of {self.at}"
        rank = number(self.effective_rank, self.effective_rank_error)
        said = f"The outputs depend on {rank} of {self.dim} directions of the {where} (effective rank); "
        said += f"{number(100 * self.top_share, 100 * self.top_share_error)} % of the squared gradient lies along the first"
        if self.unused:
            said += f"; {len(self.unused)} coordinate{'s have' if len(self.unused) > 1 else ' has'} no effect"
        if self.reference is not None:
            said += f"; alignment with the reference {number(self.reference, self.reference_error)}"
            said += f", of no preferred direction {self.chance:.3g}"
        return said + "."


@checked(inputs=some_inputs, reference=a_gram)
def feature_report(
    model_or_problem: Any, inputs: Any = None, reference: Matrix | None = None, **options: Unpack[Options]
) -> FeatureReport:
    """What a model looks at: the average gradient outer product in numbers, with error bars.

    `reference` is what it should look at: the AGOP of a better model on the same inputs, or the expected one of a known
    target. The other arguments are those of `agop`.

    >>> model = torch.nn.Linear(4, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
    >>> print(feature_report(model, torch.randn(20, 4).double()))
    The outputs depend on 1 of 4 directions of the inputs (effective rank); 100 % of the squared gradient lies along the first; \
2 coordinates have no effect.
    """
    began = time.perf_counter()
    problem, settings = as_source(model_or_problem, inputs), Settings(**options)
    gathered = gather(chunks(problem, inputs, settings), settings.seed)
    groups = [group for group in gathered.groups if group.count]
    matrices, weights = [group.matrix() for group in groups], [float(group.count) for group in groups]
    if reference is not None:
        require_same_inputs(matrices[0], reference)
    diagonal = weighted_mean([diagonal_of(m) for m in matrices], weights)
    if not float(diagonal.sum()) > 0:
        raise ValueError("The model's outputs do not depend on its inputs at any of these samples: the AGOP is zero.")
    values, vectors = _top(matrices, weights)
    moments = Moments(matrices, vectors, reference)
    counts = torch.tensor(weights, dtype=torch.float64)
    rank, rank_error = jackknife(counts, moments.effective_rank)
    share, share_error = jackknife(counts, moments.top_share)
    whole = [w / sum(weights) for w in weights]
    aligned, aligned_error, chance = None, 0.0, None
    if reference is not None:
        aligned, aligned_error = jackknife(counts, moments.alignment)
        used = diagonal_of(reference).double()
        chance = min(1.0, float(used.sum()) / math.sqrt(len(used) * inner(reference, reference)))
    return FeatureReport(
        values=values,
        vectors=vectors,
        diagonal=diagonal,
        trace=float(diagonal.sum()),
        effective_rank=rank,
        effective_rank_error=rank_error,
        top_share=share,
        top_share_error=share_error,
        identity=min(1.0, math.sqrt(rank / len(diagonal))),  # Tr G / (‖G‖ √d)
        covariance=_with_covariance(matrices, whole, gathered.values, moments),
        reference=aligned,
        reference_error=aligned_error,
        chance=chance,
        samples=int(sum(weights)),
        outputs=gathered.outputs,
        at=settings.at,
        outcome=Outcome.FINISHED if settings.projections is None else Outcome.ESTIMATED,
        seed=settings.seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


def _top(matrices: list[Matrix], weights: list[float]) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of the mean, descending, and their directions (d, r)."""
    rows = [m.rows for m in matrices if isinstance(m, InputGradients)]
    if len(rows) == len(matrices) and sum(map(len, rows)) < rows[0].shape[1]:
        joined = torch.cat(rows) / math.sqrt(sum(weights))
        values, vectors = _largest(joined @ joined.T)
        # Orthonormal also where an eigenvalue is zero up to rounding and its column is noise.
        return values, torch.linalg.qr(joined.T.double() @ vectors.double())[0].to(joined.dtype)
    return _largest(weighted_mean([m if isinstance(m, Tensor) else m.matrix() for m in matrices], weights))


def _largest(matrix: Tensor) -> tuple[Tensor, Tensor]:
    size = len(matrix)
    if size > DENSE:
        pairs = top_eigenpairs(matrix, TOP, progress=False)
        return pairs.values.clamp_min(0).to(matrix.dtype), pairs.vectors.to(matrix.dtype)
    values, vectors = torch.linalg.eigh(matrix.double())
    r = min(TOP, size)
    return values[-r:].flip(0).clamp_min(0).to(matrix.dtype), vectors[:, -r:].flip(1).to(matrix.dtype)


def _with_covariance(matrices: list[Matrix], weights: list[float], values: Tensor, moments: Moments) -> float | None:
    centred = values - values.mean(0)
    if float(centred.abs().max()) <= 1e-6 * float(values.abs().max()):
        return None
    spread = InputGradients(centred, len(centred))
    shared = sum(w * inner(m, spread) for w, m in zip(weights, matrices, strict=True))
    return min(1.0, shared / (moments.size(torch.tensor(weights, dtype=torch.float64)) * math.sqrt(inner(spread, spread))))


#: How often a network that is fresh itself would be called moved if logarithms were normal, and the least change that
#: counts, as a share. Tails are heavier: 11 of 500 small fresh networks were called moved, at ten copies.
ALARM, LEAST = 0.002, 0.05

QUANTITIES = ("alignment with fresh networks", "effective rank", "coordinates in use")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeatureMovement(Result):
    """The AGOP of a model beside those of copies whose layers were initialised anew, in three numbers.

    The mean alignment with the fresh ones; the effective rank (Tr G)²/‖G‖², which counts directions; and the same of the
    diagonal, (Σ Gᵢᵢ)²/Σ Gᵢᵢ², which counts coordinates. `values` are the model's, `fresh` the geometric means over the fresh
    networks (of each with the others), `spreads` the standard deviations of their logarithms. A number has moved if its logarithm
    is farther from theirs than `least` (a column of the rows).
    """

    values: tuple[float, ...]
    fresh: tuple[float, ...]
    spreads: tuple[float, ...]
    copies: int

    @property
    def alignment(self) -> float:
        """The mean cosine of the model's AGOP with a fresh one."""
        return self.values[0]

    @property
    def moved(self) -> tuple[str, ...]:
        """The numbers that lie where those of fresh networks do not: empty where the model cannot be told from one."""
        return tuple(row["quantity"] for row in self.rows() if row["moved"])

    def rows(self) -> list[Row]:
        from scipy.stats import t

        quantile = t.ppf(1.0 - ALARM / (2 * len(QUANTITIES)), self.copies - 1)
        scale = float(quantile) * math.sqrt(1.0 + 1.0 / self.copies)
        rows: list[Row] = []
        for name, v, f, s in zip(QUANTITIES, self.values, self.fresh, self.spreads, strict=True):
            least = max(LEAST, scale * s)
            facts = {"value": v, "fresh": f, "spread": s, "least": least, "moved": abs(math.log(v / f)) > least}
            rows.append({"quantity": name, **facts, "seed": self.seed})
        return rows

    def sentence(self) -> str:
        told = [row for row in self.rows() if row["moved"] or not self.moved]
        numbers = "; ".join(
            f"{r['quantity']} {r['value']:.3g}, of fresh ones {r['fresh']:.3g} (told apart outside "
            f"{r['fresh'] * math.exp(-r['least']):.3g} to {r['fresh'] * math.exp(r['least']):.3g})"
            for r in told
        )
        what = "have moved away" if self.moved else "cannot be told"
        return f"The features {what} from those of a fresh network: {numbers}."


@checked(inputs=some_inputs, copies=count)
def feature_movement(
    model_or_problem: Any, inputs: Any = None, *, copies: int = 16, **options: Unpack[Options]
) -> FeatureMovement:
    """Compare a model's AGOP with those of copies initialised anew, by the `reset_parameters` of their layers.

    That is torch's default initialisation, or that of your own modules; a model that was initialised otherwise is compared
    with a start it did not have. The other arguments are those of `agop`.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> model[0].weight.data[:, 1:] = 0.0                     # reads one input of twenty
    >>> "coordinates in use" in feature_movement(model, torch.randn(50, 20)).moved
    True
    """
    if copies < 3:
        raise ValueError(f"copies must be at least 3: fresh networks are compared with one another too. Got {copies}.")
    began = time.perf_counter()
    problem = as_source(model_or_problem, inputs)
    reason = cannot_start_anew(problem.model)
    if reason:
        raise ValueError(f"No fresh copy of this model can be made: {reason}.")
    settings = Settings(**options)
    networks = [problem, *(_fresh(problem, settings.seed + i) for i in range(copies))]
    matrices = [gathered(chunks(network, inputs, settings)) for network in networks]
    products = inner_products(matrices)
    found = torch.stack([_alignments(products), *_counts(matrices, products)])  # (3, 1 + copies)
    return FeatureMovement(
        values=tuple(found[:, 0].tolist()),
        fresh=tuple(found[:, 1:].log().mean(1).exp().tolist()),
        spreads=tuple(found[:, 1:].log().std(1).tolist()),
        copies=copies,
        outcome=Outcome.ESTIMATED,
        seed=settings.seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


def _alignments(products: Tensor) -> Tensor:
    """The mean cosine of each matrix with the fresh ones, which are all but the first; with the others, for a fresh one."""
    if not bool((products.diagonal() > 0).all()):
        raise ValueError("The outputs of the model, or of a fresh copy, do not depend on the inputs at any of these samples.")
    sizes = products.diagonal().sqrt()
    cosines = (products / torch.outer(sizes, sizes)).fill_diagonal_(0.0)[:, 1:]
    fresh = cosines.shape[1]
    return (cosines.sum(1) / torch.tensor([fresh, *[fresh - 1] * fresh])).clamp_min(1e-12)


def _counts(matrices: list[Matrix], products: Tensor) -> tuple[Tensor, Tensor]:
    """How many directions, and how many coordinates, each matrix amounts to."""
    diagonals = torch.stack([diagonal_of(m) for m in matrices]).double().cpu()
    squared_traces = diagonals.sum(1).square()
    return squared_traces / products.diagonal(), squared_traces / diagonals.square().sum(1)


def cannot_start_anew(model: nn.Module) -> str:
    """Why the layers of a model cannot be initialised anew, empty where they can."""
    if isinstance(model, Function):
        return "it has nothing to train"
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            return f"{name or 'it'} normalises by statistics of training, which a fresh network does not have"
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if own and reset_of(module) is None:
            return f"{name or type(module).__name__} holds {own[0]} but has no reset_parameters"
    return ""


def _fresh(problem: Problem, seed: int) -> Problem:
    """The problem on a copy with all layers initialised anew; the random state is left as it was."""
    model = copy_model(problem.model)
    with own_random_state(seed, cuda_devices(model)):
        for module in reversed(list(model.modules())):  # inner ones first: an outer one may know better
            reset = reset_of(module)
            if reset is not None:
                reset()
    return problem.with_model(model)
