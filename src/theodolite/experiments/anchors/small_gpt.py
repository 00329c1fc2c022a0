"""Small GPTs trained here, on generated or real text, and kept at several steps of their pre-training."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite import data
from theodolite.experiments.anchors.model_folder import models_folder
from theodolite.experiments.anchors.zipf_text import zipf_text
from theodolite.models import gpt
from theodolite.models.transformers import GPT
from theodolite.training import cosine, train, warmup
from theodolite.training.interruption import load_state, save_state

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


@lru_cache(maxsize=4)
def corpus(text: str, words: int, tokens: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens to train on and tokens held out, one after the other (N,), (M,)."""
    if text == GENERATED:
        return zipf_text(words, tokens, seed=seed), zipf_text(words, held_out, seed=seed, draw=1)
    found = data.load(text)
    vocabulary = found.vocabulary(words)
    return found.words("train", vocabulary), found.words("test", vocabulary)[:held_out]


def corpus_of(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The text of a recipe."""
    return corpus(recipe.text, recipe.words, recipe.tokens, recipe.held_out, recipe.seed)


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows (B, T) of running text and the tokens that follow each of theirs (B, T)."""
    count = (len(tokens) - 1) // length
    return tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)


def next_word_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean −log p of the words that follow; logits (B, T, n), words (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


Weights = dict[str, Tensor]


@lru_cache(maxsize=4)
def pretrained(recipe: Recipe) -> dict[int, Weights]:
    """The weights at the start, at the milestones and at the end, trained once per process.

    Where $THEODOLITE_MODELS names a folder, the run is kept there: it goes on where it was stopped, and is not done twice.
    """
    inputs, following = windows(corpus_of(recipe)[0], recipe.context)
    return follow(recipe, recipe.network(), next_word_loss, (inputs, following), kept_in(recipe))


def kept_in(recipe: Recipe) -> Path | None:
    """The folder of this very recipe."""
    root = models_folder()
    name = hashlib.blake2b(json.dumps(asdict(recipe), sort_keys=True).encode(), digest_size=6).hexdigest()
    return None if root is None else root / "trained" / f"gpt-{recipe.text}-{name}"


def follow(
    recipe: Recipe,
    model: GPT,
    loss: Callable[[Tensor, Tensor], Tensor],
    samples: tuple[Tensor, Tensor],
    folder: Path | None = None,
) -> dict[int, Weights]:
    """Train the model and return its weights at `recipe.kept`; each part of the run goes on from the checkpoint of the last."""
    found: dict[int, Weights] = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
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


def network_at(recipe: Recipe, step: int | None = None) -> GPT:
    """The trained network, at one of the steps kept or at the end; in eval mode."""
    model = recipe.network()
    model.load_state_dict(pretrained(recipe)[recipe.steps if step is None else step])
    return model.eval()
