"""Where a prior is centred, and whether it may be: nothing that the certified samples had a part in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.errors import ArgumentError, BatchCoupledError
from theodolite.measures.bounds.noisy_network import Samples
from theodolite.measures.data_audit.discreteness import sample_keys
from theodolite.measures.trials import cannot_restart, start_anew
from theodolite.problem import Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.training import train

#: An untrained network makes at least this share of the errors of guessing.
UNTRAINED = 0.5


@dataclass(frozen=True)
class Prior:
    """The centre of a prior: `weights` by name, the `problem` that is certified, and what kind of prior it is."""

    kind: str
    problem: Problem
    weights: dict[str, Tensor]

    @property
    def hash(self) -> str:
        """Of the centre."""
        return hash_of(self.weights)


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def find_prior(
    problem: Problem,
    kind: str,
    start: Any,
    *,
    split: float,
    recipe: Callable[[nn.Module, Any], None] | None,
    seed: int,
    progress: bool | None,
) -> Prior:
    """The prior of a kind; raises where it would depend on the samples."""
    own = dict(zip(problem.names, (leaf.clone() for leaf in problem.leaves(grad=False)), strict=True))
    if kind == "held-out":
        if start is not None:
            raise ArgumentError("start belongs to prior='start' and 'split': a held-out prior is the model as it stands.")
        return Prior(kind, problem, own)
    if kind == "split":
        return _split(problem, start, split, recipe, seed, progress)
    if start is None:
        raise ArgumentError(
            "start is missing: prior='start' needs the weights before training, a module or its state dict. If they are lost: "
            "prior='held-out' for data that was not trained on, or prior='split'."
        )
    weights = weights_of(problem, start, own)
    _refuse_what_was_learned(problem, start, weights, own)
    return Prior(kind, problem, weights)


def weights_of(problem: Problem, start: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The measured parameters of a start, by name; raises where it does not fit `own`, those of the model."""
    given = dict(start.state_dict()) if isinstance(start, nn.Module) else start
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise ArgumentError(f"start must be a module or a mapping of names to tensors. Got {type(start).__name__}.")
    if missing := [name for name in own if name not in given]:
        raise ArgumentError(f"start lacks the parameter {missing[0]} of the model. It has: {', '.join(list(given)[:5])}.")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            shapes = f"{tuple(given[name].shape)}, the model's {tuple(tensor.shape)}"
            raise ArgumentError(f"start is of another architecture: {name} has shape {shapes}.")
        if given[name].is_meta or not bool(torch.isfinite(given[name]).all()):
            raise ArgumentError(f"start must hold finite numbers. Got NaN, infinity or no values in {name}.")
    return {name: given[name].detach().to(tensor).clone() for name, tensor in own.items()}


def _refuse_what_was_learned(problem: Problem, start: Any, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise where the prior, or what it leaves fixed, has seen the samples."""
    if all(torch.equal(weights[name], tensor) for name, tensor in own.items()):
        raise ArgumentError(
            "start equals the model's weights: a prior must not depend on the data. Give the weights before training; for a "
            "model that was not trained on these data, prior='held-out'."
        )
    for name, module in problem.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise BatchCoupledError(
                f"{name} holds running statistics, which were estimated from the training data: no prior of the untrained "
                "weights covers them. Take prior='held-out' or 'split', or a network with GroupNorm or LayerNorm."
            )
    given = dict(start.state_dict()) if isinstance(start, nn.Module) else dict(start)
    for name, p in problem.model.named_parameters():
        if name not in own and (name not in given or not torch.equal(given[name].to(p), p.detach())):
            raise ArgumentError(
                f"{name} is not measured, and differs from start or is not in it: what is fixed must be as it was before "
                "training. Measure all that was trained (params=)."
            )
    error, guessing = error_at(problem, weights)
    if error < UNTRAINED * guessing:
        raise ArgumentError(
            f"start is no untrained network: it is wrong on {100 * error:.3g} % of these data, where guessing is on "
            f"{100 * guessing:.3g} %. A prior that has seen the data certifies nothing. Give the weights before training; if "
            "start was trained on other data, set the model to it and take prior='held-out'."
        )


def error_at(problem: Problem, weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """The error rate of one network on the data, and that of always naming the commonest class."""
    tensors = problem.tensors([weights[name] for name in problem.names])
    wrong, labels = 0, []
    with problem.session(second=False), torch.no_grad():
        for i, (_, batch) in enumerate(Samples(problem).epoch(1000)):
            output = problem.output(tensors, batch, i, check=False)
            right, classes = (
                right_answers(output, batch.target, problem.loss_function),
                answers(batch.target, problem.loss_function),
            )
            assert right is not None
            assert classes is not None
            wrong += int((~right).sum())
            labels.append(classes)
    _, counts = torch.cat(labels).unique(return_counts=True)
    return wrong / problem.samples, 1 - float(counts.max() / counts.sum())


def refuse_overlap(problem: Problem, test: Problem) -> None:
    """Raise where test samples stand among those that are certified."""
    shared = int(torch.isin(sample_keys(test), sample_keys(problem)).sum())
    if shared:
        raise ArgumentError(f"test holds {shared} samples of the data: a bound from them would not be one. Leave these out.")


def _split(
    problem: Problem, start: Any, share: float, recipe: Callable[[nn.Module, Any], None] | None, seed: int, progress: bool | None
) -> Prior:
    """New weights trained on a random part of the data; the rest is certified."""
    copy = problem.copied()
    if start is not None:
        own = dict(zip(copy.names, copy.leaves(grad=False), strict=True))
        for p, value in zip(copy.parameters, weights_of(copy, start, own).values(), strict=True):
            p.detach().copy_(value)
    elif why := cannot_restart(copy.model):
        raise ArgumentError(f"start is missing: {why}. Give the weights from which training begins.")
    else:
        start_anew(copy.model, seed)
    mine, rest = _halves(copy, share, seed)
    if recipe is None:
        _usual_recipe(copy, mine, seed, progress)
    else:
        recipe(copy.model, [(batch.args[0] if len(batch.args) == 1 else batch.inputs, batch.target) for batch in mine.data])
    certified = copy.with_batches(list(rest.data))
    return Prior("split", certified, dict(zip(copy.names, (leaf.clone() for leaf in copy.leaves(grad=False)), strict=True)))


def _halves(problem: Problem, share: float, seed: int) -> tuple[Problem, Problem]:
    order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(problem.samples, dtype=torch.bool)
    chosen[order[: round(share * problem.samples)]] = True
    parts: tuple[list[Any], list[Any]] = ([], [])
    before = 0
    for batch in problem.data:
        here = chosen[before : before + batch.size]
        for part, rows in zip(parts, (here, ~here), strict=True):
            if bool(rows.any()):
                part.append(batch.part(torch.nonzero(rows).flatten()))
        before += batch.size
    return problem.with_batches(parts[0]), problem.with_batches(parts[1])


def _usual_recipe(problem: Problem, mine: Problem, seed: int, progress: bool | None) -> None:
    """Adam for twenty epochs on batches of 128."""
    batch = next(iter(mine.data)) if len(mine.data) == 1 else None
    data: Any = [(b.args[0], b.target) for b in mine.data] if batch is None else (batch.args[0], batch.target)
    model, size = problem.model.train(), None if batch is None else 128
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    train(model, problem.loss_function, data, optimizer, epochs=20, seed=seed, progress=progress, every=10**9, batch_size=size)
