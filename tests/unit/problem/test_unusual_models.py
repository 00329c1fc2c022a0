"""Models with scalar, unused or half-precision parameters, repeated names, and layers that change themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from theodolite.testing import dense_hessian

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(11, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (11,), generator=GENERATOR)
CE = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_scalar_parameters():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = network(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.body(x) * self.scale

    model = Scaled()
    problem = th.Problem(model, CE, (X, Y))
    dense = dense_hessian(lambda: CE(model(X), Y), list(model.parameters()))
    torch.testing.assert_close(th.hessian(problem).to_dense(), dense)
    assert problem.split(problem.vector)["scale"].shape == ()


def test_names_stay_unique():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"fc": nn.Linear(6, 3)})
            self.fc = nn.Linear(6, 3)
            self.root = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.module["fc"](x) * self.fc(x) + self.root

    problem = th.Problem(Twice().double(), CE, (X, Y))
    assert len(set(problem.names)) == len(problem.names) == 5
    assert len(problem.split(problem.vector)) == 5
    assert len(problem.layers) == 3
    assert sum(op.shape[0] for op in th.layer_hessians(problem, bias=True).values()) == problem.size


def test_half_precision_anywhere_counts():
    model = nn.Sequential(nn.Linear(6, 5).to(torch.bfloat16), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    problem = th.Problem(model, CE, (X.float(), Y), check=False)
    assert problem.half_precision
    assert problem.notes


def test_mixed_precision_models_keep_their_casts():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 5).double(), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(self.a(x).float())

    op = th.hessian(th.Problem(Mixed(), CE, (X, Y)))
    assert op.dtype == torch.float64
    assert bool(torch.isfinite(op @ torch.ones(op.shape[0])).all())


def test_an_embedding_that_rescales_itself_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="max_norm=None"):
        th.Problem(model, CE, (torch.randint(9, (5, 2)), torch.randint(3, (5,))))


def test_reading_a_shuffling_loader_leaves_the_random_state():
    model, loader = network(), DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    th.Problem(model, CE, loader)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_is_left_as_found():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 3)).double())
    before = model[0].weight
    op = th.hessian(th.Problem(model, CE, (X, Y)))
    assert bool(torch.isfinite(op @ torch.ones(op.shape[0], dtype=torch.float64)).all())
    assert model[0].weight is before


def test_an_output_without_the_parameters():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    model = Unused().double()
    assert float(th.hessian(th.Problem(model, CE, (X, Y), params="unused.*")).to_dense().abs().max()) == 0.0
    for make in (th.operators.jacobian, th.gauss_newton):
        problem = th.Problem(model, CE, (X, Y), params="unused.*")
        with pytest.raises(ValueError, match="does not depend on the measured parameters"):
            make(problem) @ torch.ones(problem.size, dtype=torch.float64)


class TakesOneMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        return {"out": self.linear(batch["x"])}


@pytest.mark.parametrize("form", ["pair", "mapping", "list"])
def test_a_model_that_takes_a_mapping_as_its_one_argument(form):
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    data = {"pair": ({"x": x}, y), "mapping": {"x": x, "labels": y}, "list": [({"x": x}, y)]}[form]
    model = TakesOneMapping()
    expected = nn.functional.cross_entropy(model.linear(x), y).item()
    assert th.Problem(model, nn.CrossEntropyLoss(), data).loss() == pytest.approx(expected)
