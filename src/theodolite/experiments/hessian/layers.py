"""The curvature of the layers of a network: Kronecker factors and eigenpairs, and how they become rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.operators import KroneckerFactors, kronecker_factors, layer_hessians
from theodolite.problem import Problem
from theodolite.results import Row

#: Residual of eigenvectors over the largest eigenvalue; those that are compared are up to a thousand times smaller than it.
TOLERANCE = 1e-5


class Layer(NamedTuple):
    """A layer of one model: its Kronecker factors and the top eigenpairs of its Hessian."""

    factors: KroneckerFactors
    pairs: Eigenpairs

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.factors.output), len(self.factors.input)


def layer_factors(problem: Problem, layer: str) -> KroneckerFactors:
    """The Kronecker factors of a layer."""
    found: KroneckerFactors = kronecker_factors(problem, [layer], sharing="expand")[layer]
    return found


def layer_pairs(problem: Problem, layers: Sequence[str], k: int, tol: float = TOLERANCE) -> Mapping[str, Eigenpairs]:
    """The k largest eigenpairs of the layers' blocks, k capped at their sizes; several in lockstep."""
    return top_eigenpairs(layer_hessians(problem, layers), k, tol=tol, seed=0, progress=False)


def layers_of(problem: Problem, layers: Sequence[str], k: int, tol: float = TOLERANCE) -> dict[str, Layer]:
    """The layers with their factors and k largest eigenpairs."""
    pairs = layer_pairs(problem, layers, k, tol)
    return {layer: Layer(layer_factors(problem, layer), pairs[layer]) for layer in layers}


def numbered(shared: Mapping[str, Any], index: str = "i", **columns: Tensor) -> Iterator[Row]:
    """Vectors of equal length as columns of rows that are counted from 1."""
    for i, values in enumerate(zip(*(column.tolist() for column in columns.values()), strict=True), start=1):
        yield {**shared, index: i, **dict(zip(columns, values, strict=True))}


def entries(shared: Mapping[str, Any], matrix: Tensor) -> Iterator[Row]:
    """The entries of a matrix, rows and columns counted from 1."""
    for i, line in enumerate(matrix, start=1):
        yield from numbered({**shared, "i": i}, "j", value=line)


#: Overlap is looked at up to so many outputs of the layer: far enough to see a peak at m and the decline behind it.
REACH = 1.5


def layer_of_each(problems: Sequence[Problem], layer: str, reach: float = REACH, tol: float = TOLERANCE) -> list[Layer]:
    """The same layer of several models, with `reach` times as many eigenpairs as it has outputs."""
    factors = [layer_factors(problem, layer) for problem in problems]
    k = round(reach * len(factors[0].output))
    return [Layer(f, layer_pairs(problem, [layer], k, tol)[layer]) for f, problem in zip(factors, problems, strict=True)]
