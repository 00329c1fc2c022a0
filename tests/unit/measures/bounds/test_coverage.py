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


#: Fresh samples that the risk is measured on, and networks that are drawn for it.
FRESH, DRAWN = 20_000, 100


def certified(repeat: int) -> th.measures.bounds.RiskCertificate:
    """A small network and its certificate: by its untrained weights on the training data, or by samples held out, in turn."""
    torch.manual_seed(repeat)
    data, model = prototypes(600, 100 + repeat), mlp(40, 8, 2)
    start = trained(model, data, 5)
    how = {"epochs": 4, "batch_size": 100, "passes": 3, "progress": False, "seed": repeat}
    if repeat % 2 == 0:
        return th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), data), start=start, **how)
    held_out = th.Problem(model, nn.CrossEntropyLoss(), prototypes(300, 5000 + repeat))
    return th.pac_bayes_bound(held_out, prior="held-out", **how)


def risk_of(posterior: th.measures.bounds.GaussianPosterior, seed: int) -> tuple[float, float]:
    """The error rate of drawn networks on fresh samples and its standard error, each network on samples of its own."""
    x, y = prototypes(FRESH, 100_000 + seed)
    drawn = posterior.module(mlp(40, 8, 2))
    with torch.no_grad():
        rates = [float((drawn(a).argmax(1) != b).float().mean()) for a, b in zip(x.chunk(DRAWN), y.chunk(DRAWN), strict=True)]
    return float(np.mean(rates)), float(np.std(rates, ddof=1)) / math.sqrt(DRAWN)


@pytest.mark.parametrize("networks", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_certificates_of_small_networks_are_above_the_risk_on_fresh_samples(networks):
    """None is below the measured risk by more than three standard errors; error rates on the samples alone often are."""
    below, without = [], 0
    for repeat in range(networks):
        found = certified(repeat)
        risk, error = risk_of(found.posterior, repeat)
        assert error < 0.02
        below += [repeat] if found.value < risk - 3 * error else []
        without += found.empirical < risk
    assert below == []
    assert without > networks / 3
