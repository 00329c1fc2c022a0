"""`hessian_structure`: what each layer's sharp directions are, and how far its Kronecker factors explain them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.arguments import checked, count, each, fraction, instance, seed
from theodolite.linalg import Eigenpairs, overlap_curve, top_eigenpairs
from theodolite.operators import KroneckerFactors, LinearOperator, as_operator, kronecker_factors, layer_hessians
from theodolite.operators.kronecker import FactorMode
from theodolite.operators.layer_hessians import LayerHessians
from theodolite.problem import Problem
from theodolite.problem.arguments import a_problem, of_dimensions
from theodolite.results import Cost, Outcome, Result, ResultMapping, Row, fields_of, number

#: What a decoupling error up to the bound says of the factors.
GRADES = (
    (0.1, "the factors stand for the block"),
    (0.5, "the factors explain most of the block"),
    (0.9, "the factors explain little of the block"),
    (float("inf"), "the factors do not explain the block"),
)

# How far the sharp subspaces of two models overlap, predicted from their Kronecker factors.


@checked(factors=instance(KroneckerFactors))
def rank_one_count(factors: KroneckerFactors) -> int:
    """K*: how many leading eigenvectors of the Kronecker product have the form u_i ⊗ v₁, i.e. `τ_i γ₁ > τ₁ γ₂`.

    >>> from theodolite.operators.kronecker import factors_of
    >>> flat = torch.diag(torch.tensor([1.0, 0.9, 0.8, 0.05])).double()
    >>> rank_one_count(factors_of(flat, torch.diag(torch.tensor([1.0, 0.1])).double()))
    3
    """
    tau, gamma = (torch.linalg.eigvalsh(factor).flip(0) for factor in (factors.output, factors.input))
    second = gamma[1] if len(gamma) > 1 else gamma.new_zeros(())
    return int((tau * gamma[0] > tau[0] * second).sum())


@checked(a=instance(KroneckerFactors), b=instance(KroneckerFactors), k=count)
def predicted_overlap(a: KroneckerFactors, b: KroneckerFactors, k: int, *, permuted: bool = False) -> Tensor:
    """The overlap curve, for 1..k, of the top eigenspaces of two Kronecker products.

    `Overlap(k) = (1/k) Σ_{T_a(k)} Σ_{T_b(k)} (u_i·u'_i')² (v_j·v'_j')²` with T(k) the k largest τ_i γ_j. `permuted` replaces
    (u·u')² by 1/m: hidden units have no common order, so on average over orders that is what they share.
    """
    if (a.output.shape, a.input.shape) != (b.output.shape, b.input.shape):
        sizes = " and ".join(f"{f.layer} with {len(f.output)} outputs and {len(f.input)} inputs" for f in (a, b))
        raise ValueError(f"An overlap needs two layers of the same size. Got {sizes}.")
    first, second = a.top_eigenpairs(k), b.top_eigenpairs(k)
    outputs = (first.left.T @ second.left).square()
    if permuted:
        outputs = torch.full_like(outputs, 1.0 / len(first.left))
    inputs = (first.right.T @ second.right).square()
    shared = outputs[first.left_index][:, second.left_index] * inputs[first.right_index][:, second.right_index]
    return _corner_means(shared)


def _corner_means(shares: Tensor) -> Tensor:
    """The sum of each leading k × k corner over k, for k = 1, 2, ..."""
    total = shares.cumsum(0).cumsum(1).diagonal()
    return total / torch.arange(1, len(total) + 1, dtype=total.dtype)


@checked(values=of_dimensions(1), classes=count)
def outlier_count(values: Tensor, classes: int) -> int:
    """How many eigenvalues stand out: those before the widest step in ratio among the first `3 classes`.

    0 where no step stands out: the widest is at most twice the mean of the others. Values within rounding of zero do not count.

    >>> outlier_count(torch.tensor([9.0, 8.0, 7.0, 0.5, 0.4, 0.3]).double(), 4)
    3
    >>> outlier_count(0.8 ** torch.arange(12).double(), 4)
    0
    """
    top = values[: 3 * classes].double()
    top = top[top > 1e-12 * top.max()]
    if len(top) < 2:
        return 0
    steps = (top[:-1] / top[1:]).log()
    place = int(steps.argmax())
    others = torch.cat([steps[:place], steps[place + 1 :]])
    usual = float(others.mean()) if len(others) else 0.0
    return place + 1 if float(steps[place]) > max(2 * usual, 1e-9) else 0


# Eigenvectors of a layer as matrices: their rank, and how they correspond to the eigenvectors of the factors.


def matricised(vectors: Tensor, m: int, n: int, *, transposed: bool = False) -> Tensor:
    """Columns (m·n, k) of a flattened weight as matrices (k, m, n): outputs down, inputs across."""
    if vectors.shape[0] != m * n:
        raise ValueError(f"vectors must have {m}·{n} = {m * n} rows. Got {vectors.shape[0]}.")
    matrices = vectors.T.double()
    return matrices.reshape(-1, n, m).transpose(1, 2) if transposed else matrices.reshape(-1, m, n)


@checked(vectors=of_dimensions(2), m=count, n=count)
def rank_ratios(vectors: Tensor, m: int, n: int, *, transposed: bool = False) -> Tensor:
    """`‖Mat(h)‖₂ / ‖Mat(h)‖_F` of each column: 1 for rank one, 1/√min(m, n) for a flat spectrum.

    >>> u, v = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 0.0, 4.0]).double()
    >>> round(float(rank_ratios(torch.outer(u, v).reshape(-1, 1), 2, 3)), 9)
    1.0
    """
    singular: Tensor = torch.linalg.svdvals(matricised(vectors, m, n, transposed=transposed))
    return singular[:, 0] / singular.square().sum(1).sqrt()


@dataclass(frozen=True)
class Correspondence:
    """`inputs[i, j] = ‖Mat(h_j) v_i‖²` (n, k) and `outputs[i, j] = ‖Mat(h_j)ᵀ u_i‖²` (m, k): columns sum to 1."""

    inputs: Tensor
    outputs: Tensor


@checked(vectors=of_dimensions(2), factors=instance(KroneckerFactors))
def correspondence(vectors: Tensor, factors: KroneckerFactors) -> Correspondence:
    """How the eigenvectors h of a layer's block lie in the eigenvectors u of `E[M]` and v of `E[x xᵀ]`.

    Where the block is a Kronecker product every column is 0 but for a single 1.
    """
    u, v = torch.linalg.eigh(factors.output)[1].flip(1), torch.linalg.eigh(factors.input)[1].flip(1)
    matrices = matricised(vectors, len(u), len(v), transposed=factors.transposed)
    squares = (u.T @ matrices @ v).square()  # (k, m, n): shares of u_i ⊗ v_j
    return Correspondence(squares.sum(1).T, squares.sum(2).T)


@checked(vectors=of_dimensions(2), factors=instance(KroneckerFactors))
def kronecker_overlap(vectors: Tensor, factors: KroneckerFactors) -> Tensor:
    """Overlap of the first k eigenvectors with the first k of the Kronecker product, for k = 1, 2, ...; nothing is formed."""
    pairs = factors.top_eigenpairs(vectors.shape[1])
    matrices = matricised(vectors, len(pairs.left), len(pairs.right), transposed=factors.transposed)
    shares = (pairs.left.T @ matrices @ pairs.right).square()  # (k, m, n)
    return _corner_means(shares[:, pairs.left_index, pairs.right_index])  # of (h, product)


# Is a layer's input nearly one direction? The mean against the auto-correlation.


@dataclass(frozen=True)
class Autocorrelation:
    """`squared_dot` is (v₁·μ̂)², `ratio` γ₁/γ₂, `bound` ‖μ‖²/‖Σ‖, which `ratio` never falls below."""

    squared_dot: float
    ratio: float
    bound: float
    values: Tensor


@checked(factors=instance(KroneckerFactors))
def autocorrelation(factors: KroneckerFactors) -> Autocorrelation:
    """How dominant the leading eigenvector of `E[x xᵀ]` is, and how near to the mean input.

    γ₁ >= ‖μ‖² because μ̂ is a test vector, and γ₂ <= ‖Σ‖ by interlacing; so γ₁/γ₂ >= ‖μ‖²/‖Σ‖, always.

    >>> from theodolite.operators.kronecker import factors_of
    >>> mean = torch.tensor([2.0, 0.0]).double()
    >>> found = autocorrelation(factors_of(torch.eye(1).double(), torch.outer(mean, mean) + 0.5 * torch.eye(2).double(), mean))
    >>> found.squared_dot, found.ratio, found.bound
    (1.0, 9.0, 8.0)
    """
    values, vectors = (t.flip(-1) for t in torch.linalg.eigh(factors.input))
    norm = float(factors.mean.norm())
    dot = float(vectors[:, 0] @ factors.mean) / norm if norm > 0 else 0.0
    spread = float(torch.linalg.matrix_norm(factors.covariance, 2))
    second = float(values[1]) if len(values) > 1 else 0.0
    return Autocorrelation(
        squared_dot=dot * dot,
        ratio=float(values[0]) / second if second > 0 else float("inf"),
        bound=norm * norm / spread if spread > 0 else float("inf"),
        values=values,
    )


@checked(factors=instance(KroneckerFactors), tol=fraction, seed=seed, max_matvecs=count)
def decoupling_error(
    block: LinearOperator, factors: KroneckerFactors, *, tol: float = 1e-3, seed: int = 0, max_matvecs: int | None = None
) -> float:
    """`‖E[M] ⊗ E[x xᵀ] − E[M ⊗ x xᵀ]‖ / ‖E[M ⊗ x xᵀ]‖` in the spectral norm, by Lanczos on the difference.

    >>> from theodolite.operators import DenseOperator
    >>> from theodolite.operators.kronecker import factors_of
    >>> factors = factors_of(torch.eye(2).double(), torch.eye(3).double())
    >>> round(decoupling_error(DenseOperator(torch.eye(6).double() * 2), factors), 6)
    0.5
    """
    block = as_operator(block, name="block")
    settings = {"which": "magnitude", "tol": tol, "seed": seed, "max_matvecs": max_matvecs, "progress": False}
    whole = top_eigenpairs(block, 1, **settings)  # type: ignore[call-overload]
    gap = top_eigenpairs(block - factors.operator(), 1, **settings)  # type: ignore[call-overload]
    return relative_norm(gap, whole)


def relative_norm(gap: Eigenpairs, whole: Eigenpairs) -> float:
    """The spectral norm of one symmetric matrix over that of another, by their eigenvalues of largest magnitude."""
    size = abs(float(whole.values[0]))
    return abs(float(gap.values[0])) / size if size > 0 else 0.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerStructure(Result):
    """One layer: exact eigenpairs of its block, its factors, and how the two compare.

    The factors are those of the Gauss-Newton part unless they were made with mode="exact"; the block is always the exact one.
    `overlap` is the overlap of the first k eigenvectors with those of the Kronecker product, k = 1, 2, ...; `rank_ratios` are
    1 for eigenvectors of rank one; `decoupling_error` is the relative spectral norm of the difference; `squared_dot` and
    `ratio` say how far the input is one direction; `rank_one_count` (K*) how many leading eigenvectors the factors predict
    to be u_i ⊗ v₁; `outliers` how many eigenvalues stand before the widest gap, 0 without one.
    """

    layer: str
    kind: str
    pairs: Eigenpairs
    factors: KroneckerFactors
    overlap: Tensor
    rank_ratios: Tensor
    decoupling_error: float
    squared_dot: float
    ratio: float
    bound: float
    rank_one_count: int
    outliers: int

    def correspondence(self) -> Correspondence:
        """How the eigenvectors lie in those of the two factors."""
        return correspondence(self.pairs.vectors, self.factors)

    def rows(self) -> list[Row]:
        columns = {
            "eigenvalue": self.pairs.values,
            "residual": self.pairs.residuals,
            "unresolved": self.pairs.unresolved,
            "kronecker": self.factors.top_eigenpairs(len(self.pairs.values)).values,
            "overlap": self.overlap,
            "rank_ratio": self.rank_ratios,
        }
        return [{"index": i, **{name: column[i].item() for name, column in columns.items()}} for i in range(len(self.overlap))]

    def summary(self) -> Row:
        """The layer in one row; overlap and rank are those of the outliers."""
        leading = min(max(1, self.outliers), len(self.overlap))
        return {
            **fields_of(self, "layer kind"),
            "outputs": self.factors.output.shape[0],
            "inputs": self.factors.input.shape[0],
            "sharpness": float(self.pairs.values[0]),
            "residual": float(self.pairs.residuals[0]),
            "decoupling_error": self.decoupling_error,
            "overlap": float(self.overlap[leading - 1]),
            "rank_ratio": float(self.rank_ratios[:leading].mean()),
            **fields_of(self, "squared_dot ratio rank_one_count outliers"),
            "converged": self.pairs.converged,
        }

    def sentence(self) -> str:
        kind = "Gauss-Newton factors" if self.factors.mode == "ggn" else "exact factors"
        trust = next(words for bound, words in GRADES if self.decoupling_error <= bound)
        return (
            f"{self.layer}: sharpest direction {number(float(self.pairs.values[0]), float(self.pairs.residuals[0]))}, decoupling "
            f"error {self.decoupling_error:.2g} ({kind} against the exact block): {trust}; {self.outliers} outliers, "
            f"K* = {self.rank_one_count}{self.factors.sampling()}."
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StructureReport(ResultMapping):
    """`LayerStructure` by layer; `without` names the layers that have no Kronecker form."""

    without: dict[str, str]

    def rows(self) -> list[Row]:
        return [structure.summary() for structure in self.values()]

    def sentence(self) -> str:
        lines = [structure.sentence() for structure in self.values()]
        return "\n".join([*lines, *(f"{name}: not measured, {why}." for name, why in self.without.items())])


class Differences(dict[str, LinearOperator]):
    """Block less Kronecker product, layer by layer, multiplied in lockstep on one graph."""

    def __init__(self, blocks: LayerHessians, factors: Mapping[str, KroneckerFactors]) -> None:
        self._blocks, self._products = blocks, {name: factor.operator() for name, factor in factors.items()}
        super().__init__({name: blocks[name] - product for name, product in self._products.items()})

    def products(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        images = self._blocks.products(blocks)
        return {name: image - (self._products[name] @ blocks[name]).to(image.dtype) for name, image in images.items()}


@checked(problem=a_problem, k=count, tol=fraction, classes=count, draws=count, max_passes=count, seed=seed)
def hessian_structure(
    problem: Problem,
    layers: str | Iterable[str] | None = None,
    *,
    k: int = 200,
    tol: float = 1e-3,
    classes: int | None = None,
    mode: FactorMode = "ggn",
    draws: int | None = None,
    max_passes: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> StructureReport:
    """Exact eigenpairs, Kronecker factors and their comparison for every linear and convolutional layer, in lockstep.

    The block is the exact Hessian's; the factors are those of its Gauss-Newton part, which is the same for piecewise linear
    networks. For others part of the decoupling error is the difference of the two, which `mode="exact"` takes away.
    `k` is capped at the size of each block; `classes` (by default the outputs of the model) sets how far outliers are
    looked for; `mode`, `draws` and `max_passes` are those of `kronecker_factors`. Layers without a Kronecker form are listed in
    the report's `without`.

    Returns:
        A `StructureReport` with a row and the matrices of each layer, and `.plot()`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    >>> data = torch.rand(20, 3).double(), torch.arange(20) % 2
    >>> report = hessian_structure(Problem(model, torch.nn.CrossEntropyLoss(), data), k=4)
    >>> list(report), report["2"].factors.output.shape
    (['0', '2'], torch.Size([2, 2]))
    """
    began = time.perf_counter()
    factors = kronecker_factors(problem, layers, mode=mode, sharing="expand", draws=draws, max_passes=max_passes, seed=seed)
    names = [name for name in factors if factors[name].groups == 1]
    grouped = {name: "a grouped convolution: its factors are in kronecker_factors" for name in factors if name not in names}
    without = {**factors.without, **grouped}
    if not names:
        raise ValueError(
            "No layer has two factors to be compared with its block: "
            f"{'; '.join(f'{name}: {why}' for name, why in without.items())}."
        )
    blocks = layer_hessians(problem, names)
    pairs = top_eigenpairs(blocks, k, tol=tol, seed=seed, progress=progress)
    differences = Differences(blocks, {name: factors[name] for name in names})
    # Norms, not the largest values: a block may bend down more than up.
    norms, gaps = (
        top_eigenpairs(op, 1, which="magnitude", tol=max(tol, 1e-3), seed=seed, progress=progress) for op in (blocks, differences)
    )
    count = classes or max(2, factors.classes)  # one logit tells two classes apart
    results: dict[str, Result] = {
        name: _layer(factors[name], pairs[name], relative_norm(gaps[name], norms[name]), count) for name in names
    }
    cost = Cost(time.perf_counter() - began, pairs.cost.route, pairs.cost.peak_bytes, pairs.cost.notes)
    outcome = pairs.outcome if not pairs.outcome.good else _outcome(factors)
    return StructureReport(results=results, without=without, seed=seed, cost=cost, outcome=outcome)


def _outcome(factors: Result) -> Outcome:
    """That of converged eigenpairs beside factors that may be sampled."""
    return Outcome.ESTIMATED if factors.outcome is Outcome.ESTIMATED else Outcome.CONVERGED


def _layer(factors: KroneckerFactors, pairs: Eigenpairs, error: float, classes: int) -> LayerStructure:
    m, n = factors.output.shape[0], factors.input.shape[0]
    inputs = autocorrelation(factors)
    return LayerStructure(
        layer=factors.layer,
        kind=factors.kind,
        pairs=pairs,
        factors=factors,
        overlap=kronecker_overlap(pairs.vectors, factors),
        rank_ratios=rank_ratios(pairs.vectors, m, n, transposed=factors.transposed),
        decoupling_error=error,
        **fields_of(inputs, "squared_dot ratio bound"),
        rank_one_count=rank_one_count(factors),
        outliers=outlier_count(pairs.values, classes),
        outcome=pairs.outcome if not pairs.outcome.good else _outcome(factors),
        seed=pairs.seed,
        cost=pairs.cost,
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerComparison(Result):
    """What one layer of two models shares.

    `overlap[k-1]` of their top-k eigenspaces, `predicted` from the factors as they are, and
    `permuted` where hidden units have no common order, which the `last` layer's have; `input_dot` is (v₁·v₁')² of the two
    input auto-correlations.

    `errors[k-1]` estimates what the eigenvectors' residuals leave open in `overlap[k-1]`; it is 1 where the k-th eigenvalue
    cannot be told from the next, for there is no such subspace then, or the next is not known.
    """

    layer: str
    first: str
    second: str
    outputs: int
    last: bool
    overlap: Tensor
    errors: Tensor
    predicted: Tensor
    permuted: Tensor
    input_dot: float

    @property
    def peak(self) -> int:
        """The k at which the overlap is largest."""
        return int(self.overlap.argmax()) + 1

    def rows(self) -> list[Row]:
        curves = {"measured": self.overlap, "predicted": self.predicted}
        if not self.last:
            curves["predicted, units permuted"] = self.permuted
        both = {"layer": self.layer, "pair": f"{self.first} and {self.second}"}
        points = [(name, k, v) for name, curve in curves.items() for k, v in enumerate(curve.tolist(), 1)]
        return [{**both, "curve": name, "dimension": k, "overlap": v} for name, k, v in points]

    def sentence(self) -> str:
        k = len(self.overlap)
        free = "" if self.last else f", {float(self.permuted[-1]):.3g} with units in no common order"
        return (
            f"{self.layer} of {self.first} and {self.second}: the {k} sharpest directions share "
            f"{number(float(self.overlap[-1]), float(self.errors[-1]))} (predicted {float(self.predicted[-1]):.3g}{free}), "
            f"most at {self.peak}."
        )


@checked(a=instance(LayerStructure), b=instance(LayerStructure), names=each(instance(str)), k=count)
def compare_layers(
    a: LayerStructure, b: LayerStructure, names: tuple[str, str] = ("A", "B"), *, k: int | None = None
) -> LayerComparison:
    """Overlap of one layer's sharp subspaces in two models of the same architecture, up to k directions (None: all known).

    The error of the overlap of k directions needs eigenvalue k + 1: of all known ones it may not be known.
    """
    shapes = [(len(part.factors.output), len(part.factors.input)) for part in (a, b)]
    if shapes[0] != shapes[1]:
        sizes = " and ".join(f"{m}×{n} in {name}" for (m, n), name in zip(shapes, names, strict=True))
        raise ValueError(f"{a.layer} must have the same size in both models. Its weight is {sizes}.")
    known = min(len(a.pairs.values), len(b.pairs.values))
    k = known if k is None else min(k, known)
    first, second = (torch.linalg.eigh(part.factors.input)[1][:, -1] for part in (a, b))
    return LayerComparison(
        layer=a.layer,
        first=names[0],
        second=names[1],
        outputs=a.factors.output.shape[0],
        last=a.factors.last,
        overlap=overlap_curve(a.pairs.vectors[:, :k], b.pairs.vectors[:, :k]).double(),
        errors=overlap_errors(a.pairs, b.pairs)[:k],
        predicted=predicted_overlap(a.factors, b.factors, k),
        permuted=predicted_overlap(a.factors, b.factors, k, permuted=True),
        input_dot=float(first @ second) ** 2,
        outcome=next((part.outcome for part in (a, b) if not part.outcome.good), Outcome.CONVERGED),
        seed=a.seed,
        cost=a.cost,
    )


def overlap_errors(a: Eigenpairs, b: Eigenpairs) -> Tensor:
    """What residuals leave open in the overlap of the first k eigenvectors, k = 1, 2, ...: an estimate of first order.

    As in Davis and Kahan's theorem a computed vector i of the first k is tilted out of the eigenspace by at most its
    residual over its gap, `r_i / (λ_i − λ_{k+1})` with the computed eigenvalues; Θ collects these angles. Turning U by Θ moves
    `tr(P_U P_V)/k` by at most `(2/k) √(Σ c²s²) ‖Θ‖`, c and s the cosines and sines between U and V, and by `‖Θ‖²/k` more in
    second order.
    """
    width = min(len(a.values), len(b.values))
    count = torch.arange(1, width + 1, dtype=torch.float64)
    turns = torch.stack([_turns(pairs)[:width] for pairs in (a, b)]).minimum(count.sqrt())
    dots = a.vectors[:, :width].double().T @ b.vectors[:, :width].double()
    corners = [dots[:k, :k] for k in range(1, width + 1)]
    # Σ c² − Σ c⁴, by the traces of C = D Dᵀ and C².
    mixed = torch.stack([d.square().sum() - (d @ d.T).square().sum() for d in corners]).clamp_min(0.0).sqrt()
    errors = ((2 * mixed * turns + turns.square()) / count).sum(0)
    return errors.clamp(max=1.0)


def _turns(pairs: Eigenpairs) -> Tensor:
    """The angle ‖Θ‖ of the first k eigenvectors, k = 1, 2, ...; infinite where the gap is zero or not known."""
    values, residuals = pairs.values.double(), pairs.residuals.double()
    if len(values) == pairs.vectors.shape[0]:
        beyond = float("-inf")  # nothing is left out
    else:
        beyond = float(pairs.nearby_values.double().max()) if len(pairs.nearby_values) else float("inf")
    following = torch.cat([values[1:], values.new_tensor([beyond])])
    gaps = values[:, None] - following  # (i, k)
    rounding = 100 * torch.finfo(pairs.values.dtype).eps * pairs.scale
    tilts = torch.where(gaps > rounding, residuals[:, None] / gaps.clamp_min(1e-300), float("inf"))
    inside = torch.ones_like(tilts, dtype=torch.bool).triu()
    return torch.where(inside, tilts, 0.0).square().sum(0).sqrt()
