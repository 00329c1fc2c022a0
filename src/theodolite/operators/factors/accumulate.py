"""`kronecker_factors`: the factors of all layers in one streamed pass over the data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.operators.factors.affine import AffineLayer, affine_layers
from theodolite.operators.factors.kronecker_factors import KroneckerFactors
from theodolite.operators.factors.passes import LayerPass, layer_passes
from theodolite.operators.factors.roots import EXACT_PASSES, derivative
from theodolite.problem import Problem, match_layers
from theodolite.results import Cost, Outcome, Result, ResultMapping

FactorMode = Literal["ggn", "exact"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorMapping(ResultMapping):
    """Factors by layer name; `without` says which layers have no Kronecker form, and why."""

    without: dict[str, str]

    def sentence(self) -> str:
        lines = [super().sentence(), *(f"{name}: {why}." for name, why in self.without.items())]
        return "\n".join(line for line in lines if line)


def kronecker_factors(
    problem: Problem,
    layers: str | Iterable[str] | None = None,
    *,
    mode: FactorMode = "ggn",
    draws: int | None = None,
    max_passes: int = EXACT_PASSES,
    seed: int = 0,
) -> FactorMapping:
    """Output Hessian `E[M]` and input auto-correlation `E[x xᵀ]` of every linear and convolutional layer.

    The block of a layer is `E[M_x ⊗ x xᵀ]`; the factors decouple the two averages. One backward pass for each output of the
    network serves all layers.

    Parameters
    ----------
    layers : names or globs; None means all. Layers without such a form are listed in the result's `without`.
    mode : `"ggn"` (curvature of the loss pulled back: exact for piecewise linear networks) or `"exact"` (second
        derivatives of the whole rest of the network, one pass for each output of each layer and position).
    draws : sample the loss's curvature so many times per batch (softmax cross-entropy, unbiased, with a standard error);
        None treats it exactly where that takes at most `max_passes` backward passes a batch, and draws 16 times otherwise.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
    >>> factors = kronecker_factors(Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double())))["(model)"]
    >>> factors.output, factors.input
    (tensor([[2.]], dtype=torch.float64), tensor([[0.5000, 0.0000],
            [0.0000, 2.0000]], dtype=torch.float64))
    """
    if mode not in ("ggn", "exact"):
        raise ValueError(f"mode must be 'ggn' or 'exact'. Got {mode!r}.")
    problem.refuse_batch_coupling("A Kronecker factor")
    began = time.perf_counter()
    chosen = [layer.name for layer in match_layers(problem.selection, layers)]
    recipes, without = affine_layers(problem, chosen)
    sums = {recipe.name: _Sums(recipe) for recipe in recipes}
    if recipes:
        _stream(problem, recipes, sums, mode, draws, max_passes, torch.Generator().manual_seed(seed))
    cost = Cost(time.perf_counter() - began, f"{mode} factors, backward passes from the output", 0, problem.notes)
    results: dict[str, Result] = {name: total.result(problem, mode, seed, cost) for name, total in sums.items() if total.uses}
    without |= {name: "the layer is not called in the forward pass" for name, total in sums.items() if not total.uses}
    return FactorMapping(results=results, without=without, seed=seed, cost=cost, outcome=Outcome.FINISHED)


def _stream(
    problem: Problem,
    recipes: list[AffineLayer],
    sums: dict[str, _Sums],
    mode: FactorMode,
    draws: int | None,
    max_passes: int,
    generator: torch.Generator,
) -> None:
    for one in layer_passes(problem, recipes):
        for recipe in one.recipes:
            sums[recipe.name].add_inputs(one.inputs(recipe), one.weight)
        if mode == "exact":
            _add_exact(one, sums)
            continue
        roots, sampled = one.roots(draws, max_passes, generator)
        for parts in one.pulled(roots):
            for name, part in parts.items():
                sums[name].add_root(part, one.share, sampled=sampled)
        for recipe in one.recipes:
            sums[recipe.name].end_batch()


def _add_exact(one: LayerPass, sums: dict[str, _Sums]) -> None:
    """Second derivatives of the loss in every layer's output: those of a sample at one position."""
    size = one.batch.size
    for recipe in one.recipes:
        for z in one.seen.outputs[recipe.name]:
            (g,) = torch.autograd.grad(one.evaluation.loss, z, create_graph=True)
            rows = recipe.outputs(g, size)  # (B, P, m)
            total = torch.zeros(recipe.m, recipe.m, dtype=torch.float64, device=z.device)
            for t in range(rows.shape[1]):
                for j in range(recipe.m):
                    found = derivative(rows[:, t, j].sum(), z)
                    if found is not None:
                        total[j] += recipe.outputs(found, size)[:, t].double().sum(0)
            sums[recipe.name].add_output(total, one.share, len(rows[0]), passes=rows.shape[1] * recipe.m)


class _Sums:
    """Running averages of one layer."""

    def __init__(self, recipe: AffineLayer) -> None:
        self.recipe = recipe
        self.uses = 0
        self.samples = 0
        self.positions = 1
        self.passes = 0
        self.input = torch.zeros(())
        self.mean = torch.zeros(())
        self.output = torch.zeros(())
        self._batch: list[Tensor] = []
        self._variance = 0.0

    def add_inputs(self, x: Tensor, share: float) -> None:
        """Inputs (B, P, n) of a batch that is `share` of the data."""
        flat = x.flatten(0, 1)
        weight = share / len(x)
        mean = x.sum(0).T.double() * weight  # (n, P)
        product = (flat.T @ flat).double() * weight  # products in the network's precision, sums in float64
        self.input = product if not self.uses else self.input + product
        same = self.uses and self.mean.shape == mean.shape
        self.mean = mean if not self.uses else self.mean + mean if same else _wider(self.mean, mean)
        self.uses += 1
        self.samples += len(x)
        self.positions = max(self.positions, x.shape[1])

    def add_root(self, n: Tensor, share: float, *, sampled: bool) -> None:
        """One root's derivatives (B, P, m): the mean over positions of their outer products."""
        flat = n.flatten(0, 1)
        product = (flat.T @ flat).double() * (share / n.shape[1])
        if sampled:
            self._batch.append(product)
        self.output = self.output + product
        self.passes += 1

    def end_batch(self) -> None:
        """The variance that sampling leaves: from the spread of the draws, in the Frobenius norm."""
        if len(self._batch) > 1:
            draws = torch.stack(self._batch)
            k = len(draws)
            self._variance += float((draws - draws.mean(0)).square().sum()) * k / (k - 1)
        self._batch = []

    def add_output(self, total: Tensor, share: float, positions: int, passes: int) -> None:
        self.output = self.output + 0.5 * (total + total.T) * (share / positions)
        self.passes += passes

    def result(self, problem: Problem, mode: str, seed: int, cost: Cost) -> KroneckerFactors:
        recipe = self.recipe
        left, sizes, _ = torch.linalg.svd(self.mean, full_matrices=False)
        lead = left[:, 0] * sizes[0]
        mean = (
            self.mean[:, 0]
            if self.mean.shape[1] == 1
            else lead * torch.sign(lead.sum() if lead.sum() != 0 else lead.new_ones(()))
        )
        size = float(self.output.norm())
        stderr = math.sqrt(self._variance) / size if size > 0 else 0.0
        return KroneckerFactors(
            layer=recipe.name,
            kind=problem.layers[recipe.name].kind,
            mode=mode,
            output=self.output if self.output.ndim else torch.zeros(recipe.m, recipe.m, dtype=torch.float64),
            input=self.input,
            mean=mean,
            positions=self.positions,
            samples=self.samples,
            passes=self.passes,
            stderr=stderr,
            groups=recipe.groups,
            transposed=recipe.transposed,
            outcome=Outcome.ESTIMATED if stderr else Outcome.FINISHED,
            seed=seed,
            cost=cost,
        )


def _wider(a: Tensor, b: Tensor) -> Tensor:
    """Means over different numbers of positions (sequences of different length), side by side where both have them."""
    short, long = (a, b) if a.shape[1] < b.shape[1] else (b, a)
    out = long.clone()
    out[:, : short.shape[1]] += short
    return out
