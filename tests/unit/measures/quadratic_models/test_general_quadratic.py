"""General quadratic models, the conventions of the loss, and what happens along the top eigenvector."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from tests.unit.measures.quadratic_models.quadratic_starts import Y, draw, inputs, orbits, words
from theodolite.measures.quadratic_models import (
    GatedBilinear,
    GeneralQuadratic,
    Orbit,
    critical_rate,
    half_sum_rate,
    pure_quadratic,
    quadratic_step,
    top_direction,
    unit_sigma,
)

# The general quadratic model


def general(n: int, p: int, gamma: float, seed: int = 0) -> tuple[GeneralQuadratic, Tensor, Tensor]:
    """A random model on n examples, given by their numbers."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, p, generator=generator, dtype=torch.float64)
    sigma = torch.randn(n, p, p, generator=generator, dtype=torch.float64)
    sigma = sigma + sigma.mT
    w = torch.randn(p, generator=generator, dtype=torch.float64)
    model = GeneralQuadratic(w, lambda i: phi[i], lambda i, z: sigma[i] @ z, gamma)
    return model, torch.arange(n), torch.randn(n, generator=generator, dtype=torch.float64)


def test_check_04_the_step_of_a_general_model_and_the_printed_one():
    model, x, y = general(6, 30, gamma=0.05)
    rate = 0.01
    J, residual = model.jacobian(x), model(x).detach() - y
    K = J @ J.T
    step = model.step(x, y, rate)
    G = model.gamma * model.product(x, residual @ J)
    printed = K - 0.25 * rate * (4 * G @ J.T - rate * G @ G.T)
    grad = torch.autograd.grad(0.5 * (model(x) - y).square().sum(), model.w)[0]
    model.w.data -= rate * grad
    after = model.jacobian(x)
    assert (model(x).detach() - y - step.residual).norm() < 1e-10 * residual.norm()
    assert (after @ after.T - step.kernel).norm() < 1e-10 * K.norm()
    assert (after - J + rate * G).norm() < 1e-10 * J.norm()
    assert (after @ after.T - printed).norm() > 1e-3 * K.norm()  # (3.16) as printed does not hold
    again = quadratic_step(residual, J, G, rate)
    assert torch.equal(again.kernel, step.kernel)


def diagonal(seed: int, gamma: float, p: int = 100) -> tuple[GeneralQuadratic, Tensor, float]:
    """The model of Figure B.4: φ a unit vector, Σ = diag(±1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, p, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, (p,), generator=generator).double() * 2 - 1
    w = torch.randn(p, generator=generator, dtype=torch.float64)
    phi = x / x.norm()
    return (
        GeneralQuadratic(w, lambda x: x, lambda x, z: (signs * z).expand(len(x), -1), gamma),
        phi,
        float(phi[0] @ (signs * phi[0])),
    )


def scalar_runs(gamma: float, rate: float, seeds: int = 20, steps: int = 1000) -> Orbit:
    found = [diagonal(seed, gamma) for seed in range(seeds)]
    g = torch.stack([model(x)[0] for model, x, _ in found]).detach()
    kernel = torch.stack([model.jacobian(x)[0].square().sum() for model, x, _ in found])
    c0 = torch.tensor([c for _, _, c in found], dtype=torch.float64)
    return unit_sigma(g, kernel, Y, c0, gamma, rate, steps)


def test_unit_sigma_is_descent_on_the_model():
    model, x, c0 = diagonal(0, gamma=0.05)
    y = torch.tensor([Y], dtype=torch.float64)
    kernel = model.jacobian(x)[0].square().sum()
    scalar = unit_sigma(model(x).detach()[0], kernel, Y, c0, 0.05, 1.3, 30)
    for step in range(30):
        assert float(model(x).detach()) == pytest.approx(float(scalar.output[step, 0]), rel=1e-9)
        assert float(model.jacobian(x).square().sum()) == pytest.approx(float(scalar.kernel_norm[step]), rel=1e-9)
        grad = torch.autograd.grad(0.5 * (model(x) - y).square().sum(), model.w)[0]
        model.w.data -= 1.3 * grad


@pytest.mark.parametrize("gamma", [1e-2, 1e-3, 1e-4])
def test_check_13_general_models_catapult(gamma):
    orbit = scalar_runs(gamma, 2.8)
    assert (orbit.loss[-1] < 1e-10).all()
    assert words(orbit) == ["catapult"] * 20
    assert float(orbit.loss.amax(0).median()) * gamma**2 == pytest.approx(0.032, rel=0.25)
    assert float(orbit.kernel_norm[-1].median()) == pytest.approx(0.26, abs=0.05)
    assert words(scalar_runs(gamma, 4.2)) == ["divergent"] * 20
    peaks = [float(scalar_runs(gamma, rate).loss.amax(0).median()) for rate in (2.2, 2.5, 2.8, 3.2, 3.6)]
    assert peaks == sorted(set(peaks))


def test_two_layer_linear_networks_are_pure_quadratics():
    m, d = 60, 4
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(m, d, generator=generator, dtype=torch.float64, requires_grad=True)
    v = torch.randn(m, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randn(d, generator=generator, dtype=torch.float64)

    def kernel() -> Tensor:
        return (v.square().sum() * x.square().sum() + (u @ x).square().sum()).detach() / m

    rate = 2.6 / kernel()
    scalar = pure_quadratic((v @ u @ x).detach() / m**0.5, kernel(), m**-0.5, float(x.norm()), rate, 40)
    for step in range(40):
        f = v @ u @ x / m**0.5
        assert float(f.detach()) == pytest.approx(float(scalar.output[step, 0]), rel=1e-8)
        assert float(kernel()) == pytest.approx(float(scalar.kernel_norm[step]), rel=1e-8)
        for p, grad in zip((u, v), torch.autograd.grad(0.5 * f.square(), (u, v)), strict=True):
            p.data -= rate * grad
    assert th.classify_run(scalar.loss.tolist(), kernel=scalar.kernel_norm.tolist()) == "catapult"


# Conventions and the top eigenvector


@pytest.mark.parametrize("ratio", [0.7, 1.3])
def test_check_18_conventions_describe_one_trajectory(ratio):
    x, y = inputs(6, 3)
    u, v = draw(200, 3)
    top = float(torch.linalg.eigvalsh(GatedBilinear(u[0], v[0]).kernel(x))[-1])
    losses = {
        "half sum": lambda f, t: 0.5 * (f - t).square().sum(),
        "mean": nn.MSELoss(),
        "half mean": lambda f, t: 0.5 * (f - t).square().mean(),
    }
    ends = []
    for convention, loss in losses.items():
        model = GatedBilinear(u[0], v[0])
        rate = ratio * critical_rate(top, convention, 6)
        th.train(model, loss, (x, y), torch.optim.SGD(model.parameters(), lr=rate), steps=50)
        assert half_sum_rate(rate, convention, 6) == pytest.approx(ratio * 2 / top, rel=1e-12)
        ends.append(model(x).detach())
    assert all(torch.allclose(end, ends[0], rtol=1e-10) for end in ends[1:])


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="'mean'"):
        half_sum_rate(0.1, "meen", 3)


def test_top_direction_of_a_quadratic_step_has_its_closed_form():
    model, x, y = general(6, 30, gamma=0.05)
    J, residual = model.jacobian(x), model(x).detach() - y
    G = model.gamma * model.product(x, residual @ J)
    K, rate = J @ J.T, 0.002
    step = model.step(x, y, rate)
    found = top_direction(K, step.kernel, residual, step.residual, rate)
    p = found.vector
    along = p @ residual
    assert float(found.rho_f) == pytest.approx(float(0.5 * rate**2 * p @ G @ J.T @ residual / along), abs=1e-10)
    assert float(found.rho_K) == pytest.approx(float(p @ (2 * rate * G @ J.T - rate**2 * G @ G.T) @ p), rel=1e-6)
    assert float(found.share) == pytest.approx(float(along**2 / residual.square().sum()))


def test_top_direction_is_the_remainder_of_the_recursion_at_one_example():
    orbit = orbits(1000, 2.5, replicas=4, steps=20)
    K, r = orbit.kernel, orbit.residual
    found = top_direction(K[:-1], K[1:], r[:-1], r[1:], orbit.rate)
    assert torch.allclose(found.rho_f, (1 / 1000 * orbit.rate[:, None] ** 2 * r * orbit.output)[:-1, :, 0], atol=1e-7)
    assert torch.allclose(found.rho_K, orbit.kernel_norm[:-1] - orbit.kernel_norm[1:], atol=1e-12)
    loud = orbit.loss[:-1] > 0.3 * orbit.loss.amax(0)
    assert (found.rho_f[loud] > 0).all()
    assert (found.share == 1).all()


def test_top_direction_does_not_divide_by_nothing():
    K = torch.diag(torch.tensor([3.0, 1.0]).double())
    r = torch.tensor([1e-12, 1.0]).double()
    assert math.isnan(float(top_direction(K, K, r, r, 0.1).rho_f))
    zero = torch.zeros(2).double()
    assert math.isnan(float(top_direction(K, K, zero, zero, 0.1).rho_f))
