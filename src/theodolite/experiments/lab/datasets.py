"""Data sets for experiments, and what stands in where their files are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite import data
from theodolite.data import Dataset, MissingDataError
from theodolite.data.generators import two_class_images

#: "files": the real set or an error; "either": the stand-in where its files are not there; "stand-in": never the files.
Source = Literal["files", "either", "stand-in"]

Found = TypeVar("Found")


def load_or(load: Callable[[], Found], stand_in: Callable[[], Found], source: Source = "either") -> Found:
    """What `load` finds; where files are missing and `source` allows it, what `stand_in` makes.

    >>> load_or(lambda: "files", lambda: "generated", "stand-in")
    'generated'
    """
    if source == "stand-in":
        return stand_in()
    try:
        return load()
    except MissingDataError:
        if source == "files":
            raise
        return stand_in()


#: Pairs of classes. Airplane and bird, digits 0 and 2 of SVHN and 1 and 3 of FSDD are the source's; the others are not stated.
CLASSES: dict[str, tuple[int, int]] = {"mnist": (0, 2), "cifar10": (0, 2), "svhn": (0, 2), "fsdd": (1, 3), "ag_news": (0, 1)}
#: Digits of scikit-learn of the same pair stand in for digits and spoken digits, generated images for the others: their
#: channels, and what is added to the seed so that no two panels see the same ones.
_IMAGES = {"cifar10": (3, 0), "svhn": (3, 1000), "ag_news": (1, 2000)}
#: Share of labels flipped in generated images, which would be too easy without.
LABEL_NOISE = 0.1
#: The most frequent words that a text is counted by, and the samples of a recording.
WORDS, SAMPLES = 2000, 8000


class Sample(NamedTuple):
    """Inputs (n, C, H, W) or (n, d) with a mean square of one over the training points, targets ±1 (n, 1), where from."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    origin: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


def two_classes(name: str, n: int, n_test: int, *, side: int, source: Source, seed: int = 0) -> Sample:
    """`n` training and at most `n_test` other points of a pair of classes, as many of each class in the training set.

    Images are averaged down to `side` × `side` pixels. Training and test part of the set are joined first: the files here
    hold too few test images of two classes.
    """
    x, label, origin = _points(name, n + n_test, side, source, seed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, label = x[order], label[order]
    halves = [(label == which).nonzero()[:, 0] for which in (0, 1)]
    if min(map(len, halves)) < (n + 1) // 2 or len(x) <= n:
        raise ValueError(
            f"{origin} has {len(halves[0])} and {len(halves[1])} points of the two classes: too few to train on {n}."
        )
    chosen = torch.cat([halves[0][: n // 2], halves[1][: n - n // 2]]).sort().values
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[chosen] = False
    rest = kept.nonzero()[:n_test, 0]
    x = x / x[chosen].square().mean().sqrt()
    y = (label.to(x.dtype) * 2 - 1)[:, None]
    return Sample(x[chosen], y[chosen], x[rest], y[rest], origin)


def _points(name: str, count: int, side: int, source: Source, seed: int) -> tuple[Tensor, Tensor, str]:
    """All there is of the pair: inputs, labels 0 and 1, and the origin."""
    if name not in CLASSES:
        raise ValueError(f"name must be one of {', '.join(CLASSES)}. Got {name!r}.")

    def from_files() -> tuple[Tensor, Tensor, str]:
        return *joined(_read(name), CLASSES[name], side), name

    def stand_in() -> tuple[Tensor, Tensor, str]:
        if name not in _IMAGES:
            return *joined(data.load("digits"), CLASSES[name], side), "digits of scikit-learn"
        channels, shift = _IMAGES[name]
        made = two_class_images(count, side, channels, label_noise=LABEL_NOISE, seed=seed + shift)
        return made.x, (made.y > 0).long(), "generated images"

    return load_or(from_files, stand_in, source)


def _read(name: str) -> Dataset:
    if name == "ag_news":
        return data.load("ag_news").bag_of_words(WORDS)
    return data.load("fsdd", length=SAMPLES) if name == "fsdd" else data.load(name)


def joined(found: Dataset, classes: tuple[int, ...], side: int) -> tuple[Tensor, Tensor]:
    """All points of some classes, training and test part together: values from 0 to 1 as `features`, and labels 0, 1, ..."""
    pair = found.classes_only(classes)
    x = torch.cat([pair.x_train, pair.x_test]).float() / pair.peak
    return features(x, side), torch.cat([pair.y_train, pair.y_test])


def in_halves(found: Dataset) -> Dataset:
    """Two classes: the first half of the classes against the second, as digits 0 to 4 against 5 to 9 ("MNIST-2").

    >>> in_halves(data.load("digits")).classes
    ('0 1 2 3 4', '5 6 7 8 9')
    """
    half = len(found.classes) // 2
    y_train, y_test = ((y >= half).long() for y in (found.y_train, found.y_test))
    names = " ".join(found.classes[:half]), " ".join(found.classes[half:])
    return replace(found, y_train=y_train, y_test=y_test, classes=names)


def features(x: Tensor, side: int) -> Tensor:
    """Images as smaller images, recordings (n, 1, T) as the logarithms of side² parts of their spectrum, counts as they are.

    >>> features(torch.ones(2, 3, 32, 32), 8).shape, features(torch.ones(2, 1, 8000), 8).shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 64]))
    """
    if x.ndim == 4:
        return x if x.shape[-1] <= side else F.adaptive_avg_pool2d(x, side)
    if x.ndim == 3:
        return F.adaptive_avg_pool1d(torch.fft.rfft(x).abs(), side * side)[:, 0].log1p()
    return x
