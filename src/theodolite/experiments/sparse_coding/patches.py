"""Real images: hidden pixels predicted by dictionaries of both objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite import data
from theodolite.experiments import Experiment, Params, at_most, measured, rows
from theodolite.experiments.lab.datasets import Source, load_or
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Column, Value, chosen, values_of
from theodolite.experiments.sparse_coding.baselines import mini_batch
from theodolite.experiments.sparse_coding.planted import OBJECTIVES
from theodolite.experiments.sparse_coding.recovery import NAMES
from theodolite.measures.dictionary import LearningSettings, hidden_error, learn_dictionaries
from theodolite.measures.dictionary.learning import initial_dictionary
from theodolite.results import Row

SIDE = 8
#: Sets of hidden pixels that an imputation error is averaged over.
MASKS = 10
OTHER = "scikit-learn, mini-batch"
METHODS = (*NAMES.values(), OTHER)
#: Noise that is added to the pixels, in units of their standard deviation about the mean image.
CLEAN, NOISY = 0.0, 0.5


@dataclass(frozen=True)
class Patching:
    """Patches to learn from and to test on, and how. `source`: a data set, or digits where its files are not there."""

    name: Literal["digits", "cifar10"] = "digits"
    required: bool = False
    samples: int = 1000
    tested: int = 350
    sparsity: int = 5
    learned: int = 64
    noise: float = CLEAN
    batch: int = 200
    epochs: int = 25
    learning_rate: float = 3e-3


def patches(study: Patching, seed: int) -> tuple[Tensor, Tensor, str]:
    """Patches (n, 64) to learn from and to test on, of different images and minus the mean patch of the first, and their origin.

    Scaled to a mean square of 1/64 per pixel about the mean, so that a patch has length 1 as planted signals have.
    """
    source: Source = "files" if study.required else "either"
    found = load_or(lambda: data.load(study.name), lambda: data.load("digits"), source)
    generator = torch.Generator().manual_seed(seed)
    known = _cut(found.x_train, study.samples, generator) / found.peak
    tested = _cut(found.x_test, study.tested, generator) / found.peak
    mean = known.mean(0)
    scale = (known - mean).square().sum(1).mean().sqrt()
    known, tested = ((part - mean) / scale for part in (known, tested))
    level = study.noise / SIDE
    noisy = [part + level * torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in (known, tested)]
    return noisy[0], noisy[1], found.name


def _cut(images: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n grey squares (n, 64), at random places of random images, each image at most once while there are enough."""
    images = images.double().mean(1)
    chosen_images = torch.randperm(max(n, len(images)), generator=generator)[:n] % len(images)
    rows, columns = (torch.randint(0, images.shape[axis] - SIDE + 1, (n,), generator=generator) for axis in (1, 2))
    inside = torch.arange(SIDE)
    down, across = (rows[:, None] + inside)[:, :, None], (columns[:, None] + inside)[:, None, :]
    return images[chosen_images[:, None, None], down, across].flatten(1)


def learned_by(method: str, study: Patching, signals: Tensor, seed: int) -> Tensor:
    """Atoms (p', 64) from patches, started at some of them."""
    start = initial_dictionary(signals, study.learned, seed=seed)
    if method == OTHER:
        return mini_batch(signals, start, study.sparsity, batch=study.batch, epochs=study.epochs, seed=seed)
    objective = next(objective for objective in OBJECTIVES if NAMES[objective] == method)
    settings = LearningSettings(study.sparsity, objective, batch_size=study.batch, learning_rate=study.learning_rate)
    return learn_dictionaries(signals, start[None], settings, epochs=study.epochs, seeds=(seed,)).components[0]


def by_size(column: str, **where: Any) -> Column:
    """Means over the seeds by the number of atoms, the most last."""
    return rows(**where).by("learned").each(rows.mean(column))


def ratio(noise: float) -> Value:
    """Masking's imputation error over the baseline's, with most atoms."""
    masked, base = (by_size("imputation", noise=noise, method=method).last() for method in ("masking", "baseline"))
    return masked / base


def best(noise: float, method: str) -> Value:
    """The lowest imputation error over the numbers of atoms, as a share of what the mean image leaves."""
    error, left = (by_size(column, noise=noise, method=method) for column in ("imputation", "of_mean"))
    return (error / left).min()


class Patches(Experiment):
    """Real images: which dictionary predicts the pixels it did not see.

    Grey 8 × 8 patches less their mean, clean and with noise half as strong as they are; a tenth of the pixels of held-out patches
    is hidden and predicted from the others by 5 atoms. Masking, the baseline and scikit-learn's mini-batch learning start at
    the same patches.
    """

    id = "sparse-coding/real-patches"
    where = "beside Wu 2023, section 2.4"
    sizes = {
        "tiny": Params(study=Patching(samples=600, tested=300, batch=100), atoms=(64, 128, 256), seeds=1),
        "laptop": Params(study=Patching("cifar10", samples=4000, tested=1000, epochs=100), atoms=(64, 128, 256, 512), seeds=2),
        "paper": Params(study=Patching("cifar10", True, 20_000, 5000, epochs=200), atoms=(64, 128, 256, 512, 1024), seeds=5),
    }
    departs = (
        "Not in the source, which has planted signals alone. At tiny size whole digits of scikit-learn are the patches; they "
        "also stand for CIFAR-10 below paper size where its files are not there. The learning rate is 0.003."
    )
    claims = (
        {
            "noisy patches, most atoms: masking's error on hidden pixels over the baseline's": at_most(1.0, ratio(NOISY)),
            "clean patches, most atoms: masking's error on hidden pixels over the baseline's": at_most(1.0, ratio(CLEAN)),
        },
        {
            f"{word} patches: lowest error on hidden pixels, as a share of the variance: {method}": measured(best(noise, method))
            for noise, word in ((NOISY, "noisy"), (CLEAN, "clean"))
            for method in METHODS
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for noise, size, method, seed in product((CLEAN, NOISY), p.atoms, METHODS, range(p.seeds)):
            yield {"study": asdict(replace(p.study, learned=size, noise=noise)), "method": method, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        study, method, seed = Patching(**job["study"]), job["method"], job["seed"]
        known, tested, origin = patches(study, seed)
        atoms = learned_by(method, study, known, seed)
        held = hidden_error(tested, atoms, study.sparsity, masks=MASKS, seed=seed)
        seen = hidden_error(known, atoms, study.sparsity, masks=1, seed=seed)
        yield {
            "method": method,
            "data": origin,
            "noise": study.noise,
            "learned": study.learned,
            "seed": seed,
            "imputation": held.value,
            "of_mean": held.baseline,
            "reconstruction": held.reconstruction,
            "train_reconstruction": seen.reconstruction,
        }

    def draw(self, rows: list[Row]) -> Any:
        table = [{**row, "share": row["imputation"] / row["of_mean"]} for row in rows]
        origin, noisy = ", ".join(values_of(rows, "data")), chosen(table, noise=NOISY)
        rest: dict[str, Any] = {"by": "method", "log": "x", "xlabel": "learned atoms", "ylabel": "squared error / variance"}
        names = {"ylabel": "squared error per pixel", "title": "noisy: training patches, rebuilt", "labels": "none"}
        hidden = [
            curves(chosen(table, noise=noise), "learned", "share", title=f"{origin}, {word}: hidden pixels")
            for noise, word in ((CLEAN, "clean"), (NOISY, "noisy"))
        ]
        rebuilt = curves(noisy, "learned", "train_reconstruction", **names)
        return draw_panels(*hidden, rebuilt, size=(4.3, 3.5), labels="legend", **rest)
