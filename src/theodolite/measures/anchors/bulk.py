"""The bulk partition function: what is left of the sum of exp(logits) without the most probable words of each context."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Shares of the vocabulary removed by default: 0, 10, 100, 1000, 10000 of about 50,000 words.
SHARES = (0.0, 2e-4, 2e-3, 2e-2, 0.2)


class LogPartition(NamedTuple):
    """Per row, the logarithms of the whole sum, `total` (N,), and of the bulk sums, `bulk` (N, number of tops)."""

    total: Tensor
    bulk: Tensor


def default_top(vocabulary: int) -> tuple[int, ...]:
    """How many of the most probable words to remove: the decades 0, 10, ..., 10000 near 50,000 words, else their shares.

    >>> default_top(50257), default_top(512)
    ((0, 10, 100, 1000, 10000), (0, 1, 10, 102))
    """
    if 45_000 <= vocabulary <= 55_000:
        return (0, 10, 100, 1000, 10000)
    return tuple(sorted({round(share * vocabulary) for share in SHARES}))


def check_top(top: int | Iterable[int] | None, vocabulary: int, excluded: int = 0) -> tuple[int, ...]:
    """The numbers of words to remove in rising order, or the default; a bulk must be left."""
    if top is None:
        return tuple(k for k in default_top(vocabulary) if k + excluded < vocabulary)
    given = [top] if isinstance(top, int) else list(top)
    if not given or any(isinstance(k, bool) or int(k) != k or k < 0 for k in given):
        raise ValueError(f"top must be one or more whole numbers of words to remove, 0 or more. Got {top!r}.")
    if max(given) + excluded >= vocabulary:
        more = f" and {excluded} excluded words" if excluded else ""
        raise ValueError(
            f"top={max(given)}{more} leaves no bulk of a vocabulary of {vocabulary}: remove fewer than {vocabulary - excluded} "
            "words."
        )
    return tuple(sorted({int(k) for k in given}))


def check_excluded(exclude: Iterable[int] | Tensor | None, vocabulary: int) -> Tensor | None:
    """The words that are never in the bulk as a sorted tensor of distinct numbers, None where there are none."""
    words = torch.as_tensor([] if exclude is None else exclude if isinstance(exclude, Tensor) else list(exclude)).reshape(-1)
    if not len(words):
        return None
    if words.is_floating_point() or int(words.min()) < 0 or int(words.max()) >= vocabulary:
        raise ValueError(f"exclude must hold token numbers in 0 .. {vocabulary - 1}. Got {words.tolist()[:8]}.")
    distinct: Tensor = words.long().unique()
    return distinct


def log_bulk_partition(logits: Tensor, top: Sequence[int] = (0,), exclude: Tensor | None = None) -> LogPartition:
    """Logarithms of Σ exp(logits) over all words, and over all but the `top` largest of each row, for each of `top`.

    Parameters
    ----------
    logits : (N, n), float32 or float64.
    top : rising numbers of words to remove.
    exclude : words (m,) that are in no bulk; the largest are then counted among the others: each bulk has n − m − k words.

    Only terms that stay are added, from the smallest part to the largest, so nothing cancels however little mass is left.

    >>> z = torch.tensor([[0.0, 3.0, 1.0]])
    >>> log_bulk_partition(z, [0, 1]).bulk.exp()         # e⁰ + e³ + e¹, e⁰ + e¹
    tensor([[23.8038,  3.7183]])
    """
    rest = logits if exclude is None else logits[:, _others(logits.shape[1], exclude).to(logits.device)]
    n, removed = rest.shape[1], [k for k in reversed(top) if k]
    ordered = _largest_last(rest, removed)
    ends = [*(n - k for k in removed), n]
    # One pass over the words: the sum below the first cut, then between the cuts.
    bulk = ordered[:, : ends[0]].logsumexp(-1)
    sums = {ends[0]: bulk}
    for start, end in itertools.pairwise(ends):
        sums[end] = torch.logaddexp(sums[start], ordered[:, start:end].logsumexp(-1))
    total = sums[n] if exclude is None else logits.logsumexp(-1)
    return LogPartition(total, torch.stack([sums[n - k] for k in top], dim=1))


def _others(n: int, exclude: Tensor) -> Tensor:
    """The words (n − m,) that are not excluded."""
    stays = torch.ones(n, dtype=torch.bool)
    stays[exclude.cpu()] = False
    return stays.nonzero()[:, 0]


def _largest_last(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows reordered so that their last k numbers are the k largest, for each k of the falling `counts`.

    On the CPU NumPy's selection, one cut inside the other, takes two thirds of the time of `torch.topk` (n = 49,152) to a fifth
    (n = 512) and shares the memory of the tensor.
    """
    if not counts:
        return rows
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    n, above = rows.shape[1], rows.shape[1]
    ordered = rows.numpy(force=True).copy()
    for k in counts:
        ordered[:, n - above :].partition(above - k, axis=-1)
        above = k
    return torch.from_numpy(ordered)
