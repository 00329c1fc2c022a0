"""One batch through the network with the inputs and outputs of its affine layers noted, ready to be pulled back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.operators.factors.affine import AffineLayer, Capture, capturing
from theodolite.operators.factors.roots import OutputRows, exact_roots, sampled_roots
from theodolite.problem import Batch, Evaluation, Problem

#: Draws a batch where the loss's curvature is sampled because it has too many outputs.
DRAWS = 16


@dataclass(frozen=True)
class LayerPass:
    """One batch: `share` multiplies its loss in the objective, `weight` is its part of the data (all add up to 1)."""

    recipes: list[AffineLayer]
    seen: Capture
    batch: Batch
    share: float
    weight: float
    evaluation: Evaluation

    def inputs(self, recipe: AffineLayer) -> Tensor:
        """A layer's inputs (B, P, n), several uses side by side as positions."""
        parts = [recipe.inputs(x, self.batch.size) for x in self.seen.inputs[recipe.name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def outputs(self, recipe: AffineLayer) -> Tensor:
        """A layer's outputs (B, P, m), detached."""
        parts = [recipe.outputs(z.detach(), self.batch.size) for z in self.seen.outputs[recipe.name]]
        return torch.cat(parts, dim=1)

    def rows(self) -> OutputRows:
        (gradient,) = torch.autograd.grad(self.evaluation.loss, self.evaluation.output, create_graph=True)
        return OutputRows(self.evaluation.output, gradient, self.batch.size)

    def roots(self, draws: int | None, max_passes: int, generator: torch.Generator) -> tuple[Iterator[Tensor], bool]:
        """Roots of the loss's curvature, exact or sampled, and which of the two."""
        rows = self.rows()
        count = draws if draws is not None else (None if rows.passes <= max_passes else DRAWS)
        return (exact_roots(rows), False) if count is None else (sampled_roots(rows, count, generator), True)

    def pulled(self, cotangents: Iterator[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Each cotangent of the output pulled back to all layers at once: (B, P, m) by name."""
        places = [(recipe, z) for recipe in self.recipes for z in self.seen.outputs[recipe.name]]
        targets = [z for _, z in places]
        for cotangent in cotangents:
            found = torch.autograd.grad(self.evaluation.output, targets, cotangent, retain_graph=True, allow_unused=True)
            parts: dict[str, list[Tensor]] = {}
            for (recipe, z), g in zip(places, found, strict=True):
                parts.setdefault(recipe.name, []).append(recipe.outputs(torch.zeros_like(z) if g is None else g, self.batch.size))
            yield {name: part[0] if len(part) == 1 else torch.cat(part, dim=1) for name, part in parts.items()}


def layer_passes(problem: Problem, recipes: list[AffineLayer]) -> Iterator[LayerPass]:
    """All batches, one after the other; layers that a batch does not call are left out of its `recipes`."""
    total = sum(problem.weighting.shares)
    with problem.session():
        tensors = problem.tensors(problem.leaves())
        for i, share, batch in problem.iterate():
            with capturing({recipe.name: recipe.module for recipe in recipes}) as seen:
                evaluation = problem.evaluate(tensors, batch, i)
            used = [recipe for recipe in recipes if seen.outputs[recipe.name]]
            yield LayerPass(used, seen, batch, share, share / total, evaluation)
