"""L2: matrices known by their action."""

from theodolite.operators.algebra import (
    CongruentOperator,
    DenseOperator,
    DiagonalOperator,
    IdentityOperator,
    KroneckerOperator,
    ProductOperator,
    congruent,
)
from theodolite.operators.base import LinearOperator
from theodolite.operators.gauss_newton import GaussNewtonOperator, JacobianOperator, gauss_newton, jacobian
from theodolite.operators.hessian import HessianOperator, hessian
from theodolite.operators.kronecker import KroneckerEigenpairs, KroneckerFactors, kronecker_factors
from theodolite.operators.layer_hessians import LayerHessians, layer_hessians
from theodolite.operators.scipy_bridge import as_operator
from theodolite.operators.tangent_kernels import TangentKernelOperator, tangent_kernel, tangent_kernel_operator

__all__ = [
    "CongruentOperator",
    "DenseOperator",
    "DiagonalOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "IdentityOperator",
    "JacobianOperator",
    "KroneckerEigenpairs",
    "KroneckerFactors",
    "KroneckerOperator",
    "LayerHessians",
    "LinearOperator",
    "ProductOperator",
    "TangentKernelOperator",
    "as_operator",
    "congruent",
    "gauss_newton",
    "hessian",
    "jacobian",
    "kronecker_factors",
    "layer_hessians",
    "tangent_kernel",
    "tangent_kernel_operator",
]
