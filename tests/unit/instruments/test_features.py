"""What a model looks at, on planted cases: inputs that it does not see, features that training moved, tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import registry
from theodolite.instruments.features.features import input_shape
from theodolite.measures.features import agop
from theodolite.results import Severity


def survey(problem: th.Problem, **more) -> tuple[th.instruments.Survey, dict[str, th.Finding]]:
    found = th.survey(problem, only=["features"], progress=False, **more)
    assert found.sound, found
    return found, {f.label: f for f in found.findings}


def quadrants(samples: int = 400, inputs: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and the quadrant of their third and eighth coordinate."""
    x = torch.randn(samples, inputs, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 3] > 0).long() + 2 * (x[:, 8] > 0).long()


def network(inputs: int = 20, outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def test_two_inputs_of_twenty():
    model = network()
    with torch.no_grad():
        model[0].weight[:, [i for i in range(20) if i not in (3, 8)]] = 0.0
    problem = th.Problem(model, nn.CrossEntropyLoss(), quadrants())
    found, by = survey(problem)
    assert by["unused inputs"].value == 18
    assert by["unused inputs"].severity is Severity.WARNING
    assert "0, 1, 2, 4 and 14 more" in by["unused inputs"].sentence
    assert by["input directions"].value <= 2
    matrix = agop(problem)
    assert by["input directions"].value == pytest.approx(float(matrix.trace() ** 2 / matrix.square().sum()), rel=1e-4)
    assert {i for i, share in found.results["features"].report.coordinates if share > 0} == {3, 8}


def test_training_is_seen():
    x, y = quadrants()
    model = network()
    _, before = survey(th.Problem(model, nn.CrossEntropyLoss(), (x, y)))
    assert "features of chance" in before
    assert "unused inputs" not in before
    th.train(model, nn.CrossEntropyLoss(), (x, y), torch.optim.Adam(model.parameters(), lr=0.01), steps=150)
    found, after = survey(th.Problem(model, nn.CrossEntropyLoss(), (x, y)))
    assert "features moved" in after
    assert after["features moved"].quantity == before["features of chance"].quantity == "alignment with fresh networks"
    assert after["features moved"].value < before["features of chance"].value
    assert after["input directions"].value < before["input directions"].value
    assert {i for i, _ in found.results["features"].report.coordinates[:2]} == {3, 8}


def test_one_direction_is_called_so():
    x, _ = quadrants()
    torch.manual_seed(0)
    _, by = survey(th.Problem(nn.Linear(20, 1), nn.MSELoss(), (x, x[:, :1])))
    assert by["input directions"].value == pytest.approx(1.0)
    assert "One direction" in by["input directions"].advice


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.words = nn.Embedding(6, 8), nn.Embedding(12, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(torch.tanh(self.mix(e.cumsum(1)))).flatten(0, 1)


def test_tokens_are_measured_at_their_embedding():
    ids = torch.randint(0, 12, (30, 7), generator=torch.Generator().manual_seed(0))
    loader = [(ids[i : i + 10, :-1], ids[i : i + 10, 1:].reshape(-1)) for i in range(0, 30, 10)]
    problem = th.Problem(Tokens(), nn.CrossEntropyLoss(), loader)
    assert input_shape(problem).at == "words"
    found, by = survey(problem)
    assert "features of words" in by["input directions"].sentence
    assert found.results["features"].report.dim == 8
    assert not any(m._forward_hooks for m in problem.model.modules())


def test_where_it_does_not_apply_it_says_so():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids.float().sum(1, keepdim=True) * self.weight

    found = th.survey(
        Counts(), nn.CrossEntropyLoss(), (torch.ones(9, 4).long(), torch.zeros(9).long()), only=["features"], progress=False
    )
    (row,) = [row for row in found.plan if row["instrument"] == "features"]
    assert "no embedding" in str(row)
    coupled = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4))
    problem = th.Problem(coupled, nn.CrossEntropyLoss(), quadrants(40), mode="train")
    assert "normalises over the batch" in registry.get("features").applies(th.instruments.base.SurveyContext(problem))


def test_batch_norm_in_eval_mode_has_no_fresh_copy():
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    found, by = survey(th.Problem(model, nn.CrossEntropyLoss(), quadrants(60)))
    assert not {"features moved", "features of chance"} & set(by)
    assert "statistics of training" in found.results["features"].missing


def test_images_with_many_outputs_by_projections():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 30))
    problem = th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(50, 1, 8, 8), torch.arange(50) % 30))
    found, by = survey(problem)
    assert found.results["features"].outcome is th.results.Outcome.ESTIMATED
    exact = agop(problem)
    truth = float(exact.trace() ** 2 / exact.square().sum())
    assert by["input directions"].value == pytest.approx(truth, rel=0.15)


def test_the_page_has_a_picture(tmp_path):
    found, _ = survey(th.Problem(network(), nn.CrossEntropyLoss(), quadrants(60)))
    text = found.to_html(tmp_path / "index.html").read_text()
    assert "Top directions of the gradient outer product" in text
    assert "could not be drawn" not in text
