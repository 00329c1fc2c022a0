"""L2: matrices known by their action."""

from theodolite._names import imported
from theodolite.operators.algebra import CongruentOperator as CongruentOperator
from theodolite.operators.algebra import DenseOperator as DenseOperator
from theodolite.operators.algebra import DiagonalOperator as DiagonalOperator
from theodolite.operators.algebra import IdentityOperator as IdentityOperator
from theodolite.operators.algebra import KroneckerOperator as KroneckerOperator
from theodolite.operators.algebra import ProductOperator as ProductOperator
from theodolite.operators.algebra import congruent as congruent
from theodolite.operators.base import LinearOperator as LinearOperator
from theodolite.operators.gauss_newton import GaussNewtonOperator as GaussNewtonOperator
from theodolite.operators.gauss_newton import JacobianOperator as JacobianOperator
from theodolite.operators.gauss_newton import gauss_newton as gauss_newton
from theodolite.operators.gauss_newton import jacobian as jacobian
from theodolite.operators.hessian import HessianOperator as HessianOperator
from theodolite.operators.hessian import hessian as hessian
from theodolite.operators.kronecker import KroneckerEigenpairs as KroneckerEigenpairs
from theodolite.operators.kronecker import KroneckerFactors as KroneckerFactors
from theodolite.operators.kronecker import kronecker_factors as kronecker_factors
from theodolite.operators.layer_hessians import LayerHessians as LayerHessians
from theodolite.operators.layer_hessians import layer_hessians as layer_hessians
from theodolite.operators.scipy_bridge import as_operator as as_operator
from theodolite.operators.tangent_kernels import TangentKernelOperator as TangentKernelOperator
from theodolite.operators.tangent_kernels import tangent_kernel as tangent_kernel
from theodolite.operators.tangent_kernels import tangent_kernel_operator as tangent_kernel_operator

__all__ = sorted(imported(__file__))
