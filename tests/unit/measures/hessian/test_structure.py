"""Structure of layer Hessians: the acceptance checks of theory, by their numbers, with the numbers measured beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.measures.hessian.approximations import (
    firing_rates,
    full_hessian_approximation,
    logit_clusters,
    sharp_subspace,
    weight_product,
)
from theodolite.measures.hessian.structure import (
    autocorrelation,
    correspondence,
    decoupling_error,
    kronecker_overlap,
    outlier_count,
    predicted_overlap,
    rank_one_count,
    rank_ratios,
)
from theodolite.operators.kronecker import factors_of, kronecker_factors


def haar(n: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return q * torch.sign(r.diagonal())


def test_check_6_overlap_of_random_subspaces():
    generator = torch.Generator().manual_seed(0)
    draws = [
        th.subspace_overlap(
            *(torch.linalg.qr(torch.randn(200, 10, generator=generator, dtype=torch.float64))[0] for _ in range(2))
        )
        for _ in range(50)
    ]
    assert sum(draws) / 50 == pytest.approx(0.05, abs=0.01)
    u = torch.linalg.qr(torch.randn(200, 10, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(200, 10, generator=generator, dtype=torch.float64))[0]
    assert th.subspace_overlap(u, u) == pytest.approx(1.0)
    assert abs(th.subspace_overlap(u, v) - th.subspace_overlap(u @ haar(10, generator), v)) < 1e-12


def trained_like(seed: int = 0) -> tuple[th.Problem, Mapping[str, th.operators.KroneckerFactors]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.rand(60, 8).double(), torch.arange(60) % 4))
    return problem, kronecker_factors(problem)


def test_check_7_correspondence_columns_sum_to_one_and_are_indicators_for_a_product():
    problem, factors = trained_like()
    pairs = th.top_eigenpairs(th.layer_hessians(problem), k=10, tol=1e-8)
    for name, f in factors.items():
        found = correspondence(pairs[name].vectors, f)
        for part in (found.inputs, found.outputs):
            assert torch.allclose(part.sum(0), torch.ones(part.shape[1]).double(), atol=1e-6)
        product = correspondence(f.top_eigenpairs(6).vectors, f)
        assert torch.allclose(product.inputs.max(0).values, torch.ones(6).double(), atol=1e-6)
        assert torch.allclose(product.outputs.max(0).values, torch.ones(6).double(), atol=1e-6)
        assert torch.allclose(
            rank_ratios(f.top_eigenpairs(6).vectors, len(f.output), len(f.input)), torch.ones(6).double(), atol=1e-9
        )


def test_the_overlap_with_the_product_equals_that_of_its_formed_vectors():
    problem, factors = trained_like()
    pairs = th.top_eigenpairs(th.layer_hessians(problem), k=8, tol=1e-8)
    for name, f in factors.items():
        formed = th.overlap_curve(pairs[name].vectors, f.top_eigenpairs(8).vectors)
        assert torch.allclose(kronecker_overlap(pairs[name].vectors, f), formed.double(), atol=1e-9)


def test_check_8_the_ratio_never_falls_below_its_bound():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        n, count = int(torch.randint(2, 9, (1,), generator=generator)), int(torch.randint(3, 30, (1,), generator=generator))
        x = torch.randn(count, n, generator=generator, dtype=torch.float64) + torch.randn(
            n, generator=generator, dtype=torch.float64
        )
        found = autocorrelation(factors_of(torch.eye(1).double(), x.T @ x / count, x.mean(0)))
        assert found.ratio >= found.bound * (1 - 1e-9)
        assert 0.0 <= found.squared_dot <= 1.0 + 1e-12


def kronecker_model(tau: Tensor, gamma: Tensor, lead: Tensor, generator: torch.Generator):
    """Factors with given spectra, Haar output eigenvectors, and `lead` as the first input eigenvector."""
    m, n = len(tau), len(gamma)
    u = haar(m, generator)
    rest = torch.randn(n, n - 1, generator=generator, dtype=torch.float64)
    v, r = torch.linalg.qr(torch.cat([lead[:, None], rest], dim=1))
    v = v * torch.sign(r.diagonal())
    return factors_of(u @ torch.diag(tau) @ u.T, v @ torch.diag(gamma) @ v.T)


def test_check_9_the_overlap_law_of_a_flat_output_spectrum():
    """(k/m)(v₁·v₁')² up to m: within 3 standard errors over 20 draws, peak at m."""
    generator = torch.Generator().manual_seed(0)
    m, n = 40, 12
    first, second = (torch.rand(n, generator=generator, dtype=torch.float64) for _ in range(2))
    first, second = first / first.norm(), second / second.norm()
    gamma = torch.cat([torch.ones(1), torch.full((n - 1,), 1e-3)]).double()
    tau = torch.linspace(1.0, 0.5, m, dtype=torch.float64)
    curves = torch.stack(
        [
            predicted_overlap(kronecker_model(tau, gamma, first, generator), kronecker_model(tau, gamma, second, generator), 60)
            for _ in range(20)
        ]
    )
    cosine = float(first @ second) ** 2
    law = torch.arange(1, m + 1).double() / m * cosine
    error = curves.std(0)[:m] / math.sqrt(20)
    for k in (1, 10, 20, 30, 40):  # neighbouring points are one observation
        assert abs(float(curves.mean(0)[k - 1] - law[k - 1])) <= 3 * float(error[k - 1]) + 1e-9
    assert abs(int(curves.mean(0).argmax()) + 1 - m) <= 1


def regime_curves(tau: Tensor, generator: torch.Generator, k: int = 200) -> tuple[Tensor, int]:
    m = 60
    gamma = torch.cat([torch.ones(1), 0.1 * 0.9 ** torch.arange(m - 1)]).double()
    curves = []
    for _ in range(20):
        leads = [torch.randn(m, generator=generator, dtype=torch.float64).abs() for _ in range(2)]
        models = [kronecker_model(tau, gamma, lead / lead.norm(), generator) for lead in leads]
        curves.append(predicted_overlap(*models, k))
    return torch.stack(curves).mean(0), rank_one_count(models[0])


def test_check_9_three_regimes_without_training():
    generator = torch.Generator().manual_seed(0)
    i = torch.arange(60).double()
    flat, count = regime_curves(torch.linspace(1.0, 0.5, 60, dtype=torch.float64), generator)
    assert count == 60
    assert abs(int(flat.argmax()) + 1 - 60) <= 2
    assert float(flat[59]) == pytest.approx(0.394, abs=0.03)
    nine = torch.cat([torch.linspace(1.0, 0.5, 9), 0.01 * 0.98 ** i[9:]]).double()
    early, count = regime_curves(nine, generator)
    assert count == 9
    assert abs(int(early[:30].argmax()) + 1 - 9) <= 1
    assert early[59] < early[8]
    heavy, count = regime_curves(1.0 / (i + 1), generator)
    assert count == 9
    assert int(heavy.argmax()) + 1 > 1.3 * 60


def two_layers(n: int, d: int, c: int, samples: int, *, rectified: bool, seed: int = 0) -> dict[str, Tensor]:
    """The setting of the theorems: y = relu(W₁ x), z = W₂ y with Gaussian weights; E over x with the weights fixed."""
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(n, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    w2 = torch.randn(c, n, generator=generator, dtype=torch.float64) / math.sqrt(n)
    m, mean_a, rate = torch.zeros(n, n).double(), torch.zeros(c, c).double(), torch.zeros(n).double()
    for part in range(0, samples, 2000):
        x = torch.randn(min(2000, samples - part), d, generator=generator, dtype=torch.float64)
        x = x.clamp_min(0.0) if rectified else x
        u = x @ w1.T
        gate = (u > 0).double()
        p = (u.clamp_min(0.0) @ w2.T).softmax(-1)
        # N_x rows: sqrt(p_j) (e_j − p)ᵀ W₂ D; the sum over j of their outer products is D W₂ᵀ A W₂ D.
        a_root = p.sqrt()[:, :, None] * (torch.eye(c).double()[None] - p[:, None, :])  # (B, c, c)
        rows = (a_root @ w2) * gate[:, None, :]  # (B, c, n)
        flat = rows.flatten(0, 1)
        m += flat.T @ flat / samples
        mean_a += (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).sum(0) / samples
        rate += gate.sum(0) / samples
    return {"M": m, "A": mean_a, "W": w2, "rate": rate}


def top_space(matrix: Tensor, k: int) -> Tensor:
    return torch.linalg.eigh(matrix)[1].flip(1)[:, :k]


def test_check_10_the_theorem_for_gaussian_inputs():
    errors = {}
    for n, d in ((100, 251), (400, 1325)):
        part = two_layers(n, d, 10, 20_000, rectified=False)
        predicted = sharp_subspace(part["W"])
        overlap = th.subspace_overlap(top_space(part["M"], 9), predicted)
        assert overlap > (0.99 if n == 100 else 0.995)
        reference = part["W"].T @ part["A"] @ part["W"] / 4
        errors[n] = float((part["M"] - reference).norm() / part["M"].norm())
    assert 0.10 <= errors[400] <= 0.22
    assert -0.65 <= math.log(errors[400] / errors[100]) / math.log(4) <= -0.35


def test_check_11_rectified_inputs_need_the_firing_rates():
    part = two_layers(400, 1325, 10, 20_000, rectified=True)
    top = top_space(part["M"], 9)
    assert 0.79 <= th.subspace_overlap(top, sharp_subspace(part["W"])) <= 0.88
    assert th.subspace_overlap(top, sharp_subspace(part["W"] * part["rate"])) > 0.995


def block_problem(n: int, d: int, c: int, samples: int, *, rectified: bool) -> th.Problem:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(d, n, bias=False), nn.ReLU(), nn.Linear(n, c, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(n, d, generator=generator, dtype=torch.float64) / math.sqrt(d))
        model[2].weight.copy_(torch.randn(c, n, generator=generator, dtype=torch.float64) / math.sqrt(n))
    x = torch.randn(samples, d, generator=generator, dtype=torch.float64)
    return th.Problem(model, nn.CrossEntropyLoss(), (x.clamp_min(0.0) if rectified else x, torch.arange(samples) % c))


def test_check_12_the_block_is_nearly_its_product_for_rectified_inputs_and_not_for_centred_ones():
    found = {}
    for rectified in (True, False):
        problem = block_problem(80, 300, 5, 8000, rectified=rectified)
        factors = kronecker_factors(problem, "0")["0"]
        block = th.layer_hessians(problem, "0")["0"]
        pairs = th.top_eigenpairs(block, 4, tol=1e-4)
        found[rectified] = (float(kronecker_overlap(pairs.vectors, factors)[3]), decoupling_error(block, factors))
        if rectified:
            assert float(rank_ratios(pairs.vectors, 80, 300).min()) > 0.99
    assert found[True][0] > 0.98
    assert 0.03 <= found[True][1] <= 0.12
    assert found[False][0] < 0.75


def test_gated_products_beat_plain_ones_in_a_deep_network_at_initialisation():
    """300-200-200-10 with N(0, 1/fan_in): plain 0.83 to 0.84, gated 0.99 and more."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(300, 200, bias=False), nn.ReLU(), nn.Linear(200, 200, bias=False), nn.ReLU(), nn.Linear(200, 10, bias=False)
    ).double()
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64) / layer.in_features**0.5)
    x = torch.randn(4000, 300, generator=generator, dtype=torch.float64)
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(4000) % 10))
    factors = kronecker_factors(problem)
    _, weights, rates = firing_rates(problem)
    for place, name in enumerate(["0", "2"]):
        top = top_space(factors[name].output, 9)
        plain = th.subspace_overlap(top, sharp_subspace(weight_product(weights[place + 1 :])))
        gated = th.subspace_overlap(top, sharp_subspace(weight_product(weights[place + 1 :], rates[place:])))
        assert 0.78 <= plain <= 0.9
        assert gated >= 0.98
    last = th.subspace_overlap(top_space(factors["4"].output, 9), sharp_subspace(torch.eye(10).double()))
    assert last == pytest.approx(1.0, abs=1e-8)  # check 15, T10


def test_check_16_closed_forms_of_the_rectified_gaussian():
    d = 50
    matrix = torch.ones(d, d).double() / (2 * math.pi * d) + (math.pi - 1) / (2 * math.pi * d) * torch.eye(d).double()
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[-1]) == pytest.approx(1 / (2 * math.pi) + (math.pi - 1) / (2 * math.pi * d), abs=1e-12)
    assert torch.allclose(values[:-1], torch.full((d - 1,), (math.pi - 1) / (2 * math.pi * d)).double(), atol=1e-12)
    from scipy.integrate import quad

    def moment(f):
        return quad(lambda g: f(g) * math.exp(-g * g / 2) / math.sqrt(2 * math.pi), 0, 12, epsabs=1e-12)[0]

    mean = moment(lambda g: g)
    assert mean == pytest.approx(1 / math.sqrt(2 * math.pi), abs=1e-8)
    variance = moment(lambda g: (g - mean) ** 2) + 0.5 * mean**2
    assert variance == pytest.approx((math.pi - 1) / (2 * math.pi), abs=1e-8)
    fourth = moment(lambda g: (g - mean) ** 4) + 0.5 * mean**4
    assert fourth == pytest.approx((6 * math.pi**2 - 10 * math.pi - 3) / (4 * math.pi**2), abs=1e-8)


def test_outliers_are_counted_at_the_widest_gap():
    values = torch.cat([torch.linspace(3, 2, 9), torch.linspace(0.3, 0.1, 30)])
    assert outlier_count(values, 10) == 9
    assert outlier_count(torch.zeros(5), 10) == 0


def test_check_14_one_sample_whitened_is_the_spectrum_of_the_curvature_of_the_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(1, 20).double(), torch.tensor([2])))
    truth = torch.linalg.eigvalsh(th.gauss_newton(problem).to_dense()).flip(0)[:4]
    found = full_hessian_approximation(problem, 4, variant="whitened")
    assert torch.allclose(found.values, truth, rtol=1e-8)
    assert torch.allclose(found.vectors.T @ found.vectors, torch.eye(4).double(), atol=1e-8)
    image = th.gauss_newton(problem) @ found.vectors
    assert torch.allclose(image, found.vectors * found.values, atol=1e-8)
    paper = full_hessian_approximation(problem, 4)
    assert torch.allclose(paper.values / truth, torch.ones(4).double(), atol=0.1)


def test_the_full_approximation_of_many_samples_finds_the_sharp_subspace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(400, 20).double().clamp_min(0), torch.arange(400) % 5))
    top = th.top_eigenpairs(th.hessian(problem), 4, tol=1e-6).vectors
    for variant in ("paper", "whitened"):
        assert th.subspace_overlap(top, full_hessian_approximation(problem, 4, variant=variant).vectors) > 0.85
    with pytest.raises(ValueError, match="variant"):
        full_hessian_approximation(problem, 4, variant="kfac")


def test_check_15_between_and_within_the_clusters_make_the_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(30, 6).double(), torch.arange(30) % 3))
    clusters = logit_clusters(problem, "0")
    block = th.layer_hessians(problem)["0"].to_dense()
    assert clusters.between + clusters.within == pytest.approx(float(block.trace()), abs=1e-8)
    means = sum(
        clusters.frequency[i] * torch.outer(clusters.delta[i, j], clusters.delta[i, j]) for i in range(3) for j in range(3)
    )
    assert clusters.between == pytest.approx(float(means.trace()), abs=1e-10)
    rest = torch.linalg.eigvalsh(block - means)
    assert float(rest.min()) >= -1e-10  # what is left is a covariance
    assert 0 <= clusters.score("logit") <= 1
    with pytest.raises(ValueError, match="by must be"):
        clusters.score("both")


def test_the_structure_report_agrees_with_dense_blocks():
    problem, factors = trained_like()
    report = th.hessian_structure(problem, k=12, tol=1e-8)
    blocks = th.layer_hessians(problem)
    assert list(report) == ["0", "2", "4"]
    for name, layer in report.items():
        block = blocks[name].to_dense()
        truth = torch.linalg.eigvalsh(block).flip(0)
        assert torch.allclose(layer.pairs.values.double(), truth[: len(layer.pairs.values)], atol=1e-7)
        product = torch.kron(factors[name].output, factors[name].input)
        error = float(torch.linalg.matrix_norm(product - block, 2) / torch.linalg.matrix_norm(block, 2))
        assert layer.decoupling_error == pytest.approx(error, rel=2e-3)
        assert layer.ratio >= layer.bound
        assert layer.decoupling_error == pytest.approx(decoupling_error(blocks[name], factors[name]), rel=1e-2)
    assert {row["layer"] for row in report.rows()} == {"0", "2", "4"}
    assert "decoupling error" in str(report)


def test_layers_without_factors_are_listed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(30, 5).double(), torch.arange(30) % 3))
    report = th.hessian_structure(problem, k=5)
    assert list(report) == ["0", "3"]
    assert "LayerNorm" in report.without["1"]
    with pytest.raises(ValueError, match="No layer has two factors"):
        th.hessian_structure(problem, "1")
    batchnorm = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    coupled = th.Problem(batchnorm, nn.CrossEntropyLoss(), (torch.randn(30, 5).double(), torch.arange(30) % 3), mode="train")
    with pytest.raises(RuntimeError, match="eval"):
        th.hessian_structure(coupled)


def test_check_3_a_padded_product_is_the_block_times_the_vector():
    problem, _ = trained_like()
    blocks, whole = th.layer_hessians(problem), th.hessian(problem)
    generator = torch.Generator().manual_seed(0)
    for name, block in blocks.items():
        v = torch.randn(block.shape[0], generator=generator, dtype=torch.float64)
        padded = torch.zeros(problem.size, dtype=torch.float64)
        places = blocks.positions(name)
        padded[places] = v
        truth = block.to_dense() @ v
        assert float((whole @ padded)[places].sub(truth).norm() / truth.norm()) < 1e-6


def test_check_4_lanczos_against_the_dense_spectrum_of_a_block_of_400():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 6)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.rand(200, 20).double(), torch.arange(200) % 6))
    block = th.layer_hessians(problem, "0")["0"]
    pairs = th.top_eigenpairs(block, 10, tol=1e-8)
    values, vectors = torch.linalg.eigh(block.to_dense())
    assert torch.allclose(pairs.values, values.flip(0)[:10], rtol=1e-6)
    assert th.subspace_overlap(pairs.vectors, vectors.flip(1)[:, :10]) > 1 - 1e-6
