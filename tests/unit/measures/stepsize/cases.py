"""Models and data of the tests of meta-gradients, and a truth that shares no code with them: torch's optimizers and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import theodolite as th


def data(samples: int = 60, width: int = 5, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return x, (x[:, :classes] + 0.5 * torch.randn(samples, classes, generator=generator)).argmax(1)


def mlp(seed: int = 0) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.conv(x.view(-1, 1, 3, 3))).flatten(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.first(x))))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.back, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.back.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.back(torch.tanh(self.first(x)))))


MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "mlp": (mlp, 5),
    "cnn": (lambda seed: Cnn().double(), 9),
    "layernorm": (lambda seed: Normed().double(), 5),
    "tied": (lambda seed: Tied().double(), 5),
}

#: An optimizer's name -> how torch makes it from settings by name.
TORCH = {
    "sgd": lambda p, s: torch.optim.SGD(p, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"]),
    "nesterov": lambda p, s: torch.optim.SGD(
        p, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"], nesterov=True
    ),
    "adam": lambda p, s: torch.optim.Adam(p, lr=s["lr"], betas=(s["beta1"], s["beta2"]), weight_decay=s["weight_decay"]),
    "adamw": lambda p, s: torch.optim.AdamW(p, lr=s["lr"], betas=(s["beta1"], s["beta2"]), weight_decay=s["weight_decay"]),
    "rmsprop": lambda p, s: torch.optim.RMSprop(
        p, lr=s["lr"], alpha=s["alpha"], momentum=s["momentum"], weight_decay=s["weight_decay"]
    ),
}
SETTINGS = {
    "sgd": {"lr": 0.3, "momentum": 0.8, "weight_decay": 1e-2},
    "nesterov": {"lr": 0.2, "momentum": 0.7, "weight_decay": 1e-2},
    "adam": {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "weight_decay": 1e-2},
    "adamw": {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "weight_decay": 1e-1},
    "rmsprop": {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "weight_decay": 1e-2},
}


def as_arguments(settings: dict[str, float]) -> dict[str, object]:
    """Settings by name as `meta_gradient` takes them."""
    given: dict[str, object] = {name: value for name, value in settings.items() if name not in ("beta1", "beta2")}
    if "beta1" in settings:
        given["betas"] = (settings["beta1"], settings["beta2"])
    return given


def trained_score(
    make: Callable[[int], nn.Module], optimizer: str, settings: dict[str, float], train, score, objective: str, steps: int, **how
) -> float:
    """The score of a run of `th.train` with torch's own optimizer."""
    torch.manual_seed(0)
    model = make(0)
    loss, seen = nn.CrossEntropyLoss(), []

    def look(found: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(found(score[0]), score[1]))

    made = TORCH[optimizer](list(model.parameters()), settings)
    th.train(model, loss, train, made, steps=steps, measure={"score": lambda m: seen.append(look(m)) or 0.0}, **how)
    seen.append(look(model))
    last = seen[-1]
    return {"last": last, "log_last": math.log(last) / steps, "segment_mean": sum(seen[1:]) / steps}[objective]
