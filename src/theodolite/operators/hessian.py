"""The Hessian of a problem's objective: by double backward, or in closed form for a plain stack of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from theodolite.arguments import checked, optional, whole
from theodolite.operators.autograd.graphs import Keep, Keeping
from theodolite.operators.autograd.operator import CHUNK, AutogradOperator
from theodolite.operators.linear_stacks.products import StackPass
from theodolite.operators.linear_stacks.recognition import run_stack
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem

Gradients = tuple[Tensor | None, ...]


class HessianOperator(AutogradOperator[Gradients | StackPass]):
    """`H = ∇² Σ_b share_b loss_b` on the flat parameters. Made by `theodolite.hessian`."""

    @checked(problem=a_problem, memory_budget=optional(whole))
    def __init__(
        self, problem: Problem, *, batched: bool | None = None, closed_form: bool = True, **keeping: Unpack[Keeping]
    ) -> None:
        size = getattr(problem, "size", 0)
        super().__init__(problem, (size, size), symmetric=True, batched=batched, **keeping)
        self.batched, self.closed_form = batched, closed_form

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Gradients | StackPass:
        # What the closed form stores pays over several products only.
        run = run_stack(self.problem, tensors, batch, index) if self.closed_form and self.graphs.keeping else None
        return self.build_graph(leaves, tensors, batch, index) if run is None else StackPass.of(run)

    def build_graph(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Gradients:
        """The gradient of one batch with its graph."""
        loss = self.problem.evaluate(tensors, batch, index).loss
        return self.problem.gradients_of(loss, leaves, batch, index, create_graph=True)

    def roots(self, graph: Gradients | StackPass) -> list[Tensor]:
        return graph.tensors() if isinstance(graph, StackPass) else [g for g in graph if g is not None]

    def _check_derivatives(self) -> None:
        self.problem.check_products()

    def _matmat(self, x: Tensor) -> Tensor:
        return self._summed(x, self._batch_product)

    def _batch_product(self, graph: Gradients | StackPass, rows: Tensor) -> Tensor:
        if isinstance(graph, StackPass):
            parts = [graph.product(chunk) for chunk in rows.split(1 if self.batched is False else CHUNK)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.block_route.pull_back(graph, self.graphs.leaves, rows)

    def on(self, problem: Problem) -> HessianOperator:
        return HessianOperator(problem, batched=False, closed_form=self.closed_form)

    def _kind(self) -> str:
        return route_kind(self.graphs.kept, closed_form=self.closed_form and self.graphs.keeping)


def route_kind(kept: Sequence[object], *, closed_form: bool) -> str:
    """How products are made, from what is kept of the batches; `closed_form`: whether it is still to be tried."""
    closed = sum(not isinstance(graph, tuple) for graph in kept)
    if not closed:
        return "closed form or double backward" if closed_form and not kept else "double backward"
    return "closed form of a linear stack" + (", else double backward" if closed < len(kept) else "")


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

    Returns:
        A `HessianOperator` (p, p): `H @ v`, also for columns of vectors.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double()))
    >>> hessian(problem).to_dense()                       # 2 XᵀX / n
    tensor([[1., 0.],
            [0., 9.]], dtype=torch.float64)
    """
    return HessianOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched, closed_form=closed_form)
