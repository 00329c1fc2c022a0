"""The matrices by name: what `matrix=` (or `by=`) chooses wherever a function measures one of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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


def check_matrix_or_none(name: str | None) -> None:
    """Refuse what names no matrix, for functions that choose one themselves where they are given None.

    >>> check_matrix_or_none("fisher")
    Traceback (most recent call last):
    ValueError: by must be 'kernel', 'gauss_newton', 'hessian' or None. Got 'fisher'.
    """
    names = ("kernel", "gauss_newton", "hessian")
    choice("by", name, (*names, None), wanted=f"{quoted(names)} or None")
