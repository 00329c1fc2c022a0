"""Prompts: the states in which a language model is about to say a label word, and how a prompt changes the transfer theorem."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.arguments import at_least, checked, each, finite, instance, mapping_of, number_in, shown, whole
from theodolite.measures.anchors.probing.bulk import check_one_top, log_bulk_partition
from theodolite.measures.anchors.probing.heads import find_head, states_of
from theodolite.measures.anchors.probing.inputs import check_ids, context_length, model_kind, tokenise
from theodolite.measures.anchors.transfer.certificate import check_coefficients, fit_anchor, normalized_margin
from theodolite.measures.anchors.transfer.log_linear import LogLinear
from theodolite.measures.anchors.transfer.readout import anchored_logits, label_ids, thresholded_score
from theodolite.problem.arguments import a_finite_tensor
from theodolite.problem.calling import unwrap
from theodolite.problem.state_guard import left_as_found
from theodolite.progress import counting
from theodolite.results import Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PromptComparison(Result):
    """What enters the transfer theorem, per prompt; every tuple follows `prompts`.

    `active`: share of thresholded units above 0. `undecided`: share of texts with f* = 0. `Gamma`: the least normalised margin
    of the others, and `Gamma_median` the median. `p_b`: least bulk mass. `eps_b`: largest error of the anchor, and
    `eps_b_99` its 99 % quantile (no guarantee). `mu`: density ratio, NaN where unknown.
    """

    prompts: tuple[str, ...]
    active: tuple[float, ...]
    undecided: tuple[float, ...]
    Gamma: tuple[float, ...]
    Gamma_median: tuple[float, ...]
    p_b: tuple[float, ...]
    eps_b: tuple[float, ...]
    eps_b_99: tuple[float, ...]
    mu: tuple[float, ...]
    texts: int

    def rows(self) -> list[Row]:
        columns = ("active", "undecided", "Gamma", "Gamma_median", "p_b", "eps_b", "eps_b_99", "mu")
        return [{"prompt": prompt, **{c: getattr(self, c)[i] for c in columns}} for i, prompt in enumerate(self.prompts)]

    def sentence(self) -> str:
        parts = [
            f"{row['prompt']!r}: {row['active']:.0%} of the units active, median Γ = {row['Gamma_median']:.3g}, "
            f"p_b = {row['p_b']:.3g}, ε_b = {row['eps_b']:.3g}"
            for row in self.rows()
        ]
        return f"Over {self.texts} texts, {'; '.join(parts)}."


def prompted_states(
    model: nn.Module,
    texts: Sequence[str],
    prompt: str,
    tokenizer: Any,
    *,
    head: str | nn.Module | None = None,
    mask_token: int | None = None,
    batch_size: int = 16,
    progress: bool | None = None,
) -> LogLinear:
    """The model at the end of each "text prompt", as a `LogLinear` of one context per text.

    A causal model is read at the last token of the prompt; a masked one at a mask token put after it. Of texts longer than the
    model's context the beginning is cut off, never the prompt. The model is left as found.
    """
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"texts must be a list of at least one text. Got {shown(texts)}.")
    at_least(1, batch_size=batch_size)
    model = unwrap(model)
    kind = model_kind(model, mask_token)
    end, longest = _end(kind, mask_token, tokenizer), context_length(model)
    full = [tokenise(f"{text} {prompt}" if prompt else text, tokenizer) for text in texts]
    rows = [torch.cat([tokens, end])[-(longest or 0) :] for tokens in full]  # all of them where the longest is not known
    lengths = torch.tensor([len(row) for row in rows])
    check_ids(torch.cat(rows), model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    states = torch.empty(0)
    with left_as_found(model, "eval"), torch.no_grad(), counting("prompts", progress=progress, total=len(rows)) as advance:
        output = find_head(model, (rows[0][None].to(device),), {}, head)
        for part in _alike(lengths, batch_size, exactly=kind != "causal"):
            # Padding comes after the last tokens, where a causal model cannot see it.
            block = nn.utils.rnn.pad_sequence([rows[i] for i in part.tolist()], batch_first=True).to(device)
            caught = states_of(model, output.module, (block,), {}, output.call)
            last = output.states(caught[torch.arange(len(part)), lengths[part] - 1]).double().cpu()
            states = states if len(states) else last.new_empty(len(rows), last.shape[1])
            states[part] = last
            advance(len(part))
    return LogLinear(states, output.weight, output.bias)


def _end(kind: str, mask_token: int | None, tokenizer: Any) -> Tensor:
    """What comes after a prompt: nothing, or the mask token."""
    if kind == "encoder-decoder":
        raise ValueError(
            "Prompts are for causal and masked language models. Got an encoder-decoder one; pass its states to LogLinear."
        )
    mask = mask_token if mask_token is not None else getattr(tokenizer, "mask_token_id", None)
    if kind == "masked" and mask is None:
        raise ValueError("A masked language model needs the number of its mask token: mask_token=, or a tokenizer that knows it.")
    return torch.tensor([mask] if kind == "masked" else [], dtype=torch.int64)


def _alike(lengths: Tensor, batch_size: int, *, exactly: bool) -> Iterator[Tensor]:
    """Numbers of rows in batches of like lengths, so that there is little padding, or none."""
    order = lengths.argsort(stable=True)
    groups = order.split(lengths[order].unique_consecutive(return_counts=True)[1].tolist()) if exactly else (order,)
    for group in groups:
        yield from group.split(batch_size)


@checked(
    models=mapping_of(instance(LogLinear)),
    labels=each(whole),
    a=each(finite),
    b=each(finite),
    anchor=a_finite_tensor,
    top=whole,
    mu=mapping_of(number_in(above=0, most=1)),
)
def compare_prompts(
    models: dict[str, LogLinear],
    *,
    labels: Sequence[int] | Tensor,
    a: Sequence[float] | Tensor,
    b: Sequence[float] | Tensor,
    anchor: Tensor | None = None,
    top: int = 0,
    mu: dict[str, float] | None = None,
) -> PromptComparison:
    """Share of active units, margin, bulk mass and anchor error for each prompt.

    models : prompt → the model at the end of the prompted texts, from `prompted_states`. anchor : one vector for all prompts,
    or one fitted to each by least squares. The bulk is all words but the labels and the `top` most probable of a context,
    labels counted.
    """
    if not models:
        raise ValueError("models must hold at least one prompt with its LogLinear model. Got none.")
    columns: dict[str, list[float]] = defaultdict(list)
    for prompt, model in models.items():
        ids = label_ids(labels, model.words)
        a_, b_ = check_coefficients(a, b, len(ids))
        tops = (check_one_top(top, model.words, len(ids)),)
        parts = [log_bulk_partition(model.logits(rows), tops, ids) for rows in model.chunks()]
        total, bulk = torch.cat([part.total for part in parts]), torch.cat([part.bulk[:, 0] for part in parts])
        vector = fit_anchor(model.states, bulk) if anchor is None else anchor.double().cpu()
        u = anchored_logits(model, vector, ids)
        score = thresholded_score(u, a_, b_).abs()
        margins = normalized_margin(score[score > 0], a_) if bool((score > 0).any()) else torch.zeros(1)
        errors = (model.states @ vector - bulk).abs()
        columns["active"].append(float((u > b_).double().mean()))
        columns["undecided"].append(float((score == 0).double().mean()))
        columns["Gamma"].append(float(margins.min()))
        columns["Gamma_median"].append(float(margins.median()))
        columns["p_b"].append(float((bulk - total).exp().min()))
        columns["eps_b"].append(float(errors.max()))
        columns["eps_b_99"].append(float(errors.quantile(0.99)))
        columns["mu"].append((mu or {}).get(prompt, math.nan))
    measured: dict[str, Any] = {name: tuple(column) for name, column in columns.items()}
    return PromptComparison(prompts=tuple(models), texts=next(iter(models.values())).contexts, **measured)
