"""`kronecker_factors`: the factors of all layers in one streamed pass over the data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from theodolite.arguments import checked, count, either, optional_integer, seed
from theodolite.errors import OutputLossError
from theodolite.operators.kronecker.affine import AffineLayer, affine_layers
from theodolite.operators.kronecker.factors import KroneckerFactors
from theodolite.operators.kronecker.loss_curvature import EXACT_PASSES, FLAT, derivative
from theodolite.operators.kronecker.passes import LayerPass, Use, some_samples, visit_batches
from theodolite.problem import Problem, match_layers
from theodolite.problem.arguments import a_problem
from theodolite.results import Cost, Outcome, Result, ResultMapping

FactorMode = Literal["ggn", "exact"]
Sharing = Literal["auto", "expand", "reduce"]
#: Samples on which the two ways of sharing are compared, and the factor by which expanding may miss the trace.
COMPARED, MISSES = 8, 4.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorMapping(ResultMapping):
    """Factors by layer name; `without` says which layers have no Kronecker form, and why; `classes` are the model's outputs.

    With an output for every position (tokens, pixels), `classes` counts those of one.
    """

    without: dict[str, str]
    classes: int

    def sentence(self) -> str:
        lines = [super().sentence(), *(f"{name}: {why}." for name, why in self.without.items())]
        return "\n".join(line for line in lines if line)


@checked(problem=a_problem, draws=count, max_passes=count, seed=seed)
def kronecker_factors(
    problem: Problem,
    layers: str | Iterable[str] | None = None,
    *,
    mode: FactorMode = "ggn",
    sharing: Sharing = "auto",
    draws: int | None = None,
    max_passes: int | None = None,
    seed: int = 0,
) -> FactorMapping:
    """Output Hessian `E[M]` and input auto-correlation `E[x xᵀ]` of every linear and convolutional layer.

    The block of a layer is `E[M_x ⊗ x xᵀ]`; the factors decouple the two averages. One backward pass for each output of the
    network serves all layers. `E[M]` weighs samples as the objective does; `E[x xᵀ]` counts every sample of the data once.

    Args:
        layers: names or globs; None means all. Layers without such a form are listed in the result's `without`.
        mode: `"ggn"` (curvature of the loss pulled back: exact for piecewise linear networks) or `"exact"` (second derivatives of
            the whole rest of the network, one pass for each output of each layer and position).
        sharing: how the positions at which a sample uses a weight (pixels, tokens) enter: `"expand"` takes each as a sample of
            its own, `"reduce"` first averages the inputs and sums the derivatives over them, which is right where the network
            averages its positions later on. `"auto"` expands unless that misses the trace of the layer's block by more than a
            factor of four on a few samples and reducing does better; each result says what it is.
        draws: sample the loss's curvature so many times per batch (unbiased, with a standard error from two draws on); None
            treats it exactly where that takes at most `max_passes` backward passes a batch (128), and draws 16 times otherwise.

    Returns:
        The factors of each layer, by layer name.

    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
    >>> factors = kronecker_factors(Problem(model, torch.nn.MSELoss(), (x, torch.zeros(2, 1).double())))["(model)"]
    >>> factors.output, factors.input
    (tensor([[2.]], dtype=torch.float64), tensor([[0.5000, 0.0000],
            [0.0000, 2.0000]], dtype=torch.float64))
    """
    _check_arguments(mode, sharing, draws, max_passes)
    problem.refuse_batch_coupling("A Kronecker factor")
    began = time.perf_counter()
    chosen = [layer.name for layer in match_layers(problem.selection, layers)]
    recipes, without = affine_layers(problem, chosen)
    passes = EXACT_PASSES if max_passes is None else max_passes
    both = sharing != "expand" and mode == "ggn"
    stream = _Stream({recipe.name: Shared(recipe, both) for recipe in recipes}, mode, draws, passes, seed)
    if recipes:
        without |= visit_batches(problem, recipes, stream.add, who="kronecker_factors", split=mode == "ggn")
    found = {name: total for name, total in stream.sums.items() if name not in without}
    if mode == "ggn" and found and not stream.curved:
        raise OutputLossError(FLAT)
    cost = Cost(time.perf_counter() - began, f"{mode} factors, backward passes from the output", 0, problem.notes)
    results: dict[str, Result] = {
        n: total.result(sharing, problem.layers[n].kind, mode, seed, cost) for n, total in found.items()
    }
    shown = {name: without[name] for name in chosen if name in without}
    outcome = Outcome.ESTIMATED if stream.sampled else Outcome.FINISHED
    return FactorMapping(results=results, without=shown, classes=stream.classes, seed=seed, cost=cost, outcome=outcome)


def _check_arguments(mode: str, sharing: str, draws: int | None, max_passes: int | None) -> None:
    either("mode", mode, ("ggn", "exact"))
    either("sharing", sharing, get_args(Sharing))
    if sharing == "reduce" and mode == "exact":
        raise ValueError("sharing='reduce' belongs to mode='ggn': second derivatives are taken position by position.")
    for name, value in (("draws", draws), ("max_passes", max_passes)):
        optional_integer(name, value, least=1, wanted="a whole number of 1 or more")
        if value is not None and mode == "exact":
            raise ValueError(f"{name} belongs to mode='ggn': the second derivatives of mode='exact' are not sampled.")


class _Stream:
    """Adds batch after batch to the running averages of all layers."""

    def __init__(self, sums: dict[str, Shared], mode: FactorMode, draws: int | None, max_passes: int, seed: int) -> None:
        self.sums, self.mode, self.draws, self.max_passes = sums, mode, draws, max_passes
        self.generator = torch.Generator().manual_seed(seed)
        self.curved = False  # whether the loss has any curvature that a gradient would let expect
        self.sampled = False
        self.classes = 0

    def add(self, one: LayerPass) -> None:
        for name in one.uses:
            derived = one.loss is not None
            self.sums[name].add_inputs(one.inputs(name), one.fraction, last=one.is_last(name), derived=derived)
        if one.loss is None or not one.uses:
            return
        if self.mode == "exact":
            self.classes = self.classes or (one.recogniser.softmax() or one.recogniser).layout.classes
            for name, uses in one.uses.items():
                self._add_exact(one, name, uses)
            return
        self.classes = self.classes or one.curvature.layout.classes
        self.curved |= not one.curvature.flat
        roots, count = one.roots(self.draws, self.max_passes, self.generator)
        self.sampled |= count > 0
        for parts in one.pulled(roots):
            for name, part in parts.items():
                self.sums[name].add_root(part, one.share, drawn=count)
        for name in one.uses:
            self.sums[name].end_batch()

    def _add_exact(self, one: LayerPass, name: str, uses: list[Use]) -> None:
        """Second derivatives of the loss in a layer's output: those of a sample at one position."""
        assert one.loss is not None
        expanded = self.sums[name].expanded
        m, size = expanded.recipe.m, one.batch.size
        total = torch.zeros(m, m, dtype=torch.float64, device=one.output.device)
        positions = passes = 0
        for use in uses:
            g = torch.autograd.grad(one.loss, use.z, create_graph=True, allow_unused=True)[0]
            rows = use.outputs(torch.zeros_like(use.z) if g is None else g, size)  # (B, P, m)
            _refuse_mixing(rows, use, size)
            for t in range(rows.shape[1]):
                for j in range(m):
                    found = derivative(rows[:, t, j].sum(), use.z)
                    if found is not None:
                        total[j] += use.outputs(found, size)[:, t].double().sum(0)
            positions += rows.shape[1]
            passes += rows.shape[1] * m
        expanded.add_output(total, one.share, positions, passes)


def _refuse_mixing(rows: torch.Tensor, use: Use, size: int) -> None:
    """Raise where the second derivative couples samples."""
    lit = some_samples(size, rows.device)
    v = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).to(rows) * lit[:, None, None]
    found = derivative((rows * v).sum(), use.z)
    if found is None:
        return
    image = use.outputs(found, size)
    if float(image[~lit].norm()) > 1e-5 * float(image.norm()):
        raise OutputLossError(
            "The loss mixes samples (a contrastive or ranking loss): it is no sum over samples, so there is no output "
            "Hessian of a sample. theodolite.hessian measures it."
        )


class Shared:
    """Running averages of one layer with its positions taken one by one and, where there are several, taken together."""

    def __init__(self, recipe: AffineLayer, both: bool) -> None:
        self.expanded, self.reduced = Sums(recipe), Sums(recipe) if both and recipe.groups == 1 else None
        self._few = torch.zeros(())  # inputs (B, P, n) of the first samples
        self._traces: Tensor | None = None  # of the block there: true, from ‖g‖²/P, from ‖Σ g‖²

    def add_inputs(self, x: Tensor, fraction: float, *, last: bool, derived: bool) -> None:
        """Inputs (B, P, n) of a batch that holds `fraction` of all samples; `derived`: whether its derivatives follow."""
        if self.reduced is not None and self._traces is None and derived and x.shape[1] > 1:
            self._few, self._traces = x[:COMPARED].double(), torch.zeros(3, dtype=torch.float64, device=x.device)
        self.expanded.add_inputs(x, fraction, last=last)
        if self.reduced is not None:
            self.reduced.add_inputs(x.mean(1, keepdim=True), fraction, last=last)

    def add_root(self, n: Tensor, share: float, *, drawn: int) -> None:
        """One root's derivatives (B, P, m)."""
        self.expanded.add_root(n, share, drawn=drawn)
        if self.reduced is None:
            return
        together = n.sum(1, keepdim=True)
        self.reduced.add_root(together, share, drawn=drawn)
        if self._few.ndim and self._traces is not None:
            g = n[:COMPARED].double()
            block = torch.einsum("bpm,bpn->bmn", g, self._few)
            apart = g.square().sum() / g.shape[1], together[:COMPARED].double().square().sum()
            self._traces += torch.stack([block.square().sum(), *apart])

    def end_batch(self) -> None:
        for sums in (self.expanded, self.reduced):
            if sums is not None:
                sums.end_batch()
        if self._few.ndim and self._traces is not None:  # one batch is enough
            inputs = self._few.square().sum((1, 2)).mean(), self._few.mean(1).square().sum(1).mean()
            self._traces[1:] *= torch.stack(inputs)
            self._few = torch.zeros(())

    def result(self, sharing: Sharing, kind: str, mode: str, seed: int, cost: Cost) -> KroneckerFactors:
        far = False
        if self._traces is not None:
            true, expanded, reduced = self._traces.clamp(min=1e-300).log().tolist()
            far = abs(expanded - true) > math.log(MISSES) and abs(reduced - true) < abs(expanded - true)
        together = self.expanded.positions > 1 and self.reduced is not None and (sharing == "reduce" or far)
        found = (self.reduced if together and self.reduced is not None else self.expanded).result(kind, mode, seed, cost)
        return replace(found, sharing="reduce", positions=self.expanded.positions) if together else found


class Sums:
    """Running averages of one layer."""

    def __init__(self, recipe: AffineLayer) -> None:
        self.recipe = recipe
        self.samples = 0
        self.positions = 1
        self.passes = 0
        self.draws = 0
        self.last = False
        self.input = torch.zeros(())
        self.mean = torch.zeros(())
        self.output = torch.zeros(())
        self._batch: list[Tensor] = []
        self._variance = 0.0

    def add_inputs(self, x: Tensor, fraction: float, *, last: bool) -> None:
        """Inputs (B, P, n) of a batch that holds `fraction` of all samples."""
        flat = x.flatten(0, 1)
        weight = fraction / len(x)
        mean = x.sum(0).T.double() * weight  # (n, P)
        self.input = self.input + (flat.T @ flat).double() * weight  # products in the network's precision, sums in float64
        if self.samples:  # sequences may differ in length: their means add up where both have positions
            longer = max(mean.shape[1], self.mean.shape[1])
            mean = F.pad(self.mean, (0, longer - self.mean.shape[1])) + F.pad(mean, (0, longer - mean.shape[1]))
        self.mean = mean
        self.samples += len(x)
        self.positions = max(self.positions, x.shape[1])
        self.last = last

    def add_root(self, n: Tensor, share: float, *, drawn: int) -> None:
        """One root's derivatives (B, P, m): the mean over positions of their outer products. `drawn`: of how many, 0 if exact."""
        flat = n.flatten(0, 1)
        product = (flat.T @ flat).double() * (share / n.shape[1])
        if drawn:
            self._batch.append(product)
            self.draws = drawn
        self.output = self.output + product
        self.passes += 1

    def end_batch(self) -> None:
        """The variance that sampling leaves: from the spread of the draws, in the Frobenius norm."""
        k = len(self._batch)
        if k == 1:
            self._variance = math.nan
        elif k > 1:
            draws = torch.stack(self._batch)
            self._variance += float((draws - draws.mean(0)).square().sum()) * k / (k - 1)
        self._batch = []

    def add_output(self, total: Tensor, share: float, positions: int, passes: int) -> None:
        """The second derivatives (m, m) of a batch, summed over samples and positions."""
        self.output = self.output + 0.5 * (total + total.T) * (share / positions)
        self.passes += passes

    def result(self, kind: str, mode: str, seed: int, cost: Cost) -> KroneckerFactors:
        recipe = self.recipe
        output = self.output if self.output.ndim else torch.zeros(recipe.m, recipe.m, dtype=torch.float64)
        size = float(output.norm())
        return KroneckerFactors(
            layer=recipe.name,
            kind=kind,
            mode=mode,
            output=output,
            input=self.input,
            mean=_leading(self.mean),
            positions=self.positions,
            samples=self.samples,
            passes=self.passes,
            stderr=math.sqrt(self._variance) / size if size > 0 else 0.0,
            draws=self.draws,
            groups=recipe.groups,
            transposed=recipe.transposed,
            last=self.last,
            outcome=Outcome.ESTIMATED if self.draws else Outcome.FINISHED,
            seed=seed,
            cost=cost,
        )


def _leading(mean: Tensor) -> Tensor:
    """The mean input, or of several positions (n, P) the leading left singular vector times its value, most entries positive."""
    if mean.shape[1] == 1:
        return mean[:, 0]
    left, sizes, _ = torch.linalg.svd(mean, full_matrices=False)
    lead: Tensor = left[:, 0] * sizes[0]
    return -lead if float(lead.sum()) < 0 else lead
