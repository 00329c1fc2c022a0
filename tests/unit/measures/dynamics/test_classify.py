"""The word for a run, on runs whose word is known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import theodolite as th
from theodolite.measures.dynamics.regimes import classify, classify_losses


def trace(loss, *, final=None, **columns) -> th.training.Trace:
    n = len(loss)
    return th.training.Trace(loss=tuple(loss), rate=(0.1,) * n, epoch=(0,) * n, measured=columns, final_loss=final)


CATAPULT = (1.0, 5.0, 20.0, 3.0, 0.1)


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ((2.0, 1.0, 0.5), "monotone"),
        ((1.0, 1.0, 1.0), "monotone"),
        ((1.0,), "monotone"),
        (CATAPULT, "catapult"),
        ((1.0, 1.04, 0.2), "other"),  # rose by less than 5 %
        ((1.0, 1.06, 0.2), "catapult"),
        ((1.0, 20.0, 1.01), "other"),  # did not come back below its start
        ((1.0, 1.2, 0.7), "other"),  # still above half its peak
        ((1.0, math.nan, 0.1), "divergent"),
        ((1.0, math.inf), "divergent"),
        ((1.0, 1.1e8, 0.1), "divergent"),
        ((1.0, 0.9e8, 0.1), "catapult"),
    ],
)
def test_words(losses, word):
    assert th.classify_run(losses) == word
    assert th.classify_run(trace(losses)) == word


@pytest.mark.parametrize("name", ["lambda_1", "kernel_norm"])
def test_a_catapult_needs_a_falling_kernel_where_it_was_measured(name):
    assert th.classify_run(trace(CATAPULT, **{name: (4.0, None, 3.0, None, 2.0)})) == "catapult"
    assert th.classify_run(trace(CATAPULT, **{name: (4.0, None, 3.0, None, 3.97)})) == "other"
    assert th.classify_run(trace(CATAPULT, **{name: (4.0, None, 3.0, None, 3.95)})) == "catapult"
    assert th.classify_run(CATAPULT, kernel=torch.tensor([4.0, 4.0, 4.0])) == "other"


def test_thresholds_are_arguments():
    assert th.classify_run(CATAPULT, rise=30.0) == "other"
    assert th.classify_run(CATAPULT, settled=0.001) == "other"
    assert th.classify_run((1.0, 1.05, 0.2), slack=0.1) == "monotone"
    assert th.classify_run(CATAPULT, kernel=[4.0, 3.5], kernel_fall=0.2) == "other"
    assert th.classify_run(CATAPULT, blown_up=10.0) == "divergent"
    assert th.classify_run((1.0, 1e10, 0.1), quadratic=True) == "catapult"
    assert th.classify_run((1.0, 1e13, 0.1), quadratic=True) == "divergent"


def test_the_loss_after_the_last_step_counts():
    assert th.classify_run(trace((1.0, 20.0, 15.0), final=0.3)) == "catapult"


def test_tensors_are_losses_too():
    assert th.classify_run(torch.tensor(CATAPULT)) == "catapult"


def test_no_loss_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one loss"):
        th.classify_run([])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_words_do_not_depend_on_the_unit(losses, unit):
    assert classify_losses(losses) == classify_losses([unit * value for value in losses]) or _on_an_edge(losses)


def _on_an_edge(losses: list[float]) -> bool:
    """Rounding decides: a loss sits on a threshold."""
    first, last, most = losses[0], losses[-1], max(losses)
    marks = [most / (1.05 * first), last / first, last / (0.5 * most)]
    steps = [b / a for a, b in itertools.pairwise(losses)]
    return any(abs(value - 1) < 1e-5 for value in [*marks, *steps])


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20))
def test_trial_runs_are_read_by_the_same_core(losses):
    """`expected_regime` has more words, but no other opinion."""
    word, trial = classify_losses(losses), classify(losses, ratio=0.9)
    assert (trial == "catapult") == (word == "catapult")
    assert (trial == "monotone") == (word == "monotone")


@pytest.mark.parametrize(
    ("losses", "ratio", "word"),
    [
        ([0.9**i for i in range(61)], 0.5, "monotone"),
        ([0.9**i for i in range(61)], 3.0, "edge is no limit"),
        ([0.9**i for i in range(61)], 1.05, "edge of stability"),  # would a quadratic one have shown it yet?
        ([0.9**i for i in range(6)], 3.0, "edge of stability"),
        ([1.0, 0.6, 0.7, 0.3], 3.0, "edge of stability"),
        ([1.0, 0.6, 0.7, 0.3], 0.5, "uneven"),  # a jump below the edge is not the edge's doing
    ],
)
def test_what_a_trial_says_of_the_edge(losses, ratio, word):
    assert classify(losses, ratio) == word


def test_oscillations_below_the_edge_belong_to_momentum():
    assert classify([1.0, 0.6, 0.7, 0.3], 0.5, momentum=True) == "stable"
