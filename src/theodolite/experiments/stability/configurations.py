"""The algorithms whose stability is measured: the source's own settings, and those that stand for them on a small machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.data.generators import gaussian_classes, gaussian_mixture
from theodolite.experiments.lab.datasets import Source, load_or
from theodolite.measures.stability.study import make_bench
from theodolite.measures.stability.training_pairs import Bench, Recipe
from theodolite.models import fcn, resnet20

LOGISTIC = "logistic regression"
DEEP = ("1a", "2a", "2b")
#: Test examples of every experiment of the source.
TESTED = 10_000
#: Examples of a generated training pool, as many as MNIST has.
GENERATED = 60_000
#: Classes below this are one label of the binary task, the others the other.
SPLIT = 5
#: Photographs that are not there are replaced by digits of scikit-learn, everything else by Gaussian classes.
PHOTOGRAPHS = ("svhn", "cifar10")


@dataclass(frozen=True)
class Setting:
    """An algorithm on a data set, in plain values, so that it can be part of a job.

    `data` is a name of `theodolite.data`, or "two classes" and "ten classes" of Gaussian points; `network` is "linear" (one
    output, zeros at the start), "mlp" (two hidden layers of `width`) or "resnet20". From each of the updates in `drops` on
    the rate is a tenth. `steps` is T, the update at which figures look; runs go on to 3T/2 if figures look `beyond` T.
    """

    name: str
    data: str
    network: str
    width: int
    rate: float
    batch: int
    momentum: float = 0.0
    drops: tuple[int, ...] = ()
    steps: int = 100_000
    source: Source = "files"
    tested: int = TESTED
    beyond: bool = True

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Setting:
        """From the values of a job."""
        return cls(**{**plain, "drops": tuple(plain["drops"])})

    @property
    def checkpoints(self) -> dict[int, str]:
        """Updates at which all is measured, by name, the end last."""
        T = self.steps
        early = {} if self.beyond else {T // 4: "T/4"}
        late = {3 * T // 2: "3T/2"} if self.beyond else {}
        return {**early, T // 2: "T/2", T: "T", **late}

    @property
    def binary(self) -> bool:
        return self.network == "linear"

    def rate_at(self, step: int) -> float:
        """The learning rate of an update.

        >>> CONFIGURATIONS["2a"].rate_at(32_000)
        0.01
        """
        return self.rate / 10.0 ** sum(step >= drop for drop in self.drops)


#: Table 2.1 of the source.
CONFIGURATIONS = {
    "1a": Setting("1a", "svhn", "resnet20", 16, rate=0.01, batch=32),
    "2a": Setting("2a", "cifar10", "resnet20", 16, rate=0.1, batch=128, drops=(32_000, 48_000)),
    "2b": Setting("2b", "cifar10", "resnet20", 16, rate=0.1, batch=128, momentum=0.9, drops=(32_000, 48_000)),
}
PAPER = tuple(CONFIGURATIONS.values())


def scaled(data: str, width: int, steps: int, batches: tuple[int, int], source: Source) -> tuple[Setting, ...]:
    """Fully connected networks that stand for 1a, 2a and 2b: a small rate and batch, then a larger one with two drops."""
    small, large = batches
    drops = (steps // 2, 3 * steps // 4)
    first = Setting("1a", data, "mlp", width, rate=0.05, batch=small, steps=steps, source=source)
    second = replace(first, name="2a", rate=0.1, batch=large, drops=drops)
    return first, second, replace(second, name="2b", momentum=0.9)


LAPTOP = scaled("fashion_mnist", 256, 3000, (32, 128), "either")
TINY = scaled("digits", 32, 160, (16, 32), "either")

#: Logistic regression of Figure 2.1.
MNIST = Setting(LOGISTIC, "mnist", "linear", 0, rate=0.1, batch=128, beyond=False)
LOGISTIC_SIZES = {
    "tiny": replace(MNIST, data="two classes", steps=400, tested=2000),
    "laptop": replace(MNIST, steps=10_000, source="either"),
    "paper": MNIST,
}


# Data


@dataclass(frozen=True, eq=False)
class Task:
    """The pools, and where their examples come from."""

    bench: Bench
    origin: str


def task_of(name: str, source: Source, tested: int, binary: bool) -> Task:
    """Pixels over 255 and nothing else; the test pool is a choice of `tested` examples made once.

    Others stand in for images that are not there, if `source` allows it.
    """
    train, test, origin = _examples(name, source, tested, binary)
    if len(test[0]) > tested:
        rows = torch.randperm(len(test[0]), generator=torch.Generator().manual_seed(0))[:tested].sort().values
        test = test[0][rows], test[1][rows]
    return Task(make_bench(train, test, tested), origin)


Pool = tuple[Tensor, Tensor]


def _examples(name: str, source: Source, tested: int, binary: bool) -> tuple[Pool, Pool, str]:
    if name in ("two classes", "ten classes"):
        return _generated(tested, binary)

    def from_files() -> tuple[Pool, Pool, str]:
        found = data.load(name).scaled()
        train, test = ((x, labels(y, binary)) for x, y in ((found.x_train, found.y_train), (found.x_test, found.y_test)))
        return train, test, "digits of scikit-learn" if name == "digits" else name

    def stand_in() -> tuple[Pool, Pool, str]:
        return _examples("digits", source, tested, binary) if name in PHOTOGRAPHS else _generated(tested, binary)

    return load_or(from_files, stand_in, source)


def _generated(tested: int, binary: bool) -> tuple[Pool, Pool, str]:
    count = GENERATED + tested
    if binary:
        two = gaussian_classes(count)
        x, y, origin = two.x, (two.y[:, None] + 1) / 2, "two Gaussian classes"
    else:
        ten = gaussian_mixture(count)
        x, y, origin = ten.x, ten.y, "ten Gaussian classes"
    return (x[:GENERATED], y[:GENERATED]), (x[GENERATED:], y[GENERATED:]), origin


def labels(y: Tensor, binary: bool) -> Tensor:
    """Class numbers, or as 0 and 1 (n, 1) whether they are below 5 or not.

    >>> labels(torch.tensor([4, 5]), True).tolist()
    [[0.0], [1.0]]
    """
    return (y >= SPLIT).float()[:, None] if binary else y


# Algorithms


def recipe_of(setting: Setting, task: Task) -> Recipe:
    """The algorithm as the measures take it, up to T."""
    return Recipe(
        partial(_network, setting.network, setting.width, tuple(task.bench.train.inputs.shape[1:])),
        "sgd",
        nn.BCEWithLogitsLoss() if setting.binary else nn.CrossEntropyLoss(),
        setting.steps,
        setting.batch,
        schedule=lambda step: setting.rate_at(step) / setting.rate,
        settings={"rate": setting.rate, "momentum": setting.momentum},
    )


def _network(kind: str, width: int, shape: tuple[int, ...], seed: int) -> nn.Module:
    inputs = torch.Size(shape).numel()
    if kind == "linear":
        model = fcn(inputs, [], 1, seed=seed)
        for p in model.parameters():
            nn.init.zeros_(p)
        return model
    if kind == "mlp":
        return fcn(inputs, [width, width], 10, init="kaiming_normal", seed=seed)
    return resnet20(10, shape[0], width=width, seed=seed)
