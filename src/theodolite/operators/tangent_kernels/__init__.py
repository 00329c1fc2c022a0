"""The tangent kernel: inner products of per-sample gradients."""

from theodolite.operators.tangent_kernels.tangent_kernel import TangentKernelOperator as TangentKernelOperator
from theodolite.operators.tangent_kernels.tangent_kernel import as_problem as as_problem
from theodolite.operators.tangent_kernels.tangent_kernel import tangent_kernel as tangent_kernel
from theodolite.operators.tangent_kernels.tangent_kernel import tangent_kernel_operator as tangent_kernel_operator
