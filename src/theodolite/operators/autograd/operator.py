"""What Hessian, Gauss-Newton and Jacobian operators share: the snapshot, the graphs, and blocks of vectors."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Unpack

import torch
from torch import Tensor, nn

from theodolite.errors import NumericalWarning, StaleOperatorError, TheodoliteError
from theodolite.operators.autograd.graphs import Graph, GraphStore, Keeping, backward, batching_may_pay
from theodolite.operators.base import SYMMETRY_TOLERANCE, LinearOperator, rows_of, symmetry_gap
from theodolite.problem import Batch, Problem, join_like, split_like
from theodolite.results import Cost

#: Vectors sent through one graph at a time.
CHUNK = 8


class BlockRoute:
    """Decides whether a block of vectors goes through a graph at once or one by one.

    The batched route is proven on its first use: its first column must equal the single product. Some layers
    have no batching rule (GroupNorm), and a wrong one must not pass.
    """

    def __init__(self, problem: Problem, *, batched: bool | None) -> None:
        self.batched = batched if batched is not None else (None if batching_may_pay(problem) else False)

    def apply(self, single: Callable[[Tensor], Tensor], block: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """`rows` (k, n) -> (k, m), by `block` where that is right and pays, else by `single` row by row."""
        if rows.shape[0] == 1:
            return single(rows[0])[None]
        if self.batched is False:
            return torch.stack([single(row) for row in rows])
        if self.batched is None:
            self.batched = self._proves_itself(single, block, rows)
            return self.apply(single, block, rows)
        return torch.cat([block(chunk) for chunk in rows.split(CHUNK)])

    def pull_back(self, outputs: Sequence[Tensor | None], leaves: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Vector-Jacobian products of the outputs, which have the shapes of the leaves, with flat rows (k, n)."""

        def single(v: Tensor) -> Tensor:
            return join_like(backward(outputs, leaves, split_like(v, leaves), batched=False), leaves)

        def block(vs: Tensor) -> Tensor:
            return join_like(backward(outputs, leaves, split_like(vs, leaves), batched=True), leaves, len(vs))

        return self.apply(single, block, rows)

    @staticmethod
    def _proves_itself(single: Callable[[Tensor], Tensor], block: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
        # Random vectors: the caller's may be special (a unit vector whose product is zero proves nothing).
        generator = torch.Generator().manual_seed(0)
        trial = torch.randn(2, rows.shape[1], generator=generator, dtype=torch.float32).to(rows)
        expected = single(trial[0])
        try:
            got = block(trial)[0]
        except RuntimeError:  # no batching rule, or no room: the single product above has shown that the model itself is sound
            return False
        tolerance = 1e-8 if rows.dtype == torch.float64 else 1e-3
        return float((got - expected).norm()) <= tolerance * float(expected.norm())


def asymmetric_elsewhere(problem: Problem, make: Callable[[Problem], LinearOperator], x: Tensor, ax: Tensor) -> bool:
    """Repeat a failed symmetry probe (x, Ax) in float64 and away from the current parameters.

    Near a flat minimum products are tiny and mostly rounding, which looks asymmetric and is not. A wrong derivative is
    wrong at other parameters too: those here are shrunk, so that the loss is curved again, and shaken.
    """
    try:
        double = problem.in_float64()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in double.model.parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
                p.mul_(0.3).add_(noise * 0.1 * (p.square().mean().sqrt() + 1e-3))
        op = make(double)
        images = [op._matmat(column[:, None])[:, 0] for column in x.double().T]
    except (TheodoliteError, RuntimeError, ValueError):
        return True  # the model cannot run there: the first verdict stands
    there = torch.stack(images, dim=1)
    tiny = 1e-3 if problem.dtype == torch.float32 else 1e-6
    if symmetry_gap(x.double(), there) > SYMMETRY_TOLERANCE[torch.float64] or float(ax.norm()) > tiny * float(there.norm()):
        return True
    warnings.warn(
        "Products are dominated by rounding here: the loss is nearly flat at these parameters. In float64 fewer digits are lost.",
        NumericalWarning,
        stacklevel=2,
    )
    return False


class AutogradOperator(LinearOperator, Generic[Graph]):
    """An operator made of one autograd graph per batch.

    Subclasses build the graph of a batch and differentiate it; `keep` forces the choice between keeping graphs
    ("always") and evaluating the model anew for each product ("never"), `memory_budget` bounds what is kept.
    """

    def __init__(
        self, problem: Problem, shape: tuple[int, int], *, symmetric: bool, batched: bool | None, **keeping: Unpack[Keeping]
    ) -> None:
        if not isinstance(problem, Problem):
            raise ValueError(f"Expected a Problem. Got {type(problem).__name__}; wrap it: theodolite.Problem(model, loss, data).")
        super().__init__(shape, dtype=problem.dtype, device=problem.device, symmetric=symmetric)
        self.problem = problem
        self.graphs: GraphStore[Graph] = GraphStore(problem, self.build, self.roots, **keeping)
        self.keep, self.memory_budget = self.graphs.keep, keeping.get("memory_budget")
        self.snapshot = Snapshot(problem.model)
        self.block_route = BlockRoute(problem, batched=batched)

    @abstractmethod
    def build(self, leaves: list[Tensor], tensors: dict[str, Tensor], batch: Batch, index: int) -> Graph:
        """Evaluate one batch and return what is to be differentiated."""

    @abstractmethod
    def roots(self, graph: Graph) -> list[Tensor]:
        """The tensors whose history the graph is."""

    def _summed(self, x: Tensor, product: Callable[[Graph, Tensor], Tensor]) -> Tensor:
        """Σ_b share_b · product_b over the batches, accumulated in float64: (n, k) -> (m, k); `product` maps rows to rows."""
        self.snapshot.check()
        rows = rows_of(x)
        total: Tensor | None = None
        for share, graph in self.graphs:
            part = product(graph, rows)
            if share != 1.0 or total is not None:
                part = part.double() * share
            total = part if total is None else total + part
        assert total is not None
        return total.T

    def on(self, problem: Problem) -> LinearOperator:
        """The same kind of operator for another problem."""
        raise TypeError(f"{type(self).__name__} is not symmetric.")

    def _confirm_asymmetry(self, x: Tensor, ax: Tensor) -> bool:
        return asymmetric_elsewhere(self.problem, self.on, x, ax)

    def cost(self) -> Cost:
        return Cost(route=f"{self._kind()}, {self.graphs.route}", peak_bytes=self.graphs.bytes, notes=self.problem.notes)

    def _kind(self) -> str:
        return "double backward"


#: Entries of each tensor that are looked at; a change by way of `.data` leaves no version behind.
SAMPLE = 128


class Snapshot:
    """Remembers versions, places and sampled values of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        # The dictionaries rather than the tensors: a replaced parameter must be noticed too.
        self._places = [
            (owner, name) for module in model.modules() for owner in (module._parameters, module._buffers) for name in owner
        ]
        tensors = self._tensors()
        self._stamps = [(t._version, t.data_ptr()) for t in tensors]
        self._samples = _grouped([_sample(t) for t in tensors if t.is_floating_point() and t.numel()])
        self._values = [_bits(group) for group in self._samples]

    def check(self) -> None:
        """Raise if anything changed."""
        stamps = [(t._version, t.data_ptr()) for t in self._tensors()]
        if stamps != self._stamps or not all(map(torch.equal, map(_bits, self._samples), self._values)):
            raise StaleOperatorError(
                "The model's parameters or buffers changed after this operator was built (an optimizer step, load_state_dict, "
                "a move to another device). An operator is a snapshot: build a new one from the same Problem."
            )

    def _tensors(self) -> list[Tensor]:
        found = (owner.get(name) for owner, name in self._places)
        return [t for t in found if t is not None]


def _sample(t: Tensor) -> Tensor:
    """A flat view of at most about `SAMPLE` entries, spread over the tensor; it follows the tensor's memory."""
    t = t.detach()
    if t.is_contiguous():
        return t.view(-1)[:: max(1, t.numel() // SAMPLE)]
    while t.ndim > 1:
        t = t.select(0, t.shape[0] // 2)
    return t[:SAMPLE] if t.ndim else t[None]


def _grouped(samples: list[Tensor]) -> list[list[Tensor]]:
    """By dtype and device, so that each group can be joined."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in samples:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def _bits(group: list[Tensor]) -> Tensor:
    """The samples side by side as whole numbers: NaN must equal itself."""
    return torch.cat(group).view(_WHOLE[group[0].element_size()])


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
