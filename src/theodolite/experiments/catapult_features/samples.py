"""Points to train on: two classes or ten of CIFAR-10 and SVHN, low-rank targets, and what stands in for missing files."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite import data
from theodolite.data import Dataset, MissingDataError
from theodolite.data.generators import rank_k_targets, two_class_images
from theodolite.experiments.lab.datasets import Source, features

#: Pairs of classes: horse and truck of CIFAR-10, digits 0 and 2 of SVHN.
PAIRS: dict[str, tuple[int, int]] = {"cifar10": (7, 9), "svhn": (0, 2)}
NAMES = {"cifar10": "CIFAR", "svhn": "SVHN", "rank-2": "rank-2 target", "rank-4": "rank-4 target"}
#: Added to the seed of generated images, so that two panels do not see the same ones.
_SHIFT = {"cifar10": 0, "svhn": 1000}
#: Root mean square of an image's pixels, which are not centred.
RMS = 1.1


class Points(NamedTuple):
    """Inputs (n, ...), targets (n, outputs) and where they come from."""

    x: Tensor
    y: Tensor
    origin: str

    @property
    def outputs(self) -> int:
        return int(self.y.shape[1])


def points(name: str, n: int, *, side: int = 8, dim: int = 100, classes: int = 2, source: Source, seed: int = 0) -> Points:
    """`n` points of a data set by name: a pair of classes with targets ±1, `classes` > 2 one-hot, or a rank-k target.

    They are float64: catapults amplify rounding, and in float32 two machines soon see different runs.
    """
    if name.startswith("rank-"):
        made = rank_k_targets(name, n, dim=dim, seed=seed)  # type: ignore[arg-type]
        found = Points(made.x, made.y[:, None], name)
    else:
        found = _pair(name, n, side, source, seed) if classes == 2 else _many(name, n, side, classes, source, seed)
    return Points(found.x.double(), found.y.double(), found.origin)


def _pair(name: str, n: int, side: int, source: Source, seed: int) -> Points:
    found = _read(name, source)
    if found is None:
        made = two_class_images(n, side, 3, rms=RMS, mean_cos=0.9, seed=seed + _SHIFT[name])
        return Points(made.x, made.y[:, None], "generated images")
    x, label = _drawn(found, PAIRS[name], n, side, seed)
    return Points(x, (2.0 * label - 1.0)[:, None], name)


def _many(name: str, n: int, side: int, classes: int, source: Source, seed: int) -> Points:
    """One-hot targets; digits of scikit-learn stand in."""
    found = _read(name, source)
    origin = name if found is not None else "digits of scikit-learn"
    x, label = _drawn(found or data.load("digits"), tuple(range(classes)), n, side, seed)
    return Points(x, F.one_hot(label, classes).to(x.dtype), origin)


def _read(name: str, source: Source) -> Dataset | None:
    """The data set, None where a stand-in shall be used."""
    if source == "stand-in":
        return None
    try:
        found: Dataset = data.load(name)
        return found
    except MissingDataError:
        if source == "files":
            raise
        return None


def _drawn(found: Dataset, classes: tuple[int, ...], n: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """`n` images of these classes, as many of each as that allows, and their labels 0, 1, ..., in random order."""
    chosen = found.classes_only(classes)
    x = torch.cat([chosen.x_train, chosen.x_test])
    label = torch.cat([chosen.y_train, chosen.y_test])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    # The i-th image of every class before the (i+1)-th of any.
    turn = torch.empty(len(x))
    for which in range(len(classes)):
        mine = order[label[order] == which]
        turn[mine] = torch.arange(len(mine), dtype=turn.dtype) + which / len(classes)
    if len(x) < n:
        raise ValueError(f"There are {len(x)} images of the classes {classes}: too few to draw {n}.")
    keep = turn.argsort()[:n]
    keep = keep[torch.randperm(n, generator=generator)]
    images = features(x[keep].float() / chosen.peak, side)
    return images * (RMS / images.square().mean().sqrt()), label[keep]
