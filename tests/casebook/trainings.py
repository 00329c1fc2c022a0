"""Small trainings of four kinds, healthy as they stand; the cases plant one fault in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

Data = tuple[Tensor, Tensor]


@dataclass
class Training:
    """A model on its way: `steps` batches of `batch_size` are taken by `run`, as a user's loop would."""

    model: nn.Module
    loss: Any
    data: Data
    valid: Data
    optimizer: Callable[[nn.Module], Optimizer]
    batch_size: int = 32
    steps: int = 150
    warmup: int = 0
    train_mode: bool = True
    schedule: Callable[[int], float] | None = None
    survey: dict[str, Any] = field(default_factory=dict)  # further arguments
    made: Optimizer | None = None

    def run(self, steps: int | None = None, seed: int = 0) -> Training:
        """Train in place; ends early where the loss is not finite."""
        torch.manual_seed(seed)
        self.made = self.made or self.optimizer(self.model)
        generator = torch.Generator().manual_seed(seed)
        rates = [group["lr"] for group in self.made.param_groups]
        self.model.train(self.train_mode)
        for step in range(self.steps if steps is None else steps):
            rows = torch.randint(len(self.data[1]), (self.batch_size,), generator=generator)
            factor = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
            factor *= self.schedule(step) if self.schedule else 1.0
            for group, lr in zip(self.made.param_groups, rates, strict=True):
                group["lr"] = factor * lr
            self.made.zero_grad()
            value = self.loss(self.model(self.data[0][rows]), self.data[1][rows])
            if not math.isfinite(float(value.detach())):
                break
            value.backward()
            self.made.step()
        self.model.eval()
        return self

    def score(self, data: Data | None = None, loss: Any = None) -> float:
        """The loss on data, by default the validation data, in eval mode; infinite where it is not finite."""
        x, y = data or self.valid
        with torch.no_grad():
            value = float((loss or self.loss)(self.model(x), y))
        return value if math.isfinite(value) else math.inf


def digits(flat: bool = True) -> tuple[Data, Data]:
    """Handwritten digits in 0..1: 1200 to train on, 500 to validate."""
    found = load_digits()
    x, y = torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = x if flat else x.reshape(-1, 1, 8, 8)
    return (x[:1200], y[:1200]), (x[1200:1700], y[1200:1700])


def mlp(width: int = 48, depth: int = 2, inputs: int = 64, outputs: int = 10, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    sizes = [inputs, *[width] * depth]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class SmallCnn(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.fc1, self.fc2 = nn.Linear(16 * 4, 32), nn.Linear(32, 10)
        for layer in (self.conv1, self.conv2, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        h = torch.max_pool2d(torch.relu(self.norm2(self.conv2(h))), 2)
        return self.fc2(torch.relu(self.fc1(h.flatten(1))))


class SmallGpt(nn.Module):
    """Two blocks of causal attention over 16 symbols."""

    def __init__(self, symbols: int = 16, width: int = 32, length: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.triu(torch.full((length, length), -math.inf), 1)
        h = self.tokens(x) + self.places(torch.arange(length))
        return self.head(self.norm(self.blocks(h, mask=mask)))


def next_symbol(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def symbols(count: int = 400, length: int = 24, seed: int = 0) -> tuple[Data, Data]:
    """Sequences of a random Markov chain with few likely successors; the targets are the next symbols."""
    generator = torch.Generator().manual_seed(seed)
    chain = torch.softmax(3.0 * torch.randn(16, 16, generator=generator), dim=1)
    states = torch.randint(16, (count,), generator=generator)
    columns = [states]
    for _ in range(length):
        states = torch.multinomial(chain[states], 1, generator=generator).flatten()
        columns.append(states)
    x = torch.stack(columns, dim=1)
    cut = 3 * count // 4
    return (x[:cut, :-1], x[:cut, 1:]), (x[cut:, :-1], x[cut:, 1:])


def table(count: int = 800, seed: int = 0) -> tuple[Data, Data]:
    """Six standardised columns and a smooth target of order one, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * x[:, 3]
    y = (y + 0.1 * torch.randn(count, generator=generator))[:, None]
    cut = 3 * count // 4
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def sgd(lr: float, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **settings)


def adamw(lr: float, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, **settings)


def mlp_training(seed: int = 0, **changes: Any) -> Training:
    torch.manual_seed(seed)
    train, valid = digits()
    return Training(
        **{"model": mlp(), "loss": nn.CrossEntropyLoss(), "data": train, "valid": valid, "optimizer": sgd(0.3), **changes}
    )


def cnn_training(seed: int = 0, **changes: Any) -> Training:
    torch.manual_seed(seed)
    train, valid = digits(flat=False)
    momentum = sgd(0.05, momentum=0.9)
    return Training(
        **{"model": SmallCnn(), "loss": nn.CrossEntropyLoss(), "data": train, "valid": valid, "optimizer": momentum, **changes}
    )


def gpt_training(seed: int = 0, **changes: Any) -> Training:
    torch.manual_seed(seed)
    train, valid = symbols()
    settings = {"model": SmallGpt(), "loss": next_symbol, "data": train, "valid": valid, "optimizer": adamw(3e-3)}
    return Training(**{**settings, "batch_size": 16, **changes})


def table_training(seed: int = 0, **changes: Any) -> Training:
    torch.manual_seed(seed)
    train, valid = table()
    model = mlp(32, 2, inputs=6, outputs=1)
    return Training(**{"model": model, "loss": nn.MSELoss(), "data": train, "valid": valid, "optimizer": adamw(3e-3), **changes})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1]).squeeze(-1)


def recurrent_training(**changes: Any) -> Training:
    """Whether a weighted sum over a sequence is positive: later steps count for more."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1200, 20, 4, generator=generator)
    y = ((x[..., 0] * torch.linspace(0.0, 1.0, 20)).sum(1) + 0.5 * x[..., 1].sum(1) > 0).float()
    torch.manual_seed(0)
    usual = {"model": Recurrent(), "loss": nn.BCEWithLogitsLoss(), "optimizer": adamw(3e-3), "batch_size": 64}
    return Training(data=(x[:900], y[:900]), valid=(x[900:], y[900:]), **{**usual, **changes})
