"""Which parameters can train: dead, duplicated, unused, tied and frozen ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.measures.audit.data import duplicate_rows
from theodolite.problem import Problem
from theodolite.problem.parameters import Layer, clean_names
from theodolite.results import Cost, Outcome, Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ParameterAudit(Result):
    """What the parameters of each layer are good for.

    Units that move no output on any sample (`dead`), that repeat another (`duplicated`), weights on inputs that are always zero
    (`silent_inputs`), rows of embeddings that the data never asks for (`unused_rows`).

    `dead_layers` are those without any effect, `tied` groups of names for one tensor, `frozen` names that require no
    gradient, `unreached` measured parameters that the output does not depend on at all. `waiting` layers move nothing only
    because the parameters `waiting_for` are still zero: they begin to train after the first step, and are not counted as dead.
    """

    layers: tuple[Row, ...]
    dead_layers: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    frozen: tuple[str, ...]
    frozen_count: int
    unreached: tuple[str, ...]
    waiting: tuple[str, ...]
    waiting_for: tuple[str, ...]
    parameters: int
    motionless: bool

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.layers]

    def total(self, column: str) -> int:
        """A column of the layers added up."""
        return sum(int(row[column]) for row in self.layers)

    def sentence(self) -> str:
        parts = [f"{self.parameters} parameters in {len(self.layers)} layers"]
        parts += [f"{self.total(name)} {name.replace('_', ' ')}" for name in ("dead", "duplicated") if self.total(name)]
        if self.frozen:
            parts.append(f"{self.frozen_count} frozen")
        return ", ".join(parts) + "."


def audit_parameters(problem: Problem) -> ParameterAudit:
    """One backward pass from random combinations of the outputs, so that a vanishing loss hides nothing.

    A parameter is dead where no output of any sample depends on it at first order: its derivative is exactly zero.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = nn.init.constant_(model[0].bias, -100.0)
    >>> audit_parameters(Problem(model, nn.MSELoss(), (torch.rand(5, 2), torch.rand(5, 1)))).dead_layers
    ('0',)
    """
    began = time.perf_counter()
    reach = _reach(problem)
    rows = [_layer_row(problem, layer, reach) for layer in problem.layers.values()]
    # Biases at zero hold nothing back.
    weights = [i for layer in problem.layers.values() for i in layer.weights]
    zero = [i for i in weights if _waits(problem.parameters[i], reach[i])]
    waiting: list[str] = []
    if zero and any(row["dead"] for row in rows):
        # Behind weights that are zero but will train nothing moves yet; it will after the first step.
        later = _reach(problem, shaken={i: reach[i] for i in zero})
        before, rows = rows, [_layer_row(problem, layer, later) for layer in problem.layers.values()]
        waiting = [str(a["layer"]) for a, b in zip(before, rows, strict=True) if a["dead"] > b["dead"]]
    motionless = not any(bool(r.any()) for r in reach if r is not None)
    names, model = clean_names(name for name, _ in problem.model.named_parameters()), problem.model
    frozen = [(names[k], p.numel()) for k, p in model.named_parameters() if not p.requires_grad]
    return ParameterAudit(
        layers=tuple(rows),
        dead_layers=() if motionless else tuple(str(row["layer"]) for row in rows if _is_dead(problem, row, reach)),
        tied=_tied(model),
        frozen=tuple(name for name, _ in frozen),
        frozen_count=sum(size for _, size in frozen),
        waiting=tuple(waiting),
        waiting_for=tuple(problem.names[i] for i in zero) if waiting else (),
        unreached=tuple(name for name, r in zip(problem.names, reach, strict=True) if r is None),
        parameters=problem.size,
        motionless=motionless,
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="gradients of outputs"),
    )


def _is_dead(problem: Problem, row: Row, reach: list[Tensor | None]) -> bool:
    """Whether all units of a layer are dead, though the output is computed from it (else it is unused, not dead)."""
    layer = problem.layers[row["layer"]]
    used = any(reach[i] is not None for i in (*layer.weights, *layer.biases))
    return used and bool(row["units"]) and row["dead"] == row["units"]


def _waits(p: Tensor, moved: Tensor | None) -> bool:
    """Whether a parameter is zero throughout and yet moves an output: initialised at zero, and about to train."""
    return moved is not None and bool(moved.any()) and not bool(p.detach().any())


def _reach(problem: Problem, shaken: Mapping[int, Tensor | None] | None = None) -> list[Tensor | None]:
    """For each measured parameter, which of its entries move an output; None where the output does not depend on it.

    The marked entries of the parameters `shaken` are given small random values first (in stand-ins; the model is not touched).
    """
    generator = torch.Generator().manual_seed(0)
    touched: list[Tensor | None] = [None] * len(problem.names)
    with problem.session(second=False):
        leaves = problem.leaves()
        for i, entries in (shaken or {}).items():
            noise = 0.01 * torch.randn(leaves[i].shape, generator=generator, dtype=torch.float32).to(leaves[i])
            leaves[i] = (noise if entries is None else noise * entries).requires_grad_()
        tensors = problem.tensors(leaves)
        for i, _, batch in problem.iterate():
            output = problem.evaluate(tensors, batch, i).output
            mix = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
            for place, g in enumerate(torch.autograd.grad((output * mix).sum(), leaves, allow_unused=True)):
                if g is not None:
                    moved, before = g != 0, touched[place]
                    touched[place] = moved if before is None else before | moved
    return touched


def _layer_row(problem: Problem, layer: Layer, reach: list[Tensor | None]) -> Row:
    parameters = problem.parameters
    members = [*layer.weights, *layer.biases]
    matrices = [i for i in layer.weights if parameters[i].ndim >= 2]
    row: Row = {
        "layer": layer.name,
        "kind": layer.kind,
        "parameters": sum(parameters[i].numel() for i in members),
        **dict.fromkeys(("units", "dead", "duplicated", "silent_inputs", "unused_rows"), 0),
    }
    if all(reach[i] is None for i in members):
        return row  # unused, which is another thing than dead
    # Layers with several matrices (recurrent ones, packed attention) are judged as a whole only.
    if len(matrices) != 1:
        moved = any(bool(r.any()) for i in members if (r := reach[i]) is not None)
        return {**row, "units": 1, "dead": int(not moved)}
    weight: Tensor = parameters[matrices[0]]
    seen = reach[matrices[0]]
    seen = torch.zeros(weight.shape, dtype=torch.bool) if seen is None else seen
    if "Embedding" in layer.kind:
        return {**row, "units": 1, "dead": int(not bool(seen.any())), "unused_rows": int((~seen.flatten(1).any(1)).sum())}
    if layer.kind == "Conv1D" or layer.kind.startswith("ConvTranspose"):  # stored with the inputs first
        weight, seen = weight.transpose(0, 1), seen.transpose(0, 1)
        if any(parameters[i].ndim == 1 and len(parameters[i]) != len(weight) for i in layer.biases):
            return {**row, "units": 1, "dead": int(not bool(seen.any()))}  # groups
    vectors = [i for i in members if parameters[i].ndim == 1 and len(parameters[i]) == weight.shape[0]]
    alive = seen.reshape(len(seen), -1).any(1)
    for i in vectors:
        if (r := reach[i]) is not None:
            alive = alive | r.to(alive.device)
    biases = [parameters[i].detach()[:, None].to(weight) for i in vectors]
    with_bias = torch.cat([weight.detach().reshape(len(weight), -1), *biases], dim=1)
    duplicates = [group for group in duplicate_rows(with_bias) if bool(with_bias[group[0]].any())] if len(weight) > 1 else []
    silent = int((~seen.transpose(0, 1).flatten(1).any(1)).sum()) if weight.ndim == 2 and bool(alive.any()) else 0
    return {
        **row,
        "units": weight.shape[0],
        "dead": int((~alive).sum()),
        "duplicated": sum(len(group) - 1 for group in duplicates),
        "silent_inputs": silent,
    }


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[id(p)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
