"""Not in the source: dictionary learning of other packages, patches of real images, and a score without ground truth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite import data
from theodolite.experiments import Experiment, Params, Reported, at_least, at_most, equal, measured, rows, sizes
from theodolite.experiments.claims import Measure
from theodolite.experiments.lab.datasets import Source, load_or
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.query import Column, Value, chosen, values_of
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, Init, OnTrained, Setting, errors_of, job_of, planted
from theodolite.experiments.sparse_coding.recovery import FULL, NAMES, STARTS, TINY, mean_and_spread, over_realized
from theodolite.measures import dictionary
from theodolite.measures.dictionary.learning import initial_dictionary
from theodolite.results import Row

# Other packages


def scikit_learn(signals: Tensor, start: Tensor, sparsity: int, *, batch: int, epochs: int, seed: int, online: bool) -> Tensor:
    """scikit-learn's alternation of codes and atoms, over all signals or online, in a tenth of the passes and at least 10.

    It has no number of atoms per signal: the penalty of its Lasso is 1.2/√d, as is usual for unit atoms.
    """
    from sklearn import decomposition
    from sklearn.exceptions import ConvergenceWarning

    atoms, passes = F.normalize(start), max(10, epochs // 10)
    shared = {"alpha": 1.2 / signals.shape[1] ** 0.5, "fit_algorithm": "cd", "dict_init": atoms.numpy(), "random_state": seed}
    if online:
        own = {"batch_size": batch, "max_no_improvement": None, "tol": 0.0, "shuffle": False}
        learner = decomposition.MiniBatchDictionaryLearning(len(atoms), max_iter=passes, **shared, **own)
    else:
        codes = dictionary.orthogonal_matching_pursuit(signals, atoms, sparsity).numpy()
        learner = decomposition.DictionaryLearning(len(atoms), max_iter=passes, code_init=codes, **shared)
    with warnings.catch_warnings():
        # a fixed number of passes is wanted, whether they suffice or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner.fit(signals.numpy())
    return torch.from_numpy(learner.components_)


def spams(signals: Tensor, start: Tensor, sparsity: int, *, batch: int, epochs: int, seed: int) -> Tensor:
    """spams.trainDL with its own matching pursuit, `epochs` passes."""
    steps = epochs * -(-len(signals) // batch)
    found = import_module("spams").trainDL(
        np.asfortranarray(signals.numpy().T),
        D=np.asfortranarray(F.normalize(start).numpy().T),
        K=len(start),
        lambda1=sparsity,
        mode=3,
        iter=steps,
        batchsize=batch,
        numThreads=1,
        verbose=False,
    )
    return torch.from_numpy(np.ascontiguousarray(found.T))


OTHERS: dict[str, Callable[..., Tensor]] = {
    "scikit-learn, mini-batch": partial(scikit_learn, online=True),
    "scikit-learn, alternating": partial(scikit_learn, online=False),
    "spams": spams,
}


def installed(method: str) -> bool:
    """Whether the package of a method is there."""
    return method != "spams" or find_spec("spams") is not None


#: The fleet of Figure 2.1 at tiny size.
TINY_FLEET: tuple[tuple[Init, int], ...] = (("samples", 0), ("local", 0))


def error_of(method: str) -> Measure:
    """Mean recovery error with as many learned atoms as signals, or that the package is not there."""
    mine = rows(method=method, place=FULL)
    return lambda table: (
        mine["final"].reduce(mean_and_spread)(table) if mine.share(state="trained")(table) == 1 else "not installed"
    )


class Baselines(OnTrained, Experiment):
    """Both objectives beside the dictionary learning of scikit-learn and spams.

    Recovery error of planted atoms by the number of learned ones: the two objectives, scikit-learn's two algorithms (which
    decode by the Lasso while they learn) and spams, all from the same noisy samples.
    """

    id = "sparse-coding/baselines"
    where = "beside Wu 2023, Figure 2.1 (a)"
    sizes = {
        "tiny": Params(settings=over_realized(TINY, 1, 2, 5), fleets=(TINY_FLEET,)),
        "laptop": Params(settings=over_realized(Setting(), 1, 2, 5), fleets=((("samples", 0),),)),
        "paper": Params(settings=over_realized(Setting(), 1, 2, 3, 4, 5), fleets=tuple((("samples", s),) for s in range(5))),
    }
    departs = (
        "Not in the source. The Lasso's penalty is 1.2/√d; scikit-learn's algorithms have a tenth of the passes. At tiny size "
        "100 atoms in 50 dimensions, 500 signals and 100 passes."
    )
    claims = {
        f"recovery error with as many learned atoms as signals: {name}": measured(error_of(name))
        for name in (*NAMES.values(), *OTHERS)
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for place, setting in p.settings:
            for runs, objective in product(p.fleets, OBJECTIVES):
                yield job_of(setting, objective, runs, place=place, method=NAMES[objective])
            for seed, method in product(range(len(p.fleets)), OTHERS):
                yield {"setting": asdict(setting), "method": method, "place": place, "seed": seed}

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        mark = {"method": job["method"], "place": job["place"], "learned": setting.learned}
        if job["method"] in OTHERS:
            yield {**mark, "seed": job["seed"], **compared(job["method"], setting, job["seed"])}
            return
        for row in trained[0]:
            if row["init"] == "samples":
                yield {**mark, "state": "trained", **{name: row[name] for name in ("seed", *COLUMNS)}}

    def draw(self, rows: list[Row]) -> Any:
        drawn = chosen(rows, state="trained")
        look: dict[str, Any] = {"by": "method", "xlabel": "learned atoms p'", "band": "std"}
        return draw_panels(
            curves(drawn, "learned", "final", labels="legend", ylabel="recovery error (cosine)").set(ylim=(0.0, None)),
            curves(drawn, "learned", "score", labels="none", ylabel="error per hidden coordinate", title="held-out signals"),
            size=(4.8, 3.6),
            **look,
        )


COLUMNS = ("initial", "final", "score", "reconstruction")


def compared(method: str, setting: Setting, seed: int) -> Row:
    """Another method's errors, as `trained` measures ours."""
    if not installed(method):
        return {"state": "not installed", **dict.fromkeys(COLUMNS, math.nan)}
    run = planted(setting, "samples", seed)
    learned = OTHERS[method](run.signals, run.start, setting.sparsity, batch=setting.batch, epochs=setting.epochs, seed=seed)
    return {"state": "trained", **errors_of(run, learned, setting, seed)}


# Real images: hidden pixels predicted by dictionaries of both objectives

SIDE = 8
#: Sets of hidden pixels that an imputation error is averaged over.
MASKS = 10
METHODS = (*NAMES.values(), "scikit-learn, mini-batch")
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
    both = [
        _cut(images, n, generator) / found.peak for images, n in ((found.x_train, study.samples), (found.x_test, study.tested))
    ]
    mean = both[0].mean(0)
    scale = (both[0] - mean).square().sum(1).mean().sqrt()
    noise = [study.noise / SIDE * torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in both]
    known, tested = ((part - mean) / scale + added for part, added in zip(both, noise, strict=True))
    return known, tested, found.name


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
    if method in OTHERS:
        return OTHERS[method](signals, start, study.sparsity, batch=study.batch, epochs=study.epochs, seed=seed)
    objective = next(objective for objective in OBJECTIVES if NAMES[objective] == method)
    settings = dictionary.LearningSettings(study.sparsity, objective, batch_size=study.batch, learning_rate=study.learning_rate)
    return dictionary.learn_dictionaries(signals, start[None], settings, epochs=study.epochs, seeds=(seed,)).components[0]


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
    claims = {
        "noisy patches, most atoms: masking's error on hidden pixels over the baseline's": at_most(1.0, ratio(NOISY)),
        "clean patches, most atoms: masking's error on hidden pixels over the baseline's": at_most(1.0, ratio(CLEAN)),
        **{
            f"{word} patches: lowest error on hidden pixels, as a share of the variance: {method}": measured(best(noise, method))
            for noise, word in ((NOISY, "noisy"), (CLEAN, "clean"))
            for method in METHODS
        },
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for noise, size, method, seed in product((CLEAN, NOISY), p.atoms, METHODS, range(p.seeds)):
            yield {"study": asdict(replace(p.study, learned=size, noise=noise)), "method": method, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        study, method, seed = Patching(**job["study"]), job["method"], job["seed"]
        known, tested, origin = patches(study, seed)
        atoms = learned_by(method, study, known, seed)
        held = dictionary.hidden_error(tested, atoms, study.sparsity, masks=MASKS, seed=seed)
        seen = dictionary.hidden_error(known, atoms, study.sparsity, masks=1, seed=seed)
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


# The hidden-coordinate score: which dictionary to trust, how many atoms, how many per signal


def advantages(column: str) -> Column:
    """Masking's value over the baseline's, less 1, for each start."""
    base, masked = (rows(objective=objective).mean(column) for objective in OBJECTIVES)
    return rows(part="objectives").by("init").each(masked / base - 1)


#: The row of the search with the lowest score.
preferred = rows(part="search").measure(min, key=lambda row: row["hidden_error"])
SEARCH = Setting(noise=0.03, samples=4000, learning_rate=1e-2)


def _fleets(seeds: int) -> tuple[Any, ...]:
    return tuple(((init, seed),) for init in ("samples", "local") for seed in range(seeds))


def extreme(rows: list[Row]) -> bool:
    """Whether the reconstruction of the training signals is best with most atoms and most of them per signal."""
    table = chosen(rows, part="search")
    best = min(table, key=lambda row: row["train_reconstruction"])
    return all(best[name] == max(row[name] for row in table) for name in ("n_components", "sparsity"))


class Score(OnTrained, Experiment):
    """A score without ground truth: the error of hidden coordinates prefers the dictionary nearer the truth.

    On held-out signals the masked dictionary predicts hidden coordinates better, although the baseline rebuilds its own
    training signals better. The same score compares numbers of atoms and of atoms per signal, where reconstruction always
    wants more.
    """

    id = "sparse-coding/score"
    where = "beside Wu 2023, Figure 2.1 at p' = n"
    sizes = sizes(
        {
            "setting": (replace(TINY, learned=FULL * TINY.atoms), Setting(), Setting()),
            "fleets": ((TINY_FLEET,), _fleets(1), _fleets(5)),
            "search": (
                Setting(dim=32, atoms=40, sparsity=3, noise=0.06, samples=500, batch=100, epochs=40, learning_rate=1e-2),
                replace(SEARCH, epochs=100),
                replace(SEARCH, epochs=200),
            ),
            "atoms": ((20, 40, 80), (100, 200, 400), (100, 150, 200, 300, 400, 800)),
            "sparsities": ((1, 2, 3, 4), (3, 4, 5, 6, 8), (3, 4, 5, 6, 7, 8)),
        }
    )
    departs = (
        "Not in the source. Sizes and sparsities are compared on signals with less noise than the figures' and with a larger "
        "learning rate. At tiny size 100 atoms in 50 dimensions and 100 passes; the search has 40 atoms in 32 dimensions."
    )
    claims = (
        at_most(
            0.0,
            "held-out hidden coordinates prefer the masked dictionary (score over the baseline's, less 1; larger of the starts)",
            advantages("score").max(),
            reported=Reported.theory("lower", "Wu 2023, section 2.3"),
        ),
        at_least(
            0.0,
            "reconstruction of the training signals prefers the baseline (masked over baseline, less 1; smaller of the starts)",
            advantages("reconstruction").min(),
            reported=Reported.theory("higher", "Wu 2023, section 2.3"),
        ),
        {
            "reconstruction wants most atoms and most per signal": equal(True, extreme),
            "atoms with the lowest score, over the true number": measured(
                preferred.then(lambda row: row["n_components"] / row["atoms"])
            ),
            "atoms per signal with the lowest score, less the true number": measured(
                preferred.then(lambda row: float(row["sparsity"] - row["true_sparsity"]))
            ),
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for runs, objective in product(p.fleets, OBJECTIVES):
            yield job_of(p.setting, objective, runs, part="objectives")
        for size in p.atoms:
            yield {"part": "search", "setting": asdict(p.search), "atoms": size, "sparsities": list(p.sparsities), "seed": 0}

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        if job["part"] == "objectives":
            yield from ({"part": job["part"], **row} for row in trained[0])
            return
        setting = Setting(**job["setting"])
        signals = planted(setting, "samples", job["seed"]).signals
        found = dictionary.choose_dictionary(
            signals.numpy(),
            [job["atoms"]],
            job["sparsities"],
            seed=job["seed"],
            max_iter=setting.epochs,
            batch_size=setting.batch,
            learning_rate=setting.learning_rate,
        )
        for row in found.rows():
            yield {"part": job["part"], "atoms": setting.atoms, "true_sparsity": setting.sparsity, **row}

    def draw(self, rows: list[Row]) -> Any:
        table = [{**row, "curve": f"{NAMES[row['objective']]}, {STARTS[row['init']]}"} for row in chosen(rows, part="objectives")]
        names: dict[str, Any] = {"xlabel": "error per coordinate of training signals", "title": "two objectives, p' = n"}
        names["ylabel"] = "error per hidden coordinate, held out"
        search = [{**row, "learned_atoms": row["n_components"]} for row in chosen(rows, part="search")]
        true = float(search[0]["true_sparsity"])
        look: dict[str, Any] = {"by": "learned_atoms", "labels": "legend", "ylabel": "squared error per coordinate"}
        look["xlabel"] = "atoms per signal"
        return draw_panels(
            scatter(table, "reconstruction", "score", by="curve", **names),
            curves(search, "sparsity", "hidden_error", title="held out, hidden", **look).line(x=true, label="true"),
            curves(search, "sparsity", "train_reconstruction", title="training, reconstructed", **look).line(x=true),
            size=(4.2, 3.4),
        )
