"""The exact diagonal blocks of the Hessian, one per layer, all on one graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Unpack

import torch
from torch import Tensor

from theodolite.arguments import checked, optional, whole
from theodolite.errors import NonFiniteError
from theodolite.operators.autograd.graphs import GraphStore, Keep, Keeping
from theodolite.operators.autograd.operator import BlockRoute, asymmetric_elsewhere
from theodolite.operators.base import LinearOperator, rows_of, without_autocast
from theodolite.operators.hessian import Gradients, HessianOperator, route_kind
from theodolite.operators.linear_stacks.products import StackFactors, StackPass
from theodolite.operators.linear_stacks.recognition import run_stack
from theodolite.problem import Batch, Problem, match_layers
from theodolite.problem.arguments import a_problem
from theodolite.problem.derivatives.second_order import plain_second_order_errors
from theodolite.results import Cost

BatchGraph = Gradients | StackFactors | StackPass


class LayerHessians(Mapping[str, LinearOperator]):
    """Layer name -> operator of that layer's block; `products` multiplies several blocks at once.

    Stacks of Linear layers and elementwise activations use the closed forms of `linear_stacks.products`, the shorter one where
    the activations are piecewise linear. Every other model uses double backward on one graph, where the second backward of a
    block runs only from the layer's own gradient to its own weight. `closed_form=False` forces the latter.
    """

    @checked(problem=a_problem, memory_budget=optional(whole))
    def __init__(
        self,
        problem: Problem,
        layers: str | Iterable[str] | None = None,
        *,
        bias: bool = False,
        closed_form: bool = True,
        **keeping: Unpack[Keeping],
    ) -> None:
        self.problem, self.bias, self.closed_form = problem, bias, closed_form
        self._hessian = HessianOperator(problem, closed_form=False, **keeping)
        self._members = {layer.name: layer.members(bias=bias) for layer in match_layers(problem.selection, layers)}
        self._graphs: GraphStore[BatchGraph] = GraphStore(problem, self._build, self._roots, **keeping)
        self._blocks = {name: LayerBlock(self, name, members) for name, members in self._members.items()}
        self._routes = {name: BlockRoute(problem, batched=None) for name in self._members}  # each layer proves its own

    def __getitem__(self, name: str) -> LinearOperator:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def positions(self, name: str) -> Tensor:
        """Indices of a layer's block in the problem's flat vector."""
        return self.problem.selection.positions(self._members[name])

    def products(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Multiply each named layer's block with its columns (n, k), all on one pass over the data."""
        for name, x in blocks.items():
            self._blocks[name].check_operand(x, columns_only=True)
            self._blocks[name].check_symmetry()
        with without_autocast(self._hessian.device):
            images = self.multiply(blocks)
        if not bool(torch.isfinite(torch.stack([image.sum() for image in images.values()])).all()):
            bad = next((name for name, image in images.items() if not bool(torch.isfinite(image).all())), None)
            if bad is not None:
                raise NonFiniteError(f"The Hessian block of layer {bad} returned NaN or inf: has the loss diverged here?")
        return {name: image.to(torch.promote_types(image.dtype, blocks[name].dtype)) for name, image in images.items()}

    def multiply(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`products` without its checks."""
        self._hessian.snapshot.check()
        dtype, device = self._hessian.dtype, self._hessian.device
        rows = {name: rows_of(x).to(dtype=dtype, device=device) for name, x in blocks.items()}
        totals: dict[str, Tensor] = {}
        for share, graph in self._graphs:
            for name, part in self._batch_products(graph, rows).items():
                weighted = part if share == 1.0 else part.double() * share
                totals[name] = totals[name] + weighted if name in totals else weighted
        return {name: (total if total.dtype == dtype else total.to(dtype)).T for name, total in totals.items()}

    def _batch_products(self, graph: BatchGraph, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(graph, StackFactors | StackPass):
            return graph.products(rows)
        with plain_second_order_errors():
            return {name: self._block_product(graph, name, vectors) for name, vectors in rows.items()}

    def _block_product(self, graph: Gradients, name: str, rows: Tensor) -> Tensor:
        members = self._members[name]
        gradient, leaf = graph[members[0]], self._graphs.leaves[members[0]]
        alone = len(members) == 1 and len(rows) == 1 and leaf.dtype == rows.dtype
        if alone and gradient is not None and gradient.requires_grad:
            # The usual case in short: with many small layers the way through `backward` is a tenth of the cost.
            found = torch.autograd.grad(gradient, leaf, rows.view(leaf.shape), retain_graph=True, allow_unused=True)[0]
            return torch.zeros_like(rows) if found is None else found.reshape(1, -1)
        leaves = [self._graphs.leaves[i] for i in members]
        return self._routes[name].pull_back([graph[i] for i in members], leaves, rows)

    def _build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> BatchGraph:
        run = run_stack(self.problem, tensors, batch, index) if self._may_be_closed else None
        if run is None:
            return self._hessian.build_graph(leaves, tensors, batch, index)
        return StackFactors.of(run) if run.piecewise_linear else StackPass.of(run)

    @property
    def _may_be_closed(self) -> bool:
        return self.closed_form and not self.bias and self._graphs.keeping  # it pays over several products only

    def _roots(self, graph: BatchGraph) -> list[Tensor]:
        return graph.tensors() if isinstance(graph, StackFactors) else self._hessian.roots(graph)

    def cost(self) -> Cost:
        kind = route_kind(self._graphs.kept, closed_form=self._may_be_closed)
        return Cost(route=f"{kind}, {self._graphs.route}", peak_bytes=self._graphs.bytes, notes=self.problem.notes)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} ({op.shape[0]})" for name, op in self._blocks.items())
        return f"<LayerHessians: {shown}>"


class LayerBlock(LinearOperator):
    """One diagonal block; shares the graph with its neighbours."""

    def __init__(self, owner: LayerHessians, name: str, members: tuple[int, ...]) -> None:
        size = sum(owner.problem.selection.sizes[i] for i in members)
        super().__init__((size, size), dtype=owner.problem.dtype, device=owner.problem.device, symmetric=True)
        self.owner, self.name = owner, name

    def _matmat(self, x: Tensor) -> Tensor:
        return self.owner.multiply({self.name: x})[self.name]

    def _check_derivatives(self) -> None:
        self.owner.problem.check_products()

    def _confirm_asymmetry(self, x: Tensor, ax: Tensor) -> bool:
        def same(problem: Problem) -> LinearOperator:
            closed = self.owner.closed_form
            return LayerHessians(problem, [self.name], bias=self.owner.bias, keep="never", closed_form=closed)[self.name]

        return asymmetric_elsewhere(self.owner.problem, same, x, ax)

    def cost(self) -> Cost:
        return self.owner.cost()


def layer_hessians(
    problem: Problem,
    layers: str | Iterable[str] | None = None,
    *,
    bias: bool = False,
    keep: Keep = "auto",
    memory_budget: int | None = None,
    closed_form: bool = True,
) -> LayerHessians:
    """The exact diagonal Hessian block of each layer, by layer name.

    A layer is a module that owns parameters directly; its block is its weight, row-major (`bias=True` adds the
    bias). `top_eigenpairs`, `spectral_density` and `trace` accept the mapping and run all layers in lockstep.

    Returns:
        A mapping from layer names to operators that share one graph.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    >>> _ = torch.nn.init.constant_(model[0].weight, 3.0), torch.nn.init.constant_(model[1].weight, 2.0)
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.ones(1, 1).double(), torch.zeros(1, 1).double()))
    >>> {name: float(block.to_dense()) for name, block in layer_hessians(problem).items()}   # 2 w2², 2 w1²
    {'0': 8.0, '1': 18.0}
    """
    return LayerHessians(problem, layers, bias=bias, keep=keep, memory_budget=memory_budget, closed_form=closed_form)
