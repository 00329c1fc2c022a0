"""A stability study from the options of the command line: its pools and recipe, its jobs, and how long they may take."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.cli.loading.batches import first_parts
from theodolite.cli.loading.checkpoints import load_checkpoint
from theodolite.cli.loading.datasets import Part
from theodolite.cli.loading.hugging_face import as_one_tensor
from theodolite.cli.loading.module_attribute import load_attribute, names_code
from theodolite.cli.loading.optimizers import WORDS, make_optimizer
from theodolite.cli.loading.subject import Subject, load_subject, load_test_part, own_model
from theodolite.errors import NotRepeatableError
from theodolite.measures.mode_connectivity import POINTS, LinearPath
from theodolite.measures.stability.study import (
    CHECK_STEPS,
    Measured,
    StabilityConfig,
    StabilityResult,
    Stopping,
    check_loss,
    joined,
    make_bench,
    measure_size,
    with_length,
)
from theodolite.measures.stability.training_pairs import Bench, Recipe, Swap, compare_pairs, draw_swaps, null_swap, read_pool
from theodolite.results import Cost, Outcome, Result, Row, fields_of

MODEL, DATA, MOMENTUM = "F-48^2", "digits", 0.9  # the embedded example
RATE = 0.1  # of SGD where none is named
HELD_OUT = 0.2  # share of data without a test part
EXAMPLES = 10_000  # on which the models of a pair are compared, at most

SIZES, LARGEST = 4, 0.8  # default: so many sizes, each twice the one before, up to this share of the pool
TRIED, MOST_TRIED, LONG_ENOUGH = 2, 200, 0.3  # steps that the estimate is made of, and seconds they should take


@dataclass(frozen=True)
class StudyOptions:
    """Everything that decides what is trained, as plain values: a worker elsewhere makes the same study of them."""

    model: str | None = None
    data: str | None = None
    test: str | None = None
    loss: str | None = None
    weights: str | None = None
    optimizer: str | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    batch_size: int = 32
    samples: int | None = None
    steps: int | None = None
    epochs: int | None = None
    loss_target: float | None = None
    seed: int = 0

    @property
    def own_model(self) -> bool:
        """Whether the model comes from the user's code or folder."""
        return self.model is not None and (names_code(self.model) or self.model.startswith("hf:"))

    @property
    def stop(self) -> Stopping:
        return "epochs" if self.epochs is not None else "updates" if self.loss_target is None else "train_loss"

    def owners(self) -> tuple[object, ...]:
        """The user's own code among the options."""
        code = {"--model": self.model, "--data": self.data, "--test": self.test, "--loss": self.loss}
        code |= {"--optimizer": None if _is_known(self.optimizer) else self.optimizer}
        return tuple(load_attribute(word, option, self.seed) for option, word in code.items() if word and names_code(word))


@dataclass(frozen=True)
class Study:
    """Recipe and pools, what was loaded from where, what the user must know.

    `places` (n,) are the numbers that held-out test examples have in the data; None where there is a test set of its own.
    """

    options: StudyOptions
    name: str
    recipe: Recipe
    bench: Bench
    places: Tensor | None
    facts: dict[str, str]
    notes: tuple[str, ...]

    def recipe_for(self, m: int) -> Recipe:
        """The recipe with as many steps as a training set of this size takes."""
        return with_length(self.recipe, m, self.options.stop, self.options.steps, self.options.epochs)

    def fingerprint(self, trial: int) -> str:
        """A digest of the examples and of the weights that a trial starts from."""
        start = self.recipe.factory(self.recipe.init_seed + trial)
        digest = hashlib.blake2b(digest_size=12)
        for t in (*self.bench.joined, self.bench.eval_rows, *start.state_dict().values()):
            if isinstance(t, Tensor):
                digest.update(f"{t.dtype}{tuple(t.shape)}".encode())
                digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b"")
        return digest.hexdigest()


class Replicas:
    """seed -> a model with the weights of that seed.

    A seed's model is built twice, so that a builder that gives other weights each time shows, and no more often: a fleet copies
    the weights of what it is given, and builders may be slow.
    """

    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        self._build = build
        self._made: dict[int, list[nn.Module]] = {}

    def __call__(self, seed: int) -> nn.Module:
        made = self._made.setdefault(seed, [])
        if len(made) < 2:
            made.append(self._build(seed))
            return made[-1]
        return made[0]


def load_study(options: StudyOptions) -> Study:
    """Pools, model, loss and optimizer that the options name."""
    options = _with_example(options)
    subject = _load(options, options.data)
    wrap, loss, train = _tensors(subject)
    pool = read_pool(train, "--data")
    held = load_test_part(lambda word, part: _load(options, word, part=part), options.test, options.data)
    notes, places = list(subject.notes), None
    if held is None:
        test, places = pool.part(order := _drawn(len(pool), options.seed)), order
        rest = torch.ones(len(pool), dtype=torch.bool)
        rest[order] = False
        kept = pool.part(rest.nonzero().flatten())
        notes.append(
            f"the data have no test part: {len(order)} of {len(pool)} examples, a seeded choice, were held out; --test names one"
        )
    else:
        kept, test = pool.both, read_pool(_tensors(held)[2], "--test" if options.test else "the test part").both
    factory = Replicas(partial(_build, options, wrap))
    optimizer, settings = _optimizer(options, subject)
    recipe = Recipe(
        factory,
        optimizer,
        loss,
        options.steps or 1,
        options.batch_size,
        init_seed=options.seed,
        order_seed=options.seed,
        loss_target=options.loss_target,
        settings=settings,
    )
    facts, fixed = {**subject.facts, "optimizer": _rule(recipe)}, _fixed(options, subject, factory)
    if fixed:
        notes.append(f"every seed starts from the same weights ({fixed}): trials differ in the order of the data alone")
        facts["weights"] = fixed
    bench = make_bench(kept, test, EXAMPLES, options.seed)
    return Study(options, subject.name, recipe, bench, places, facts, tuple(dict.fromkeys(notes)))


def check_data_stays(study: Study) -> None:
    """Raise where the user's own data are others when they are read again."""
    options = _with_example(study.options)
    if not any(word is not None and names_code(word) for word in (options.model, options.data, options.test)):
        return
    again = load_study(study.options).bench.joined
    for name, mine, theirs in zip(("inputs", "targets"), study.bench.joined, again, strict=True):
        if mine.shape != theirs.shape or not torch.equal(mine, theirs):
            raise NotRepeatableError(
                f"--data: its {name} changed between two readings. Usual causes: random augmentation, a data set that keeps a "
                "state. Remedy: fixed transforms, or a function that gives the same tensors (inputs, targets) each time."
            )


def _with_example(options: StudyOptions) -> StudyOptions:
    """The embedded example where model and data are not named, its data for built-in networks."""
    if options.data is not None or options.own_model:
        return options
    if options.model is not None:
        return replace(options, data=DATA)
    plain = options.optimizer is None and options.lr is None and options.momentum is None
    return replace(options, model=MODEL, data=DATA, momentum=MOMENTUM if plain else options.momentum)


def _load(options: StudyOptions, data: str | None, seed: int | None = None, part: Part = "train") -> Subject:
    return load_subject(
        options.model,
        data,
        options.loss,
        samples=options.samples,
        seed=options.seed if seed is None else seed,
        pretrained=False,
        part=part,
        everything=True,
    )


def _tensors(subject: Subject) -> tuple[Callable[[nn.Module], nn.Module], Any, Any]:
    """What the model has to be wrapped in, the loss of outputs and targets, and the data as pairs."""
    if subject.loss is None:
        return as_one_tensor(subject.model, subject.data)
    first_parts(subject.data)  # says what is wrong with data of an unknown form
    return (lambda model: model), subject.loss, subject.data


def _build(options: StudyOptions, wrap: Callable[[nn.Module], nn.Module], seed: int) -> nn.Module:
    if options.model is not None and names_code(options.model):
        model = own_model(options.model, seed).model
    elif options.model is not None and options.model.startswith("hf:"):
        from theodolite.cli.loading.hugging_face import load_folder

        model = load_folder(options.model, seed).model
    else:
        model = _load(options, options.data, seed).model
    if options.weights is not None:
        load_checkpoint(model, options.weights)
    return wrap(model)


def _fixed(options: StudyOptions, subject: Subject, factory: Replicas) -> str:
    """Where the weights come from if they are the same for every seed, else nothing."""
    if options.weights is not None:
        return options.weights
    known = subject.facts.get("weights", "")
    if not options.own_model or known.startswith("random"):
        return ""
    one, other = (factory(options.seed + trial).state_dict() for trial in (0, 1))
    same = one.keys() == other.keys() and all(
        one[key].shape == other[key].shape and torch.equal(one[key], other[key]) for key in one
    )
    return known if same else ""


def _rule(recipe: Recipe) -> str:
    """The optimizer with its settings, as the fleet reads them; two replicas show a factory that changes."""
    fleet = recipe.fleet(2)
    rule: Any = fleet.rule
    settings = {name: value for name, value in vars(rule).items() if value} if is_dataclass(rule) else {}
    known = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items()]
    return ", ".join([type(rule).__name__, f"learning rate {float(fleet.rates[0]):g}", *known])


def _drawn(size: int, seed: int) -> Tensor:
    """Numbers of the examples to hold out."""
    if size < 2:
        raise ValueError(f"--data holds {size} example and has no test part: name test data with --test.")
    count = max(1, round(HELD_OUT * size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def _kind(text: str) -> str:
    """The optimizer's own word, without its settings."""
    return text.partition(":")[0].strip().lower().replace("_", "-")


def _is_known(word: str | None) -> bool:
    return word is None or _kind(word) in WORDS


def _optimizer(options: StudyOptions, subject: Subject) -> tuple[Any, dict[str, Any]]:
    """What makes the optimizer, and the settings that override its own."""
    settings = {"momentum": options.momentum, "weight_decay": options.weight_decay}
    given = {name: value for name, value in settings.items() if value is not None}
    if options.optimizer is None and subject.optimizer is not None:
        brought = subject.optimizer
        return (lambda parameters: brought), given | ({} if options.lr is None else {"rate": options.lr})
    text = options.optimizer or "sgd"
    rate = options.lr if options.lr is not None else subject.lr if options.optimizer is None else None
    if rate is None and _is_known(text) and not _kind(text).startswith("adam") and "lr=" not in text.replace(" ", ""):
        rate = RATE
    return partial(make_optimizer, text, lr=rate), given


@dataclass(frozen=True)
class Plan:
    """What is measured: `pairs` pairs at each of `sizes` in each of `trials` seed-trials."""

    options: StudyOptions
    sizes: tuple[int, ...]
    pairs: int
    trials: int
    checkpoints: tuple[int, ...] = ()
    paths: int = 0

    def config(self) -> StabilityConfig:
        same = fields_of(self, "sizes pairs checkpoints paths")
        return StabilityConfig(**same, trials=tuple(range(self.trials)), pair_seed=self.options.seed)

    def paths_at(self, m: int) -> int:
        return self.paths if m in (min(self.sizes), max(self.sizes)) else 0

    def jobs(self, study: Study) -> list[dict[str, Any]]:
        """Plain values; data and starting weights enter by their digest, so that no result of others is taken for one."""
        return [
            {
                **asdict(self.options),
                "trial": trial,
                "m": m,
                "pairs": self.pairs,
                "checkpoints": list(self.checkpoints),
                "paths": self.paths_at(m),
                "content": content,
            }
            for trial in range(self.trials)
            for content in [study.fingerprint(trial)]
            for m in self.sizes
        ]


def default_sizes(pool: int) -> tuple[int, ...]:
    """Sizes that double, up to four fifths of the pool.

    >>> default_sizes(1000)
    (100, 200, 400, 800)
    """
    largest = max(1, int(LARGEST * pool))
    return tuple(sorted({max(1, largest // 2**k) for k in range(SIZES)}))


def measure_job(job: Mapping[str, Any]) -> list[Row]:
    """All pairs of one size in one trial, as rows: those of the pairs, of the paths, and one on the whole."""
    options = StudyOptions(**{f.name: job[f.name] for f in fields(StudyOptions)})
    study = _study(options)
    if study.fingerprint(job["trial"]) != job["content"]:
        raise NotRepeatableError(
            "The words of the command gave other data or other weights here than where the run was started: they must depend "
            "on their seed alone."
        )
    m, trial = job["m"], job["trial"]
    config = Plan(options, (m,), job["pairs"], trial + 1, tuple(job["checkpoints"]), job["paths"]).config()
    return as_rows(measure_size(study.recipe_for(m), study.bench, config, m, trial, progress=False))


#: What was loaded, not what was trained; one study at a time, so that the jobs of a process read their data once.
_study = lru_cache(maxsize=1)(load_study)


def open_study(options: StudyOptions) -> Study:
    """The study of the options, checked; the jobs done in this process share it."""
    study = _study(options)
    check_data_stays(study)
    return study


def as_rows(found: Measured) -> list[Row]:
    """What was measured as plain rows, to be kept or sent."""
    whole = {"part": "job", "check": found.check, "notes": list(found.notes), "route": found.route}
    pairs = [{"part": "pair", **row} for row in found.rows]
    return [whole, *pairs, *({"part": "path", "name": name, **_path_row(path)} for name, path in found.paths.items())]


def from_rows(rows: Iterable[Row]) -> list[Measured]:
    """What jobs measured, from their rows one after the other."""
    found: list[Measured] = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key != "part"}
        if row["part"] == "job":
            found.append(Measured([], {}, rest["check"], tuple(rest["notes"]), rest["route"]))
        elif row["part"] == "pair":
            found[-1].rows.append(rest)
        else:
            name = rest.pop("name")
            found[-1].paths[name] = _path_from(rest)
    return found


def result_of(plan: Plan, study: Study, rows: Iterable[Row], seconds: float) -> StabilityResult:
    """The rows of all jobs as one result."""
    options = plan.options
    recipe = study.recipe_for(max(plan.sizes))
    return joined(from_rows(rows), plan.config(), study.bench, recipe, stop=options.stop, epochs=options.epochs, seconds=seconds)


def _path_row(path: LinearPath) -> Row:
    common = {f.name for f in fields(Result)}
    own = {f.name: getattr(path, f.name) for f in fields(path) if f.name not in common}
    return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in own.items()} | {"seconds": path.cost.seconds}


def _path_from(row: Row) -> LinearPath:
    own: dict[str, Any] = {name: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for name, v in row.items()}
    return LinearPath(outcome=Outcome.FINISHED, cost=Cost(own.pop("seconds")), **own)


def estimate_seconds(plan: Plan, study: Study) -> float:
    """How long all jobs take on one core, from some steps of all pairs of the largest size.

    A null swap comes first, so that what cannot be measured shows here.
    """
    m = max(plan.sizes)
    swaps = draw_swaps(len(study.bench.train), len(study.bench.test), m, plan.pairs, plan.options.seed)
    recipe = replace(study.recipe, loss_target=None)
    check_loss(recipe, study.bench)
    began = time.perf_counter()
    null_swap(recipe, study.bench, swaps, TRIED)
    building = time.perf_counter() - began
    step, compared = _timed(recipe, study.bench, swaps)
    # A path evaluates one model at so many points; comparing the pairs evaluates two models of each once.
    path = POINTS * compared / (2 * plan.pairs)
    return plan.trials * sum(
        _steps(study, size) * step + 2 * building + compared * (1 + len(plan.checkpoints)) + plan.paths_at(size) * path
        for size in plan.sizes
    )


def _timed(recipe: Recipe, bench: Bench, swaps: Sequence[Swap]) -> tuple[float, float]:
    """Seconds of one step of all pairs, and of comparing them once."""
    index = torch.cat([swap.rows(len(bench.train)) for swap in swaps])
    fleet = recipe.fleet(len(index))
    trace = recipe.train(fleet, bench.joined, index, steps=TRIED, progress=False)
    steps, took = TRIED, trace.cost.seconds
    while trace.outcome is not Outcome.DIVERGED and steps < MOST_TRIED:
        trace = recipe.train(fleet, bench.joined, index, steps=steps, progress=False)
        took = trace.cost.seconds
        if took > LONG_ENOUGH:
            break
        steps *= 4
    began = time.perf_counter()
    compare_pairs(fleet, recipe, bench, swaps)
    return took / trace.loss.shape[1], time.perf_counter() - began


def _steps(study: Study, m: int) -> int:
    """Updates of a size with those of the null swap."""
    steps = study.recipe_for(m).steps
    return steps + min(steps, max(CHECK_STEPS, steps // 10))
