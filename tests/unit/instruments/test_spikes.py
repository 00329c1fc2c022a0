"""Spikes on planted cases: the share of batches above their critical rate is known on paper, and training spikes there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.dynamics import batch_critical_rates, spike_events
from theodolite.results import Severity


def line(scales: list[float]) -> th.Problem:
    """y = w x with a batch of two equal samples for each scale a: the mean squared error has its edge at 1/a²."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    batches = [(torch.full((2, 1), a).double(), torch.zeros(2, 1).double()) for a in scales]
    return th.Problem(model, nn.MSELoss(), batches)


def finding(problem: th.Problem, **arguments) -> th.Finding:
    (found,) = th.survey(problem, only=["spikes"], progress=False, **arguments).of("spikes")
    return found


@pytest.mark.parametrize(
    ("rate", "label", "severity", "share"),
    [
        (0.2, "batches below the edge", Severity.NOTE, 0.0),
        (0.5, "batches above the edge", Severity.NOTE, 0.25),
        (1.5, "batches above the edge", Severity.NOTE, 1.0),
    ],
)
def test_batches_above_their_edge_are_counted(rate, label, severity, share):
    found = finding(line([1.0, 1.0, 1.0, 2.0]), lr=rate)  # critical rates 1, 1, 1 and 0.25
    assert (found.label, found.severity, found.value) == (label, severity, share)
    assert found.error > 0
    assert "0.25" in found.sentence


def test_the_rate_of_momentum_is_that_of_momentum():
    problem = line([1.0, 2.0])
    sgd = torch.optim.SGD(problem.model.parameters(), lr=0.4, momentum=0.9)  # edges 1.9 and 0.475
    assert finding(problem, optimizer=sgd).label == "batches below the edge"
    assert finding(problem, optimizer=torch.optim.SGD(problem.model.parameters(), lr=0.4)).label == "batches above the edge"


def test_training_spikes_where_it_was_expected_and_not_where_it_was_not():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 10, generator=generator).double()
    x[:6] *= 3.0  # one batch in ten is steep
    y = torch.randn(60, 1, generator=generator).double()
    batches = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 60, 6)]
    for share, label in ((0.7, "batches below the edge"), (1.6, "batches above the edge")):
        model = th.models.ntk_fcn(10, width=512, depth=2, seed=0).double()
        problem = th.Problem(model, nn.MSELoss(), batches)
        rate = share * batch_critical_rates(problem, own=True).quantile(0.0)
        assert finding(problem, lr=rate).label == label
        whole = th.Problem(model, nn.MSELoss(), (x, y), check=False)
        trace = th.train(
            model,
            nn.MSELoss(),
            batches,
            torch.optim.SGD(model.parameters(), lr=rate),
            epochs=10,
            measure={"loss": lambda m, whole=whole: whole.loss()},
        )
        spikes = spike_events([v for v in trace.measured["loss"] if v is not None])
        assert bool(spikes) == (label == "batches above the edge")


def test_cross_entropy_and_adam_are_answered_by_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(4)]
    problem = th.Problem(model, nn.CrossEntropyLoss(), batches)
    survey = th.survey(problem, only=["spikes"], optimizer=torch.optim.Adam(model.parameters(), lr=1e-6), progress=False)
    (found,) = survey.of("spikes")
    assert found.label == "batches below the edge"
    assert survey.results["spikes"].by == "gauss_newton"


def test_one_batch_of_data_is_asked_in_random_parts():
    problem = line([1.0])
    whole = th.Problem(
        problem.model, nn.MSELoss(), (torch.tensor([[1.0], [1.0], [2.0], [2.0]]).double(), torch.zeros(4, 1).double())
    )
    found = finding(whole, lr=0.3)  # pairs of samples: rates 1, 0.4 and, for two of 2, 0.25
    assert found.label == "batches above the edge"
    assert found.value == pytest.approx(1 / 6, abs=4 * found.error)
    assert "random batches of 2" in found.sentence


def test_without_a_rate_there_is_no_question():
    assert not th.survey(line([1.0, 2.0]), only=["spikes"], progress=False).of("spikes")


def test_the_page_shows_the_batches(tmp_path):
    survey = th.survey(line([1.0, 1.5, 2.0]), lr=0.5, only=["spikes"], progress=False)
    survey.to_html(tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert "Spikes of the loss" in text
    assert "share of batches" in text
