"""`top_eigenpairs`: extreme eigenpairs of a symmetric operator, or of many in lockstep."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from theodolite.arguments import choice, either, fraction, integer, optional_integer, random_seed, up_to
from theodolite.linalg.eigensolver import EigenSolver, Neighbours, Solution
from theodolite.linalg.lockstep import solve
from theodolite.operators import LinearOperator, as_operator
from theodolite.results import Cost, Outcome, Result, ResultMapping, Row

Which = Literal["largest", "smallest", "magnitude"]
_WHICH = ("largest", "smallest", "magnitude")

#: Memory the solver may use for its basis, in bytes; smaller bases restart more often.
BASIS_BYTES = 2 * 2**30


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Eigenpairs(Result):
    """Eigenvalues with orthonormal eigenvectors and their true residuals `‖Av − λv‖`.

    `values` descend (by magnitude for `which="magnitude"`); `vectors` is (n, k). `unresolved` flags pairs with
    `|λ| < tol·scale`, which cannot be told from zero at this tolerance; `scale` is the largest |λ| seen.
    `converged` says that all residuals are below `tol` and that no eigenvalue, no copy of one, was overlooked: `miss_probability`
    bounds the chance of that, and is at most 0.001 then. A warm start that was trusted (see `verify`) has not converged: its
    outcome is `Outcome.TRUSTED`. `nearby_values` and `nearby_vectors` are rough pairs beyond the wanted
    ones, seen on the way; they are not converged and serve only to make a warm start cheaper.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    matvecs: int
    which: str
    tol: float
    scale: float
    miss_probability: float
    nearby_values: Tensor
    nearby_vectors: Tensor

    @property
    def unresolved(self) -> Tensor:
        """Which values are too small to be told from zero at this tolerance."""
        return self.values.abs() < self.tol * self.scale

    def most_extreme(self, k: int) -> Eigenpairs:
        """The k outermost of the pairs, as verified as they all are: a start for a smaller solve.

        >>> import torch
        >>> top_eigenpairs(torch.diag(torch.tensor([5.0, 3.0, 1.0]).double()), k=2).most_extreme(1).values.round().tolist()
        [5.0]
        """
        k = up_to("k", k, len(self.values), of="pairs")
        part = slice(-k, None) if self.which == "smallest" else slice(k)
        return replace(self, values=self.values[part], vectors=self.vectors[:, part], residuals=self.residuals[part])

    def rows(self) -> list[Row]:
        unresolved = self.unresolved
        return [
            {
                "index": i,
                "eigenvalue": float(self.values[i]),
                "residual": float(self.residuals[i]),
                "unresolved": bool(unresolved[i]),
                "miss_probability": self.miss_probability,
                "converged": self.converged,
                "which": self.which,
                "seed": self.seed,
            }
            for i in range(len(self.values))
        ]

    def sentence(self) -> str:
        shown = ", ".join(f"{float(v):.4g}" for v in self.values[:5])
        more = ", ..." if len(self.values) > 5 else ""
        worst = float(self.residuals.max()) / self.scale if self.scale else 0.0
        state = "converged" if self.converged else f"not converged ({self.outcome.value})"
        unresolved = int(self.unresolved.sum())
        flag = f"; {unresolved} below the resolution {self.tol:g}·{self.scale:.3g}" if unresolved else ""
        return (
            f"{len(self.values)} {self.which} eigenvalues: {shown}{more}; largest relative residual {worst:.1e}, "
            f"{self.matvecs} products, {state}{flag}."
        )


class _Options(TypedDict, total=False):
    which: Which
    tol: float
    start: Any
    max_matvecs: int | None
    verify: Literal["auto", "full"]
    seed: int
    progress: bool | None


@overload
def top_eigenpairs(op: Mapping[str, LinearOperator], k: int = ..., **options: Unpack[_Options]) -> ResultMapping: ...
@overload
def top_eigenpairs(op: Any, k: int = ..., **options: Unpack[_Options]) -> Eigenpairs: ...
def top_eigenpairs(
    op: Any,
    k: int = 10,
    *,
    which: Which = "largest",
    tol: float = 1e-3,
    start: Any = None,
    max_matvecs: int | None = None,
    verify: Literal["auto", "full"] = "auto",
    seed: int = 0,
    progress: bool | None = None,
) -> Eigenpairs | ResultMapping:
    """The k extreme eigenpairs of a symmetric operator.

    Args:
        op: a `LinearOperator`, tensor, SciPy or curvlinops operator; or a mapping of them (such as `layer_hessians`), which is
            solved in lockstep, k capped at the size of each block.
        which: `"largest"` or `"smallest"` (algebraic), or `"magnitude"`.
        tol: a pair is done when `‖Av − λv‖ <= tol · max|λ|` over all Ritz values seen; above 0 and below 1.
        start: an earlier `Eigenpairs`, or columns (n, j), near the wanted eigenvectors. The former needs fewer products: it was
            verified, and it also knows the neighbouring eigenvectors. For a mapping, a mapping.
        max_matvecs: the budget in products; None means `500 + 100 k`.
        verify: `"auto"` certifies the result against missed copies of eigenvalues with error chance 1e-3, but trusts a warm start
            (a converged `Eigenpairs` of the same end and at least this accuracy that is nearly right here too) after a short look
            around: a value that has risen from nowhere since may then be missed, so unless the look was certificate enough the
            outcome is `TRUSTED` and `converged` is False. Such a result is no verified start: the next solve from it certifies.
            `"full"` certifies always; so are columns of unknown origin.
        seed: of the random start and the verification.
        progress: show a bar; None shows it on a terminal only.

    Returns:
        `Eigenpairs`: values, vectors and the residual of each; of a mapping, one by name.

    >>> import torch
    >>> pairs = top_eigenpairs(torch.diag(torch.tensor([5.0, 3.0, 3.0, 1.0, -4.0]).double()), k=3)
    >>> [round(float(v), 6) for v in pairs.values], pairs.converged
    ([5.0, 3.0, 3.0], True)
    """
    k, seed, tol = integer("k", k, least=1), random_seed(seed), fraction("tol", tol)
    max_matvecs = optional_integer("max_matvecs", max_matvecs, least=1)
    choice("which", which, _WHICH)
    either("verify", verify, ("auto", "full"))
    settings = _Settings(k, which, tol, max_matvecs, verify == "full", seed)
    if not isinstance(op, Mapping):
        op = as_operator(op, name="op")
        if k > op.shape[0]:
            raise ValueError(f"k must be at most the size of the operator, {op.shape[0]}. Got {k}.")
    starts = _starts(op, start) if isinstance(op, Mapping) else {"": start}
    return solve(
        op,
        "eigenpairs",
        lambda name, operator: _steps(operator, settings, starts.get(name)),
        lambda _, solution, cost: _result(solution, settings, cost),
        progress=progress,
        held=lambda solution: solution.basis_bytes,
    )


@dataclass(frozen=True)
class _Settings:
    k: int
    which: Which
    tol: float
    max_matvecs: int | None
    verify_fully: bool
    seed: int


def _starts(ops: Mapping[str, Any], start: Any) -> Mapping[str, Any]:
    if start is None:
        return {}
    if not isinstance(start, Mapping):
        raise ValueError(f"For a mapping of operators start must be a mapping too. Got {type(start).__name__}.")
    unknown = [name for name in start if name not in ops]
    if unknown:
        raise ValueError(f"start names {unknown[0]!r}, which is none of the operators: {', '.join(ops)}.")
    return start


def _steps(op: LinearOperator, settings: _Settings, start: Any) -> Generator[Tensor, Tensor, Solution]:
    """The solver's generator; the smallest eigenvalues are the largest of −A."""
    if not op.symmetric:
        raise ValueError(f"top_eigenpairs needs a symmetric operator. Got {op!r}.")
    n = op.shape[0]
    k = min(settings.k, n)
    sign = -1.0 if settings.which == "smallest" else 1.0
    known = start if isinstance(start, Eigenpairs) else None
    first = _start_block(op, k, start)
    solver = EigenSolver(
        n,
        k,
        tol=settings.tol,
        by_magnitude=settings.which == "magnitude",
        start=first,
        neighbours=_neighbours(known, sign),
        max_matvecs=settings.max_matvecs or 500 + 100 * k,
        max_basis=_basis_size(n, k, op.dtype),
        claimed=_claimed(known, first, settings, sign),
        dtype=op.dtype,
        device=op.device,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    steps = solver.steps()
    block = next(steps)
    while True:
        image = yield block
        try:
            block = steps.send(image if sign > 0 else -image)
        except StopIteration as stop:
            solution: Solution = stop.value
            return solution


def _basis_size(n: int, k: int, dtype: torch.dtype) -> int:
    room = BASIS_BYTES // max(1, n * (8 + dtype.itemsize))
    return min(n, max(k + 4, min(4 * k + 60, room)))


def _start_block(op: LinearOperator, k: int, start: Any) -> Tensor | None:
    if start is None:
        return op.suggest_start(k)
    block = start.vectors if isinstance(start, Eigenpairs) else start
    if not hasattr(block, "__array__") or getattr(block, "is_meta", False):
        raise ValueError(f"start must be a tensor or array (n, j) or an Eigenpairs. Got {type(start).__name__}.")
    block = torch.as_tensor(block)
    block = block[:, None] if block.ndim == 1 else block
    if block.ndim != 2 or block.shape[0] != op.shape[0] or block.shape[1] < 1:
        raise ValueError(f"start must have {op.shape[0]} rows and at least one column. Got shape {tuple(block.shape)}.")
    if block.is_complex():
        raise ValueError(f"start must be real: eigenvectors of a symmetric operator are. Got {block.dtype}; pass its .real.")
    if not bool(torch.isfinite(block).all()):
        raise ValueError("start holds NaN or inf.")
    return block


def _claimed(known: Eigenpairs | None, block: Tensor | None, settings: _Settings, sign: float) -> Tensor | None:
    """The values of a start that was verified for what is wanted now; columns of unknown origin may lack a copy of one."""
    if known is None or block is None or settings.verify_fully or not known.converged:
        return None
    alike = known.which == settings.which and known.tol <= settings.tol
    return sign * known.values[: block.shape[1]] if alike else None


def _neighbours(known: Eigenpairs | None, sign: float) -> Neighbours | None:
    if known is None or not known.nearby_values.numel():
        return None
    return Neighbours(sign * known.nearby_values, known.nearby_vectors)


def _result(solution: Solution, settings: _Settings, cost: Cost) -> Eigenpairs:
    values, vectors, residuals = solution.values, solution.vectors, solution.residuals
    nearby = solution.neighbours.values
    if settings.which == "smallest":
        nearby = -nearby
        values, vectors, residuals = (-values).flip(0), vectors.flip(1), residuals.flip(0)
    return Eigenpairs(
        values=values,
        vectors=vectors,
        residuals=residuals,
        converged=solution.outcome is Outcome.CONVERGED,
        matvecs=solution.matvecs,
        which=settings.which,
        tol=settings.tol,
        scale=solution.scale,
        miss_probability=solution.miss_probability,
        nearby_values=nearby,
        nearby_vectors=solution.neighbours.vectors,
        outcome=solution.outcome,
        seed=settings.seed,
        cost=cost,
    )
