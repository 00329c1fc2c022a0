"""Quadratic models against closed recursions, autograd and dense matrices; numbers are the checks of the specification."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import theodolite as th
from theodolite.data.generators import mixture_1d
from theodolite.measures.dynamics.quadratic import (
    GatedBilinear,
    GeneralQuadratic,
    Orbit,
    class_eigenvalues,
    class_orbit,
    critical_rate,
    descend,
    displacement,
    gated_kernel,
    gated_output,
    half_sum_rate,
    largest_rate,
    one_example,
    one_example_step,
    pure_quadratic,
    quadratic_step,
    reduced_step,
    sign_classes,
    top_direction,
    unit_sigma,
)
from theodolite.measures.dynamics.quadratic.gated import gates

Y = 1.0


def draw(m: int, d: int = 1, replicas: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of (3.9): u (replicas, m, d) normal, v (replicas, m) signs."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(replicas, m, d, generator=generator, dtype=torch.float64)
    return u, torch.randint(0, 2, (replicas, m), generator=generator).double() * 2 - 1


@functools.cache
def start(m: int, replicas: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """First output and kernel of networks at one example with ‖x‖² = d (only u·x/‖x‖ matters, so d = 1)."""
    u, v = draw(m, 1, replicas, seed)
    x = torch.ones(1, 1, dtype=torch.float64)
    gate = gates(u, x)
    return gated_output(u, v, gate, x)[:, 0], gated_kernel(u, v, gate, x)[:, 0, 0]


def orbits(m: int, ratio: float, replicas: int = 20, steps: int = 500, seed: int = 0) -> Orbit:
    g, kernel = start(m, replicas, seed)
    return one_example(g, kernel, Y, 1 / m, ratio / kernel, steps)


def words(orbit: Orbit) -> list[str]:
    runs = zip(orbit.loss.T.tolist(), orbit.kernel_norm.T.tolist(), strict=True)
    return [th.classify_run(loss, kernel=kernel, quadratic=True) for loss, kernel in runs]


def inputs(n: int, d: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64), torch.randn(n, generator=generator, dtype=torch.float64)


def printed_form(u: Tensor, v: Tensor, u0: Tensor, v0: Tensor, x: Tensor) -> Tensor:
    """(3.10) as it stands: constant, two linear terms, one bilinear term; x (n, d)."""
    m, d = u.shape
    scale = (m * d) ** -0.5
    gate = (u0 @ x.T >= 0).double()  # (m, n)
    moved = (u - u0) @ x.T * gate
    constant = m**-0.5 * v0 @ torch.relu(u0 @ x.T / d**0.5)
    return constant + scale * (v0 @ moved + (v - v0) @ torch.relu(u0 @ x.T) + (v - v0) @ moved)


# The gated network


def test_check_01_the_gated_form_is_the_printed_one():
    (u0, v0), (u, v) = draw(50, 4, seed=1), draw(50, 4, seed=2)
    x, _ = inputs(7, 4)
    model = GatedBilinear(u[0], v[0] * 1.7, u0=u0[0])
    expected = printed_form(u[0], v[0] * 1.7, u0[0], v0[0], x)
    assert torch.allclose(model(x), expected, rtol=1e-12, atol=1e-12)


def test_at_its_start_the_gated_form_is_the_network():
    net = th.models.ntk_fcn(4, 30, 2, init="ntk_sign", seed=0).double()
    x, _ = inputs(6, 4)
    model = GatedBilinear(net.fc1.weight, net.fc2.weight[0])
    assert torch.allclose(model(x), net(x)[:, 0], rtol=1e-12)
    grads = [torch.autograd.grad(f(x).sum(), list(f.parameters())) for f in (model, net)]
    assert all(torch.allclose(a.flatten(), b.flatten(), rtol=1e-12) for a, b in zip(*grads, strict=True))


def test_the_kernel_is_the_gram_matrix_of_gradients():
    (u0, _), (u, v) = draw(20, 3, seed=1), draw(20, 3, seed=2)
    x, _ = inputs(5, 3)
    model = GatedBilinear(u[0], v[0], u0=u0[0])
    rows = [torch.autograd.grad(output, [model.u, model.v], retain_graph=True) for output in model(x)]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    assert torch.allclose(model.kernel(x), jacobian @ jacobian.T, rtol=1e-12)


def test_bad_weights_are_refused():
    with pytest.raises(ValueError, match=r"\(m, d\)"):
        GatedBilinear(torch.ones(3, 2), torch.ones(2))


@pytest.mark.parametrize("frozen", [True, False])
def test_vectorised_descent_is_autograd_descent(frozen):
    u, v = draw(40, 3, replicas=2, seed=3)
    x, y = inputs(6, 3)
    rates = torch.tensor([0.05, 0.2], dtype=torch.float64)
    found = descend(u, v, x, y, rates, 12, frozen=frozen)
    for run in range(2):
        model: nn.Module = GatedBilinear(u[run], v[run])
        if not frozen:
            model = th.models.ntk_fcn(3, 40, 2, seed=0).double()
            with torch.no_grad():
                model.fc1.weight.copy_(u[run])
                model.fc2.weight.copy_(v[run][None])
        optimizer = torch.optim.SGD(model.parameters(), lr=float(rates[run]))
        losses = th.train(model, lambda f, t: 0.5 * (f.flatten() - t).square().sum(), (x, y), optimizer, steps=13).loss
        assert torch.allclose(found.loss[:, run], torch.tensor(losses, dtype=torch.float64), rtol=1e-9)
        assert found.kernel_norm.shape == (13, 2)


def test_one_start_runs_at_many_rates_and_stops_when_done():
    u, v = draw(30, 2)
    x, y = inputs(1, 2)
    rates = torch.tensor([0.1, 0.2, 100.0], dtype=torch.float64)
    found = descend(u[0], v[0], x, y, rates, 2000, until=1e-12)
    assert found.u.shape == (3, 30, 2)
    assert len(found.loss) < 2001
    assert (found.loss[-1, :2] <= 1e-12).all()
    assert not found.loss[-1, 2].isfinite()


# One example


def test_check_03_descent_follows_the_recursion():
    u, v = draw(1000, 5, replicas=3, seed=0)
    x = inputs(1, 5)[0]
    y = torch.tensor([Y], dtype=torch.float64)
    gate = gates(u, x)
    kernel = gated_kernel(u, v, gate, x)[:, 0, 0]
    direct = descend(u, v, x, y, 2.5 / kernel, 200)
    c = float(x.square().sum()) / (1000 * 5)
    scalar = one_example(gated_output(u, v, gate, x)[:, 0], kernel, Y, c, 2.5 / kernel, 200)
    large = direct.loss > 1e-8 * direct.loss[0]
    assert large.sum() > 40
    assert words(direct) == ["catapult"] * 3
    gap = ((direct.residual - scalar.residual)[..., 0] / scalar.residual[..., 0]).abs()[large]
    assert gap.max() < 1e-6
    assert ((direct.kernel_norm - scalar.kernel_norm) / scalar.kernel_norm).abs().max() < 1e-6
    g, lam = one_example_step(direct.output[:-1, :, 0], direct.kernel_norm[:-1], Y, c, direct.rate)
    assert torch.allclose(g, direct.output[1:, :, 0], rtol=1e-10)
    assert torch.allclose(lam, direct.kernel_norm[1:], rtol=1e-10)


def test_reduced_variables_are_the_same_map():
    g, kernel = start(500, 5)
    rate, c = 2.6 / kernel, 1 / 500
    after_g, after_kernel = one_example_step(g, kernel, Y, c, rate)
    u, w = c * rate**2 * (g - Y) ** 2, c * rate**2 * (g - Y) * Y
    u_next, v_next = reduced_step(u, rate * kernel, w)
    assert torch.allclose(u_next, c * rate**2 * (after_g - Y) ** 2, rtol=1e-12)
    assert torch.allclose(v_next, rate * after_kernel, rtol=1e-12)


def test_displacement_is_the_way_of_the_weights():
    u, v = draw(300, 4, replicas=3, seed=2)
    x = inputs(1, 4)[0]
    y = torch.tensor([Y], dtype=torch.float64)
    rate = 2.5 / gated_kernel(u, v, gates(u, x), x)[:, 0, 0]
    direct = descend(u, v, x, y, rate, 40)
    moved = ((direct.u - u).square().sum((-1, -2)) + (direct.v - v).square().sum(-1)).sqrt()
    assert torch.allclose(displacement(direct, float(x.square().sum()) / (300 * 4))[-1], moved, rtol=1e-8)


def test_stable_equilibria_have_eigenvalues_1_and_1_minus_v_squared():
    for v_star in (0.3, 1.0, 1.9):
        point = (torch.tensor(0.0).double(), torch.tensor(v_star).double())
        jacobian = torch.tensor(torch.autograd.functional.jacobian(reduced_step, point), dtype=torch.float64)
        assert sorted(torch.linalg.eigvals(jacobian).real.tolist()) == pytest.approx(sorted([(1 - v_star) ** 2, 1.0]))


@given(
    u=st.floats(1e-8, 4.0), v=st.floats(0.0, 3.99), sign=st.sampled_from([-1.0, 1.0]), share=st.floats(0, 1), c=st.floats(0.1, 5)
)
def test_above_the_corrected_threshold_the_kernel_falls(u, v, sign, share, c):
    m = 1000.0
    if u > 16 * c**2 / (m * (4 - v) ** 2):
        w = sign * share * c * math.sqrt(u / m)
        _, after = reduced_step(torch.tensor(u).double(), torch.tensor(v).double(), w)
        assert float(after) < v


@pytest.mark.parametrize("ratio", [1.8, 2.2, 2.5, 3.0, 3.5, 3.9, 4.2])
@pytest.mark.parametrize("m", [1000, 10_000, 100_000])
def test_check_05_regimes(m, ratio):
    orbit = orbits(m, ratio)
    expected = "monotone" if ratio < 2 else "catapult" if ratio < 4 else "divergent"
    assert words(orbit) == [expected] * 20
    if expected == "divergent":
        assert (orbit.loss.isfinite().sum(0) < 25).all()


@pytest.mark.parametrize("m", [1000, 10_000, 100_000])
@pytest.mark.parametrize(
    ("ratio", "low", "high"),  # 2.5 is check 6; the others are the table of the specification, with the same 20 %
    [
        (2.5, 0.8 * 0.0134, 1.2 * 0.0134),
        (3.0, 0.8 * 0.043, 1.2 * 0.045),
        (3.5, 0.8 * 0.066, 1.2 * 0.080),
        (3.9, 0.8 * 0.087, 1.2 * 0.101),
    ],
)
def test_check_06_the_peak_is_proportional_to_the_width(m, ratio, low, high):
    peak = float(orbits(m, ratio).loss.amax(0).median()) / m
    assert low <= peak <= high
    assert 0.025 * 0.8 <= peak / (ratio - 2) ** 2 <= 0.065 * 1.2


@pytest.mark.parametrize(("m", "peak"), [(1000, 0.0031), (10_000, 0.0024), (100_000, 0.0024)])
def test_check_06_near_the_edge_the_peak_needs_width(m, peak):
    """At 1000 units the first loss is a third of the peak and lifts it: the median of 1000 starts is 0.0031 m."""
    assert float(orbits(m, 2.2).loss.amax(0).median()) / m == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize("m", [10_000, 100_000])
@pytest.mark.parametrize(("ratio", "low", "high"), [(2.2, 1.72, 1.82), (2.5, 1.23, 1.33), (3.0, 0.17, 0.26)])
def test_check_07_the_kernel_at_the_end(m, ratio, low, high):
    orbit = orbits(m, ratio)
    end = orbit.rate * orbit.kernel_norm[-1]
    assert low <= float(end.median()) <= high
    assert ((end > 0) & (end < 2)).all()


def test_check_07_after_a_catapult_the_rate_is_subcritical():
    for ratio in (2.2, 2.5, 3.0, 3.5, 3.9):
        orbit = orbits(1000, ratio)
        end = orbit.rate * orbit.kernel_norm[-1]
        assert ((end > 0) & (end < 2)).all()


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_check_08_subcritical_drift_falls_like_1_over_m(ratio):
    widths = [100, 1000, 10_000, 100_000]
    drifts = []
    for m in widths:
        kernels = orbits(m, ratio, replicas=100, steps=200).kernel_norm
        drifts.append(float((kernels - kernels[0]).abs().amax(0).median()))
    slope = th.plots.power_law(widths, drifts).exponent
    assert slope == pytest.approx(-1.0, abs=0.1)


@pytest.mark.parametrize("m", [1000, 10_000, 100_000])
def test_check_09_the_window_does_not_shrink(m):
    g, kernel = start(m, replicas=3)

    def converges(ratio: float) -> bool:
        orbit = one_example(g, kernel, Y, 1 / m, ratio / kernel, 5000, until=1e-12)
        return bool((orbit.loss[-1] <= 1e-6 * orbit.loss[0]).all())

    assert 3.90 <= largest_rate(converges, 2.05, 16.0, tol=1e-3) <= 4.05


def test_largest_rate_says_what_is_wrong():
    with pytest.raises(ValueError, match="lower rate"):
        largest_rate(lambda rate: False, 1.0, 2.0)
    with pytest.raises(ValueError, match="higher rate"):
        largest_rate(lambda rate: True, 1.0, 2.0)
    with pytest.raises(ValueError, match="lower first"):
        largest_rate(lambda rate: True, 2.0, 1.0)
    assert largest_rate(lambda rate: rate < 7.0, 1.0, 2.0) == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize(("delta", "peak", "end"), [(0.1, 0.54, 1.892), (0.2, 0.57, 1.769), (0.5, 0.68, 1.282)])
def test_the_map_without_a_target(delta, peak, end):
    """Peak of u over δ² and end of v for y = 0, as computed for the specification (u starts near 0)."""
    u, v = torch.tensor(1e-8).double(), torch.tensor(2 + delta).double()
    seen = [u]
    for _ in range(2000):
        u, v = reduced_step(u, v)
        seen.append(u)
    assert float(max(seen)) / delta**2 == pytest.approx(peak, rel=0.05)
    assert float(v) == pytest.approx(end, abs=0.01)


@pytest.mark.parametrize(("m", "least", "most"), [(10, 0.71, 0.81), (50, 0.97, 1.0), (200, 1.0, 1.0)])
def test_check_12_scale_of_the_first_kernel(m, least, most):
    _, kernel = start(m, replicas=2000)
    share = float(((kernel >= 0.5) & (kernel <= 1.5)).double().mean())
    assert least <= share <= most
    assert float(kernel.mean()) == pytest.approx(1.0, abs=0.05)


# Several examples on a line


def line(seed: int = 0, n: int = 128) -> tuple[Tensor, Tensor]:
    x, y = mixture_1d(n, seed=seed, dtype=torch.float64)
    return x, y


def test_check_11_two_classes_are_two_examples():
    x, y = line()
    u, v = draw(5000, 1)
    classes = sign_classes(x, y)
    model = GatedBilinear(u[0], v[0])
    kernels = class_eigenvalues(u, v, u, classes)[0]
    top = float(kernels.max())
    rate = 1.3 * 2 / top
    orbit, _ = class_orbit(u[0], v[0], classes, rate, 100)
    rests, outputs, eigenvalues = [], [], []
    weights = list(model.parameters())
    for _ in range(101):
        output = model(x)
        residual = output.detach() - y
        outputs.append(classes.project(output.detach()))
        eigenvalues.append(class_eigenvalues(model.u.detach()[None], model.v.detach()[None], u, classes)[0])
        rests.append(classes.rest(residual))
        for p, grad in zip(weights, torch.autograd.grad(0.5 * (output - y).square().sum(), weights), strict=True):
            p.data -= rate * grad
    assert torch.allclose(torch.stack(outputs), orbit.output[..., 0], rtol=1e-8)
    assert torch.allclose(torch.stack(eigenvalues), orbit.kernel_norm, rtol=1e-8)
    assert torch.allclose(torch.stack(rests), classes.floor.expand(101), rtol=1e-10)
    residual = model(x).detach() - y
    assert float(0.5 * residual.square().sum()) == pytest.approx(float(orbit.loss[-1].sum() + classes.floor), rel=1e-6)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_two_effective_examples_stand_for_all_points(frozen):
    """Also for the network itself, whose gates move."""
    x, y = line(n=20)
    u, v = draw(200, 1)
    classes = sign_classes(x, y)
    rate = 1.4 * 2 / float(class_eigenvalues(u, v, u, classes).max())
    whole = descend(u[0], v[0], x, y, rate, 60, frozen=frozen)
    pair = descend(u[0], v[0], classes.inputs, classes.targets, rate, 60, frozen=frozen)
    assert torch.allclose(whole.loss, pair.loss + classes.floor, rtol=1e-8)
    assert torch.allclose(whole.kernel_norm, pair.kernel_norm, rtol=1e-8)


def test_the_kernel_has_rank_two_and_fixed_eigenvectors():
    x, y = line(n=16)
    u, v = draw(300, 1)
    classes = sign_classes(x, y)
    rate = 1.3 * 2 / float(class_eigenvalues(u, v, u, classes).max())
    orbit = descend(u[0], v[0], x, y, rate, 40)
    p = (classes.directions / classes.norms[:, None]).T  # (n, 2)
    values = (p * (orbit.kernel @ p)).sum(-2)  # (steps, 2)
    assert ((orbit.kernel @ p - values[:, None, :] * p).abs().amax((1, 2)) < 1e-10 * values.amax(-1)).all()
    assert torch.linalg.eigvalsh(orbit.kernel)[:, :-2].abs().max() < 1e-10 * values.max()


def test_check_10_thresholds_of_figure_3_3():
    """Convention "mean"; the seed is the first whose two thresholds are at least 3 % apart."""
    n = 128
    for seed in range(20):
        x, y = line(seed)
        u, v = draw(5000, 1, seed=seed)
        classes = sign_classes(x, y)
        first = class_eigenvalues(u, v, u, classes)[0]
        upper, lower = float(first.max()), float(first.min())
        if upper / lower > 1.03:
            break
    edges = [critical_rate(value, "mean", n) for value in (upper, lower)]
    assert 0.33 <= edges[0] <= 0.46
    order = first.argsort(descending=True)

    def end(rate: float) -> Tensor:
        orbit, _ = class_orbit(u[0], v[0], classes, half_sum_rate(rate, "mean", n), 3000)
        return (orbit.kernel_norm[-1] / orbit.kernel_norm[0])[order]

    between = end(0.5 * sum(edges))
    assert between[0] < 0.995
    assert abs(between[1] - 1) < 0.003
    assert (end(1.2 * edges[1]) < 0.9).all()
    assert not end(2.1 * edges[0]).isfinite().all()


def test_one_sign_only_is_refused():
    with pytest.raises(ValueError, match="both signs"):
        sign_classes(torch.ones(3, 1), torch.ones(3))


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
