"""The tangent kernel against the product of the dense Jacobian, float64, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.errors import BatchCoupledError, NotRepeatableError
from theodolite.models import ntk_cnn, ntk_fcn
from theodolite.operators.tangent_kernels.blocks import BlockMaker
from theodolite.operators.tangent_kernels.features import Features, Outer, Positions, Rows, Tokens, affine_features
from theodolite.operators.tangent_kernels.tangent_kernel import as_problem
from theodolite.testing import OperatorContract


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens)))).mean(1)


class Tagger(nn.Module):
    """Embedding, normalisation, one output per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embed(tokens))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class SequenceFirst(nn.Module):
    """Attention whose inner layers see (time, batch, feature): samples are not the first dimension there."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x.transpose(0, 1)).mean(0))


class Twice(nn.Module):
    """One layer called twice, and its weight read once more by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.layer, self.head, self.by_hand = nn.Linear(4, 4), nn.Linear(4, 2), by_hand

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.head(x @ self.layer.weight if self.by_hand else x)


class Positional(nn.Module):
    """Token and position embeddings: the latter are looked up once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(11, 6), nn.Embedding(8, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens) + self.place(torch.arange(tokens.shape[1])))).mean(1)


class Experts(nn.Module):
    """Each sample goes through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, 0] > 0
        h = x.new_zeros(len(x), 5)
        h[left] = self.one(x[left])
        h[~left] = self.two(x[~left])
        return self.head(torch.tanh(h))


class PartlyFixed(nn.Module):
    """A layer called once under no_grad and once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.layer(x)
        return self.head(torch.tanh(self.layer(input=x)) * fixed)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze()


def upsampling() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 81, 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, dilation=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 8, 3), nn.PReLU(), nn.Conv1d(8, 8, 3, padding="same"), nn.Flatten(), nn.Linear(64, 2), nn.Softplus()
    )


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, numbers(5, 7)),
    "cnn": (cnn, numbers(5, 4, 8, 8)),
    "conv1d": (conv1d, numbers(5, 2, 10)),
    "lstm": (Recurrent, numbers(5, 6, 4)),
    "attention, time first": (SequenceFirst, numbers(5, 6, 8)),
    "tied embedding": (TiedLanguageModel, tokens(5, 4)),
    "outputs per token": (Tagger, tokens(5, 4)),
    "layer used twice": (lambda: Twice(by_hand=False), numbers(5, 4)),
    "weight read by hand": (lambda: Twice(by_hand=True), numbers(5, 4)),
    "ntk": (lambda: ntk_fcn(7, 8, 3, outputs=2, bias="all", bias_init="normal"), numbers(5, 7)),
    "positions shared by all samples": (Positional, tokens(5, 4)),
    "experts": (Experts, numbers(5, 4)),
    "no_grad and keyword": (PartlyFixed, numbers(5, 4)),
    "transposed convolution": (upsampling, numbers(5, 2, 4, 4)),
    "squeezed": (Squeezed, numbers(5, 4)),
    "ntk cnn": (lambda: ntk_cnn((2, 5, 5), 4, 3), numbers(5, 2, 5, 5)),
}


def dense_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """Row by row with plain backward: (n c, p)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for value in model.eval()(x).reshape(-1):
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]))
    return torch.stack(rows)


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, x = CASES[name]
    model = build().double().eval()
    jacobian = dense_jacobian(model, x)
    return model, x, jacobian @ jacobian.T


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_product_of_the_dense_jacobian(name: str) -> None:
    model, x, kernel = made(name)
    assert_close(th.tangent_kernel(model, x), kernel)
    assert_close(th.tangent_kernel_operator(model, x).to_dense(), kernel)
    c = len(kernel) // len(x)
    assert_close(th.tangent_kernel(model, x[:2], x[2:]), kernel[: 2 * c, 2 * c :])
    assert_close(th.tangent_kernel(model, x, outputs=[c - 1]), kernel[c - 1 :: c, c - 1 :: c])


def assert_close(found: Tensor, true: Tensor) -> None:
    assert found.shape == true.shape
    assert float((found - true).abs().max()) <= 1e-10 * float(true.abs().max())


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "outputs per token"])
@pytest.mark.parametrize("budget", [None, 0])
def test_blocks_of_samples_make_the_same_kernel(name: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    model, x, kernel = made(name)
    monkeypatch.setattr(sys.modules["theodolite.operators.tangent_kernels.tangent_kernel"], "SAMPLES", 2)
    assert_close(th.tangent_kernel(model, x, memory_budget=budget), kernel)
    c = len(kernel) // len(x)
    assert_close(th.tangent_kernel(model, x, x[:3], memory_budget=budget), kernel[:, : 3 * c])


def forms(model: nn.Module, x: Tensor) -> list[type[Features]]:
    problem = as_problem(model, x)
    block = BlockMaker(problem, None).make(next(iter(problem.data)), 0)
    return [type(block.features[i]) for i in range(len(problem.parameters)) if i in block.features]


def test_layers_are_not_written_out() -> None:
    """The point of it: outer products for linear layers, also in the NTK parameterisation, tokens for embeddings."""
    assert forms(*made("mlp")[:2]) == [Outer, Rows, Outer, Rows]
    assert forms(*made("ntk")[:2]) == [Outer, Rows] * 3
    assert forms(*made("outputs per token")[:2])[0] is Tokens


def test_sequences_of_different_length_meet() -> None:
    """One position makes another form than many; their inner products still fit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten()).double()
    short, long = numbers(3, 1, 4), numbers(2, 5, 4)
    found = th.tangent_kernel(model, short, long)
    assert_close(found, dense_jacobian(model, short) @ dense_jacobian(model, long).T)


@pytest.mark.parametrize("positions", [1, 2, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_forms_agree_with_the_gradients_written_out(positions: int, transposed: bool) -> None:
    inputs, pulled = numbers(3, positions, 5), numbers(3, 2, positions, 4)
    form = "ncpm,npk->nckm" if transposed else "ncpm,npk->ncmk"
    rows = torch.einsum(form, pulled, inputs).flatten(2)
    features = affine_features(inputs, pulled, groups=1, transposed=transposed)
    kinds = {1: Outer, 2: Positions, 40: Rows}
    assert type(features) is kinds[positions]
    total = torch.zeros(6, 6, dtype=torch.float64)
    features.add_gram(features, total)
    assert_close(total, rows.flatten(0, 1) @ rows.flatten(0, 1).T)
    assert_close(features.written_out().rows, rows)
    assert_close(features.summed(numbers(3, 2)), torch.einsum("nc,ncq->q", numbers(3, 2), rows))


def test_problem_gives_mode_parameters_and_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = numbers(6, 3), numbers(6, 2)
    problem = th.Problem(model, nn.MSELoss(), [(x[:4], y[:4]), (x[4:], y[4:])], params="2.*")
    jacobian = th.operators.jacobian(problem).to_dense()
    assert_close(th.tangent_kernel(problem), jacobian @ jacobian.T)
    assert_close(th.tangent_kernel(problem, x[:2]), (jacobian @ jacobian.T)[:4, :4])
    assert_close(th.tangent_kernel_operator(problem, x[:2]).to_dense(), (jacobian @ jacobian.T)[:4, :4])


def test_float32_agrees_with_float64() -> None:
    model, x, kernel = made("cnn")
    found = th.tangent_kernel(model.float(), x.float())
    assert found.dtype == torch.float32
    assert float((found - kernel).abs().max()) < 1e-5 * float(kernel.abs().max())


def test_model_is_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    th.tangent_kernel(model, numbers(6, 3))
    with pytest.raises(ValueError, match="refused"):
        th.tangent_kernel(model, numbers(6, 5))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_bad_input_is_refused_in_plain_words() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, y = numbers(6, 3), numbers(6, 2)
    with pytest.raises(BatchCoupledError, match="eval"):
        th.tangent_kernel(th.Problem(model, nn.MSELoss(), (x, y), mode="train"))
    dropout = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double()
    with pytest.raises(NotRepeatableError, match="Dropout"):
        th.tangent_kernel(th.Problem(dropout, nn.MSELoss(), (x, numbers(6, 4)), mode="train"))
    with pytest.raises(ValueError, match="inputs is missing"):
        th.tangent_kernel(model)
    with pytest.raises(ValueError, match="2 outputs of a sample"):
        th.tangent_kernel(model, x, outputs=[2])
    with pytest.raises(TypeError, match=r"model_or_problem must be .*Got function"):
        th.tangent_kernel(lambda x: x, x)
    pooled = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0)).double()
    with pytest.raises(ValueError, match="one row of outputs per sample"):
        th.tangent_kernel(pooled, x)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_hugging_face_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 11, "attn_implementation": "eager"}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    model = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=6, use_cache=False, **small)
        ),
        "bert": lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(max_position_embeddings=6, **sizes, **small)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes, **small)),
    }[kind]()
    model, ids = model.double().eval(), tokens(4, 3)
    chosen = [0, 1]
    parameters = list(model.parameters())
    outputs = model(input_ids=ids).logits.reshape(4, -1)[:, chosen].reshape(-1)
    rows = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True) for v in outputs]
    zero = [torch.zeros_like(p) for p in parameters]
    jacobian = torch.stack([torch.cat([(z if g is None else g).reshape(-1) for g, z in zip(r, zero, strict=True)]) for r in rows])
    found = th.tangent_kernel(model, {"input_ids": ids}, outputs=chosen)
    assert float((found - jacobian @ jacobian.T).abs().max()) <= 1e-6 * float(found.abs().max())


class Centred(nn.Module):
    """Outputs depend on the other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h - h.mean(0)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ (self.mix * mask)).tanh()


def test_what_is_not_per_sample_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(BatchCoupledError, match="depends on other samples"):
        th.tangent_kernel(Centred().double(), numbers(5, 4))
    mask = numbers(5, 5).sign()
    with pytest.raises(BatchCoupledError, match="take another number of samples"):
        th.tangent_kernel(Masked().double(), (numbers(5, 5), mask))
    found = th.tangent_kernel(Masked().double(), (numbers(4, 5), mask))
    assert found.shape == (20, 20)


def test_layers_of_several_precisions_meet() -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)).double())

    model = Mixed()
    found = th.tangent_kernel(model, numbers(3, 4).float())
    jacobian = dense_jacobian(model, numbers(3, 4).float())
    assert float((found - jacobian @ jacobian.T).abs().max()) < 1e-5 * float(found.abs().max())


def test_one_output_by_its_number_and_one_sample() -> None:
    model, x, kernel = made("mlp")
    assert_close(th.tangent_kernel(model, x, outputs=1), kernel[1::3, 1::3])
    assert_close(th.tangent_kernel(model, x[:1]), kernel[:3, :3])
    assert th.tangent_kernel(Squeezed().double(), x[:1, :4]).shape == (1, 1)
    with pytest.raises(ValueError, match="an integer of at least 0"):
        th.tangent_kernel(model, x, outputs=[0.5])  # type: ignore[list-item]


def test_output_without_parameters_is_refused() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="does not depend"):
        th.tangent_kernel(Constant().double(), numbers(3, 4))


class TestTangentKernelContract(OperatorContract):
    def make(self) -> tuple[th.LinearOperator, Tensor]:
        model, x, kernel = made("mlp")
        return th.tangent_kernel_operator(model, x), kernel


def test_a_scalar_parameter_counts_like_any_other():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.scale * self.layer(x)

    model, x = Scaled().double(), torch.randn(4, 3, dtype=torch.float64)
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(output, parameters, retain_graph=True) for output in model(x).flatten()]
    jacobian = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in grads])
    assert torch.allclose(th.tangent_kernel(model, x), jacobian @ jacobian.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_that_is_zero_but_for_rounding(dtype):
    """The bias in front of an InstanceNorm takes no part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    problem = th.Problem(model.to(dtype), nn.CrossEntropyLoss(), (torch.randn(5, 1, 8, 8, dtype=dtype), torch.arange(5) % 2))
    jacobian = th.operators.jacobian(problem).to_dense()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(th.tangent_kernel(problem), jacobian @ jacobian.T, rtol=tolerance, atol=tolerance)
