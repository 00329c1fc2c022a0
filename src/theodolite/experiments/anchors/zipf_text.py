"""Text from a random bigram source whose words are distributed nearly as Zipf's law has it."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.data.generators import stream

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
