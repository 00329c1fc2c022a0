"""Which learning rate, momentum, weight decay? Searches at equal cost, scored on held-out data and on fresh seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, Optimizer

from theodolite.arguments import a_mapping, a_path, about, checked, count, one_of, positive, shown, whole
from theodolite.errors import ArgumentError, TheodoliteError
from theodolite.measures.dynamics.critical import critical_learning_rate
from theodolite.measures.dynamics.sweep import joined_data
from theodolite.measures.stepsize.meta_gradients.hyperparameters import (
    OPTIMIZERS,
    parts_of,
    read_optimizer,
    refuse_two_meanings,
)
from theodolite.measures.stepsize.meta_gradients.unrolled import refuse_overlap
from theodolite.measures.stepsize.search.search_space import (
    ADAPTIVE_RATES,
    LEAST_RATE,
    MOST_RATE,
    Setting,
    check_names,
    make_space,
    swept_axes,
)
from theodolite.measures.stepsize.search.searches import Search, Tasks, gradient_search, random_search, sweep
from theodolite.measures.stepsize.search.slopes import Slopes, slope_of
from theodolite.measures.stepsize.search.tuned_runs import Ledger, Scores, Split, Task, TunedRuns
from theodolite.problem import Problem
from theodolite.problem.arguments import a_factory, a_loss, some_data
from theodolite.problem.calling import Loss
from theodolite.problem.tensors import named_tensors
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import number, quoted
from theodolite.training.fleets.state import Factory, stack_replicas
from theodolite.training.interruption import tensor_check_sums

SearchName = Literal["auto", "sweep", "gradient", "smoothed"]

#: Settings that a search tries, where no budget is given.
SETTINGS = 27
#: The same where a sweep varies two hyperparameters: nine by nine.
SETTINGS_OF_TWO = 81
#: Hyperparameters up to which a sweep is the search, with `search="auto"`.
SWEPT = 2
#: The tuning set overfits where the best rate on it is so many times the best one on held-out data.
FACTOR = 3.0
#: Fresh seeds at least, and how far they are from those that were tuned on.
FRESH, FAR = 5, 10_000
#: Samples on which the critical rate is measured.
MEASURED = 1000
#: Where the sweep goes around if no rate is critical.
USUAL_RATE = 0.1
#: Values to start from where the optimizer has none that can be moved by a factor.
STARTS = {"momentum": 0.5, "weight_decay": 1e-4}
#: The learning rate to start from where none is given, as a share of the critical one.
SHARE = 0.1
WORDS = {"sweep": "the sweep", "random": "random search", "gradient": "gradient search", "smoothed": "smoothed gradient search"}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StepSizeChoice(Result):
    """The best setting that was found, and how sure that is.

    `best` are hyperparameters by name, found by `search`; `score` is the mean loss after `steps` steps on the data of `split`
    over `runs` runs (tasks and seeds), `error` its standard error, and `fresh` the same on seeds that had no part in tuning.
    `curve` has a row for each setting of the sweep, or of the search where there was none: values, score, and the difference to
    the best one with the standard error of that difference, for all settings share seeds, tasks and orders; losses on both parts
    of the data, and the share of runs that blew up. `by_train` and `by_valid` are the best settings of the curve by the loss on
    the samples trained on and on the others, `ratio` how many times the learning rate of the first is that of the second (over
    1 − momentum, where that is tuned), and `overfits` whether that is a factor of three or more and costs more than two standard
    errors on held-out data.
    `compared` has a row for each search at equal gradients; the smallest loss on fresh seeds wins. `health` is that of the
    meta-gradient, empty where none was taken, `trace` the steps of the gradient search. `gradients` counts all gradients of a
    batch, `critical` is the rate at which plain descent leaves the sharpest direction at the start; None for optimizers that
    divide by a second moment, of which it says little.
    """

    best: Setting
    search: str
    score: float
    error: float
    fresh: float
    fresh_error: float
    split: str
    steps: int
    runs: int
    curve: tuple[Row, ...]
    by_train: Setting
    by_valid: Setting | None
    ratio: float | None
    overfits: bool
    compared: tuple[Row, ...]
    critical: float | None
    gradients: float
    health: str = ""
    trace: tuple[Row, ...] = ()

    @property
    def truncated(self) -> tuple[float, ...]:
        """The share of runs that blew up, for each row of the curve."""
        return tuple(row["truncated"] for row in self.curve)

    @property
    def at_an_end(self) -> tuple[str, ...]:
        """Hyperparameters whose best value in a sweep is the smallest or the largest that was tried."""
        if all(row["search"] != "sweep" for row in self.compared):
            return ()
        best = min(self.curve, key=lambda row: row["score"])
        tried = {name: {row[name] for row in self.curve} for name in self.best}
        return tuple(name for name, values in tried.items() if len(values) > 1 and best[name] in (min(values), max(values)))

    def rows(self) -> list[Row]:
        return [dict(row) for row in self.curve]

    def sentence(self) -> str:
        return " ".join([self._choice(), *self._comparison(), *self._splits()])

    def _choice(self) -> str:
        where = "held-out data" if self.split == "valid" else "the data trained on"
        fresh = f", {number(self.fresh, self.fresh_error)} on seeds not tuned on" if math.isfinite(self.fresh) else ""
        return (
            f"Best is {values_text(self.best)}, found by {WORDS[self.search]}: after {self.steps} steps the loss on {where} is "
            f"{number(self.score, self.error)}{fresh}."
        )

    def _comparison(self) -> list[str]:
        others = [row for row in self.compared if not row["won"]]
        if not others:
            return []
        said = " and ".join(f"{WORDS[row['search']]} {number(row['fresh'], row['fresh_error'])}" for row in others)
        return [f"At the same number of gradients {said} on these seeds."]

    def _splits(self) -> list[str]:
        if self.ratio is None:
            return []
        if self.overfits:
            return [
                "Your tuning set overfits: by the loss on the data trained on the best learning rate would be "
                f"{self.ratio:.3g} times that by held-out data."
            ]
        if f"{self.ratio:.3g}" == "1":
            return ["By the loss on the data trained on the best learning rate is that by held-out data."]
        return [
            f"By the loss on the data trained on the best learning rate would be {self.ratio:.3g} times that by held-out data."
        ]


def values_text(setting: Mapping[str, float]) -> str:
    """Hyperparameters as a sentence names them.

    >>> values_text({"lr": 0.123456, "momentum": 0.9})
    'lr = 0.123, momentum = 0.9'
    """
    return ", ".join(f"{name} = {value:.3g}" for name, value in setting.items())


@checked(
    factory=a_factory,
    train=some_data,
    valid=some_data,
    steps=count,
    loss=a_loss,
    search=one_of("auto", "sweep", "gradient", "smoothed"),
    lr=positive,
    values=a_mapping,
    seeds=count,
    budget=count,
    batch_size=count,
    split=one_of("train", "valid", None),
    checkpoint=a_path,
    seed=whole,
)
def tune_step_size(
    factory: Factory,
    optimizer: str | type[Optimizer] | Callable[[Any], Optimizer] = "sgd",
    train: Any = None,
    valid: Any = None,
    *,
    steps: int,
    loss: Loss,
    hyper: str | Sequence[str] = ("lr",),
    search: SearchName = "auto",
    lr: float | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
    tasks: Sequence[tuple[Any, Any]] | Callable[[int], tuple[Any, Any]] | None = None,
    seeds: int = 3,
    budget: int | None = None,
    compare: bool = True,
    batch_size: int | None = None,
    split: Split | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> StepSizeChoice:
    """Find the learning rate, and other hyperparameters, that leave the smallest loss after `steps` steps.

    Every setting is tried on the same tasks, seeds and orders of the data, so that differences are those of the settings. A
    sweep, random draws and steps along the meta-gradient get the same number of gradients, and fresh seeds decide between them.
    A meta-gradient that explodes or jumps is never used.

    Args:
        factory: seed -> model.
        optimizer: `"sgd"`, `"momentum"`, `"nesterov"`, `"adam"`, `"adamw"`, `"rmsprop"`, or a function of the parameters that
            makes such an optimizer of torch.
        train, valid: data to train on, and held-out data to score on. All of them are held in memory.
        steps: of each run.
        hyper: what to tune: `"lr"`, `"lr:LAYER"`, `"momentum"`, `"weight_decay"`, `"beta1"`, `"beta2"`, `"alpha"`. Where the
            optimizer has several parameter groups, `"lr"` moves the rates of all by one factor and is that of the first
            parameter, `"lr:0"` (or `"lr:group0"`) is that of the first group.
        search: `"auto"` sweeps up to two hyperparameters and follows the gradient beyond. With `compare` the others run too.
        lr: the learning rate to start from, and to keep where it is not tuned. Else a tenth of the critical one.
        values: what a sweep is to try, by name; else it goes around the critical learning rate.
        tasks: pairs (train, valid) in place of `train` and `valid`, each of which is trained on with every seed; or a function
            seed -> pair, which then gives fresh seeds fresh tasks.
        seeds: how many, of weights and orders; tuned on are `seed`, `seed + 1`, ...
        budget: training runs that each search may take, over all tasks and seeds; where `values` are given those are tried.
        split: score on `"valid"` (the default where there is held-out data) or on `"train"`.
        checkpoint, resume: a folder that keeps what is finished, and whether to go on from it.

    Returns:
        A `StepSizeChoice`: `best`, the `curve` with the error of each difference, `compared`, `by_train` beside `by_valid`.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).double()        # f = ¼ (w₁² + 9 w₂²): best in the long run 2/(½ + 9/2) = 0.4
    >>> found = tune_step_size(lambda seed: nn.Linear(2, 1, bias=False).double(), "sgd", (x, 0 * x[:, :1]), steps=50,
    ...     loss=lambda output, target: ((output - target) ** 2).mean() / 2, budget=60, compare=False, progress=False)
    >>> abs(found.best["lr"] - 0.4) < 0.02, found.critical is not None
    (True, True)
    """
    began = time.perf_counter()
    data = _Data(train, valid, tasks, split, seed)
    named = [hyper] if isinstance(hyper, str) else hyper
    study = _Study(factory, optimizer, data, loss, steps, named, lr, values or {}, batch_size, seed)
    why_not = study.no_gradient(seed) if search != "sweep" or compare else ""
    if search == "gradient" and why_not:
        raise ArgumentError(f"search='gradient' is not possible here: {why_not}")
    many = data.columns(seeds)
    settings = usual_settings(study.space.names)
    if budget is not None and budget < 2 * many:
        raise ArgumentError(f"budget must pay for two settings at least: {2 * many} runs, {many} for each. Got {budget}.")
    tried = len(study.space.sweep(settings if budget is None else budget // many))  # a grid has as many as it has
    names, note = _search_names(search, len(study.space.names), compare, why_not)
    identity = study.identity() | {"searches": names, "seeds": seeds, "budget": budget, "seed": seed}
    ledger = Ledger(None if checkpoint is None else Path(checkpoint), identity, resume=resume)
    tuned = [seed + i for i in range(seeds)]
    fresh = [seed + FAR + i for i in range(max(FRESH, seeds))]
    total = len(names) * tried * many * steps + len(names) * data.columns(len(fresh)) * steps
    with counting("gradients", progress=progress, total=total) as advance:
        runs = study.runs(ledger, advance)
        found = [_search(name, study, runs, study.tasks(tuned), tried, seed) for name in names]
        _refuse_lost(found, study)
        scores = runs.scores([one.settings[one.scores.best(data.split)] for one in found], study.tasks(fresh))
    return _choice(study, found, scores, many, note, seed, time.perf_counter() - began)


def _search(name: str, study: _Study, runs: TunedRuns, tasks: Tasks, count: int, seed: int) -> Search:
    """One search, of so many settings or what they cost."""
    if name == "sweep":
        return sweep(runs, study.space, tasks, count, study.data.split)
    if name == "random":
        return random_search(runs, study.space, tasks, count, seed)
    budget = float(count * sum(len(seeds) for _, seeds in tasks) * study.steps)
    slopes = slope_of(study.slopes(runs))
    return gradient_search(runs, study.space, tasks, budget, slopes, smoothed=name == "smoothed")


class _Data:
    """The tasks, for any seeds: one for all, several with every seed, or one for each seed."""

    def __init__(self, train: Any, valid: Any, tasks: Any, split: Split | None, seed: int) -> None:
        if (train is None) == (tasks is None) or (tasks is not None and valid is not None):
            raise ArgumentError("Give train (and valid), or tasks: one of them.")
        self._of_seed = tasks if callable(tasks) and not isinstance(tasks, nn.Module | type) else None
        if tasks is None:
            self._pairs = [Task(train, valid, "train")]
        elif self._of_seed is not None:
            self._pairs = [_a_task(f"tasks({seed})", tasks(seed))]
        else:
            self._pairs = [_a_task(f"tasks[{i}]", pair) for i, pair in enumerate(_listed(tasks))]
        has_valid = all(task.valid is not None for task in self._pairs)
        if split == "valid" and not has_valid:
            raise ArgumentError("split='valid' needs held-out data: give valid=, or score on split='train'.")
        self.split: Split = split or ("valid" if has_valid else "train")

    @property
    def first(self) -> Task:
        return self._pairs[0]

    @property
    def listed(self) -> list[Task]:
        """The tasks at hand."""
        return self._pairs

    def columns(self, seeds: int) -> int:
        """Runs of a setting."""
        return seeds if self._of_seed is not None else len(self._pairs) * seeds

    def of(self, seeds: Sequence[int], prepared: Callable[[Task], Task]) -> list[tuple[Task, list[int]]]:
        """Tasks, each with the seeds it is trained on."""
        if self._of_seed is not None:
            return [(prepared(_a_task(f"tasks({seed})", self._of_seed(seed))), [seed]) for seed in seeds]
        return [(prepared(task), list(seeds)) for task in self._pairs]

    def check_sums(self) -> list[str]:
        """Of all tensors at hand."""
        return tensor_check_sums(dict(named_tensors([(task.train, task.valid) for task in self._pairs])))


def _listed(tasks: Any) -> list[Any]:
    if isinstance(tasks, str | Mapping) or not isinstance(tasks, Sequence) or not tasks:
        raise ArgumentError(f"tasks must be a list of pairs (train, valid), or a function seed -> pair. Got {shown(tasks)}.")
    return list(tasks)


def _a_task(name: str, pair: Any) -> Task:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ArgumentError(f"{name} must be a pair (train, valid), where valid may be None. Got {shown(pair)}.")
    return Task(some_data(name, pair[0]), None if pair[1] is None else some_data(name, pair[1]), name)


class _Study:
    """What is tuned and how: checked arguments, the optimizer's settings, the critical rate, the space of the search."""

    def __init__(
        self,
        factory: Factory,
        optimizer: Any,
        data: _Data,
        loss: Loss,
        steps: int,
        hyper: Sequence[str],
        lr: float | None,
        values: Mapping[str, Any],
        batch_size: int | None,
        seed: int,
    ) -> None:
        self.factory, self.loss, self.data, self.steps, self.batch_size = factory, loss, data, steps, batch_size
        model = stack_replicas(factory, [seed]).replica(0)
        with about(data.first.name):
            self.problem = Problem(model, loss, data.first.train)
        self._refuse_overlaps()
        by_name, self.given = isinstance(optimizer, str | type), _at_rate(optimizer, lr)
        brings = lr is not None or not by_name
        self.recipe = read_optimizer(self.given, {"lr": (lr or 1.0) if by_name else None}, self.problem.parameters)
        settings, keys = self.recipe.groups[self.recipe.members[0]], self.problem.selection.keys
        layers = {name: layer.members(bias=True) for name, layer in self.problem.layers.items()}
        self.parts = {name: [keys[i] for i in tensors] for name, tensors in parts_of(self.recipe, layers).items()}
        self.own_rates = self._rates_by_parameter()
        names = check_names(hyper, self.recipe.rule.settings, self.parts)
        refuse_two_meanings(names, self.recipe, layers)
        if not brings and all(name.split(":")[0] != "lr" for name in names):
            raise ArgumentError("lr is missing: it is not tuned, so give the learning rate to train with.")
        own = {name: value or STARTS.get(name, value) for name, value in settings.items()}
        self.optimizer = fleet_optimizer_of(self.given)
        self.adaptive = self.recipe.name != "SGD"
        held = 0.0 if self.adaptive or "momentum" in names else settings["momentum"]
        self.critical = None if self.adaptive else self._critical(held)
        rates = self._rates()
        start = own | {"lr": own["lr"] if brings else self._start_of(rates)}
        self.held = settings | {"lr": start["lr"]}
        firsts = {name: self.parts[name.removeprefix("lr:")][0] for name in names if name.startswith("lr:")}
        start |= {name: start["lr"] * self.own_rates[first] / self.own_rates[keys[0]] for name, first in firsts.items()}
        self.space = make_space(names, start, rates, values)
        #: What the optimizer begins with in a meta-gradient: its own settings, and a start for those that are tuned.
        tuned = {name.split(":")[0] for name in names}
        self.start = {name: start[name] if name in tuned else value for name, value in settings.items()}
        if len(self.recipe.groups) > 1:
            del self.start["lr"]  # the groups have theirs

    def _rates_by_parameter(self) -> dict[str, float]:
        """The learning rate that the optimizer gives to every parameter."""
        groups = self.recipe.groups
        unlike = [name for name in groups[0] if name != "lr" and len({group[name] for group in groups}) > 1]
        if unlike:
            raise ArgumentError(
                f"optimizer: its parameter groups differ in {quoted(unlike)}. Tuning trains many runs as one, whose groups may "
                "differ in lr alone: give all groups the same, or take th.meta_gradient, which keeps them as they are."
            )
        if len(groups) > 1 and any(group["lr"] == 0 for group in groups):
            raise ArgumentError(
                "optimizer: a parameter group has lr=0, of which no multiple can be tried. Freeze its parameters in the factory "
                "with requires_grad_(False)."
            )
        keys = self.problem.selection.keys
        return {key: groups[member]["lr"] or 1.0 for key, member in zip(keys, self.recipe.members, strict=True)}

    def _refuse_overlaps(self) -> None:
        for task in self.data.listed:
            if task.valid is not None:
                with about("valid" if task.name == "train" else task.name):
                    held_out = self.problem.on(task.valid)
                    held_out.with_batches([held_out.few(8)]).loss()  # what the model refuses is said of these data
                refuse_overlap(self.problem.on(task.train), held_out)

    def _critical(self, momentum: float) -> float | None:
        """The critical rate of descent at the start, with the momentum that is held; None where none is known."""
        few = self.problem.with_batches([self.problem.few(MEASURED)])
        try:
            found = critical_learning_rate(few, optimizer=SGD(few.parameters, lr=1.0, momentum=momentum), progress=False).value
        except TheodoliteError:
            return None
        return found if math.isfinite(found) else None

    def _rates(self) -> tuple[float, float]:
        """Learning rates between which the search looks."""
        if self.adaptive:
            return ADAPTIVE_RATES
        centre = self.critical or USUAL_RATE
        return LEAST_RATE * centre, MOST_RATE * centre

    def _start_of(self, rates: tuple[float, float]) -> float:
        return math.sqrt(rates[0] * rates[1]) if self.adaptive else SHARE * (self.critical or USUAL_RATE)

    def tasks(self, seeds: Sequence[int]) -> list[tuple[Task, list[int]]]:
        return self.data.of(seeds, self._in_tensors)

    def _in_tensors(self, task: Task) -> Task:
        """Loaders and lists of batches as one batch of tensors."""
        train, valid = (self._joined(part) for part in (task.train, task.valid))
        return Task(train, valid, task.name)

    def _joined(self, data: Any) -> Any:
        return data if data is None or isinstance(data, tuple) else joined_data(self.problem.on(data))

    def identity(self) -> dict[str, Any]:
        """What tells this search from others."""
        ranges = [[one.name, one.low, one.high, list(one.values)] for one in self.space.hyper]
        weights = tensor_check_sums({name: p.detach() for name, p in self.problem.model.named_parameters()})
        recipe = self.recipe
        optimizer = [recipe.name, repr(recipe.rule), [dict(group) for group in recipe.groups], list(recipe.members)]
        sizes = {"steps": self.steps, "batch_size": self.batch_size, "split": self.data.split}
        start = {"start": dict(self.space.start), "loss": getattr(self.loss, "__qualname__", type(self.loss).__name__)}
        return {"ranges": ranges, "weights": weights, "data": self.data.check_sums(), "optimizer": optimizer, **sizes, **start}

    def runs(self, ledger: Ledger, advance: Callable[[int], None]) -> TunedRuns:
        return TunedRuns(
            self.factory,
            self.optimizer,
            self.loss,
            self.steps,
            self.batch_size,
            self.held,
            self.parts,
            self.own_rates,
            ledger,
            advance,
        )

    def no_gradient(self, seed: int) -> str:
        """Why no meta-gradient can be taken of this training; empty where one can."""
        ledger = Ledger(None, {}, resume=False)
        try:
            self.slopes(self.runs(ledger, lambda units: None)).objective(self.tasks([seed])[0][0], seed)
        except (TheodoliteError, ValueError) as error:
            return str(error)
        return ""

    def slopes(self, runs: TunedRuns) -> Slopes:
        return Slopes(self.factory, self.given, self.loss, self.space, self.start, self.data.split, runs)


def usual_settings(names: Sequence[str]) -> int:
    """Settings that each search tries of hyperparameters with these names, where no budget is given.

    >>> usual_settings(["lr"]), usual_settings(["lr", "momentum"]), usual_settings(["lr:0", "lr:1", "lr:2"])
    (27, 81, 27)
    """
    return SETTINGS_OF_TWO if swept_axes(names) > 1 else SETTINGS


def fleet_optimizer_of(optimizer: Any) -> Any:
    """A function that makes the optimizer, from its name or its class; its learning rate is set by the search."""
    kind, meant = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else (optimizer, {})
    if isinstance(kind, type):
        return lambda parameters: kind(parameters, lr=1.0, **meant)

    def of_one_group(parameters: Any) -> Any:
        made = optimizer(parameters)
        del made.param_groups[1:]  # only their rates may differ, and those are given by parameter
        return made

    return of_one_group


def _at_rate(optimizer: Any, lr: float | None) -> Any:
    """The optimizer at a learning rate, that of the first parameter; other groups keep their ratio to it."""
    if lr is None or isinstance(optimizer, str | type) or not callable(optimizer):
        return optimizer

    def at_rate(parameters: Any) -> Any:
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            return made  # which is refused where it is read
        own = next((g["lr"] for g in made.param_groups if any(p is parameters[0] for p in g["params"])), 0.0)
        for group in made.param_groups:
            group["lr"] = lr * group["lr"] / own if own else lr
        return made

    return at_rate


def _search_names(search: SearchName, hyper: int, compare: bool, why_not: str) -> tuple[list[str], str]:
    """The searches to run, that which was asked for first, and what to say of one that cannot run."""
    chosen = search if search != "auto" else "sweep" if hyper <= SWEPT else "gradient"
    if chosen == "gradient" and why_not:
        chosen = "smoothed"
    others = ["sweep", "random", "smoothed" if chosen == "smoothed" or why_not else "gradient"]
    note = f"no meta-gradient was taken: {why_not}" if why_not else ""
    return [chosen, *(name for name in others if compare and name != chosen)], note


def _refuse_lost(found: Sequence[Search], study: _Study) -> None:
    """Raise where every run of every search blew up."""
    if all(bool(one.scores.truncated.all()) for one in found):
        tried = [setting[one.name] for search in found for setting in search.settings for one in study.space.hyper if one.is_rate]
        rates = (
            f"every learning rate that was tried, from {min(tried):.3g} to {max(tried):.3g}"
            if tried
            else "every setting that was tried"
        )
        edge = f" The critical rate at the start is {study.critical:.3g}." if study.critical else ""
        raise ValueError(f"Training diverges at {rates}.{edge} Give lower rates by values=, or look for what makes it blow up.")


def _choice(
    study: _Study, found: Sequence[Search], fresh: Scores, many: int, note: str, seed: int, seconds: float
) -> StepSizeChoice:
    split = study.data.split
    bests = [one.scores.best(split) for one in found]
    means = fresh.on(split).mean(1)
    won = int(means.argmin())
    winner, k = found[won], bests[won]
    score, error = winner.scores.mean(split, k)
    compared = tuple(
        {
            "search": one.name,
            **one.settings[best],
            **dict(zip(("score", "error"), one.scores.mean(split, best), strict=True)),
            **dict(zip(("fresh", "fresh_error"), fresh.mean(split, i), strict=True)),
            "gradients": one.gradients,
            "settings": len(one.settings),
            "health": one.health,
            "won": i == won,
            "note": one.note,
        }
        for i, (one, best) in enumerate(zip(found, bests, strict=True))
    )
    drawn = next((one for one in found if one.name == "sweep"), found[0])
    by_train, by_valid, ratio, overfits = _by_split(drawn)
    return StepSizeChoice(
        best=dict(winner.settings[k]),
        search=winner.name,
        score=score,
        error=error,
        fresh=fresh.mean(split, won)[0],
        fresh_error=fresh.mean(split, won)[1],
        split=split,
        steps=study.steps,
        runs=many,
        curve=tuple(_curve(drawn, split)),
        by_train=by_train,
        by_valid=by_valid,
        ratio=ratio,
        overfits=overfits,
        compared=compared,
        critical=study.critical,
        gradients=sum(one.gradients for one in found) + float(len(found) * fresh.truncated.shape[1] * study.steps),
        health=next((one.health for one in found if one.health), ""),
        trace=next((one.trace for one in found if one.trace), ()),
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(seconds, "fleet", 0, tuple(filter(None, [note, *(one.note for one in found)]))),
    )


def _by_split(drawn: Search) -> tuple[Setting, Setting | None, float | None, bool]:
    """The best settings by either loss, how many times the rate of the first is that of the second, and whether that costs."""
    scores = drawn.scores
    a = scores.best("train")
    if scores.valid is None:
        return dict(drawn.settings[a]), None, None, False
    b = scores.best("valid")
    by_train, by_valid = drawn.settings[a], drawn.settings[b]
    rates = [name for name in by_train if name.split(":")[0] == "lr"]
    ratio = _pace(by_train, rates) / _pace(by_valid, rates) if rates else None
    worse, error = (float(t[a]) for t in scores.difference("valid", b))
    overfits = ratio is not None and ratio >= FACTOR and (math.isnan(error) or worse > 2 * error)
    return dict(by_train), dict(by_valid), ratio, overfits


def _pace(setting: Setting, rates: Sequence[str]) -> float:
    """The learning rate as momentum adds it up, lr / (1 − momentum); the geometric mean where layers have their own."""
    mean = math.exp(sum(math.log(setting[name]) for name in rates) / len(rates))
    return mean / (1 - setting.get("momentum", 0.0))


def _curve(drawn: Search, split: Split) -> list[Row]:
    """A row for each setting of a search: values, score, difference to the best, both losses, share of truncated runs."""
    scores = drawn.scores
    apart, errors = scores.difference(split, scores.best(split))
    rows = []
    for k, setting in enumerate(drawn.settings):
        score, error = scores.mean(split, k)
        row: Row = {
            **setting,
            "score": score,
            "error": error,
            "difference": float(apart[k]),
            "difference_error": float(errors[k]),
        }
        row |= {"train": float(scores.train[k].mean()), "valid": None if scores.valid is None else float(scores.valid[k].mean())}
        rows.append(row | {"truncated": float(scores.truncated[k].double().mean())})
    return rows
