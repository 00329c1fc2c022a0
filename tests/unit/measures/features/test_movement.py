"""Features beside those of fresh networks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import theodolite as th
from tests.unit.measures.features.cases import cnn, numbers
from theodolite.measures.features import FeatureMovement, agop, feature_movement


def wide(seed: int, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, outputs))


@pytest.mark.parametrize("outputs", [1, 4])
def test_fresh_networks_have_not_moved(outputs: int) -> None:
    x = numbers(100, 10).float()
    assert sum(bool(feature_movement(wide(100 + seed, outputs), x).moved) for seed in range(12)) <= 1


def trained(outputs: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, nn.Module]:
    """On a product of two coordinates, or the quadrant they lie in; with its loss."""
    x = numbers(400, 10).float()
    if outputs == 1:
        y, loss = (x[:, 0] * x[:, 1])[:, None], nn.MSELoss()
    else:
        y, loss = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), nn.CrossEntropyLoss()  # type: ignore[assignment]
    model = wide(0, outputs)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        adam.zero_grad()
        loss(model(x), y).backward()
        adam.step()
    return model, x, y, loss


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_trained_network_has(outputs: int) -> None:
    model, x, y, loss = trained(outputs)
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    found = feature_movement(th.Problem(model, loss, (x, y)))  # type: ignore[arg-type]
    assert "coordinates in use" in found.moved, found
    assert "moved away" in found.sentence()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert feature_movement(model, x).values == pytest.approx(found.values, rel=1e-4)


def test_the_numbers_are_those_of_the_matrices() -> None:
    model, x, _, _ = trained(4)
    found, g = feature_movement(model, x), agop(model, x).double()
    assert found.values[1] == pytest.approx(float(g.trace() ** 2 / g.square().sum()), rel=1e-4)
    assert found.values[2] == pytest.approx(float(g.trace() ** 2 / g.diagonal().square().sum()), rel=1e-4)
    assert 0 < found.alignment < 1
    assert found.fresh[2] <= 10
    assert [row["quantity"] for row in found.rows() if row["moved"]] == list(found.moved)


def test_attention_can_start_anew() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert not feature_movement(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2)), numbers(20, 3, 8).float()).moved


def test_what_cannot_start_anew_is_refused() -> None:
    with pytest.raises(ValueError, match="statistics of training"):
        feature_movement(cnn(), numbers(4, 2, 4, 4))
    with pytest.raises(ValueError, match="nothing to train"):
        feature_movement(lambda x: x.sum(1), numbers(4, 3))
    with pytest.raises(ValueError, match="copies must be at least 3"):
        feature_movement(wide(0), numbers(4, 10), copies=1)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with pytest.raises(ValueError, match="Own holds scale but has no reset_parameters"):
        feature_movement(Own(), numbers(4, 3).float())


def test_the_sentence_agrees_with_the_intervals_that_it_shows() -> None:
    """A number lies within what the sentence names exactly where it is not said to have moved."""
    for factor in (1.0, 1.3, 2.0, 6.0):
        found = FeatureMovement(values=(0.4 * factor, 5.0, 9.0), fresh=(0.4, 5.0, 9.0), spreads=(0.15, 0.1, 0.1), copies=10)
        sentence = found.sentence()
        shown = re.search(r"alignment with fresh networks ([\d.]+), of .*? outside ([\d.]+) to ([\d.]+)", sentence)
        assert shown is not None
        value, low, high = map(float, shown.groups())
        assert (low <= value <= high) == ("cannot be told" in sentence)
