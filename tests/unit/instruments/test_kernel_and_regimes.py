"""Kernel, linearity and regimes on planted cases: what was put there is found, by its name, with the right number."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import registry
from theodolite.instruments.subset import subset
from theodolite.measures.dynamics.weight_linearity import RADII, WeightLinearity, weight_linearity
from theodolite.results import Severity

OURS = ["kernel", "linearity", "regimes"]


def points(samples: int = 16, outputs: int = 1, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator).double()
    return x, scale * torch.randn(samples, outputs, generator=generator).double()


def wide(*, width: int = 512, residual: float | None = None) -> th.Problem:
    """Two layers of many ReLU units in the kernel parameterisation, squared loss; targets that far from the outputs."""
    model = th.models.ntk_fcn(4, width=width, depth=2, seed=0).double()
    x, y = points()
    return th.Problem(model, nn.MSELoss(), (x, y if residual is None else model(x).detach() + residual))


def narrow(*, scale: float = 1.0, size: float = 0.3) -> th.Problem:
    """Six units, small weights; with large targets the residuals are large too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size)
    return th.Problem(model, nn.MSELoss(), points(scale=scale))


def line() -> th.Problem:
    torch.manual_seed(0)
    return th.Problem(nn.Linear(4, 1).double(), nn.MSELoss(), points())


def survey(problem: th.Problem, *only: str, **more) -> tuple[th.instruments.Survey, dict[str, th.Finding]]:
    found = th.survey(problem, only=list(only) or OURS, progress=False, **more)
    assert found.sound, found
    return found, {f.label: f for f in found.findings}


def dense_jacobian(problem: th.Problem, model: nn.Module | None = None) -> torch.Tensor:
    """(outputs, parameters), row by row by plain backward."""
    model = problem.model if model is None else model
    (batch,) = problem.data
    output = model(*batch.args).reshape(-1)
    rows = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in output]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


# The kernel


def test_the_kernel_is_that_of_the_dense_jacobian():
    problem = narrow()
    found, by = survey(problem, "kernel", lr=0.2)
    jacobian = dense_jacobian(problem)
    values = torch.linalg.eigvalsh(jacobian @ jacobian.T)
    report = found.results["kernel"]
    assert by["tangent kernel"].value == pytest.approx(float(values[-1]), rel=1e-9)
    assert report.condition == pytest.approx(float(values[-1] / values[0]), rel=1e-4)
    curvature = 2 / 16  # of a mean over 16 numbers
    assert report.by_outputs.value == pytest.approx(2 / (curvature * float(values[-1])), rel=1e-4)
    assert report.pl.mu == pytest.approx(curvature * float(values[0]), rel=1e-4)
    assert report.pl.contraction == pytest.approx(max(abs(1 - 0.2 * curvature * v) for v in values.tolist()), rel=1e-9)
    (batch,) = problem.data
    loss = nn.functional.mse_loss(problem.model(*batch.args), batch.target)
    hessian = th.testing.dense_hessian(lambda: loss, list(problem.model.parameters()))
    assert report.by_hessian.value == pytest.approx(2 / float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-4)


def test_hessian_and_kernel_agree_in_a_wide_network_and_not_under_large_residuals():
    _, calm = survey(wide(residual=0.01), "kernel")
    assert calm["kernel sets the edge"].value == pytest.approx(1.0, abs=0.01)
    assert calm["kernel sets the edge"].severity is Severity.GOOD
    _, rough = survey(narrow(scale=20.0), "kernel")
    assert rough["residual curvature"].value > 3
    assert "Trust the Hessian" in rough["residual curvature"].advice


def test_the_speed_that_the_kernel_promises_is_kept():
    problem = wide(residual=0.01)
    found, by = survey(problem, "kernel", lr=1.0)
    contraction = found.results["kernel"].pl.contraction
    assert by["PL condition"].severity is Severity.GOOD
    model = copy.deepcopy(problem.model)
    (batch,) = problem.data
    losses = [row["loss"] for row in th.train(model, nn.MSELoss(), (*batch.args, batch.target), _sgd(1.0), steps=20).rows()]
    assert all(b <= a * contraction**2 * 1.05 for a, b in itertools.pairwise(losses))


def _sgd(rate: float):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def test_more_outputs_than_parameters_make_the_kernel_singular():
    _, by = survey(line(), "kernel")
    assert by["no PL condition"].value == pytest.approx(0.0, abs=1e-12)
    assert by["kernel sets the edge"].value == pytest.approx(1.0)


def test_other_losses_are_compared_by_gauss_newton_and_some_cannot_be():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, _ = points(30)
    found, by = survey(th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(30) % 3)), "kernel")
    assert found.results["kernel"].by_outputs.by == "gauss_newton"
    assert "PL condition" not in by
    _, flat = survey(th.Problem(model, nn.L1Loss(), (x, points(30, 3)[1])), "kernel")
    assert "does not curve" in flat["no kernel rate"].sentence


def test_many_samples_are_thinned_out_and_many_outputs_known_by_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = points(500, 2)
    problem = th.Problem(model, nn.MSELoss(), (x, y))
    found, by = survey(problem, "kernel")
    assert found.results["kernel"].samples == 200
    assert "200 of the 500 samples, 2 outputs each" in by["tangent kernel"].sentence
    head = nn.Linear(4, 300).double()
    found, by = survey(th.Problem(head, nn.MSELoss(), points(12, 300)), "kernel")
    report = found.results["kernel"]
    assert not report.formed
    gram = points(12)[0] @ points(12)[0].T + 1  # of a linear layer with bias, times the identity of the outputs
    assert report.largest == pytest.approx(float(torch.linalg.eigvalsh(gram)[-1]), rel=1e-3)
    assert "known by its products only" in by["tangent kernel"].sentence


def test_a_part_of_the_data_is_spread_evenly_and_keeps_the_objective():
    x, y = torch.arange(100.0).double()[:, None], torch.arange(100) // 10
    model = nn.Linear(1, 10).double()
    batches = [(x[:30], y[:30]), (x[30:], y[30:])]
    part = subset(th.Problem(model, nn.CrossEntropyLoss(), batches), 20)
    (batch,) = part.data
    assert batch.size == 20
    assert set(batch.target.tolist()) == set(range(10))
    direct = nn.functional.cross_entropy(model(*batch.args), batch.target)
    assert part.loss() == pytest.approx(float(direct.detach()))


# Linearity


def test_a_wide_network_is_in_the_kernel_regime_and_a_narrow_one_is_not():
    found, by = survey(wide(width=2048), "linearity")
    assert by["kernel regime"].value < 0.03
    assert found.results["linearity"].fall > 0.5
    _, other = survey(narrow(), "linearity")
    assert other["feature regime"].value > 0.5
    assert other["feature regime"].value > 20 * by["kernel regime"].value
    assert other["linear radius"].value < by["linear radius"].value


def test_the_drift_is_that_of_a_run_made_in_the_plainest_way():
    problem = narrow()
    result = weight_linearity(problem, 0.2, steps=10)
    model = copy.deepcopy(problem.model)
    (batch,) = problem.data
    before = dense_jacobian(problem, model)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    here = model(*batch.args).detach()
    th.train(model, nn.MSELoss(), (*batch.args, batch.target), _sgd(0.2), steps=10)
    after = dense_jacobian(problem, model)
    kernels = [j @ j.T for j in (before, after)]
    truth = torch.linalg.matrix_norm(kernels[1] - kernels[0], 2) / torch.linalg.matrix_norm(kernels[0], 2)
    assert result.drift == pytest.approx(float(truth), rel=1e-6)
    away = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - start
    change = (model(*batch.args).detach() - here).reshape(-1)
    missed = (change - before @ away).norm() / change.norm()
    assert result.path[-1]["missed"] == pytest.approx(float(missed), rel=1e-6)
    assert result.path[-1]["distance"] == pytest.approx(float(away.norm() / start.norm()), rel=1e-9)


class Bent(nn.Module):
    """f = x (w + w²/2) at w = 1: along its only direction a step t has change 2t + t²/2, of which the twin misses t²/2."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1).double())

    def forward(self, x):
        return x * (self.w + self.w.square() / 2)


def test_the_radius_of_the_linear_twin_is_where_theory_puts_it():
    x = torch.ones(12, 1).double()
    result = weight_linearity(th.Problem(Bent(), nn.MSELoss(), (x, 5 * x)), 0.01, steps=5)
    # Uphill in w: t²/2 = 0.1 (2t + t²/2), t = 4/9; the grid of radii is interpolated.
    assert result.radius[0] == pytest.approx(4 / 9, rel=0.02)
    assert result.radius[1] == pytest.approx(0.0, abs=1e-12)  # all samples say the same
    assert not result.linear


def test_a_linear_model_is_called_linear_and_zeros_are_not():
    _, by = survey(line(), "linearity")
    assert "linear model" in by
    zeros = narrow(size=0.0)
    assert "linear model" not in survey(zeros, "linearity", lr=0.1)[1]


def test_a_narrow_layer_is_named():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)]
    _, by = survey(th.Problem(nn.Sequential(*layers).double(), nn.MSELoss(), points()), "linearity")
    assert by["bottleneck"].value == 2
    assert "The units of 4 read few inputs, 2," in by["bottleneck"].sentence
    assert "bottleneck" not in survey(wide(), "linearity")[1]


def test_a_rate_that_tells_nothing():
    _, still = survey(wide(), "linearity", lr=1e-9)
    assert "regime not told" in still
    _, wild = survey(narrow(), "linearity", lr=1e4)
    assert "blew up" in wild["regime not told"].sentence


def test_a_loss_below_zero_is_never_gone():
    problem = narrow()
    inner = problem.loss_function
    for shift in (1e3, 0.9 * problem.loss()):  # below 0 from the start, or from some step on
        below = th.Problem(problem.model, lambda out, t, shift=shift: inner(out, t) - shift, list(problem.data))
        _, by = survey(below, "linearity", lr=0.1)
        assert "A loss below 0 has no end to compare with" in by["regime not told"].sentence
        assert not {"kernel regime", "between regimes", "feature regime"} & by.keys()


def test_the_error_of_the_drift_is_that_of_looking_at_other_samples():
    """One run, its kernel on twelve draws of samples: the jackknife error is as large as the spread, within a factor of two."""
    problem = narrow()
    generator = torch.Generator().manual_seed(1)
    drifts, errors = [], []
    for _ in range(12):
        x = torch.randn(40, 4, generator=generator).double()
        few = th.Problem(problem.model, nn.MSELoss(), (x, x[:, :1]))
        result = weight_linearity(problem, 0.2, steps=5, kernel_on=few)
        drifts.append(result.drift)
        errors.append(result.drift_error)
    spread = float(torch.tensor(drifts).std())
    assert spread / 2 < sum(errors) / len(errors) < 2 * spread


def test_half_precision_is_trained_in_float64_and_left_as_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
    before = copy.deepcopy(model.state_dict())
    x, y = (t.bfloat16() for t in points())
    found, _ = survey(th.Problem(model, nn.MSELoss(), (x, y)), lr=0.1)
    assert isinstance(found.results["linearity"], WeightLinearity)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Regimes


def test_a_wide_network_has_a_catapult_window_and_a_linear_model_none():
    found, by = survey(wide(), "regimes")
    diagram = found.results["regimes"]
    assert by["catapult window"].value == diagram.window[1]
    assert 1.0 < diagram.window[0] <= 1.5
    assert diagram.example["kernel_after"] < 0.9 * diagram.example["kernel_before"]
    assert diagram.example["peak_loss"] > 1.5 * diagram.example["first_loss"]
    assert {row["regime"] for row in diagram.network() if row["ratio"] < 1} == {"monotone"}
    assert {row["model"] for row in diagram.runs} == {"network", "quadratic"}
    found, by = survey(line(), "regimes")
    assert found.results["regimes"].window == ()
    assert "quadratic" in by["no catapult window"].sentence


def test_the_diagram_shows_what_a_plain_run_does():
    problem = wide()
    diagram = survey(problem, "regimes", lr=2.0)[0].results["regimes"]
    (own,) = [row for row in diagram.network() if row["rate"] == pytest.approx(2.0)]
    model = copy.deepcopy(problem.model)
    (batch,) = problem.data
    trace = th.train(model, nn.MSELoss(), (*batch.args, batch.target), _sgd(2.0), steps=60, evaluate=True)
    assert own["final_loss"] == pytest.approx(trace.final_loss, rel=1e-6)
    assert own["peak_loss"] == pytest.approx(max(trace.loss), rel=1e-6)
    assert own["regime"] == "monotone"


def test_other_optimizers_run_as_they_are_or_plain_descent_stands_in():
    problem = narrow()
    heavy = torch.optim.SGD(problem.parameters, lr=0.1, momentum=0.9)
    found, _ = survey(problem, "regimes", optimizer=heavy)
    diagram = found.results["regimes"]
    assert "β = 0.9" in diagram.critical.rule
    assert diagram.runs[-1]["model"] == "network"
    found, by = survey(problem, "regimes", optimizer=torch.optim.Adadelta(problem.parameters, lr=0.1))
    assert found.results["regimes"].critical.rule == "2/λ"
    assert any("plain gradient descent, because" in f.sentence for f in by.values())


def test_batches_that_cannot_be_joined_are_run_one_rate_after_the_other():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            return self.inner(x[..., None]).mean(1)

    torch.manual_seed(0)
    model = Mean().double()
    batches = [(torch.randn(6, length).double(), torch.randn(6, 1).double()) for length in (3, 5)]
    problem = th.Problem(model, nn.MSELoss(), batches)
    found, _ = survey(problem)
    assert found.results["regimes"].cost.route == "trial runs"
    assert len(found.results["regimes"].network()) == 13


# What they share


@pytest.mark.parametrize("name", OURS)
def test_every_effort_runs_draws_and_is_saved(name, tmp_path):
    problem = wide()
    instrument = registry.get(name)
    for effort in instrument.efforts:
        context = th.instruments.SurveyContext(problem, lr=1.0)
        assert instrument.applies(context) == ""
        work = instrument.cost(context, **effort)
        assert work.gradients > 0
        result = instrument.run(context, **effort)
        result.save(tmp_path / name)
        back = th.load(tmp_path / name)
        assert [f.sentence for f in instrument.findings(context, back)] == [
            f.sentence for f in instrument.findings(context, result)
        ]
        assert instrument.rows(back)
        assert instrument.figure({name: back}) is not None
    costs = [context.timings.seconds(instrument.cost(context, **effort)) for effort in instrument.efforts]
    assert costs == sorted(costs, reverse=True)


def test_what_is_no_function_sample_by_sample_is_left_out_with_the_remedy():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    found, _ = survey(th.Problem(model, nn.MSELoss(), points(), mode="train"))
    skipped = {row["instrument"]: row["reason"] for row in found.plan if row["state"] == "skipped"}
    assert set(skipped) == set(OURS)
    assert all("mode='eval'" in reason for reason in skipped.values())


def test_weights_given_batch_by_batch_leave_no_part_to_take():
    x, y = points()
    problem = th.Problem(narrow().model, nn.MSELoss(), [(x[:6], y[:6]), (x[6:], y[6:])], batch_weight=[1.0, 3.0])
    found, _ = survey(problem)
    reasons = [row["reason"] for row in found.plan if row["state"] == "skipped"]
    assert len(reasons) == 3
    assert all("function of the batch" in reason for reason in reasons)


def test_the_model_and_the_random_numbers_are_left_as_found():
    problem = wide()
    before = copy.deepcopy(problem.model.state_dict())
    random = torch.get_rng_state()
    survey(problem, lr=1.0)
    assert all(torch.equal(before[name], value) for name, value in problem.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in problem.model.parameters())


def test_radii_reach_from_a_thousandth_to_ten_times_the_weights():
    assert RADII[0] == pytest.approx(1e-3)
    assert RADII[-1] == pytest.approx(10.0)
    assert all(math.isclose(b / a, RADII[1] / RADII[0]) for a, b in itertools.pairwise(RADII))
