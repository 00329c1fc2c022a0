"""Objectives of language models as a change of the data: next tokens, a prefix, corrupted spans, and their mixture UL2.

A decoder reads one row and predicts the next token at each place; what an objective does not ask for has the label −100. So the
mixture is one data set, and a model needs to know nothing of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.arguments import checked, count, each, number_in, share, shown, whole
from theodolite.arguments import seed as a_seed
from theodolite.problem.arguments import of_dimensions

#: Shares of next-token, prefix and span rows in UL2 as Karp (2024) trained with it.
UL2 = (0.6, 0.2, 0.2)
IGNORED = -100


class MixedTokens(NamedTuple):
    """Rows for a decoder: what it reads, what it predicts (−100 for what is not asked), and the objective of each row.

    `prefix` is how many leading tokens may see each other; 0 where each sees those before it alone.
    """

    inputs: Tensor
    labels: Tensor
    objective: Tensor
    prefix: Tensor


@checked(
    tokens=of_dimensions(2), sentinel=whole, shares=each(share), corrupted=number_in(above=0, below=1), span=count, seed=a_seed
)  # fmt: skip
def ul2_objectives(
    tokens: Tensor,
    sentinel: int,
    *,
    shares: tuple[float, float, float] = UL2,
    corrupted: float = 0.15,
    span: int = 3,
    seed: int = 0,
) -> MixedTokens:
    """Rows of n + 1 tokens as rows of n for a decoder, each under one of three objectives.

    0, causal: all next tokens. 1, prefix: the next tokens behind a prefix of random length. 2, spans: the row up to what fits,
    with a share `corrupted` of its tokens taken out in spans of `span` tokens in the mean, a sentinel for each; behind it the
    sentinels again, each with the tokens that it stands for, which alone are predicted.

    Args:
        tokens: (rows, n + 1) whole numbers.
        sentinel: the first of the tokens that stand for spans; they are numbered on from there, above all words.
        shares: of the rows of each objective; they sum to 1.

    >>> rows = torch.arange(1, 13).repeat(5, 1)
    >>> mixed = ul2_objectives(rows, 100, corrupted=0.3, seed=1)
    >>> mixed.objective.sort().values.tolist(), mixed.inputs.shape
    ([0, 0, 0, 1, 2], torch.Size([5, 11]))
    >>> row = int((mixed.objective == 2).nonzero()[0])
    >>> mixed.inputs[row].tolist()
    [1, 2, 3, 4, 5, 6, 7, 100, 100, 8, 9]
    >>> mixed.labels[row].tolist()[7:]
    [100, 8, 9, 10]
    """
    if tokens.is_floating_point() or tokens.shape[1] < 3 or not len(tokens):
        raise ValueError(f"tokens must be rows of at least three whole numbers. Got {shown(tokens)} of {tokens.dtype}.")
    if len(shares) != 3 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shares must be three numbers that sum to 1: causal, prefix, spans. Got {shown(shares)}.")
    if int(tokens.max()) >= sentinel:
        raise ValueError(f"sentinel must be above all tokens, of which the largest is {int(tokens.max())}. Got {sentinel}.")
    generator = torch.Generator().manual_seed(seed)
    rows, n = len(tokens), tokens.shape[1] - 1
    ends = torch.tensor([round(rows * shares[0]), round(rows * (shares[0] + shares[1]))])
    objective = torch.bucketize(torch.arange(rows), ends, right=True)[torch.randperm(rows, generator=generator)]
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    prefix = torch.zeros(rows, dtype=torch.int64)
    behind = objective == 1
    prefix[behind] = torch.randint(1, n, (int(behind.sum()),), generator=generator)
    labels[torch.arange(n) < prefix[:, None] - 1] = IGNORED  # the last token of the prefix predicts the first one behind it
    cut = objective == 2
    if bool(cut.any()):
        inputs[cut], labels[cut], prefix[cut] = _spans(tokens[cut], sentinel, corrupted, span, generator)
    return MixedTokens(inputs, labels, objective, prefix)


def _spans(tokens: Tensor, sentinel: int, corrupted: float, span: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Rows with spans taken out: inputs, labels and the length of the part that is read only."""
    rows, length = tokens.shape
    taken, noise, spans = _sizes(length, corrupted, span)
    tokens = tokens[:, :taken]
    # Stretches that stay and spans that go, in turn; each has at least one token.
    stay, go = (_parts(rows, size, spans, generator) for size in (taken - noise, noise))
    starts = torch.stack([stay, go], dim=2).reshape(rows, 2 * spans).cumsum(1)
    place = torch.arange(taken).expand(rows, taken).contiguous()
    stretch = torch.searchsorted(starts, place, right=True)  # even: stays, odd: goes
    gone, number = stretch % 2 == 1, stretch // 2
    kept_before, gone_before = (~gone).cumsum(1), gone.cumsum(1)
    read = taken - noise + spans
    found = torch.full((rows, read + noise + spans), sentinel)
    to = torch.where(gone, read + gone_before + number, kept_before - 1 + number)
    found.scatter_(1, to, tokens)
    marks = sentinel + torch.arange(spans).expand(rows, spans)
    found.scatter_(1, stay.cumsum(1) + torch.arange(spans), marks)
    found.scatter_(1, read + go.cumsum(1) - go + torch.arange(spans), marks)
    padded = torch.full((rows, length), sentinel + spans - 1)
    padded[:, : found.shape[1]] = found
    labels = padded[:, 1:].clone()
    labels[:, : read - 1] = IGNORED
    labels[:, found.shape[1] - 1 :] = IGNORED
    return padded[:, :-1], labels, read


def _sizes(length: int, corrupted: float, span: int) -> tuple[int, int, int]:
    """Tokens of the row that fit with their sentinels, how many of them go, and in how many spans."""
    for taken in range(length - 2, 1, -1):
        noise = min(taken - 1, max(1, round(corrupted * taken)))
        spans = min(noise, taken - noise, max(1, round(noise / span)))
        if taken + 2 * spans <= length:
            return taken, noise, spans
    raise ValueError(f"tokens must have longer rows for spans to be taken out. Got {length} tokens.")


def _parts(rows: int, size: int, parts: int, generator: torch.Generator) -> Tensor:
    """(rows, parts), positive whole numbers that sum to `size`, all such with equal chance."""
    cuts = torch.rand(rows, size - 1, generator=generator).argsort(1)[:, : parts - 1].sort(1).values + 1
    ends = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), cuts, torch.full((rows, 1), size)], dim=1)
    return ends.diff(dim=1)
