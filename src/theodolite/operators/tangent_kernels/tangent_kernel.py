"""The tangent kernel `J Jᵀ` of a network at its current weights: which outputs move together in training."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import about, checked, instance, one_or_each, whole
from theodolite.errors import BatchCoupledError
from theodolite.operators.autograd.graphs import Keep, available_bytes
from theodolite.operators.base import LinearOperator
from theodolite.operators.gauss_newton import JacobianOperator, jacobian
from theodolite.operators.tangent_kernels.blocks import Block, BlockMaker, not_of_samples
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_model_or_problem, of_dimensions, some_inputs
from theodolite.problem.tensors import bytes_of
from theodolite.results import Cost

#: Samples whose gradients are made at once.
SAMPLES = 256
#: Samples of a bare module's inputs that are evaluated twice, to see whether the model repeats itself.
CHECKED = 8


@checked(
    model_or_problem=a_model_or_problem, inputs=some_inputs, other=some_inputs, outputs=one_or_each(whole), memory_budget=whole
)
def tangent_kernel(
    model_or_problem: nn.Module | Problem,
    inputs: Any = None,
    other: Any = None,
    *,
    outputs: Iterable[int] | int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """`K[(i, a), (k, b)] = ⟨∇f_a(x_i), ∇f_b(x_k)⟩` over the measured parameters, as an (n c) × (n' c) matrix, sample-major.

    Gradients are never written out where a layer makes that unnecessary: those of a linear layer are outer products, so
    its share of the kernel is the entry-wise product of two small Gram matrices. Each such form is checked against plain
    backward; what has none (recurrent layers, weights used twice) is treated sample by sample.

    Args:
        model_or_problem: a module (measured in eval mode, parameters that require grad) or a Problem (its mode and parameters).
        inputs: what the model is called with: a tensor, a tuple of arguments, a mapping; None means the problem's own.
        other: inputs for the columns; None means the same as for the rows.
        outputs: which outputs of a sample, counted in the flattened output; None means all.
        memory_budget: bytes for gradients, a quarter of what is free by default; where they do not fit, samples are taken in
            smaller blocks and gradients made again for each pair of blocks.

    Returns:
        The matrix, positive semi-definite where both sets are the same.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> tangent_kernel(model, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    problem = as_problem(model_or_problem, inputs)
    problem.refuse_batch_coupling("A tangent kernel")
    maker = BlockMaker(problem, outputs)
    whole = list(problem.data) if inputs is None else [problem.batch_of(inputs)]
    budget = available_bytes(problem.device) // 4 if memory_budget is None else memory_budget
    width = _block_size(maker, whole[0], budget)
    if other is not None:
        with about("other"):
            return _between(maker, _cut(whole, width), _cut([problem.batch_of(other, "other")], width), budget)
    return _symmetric(maker, _cut(whole, width), budget)


def _block_size(maker: BlockMaker, batch: Batch, budget: int) -> int:
    """Samples whose gradients fit twice into the budget; judged by one sample, unless even written out they would fit."""
    first, problem = maker.problem.placed(batch.part(slice(0, 1))), maker.problem
    with problem.session(second=False), torch.no_grad():
        try:
            outputs = problem.output(problem.tensors(problem.leaves(grad=False)), first, 0)
        except ValueError as error:
            if batch.size == 1:
                raise
            raise BatchCoupledError(not_of_samples(batch.size)) from error
    most = min(SAMPLES, batch.size) * outputs.numel() * (problem.size + bytes_of(first.args) // 4) * outputs.element_size()
    if 2 * most <= budget or batch.size == 1:
        return SAMPLES
    return max(1, min(SAMPLES, budget // (2 * max(1, maker.make(first, 0).bytes()))))


def _cut(whole: list[Batch], width: int) -> list[Batch]:
    """Batches of at most `width` samples."""
    return [
        batch.part(slice(start, start + width)) if batch.size > width else batch
        for batch in whole
        for start in range(0, batch.size, width)
    ]


def _between(maker: BlockMaker, rows: list[Batch], columns: list[Batch], budget: int) -> Tensor:
    store = _Store(maker, columns, budget)
    blocks = (maker.make(maker.problem.placed(batch), i) for i, batch in enumerate(rows))
    return torch.cat([torch.cat(store.grams(block), dim=1) for block in blocks])


def _symmetric(maker: BlockMaker, batches: list[Batch], budget: int) -> Tensor:
    store = _Store(maker, batches, budget)
    parts: list[list[Tensor]] = [[] for _ in batches]
    for i in range(len(batches)):
        parts[i] = [parts[j][i].T for j in range(i)] + store.grams(store.block(i), start=i)
    return torch.cat([torch.cat(row, dim=1) for row in parts])


class _Store:
    """Blocks of the columns, kept while they fit and made again where they do not."""

    def __init__(self, maker: BlockMaker, batches: list[Batch], budget: int) -> None:
        self.maker, self.batches, self.left = maker, batches, budget
        self._kept: dict[int, Block] = {}

    def block(self, i: int) -> Block:
        if i in self._kept:
            return self._kept[i]
        block = self.maker.make(self.maker.problem.placed(self.batches[i]), i)
        if block.bytes() <= self.left:
            self._kept[i] = block
            self.left -= block.bytes()
        return block

    def grams(self, block: Block, start: int = 0) -> list[Tensor]:
        """Inner products of a block with those of the columns from `start` on."""
        return [block.gram(self.block(i)) for i in range(start, len(self.batches))]


class TangentKernelOperator(LinearOperator):
    """`J Jᵀ` known by its products: one pull back and one push forward. Made by `theodolite.tangent_kernel_operator`.

    With `metric`, one positive number per parameter, it is `J diag(metric) Jᵀ`: the kernel of a preconditioned descent.
    """

    @checked(jacobian=instance(JacobianOperator), metric=of_dimensions(1))
    def __init__(self, jacobian: JacobianOperator, metric: Tensor | None = None) -> None:
        size = jacobian.shape[0]
        super().__init__((size, size), dtype=jacobian.dtype, device=jacobian.device, symmetric=True)
        self.jacobian = jacobian
        self.metric = None if metric is None else metric.to(jacobian.device, jacobian.dtype)[:, None]

    def _matmat(self, x: Tensor) -> Tensor:
        pulled = self.jacobian._rmatmat(x)
        return self.jacobian._matmat(pulled if self.metric is None else pulled * self.metric)

    def cost(self) -> Cost:
        return self.jacobian.cost()


@checked(model_or_problem=a_model_or_problem, inputs=some_inputs, memory_budget=whole)
def tangent_kernel_operator(
    model_or_problem: nn.Module | Problem,
    inputs: Any = None,
    *,
    metric: Tensor | None = None,
    keep: Keep = "auto",
    memory_budget: int | None = None,
) -> TangentKernelOperator:
    """The tangent kernel for many samples, never formed: each product costs about two gradients.

    `metric` (one positive number per parameter) gives `J diag(metric) Jᵀ`, the kernel of a preconditioned descent.

    Returns:
        A `TangentKernelOperator` (n c, n c).

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> op = tangent_kernel_operator(model, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    >>> op @ torch.tensor([1.0, 0.0]).double()
    tensor([ 5., 11.], dtype=torch.float64)
    """
    problem = as_problem(model_or_problem, inputs)
    if isinstance(model_or_problem, Problem) and inputs is not None:
        problem = _without_loss(problem.model, inputs, params=list(problem.names), mode=problem.mode)
    return TangentKernelOperator(jacobian(problem, keep=keep, memory_budget=memory_budget), metric)


def as_problem(model_or_problem: nn.Module | Problem, inputs: Any) -> Problem:
    """A problem as it is; a bare module on `inputs` in eval mode, with a loss that nobody looks at."""
    if isinstance(model_or_problem, Problem):
        return model_or_problem
    if inputs is None:
        raise ValueError("inputs is missing: a bare module needs the inputs at which its kernel is taken.")
    problem = _without_loss(model_or_problem, inputs, check=False)
    problem.with_batches([problem.few(CHECKED)]).check_repeatable()
    return problem


def _without_loss(model: nn.Module, inputs: Any, **options: Any) -> Problem:
    return Problem(model, _sum_of_outputs, [(inputs, torch.zeros(1))], batch_weight=attrgetter("size"), **options)


def _sum_of_outputs(output: Any, target: Any) -> Tensor:
    return output.sum()  # type: ignore[no-any-return]
