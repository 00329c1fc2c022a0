"""What the arguments of a stability study mean, checked before anything is trained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.arguments import choice, integer
from theodolite.measures.mode_connectivity.linear_path import POLICIES
from theodolite.measures.mode_connectivity.points import BatchNormPolicy
from theodolite.measures.stability.pairs import check_size
from theodolite.measures.stability.training_pairs import Bench, Recipe, example_losses, label_weights, mean
from theodolite.problem.weighting import IGNORED
from theodolite.text import nearest
from theodolite.training import Fleet
from theodolite.training.matrix_products import fix_matrix_products

Stopping = Literal["updates", "epochs", "train_loss"]
STOPPING: tuple[Stopping, ...] = ("updates", "epochs", "train_loss")

#: Examples on which the loss is tried before training, and how many of them are also tried alone.
TRIED, ALONE = 256, 4
#: What the mean of the examples' losses may differ from the loss by.
AGREES = 1e-4

#: Arguments of a fleet that the study sets itself.
_OWN = ("loss", "optimizer", "bitwise", "target")


@dataclass(frozen=True)
class StabilityConfig:
    """What is measured.

    `pairs` pairs at each of `sizes`, at `checkpoints` (updates) and at the end, on `eval_size` test examples, with `trials`
    seeds of start and order. `paths` pairs of the smallest and largest size are joined by a line.
    """

    sizes: tuple[int, ...]
    pairs: int
    checkpoints: tuple[int, ...] = ()
    trials: tuple[int, ...] = (0,)
    eval_size: int = 10_000
    pair_seed: int = 0
    paths: int = 0
    batchnorm: BatchNormPolicy = "interpolate"
    check_steps: int | None = None


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number of Python or NumPy, at least so large.

    >>> whole("steps", 3)
    3
    """
    return integer(name, value, least=least, wanted=None if least == 1 else f"an integer, at least {least}")


def wholes(name: str, values: Any, least: int = 0) -> tuple[int, ...]:
    """Different whole numbers, in the order given."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a sequence of integers, such as [100, 200, 400]. Got {values!r}.")
    numbers = values.tolist() if isinstance(values, Tensor) else list(values)
    found = tuple(whole(f"Each of {name}", value, least) for value in numbers)
    if len(set(found)) < len(found):
        raise ValueError(f"{name} must be different numbers. Got {list(found)}.")
    return found


def read_config(
    pool: int,
    *,
    sizes: Any,
    pairs: Any,
    checkpoints: Any,
    trials: Any,
    eval_size: Any,
    pair_seed: Any,
    paths: Any,
    batchnorm: Any,
    check_steps: Any,
) -> StabilityConfig:
    """What is measured on a training pool of that size."""
    choice("batchnorm", batchnorm, POLICIES)
    chosen = tuple(range(trials)) if isinstance(trials, Integral) else wholes("trials", trials)
    if not chosen or isinstance(trials, bool):
        raise ValueError(f"trials must be at least one, as a number or as a list. Got {trials!r}.")
    lengths = wholes("sizes", sizes)
    if not lengths:
        raise ValueError("sizes must hold at least one number of examples. Got none.")
    for m in lengths:
        check_size(m, pool)
    return StabilityConfig(
        sizes=lengths,
        pairs=whole("pairs", pairs, 1),
        checkpoints=wholes("checkpoints", checkpoints),
        trials=chosen,
        eval_size=eval_size,
        pair_seed=whole("pair_seed", pair_seed),
        paths=whole("paths", paths),
        batchnorm=batchnorm,
        check_steps=None if check_steps is None else whole("check_steps", check_steps),
    )


def read_length(stop: Any, steps: Any, epochs: Any, loss_target: Any) -> tuple[int | None, int | None, float | None]:
    """Steps, epochs and the target of the loss; those that do not belong to the way of stopping are refused."""
    choice("stop", stop, STOPPING)
    for name, value, owner in (("epochs", epochs, "epochs"), ("loss_target", loss_target, "train_loss")):
        if value is not None and stop != owner:
            raise ValueError(f"{name} counts with stop={owner!r} alone; give that, or leave {name} out. Got stop={stop!r}.")
    if stop == "epochs":
        if steps is not None:
            raise ValueError(f"stop='epochs' takes epochs in place of steps; leave steps out. Got steps={steps!r}.")
        return None, whole("epochs", epochs, 1), None
    if stop == "train_loss" and not (isinstance(loss_target, Real) and float(loss_target) > 0):
        raise ValueError(f"stop='train_loss' needs loss_target, a positive loss. Got {loss_target!r}.")
    return whole("steps", steps, 1), None, None if loss_target is None else float(loss_target)


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the optimizer and of the fleet, with one rate for all models."""
    known = [name for name, p in inspect.signature(Fleet).parameters.items() if p.kind is p.KEYWORD_ONLY and name not in _OWN]
    for name in settings:
        if name not in known:
            raise TypeError(
                f"stability has no argument {name!r} (nearest: {', '.join(nearest(name, known))}). As settings of the optimizer "
                f"and of the fleet it accepts {', '.join(known)}."
            )
    rate = settings.get("rate")
    if rate is None:
        return dict(settings)
    if not isinstance(rate, Real) and not (isinstance(rate, Tensor) and not rate.ndim):
        raise ValueError(f"rate must be one number: all models of a study share the algorithm. Got {rate!r}.")
    return {**settings, "rate": float(rate)}


@torch.no_grad()
def check_loss(recipe: Recipe, bench: Bench) -> None:
    """Raise where single examples have no losses of their own that average to the loss, tried on the first model."""
    if not callable(recipe.loss):
        raise ValueError("stability compares the losses of single examples: give a loss of outputs and targets.")
    for pool in (bench.train, bench.test):
        _check_labels(recipe.loss, pool.targets, pool.name)
    rows = torch.cat([len(bench.train) + bench.eval_rows, torch.arange(len(bench.train))])[:TRIED]
    inputs, targets = (part[rows] for part in bench.joined)
    outputs = _outputs(recipe, inputs, targets)
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    try:
        together = torch.as_tensor(recipe.loss(outputs, targets))
    except Exception as error:
        raise ValueError(f"The loss cannot be taken of {shapes}: {error}") from error
    if together.numel() != 1:
        raise ValueError(f"The loss must be one number, a mean over the examples. Got shape {tuple(together.shape)}.")
    try:
        each = example_losses(recipe.loss, outputs, targets)
        alone = torch.stack(
            [torch.as_tensor(recipe.loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(ALONE)[: len(each)]]
        )
    except Exception as error:
        raise ValueError(f"The loss of {shapes} cannot be taken of one example alone. {_NEEDED}") from error
    if bool(torch.isfinite(together)) and not _average(recipe.loss, each, alone.double(), float(together), targets):
        raise ValueError(
            f"The loss of {shapes} is {float(together):.6g}, and the mean of the examples' own losses {mean(each):.6g}, or these "
            f"depend on what else is in the batch. {_NEEDED}"
        )


_NEEDED = (
    "Stability needs a loss that is a mean over examples: one of torch's losses with reduction='mean' (class weights and ignored "
    "labels as its own arguments) and targets of a fitting shape, or a function of torch operations (outputs, targets) -> mean "
    "that also takes a batch of one example."
)


def _average(loss: Any, each: Tensor, alone: Tensor, together: float, targets: Tensor) -> bool:
    """Whether the losses (n,) average to the loss of all, and the first of them are those of the examples alone."""
    close = AGREES * max(abs(together), float(each.abs().mean()))
    weights = label_weights(loss, targets)
    scale = torch.ones_like(each) if weights is None else weights / mean(weights)
    some = len(alone)
    own = torch.where(scale[:some] == 0, torch.zeros_like(alone), alone * scale[:some])  # nothing counts: no number alone
    return abs(mean(each) - together) <= close and bool(((each[:some] - own).abs() <= close + AGREES * own.abs()).all())


def _check_labels(loss: Any, targets: Tensor, name: str) -> None:
    """Raise where an example has no label that counts: it would change the scale of the others."""
    if targets.is_floating_point():
        return
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        ignored = loss.ignore_index
    elif loss in (functional.cross_entropy, functional.nll_loss):
        ignored = IGNORED
    else:
        return
    empty = int((targets == ignored).reshape(len(targets), -1).all(1).sum())
    if empty:
        raise ValueError(
            f"{name} has examples without a label that counts: leave them out. Got {empty} of {len(targets)} with nothing "
            f"but the label {ignored}, which the loss ignores."
        )


def _outputs(recipe: Recipe, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of the model that all start from, (n, ...)."""
    fleet = recipe.fleet(1)
    try:
        return fleet.outputs((inputs, targets))[0].to(targets.device)
    except ValueError as error:
        given = fleet.model(0).eval()(inputs[:2].to(next(iter(fleet.parameters.values())).device))
        if isinstance(given, Tensor):
            raise
        raise ValueError(
            f"The model must return one tensor, (examples, ...). It returns a {type(given).__name__}: wrap the model so that it "
            "returns the logits."
        ) from error


# The settings of a stability study as plain values, enough to repeat it.


def settings_of(
    recipe: Recipe, config: StabilityConfig, bench: Bench, *, stop: Stopping, epochs: int | None = None
) -> dict[str, Any]:
    """What was trained, how long, on what, from which seeds.

    `optimizer` is the name given, or the rule that was read from a function, with all its settings; `optimizer_settings` are
    those given beside it, `rate` the learning rate of either.
    """
    fleet = recipe.fleet(1)
    given = {name: value for name, value in recipe.settings.items() if name != "rate" and value is not None}
    found = {
        "factory": recipe.factory,
        "optimizer": recipe.optimizer if isinstance(recipe.optimizer, str) else fleet.rule,
        "rate": float(fleet.rates[0]),
        "optimizer_settings": given,
        "schedule": recipe.schedule,
        "loss": getattr(recipe.loss, "__name__", type(recipe.loss).__name__),
        "batch_size": recipe.batch_size,
        "drop_last": recipe.drop_last,
        "stop": stop,
        "steps": None if stop == "epochs" else recipe.steps,
        "epochs": epochs if stop == "epochs" else None,
        "loss_target": recipe.loss_target if stop == "train_loss" else None,
        **asdict(config),
        "pool": len(bench.train),
        "eval_size": len(bench.eval_rows),
        "init_seed": recipe.init_seed,
        "order_seed": recipe.order_seed,
        "threads": torch.get_num_threads(),
        "matrix_products": fix_matrix_products(),
    }
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Numbers, words, lists and dictionaries of them; anything else by its name or description, without addresses.

    >>> plain({0: 1.0, 50: torch.tensor(0.1, dtype=torch.float64)}), plain(len)
    ({'0': 1.0, '50': 0.1}, 'len')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(one) for one in value]
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
