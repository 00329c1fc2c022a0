"""What the networks learn in the experiments on features: a target of few directions, or two classes of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from theodolite import data, training
from theodolite.data import MissingDataError
from theodolite.data.generators import rank_k_targets, two_class_images
from theodolite.experiments.catapult_features.feature_networks import StackedNetworks
from theodolite.experiments.catapult_features.feature_training import Points, Splits
from theodolite.experiments.lab.datasets import Source, features
from theodolite.measures.features import agop, agop_alignment
from theodolite.models import fcn, myrtle5, ntk_cnn, ntk_fcn
from theodolite.models.initialisation import construct

Init = Literal["ntk", "ntk_small", "torch"]

#: Root mean square of the pixels, which are not centred.
RMS = 1.1
#: Share of flipped training labels where something stands in for the images, which would be too easy without.
STAND_IN_NOISE = 0.1
#: Share of a generated image's own part that tells its class: at 0.2 no network made an error, at 0.05 some do (measured once).
CLASS_SHARE = 0.05
#: Where a network's images come from, by task; USPS and CelebA are not to be had here.
READ = {"svhn": "svhn", "fashion": "fashion_mnist", "usps": "digits"}
CLASSES = (0, 2)
#: Origins that are what the source used.
REAL = ("svhn", "fashion_mnist")


@dataclass(frozen=True)
class Task:
    """A task of the source: its title, the network's kind and number of weight layers, and whether signs are what counts."""

    title: str
    depth: int
    convolutional: bool = False
    images: bool = False


TASKS = {
    "rank-2": Task("rank-2", 2),
    "rank-3": Task("rank-3", 4),
    "rank-4": Task("rank-4", 4),
    "full": Task("full rank", 2),
    "svhn": Task("SVHN-2", 5, convolutional=True, images=True),
    "celeba": Task("CelebA", 4, images=True),
    "usps": Task("USPS", 4, images=True),
    "fashion": Task("Fashion-MNIST", 4, images=True),
}


@dataclass(frozen=True)
class Setting:
    """A task at a size.

    `dim` is the input's dimension, or the side of images; there are `held_out` points to choose and as many to judge by.
    """

    task: str
    n: int
    held_out: int
    dim: int
    width: int
    source: Source = "either"
    noise: float = 0.0  # share of flipped training labels


class Prepared(NamedTuple):
    """Networks at their start, their points, the matrix (d, d) their AGOPs are compared with, and where the points are from."""

    networks: StackedNetworks
    splits: Splits
    target: Tensor
    origin: str
    reference_error: float | None  # test error of the network that stands for the target


def prepare(setting: Setting, seeds: Sequence[int], init: Init = "ntk", *, copies: int = 1) -> Prepared:
    """`copies` times R networks, one start for each seed. Points of synthetic tasks are drawn anew for each seed."""
    task = TASKS[setting.task]
    if task.images:
        found = images(setting)
        splits = Splits(*(_stacked([part] * (copies * len(seeds))) for part in found.parts))
        image, target, origin, error = found.shape, found.target, found.origin, found.error
    else:
        drawn = [_drawn(setting, seed) for seed in seeds] * copies
        splits = Splits(*(_stacked([parts[i] for parts, _ in drawn]) for i in range(3)))
        image, target, origin, error = None, drawn[0][1], setting.task, None
    start = [network(setting, init, seed, image) for seed in seeds] * copies
    return Prepared(StackedNetworks(start, image), splits, target, origin, error)


def network(setting: Setting, init: Init, seed: int, image: tuple[int, int, int] | None) -> nn.Sequential:
    """The network of a task: without biases in the NTK form, with torch's biases and scales for init "torch"."""
    task = TASKS[setting.task]
    inputs = setting.dim if image is None else int(torch.Size(image).numel())
    if init == "torch":
        return _plain_cnn(setting, seed, image) if task.convolutional else _plain_fcn(setting, seed, inputs)
    if task.convolutional:
        assert image is not None
        return ntk_cnn(image, setting.width, task.depth, init=init, seed=seed)
    return ntk_fcn(inputs, setting.width, task.depth, init=init, seed=seed)


def alignments(networks: StackedNetworks, x: Tensor, target: Tensor) -> list[float]:
    """Cosine between each network's AGOP on its inputs (R, n, d) and the target's; 0 where all units of a layer are dead."""
    return [agop_alignment(matrix, target) if bool(matrix.any()) else 0.0 for matrix in agops(networks, x)]


def agops(networks: StackedNetworks, x: Tensor) -> Tensor:
    """Average gradient outer products (R, d, d)."""
    rows = networks.input_gradients(x).double()
    return torch.bmm(rows.mT, rows) / x.shape[1]


def _stacked(parts: Sequence[tuple[Tensor, Tensor]]) -> Points:
    return Points(torch.stack([x for x, _ in parts]), torch.stack([y for _, y in parts]))


def _drawn(setting: Setting, seed: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    name: Any = setting.task
    sample = rank_k_targets(name, setting.n + 2 * setting.held_out, dim=setting.dim, seed=seed)
    sizes = [setting.n, setting.held_out, setting.held_out]
    return list(zip(sample.x.split(sizes), sample.y.split(sizes), strict=True)), sample.target.egop


def _plain_fcn(setting: Setting, seed: int, inputs: int) -> nn.Sequential:
    widths = [setting.width] * (TASKS[setting.task].depth - 1)
    return fcn(inputs, widths, 1, init="torch", seed=seed)


def _plain_cnn(setting: Setting, seed: int, image: tuple[int, int, int] | None) -> nn.Sequential:
    assert image is not None
    channels, *pixels = image

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for i in range(TASKS[setting.task].depth - 1):
            layers += [nn.Conv2d(channels if i == 0 else setting.width, setting.width, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(setting.width * pixels[0] * pixels[1], 1))

    return construct(make, "torch", seed)


# Images


class Images(NamedTuple):
    """Training, validation and test points (flat images, labels ±1), their shape, and the AGOP of a reference network."""

    parts: tuple[tuple[Tensor, Tensor], ...]
    shape: tuple[int, int, int]
    target: Tensor
    origin: str
    error: float


#: Epochs and filters of the reference network, a Myrtle-5 with biases trained by Adam at 1e-3 in batches of 50 on training and
#: validation points with their true labels.
REFERENCE = {"epochs": 20, "width": 32, "batch": 50, "rate": 1e-3}


@lru_cache(maxsize=8)
def images(setting: Setting) -> Images:
    """The points of an image task, the same for all seeds, and their reference."""
    x, y, origin = _pool(setting)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    if len(x) < setting.n + 2:
        raise ValueError(f"{origin} has {len(x)} points of the two classes: too few to train on {setting.n}.")
    held = min(setting.held_out, (len(x) - setting.n) // 2)
    x = x * (RMS / x[: setting.n].square().mean().sqrt())
    sizes = [setting.n, held, held]
    cut_x, cut_y = x[: sum(sizes)].split(sizes), y[: sum(sizes)].split(sizes)
    matrix, error = _reference(torch.cat(cut_x[:2]), torch.cat(cut_y[:2]), cut_x[0], (cut_x[2], cut_y[2]))
    noise = setting.noise or (0.0 if origin in REAL else STAND_IN_NOISE)
    labels = (flipped(cut_y[0], noise), cut_y[1], cut_y[2])
    parts = tuple((images.flatten(1), y) for images, y in zip(cut_x, labels, strict=True))
    shape = (int(x.shape[1]), int(x.shape[2]), int(x.shape[3]))
    return Images(parts, shape, matrix, origin, error)


def flipped(y: Tensor, share: float) -> Tensor:
    """Labels ±1 with a share of them turned round, the same ones each time.

    >>> int((flipped(torch.ones(10), 0.2) < 0).sum())
    2
    """
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))[: round(share * len(y))]
    turned = y.clone()
    turned[chosen] *= -1
    return turned


def _pool(setting: Setting) -> tuple[Tensor, Tensor, str]:
    """Images (N, C, side, side), labels ±1, and the origin."""
    name = READ.get(setting.task)
    if name is not None and (setting.source != "stand-in" or name == "digits"):
        try:
            pair = data.load(name).classes_only(CLASSES)
            x = torch.cat([pair.x_train, pair.x_test]).float() / pair.peak
            y = torch.cat([pair.y_train, pair.y_test]).float() * 2 - 1
            return features(x, setting.dim), y, "digits of scikit-learn" if name == "digits" else name
        except MissingDataError:
            if setting.source == "files":
                raise
    channels = 1 if setting.task == "fashion" else 3
    made = two_class_images(
        setting.n + 2 * setting.held_out, setting.dim, channels, class_frac=CLASS_SHARE, seed=list(TASKS).index(setting.task)
    )
    return made.x, made.y, "generated images"


def _reference(x: Tensor, y: Tensor, at: Tensor, test: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """AGOP at some images, and test error, of a network trained on images (n, C, H, W)."""
    model = myrtle5(int(REFERENCE["width"]), 1, x.shape[1], init="kaiming_normal", bias=True, seed=0)
    make: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.Adam(weights, lr=REFERENCE["rate"])  # noqa: E731
    training.train(
        model,
        nn.MSELoss(),
        (x, y[:, None]),
        make,
        epochs=int(REFERENCE["epochs"]),
        batch_size=int(REFERENCE["batch"]),
        seed=0,
        progress=False,
    )
    with torch.no_grad():
        wrong = (model(test[0])[:, 0] * test[1] <= 0).double().mean()
    return agop(model, at).double(), float(wrong)
