"""Cases that once went wrong: each is a trap a user could step into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from theodolite.errors import NonFiniteError, WeightingError
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


# Weighting of loss functions that do not say what they divide by

WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


def class_weighted(z, y):
    return F.cross_entropy(z, y, weight=WEIGHT)


@pytest.mark.parametrize(
    "batches",
    [
        [(X[c == Y], Y[c == Y]) for c in range(3)],
        [(X[i : i + 1], Y[i : i + 1]) for i in range(11)],
        [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    ],
    ids=["sorted by class", "single samples", "mixed"],
)
def test_a_weighting_that_cannot_be_recognised_is_refused(batches):
    with pytest.raises(WeightingError, match="batch_weight"):
        th.Problem(network(), class_weighted, batches).loss()
    told = th.Problem(network(), class_weighted, batches, batch_weight=lambda b: float(WEIGHT[b.target].sum()))
    assert told.loss() == pytest.approx(th.Problem(network(), class_weighted, (X, Y)).loss(), rel=1e-12)


def test_a_rule_must_fit_every_batch():
    def ignore_zero(z, y):
        return F.cross_entropy(z, y, ignore_index=0)

    y = Y.clamp(min=1)
    y[-1] = 0  # the only ignored label is in the last batch
    with pytest.raises(WeightingError):
        th.Problem(network(), ignore_zero, [(X[i : i + 4], y[i : i + 4]) for i in range(0, 11, 4)]).loss()


def test_batches_of_ignored_labels_weigh_nothing():
    nothing = torch.full((5,), -100)
    for loss in (CE, nn.CrossEntropyLoss(weight=WEIGHT), F.cross_entropy):
        alone = th.Problem(network(), loss, (X[:6], Y[:6]))
        both = th.Problem(network(), loss, [(X[6:], nothing), (X[:6], Y[:6])])
        assert both.loss() == pytest.approx(alone.loss(), rel=1e-12)
        torch.testing.assert_close(th.hessian(both).to_dense(), th.hessian(alone).to_dense())
        with pytest.raises(ValueError, match="ignored"):
            th.Problem(network(), loss, (X[6:], nothing))


def test_weights_and_sums_do_not_mix():
    loss = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match="batch_weight weighs means"):
        th.Problem(network(), loss, [(X, Y), (X, Y)], batch_weight=[1.0, 2.0]).loss()
    with pytest.raises(ValueError, match="batch_weight must be"):
        th.Problem(network(), CE, [(X, Y), (X, Y)], batch_weight=2.0).loss()


def test_broadcasting_targets_are_refused():
    model = nn.Linear(6, 1).double()
    with pytest.raises(ValueError, match=r"\(11, 1\).*\(11,\).*view"):
        th.Problem(model, nn.MSELoss(), (X, Y.double()))


def test_class_labels_beyond_the_weights_are_named():
    with pytest.raises(ValueError, match="Class labels must lie in 0"):
        th.Problem(network(), nn.CrossEntropyLoss(weight=WEIGHT), [(X, Y), (X, Y + 1)]).loss()


# Names


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


# Precision and state


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


# Layers


def test_blocks_with_positions_before_the_flattening():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    x, y = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(1)).double(), torch.randint(2, (7,))
    blocks = th.layer_hessians(th.Problem(model, CE, (x, y)))
    dense = dense_hessian(lambda: CE(model(x), y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])
    assert "closed form" not in blocks.cost().route


def test_each_layer_proves_its_own_batching():
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm, self.body = nn.Linear(6, 3), nn.GroupNorm(2, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.head(torch.tanh(self.norm(self.body(x))))

    model = Reversed().double()
    blocks = th.layer_hessians(th.Problem(model, CE, (X, Y)))
    dense = dense_hessian(lambda: CE(model(X), Y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])


def test_a_subclass_of_a_loss_gets_no_closed_form():
    class RootMeanSquare(nn.MSELoss):
        def forward(self, z, y):
            return super().forward(z, y).sqrt()

    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    y = torch.randn(11, 3).double()
    blocks = th.layer_hessians(th.Problem(model, RootMeanSquare(), (X, y)))
    dense = dense_hessian(lambda: RootMeanSquare()(model(X), y), list(model.parameters()))
    for name, op in blocks.items():
        where = blocks.positions(name)
        torch.testing.assert_close(op.to_dense(), dense[where][:, where])


def test_facts_of_a_mapping_reach_its_results():
    blocks = th.layer_hessians(th.Problem(network().to(torch.bfloat16), CE, (X.to(torch.bfloat16), Y)))
    cost = th.top_eigenpairs(blocks, 2).cost
    assert "kept graph" in cost.route
    assert cost.peak_bytes > 0
    assert "float32 copy" in cost.notes[0]


# Operators and solver


def test_the_basis_never_overflows():
    matrix = torch.diag(torch.linspace(0, 1, 300).double())
    for k, seed in ((5, 4), (5, 16), (3, 21), (5, 29), (3, 35)):
        assert th.top_eigenpairs(matrix, k, seed=seed).converged
    assert th.top_eigenpairs(matrix, 1, start=torch.randn(300, 64).double()).converged
    small = torch.diag(torch.linspace(1, 2, 10))
    assert th.top_eigenpairs(small, 3, tol=1e-9).outcome.name in ("PRECISION", "CONVERGED")


def test_a_zero_operator_is_certain_at_once():
    pairs = th.top_eigenpairs(torch.zeros(3000, 3000), 3)
    assert pairs.converged
    assert pairs.matvecs < 20


def test_a_trusted_start_is_said_to_be_trusted():
    values = torch.cat([torch.linspace(10, 5, 12), torch.rand(188) * 4.8]).double()
    matrix = torch.diag(values)
    trusted = th.top_eigenpairs(matrix, 10, start=th.top_eigenpairs(matrix, 10))
    assert trusted.miss_probability > 1e-3  # a few products after the start certify nothing, and it says so
    assert "trusted" in str(trusted)
    assert trusted.rows()[0]["miss_probability"] > 1e-3
    missing_one = torch.eye(200).double()[:, [i for i in range(12) if i != 4][:10]]
    verified = th.top_eigenpairs(matrix, 10, start=missing_one)
    assert "trusted" not in str(verified)
    assert float((verified.values - values.sort(descending=True).values[:10]).abs().max()) < 0.01


def test_a_suggested_start_is_verified():
    class Suggestive(th.operators.DenseOperator):
        def suggest_start(self, k):
            return torch.eye(self.shape[0], dtype=self.dtype)[:, 5 : 5 + k]

    values = torch.cat([torch.linspace(10, 5, 12), torch.rand(188) * 4.8]).double()
    pairs = th.top_eigenpairs(Suggestive(torch.diag(values)), 2)
    assert float((pairs.values - values[:2]).abs().max()) < 0.02


def test_algebra():
    a, b = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    one, two = th.operators.DenseOperator(a), th.operators.DenseOperator(b)
    torch.testing.assert_close((one @ two).to_dense(), a @ b)
    torch.testing.assert_close((one / 2).to_dense(), a / 2)
    identity = th.operators.IdentityOperator(4)
    torch.testing.assert_close((one + 0.5 * identity).to_dense(), a + 0.5 * torch.eye(4).double())
    with pytest.raises(TypeError):
        one + 3
    with pytest.raises(TypeError, match="to_scipy"):
        one @ np.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: th.hessian(network()), ValueError, "wrap it"),
        (lambda: th.operators.DenseOperator(torch.zeros(0, 0)), ValueError, "entries"),
        (lambda: th.operators.DenseOperator(torch.full((2, 2), float("nan"))), NonFiniteError, "NaN"),
        (lambda: th.top_eigenpairs(torch.eye(3), 1, seed=None), ValueError, "seed must be an integer"),
        (lambda: th.top_eigenpairs({"a": torch.eye(3)}, 1, start=torch.eye(3)), ValueError, "start must be a mapping"),
        (lambda: th.top_eigenpairs({"a": torch.eye(3)}, 1, start={"b": torch.eye(3)}), ValueError, "none of the operators"),
    ],
)
def test_bad_arguments_say_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_complex_operators_are_refused():
    from scipy.sparse.linalg import aslinearoperator

    with pytest.raises(ValueError, match="real"):
        th.operators.as_operator(aslinearoperator(np.array([[1, 1j], [-1j, 1]])))


def test_whole_numbers_of_any_type():
    assert len(th.top_eigenpairs(torch.eye(4).double(), np.int64(2)).values) == 2
    assert th.trace(torch.eye(1).double(), matvecs=6, method="xtrace").value == 1.0


def test_a_product_with_wrong_blocks_is_explained():
    blocks = th.layer_hessians(th.Problem(network(), CE, (X, Y)))
    with pytest.raises(ValueError, match="expected a matrix"):
        blocks.products({"0": torch.ones(30)})
    with pytest.raises(ValueError, match="Got"):
        blocks.products({"0": torch.ones(29, 1)})


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


def test_results_load_in_a_fresh_process(tmp_path):
    import subprocess
    import sys

    th.top_eigenpairs(torch.eye(3).double(), 1).save(tmp_path / "pairs")
    code = f"from theodolite.results import load; print(load({str(tmp_path / 'pairs')!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "1 largest eigenvalues" in done.stdout, done.stderr
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        th.load(tmp_path / "broken")
