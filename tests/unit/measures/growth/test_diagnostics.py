"""Numbers of loss curves: against SciPy, by hand, on curves whose answers are known on paper."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from theodolite.measures.growth import diagnostics as d
from theodolite.measures.growth.lag import TrialCurves, dropped_now, gain_of, has_settled, settled_at

TIED = st.lists(st.integers(-3, 3), min_size=3, max_size=12)
TABLES = arrays.arrays(
    np.float64, st.tuples(st.integers(2, 7), st.integers(1, 6)), elements=st.integers(0, 5).map(lambda n: n / 4)
)


@given(TIED, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rank_correlations_are_those_of_scipy_ties_included(x, random):
    y = [random.choice(x) + random.randint(0, 2) for _ in x]
    ours = d.spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(ours)
    else:
        assert abs(ours - stats.spearmanr(x, y).statistic) < 1e-12
        assert abs(d.pearson(x, y) - stats.pearsonr(x, y).statistic) < 1e-12


def test_a_candidate_that_blew_up_ranks_last():
    assert d.spearman([1.0, math.inf, 2.0], [1.0, 9.0, 2.0]) == 1.0
    assert d.spearman([1.0, math.nan, 2.0], [1.0, 9.0, 2.0]) == 1.0


@given(TABLES)
@settings(max_examples=60, deadline=None)
def test_regret_recall_and_heat_map_keep_their_identities(losses):
    relative = d.relative_regret(losses)
    assert ((relative >= 0) & (relative <= 1)).all()
    final = losses[:, -1]
    chosen = final[np.argmin(losses, axis=0)]
    assert ((relative == 0) == (chosen == final.min())).all()
    if final.max() > final.min():
        assert ((relative == 1) == (chosen == final.max())).all()
    recalls = [d.recall(losses, r) for r in range(1, len(losses) + 1)]
    assert all((late >= early).all() for early, late in itertools.pairwise(recalls))
    assert (recalls[-1] == 1).all()
    heat = d.heat_map(losses)
    assert np.array_equal(heat, heat.T, equal_nan=True)
    assert (np.diag(heat) == 1).all()


@given(TABLES)
@settings(max_examples=30, deadline=None)
def test_the_heat_map_holds_the_rank_correlations(losses):
    heat = d.heat_map(losses)
    for t in range(losses.shape[1]):
        for u in range(t):
            one = d.spearman(losses[:, t], losses[:, u])
            assert (math.isnan(one) and math.isnan(heat[t, u])) or abs(one - heat[t, u]) < 1e-12


@pytest.mark.parametrize(
    ("loss", "largest", "reported", "tolerance"),
    [
        (1.7875, 1.79794, 0.7986, 5e-4),
        (1.7747, 1.79794, 0.5517, 5e-4),
        (1.7461, 1.79794, 0.0, 1e-12),
    ],
)
def test_relative_regrets_of_table_5_1(loss, largest, reported, tolerance):
    assert abs(d.relative_regret_of(loss, 1.7461, largest) - reported) < tolerance


@pytest.mark.parametrize(("loss", "reported"), [(2.1398, 0.920), (2.1357, 0.658), (2.1268, 0.089)])
def test_relative_regrets_of_table_5_2(loss, reported):
    assert abs(d.relative_regret_of(loss, 2.1254, 2.14105) - reported) < 1e-3


def test_smoothing_is_a_centred_mean_that_is_cut_off_at_the_ends():
    series = np.random.default_rng(0).normal(size=(3, 30))
    smooth = d.smoothed(series)
    assert np.allclose(smooth[:, 12], series[:, 7:18].mean(axis=1), rtol=0, atol=1e-15)
    assert np.allclose(smooth[:, 0], series[:, :6].mean(axis=1), rtol=0, atol=1e-15)
    assert np.allclose(smooth[:, -2], series[:, -7:].mean(axis=1), rtol=0, atol=1e-15)
    assert np.array_equal(d.smoothed(np.full((2, 20), 1.25)), np.full((2, 20), 1.25))
    with pytest.raises(ValueError, match="odd"):
        d.smoothed(series, 10)


# Planted curves: ℓ_t = u + A e^(−t/τ), where those that end best begin worst


def planted(candidates=8, tau=40.0, share=0.3, steps=range(0, 401, 5), noise=0.0, seed=0):
    """With u = −share · A all ranks turn over at once, where e^(−t/τ) = share: at t = τ log(1/share)."""
    amplitude = np.linspace(0.1, 1.0, candidates)
    t = np.array(list(steps), dtype=np.float64)
    rng = np.random.default_rng(seed)
    losses = 2.0 - share * amplitude[:, None] + amplitude[:, None] * np.exp(-t / tau)
    return t, losses + noise * rng.normal(size=losses.shape), tau * math.log(1 / share)


@pytest.mark.parametrize("tau", [10.0, 40.0, 90.0])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_planted_transition_is_found_within_one_step_of_the_grid(tau, share):
    steps, losses, truth = planted(tau=tau, share=share)
    found = d.transition(steps, losses)
    assert found is not None
    assert truth <= found <= truth + 5
    h = d.final_correlation(losses)
    assert np.allclose(h[steps < truth], -1)
    assert np.allclose(h[steps > truth], 1)


def test_a_planted_transition_is_found_in_noise_and_with_other_diagnostics():
    steps, losses, truth = planted(noise=0.002)
    found = d.transition(steps, losses)
    assert found is not None
    assert abs(found - truth) <= 5
    assert d.recall(losses, 1)[0] == 0
    assert d.recall(losses, 1)[-1] == 1
    assert d.relative_regret(losses)[0] > 0.95
    assert d.relative_regret(losses)[-1] == 0
    assert d.heat_map(losses)[0, -1] < -0.9


def test_a_mixed_pool_turns_where_its_pairs_cross():
    """Ranks change where two curves cross, at τ log((A_i − A_j)/(u_j − u_i)): the correlation is known at each step."""
    rng = np.random.default_rng(4)
    amplitude, u = rng.permutation(np.linspace(0.2, 1.2, 6)), rng.permutation(np.linspace(0, 0.5, 6))
    t = np.arange(0.0, 300.0, 1.0)
    crossings = sorted(
        40 * math.log((amplitude[i] - amplitude[j]) / (u[j] - u[i]))
        for i in range(6) for j in range(6) if amplitude[i] - amplitude[j] > u[j] - u[i] > 0
    )  # fmt: skip
    h = d.final_correlation(u[:, None] + amplitude[:, None] * np.exp(-t / 40))
    changes = [step for step in range(1, 300) if h[step] != h[step - 1]]
    assert changes
    assert all(any(step - 1 <= c <= step for c in crossings) for step in changes)
    found = d.transition(t, u[:, None] + amplitude[:, None] * np.exp(-t / 40))
    assert found is not None
    assert min(abs(found - c) for c in crossings) <= 1


def test_there_is_no_transition_where_only_the_end_agrees_with_itself():
    assert d.transition([0, 1, 2], [[1, 1, 2], [2, 2, 1]]) is None


# Errors


def test_the_paired_error_covers_the_mean_of_differences():
    rng = np.random.default_rng(1)
    draws = rng.normal(0.3, 1.0, size=(400, 8)).tolist()
    inside = [abs(np.mean(row) - 0.3) < 2.365 * d.paired_error(row) for row in draws]  # t with 7 degrees of freedom
    assert 0.91 < np.mean(inside) < 0.98
    assert d.paired_error([1.0, 1.0, 1.0]) == 0.0
    weighted = d.paired_error([0.0, 1.0, 5.0], [1.0, 1.0, 0.0])
    assert weighted == pytest.approx(math.sqrt(3 / 2 * 2 * 0.25 * 0.25))


def test_small_differences_and_small_spreads_are_not_called_results():
    assert not d.told_apart(0.0199, 0.01)
    assert d.told_apart(0.02, 0.01)
    assert not d.told_apart(0.0, 0.0)
    assert d.ranks_mean_something([1.0, 1.3], 0.1)
    assert not d.ranks_mean_something([1.0, 1.29], 0.1)
    assert not d.ranks_mean_something([1.0, 1.0], 0.0)


def test_noise_over_seeds_leaves_out_what_all_candidates_share():
    rng = np.random.default_rng(2)
    shared = rng.normal(size=(200, 1, 1))
    own = 0.1 * rng.normal(size=(200, 5, 3))
    mean, error, noise = d.over_seeds(shared + own)
    assert mean.shape == error.shape == (5, 3)
    assert noise == pytest.approx(0.1 * math.sqrt(4 / 5), rel=0.1)
    assert error[0, 0] == pytest.approx(noise / math.sqrt(200), rel=0.2)
    assert math.isnan(d.over_seeds(own[:1])[2])


def test_costs_of_the_source():
    assert d.trial_steps(30, 200) == 6_000
    assert d.trial_steps(30, 2_000) == 60_000
    assert d.stacking_trial_steps([3, 15, 27, 21, 27], 200) == (18_600, 17_600)


# How long a trial has to be, from what it has seen


def trial(losses, steps, parts=8, spread=0.0, seed=0):
    """Curves whose parts scatter, together for all candidates and a little by themselves."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(1, 1, parts))
    own = spread * rng.normal(size=(len(losses), 1, parts)) if spread else 0.0
    table = np.asarray(losses)[:, :, None] + common - common.mean() + own
    return TrialCurves(tuple(map(str, range(len(losses)))), tuple(map(int, steps)), table, np.ones(parts))


@pytest.mark.parametrize("tau", [20.0, 60.0])
def test_a_trial_does_not_settle_before_the_planted_transition(tau):
    steps, losses, truth = planted(tau=tau, steps=range(0, 1001, 10))
    found = settled_at(trial(losses, steps, spread=1e-4), horizon=10_000)
    assert found is not None
    assert steps[found - 1] > truth
    assert trial(losses, steps).until(found).leader == int(np.argmin(losses[:, -1]))


def test_a_candidate_that_will_pass_holds_the_trial_open():
    t = np.arange(0, 201, 10)
    steady, late = 1.0 - 0 * t, 1.5 - 0.002 * t  # passes at step 250
    curves = trial([steady, late, steady + 2], t)
    assert curves.leader == 0
    assert gain_of(curves, 1, 1000).may_pass
    assert not has_settled(curves, 1000)
    assert not gain_of(curves, 1, 210).may_pass
    assert has_settled(curves, 210)


def test_equal_candidates_never_settle_and_are_tied():
    t = np.arange(0, 101, 10)
    curve = 2 - t / 200
    curves = trial([curve, curve, curve + 0.5], t)
    assert not has_settled(curves, 1000)
    assert curves.tied() == [1]
    assert [curves.names[c] for c in curves.ranked()] == ["0", "1", "2"]


def test_only_those_are_dropped_that_cannot_win():
    steps, losses, _ = planted(candidates=6, tau=30.0, steps=range(0, 601, 10))
    winner = int(np.argmin(losses[:, -1]))
    full = trial(losses, steps, spread=1e-4)
    for looks in range(1, len(steps) + 1):
        assert winner not in dropped_now(full.until(looks), horizon=600)
    late = dropped_now(full, horizon=600)
    assert late
    assert full.leader == winner


def test_a_diverged_candidate_is_dropped_at_once_and_never_leads():
    t = [0, 10]
    curves = trial([[2.0, math.inf], [2.5, 2.4], [2.5, 2.3]], t)
    assert dropped_now(curves, 100) == [0]
    assert curves.leader == 2
    assert curves.ranked() == [2, 1, 0]
