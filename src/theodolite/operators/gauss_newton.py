"""The Jacobian J of the outputs, and the generalised Gauss-Newton matrix `Jᵀ (∇²_z loss) J`, z the outputs; neither is formed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from theodolite.arguments import checked, whole
from theodolite.errors import OutputLossError
from theodolite.operators.autograd.graphs import Keep, backward
from theodolite.operators.autograd.operator import AutogradOperator
from theodolite.operators.base import rows_of
from theodolite.problem import Batch, Problem, join_like, split_like
from theodolite.problem.arguments import a_problem
from theodolite.problem.calling import Output


@dataclass(frozen=True)
class OutputGraph:
    """One batch: its output, `Jᵀu` as a function of u, and the loss gradient at the output with its graph."""

    measured: Output
    cotangent: Tensor
    pulled: tuple[Tensor | None, ...]
    loss_gradient: Tensor | None

    @property
    def output(self) -> Tensor:
        return self.measured.tensor

    def push(self, tangents: list[Tensor], *, batched: bool) -> Tensor:
        """J v: the derivative of `v · Jᵀu` with respect to u."""
        out = backward(self.pulled, [self.cotangent], tangents, batched=batched)[0]
        lead = tangents[0].shape[:1] if batched else ()
        return self.output.new_zeros(*lead, *self.output.shape) if out is None else out

    def pull(self, leaves: list[Tensor], u: Tensor, *, batched: bool) -> list[Tensor | None]:
        """Jᵀ u."""
        return backward([self.output], leaves, [u], batched=batched)

    def loss_curvature(self, t: Tensor, *, batched: bool) -> Tensor:
        """(∇²_z loss) t."""
        found = self.measured.join_moving(backward([self.loss_gradient], self.measured.moving, [t], batched=batched))
        return torch.zeros_like(t) if found is None else found


def output_graph(leaves: list[Tensor], measured: Output, loss: Tensor | None) -> OutputGraph:
    """Build the pieces from an evaluated batch; `loss=None` where only the Jacobian is wanted."""
    output = measured.tensor
    if not output.requires_grad:
        raise ValueError("The model's output does not depend on the measured parameters.")
    gradient = None if loss is None else output_gradient(loss, measured, "gauss_newton: the loss")
    cotangent = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, leaves, cotangent, create_graph=True, allow_unused=True)
    return OutputGraph(measured, cotangent, pulled, gradient)


def output_gradient(loss: Tensor, measured: Output, the_loss: str = "The loss") -> Tensor:
    """The loss gradient at the output, with its graph; `the_loss` begins the sentence that says that there is none."""
    if measured.entangled:
        raise OutputLossError(
            f"{the_loss} reads several outputs of which one is computed from another (the logits and what an auxiliary loss of "
            "the model's own is made of). Use theodolite.hessian, or pass the loss as a function of what the model returns."
        )
    found = torch.autograd.grad(loss, measured.moving, create_graph=True, allow_unused=True)
    gradient = measured.join_moving(found)
    if gradient is None:
        raise ValueError(
            f"{the_loss} reads none of the tensors that the model returns: it is computed from something else inside the model. "
            "Return that too, or use theodolite.hessian."
        )
    return gradient


def refuse_other_ways(who: str, leaves: list[Tensor], output: Tensor, loss_gradient: Tensor, loss: Tensor) -> None:
    """The split into model and loss is only valid if the loss sees the parameters through the output alone: the chain rule."""
    direct = join_like(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True), leaves)
    chained = join_like(backward([output], leaves, [loss_gradient], batched=False), leaves)
    gap = float((direct - chained).norm())
    floor = 1e-12 if direct.dtype == torch.float64 else 1e-7  # rounding near a minimum
    if gap > max(1e-3 * float(direct.norm()), floor):
        raise OutputLossError(
            f"{who}: the loss depends on the parameters by other ways than the model's output (an auxiliary loss, "
            "weight decay inside the loss, a tensor that is not returned). Use theodolite.hessian, or a loss of the output alone."
        )


class OutputOperator(AutogradOperator[OutputGraph]):
    """An operator whose products go through the Jacobian of the outputs."""

    def roots(self, graph: OutputGraph) -> list[Tensor]:
        return [t for t in (graph.output, graph.loss_gradient, *graph.pulled) if t is not None]

    def _by_route(self, product: Callable[[Tensor, bool], Tensor], rows: Tensor) -> Tensor:
        """`product` of one row (n,), or of a batch of them (k, n), for all rows."""
        return self.block_route.apply(lambda v: product(v, False), lambda vs: product(vs, True), rows)

    def _kind(self) -> str:
        return "Jacobian products"


class GaussNewtonOperator(OutputOperator):
    """`G = Σ_b share_b Jᵀ (∇²_z loss_b) J`. Made by `theodolite.gauss_newton`."""

    @checked(problem=a_problem, memory_budget=whole)
    def __init__(
        self, problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
    ) -> None:
        size = getattr(problem, "size", 0)
        super().__init__(problem, (size, size), symmetric=True, keep=keep, memory_budget=memory_budget, batched=batched)
        self._checked = False

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> OutputGraph:
        result = self.problem.evaluate(tensors, batch, index)
        loss, measured = result.through_output()
        graph = output_graph(leaves, measured, loss)
        if not self._checked:
            assert graph.loss_gradient is not None
            if self.problem.loss_function is None and graph.output.numel() == 1 and not graph.loss_gradient.requires_grad:
                raise ValueError(
                    "gauss_newton splits the objective into a model's output and a loss of it, and this model returns only its "
                    "loss. Return the output too (as .logits, or in a dictionary beside 'loss'), or pass the loss as its own "
                    "argument: Problem(model, loss, data). theodolite.hessian works as it is."
                )
            refuse_other_ways("gauss_newton", leaves, graph.output, graph.loss_gradient.detach(), loss)
            self._checked = True
        return graph

    def _matmat(self, x: Tensor) -> Tensor:
        leaves = self.graphs.leaves

        def through(graph: OutputGraph, rows: Tensor) -> Tensor:
            def product(v: Tensor, batched: bool) -> Tensor:
                pushed = graph.push(split_like(v, leaves), batched=batched)
                pulled = graph.pull(leaves, graph.loss_curvature(pushed, batched=batched), batched=batched)
                return join_like(pulled, leaves, *v.shape[:-1])

            return self._by_route(product, rows)

        return self._summed(x, through)

    def trusted(self) -> Self:
        self._checked = True
        return super().trusted()

    def on(self, problem: Problem) -> GaussNewtonOperator:
        return GaussNewtonOperator(problem, keep="never", batched=False)


def gauss_newton(
    problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
) -> GaussNewtonOperator:
    """The generalised Gauss-Newton matrix of the objective: the part of the Hessian due to the loss's own curvature.

    For any twice differentiable loss of the output (cross-entropy, squared error, ...); positive semi-definite
    when the loss is convex in the output. Arguments as for `hessian`.

    Returns:
        A `GaussNewtonOperator` (p, p): `G @ v`, also for columns of vectors.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.tensor([[2.0]]).double(), torch.zeros(1, 1).double()))
    >>> gauss_newton(problem).to_dense()
    tensor([[8.]], dtype=torch.float64)
    """
    return GaussNewtonOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched)


class JacobianOperator(OutputOperator):
    """`J` of shape (outputs of all samples, parameters), sample-major. Made by `theodolite.jacobian`."""

    @checked(problem=a_problem, memory_budget=whole)
    def __init__(
        self, problem: Problem, *, keep: Keep = "auto", memory_budget: int | None = None, batched: bool | None = None
    ) -> None:
        problem.refuse_batch_coupling("The Jacobian")
        self.counts = output_counts(problem)
        super().__init__(
            problem, (sum(self.counts), problem.size), symmetric=False, keep=keep, memory_budget=memory_budget, batched=batched
        )

    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> OutputGraph:
        return output_graph(leaves, self.problem.evaluate(tensors, batch, index).measured, None)

    def _matmat(self, x: Tensor) -> Tensor:
        self.snapshot.check()
        leaves, rows = self.graphs.leaves, rows_of(x)
        parts = []
        for _, graph in self.graphs:

            def product(v: Tensor, batched: bool, graph: OutputGraph = graph) -> Tensor:
                return graph.push(split_like(v, leaves), batched=batched).reshape(*v.shape[:-1], -1)

            parts.append(self._by_route(product, rows))
        return torch.cat(parts, dim=1).T

    def _rmatmat(self, x: Tensor) -> Tensor:
        self.snapshot.check()
        leaves = self.graphs.leaves
        total = torch.zeros(x.shape[1], self.shape[1], dtype=torch.float64, device=self.device)
        for (_, graph), rows in zip(self.graphs, rows_of(x).split(self.counts, dim=1), strict=True):

            def product(u: Tensor, batched: bool, graph: OutputGraph = graph) -> Tensor:
                lead = u.shape[:-1]
                return join_like(graph.pull(leaves, u.reshape(*lead, *graph.output.shape), batched=batched), leaves, *lead)

            total += self._by_route(product, rows)
        return total.T.to(self.dtype)


def output_counts(problem: Problem) -> list[int]:
    """Number of output values of each batch."""
    with problem.session(second=False):
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
