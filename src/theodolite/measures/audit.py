"""What is there before anything is measured: batches, inputs, parameters; what is dead, doubled, tied, frozen or not finite."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.arguments import checked, place
from theodolite.errors import NonFiniteError, WeightingError
from theodolite.measures.progress.gradient_flow import in_forward_order, record_forward
from theodolite.problem import Batch, Problem
from theodolite.problem.arguments import a_problem
from theodolite.problem.parameters import Layer, clean_names, padding_rows
from theodolite.problem.tensors import named_tensors
from theodolite.problem.weighting import IGNORED
from theodolite.results import Cost, Outcome, Result, Row

__all__ = ["BatchAudit", "InputAudit", "ParameterAudit", "audit_batches", "audit_inputs", "audit_parameters"]


#: Samples of inputs looked at; features that agree on so many agree.
SAMPLES = 2000
#: Features treated at a time, to bound the memory.
CHUNK = 4096


def duplicate_rows(matrix: Tensor, tolerance: float = 1e-6) -> list[list[int]]:
    """Groups of rows that agree to a relative `tolerance`, each with at least two members.

    Rows are sorted by a random projection, so that equal ones become neighbours, and neighbours are compared in full.

    >>> duplicate_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    [[0, 2]]
    """
    rows = matrix.detach().double().flatten(1)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows.device)
    order = torch.argsort(rows @ direction, stable=True)
    ordered = rows[order]
    size = torch.maximum(ordered[1:].abs().amax(1), ordered[:-1].abs().amax(1))
    same = ((ordered[1:] - ordered[:-1]).abs().amax(1) <= tolerance * size).tolist()
    return _runs(order.tolist(), same)


def _runs(order: list[int], same: Iterable[bool]) -> list[list[int]]:
    """Groups of neighbours that are the `same` as the one before."""
    groups = [[i] for i in order[:1]]
    for i, equal in zip(order[1:], same, strict=True):
        if equal:
            groups[-1].append(i)
        else:
            groups.append([i])
    return sorted(sorted(group) for group in groups if len(group) > 1)


# Every batch once: its loss, its gradient, its weight, and where NaN or infinity first appears.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchAudit(Result):
    """The batches one by one. `bad` says what is not finite, batch by batch and parameter by parameter.

    `loss` weighs each batch by what its loss divides by (`rule`), `naive_loss` averages the batches as they come.
    `labels` counts the labels where they are classes, `ignored` those that do not count, `label_entropy` is the entropy of
    their frequencies in nats.
    """

    batches: tuple[Row, ...]
    rule: str
    loss: float
    naive_loss: float
    ignored: int
    labels: int
    classes: int
    majority: float
    label_entropy: float
    bad: tuple[str, ...]

    @property
    def finite(self) -> bool:
        return not self.bad

    @property
    def sizes(self) -> list[int]:
        return [int(row["samples"]) for row in self.batches]

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.batches]

    def sentence(self) -> str:
        if self.bad:
            return " ".join(self.bad[:3])
        batches = f"{len(self.batches)} batches, " if len(self.batches) > 1 else ""
        return f"{batches}{sum(self.sizes)} samples, weighted by {self.rule}; the loss is {self.loss:.4g} and finite everywhere."


@checked(problem=a_problem)
def audit_batches(problem: Problem) -> BatchAudit:
    """One pass over the data, loss and gradient; nothing is raised for NaN, it is written down.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.ones(3, 1)
    >>> audit_batches(Problem(model, torch.nn.MSELoss(), [(x, x), (x[:1], x[:1])])).sizes
    [3, 1]
    """
    began = time.perf_counter()
    bad = _bad_parameters(problem)
    weights, rule = _weights(problem)
    rows: list[Row] = []
    with problem.session(second=False):
        leaves = problem.leaves()
        tensors = problem.tensors(leaves)
        for i, batch in enumerate(problem.data):
            loss, norm = math.nan, math.nan
            if weights is None or weights[i] > 0:
                try:
                    value = problem.evaluate(tensors, problem.placed(batch), i).loss
                    loss = float(value.detach())
                    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
                    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
                    if not math.isfinite(norm):
                        bad.append(_bad_gradient(i, problem, gradients))
                except NonFiniteError as error:
                    bad.append(str(error))
            weight = None if weights is None else weights[i]
            rows.append({"batch": i, "samples": batch.size, "weight": weight, "loss": loss, "gradient_norm": norm})
    labels, ignored = _labels(problem)
    counted = [row["loss"] for row in rows if row["weight"] is None or row["weight"] > 0]
    weighted = math.nan
    if weights is not None:
        total = 1.0 if rule == "sum" else sum(weights)
        weighted = float(sum(row["weight"] * row["loss"] for row in rows if row["weight"] > 0)) / total
    return BatchAudit(
        batches=tuple(rows),
        rule=rule,
        loss=weighted,
        naive_loss=sum(counted) / max(1, len(counted)),
        ignored=ignored,
        labels=sum(labels.values()),
        classes=len(labels),
        majority=max(labels.values(), default=0) / max(1, sum(labels.values())),
        label_entropy=-sum(n / labels.total() * math.log(n / labels.total()) for n in labels.values()),
        bad=tuple(bad),
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="gradients of batches"),
    )


def _weights(problem: Problem) -> tuple[tuple[float, ...] | None, str]:
    try:
        return problem.weighting.weights, problem.weighting.rule
    except (WeightingError, NonFiniteError) as error:
        return None, f"unknown ({error})"


def _bad_parameters(problem: Problem) -> list[str]:
    bad = []
    for kind, named in (("parameter", problem.model.named_parameters()), ("buffer", problem.model.named_buffers())):
        for name, t in named:
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                bad.append(f"The {kind} {name} holds {int((~torch.isfinite(t)).sum())} NaN or inf of {t.numel()} values.")
    return bad


def _bad_gradient(index: int, problem: Problem, gradients: tuple[Tensor | None, ...]) -> str:
    for name, g in zip(problem.names, gradients, strict=True):
        if g is not None and not bool(torch.isfinite(g).all()):
            return f"The loss of batch {index} is finite, but its gradient is not: {name} is the first parameter concerned."
    return f"The gradient of batch {index} overflows."


def _labels(problem: Problem) -> tuple[Counter[int], int]:
    """How often each class label occurs, and how many labels are ignored."""
    counts: Counter[int] = Counter()
    for batch in problem.data:
        target = batch.target
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
            continue
        values, times = torch.unique(target, return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    ignored = counts.pop(getattr(problem.loss_function, "ignore_index", IGNORED), 0)
    return counts, ignored


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class InputAudit(Result):
    """Features of the (one, floating-point) input: `constant` ones, and groups that are the same up to shift and scale.

    `names` are those of the columns, where they have some.
    """

    features: int
    samples: int
    constant: tuple[int, ...]
    duplicated: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    def called(self, feature: int) -> str:
        """How a sentence calls a feature: by its name in quotes, or by its number."""
        feature = place("feature", feature, self.features)
        return repr(self.names[feature]) if self.names else str(feature)

    @property
    def redundant(self) -> int:
        """Features that could be left out because another says the same."""
        return sum(len(group) - 1 for group in self.duplicated)

    def rows(self) -> list[Row]:
        named = [*((group, "same") for group in self.duplicated), *([(self.constant, "constant")] if self.constant else [])]
        return [{"features": ", ".join(map(self.called, group[:8])), "count": len(group), "what": what} for group, what in named]

    def sentence(self) -> str:
        if not self.constant and not self.duplicated:
            return f"All {self.features} inputs vary and no two are the same."
        return f"Of {self.features} inputs {len(self.constant)} never change and {self.redundant} repeat another."


def has_main_input(problem: Problem) -> bool:
    """Whether the data has one floating-point input, a matrix or more for each batch."""
    return _main_tensor(next(iter(problem.data))) is not None


def _main_tensor(batch: Batch) -> Tensor | None:
    floating = [t for _, t in named_tensors(batch.inputs) if t.is_floating_point() and t.ndim >= 2]
    return floating[0] if len(floating) == 1 and floating[0].shape[0] == batch.size else None


def main_input(problem: Problem) -> Tensor | None:
    """The input of all samples as a matrix (samples, features), if it is one floating tensor; at most `SAMPLES` rows."""
    parts: list[Tensor] = []
    for batch in problem.data:
        found = _main_tensor(batch)
        if found is None:
            return None
        parts.append(found.flatten(1)[: SAMPLES - sum(map(len, parts))])
        if sum(map(len, parts)) >= SAMPLES:
            break
    if len({part.shape[1] for part in parts}) != 1:
        return None
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def column_names(problem: Problem, features: int) -> tuple[str, ...]:
    """The names of the columns of a table that the flattened inputs are; none where the inputs came as something else."""
    names = problem.data.columns
    return names if names is not None and len(names) == features else ()


@checked(problem=a_problem)
def audit_inputs(problem: Problem) -> InputAudit:
    """Find constant and duplicated features; feature numbers count through the flattened sample.

    Two features are the same if one is the other shifted and scaled, up to the rounding of their own precision; features that
    stand out on fewer than five samples are not compared, for rare ones fall together by chance.

    >>> x = torch.tensor([[1.0, 5.0, 2.0], [2.0, 5.0, 4.0], [4.0, 5.0, 8.0], [5.0, 5.0, 10.0], [9.0, 5.0, 18.0], [0.0, 5.0, 0.0]])
    >>> audit_inputs(Problem(torch.nn.Linear(3, 1), torch.nn.MSELoss(), (x, torch.zeros(6, 1)))).duplicated
    ((0, 2),)
    """
    began = time.perf_counter()
    x = main_input(problem)
    if x is None:
        raise ValueError("audit_inputs needs data with one floating-point input of equal shape in all batches.")
    direction = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    still, rare, place, blur = (torch.cat(column) for column in zip(*_facts(x, direction), strict=True))
    usable = torch.nonzero(~still & ~rare).flatten()
    groups = _same(x, usable, place, blur) if len(x) > 2 else []
    return InputAudit(
        features=x.shape[1],
        samples=len(x),
        constant=tuple(torch.nonzero(still).flatten().tolist()),
        duplicated=tuple(tuple(group) for group in groups),
        names=column_names(problem, x.shape[1]),
        outcome=Outcome.FINISHED,
        cost=Cost(seconds=time.perf_counter() - began, route="comparison of features"),
    )


def _facts(x: Tensor, direction: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """By chunks of features: whether constant, whether rare, a number that copies share, and how blurred it is."""
    eps = torch.finfo(x.dtype).eps
    for start in range(0, x.shape[1], CHUNK):
        part = x[:, start : start + CHUNK].double()
        largest = part.abs().amax(0).clamp_min(1e-300)
        centred = part - part.mean(0)
        spread = centred.abs().amax(0)
        still = spread <= 4 * eps * largest
        usual = part.median(0).values
        rare = ((part - usual).abs() > 1e-3 * spread).sum(0) < min(5, max(1, len(x) // 3))
        scaled = _signed(centred / spread.clamp_min(1e-300))
        blur = 1e-6 + 8 * eps * largest / spread.clamp_min(1e-300)
        yield still, rare, direction @ scaled, blur


def _signed(columns: Tensor) -> Tensor:
    """Columns turned so that their largest entry is positive: a mirrored copy is a copy too."""
    peak = columns.gather(0, columns.abs().argmax(0, keepdim=True))
    return columns * torch.sign(peak)


def _same(x: Tensor, usable: Tensor, place: Tensor, blur: Tensor) -> list[list[int]]:
    """Groups of features whose scaled columns agree; only neighbours along a random direction are compared."""

    def agree(i: int, j: int) -> bool:
        near = float(blur[i] + blur[j])
        if abs(float(place[j] - place[i])) > 4 * near * len(x) ** 0.5:
            return False
        pair = x[:, [i, j]].double()
        pair = pair - pair.mean(0)
        pair = _signed(pair / pair.abs().amax(0))
        return float((pair[:, 0] - pair[:, 1]).abs().max()) <= near

    order = usable[place[usable].argsort()].tolist()
    return _runs(order, itertools.starmap(agree, itertools.pairwise(order)))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ParameterAudit(Result):
    """What the parameters of each layer are good for.

    Units that move no output on any sample (`dead`), that repeat another (`duplicated`), weights on inputs that are always zero
    (`silent_inputs`), rows of embeddings that the data never asks for (`unused_rows`).

    `dead_layers` are those without any effect; `shut` has a group for each of them that is not dead for the sake of another: its
    name, then the dead layers before it that nothing comes back to, `starved` the layers behind that are given nothing but
    zeros. `tied` groups of names for one tensor, `frozen` names that require no
    gradient, `unreached` measured parameters that the loss does not depend on at all. `waiting` layers move nothing only
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
    shut: tuple[tuple[str, ...], ...] = ()
    starved: tuple[str, ...] = ()

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


@checked(problem=a_problem)
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
    # Weights that are zero and yet move an output were initialised so, and will train. Biases at zero hold nothing back.
    moving = [i for layer in problem.layers.values() for i in layer.weights if (r := reach[i]) is not None and bool(r.any())]
    zero = [i for i in moving if not bool(problem.parameters[i].detach().any())]
    waiting: list[str] = []
    if zero and any(row["dead"] for row in rows):
        # Behind weights that are zero but will train nothing moves yet; it will after the first step.
        later = _reach(problem, shaken={i: reach[i] for i in zero})
        before, rows = rows, [_layer_row(problem, layer, later) for layer in problem.layers.values()]
        waiting = [str(a["layer"]) for a, b in zip(before, rows, strict=True) if a["dead"] > b["dead"]]
    motionless = not any(bool(r.any()) for r in reach if r is not None)
    dead = () if motionless else tuple(str(row["layer"]) for row in rows if _is_dead(problem, row, reach))
    names, model = clean_names(name for name, _ in problem.model.named_parameters()), problem.model
    frozen = [(names[k], p.numel()) for k, p in model.named_parameters() if not p.requires_grad]
    return ParameterAudit(
        layers=tuple(rows),
        dead_layers=dead,
        shut=_groups_of_dead(problem, dead),
        starved=tuple(name for name in problem.layers if _starved(problem, problem.layers[name], reach)) if dead else (),
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


def _groups_of_dead(problem: Problem, dead: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Dead layers that follow one another in the forward pass: the last of them is shut, and nothing comes back to the others."""
    if not dead:
        return ()
    groups: list[list[str]] = [[]]
    for layer in in_forward_order(problem.layers.values(), record_forward(problem).order):
        if layer.name in dead:
            groups[-1].insert(0, layer.name)
        elif groups[-1]:
            groups.append([])
    return tuple(tuple(group) for group in groups if group)


def _starved(problem: Problem, layer: Layer, reach: list[Tensor | None]) -> bool:
    """Whether a layer moves outputs by its bias alone: all it is given is zero."""
    weights = [r for i in layer.weights if problem.parameters[i].ndim >= 2 and (r := reach[i]) is not None]
    biases = [r for i in layer.biases if (r := reach[i]) is not None]
    return bool(weights) and not any(bool(r.any()) for r in weights) and any(bool(r.any()) for r in biases)


def dead_units(problem: Problem) -> dict[str, Tensor]:
    """Which units of each layer with one weight matrix move no output on any sample, one bit per unit."""
    reach = _reach(problem)
    found = ((name, _units_alive(problem, layer, reach)) for name, layer in problem.layers.items())
    return {name: ~alive for name, alive in found if alive is not None}


def _reach(problem: Problem, shaken: Mapping[int, Tensor | None] | None = None) -> list[Tensor | None]:
    """For each measured parameter, which of its entries move an output; None where the loss does not depend on it.

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
            found = problem.evaluate(tensors, batch, i)
            mix = torch.randn(found.output.shape, generator=generator, dtype=torch.float32).to(found.output)
            grads = list(torch.autograd.grad((found.output * mix).sum(), leaves, retain_graph=True, allow_unused=True))
            # By other ways than the output: a part of the model's own loss that it does not return.
            missing = [place for place, g in enumerate(grads) if g is None and touched[place] is None]
            if missing and found.loss.requires_grad:
                direct = torch.autograd.grad(found.loss, [leaves[place] for place in missing], allow_unused=True)
                grads = [g if place not in missing else direct[missing.index(place)] for place, g in enumerate(grads)]
            for place, g in enumerate(grads):
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
        unused = ~seen.flatten(1).any(1)
        padding = padding_rows(problem.model).get(id(weight))
        unused = unused if padding is None else unused & (torch.arange(len(unused), device=unused.device) != padding)
        return {**row, "units": 1, "dead": int(not bool(seen.any())), "unused_rows": int(unused.sum())}
    if layer.kind == "Conv1D" or layer.kind.startswith("ConvTranspose"):  # stored with the inputs first
        weight, seen = weight.transpose(0, 1), seen.transpose(0, 1)
        if any(parameters[i].ndim == 1 and len(parameters[i]) != len(weight) for i in layer.biases):
            return {**row, "units": 1, "dead": int(not bool(seen.any()))}  # groups
    vectors = [i for i in members if parameters[i].ndim == 1 and len(parameters[i]) == weight.shape[0]]
    alive = _open(seen, vectors, reach)
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


def _open(seen: Tensor, vectors: Iterable[int], reach: list[Tensor | None]) -> Tensor:
    """Units (rows) of which a weight or a bias moves an output."""
    alive = seen.reshape(len(seen), -1).any(1)
    for i in vectors:
        if (r := reach[i]) is not None:
            alive = alive | r.to(alive.device)
    return alive


def _units_alive(problem: Problem, layer: Layer, reach: list[Tensor | None]) -> Tensor | None:
    """The same for a layer whose one matrix has its units first."""
    matrices = [i for i in layer.weights if problem.parameters[i].ndim >= 2]
    plain = layer.kind != "Conv1D" and not layer.kind.startswith("ConvTranspose") and "Embedding" not in layer.kind
    if len(matrices) != 1 or not plain or (seen := reach[matrices[0]]) is None:
        return None
    members = (*layer.weights, *layer.biases)
    return _open(seen, [i for i in members if problem.parameters[i].shape == seen.shape[:1]], reach)


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[id(p)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
