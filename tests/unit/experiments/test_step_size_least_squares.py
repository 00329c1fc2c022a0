"""The objectives over step sizes that descend, against finite differences; and where a parabola has its minimum."""

from __future__ import annotations

import math

import pytest
import torch

from theodolite.experiments.step_size.log_objective import SETTINGS, descend_on_rate, fitted, last_objective, log_objective
from theodolite.experiments.step_size.sgd_theorems import lowest
from theodolite.measures.stepsize import least_squares_curves


def tasks(setting, dim=12):
    ratio, judge = SETTINGS[setting]
    return fitted(dim, round(ratio * dim), 5, 2.0, judge, 0)


@pytest.mark.parametrize("setting", SETTINGS)
def test_objectives_and_their_derivatives(setting):
    fit, rates, step = tasks(setting), torch.tensor([1e-3, 0.05, 0.2, 0.9], dtype=torch.float64), 1e-6
    values, slopes = log_objective(fit, rates, 7)
    loss, loss_slopes = last_objective(fit, rates, 7)
    torch.testing.assert_close(values, loss.log() / 7)
    torch.testing.assert_close(slopes, loss_slopes / loss / 7)
    for objective, found in ((log_objective, slopes), (last_objective, loss_slopes)):
        ends = [objective(fit, rates + sign * step, 7)[0] for sign in (1, -1)]
        torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_losses_are_those_of_the_curves(setting):
    ratio, judge = SETTINGS[setting]
    curves = least_squares_curves(12, round(12 * ratio), sigmas=[2.0], rates=[0.05, 0.1], steps=7, tasks=5)
    found = last_objective(tasks(setting), torch.tensor([0.05, 0.1], dtype=torch.float64), 7)[0]
    torch.testing.assert_close(found, curves.objective[["train", "valid"].index(judge), 0])


def test_the_log_form_never_overflows():
    fit = tasks("train, n < d")
    values, slopes = log_objective(fit, torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64), 2000)
    assert bool(values.isfinite().all() and slopes.isfinite().all())
    top = fit.eigenvalues.max()
    assert float(slopes[2]) == pytest.approx(2 * float(top) / (1e3 * float(top) - 1), rel=1e-6)
    assert not last_objective(fit, torch.tensor([1e3], dtype=torch.float64), 2000)[0].isfinite()


def test_descent_on_the_rate_stops_at_zero():
    path = descend_on_rate(tasks("valid, n < d"), "last", [0.5], 40, 1, 1.0)
    assert path[:, 0].tolist() == [0.5, 0.0]


def test_the_lowest_point_of_a_parabola():
    rates = [10**u for u in (-2.0, -1.0, 0.0, 1.0)]
    values = torch.tensor([(math.log10(rate) + 0.7) ** 2 for rate in rates], dtype=torch.float64)
    assert lowest(rates, values) == pytest.approx(10**-0.7)
    assert lowest(rates, torch.tensor([0.0, 1.0, 2.0, math.nan])) == rates[0]
