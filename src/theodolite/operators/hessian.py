"""The Hessian of a problem's objective, by double backward."""

from __future__ import annotations

from torch import Tensor

from theodolite.operators.curvature import CurvatureOperator
from theodolite.operators.graphs import Keep, backward
from theodolite.problem import Batch, Problem, join_like, split_like

Gradients = tuple[Tensor | None, ...]


class HessianOperator(CurvatureOperator[Gradients]):
    """`H = ∇² Σ_b share_b loss_b` on the flat parameters. Made by `theodolite.hessian`."""

    def __init__(
        self, problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
    ) -> None:
        size = getattr(problem, "size", 0)
        super().__init__(problem, (size, size), symmetric=True, keep=keep, memory_budget=memory_budget, batched=batched)

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Gradients:
        loss = self.problem.evaluate(tensors, batch, index).loss
        return self.problem.gradients_of(loss, leaves, batch, index, create_graph=True)

    def roots(self, graph: Gradients) -> list[Tensor]:
        return [g for g in graph if g is not None]

    def _matmat(self, x: Tensor) -> Tensor:
        leaves = self.graphs.leaves

        def single(graph: Gradients, v: Tensor) -> Tensor:
            return join_like(backward(graph, leaves, split_like(v, leaves), batched=False), leaves)

        def block(graph: Gradients, rows: Tensor) -> Tensor:
            return join_like(backward(graph, leaves, split_like(rows, leaves), batched=True), leaves, len(rows))

        return self._summed(x, single, block)

    def on(self, problem: Problem) -> HessianOperator:
        return HessianOperator(problem, keep="never", batched=False)


def hessian(
    problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
) -> HessianOperator:
    """The exact Hessian of the objective as an operator on the flat parameters.

    Products are double backward on a gradient graph that is kept alive between products while it fits in
    `memory_budget` bytes (default: half of what is free) and rebuilt otherwise; `keep="always"` or `"never"`
    forces the choice, and `op.cost().route` tells it. `batched` forces blocks of vectors through the graph at
    once or one by one.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))
    >>> hessian(problem).to_dense()                       # 2 XᵀX / n
    tensor([[1., 0.],
            [0., 9.]], dtype=torch.float64)
    """
    return HessianOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched)
