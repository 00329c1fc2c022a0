"""The Jacobian of all outputs with respect to the flat parameters, never formed."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.operators.autograd.graphs import Keep
from theodolite.operators.autograd.operator import AutogradOperator
from theodolite.operators.base import rows_of
from theodolite.operators.gauss_newton import OutputGraph, output_graph
from theodolite.problem import Batch, Problem, join_like, split_like


class JacobianOperator(AutogradOperator[OutputGraph]):
    """`J` of shape (outputs of all samples, parameters), sample-major. Made by `theodolite.jacobian`."""

    def __init__(
        self, problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
    ) -> None:
        problem.refuse_batch_coupling("The Jacobian")
        self.counts = output_counts(problem)
        super().__init__(
            problem, (sum(self.counts), problem.size), symmetric=False, keep=keep, memory_budget=memory_budget, batched=batched
        )

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> OutputGraph:
        return output_graph(leaves, self.problem.evaluate(tensors, batch, index).output, None)

    def roots(self, graph: OutputGraph) -> list[Tensor]:
        return [graph.output, *(g for g in graph.pulled if g is not None)]

    def _matmat(self, x: Tensor) -> Tensor:
        self.snapshot.check()
        leaves, rows = self.graphs.leaves, rows_of(x)
        parts = []
        for _, graph in self.graphs:

            def single(v: Tensor, graph: OutputGraph = graph) -> Tensor:
                return graph.push(split_like(v, leaves), batched=False).reshape(-1)

            def block(vs: Tensor, graph: OutputGraph = graph) -> Tensor:
                return graph.push(split_like(vs, leaves), batched=True).reshape(len(vs), -1)

            parts.append(self.block_route.apply(single, block, rows))
        return torch.cat(parts, dim=1).T

    def _rmatmat(self, x: Tensor) -> Tensor:
        self.snapshot.check()
        leaves = self.graphs.leaves
        total = torch.zeros(x.shape[1], self.shape[1], dtype=torch.float64, device=self.device)
        pieces = rows_of(x).split(self.counts, dim=1)
        for (_, graph), rows in zip(self.graphs, pieces, strict=True):

            def single(u: Tensor, graph: OutputGraph = graph) -> Tensor:
                return join_like(graph.pull(leaves, u.view_as(graph.output), batched=False), leaves)

            def block(us: Tensor, graph: OutputGraph = graph) -> Tensor:
                return join_like(graph.pull(leaves, us.reshape(-1, *graph.output.shape), batched=True), leaves, len(us))

            total += self.block_route.apply(single, block, rows)
        return total.T.to(self.dtype)

    def _kind(self) -> str:
        return "Jacobian products"


def output_counts(problem: Problem) -> list[int]:
    """Number of output values of each batch."""
    with problem.session(second=False), torch.no_grad():
        tensors = problem.tensors(problem.leaves(grad=False))
        return [problem.evaluate(tensors, batch, i).output.numel() for i, _, batch in problem.iterate()]


def jacobian(
    problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
) -> JacobianOperator:
    """The Jacobian of the model's outputs, rows sample-major, columns the flat parameters; `.T` pulls back.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    >>> jacobian(Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))).to_dense()
    tensor([[1., 2.],
            [3., 4.]], dtype=torch.float64)
    """
    return JacobianOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched)
