"""The bulk partition function: what is left of the sum of exp(logits) without the most probable words of each context."""

from __future__ import annotations

import itertools
import numbers
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.arguments import checked, each, shown, whole
from theodolite.errors import NonFiniteError
from theodolite.problem.arguments import of_dimensions, tensors_fit

#: Shares of the vocabulary removed by default: 0, 10, 100, 1000, 10000 of about 50,000 words.
SHARES = (0.0, 2e-4, 2e-3, 2e-2, 0.2)
#: Numbers from which on it pays to start threads.
WORTH_THREADS = 2**18


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
    """The numbers of words to remove in rising order, or the default; a bulk must be left even where no word is in both lists."""
    if top is None:
        return tuple(k for k in default_top(vocabulary) if k + excluded < vocabulary)
    if getattr(top, "is_meta", False):
        raise ValueError(f"top must be whole numbers of words to remove. Got {shown(top)}.")
    plain = top.tolist() if hasattr(top, "tolist") else top  # numbers and arrays of NumPy and torch
    given = list(plain) if isinstance(plain, Iterable) else [plain]
    real = all(isinstance(k, numbers.Real) and not isinstance(k, bool) for k in given)
    if not given or not real or not all(float(k) >= 0 and float(k).is_integer() for k in given):
        raise ValueError(f"top must be one or more whole numbers of words to remove, 0 or more. Got {shown(top)}.")
    if max(given) + excluded >= vocabulary:
        more = f" and {excluded} excluded words" if excluded else ""
        raise ValueError(
            f"top={max(given)}{more} leaves no bulk of a vocabulary of {vocabulary}: remove fewer than {vocabulary - excluded} "
            "words."
        )
    return tuple(sorted({int(k) for k in given}))


def check_one_top(top: int, vocabulary: int, excluded: int = 0) -> int:
    """The one number of words to remove; a bulk must be left."""
    found = check_top(top, vocabulary, excluded)
    if top is None or len(found) != 1:
        raise ValueError(f"top must be one whole number of words to remove. Got {shown(top)}.")
    return found[0]


def check_excluded(exclude: int | Iterable[int] | Tensor | None, vocabulary: int) -> Tensor | None:
    """The words that are never in the bulk as a sorted tensor of distinct numbers, None where there are none.

    `exclude` is one word, some words, or a mask over the vocabulary.

    >>> check_excluded([7, 2], 10), check_excluded([False, True, True], 3)
    (tensor([2, 7]), tensor([1, 2]))
    """
    if exclude is None:
        return None
    if getattr(exclude, "is_meta", False) or not isinstance(exclude, Iterable | SupportsIndex):
        raise ValueError(f"exclude must be token numbers, or a mask of booleans. Got {shown(exclude)}.")
    if not (isinstance(exclude, SupportsIndex) or hasattr(exclude, "__array__")):
        exclude = list(exclude)
        if len({isinstance(word, bool) for word in exclude}) > 1 or any(isinstance(word, str) for word in exclude):
            raise ValueError(
                f"exclude must hold token numbers, or be a mask of booleans, not both and no text. Got {exclude[:8]}."
            )
    try:
        words = torch.as_tensor(exclude).reshape(-1)
    except (OverflowError, ValueError, TypeError, RuntimeError):
        raise ValueError(f"exclude must be token numbers in 0 .. {vocabulary - 1}. Got {shown(exclude)}.") from None
    if words.dtype == torch.bool and words.shape == (vocabulary,):
        words = words.nonzero()[:, 0]
    if not len(words):
        return None
    if words.dtype == torch.bool or words.is_floating_point() or int(words.min()) < 0 or int(words.max()) >= vocabulary:
        raise ValueError(
            f"exclude must hold token numbers in 0 .. {vocabulary - 1}, or be a mask of {vocabulary} booleans. Got "
            f"{words.tolist()[:8]}{' ...' * (len(words) > 8)} ({len(words)})."
        )
    distinct: Tensor = words.long().unique()
    return distinct


@checked(logits=of_dimensions(2, finite=False), top=each(whole))
@tensors_fit
def log_bulk_partition(logits: Tensor, top: Sequence[int] = (0,), exclude: Tensor | None = None) -> LogPartition:
    """Logarithms of Σ exp(logits) over all words, and over all but the `top` largest of each row, for each of `top`.

    Args:
        logits: (N, n), float32 or float64.
        top: rising numbers of words to remove.
        exclude: words (m,) that are in no bulk. The k largest are those of all words, excluded ones among them, so that a bulk is
            what neither rule removes: n − m − k words or, where excluded words are among the largest, up to m more.

    Only terms that stay are added, from the smallest part to the largest, so nothing cancels however little mass is left.

    >>> z = torch.tensor([[0.0, 3.0, 1.0]])
    >>> log_bulk_partition(z, [0, 1]).bulk.exp()         # e⁰ + e³ + e¹, e⁰ + e¹
    tensor([[23.8038,  3.7183]])
    """
    if logits.shape[-1] <= max(top):
        raise ValueError(f"top must be below the number of words in logits, {logits.shape[-1]}. Got {max(top)}.")
    found = bulk_sums(logits, top, exclude)
    if bool(torch.isnan(found.bulk).any()):
        raise NonFiniteError("logits hold NaN; leave out those rows, or look for NaN in the model's weights.")
    return found


def bulk_sums(logits: Tensor, top: Sequence[int], exclude: Tensor | None) -> LogPartition:
    """The same for numbers that were looked at before; NaN gives NaN."""
    rest = logits
    if exclude is not None:
        stays = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        stays[exclude.to(logits.device)] = False
        rest = logits[:, stays]
    n, removed = rest.shape[1], [k for k in reversed(top) if k]
    ordered = _largest_last(rest, removed)
    ends = [*(n - k for k in removed), n]
    # One pass over the words: the sum below the first cut, then between the cuts.
    sums = {ends[0]: ordered[:, : ends[0]].logsumexp(-1)}
    for start, end in itertools.pairwise(ends):
        sums[end] = torch.logaddexp(sums[start], ordered[:, start:end].logsumexp(-1))
    if exclude is None:
        return LogPartition(sums[n], torch.stack([sums[n - k] for k in top], dim=1))
    excluded = logits[:, exclude.to(logits.device).unique()].sort(-1, descending=True).values
    kept = [_with_spared(sums[n - k], ordered[:, n - k :], excluded) if k else sums[n] for k in top]
    return LogPartition(logits.logsumexp(-1), torch.stack(kept, dim=1))


def _with_spared(below: Tensor, largest: Tensor, excluded: Tensor) -> Tensor:
    """The log sums (N,) of the words below the k largest, with excluded words among them.

    Those `below` the k `largest` (N, k) of the other words, and of those that stay since excluded words (N, m), in falling order,
    take places among the k largest of all.

    The excluded word number i is among these if at most k − 1 − i of the others lie above it; ties go to the excluded.
    """
    count = min(excluded.shape[1], largest.shape[1])
    least = largest.topk(count, largest=False).values  # rising: the k-th, (k − 1)-th, ... largest of the others
    spared = (excluded[:, :count] >= least).sum(-1, keepdim=True)
    sums = torch.cat([torch.full_like(below[:, None], -torch.inf), least.logcumsumexp(-1)], dim=-1)
    return torch.logaddexp(below, sums.gather(-1, spared)[:, 0])


def _largest_last(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows reordered so that their last k numbers are the k largest, for each k of the falling `counts`.

    On the CPU NumPy's selection, one cut inside the other, takes two thirds of the time of `torch.topk` (n = 49,152) to a fifth
    (n = 512) and shares the memory of the tensor; it lets go of the interpreter, so torch's threads may each take some rows.
    """
    if not counts:
        return rows
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    n, ordered = rows.shape[1], rows.numpy(force=True).copy()

    def order(some: NDArray[np.floating[Any]]) -> None:
        above = n
        for k in counts:
            some[:, n - above :].partition(above - k, axis=-1)
            above = k

    workers = min(torch.get_num_threads(), len(ordered)) if ordered.size >= WORTH_THREADS else 1
    first, *others = np.array_split(ordered, workers)
    helpers = [threading.Thread(target=order, args=(part,)) for part in others]
    for helper in helpers:
        helper.start()
    order(first)
    for helper in helpers:
        helper.join()
    return torch.from_numpy(ordered)
