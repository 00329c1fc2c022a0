"""The exact diagonal blocks of the Hessian, one per layer, all on one graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.operators.base import LinearOperator
from theodolite.operators.graphs import Keep, backward
from theodolite.operators.hessian import Gradients, HessianOperator
from theodolite.problem import Problem, match_layers
from theodolite.results import Cost


class LayerHessians(Mapping[str, LinearOperator]):
    """Layer name -> operator of that layer's block; `products` multiplies several blocks on one graph.

    The second backward of a block runs only from the layer's own gradient to its own weight.
    """

    def __init__(
        self,
        problem: Problem,
        layers: str | Iterable[str] | None = None,
        *,
        bias: bool = False,
        keep: Keep = "auto",
        memory_budget: int | None = None,
        batched: bool | None = None,
    ) -> None:
        self.problem = problem
        self._hessian = HessianOperator(problem, keep=keep, memory_budget=memory_budget, batched=batched)
        self._members = {layer.name: layer.members(bias=bias) for layer in match_layers(problem.selection, layers)}
        self._blocks = {name: LayerBlock(self, name, members) for name, members in self._members.items()}

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
        """Multiply each named layer's block with its columns, all on one pass over the data."""
        for name in blocks:
            self._blocks[name].check_symmetry()
        images = self._multiply(
            {name: x.to(dtype=self._hessian.dtype, device=self._hessian.device) for name, x in blocks.items()}
        )
        for name, image in images.items():
            if not bool(torch.isfinite(image).all()):
                raise NonFiniteError(
                    f"The Hessian block of layer {name} returned NaN or inf: has the loss diverged at these parameters?"
                )
        return {name: image.to(torch.promote_types(image.dtype, blocks[name].dtype)) for name, image in images.items()}

    def _multiply(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hessian = self._hessian
        hessian._snapshot.check()
        rows = {name: x.T.contiguous() for name, x in blocks.items()}
        totals: dict[str, Tensor] = {}
        for share, graph in hessian.graphs:
            for name, vectors in rows.items():
                part = share * self._block_product(graph, self._members[name], vectors).double()
                totals[name] = totals[name] + part if name in totals else part
        return {name: total.T.to(hessian.dtype) for name, total in totals.items()}

    def _block_product(self, graph: Gradients, members: tuple[int, ...], rows: Tensor) -> Tensor:
        leaves = [self._hessian.graphs.leaves[i] for i in members]
        gradients = [graph[i] for i in members]
        sizes = [leaf.numel() for leaf in leaves]

        def join(parts: list[Tensor | None], *lead: int) -> Tensor:
            flat = [
                leaf.new_zeros(*lead, leaf.numel()) if part is None else part.reshape(*lead, -1)
                for part, leaf in zip(parts, leaves, strict=True)
            ]
            return torch.cat(flat, dim=-1).to(self._hessian.dtype)

        def split(x: Tensor, *lead: int) -> list[Tensor]:
            return [
                part.reshape(*lead, *leaf.shape).to(leaf.dtype) for part, leaf in zip(x.split(sizes, dim=-1), leaves, strict=True)
            ]

        def single(v: Tensor) -> Tensor:
            return join(backward(gradients, leaves, split(v), batched=False))

        def block(vs: Tensor) -> Tensor:
            return join(backward(gradients, leaves, split(vs, len(vs)), batched=True), len(vs))

        return self._hessian._blocks.apply(single, block, rows)

    def cost(self) -> Cost:
        return self._hessian.cost()

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
        return self.owner._multiply({self.name: x})[self.name]

    def cost(self) -> Cost:
        return self.owner.cost()


def layer_hessians(
    problem: Problem,
    layers: str | Iterable[str] | None = None,
    *,
    bias: bool = False,
    keep: Keep = "auto",
    memory_budget: int | None = None,
) -> LayerHessians:
    """The exact diagonal Hessian block of each layer, by layer name.

    A layer is a module that owns parameters directly; its block is its weight, row-major (`bias=True` adds the
    bias). `top_eigenpairs`, `spectral_density` and `trace` accept the mapping and run all layers in lockstep.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    >>> _ = torch.nn.init.constant_(model[0].weight, 3.0), torch.nn.init.constant_(model[1].weight, 2.0)
    >>> problem = Problem(model, torch.nn.MSELoss(), (torch.ones(1, 1).double(), torch.zeros(1, 1).double()))
    >>> {name: float(block.to_dense()) for name, block in layer_hessians(problem).items()}   # 2 w2², 2 w1²
    {'0': 8.0, '1': 18.0}
    """
    return LayerHessians(problem, layers, bias=bias, keep=keep, memory_budget=memory_budget)
