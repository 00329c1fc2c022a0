"""`track_eigenpairs`: dense truth, what warm starts save, the model left as found, continued runs, bad input."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.errors import NonFiniteError
from theodolite.results import Outcome
from theodolite.testing.dense import dense_hessian

LOSS = nn.CrossEntropyLoss()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    return x, (x @ torch.randn(6, 4, generator=generator, dtype=torch.float64)).argmax(1)


def states(model: nn.Module, count: int = 4, rate: float = 0.5) -> list[dict[str, Tensor]]:
    """The state before each of some steps of gradient descent."""
    found = []
    sgd = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(count):
        found.append(copy.deepcopy(model.state_dict()))
        th.train(model, LOSS, data(), sgd, steps=1)
    return found


def dense(model: nn.Module) -> Tensor:
    return dense_hessian(lambda: LOSS(model(data()[0]), data()[1]), list(model.parameters()))


def dense_pairs(problem: th.Problem, state: dict[str, Tensor], block: Tensor | slice, k: int) -> tuple[Tensor, Tensor]:
    """Top eigenpairs of a diagonal block of the dense Hessian at a state."""
    model = copy.deepcopy(problem.model)
    model.load_state_dict(state)
    matrix = dense(model)[block][:, block]
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0)[:k], vectors.flip(1)[:, :k]


def test_the_whole_hessian_against_the_dense_one():
    problem, k = th.Problem(network(), LOSS, data()), 3
    run = states(network())
    found = th.measures.hessian.track_eigenpairs(problem, run, k, labels=(0, 1, 2, 3), tol=1e-9, verify="full")
    truth = [dense_pairs(problem, state, slice(None), k) for state in run]
    assert torch.allclose(found.values, torch.stack([values for values, _ in truth]), rtol=1e-9)
    assert float(found.residuals.max()) < 1e-8
    for t in range(1, 4):
        before, first = (th.subspace_overlap(truth[s][1], truth[t][1]) for s in (t - 1, 0))
        assert float(found.with_previous[t]) == pytest.approx(before, abs=1e-7)
        assert float(found.with_first[t]) == pytest.approx(first, abs=1e-7)
    assert math.isnan(float(found.with_previous[0]))
    assert float(found.with_first[0]) == 1.0
    losses = [th.Problem(_with(state), LOSS, data()).loss() for state in run]
    assert found.losses == pytest.approx(losses)
    assert found.outcome.good
    assert all(found.converged)


def _with(state: dict[str, Tensor]) -> nn.Module:
    model = network()
    model.load_state_dict(state)
    return model


def test_layers_in_lockstep_against_the_dense_blocks():
    problem = th.Problem(network(), LOSS, data())
    run = states(network())
    found = th.measures.hessian.track_eigenpairs(problem, run, 4, layers="*", tol=1e-9)
    blocks = th.layer_hessians(problem)
    assert list(found) == ["0", "2"]
    for name, track in found.items():
        truth = [dense_pairs(problem, state, blocks.positions(name), 4)[0] for state in run]
        assert torch.allclose(track.values, torch.stack(truth), rtol=1e-8, atol=1e-12)
    assert {row["layer"] for row in found.rows()} == {"0", "2"}
    assert [row["label"] for row in found.rows()[::4]] == [0, 1, 2, 3, 0, 1, 2, 3]
    one = th.measures.hessian.track_eigenpairs(problem, run, 4, layers=(name for name in ["2"]), tol=1e-9)
    assert torch.allclose(one["2"].values, found["2"].values, rtol=1e-8)


@pytest.mark.parametrize("layers", [None, "*"])
def test_warm_looks_take_fewer_products_than_cold_ones(layers):
    model = network()
    run = states(model, 8, rate=0.05)
    problem = th.Problem(network(), LOSS, data())
    found = th.measures.hessian.track_eigenpairs(problem, run, 3, layers=layers)
    cold = [th.measures.hessian.track_eigenpairs(problem, [state], 3, layers=layers) for state in run]
    tracks = [(found, cold)] if layers is None else [(found[name], [c[name] for c in cold]) for name in found]
    for track, afresh in tracks:
        assert [row["start"] for row in track.rows()[::3]] == ["cold"] + 7 * ["warm"]
        assert track.matvecs[0] == afresh[0].matvecs[0]
        for warm, other in zip(track.matvecs[1:], afresh[1:], strict=True):
            assert warm <= other.matvecs[0]
        assert sum(track.matvecs[1:]) < 0.7 * sum(other.matvecs[0] for other in afresh[1:])


def test_a_look_that_trusts_says_so_and_the_next_one_certifies():
    problem = th.Problem(network(), LOSS, data())
    found = th.measures.hessian.track_eigenpairs(problem, states(network(), 6, rate=0.05), 2)
    assert found.converged == (True, False) * 3
    assert found.outcome is Outcome.TRUSTED
    assert "3 not converged (residuals are below tol, but the start was trusted" in found.sentence()
    assert [row["converged"] for row in found.rows()[::2]] == [True, False] * 3


def test_modules_state_dicts_vectors_and_wrapped_names_are_the_same_checkpoints():
    problem = th.Problem(network(), LOSS, data())
    run = states(network(), 3)
    models = [_with(state) for state in run]
    vectors = [th.Problem(model, LOSS, data()).vector for model in models]
    wrapped = [{f"module.{name}": value.float() for name, value in state.items()} for state in run]
    expected = th.measures.hessian.track_eigenpairs(problem, run, 2, tol=1e-8).values
    for checkpoints, slack in ((models, 1e-12), (vectors, 1e-12), (torch.stack(vectors), 1e-12), (wrapped, 1e-5)):
        assert torch.allclose(
            th.measures.hessian.track_eigenpairs(problem, checkpoints, 2, tol=1e-8).values, expected, rtol=slack
        )


def test_a_vector_leaves_what_is_not_measured_as_the_problem_has_it():
    problem = th.Problem(network(), LOSS, data(), params="2.*")
    other = _with(states(network(), 2)[1])
    mixed = copy.deepcopy(problem.model)
    mixed[2].load_state_dict(other[2].state_dict())
    vector = th.Problem(other, LOSS, data(), params="2.*").vector
    found = th.measures.hessian.track_eigenpairs(problem, [other, vector], 2, tol=1e-9)
    truth = th.top_eigenpairs(th.hessian(th.Problem(mixed, LOSS, data(), params="2.*")), 2, tol=1e-9)
    assert torch.allclose(found.values[1], truth.values, rtol=1e-9)


def test_buffers_come_with_a_state():
    def normed() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 4)).double()

    trained = normed()
    th.train(trained, LOSS, data(), torch.optim.SGD(trained.parameters(), lr=0.1), steps=5)
    found = th.measures.hessian.track_eigenpairs(th.Problem(normed(), LOSS, data()), [trained.state_dict()], 2, tol=1e-8)
    truth = th.top_eigenpairs(th.hessian(th.Problem(trained, LOSS, data())), 2, tol=1e-8)
    assert torch.allclose(found.values[0], truth.values, rtol=1e-9)


def test_a_generator_trains_in_between_and_keeps_nothing():
    model = network()
    problem = th.Problem(model, LOSS, data())
    expected = th.measures.hessian.track_eigenpairs(problem, states(network()), 2, tol=1e-8)

    def run() -> Iterator[nn.Module]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(4):
            yield model
            th.train(model, LOSS, data(), sgd, steps=1)

    found = th.measures.hessian.track_eigenpairs(problem, run(), 2, labels=range(0, 40, 10), tol=1e-8)
    assert found.labels == (0, 10, 20, 30)
    assert torch.allclose(found.values, expected.values, rtol=1e-12)


@pytest.mark.parametrize("layers", [None, ["0", "2"]])
def test_a_run_goes_on_from_an_earlier_result(layers, tmp_path):
    problem = th.Problem(network(), LOSS, data())
    run = states(network(), 4)
    whole = th.measures.hessian.track_eigenpairs(problem, run, 2, layers=layers, tol=1e-6)
    part = th.measures.hessian.track_eigenpairs(problem, run[:2], 2, layers=layers, tol=1e-6)
    part.save(tmp_path / "run")
    both = th.measures.hessian.track_eigenpairs(problem, run[2:], 2, layers=layers, tol=1e-6, start=th.load(tmp_path / "run"))
    pairs = [(whole, both)] if layers is None else [(whole[name], both[name]) for name in layers]
    for one, other in pairs:
        assert other.labels == one.labels == (0, 1, 2, 3)
        assert torch.allclose(one.values, other.values, rtol=1e-9)
        assert torch.allclose(one.with_first, other.with_first, atol=1e-8)
        assert other.matvecs == one.matvecs
        assert other.warm == (False, True, True, True)


def test_another_matrix_and_the_other_end():
    problem = th.Problem(network(), LOSS, data())
    run = states(network(), 3)
    ggn = th.measures.hessian.track_eigenpairs(problem, run, 2, matrix=th.gauss_newton, tol=1e-8)
    low = th.measures.hessian.track_eigenpairs(problem, run, 2, which="smallest", tol=1e-8)
    for t, state in enumerate(run):
        here = th.Problem(_with(state), LOSS, data())
        assert torch.allclose(ggn.values[t], torch.linalg.eigvalsh(th.gauss_newton(here).to_dense()).flip(0)[:2], rtol=1e-8)
        assert torch.allclose(low.values[t], torch.linalg.eigvalsh(dense(here.model))[:2].flip(0), rtol=1e-6)
    assert f"from {float(low.values[0, -1]):.4g} to {float(low.values[-1, -1]):.4g}" in low.sentence()
    assert "cold start" in str(ggn)
    assert "warm one" in str(ggn)


def test_looking_inside_train_changes_nothing_of_the_run():
    def run(look: bool) -> tuple[th.training.Trace, nn.Module, list[th.measures.hessian.EigenTrajectory | None]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4)).double()
        problem = th.Problem(model, LOSS, data())
        looks: list[th.measures.hessian.EigenTrajectory | None] = [None]

        def observe(step, model, batch, optimizer):
            if look and step % 2 == 0:
                looks.append(th.measures.hessian.track_eigenpairs(problem, [model], k=2, labels=[step], start=looks[-1]))

        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return th.train(model, LOSS, data(), sgd, steps=5, batch_size=20, observe=observe), model, looks

    (plain, without, _), (watched, model, looks) = run(False), run(True)
    assert plain.loss == watched.loss
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), model.parameters(), strict=True))
    assert looks[-1] is not None
    assert looks[-1].labels == (0, 2, 4)
    assert looks[-1].warm == (False, True, True)


class Failing(nn.Module):
    """A network that stops working at weights beyond a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.norm = nn.BatchNorm1d(4, affine=False).double()

    def forward(self, x: Tensor) -> Tensor:
        if float(self.body[0].weight.detach().abs().max()) > 10:
            raise RuntimeError("too large")
        return self.norm(self.body(x))


@pytest.mark.parametrize("how", ["good", "failing forward", "bad checkpoint", "stopped by the user"])
def test_the_model_is_left_as_found(how):
    model = Failing().train()
    model.body[0].weight.requires_grad_(True)
    LOSS(model(data()[0]), data()[1]).backward()
    model.body[2].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    problem = th.Problem(model, LOSS, data())

    def run() -> Iterator[dict[str, Tensor]]:
        yield before
        moved = {name: value + 1 if name == "norm.running_mean" else value for name, value in before.items()}
        yield moved
        if how == "failing forward":
            yield {name: 100 * value for name, value in before.items()}
        if how == "bad checkpoint":
            yield {}
        if how == "stopped by the user":
            raise KeyboardInterrupt

    if how == "good":
        th.measures.hessian.track_eigenpairs(problem, run(), 2, layers="*")
    else:
        kind, words = {
            "failing forward": (ValueError, "too large"),
            "bad checkpoint": (ValueError, "lacks"),
            "stopped by the user": (KeyboardInterrupt, None),
        }[how]
        with pytest.raises(kind, match=words) as error:
            th.measures.hessian.track_eigenpairs(problem, run(), 2, layers="*")
        if how == "failing forward":
            assert any("checkpoint 2" in note for note in error.value.__notes__)
    assert model.training
    assert model.norm.training
    assert not model.body[2].bias.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, p in model.named_parameters():
        assert (p.grad is None) == (grads[name] is None)
        assert p.grad is None or torch.equal(p.grad, grads[name])
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())


def test_bad_input_says_what_is_wanted():
    model = network()
    problem = th.Problem(model, LOSS, data())
    state = model.state_dict()
    renamed = {name.replace("2.", "3."): value for name, value in state.items()}
    wider = {**state, "2.bias": torch.zeros(5).double()}
    nan = {**state, "2.bias": torch.full((4,), math.nan).double()}
    track = th.measures.hessian.track_eigenpairs
    for checkpoints, words in (
        (state, "got one OrderedDict"),
        (model, "got one Sequential"),
        (problem.vector, "got one Tensor"),
        (7, "got one int"),
        ([], "checkpoints is empty"),
        (["run.pt"], "must be a module, a state dict or a flat vector. got str"),
        ([problem.vector[:-1]], r"has shape \(92,\)"),
        ([renamed], "holds '3.weight'.*nearest names: .*2.weight"),
        ([{"0.weight": state["0.weight"]}], "lacks '0.bias'"),
        ([wider], r"2.bias has shape \(5,\); in the problem's model it is \(4,\)"),
    ):
        with pytest.raises(ValueError, match=f"(?i){words}"):
            track(problem, checkpoints, 2)
    with pytest.raises(NonFiniteError, match=r"checkpoints: 'late': 2\.bias holds NaN"):
        track(problem, [nan], 2, labels=["late"])


def test_bad_settings_say_what_is_wanted():
    model = network()
    problem = th.Problem(model, LOSS, data())
    run = [model, model]
    whole, layers = (
        th.measures.hessian.track_eigenpairs(problem, run, 2),
        th.measures.hessian.track_eigenpairs(problem, run, 2, layers="*"),
    )
    for settings, words in (
        ({"labels": [1]}, "1 labels for 2 checkpoints"),
        ({"labels": (i for i in [1])}, "labels ended after 1"),
        ({"layers": "0", "matrix": th.hessian}, "Give layers or matrix"),
        ({"layers": "body"}, "fits no layer"),
        ({"k": 93}, "at most the size"),
        ({"which": "widest"}, "which must be one of"),
        ({"start": model}, "what an earlier track_eigenpairs returned"),
        ({"start": layers}, "there is one matrix to track, but what was tracked so far is a mapping"),
        ({"start": whole, "layers": "*"}, "there is a mapping to track, but what was tracked so far is one matrix"),
        ({"start": whole, "k": 3}, "start holds 2 largest eigenpairs, asked for are 3 largest"),
        ({"start": whole, "which": "smallest"}, "asked for are 2 smallest"),
    ):
        with pytest.raises(ValueError, match=words):
            th.measures.hessian.track_eigenpairs(problem, run, **{"k": 2, **settings})
    small = th.Problem(model, LOSS, data(), params="2.*")
    with pytest.raises(ValueError, match="matrix of size 92; here it is 36"):
        th.measures.hessian.track_eigenpairs(small, [model], 2, start=whole)


def test_the_bar_counts_checkpoints(capsys):
    problem = th.Problem(network(), LOSS, data())
    th.measures.hessian.track_eigenpairs(problem, states(network(), 2), 1, progress=True)
    assert "tracking" in capsys.readouterr().err
    th.measures.hessian.track_eigenpairs(problem, states(network(), 2), 1)
    assert capsys.readouterr().err == ""
