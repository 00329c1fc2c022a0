"""`stability`: how far a trained model moves when one training example is exchanged, and how that falls with their number."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from theodolite.arguments import a_text, also_called, checked, choice, integer, place, positive, shown
from theodolite.arguments import whole as a_whole
from theodolite.interrupts import called_within
from theodolite.measures.mode_connectivity import POLICIES, BatchNormPolicy, LinearPath, linear_path
from theodolite.measures.stability.power_law import Explanation, PowerFit, explains, fit_power_law, of_one_checkpoint
from theodolite.measures.stability.training_pairs import (
    Bench,
    Recipe,
    Swap,
    check_size,
    draw_swaps,
    example_losses,
    label_weights,
    mean,
    null_swap,
    read_pool,
    train_pairs,
)
from theodolite.problem.weighting import IGNORED
from theodolite.results import Cost, Outcome, Result, Row, fields_of
from theodolite.text import nearest
from theodolite.training import Fleet, FleetTrace
from theodolite.training.matrix_products import fix_matrix_products

#: Steps of the check that comes first; a tenth of the run if that is more.
CHECK_STEPS = 20
#: Seed-trials of a study at most.
MOST_TRIALS = 1_000_000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StabilityResult(Result):
    """A table of pairs, sizes, checkpoints and seed-trials; the laws that its maxima follow, and what they say.

    `table` has one row per trial, size m, pair and checkpoint (`step`): stability with and without z, gaps of loss and of 0-1
    loss (test minus train), distance, norms and normalised distance of the parameters, quantiles of the differences of losses,
    and where pair and maximum come from. `paths` are the profiles between the two models of some pairs, by trial, size and
    pair. `checks` says what the null swap showed before each measurement.
    """

    table: tuple[Row, ...]
    paths: dict[str, LinearPath]
    checks: tuple[str, ...]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.table]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({row["m"] for row in self.table}))

    @property
    def trials(self) -> tuple[int, ...]:
        return tuple(sorted({row["trial"] for row in self.table}))

    def select(self, **where: Any) -> list[Row]:
        """Rows with these values, such as `m=800, pair=3`."""
        return [dict(row) for row in self.table if all(row[name] == value for name, value in where.items())]

    @checked(quantity=a_text, trial=a_whole, step=a_whole)
    def values(self, quantity: str, *, trial: int | None = None, step: int | None = None) -> dict[int, list[float]]:
        """The pairs' values of a quantity by size; at the last checkpoint if no step is named."""
        if quantity not in self.table[0]:
            raise ValueError(
                f"quantity: there is no column {quantity!r}; the nearest: {', '.join(nearest(quantity, self.table[0], 4))}."
            )
        rows = of_one_checkpoint(self.rows(), trial, step)[0]
        return {m: [row[quantity] for row in rows if row["m"] == m] for m in self.sizes}

    def fit(self, quantity: str, *, trial: int | None = None, step: int | None = None) -> PowerFit:
        """The power law of the maxima of a quantity."""
        values = self.values(quantity, trial=trial, step=step)
        return fit_power_law(list(values), list(values.values()))

    def explains(self, *, trial: int | None = None, step: int | None = None) -> Explanation:
        """Whether stability explains the gap, for a trial and a checkpoint (default: the first trial, the last checkpoint)."""
        return explains(self, trial=trial, step=step, pool=self.settings.get("pool"))

    @cached_property
    def explanation(self) -> Explanation:
        return self.explains(trial=self.trials[0])

    verdict, b_stab, b_gap, b_dist, delta_b = (
        property(attrgetter(f"explanation.{name}")) for name in ("verdict", "b_stab", "b_gap", "b_dist", "delta_b")
    )

    def sentence(self) -> str:
        largest = self.sizes[-1]
        ends = of_one_checkpoint(self.select(m=largest), self.trials[0], None)[0]
        rows = [row for row in ends if row["stab"] == row["stab"]]
        worst = max(rows, key=lambda row: row["stab"], default=None)
        told = "" if worst is None else (
            f"Exchanging one of {largest} examples changed the loss of a test example by up to {worst['stab']:.3g} and moved the "
            f"parameters by up to {100 * max(row['ndist'] for row in rows):.3g} % of their norm. "
        )  # fmt: skip
        joined = [path for path in self.paths.values() if path.connected]
        basins = f" {len(joined)} of {len(self.paths)} pairs lie in one basin." if self.paths else ""
        lost = "All pairs diverged: a smaller rate may help. " if self.outcome is Outcome.DIVERGED else ""
        return f"{lost}{told}{self.explanation.sentence()}{basins}"


@also_called(lr="rate")
def stability(
    factory: Any,
    optimizer: Any,
    train: Any,
    test: Any,
    *,
    sizes: Sequence[int],
    pairs: int = 8,
    steps: int | None = None,
    loss: Any,
    batch_size: int = 32,
    stop: Stopping = "updates",
    epochs: int | None = None,
    loss_target: float | None = None,
    schedule: Any = None,
    checkpoints: Sequence[int] = (),
    trials: int | Sequence[int] = 1,
    init_seed: int = 0,
    order_seed: int = 0,
    pair_seed: int = 0,
    eval_size: int = 10_000,
    drop_last: bool = True,
    paths: int = 0,
    batchnorm: BatchNormPolicy = "interpolate",
    check_steps: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> StabilityResult:
    """Train pairs of models on sets that differ in one example, at several sizes, and measure how far apart they end.

    Args:
        factory: seed -> model, or a function of nothing; torch's generator is seeded before each call.
        optimizer: as for `Fleet`: "sgd", "adam", "adamw" with `rate=...` (or `lr=...`) and further settings (momentum,
            weight_decay, nesterov, ...) as keywords, or a function of the parameters that makes such a torch optimizer.
        train, test: pools as tensors (inputs, targets), data sets or plain loaders of them; S is drawn from the first without
            repetition, the example that comes in from the second.
        sizes: of the training sets; three or more give a law.
        pairs: per size.
        steps: updates; larger sets get no more of them. `stop="epochs"` takes `epochs` instead, and `stop="train_loss"` ends each
            run when its mean batch loss over an epoch is at most `loss_target`, after `steps` updates at the latest.
        loss: `(outputs, targets) -> mean loss`, a mean over examples, which is tried before training (`example_losses`). Class
            weights and labels to ignore must be arguments of a torch loss.
        schedule: factor on the rate by update, as for `Fleet`.
        drop_last: leave out the incomplete batch of an epoch.
        checkpoints: further numbers of updates at which all is measured.
        trials: seed-trials, how many or which: trial k starts from seed `init_seed + k` and shuffles by `order_seed + k`. Within
            a trial all pairs and sizes share both seeds, for the bound must hold for each draw of the algorithm's own randomness.
        eval_size: test examples on which the models are compared, drawn once if there are more.
        paths: pairs of the smallest and of the largest size between which a line is drawn (`linear_path`, policy `batchnorm`).
        check_steps: length of the null swap that precedes every measurement; 0 leaves it out and says so.

    Returns:
        A `StabilityResult`: the distances at each size with their errors, the fitted powers, the verdict, `.plot()`.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(300, 4, generator=generator)
    >>> pool, test = (x[:200], (x[:200, 0] > 0).long()), (x[200:], (x[200:, 0] > 0).long())
    >>> line = lambda seed: torch.nn.Linear(4, 2)
    >>> found = stability(
    ...     line, "sgd", pool, test, sizes=[20, 40, 80], pairs=4, steps=60, loss=torch.nn.CrossEntropyLoss(), batch_size=10,
    ...     rate=0.1,
    ... )
    >>> found.fit("dist").b < 0
    True
    """
    began = time.perf_counter()
    fix_matrix_products()  # before the factory multiplies anything
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"factory must be a function that builds a model, for every pair starts anew: give a function that builds one, such "
            f"as lambda seed: Net(). Got a {type(factory).__name__}."
        )
    steps, epochs, loss_target = read_length(stop, steps, epochs, loss_target)
    recipe = Recipe(
        factory,
        optimizer,
        loss,
        steps or 1,
        whole("batch_size", batch_size, 1),
        whole("init_seed", init_seed),
        whole("order_seed", order_seed),
        drop_last,
        schedule,
        loss_target,
        read_settings(settings),
    )
    bench = make_bench(train, test, eval_size, whole("pair_seed", pair_seed))
    given: Any = sizes, pairs, checkpoints, trials, eval_size, pair_seed, paths, batchnorm, check_steps
    config = checked_config(StabilityConfig(*given), len(bench.train))
    recipes = {m: with_length(recipe, m, stop, steps, epochs) for m in config.sizes}
    longest = max(one.steps for one in recipes.values())
    late = [step for step in config.checkpoints if step > longest]
    if late:
        raise ValueError(f"checkpoints must lie within the run, 0 to {longest} updates. Got {', '.join(map(str, late))}.")
    found = [
        measure_size(one, bench, config, m, trial, progress=progress) for trial in config.trials for m, one in recipes.items()
    ]
    return joined(found, config, bench, recipe, stop=stop, epochs=epochs, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class Measured:
    """All pairs of one size and trial."""

    rows: list[Row]
    paths: dict[str, LinearPath]
    check: str
    notes: tuple[str, ...]
    route: str


def measure_size(
    recipe: Recipe, bench: Bench, config: StabilityConfig, m: int, trial: int, *, progress: bool | None = None
) -> Measured:
    """The null swap, then all pairs of one size in one seed-trial."""
    check_loss(recipe, bench)
    recipe = replace(recipe, init_seed=recipe.init_seed + trial, order_seed=recipe.order_seed + trial)
    swaps = draw_swaps(len(bench.train), len(bench.test), m, config.pairs, config.pair_seed)
    length = min(recipe.steps, max(CHECK_STEPS, recipe.steps // 10) if config.check_steps is None else config.check_steps)
    check = "the null swap was left out"
    if length:
        check, recipe = null_swap(recipe, bench, swaps, length)
    before = sorted({step for step in config.checkpoints if step < recipe.steps})
    fleet, trace, rows = train_pairs(recipe, bench, swaps, before, progress=progress)
    notes = [*trace.cost.notes]
    lost = sum(row["diverged"] for row in rows if row["step"] == rows[-1]["step"])
    if lost:
        notes.append(f"m = {m}: {lost} of {config.pairs} pairs diverged; they have no part in the laws")
        rows = [
            {name: math.nan if row["diverged"] and isinstance(value, float) else value for name, value in row.items()}
            for row in rows
        ]
    profiles = _paths(fleet, trace, recipe.loss, bench, config, swaps)
    paths = {f"trial {trial}, m {m}, pair {p}": path for p, path in profiles.items()}
    label = {"trial": trial, **fields_of(recipe, "init_seed order_seed")}
    return Measured([{**label, **row} for row in rows], paths, f"m = {m}, trial {trial}: {check}", tuple(notes), trace.route)


def joined(
    found: Iterable[Measured],
    config: StabilityConfig,
    bench: Bench,
    recipe: Recipe,
    *,
    stop: Stopping,
    epochs: int | None = None,
    seconds: float,
) -> StabilityResult:
    """Measurements of all sizes and trials as one result."""
    found = list(found)
    pool = len(bench.train)
    ends = [row for one in found for row in one.rows if row["step"] == one.rows[-1]["step"]]
    notes = [note for one in found for note in one.notes]
    if pool in config.sizes:
        notes.append(f"m = {pool} is the whole pool: its pairs share one set of examples and differ in order, z and i alone")
    return StabilityResult(
        table=tuple(row for one in found for row in one.rows),
        paths={name: path for one in found for name, path in one.paths.items()},
        checks=tuple(one.check for one in found),
        settings=settings_of(recipe, config, bench, stop=stop, epochs=epochs),
        notes=tuple(dict.fromkeys(notes)),
        outcome=Outcome.DIVERGED if all(row["diverged"] for row in ends) else Outcome.FINISHED,
        seed=recipe.init_seed,
        cost=Cost(seconds, ", ".join(dict.fromkeys(one.route for one in found))),
    )


def make_bench(train: Any, test: Any, eval_size: int = 10_000, seed: int = 0) -> Bench:
    """Both pools, and the examples to compare on: all of the test pool, or a choice of it made once."""
    eval_size = whole("eval_size", eval_size, 1)
    pool = read_pool(train, "train")
    tests = read_pool(test, "test").in_types_of(pool)
    rows = torch.arange(len(tests))
    if eval_size < len(tests):
        rows = torch.from_numpy(np.sort(np.random.default_rng([seed, eval_size]).choice(len(tests), eval_size, replace=False)))
    return Bench(pool, tests, rows, pool.followed_by(tests))


def with_length(recipe: Recipe, m: int, stop: Stopping, steps: int | None, epochs: int | None) -> Recipe:
    """The recipe with the number of updates for a size; a target for the loss counts only where runs are stopped by it."""
    if stop == "epochs":
        return replace(recipe, steps=(epochs or 1) * recipe.batches(m), loss_target=None)
    return replace(recipe, steps=steps or 1, loss_target=recipe.loss_target if stop == "train_loss" else None)


def _paths(
    fleet: Fleet, trace: FleetTrace, loss: Any, bench: Bench, config: StabilityConfig, swaps: Sequence[Swap]
) -> dict[int, LinearPath]:
    """Profiles of some pairs by number, a seeded choice, at the smallest and the largest size."""
    m = len(swaps[0].members)
    if not config.paths or m not in (min(config.sizes), max(config.sizes)):
        return {}
    found = {}
    for p in sorted(np.random.default_rng([config.pair_seed, m, 1]).permutation(len(swaps))[: config.paths].tolist()):
        if not any(trace.diverged[2 * p : 2 * p + 2]):
            first, second = (fleet.model(2 * p + twin).state_dict() for twin in (0, 1))
            data = bench.train.part(swaps[p].members), bench.evaluation
            found[p] = linear_path(fleet.module, first, second, *data, loss=loss, batchnorm=config.batchnorm, progress=False)
    return found


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


def wholes(name: str, values: Any) -> tuple[int, ...]:
    """Different whole numbers, in the order given."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a sequence of integers, such as [100, 200, 400]. Got {shown(values)}.")
    numbers = values.tolist() if isinstance(values, Tensor) else list(values)
    found = tuple(whole(f"Each of {name}", value) for value in numbers)
    if len(set(found)) < len(found):
        raise ValueError(f"{name} must be different numbers. Got {list(found)}.")
    return found


def checked_config(given: StabilityConfig, pool: int) -> StabilityConfig:
    """What is measured on a training pool of that size, from arguments of any type."""
    choice("batchnorm", given.batchnorm, POLICIES)
    trials: Any = given.trials
    several = isinstance(trials, Iterable) and getattr(trials, "ndim", 1) == 1
    chosen = wholes("trials", trials) if several else tuple(range(place("trials", trials, MOST_TRIALS + 1)))
    if not chosen:
        raise ValueError(f"trials must be at least one, as a number or as a list. Got {shown(trials)}.")
    lengths = wholes("sizes", given.sizes)
    if not lengths:
        raise ValueError("sizes must hold at least one number of examples. Got none.")
    for m in lengths:
        check_size(m, pool)
    return replace(
        given,
        sizes=lengths,
        pairs=whole("pairs", given.pairs, 1),
        checkpoints=wholes("checkpoints", given.checkpoints),
        trials=chosen,
        pair_seed=whole("pair_seed", given.pair_seed),
        paths=whole("paths", given.paths),
        check_steps=None if given.check_steps is None else whole("check_steps", given.check_steps),
    )


def read_length(stop: Any, steps: Any, epochs: Any, loss_target: Any) -> tuple[int | None, int | None, float | None]:
    """Steps, epochs and the target of the loss; those that do not belong to the way of stopping are refused."""
    choice("stop", stop, STOPPING)
    for name, value, owner in (("epochs", epochs, "epochs"), ("loss_target", loss_target, "train_loss")):
        if value is not None and stop != owner:
            raise ValueError(f"{name} counts with stop={owner!r} alone; give that, or leave {name} out. Got stop={shown(stop)}.")
    if stop == "epochs":
        if steps is not None:
            raise ValueError(f"stop='epochs' takes epochs in place of steps; leave steps out. Got steps={shown(steps)}.")
        return None, whole("epochs", epochs, 1), None
    target = positive("stop='train_loss' needs loss_target, which", loss_target) if stop == "train_loss" else None
    return whole("steps", steps, 1), None, target


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
    if isinstance(rate, bool) or not (isinstance(rate, Real) or (isinstance(rate, Tensor) and not rate.ndim)):
        raise ValueError(f"rate must be one number: all models of a study share the algorithm. Got {shown(rate)}.")
    return {**settings, "rate": float(rate)}


@called_within(torch.no_grad)
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
        **fields_of(recipe, "batch_size drop_last"),
        "stop": stop,
        "steps": None if stop == "epochs" else recipe.steps,
        "epochs": epochs if stop == "epochs" else None,
        "loss_target": recipe.loss_target if stop == "train_loss" else None,
        **asdict(config),
        "pool": len(bench.train),
        "eval_size": len(bench.eval_rows),
        **fields_of(recipe, "init_seed order_seed"),
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
