"""One batch through the network with the inputs and outputs of its affine layers noted, ready to be pulled back to.

Whether a layer really multiplies its input by its weight, and which dimension counts the samples, is not taken on trust: a random
signal is sent back from some samples only. It must reach those samples alone, and give the weight the gradient that plain
backward gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from theodolite.operators.autograd.graphs import backward
from theodolite.operators.gauss_newton import output_gradient, refuse_other_ways
from theodolite.operators.kronecker.affine import AffineLayer
from theodolite.operators.kronecker.loss_curvature import LossCurvature, Recogniser, row_layouts
from theodolite.problem import Batch, Problem
from theodolite.problem.activations import Capture, capturing
from theodolite.problem.calling import Output


@dataclass(frozen=True)
class SampleAxis:
    """The samples' dimension of tensors (..., features): `dim`, where `split` has cut the first into two.

    With `split` the first dimension holds samples and something else (frames, windows) together: samples outside for
    dim 0, inside for dim 1.
    """

    dim: int
    split: bool = False

    def by_sample(self, t: Tensor, samples: int) -> Tensor:
        """(..., f) as (B, P, f).

        >>> SampleAxis(1).by_sample(torch.zeros(7, 3, 2), 3).shape
        torch.Size([3, 7, 2])
        """
        f = t.shape[-1]
        if samples == 1:
            return t.reshape(1, -1, f)
        if self.split:
            t = t.unflatten(0, (samples, -1) if self.dim == 0 else (-1, samples))
        return t.movedim(self.dim, 0).reshape(samples, -1, f)


def find_axis(signal: Tensor, lit: Tensor) -> SampleAxis | None:
    """The likeliest dimension along which a signal (..., f) is dark where a sample is not `lit` (B,); None where none is."""
    lead, samples = signal.shape[:-1], len(lit)
    axes = [SampleAxis(dim) for dim, size in enumerate(lead) if size == samples]
    if lead and lead[0] != samples and lead[0] % samples == 0:
        axes += [SampleAxis(0, split=True), SampleAxis(1, split=True)]
    tolerance = 1e-9 if signal.dtype == torch.float64 else 1e-5
    for axis in axes if samples > 1 else [SampleAxis(0)]:
        rows = axis.by_sample(signal, samples)
        if float(rows[~lit].norm()) <= tolerance * float(rows.norm()):
            return axis
    return None


def some_samples(samples: int, device: torch.device) -> Tensor:
    """A mask (B,) that is neither empty nor full (but full for one sample), with no period."""
    lit = torch.rand(samples, generator=torch.Generator().manual_seed(0)) < 0.5
    lit[0], lit[-1] = False, True
    return lit.to(device)


#: Draws a batch where the loss's curvature is sampled because it has too many outputs.
DRAWS = 16

#: How well a layer's form must give the gradient of plain backward.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

NO_GRAD = "it is called under torch.no_grad only: the loss does not depend on its weight"
NOT_CALLED = "the layer is not called in the forward pass"
READ_DIRECTLY = "no Kronecker form: the model reads its weight without calling it"
NO_SAMPLES = "no Kronecker form: its input has no dimension that counts the samples, or samples mix before the output"
NOT_AFFINE = "no Kronecker form: its weight does not act as W x on the input alone (another forward, or used elsewhere as well)"


@dataclass(frozen=True)
class Use:
    """One call of a layer: its input, its output as it stands in the graph, and which dimension counts the samples."""

    layer: AffineLayer
    x: Tensor
    z: Tensor
    axis: SampleAxis

    def inputs(self, samples: int) -> Tensor:
        """The input as (B, P, n); the patches of a convolution are made anew, for those of all layers would take much memory."""
        return self.axis.by_sample(self.layer.input_features(self.x), samples)

    def outputs(self, z: Tensor, samples: int) -> Tensor:
        """The output, or a gradient of its shape, as (B, P, m)."""
        return self.axis.by_sample(self.layer.output_features(z), samples)


@dataclass(frozen=True)
class LayerPass:
    """One batch: `uses` by layer, `share` that multiplies its loss in the objective, `fraction` of the samples that it holds.

    `loss` is None where all its labels are ignored: such a batch has inputs, but no part in the objective.
    """

    uses: dict[str, list[Use]]
    batch: Batch
    share: float
    fraction: float
    measured: Output
    loss: Tensor | None

    @property
    def output(self) -> Tensor:
        return self.measured.tensor

    def inputs(self, name: str) -> Tensor:
        """A layer's inputs (B, P, n), several uses side by side as positions."""
        return torch.cat([use.inputs(self.batch.size) for use in self.uses[name]], dim=1)

    def is_last(self, name: str) -> bool:
        """Whether the layer's output is the model's."""
        return any(
            use.z.numel() == self.output.numel() and torch.equal(use.z.detach().reshape(-1), self.output.detach().reshape(-1))
            for use in self.uses[name]
        )

    @cached_property
    def gradient(self) -> Tensor:
        """The loss gradient at the output, with its graph."""
        assert self.loss is not None
        return output_gradient(self.loss, self.measured)

    @cached_property
    def recogniser(self) -> Recogniser:
        return Recogniser(self.measured, self.gradient, self.batch.size)

    @cached_property
    def curvature(self) -> LossCurvature:
        """The loss's curvature at the output."""
        return self.recogniser.curvature()

    def roots(self, draws: int | None, max_passes: int, generator: torch.Generator) -> tuple[Iterator[Tensor], int]:
        """Roots of the loss's curvature, exact or sampled, and how many were drawn (0 for exact ones)."""
        count = draws if draws is not None else (0 if self.curvature.passes <= max_passes else DRAWS)
        return (self.curvature.sampled(count, generator), count) if count else (self.curvature.exact(), 0)

    def pulled(self, cotangents: Iterator[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Each cotangent of the output pulled back to all layers at once: (B, P, m) by name."""
        places = [(name, use) for name, uses in self.uses.items() for use in uses]
        for cotangent in cotangents:
            found = backward([self.output], [use.z for _, use in places], [cotangent], batched=False)
            parts: dict[str, list[Tensor]] = {}
            for (name, use), g in zip(places, found, strict=True):
                parts.setdefault(name, []).append(use.outputs(torch.zeros_like(use.z) if g is None else g, self.batch.size))
            yield {name: torch.cat(part, dim=1) for name, part in parts.items()}


def visit_batches(
    problem: Problem, recipes: list[AffineLayer], visit: Callable[[LayerPass], None], *, who: str, split: bool = True
) -> dict[str, str]:
    """Call `visit` with every batch; returns the layers that turned out to have no Kronecker form, with the reason.

    `split`: what is measured takes the loss to be a function of the output alone, which is checked on the first batch.
    A layer found out late has taken part in the batches before: its numbers are to be thrown away.
    """
    problem.output_choice()
    refused: dict[str, str] = {}
    absent: dict[str, str] = {}  # layers that some batch does not call, which is no harm if another does
    called: set[str] = set()
    samples = problem.samples
    parts = {f"{recipe.name} {i}": part for recipe in recipes for i, part in enumerate((recipe, *recipe.tied))}
    with problem.session():
        leaves = problem.leaves()
        tensors = problem.tensors(leaves)
        for i, (share, raw) in enumerate(zip(problem.weighting.shares, problem.data, strict=True)):
            batch = problem.placed(raw)
            with capturing({key: part.module for key, part in parts.items()}) as seen:
                if share > 0:
                    loss, measured = problem.evaluate(tensors, batch, i).through_output()
                else:
                    loss, measured = None, Output((problem.output(tensors, batch, i),))
                output = measured.tensor
            if not output.requires_grad:
                raise ValueError("The model's output does not depend on the measured parameters.")
            uses, faults, missing = _uses(problem, recipes, parts, seen, output, leaves, batch)
            refused |= faults
            absent |= missing
            called |= uses.keys()
            mine = {name: found for name, found in uses.items() if name not in refused}
            one = LayerPass(mine, batch, share, batch.size / samples, measured, loss)
            if split and loss is not None:
                refuse_other_ways(who, leaves, output, one.gradient.detach(), loss)
                split = False
            visit(one)
    return {name: why for name, why in absent.items() if name not in called} | refused


def _uses(
    problem: Problem,
    recipes: list[AffineLayer],
    parts: dict[str, AffineLayer],
    seen: Capture,
    output: Tensor,
    leaves: list[Tensor],
    batch: Batch,
) -> tuple[dict[str, list[Use]], dict[str, str], dict[str, str]]:
    """The checked uses of all layers; why the others are wrong, and why others are not there."""
    lit = some_samples(batch.size, output.device)
    layout = row_layouts(output.shape, batch.size)[0]
    rows = torch.randn(layout.samples, layout.per_sample, layout.classes, generator=torch.Generator().manual_seed(1))
    signal = layout.back(rows.to(output.device) * lit[:, None, None], output)
    calls = [
        (part, x, z)
        for key, part in parts.items()
        for x, z in zip(seen.inputs[key], seen.outputs[key], strict=True)
        if z.requires_grad
    ]
    weights = [leaves[problem.layers[recipe.name].weights[0]] for recipe in recipes]
    targets = [*(z for _, _, z in calls), *weights]
    found: list[Tensor | None] = backward([output], targets, [signal], batched=False)
    uses: dict[str, list[Use]] = {}
    faults: dict[str, str] = {}
    missing: dict[str, str] = {}
    for recipe, true in zip(recipes, found[len(calls) :], strict=True):
        mine = [(*call, g) for call, g in zip(calls, found, strict=False) if call[0].name == recipe.name]
        if not mine:
            silent = any(seen.outputs[f"{recipe.name} {i}"] for i in range(1 + len(recipe.tied)))
            used = true is not None and bool(true.any())
            missing[recipe.name] = READ_DIRECTLY if used else NO_GRAD if silent else NOT_CALLED
            continue
        checked = _checked(mine, true, lit)
        if isinstance(checked, str):
            faults[recipe.name] = checked
        else:
            uses[recipe.name] = checked
    return uses, faults, missing


def _checked(calls: list[tuple[AffineLayer, Tensor, Tensor, Tensor | None]], true: Tensor | None, lit: Tensor) -> list[Use] | str:
    """The calls of one layer with their sample dimensions, or why they are not `W x` sample by sample."""
    uses = []
    guess: Tensor | float = 0.0
    size = 0.0
    for layer, given, z, gradient in calls:
        x = layer.input_features(given)
        g = layer.output_features(torch.zeros_like(z) if gradient is None else gradient)
        axis = find_axis(g, lit)
        if axis is None:
            return NO_SAMPLES
        uses.append(Use(layer, given, z, axis))
        guess = guess + layer.weight_gradient(g, x)
        size += float(layer.weight_gradient(g.abs(), x.abs()).norm())  # what rounding is measured by
    gap = guess if true is None else guess - true.reshape(-1)
    assert isinstance(gap, Tensor)
    largest = max(size, 0.0 if true is None else float(true.norm()))
    return uses if float(gap.norm()) <= TOLERANCE[gap.dtype] * largest else NOT_AFFINE
