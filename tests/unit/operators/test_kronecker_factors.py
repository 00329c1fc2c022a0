"""Kronecker factors against sums over samples written out, for linear layers and convolutions of every kind."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.operators.kronecker import factors_of, kronecker_factors

LOSS = nn.CrossEntropyLoss()


def softmax_curvature(z: torch.Tensor) -> torch.Tensor:
    p = z.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double()


def per_sample_block(model: nn.Module, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The exact block of one layer's weight by double backward."""
    return th.testing.dense_hessian(lambda: LOSS(model(x), y), [layer.weight])


def test_check_1_the_softmax_curvature_has_a_root_and_its_null_vector():
    z = torch.randn(7).double()
    a, p = softmax_curvature(z), z.softmax(-1)
    q = torch.diag(p.sqrt()) @ (torch.eye(7).double() - torch.outer(torch.ones(7).double(), p))
    assert torch.allclose(q.T @ q, a, atol=1e-12)
    assert float((a @ torch.ones(7).double()).abs().max()) <= 1e-12
    assert int(torch.linalg.matrix_rank(a)) == 6


def test_check_2_block_and_factors_of_a_tiny_network():
    """6-5-4-3, 20 samples: the mean of M ⊗ x xᵀ is the exact block, and E[M] the Hessian in the bias."""
    model = mlp(6, 5, 4, 3)
    x, y = torch.randn(20, 6).double(), torch.arange(20) % 3
    factors = kronecker_factors(th.Problem(model, LOSS, (x, y)))
    assert list(factors) == ["0", "2", "4"]
    for name, layer in {"0": model[0], "2": model[2], "4": model[4]}.items():
        inputs = model[: int(name)](x).detach()
        bias = th.testing.dense_hessian(lambda: LOSS(model(x), y), [layer.bias])
        assert torch.allclose(factors[name].output, bias, atol=1e-10)
        assert torch.allclose(factors[name].input, inputs.T @ inputs / 20, atol=1e-12)
        assert torch.allclose(factors[name].mean, inputs.mean(0), atol=1e-12)
        block = per_sample_block(model, layer, x, y)
        total = torch.zeros_like(block)
        for i in range(20):
            one = kronecker_factors(th.Problem(model, LOSS, (x[i : i + 1], y[i : i + 1])))[name]
            total += torch.kron(one.output, one.input) / 20
            assert torch.allclose(one.operator().to_dense(), torch.kron(one.output, one.input), atol=1e-12)
        assert float((total - block).abs().max()) <= 1e-8


def test_batches_and_their_weights_do_not_matter():
    model = mlp(6, 5, 3)
    x, y = torch.randn(30, 6).double(), torch.arange(30) % 3
    y[4:9] = -100
    whole = kronecker_factors(th.Problem(model, LOSS, (x, y)))
    cut = kronecker_factors(th.Problem(model, LOSS, [(x[:13], y[:13]), (x[13:24], y[13:24]), (x[24:], y[24:])]))
    for name in whole:
        assert torch.allclose(whole[name].output, cut[name].output, atol=1e-12)
    plain = torch.arange(30) % 3
    a = kronecker_factors(th.Problem(model, LOSS, (x, plain)))
    b = kronecker_factors(th.Problem(model, LOSS, [(x[:13], plain[:13]), (x[13:], plain[13:])]))
    assert all(torch.allclose(a[name].input, b[name].input, atol=1e-12) for name in a)


def test_the_order_is_row_major_and_a_swapped_one_fails():
    model = mlp(4, 3, 2)
    x, y = torch.randn(1, 4).double(), torch.tensor([1])
    factors = kronecker_factors(th.Problem(model, LOSS, (x, y)))["0"]
    block = per_sample_block(model, model[0], x, y)
    assert torch.allclose(factors.operator().to_dense(), block, atol=1e-10)
    assert not torch.allclose(torch.kron(factors.input, factors.output), block, atol=1e-4)


CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "stride": {"kernel_size": 3, "stride": 2},
    "padding": {"kernel_size": 3, "padding": 1},
    "dilation": {"kernel_size": 2, "dilation": 2},
    "everything": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    "same": {"kernel_size": 4, "padding": "same"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "groups": {"kernel_size": 2, "groups": 2},
    "depthwise": {"kernel_size": 2, "groups": 4},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_check_13_convolutions_against_patches_written_out(name):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, **CONVOLUTIONS[name])
    x = torch.randn(6, 4, 6, 6).double()
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double()
    model(x)
    y = torch.arange(6) % 3
    factors = kronecker_factors(th.Problem(model, LOSS, (x, y)))["0"]
    # Patches by the layer itself: a convolution with the identity as its weight reads them off.
    k1, k2 = conv.kernel_size
    reader = nn.Conv2d(4, 4 * k1 * k2, **{**CONVOLUTIONS[name], "groups": 1}, bias=False).double()
    with torch.no_grad():
        reader.weight.copy_(torch.eye(4 * k1 * k2).reshape(-1, 4, k1, k2))
    patches = reader(x).detach().flatten(2)  # (B, n, P)
    assert torch.allclose(factors.input, torch.einsum("bnp,bmp->nm", patches, patches) / 6, atol=1e-10)
    positions = patches.shape[2]
    assert factors.positions == positions
    output = torch.zeros(4, 4).double()
    for i in range(6):
        z = conv(x[i : i + 1]).detach().requires_grad_()
        logits = model[3](model[2](model[1](z)))[0]
        jacobian = torch.stack([torch.autograd.grad(v, z, retain_graph=True)[0][0].flatten(1) for v in logits])  # (c, m, P)
        a = softmax_curvature(logits.detach())
        output += torch.einsum("cmp,cd,dnp->mn", jacobian, a, jacobian) / positions / 6
    assert torch.allclose(factors.output, output, atol=1e-10)
    block = factors.operator()
    assert block.shape[0] == conv.weight.numel()
    if conv.groups == 1:
        assert torch.allclose(block.to_dense(), torch.kron(factors.output, factors.input), atol=1e-12)


def test_a_grouped_block_is_the_part_of_the_full_one_that_exists():
    torch.manual_seed(0)
    m, n, g = 4, 6, 2
    root, other = torch.randn(m, m).double(), torch.randn(g * n, g * n).double()
    output, input_ = root @ root.T, other @ other.T
    full = torch.kron(output, input_)
    kept = torch.cat([i * g * n + (i // (m // g)) * n + torch.arange(n) for i in range(m)])
    from theodolite.operators.kronecker.factors import GroupedKroneckerOperator

    assert torch.allclose(GroupedKroneckerOperator(output, input_, g).to_dense(), full[kept][:, kept], atol=1e-12)


def test_check_13_a_convolution_that_covers_its_input_is_exact():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)).double()
    x, y = torch.randn(1, 2, 4, 4).double(), torch.tensor([2])
    factors = kronecker_factors(th.Problem(model, LOSS, (x, y)))["0"]
    assert torch.allclose(factors.operator().to_dense(), per_sample_block(model, model[0], x, y), atol=1e-10)


def test_one_dimensional_convolutions_and_several_uses_of_one_layer():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Linear(3, 3)

        def forward(self, x):
            z = torch.relu_(self.conv(x)).mean(-1)
            return self.head(torch.relu(self.head(z)))

    model = Net().double()
    x, y = torch.randn(5, 2, 8).double(), torch.arange(5) % 3
    factors = kronecker_factors(th.Problem(model, LOSS, (x, y)))
    z = torch.relu(model.conv(x)).mean(-1).detach()
    first = torch.relu(model.head(z)).detach()
    assert torch.allclose(factors["head"].input, (z.T @ z + first.T @ first) / 5, atol=1e-12)
    assert factors["head"].positions == 2
    patches = torch.nn.functional.pad(x, (1, 1)).unfold(2, 3, 2).permute(0, 2, 1, 3).reshape(5, 4, 6)
    assert torch.allclose(factors["conv"].input, torch.einsum("bpn,bpm->nm", patches, patches) / 5, atol=1e-12)


def test_exact_mode_is_the_second_derivative_through_a_curved_tail():
    model = mlp(5, 4, 3, 3, activation=nn.Tanh)
    x, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    problem = th.Problem(model, LOSS, (x, y))
    exact, ggn = kronecker_factors(problem, mode="exact"), kronecker_factors(problem)
    for name, layer in {"0": model[0], "2": model[2], "4": model[4]}.items():
        bias = th.testing.dense_hessian(lambda: LOSS(model(x), y), [layer.bias])
        assert torch.allclose(exact[name].output, bias, atol=1e-10)
    assert not torch.allclose(exact["0"].output, ggn["0"].output, atol=1e-5)
    assert torch.allclose(exact["4"].output, ggn["4"].output, atol=1e-10)


def test_other_losses_and_tokens():
    model = mlp(5, 4, 2)
    x, y = torch.randn(9, 5).double(), torch.randn(9, 2).double()
    factors = kronecker_factors(th.Problem(model, nn.MSELoss(), (x, y)))["2"]
    assert torch.allclose(factors.output, torch.eye(2).double(), atol=1e-12)  # 2 / (9·2) summed over 9
    torch.manual_seed(0)
    tokens = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    ids = torch.randint(0, 7, (3, 5))
    loss = lambda z, t: LOSS(z.reshape(-1, 7), t.reshape(-1))  # noqa: E731
    found = kronecker_factors(th.Problem(tokens, loss, (ids, ids.roll(1, 1))))
    assert set(found) == {"1"}
    assert "no Kronecker form" in found.without["0"]
    a = sum(softmax_curvature(z) for z in tokens(ids).detach().reshape(-1, 7)) / 15
    assert torch.allclose(found["1"].output, a / 5, atol=1e-10)
    embedded = tokens[0](ids).detach().reshape(-1, 4)
    assert torch.allclose(found["1"].input, embedded.T @ embedded / 3, atol=1e-12)


def test_sampling_is_unbiased_and_its_error_honest():
    model = mlp(6, 8, 12)
    x, y = torch.randn(20, 6).double(), torch.arange(20) % 12
    problem = th.Problem(model, LOSS, (x, y))
    exact = kronecker_factors(problem, "0")["0"].output
    runs = [kronecker_factors(problem, "0", draws=24, seed=seed)["0"] for seed in range(60)]
    mean = torch.stack([run.output for run in runs]).mean(0)
    errors = torch.tensor([float((run.output - exact).norm() / exact.norm()) for run in runs])
    claimed = torch.tensor([run.stderr for run in runs])
    assert 0.7 <= float(errors.square().mean().sqrt() / claimed.square().mean().sqrt()) <= 1.35
    assert float((mean - exact).norm() / exact.norm()) <= 4 * float(claimed.mean()) / 60**0.5
    assert runs[0].outcome is th.results.Outcome.ESTIMATED


def test_hugging_face_transposed_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=6)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(0, 11, (1, 2))
    problem = th.Problem(model, None, {"input_ids": ids, "labels": ids})
    found = kronecker_factors(problem, "*c_fc")
    (factors,) = found.values()
    assert factors.transposed
    assert (factors.output.shape[0], factors.input.shape[0]) == (32, 8)
    assert torch.allclose(factors.operator().to_dense(), torch.kron(factors.input, factors.output), atol=1e-10)
    pairs = factors.top_eigenpairs(3)
    image = factors.operator() @ pairs.vectors
    assert torch.allclose(image, pairs.vectors * pairs.values, atol=1e-8)


def test_check_5_eigenpairs_of_the_product():
    torch.manual_seed(0)
    a, b = torch.randn(7, 7).double(), torch.randn(9, 9).double()
    factors = factors_of(a @ a.T, b @ b.T)
    pairs = factors.top_eigenpairs(20)
    truth = torch.linalg.eigvalsh(torch.kron(a @ a.T, b @ b.T)).flip(0)[:20]
    assert torch.allclose(pairs.values, truth, rtol=1e-10)
    assert torch.allclose(pairs.vectors.T @ pairs.vectors, torch.eye(20).double(), atol=1e-10)
    u, v = pairs.left[:, pairs.left_index[0]], pairs.right[:, pairs.right_index[0]]
    assert torch.allclose(pairs.vectors[:, 0].reshape(7, 9), torch.outer(u, v), atol=1e-12)
    assert torch.allclose(factors.operator() @ pairs.vectors, pairs.vectors * pairs.values, rtol=1e-8, atol=1e-8)


def test_bad_input():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = (torch.randn(10, 3), torch.arange(10) % 2)
    with pytest.raises(RuntimeError, match="eval"):
        kronecker_factors(th.Problem(model, LOSS, data, mode="train"))
    found = kronecker_factors(th.Problem(model, LOSS, data))
    assert set(found) == {"0", "2"}
    assert "BatchNorm1d" in found.without["1"]
    with pytest.raises(ValueError, match="mode must be"):
        kronecker_factors(th.Problem(model, LOSS, data), mode="kfac")
    with pytest.raises(ValueError, match="fits no layer"):
        kronecker_factors(th.Problem(model, LOSS, data), "fc*")
    with pytest.raises(ValueError, match="k must be one of 1"):
        found["2"].top_eigenpairs(100)
    assert not any(m._forward_hooks for m in model.modules())


class MeanPooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).mean(1)


def test_positions_that_are_averaged_later_are_taken_together():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 20, 4, generator=generator).double() + 1.0
    problem = th.Problem(MeanPooled(), nn.CrossEntropyLoss(), (x, torch.arange(8) % 3))
    exact = th.gauss_newton(problem).to_dense()
    places = problem.selection.positions(problem.layers["b"].members(bias=False))
    trace = float(exact[places][:, places].trace())
    chosen, expanded = kronecker_factors(problem)["b"], kronecker_factors(problem, sharing="expand")["b"]
    assert (chosen.sharing, expanded.sharing, chosen.positions) == ("reduce", "expand", 20)
    assert float(chosen.operator().to_dense().trace()) == pytest.approx(trace, rel=0.2)
    assert float(expanded.operator().to_dense().trace()) < 0.25 * trace


def test_a_single_position_is_shared_either_way():
    problem = th.Problem(
        MeanPooled(), nn.CrossEntropyLoss(), (torch.ones(6, 1, 4).double() * torch.arange(6)[:, None, None], torch.arange(6) % 3)
    )
    either_way = [kronecker_factors(problem, sharing=sharing)["b"] for sharing in ("auto", "expand", "reduce")]
    assert {found.sharing for found in either_way} == {"expand"}
    torch.testing.assert_close(either_way[0].output, either_way[2].output)
    with pytest.raises(ValueError, match="mode='ggn'"):
        kronecker_factors(problem, sharing="reduce", mode="exact")


def test_sharing_is_judged_by_a_batch_that_counts():
    torch.manual_seed(0)
    x = torch.randn(11, 20, 4, generator=torch.Generator().manual_seed(1)).double() + 1.0
    labels = torch.arange(8) % 3
    good, ignored = (x[:8], labels), (x[8:], torch.full((3,), -100))
    model = MeanPooled()
    found = [kronecker_factors(th.Problem(model, LOSS, data))["b"] for data in ([good, ignored], [ignored, good])]
    assert {factors.sharing for factors in found} == {"reduce"}
    torch.testing.assert_close(found[0].output, found[1].output)
