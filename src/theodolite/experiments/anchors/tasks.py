"""Downstream tasks on a small language model: its states at some text, and tasks that read a few frequent words."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from theodolite.measures.anchors import find_head
from theodolite.measures.anchors.probing.heads import states_of
from theodolite.measures.anchors.transfer.certificate import fit_anchor
from theodolite.measures.anchors.transfer.log_linear import LogLinear
from theodolite.measures.anchors.transfer.readout import anchored_logits, thresholded_score

#: Frequent words from which label words are drawn, and at which quantile of its feature a unit begins to speak.
FREQUENT, QUANTILE = 20, 0.25


class Task(NamedTuple):
    """Label words (k,), coefficients ±1 and thresholds of f = Σ a_j max(u_j − b_j, 0)."""

    labels: Tensor
    a: Tensor
    b: Tensor

    def score(self, features: Tensor) -> Tensor:
        return thresholded_score(features, self.a, self.b)


def states_at(model: nn.Module, ids: Tensor) -> LogLinear:
    """The model at every position of windows of tokens (B, T), one context each."""
    with torch.no_grad():
        head = find_head(model, (ids[:1],), {})
        caught = torch.cat([states_of(model, head.module, (part,), {}) for part in ids.split(64)])
        return LogLinear(head.states(caught), head.weight, head.bias)


def log_bulk(model: LogLinear, labels: Tensor) -> Tensor:
    """The log partition function (contexts,) of all words but the labels."""
    others = torch.ones(model.words, dtype=torch.bool)
    others[labels] = False
    return torch.cat([model.logits(rows)[:, others].logsumexp(1) for rows in model.chunks()])


def anchor_of(model: LogLinear, labels: Tensor) -> Tensor:
    """The anchor vector for that bulk."""
    return fit_anchor(model.states, log_bulk(model, labels))


def task_of(model: LogLinear, anchor: Tensor | None, labels: Tensor) -> Task:
    """The first half of the label words speaks for a class, the second against it; thresholds at a quantile of the features.

    The features are anchored logits, or raw ones without an anchor.
    """
    features = model.logits()[:, labels] if anchor is None else anchored_logits(model, anchor, labels)
    a = torch.ones(len(labels), dtype=torch.float64)
    a[len(labels) // 2 :] = -1
    return Task(labels, a, features.quantile(QUANTILE, dim=0))


def frequent_words(model: LogLinear, k: int, seed: int) -> Tensor:
    """k of the FREQUENT words that the model says most."""
    mean = torch.stack([model.logits(rows).softmax(1).sum(0) for rows in model.chunks()]).sum(0)
    generator = torch.Generator().manual_seed(seed)
    return mean.topk(FREQUENT).indices[torch.randperm(FREQUENT, generator=generator)[:k]]
