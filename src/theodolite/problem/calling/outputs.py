"""What of all that a model returns is measured: the tensors that the loss reads.

A loss of one tensor is given the `.logits`, or the first floating tensor. One that takes the whole structure, or is computed
by the model itself, may read any of them: which ones, the way back from its value tells. Several count as one output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from theodolite.interrupts import unbroken
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.text import listed


@dataclass(frozen=True)
class Output:
    """The tensors that the loss of a batch is a function of, as they stand in the graph, and all of them as one.

    Several are put side by side along the samples, their first size. Where the model returns a list with one of `samples` in each
    place, they are put one after the other.

    >>> found = Output((torch.zeros(4, 2, 3), torch.ones(4, 5)))
    >>> found.tensor.shape, [part.shape for part in found.split(found.tensor)]
    (torch.Size([4, 11]), [torch.Size([4, 2, 3]), torch.Size([4, 5])])
    """

    parts: tuple[Tensor, ...]
    samples: int = 0

    @cached_property
    def tensor(self) -> Tensor:
        return self.join(self.parts)

    @cached_property
    def rows(self) -> int:
        """The size along which several tensors are put side by side; 0 where they have none in common."""
        sizes = [part.shape[0] if part.ndim else 0 for part in self.parts]
        fewest = min(sizes)
        return fewest if fewest and not self.samples and not any(size % fewest for size in sizes) else 0

    def join(self, values: Sequence[Tensor | None]) -> Tensor:
        """Values of the parts' shapes, (*lead, *shape), as one of the output's; None is zero."""
        if len(self.parts) == 1 and values[0] is not None:
            return values[0]
        given = next((v for v in zip(values, self.parts, strict=True) if v[0] is not None), None)
        lead = given[0].shape[: given[0].ndim - given[1].ndim] if given is not None and given[0] is not None else torch.Size()
        filled = [p.new_zeros(*lead, *p.shape) if v is None else v for v, p in zip(values, self.parts, strict=True)]
        if len(filled) == 1:
            return filled[0]
        inner = (self.rows, -1) if self.rows else (-1,)
        joined = torch.cat([v.reshape(*lead, *inner) for v in filled], dim=-1)
        return joined.reshape(*lead, self.samples, -1) if self.samples else joined

    @cached_property
    def moving(self) -> list[Tensor]:
        """The parts that depend on what is differentiated."""
        return [part for part in self.parts if part.requires_grad]

    def join_moving(self, values: Sequence[Tensor | None]) -> Tensor | None:
        """The same for values of those parts alone; None where all of them are."""
        if all(value is None for value in values):
            return None
        given = iter(values)
        return self.join([next(given) if part.requires_grad else None for part in self.parts])

    @property
    def entangled(self) -> bool:
        """Whether one of several tensors is computed from another, so that a derivative in that one holds more than its own."""
        named = {str(i): part for i, part in enumerate(self.moving)}
        others = ((part, {n: t for n, t in named.items() if n != name}) for name, part in named.items())
        return any(read_in_graph(part, rest) for part, rest in others)

    def split(self, value: Tensor) -> list[Tensor]:
        """The inverse of `join`."""
        if len(self.parts) == 1:
            return [value]
        widths = [part.numel() // (self.rows or 1) for part in self.parts]
        value = value.reshape(-1) if self.samples else value
        return [v.reshape(part.shape) for v, part in zip(value.split(widths, dim=-1), self.parts, strict=True)]


class OutputChoice:
    """Which tensors of what a model returns are measured, found out once for each form that it has."""

    def __init__(self, known: Mapping[tuple[str, ...], tuple[str, ...]] | None = None) -> None:
        self._known = dict(known or {})

    def copy(self) -> OutputChoice:
        return OutputChoice(self._known)

    def __call__(self, raw: Any) -> Tensor:
        """The measured tensors as one, by what is known already."""
        return raw if isinstance(raw, Tensor) else self.of(raw, lambda found: None).tensor

    def of(self, raw: Any, read: Callable[[dict[str, Tensor]], Iterable[str] | None]) -> Output:
        """The measured tensors of `raw`; `read` names those that the loss reads where it is not known yet, or None."""
        found = possible_outputs(raw)
        if not found:
            raise ValueError(f"The model must return a tensor, a tuple or a mapping with one. Got {type(raw).__name__}.")
        form = tuple(found)
        names = self._known.get(form) if len(found) > 1 else form
        if names is None:
            names = self._find(found, read)
        parts = tuple(found[name] for name in names)
        return Output(parts, _listed_samples(raw, names, parts))

    def _find(self, found: dict[str, Tensor], read: Callable[[dict[str, Tensor]], Iterable[str] | None]) -> tuple[str, ...]:
        names = read(found)
        if names is None:  # it cannot be told here: what is known of another form, or else the likeliest
            return next((known for known in self._known.values() if found.keys() >= set(known)), (main_name(found),))
        chosen = tuple(names) or (main_name(found),)
        self._known[tuple(found)] = chosen
        return chosen

    @property
    def note(self) -> str | None:
        """What to tell the reader where the loss reads several tensors."""
        several = next((names for names in self._known.values() if len(names) > 1), ())
        if not several:
            return None
        return f"the loss reads {len(several)} of the model's outputs ({listed(several, 4)}): they are measured as one"


def _listed_samples(raw: Any, names: Sequence[str], parts: Sequence[Tensor]) -> int:
    """How many samples a list holds, one in each place with as many numbers in it; 0 where it is none."""
    if not isinstance(raw, list) or len(names) < 2 or all(t.ndim and t.shape[0] == parts[0].shape[0] == len(raw) for t in parts):
        return 0
    numbers = dict.fromkeys((f"[{i}]" for i in range(len(raw))), 0)
    for name, part in zip(names, parts, strict=True):
        numbers[name[: name.index("]") + 1]] += part.numel()
    return len(raw) if len(set(numbers.values())) == 1 else 0


def main_output(raw: Any) -> Tensor:
    """The tensor that the loss is a function of: the output, its `.logits`, or the first floating tensor."""
    return OutputChoice()(raw)


def main_name(found: Mapping[str, Tensor]) -> str:
    """The likeliest of several outputs: `logits`, or the first."""
    return next((name for name in found if name == "logits" or name.endswith((".logits", "['logits']"))), next(iter(found)))


def possible_outputs(raw: Any) -> dict[str, Tensor]:
    """The floating tensors of a structure by name; single numbers only where there is nothing else."""
    logits = getattr(raw, "logits", None)  # of an object that nobody can walk through
    found = {name: t for name, t in named_tensors(raw) if t.is_floating_point()}
    if not found and isinstance(logits, Tensor):
        return {"logits": logits}
    return {name: t for name, t in found.items() if t.ndim > 0} or found


def read_by_loss(loss: Callable[[Any], Tensor], raw: Any) -> list[str] | None:
    """Names of the tensors of `raw` that a loss of the whole structure depends on; None where it cannot be called here."""
    leaves = {id(t): t.detach().clone().requires_grad_() for t in possible_outputs(raw).values()}
    given = map_tensors(lambda t: leaves.get(id(t), t.detach()), raw)
    try:
        with unbroken(torch.enable_grad()):
            value = loss(given)
        if not value.requires_grad:
            return []
        grads = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError):
        return None
    read = {key for key, g in zip(leaves, grads, strict=True) if g is not None}
    first = {id(t): name for name, t in reversed(possible_outputs(raw).items())}  # a tensor returned twice counts once
    return [name for name, t in possible_outputs(raw).items() if id(t) in read and first[id(t)] == name]


def read_in_graph(loss: Tensor, found: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that the graph of a loss comes to first on its way back to the parameters."""
    others = [(name, t) for name, t in reversed(list(found.items())) if t is not loss and t.requires_grad]
    places = {(t.grad_fn, t.output_nr): name for name, t in others if t.grad_fn is not None}
    leaves = {id(t): name for name, t in others if t.grad_fn is None}
    stack: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    seen: set[Any] = set()
    read: set[str] = set()
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or edge in seen:
            continue
        seen.add(edge)
        name = places.get(edge) or leaves.get(id(getattr(node, "variable", None)))
        if name is not None:
            read.add(name)
        elif node not in seen:
            seen.add(node)
            stack.extend(node.next_functions)
    return [name for name in found if name in read]
