"""Mixed objectives: nothing is lost, only what is asked for has a label, the shares are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.data.objectives import IGNORED, ul2_objectives

SPANS = (0.0, 0.0, 1.0)


@given(st.integers(4, 60), st.floats(0.05, 0.9), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_spans_put_back_in_their_places_give_the_row(length, corrupted, span, seed):
    tokens = torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(seed))
    mixed = ul2_objectives(tokens, 50, shares=SPANS, corrupted=corrupted, span=span, seed=seed)
    assert mixed.inputs.shape == mixed.labels.shape == (3, length - 1)
    for row, inputs, labels, read in zip(tokens, mixed.inputs, mixed.labels, mixed.prefix.tolist(), strict=True):
        asked = labels != IGNORED
        assert torch.equal(asked.nonzero()[:, 0], torch.arange(read - 1, read - 1 + int(asked.sum())))
        assert torch.equal(labels[asked][:-1], inputs[read : read + int(asked.sum()) - 1])  # the next token at each place
        spans, number = {}, None
        for token in labels[asked].tolist():
            number = token if token >= 50 else number
            spans.setdefault(number, []).extend([token] if token < 50 else [])
        back = [t for token in inputs[:read].tolist() for t in (spans[token] if token >= 50 else [token])]
        assert back == row[: len(back)].tolist()
        assert len(back) + 2 * len(spans) <= length
        assert all(spans.values())


def test_the_share_of_what_is_taken_out_and_the_mean_span_are_those_asked_for():
    tokens = torch.randint(0, 50, (200, 129), generator=torch.Generator().manual_seed(0))
    mixed = ul2_objectives(tokens, 50, shares=SPANS)
    words = ((mixed.labels >= 0) & (mixed.labels < 50)).sum(1)
    marks = (mixed.labels >= 50).sum(1)
    taken = mixed.prefix + words - marks  # tokens of the row that it holds
    assert (words == (0.15 * taken).round()).all()
    assert (marks == (words / 3).round()).all()


def test_the_shares_are_exact_and_the_rows_mixed():
    tokens = torch.arange(33).repeat(50, 1)
    mixed = ul2_objectives(tokens, 100, seed=3)
    assert mixed.objective.bincount().tolist() == [30, 10, 10]
    assert mixed.objective.tolist() != sorted(mixed.objective.tolist())
    causal, prefix = mixed.objective == 0, mixed.objective == 1
    assert torch.equal(mixed.labels[causal], tokens[causal, 1:])
    assert (mixed.prefix[causal] == 0).all()
    for labels, n in zip(mixed.labels[prefix], mixed.prefix[prefix].tolist(), strict=True):
        assert (labels[: n - 1] == IGNORED).all()
        assert torch.equal(labels[n - 1 :], torch.arange(n, 33))
    again = ul2_objectives(tokens, 100, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(mixed, again, strict=True))
    assert not torch.equal(ul2_objectives(tokens, 100, seed=4).objective, mixed.objective)


def test_bad_input_is_refused():
    tokens = torch.arange(12).reshape(2, 6)
    with pytest.raises(ValueError, match="above all tokens"):
        ul2_objectives(tokens, 11)
    with pytest.raises(ValueError, match="sum to 1"):
        ul2_objectives(tokens, 12, shares=(0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="whole numbers"):
        ul2_objectives(tokens.double(), 12)
