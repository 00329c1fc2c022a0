"""The Hessian of a problem's objective: by double backward, or in closed form for a plain stack of linear layers."""

from __future__ import annotations

from torch import Tensor

from theodolite.operators.curvature import BlockRoute, CurvatureOperator
from theodolite.operators.graphs import Keep, backward
from theodolite.operators.tangent_stack import StackPass, TangentStack
from theodolite.problem import Batch, Problem, join_like, split_like

Gradients = tuple[Tensor | None, ...]


class HessianOperator(CurvatureOperator[Gradients | StackPass]):
    """`H = ∇² Σ_b share_b loss_b` on the flat parameters. Made by `theodolite.hessian`."""

    def __init__(
        self,
        problem: Problem,
        *,
        keep: Keep = "auto",
        memory_budget: int | None = None,
        batched: bool | None = None,
        closed_form: bool = True,
    ) -> None:
        size = getattr(problem, "size", 0)
        super().__init__(problem, (size, size), symmetric=True, keep=keep, memory_budget=memory_budget, batched=batched)
        self.batched, self.closed_form = batched, closed_form
        self._stack = TangentStack.of(problem) if closed_form else None
        if self._stack is not None and batched is None:
            self.block_route.batched = True  # nothing is traced, so there is no batching rule to prove

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Gradients | StackPass:
        if self._stack is not None:
            self.problem.evaluate(tensors, batch, index)  # for its checks
            known = self._stack.run(self.problem, batch)
            if known is not None:
                return known
            self._stack, self.block_route = None, BlockRoute(self.problem, batched=self.batched)  # no matrix of rows
        return self.trace(leaves, tensors, batch, index)

    def trace(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Gradients:
        """The gradient of one batch with its graph."""
        loss = self.problem.evaluate(tensors, batch, index).loss
        return self.problem.gradients_of(loss, leaves, batch, index, create_graph=True)

    def roots(self, graph: Gradients | StackPass) -> list[Tensor]:
        return graph.tensors() if isinstance(graph, StackPass) else [g for g in graph if g is not None]

    def _matmat(self, x: Tensor) -> Tensor:
        return self._summed(x, self._single, self._block)

    def _single(self, graph: Gradients | StackPass, v: Tensor) -> Tensor:
        return self._block(graph, v[None])[0] if isinstance(graph, StackPass) else self._differentiate(graph, v)

    def _block(self, graph: Gradients | StackPass, rows: Tensor) -> Tensor:
        if not isinstance(graph, StackPass):
            return self._differentiate(graph, rows, len(rows))
        assert self._stack is not None
        return self._stack.product(graph, rows)

    def _differentiate(self, gradients: Gradients, v: Tensor, *rows: int) -> Tensor:
        leaves = self.graphs.leaves
        return join_like(backward(gradients, leaves, split_like(v, leaves), batched=bool(rows)), leaves, *rows)

    def on(self, problem: Problem) -> HessianOperator:
        return HessianOperator(problem, keep="never", batched=False, closed_form=self.closed_form)

    def _kind(self) -> str:
        return "closed form of a linear stack" if self._stack is not None else "double backward"


def hessian(
    problem: Problem,
    *,
    keep: Keep = "auto",
    memory_budget: int | None = None,
    batched: bool | None = None,
    closed_form: bool = True,
) -> HessianOperator:
    """The exact Hessian of the objective as an operator on the flat parameters.

    Products are double backward on a gradient graph that is kept alive between products while it fits in
    `memory_budget` bytes (default: half of what is free) and rebuilt otherwise; `keep="always"` or `"never"`
    forces the choice, and `op.cost().route` tells it. `batched` forces blocks of vectors through the graph at
    once or one by one. A Sequential of Linear layers and elementwise activations needs no graph: its products are
    written down in closed form, which is quicker; `closed_form=False` forces double backward there too.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))
    >>> hessian(problem).to_dense()                       # 2 XᵀX / n
    tensor([[1., 0.],
            [0., 9.]], dtype=torch.float64)
    """
    return HessianOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched, closed_form=closed_form)
