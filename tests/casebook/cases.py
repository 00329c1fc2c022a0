"""The cases: one fault planted in a training that is healthy without it, what it is called, and how it is mended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .trainings import (
    Training,
    adamw,
    cnn_training,
    digits,
    gpt_training,
    mlp,
    mlp_training,
    recurrent_training,
    sgd,
    table,
    table_training,
)


@dataclass(frozen=True)
class Case:
    """`fault` makes the training and runs it; `mended` is the same training with the advice followed, from the start.

    `causes` are the names of which the verdict must name one first; none for healthy trainings. `mended` is given the learning
    rate that the survey named. `better_by` is what decides between the two, by default the loss on the training data, after
    `steps` more of both, by default as many as the training has.
    """

    name: str
    causes: tuple[str, ...]
    fault: Callable[[], Training]
    mended: Callable[[float | None], Training] | None = None
    better_by: Callable[[Training], float] = lambda training: training.score(training.data)
    steps: int | None = None


CASES: dict[str, Case] = {}


def case(name: str, *causes: str, **more: Any) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    def add(fault: Callable[[], Training]) -> Callable[[], Training]:
        CASES[name] = Case(name, causes, fault, **more)
        return fault

    return add


# Learning rates: ten times too high and too low of what suits these trainings


@case("rate too high, MLP, SGD", "rate too high", "dead units", mended=lambda lr: mlp_training(optimizer=sgd(lr or 0.3)))
def _() -> Training:
    return mlp_training(optimizer=sgd(3.0)).run(40)


@case(
    "rate too high, CNN, momentum",
    "rate too high",
    "dead layer",
    mended=lambda lr: cnn_training(optimizer=sgd(lr or 0.05, momentum=0.9)),
)
def _() -> Training:
    return cnn_training(optimizer=sgd(0.7, momentum=0.9)).run(40)


@case("rate too high, GPT, AdamW", "rate too high", "no warm-up", mended=lambda lr: gpt_training(optimizer=adamw(lr or 3e-3)))
def _() -> Training:
    return gpt_training(optimizer=adamw(0.3)).run(40)


@case("rate too high, GRU, AdamW", "rate too high", mended=lambda lr: recurrent_training(optimizer=adamw(lr or 3e-3)))
def _() -> Training:
    return recurrent_training(optimizer=adamw(0.1)).run(200)


@case("rate too high, regression, AdamW", "rate too high", mended=lambda lr: table_training(optimizer=adamw(lr or 3e-3)))
def _() -> Training:
    return table_training(optimizer=adamw(0.5)).run(40)


@case("rate too low, MLP, SGD", "rate too low", mended=lambda lr: mlp_training(optimizer=sgd(lr or 0.3)))
def _() -> Training:
    return mlp_training(optimizer=sgd(0.01)).run(40)


@case("rate too low, CNN, momentum", "rate too low", mended=lambda lr: cnn_training(optimizer=sgd(lr or 0.05, momentum=0.9)))
def _() -> Training:
    return cnn_training(optimizer=sgd(0.001, momentum=0.9)).run(40)


@case("rate too low, GPT, AdamW", "rate too low", mended=lambda lr: gpt_training(optimizer=adamw(lr or 3e-3)))
def _() -> Training:
    return gpt_training(optimizer=adamw(3e-5)).run(40)


@case("rate too low, regression, AdamW", "rate too low", mended=lambda lr: table_training(optimizer=adamw(lr or 3e-3)))
def _() -> Training:
    return table_training(optimizer=adamw(1e-5)).run(40)


@case("schedule ended, MLP, SGD", "schedule ended", "rate too low", mended=lambda lr: mlp_training(optimizer=sgd(0.3)))
def _() -> Training:
    training = mlp_training(optimizer=sgd(0.3)).run(20)
    assert training.made is not None
    for group in training.made.param_groups:  # what torch's schedulers leave behind
        group["initial_lr"], group["lr"] = 0.3, 3e-6
    return training


def _sharp_start(**changes: Any) -> Training:
    """A last layer ten times as large as it should be: the surface is sharp at first, and flatter soon after."""
    torch.manual_seed(0)
    model = mlp(activation=nn.Tanh)
    with torch.no_grad():
        model[-1].weight.mul_(10.0)
    return mlp_training(model=model, optimizer=sgd(0.2, momentum=0.9), **changes)


@case(
    "no warm-up, MLP, momentum", "no warm-up", "rate too high", "exploding gradients", "saturation",
    mended=lambda lr: _sharp_start(warmup=60),
)  # fmt: skip
def _() -> Training:
    return _sharp_start().run(0)


# Units and gradients


@case("dead layer, CNN, momentum", "dead layer", mended=lambda lr: cnn_training())
def _() -> Training:
    training = cnn_training().run(20)
    with torch.no_grad():
        training.model.fc1.bias.fill_(-20.0)
    return training


@case("dead layer, MLP, AdamW", "dead layer", mended=lambda lr: mlp_training(optimizer=adamw(3e-3)))
def _() -> Training:
    training = mlp_training(optimizer=adamw(3e-3)).run(20)
    with torch.no_grad():
        training.model[2].bias.fill_(-20.0)
    return training


@case(
    "died at too high a rate, CNN, momentum",
    "dead layer",
    "rate too high",
    mended=lambda lr: cnn_training(optimizer=sgd(0.05, momentum=0.9)),
)
def _() -> Training:
    return cnn_training(optimizer=sgd(1.5, momentum=0.9)).run(60)


def _deep(activation: type[nn.Module], depth: int, scale: float = 1.0, **changes: Any) -> Training:
    torch.manual_seed(0)
    model = mlp(32, depth, activation=activation)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(scale)
    return mlp_training(model=model, **changes)


def _well_started(depth: int, **changes: Any) -> Training:
    training = _deep(nn.ReLU, depth, **changes)
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return training


@case(
    "vanishing gradients, deep sigmoid MLP",
    "vanishing gradients",
    "saturation",
    mended=lambda lr: _well_started(9, optimizer=sgd(0.05)),
)
def _() -> Training:
    return _deep(nn.Sigmoid, 9, optimizer=sgd(0.3)).run(40)


@case(
    "exploding gradients, deep MLP",
    "exploding gradients",
    "rate too high",
    mended=lambda lr: _well_started(7, optimizer=sgd(0.05)),
)
def _() -> Training:
    return _deep(nn.ReLU, 7, scale=8.0, optimizer=sgd(0.05)).run(0)


# Data


def _raw_columns(mend: bool = False) -> Training:
    (x, y), (vx, vy) = table()
    scale = torch.tensor([12.0, 40_000.0, 0.01, 3e5, 1.0, 250.0])
    shift = torch.tensor([40.0, 60_000.0, 0.5, 1.6e6, 0.0, 900.0])
    raw = [(t * scale + shift) for t in (x, vx)]
    if mend:
        mean, std = raw[0].mean(0), raw[0].std(0)
        raw = [(t - mean) / std for t in raw]
    return table_training(data=(raw[0], y), valid=(raw[1], vy))


@case("raw columns, regression, AdamW", "input scale", mended=lambda lr: _raw_columns(mend=True))
def _() -> Training:
    return _raw_columns().run(80)


@case("raw columns, regression, SGD", "input scale", mended=lambda lr: replace(_raw_columns(mend=True), optimizer=sgd(0.03)))
def _() -> Training:
    return replace(_raw_columns(), optimizer=sgd(1e-9)).run(80)


def _raw_images(mend: bool = False) -> Training:
    train, valid = digits(flat=False)
    factor = 1.0 if mend else 255.0
    return cnn_training(
        data=(factor * train[0], train[1]), valid=(factor * valid[0], valid[1]), optimizer=sgd(0.05, momentum=0.9)
    )


@case("images in 0..255, CNN, momentum", "input scale", mended=lambda lr: _raw_images(mend=True))
def _() -> Training:
    return _raw_images().run(30)


def _raw_targets(mend: bool = False) -> Training:
    (x, y), (vx, vy) = table()
    big = [50_000.0 + 12_000.0 * t for t in (y, vy)]
    if mend:
        mean, std = big[0].mean(), big[0].std()
        big = [(t - mean) / std for t in big]
    return table_training(data=(x, big[0]), valid=(vx, big[1]))


def _explained(training: Training) -> float:
    """The loss as a share of the variance of the targets."""
    return training.score(training.data) / float(training.data[1].var())


@case("raw targets, regression, AdamW", "target scale", mended=lambda lr: _raw_targets(mend=True), better_by=_explained)
def _() -> Training:
    return _raw_targets().run(80)


def _wild_targets(mend: bool = False) -> Training:
    """Three targets of 600 have lost their decimal point."""
    (x, y), _ = table()
    spoilt, kept = y.clone(), torch.ones(len(y), dtype=torch.bool)
    spoilt[[5, 99, 400]] *= 1000.0
    kept[[5, 99, 400]] = False
    return table_training(data=(x[kept], y[kept])) if mend else table_training(data=(x, spoilt))


@case("wild targets, regression, AdamW", "outliers", mended=lambda lr: _wild_targets(mend=True), better_by=lambda t: t.score())
def _() -> Training:
    return _wild_targets().run(80)


def _noisy_labels(share: float) -> Training:
    (x, y), valid = digits()
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=generator) < share
    noise = torch.where(wrong, torch.randint(10, (len(y),), generator=generator), y)
    return mlp_training(data=(x, noise), valid=valid, optimizer=adamw(3e-3), steps=250)


def _clean_part(share: float) -> Training:
    """The same with the wrong labels taken out, as the advice says."""
    training, (_, clean) = _noisy_labels(share), digits()[0]
    right = training.data[1] == clean
    return replace(training, data=(training.data[0][right], clean[right]))


@case("label noise, MLP, AdamW", "label noise", mended=lambda lr: _clean_part(0.4), better_by=lambda t: t.score())
def _() -> Training:
    return _noisy_labels(0.4).run()


def _shuffled_labels() -> Training:
    (x, y), valid = digits()
    return mlp_training(data=(x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(2))]), valid=valid)


@case("labels of other samples, MLP, SGD", "labels do not fit", mended=lambda lr: mlp_training(), better_by=lambda t: t.score())
def _() -> Training:
    return _shuffled_labels().run(80)


@case("a batch with NaN, MLP, SGD", "not finite", mended=lambda lr: mlp_training())
def _() -> Training:
    training = mlp_training().run(20)
    x = training.data[0].clone()
    x[700, 3] = torch.nan
    return replace(training, data=(x, training.data[1]))


def _imbalanced(weights: bool = False) -> Training:
    (x, y), (vx, vy) = digits()
    rare = y == 8
    keep = torch.nonzero(~rare).flatten()
    few = torch.nonzero(rare).flatten()[:10]
    rows = torch.cat([keep, few])
    y, vy = (y == 8).long(), (vy == 8).long()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, len(keep) / len(few)]) if weights else None)
    return mlp_training(model=mlp(outputs=2), data=(x[rows], y[rows]), valid=(vx, vy), loss=loss, steps=60, optimizer=sgd(0.05))


def _balanced_loss(training: Training) -> float:
    share = torch.bincount(training.valid[1]).float()
    return training.score(loss=nn.CrossEntropyLoss(weight=share.sum() / share))


@case("class imbalance, MLP, SGD", "class imbalance", mended=lambda lr: _imbalanced(weights=True), better_by=_balanced_loss)
def _() -> Training:
    return _imbalanced().run(60)


@case("leaked validation, MLP, SGD", "leaked validation")
def _() -> Training:
    training = mlp_training().run(80)
    x, y = training.data
    return replace(training, valid=(torch.cat([training.valid[0][:200], x[:300]]), torch.cat([training.valid[1][:200], y[:300]])))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with fresh noise at every reading."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.3 * torch.randn(self.x[index].shape), self.y[index]


@case("augmentation left on in validation, MLP, SGD", "augmented validation")
def _() -> Training:
    training = mlp_training().run()
    training.survey = {"valid": DataLoader(Augmented(*training.valid), batch_size=100)}
    return training


def _few_samples(**settings: Any) -> Training:
    (x, y), valid = digits()
    torch.manual_seed(0)
    return mlp_training(
        model=mlp(256), data=(x[:60], y[:60]), valid=valid, steps=400, optimizer=adamw(3e-3, **settings), batch_size=20
    )


@case(
    "overfit, MLP, AdamW",
    "overfitting",
    mended=lambda lr: replace(_few_samples(weight_decay=1.0), steps=60),
    better_by=lambda t: t.score(),
)
def _() -> Training:
    return _few_samples().run()


# The set-up


def _frozen(count: int) -> Training:
    training = cnn_training(optimizer=sgd(0.05, momentum=0.9))
    for module in [training.model.conv1, training.model.conv2, training.model.fc1][:count]:
        module.requires_grad_(False)
    return training


@case("frozen layers, CNN, momentum", "frozen layer", mended=lambda lr: _frozen(0))
def _() -> Training:
    return _frozen(3).run(80)


@case("optimizer without the first layers, MLP, SGD", "missing parameters", mended=lambda lr: mlp_training(optimizer=sgd(0.3)))
def _() -> Training:
    return mlp_training(optimizer=lambda model: torch.optim.SGD(model[-1].parameters(), lr=0.3)).run(80)


@case(
    "summed loss, MLP, SGD",
    "summed loss",
    mended=lambda lr: mlp_training(),
    better_by=lambda t: t.score(t.data, nn.CrossEntropyLoss()),
)
def _() -> Training:
    return mlp_training(loss=nn.CrossEntropyLoss(reduction="sum")).run(30)


@case(
    "softmax twice, MLP, SGD",
    "double softmax",
    mended=lambda lr: mlp_training(optimizer=sgd(0.1)),
    better_by=lambda t: -_accuracy(t),
)
def _() -> Training:
    torch.manual_seed(0)
    return mlp_training(model=nn.Sequential(*mlp(), nn.Softmax(-1)), optimizer=sgd(0.1)).run()


def _accuracy(training: Training) -> float:
    with torch.no_grad():
        return float((training.model(training.valid[0]).argmax(-1) == training.valid[1]).float().mean())


@case("weight decay too high, MLP, AdamW", "weight decay", mended=lambda lr: mlp_training(optimizer=adamw(3e-3)))
def _() -> Training:
    return mlp_training(optimizer=adamw(3e-3, weight_decay=30.0)).run()


@case("weight decay too high, CNN, momentum", "weight decay", mended=lambda lr: cnn_training())
def _() -> Training:
    return cnn_training(optimizer=sgd(0.05, momentum=0.9, weight_decay=0.1)).run()


def _dropping(p: float) -> Training:
    training = mlp_training()
    layers = [part for layer in training.model for part in ((layer, nn.Dropout(p)) if isinstance(layer, nn.ReLU) else (layer,))]
    training.model = nn.Sequential(*layers)
    return training


@case("dropout too high, MLP, SGD", "dropout", mended=lambda lr: _dropping(0.1))
def _() -> Training:
    return _dropping(0.9).run(80)


@case("batches of one, CNN, momentum", "batch too small", "rate too high", mended=lambda lr: cnn_training())
def _() -> Training:
    return cnn_training(batch_size=1).run()


def _normed(**changes: Any) -> Training:
    from .trainings import SmallCnn

    torch.manual_seed(0)
    return cnn_training(model=SmallCnn(norm=True), **changes)


def _without_statistics() -> Training:
    training = _normed().run()
    with torch.no_grad():  # trained in train mode, saved before the statistics were kept
        for module in training.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    return training


def _renewed(training: Training) -> Training:
    training.model.train()
    with torch.no_grad():
        for batch in training.data[0].split(training.batch_size):
            training.model(batch)
    return training


name = "BatchNorm statistics of another data set, CNN, momentum"
case(name, "batch statistics", mended=lambda lr: _renewed(_without_statistics()), steps=0)(_without_statistics)


# Nothing planted

HEALTHY: dict[str, Callable[[], Training]] = {
    "MLP, SGD, at the start": lambda: mlp_training().run(0),
    "MLP, SGD, on its way": lambda: mlp_training().run(60),
    "MLP, AdamW, near the end": lambda: mlp_training(optimizer=adamw(3e-3)).run(400),
    "CNN, momentum, on its way": lambda: cnn_training().run(80),
    "CNN with BatchNorm, momentum, near the end": lambda: _normed().run(300),
    "GPT, AdamW, at the start": lambda: gpt_training().run(0),
    "GPT, AdamW, on its way": lambda: gpt_training().run(80),
    "GRU, AdamW, on its way": lambda: recurrent_training().run(100),
    "regression, AdamW, on its way": lambda: table_training().run(60),
    "regression, SGD, on its way": lambda: table_training(optimizer=sgd(0.03)).run(100),
}


def planted() -> Iterator[Case]:
    """All cases, the healthy ones last."""
    yield from CASES.values()
    yield from (Case(name, (), fault) for name, fault in HEALTHY.items())
