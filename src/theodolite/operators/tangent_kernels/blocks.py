"""The gradients of all outputs of a block of samples, parameter by parameter, in their cheapest form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from theodolite.errors import BatchCoupledError
from theodolite.operators.autograd.graphs import backward
from theodolite.operators.tangent_kernels.features import Features, Form, Rows, Use, guesses
from theodolite.problem import Batch, Problem, join_like
from theodolite.problem.activations import Capture, capturing
from theodolite.problem.derivatives.second_order import functional_transforms
from theodolite.problem.tensors import map_tensors, named_tensors

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
        return sum(f.numel() for f in self.features.values()) * self.empty.element_size()


class BlockMaker:
    """Makes blocks of one problem; which form fits which parameter is found out on the first and kept for the others."""

    def __init__(self, problem: Problem, outputs: Iterable[int] | int | None) -> None:
        self.problem = problem
        self.wanted = _wanted(outputs)
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
            if not flat.requires_grad:
                raise ValueError("The model's output does not depend on the measured parameters.")
            cotangent = _random(flat.shape, flat)
            truth = torch.autograd.grad(flat, leaves, cotangent, retain_graph=True, allow_unused=True)
            features = self._layerwise(seen, flat, truth, cotangent, batch)
            rest = [i for i, g in enumerate(truth) if g is not None and i not in features]
            empty = flat.detach().new_empty(0)
            del flat, output
            if rest:
                true = torch.cat([truth[i].reshape(-1) for i in rest])
                rows = self._rest(leaves, rest, batch, chosen, true, cotangent)
                features |= {
                    i: Rows(r).to(empty.dtype)
                    for i, r in zip(rest, rows.split([leaves[i].numel() for i in rest], 2), strict=True)
                }
        return Block(features, empty, batch.size, len(chosen))

    def _flat(self, output: Tensor, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
        """The chosen outputs as (n, c), and which they are."""
        if batch.size > 1 and (output.ndim == 0 or output.shape[0] != batch.size):
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
        uses = {
            name: use
            for name, (module, own) in self.owners.items()
            if not self._shapeless.issuperset(own.values())
            and (use := Use.of(module, seen.inputs[name], seen.outputs[name], batch.size)).outputs
        }
        if not uses:  # a Taylor twin, say, which calls its layers inside a transform
            return {}
        made = [
            (name, i, [_Gathered(form, flat.shape[1]) for form in _safely(guesses(use, local))])
            for name, use in uses.items()
            for local, i in self.owners[name][1].items()
            if truth[i] is not None and i not in self._shapeless
        ]
        for parts in _pulled_back(flat, {name: use.outputs for name, use in uses.items()}):
            for name, _, several in made:
                for gathered in several:
                    gathered.add(parts[name])
        found: dict[int, Features] = {}
        for _, i, several in made:
            features = _first_fit(several, truth[i].reshape(-1), cotangent)  # type: ignore[union-attr]
            if features is None:
                self._shapeless.add(i)
            else:
                found[i] = features.to(flat.dtype)
        return found

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
        rows = looped_rows(self.problem, leaves, rest, batch, chosen)
        if fitted_factor(Rows(rows).summed(cotangent), true, exactly=True) is None:
            raise BatchCoupledError(
                "The gradients of samples taken one by one do not add up to those of the batch, so there is no tangent kernel: "
                "(a) an output depends on other samples (a mean over the batch); (b) an input whose first size happens to be the "
                f"number of samples, {batch.size}, is not per sample (a mask, a table): take another number of samples."
            )
        return rows


def _wanted(outputs: Iterable[int] | int | None) -> list[int] | None:
    if outputs is None:
        return None
    wanted = [outputs] if isinstance(outputs, int) else list(outputs)
    if any(not isinstance(j, int) or isinstance(j, bool) for j in wanted):
        raise ValueError(f"outputs must be positions in the flattened output of a sample, whole numbers. Got {wanted}.")
    return wanted


def _safely(forms: Iterator[Form]) -> list[Form]:
    """The guesses that can be made at all: a module may be called in ways that no recipe foresees."""
    found: list[Form] = []
    with suppress(RuntimeError, ValueError, IndexError, TypeError):
        found.extend(forms)
    return found


class _Gathered:
    """The features of one form, output after output; gradients that are written out go straight to their place."""

    def __init__(self, form: Form, outputs: int) -> None:
        self.form, self.outputs = form, outputs
        self.parts: list[Features] = []
        self.rows: Tensor | None = None
        self.count, self.failed = 0, False

    def add(self, pulled: list[Tensor]) -> None:
        """One more output."""
        if self.failed:
            return
        try:
            features = self.form(pulled)
        except (RuntimeError, ValueError, IndexError, TypeError):
            self.failed = True
            return
        if not isinstance(features, Rows):
            self.parts.append(features)
            return
        if self.rows is None:
            samples, _, size = features.rows.shape
            self.rows = features.rows.new_empty(samples, self.outputs, size)
        self.rows[:, self.count] = features.rows[:, 0]
        self.count += 1

    def joined(self) -> Features | None:
        """All outputs together; None where the form did not work, or was not the same for all."""
        if self.failed or (self.parts and self.rows is not None) or len({type(part) for part in self.parts}) > 1:
            return None
        return Rows(self.rows) if self.rows is not None else self.parts[0].with_outputs(self.parts[1:])


def _first_fit(candidates: Iterable[_Gathered], true: Tensor, cotangent: Tensor) -> Features | None:
    """The first form that gives the gradient of plain backward up to a factor."""
    for gathered in candidates:
        features = gathered.joined()
        factor = None if features is None else fitted_factor(features.summed(cotangent.to(true.dtype)), true)
        if features is not None and factor is not None:
            features.factor = factor
            return features
    return None


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


#: Numbers of per-sample gradients written at once.
AT_ONCE = 2**24


def vectorised_rows(problem: Problem, leaves: Sequence[Tensor], which: Sequence[int], batch: Batch, chosen: Tensor) -> Tensor:
    """Gradients (n, c, q) of the chosen outputs with respect to some leaves, all samples as one program."""
    fixed = [leaf.detach() for leaf in leaves]
    fields = dict(named_tensors(_fields(batch)))
    own = {name for name, t in fields.items() if t.ndim and t.shape[0] == batch.size}

    def outputs(some: tuple[Tensor, ...], sample: dict[str, Tensor]) -> Tensor:
        values = list(fixed)
        for i, value in zip(which, some, strict=True):
            values[i] = value
        alone = _rebuilt(batch, {name: t[None] if name in own else t for name, t in sample.items()})
        return problem.output(problem.tensors(values), alone, 0, check=False).reshape(-1)[chosen]

    def rows(sample: dict[str, Tensor]) -> Tensor:
        out, pull, *_ = vjp(lambda *some: outputs(some, sample), *(fixed[i] for i in which))
        parts = vmap(pull)(torch.eye(len(out), dtype=out.dtype, device=out.device))
        return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)  # a scalar parameter has (samples,)

    size = sum(fixed[i].numel() for i in which) * len(chosen)
    dims = {name: 0 if name in own else None for name in fields}
    with functional_transforms():
        found: Tensor = vmap(rows, in_dims=(dims,), chunk_size=max(1, AT_ONCE // size))(fields)
    return found.detach()


def looped_rows(problem: Problem, leaves: Sequence[Tensor], which: Sequence[int], batch: Batch, chosen: Tensor) -> Tensor:
    """The same sample by sample, for models that cannot be vectorised."""
    targets = [leaves[i] for i in which]
    samples = []
    for i in range(batch.size):
        out = problem.output(problem.tensors(leaves), batch.part(slice(i, i + 1)), i).reshape(-1)[chosen]
        rows = [torch.autograd.grad(value, targets, retain_graph=True, allow_unused=True) for value in out]
        samples.append(torch.stack([join_like(row, targets) for row in rows]))
    return torch.stack(samples)


def _fields(batch: Batch) -> Any:
    return {"args": batch.args, "kwargs": batch.kwargs}


def _rebuilt(batch: Batch, tensors: dict[str, Tensor]) -> Batch:
    """The batch with its input tensors replaced, in the order in which they are named."""
    values = iter(tensors.values())
    fields = map_tensors(lambda t: next(values), _fields(batch))
    return Batch(fields["args"], fields["kwargs"], batch.target, 1)
