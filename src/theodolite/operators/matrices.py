"""The matrices by name: what `matrix=` (or `by=`) chooses wherever a function measures one of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from theodolite.arguments import choice
from theodolite.operators.base import LinearOperator
from theodolite.operators.gauss_newton import gauss_newton
from theodolite.operators.hessian import hessian
from theodolite.operators.tangent_kernels import tangent_kernel_operator
from theodolite.problem import Problem
from theodolite.text import quoted

MatrixName = Literal["hessian", "gauss_newton", "kernel"]

#: Those on the flat parameters, which have any algorithm in common.
ON_PARAMETERS: dict[str, Callable[[Problem], LinearOperator]] = {"hessian": hessian, "gauss_newton": gauss_newton}

#: All of them; the tangent kernel acts on the outputs of all samples.
MATRICES: dict[str, Callable[[Problem], LinearOperator]] = {**ON_PARAMETERS, "kernel": tangent_kernel_operator}


def matrix_name(by: str, matrix: str | None = None) -> MatrixName:
    """The name of the chosen matrix: `matrix` where it is given, `by` (its other name) else.

    >>> matrix_name("hessian"), matrix_name("hessian", "kernel")
    ('hessian', 'kernel')
    >>> matrix_name("hesian")
    Traceback (most recent call last):
    ValueError: by must be one of 'hessian', 'gauss_newton', 'kernel'. Got 'hesian'; did you mean 'hessian'?
    """
    choice(*(("by", by) if matrix is None else ("matrix", matrix)), MATRICES)
    return cast(MatrixName, by if matrix is None else matrix)


def matrix_name_or_none(by: str | None, matrix: str | None = None) -> MatrixName | None:
    """The same where None leaves the choice to the function."""
    chosen = by if matrix is None else matrix
    names = ("kernel", "gauss_newton", "hessian")
    choice("by" if matrix is None else "matrix", chosen, (*names, None), wanted=f"{quoted(names)} or None")
    return cast(MatrixName | None, chosen)
