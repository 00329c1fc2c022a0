"""Where a prior is centred, and whether it may be: nothing that the certified samples had a part in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.errors import ArgumentError, BatchCoupledError
from theodolite.measures.bounds import checkpoints
from theodolite.measures.bounds.noisy_network import Samples
from theodolite.measures.data_audit.discreteness import sample_keys
from theodolite.measures.trials import cannot_restart, in_training, random_batches, start_anew
from theodolite.problem import Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.problem.batches import fingerprint
from theodolite.progress import counting

#: The usual training of a split: epochs, steps at least, samples of a batch.
RECIPE_EPOCHS, RECIPE_STEPS, RECIPE_BATCH = 20, 500, 128
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
    folder: Path | None = None,
) -> Prior:
    """The prior of a kind; raises where it would depend on the samples. What a split trains is kept in the folder."""
    own = dict(zip(problem.names, (leaf.clone() for leaf in problem.leaves(grad=False)), strict=True))
    if kind == "held-out":
        if start is not None:
            raise ArgumentError("start belongs to prior='start' and 'split': a held-out prior is the model as it stands.")
        return Prior(kind, problem, own)
    if kind == "split":
        return _split(problem, start, split, recipe, seed, progress, folder)
    if start is None:
        raise ArgumentError(
            "start is missing: prior='start' needs the weights before training, a module or its state dict. If they are lost: "
            "prior='held-out' for data that was not trained on, or prior='split'."
        )
    weights = weights_of(start, own)
    _refuse_what_was_learned(problem, start, weights, own)
    return Prior(kind, problem, weights)


def _state_of(start: Any) -> Any:
    return dict(start.state_dict()) if isinstance(start, nn.Module) else start


def _running(model: nn.Module) -> list[tuple[str, Any]]:
    """Layers whose running statistics come from the samples of the training, by name."""
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [(name, norm) for name, norm in norms if norm.running_mean is not None]


def weights_of(start: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a start, by name; raises where it does not fit `own`, those of the model."""
    given = _state_of(start)
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
    for name, _ in _running(problem.model):
        raise BatchCoupledError(
            f"{name} holds running statistics, which were estimated from the training data: no prior of the untrained "
            "weights covers them. Take prior='held-out' or 'split', or a network with GroupNorm or LayerNorm."
        )
    given = _state_of(start)
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


def refuse_overlap(known: Problem, fresh: Problem, said: str) -> None:
    """Raise where fresh samples stand among known ones; `said` tells how many `{shared}` of how many `{of}` do."""
    shared = int(torch.isin(sample_keys(fresh), sample_keys(known)).sum())
    if shared:
        raise ArgumentError(f"{said.format(shared=shared, of=fresh.samples)} Leave these out.")


def _split(
    problem: Problem,
    start: Any,
    share: float,
    recipe: Callable[[nn.Module, Any], None] | None,
    seed: int,
    progress: bool | None,
    folder: Path | None,
) -> Prior:
    """New weights trained on a random part of the data; the rest is certified."""
    copy = problem.copied()
    _begin(copy, start, seed)
    mine, rest = _halves(copy, share, seed)
    begin = dict(zip(copy.names, copy.leaves(grad=False), strict=True))
    identity = {"data": [fingerprint(batch) for batch in mine.data], "start": hash_of(begin), "recipe": recipe is None}
    state = None if folder is None else checkpoints.kept(folder, checkpoints.SPLIT, identity)
    if state is not None:
        copy.model.load_state_dict(state)
    else:
        _train(copy, mine, recipe, seed, progress)
        if folder is not None:
            checkpoints.keep(folder, checkpoints.SPLIT, identity, copy.model.state_dict())
    certified = copy.with_batches(list(rest.data))
    return Prior("split", certified, dict(zip(copy.names, (leaf.clone() for leaf in copy.leaves(grad=False)), strict=True)))


def _begin(copy: Problem, start: Any, seed: int) -> None:
    """The weights from which a split is trained: nothing of the model's own is left, which may have seen the samples."""
    if start is None:
        if why := cannot_restart(copy.model):
            raise ArgumentError(f"start is missing: {why}. Give the weights from which training begins.")
        start_anew(copy.model, seed)
        return
    weights_of(start, dict(copy.model.named_parameters()))
    given, own = _state_of(start), copy.model.state_dict()
    for _, module in _running(copy.model):
        module.reset_running_stats()
    copy.model.load_state_dict({name: value for name, value in given.items() if name in own}, strict=False)


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


def _train(
    copy: Problem, mine: Problem, recipe: Callable[[nn.Module, Any], None] | None, seed: int, progress: bool | None
) -> None:
    """Train the copy on its part of the data."""
    if recipe is None:
        _usual_recipe(mine, seed, progress)
    else:
        recipe(copy.model, [(batch.args[0] if len(batch.args) == 1 else batch.inputs, batch.target) for batch in mine.data])


def recipe_steps(samples: int) -> int:
    """Steps of the usual training on so many samples.

    >>> recipe_steps(300), recipe_steps(30_000)
    (500, 4700)
    """
    return max(RECIPE_STEPS, RECIPE_EPOCHS * -(-samples // RECIPE_BATCH))


def _usual_recipe(mine: Problem, seed: int, progress: bool | None) -> None:
    """Adam on random batches."""
    steps = recipe_steps(mine.samples)
    optimizer = torch.optim.Adam([p for p in mine.model.parameters() if p.requires_grad], lr=1e-3)
    with in_training(mine, seed), counting("training on a part", progress=progress, total=steps) as count:
        for batch in random_batches(mine, RECIPE_BATCH, steps, seed):
            optimizer.zero_grad()
            mine.live_loss(batch).backward()
            optimizer.step()
            count(1)
