"""Small GPTs trained here, on generated or real text, and kept at several steps of their pre-training."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite import data
from theodolite.data.generators import stream
from theodolite.errors import TheodoliteError
from theodolite.experiments import Study
from theodolite.experiments.study import Computation
from theodolite.models import gpt
from theodolite.models.transformers import GPT
from theodolite.results import Row
from theodolite.runners.code_version import code_version
from theodolite.training import cosine, train, warmup
from theodolite.training.interruption import load_state, save_state

VARIABLE = "THEODOLITE_MODELS"


class MissingModelError(TheodoliteError, FileNotFoundError):
    """A language model, or what is needed to read it, is not there."""


def models_folder() -> Path | None:
    """The folder that $THEODOLITE_MODELS names, if it does."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else None


def checkpoint_folder(name: str, wanted: tuple[str, ...] = ()) -> Path:
    """The folder of a Hugging Face checkpoint inside that folder; `wanted` are all that an experiment asks for."""
    root = models_folder()
    path = None if root is None else root / name
    if path is not None and (path / "config.json").is_file():
        return path
    looked = f"${VARIABLE} is not set" if path is None else f"{path} has no config.json"
    folders = ", ".join(wanted or (name,))
    raise MissingModelError(
        f"The checkpoint {name!r} is not there: {looked}. Put Hugging Face checkpoints (config.json, weights, tokenizer) into "
        f"the folders {folders} of one directory and name that with ${VARIABLE}. Nothing is downloaded."
    )


#: Words that may follow a given one by habit, and how often habit decides rather than frequency alone.
SUCCESSORS, HABIT = 20, 0.7
#: Texts written side by side; the result is one after the other.
CHAINS = 64


def zipf_text(words: int, tokens: int, *, seed: int = 0, draw: int = 0) -> Tensor:
    """Tokens (N,) of a Markov chain: word j has frequency near 1/(j + 2), and each word its own 20 likely successors.

    `seed` is the language (who follows whom), `draw` the text written in it.

    >>> text = zipf_text(100, 5000)
    >>> bool((text == 0).sum() > (text == 50).sum())
    True
    """
    frequency = 1 / torch.arange(2, words + 2, dtype=torch.float64)
    language = stream("zipf_text", seed)
    followers = torch.multinomial(frequency.expand(words, -1), min(SUCCESSORS, words), generator=language)  # no word twice
    hand = stream(f"zipf_text:{draw}", seed)
    length = -(-tokens // CHAINS)
    fresh = torch.multinomial(frequency, CHAINS * length, replacement=True, generator=hand).view(length, CHAINS)
    habit = torch.rand(length, CHAINS, generator=hand) < HABIT
    rank = 1 / torch.arange(1, followers.shape[1] + 1, dtype=torch.float64)
    place = torch.multinomial(rank, CHAINS * length, replacement=True, generator=hand).view(length, CHAINS)
    written = [fresh[0]]
    for t in range(1, length):
        written.append(torch.where(habit[t], followers[written[-1], place[t]], fresh[t]))
    return torch.stack(written, dim=1).reshape(-1)[:tokens]


#: Name of the generated text; any other is a data set of running text.
GENERATED = "zipf"


@dataclass(frozen=True)
class Recipe:
    """A GPT and how it is trained: `words` in its vocabulary, AdamW with warm-up and a cosine, kept at `milestones`.

    `tokens` is the length of the generated text, `held_out` that of the text the model never sees.
    """

    text: str = GENERATED
    words: int = 1000
    context: int = 64
    dim: int = 64
    depth: int = 2
    heads: int = 4
    steps: int = 1000
    batch: int = 16
    rate: float = 1e-3
    final_rate: float = 1e-3
    warmup: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.01
    tokens: int = 2**18
    held_out: int = 12_800
    milestones: tuple[int, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Recipe:
        """From the dictionary of a job."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return cls(**values)

    @property
    def kept(self) -> tuple[int, ...]:
        """Steps after which the weights are kept: the start, the milestones, the end."""
        return tuple(sorted({0, *self.milestones, self.steps}))

    def network(self, seed: int | None = None) -> GPT:
        """The network before training."""
        return gpt(self.words, self.context, self.dim, self.depth, self.heads, seed=self.seed if seed is None else seed)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.rate, betas=self.betas, weight_decay=self.decay)

    def schedule(self, step: int) -> float:
        """The learning rate."""
        return warmup(cosine(self.rate, self.steps, final=self.final_rate), self.warmup)(step)


def corpus_of(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The text of a recipe: tokens to train on and tokens held out, one after the other (N,), (M,)."""
    if recipe.text == GENERATED:
        words, seed = recipe.words, recipe.seed
        return zipf_text(words, recipe.tokens, seed=seed), zipf_text(words, recipe.held_out, seed=seed, draw=1)
    found = data.load(recipe.text)
    vocabulary = found.vocabulary(recipe.words)
    return found.words("train", vocabulary), found.words("test", vocabulary)[: recipe.held_out]


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows (B, T) of running text and the tokens that follow each of theirs (B, T)."""
    count = (len(tokens) - 1) // length
    return tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)


def next_word_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean −log p of the words that follow; logits (B, T, n), words (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class Pretraining(Study):
    """Weights of a small GPT along its training. Other studies need its jobs; it has none itself."""

    def run(self, job: Mapping[str, Any]) -> list[Row]:
        return pretrained(Recipe.of(job["recipe"]))


def pretrained(recipe: Recipe) -> list[Row]:
    """The weights at the start, at the milestones and at the end, one row each.

    Where $THEODOLITE_MODELS names a folder, the run is kept there as well: it goes on where it was stopped.
    """
    samples = windows(corpus_of(recipe)[0], recipe.context)
    found = follow(recipe, next_word_loss, samples, kept_in(recipe))
    return [{"step": step, **weights} for step, weights in found.items()]


class OnGPT(Study):
    """Parent of studies that look at the network of a recipe, where a job has one; `run` gets the rows of its pre-training."""

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        recipe = job.get("recipe") or job.get("teacher") or job.get("subject", {}).get("recipe")
        return [] if recipe is None else [Pretraining().job(recipe=asdict(Recipe.of(recipe)), seed=recipe["seed"])]


def kept_in(recipe: Recipe) -> Path | None:
    """The folder of this very recipe, trained by this very code."""
    root = models_folder()
    made = json.dumps([asdict(recipe), code_version(Pretraining)], sort_keys=True)
    name = hashlib.blake2b(made.encode(), digest_size=6).hexdigest()
    return None if root is None else root / "trained" / f"gpt-{recipe.text}-{name}"


def follow(
    recipe: Recipe, loss: Callable[[Tensor, Tensor], Tensor], samples: tuple[Tensor, Tensor], folder: Path | None = None
) -> dict[int, dict[str, Tensor]]:
    """Train the network and return its weights at `recipe.kept`; each part of the run goes on from the checkpoint of the last."""
    model, found = recipe.network(), {}
    with tempfile.TemporaryDirectory() as passing:
        place = folder or Path(passing)
        for step in recipe.kept:
            known = load_state(place / f"step-{step}")
            if known is None:
                if step:
                    train(
                        model,
                        loss,
                        samples,
                        recipe.optimizer,
                        steps=step,
                        batch_size=recipe.batch,
                        schedule=recipe.schedule,
                        checkpoint=place,
                        resume=True,
                        seed=recipe.seed,
                    )
                known = {name: value.clone() for name, value in model.state_dict().items()}
                save_state(place / f"step-{step}", known)
            found[step] = known
    return found


def network_at(recipe: Recipe, trained: list[Row], step: int | None = None) -> GPT:
    """The network with the rows of its pre-training, at one of the steps kept or at the end; in eval mode."""
    row = next(row for row in trained if row["step"] == (recipe.steps if step is None else step))
    model = recipe.network()
    model.load_state_dict({name: value for name, value in row.items() if name != "step"})
    return model.eval()
