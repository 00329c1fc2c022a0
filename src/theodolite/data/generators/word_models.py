"""Synthetic log-linear word models, p(word | context) ∝ exp⟨h, v_word⟩, whose log bulk partition function is known.

Rows are contexts and words: states (contexts, dim), atoms (words, dim). The last coordinate of every state is 1, so that
constants are linear in the state. In double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import at_least, between, choice
from theodolite.data.generators.seeding import stream

RadiusLaw = Literal["uniform", "two"]


@dataclass(frozen=True, eq=False)
class WordModel:
    """States (contexts, dim) and atoms (words, dim); the logits are `states @ atoms.T`.

    `labels` are the ids of the words of interest, empty where all words are alike. `anchor` (dim,) is the exact anchor
    vector for the bulk of all other words, None where there is none. `group` (contexts,) tells contexts of different norm
    apart: 0 or 1 where the radius takes two values, else 0.
    """

    states: Tensor
    atoms: Tensor
    labels: Tensor
    anchor: Tensor | None
    group: Tensor


def exact_anchor_world(
    contexts: int = 2000,
    dim: int = 16,
    label_words: int = 4,
    bulk_words: int = 50,
    *,
    level: float = -1.0,
    scale: float = 1.0,
    seed: int = 0,
) -> WordModel:
    """A world with an exact anchor: all bulk words share one atom w, so log Z_bulk = ⟨h, w⟩ + log(bulk_words).

    The first `label_words` words are labels. Their anchored logits ⟨h, v_j − v0⟩ are Gaussian over contexts with mean
    `level` and standard deviation `scale` (on average over atoms).

    >>> world = exact_anchor_world(5, bulk_words=7)
    >>> bulk = (world.states @ world.atoms[4:].T).logsumexp(1)
    >>> bool((world.states @ world.anchor - bulk).abs().max() < 1e-12)
    True
    """
    at_least(1, contexts=contexts, label_words=label_words, bulk_words=bulk_words)
    at_least(2, dim=dim)
    between(-math.inf, math.inf, level=level)
    between(0, math.inf, scale=scale)
    generator = stream("exact_anchor_world", seed)
    states = torch.ones(contexts, dim, dtype=torch.float64)
    states[:, :-1] = torch.randn(contexts, dim - 1, generator=generator, dtype=torch.float64)
    bulk = torch.randn(dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    anchor = bulk.clone()
    anchor[-1] += math.log(bulk_words)
    labels = anchor.repeat(label_words, 1)
    labels[:, :-1] += scale / math.sqrt(dim - 1) * torch.randn(label_words, dim - 1, generator=generator, dtype=torch.float64)
    labels[:, -1] += level
    atoms = torch.cat([labels, bulk.repeat(bulk_words, 1)])
    return WordModel(states, atoms, torch.arange(label_words), anchor, torch.zeros(contexts, dtype=torch.int64))


def gaussian_dictionary_world(
    words: int = 4000,
    dim: int = 32,
    contexts: int = 6000,
    radius: float | tuple[float, float] = 3.0,
    *,
    law: RadiusLaw = "uniform",
    spread: float = 1.0,
    offset: float = 0.3,
    seed: int = 0,
) -> WordModel:
    """Gaussian atoms around a common mean, and states of a chosen radius on a sphere, with a constant coordinate.

    Atoms are N(m, spread² I) with m = `offset` · N(0, I); then log Z ≈ log(words) + ⟨h, m⟩ + spread² ‖h‖² / 2 as long as
    ‖h‖ · spread is well below √(2 log words). An anchor vector therefore exists only for states of (nearly) constant
    norm. A pair as `radius` breaks that: drawn uniformly between the two (`law="uniform"`), or one of the two for the
    first and the other for the second half of the contexts (`law="two"`), where each half has an anchor of its own.
    """
    at_least(1, words=words, contexts=contexts)
    at_least(2, dim=dim)
    choice("law", law, get_args(RadiusLaw))
    low, high = (radius, radius) if isinstance(radius, int | float) else radius
    between(0, math.inf, radius=low, spread=spread, offset=offset)
    between(low, math.inf, radius=high)
    generator = stream("gaussian_dictionary_world", seed)
    mean = offset * torch.randn(dim, generator=generator, dtype=torch.float64)
    atoms = mean + spread * torch.randn(words, dim, generator=generator, dtype=torch.float64)
    directions = torch.randn(contexts, dim - 1, generator=generator, dtype=torch.float64)
    where = torch.rand(contexts, generator=generator, dtype=torch.float64)
    group = torch.zeros(contexts, dtype=torch.int64)
    if law == "two":
        where = (torch.arange(contexts) >= (contexts + 1) // 2).double()
        group = where.long() if high > low else group
    lengths = low + (high - low) * where
    states = torch.ones(contexts, dim, dtype=torch.float64)
    states[:, :-1] = lengths[:, None] * directions / directions.norm(dim=1, keepdim=True)
    return WordModel(states, atoms, torch.empty(0, dtype=torch.int64), None, group)
