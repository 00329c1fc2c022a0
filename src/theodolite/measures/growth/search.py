"""What a search for an operator is given, checked and made ready: for `landscape_aware_growth` and `growth_study` alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.arguments import about, each, integer, sequence, shown, whole
from theodolite.errors import ArgumentError
from theodolite.files import check_sum, json_check_sum, write_whole
from theodolite.interrupts import unbroken_context
from theodolite.measures.growth.body import find_body
from theodolite.measures.growth.growing import refuse_quantised
from theodolite.measures.growth.operators import GrowthOperator, added_layers, growth_operator, growth_operators
from theodolite.measures.growth.optimizer_state import check_optimizer
from theodolite.measures.growth.runs import (
    RESTING,
    Arm,
    Recipe,
    Runs,
    finite_stream,
    name_of,
    refuse_unrepeatable,
    refuse_without_room,
)
from theodolite.measures.growth.validation import batch_check_sum, refuse_shared_text, validation_problem
from theodolite.operators.autograd.graphs import available_bytes
from theodolite.problem.calling import Loss, unwrap
from theodolite.problem.optimizers import as_optimizer
from theodolite.results import Row
from theodolite.text import listed, quoted
from theodolite.training.interruption import tensor_check_sums
from theodolite.training.schedules import as_schedule

BASELINES = ("small", "scratch")
#: What a search writes about itself into its folder.
RECORD = "search.json"


def prepared(
    model: nn.Module, loss: Loss, data: Any, optimizer: Any, validation: Any, operators: Any, layers: int, needed: int, seed: int,
    **options: Any,
) -> tuple[Recipe, list[GrowthOperator]]:  # fmt: skip
    """The recipe of all runs and the operators in their order; raises where they could not be compared."""
    whole = unwrap(model)
    refuse_quantised(whole)
    chosen = some_operators(operators, find_body(whole, options["body"]).layers, layers)
    recipe = Recipe(
        whole,
        own_optimizer(optimizer, whole, options["schedule"]),
        loss,
        finite_stream(data, options["first"] + needed),
        validation_problem(whole, loss, validation, options["target"]),
        chosen[0],
        **options,
    )
    refuse_unrepeatable(recipe, seed)
    refuse_shared_text(whole, loss, _raw(recipe, seed), recipe.validation, options["target"])
    refuse_without_room(recipe)
    return recipe, chosen


def _raw(recipe: Recipe, seed: int) -> Iterable[Any]:
    feed = recipe.feed(seed, recipe.first)
    return [feed] if isinstance(feed, tuple) else feed


def own_optimizer(optimizer: Any, model: nn.Module, schedule: Any) -> Optimizer:
    """The optimizer of the small model, which moves parameters of that model alone."""
    if isinstance(schedule, LRScheduler):
        raise ValueError(
            "schedule is bound to the optimizer of the small model: give the learning rate as a function of the step, a table "
            "{first step: rate} or a number."
        )
    as_schedule(schedule)
    trained = [p for p in model.parameters() if p.requires_grad]
    first = float(schedule) if isinstance(schedule, int | float) else None if schedule is None else 1.0
    found = as_optimizer(optimizer, trained, lr=first, needs_rate=True, rate="schedule=0.1")
    if found is None:
        raise ArgumentError("optimizer is missing: give the one that the model was trained with, or a new one of the same kind.")
    check_optimizer(model, found)
    return found


def some_operators(operators: Any, depth: int, layers: int) -> list[GrowthOperator]:
    """The operators that were meant, each once, in the order in which ties are broken."""
    added = added_layers(depth, layers)
    if isinstance(operators, str) and operators == "all":
        found = [*growth_operators(depth, added), growth_operator("identity", depth, added)]
    else:
        given = [operators] if isinstance(operators, str | GrowthOperator) else operators
        if not isinstance(given, Iterable) or isinstance(given, Mapping):
            raise TypeError(f"operators must be 'all', or operators, names or lists of layers. Got {shown(operators)}.")
        with about("operators"):
            found = [_one(entry, depth, added) for entry in given]
        if not found:
            raise ValueError("operators must hold at least one. Give 'all', or names such as ['last', 'identity', '2/1/copy'].")
    for one in found:
        if (one.layers, one.added) != (depth, added):
            raise ValueError(
                f"operators: {one.name} makes {one.depth} layers of {one.layers}; wanted are {layers} of the {depth} that the "
                "model has. Make them by th.growth_operators for these numbers."
            )
    return sorted({one.name: one for one in found}.values(), key=lambda one: one.key)


def _one(entry: Any, depth: int, added: int) -> GrowthOperator:
    if isinstance(entry, GrowthOperator):
        return entry
    return growth_operator(entry, depth, added) if isinstance(entry, str) else GrowthOperator.of(entry)


def some_baselines(name: str, value: Any) -> tuple[str, ...]:
    """Baselines, each one of `BASELINES`, once."""
    entries = [value] if isinstance(value, str) else list(sequence(name, value))
    if wrong := [entry for entry in entries if entry not in BASELINES]:
        raise ValueError(f"{name} must be of {quoted(BASELINES)}. Got {shown(wrong[0])}.")
    return tuple(entry for entry in BASELINES if entry in entries)


def looks_at(every: int | Sequence[int] | None, last: int, usual: int) -> list[int]:
    """The steps at which losses are looked at: 0, every so many or those listed, and the last one."""
    if every is None:
        every = usual
    if isinstance(every, int) and not isinstance(every, bool):
        return sorted({*range(0, last, integer("every", every, least=1)), last})
    if isinstance(every, str) or not isinstance(every, Iterable):
        raise ValueError(f"every must be a number of steps, or a list of steps. Got {shown(every)}.")
    wanted = each(whole)("every", every)
    return sorted({0, *(step for step in wanted if step <= last), last})


@unbroken_context
def resting_place(
    recipe: Recipe, arms: Sequence[Arm], engine: Any, checkpoint: Any, resume: bool, settings: Row, *, rests: bool
) -> Iterator[Runs]:
    """The runs of a search with the place where they rest: memory where there is room, else a folder that goes in the end.

    With a `checkpoint` they are written there too; what an earlier search with other settings left there is refused.
    """
    size = refuse_without_room(recipe)
    free = available_bytes(next(recipe.model.parameters()).device)
    hold = engine == "serial" and rests and size * len(arms) < RESTING * free
    if checkpoint is not None:
        folder = Path(checkpoint)
        _agree(folder, resume, {**settings, "arms": [name_of(arm) for arm in arms], **identity(recipe)})
        yield Runs(recipe, tuple(arms), folder, hold)
    elif hold or not rests:
        yield Runs(recipe, tuple(arms), None, hold)
    else:
        with TemporaryDirectory(prefix="theodolite-growth-") as folder_name:
            yield Runs(recipe, tuple(arms), Path(folder_name), hold=False)


def identity(recipe: Recipe) -> Row:
    """What tells this search from others: check sums of weights and data, and how the model is trained."""
    groups = [{k: str(v) for k, v in group.items() if k != "params"} for group in recipe.optimizer.param_groups]
    validation = 0
    for batch in recipe.validation.data:
        validation = batch_check_sum(batch, validation)
    stream = 0
    for _, batch in zip(range(2), recipe.batches(0), strict=False):
        stream = batch_check_sum(batch, stream)
    weights = json_check_sum(tensor_check_sums(dict(recipe.model.state_dict())))
    return {
        "weights": weights, "training data": stream, "validation data": validation, "optimizer": type(recipe.optimizer).__name__,
        "settings of the optimizer": check_sum(json.dumps(groups).encode()), "first": recipe.first, "state": recipe.state,
        "batch_size": recipe.batch_size, "shuffle": recipe.shuffle, "clip": recipe.clip,
    }  # fmt: skip


def _agree(folder: Path, resume: bool, settings: Row) -> None:
    """Note the settings in a new folder; raise where it holds a search, unless that is to go on and is the same."""
    path = folder / RECORD
    here = json.loads(json.dumps(settings))
    if not path.exists():
        write_whole(path, json.dumps(here, indent=1).encode())
        return
    if not resume:
        raise FileExistsError(f"{folder} already holds a search. Go on with it by resume=True, or give another folder.")
    try:
        there = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Remove the folder to search from the start.") from error
    if others := [name for name in here if there.get(name) != here[name]]:
        raise ValueError(
            f"The search in {folder} was made with another choice of: {listed(others)}. Give the same to go on with it, or "
            "another folder."
        )
