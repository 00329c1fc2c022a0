"""The networks and data of the benchmarks: small, made from seeds, nothing downloaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """A model, a loss and batches, as a user would hold them."""

    name: str
    model: nn.Module
    loss: nn.Module
    batches: Batches

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def bytes(self) -> int:
        """What rests in memory before anything is computed: parameters and data."""
        tensors = [*self.parameters, *(t for batch in self.batches for t in batch)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def copy(self) -> Task:
        """A model of its own for each contender: some leave traces in it."""
        return replace(self, model=copy.deepcopy(self.model))

    def double(self) -> Task:
        batches = [(x.double() if x.is_floating_point() else x, y) for x, y in self.batches]
        return replace(self, model=copy.deepcopy(self.model).double(), batches=batches)

    def gradient(self) -> list[tuple[Tensor, ...]]:
        """One gradient in the plain way: the unit of all costs."""
        return [torch.autograd.grad(self.loss(self.model(x), y), self.parameters) for x, y in self.batches]

    def vectors(self, count: int, seed: int = 1) -> Tensor:
        """Gaussian columns (size, count) in the model's dtype."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.size, count, generator=generator, dtype=self.parameters[0].dtype)


def stack(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b)] if i == len(widths) - 2 else [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers)


def _random_batch(samples: int, *shape: int) -> Batches:
    return [(torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))]


def mlp(samples: int = 256) -> Task:
    """784-256-256-10 with ReLU."""
    torch.manual_seed(0)
    return Task("MLP 784-256-256-10", stack(784, 256, 256, 10), nn.CrossEntropyLoss(), _random_batch(samples, 784))


def lenet5(samples: int = 500) -> Task:
    """LeNet5 for 3x32x32 images, at initialisation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), *stack(400, 120, 84, 10),
    )  # fmt: skip
    torch.manual_seed(0)
    return Task("LeNet5", model, nn.CrossEntropyLoss(), _random_batch(samples, 3, 32, 32))


def deep_stack(activation: type[nn.Module] = nn.ReLU, samples: int = 256) -> Task:
    """Seven Linear layers of width 64, ten outputs."""
    torch.manual_seed(0)
    model = stack(*[64] * 7, 10, activation=activation)
    return Task(f"7-layer MLP, {activation.__name__}", model, nn.CrossEntropyLoss(), _random_batch(samples, 64))


def layernorm_net() -> Task:
    """A small network with LayerNorm, float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 10)).double()
    return Task("LayerNorm net", model, nn.CrossEntropyLoss(), _random_batch(64, 8)).double()


def digits_mlp(samples: int = 300, *, batch_sizes: tuple[int, ...] | None = None, steps: int = 30) -> Task:
    """64-16-10 on scikit-learn's digits, float64, after a few steps of gradient descent: small enough for dense truth."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.as_tensor(digits.data[:samples] / 16.0)
    targets = torch.as_tensor(digits.target[:samples]).long()
    torch.manual_seed(0)
    task = Task("digits MLP 64-16-10", stack(64, 16, 10).double(), nn.CrossEntropyLoss(), [(inputs, targets)])
    for _ in range(steps):
        sgd_step(task, 0.2)
    sizes = batch_sizes or (samples,)
    return replace(task, batches=list(zip(inputs.split(sizes), targets.split(sizes), strict=True)))


def sgd_step(task: Task, rate: float) -> None:
    """One full-batch step of a task with a single batch."""
    (gradients,) = task.gradient()
    with torch.no_grad():
        for p, g in zip(task.parameters, gradients, strict=True):
            p -= rate * g


class Attention(nn.Module):
    """Causal self-attention through torch's default kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT; logits come flat, one row per token, so that a plain cross-entropy fits."""

    def __init__(self, vocabulary: int = 65, context: int = 64, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)


def gpt(sequences: int = 8, context: int = 64) -> Task:
    """GPT of 2 layers, width 64, 4 heads, vocabulary 65, on random tokens."""
    torch.manual_seed(0)
    model = GPT(context=context)
    ids = torch.randint(0, 65, (sequences, context + 1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1))
    return Task("GPT 2 layers d=64", model, nn.CrossEntropyLoss(), [batch])
