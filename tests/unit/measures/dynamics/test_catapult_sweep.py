"""Sweeps over learning rates, the largest rate that converges, and checks 2 and 15 to 17 of catapult dynamics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import theodolite as th
from theodolite.experiments.catapult import kernels, sweeps
from theodolite.measures.dynamics.sweep import kernel_norm
from theodolite.measures.quadratic_models import GatedBilinear
from theodolite.models import ntk_cnn, ntk_fcn


def half_sum(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum()


def points(n: int = 6, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()[:, None]


def wide(seed: int = 0, width: int = 64) -> nn.Module:
    return ntk_fcn(3, width, 2, init="ntk_sign", seed=seed).double()


def problem(model: nn.Module | None = None, n: int = 6) -> th.Problem:
    return th.Problem(wide() if model is None else model, nn.MSELoss(), points(n))


def sweep(outer: th.Problem, rates=None, **settings) -> th.measures.dynamics.CatapultSweep:
    return th.catapult_sweep(outer, rates, **{"steps": 150, "progress": False, **settings})


# Check 2: the quadratic twin of a two-layer ReLU network is the gated form


def by_hand(net: nn.Module, away: dict[str, Tensor], x: Tensor) -> Tensor:
    """f + Jδ + ½δᵀHδ by two derivatives along the displacement."""
    start = {name: p.detach() for name, p in net.named_parameters()}

    def along(t: Tensor) -> Tensor:
        return functional_call(net, {name: w + t * away[name] for name, w in start.items()}, (x,))

    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    slope, bend = jvp(lambda t: jvp(along, (t,), (one,))[1], (zero,), (one,))
    return along(zero) + slope + 0.5 * bend


def test_check_02_the_quadratic_twin_is_the_gated_form():
    x = points(7, 5, seed=3)[0]
    net = ntk_fcn(5, 40, 2, init="ntk_sign", seed=1).double()
    generator = torch.Generator().manual_seed(2)
    away = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in net.named_parameters()}
    weights = torch.randn(7, 1, generator=generator, dtype=torch.float64)
    twin, gated = th.quadratize(net), GatedBilinear(net.fc1.weight, net.fc2.weight[0])
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.add_(away[name])
        gated.u.add_(away["fc1.weight"])
        gated.v.add_(away["fc2.weight"][0])
    assert torch.allclose(twin(x)[:, 0], gated(x), rtol=0, atol=1e-8)
    assert torch.allclose(by_hand(net, away, x)[:, 0], gated(x), rtol=0, atol=1e-8)
    du, dv = torch.autograd.grad((weights[:, 0] * gated(x)).sum(), [gated.u, gated.v])
    first, last = torch.autograd.grad((weights * twin(x)).sum(), list(twin.parameters()))
    assert torch.allclose(first, du, rtol=0, atol=1e-8)
    assert torch.allclose(last[0], dv, rtol=0, atol=1e-8)


# The sweep


def test_linear_models_have_two_regimes():
    found = sweep(problem(), ratios=[0.5, 0.9, 1.1, 3.0], models=["linear"])
    assert [row["regime"] for row in found.rows()] == ["monotone", "monotone", "divergent", "divergent"]
    assert [row["ratio"] for row in found.rows()] == pytest.approx([0.5, 0.9, 1.1, 3.0])
    lost = [row for row in found.rows() if row["regime"] == "divergent"]
    assert all(row["final_loss"] == math.inf and row["diverged_at"] is not None for row in lost)
    assert "linear: monotone from 0.5 to 0.9, divergent from 1.1 to 3" in found.sentence()


def test_networks_and_quadratic_models_catapult_and_the_quadratic_one_ends_first():
    found = sweep(problem(wide(width=512)), ratios=[0.5, 1.5, 3.0], models=["network", "quadratic"])
    assert [row["regime"] for row in found.select(model="network")][:2] == ["monotone", "catapult"]
    assert [row["regime"] for row in found.select(model="quadratic")] == ["monotone", "catapult", "divergent"]


def test_a_catapult_must_have_lowered_the_kernel():
    found = sweep(problem(wide(width=512)), ratios=[1.5], models=["network"])
    (row,) = found.rows()
    assert row["regime"] == "catapult"
    assert row["peak_loss"] > row["first_loss"] > row["final_loss"]


def test_absolute_rates_are_taken_as_they_are():
    outer = problem()
    critical = th.critical_learning_rate(outer, by="kernel", progress=False).value
    found = sweep(outer, [0.4 * critical, 0.2 * critical], models=["network"])
    assert [row["rate"] for row in found.rows()] == pytest.approx([0.2 * critical, 0.4 * critical])
    assert found.critical[0] == pytest.approx(critical)


def test_the_fleet_does_what_a_loop_does():
    outer = problem()
    (row,) = sweep(outer, ratios=[0.7], models=["network"], steps=20).rows()
    model = wide()
    x, y = points()
    for _ in range(20):
        gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= row["rate"] * g
    assert row["final_loss"] == pytest.approx(float(nn.functional.mse_loss(model(x), y).detach()), rel=1e-10)


def test_seeds_draw_the_layers_anew_and_seed_0_is_the_model_as_it_is():
    outer = problem()
    found = sweep(outer, ratios=[0.5], models=["network"], seeds=3, steps=3)
    first = [row["first_loss"] for row in found.rows()]
    assert [row["seed"] for row in found.rows()] == [0, 1, 2]
    assert first[0] == pytest.approx(outer.loss())
    assert len({round(loss, 9) for loss in first}) == 3
    again = sweep(outer, ratios=[0.5], models=["network"], seeds=[2], steps=3)
    assert again.rows()[0]["first_loss"] == pytest.approx(first[2])


def test_a_factory_replaces_the_initialisation():
    found = sweep(problem(), ratios=[0.5], models=["network", "linear"], seeds=[4, 7], steps=3, factory=wide)
    x, y = points()
    expected = [float(nn.functional.mse_loss(wide(seed)(x), y).detach()) for seed in (4, 7)]
    for model in ("network", "linear"):
        assert [row["first_loss"] for row in found.select(model=model)] == pytest.approx(expected)


def test_each_seed_is_made_once():
    made = []

    def factory(seed: int) -> nn.Module:
        made.append(seed)
        return wide(seed)

    sweep(problem(), ratios=[0.3, 0.5, 0.7], models=["network"], seeds=2, steps=2, factory=factory)
    assert made == [0, 1, 0, 1]  # for the critical rates, and for the fleet


def test_batches_of_a_problem_are_joined():
    x, y = points(6)
    whole = sweep(problem(), ratios=[0.5], models=["network"], steps=10)
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    joined = sweep(th.Problem(wide(), nn.MSELoss(), parts), ratios=[0.5], models=["network"], steps=10)
    assert joined.rows()[0]["final_loss"] == pytest.approx(whole.rows()[0]["final_loss"], rel=1e-9)


def test_test_data_give_the_best_on_the_way_and_nothing_for_a_run_that_diverged():
    x, y = points(20, seed=5)
    found = sweep(problem(), ratios=[0.5, 2.0], models=["linear"], test=(x, y), every=3)
    kept, lost = found.rows()
    assert 0 <= kept["best_test_accuracy"] <= 1
    assert kept["best_test_loss"] <= float(nn.functional.mse_loss(wide()(x), y).detach()) + 1e-12
    assert (lost["regime"], lost["best_test_loss"], lost["best_test_accuracy"]) == ("divergent", None, None)


def test_minibatches():
    found = sweep(problem(), ratios=[0.3], models=["network"], batch_size=2, steps=30)
    (row,) = found.rows()
    assert row["final_loss"] < row["first_loss"]


class Gated(GatedBilinear):
    """With outputs (n, 1), as the network has them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., None]


def test_a_twin_in_closed_form_may_have_other_parameters():
    outer, ratios = problem(wide(width=512)), [0.5, 1.5, 2.5]
    closed = {"quadratic": lambda net: Gated(net.fc1.weight, net.fc2.weight[0])}
    ours, theirs = (sweep(outer, ratios=ratios, models=["quadratic"], twins=twins).rows() for twins in (closed, None))
    assert [row["regime"] for row in ours] == [row["regime"] for row in theirs] == ["monotone", "catapult", "divergent"]
    assert [row["peak_loss"] for row in ours][:2] == pytest.approx([row["peak_loss"] for row in theirs][:2], rel=1e-8)


@pytest.mark.parametrize("activation", ["relu", "swish"])
def test_kernel_norm_of_a_convolutional_twin(activation):
    """The products of its kernel run the network inside a transform, where no replacement of convolutions may step in."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    net = ntk_cnn((2, 4, 4), 6, 2, activation=activation, seed=0).double()
    outer = th.Problem(net, nn.MSELoss(), (x, torch.zeros(5, 1).double()))
    exact = float(torch.linalg.eigvalsh(th.tangent_kernel(net, x))[-1])
    assert kernel_norm(outer, th.quadratize(net)) == pytest.approx(exact, rel=2e-3)
    assert torch.allclose(th.tangent_kernel(th.quadratize(net), x), th.tangent_kernel(net, x), rtol=1e-8)


def test_the_model_is_left_as_found():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    sweep(problem(model), ratios=[0.5, 1.5], seeds=2, steps=5, models=["network", "linear"])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_bad_input_says_what_is_accepted():
    outer = problem()
    with pytest.raises(ValueError, match=r"'network', 'linear', 'quadratic'.*cubic"):
        sweep(outer, models=["cubic"])
    with pytest.raises(ValueError, match="models must be some of"):
        sweep(outer, models=[])
    with pytest.raises(ValueError, match=r"has no reset_parameters.*factory"):
        sweep(problem(Bare()), seeds=2, steps=2)
    for bad in ([], [0.0], [-1.0], [math.inf], [math.nan]):
        with pytest.raises(
            ValueError, match=r"must be (positive numbers|a sequence with at least one)|must be a positive number"
        ):
            sweep(outer, bad)
        with pytest.raises(
            ValueError, match=r"must be (positive numbers|a sequence with at least one)|must be a positive number"
        ):
            sweep(outer, ratios=bad)
    for bad in (0, [1, 1]):
        with pytest.raises(ValueError, match="seeds must be"):
            sweep(outer, seeds=bad)


# The largest rate that converges


def test_a_quadratic_loss_has_no_window():
    x = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    bowl = th.Problem(nn.Linear(2, 1, bias=False).double(), half_sum, (x, torch.ones(2, 1).double()))
    found = th.find_max_learning_rate(bowl, progress=False)  # λ = 4
    assert found.value == pytest.approx(0.5, rel=0.011)
    assert found.critical == pytest.approx(0.5, rel=1e-3)
    assert found.error <= 0.01 * found.value
    assert {row["converged"] for row in found.rows()} == {True, False}
    assert f"{found.value:.4g}" in found.sentence()


@pytest.mark.parametrize("m", [1000, 4000])
def test_a_quadratic_model_converges_up_to_twice_the_critical_rate(m):
    net = ntk_fcn(5, m, 2, init="ntk_sign", seed=0).double()
    x, y = torch.ones(1, 5, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    model = Gated(net.fc1.weight, net.fc2.weight[0])
    kernel = float(model.kernel(x))
    found = th.find_max_learning_rate(th.Problem(model, half_sum, (x, y)), progress=False, tol=0.005)
    assert 3.9 <= found.value * kernel <= 4.05
    assert found.ratio == pytest.approx(2.0, abs=0.05)


def test_the_search_leaves_the_model_as_found_and_refuses_what_makes_no_bracket():
    model = wide()
    before = [p.detach().clone() for p in model.parameters()]
    outer = problem(model)
    th.find_max_learning_rate(outer, steps=60, tol=0.1, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for tol in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="tol must be a number above 0 and below 1"):
            th.find_max_learning_rate(outer, tol=tol, progress=False)
    for low, high in ((2.0, 1.0), (-1.0, 1.0), (0.1, math.inf)):
        with pytest.raises(ValueError, match=r"0 < low < high|(low|high) must be a positive number"):
            th.find_max_learning_rate(outer, low=low, high=high, progress=False)


# Checks 15 to 17: trends of the source, at a small size


def test_check_15_networks_and_their_twins_below_and_above_the_critical_rate():
    """Two-layer network of width 512 on digits. Measured: f and f_quad are 0.8 and 1.1 % from f_lin, and all seeds gain."""
    study = sweeps.sweep(sweeps.MNIST)
    p = study.parameters("tiny").but(width=512, n=64, steps=100, ratios=(0.4, 0.8, 1.2, 1.5))
    (job,) = study.jobs(p)
    rows = list(study.run(job))
    assert sweeps.diverging(rows) == 1.0
    for model in ("network", "quadratic"):
        assert sweeps.distance(rows, model) < 0.05, sweeps.NAMES[model]
        assert sweeps.converging(model, 1.5)(rows) == 1.0
        assert sweeps.seeds_that_gain(rows, model) >= 2 / 3 - 1e-9


def test_figures_that_show_a_panel_again_share_its_runs():
    by_accuracy = (sweeps.FigureB5, sweeps.FigureB6, sweeps.FigureB7)
    for size in ("tiny", "laptop", "paper"):
        again = [job for figure in by_accuracy for job in figure().chosen_jobs(size)]
        assert again == sweeps.Figure34().chosen_jobs(size)
    assert {figure.study.name for figure in (sweeps.Figure34, *by_accuracy)} == {"catapult.Sweep"}


@pytest.mark.parametrize("figure", [kernels.FigureB2, kernels.FigureB3])
def test_check_16_what_leaves_linear_dynamics_is_positive_along_the_top_eigenvector(figure):
    jobs = [job for job in figure().chosen_jobs("tiny") if job["data"] == "cifar10"]
    assert [job["architecture"] for job in jobs] == ["fc", "cnn"]
    rows = [row for job in jobs for row in figure.study.run(job)]
    assert kernels.while_large("rho_f")(rows) > 0
    assert kernels.while_large("rho_K")(rows) > 0
    assert kernels.share_at_peak(rows) > 0.9


def test_check_17_the_two_critical_rates_agree_for_wide_networks():
    experiment = kernels.CriticalRate()
    rows = [experiment.run(job) for job in experiment.jobs(experiment.parameters("tiny"))]
    assert {row["seed"] for row in rows} == {0, 1, 2}
    assert kernels.smallest_fall(rows) > 1
    assert [row["width"] for row in rows if row["width"] == 2048]
    assert all(verdict.measured <= 0.1 for verdict in experiment.judge(rows, "tiny") if "2048" in verdict.text)
