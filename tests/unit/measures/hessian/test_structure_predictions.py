"""Structure of layer Hessians where it is easily wrong: without biases, convolutions, class weights, indefinite blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.measures.hessian.approximations import firing_rates, full_hessian_approximation, logit_clusters
from theodolite.measures.hessian.structure import (
    autocorrelation,
    decoupling_error,
    matricised,
    outlier_count,
    predicted_overlap,
)
from theodolite.operators.kronecker import factors_of, kronecker_factors

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias))


def data(count: int = 30) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6) * torch.linspace(0.2, 3, count)[:, None], torch.arange(count) % 3


def close(a: Tensor, b: Tensor, atol: float = 1e-8) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=atol)


def test_check_6_orthogonal_subspaces_share_nothing():
    q = torch.linalg.qr(torch.randn(200, 20))[0]
    assert th.subspace_overlap(q[:, :10], q[:, 10:]) == pytest.approx(0.0, abs=1e-12)


def test_check_8_holds_for_convolutions():
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        x = torch.randn(9, 2, 4, 4) + torch.randn(())
        for factors in kronecker_factors(th.Problem(model, LOSS, (x, torch.arange(9) % 3)), ["0", "2"]).values():
            found = autocorrelation(factors)
            assert found.ratio >= found.bound * (1 - 1e-9)
            assert found.bound > 0


def test_the_squared_dot_is_that_of_the_mean_and_the_leading_eigenvector():
    x = torch.rand(40, 6) + torch.randn(6)
    found = autocorrelation(factors_of(torch.eye(1), x.T @ x / 40, x.mean(0)))
    v = torch.linalg.eigh(x.T @ x / 40)[1][:, -1]
    assert found.squared_dot == pytest.approx(float((v @ x.mean(0)) ** 2 / x.mean(0).square().sum()))


# The whole network


@pytest.mark.parametrize(("bias", "params"), [(False, None), (True, "*weight"), (True, None)])
def test_check_14_with_and_without_biases(bias, params):
    x, y = data()
    problem = th.Problem(mlp(bias=bias), LOSS, (x[-1:], y[-1:]), params=params)
    matrix = th.gauss_newton(problem).to_dense()
    found = full_hessian_approximation(problem, 2, variant="whitened")
    assert torch.allclose(found.values, torch.linalg.eigvalsh(matrix).flip(0)[:2], rtol=1e-8)
    assert close(found.vectors.T @ found.vectors, torch.eye(2))
    assert close(matrix @ found.vectors, found.vectors * found.values)
    paper = full_hessian_approximation(problem, 2).vectors
    assert close(paper.T @ paper, torch.eye(2))


def test_the_full_approximation_refuses_what_it_cannot_do():
    problem = th.Problem(mlp(), LOSS, data())
    for k in (0, 9):
        with pytest.raises(ValueError, match=r"k must lie between 1 and 8, .* Got"):
            full_hessian_approximation(problem, k)
    grouped = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="Not so: 0: a grouped convolution"):
        full_hessian_approximation(th.Problem(grouped, LOSS, (torch.randn(5, 4, 1), torch.arange(5) % 3)), 2)
    coupled = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    for measure in (lambda p: full_hessian_approximation(p, 2), lambda p: logit_clusters(p, "0")):
        with pytest.raises(RuntimeError, match="normalises over the batch"):
            measure(th.Problem(coupled, LOSS, data(), mode="train"))


def test_sampled_results_say_so():
    x, _ = data()
    wide = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 150))
    problem = th.Problem(wide, LOSS, (x, torch.arange(30) * 5))
    exact = full_hessian_approximation(problem, 3, max_passes=150)
    a, b, again = (full_hessian_approximation(problem, 3, seed=seed) for seed in (0, 1, 0))
    assert (exact.draws, exact.stderr, exact.outcome) == (0, 0.0, th.results.Outcome.FINISHED)
    assert a.outcome is th.results.Outcome.ESTIMATED
    assert a.stderr > 0
    assert "sampled" in str(a)
    assert not torch.equal(a.values, b.values)
    assert torch.equal(a.values, again.values)
    assert float((a.values / exact.values - 1).abs().max()) < 5 * a.stderr
    report = th.hessian_structure(problem, "0", k=2)
    assert report.outcome is report["0"].outcome is th.results.Outcome.ESTIMATED
    assert "output Hessian sampled" in str(report)
    exact_report = th.hessian_structure(problem, "0", k=2, max_passes=150)
    assert exact_report.outcome is exact_report["0"].outcome is th.results.Outcome.CONVERGED


# Clusters


def gradients(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """δ_{x,j} (B, c, size of the weight): √p_j times the gradient of z_j − Σ_k p_k z_k, p held."""
    rows = []
    for one in x:
        z = model(one[None])[0]
        p = z.detach().softmax(-1)
        parts = [
            torch.autograd.grad(p[j].sqrt() * (z[j] - p @ z), layer.weight, retain_graph=True)[0].flatten() for j in range(3)
        ]
        rows.append(torch.stack(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["linear", "class weights", "ignored labels", "convolution", "groups"])
def test_check_15_between_and_within_the_clusters_are_the_block(kind):
    """The identity of matrices: means of the groups and spread around them make the layer's block."""
    x, y = data(24)
    model, loss, weight = mlp(), LOSS, torch.ones(24)
    if kind == "class weights":
        loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 8.0]))
        weight = loss.weight[y]
    if kind == "ignored labels":
        y[5:11], weight[5:11] = -100, 0.0
    if kind in ("convolution", "groups"):
        conv = nn.Conv1d(2, 4, 2, groups=2 if kind == "groups" else 1)
        model, x = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), x.reshape(24, 2, 3)
    weight = weight / weight.sum()
    problem = th.Problem(model, loss, [(x[:9], y[:9]), (x[9:], y[9:])])
    clusters = logit_clusters(problem, "0")
    delta = gradients(model, model[0], x)
    between = within = 0.0
    for i in range(3):
        mine = y == i
        share = weight[mine].sum()
        mean = torch.einsum("b,bjn->jn", weight[mine], delta[mine]) / share
        assert close(clusters.delta[i], mean)
        assert float(clusters.frequency[i]) == pytest.approx(float(share))
        between += share * mean.T @ mean
        spread = delta[mine] - mean
        within += torch.einsum("b,bjn,bjm->nm", weight[mine], spread, spread)
    block = th.layer_hessians(problem, "0")["0"].to_dense()
    assert close(between + within, block)
    assert clusters.between == pytest.approx(float(between.trace()))
    assert clusters.within == pytest.approx(float(within.trace()))


def test_clusters_refuse_what_they_cannot_do(monkeypatch):
    x, y = data()
    problem = th.Problem(mlp(), LOSS, (x, y))
    with pytest.raises(ValueError, match="part must be"):
        logit_clusters(problem, "0").score("logit", part="Delta")
    with pytest.raises(ValueError, match="fits no layer"):
        logit_clusters(problem, "fc9")
    with pytest.raises(ValueError, match="takes one layer"):
        logit_clusters(problem, "*")
    with pytest.raises(ValueError, match="softmax cross-entropy"):
        logit_clusters(th.Problem(mlp(), nn.MSELoss(), (x, torch.randn(30, 3))), "0")
    with pytest.raises(ValueError, match=r"class labels.*float64 \(30, 3\)"):
        logit_clusters(th.Problem(mlp(), LOSS, (x, torch.randn(30, 3).softmax(-1))), "0")
    model = mlp()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with pytest.raises(ValueError, match="spare: the layer is not called"):
        logit_clusters(th.Problem(model, LOSS, (x, y)), "spare")
    monkeypatch.setattr("theodolite.measures.hessian.approximations.MEANS_BYTES", 2000)
    with pytest.raises(ValueError, match="3 × 3 groups of 30 weights would take"):
        logit_clusters(problem, "0")


# The report


class Backwards(nn.Module):
    """The last layer is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.inner = nn.Linear(30, 3), nn.Linear(6, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inner(x)))


def test_outliers_do_not_depend_on_the_selection_or_the_order_of_layers():
    problem = th.Problem(Backwards(), LOSS, data(60))
    everything, given = th.hessian_structure(problem, k=40), th.hessian_structure(problem, k=40, classes=3)
    alone = th.hessian_structure(problem, "inner", k=40)
    for name, layer in everything.items():
        truth = outlier_count(torch.linalg.eigvalsh(th.layer_hessians(problem, name)[name].to_dense()).flip(0), 3)
        assert layer.outliers == given[name].outliers == truth
    assert alone["inner"].outliers == everything["inner"].outliers


def test_a_spectrum_without_a_gap_has_no_outliers():
    assert outlier_count(torch.ones(20), 10) == 0
    assert outlier_count(0.7 ** torch.arange(40), 10) == 0
    assert outlier_count(torch.linspace(2.0, 1.0, 30), 10) == 0
    assert outlier_count(torch.cat([torch.linspace(3, 2, 9), torch.linspace(1, 0.5, 20), torch.zeros(5)]), 10) == 9
    assert outlier_count(torch.tensor([1.0, 0.9, 0.8, 1e-17, 1e-18]), 10) == 0  # rounding is no gap


def test_the_decoupling_error_of_an_indefinite_block_is_over_its_norm():
    errors = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        with torch.no_grad():
            for q in model.parameters():
                q.mul_(3)
        problem = th.Problem(model, nn.MSELoss(), (torch.randn(20, 4), torch.randn(20, 1) * 10 + 20 * torch.randn(1).sign()))
        report = th.hessian_structure(problem, k=3, tol=1e-8)
        for name, layer in report.items():
            block = th.layer_hessians(problem)[name]
            dense = block.to_dense()
            product = torch.kron(layer.factors.output, layer.factors.input)
            truth = float(torch.linalg.matrix_norm(dense - product, 2) / torch.linalg.matrix_norm(dense, 2))
            assert layer.decoupling_error == pytest.approx(truth, rel=2e-3, abs=1e-6)
            assert layer.decoupling_error == pytest.approx(decoupling_error(block, layer.factors), rel=1e-2, abs=1e-6)
            errors.append(float(torch.linalg.eigvalsh(dense)[0]) < -float(torch.linalg.eigvalsh(dense)[-1]))
        exact = th.hessian_structure(problem, k=3, tol=1e-8, mode="exact")
        assert exact["0"].factors.mode == "exact"
        assert "exact factors against" in str(exact["0"])
        assert "Gauss-Newton factors against the exact block" in str(report["0"])
    assert any(errors)  # some block bends down more than up


def test_every_number_of_the_report_against_dense_matrices():
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    problem = th.Problem(model, LOSS, (torch.rand(50, 6), torch.arange(50) % 4))
    report = th.hessian_structure(problem, k=12, tol=1e-9)
    for name, layer in report.items():
        block = th.layer_hessians(problem, name)[name].to_dense()
        values, vectors = torch.linalg.eigh(block)
        values, vectors = values.flip(0)[:12], vectors.flip(1)[:, :12]
        factors = kronecker_factors(problem, name)[name]
        tau, gamma = (torch.linalg.eigvalsh(t).flip(0) for t in (factors.output, factors.input))
        assert layer.outliers == outlier_count(values, 4)
        assert layer.rank_one_count == int((tau * gamma[0] > tau[0] * gamma[1]).sum())
        m, n = len(tau), len(gamma)
        clear = (values[:8] > 1e-6) & (values[:8] - values[1:9] > 1e-6)
        clear &= torch.cat([torch.tensor([True]), clear[:-1]])
        sizes = torch.linalg.svdvals(matricised(vectors[:, :8], m, n))
        assert close(layer.rank_ratios[:8][clear], sizes[clear][:, 0], atol=1e-6)
        assert layer.ratio == pytest.approx(float(gamma[0] / gamma[1]))
        mean = factors.mean / factors.mean.norm()
        v = torch.linalg.eigh(factors.input)[1][:, -1]
        assert layer.squared_dot == pytest.approx(float((mean @ v) ** 2))
        row = layer.summary()
        assert (row["outliers"], row["rank_one_count"]) == (layer.outliers, layer.rank_one_count)
    assert [layer.factors.last for layer in report.values()] == [False, True]


def test_sentences_grade_and_name_what_is_left_out():
    from dataclasses import replace

    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    report = th.hessian_structure(th.Problem(model, LOSS, data()), k=3)
    assert "1: not measured, no Kronecker form: LayerNorm" in str(report)
    said = {str(replace(report["0"], decoupling_error=e)).split(": ")[-1].split(";")[0] for e in (0.05, 0.4, 0.8, 1.2)}
    assert len(said) == 4
    grouped = nn.Sequential(nn.Conv1d(4, 3, 1, groups=1), nn.Flatten())
    grouped[0] = nn.Conv1d(4, 4, 1, groups=2)
    with pytest.raises(ValueError, match="0: a grouped convolution"):
        th.hessian_structure(th.Problem(grouped, LOSS, (torch.randn(9, 4, 1), torch.arange(9) % 3)), k=3)


# Prediction and weights


def formed_overlap(a, b, k: int) -> float:
    """The overlap of the top k eigenvectors of two products that are written out."""
    spaces = [torch.linalg.eigh(torch.kron(f.output, f.input))[1].flip(1)[:, :k] for f in (a, b)]
    return float((spaces[0].T @ spaces[1]).square().sum()) / k


def test_both_predictions_against_products_written_out():
    roots = [torch.randn(5, 5) for _ in range(2)]
    means = [torch.rand(4) for _ in range(2)]
    a, b = (factors_of(r @ r.T, torch.outer(v, v) + 0.01 * torch.diag(torch.rand(4))) for r, v in zip(roots, means, strict=True))
    plain, permuted = predicted_overlap(a, b, 8), predicted_overlap(a, b, 8, permuted=True)
    for k in (1, 3, 8):
        assert float(plain[k - 1]) == pytest.approx(formed_overlap(a, b, k))
    (tau_a, _), (gamma_a, v_a) = (torch.linalg.eigh(t) for t in (a.output, a.input))
    (tau_b, _), (gamma_b, v_b) = (torch.linalg.eigh(t) for t in (b.output, b.input))
    for k in (1, 3, 8):
        first = torch.outer(tau_a, gamma_a).flatten().argsort(descending=True)[:k] % 4
        second = torch.outer(tau_b, gamma_b).flatten().argsort(descending=True)[:k] % 4
        dots = (v_a[:, first].T @ v_b[:, second]).square()  # (u·u')² is 1/m, on average over the orders of the units
        assert float(permuted[k - 1]) == pytest.approx(float(dots.sum()) / 5 / k)
    with pytest.raises(ValueError, match="same size"):
        predicted_overlap(a, factors_of(torch.eye(3), torch.eye(4)), 2)


def test_firing_rates_count_every_sample_once_and_need_a_chain():
    x, y = data(30)
    model = mlp()
    for loss in (LOSS, nn.CrossEntropyLoss(reduction="sum")):
        y[13:24] = -100
        problem = th.Problem(model, loss, [(x[:13], y[:13]), (x[13:24], y[13:24]), (x[24:], y[24:])])
        names, weights, rates = firing_rates(problem)
        assert names == ["0", "2"]
        assert close(rates[0], (model[0](x) > 0).double().mean(0))
        assert torch.equal(weights[1], model[2].weight)
    with pytest.raises(ValueError, match="rectified output"):
        firing_rates(th.Problem(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), LOSS, data()))
    with pytest.raises(ValueError, match="rectified output"):
        firing_rates(th.Problem(Backwards(), LOSS, data()))
    mixed = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3))
    problem = th.Problem(mixed, LOSS, (x[:, None], torch.arange(30) % 3))
    with pytest.raises(ValueError, match="0 is none"):
        firing_rates(problem)
    assert firing_rates(problem, ["2", "4"])[0] == ["2", "4"]
