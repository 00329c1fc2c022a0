"""What the networks learn in the experiments on features: a target of few directions, or two classes of images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from theodolite import data, training
from theodolite.data.generators import rank_k_targets, two_class_images
from theodolite.experiments import Study, rows
from theodolite.experiments.catapult_features.runs import RMS, plain_network
from theodolite.experiments.catapult_features.stacked_networks import History, Points, Splits, StackedNetworks
from theodolite.experiments.claims import SIZES
from theodolite.experiments.lab.datasets import Source, joined, load_or
from theodolite.experiments.study import Computation
from theodolite.measures.features import agop, agop_alignment
from theodolite.models import myrtle5
from theodolite.results import Row

Init = Literal["ntk", "ntk_small", "torch"]

#: Share of flipped training labels where something stands in for the images, which would be too easy without.
STAND_IN_NOISE = 0.1
#: Share of a generated image's own part that tells its class: at 0.2 no network made an error, at 0.05 some do (measured once).
CLASS_SHARE = 0.05
#: Where a network's images come from, by task; USPS and CelebA are not available here.
READ = {"svhn": "svhn", "fashion": "fashion_mnist", "usps": "digits"}
CLASSES = (0, 2)
#: Origins that are what the source used.
REAL = ("svhn", "fashion_mnist")


class Task(NamedTuple):
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


#: The lowest validation loss of a run, of the checks that are numbers.
LOWEST = rows(validation=lambda loss: not math.isnan(loss)).min("validation")


def score_of(title: str) -> tuple[str, str]:
    """What a task is judged by: a column and its name."""
    images = next(task.images for task in TASKS.values() if task.title == title)
    return ("test_error", "test error") if images else ("test_loss", "test loss")


class Setting(NamedTuple):
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

    @property
    def title(self) -> str:
        return TASKS[self.task].title


#: Training points, points held out, dimension and width of the tasks, at each size; figures that need others say so.
SETTINGS = {
    "rank-2": ((80, 500, 20, 128), (500, 2000, 50, 512), (2000, 5000, 100, 1024)),
    "rank-3": ((150, 500, 20, 64), (500, 2000, 50, 256), (1000, 5000, 100, 256)),
    "rank-4": ((150, 500, 20, 64), (500, 2000, 50, 256), (1000, 5000, 100, 256)),
    "full": ((60, 500, 20, 128), (128, 2000, 100, 1024), (128, 2000, 100, 1024)),
    "svhn": ((20, 60, 4, 4), (200, 500, 8, 16), (1000, 5000, 32, 256)),
    "celeba": ((60, 100, 6, 64), (300, 500, 8, 256), (1000, 5000, 32, 256)),
    "usps": ((60, 100, 8, 64), (100, 100, 8, 256), (100, 100, 8, 256)),
    "fashion": ((60, 100, 6, 64), (500, 2000, 14, 256), (1000, 5000, 28, 256)),
}


def setting_of(size: str, task: str, **changes: Any) -> Setting:
    """A task at a size, with other values.

    >>> setting_of("laptop", "rank-3", n=1000)
    Setting(task='rank-3', n=1000, held_out=2000, dim=50, width=256, source='either', noise=0.0)
    """
    sources: dict[str, Source] = {"tiny": "stand-in"} if TASKS[task].images else {}
    if READ.get(task) in REAL:
        sources["paper"] = "files"
    return Setting(task, *SETTINGS[task][SIZES.index(size)], sources.get(size, "either"))._replace(**changes)


def settings(size: str, *tasks: str, **changes: Mapping[str, Any]) -> list[Setting]:
    """Several tasks at a size; `n={"rank-3": 1000}` changes a value of some.

    >>> [(setting.task, setting.n) for setting in settings("tiny", "rank-2", "rank-3", n={"rank-3": 100})]
    [('rank-2', 80), ('rank-3', 100)]
    """
    own = {task: {name: values[task] for name, values in changes.items() if task in values} for task in tasks}
    return [setting_of(size, task, **own[task]) for task in tasks]


class Prepared(NamedTuple):
    """Networks at their start, their points, the matrix (d, d) their AGOPs are compared with, and where the points are from."""

    networks: StackedNetworks
    splits: Splits
    target: Tensor
    origin: str
    reference_error: float | None  # test error of the network that stands for the target


def prepare(
    setting: Setting, seeds: Sequence[int], init: Init = "ntk", *, copies: int = 1, reference: Sequence[Row] = ()
) -> Prepared:
    """`copies` times R networks, one start for each seed; `reference` are the rows of `ReferenceNetwork` for a task of images.

    Points of synthetic tasks are drawn anew for each seed.
    """
    task, image = TASKS[setting.task], None
    if task.images:
        found = images(setting)
        noise = setting.noise or (0.0 if found.origin in REAL else STAND_IN_NOISE)
        labels = (flipped(found.y[0], noise), *found.y[1:])
        drawn = [[(x.flatten(1), y) for x, y in zip(found.x, labels, strict=True)]] * len(seeds)
        [known], image, origin = reference, found.shape, found.origin
        target, error = known["target"], known["error"]
    else:
        name: Any = setting.task
        sizes = [setting.n, setting.held_out, setting.held_out]
        samples = [rank_k_targets(name, sum(sizes), dim=setting.dim, seed=seed) for seed in seeds]
        drawn = [list(zip(sample.x.split(sizes), sample.y.split(sizes), strict=True)) for sample in samples]
        target, origin, error = samples[0].target.egop, setting.task, None
    splits = Splits(*(Points(*map(torch.stack, zip(*parts, strict=True))) for parts in zip(*drawn * copies, strict=True)))
    shape, widths = image or (setting.dim,), [setting.width] * (task.depth - 1)
    start = [plain_network(shape, widths, 1, task.convolutional, init, seed) for seed in seeds] * copies
    return Prepared(StackedNetworks(start, image), splits, target, origin, error)


def alignments(networks: StackedNetworks, x: Tensor, target: Tensor) -> list[float]:
    """Cosine between each network's AGOP on its inputs (R, n, d) and the target's; 0 where all units of a layer are dead."""
    return [agop_alignment(matrix, target) if bool(matrix.any()) else 0.0 for matrix in agops(networks, x)]


def agops(networks: StackedNetworks, x: Tensor) -> Tensor:
    """Average gradient outer products (R, d, d)."""
    rows = networks.input_gradients(x).double()
    return torch.bmm(rows.mT, rows) / x.shape[1]


def judged(start: Prepared, history: History) -> list[Row]:
    """For each trained network: alignment and tests of its best weights, and how the run went."""
    best, test = history.best, start.splits.test
    aligned = alignments(best, start.splits.train.x, start.target)
    found = zip(aligned, test.loss(best).tolist(), test.error(best).tolist(), strict=True)
    return [
        {"alignment": a, "test_loss": loss, "test_error": e, **history.row(r), "reference_error": start.reference_error}
        for r, (a, loss, e) in enumerate(found)
    ]


# Images


class Images(NamedTuple):
    """Training, validation and test images (n, C, H, W), their true labels ±1, and where they are from."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    origin: str

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.x[0].shape
        return channels, height, width


def images(setting: Setting) -> Images:
    """The points of an image task, the same for all seeds."""
    name = READ.get(setting.task, "")

    def from_files() -> tuple[Tensor, Tensor, str]:
        x, label = joined(data.load(name), CLASSES, setting.dim)
        return x, label.float() * 2 - 1, "digits of scikit-learn" if name == "digits" else name

    def generated() -> tuple[Tensor, Tensor, str]:
        count, channels = setting.n + 2 * setting.held_out, 1 if setting.task == "fashion" else 3
        seed = list(TASKS).index(setting.task)
        made = two_class_images(count, setting.dim, channels, class_frac=CLASS_SHARE, seed=seed)
        return made.x, made.y, "generated images"

    source: Source = "files" if name == "digits" else setting.source if name else "stand-in"
    x, y, origin = load_or(from_files, generated, source)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    if len(x) < setting.n + 2:
        raise ValueError(f"{origin} has {len(x)} points of the two classes: too few to train on {setting.n}.")
    held = min(setting.held_out, (len(x) - setting.n) // 2)
    x = x * (RMS / x[: setting.n].square().mean().sqrt())
    sizes = [setting.n, held, held]
    return Images(x[: sum(sizes)].split(sizes), y[: sum(sizes)].split(sizes), origin)


def flipped(y: Tensor, share: float) -> Tensor:
    """Labels ±1 with a share of them turned round, the same ones each time.

    >>> int((flipped(torch.ones(10), 0.2) < 0).sum())
    2
    """
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))[: round(share * len(y))]
    turned = y.clone()
    turned[chosen] *= -1
    return turned


#: Epochs and filters of the reference network, a Myrtle-5 with biases trained by Adam at 1e-3 in batches of 50 on training and
#: validation points with their true labels.
EPOCHS, FILTERS, BATCH, RATE = 20, 32, 50, 1e-3


class ReferenceNetwork(Study):
    """The network whose AGOP at the training images stands for the target of an image task, and its test error."""

    def of(self, setting: Setting) -> Computation:
        """The job of a task, whatever is trained on it."""
        return self.job(**setting._replace(width=0, noise=0.0)._asdict(), seed=0)

    def run(self, job: Mapping[str, Any]) -> Row:
        found = images(Setting(**{name: job[name] for name in Setting._fields}))
        model = myrtle5(FILTERS, 1, found.shape[0], init="kaiming_normal", bias=True, seed=job["seed"])
        points = torch.cat(found.x[:2]), torch.cat(found.y[:2])[:, None]
        training.train(
            *(model, nn.MSELoss(), points, lambda weights: torch.optim.Adam(weights, lr=RATE)),
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=job["seed"],
            progress=False,
        )
        with torch.no_grad():
            wrong = (model(found.x[2])[:, 0] * found.y[2] <= 0).double().mean()
        return {"target": agop(model, found.x[0]).double(), "error": float(wrong), "data": found.origin}


class TaskStudy(Study):
    """A study whose jobs name a setting; those of image tasks need the reference network."""

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        setting = Setting(**job["setting"])
        return [ReferenceNetwork().of(setting)] if TASKS[setting.task].images else []
