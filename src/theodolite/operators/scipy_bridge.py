"""Operators of other libraries in, ours out. The only place here that meets NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.arguments import about
from theodolite.operators.algebra import DenseOperator
from theodolite.operators.base import LinearOperator
from theodolite.results import Cost

_TORCH_DTYPE = {np.dtype("float32"): torch.float32, np.dtype("float64"): torch.float64}
_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


def to_scipy(op: LinearOperator) -> Any:
    """A `scipy.sparse.linalg.LinearOperator` with the same products."""
    import scipy.sparse.linalg

    def through_torch(product: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            tensor = torch.as_tensor(np.ascontiguousarray(x), dtype=op.dtype, device=op.device)
            return np.asarray(product(tensor).cpu())

        return call

    forward, transposed = through_torch(op.__matmul__), through_torch(op.rmatmul)
    return scipy.sparse.linalg.LinearOperator(
        shape=op.shape,
        dtype=np.dtype(_NUMPY_DTYPE[op.dtype]),
        matvec=forward,
        matmat=forward,
        rmatvec=transposed,
        rmatmat=transposed,
    )


class ForeignOperator(LinearOperator):
    """Products made by an object of another library, through NumPy or through torch."""

    def __init__(self, source: Any, *, symmetric: bool) -> None:
        rows, columns = (int(s) for s in source.shape)
        self.source = source
        given = getattr(source, "dtype", None)
        self.speaks_torch = isinstance(given, torch.dtype)
        dtype = given if isinstance(given, torch.dtype) else _TORCH_DTYPE.get(_real_dtype(given), torch.float64)
        super().__init__((rows, columns), dtype=dtype, device=getattr(source, "device", "cpu"), symmetric=symmetric)

    def _matmat(self, x: Tensor) -> Tensor:
        return self._call(self.source, x)

    def _rmatmat(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return self._matmat(x)
        return self._call(self.source.adjoint() if self.speaks_torch else self.source.T, x)

    def _call(self, source: Any, x: Tensor) -> Tensor:
        if self.speaks_torch:
            return torch.as_tensor(source @ x)
        return torch.as_tensor(np.asarray(source @ x.cpu().numpy()), dtype=self.dtype, device=self.device)

    def cost(self) -> Cost:
        return Cost(route=f"{type(self.source).__module__.split('.')[0]} operator")


def _real_dtype(given: Any) -> np.dtype:
    """The NumPy dtype of a source, where it is one of real numbers; what states none is taken for float64."""
    found = np.dtype("float64" if given is None else given)
    if found.kind not in "fiub":
        raise ValueError(f"Only real operators are accepted: floats, integers or booleans. Got dtype {found}.")
    return found


def as_operator(source: Any, *, symmetric: bool | None = None, name: str = "source") -> LinearOperator:
    """Accept a `LinearOperator`, tensor, array, SciPy sparse matrix or operator, or curvlinops operator.

    Integers and booleans become float64, half precision is widened.

    `symmetric` says what the matrix is where it cannot be seen; a square operator of another library is
    taken as symmetric and probed, since that is what eigen-solvers need. `name` is the argument that errors speak of.
    """
    with about(name):
        return source if isinstance(source, LinearOperator) else _as_operator(source, symmetric)


def _as_operator(source: Any, symmetric: bool | None) -> LinearOperator:
    if isinstance(source, Tensor):
        return DenseOperator(source, symmetric=symmetric)
    if isinstance(source, np.ndarray):
        known = source if _real_dtype(source.dtype) in _TORCH_DTYPE else source.astype(np.float64)
        return DenseOperator(torch.as_tensor(known), symmetric=symmetric)
    if hasattr(source, "shape") and hasattr(source, "__matmul__"):
        square = source.shape[0] == source.shape[1]
        return ForeignOperator(source, symmetric=square if symmetric is None else symmetric)
    raise TypeError(
        "an operator must be a theodolite LinearOperator, a tensor, a NumPy array, a SciPy sparse matrix or LinearOperator, "
        f"or a curvlinops operator. Got {type(source).__name__}."
    )
