"""The log bulk partition function against sorting in float64, also where almost no mass is left."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.measures.anchors.probing.bulk import check_excluded, check_one_top, check_top, default_top, log_bulk_partition


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


def union_rule(logits, top, words):
    """All words but the k most probable of all and but the excluded ones, a row and a number at a time."""
    found = torch.empty(len(logits), len(top), dtype=torch.float64)
    for row, z in enumerate(logits.double()):
        # of equal words the excluded ones count as the more probable
        order = sorted(range(len(z)), key=lambda j, z=z: (-float(z[j]), j not in words))
        for i, k in enumerate(top):
            found[row, i] = z[[j for j in order[k:] if j not in words]].logsumexp(0)
    return found


def test_excluded_words_are_in_no_bulk():
    logits = torch.randn(30, 60, dtype=torch.float64)
    logits[:10, 3] += 9  # among the most probable
    logits[5:15, 17] -= 9
    words = torch.tensor([3, 17])
    total, bulk = log_bulk_partition(logits, (0, 1, 4), words)
    torch.testing.assert_close(total, logits.logsumexp(-1))
    torch.testing.assert_close(bulk, union_rule(logits, (0, 1, 4), [3, 17]))
    changed = logits.clone()
    changed[:, words] += 100  # now two of the four
    others = [j for j in range(60) if j not in (3, 17)]
    expected = brute_force(logits[:, others], (0, 2))
    torch.testing.assert_close(log_bulk_partition(changed, (0, 4), words).bulk, expected)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(4, 30),
    seed=st.integers(0, 99),
    levels=st.sampled_from([2, 4, 1000]),
    share=st.floats(0.05, 0.7),
    cuts=st.lists(st.integers(0, 29), min_size=1, max_size=4),
)
def test_excluded_words_and_any_tops(n, seed, levels, share, cuts):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randperm(n, generator=generator)[: max(1, int(share * n))]
    top = tuple(sorted({k % (n - len(words)) for k in cuts}))
    logits = torch.randint(levels, (4, n), generator=generator).double() * 4 / levels
    torch.testing.assert_close(log_bulk_partition(logits, top, words).bulk, union_rule(logits, top, words.tolist()))


def test_excluded_words_with_almost_no_mass_left():
    logits = torch.randn(20, 500)
    logits[:, :30] += 40
    words = torch.arange(10, 20)
    found, exact = log_bulk_partition(logits, (0, 30), words).bulk, union_rule(logits, (0, 30), range(10, 20))
    assert float(((found - exact) / exact).abs().max()) < 1e-5


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
    assert check_excluded(3, 10).tolist() == [3]
    assert check_excluded({4, 2}, 10).tolist() == [2, 4]
    assert check_excluded(np.array([4, 2]), 10).tolist() == [2, 4]


def test_masks_of_words():
    mask = torch.zeros(10, dtype=torch.bool)
    mask[[2, 7]] = True
    for form in (mask, mask.tolist(), mask.numpy()):
        assert check_excluded(form, 10).tolist() == [2, 7]
    assert check_excluded(torch.zeros(10, dtype=torch.bool), 10) is None
    for wrong in (mask[:9], [True, False], True, [True, 3], [0.5], ["good"]):
        with pytest.raises(ValueError, match="exclude must hold token numbers"):
            check_excluded(wrong, 10)


def test_numbers_of_words_of_all_kinds():
    for form in (10, np.int64(10), torch.tensor(10), 10.0, [10], np.array([10]), (np.int32(10),)):
        assert check_top(form, 60) == (10,)
    for wrong in (1.5, np.float64(1.5), "ten", ["ten"], math.nan, [math.inf], [None], [True]):
        with pytest.raises(ValueError, match="top must be one or more whole numbers"):
            check_top(wrong, 60)
    assert check_one_top(np.int64(3), 10, 2) == 3
    for wrong in ((1, 2), None):
        with pytest.raises(ValueError, match="top must be one whole number"):
            check_one_top(wrong, 10)
