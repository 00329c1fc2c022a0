"""The tangent kernel: inner products of per-sample gradients."""

from theodolite.operators.tangent_kernels.tangent_kernel import (
    TangentKernelOperator,
    as_problem,
    tangent_kernel,
    tangent_kernel_operator,
)

__all__ = ["TangentKernelOperator", "as_problem", "tangent_kernel", "tangent_kernel_operator"]
