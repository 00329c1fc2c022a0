"""Kronecker factors where they are easily wrong: uneven batches, several uses, odd shapes of inputs, outputs and losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite.operators.kronecker import kronecker_factors

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """Named layers and a forward given as a function of the module and its input."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def data(count: int = 30, inputs: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Samples whose size grows with their place, so that the cutting would show."""
    return torch.randn(count, inputs) * torch.linspace(0.1, 3, count)[:, None], torch.arange(count) % classes


def cut(x: Tensor, y: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def curvature(z: Tensor) -> Tensor:
    """`diag p − p pᵀ` of rows (R, c)."""
    p = z.detach().softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def close(a: Tensor, b: Tensor, atol: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=atol)


# Averages


def tokens_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=-100)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 8.0]).double()),
        nn.CrossEntropyLoss(),
        tokens_loss,
    ],
)
def test_averages_do_not_depend_on_the_cutting(loss):
    model, (x, y) = mlp(), data()
    y = y.sort().values
    y[13:24] = -100  # the whole second batch, which then has no part in the objective
    whole = kronecker_factors(th.Problem(model, loss, (x, y)))
    parts = kronecker_factors(th.Problem(model, loss, cut(x, y, 13, 11, 6)))
    for name, inputs in {"0": x, "2": model[:2](x).detach()}.items():
        for found in (whole[name], parts[name]):  # every sample counts once, whatever its label
            assert close(found.input, inputs.T @ inputs / 30)
            assert close(found.mean, inputs.mean(0))
            assert found.samples == 30
        assert close(whole[name].output, parts[name].output)


def test_a_sum_makes_a_sum_of_the_output_hessian_only():
    model, pair = mlp(), data()
    mean = kronecker_factors(th.Problem(model, LOSS, pair))
    total = kronecker_factors(th.Problem(model, nn.CrossEntropyLoss(reduction="sum"), pair))
    for name in mean:
        assert close(total[name].output, 30 * mean[name].output)
        assert close(total[name].input, mean[name].input)


# Several uses of a weight


def twice(m: Net, x: Tensor) -> Tensor:
    return m.o(torch.relu(m.h(torch.relu(m.h(torch.relu(m.i(x)))))))


def test_two_uses_are_two_positions_in_both_modes():
    m, (x, y) = Net(twice, i=nn.Linear(6, 4), h=nn.Linear(4, 4), o=nn.Linear(4, 3)), data()
    found = {mode: kronecker_factors(th.Problem(m, LOSS, (x, y)), mode=mode)["h"] for mode in ("ggn", "exact")}
    first = m.h(torch.relu(m.i(x))).detach()

    def hessian(rest, z: Tensor) -> Tensor:
        total = torch.autograd.functional.hessian(lambda q: LOSS(rest(q), y), z)  # (B, m, B, m)
        return torch.einsum("bibj->ij", total)

    truth = hessian(lambda z: m.o(torch.relu(m.h(torch.relu(z)))), first)
    truth = (truth + hessian(lambda z: m.o(torch.relu(z)), m.h(torch.relu(first)).detach())) / 2
    for mode, factors in found.items():
        assert close(factors.output, truth), mode
        assert factors.positions == 2


def test_modules_that_share_a_weight_are_counted_together():
    layers = {"i": nn.Linear(6, 4), "h": nn.Linear(4, 4), "o": nn.Linear(4, 3)}
    one = Net(twice, **layers)
    other = nn.Linear(4, 4)
    other.weight, other.bias = layers["h"].weight, layers["h"].bias
    tied = Net(lambda m, x: m.o(torch.relu(m.g(torch.relu(m.h(torch.relu(m.i(x))))))), g=other, **layers)
    pair = data()
    a = kronecker_factors(th.Problem(one, LOSS, pair))["h"]
    (b,) = (f for name, f in kronecker_factors(th.Problem(tied, LOSS, pair)).items() if name in "gh")
    assert close(a.input, b.input)
    assert close(a.output, b.output)
    assert b.positions == 2
    embedded = Net(lambda m, x: m.o(m.e(x).mean(1)), o=nn.Linear(4, 7, bias=False), e=nn.Embedding(7, 4))
    embedded.e.weight = embedded.o.weight
    found = kronecker_factors(th.Problem(embedded, LOSS, (torch.randint(0, 7, (5, 3)), torch.arange(5))))
    assert "also used by e (Embedding)" in found.without["o"]


# What the loss may be


def test_a_loss_without_curvature_in_the_output_is_refused():
    model = nn.Sequential(*mlp(), nn.LogSoftmax(-1))
    problem = th.Problem(model, nn.NLLLoss(), data())
    with pytest.raises(ValueError, match="end at the logits"):
        kronecker_factors(problem)
    with pytest.raises(ValueError, match="end at the logits"):
        th.measures.hessian.full_hessian_approximation(problem, 2)
    torch.manual_seed(0)
    model, pair = mlp(), data()
    plain = kronecker_factors(th.Problem(model, LOSS, pair))
    exact = kronecker_factors(th.Problem(nn.Sequential(*model, nn.LogSoftmax(-1)), nn.NLLLoss(), pair), mode="exact")
    assert all(close(plain[name].output, exact[name].output) for name in plain)


def two_heads(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(m.a(x))
    return m.p(h), m.q(h)


def test_two_outputs_are_measured_as_one():
    model = Net(two_heads, a=nn.Linear(6, 5), p=nn.Linear(5, 3), q=nn.Linear(5, 2))
    x, y = data()
    found = kronecker_factors(th.Problem(model, lambda o, t: LOSS(o[0], t) + 2 * LOSS(o[1], t % 2), (x, y)))
    p, q = (curvature(z) for z in model(x))
    assert close(found["p"].output, p.mean(0))
    assert close(found["q"].output, 2 * q.mean(0))
    below = (model.a(x) > 0).double()[:, :, None] * torch.cat([model.p.weight, model.q.weight]).T  # ∂ both / ∂ a
    both = torch.stack([torch.block_diag(m, 2 * n) for m, n in zip(p, q, strict=True)])
    assert close(found["a"].output, (below @ both @ below.mT).mean(0))


def test_other_ways_from_the_parameters_to_the_loss_are_refused():
    model = Net(two_heads, a=nn.Linear(6, 5), p=nn.Linear(5, 3), q=nn.Linear(5, 2))
    problem = th.Problem(model, lambda o, t: LOSS(o[0], t) + LOSS(o[1], t % 2) + model.a.weight.square().sum(), data())
    with pytest.raises(ValueError, match=r"kronecker_factors: the loss depends .* other ways"):
        kronecker_factors(problem)
    with pytest.raises(ValueError, match="gauss_newton: the loss depends"):
        th.gauss_newton(problem).to_dense()
    with pytest.raises(ValueError, match="full_hessian_approximation: the loss depends"):
        th.measures.hessian.full_hessian_approximation(problem, 2)


def test_concave_and_mixing_losses_are_refused():
    with pytest.raises(ValueError, match="not convex"):
        kronecker_factors(th.Problem(mlp(), lambda z, t: -LOSS(z, t), data()))

    def ranking(z: Tensor, t: Tensor) -> Tensor:
        return F.softplus(z[None, :, 0] - z[:, None, 0])[t[:, None] > t[None, :]].mean()

    for mode in ("ggn", "exact"):
        with pytest.raises(ValueError, match="mixes samples"):
            kronecker_factors(th.Problem(mlp(), ranking, data()), mode=mode)


def test_a_small_curvature_beside_the_softmax_is_kept_in_float32():
    model, (x, y) = nn.Linear(12, 3), (torch.rand(40, 12), torch.arange(40) % 3)
    loss = lambda z, t: LOSS(z, t) + 1e-4 * z.square().mean()  # noqa: E731
    wide = kronecker_factors(th.Problem(model, loss, (x, y)))["(model)"].output
    narrow = kronecker_factors(th.Problem(model.float(), loss, (x.float(), y)))["(model)"].output
    assert float(torch.linalg.eigvalsh(wide)[0]) == pytest.approx(2e-4 / 3, rel=1e-6)
    assert float(torch.linalg.eigvalsh(narrow)[0]) == pytest.approx(2e-4 / 3, rel=1e-2)


def test_one_number_per_sample():
    model = Net(lambda m, x: m.b(torch.relu(m.a(x))).squeeze(-1), a=nn.Linear(6, 4), b=nn.Linear(4, 1))
    x, y = data()
    squared = kronecker_factors(th.Problem(model, nn.MSELoss(), (x, torch.randn(30))))
    assert close(squared["b"].output, torch.tensor([[2.0]]))
    q = model(x).detach().sigmoid()
    logistic = kronecker_factors(th.Problem(model, nn.BCEWithLogitsLoss(), (x, (y > 0).double())))
    assert close(logistic["b"].output, (q * (1 - q)).mean().reshape(1, 1))
    assert logistic.classes == 1
    assert th.hessian_structure(th.Problem(model, nn.MSELoss(), (x, torch.randn(30))), k=2)["b"].factors.last


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_classes_in_the_second_dimension(shape):
    conv = (nn.Conv1d, nn.Conv2d)[len(shape) - 1](2, 3, 1)
    x, y = torch.randn(8, 2, *shape), torch.randint(0, 3, (8, *shape))
    problem = th.Problem(conv, LOSS, (x, y))
    found, exact = kronecker_factors(problem), kronecker_factors(problem, mode="exact")
    positions = y[0].numel()
    rows = conv(x).detach().flatten(2).transpose(1, 2).reshape(-1, 3)
    truth = curvature(rows).sum(0) / y.numel() / positions
    assert close(found["(model)"].output, truth)
    assert close(exact["(model)"].output, truth)
    assert found.classes == exact.classes == 3


def test_outputs_with_positions_first():
    """A model that works on (T, B, d) and gives (T, B, c)."""
    x, y = torch.randn(7, 3, 4), torch.randint(0, 5, (7, 3))
    model = Net(lambda m, x: m.a(x.transpose(0, 1)), a=nn.Linear(4, 5))
    loss = lambda z, t: LOSS(z.reshape(-1, 5), t.T.reshape(-1))  # noqa: E731
    found = kronecker_factors(th.Problem(model, loss, (x, y)))["a"]
    assert close(found.output, curvature(model.a(x).reshape(-1, 5)).sum(0) / 21 / 3)
    assert found.positions == 3


def test_any_convex_loss_can_be_sampled():
    x, y = data(20)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))
    losses = {
        "squared": (nn.MSELoss(), torch.randn(20, 6)),
        "coupled": (lambda z, t: LOSS(z, t) + 0.3 * z.square().sum(1).mean() + 0.1 * z.sum(1).square().mean(), y),
    }
    for name, (loss, target) in losses.items():
        problem = th.Problem(model, loss, (x, target))
        exact = kronecker_factors(problem, "0")["0"].output
        runs = [kronecker_factors(problem, "0", draws=20, seed=seed)["0"] for seed in range(40)]
        mean = torch.stack([run.output for run in runs]).mean(0)
        errors = torch.tensor([float((run.output - exact).norm() / exact.norm()) for run in runs])
        claimed = torch.tensor([run.stderr for run in runs])
        assert float((mean - exact).norm() / exact.norm()) <= 4 * float(claimed.mean()) / 40**0.5, name
        assert 0.65 <= float(errors.square().mean().sqrt() / claimed.square().mean().sqrt()) <= 1.45, name
    wide = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 200))
    report = th.hessian_structure(th.Problem(wide, nn.MSELoss(), (x, torch.randn(20, 200))), "0", k=2)
    assert report["0"].factors.draws == 16
    exact = th.hessian_structure(th.Problem(wide, nn.MSELoss(), (x, torch.randn(20, 200))), "0", k=2, max_passes=200)
    assert exact["0"].factors.draws == 0


def test_the_number_of_draws_is_checked_and_one_has_no_error():
    problem = th.Problem(mlp(), LOSS, data())
    one = kronecker_factors(problem, draws=1)
    assert one["0"].stderr != one["0"].stderr  # NaN
    assert one["0"].outcome is one.outcome is th.results.Outcome.ESTIMATED
    assert "error unknown" in str(one["0"])
    for draws in (0, -3, 2.5):
        with pytest.raises(ValueError, match="draws must be"):
            kronecker_factors(problem, draws=draws)
    for setting in ({"draws": 4}, {"max_passes": 9}):
        with pytest.raises(ValueError, match="mode='ggn'"):
            kronecker_factors(problem, mode="exact", **setting)


# Where the samples are


def tail(m: Net, z: Tensor, dim: int) -> Tensor:
    return m.o(torch.tanh(torch.tanh(z).cumsum(dim))).mean(dim)


@pytest.mark.parametrize(("samples", "positions"), [(6, 3), (4, 4)])
def test_models_that_put_positions_first(samples, positions):
    layers = {"a": nn.Linear(4, 5), "o": nn.Linear(5, 3)}
    x, y = torch.randn(samples, positions, 4) + torch.arange(positions)[None, :, None], torch.arange(samples) % 3
    inner = Net(lambda m, x: tail(m, m.a(x.transpose(0, 1)), 0), **layers)
    outer = Net(lambda m, x: tail(m, m.a(x), 1), **layers)
    z = inner.a(x).detach()
    total = torch.autograd.functional.hessian(lambda q: LOSS(tail(outer, q, 1), y), z)
    exact = torch.einsum("btibtj->ij", total) / positions
    left, sizes, _ = torch.linalg.svd(x.mean(0).T)
    for model in (inner, outer):
        problem = th.Problem(model, LOSS, (x, y))
        ggn, found = kronecker_factors(problem)["a"], kronecker_factors(problem, mode="exact")["a"]
        assert close(found.output, exact)
        assert close(ggn.output, kronecker_factors(th.Problem(outer, LOSS, (x, y)))["a"].output)
        assert float(ggn.mean.norm()) == pytest.approx(float(sizes[0]))
        assert float((ggn.mean @ left[:, 0]) ** 2) == pytest.approx(float(sizes[0]) ** 2)


def test_frames_in_the_batch_dimension():
    """Samples and frames in one dimension, as for videos: the frames are positions of a sample."""
    layers = {"c": nn.Conv1d(2, 3, 2), "o": nn.Linear(3, 3)}
    x, y = torch.randn(4, 5, 2, 6), torch.arange(4) % 3

    def merged(m: Net, x: Tensor) -> Tensor:
        frames = torch.relu(m.c(x.flatten(0, 1))).mean(-1)
        return m.o(frames.unflatten(0, (4, 5)).mean(1))

    found = kronecker_factors(th.Problem(Net(merged, **layers), LOSS, (x, y)))["c"]
    patches = x.unfold(3, 2, 1).transpose(2, 3).flatten(3)  # (B, frames, P, n)
    assert found.positions == 25
    assert close(found.input, torch.einsum("bfpn,bfpm->nm", patches, patches) / 4)


def test_layers_that_are_no_product_with_the_weight_are_named():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    x, y = data()
    found = kronecker_factors(th.Problem(nn.Sequential(Scaled(6, 3)), LOSS, (x, y)))
    assert "does not act as W x" in found.without["0"]
    also = Net(lambda m, x: m.a(x) + x[:, :1] @ m.a.weight[:, :1].T, a=nn.Linear(6, 3))
    assert "does not act as W x" in kronecker_factors(th.Problem(also, LOSS, (x, y))).without["a"]
    for count in (30, 4):  # as many prototypes as samples, or another number
        table = torch.randn(count, 5)
        prototypes = Net(lambda m, x, p=table: m.i(x) @ m.o(p).T, i=nn.Linear(6, 4), o=nn.Linear(5, 4))
        listed = kronecker_factors(th.Problem(prototypes, LOSS, (x, y)))
        assert set(listed) == {"i"}
        assert "counts the samples" in listed.without["o"]


def test_layers_that_take_no_part():
    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.relu(m.i(input=x))  # by keyword
        m.aux(h)
        with torch.no_grad():
            still = m.t(x)
        return m.o(h + still)

    names = {"i": nn.Linear(6, 4), "aux": nn.Linear(4, 2), "t": nn.Linear(6, 4), "o": nn.Linear(4, 3), "gone": nn.Linear(2, 2)}
    x, y = data()
    with pytest.warns(th.errors.DerivativeWarning, match="not that of the loss"):  # it moves with the weights of `t`
        problem = th.Problem(Net(forward, **names), LOSS, (x, y))
    for mode in ("ggn", "exact"):
        found = kronecker_factors(problem, mode=mode)
        assert set(found) == {"i", "aux", "o"}
        assert not found["aux"].output.any()
        assert "no_grad" in found.without["t"]
        assert "not called" in found.without["gone"]
        assert close(found["i"].input, x.T @ x / 30)


def test_reasons_are_the_true_ones():
    x, y = data()
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    assert "not measured" in kronecker_factors(th.Problem(frozen, LOSS, (x, y))).without["0"]
    assert "not measured" in kronecker_factors(th.Problem(mlp(), LOSS, (x, y), params="*bias")).without["2"]
    volume = nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(16, 3))
    found = kronecker_factors(th.Problem(volume, LOSS, (torch.randn(4, 1, 3, 3, 3), y[:4])))
    assert "Conv3d is not a linear layer, a Conv1d or a Conv2d" in found.without["0"]
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = Net(lambda m, x: m.o(m.t(x).mean(1)), t=encoder, o=nn.Linear(8, 3))
    found = kronecker_factors(th.Problem(model, LOSS, (torch.randn(5, 4, 8), y[:5])))
    assert "without calling it" in found.without["t.self_attn.out_proj"]


def test_the_model_is_as_found_while_an_error_is_still_held():
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)).train()
    with pytest.raises(ValueError, match="not convex") as held:
        kronecker_factors(th.Problem(model, lambda z, t: -LOSS(z, t), data()))
    assert held.value is not None  # its frames live
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


# Convolutions and Hugging Face's layers against autograd


def test_check_13_the_exact_identity_of_a_convolution_with_several_patches():
    """H(w) = (I ⊗ X) M (I ⊗ Xᵀ) with M the Hessian in all outputs, on a CNN with P > 1."""
    from theodolite.operators.kronecker.affine import affine_layer

    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    x, y = torch.randn(5, 2, 5, 5), torch.arange(5) % 4
    layer = affine_layer("0", model[0])
    patches = layer.input_features(x)  # (B, P, n)
    z = model[0](x).detach()
    total = torch.autograd.functional.hessian(lambda q: LOSS(model[1:](q), y), z).flatten(2, 3).flatten(-2)
    outputs = torch.einsum("bipbjq->bipjq", total)  # samples do not mix
    block = torch.einsum("bipjq,bpn,bqo->injo", outputs, patches, patches).reshape(24, 24)
    truth = th.layer_hessians(th.Problem(model, LOSS, (x, y)), "0")["0"].to_dense()
    assert patches.shape[1] == 9
    assert close(block, truth, atol=1e-8)
    factors = {mode: kronecker_factors(th.Problem(model, LOSS, (x, y)), "0", mode=mode)["0"] for mode in ("ggn", "exact")}
    for found in factors.values():
        assert close(found.output, torch.einsum("bipjp->ij", outputs) / 9)


def test_exact_mode_at_several_positions_of_a_curved_network():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.randn(6, 2, 5), torch.arange(6) % 3
    total = torch.autograd.functional.hessian(lambda q: LOSS(model[1:](q), y), model[0](x).detach())
    exact = kronecker_factors(th.Problem(model, LOSS, (x, y)), "0", mode="exact")["0"]
    assert close(exact.output, torch.einsum("bipbjp->ij", total) / 4)


def test_the_mean_of_several_positions_is_the_leading_direction_of_the_mean_patches():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.rand(7, 2, 3, 3), torch.arange(7) % 3
    found = kronecker_factors(th.Problem(model, LOSS, cut(x, y, 3, 4)), "0")["0"]
    mean = F.unfold(x, 2).mean(0)  # (n, P)
    left, sizes, _ = torch.linalg.svd(mean)
    assert close(torch.outer(found.mean, found.mean), sizes[0] ** 2 * torch.outer(left[:, 0], left[:, 0]))
    assert float(found.mean.sum()) > 0


def test_the_operator_of_a_grouped_convolution_is_its_block():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    problem = th.Problem(model, LOSS, (torch.randn(1, 4, 3, 3), torch.tensor([1])))
    block = th.layer_hessians(problem, "0")["0"].to_dense()
    assert close(kronecker_factors(problem)["0"].operator().to_dense(), block)


def test_hugging_face_layers_against_autograd():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=6, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(0, 11, (3, 4))
    name = "transformer.h.0.mlp.c_fc"
    found = kronecker_factors(th.Problem(model, None, {"input_ids": ids, "labels": ids}), name)[name]
    seen = {}
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, o: seen.update(x=a[0].detach(), z=o))
    logits = model(ids).logits
    hook.remove()
    truth = torch.zeros(32, 32)
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(3)):  # the last position predicts nothing
        rows = [torch.autograd.grad(v, seen["z"], retain_graph=True)[0][b] for v in logits[b, t]]
        jacobian = torch.stack(rows)  # (V, T, m)
        truth += torch.einsum("vtm,vw,wtn->mn", jacobian, curvature(logits[b, t][None])[0], jacobian) / 4 / 9
    assert close(found.output, truth)
    x = seen["x"].reshape(-1, 8)
    assert close(found.input, x.T @ x / 3)
