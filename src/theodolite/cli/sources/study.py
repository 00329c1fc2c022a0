"""`load_study`: the words of the command line become the pools and the recipe of a stability study."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.cli.sources.batches import first_parts
from theodolite.cli.sources.checkpoints import load_checkpoint
from theodolite.cli.sources.datasets import NoTestPartError
from theodolite.cli.sources.one_tensor import as_one_tensor
from theodolite.cli.sources.optimizers import WORDS, make_optimizer
from theodolite.cli.sources.own_models import own_model
from theodolite.cli.sources.subject import Subject, load_subject
from theodolite.cli.sources.words import load_attribute, names_code
from theodolite.errors import NotRepeatableError
from theodolite.measures.stability.config import Stopping
from theodolite.measures.stability.pairs import read_pool
from theodolite.measures.stability.study import make_bench
from theodolite.measures.stability.training_pairs import Bench, Recipe

MODEL, DATA, MOMENTUM = "F-48^2", "digits", 0.9  # the embedded example
RATE = 0.1  # of SGD where none is named
HELD_OUT = 0.2  # share of data without a test part
EXAMPLES = 10_000  # on which the models of a pair are compared, at most


@dataclass(frozen=True)
class StudyWords:
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
    def stop(self) -> Stopping:
        return "epochs" if self.epochs is not None else "updates" if self.loss_target is None else "train_loss"

    def owners(self) -> tuple[object, ...]:
        """The user's own code among the words."""
        code = {"--model": self.model, "--data": self.data, "--test": self.test, "--loss": self.loss}
        code |= {"--optimizer": None if _is_known(self.optimizer) else self.optimizer}
        return tuple(load_attribute(word, option, self.seed) for option, word in code.items() if word and names_code(word))


@dataclass(frozen=True)
class Study:
    """Recipe and pools, what was loaded from where, what the user must know. `seconds` is how long loading took.

    `places` (n,) are the numbers that held-out test examples have in the data; None where there is a test set of its own.
    """

    words: StudyWords
    name: str
    recipe: Recipe
    bench: Bench
    places: Tensor | None
    facts: dict[str, str]
    notes: tuple[str, ...]
    seconds: float

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


def load_study(words: StudyWords) -> Study:
    """Pools, model, loss and optimizer that the words name."""
    began = time.perf_counter()
    words = _with_example(words)
    subject = _load(words, words.data)
    wrap, loss, train = _tensors(subject)
    pool = read_pool(train, "--data")
    held, notes, places = _test_pool(words), list(subject.notes), None
    if held is None:
        test, places = pool.part(order := _drawn(len(pool), words.seed)), order
        rest = torch.ones(len(pool), dtype=torch.bool)
        rest[order] = False
        kept = pool.part(rest.nonzero().flatten())
        notes.append(
            f"the data have no test part: {len(order)} of {len(pool)} examples, a seeded choice, were held out; --test names one"
        )
    else:
        kept, test = pool.both, read_pool(_tensors(held)[2], "--test" if words.test else "the test part").both
    factory = Replicas(partial(_build, words, wrap))
    optimizer, settings = _optimizer(words, subject)
    recipe = Recipe(
        factory,
        optimizer,
        loss,
        words.steps or 1,
        words.batch_size,
        init_seed=words.seed,
        order_seed=words.seed,
        loss_target=words.loss_target,
        settings=settings,
    )
    facts, fixed = {**subject.facts, "optimizer": _rule(recipe)}, _fixed(words, subject, factory)
    if fixed:
        notes.append(f"every seed starts from the same weights ({fixed}): trials differ in the order of the data alone")
        facts["weights"] = fixed
    took = time.perf_counter() - began
    return Study(
        words,
        subject.name,
        recipe,
        make_bench(kept, test, EXAMPLES, words.seed),
        places,
        facts,
        tuple(dict.fromkeys(notes)),
        took,
    )


def check_data_stays(study: Study) -> None:
    """Raise where the user's own data are others when they are read again."""
    words = _with_example(study.words)
    if not any(word is not None and names_code(word) for word in (words.model, words.data, words.test)):
        return
    again = load_study(study.words).bench.joined
    for name, mine, theirs in zip(("inputs", "targets"), study.bench.joined, again, strict=True):
        if mine.shape != theirs.shape or not torch.equal(mine, theirs):
            raise NotRepeatableError(
                f"--data: its {name} changed between two readings. Usual causes: random augmentation, a data set that keeps a "
                "state. Remedy: fixed transforms, or a function that gives the same tensors (inputs, targets) each time."
            )


def job_of(words: StudyWords, **more: Any) -> dict[str, Any]:
    """The words and what else a job needs as one dictionary of plain values."""
    return {**asdict(words), **more}


def words_of(job: Mapping[str, Any]) -> StudyWords:
    return StudyWords(**{name: job[name] for name in StudyWords.__dataclass_fields__})


def _with_example(words: StudyWords) -> StudyWords:
    """The embedded example where model and data are not named, its data for built-in networks."""
    own = words.model is not None and (names_code(words.model) or words.model.startswith("hf:"))
    if words.data is not None or own:
        return words
    if words.model is not None:
        return replace(words, data=DATA)
    plain = words.optimizer is None and words.lr is None and words.momentum is None
    return replace(words, model=MODEL, data=DATA, momentum=MOMENTUM if plain else words.momentum)


def _load(words: StudyWords, data: str | None, seed: int | None = None, part: Any = "train") -> Subject:
    return load_subject(
        words.model,
        data,
        words.loss,
        samples=words.samples,
        seed=words.seed if seed is None else seed,
        pretrained=False,
        part=part,
        everything=True,
    )


def _test_pool(words: StudyWords) -> Subject | None:
    """What --test names, else the test part of the data, else None."""
    word = words.test or words.data
    if word is None:
        return None
    try:
        return _load(words, word, part="test")
    except NoTestPartError:
        return None if words.test is None else _load(words, word)


def _tensors(subject: Subject) -> tuple[Callable[[nn.Module], nn.Module], Any, Any]:
    """What the model has to be wrapped in, the loss of outputs and targets, and the data as pairs."""
    if subject.loss is None:
        wrap, loss, data = as_one_tensor(subject.model, subject.data)
        return wrap, loss, data
    first_parts(subject.data)  # says what is wrong with data of an unknown form
    return (lambda model: model), subject.loss, subject.data


def _build(words: StudyWords, wrap: Callable[[nn.Module], nn.Module], seed: int) -> nn.Module:
    if words.model is not None and names_code(words.model):
        model = own_model(words.model, seed).model
    elif words.model is not None and words.model.startswith("hf:"):
        from theodolite.cli.sources.hugging_face import load_folder

        model = load_folder(words.model, seed).model
    else:
        model = _load(words, words.data, seed).model
    if words.weights is not None:
        load_checkpoint(model, words.weights)
    return wrap(model)


def _fixed(words: StudyWords, subject: Subject, factory: Replicas) -> str:
    """Where the weights come from if they are the same for every seed, else nothing."""
    if words.weights is not None:
        return words.weights
    told = subject.facts.get("weights", "")
    if words.model is None or not (names_code(words.model) or words.model.startswith("hf:")) or told.startswith("random"):
        return ""
    one, other = (factory(words.seed + trial).state_dict() for trial in (0, 1))
    same = one.keys() == other.keys() and all(
        one[key].shape == other[key].shape and torch.equal(one[key], other[key]) for key in one
    )
    return told if same else ""


def _rule(recipe: Recipe) -> str:
    """The optimizer with its settings, as the fleet reads them; two replicas show a factory that changes."""
    fleet = recipe.fleet(2)
    rule: Any = fleet.rule
    settings = {name: value for name, value in vars(rule).items() if value} if is_dataclass(rule) else {}
    told = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items()]
    return ", ".join([type(rule).__name__, f"learning rate {float(fleet.rates[0]):g}", *told])


def _drawn(size: int, seed: int) -> Tensor:
    """Numbers of the examples to hold out."""
    if size < 2:
        raise ValueError(f"--data holds {size} example and has no test part: name test data with --test.")
    count = max(1, round(HELD_OUT * size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def _is_known(word: str | None) -> bool:
    return word is None or word.partition(":")[0].strip().lower().replace("_", "-") in WORDS


def _optimizer(words: StudyWords, subject: Subject) -> tuple[Any, dict[str, Any]]:
    """What makes the optimizer, and the settings that override its own."""
    settings = {"momentum": words.momentum, "weight_decay": words.weight_decay}
    given = {name: value for name, value in settings.items() if value is not None}
    if words.optimizer is None and subject.optimizer is not None:
        brought = subject.optimizer
        return (lambda parameters: brought), given | ({} if words.lr is None else {"rate": words.lr})
    text = words.optimizer or "sgd"
    rate = words.lr if words.lr is not None else subject.lr if words.optimizer is None else None
    kind = text.partition(":")[0].strip().lower().replace("_", "-")
    if rate is None and _is_known(text) and not kind.startswith("adam") and "lr=" not in text.replace(" ", ""):
        rate = RATE
    return partial(make_optimizer, text, lr=rate), given
