"""Small classifiers and data of known error rates."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th

#: Eight prototypes with alternating labels: the synthetic data of the specification.
PROTOTYPES = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)).clamp(min=0)


def prototypes(n: int, seed: int, noise: float = 1.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(8, (n,), generator=generator)
    return PROTOTYPES[which] + noise * torch.randn(n, 40, generator=generator).clamp(min=0), which % 2


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int = 10) -> dict[str, Tensor]:
    """Train in place; the weights before."""
    start = state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    th.train(model, nn.CrossEntropyLoss(), data, optimizer, epochs=epochs, batch_size=100, progress=False, every=10**6)
    return start


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SmallCnn(nn.Module):
    """A strided and a padded convolution, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, stride=2), nn.Conv2d(3, 4, 3, padding="same")
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1))


class TiedTwice(nn.Module):
    """One linear layer that is called twice, and one whose weight another module shares."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.other.weight = self.one.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.loop(torch.tanh(self.loop(x))))
        return self.head(torch.tanh(self.other(torch.tanh(self.one(h)))))


class Words(nn.Module):
    """Embeddings of words and of places, the latter looked up once for all samples, a layer at every place, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.first = nn.Embedding(7, 4), nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        h = self.words(x) + self.places(place[None]) + self.first(place)
        return self.head(torch.tanh(self.mix(h)).mean(1))


class Normed(nn.Module):
    """Normalisations of all kinds; one layer norm is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.layer, self.rms, self.head = nn.LayerNorm((6, 6)), nn.RMSNorm(6), nn.Linear(4 * 36, 3)
        for norm in (self.batch, self.group, self.layer, self.rms):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(self.batch.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(torch.tanh(self.layer(torch.tanh(self.group(self.batch(self.conv(x)))))))
        return self.head(self.rms(h).flatten(1))


class Scaled(nn.Module):
    """A parameter that is no layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.head = nn.Linear(5, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.scale * self.inner(x)))
