"""The models every operator must be right on, each with its loss and one batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import theodolite as th


@dataclass
class Case:
    """`loss_of_output` is None where the model returns its own loss."""

    model: nn.Module
    loss: Any
    data: Any
    params: Any = None
    mode: Any = "eval"

    def to(self, dtype: torch.dtype) -> Case:
        def cast(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.to(dtype) if x.is_floating_point() else x
            if isinstance(x, dict):
                return {k: cast(v) for k, v in x.items()}
            return tuple(cast(v) for v in x)

        loss = copy.deepcopy(self.loss).to(dtype) if isinstance(self.loss, nn.Module) else self.loss
        return Case(copy.deepcopy(self.model).to(dtype), loss, cast(self.data), self.params, self.mode)

    def problem(self, **kwargs: Any) -> th.Problem:
        return th.Problem(self.model, self.loss, self.data, params=self.params, mode=self.mode, **kwargs)

    # Plain truth: the user's own way of calling the model, sharing nothing with Problem.

    def parameters(self) -> list[Tensor]:
        model = getattr(self.model, "_orig_mod", self.model)
        return [p for p in model.parameters() if p.requires_grad]

    def output(self) -> Tensor:
        model = getattr(self.model, "_orig_mod", self.model)
        modes = [(m, m.training) for m in model.modules()]
        model.train(self.mode == "train")
        try:
            out = model(**self.data) if isinstance(self.data, dict) else model(self.data[0])
        finally:
            for m, training in modes:
                m.training = training
        if self.loss is None:
            return out
        return out[0] if isinstance(out, tuple) else out

    def loss_of(self, output: Tensor) -> Tensor:
        return self.loss(output, self.data[1])

    def objective(self) -> Tensor:
        out = self.output()
        return out.loss if self.loss is None else self.loss_of(out)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _labels(n: int = 5, classes: int = 3) -> Tensor:
    return torch.randint(classes, (n,))


def _stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


def mlp() -> Case:
    return Case(_stack(nn.ReLU()), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def mlp_tanh_mse() -> Case:
    return Case(_stack(nn.Tanh()), nn.MSELoss(), (_normal(5, 4), _normal(5, 3)))


def mlp_huber() -> Case:
    return Case(_stack(nn.SiLU()), nn.HuberLoss(), (_normal(5, 4), 2 * _normal(5, 3)))


def ignored_labels() -> Case:
    y = torch.tensor([0, -100, 2, 1, -100])
    return Case(_stack(nn.GELU()), nn.CrossEntropyLoss(), (_normal(5, 4), y))


def weighted_smoothed() -> Case:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), label_smoothing=0.1)
    return Case(_stack(nn.Softplus()), loss, (_normal(5, 4), _labels()))


def groupnorm() -> Case:
    return Case(_stack(nn.GroupNorm(2, 6), nn.Tanh()), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def rmsnorm() -> Case:
    return Case(_stack(nn.RMSNorm(6), nn.SiLU()), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def layernorm() -> Case:
    return Case(_stack(nn.LayerNorm(6), nn.Tanh()), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def weightnorm() -> Case:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
    return Case(model, nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def cnn_batchnorm() -> Case:
    head = [nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3)]
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), *head).double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 1.5)
    return Case(model, nn.CrossEntropyLoss(), (_normal(4, 2, 6, 6), _labels(4)))


def cnn_odd_shapes() -> Case:
    """Strided, dilated, grouped, without bias, one- and three-dimensional."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(2, 4, 3, stride=2, dilation=2, padding=2, groups=2, bias=False)
            self.b = nn.Conv1d(4, 3, 2, stride=2)
            self.c = nn.Conv3d(1, 2, (1, 2, 2), padding=(0, 1, 0))
            self.head = nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.a(x))
            z = torch.tanh(self.b(z.flatten(2)))
            z = self.c(z[:, None, :, None, :].transpose(2, 3).contiguous())
            return self.head(z.flatten(1))

    model = Net().double()
    x = _normal(3, 2, 6, 6)
    model(x)
    return Case(model, nn.CrossEntropyLoss(), (x, _labels(3)))


def batchnorm_train() -> Case:
    return Case(_stack(nn.BatchNorm1d(6), nn.Tanh()), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()), mode="train")


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)  # default attention, dropout 0.1
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def attention() -> Case:
    return Case(_Encoder().double(), nn.CrossEntropyLoss(), (_normal(3, 4, 4), _labels(3)))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm() -> Case:
    return Case(_Recurrent(nn.LSTM).double(), nn.CrossEntropyLoss(), (_normal(4, 3, 3), _labels(4)))


def gru() -> Case:
    return Case(_Recurrent(nn.GRU).double(), nn.CrossEntropyLoss(), (_normal(4, 3, 3), _labels(4)))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embedding(x)))).flatten(0, 1)


def tied() -> Case:
    return Case(_Tied().double(), nn.CrossEntropyLoss(), (torch.randint(7, (3, 4)), torch.randint(7, (12,))))


def frozen() -> Case:
    case = mlp()
    case.model[0].weight.requires_grad_(False)
    return case


class _MeanEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def embedding_mean() -> Case:
    return Case(_MeanEmbedding().double(), nn.CrossEntropyLoss(), (torch.randint(9, (5, 3)), _labels()))


def compiled() -> Case:
    case = mlp_tanh_mse()
    return Case(torch.compile(case.model), case.loss, case.data)


class MyDataParallel(nn.Module):
    """Looks like DistributedDataParallel, needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def data_parallel() -> Case:
    case = mlp_tanh_mse()
    return Case(MyDataParallel(case.model), case.loss, case.data)


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(4, 4), _stack(nn.Tanh()), reentrant
        self.active = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant) if self.active else self.body(x)


class CheckpointedCase(Case):
    """The truth runs without checkpointing (reentrant checkpoints refuse autograd.grad)."""

    def problem(self, **kwargs: Any) -> th.Problem:
        self.model.active = True
        return super().problem(**kwargs)

    def output(self) -> Tensor:
        self.model.active = False
        return super().output()

    def to(self, dtype: torch.dtype) -> Case:
        case = super().to(dtype)
        return CheckpointedCase(case.model, case.loss, case.data)


def checkpointed() -> Case:
    return CheckpointedCase(_Checkpointed(False).double(), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def checkpointed_reentrant() -> Case:
    return CheckpointedCase(_Checkpointed(True).double(), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


class _Tuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _stack(nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return z, z.square()


def tuple_output() -> Case:
    return Case(_Tuple().double(), nn.CrossEntropyLoss(), (_normal(5, 4), _labels()))


def _hugging_face(build: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    model = build().double()  # arrives in train mode with dropout, default attention
    ids = torch.randint(1, 7, (2, 4))  # 0 is padding to BERT: its embedding gets no gradient by design
    labels = ids.clone()
    labels[0, 2] = -100
    return Case(model, None, {"input_ids": ids, "labels": labels})


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=7, n_positions=6, bos_token_id=0, eos_token_id=0)
    return _hugging_face(lambda: GPT2LMHeadModel(config).train())


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=6, num_attention_heads=2, num_key_value_heads=1, vocab_size=7,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _hugging_face(lambda: LlamaForCausalLM(config).train())


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=1, hidden_size=4, intermediate_size=6, num_attention_heads=2, vocab_size=7, max_position_embeddings=6,
    )  # fmt: skip
    return _hugging_face(lambda: BertForMaskedLM(config).train())


PLAIN = [
    mlp, mlp_tanh_mse, mlp_huber, ignored_labels, weighted_smoothed, groupnorm, rmsnorm, layernorm, cnn_batchnorm,
    cnn_odd_shapes, batchnorm_train, attention, lstm, gru, tied, frozen, embedding_mean, compiled, data_parallel, checkpointed,
    checkpointed_reentrant, tuple_output,
]  # fmt: skip
HUGGING_FACE = [gpt2, llama, bert]


def make(builder: Callable[[], Case], seed: int = 0) -> Case:
    torch.manual_seed(seed)
    return builder()
