"""The average gradient outer product: closed forms, dense truth, chunks, streams, projections, and what is refused."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import theodolite as th
from tests.unit.measures.features.cases import CASES, Attending, Tokens, cnn, dense, mlp, numbers
from theodolite.data.generators import rank_k_target
from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.measures.features import AGOP, InputGradients, agop, agop_alignment, input_gradients


class Quadratic(nn.Module):
    """xᵀAx for a symmetric A."""

    def __init__(self, a: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(a)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,ij,nj->n", x, self.a, x)


def symmetric(d: int) -> Tensor:
    a = numbers(d, d, seed=3)
    return a + a.T


# Closed forms


def test_check_12_a_quadratic_form() -> None:
    a, x = symmetric(6), numbers(40, 6)
    g = agop(Quadratic(a), x)
    torch.testing.assert_close(g, 4 * a @ (x.T @ x / 40) @ a, rtol=1e-12, atol=1e-12)
    assert agop_alignment(g, g) == pytest.approx(1.0, abs=1e-12)
    other = agop(mlp(inputs=6), x)
    low = agop_alignment(input_gradients(Quadratic(a), x), input_gradients(mlp(inputs=6), x))
    assert low == pytest.approx(agop_alignment(g, other), abs=1e-10)
    assert agop_alignment(agop(Quadratic(-7.5 * a), x), other) == pytest.approx(agop_alignment(g, other), abs=1e-12)


@pytest.mark.slow
def test_check_13_expected_outer_products_of_the_targets() -> None:
    """A million points; largest errors measured with this seed: 7e-4, 0.064, 0.0094 and 4e-7 in the order of the bounds."""
    bounds = {"rank-2": 0.05, "rank-3": 0.15, "rank-4": 0.05, "full": 0.05}
    cosines = {"rank-2": 0.1414, "rank-3": 0.1445, "rank-4": 0.1826, "full": 1.0}
    targets = {name: rank_k_target(name, 100) for name in bounds}  # type: ignore[arg-type]
    streams = {name: AGOP(batch_size=50_000) for name in bounds}
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(50_000, 100, generator=generator)
        for name, target in targets.items():
            streams[name].update(target, x)
    for name, target in targets.items():
        found = streams[name].compute().double()
        assert streams[name].count == 1_000_000
        assert float((found - target.egop).abs().max()) < bounds[name], name
        assert agop_alignment(torch.eye(100), target.egop) == pytest.approx(cosines[name], abs=5e-5)
        assert agop_alignment(torch.eye(100), found) == pytest.approx(cosines[name], abs=2e-3)
    values = torch.linalg.eigvalsh(targets["rank-3"].egop).flip(0)
    torch.testing.assert_close(values[:3], torch.tensor([24.0, 10.0, 4.0]).double())
    assert float(values[3:].abs().max()) < 1e-12
    top = torch.linalg.eigvalsh(streams["rank-3"].compute().double()).flip(0)[:3]
    torch.testing.assert_close(top, values[:3], rtol=0.02, atol=0.0)


# Dense truth


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_it_is_that_of_written_out_jacobians(name: str, batch_size: int | None) -> None:
    make, shape = CASES[name]
    model, x = make(), numbers(*shape)
    torch.testing.assert_close(agop(model, x, batch_size=batch_size), dense(model, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_rows_have_the_same_matrix(name: str) -> None:
    make, shape = CASES[name]
    model, x = make(), numbers(*shape)
    rows = input_gradients(model, x, batch_size=2)
    assert rows.count == len(x)
    assert rows.rows.shape == (len(x) * model.eval()(x).shape[1], x[0].numel())
    torch.testing.assert_close(rows.matrix(), agop(model, x), rtol=1e-10, atol=1e-12)


def test_many_outputs_come_in_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[agop.__module__], "NUMBERS", 20)
    model, x = mlp(outputs=9), numbers(7, 5)
    torch.testing.assert_close(agop(model, x), dense(model, x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(agop(model, x, batch_size=5), dense(model, x), rtol=1e-10, atol=1e-12)
    assert input_gradients(model, x).count == 7


def test_large_matrices_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(inputs=11), numbers(7, 11)
    monkeypatch.setattr(sys.modules[agop.__module__], "BLOCK", 4)
    torch.testing.assert_close(agop(model, x), dense(model, x), rtol=1e-10, atol=1e-12)


def test_a_problem_brings_its_inputs_mode_and_batches() -> None:
    model, x, y = cnn(), numbers(6, 2, 4, 4), torch.zeros(6, dtype=torch.long)
    problem = th.Problem(model, nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:], y[4:])])
    torch.testing.assert_close(agop(problem), dense(model, x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(agop(problem, x[:2]), dense(model, x[:2]), rtol=1e-10, atol=1e-12)


def test_functions_and_frozen_models_have_one_too() -> None:
    x = numbers(9, 5)
    torch.testing.assert_close(agop(lambda z: z[:, :2] * 3.0, x), torch.diag(torch.tensor([9.0, 9, 0, 0, 0]).double()))
    torch.testing.assert_close(agop(mlp().requires_grad_(False), x), dense(mlp(), x))
    torch.testing.assert_close(agop(nn.Sequential(nn.Tanh()), x, at="0").trace(), torch.tensor(5.0).double())


def test_several_inputs_are_joined() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0).double())

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.weight * a.sum(1) + 3 * b[:, 0]

    row = torch.tensor([2.0, 2.0, 3.0, 0.0]).double()
    torch.testing.assert_close(agop(Two(), (numbers(4, 2), numbers(4, 2))), torch.outer(row, row))


def test_half_precision_is_measured_through_float32() -> None:
    model, x = mlp().bfloat16(), numbers(8, 5).bfloat16()
    found = agop(model, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, dense(copy.deepcopy(model).float(), x.float()), rtol=1e-5, atol=1e-6)


# At a layer


@pytest.mark.parametrize("flat", [False, True])
def test_tokens_are_measured_at_the_embedding(flat: bool) -> None:
    model = Tokens(flat=flat)
    ids = torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(0))
    jacobians = torch.autograd.functional.jacobian(model.embedded, model.embedding(ids).detach())
    n = len(ids)
    per_sample = jacobians.reshape(n, -1, n, 4, 6)  # (sample, outputs, sample, token, feature)
    rows = torch.stack([per_sample[i, :, i] for i in range(n)])  # (n, k, 4, 6)
    truth = torch.einsum("nkti,nktj->ij", rows, rows) / (4 * n)
    torch.testing.assert_close(agop(model, ids, at="embedding"), truth, rtol=1e-10, atol=1e-12)
    assert input_gradients(model, ids, at="embedding").count == 4 * n


def test_images_count_their_pixels_as_samples() -> None:
    model, x = cnn(), numbers(6, 2, 4, 4)
    rest = copy.deepcopy(model[1:])  # type: ignore[index]
    inner = dense(rest, model[0](x).detach()).reshape(3, 16, 3, 16)  # type: ignore[index]
    truth = torch.einsum("apbp->ab", inner) / 16
    torch.testing.assert_close(agop(model, x, at="0"), truth, rtol=1e-10, atol=1e-12)


def test_a_hidden_layer_is_the_input_of_the_rest() -> None:
    model, x = mlp(), numbers(7, 5)
    rest = nn.Sequential(model[1], model[2])  # type: ignore[index]
    torch.testing.assert_close(agop(model, x, at="0"), dense(rest, model[0](x).detach()))  # type: ignore[index]


# Streams, projections


def test_a_stream_is_the_whole() -> None:
    model, x = mlp(), numbers(10, 5)
    stream = AGOP()
    for part in x.split([3, 6, 1]):
        stream.update(model, part)
    torch.testing.assert_close(stream.compute(), agop(model, x), rtol=1e-12, atol=1e-14)
    left, right = AGOP().update(model, x[:4]), AGOP().update(model, x[4:])
    torch.testing.assert_close(left.merge(right).merge(AGOP()).compute(), agop(model, x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(AGOP().merge(right).compute(), agop(model, x[4:]))
    with pytest.raises(ValueError, match="call update"):
        AGOP().compute()
    with pytest.raises(ValueError, match="all must have one size"):
        left.merge(AGOP().update(mlp(inputs=4), numbers(2, 4)))


def test_projections_are_unbiased() -> None:
    """The mean of 400 estimates lies within four standard errors of the truth, in every entry."""
    model, x = mlp(outputs=6), numbers(4, 5)
    found = torch.stack([agop(model, x, projections=2, seed=seed) for seed in range(400)])
    error = found.std(0) / 20
    assert bool(((found.mean(0) - dense(model, x)).abs() < 4 * error + 1e-12).all())
    assert float(error.max()) > 0
    torch.testing.assert_close(agop(model, x, projections=6), dense(model, x))


def test_projections_do_not_depend_on_the_chunks() -> None:
    model, x = mlp(outputs=6), numbers(10, 5)
    torch.testing.assert_close(agop(model, x, projections=2, batch_size=3), agop(model, x, projections=2))
    assert not torch.allclose(agop(model, x, projections=2, seed=1), agop(model, x, projections=2))


# Alignment


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 7), m=st.integers(1, 7), d=st.integers(1, 5), scale=st.floats(1e-3, 1e3))
def test_alignment_is_a_cosine(seed: int, n: int, m: int, d: int, scale: float) -> None:
    a, b = (InputGradients(numbers(rows, d, seed=seed + i), rows) for i, rows in enumerate((n, m)))
    found = agop_alignment(a, b)
    assert 0 <= found <= 1
    pairs = [(a.matrix(), b.matrix()), (a, b.matrix()), (a.matrix(), b), (b, a), (InputGradients(scale * a.rows, n), b)]
    for pair in pairs:
        assert agop_alignment(*pair) == pytest.approx(found, abs=1e-10)
    rotation = torch.linalg.qr(numbers(d, d, seed=seed + 2))[0]
    turned = [InputGradients(g.rows @ rotation, g.count) for g in (a, b)]
    assert agop_alignment(*turned) == pytest.approx(found, abs=1e-10)
    assert agop_alignment(a, a) == pytest.approx(1.0, abs=1e-12)


def test_alignment_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="second matrix is zero"):
        agop_alignment(torch.eye(2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="2 and 3 coordinates"):
        agop_alignment(torch.eye(2), torch.eye(3))
    with pytest.raises(ValueError, match="shape \\(2, 3\\)"):
        agop_alignment(torch.eye(2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="NaN or inf"):
        agop_alignment(torch.eye(2), torch.full((2, 2), torch.nan))


# What is refused, and what is left behind


def test_errors_say_what_to_do() -> None:
    ids = torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(TypeError, match="at='embedding'"):
        agop(Tokens(), ids)
    with pytest.raises(ValueError, match="Nearest names: embedding"):
        agop(Tokens(), ids, at="embeding")
    with pytest.raises(ValueError, match="called 0 times"):
        agop(_Idle(), numbers(2, 5), at="idle")
    with pytest.raises(ValueError, match="inputs is missing"):
        agop(mlp())
    with pytest.raises(TypeError, match="Got str"):
        agop("model", numbers(2, 5))
    for name in ("batch_size", "projections"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number"):
            agop(mlp(), numbers(2, 5), **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not depend on the inputs"):
        agop(lambda x: torch.zeros(len(x), 1), numbers(2, 5))
    with pytest.raises(ValueError, match="its own outputs"):
        agop(lambda x: x.sum(0), numbers(3, 5))


class _Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_coupled_samples_are_refused() -> None:
    problem = th.Problem(cnn(), nn.CrossEntropyLoss(), (numbers(6, 2, 4, 4), torch.zeros(6, dtype=torch.long)), mode="train")
    with pytest.raises(BatchCoupledError, match="normalises over the batch"):
        agop(problem)
    with pytest.raises(BatchCoupledError, match="other outputs alone"):
        agop(lambda x: x - x.mean(0), numbers(4, 3))
    with pytest.raises(NotRepeatableError):
        agop(lambda x: x + torch.rand(()), numbers(4, 3))


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_found(fails: bool) -> None:
    model = Attending().train()
    model.head.eval()
    x = numbers(5, 3, 6)
    if fails:  # the last chunk
        handle = model.head.register_forward_hook(lambda _, __, out: 1 / 0 if len(out) == 1 and float(x[4, 0, 0]) == 0 else out)
        x[4] = 0.0
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            agop(model, x, at="attention", batch_size=4)
        handle.remove()
    else:
        agop(model, x, projections=2)
        agop(model, x, at="attention")
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model.modules()] == flags
    assert not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.head.weight.grad is not None
    assert bool((model.head.weight.grad == 1).all())
    assert model.head.bias.grad is None
    assert all(p.requires_grad for p in model.parameters())
    assert not x.requires_grad
    assert x.grad is None


def test_inputs_that_require_grad_stay_so() -> None:
    x = numbers(4, 5).requires_grad_()
    found = agop(mlp(), x)
    assert not found.requires_grad
    assert x.requires_grad
    assert x.grad is None
    with torch.no_grad():
        torch.testing.assert_close(agop(mlp(), x), found)
    model = mlp()
    with torch.inference_mode():
        torch.testing.assert_close(agop(model, numbers(4, 5)), found)


def test_a_matrix_too_large_for_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[agop.__module__], "available_bytes", lambda device: 100)
    with pytest.raises(ValueError, match="input_gradients keeps"):
        agop(mlp(), numbers(4, 5))
    assert input_gradients(mlp(), numbers(4, 5)).dim == 5
