"""Per-sample gradients of parameters that no layer-wise form covers: recurrent layers, attention, weights used twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from theodolite.problem import Batch, Problem
from theodolite.problem.second_order import functional_transforms
from theodolite.problem.tensors import map_tensors, named_tensors

#: Numbers of per-sample gradients written at once.
AT_ONCE = 2**24


def vectorised_rows(problem: Problem, leaves: Sequence[Tensor], which: Sequence[int], batch: Batch, chosen: Tensor) -> Tensor:
    """Gradients (n, c, q) of the chosen outputs with respect to some leaves, all samples as one program."""
    fixed = [leaf.detach() for leaf in leaves]
    own = {name for name, t in named_tensors(_fields(batch)) if _per_sample(t, batch)}
    fields = dict(named_tensors(_fields(batch)))

    def outputs(some: tuple[Tensor, ...], sample: dict[str, Tensor]) -> Tensor:
        values = list(fixed)
        for i, value in zip(which, some, strict=True):
            values[i] = value
        alone = _rebuilt(batch, {name: t[None] if name in own else t for name, t in sample.items()})
        return problem.output(problem.tensors(values), alone, 0, check=False).reshape(-1)[chosen]

    def rows(sample: dict[str, Tensor]) -> Tensor:
        out, pull, *_ = vjp(lambda *some: outputs(some, sample), *(fixed[i] for i in which))
        parts = vmap(pull)(torch.eye(len(out), dtype=out.dtype, device=out.device))
        return torch.cat([part.flatten(1) for part in parts], dim=1)

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
        rows = [_gradient(value, targets) for value in out]
        samples.append(torch.stack(rows))
    return torch.stack(samples)


def _gradient(value: Tensor, targets: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, targets, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in zip(found, targets, strict=True)])


def _fields(batch: Batch) -> Any:
    return {"args": batch.args, "kwargs": batch.kwargs}


def _per_sample(t: Tensor, batch: Batch) -> bool:
    return t.ndim > 0 and t.shape[0] == batch.size


def _rebuilt(batch: Batch, tensors: dict[str, Tensor]) -> Batch:
    """The batch with its input tensors replaced, in the order in which they are named."""
    values = iter(tensors.values())
    fields = map_tensors(lambda t: next(values), _fields(batch))
    return Batch(fields["args"], fields["kwargs"], batch.target, 1)
