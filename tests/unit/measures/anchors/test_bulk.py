"""The log bulk partition function against sorting in float64, also where almost no mass is left."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.measures.anchors.bulk import check_excluded, check_top, default_top, log_bulk_partition


def brute_force(logits, top):
    """Sort, leave out the largest, add up, in float64."""
    ordered = logits.double().sort(-1).values
    return torch.stack([ordered[:, : logits.shape[1] - k].logsumexp(-1) for k in top], dim=1)


def test_check_01_equals_brute_force_also_with_little_mass_left():
    top = (0, 1, 5, 50, 400)
    logits = 3 * torch.randn(200, 2000)
    logits[100:, :50] += 40  # the top 50 carry all but 1e-15 of the mass
    found, exact = log_bulk_partition(logits, top).bulk, brute_force(logits, top)
    assert float((found[100:, 3] - found[100:, 0]).max()) < math.log(1e-4)
    assert float(((found - exact) / exact).abs().max()) < 1e-5


def test_check_02_order_and_mass():
    top = (0, 1, 10, 100)
    logits = 2 * torch.randn(50, 300, dtype=torch.float64)
    total, bulk = log_bulk_partition(logits, top)
    torch.testing.assert_close(bulk[:, 0], logits.logsumexp(-1))
    torch.testing.assert_close(total, logits.logsumexp(-1))
    assert bool((bulk.diff(dim=1) < 0).all())
    probabilities = logits.softmax(-1).sort(-1).values
    for i, k in enumerate(top):
        torch.testing.assert_close((bulk[:, i] - total).exp(), probabilities[:, : 300 - k].sum(-1))


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(2, 40),
    rows=st.integers(1, 5),
    seed=st.integers(0, 99),
    levels=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 39), min_size=1, max_size=5),
)
def test_ties_and_any_tops(n, rows, seed, levels, cuts):
    top = tuple(sorted({k % n for k in cuts}))
    logits = torch.randint(levels, (rows, n), generator=torch.Generator().manual_seed(seed)).double()
    torch.testing.assert_close(log_bulk_partition(logits, top).bulk, brute_force(logits, top))


def test_excluded_words_are_in_no_bulk():
    logits = torch.randn(30, 60, dtype=torch.float64)
    words = torch.tensor([3, 17])
    total, bulk = log_bulk_partition(logits, (0, 4), words)
    others = [j for j in range(60) if j not in (3, 17)]
    torch.testing.assert_close(total, logits.logsumexp(-1))
    torch.testing.assert_close(bulk, brute_force(logits[:, others], (0, 4)))
    changed = logits.clone()
    changed[:, words] += 100
    torch.testing.assert_close(log_bulk_partition(changed, (0, 4), words).bulk, bulk)


def test_logits_are_left_alone():
    logits = torch.randn(4, 30)
    before = logits.clone()
    log_bulk_partition(logits, (0, 3, 9))
    assert torch.equal(logits, before)


def test_defaults():
    assert default_top(49152) == default_top(50272) == (0, 10, 100, 1000, 10000)
    assert default_top(32000) == (0, 6, 64, 640, 6400)
    assert default_top(2) == (0,)


def test_bad_tops_and_words():
    with pytest.raises(ValueError, match=r"top=10 leaves no bulk of a vocabulary of 10: remove fewer than 10 words"):
        check_top((0, 10), 10)
    with pytest.raises(ValueError, match="top=8 and 2 excluded words"):
        check_top(8, 10, 2)
    for bad in ((), (-1,), (1.5,), True):
        with pytest.raises(ValueError, match="top must be"):
            check_top(bad, 10)
    with pytest.raises(ValueError, match=r"exclude must hold token numbers in 0 \.\. 9"):
        check_excluded([10], 10)
    assert check_excluded((), 10) is None
    assert check_excluded([4, 2, 4], 10).tolist() == [2, 4]
