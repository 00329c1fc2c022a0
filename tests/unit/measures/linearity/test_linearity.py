"""Linearity: Hessian norms, deviations, drifts and PL* constants against dense matrices and closed forms.

Acceptance checks of the spec: 1 and 2 in tests/unit/models/test_dag.py; 3, 11, 12 and 16 here; 4 to 10 are claims of
linearity/hessian-scaling, 8 also of linearity/figure-2.3, 13 and 15 of linearity/pl, 14 of linearity/figure-2.2 and 17 of
linearity/lemmas.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.experiments.linearity.ensembles import Convolutions, Ensemble, hessian_norms
from theodolite.models import cnn_graph, densenet_graph, fcn_graph, ntk_cnn, with_drops, with_skips

D = 10


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def half_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().sum()


def problem_of(model: nn.Module, samples: int = 4, *, features: int = D, outputs: int = 1, loss=half_sum, **options):
    return th.Problem(model, loss, (normal(samples, features), normal(samples, outputs, seed=1)), **options)


def dense_hessian(model: nn.Module, x: torch.Tensor, output: int = 0) -> torch.Tensor:
    """By double backward, column by column."""
    weights = list(model.parameters())
    value = model(x[None]).reshape(-1)[output]
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, weights, create_graph=True)])
    rows = [torch.autograd.grad(g, weights, retain_graph=True, materialize_grads=True) for g in gradient]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


NETWORKS = {
    "fcn": lambda m: th.DagNetwork(fcn_graph(D, [m, m]), seed=1),
    "dense": lambda m: th.DagNetwork(densenet_graph(D, [m, m]), seed=1),
    "dropped": lambda m: th.DagNetwork(with_drops(densenet_graph(D, [m, m]), seed=1), seed=1),
    "skip": lambda m: th.DagNetwork(with_skips(fcn_graph(D, [m, m])), seed=1),
    "cnn": lambda m: th.DagNetwork(cnn_graph(D, [m, m]), seed=1),
}


# The Hessian of an output


@pytest.mark.parametrize("name", NETWORKS)
def test_hessian_norm_is_that_of_the_dense_matrix(name):
    model = NETWORKS[name](5)
    problem = problem_of(model)
    exact = torch.linalg.matrix_norm(dense_hessian(model, normal(4, D)[2]), 2)
    found = th.measures.linearity.hessian_norm(problem, samples=2)
    assert found.value == pytest.approx(float(exact), rel=1e-6)
    assert found.where == (2, 0)
    assert found.error <= 1e-4 * found.value


def test_several_outputs_and_samples_give_the_largest():
    model = th.DagNetwork(fcn_graph(D, [6, 6], 3), seed=0)
    problem = problem_of(model, outputs=3)
    found = th.measures.linearity.hessian_norm(problem, output=[0, 2], samples=[1, 3])
    exact = {(s, o): float(torch.linalg.matrix_norm(dense_hessian(model, normal(4, D)[s], o), 2)) for s in (1, 3) for o in (0, 2)}
    assert found.value == pytest.approx(max(exact.values()), rel=1e-6)
    assert exact[found.where] == max(exact.values())
    assert [(r["sample"], r["output"]) for r in found.rows()] == list(exact)


def test_a_scalar_must_be_chosen():
    problem = problem_of(th.DagNetwork(fcn_graph(D, [6], 3), seed=0), outputs=3)
    with pytest.raises(ValueError, match=r"returns 3 numbers.*output=0 \.\. 2.*samples"):
        th.measures.linearity.hessian_norm(problem)
    with pytest.raises(ValueError, match=r"output must lie in 0 \.\. 2"):
        th.measures.linearity.hessian_norm(problem, output=3)
    with pytest.raises(ValueError, match=r"samples must lie in 0 \.\. 3"):
        th.measures.linearity.hessian_norm(problem, output=0, samples=4)


def test_check_16_hessians_that_vanish():
    first = problem_of(th.DagNetwork(fcn_graph(D, [], 5), seed=0), outputs=5)  # first-layer pre-activations
    assert max(th.measures.linearity.hessian_norm(first, output=range(5)).values) < 1e-12
    last = problem_of(NETWORKS["fcn"](8), params="layers.2.*")  # the block of the output layer
    assert th.measures.linearity.hessian_norm(last).value < 1e-12
    assert th.measures.linearity.hessian_norm(problem_of(NETWORKS["fcn"](8), params="layers.[01].*")).value > 0.1


def test_samples_are_found_across_batches():
    model = NETWORKS["fcn"](5)
    x, y = normal(5, D), normal(5, 1, seed=1)
    whole = th.Problem(model, nn.MSELoss(), (x, y))
    parts = th.Problem(model, nn.MSELoss(), [(x[:2], y[:2]), (x[2:], y[2:])])
    assert th.measures.linearity.hessian_norm(parts, samples=3).value == pytest.approx(
        th.measures.linearity.hessian_norm(whole, samples=3).value, rel=1e-9
    )


def test_batch_weights_of_the_loss_do_not_matter():
    model = NETWORKS["fcn"](5)
    x, y = normal(5, D), normal(5, 1, seed=1)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    weighted = th.Problem(model, nn.MSELoss(), batches, batch_weight=lambda batch: float(batch.size) ** 2)
    plain = th.Problem(model, nn.MSELoss(), batches)
    assert th.measures.linearity.hessian_norm(weighted, samples=3).value == pytest.approx(
        th.measures.linearity.hessian_norm(plain, samples=3).value, rel=1e-9
    )


# The deviation


#: The wider ones that take long are left to `slow`, and to the claim T2 of linearity/taylor.
CHECK_03 = [("fcn", 16, 0.5), ("cnn", 16, 1.0), *((name, 16, 2.0) for name in ("fcn", "dense", "skip", "cnn")), ("fcn", 64, 2.0)]
_WIDER = [(name, m, radius) for name in ("fcn", "dense", "skip", "cnn") for m in (16, 64) for radius in (0.5, 1.0, 2.0)]
_WIDER += [("fcn", 256, 2.0), ("skip", 256, 2.0)]
CHECK_03 += [pytest.param(*case, marks=pytest.mark.slow) for case in _WIDER if case not in CHECK_03]


@pytest.mark.parametrize(("name", "m", "radius"), CHECK_03)
def test_check_03_taylor_certificate(name, m, radius):
    found = th.measures.linearity.linearity_deviation(
        problem_of(NETWORKS[name](m), 1), radius=radius, directions=1, segments=2, tol=1e-3, progress=False
    )
    assert found.certified
    assert found.violations == 0
    assert found.worst > 0


def test_the_deviation_is_what_it_says_it_is():
    model = NETWORKS["fcn"](6)
    problem = problem_of(model, 1)
    direction = normal(problem.size, seed=9)
    found = th.measures.linearity.linearity_deviation(problem, radius=0.7, directions=0, displacement=0.2 * direction)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    value = model(normal(1, D))
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value.sum(), list(model.parameters()))])
    step = 0.2 * direction  # a displacement is gone as it is
    other = NETWORKS["fcn"](6)
    nn.utils.vector_to_parameters(weights + step, other.parameters())
    expected = abs(float(other(normal(1, D)).detach() - value.detach()) - float(step @ gradient))
    assert found.deviations[found.directions.index("displacement")] == pytest.approx(expected, rel=1e-9)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-9)
    assert found.directions == ("gradient", "top Hessian eigenvector", "displacement")
    assert found.distances == pytest.approx((0.7, 0.7, float(step.norm())))
    where = found.distances[found.deviations.index(found.worst)]
    assert f"At distance {where:.3g}" in str(found)


def test_a_bilinear_output_meets_the_bound_exactly():
    """f = w₂w₁x: H has eigenvalues ±x everywhere, and along (1, 1)/√2 the deviation is ½R²x, the bound itself."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    data = torch.full((1, 1), 3.0).double(), torch.zeros(1, 1).double()
    found = th.measures.linearity.linearity_deviation(
        th.Problem(model, nn.MSELoss(), data), radius=1.0, directions=0, displacement=2**0.5 * torch.ones(2).double()
    )
    where = found.directions.index("displacement")
    assert found.deviations[where] == pytest.approx(6.0)
    assert found.certificates[where] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("layer", "kinks"), [(nn.ReLU(), ("Relu",)), (nn.Tanh(), ()), (nn.GELU(), ()), (nn.LeakyReLU(), ("LeakyRelu",))]
)
def test_kinks_make_the_certificate_void(layer, kinks):
    model = nn.Sequential(nn.Linear(D, 6), layer, nn.Linear(6, 1)).double()
    found = th.measures.linearity.linearity_deviation(problem_of(model, 1), directions=1, segments=2)
    assert found.kinks == kinks
    assert found.certified == (not kinks)
    assert ("not valid" in str(found)) == bool(kinks)


# The kernel


@pytest.mark.parametrize("name", ["fcn", "dense", "dropped", "skip"])
def test_check_12_gram_trick(name):
    """The kernel by Gram products, masks included, is the product of the explicit Jacobian."""
    networks = [NETWORKS[name](7), th.DagNetwork(NETWORKS[name](7).graph, seed=5)]
    x = torch.stack([normal(6, D), normal(6, D, seed=3)])
    ensemble = Ensemble(networks)
    kernels = ensemble.kernel(ensemble.weights, x)
    for network, inputs, kernel in zip(networks, x, kernels, strict=True):
        jacobian = th.operators.jacobian(th.Problem(network, half_sum, (inputs, inputs[:, :1]))).to_dense()
        exact = jacobian @ jacobian.T
        assert float((kernel - exact).norm()) <= 1e-10 * float(exact.norm())
        assert float((th.tangent_kernel(network, inputs) - exact).norm()) <= 1e-10 * float(exact.norm())


def test_kernel_drift_is_the_change_of_the_jacobian_product():
    model = NETWORKS["dropped"](6)
    problem = problem_of(model, 5)
    step = 0.5 * normal(problem.size, seed=4)
    found = th.measures.kernel.kernel_drift(problem, probes=0, displacement=step)
    there = NETWORKS["dropped"](6)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() + step, there.parameters())
    grams = [j @ j.T for j in (th.operators.jacobian(problem_of(m, 5)).to_dense() for m in (model, there))]
    expected = float(torch.linalg.matrix_norm(grams[1] - grams[0], 2) / torch.linalg.matrix_norm(grams[0], 2))
    assert found.drifts[found.places.index("displacement")] == pytest.approx(expected, rel=1e-9)
    assert found.places == ("descent", "displacement")


def test_a_kernel_too_large_to_form_is_refused():
    model = nn.Linear(1, 500).double()
    with pytest.raises(ValueError, match="5000 outputs"):
        th.measures.kernel.kernel_drift(problem_of(model, 10, features=1, outputs=500))


# PL*


def test_check_11_pl_inequality():
    """100 random weights, inputs and targets; equality along the bottom eigenvector."""
    slacks, gaps = [], []
    for seed in range(100):
        model = th.DagNetwork(fcn_graph(3, [6]), seed=seed)
        x = normal(3, 3, seed=seed)
        kernel = th.tangent_kernel(model, x)
        values, vectors = torch.linalg.eigh(kernel)
        for found, target in ((slacks, normal(3, 1, seed=seed + 500)), (gaps, model(x).detach() - vectors[:, :1])):
            loss, gradient = th.Problem(model, half_sum, (x, target)).loss_and_gradient()
            squared = float(gradient.square().sum())
            found.append((squared - 2 * float(values[0]) * loss) / squared)
    assert min(slacks) >= -1e-9
    assert max(map(abs, gaps)) <= 1e-8


@pytest.mark.parametrize(
    ("loss", "curvature"),
    [
        (half_sum, 1.0),
        (nn.MSELoss(), 2 / 12),  # 4 samples of 3 numbers
        (nn.MSELoss(reduction="sum"), 2.0),
        (lambda z, y: (z - y).square().sum(1).mean(), 2 / 4),
    ],
)
def test_mu_is_in_the_convention_of_the_loss(loss, curvature):
    problem = problem_of(th.DagNetwork(fcn_graph(D, [30], 3), seed=0), outputs=3, loss=loss)
    report = th.measures.kernel.pl_report(problem, probes=2)
    values = torch.linalg.eigvalsh(th.tangent_kernel(problem))
    assert report.curvature == pytest.approx(curvature)
    assert report.mu == pytest.approx(curvature * float(values[0]))
    assert report.condition == pytest.approx(float(values[-1] / values[0]))
    assert report.rate == pytest.approx(1 / (curvature * float(values[-1])))
    assert report.contraction == pytest.approx(1 - float(values[0] / values[-1]))
    assert report.largest_rate == pytest.approx(2 * report.rate)
    assert report.mu_ball <= report.mu
    assert float(problem.gradient().square().sum()) >= 2 * report.mu * problem.loss()
    assert report.holds


def test_uneven_batches_keep_the_convention():
    x, y = normal(5, D), normal(5, 1, seed=1)
    model = NETWORKS["fcn"](6)
    whole = th.measures.kernel.pl_report(th.Problem(model, nn.MSELoss(), (x, y)), probes=1)
    parts = th.measures.kernel.pl_report(th.Problem(model, nn.MSELoss(), [(x[:2], y[:2]), (x[2:], y[2:])]), probes=1)
    assert parts.mu == pytest.approx(whole.mu, rel=1e-9)
    assert whole.curvature == pytest.approx(2 / 5)


def test_a_linear_model_contracts_as_predicted():
    x = normal(3, 5)
    model = nn.Linear(5, 1, bias=False).double()
    report = th.measures.kernel.pl_report(th.Problem(model, half_sum, (x, normal(3, 1, seed=2))), probes=1)
    vectors = torch.linalg.eigh(x @ x.T).eigenvectors
    y = model(x).detach() - vectors[:, :1]  # the slowest mode alone
    optimizer = torch.optim.SGD(model.parameters(), lr=report.rate)
    trace = th.train(model, half_sum, (x, y), optimizer, steps=4, progress=False)
    ratios = [b / a for a, b in zip(trace.loss, trace.loss[1:], strict=False)]
    assert ratios == pytest.approx([report.contraction**2] * 3, rel=1e-9)


def test_other_losses_have_no_pl_constant():
    problem = th.Problem(nn.Linear(D, 3).double(), nn.CrossEntropyLoss(), (normal(4, D), torch.tensor([0, 1, 2, 0])))
    with pytest.raises(ValueError, match=r"squared loss.*CrossEntropyLoss"):
        th.measures.kernel.pl_report(problem)
    report = th.linearity(problem, output=1, directions=1, segments=2)
    assert report.pl is None
    assert "not squared" in str(report)


def test_a_singular_kernel_promises_nothing():
    problem = problem_of(nn.Linear(2, 1, bias=False).double(), 4, features=2)
    report = th.measures.kernel.pl_report(problem, probes=1)
    assert not report.holds
    assert math.isinf(report.condition)
    assert "singular" in str(report)


# All together


def test_linearity_agrees_with_its_parts_and_leaves_the_model_as_found():
    model = NETWORKS["dropped"](8).train()
    problem = problem_of(model, 5)
    before = [p.detach().clone() for p in model.parameters()]
    report = th.linearity(problem, radius=0.5, samples=[0, 3], directions=2, segments=3, displacement=normal(problem.size))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert report.hessian.value == pytest.approx(th.measures.linearity.hessian_norm(problem, samples=[0, 3]).value, rel=1e-9)
    assert (report.deviation.sample, report.deviation.output) == report.hessian.where
    assert report.deviation.violations == 0
    assert report.drift.worst == pytest.approx(
        th.measures.kernel.kernel_drift(problem, radius=0.5, probes=2, displacement=normal(problem.size)).worst, rel=1e-9
    )
    assert report.in_degrees.width == model.width
    shares = [
        d / (r * report.gradient_norm) for d, r in zip(report.deviation.deviations, report.deviation.distances, strict=True)
    ]
    assert report.nonlinearity == pytest.approx(max(shares))
    assert report.deviation.distances[-1] == report.drift.distances[-1] == pytest.approx(float(normal(problem.size).norm()))


def test_reports_are_saved_and_read(tmp_path):
    report = th.linearity(problem_of(NETWORKS["fcn"](5), 3), directions=1, segments=2)
    report.save(tmp_path / "report")
    again = th.load(tmp_path / "report")
    assert again.rows() == report.rows()
    assert str(again) == str(report)
    assert "<table>" in again._repr_html_()


def test_same_seed_same_report():
    reports = [th.linearity(problem_of(NETWORKS["fcn"](5), 3), directions=2, segments=2, seed=3) for _ in range(2)]
    assert reports[0].rows() == reports[1].rows()


def test_layers_that_couple_or_draw_are_refused():
    coupled = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.raises(BatchCoupledError, match="mode='eval'"):
        th.linearity(problem_of(coupled, mode="train"))
    assert th.linearity(problem_of(coupled), directions=1, segments=2).deviation.violations == 0
    random = nn.Sequential(nn.Linear(D, 40), nn.Dropout(0.5), nn.Linear(40, 1)).double()
    with pytest.raises(NotRepeatableError, match="Dropout"):
        th.linearity(problem_of(random, mode="train", check=False))


def test_arguments_out_of_range():
    problem = problem_of(NETWORKS["fcn"](4))
    with pytest.raises(ValueError, match="radius must be a positive number"):
        th.linearity(problem, radius=0.0)
    with pytest.raises(ValueError, match="flat vector"):
        th.measures.kernel.kernel_drift(problem, displacement=torch.ones(3))


def test_float32_and_parameter_selections():
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1))
    problem = th.Problem(model, nn.MSELoss(), (normal(3, D).float(), normal(3, 1).float()), params="0.*")
    report = th.linearity(problem, directions=1, segments=2)
    assert report.deviation.violations == 0
    assert report.hessian.vector.shape == (problem.size,)


# In-degrees


def test_in_degrees_of_any_module():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 300), nn.Linear(300, 5)
    )
    report = th.measures.linearity.in_degree_report(model)
    assert report.degrees == (18, None, 32, 16, 300)
    assert report.width == 16
    assert report.unknown == ("1",)
    narrow = nn.Sequential(nn.Linear(9, 900), nn.Linear(900, 2), nn.Linear(2, 900), nn.Linear(900, 1))
    assert th.measures.linearity.in_degree_report(narrow).bottlenecks == ("2",)
    layers = th.measures.linearity.in_degree_report(nn.TransformerEncoderLayer(16, 2, 64))
    assert "self_attn" in layers.unknown
    assert "hessian_norm" in layers.rows()[0]["note"]
    assert th.measures.linearity.in_degree_report(nn.LSTM(4, 5)).degrees == (None,)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        th.measures.linearity.in_degree_report(3)


def test_in_degrees_of_graphs_and_scaled_layers():
    assert th.measures.linearity.in_degree_report(th.DagNetwork(fcn_graph(3, [40, 20]), seed=0)).degrees == (3, 40, 20)
    assert th.measures.linearity.in_degree_report(ntk_cnn((3, 8, 8), [4, 6])).degrees == (27, 36, 384)


# Ensembles


@pytest.mark.parametrize("name", ["fcn", "dropped", "skip"])
def test_ensembles_are_their_networks(name):
    graphs = [NETWORKS[name](6).graph for _ in range(2)]
    if name == "dropped":
        graphs = [with_drops(densenet_graph(D, [6, 6]), seed=s) for s in range(2)]
    networks = [th.DagNetwork(graph, seed=s) for s, graph in enumerate(graphs)]
    ensemble = Ensemble(networks)
    x = torch.stack([normal(3, D), normal(3, D, seed=1)])
    outputs = ensemble(ensemble.weights, x)
    norms, residuals = hessian_norms(lambda w: ensemble(w, x)[:, 0, 0], ensemble.weights, steps=40)
    for i, network in enumerate(networks):
        assert torch.allclose(outputs[i], network(x[i]), rtol=0, atol=1e-12)
        exact = th.measures.linearity.hessian_norm(th.Problem(network, half_sum, (x[i], x[i, :, :1]))).value
        assert float(norms[i]) == pytest.approx(exact, rel=1e-6)
    assert float(residuals.max()) < 1e-3


def test_convolutions_are_their_networks():
    ensemble = Convolutions(2, D, [4, 5], seed=0)
    x = normal(2, 3, D)
    for i in range(2):
        network = th.DagNetwork(cnn_graph(D, [4, 5]), seed=0)
        with torch.no_grad():
            for layer, weight in zip(network.layers, ensemble.matrices(ensemble.weights), strict=True):
                layer.weight.copy_(weight[i].reshape(-1))
        assert torch.allclose(ensemble(ensemble.weights, x)[i], network(x[i]), rtol=0, atol=1e-12)


def test_a_spectral_norm_in_train_mode_is_left_as_found():
    from torch.nn.utils.parametrizations import spectral_norm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), spectral_norm(nn.Linear(6, 2))).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    data = torch.randn(12, 4), torch.arange(12) % 2
    th.linearity(th.Problem(model, nn.CrossEntropyLoss(), data), output=0, progress=False)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
