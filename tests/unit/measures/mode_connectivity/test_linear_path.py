"""The straight line through two solutions: exact ends, convexity, BatchNorm by hand, permuted and sister networks, bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import theodolite as th
from tests.unit.measures.mode_connectivity.solutions import blobs, direct, mlp, permuted, train
from theodolite.errors import NonFiniteError
from theodolite.measures.mode_connectivity import (
    LinearPath,
    accuracy_barrier,
    interpolate_states,
    linear_path,
    loss_barrier,
    loss_excess,
)


def test_check_08_the_grid_and_its_ends(solution, data, test_data):
    other = permuted(solution)
    path = linear_path(mlp(9), solution, other.state_dict(), data, test_data)
    assert len(path.alphas) == 76
    assert abs(float(path.alphas[25])) < 1e-12
    assert abs(float(path.alphas[50]) - 1) < 1e-12
    assert torch.allclose(path.alphas.diff(), torch.full((75,), 0.04).double(), atol=1e-12)
    for index, model in ((50, solution), (25, other)):
        for name, part in (("train", data), ("test", test_data)):
            loss, accuracy = direct(model, part)
            assert float(getattr(path, f"{name}_accuracy")[index]) == accuracy
            assert float(getattr(path, f"{name}_loss")[index]) == pytest.approx(loss, abs=1e-12)


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=8), st.integers(0, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_check_08_the_weights_are_bitwise_those_of_the_ends(numbers, seed, wide):
    dtype = torch.float64 if wide else torch.float32
    a = {"w": torch.tensor(numbers, dtype=dtype)}
    b = {"w": torch.randn(len(numbers), generator=torch.Generator().manual_seed(seed), dtype=dtype)}
    assert torch.equal(interpolate_states(a, b, 1.0)["w"], a["w"])
    assert torch.equal(interpolate_states(a, b, 0.0)["w"], b["w"])
    assert all(torch.equal(interpolate_states(a, a, alpha)["w"], a["w"]) for alpha in (-1.0, 0.3, 0.5, 1.96))
    half = interpolate_states(a, b, 0.48)["w"]
    assert torch.allclose(half.double(), 0.48 * a["w"].double() + 0.52 * b["w"].double(), rtol=1e-6, atol=1e-12)


def test_integer_and_complex_entries():
    a = {"n": torch.tensor(3), "z": torch.tensor([1 + 1j]), "mask": torch.tensor([True])}
    b = {"n": torch.tensor(5), "z": torch.tensor([3 - 1j]), "mask": torch.tensor([False])}
    middle = interpolate_states(a, b, 0.5)
    assert (int(middle["n"]), bool(middle["mask"]), complex(middle["z"][0])) == (3, True, 2 + 0j)
    assert middle["z"].dtype == a["z"].dtype
    assert int(interpolate_states(a, b, 0.0)["n"]) == 5


def test_check_09_a_convex_model_has_no_barrier(data):
    torch.manual_seed(0)
    a, b = (nn.Linear(6, 4).double() for _ in range(2))
    train(a, data, 30)
    path = linear_path(nn.Linear(6, 4).double(), a, b, data)
    between = path.train_loss[25:51]
    assert float(between.max()) <= max(float(path.train_loss[25]), float(path.train_loss[50])) + 1e-6
    assert path.loss_barrier_train == pytest.approx(0.0, abs=1e-12)
    assert path.loss_excess_train == pytest.approx(0.0, abs=1e-12)


@given(st.integers(0, 50))
@settings(max_examples=10, deadline=None)
def test_check_09_for_any_two_points_of_logistic_regression(seed):
    g = torch.Generator().manual_seed(seed)
    model = nn.Linear(6, 1).double()
    a, b = ({k: 3 * torch.randn(v.shape, generator=g).double() for k, v in model.state_dict().items()} for _ in range(2))
    x, y = blobs(60, seed)
    path = linear_path(model, a, b, (x, (y > 1).double()[:, None]), loss=nn.BCEWithLogitsLoss(), alphas=torch.linspace(0, 1, 11))
    assert path.loss_barrier_train <= 1e-6
    assert path.train_accuracy is not None


def test_permuted_units_are_the_same_function_with_a_barrier_between(solution, data, test_data):
    path = linear_path(solution, solution, permuted(solution), data, test_data)
    assert float(path.train_loss[25]) == pytest.approx(float(path.train_loss[50]), abs=1e-12)
    assert path.barrier_train > 0.1
    assert not path.connected
    assert not path.connected_test
    assert path.loss_barrier_train > 0
    assert "do not average" in path.sentence()
    assert 0 < path.barrier("train").alpha < 1
    assert path.barrier_train_error > 0


def test_two_halves_of_one_trajectory_are_connected(data, test_data):
    model = train(mlp(), data, 150)
    first = copy.deepcopy(model.state_dict())
    train(model, data, 50, lr=0.02)
    path = linear_path(model, model.state_dict(), first, data, test_data)
    assert path.connected
    assert "averaging these two is safe" in path.sentence()


def test_a_model_and_itself(solution, data):
    path = linear_path(solution, solution, solution, data)
    assert path.barrier_train == path.loss_barrier_train == path.loss_excess_train == path.barrier_train_error == 0.0
    assert float(path.train_loss.max()) == float(path.train_loss.min())
    assert (path.test_loss, path.barrier_test, path.connected_test, path.test_samples) == (None, None, None, 0)


def test_the_barrier_and_its_paired_error(solution, data):
    path = linear_path(solution, solution, permuted(solution), data)
    x, y = data
    low = int(path.train_accuracy[25:51].argmin()) + 25
    between = copy.deepcopy(solution)
    between.load_state_dict(interpolate_states(solution.state_dict(), permuted(solution).state_dict(), float(path.alphas[low])))
    bits = [(m(x).argmax(1) == y).double() for m in (solution, between)]
    fallen = bits[0] - bits[1]
    assert path.barrier_train == pytest.approx(float(fallen.mean()), abs=1e-12)
    assert path.barrier_train_error == pytest.approx(float(fallen.std()) / math.sqrt(len(y)), rel=1e-9)
    p = float(path.train_accuracy[3])
    assert float(path.accuracy_error()[3]) == pytest.approx(math.sqrt(p * (1 - p) / len(y)))


def test_barriers_of_known_profiles():
    at = torch.linspace(-1, 2, 76).double()
    at[25], at[50] = 0.0, 1.0
    assert accuracy_barrier(at, 1 - at * (1 - at)).value == pytest.approx(0.25, abs=1e-3)
    assert loss_barrier(at, 1 + at * (1 - at)).value == pytest.approx(0.25, abs=1e-3)
    tilted = loss_excess(at, 1 + at + at * (1 - at))
    assert (tilted.value, tilted.alpha) == (pytest.approx(0.25, abs=1e-3), pytest.approx(0.5, abs=0.03))
    assert loss_barrier([0, 0.5, 1], [1.0, math.inf, 1.0]).value == math.inf
    with pytest.raises(ValueError, match="both ends"):
        accuracy_barrier([0.0, 0.5], [1.0, 1.0])


# BatchNorm


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)).double()


@pytest.fixture(scope="module")
def normed_pair(data):
    return [train(normed(seed), data, 60).eval() for seed in (0, 1)]


def by_hand(pair, alpha: float, data, train_batches, policy: str) -> float:
    """The loss at one point with plain modules."""
    model = normed()
    model.load_state_dict(interpolate_states(pair[0].state_dict(), pair[1].state_dict(), alpha))
    norm = model.eval()[1]
    if policy == "recompute":
        with torch.no_grad():
            hidden = [model[0](x) for x, _ in train_batches]
            norm.running_mean.copy_(torch.stack([h.mean(0) for h in hidden]).mean(0))
            norm.running_var.copy_(torch.stack([h.var(0) for h in hidden]).mean(0))
    norm.training = policy == "batch"
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in data]
    return float(sum(losses)) / sum(len(y) for _, y in data)


@pytest.mark.parametrize("policy", ["interpolate", "recompute", "batch"])
def test_batchnorm_policies_by_hand(normed_pair, data, test_data, policy):
    x, y = data
    batches = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 300, 100)]
    tests = [(test_data[0][:100], test_data[1][:100]), (test_data[0][100:], test_data[1][100:])]
    before = copy.deepcopy([m.state_dict() for m in normed_pair])
    model = normed(7).train()
    own = copy.deepcopy(model.state_dict())
    path = linear_path(model, *normed_pair, data, test_data, batchnorm=policy, batch_size=100, alphas=[-0.5, 0.3, 0.5, 1.2])
    assert path.batchnorm == policy
    for i, alpha in enumerate(path.alphas.tolist()):
        assert float(path.train_loss[i]) == pytest.approx(by_hand(normed_pair, alpha, batches, batches, policy), rel=1e-10)
        assert float(path.test_loss[i]) == pytest.approx(by_hand(normed_pair, alpha, tests, batches, policy), rel=1e-10)
    for state, end in zip(before, normed_pair, strict=True):
        assert all(torch.equal(state[k], v) for k, v in end.state_dict().items())
    assert all(torch.equal(own[k], v) for k, v in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert path.forward_passes == 6 * (3 if policy == "recompute" else 2)


def test_without_batchnorm_the_policies_agree(solution, data):
    paths = [
        linear_path(solution, solution, permuted(solution), data, batchnorm=p, alphas=[0.2, 0.5])
        for p in ("interpolate", "recompute", "batch")
    ]
    assert all(torch.equal(p.train_loss, paths[0].train_loss) for p in paths)
    assert {p.batchnorm for p in paths} == {"none in the model"}


def test_the_default_evaluates_in_eval_mode(normed_pair, data):
    """Dropout is off, whatever mode the model is in."""
    found = [linear_path(normed().train(mode), *normed_pair, data, alphas=[0.5]).train_loss for mode in (True, False)]
    assert torch.equal(*found)
    assert float(found[0][-1]) == pytest.approx(direct(normed_pair[0], data)[0], abs=1e-12)


# What goes wrong


def test_left_as_found_after_an_exception(normed_pair, data):
    model = normed(5).train()
    model[1].eval()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    calls = []

    def bad(output, target):
        calls.append(1)
        if len(calls) > 8:
            raise RuntimeError("stop")
        return functional.cross_entropy(output, target)

    for policy in ("interpolate", "recompute", "batch"):
        calls.clear()
        with pytest.raises((ValueError, RuntimeError), match="stop"):
            linear_path(model, *normed_pair, data, loss=bad, batchnorm=policy)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        assert model[1].momentum == 0.1


def test_states_that_do_not_fit(solution, data):
    state = solution.state_dict()
    with pytest.raises(ValueError, match=r"state_b lacks '4.bias'"):
        linear_path(solution, state, {k: v for k, v in state.items() if k != "4.bias"}, data)
    with pytest.raises(ValueError, match=r"state_a holds '4.bais'.*Nearest names: 4.bias"):
        linear_path(solution, {**state, "4.bais": torch.zeros(4)}, state, data)
    with pytest.raises(ValueError, match=r"0.weight has shape \(3, 6\).*\(16, 6\)"):
        linear_path(solution, state, {**state, "0.weight": torch.zeros(3, 6)}, data)
    with pytest.raises(NonFiniteError, match=r"state_b: 0.bias"):
        linear_path(solution, state, {**state, "0.bias": torch.full((16,), math.nan)}, data)
    with pytest.raises(FileNotFoundError, match="state_a: there is no file"):
        linear_path(solution, "gone.safetensors", state, data)
    with pytest.raises(ValueError, match="Got int"):
        linear_path(solution, state, 3, data)


def test_an_end_whose_loss_overflows(data):
    model = nn.Linear(6, 4)
    huge = {"weight": torch.full((4, 6), 3e38), "bias": torch.zeros(4)}
    x, y = data
    with pytest.raises(NonFiniteError):
        linear_path(model, huge, model, (x.float(), y))
    with pytest.raises(NonFiniteError):
        linear_path(model, model, huge, (x.float(), y))


def test_beyond_the_ends_the_loss_may_overflow():
    class Steep(nn.Linear):
        def forward(self, x):
            return torch.exp(60 * super().forward(x))

    model = Steep(1, 2, bias=False)
    a, b = {"weight": torch.tensor([[1.0], [0.0]])}, {"weight": torch.tensor([[0.0], [0.0]])}
    path = linear_path(model, a, b, (torch.ones(2, 1), torch.tensor([0, 0])))
    assert math.isinf(float(path.train_loss[-1]))
    assert bool(torch.isfinite(path.train_loss[25:51]).all())
    assert float(path.train_accuracy[-1]) == 0.0


def test_words_and_numbers_that_do_not_fit(solution, data):
    with pytest.raises(ValueError, match="nearest: 'interpolate'"):
        linear_path(solution, solution, solution, data, batchnorm="interpolated")
    for alphas in ("abc", [math.nan], [None], [], 3, 0.5, [0, 1], [2, -1], torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="alphas"):
            linear_path(solution, solution, solution, data, alphas=alphas)
    with pytest.raises(ValueError, match="batch_size"):
        linear_path(solution, solution, solution, data, batch_size=0)
    with pytest.raises(ValueError, match=r"nn\.Module"):
        linear_path("model", solution, solution, data)


@pytest.mark.parametrize("accuracy", ["auto", None])
def test_a_grid_too_coarse_to_see_a_barrier_gives_no_verdict(solution, data, accuracy):
    """The barrier stands near the middle: points beside the ends do not see it."""
    coarse = linear_path(solution, solution, permuted(solution), data, alphas=[1e-4, 1 - 1e-4], accuracy=accuracy)
    assert coarse.connected
    assert not coarse.conclusive
    assert coarse.sentence().startswith("No verdict (")
    assert "only 2 points between the ends" in coarse.sentence()
    seen = linear_path(solution, solution, permuted(solution), data, alphas=[0.5], accuracy=accuracy)
    assert "barrier" in seen.sentence()
    assert not seen.connected


def test_given_points_get_the_ends(solution, data):
    path = linear_path(solution, solution, solution, data, alphas=[0.7, 0.3, 0.3, 1 - 1e-14])
    assert path.alphas.tolist() == [0.0, 0.3, 0.7, 1.0]


def test_rows_saving_and_cost(tmp_path, solution, data, test_data):
    path = linear_path(solution, solution, permuted(solution), data, test_data)
    rows = path.rows()
    assert len(rows) == 76
    assert rows[50]["alpha"] == 1.0
    assert {"train_loss", "train_accuracy", "train_accuracy_error", "test_loss", "test_accuracy"} <= set(rows[0])
    path.save(tmp_path / "path")
    again = LinearPath.load(tmp_path / "path")
    assert again.rows() == rows
    assert again.sentence() == path.sentence()
    assert again.summary() == path.summary()
    assert path.forward_passes == 152
    assert "76 forward passes over the train data" in path.cost.notes[0]
    assert th.results.Outcome.FINISHED is path.outcome


def test_one_basin_on_train_but_not_on_test():
    at = torch.linspace(-1, 2, 76).double()
    at[25], at[50] = 0.0, 1.0
    flat, dip = torch.full((76,), 0.9).double(), torch.full((76,), 0.9).double()
    dip[40] = 0.8
    fields = {"alphas": at, "train_loss": flat, "test_loss": flat, "train_samples": 100, "test_samples": 100}
    fields |= {"barrier_train_error": 0.0, "barrier_test_error": 0.04, "batchnorm": "interpolate", "forward_passes": 2}
    path = LinearPath(train_accuracy=flat, test_accuracy=dip, **fields)
    assert path.connected
    assert path.connected_test is False
    assert "but not on the test data" in path.sentence()
    near = LinearPath(train_accuracy=dip, test_accuracy=flat, **{**fields, "barrier_train_error": 0.05})
    assert "within two standard errors" in near.sentence()


def test_untrained_ends_give_no_verdict(data):
    x, y = data
    model = mlp()
    with torch.no_grad():
        model[4].weight.zero_()
    path = linear_path(model, model, model, data)
    assert path.chance == float(y.bincount().max()) / len(y)
    assert path.connected
    assert not path.conclusive
    assert path.sentence().startswith("No verdict")
    assert linear_path(model, model, model, (x, functional.one_hot(y).double()), loss=nn.MSELoss()).chance == path.chance
    signs = linear_path(
        nn.Linear(6, 1).double(), *[nn.Linear(6, 1).double()] * 2, (x, (y > 1).double()[:, None]), loss=nn.BCEWithLogitsLoss()
    )
    assert signs.chance == pytest.approx(max(float((y > 1).double().mean()), float((y <= 1).double().mean())))
    assert linear_path(model, model, model, data, accuracy=None).conclusive


def test_a_negative_running_variance_beyond_the_ends_is_no_number():
    """Variances 1 and 4: negative from alpha = 4/3 on, where no answer is right."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    first = {name: t.clone() for name, t in model.state_dict().items()}
    second = {**first, "0.running_var": 4 * first["0.running_var"]}
    data = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    for batchnorm, broken in (("interpolate", True), ("recompute", False), ("batch", False)):
        found = linear_path(model, first, second, data, batchnorm=batchnorm, alphas=[0.0, 0.5, 1.0, 1.5, 2.0])
        assert torch.isinf(found.train_loss).tolist() == [False, False, False, broken, broken]
        assert (found.train_accuracy == 0).tolist() == [False, False, False, broken, broken]
