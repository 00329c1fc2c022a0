"""Language models that are grown here: their text, objective, optimizer, and the small model after its training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite import data
from theodolite.data import MissingDataError
from theodolite.data.generators import stream
from theodolite.data.loading import VARIABLE, roots
from theodolite.data.text import encode, most_frequent, words
from theodolite.experiments.lab.datasets import load_or
from theodolite.experiments.study import Computation, Study
from theodolite.models import bert, gpt, stories260k_from
from theodolite.results import Row
from theodolite.training import cosine, train, warmup

#: What is not predicted.
IGNORED = -100
#: The generated text; "stories" is the sample of TinyStories in the tokens of stories260k.
GENERATED, STORIES = "generated", "stories"
#: Symbols of the generated text: letters, then brackets, opening ones first.
LETTERS, BRACKETS = 24, 4
SYMBOLS = LETTERS + 2 * BRACKETS
#: Nesting at most; how often brackets open or close and earlier text is copied; how often the last letter decides on the next.
DEPTH, OPENS, CLOSES, COPIES, NEAR = 6, 0.06, 0.08, 0.02, 0.7
#: Share of tokens that a masked model predicts; of these, the shares that are masked, and masked or replaced.
MASKED, HIDDEN, CHANGED = 0.15, 0.8, 0.9


# Text


@lru_cache(maxsize=4)
def generated_text(tokens: int, *, seed: int = 0, draw: int = 0) -> Tensor:
    """Tokens (N,) of an order-2 Markov chain of 24 letters with four kinds of nested brackets and copied stretches.

    One of the last two letters decides on the next, by two likely successors of its own. Brackets close what was opened last, at
    most six deep; stretches of 6 to 12 tokens come again within 48. `seed` is the language (who follows whom), `draw` the text.

    >>> text = generated_text(2000)
    >>> text.shape, int(text.min()) >= 0, int(text.max()) < SYMBOLS
    (torch.Size([2000]), True, True)
    """
    language = stream("growing text", seed)
    followers = torch.stack([torch.randperm(LETTERS, generator=language) for _ in range(4)]).view(2, 2, LETTERS).tolist()
    chance = torch.rand(tokens, 3, generator=stream(f"growing text:{draw}", seed)).tolist()
    found: list[int] = []
    opened: list[int] = []
    one = two = 0  # the last two letters
    while len(found) < tokens:
        kind, which, length = chance[len(found)]
        if kind < OPENS and len(opened) < DEPTH:
            opened.append(int(which * BRACKETS))
            found.append(LETTERS + opened[-1])
        elif kind < OPENS + CLOSES and opened:
            found.append(LETTERS + BRACKETS + opened.pop())
        elif kind > 1 - COPIES and len(found) > 60:
            first = len(found) - 48 + int(which * 36)
            found += [symbol for symbol in found[first : first + 6 + int(length * 7)] if symbol < LETTERS]
        else:
            near = which < NEAR
            one, two = two, followers[near][length < NEAR][two if near else one]
            found.append(two)
    return torch.tensor(found[:tokens])


class Corpus(NamedTuple):
    """Tokens to train on and tokens held out, (N,) and (M,), and where they are from."""

    train: Tensor
    held_out: Tensor
    origin: str


def corpus_of(setup: Setup) -> Corpus:
    """The text of a setup; tiny Shakespeare and WikiText-2 have generated text as their stand-in."""
    if setup.text == GENERATED:
        return _generated(setup)
    if setup.text == STORIES:
        return _stories(setup.tokens)
    if setup.text in data.names():
        return load_or(lambda: _known(setup), lambda: _generated(setup), "either")
    return _own(setup)


def _generated(setup: Setup) -> Corpus:
    return Corpus(generated_text(setup.tokens), generated_text(setup.tokens // 8, draw=1), "generated")


def _known(setup: Setup) -> Corpus:
    """A data set in characters where its alphabet is small, in words where it is not."""
    found = data.load(setup.text)
    vocabulary = found.vocabulary(setup.words)
    if len(alphabet := found.alphabet()) <= setup.words:
        return Corpus(found.characters("train"), encode("".join((found.valid, found.test)), alphabet), setup.text)
    return Corpus(found.words("train", vocabulary), found.words("valid", vocabulary), setup.text)


@lru_cache(maxsize=2)
def _stories(characters: int) -> Corpus:
    """The first characters of both parts."""
    found, tokenizer = data.load("tinystories_sample"), data.stories260k_tokenizer()
    mine, other = (tokenizer.encode(text[:characters]) for text in (found.train, found.valid))
    return Corpus(mine, other, "tinystories_sample")


def _own(setup: Setup) -> Corpus:
    """A text file that the user brings, in its most frequent words; the last hundredth is held out."""
    for root in roots():
        if (path := root / f"{setup.text}.txt").is_file():
            text = words(path.read_text(encoding="utf-8"))
            tokens = encode(text, ("<unk>", *most_frequent(text, setup.words - 1)))
            return Corpus(tokens[: -len(tokens) // 100], tokens[-len(tokens) // 100 :], setup.text)
    raise MissingDataError(
        f"{setup.text}.txt is not there. The source's text is not distributed: put one UTF-8 file of that name into the folder "
        f"that ${VARIABLE} names."
    )


# A setup: model, objective, recipe


class Sample(NamedTuple):
    """Rows that a model reads and what it predicts, (B, T) each, −100 where nothing is asked; for training and held out."""

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    origin: str


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean −log p of the tokens that are asked for; logits (B, T, n), labels (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class Setup:
    """A model of `layers` layers that is trained for `pretraining` steps, grown to `grown`, and trained for `steps` more.

    `objective` is "next" (all next tokens), "masked" (BERT) or "ul2". The learning rate warms up to `rate` and is constant, or
    falls by a cosine to `final_rate` at the very end; from growing on it is `grown_rate` where that is given. `looks` says when
    losses are looked at, in pairs (up to this step, every so many). The early window ends at step `window`, trials last `lag`
    steps, `early` is a twentieth of the steps or so, and curves are smoothed over `smooth` looks.
    """

    name: str
    objective: str = "next"
    text: str = GENERATED
    words: int = SYMBOLS
    context: int = 32
    dim: int = 32
    hidden: int = 128
    heads: int = 4
    layers: int = 4
    grown: int = 6
    norm_first: bool = True
    pretraining: int = 120
    steps: int = 24
    batch: int = 16
    rate: float = 1e-3
    grown_rate: float | None = None
    final_rate: float | None = None
    warmup: int = 1
    decay: float = 0.01
    adafactor: bool = False
    tokens: int = 40_000
    held_out: int = 64
    looks: tuple[tuple[int, int], ...] = ((2, 2), (5, 3), (10, 5), (10**9, 7))
    window: int = 10
    lag: int = 10
    early: int = 2
    smooth: int = 3
    operators: tuple[str, ...] = ()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Setup:
        """From the dictionary of a job."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return cls(**{**values, "looks": tuple((until, every) for until, every in values["looks"])})

    def but(self, **changes: Any) -> Setup:
        """The same with other values."""
        return replace(self, **changes)

    @property
    def looked_at(self) -> list[int]:
        """The steps after growing at which losses are looked at."""
        found, begin = {0, self.steps}, 0
        for until, every in self.looks:
            found.update(range(begin, min(until, self.steps) + 1, every))
            begin = until
        return sorted(found)

    @property
    def vocabulary(self) -> int:
        """Words, and what the objective needs beside them: a mask, or sentinels."""
        return self.words + {"next": 0, "masked": 1, "ul2": self.context // 15 + 2}[self.objective]

    def model(self, seed: int = 0) -> nn.Module:
        """The small model before training; stories260k has its weights."""
        if self.text == STORIES:
            return stories260k_from(data.weights("stories260k"), data.stories260k_config())
        sizes = (self.vocabulary, self.context, self.dim, self.layers, self.heads)
        if self.objective == "masked":
            return bert(*sizes, hidden=self.hidden, norm_first=self.norm_first, seed=seed)
        return gpt(*sizes, hidden=self.hidden, seed=seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Before its first step."""
        if self.adafactor:
            return torch.optim.Adafactor(parameters, lr=self.rate)
        return torch.optim.AdamW(parameters, lr=self.rate, weight_decay=self.decay)

    @property
    def schedule(self) -> Callable[[int], float]:
        """The learning rate as a function of the step, pre-training included."""
        whole = self.pretraining + self.steps
        level = self.rate if self.final_rate is None else cosine(self.rate, whole, final=self.final_rate)
        before = warmup(level, self.warmup)
        later = self.grown_rate
        return before if later is None else lambda step: before(step) if step < self.pretraining else later

    def sample(self) -> Sample:
        """The rows of its text under its objective; held-out rows are the same for all runs."""
        found = corpus_of(self)
        x, y = self._rows(found.train, seed=0)
        x_new, y_new = self._rows(found.held_out, seed=1)
        return Sample(x, y, x_new[: self.held_out], y_new[: self.held_out], found.origin)

    def _rows(self, tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        count = (len(tokens) - 1) // self.context
        if count < 1:
            raise ValueError(f"The text of {self.name} has {len(tokens)} tokens, too few for a row of {self.context}.")
        if self.objective == "masked":
            return masked(tokens[: count * self.context].view(count, self.context), self.words, seed=seed)
        place = torch.arange(count)[:, None] * self.context + torch.arange(self.context + 1)
        rows = tokens[place]
        if self.objective == "ul2":
            mixed = data.ul2_objectives(rows, self.words, seed=seed)
            return mixed.inputs, mixed.labels
        return rows[:, :-1], rows[:, 1:]


def masked(tokens: Tensor, words: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """What a masked model reads and predicts: 15 % of the tokens, of which 80 % become token `words`, 10 % another, 10 % stay.

    >>> x, y = masked(torch.arange(40).view(2, 20), 40, seed=0)
    >>> bool((x[y == IGNORED] == torch.arange(40).view(2, 20)[y == IGNORED]).all()), bool((y[x == 40] >= 0).all())
    (True, True)
    """
    generator = stream("masked tokens", seed)
    chosen = torch.rand(tokens.shape, generator=generator) < MASKED
    chosen[~chosen.any(dim=1), 0] = True
    kind = torch.rand(tokens.shape, generator=generator)
    other = torch.randint(words, tokens.shape, generator=generator)
    changed = torch.where(kind < HIDDEN, words, torch.where(kind < CHANGED, other, tokens))
    return torch.where(chosen, changed, tokens), torch.where(chosen, tokens, IGNORED)


# The small model after its training


class Pretraining(Study):
    """Weights and optimizer state of a small model after its training. Other studies need its jobs; it has none itself."""

    def run(self, job: Mapping[str, Any]) -> Row:
        setup = Setup.of(job["setup"])
        sample, model = setup.sample(), setup.model()
        optimizer = setup.optimizer(model.parameters())
        if setup.pretraining:
            train(
                model,
                token_loss,
                (sample.x, sample.y),
                optimizer,
                steps=setup.pretraining,
                batch_size=setup.batch,
                schedule=setup.schedule,
                seed=0,
                progress=False,
            )
        weights = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()["state"]
        return weights | {
            f"state.{i}.{name}": torch.as_tensor(v).clone() for i, held in state.items() for name, v in held.items()
        }


def pretraining_of(setup: Setup) -> Computation:
    """The pre-training of a setup: that of all setups which differ in what comes after it alone."""
    first = setup.but(name="", grown=setup.layers + 1, looks=(), window=0, lag=0, early=0, smooth=1, operators=(), held_out=1)
    last = {} if setup.final_rate is not None else {"steps": 0, "grown_rate": None}
    return Pretraining().job(setup=asdict(first.but(**last)), seed=0)


def pretrained(setup: Setup, trained: Row) -> tuple[nn.Module, Optimizer]:
    """The small model and its optimizer after their training."""
    model = setup.model()
    model.load_state_dict({name.removeprefix("model."): v for name, v in trained.items() if name.startswith("model.")})
    optimizer = setup.optimizer(model.parameters())
    state: dict[int, dict[str, Any]] = {}
    for name, value in trained.items():
        if name.startswith("state."):
            _, i, key = name.split(".")
            state.setdefault(int(i), {})[key] = torch.as_tensor(value).clone()  # single numbers are stored as such
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return model, optimizer
