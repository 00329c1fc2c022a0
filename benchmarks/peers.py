"""How each library is called for the same work: thin adapters, imported when used.

An operator adapter takes a `Task` and returns the library's own object; a solver takes a `Task` and returns a
`Solved`, with its set-up inside, and counts the products it makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import theodolite as th
from networks import Task
from truth import flat, split

#: Products that our operators spend on the symmetry probe before the first one.
SYMMETRY_PROBE = 3


@dataclass(frozen=True)
class Solved:
    """Eigenvalues as they came, eigenvectors in columns, products made, and what the library said of itself.

    `which` tells what was found: the largest ("LA") or, by power iteration, the largest in magnitude ("LM").
    """

    values: Tensor
    vectors: Tensor
    products: int
    note: str = ""
    which: str = "LA"


def problem(task: Task) -> th.Problem:
    return th.Problem(task.model, task.loss, task.batches)


# Operators


def curvlinops_hessian(task: Task, **options: Any) -> Any:
    from curvlinops import HessianLinearOperator

    options.setdefault("params", task.parameters)
    return HessianLinearOperator(task.model, task.loss, data=task.batches, **options)


def curvlinops_ggn(task: Task) -> Any:
    from curvlinops import GGNLinearOperator

    return GGNLinearOperator(task.model, task.loss, task.parameters, task.batches)


def eigenthings_hessian(task: Task, *, only: str | None = None, method: str = "autograd") -> Any:
    import hessian_eigenthings as he

    chosen = None if only is None else he.match_names(only)
    return he.HessianOperator(task.model, task.batches, he.supervised_loss(task.loss), param_filter=chosen, method=method)


def eigenthings_ggn(task: Task) -> Any:
    import hessian_eigenthings as he

    return he.GGNOperator(task.model, task.batches, he.supervised_forward, he.supervised_loss_of_output(task.loss))


def eigenthings_matrix(matrix: Tensor) -> Any:
    import hessian_eigenthings as he

    return he.LambdaOperator(lambda v: matrix @ v, size=len(matrix), dtype=matrix.dtype)


def pyhessian_object(task: Task) -> Any:
    import pyhessian

    data = {"data": task.batches[0]} if len(task.batches) == 1 else {"dataloader": task.batches}
    return pyhessian.hessian(task.model, task.loss, cuda=False, **data)


# One Hessian product: each takes a task and a vector, sets up, and returns the work to be timed


def ours_product(task: Task, v: Tensor, **options: Any) -> Callable[[], Tensor]:
    operator = th.hessian(problem(task), **options)
    return lambda: operator @ v


def curvlinops_product(task: Task, v: Tensor) -> Callable[[], Tensor]:
    operator = curvlinops_hessian(task, check_deterministic=False)
    return lambda: operator @ v


def eigenthings_product(task: Task, v: Tensor) -> Callable[[], Tensor]:
    operator = eigenthings_hessian(task)
    return lambda: operator.matvec(v)


def eigenthings_difference(task: Task, v: Tensor) -> Callable[[], Tensor]:
    operator = eigenthings_hessian(task, method="finite_difference")
    # Its step is made for unit vectors.
    unit = v / v.norm()
    return lambda: operator.matvec(unit) * v.norm()


def pyhessian_product(task: Task, v: Tensor) -> Callable[[], Tensor]:
    from pyhessian.utils import hessian_vector_product

    kept = pyhessian_object(task)
    parts = split(v, kept.params)
    return lambda: flat(hessian_vector_product(kept.gradsH, kept.params, parts), kept.params)


def fresh_double_backward(task: Task, v: Tensor) -> Callable[[], Tensor]:
    ((inputs, targets),) = task.batches
    parameters, parts = task.parameters, split(v, task.parameters)

    def product() -> Tensor:
        loss = task.loss(task.model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return flat(torch.autograd.grad(gradients, parameters, parts), parameters)

    return product


# Eigenpairs


def solve_ours(task: Task, k: int, *, tol: float = 1e-3, matrix: str = "hessian") -> Solved:
    operator = th.hessian(problem(task)) if matrix == "hessian" else th.gauss_newton(problem(task))
    pairs = th.top_eigenpairs(operator, k, tol=tol)
    note = "converged, verified" if pairs.converged else f"NOT converged: {pairs.outcome.name}"
    return Solved(pairs.values, pairs.vectors, pairs.matvecs + SYMMETRY_PROBE, note)


def eigsh(operator: Any, k: int, *, tol: float, seed: int = 0, which: str = "LA") -> Solved:
    """SciPy's ARPACK on any operator it accepts, with its products counted."""
    from scipy.sparse.linalg import LinearOperator, aslinearoperator
    from scipy.sparse.linalg import eigsh as scipy_eigsh

    inner, count = aslinearoperator(operator), 0

    def matvec(x: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return inner.matvec(x)

    start = np.random.default_rng(seed).standard_normal(inner.shape[0])
    counted = LinearOperator(inner.shape, matvec=matvec, dtype=inner.dtype)
    values, vectors = scipy_eigsh(counted, k=k, which=which, tol=tol, v0=start)
    return Solved(torch.as_tensor(values.copy()).double(), torch.as_tensor(vectors.copy()), count, which=which)


def solve_curvlinops(task: Task, k: int, *, tol: float = 1e-3, matrix: str = "hessian") -> Solved:
    operator = curvlinops_hessian(task) if matrix == "hessian" else curvlinops_ggn(task)
    return eigsh(operator.to_scipy(), k, tol=tol)


def lanczos(operator: Any, k: int, max_iter: int | None, seed: int = 0) -> Solved:
    """hessian-eigenthings' Lanczos on one of its operators."""
    import hessian_eigenthings as he

    result = he.lanczos(operator, k=k, max_iter=max_iter, which="LA", seed=seed)
    state = f"{int(result.converged.sum())} of {k} called converged"
    return Solved(result.eigenvalues, result.eigenvectors.T, result.iterations, state)


def solve_eigenthings(task: Task, k: int, *, max_iter: int | None = None, matrix: str = "hessian") -> Solved:
    operator = eigenthings_hessian(task) if matrix == "hessian" else eigenthings_ggn(task)
    return lanczos(operator, k, max_iter)


def solve_eigenthings_power(task: Task, k: int) -> Solved:
    import hessian_eigenthings as he

    result = he.deflated_power_iteration(eigenthings_hessian(task), k=k, seed=0)
    note = f"largest in magnitude, {int(result.converged.sum())} of {k} called converged"
    return Solved(result.eigenvalues, result.eigenvectors.T, result.iterations, note, which="LM")


def solve_pyhessian(task: Task, k: int, *, max_iter: int = 100, tol: float = 1e-3) -> Solved:
    torch.manual_seed(0)
    with default_dtype(task), counted_pyhessian() as count:
        kept = pyhessian_object(task)
        values, vectors = kept.eigenvalues(maxIter=max_iter, tol=tol, top_n=k)
    columns = torch.stack([flat(v, kept.params) for v in vectors], dim=1)
    return Solved(torch.tensor(values, dtype=torch.float64), columns, len(count), "largest in magnitude", which="LM")


@contextmanager
def default_dtype(task: Task) -> Iterator[None]:
    """PyHessian draws its vectors in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(task.parameters[0].dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def counted_pyhessian() -> Iterator[list[None]]:
    """A list that grows by one with each product PyHessian makes, on one batch or on many."""
    import pyhessian

    module, kind = sys.modules["pyhessian.hessian"], pyhessian.hessian
    on_batch, on_loader = module.hessian_vector_product, kind.dataloader_hv_product
    made: list[None] = []

    def batch_product(*args: Any) -> Any:
        made.append(None)
        return on_batch(*args)

    def loader_product(*args: Any) -> Any:
        made.append(None)
        return on_loader(*args)

    with (
        patch.object(module, "hessian_vector_product", batch_product),
        patch.object(kind, "dataloader_hv_product", loader_product),
    ):
        yield made


@contextmanager
def counted_curvlinops(operator: Any) -> Iterator[list[int]]:
    """A list of the column counts of each product of a curvlinops operator."""
    inner = operator._matmat_batch
    made: list[int] = []

    def product(x: Any, y: Any, columns: list[Tensor]) -> Any:
        made.append(columns[0].shape[-1])
        return inner(x, y, columns)

    with patch.object(operator, "_matmat_batch", product):
        yield made
