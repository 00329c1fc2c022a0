"""Random least-squares tasks against plain loops of gradient descent, means over draws, and the numbers of the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from theodolite.measures.fits import log_log_fit
from theodolite.measures.stepsize import (
    draw_tasks,
    interpolation_error,
    least_squares_curves,
    least_squares_scores,
    population_rates,
    population_risk,
)
from theodolite.measures.stepsize.quadratics.least_squares import (
    LIMIT,
    RATES,
    descend_tasks,
    diagonalise,
    distance_to_true,
    loss_on,
    train_loss,
)
from theodolite.testing import ResultContract


def t64(*values):
    return torch.tensor(values, dtype=torch.float64)


def looped(x, y, rate, steps, limit):
    """Gradient descent from 0 on one task, frozen along its own direction where it reaches the limit."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(steps):
        w = w - rate / len(y) * x.T @ (x @ w - y)
        if float(w.norm()) >= limit:
            return limit * w / w.norm(), True
    return w, False


def spectra(d, n, draws, seed=0):
    return diagonalise(draw_tasks(d, n, draws, seed=seed)).eigenvalues


# The eigenbasis against the loop


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 12),
    st.floats(0.5, 6.0),
    st.integers(1, 15),
    st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_powers_of_eigenvalues_are_gradient_descent(d, n, sigma, steps, rates, seed):
    drawn = draw_tasks(d, n, 2, seed=seed)
    eigen = diagonalise(drawn)
    w, cut = descend_tasks(eigen, t64(*rates), steps, t64(sigma))
    weights, loss, distance = eigen.weights(w), train_loss(eigen, w, t64(sigma)), distance_to_true(eigen, w)
    others = draw_tasks(d, 5, 2, seed=seed + 1)
    others = type(others)(others.x, drawn.true, others.noise)
    held_out = loss_on(others, weights, t64(sigma))
    for k in range(2):
        x, y = drawn.x[k], drawn.x[k] @ drawn.true[k] + sigma * drawn.noise[k]
        new_y = others.x[k] @ drawn.true[k] + sigma * others.noise[k]
        for e, rate in enumerate(rates):
            found, diverged = looped(x, y, rate, steps, LIMIT * sigma)
            assert bool(cut[k, 0, e]) == diverged
            scale = max(1.0, float(found.norm()))
            torch.testing.assert_close(weights[k, 0, e], found, rtol=1e-7, atol=1e-7 * scale)
            expected = [0.5 * (y - x @ found).square().mean(), (found - drawn.true[k]).square().sum()]
            expected.append(0.5 * (new_y - others.x[k] @ found).square().mean())
            got = torch.stack([loss[k, 0, e], distance[k, 0, e], held_out[k, 0, e]])
            torch.testing.assert_close(got, torch.stack(expected), rtol=1e-7, atol=1e-7)


def test_after_one_step_the_weights_are_the_rate_times_the_gradient():
    """`t` counts updates: w₁ = η Xᵀy/n."""
    drawn = draw_tasks(6, 4, 1)
    eigen = diagonalise(drawn)
    w, _ = descend_tasks(eigen, t64(0.3), 1, t64(2.0))
    y = drawn.x[0] @ drawn.true[0] + 2.0 * drawn.noise[0]
    torch.testing.assert_close(eigen.weights(w)[0, 0, 0], 0.3 * drawn.x[0].T @ y / 4)


def test_curves_see_the_same_tasks_at_every_rate_and_noise():
    alone = least_squares_curves(8, 6, sigmas=[2.0], rates=[0.1], steps=5, tasks=7)
    among = least_squares_curves(8, 6, sigmas=[1.0, 2.0], rates=[0.01, 0.1, 3.0], steps=5, tasks=7)
    torch.testing.assert_close(among.losses[:, 1, 1], alone.losses[:, 0, 0])
    halves = draw_tasks(8, 6, 7)
    eigen = diagonalise(halves.part(slice(3)))
    w, _ = descend_tasks(eigen, t64(0.1), 5, t64(2.0))
    torch.testing.assert_close(alone.losses[1, 0, 0], loss_on(halves.part(slice(3, 6)), eigen.weights(w), t64(2.0))[:, 0, 0])


def test_batches_do_not_change_the_kind_of_result():
    """Many tasks are drawn in parts; each is as good as the others."""
    found = least_squares_curves(40, 60, rates=[0.1], tasks=900)
    first, last = found.losses[0, 0, 0, :400], found.losses[0, 0, 0, 500:]
    assert found.losses.shape == (2, 1, 1, 900)
    assert abs(float(first.mean() / last.mean()) - 1) < 0.05


def test_the_error_of_a_difference_is_far_below_that_of_the_losses():
    found = least_squares_curves(100, 100, sigmas=[4.0], tasks=60)
    rows = [row for row in found.rows() if row["split"] == "valid" and row["above"] > 0 and row["rate"] < 1e-3]
    assert max(row["above_stderr"] for row in rows) < 0.2 * min(row["stderr"] for row in rows)
    best = min((row for row in found.rows() if row["split"] == "valid"), key=lambda row: row["objective"])
    assert best["above"] == best["above_stderr"] == 0.0


def test_half_as_many_samples_and_noise_make_a_warning():
    assert "fits noise" in least_squares_curves(40, 20, sigmas=[3.0], tasks=100).sentence()
    assert "too little to choose by" in least_squares_curves(4, 400, rates=[0.1, 0.3, 1.0], tasks=30).sentence()
    assert "about the same" in least_squares_curves(4, 400, rates=[0.001, 0.01, 0.02], tasks=30).sentence()


# The formulas


@pytest.mark.parametrize("n", [20, 80])
def test_ac12_formulas_are_the_mean_of_gradient_descent(n):
    """d = 40, σ = 2, t = 20, η = 0.1: 2,000 tasks by a plain loop over steps."""
    d, sigma, steps, rate = 40, 2.0, 20, 0.1
    drawn = draw_tasks(d, n, 2000, seed=n)
    y = (drawn.x @ drawn.true[..., None])[..., 0] + sigma * drawn.noise
    w = torch.zeros(2000, d, dtype=torch.float64)
    for _ in range(steps):
        w = w - rate / n * ((drawn.x @ w[..., None])[..., 0] - y)[:, None].matmul(drawn.x)[:, 0]
    found = {
        "train": 0.5 * (y - (drawn.x @ w[..., None])[..., 0]).square().mean(1),
        "error": (w - drawn.true).square().sum(1),
    }
    risk = population_risk(diagonalise(drawn).eigenvalues, [rate], steps, dim=d, samples=n, sigma=sigma)
    for values, expected in ((found["train"], risk.train_loss[:, 0]), (found["error"], risk.error[:, 0])):
        assert abs(float((values - expected).mean())) < 3 * float((values - expected).std()) / 2000**0.5
        assert abs(float(values.mean() / expected.mean()) - 1) < 0.03
    torch.testing.assert_close(risk.train_rmse, (2 * risk.train_loss).sqrt())
    torch.testing.assert_close(risk.test_rmse, (risk.error + 4).sqrt())


@pytest.mark.parametrize(("sigma", "product"), [(1.0, 0.346), (2.0, 0.1075), (5.0, 0.0194)])
def test_ac13_and_ac14_few_samples(sigma, product):
    """d = 200, n = 100: the validated rate is of order 1/t, the trained one constant, and its error that of interpolation."""
    lam, steps = spectra(200, 100, 8), [10, 20, 40, 80, 160, 320, 640]
    best = [population_rates(lam, t, dim=200, samples=100, sigma=sigma) for t in steps]
    assert abs(log_log_fit(steps, [b["valid"] for b in best]).slope + 1) < 0.03
    assert all(abs(t * b["valid"] / product - 1) < 0.05 for t, b in zip(steps, best, strict=True))
    assert all(0.29 <= b["train"] <= 0.35 for b in best)
    risk = population_risk(lam, [best[4]["train"], best[4]["valid"]], 160, dim=200, samples=100, sigma=sigma).error.mean(0)
    assert abs(float(risk[0]) / interpolation_error(200, 100, sigma) - 1) < 0.03
    assert float(risk[1]) < 1 < float(risk[0])


def test_ac17_many_samples():
    for n, ratio in ((500, 1.116), (1000, 1.055), (2000, 1.026), (5000, 1.011)):
        lam = spectra(50, n, 8)
        rate = population_rates(lam, 40, dim=50, samples=n, sigma=1.0)["train"]
        error = float(population_risk(lam, [rate], 40, dim=50, samples=n, sigma=1.0).error.mean())
        assert abs(error * n / 50 - ratio) < 0.03


def test_ac22_variance_of_eigenvalues():
    d, n = 40, 20
    lam = spectra(d, n, 2000)
    variance = float((lam.square().mean(1) - lam.mean(1).square()).mean())
    assert abs(variance / (d / n + d / n**2 - 2 * d / n**3) - 1) < 0.02
    assert abs(variance - 2.087) < 0.03


# Experiments scaled down


def test_ac15_noise_scaled_down():
    d, n = 200, 100
    found = least_squares_curves(d, n, sigmas=[1.0, 2.0, 4.0], tasks=100)
    lam = spectra(d, n, 4, seed=9)
    expected = {1.0: (3e-3, 6e-3), 2.0: (5e-4, 2e-3), 4.0: (1.5e-4, 1.2e-3)}  # those of the specification, one grid point more
    for sigma, by_train, by_valid in zip(found.sigmas, *found.best.tolist(), strict=True):
        assert round(by_train, 3) == 0.316
        assert expected[sigma][0] < by_valid < expected[sigma][1]
        scores = least_squares_scores(d, n, [by_train, by_valid], sigma=sigma)
        (train, _), (by_train_test, by_valid_test) = scores.train_rmse.mean(1).tolist(), scores.test_rmse.mean(1).tolist()
        assert train < 0.02 * sigma
        assert by_train_test > by_valid_test + (1.0 if sigma == 4 else 0.1)
        predicted = population_risk(lam, [by_valid], 40, dim=d, samples=n, sigma=sigma).test_rmse.mean()
        assert abs(by_valid_test - float(predicted)) < 0.1 * sigma
        if sigma == 1:
            assert by_valid_test < math.sqrt(2)


def test_ac16_samples_scaled_down():
    d, gaps, tests = 100, {}, {}
    for n in (50, 1000):
        found = least_squares_curves(d, n, tasks=40)
        scores = least_squares_scores(d, n, found.best[:, 0].tolist())
        tests[n], valid = scores.test_rmse.mean(1).tolist()
        gaps[n] = tests[n] - valid
        assert float(found.best[0, 0]) >= 0.3
    assert gaps[50] > 0.1
    assert gaps[1000] < 0.03
    assert abs(tests[1000] - math.sqrt(1 + d / (1000 - d - 1))) < 0.05


# Truncation


def test_ac18_truncation():
    """100 tasks, 200 rates, odd t: from some rate on truncated, never while stable, with a high loss where it is."""
    sigma = 3.0
    eigen = diagonalise(draw_tasks(80, 40, 100))
    rates = torch.linspace(0, 2, 200, dtype=torch.float64)
    for steps in (21, 40):
        w, cut = descend_tasks(eigen, rates, steps, t64(sigma))
        loss = train_loss(eigen, w, t64(sigma))
        cut, loss = cut[:, 0], loss[:, 0]
        assert not (cut[:, :-1] & ~cut[:, 1:]).any()
        assert not (cut & (rates <= 2 / eigen.eigenvalues[:, -1:])).any()
        assert float(loss[cut].min()) > 100 * sigma**2
        assert bool(cut.any(1).all())
        torch.testing.assert_close(w[:, 0][cut].norm(dim=-1), torch.full((int(cut.sum()),), LIMIT * sigma, dtype=torch.float64))


def test_a_truncated_run_would_look_harmless_outside_the_samples():
    """Frozen in a direction that the samples do not see, the loss is that of weights 0: why it is frozen along its own."""
    drawn = draw_tasks(200, 100, 1)
    eigen = diagonalise(drawn)
    w, cut = descend_tasks(eigen, t64(1.0), 40, t64(3.0))
    assert bool(cut.all())
    y = drawn.x[0] @ drawn.true[0] + 3.0 * drawn.noise[0]
    normal = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outside = normal - torch.linalg.pinv(drawn.x[0]) @ (drawn.x[0] @ normal)
    harmless = 0.5 * (y - drawn.x[0] @ (120 * outside / outside.norm())).square().mean()
    assert float(harmless) < 10
    assert float(train_loss(eigen, w, t64(3.0))) > 1000


def test_rates_that_overflow_are_truncated():
    found = least_squares_curves(5, 8, rates=[1e-3, 1e30, 1e300], steps=400, tasks=3)
    assert bool(found.truncated[..., 1:, :].all())
    assert bool(found.losses.isfinite().all())


def test_a_fit_far_away_is_truncated_though_descent_is_stable():
    """As many samples as weights: the solution may lie beyond the limit, and descent on its way to it."""
    drawn = draw_tasks(1, 1, 1)
    drawn = type(drawn)(torch.full((1, 1, 1), 0.01, dtype=torch.float64), drawn.true, torch.ones(1, 1, dtype=torch.float64))
    w, cut = descend_tasks(diagonalise(drawn), t64(1.0), 6000, t64(1.0))
    assert bool(cut.all())
    assert abs(float(w.abs())) == pytest.approx(LIMIT)


def test_directions_without_samples_stay_at_zero():
    x = torch.zeros(1, 4, 3, dtype=torch.float64)
    x[..., 0] = 1.0
    drawn = draw_tasks(3, 4, 1)
    eigen = diagonalise(type(drawn)(x, drawn.true, drawn.noise))
    w, _ = descend_tasks(eigen, t64(0.5), 9, t64(1.0))
    weights = eigen.weights(w)[0, 0, 0]
    assert float(weights[1:].abs().max()) < 1e-12
    expected = looped(x[0], x[0] @ drawn.true[0] + drawn.noise[0], 0.5, 9, LIMIT)[0]
    torch.testing.assert_close(weights, expected)
    assert float(eigen.unfitted) > 0


@pytest.mark.parametrize("d", [3, 9])
def test_samples_that_come_twice_are_fitted_in_the_mean(d):
    drawn = draw_tasks(d, 6, 1)
    drawn = type(drawn)(drawn.x[:, [0, 1, 2, 0, 1, 2]], drawn.true, drawn.noise)
    eigen = diagonalise(drawn)
    w, _ = descend_tasks(eigen, t64(0.3), 40, t64(2.0))
    y = drawn.x[0] @ drawn.true[0] + 2.0 * drawn.noise[0]
    expected, _ = looped(drawn.x[0], y, 0.3, 40, 80.0)
    torch.testing.assert_close(eigen.weights(w)[0, 0, 0], expected)
    torch.testing.assert_close(train_loss(eigen, w, t64(2.0))[0, 0, 0], 0.5 * (y - drawn.x[0] @ expected).square().mean())


# Bad input, results


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: least_squares_curves(10, 1), "train_share must leave samples for both parts"),
        (lambda: least_squares_curves(10, 6, rates=[0.1, -1.0]), r"rates\[1\] must be a positive number"),
        (lambda: least_squares_curves(10, 6, sigmas=[0.0]), r"sigmas\[0\] must be a positive number"),
        (lambda: least_squares_curves(10, 6, train_share=1.0), "train_share must be a number above 0 and below 1"),
        (lambda: draw_tasks(0, 3, 2), "dim must be a positive integer"),
        (lambda: least_squares_scores(10, 6, []), "rates must be a sequence with at least one entry"),
        (lambda: population_risk(torch.ones(3), [0.1], 5, dim=4, samples=9, sigma=1.0), "the 4 positive eigenvalues"),
        (lambda: population_rates(-torch.ones(4), 5, dim=4, samples=9, sigma=1.0), "the 4 positive eigenvalues"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_interpolation_error_is_that_of_many_draws():
    for d, n in ((40, 20), (20, 40)):
        eigen = diagonalise(draw_tasks(d, n, 3000, seed=3))
        found = (2.0 * eigen.noise).square().sum(1) + eigen.beyond
        assert abs(float(found.mean()) / interpolation_error(d, n, 2.0) - 1) < 0.02
    assert interpolation_error(10, 10, 1.0) == interpolation_error(10, 9, 1.0) == interpolation_error(10, 11, 1.0) == math.inf


def test_the_grid_has_both_ends():
    assert len(RATES) == 25
    assert (RATES[0], RATES[-1]) == (1e-6, 1.0)
    assert RATES[-3] == pytest.approx(0.1**0.5)


class TestCurves(ResultContract):
    def make(self):
        return least_squares_curves(6, 4, sigmas=[1.0, 2.0], rates=[0.01, 0.1, 5.0], tasks=5)


class TestScores(ResultContract):
    def make(self):
        return least_squares_scores(6, 4, [0.01, 0.1], tasks=3)
