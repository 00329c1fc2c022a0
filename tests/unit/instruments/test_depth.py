"""The instrument that leaves layers out: planted layers that do nothing, ruin the loss or count, and the oracle of `th.grow`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.instruments import SurveyContext
from theodolite.instruments.features.depth import Depth
from theodolite.measures.growth import ablate_layers
from theodolite.models.transformers import gpt
from theodolite.results import Severity
from theodolite.testing import InstrumentContract


class Shift(nn.Module):
    """`y = x + a`: twice in a row it is x + 2a, left out x."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x + self.a, "beside the stream"


class Shifted(nn.Module):
    def __init__(self, *shifts: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shift(a) for a in shifts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def planted(*shifts: float, samples: int = 40) -> th.Problem:
    """The sum of the shifts is right up to noise: without shift a the loss rises by a² up to noise, with it twice too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, generator=generator)
    noise = 0.1 * torch.randn(samples, 1, generator=generator)
    return th.Problem(Shifted(*shifts), nn.MSELoss(), (x, x + sum(shifts) + noise))


class TestDepth(InstrumentContract):
    labels = frozenset({"layers in use", "idle layers", "layers repeated"})

    def make(self):
        return Depth(), SurveyContext(planted(1.0, 0.0, 3.0))

    def test_the_layer_that_does_nothing_is_named(self):
        found = {finding.label: finding for finding in self.measured.findings}
        assert all(finding.severity is Severity.NOTE for finding in found.values())
        assert found["idle layers"].sentence.startswith("Without layer 1 the loss does not rise")
        assert found["layers in use"].value == pytest.approx(9.0, abs=0.2)
        assert "no forecast" in found["layers repeated"].sentence
        assert "for layer 1 to" in found["layers repeated"].sentence


def test_rises_are_those_of_paper_with_paired_errors():
    problem = planted(1.0, 0.0, 3.0)
    batch = next(iter(problem.data))
    noise = (batch.target - batch.args[0] - 4.0).flatten()
    result = ablate_layers(problem)
    for layer, a in enumerate((1.0, 0.0, 3.0)):
        assert result.left_out[layer] == pytest.approx(float((a * a + 2 * a * noise).mean()), abs=1e-5)
        assert result.repeated[layer] == pytest.approx(float((a * a - 2 * a * noise).mean()), abs=1e-5)
        error = 2 * a * float(noise.view(8, 5).mean(1).std()) / 8**0.5  # of eight parts
        assert result.left_out_error[layer] == pytest.approx(error, rel=1e-3, abs=1e-5)
    assert result.idle == (1,)


def test_two_forward_passes_for_each_layer():
    problem, calls = planted(1.0, 0.0, 3.0), []
    handle = problem.model.register_forward_hook(lambda *_: calls.append(1))
    ablate_layers(problem)
    handle.remove()
    assert 0 <= len(calls) - 8 * (2 * 3 + 1) < 8  # on eight parts of the data, and a look at what batches weigh


@pytest.mark.parametrize("layer", range(3))
def test_a_repeated_layer_is_one_that_was_copied(layer):
    """`th.grow` builds the deeper model; calling the layer twice comes to the same loss."""
    torch.manual_seed(0)
    model = gpt(vocabulary=20, depth=3, dim=16)
    tokens = torch.randint(20, (8, 9))
    loss = lambda z, y: nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())  # noqa: E731
    data = (tokens[:, :-1], tokens[:, 1:])
    result = ablate_layers(th.Problem(model, loss, data))
    deeper = th.grow(model, sorted([0, 1, 2, layer])).model
    assert result.loss + result.repeated[layer] == pytest.approx(th.Problem(deeper, loss, data).loss(), abs=1e-5)
    shallow = gpt(vocabulary=20, depth=2, dim=16)
    kept = [model.layers[i] for i in range(3) if i != layer]
    shallow.load_state_dict(
        {
            **{k: v for k, v in model.state_dict().items() if "layers." not in k},
            **{f"layers.{i}.{k}": v for i, block in enumerate(kept) for k, v in block.state_dict().items()},
        }
    )
    assert result.loss + result.left_out[layer] == pytest.approx(th.Problem(shallow, loss, data).loss(), abs=1e-5)


def test_models_without_layers_of_one_kind_are_not_spoken_of():
    plain = th.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(8, 2), torch.randn(8, 1)))
    assert not Depth().concerns(SurveyContext(plain))
    assert "no list of blocks" in Depth().applies(SurveyContext(plain))


def test_a_survey_measures_it_when_asked_and_prices_it():
    problem = planted(1.0, 0.0, 3.0)
    found = th.survey(problem, only=["depth"], progress=False)
    assert found.results["depth"].idle == (1,)
    few, many = (Depth().cost(SurveyContext(planted(*[1.0] * n)), samples=20) for n in (2, 6))
    assert many.gradients == pytest.approx(14 / 6 * few.gradients)
    assert Depth.depth == "deep"


class Twice(Shift):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)


def test_what_is_no_stream_is_named():
    problem = th.Problem(nn.Sequential(Twice(1.0), Twice(1.0)), nn.MSELoss(), (torch.ones(8, 1), torch.ones(8, 4)))
    with pytest.raises(ValueError, match="one of the same shape"):
        ablate_layers(problem)
