"""Descent on bounds: slopes against autograd, optima in closed form, the methods of the source."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.bounds import source_certificate, source_posterior
from theodolite.measures.bounds.blocks import blocks_in_basis, layer_factors, make_blocks, weight_product_bases
from theodolite.measures.bounds.fit import Fit, Settings
from theodolite.measures.bounds.noisy_network import NoisyNetwork, Samples
from theodolite.measures.bounds.source_method import LAST_RHO, source_budget

from .cases import mlp, prototypes, state, trained


def problem(n: int = 300, *sizes: int, double: bool = False) -> tuple[th.Problem, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    data, model = prototypes(n, 1), mlp(*(sizes or (40, 12, 2)))
    if double:
        model, data = model.double(), (data[0].double(), data[1])
    start = trained(model, data, 4)
    return th.Problem(model, nn.CrossEntropyLoss(), data), start


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_check_06_slopes_of_the_complexity():
    w, spread, rho, n, size = leaf(0.3, -0.2, 0.5), leaf(-2.0, -1.0, -3.0), leaf(-2.5), 1000, 3
    start = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    budget = source_budget([w], [start], [spread], rho.squeeze(), n, 0.025)
    found = torch.autograd.grad(budget, [w, spread, rho])
    variance, s, gap = (2 * rho).exp().detach(), (2 * spread).exp().detach(), (w - start).detach()
    by_rho = size - (s.sum() + gap.square().sum()) / variance - 4 / (math.log(0.1) - 2 * rho.detach())
    for slope, expected in zip(found, (gap / variance, s / variance - 1, by_rho), strict=True):
        torch.testing.assert_close(slope * (n - 1), expected, rtol=1e-8, atol=0)


def optimum(h: torch.Tensor) -> tuple[float, torch.Tensor, float]:
    """Objective, variances and complexity at the minimum of ½ Σ h s + √(B/2) with w = w₀, λ = 0.05, n = 1000."""
    rho, spread = torch.tensor(0.5 * math.log(0.05), dtype=torch.float64), torch.full_like(h, -3.0).requires_grad_()
    descent = torch.optim.LBFGS(
        [spread], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )
    zero = torch.zeros_like(h)

    def value() -> torch.Tensor:
        return 0.5 * (h * (2 * spread).exp()).sum() + (source_budget([zero], [zero], [spread], rho, 1000, 0.025) / 2).sqrt()

    def closure() -> torch.Tensor:
        descent.zero_grad()
        found = value()
        found.backward()
        return found

    descent.step(closure)
    variances = (2 * spread).exp().detach()
    return float(value().detach()), variances, float(value().detach()) - 0.5 * float((h * variances).sum())


@pytest.mark.parametrize(
    ("h", "value", "s"), [((0.5, 9.5), 0.108365, (0.004310, 0.000247)), ((5.0, 5.0), 0.110218, (0.0004595, 0.0004595))]
)
def test_checks_09_and_10_the_optimum_of_a_quadratic(h, value, s):
    h = torch.tensor(h, dtype=torch.float64)
    found, variances, complexity = optimum(h)
    assert found == pytest.approx(value, abs=1e-5)
    assert variances.tolist() == pytest.approx(s, rel=2e-3)
    torch.testing.assert_close(variances, 1 / (20 + 4 * complexity * 999 * h), rtol=0.02, atol=0)


def test_the_slopes_that_are_written_down_are_those_of_the_divergence():
    made, start = problem(double=True)
    net = NoisyNetwork(made, Samples(made), make_blocks(made, start))
    fit = Fit(net, list(net.blocks.values()), Settings(epochs=1), 0)
    by_nat = fit._slopes()[1]
    for block in fit.blocks:
        mean, spread = (t.detach().clone().requires_grad_() for t in (fit.means[block.name], fit.spreads[block.name]))
        scale = fit.scales[block.group]
        nats = 0.5 * (((2 * spread).exp() + (mean - block.start).square()) / scale).sum() - spread.sum()
        expected = torch.autograd.grad(by_nat * nats, [mean, spread])
        fit.means[block.name].grad = torch.zeros_like(mean)
        variance = (2 * fit.spreads[block.name]).exp().requires_grad_()
        variance.grad = torch.zeros_like(variance)
        fit._add_divergence(block, variance, by_nat)
        torch.testing.assert_close(fit.means[block.name].grad, expected[0], rtol=1e-10, atol=1e-14 * by_nat / scale)
        torch.testing.assert_close(fit.spreads[block.name].grad, expected[1], rtol=1e-10, atol=1e-14 * by_nat)


def test_a_fit_lowers_its_objective_and_new_bases_change_no_network():
    made, start = problem()
    net = NoisyNetwork(made, Samples(made), make_blocks(made, start))
    fit = Fit(net, list(net.blocks.values()), Settings(epochs=12, batch_size=100, every=4), 0)
    fit.run()
    assert fit.trace[-1]["objective"] < fit.trace[0]["objective"]
    before = fit.posterior().means()
    fit._refresh()
    for name, weight in fit.posterior().means().items():
        torch.testing.assert_close(weight, before[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("basis", ["isotropic", "low-rank"])
def test_coordinates_share_a_spread_where_the_basis_says_so(basis):
    made, start = problem()
    net = NoisyNetwork(made, Samples(made), make_blocks(made, start))
    fit = Fit(net, list(net.blocks.values()), Settings(basis=basis, epochs=2, batch_size=100, own=7), 0)
    fit.run()
    block = fit.posterior().blocks[0]
    assert len(block.log_std.unique()) == (1 if basis == "isotropic" else 8)


# The methods of the source


def test_check_08_with_identity_bases_iter_is_base_step_by_step(monkeypatch):
    made, start = problem(200, double=True)

    def identity(problem, blocks, *rest):
        return [b.turned(*(torch.eye(k, dtype=b.mean.dtype) for k in b.mean.shape)) if b.mean.ndim == 2 else b for b in blocks]

    monkeypatch.setattr("theodolite.measures.bounds.source_method.blocks_in_basis", identity)
    settings = {"epochs": 4, "batch_size": 50, "every": 1, "decays": (2,)}
    base, turned = (source_posterior(made, start, name, **settings) for name in ("BASE", "ITER"))
    assert turned.rho == pytest.approx(base.rho, abs=1e-12)
    for one, other in zip(base.posterior.blocks, turned.posterior.blocks, strict=True):
        torch.testing.assert_close(other.mean, one.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(other.log_std, one.log_std, rtol=0, atol=1e-12)


def test_check_16_bases_from_products_of_weights():
    made, _ = problem(300, 40, 12, 9, 3)
    factors = layer_factors(made, 300)
    before = {name: torch.linalg.qr(torch.randn(len(f.output), len(f.output)).double())[0] for name, f in factors.items()}
    found = weight_product_bases(made, factors, before)
    weights = [layer.weight.detach().double() for layer in made.model if isinstance(layer, nn.Linear)]
    product = weights[2] @ weights[1]
    centred = torch.eye(3).double() - 1 / 3
    range_ = torch.linalg.qr((centred @ product).T)[0][:, :2]
    tau, left = found["0"]
    left = left.double()
    assert float((left.T @ left - torch.eye(12)).norm()) < 1e-6
    assert float(torch.linalg.matrix_norm(range_.T @ left[:, :2], 2)) == pytest.approx(1.0, abs=1e-8)
    assert float((range_.T @ left[:, :2]).square().sum()) / 2 == pytest.approx(1.0, abs=1e-6)
    assert float(tau[1]) > 0
    assert not tau[2:].any()  # three classes know two directions
    again = weight_product_bases(made, factors, {"0": left, **{k: v for k, v in before.items() if k != "0"}})["0"][1].double()
    torch.testing.assert_close((again.T @ left).abs(), torch.eye(12).double(), rtol=0, atol=1e-5)  # the completion does not jump


def test_checks_11_and_17_the_source_keeps_its_limits_and_the_weights_before_training():
    made, start = problem()
    before = {name: value.clone() for name, value in start.items()}
    weights = state(made.model)
    fit = source_posterior(made, start, "ITER.M", epochs=3, batch_size=50, every=1, rate=0.05)
    assert fit.rho <= LAST_RHO
    certificate = source_certificate(made, fit, networks=20)
    assert certificate.j >= 1
    assert certificate.bound >= certificate.snn_error >= certificate.drawn
    assert all(torch.equal(start[name], value) for name, value in before.items())
    assert all(torch.equal(weights[name], value) for name, value in state(made.model).items())


def test_ever_rarer_bases_begin_like_iter():
    made, start = problem(150)
    one, other = (
        source_posterior(made, start, name, epochs=2, batch_size=50, every=1, decays=()) for name in ("ITER", "ITER(D)")
    )
    assert one.rho == other.rho
    later = source_posterior(made, start, "ITER(D)", epochs=4, batch_size=50, every=1, decays=(2,))
    assert later.rho != one.rho


def test_check_15_flat_variances_come_to_follow_the_curvature():
    """Spearman's correlation of log variance and log eigenvalue, from a flat beginning."""
    torch.manual_seed(0)
    data, model = prototypes(2000, 1), mlp(40, 20, 2)
    start = trained(model, data, 8)
    found = th.pac_bayes_bound(
        th.Problem(model, nn.CrossEntropyLoss(), data),
        start=start,
        init_s="flat",
        epochs=15,
        batch_size=200,
        passes=1,
        progress=False,
    )
    rows = found.posterior.variance_by_eigenvalue("0") if found.posterior.kl() > 0 else []
    h, s = (torch.tensor([row[name] for row in rows]) for name in ("eigenvalue", "variance"))
    ranks = [t.argsort().argsort().double() for t in (h, s)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) < -0.2
    shuffled = torch.stack([ranks[0], ranks[1][torch.randperm(len(s), generator=torch.Generator().manual_seed(0))]])
    assert abs(float(torch.corrcoef(shuffled)[0, 1])) < 0.1


def test_turning_back_and_forth_keeps_the_weights():
    made, start = problem()
    blocks = make_blocks(made, start)
    turned = blocks_in_basis(made, blocks, "kronecker", "iter", {})
    for one, other in zip(blocks, turned, strict=True):
        torch.testing.assert_close(other.parameter(other.mean), one.parameter(one.mean), rtol=1e-4, atol=1e-6)
        assert replace(other, left=None).name == one.name
