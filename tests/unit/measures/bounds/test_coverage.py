"""How often certificates are wrong, counted over many training sets whose true risk is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import theodolite as th
from theodolite.measures.bounds import grid_penalty, kl_inverse
from theodolite.measures.bounds.calculator import budget_of
from theodolite.measures.bounds.gibbs import DrawnError

from .cases import mlp, prototypes, trained


def test_bounds_of_a_one_weight_problem_miss_no_more_often_than_stated():
    """x = y (0.3 + noise), the network y' = sign(w x) with w ~ N(m, s): its errors have a closed form, on samples and in truth.

    Each of 20 000 training sets chooses m and s among many by its own bound.
    """
    rng, n, delta, sets = np.random.default_rng(0), 60, 0.1, 20_000
    wrong = rng.binomial(n, norm.cdf(-0.3), size=sets)  # samples on the wrong side of 0 for a positive weight
    right_sign = [norm.cdf(m / s) for m in (0.0, 0.1, 0.3, 1.0) for s in (0.1, 0.3, 1.0)]
    divergence = [0.5 * (s**2 + m**2 - 1 - math.log(s**2)) for m in (0.0, 0.1, 0.3, 1.0) for s in (0.1, 0.3, 1.0)]
    truth = norm.cdf(-0.3)
    share = wrong / n
    bounds, risks = [], []
    for p, kl in zip(right_sign, divergence, strict=True):
        empirical = p * share + (1 - p) * (1 - share)
        bounds.append(kl_inverse(torch.tensor(empirical), budget_of(kl, n, delta)).numpy())
        risks.append(p * truth + (1 - p) * (1 - truth))
    chosen = np.argmin(bounds, axis=0)
    misses = int((np.array(bounds)[chosen, np.arange(sets)] < np.array(risks)[chosen]).sum())
    assert misses <= delta * sets
    too_bold = [kl_inverse(torch.tensor(share), 0.0).numpy()]  # what no bound would say is wrong about half of the time
    assert (too_bold[0] < truth).mean() > 0.3


def test_draws_of_unequal_means_miss_no_more_often_than_stated():
    rng, delta = np.random.default_rng(0), 0.05
    means = rng.beta(0.3, 3.0, size=400)
    errors = (rng.random((4000, 400)) < means).mean(1)
    upper = np.array([DrawnError(float(e), 400).upper(delta) for e in np.unique(errors)])
    found = upper[np.searchsorted(np.unique(errors), errors)]
    misses = (found < means.mean()).mean()
    assert misses <= delta
    assert (found < 1.6 * means.mean()).mean() > 0.5  # and they are not idle


def test_the_choice_of_a_variance_is_paid_for():
    """The weights of the grid sum to one, so that a union over all j costs exactly its penalty."""
    paid = sum(math.exp(-grid_penalty(j)) for j in range(1, 10_001))
    assert 0.9999 < paid < 1


@pytest.mark.parametrize("repeat", [*range(2), *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 200))])
def test_certificates_of_small_networks_are_above_the_risk_on_fresh_samples(repeat):
    torch.manual_seed(repeat)
    data, model = prototypes(600, 100 + repeat), mlp(40, 8, 2)
    start = trained(model, data, 5)
    found = th.pac_bayes_bound(
        th.Problem(model, nn.CrossEntropyLoss(), data),
        start=start,
        epochs=4,
        batch_size=100,
        passes=3,
        progress=False,
        seed=repeat,
    )
    x, y = prototypes(20_000, 10_000 + repeat)
    drawn = found.posterior.module(model)
    with torch.no_grad():
        risk = sum(
            float((drawn(part).argmax(1) != label).float().mean()) for part, label in zip(x.split(200), y.split(200), strict=True)
        )
    assert found.value > risk / 100 - 3 * math.sqrt(0.25 / 100)
