"""`Dataset` and the errors of this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from theodolite.arguments import finite, one_or_each, place, positive, random_seed, sequence, shown, whole
from theodolite.errors import TheodoliteError
from theodolite.text import nearest


class DataError(TheodoliteError):
    """Parent of the errors about data sets."""


class UnknownDataError(DataError, ValueError):
    """No data set has this name."""


class MissingDataError(DataError, FileNotFoundError):
    """The data set is known, but its files are nowhere."""


class DamagedDataError(DataError, ValueError):
    """A file is there but is not what it should be."""

    def __init__(self, path: str | Path, problem: str, remedy: str = "") -> None:
        self.path, self.problem = Path(path), problem
        super().__init__(f"{path} is damaged: {problem}." + (f" {remedy}" if remedy else ""))


class FetchError(DataError, OSError):
    """A file could not be downloaded or written."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples with class labels, in a training and a test part.

    Images are (N, C, H, W), `uint8` as they come from disk; labels are `int64`, indices into `classes`.
    `peak` is the value of the brightest pixel and `origin` tells where the examples came from.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    name: str = ""
    origin: str = ""
    peak: float = 255.0

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if y.ndim != 1 or y.dtype != torch.int64:
                raise ValueError(f"y_{part} must be a vector of int64. Got {y.dtype} of shape {tuple(y.shape)}.")
            if len(x) != len(y):
                raise ValueError(f"x_{part} and y_{part} must be equally long. Got {len(x)} and {len(y)}.")
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
                raise ValueError(
                    f"y_{part} must lie in 0..{len(self.classes) - 1}, one index for each class. "
                    f"Got {int(y.min())}..{int(y.max())}."
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                "Training and test examples must have one shape. "
                f"Got {tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}."
            )

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x_train.shape[1:]))
        return (
            f"Dataset({self.name or 'unnamed'}: {len(self.y_train)} train, {len(self.y_test)} test, "
            f"{shape} {str(self.x_train.dtype).removeprefix('torch.')}, {len(self.classes)} classes)"
        )

    def scaled(
        self,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Dataset:
        """Values from 0 to 1, then `(x - mean) / std` with one number for all channels or one for each."""
        mean = None if mean is None else one_or_each(finite)("mean", mean)
        std = None if std is None else one_or_each(positive)("std", std)

        def per_channel(values: float | Sequence[float]) -> Tensor:
            vector = torch.as_tensor(values, dtype=dtype).reshape(-1)
            if len(vector) not in (1, self.x_train.shape[1]):
                raise ValueError(f"mean and std need 1 or {self.x_train.shape[1]} numbers. Got {len(vector)}.")
            return vector.reshape(-1, *[1] * (self.x_train.ndim - 2))

        def scale(x: Tensor) -> Tensor:
            x = x.to(dtype) / self.peak
            if mean is not None:
                x = x - per_channel(mean)
            return x if std is None else x / per_channel(std)

        return replace(self, x_train=scale(self.x_train), x_test=scale(self.x_test), peak=1.0)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the training examples, after scaling to 0..1."""
        # Channel by channel: a float64 copy of everything at once would be eight times the data.
        channels = [self.x_train[:, c].double() / self.peak for c in range(self.x_train.shape[1])]
        return torch.stack([c.mean() for c in channels]), torch.stack([c.std(correction=0) for c in channels])

    def subset(self, n_train: int, n_test: int, seed: int | None = None) -> Dataset:
        """The first `n_train` and `n_test` examples, or with a seed a random choice without repetition."""
        generator = None if seed is None else torch.Generator().manual_seed(random_seed(seed))

        def choose(y: Tensor, n: int, argument: str) -> Tensor:
            if whole(argument, n) > len(y):
                raise ValueError(f"{argument} must lie in 0..{len(y)}, the size of {self.name or 'the data set'}. Got {n}.")
            return torch.arange(n) if generator is None else torch.randperm(len(y), generator=generator)[:n]

        return self._take(choose(self.y_train, n_train, "n_train"), choose(self.y_test, n_test, "n_test"))

    def classes_only(self, classes: Sequence[int | str]) -> Dataset:
        """Only these classes, by number or name, relabelled 0, 1, ... in the given order."""
        numbers = [self._number(c) for c in sequence("classes", classes)]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"classes must be distinct and at least one. Got {shown(tuple(classes))}.")
        label = torch.full((len(self.classes),), -1)
        label[numbers] = torch.arange(len(numbers))
        train, test = label[self.y_train], label[self.y_test]
        taken = self._take((train >= 0).nonzero()[:, 0], (test >= 0).nonzero()[:, 0])
        names = tuple(self.classes[i] for i in numbers)
        return replace(taken, y_train=train[train >= 0], y_test=test[test >= 0], classes=names)

    def flat(self) -> Dataset:
        """The same with each example as one vector."""
        return replace(self, x_train=self.x_train.flatten(1), x_test=self.x_test.flatten(1))

    def _number(self, wanted: int | str) -> int:
        if isinstance(wanted, str) and wanted in self.classes:
            return self.classes.index(wanted)
        if not isinstance(wanted, str):
            return place("classes", wanted, len(self.classes))
        close = ", ".join(nearest(wanted, self.classes))
        raise ValueError(f"classes: there is no {wanted!r} among 0..{len(self.classes) - 1}. Nearest names: {close}.")

    def _take(self, train: Tensor, test: Tensor) -> Dataset:
        return replace(
            self,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_test[test],
            y_test=self.y_test[test],
        )
