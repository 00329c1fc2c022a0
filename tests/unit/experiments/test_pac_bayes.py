"""What the chapter on bounds computes itself, against dense formulas and Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.data import load
from theodolite.experiments.lab.datasets import in_halves
from theodolite.experiments.pac_bayes.networks import DIGITS, SYNTHETIC, data_of, prototypes, untrained
from theodolite.experiments.pac_bayes.posteriors import along_eigenvectors
from theodolite.experiments.pac_bayes.printed import PRINTED_ROWS, error_behind, recomputed
from theodolite.experiments.pac_bayes.theorems import HESSIAN, best_variances
from theodolite.experiments.pac_bayes.validity import FLIPPED, exact_risk
from theodolite.measures.bounds import Block, GaussianPosterior, kl_inverse
from theodolite.operators import kronecker_factors
from theodolite.problem import Problem


@pytest.mark.parametrize(("mean", "spread"), [(0.5, 0.01), (0.2, 0.3), (1.4, 0.5), (-3.0, 0.1)])
def test_the_risk_of_one_weight_is_that_of_drawn_ones(mean, spread):
    w = mean + spread * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    risks = FLIPPED + (1 - 2 * FLIPPED) * (w.clamp(0, 1) - 0.5).abs()
    found = float(exact_risk(torch.tensor([mean]).double(), torch.tensor([spread]).double()))
    assert abs(found - float(risks.mean())) < 5 * float(risks.std()) / math.sqrt(len(w)) + 1e-12


def posterior_of(block):
    return GaussianPosterior(blocks=(block,), variances={"fc1": 0.1}, basis="any")


def test_variances_along_eigenvectors():
    """In the posterior's own basis they are its variances; of equal ones nothing changes; else they are diagonals of A S Aᵀ."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(4, 3))
    model = model.double()
    x, y = torch.randn(30, 4, generator=generator).double(), torch.arange(30) % 3
    problem = Problem(model, nn.CrossEntropyLoss(), (x, y))
    factors = kronecker_factors(problem, "fc1", sharing="expand")["fc1"]
    (tau, a), (gamma, b) = torch.linalg.eigh(factors.output), torch.linalg.eigh(factors.input)
    log_std = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    plain = Block("fc1.weight", "fc1", (3, 4), torch.zeros_like(log_std), log_std, torch.zeros_like(log_std))

    values, own = along_eigenvectors(problem, posterior_of(plain.turned(a, b)))
    torch.testing.assert_close(own, (2 * log_std).exp().flatten())
    torch.testing.assert_close(values, torch.outer(tau.clamp(min=0), gamma).flatten())
    _, found = along_eigenvectors(problem, posterior_of(plain))
    axes = torch.kron(a, b)
    torch.testing.assert_close(found, (axes.T @ torch.diag((2 * log_std).exp().flatten()) @ axes).diagonal())


def test_printed_rows():
    assert sum(len(methods) for methods in PRINTED_ROWS.values()) == 36
    row = recomputed("T-600", "ITER")
    assert abs(row["bound"] - 0.1198) < 1e-4
    assert round(row["j"]) == 28
    assert abs(float(kl_inverse(row["drawn"], math.log(200) / 50_000)) - row["error"]) < 1e-9
    assert recomputed("T-300^2", "BASE")["inside"] is False
    assert round(error_behind(0.02347), 4) == 0.0213


def test_the_rotated_quadratic():
    hessian = torch.tensor(HESSIAN, dtype=torch.float64)
    along, _, variances = best_variances(torch.linalg.eigvalsh(hessian))
    assert abs(along - 0.108365) < 1e-6
    assert abs(best_variances(hessian.diagonal())[0] - 0.110218) < 1e-6
    torch.testing.assert_close(variances, torch.tensor([0.004310, 0.000247]).double(), atol=1e-6, rtol=0)


def test_two_halves_of_the_classes():
    digits = load("digits")
    halves = in_halves(digits)
    assert torch.equal(halves.y_train, (digits.y_train > 4).long())
    assert len(halves.classes) == 2


def test_networks_before_training_and_their_data():
    parts = data_of(DIGITS, 0)
    model = untrained(DIGITS, parts.x, 0)
    weights = [p for p in model.parameters() if p.ndim > 1]
    assert all(float(p.detach().abs().max()) <= 0.08 for p in weights)
    assert all(not p.any() for p in model.parameters() if p.ndim == 1)
    assert abs(float(weights[0].detach().std()) - 0.04 * 0.88) < 0.003  # cut off at two deviations
    assert torch.equal(untrained(DIGITS, parts.x, 0).fc1.weight, model.fc1.weight)
    random = data_of(SYNTHETIC.but(samples=400, labels="random"), 0)
    assert torch.equal(random.x, data_of(SYNTHETIC.but(samples=400), 0).x)
    assert 0.4 < float(random.y.double().mean()) < 0.6
    assert len(random.x_new) == 5000
    assert float(prototypes(100, 0)[0].min()) >= 0
