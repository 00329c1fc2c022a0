"""The gradients of all outputs of a block of samples, parameter by parameter, in their cheapest form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from theodolite.operators.factors.affine import Capture, capturing
from theodolite.operators.graphs import backward
from theodolite.operators.kernel.features import Features, Rows
from theodolite.operators.kernel.per_sample import looped_rows, vectorised_rows
from theodolite.operators.kernel.recipes import Form, Use, guesses
from theodolite.problem import Batch, Problem

#: How well a guessed form must give the gradient of plain backward.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class Block:
    """Features of n samples with c outputs, by parameter (its position in the selection); one without has no gradient."""

    features: dict[int, Features]
    empty: Tensor  # no numbers, in the dtype and place of the outputs
    samples: int
    outputs: int

    def gram(self, other: Block) -> Tensor:
        """Inner products of all gradients, (n c, n' c')."""
        total = self.empty.new_zeros(self.samples * self.outputs, other.samples * other.outputs)
        for i in self.features.keys() & other.features.keys():
            mine, theirs = self.features[i], other.features[i]
            if type(mine) is not type(theirs):  # another number of positions, say
                mine, theirs = mine.written_out(), theirs.written_out()
            mine.add_gram(theirs, total)
        return total

    def bytes(self) -> int:
        return sum(f.numel() for f in self.features.values()) * 8


class BlockMaker:
    """Makes blocks of one problem; which form fits which parameter is found out on the first and kept for the others."""

    def __init__(self, problem: Problem, outputs: Iterable[int] | None) -> None:
        self.problem = problem
        self.wanted = None if outputs is None else list(outputs)
        self.vectorised = True
        self._shapeless: set[int] = set()  # parameters that no form fits

    @cached_property
    def owners(self) -> dict[str, tuple[nn.Module, dict[str, int]]]:
        """Modules by name that own measured parameters directly: local name -> position in the selection."""
        place = {id(p): i for i, p in enumerate(self.problem.parameters)}
        found: dict[str, tuple[nn.Module, dict[str, int]]] = {}
        for name, module in self.problem.model.named_modules():
            own = {local: place.pop(id(p)) for local, p in module._parameters.items() if p is not None and id(p) in place}
            if own:
                found[name] = (module, own)
        return found

    def make(self, batch: Batch, index: int) -> Block:
        """The block of one batch."""
        problem = self.problem
        with problem.session(second=False):
            leaves = problem.leaves()
            with capturing({name: module for name, (module, _) in self.owners.items()}) as seen:
                output = problem.output(problem.tensors(leaves), batch, index)
            flat, chosen = self._flat(output, batch, index)
            cotangent = _random(flat.shape, flat)
            truth = torch.autograd.grad(flat, leaves, cotangent, retain_graph=True, allow_unused=True)
            features = self._layerwise(seen, flat, truth, cotangent, batch)
            rest = [i for i, g in enumerate(truth) if g is not None and i not in features]
            empty = flat.detach().new_empty(0)
            del flat, output
            if rest:
                true = torch.cat([truth[i].reshape(-1) for i in rest])
                rows = self._rest(leaves, rest, batch, chosen, true, cotangent)
                features |= {i: Rows(r) for i, r in zip(rest, rows.split([leaves[i].numel() for i in rest], 2), strict=True)}
        return Block(features, empty, batch.size, len(chosen))

    def _flat(self, output: Tensor, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
        """The chosen outputs as (n, c), and which they are."""
        if output.ndim == 0 or output.shape[0] != batch.size:
            raise ValueError(
                f"A tangent kernel needs one row of outputs per sample. Batch {index} has {batch.size} samples, "
                f"but the output has shape {tuple(output.shape)}."
            )
        flat = output.reshape(batch.size, -1)
        if self.wanted is None:
            return flat, torch.arange(flat.shape[1], device=flat.device)
        bad = [j for j in self.wanted if not -flat.shape[1] <= j < flat.shape[1]]
        if bad or not self.wanted:
            raise ValueError(f"outputs must name some of the {flat.shape[1]} outputs of a sample. Got {bad or self.wanted}.")
        chosen = torch.tensor(self.wanted, device=flat.device) % flat.shape[1]
        return flat[:, chosen], chosen

    def _layerwise(
        self, seen: Capture, flat: Tensor, truth: tuple[Tensor | None, ...], cotangent: Tensor, batch: Batch
    ) -> dict[int, Features]:
        hopeful = {
            name: owner
            for name, owner in self.owners.items()
            if seen.outputs[name] and not self._shapeless.issuperset(owner[1].values())
        }
        forms = self._forms(hopeful, seen, truth, batch)
        pulled = _pulled_back(flat, {name: seen.outputs[name] for name in hopeful})
        made = [[[form(parts[name]) for form in several] for name, _, several in forms] for parts in pulled]
        found: dict[int, Features] = {}
        for place, (_, i, several) in enumerate(forms):
            for k in range(len(several)):
                first, *others = [per_output[place][k] for per_output in made]
                features = first.with_outputs(others)
                factor = fitted_factor(features.summed(cotangent), truth[i].reshape(-1))  # type: ignore[union-attr]
                if factor is not None:
                    features.factor = factor
                    found[i] = features
                    break
            else:
                self._shapeless.add(i)
        return found

    def _forms(
        self, hopeful: dict[str, tuple[nn.Module, dict[str, int]]], seen: Capture, truth: tuple[Tensor | None, ...], batch: Batch
    ) -> list[tuple[str, int, list[Form]]]:
        """(module, parameter, forms its gradients may have)."""
        uses = {name: Use(module, seen.inputs[name], seen.outputs[name], batch.size) for name, (module, _) in hopeful.items()}
        return [
            (name, i, list(guesses(uses[name], local)))
            for name, (_, own) in hopeful.items()
            for local, i in own.items()
            if truth[i] is not None and i not in self._shapeless
        ]

    def _rest(
        self, leaves: list[Tensor], rest: list[int], batch: Batch, chosen: Tensor, true: Tensor, cotangent: Tensor
    ) -> Tensor:
        """Gradients (n, c, q) of the parameters without a form, as one program or, where that fails, sample by sample."""
        if self.vectorised:
            try:
                rows = vectorised_rows(self.problem, leaves, rest, batch, chosen)
                if fitted_factor(Rows(rows).summed(cotangent), true, exactly=True) is not None:
                    return rows
            except (RuntimeError, NotImplementedError, ValueError):
                pass  # no vectorised form: a recurrent layer, a branch on data
            self.vectorised = False
        return looped_rows(self.problem, leaves, rest, batch, chosen)


def fitted_factor(guess: Tensor, true: Tensor, *, exactly: bool = False) -> float | None:
    """The factor that makes a guess the true gradient, or None where none does."""
    if guess.shape != true.shape:
        return None
    scale = float(guess.double().square().sum())
    factor = 1.0 if exactly or scale == 0.0 else float((guess.double() * true.double()).sum()) / scale
    factor = 1.0 if abs(factor - 1.0) < TOLERANCE[true.dtype] else factor
    gap = float((factor * guess - true).norm())
    return factor if gap <= TOLERANCE[true.dtype] * float(true.norm()) else None


def _pulled_back(flat: Tensor, targets: dict[str, list[Tensor]]) -> Iterator[dict[str, list[Tensor]]]:
    """One output after the other, of all samples at once, pulled back to the layers: (1, *target.shape) by name."""
    places = [z for several in targets.values() for z in several]
    for j in range(flat.shape[1]):
        cotangent = torch.zeros_like(flat)
        cotangent[:, j] = 1.0
        parts = iter(backward([flat], places, [cotangent], batched=False))
        yield {
            name: [(torch.zeros_like(z) if g is None else g)[None] for z, g in zip(several, parts, strict=False)]
            for name, several in targets.items()
        }


def _random(shape: torch.Size, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like)
