"""Generators against the statistics that define them."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist

import pytest
import torch

from theodolite.data import generators as g

ALL = {
    "two_class_images": lambda seed: g.two_class_images(6, 4, seed=seed).x,
    "gaussian_classes": lambda seed: g.gaussian_classes(6, 4, seed=seed).x,
    "gaussian_mixture": lambda seed: g.gaussian_mixture(6, 4, 3, seed=seed).x,
    "mixture_1d": lambda seed: g.mixture_1d(6, seed=seed)[0],
    "rank_k_targets": lambda seed: g.rank_k_targets("rank-2", 6, dim=4, seed=seed).y,
    "planted_dictionary": lambda seed: g.planted_dictionary(6, 4, seed=seed),
    "planted_samples": lambda seed: g.planted_samples(torch.eye(4), 6, 2, seed=seed).signals,
}


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides_and_the_global_state_is_left_alone(name):
    state = torch.get_rng_state()
    a, b, c = ALL[name](1), ALL[name](1), ALL[name](2)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())


def cosines(x):
    unit = torch.nn.functional.normalize(x.flatten(1).double(), dim=1)
    return unit @ unit.T


@pytest.mark.parametrize(("side", "channels", "rho", "a"), [(8, 1, 0.9, 0.2), (8, 3, 0.5, 0.6), (4, 1, 0.0, 1.0)])
def test_two_class_images(side, channels, rho, a):
    x, y, clean = g.two_class_images(400, side, channels, mean_cos=rho, class_frac=a, dtype=torch.float64)
    assert x.shape == (400, channels, side, side)
    torch.testing.assert_close(x.flatten(1).square().mean(1).sqrt(), torch.full((400,), 1.1).double())
    assert torch.equal(y, clean)
    assert float(y.sum()) == 0
    cos = cosines(x)
    same = y[:, None] == y
    off = ~torch.eye(400, dtype=torch.bool)
    assert float(cos[off].mean()) == pytest.approx(rho, abs=0.02)
    assert float(cos[same & off].mean()) == pytest.approx(rho + (1 - rho) * a, abs=0.02)
    assert float(cos[~same].mean()) == pytest.approx(rho - (1 - rho) * a, abs=0.02)


def test_two_class_images_are_smooth_and_labels_may_be_noisy():
    x, y, clean = g.two_class_images(200, 16, label_noise=0.1, mean_cos=0.0, class_frac=0.0)
    neighbours = (x[..., 1:] * x[..., :-1]).mean() / x.square().mean()
    assert float(neighbours) > 0.4  # white noise has 0
    assert int((y != clean).sum()) == 20
    assert set(y.tolist()) == {-1.0, 1.0}


def test_gaussian_classes():
    x, y, u = g.gaussian_classes(20_000, dtype=torch.float64)
    assert x.shape == (20_000, 50)
    assert float(u.norm()) == pytest.approx(1)
    torch.testing.assert_close((x * y[:, None]).mean(0), 1.2 * u, atol=0.035, rtol=0)
    residual = x - 1.2 * y[:, None] * u
    torch.testing.assert_close(residual.T @ residual / len(x), torch.eye(50).double(), atol=0.06, rtol=0)
    best = NormalDist().cdf(-1.2)
    error = float((x @ u * y < 0).double().mean())
    assert error == pytest.approx(best, abs=4 * math.sqrt(best * (1 - best) / 20_000))


@pytest.mark.parametrize("seed", range(4))
def test_gaussian_mixture_is_as_hard_as_it_says(seed):
    x, y, means = g.gaussian_mixture(10_000, seed=seed)
    assert torch.bincount(y).tolist() == [1000] * 10
    assert float((x - means[y]).std()) == pytest.approx(2.4, abs=0.02)
    right = (torch.cdist(x, means).argmin(1) == y).double().mean()  # the best rule
    assert 0.90 <= float(right) <= 0.95


def test_mixture_1d():
    x, y = g.mixture_1d()
    assert x.shape == (128, 1)
    assert int((y > 0).sum()) == 64
    x, y = g.mixture_1d(40_000, center=3.0, std=0.5, dtype=torch.float64)
    own = x[:, 0] * y
    assert float(own.mean()) == pytest.approx(3, abs=0.01)
    assert float(own.std()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "variance", "cosine", "rank"),
    [("rank-2", 1, 0.1414, 2), ("rank-3", 14, 0.1445, 3), ("rank-4", 4, 0.1826, 4), ("full", 1 / 200, 1, 100)],
)
def test_rank_k_targets_have_the_tabulated_constants(name, variance, cosine, rank):
    target = g.rank_k_target(name)
    assert target.variance == pytest.approx(variance, rel=0.01)
    assert float(target.egop.trace() / target.egop.norm() / 10) == pytest.approx(cosine, abs=1e-4)
    assert int(torch.linalg.matrix_rank(target.egop)) == rank
    if name == "rank-3":
        torch.testing.assert_close(torch.linalg.eigvalsh(target.egop)[-3:], torch.tensor([4.0, 10.0, 24.0]).double())


@pytest.mark.parametrize("name", ["rank-2", "rank-3", "rank-4", "full"])
def test_expected_gradient_outer_products_by_sampling(name):
    sample = g.rank_k_targets(name, 200_000, dim=12, dtype=torch.float64)
    x = sample.x.requires_grad_()
    (gradient,) = torch.autograd.grad(sample.target(x).sum(), x)
    egop = gradient.T @ gradient / len(x)
    scale = float(sample.target.egop.abs().max())
    torch.testing.assert_close(egop / scale, sample.target.egop / scale, atol=0.06, rtol=0)
    assert float(sample.clean.var()) == pytest.approx(sample.target.variance, rel=0.06)
    noise = sample.y - sample.clean
    assert float(noise.std()) == pytest.approx(0.1, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.001)


def test_planted_dictionary_and_samples_of_the_experiments():
    atoms = g.planted_dictionary()
    assert atoms.shape == (200, 100)
    assert atoms.dtype == torch.float64
    torch.testing.assert_close(atoms.norm(dim=1), torch.ones(200).double(), atol=1e-12, rtol=0)
    gram = (atoms @ atoms.T).fill_diagonal_(0)
    assert float(gram.std()) == pytest.approx(0.1, rel=0.05)  # 1/√d
    sample = g.planted_samples(atoms)
    assert sample.signals.shape == (1000, 100)
    assert sample.codes.shape == (1000, 200)
    assert torch.equal((sample.codes != 0).sum(1), torch.full((1000,), 5))
    torch.testing.assert_close(sample.codes.norm(dim=1), torch.ones(1000).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(sample.signals, sample.codes @ atoms + sample.noise)
    assert float(sample.noise.square().sum(1).mean()) == pytest.approx(1, rel=0.02)
    used = (sample.codes != 0).double().mean(0)  # each atom in a fortieth of the signals
    assert float((used - 5 / 200).abs().max()) < 4.5 * math.sqrt(0.025 * 0.975 / 1000)


@pytest.mark.parametrize(("learned", "noise", "expected"), [(200, 0.1, 0.5135), (400, 0.1, 0.4426), (1000, 0.01, 0.1488)])
def test_samples_are_as_far_from_the_atoms_as_computed_before(learned, noise, expected):
    """The mean of 1 - max |cosine| to the nearest sample, over the atoms."""
    errors = []
    for seed in range(5):
        atoms = g.planted_dictionary(seed=seed)
        guess = torch.nn.functional.normalize(g.planted_samples(atoms, learned, noise=noise, seed=seed).signals)
        errors.append(float((1 - (atoms @ guess.T).abs().amax(1)).mean()))
    assert sum(errors) / 5 == pytest.approx(expected, abs=0.015)


def test_supports_are_uniform():
    codes = g.planted_samples(torch.eye(4), 12_000, 2).codes
    for i, j in combinations(range(4), 2):
        share = ((codes[:, i] != 0) & (codes[:, j] != 0)).double().mean()
        assert float(share) == pytest.approx(1 / 6, abs=4 * math.sqrt(5 / 36 / 12_000))


@pytest.mark.parametrize("law", ["gaussian", "rademacher", "exponential", "student"])
def test_laws_of_the_codes(law):
    codes = g.planted_samples(torch.eye(3), 60_000, 3, law=law, normalize=False, scale=4.0, noise=0.0).codes / 4
    fourth = float((codes**4).mean())
    if law != "student":  # whose fourth moment is infinite
        assert float(codes.square().mean()) == pytest.approx(1, abs=0.03)
        assert fourth == pytest.approx({"gaussian": 3, "rademacher": 1, "exponential": 6}[law], rel=0.1)
    else:
        assert float(codes.abs().mean()) == pytest.approx(2 / math.pi, abs=0.01)
        assert fourth > 6
    assert bool((codes >= 0).all()) == (law == "exponential")
    unit = g.planted_samples(torch.eye(3), 50, 2, law=law, scale=4.0).codes
    torch.testing.assert_close(unit.norm(dim=1), torch.full((50,), 4.0).double())


def test_one_signed_atom_each():
    atoms = g.planted_dictionary(40, 20)
    sample = g.planted_samples(atoms, 500, 1, law="rademacher", noise=0.05)
    assert set(sample.codes.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert float(sample.noise.std()) == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.two_class_images(0, 8), "n must be a positive integer"),
        (lambda: g.two_class_images(4, 1), "side must be an integer of at least 2"),
        (lambda: g.two_class_images(4, 8, mean_cos=1.2), "mean_cos must be a number from 0 to 1"),
        (lambda: g.two_class_images(4, 8, rms=float("nan")), "rms"),
        (lambda: g.gaussian_mixture(4, within=-1), "within"),
        (lambda: g.mixture_1d(4, std=-1), "std"),
        (lambda: g.rank_k_target("rank-5"), "'rank-2', 'rank-3', 'rank-4', 'full'"),
        (lambda: g.rank_k_target("rank-3", dim=9), "dim must be at least 10"),
        (lambda: g.planted_samples(torch.eye(3), sparsity=4), "sparsity must be at most 3"),
        (lambda: g.planted_samples(torch.ones(3)), "dictionary must be a tensor of 2 dimensions"),
        (lambda: g.planted_samples(torch.eye(3), sparsity=1, law="cauchy"), "'gaussian', 'rademacher'"),
        (lambda: g.planted_samples(torch.eye(3), sparsity=1, noise=-1.0), "noise"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_noisy_labels():
    """AC25: a fifth is drawn anew from all ten classes, so that 18 % change, evenly."""
    labels = torch.arange(10_000) % 10
    noisy = g.noisy_labels(labels, 10, 0.2, seed=3)
    changed = noisy != labels
    assert 0.17 <= float(changed.double().mean()) <= 0.19
    assert torch.equal(labels, torch.arange(10_000) % 10)
    distances = torch.bincount((noisy - labels)[changed] % 10, minlength=10)
    assert distances[0] == 0
    assert distances[1:].min() > 140  # 200 expected of each other class
    assert torch.equal(g.noisy_labels(labels, 10, 0.2, seed=3), noisy)
    assert not torch.equal(g.noisy_labels(labels, 10, 0.2, seed=4), noisy)
    assert torch.equal(g.noisy_labels(labels, 10, 0.0), labels)
    redrawn = g.noisy_labels(labels, 10, 1.0)
    assert 0.08 <= float((redrawn == labels).double().mean()) <= 0.12
    with pytest.raises(ValueError, match="labels must be whole numbers from 0 to 2"):
        g.noisy_labels(labels, 3, 0.2)
