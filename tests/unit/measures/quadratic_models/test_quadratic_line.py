"""Quadratic models on points of a line: two sign classes are two examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.measures.quadratic_models.quadratic_starts import draw
from theodolite.data.generators import mixture_1d
from theodolite.measures.quadratic_models import (
    GatedBilinear,
    class_eigenvalues,
    class_orbit,
    critical_rate,
    descend,
    half_sum_rate,
    sign_classes,
)

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
