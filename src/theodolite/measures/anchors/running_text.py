"""Token ids cut into windows, and shown as causal, masked and encoder-decoder models want to see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.anchors.source import Reading, Source, following


@dataclass(frozen=True)
class Windows:
    """How token ids are cut and shown: see `anchor_probe`."""

    kind: str
    context: int
    stride: int
    drop_first: int
    batch_size: int
    mask_token: int | None = None
    every: int = 7
    start_token: int | None = None


def from_ids(ids: Tensor, windows: Windows) -> Source:
    """Windows of running text (N,), or rows (B, T) as they are."""
    if ids.ndim == 2:
        blocks = [(0, block) for block in ids.split(windows.batch_size)]
        nexts = [following(block) for _, block in blocks]
    else:
        blocks, nexts = _cut(ids, windows)
    show = _SHOWN[windows.kind]
    if windows.kind == "masked" and windows.mask_token is None:
        raise ValueError("A masked language model needs the number of its mask token: mask_token=, or a tokenizer that knows it.")

    def readings() -> Iterator[Reading]:
        for (old, block), after in zip(blocks, nexts, strict=True):
            yield from show(block, after, max(old, windows.drop_first), windows)

    counts = []  # of the positions of each window
    for old, block in blocks:
        width = block.shape[1] // 2 if windows.kind == "encoder-decoder" else block.shape[1]
        counts += [max(0, width - max(old, windows.drop_first))] * len(block)
    if not sum(counts):
        raise ValueError(f"{ids.numel()} tokens leave no position after drop_first={windows.drop_first}: give more text.")
    return Source(readings, sum(counts), ends=torch.tensor(counts).cumsum(0) if windows.kind == "masked" else None)


def _cut(ids: Tensor, windows: Windows) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
    """Batches of windows with the number of positions at their start that were seen before, and the tokens that follow each."""
    length, stride = windows.context, windows.stride
    later = following(ids[None])[0]
    blocks: list[tuple[int, Tensor]] = []
    nexts: list[Tensor] = []
    whole = (len(ids) - length) // stride + 1 if len(ids) >= length else 0
    if whole:
        rows, after = ids.unfold(0, length, stride), later.unfold(0, length, stride)  # views
        firsts = 1 if stride < length else 0  # nothing before the first window was seen
        parts = [slice(0, firsts)] * bool(firsts)
        parts += [slice(i, min(i + windows.batch_size, whole)) for i in range(firsts, whole, windows.batch_size)]
        for part in parts:
            blocks.append((0 if part.start == 0 else length - stride, rows[part]))
            nexts.append(after[part])
    rest, old = whole * stride, length - stride if whole else 0
    if len(ids) - rest > old:
        blocks.append((old, ids[None, rest:]))
        nexts.append(later[None, rest:])
    return blocks, nexts


def _causal(block: Tensor, after: Tensor, old: int, windows: Windows) -> Iterator[Reading]:
    keep = torch.ones(block.shape, dtype=torch.bool)
    keep[:, :old] = False
    yield Reading((block,), {}, keep if old else None, after)


def _masked(block: Tensor, after: Tensor, old: int, windows: Windows) -> Iterator[Reading]:
    """Every position is hidden once, each `every`-th in the same row; all rows of a window come before those of the next."""
    assert windows.mask_token is not None
    places = torch.arange(block.shape[1])
    hidden = places % windows.every == torch.arange(windows.every)[:, None]  # (every, T)
    hidden = hidden[(hidden & (places >= old)).any(1)]
    for rows in torch.arange(len(block) * len(hidden)).split(windows.batch_size):
        window, hide = block[rows // len(hidden)], hidden[rows % len(hidden)]
        yield Reading((window.masked_fill(hide, windows.mask_token),), {}, hide & (places >= old), window)


def _encoder_decoder(block: Tensor, after: Tensor, old: int, windows: Windows) -> Iterator[Reading]:
    """The first part of a window is read, its second half is what the decoder is to say."""
    half = block.shape[1] // 2
    if not half:
        return
    question, answer = block[:, :-half], block[:, -half:]
    start = torch.full_like(answer[:, :1], int(windows.start_token or 0))
    keep = torch.ones(answer.shape, dtype=torch.bool)
    keep[:, :old] = False
    shown = {"input_ids": question, "decoder_input_ids": torch.cat([start, answer[:, :-1]], dim=1)}
    yield Reading((), shown, keep if old else None, answer)


_SHOWN = {"causal": _causal, "masked": _masked, "encoder-decoder": _encoder_decoder}
