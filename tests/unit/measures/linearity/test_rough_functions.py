"""Linearity: kinks without a name, fast oscillations, displacements, zero kernels, and refusals in plain words."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import theodolite as th
from theodolite.measures.kernel.problem_views import TRIAL_SEEDS, third_difference, trial_step
from theodolite.models import ntk_fcn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = normal(6, 3), normal(6, 2, seed=1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def problem(**options) -> th.Problem:
    return th.Problem(network(), nn.MSELoss(), (X, Y), **options)


class Hidden(nn.Module):
    """One hidden layer with any function."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.function = nn.Linear(3, 5).double(), nn.Linear(5, 1).double(), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Sine(nn.Module):
    """sin(4πw), whose second derivative vanishes at five equally spaced points of the segment 0 .. 1."""

    def __init__(self, times: float = 4.0) -> None:
        super().__init__()
        self.w, self.times = nn.Parameter(torch.zeros(1).double()), times

    def forward(self, x):
        return torch.sin(self.times * math.pi * self.w) * torch.ones(len(x), 1, dtype=x.dtype)


# What a Hessian at points does not see

ROUGH = {
    "relu": torch.relu,
    "clamp": lambda h: h.clamp(min=0),
    "maximum": lambda h: torch.maximum(h, 0 * h),
    "minimum": lambda h: torch.minimum(h, 0 * h),
    "where": lambda h: torch.where(h > 0, h, 0 * h),
    "a comparison": lambda h: h * (h > 0),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "selu": F.selu,
    "sort": lambda h: h.sort(-1)[0],
    "topk": lambda h: h.topk(5)[0],
    "jumps": lambda h: torch.floor(h) + h * h,
}


@pytest.mark.parametrize("name", ROUGH)
def test_rough_functions_are_not_certified(name):
    rough = th.Problem(Hidden(ROUGH[name]), nn.MSELoss(), (X, Y[:, :1]))
    found = th.measures.linearity.linearity_deviation(rough, radius=2.0, directions=0, segments=2, progress=False)
    assert not found.certified
    assert "not valid" in str(found) or "uncertain" in str(found)


@pytest.mark.parametrize(
    "function", [torch.tanh, F.gelu, F.softplus, lambda h: torch.logsumexp(h, -1, keepdim=True).expand(-1, 5)]
)
def test_smooth_functions_are(function):
    smooth = th.Problem(Hidden(function), nn.MSELoss(), (X, Y[:, :1]))
    found = th.measures.linearity.linearity_deviation(smooth, radius=2.0, directions=2, segments=2, progress=False)
    assert found.certified
    assert found.violations == 0
    assert "estimated from the Hessian norm at 2 points" in str(found)


def test_oscillations_between_the_points_are_seen_or_reported():
    data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    slow = th.measures.linearity.linearity_deviation(
        th.Problem(Sine(), nn.MSELoss(), data), directions=0, segments=5, progress=False
    )
    assert slow.worst == pytest.approx(4 * math.pi)
    assert slow.certificate == pytest.approx(0.5 * (4 * math.pi) ** 2)
    assert slow.certified
    assert slow.violations == 0
    fast = th.measures.linearity.linearity_deviation(
        th.Problem(Sine(256.0), nn.MSELoss(), data), directions=0, segments=5, progress=False
    )
    assert not fast.certified


# Third differences


def test_a_constant_does_not_hide_a_third_difference():
    """Judged by the size of the outputs, 1e6 + t³ would be a quadratic to 1e-5."""
    cubic = [torch.tensor([1e6 + t**3], dtype=torch.float64) for t in range(4)]
    size, scale = third_difference(cubic)
    assert size == pytest.approx(6.0, rel=1e-6)
    assert scale == pytest.approx(27.0)
    assert third_difference([torch.tensor([1e6 + t**2]) for t in range(4)])[0] == 0.0  # in float32, rounding taken off


def test_trial_steps_are_not_those_of_everyday_seeds():
    """Weights drawn with seed 0 must not be parallel to the step, or a homogeneous network looks quadratic along it."""
    weights = {"w": normal(40, 30)}
    steps = [trial_step(weights, seed)["w"] for seed in TRIAL_SEEDS]
    for step in steps:
        assert abs(float(F.cosine_similarity(step.flatten(), weights["w"].flatten(), dim=0))) < 0.15
        assert step.dtype == torch.float64
        assert float(step.std()) == pytest.approx(float(weights["w"].abs().mean()) + 0.1, rel=0.1)
    assert abs(float(F.cosine_similarity(steps[0].flatten(), steps[1].flatten(), dim=0))) < 0.15


@pytest.mark.parametrize("depth", [2, 3])
def test_networks_of_seed_0_are_not_called_quadratic(depth):
    from theodolite.measures.dynamics.critical import is_quadratic, is_quadratic_model

    model = ntk_fcn(3, 16, depth, seed=0).double()
    outer = th.Problem(model, nn.MSELoss(), (X, Y[:, :1]))
    assert not is_quadratic_model(outer)
    assert not is_quadratic(outer)
    assert is_quadratic_model(th.Problem(th.quadratize(model), nn.MSELoss(), (X, Y[:, :1])))
    assert is_quadratic(th.Problem(th.linearize(model), nn.MSELoss(), (X, Y[:, :1])))


def test_a_large_constant_output_does_not_make_a_model_quadratic():
    from theodolite.measures.dynamics.critical import is_quadratic_model

    class Lifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x) + 1e12

    assert not is_quadratic_model(th.Problem(Lifted(), nn.MSELoss(), (X, Y)))


# Displacements and kernels


def test_a_drift_quotes_the_distance_gone():
    found = th.measures.kernel.kernel_drift(problem(), radius=0.1, probes=1, displacement=10 * normal(32), progress=False)
    assert found.worst == found.drifts[found.places.index("displacement")]
    assert f"distance {float((10 * normal(32)).norm()):.3g} (displacement)" in str(found)
    assert [row["distance"] for row in found.rows()] == pytest.approx([0.1, 0.1, float((10 * normal(32)).norm())])


def test_a_zero_kernel_is_refused():
    nothing = th.Problem(nn.Linear(3, 1, bias=False).double(), nn.MSELoss(), (0 * X, Y[:, :1]))
    with pytest.raises(ValueError, match="tangent kernel is zero"):
        th.measures.kernel.kernel_drift(nothing, probes=1, progress=False)
    with pytest.raises(ValueError, match="tangent kernel is zero"):
        th.measures.kernel.pl_report(nothing, probes=1, progress=False)


def test_a_rate_above_the_largest_diverges():
    report = th.measures.kernel.pl_report(problem(), probes=1, rate=100.0, progress=False)
    assert report.contraction > 1
    assert "At rate 100 descent diverges" in str(report)
    assert "contracts" not in str(report)
    for rate in (-1.0, 0.0, math.inf):
        with pytest.raises(ValueError, match="rate must be a positive number"):
            th.measures.kernel.pl_report(problem(), probes=1, rate=rate)


# Refusals


def test_what_is_no_choice_of_outputs():
    for bad in (0.5, [0.5], "0"):
        with pytest.raises(ValueError, match=r"output.* must be an integer of at least 0"):
            th.measures.linearity.hessian_norm(problem(), output=bad)
    with pytest.raises(ValueError, match=r"one output of one sample.*linearity\(\)"):
        th.measures.linearity.linearity_deviation(problem(), output=[0, 1])


@pytest.mark.parametrize(
    "measure",
    [
        th.measures.linearity.hessian_norm,
        th.linearity,
        th.measures.linearity.linearity_deviation,
        th.measures.kernel.kernel_drift,
        th.measures.kernel.pl_report,
    ],
)
def test_a_module_is_no_problem(measure):
    with pytest.raises(TypeError, match=r"takes a theodolite\.Problem.*Got Sequential"):
        measure(network())


def test_weights_given_batch_by_batch_do_not_matter_for_an_output():
    batches = [(X[:2], Y[:2]), (X[2:], Y[2:])]
    plain = th.Problem(network(), nn.MSELoss(), batches)
    weighted = th.Problem(network(), nn.MSELoss(), batches, batch_weight=[1.0, 2.0])
    values = [th.measures.linearity.hessian_norm(each, output=1, samples=4).value for each in (plain, weighted)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_embeddings_look_up():
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Tanh(), nn.Embedding(8, 64), nn.Linear(64, 50))
    report = th.measures.linearity.in_degree_report(model)
    assert report.degrees == (None, 64, None, 64)
    assert report.width == 64
    assert report.unknown == ("0", "3")
    assert "a lookup" in report.rows()[0]["note"]


def test_graphs_take_inputs_and_outputs_by_name_and_refuse_what_is_not_there():
    edges = [("x", "a"), ("z", "a"), ("a", "y")]
    graph = th.measures.linearity.Graph.of(edges, inputs=["z", "x"], outputs=["y"])
    assert [graph.name(int(v)) for v in graph.inputs] == ["z", "x"]
    assert [graph.name(int(v)) for v in graph.outputs] == ["y"]
    with pytest.raises(ValueError, match=r"inputs must be vertices of the graph: 'x', 'a', 'z', 'y'.*\['q'\]"):
        th.measures.linearity.Graph.of(edges, inputs=["q"])
    with pytest.raises(ValueError, match=r"outputs must lie in 0 \.\. 1\. Got \[9\]"):
        th.measures.linearity.Graph.of([(0, 1)], outputs=[9])
