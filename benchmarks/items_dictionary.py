"""Sparse coding: matching pursuit of many signals, and the training of an over-realised dictionary, beside other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import theodolite as th
from harness import Row, Sample, Settings, Timing, Work, clock, race, repeats, try_row
from quiet import Watch
from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.measures.dictionary import LearningSettings, learn_dictionaries

DIM, SPARSITY, BATCH, RATE = 100, 5, 200, 1e-3


@dataclass(frozen=True)
class Coding:
    """Signals (n, d) to be coded by atoms (p, d)."""

    signals: np.ndarray
    atoms: np.ndarray


def pursuit(settings: Settings) -> Iterator[Row]:
    """Orthogonal matching pursuit of 1000 signals in 100 dimensions by 1000 atoms, five non-zeros, float64; the aim is ten times
    faster than scikit-learn. The unit in place of a gradient is the product of signals and atoms, with which everybody begins.
    `error` is the largest difference from scikit-learn's codes, relative to the largest
    entry. Making the Gram matrix is part of the work."""
    n, p = settings.pick(1000, 50), settings.pick(1000, 60)
    atoms = planted_dictionary(p, DIM, seed=0).double()
    coding = Coding(planted_samples(atoms, n, SPARSITY, noise=0.1, seed=1).signals.numpy(), atoms.numpy())
    truth = _sklearn_gram(coding)
    work = f"{n} signals, {p} atoms, d = {DIM}, k = {SPARSITY}, float64"
    rows = {who: Row("omp", work, who) for who in PURSUITS}
    ready: dict[str, Work] = {}
    for who, row in rows.items():
        try_row(row, partial(_prove, who=who, coding=coding, truth=truth, ready=ready))
    Y, D = torch.from_numpy(coding.signals), torch.from_numpy(coding.atoms)
    for who, timing in race(partial(torch.matmul, Y, D.T), ready, settings).items():
        rows[who].charge(timing)
        rows[who].say(f"{timing.gradients * rows[who].details['gradient_seconds']:.3g} s")
    yield from rows.values()


def _prove(row: Row, *, who: str, coding: Coding, truth: np.ndarray, ready: dict[str, Work]) -> None:
    found = PURSUITS[who](coding)
    row.error = float(np.abs(found - truth).max() / np.abs(truth).max())
    ready[who] = partial(PURSUITS[who], coding)


def _ours(coding: Coding) -> np.ndarray:
    found: np.ndarray = th.orthogonal_matching_pursuit(coding.signals, coding.atoms, SPARSITY)
    return found


def _sklearn_gram(coding: Coding) -> np.ndarray:
    from sklearn.linear_model import orthogonal_mp_gram

    gram, products = coding.atoms @ coding.atoms.T, coding.atoms @ coding.signals.T
    return np.asarray(orthogonal_mp_gram(gram, products, n_nonzero_coefs=SPARSITY)).T


def _sklearn_encode(coding: Coding) -> np.ndarray:
    from sklearn.decomposition import sparse_encode

    return np.asarray(sparse_encode(coding.signals, coding.atoms, algorithm="omp", n_nonzero_coefs=SPARSITY))


def _spams(coding: Coding) -> np.ndarray:
    import spams

    columns = (np.asfortranarray(matrix.T) for matrix in (coding.signals, coding.atoms))
    return np.asarray(spams.omp(*columns, L=SPARSITY, eps=0.0, numThreads=torch.get_num_threads()).todense()).T


PURSUITS: dict[str, Callable[[Coding], np.ndarray]] = {
    "ours": _ours,
    "scikit-learn orthogonal_mp_gram": _sklearn_gram,
    "scikit-learn sparse_encode": _sklearn_encode,
    "spams.omp": _spams,
}


@dataclass(frozen=True)
class Planted:
    """The data of Figure 2.1a: signals of `true` atoms in noise as strong as they are, and where the atoms start."""

    true: np.ndarray
    signals: np.ndarray
    start: np.ndarray
    epochs: int


def training(settings: Settings) -> Iterator[Row]:
    """The training of Figure 2.1a (d = 100, 200 true atoms of which five make a signal, 1000 learned, 1000 signals, noise of
    variance 1/d): 2500 steps of Adam with batches of 200 in float64; the aim is two minutes on two cores. `error` is the recovery
    error (cosine) of the true atoms, so that speed and quality stand beside each other; the others learn by reconstruction, with
    as many passes over the signals, from the same start. scikit-learn learns by the Lasso, penalty 0.1, which was not tuned. The
    unit in place of a gradient is the product of a batch and the atoms."""
    true, learned = settings.pick(200, 40), settings.pick(1000, 60)
    planted = _planted(true, learned, settings)
    work = f"{true} true atoms, {learned} learned, {planted.epochs} passes of {len(planted.signals)} signals"
    for who, learn in LEARNERS.items():
        yield try_row(Row("dictionary", work, who), partial(_train, learn=learn, planted=planted, settings=settings))


def _planted(true: int, learned: int, settings: Settings) -> Planted:
    n = settings.pick(1000, 400)
    atoms = planted_dictionary(true, DIM, seed=0).double()
    drawn = planted_samples(atoms, n + learned, SPARSITY, noise=DIM**-0.5, seed=1).signals.double().numpy()
    start = drawn[n:] / np.linalg.norm(drawn[n:], axis=1, keepdims=True)
    return Planted(atoms.numpy(), drawn[:n], start, settings.pick(500, 2))


def _train(row: Row, *, learn: Callable[[Planted], Any], planted: Planted, settings: Settings) -> None:
    """Once: it takes minutes."""
    unit = partial(torch.matmul, torch.from_numpy(planted.signals[:BATCH]), torch.from_numpy(planted.start).T)
    settings.patience.wait()
    times, watch = repeats(unit), Watch()
    before = clock(unit, times)
    began = time.perf_counter()
    found = learn(planted)
    seconds = time.perf_counter() - began
    after = clock(unit, times)
    row.charge(Timing([Sample(seconds, (before + after) / 2, watch.disturbed())]))
    row.error = th.recovery_error(planted.true, np.asarray(found))
    row.details["seconds"] = seconds
    row.say(f"{seconds:.3g} s")


def _learn_ours(planted: Planted, objective: Any) -> np.ndarray:
    how = LearningSettings(SPARSITY, objective=objective, batch_size=BATCH, learning_rate=RATE, shuffle=False)
    start = torch.from_numpy(planted.start)[None]
    return learn_dictionaries(torch.from_numpy(planted.signals), start, how, epochs=planted.epochs).components[0].numpy()


def _learn_sklearn(planted: Planted) -> np.ndarray:
    from sklearn.decomposition import MiniBatchDictionaryLearning

    learner = MiniBatchDictionaryLearning(
        len(planted.start),
        max_iter=planted.epochs,
        batch_size=BATCH,
        dict_init=planted.start,
        fit_algorithm="cd",
        transform_algorithm="omp",
        transform_n_nonzero_coefs=SPARSITY,
        alpha=0.1,
        tol=0.0,
        max_no_improvement=None,
        random_state=0,
    )
    return np.asarray(learner.fit(planted.signals).components_)


def _learn_spams(planted: Planted) -> np.ndarray:
    import spams

    found = spams.trainDL(
        np.asfortranarray(planted.signals.T),
        D=np.asfortranarray(planted.start.T),
        K=len(planted.start),
        mode=3,  # at most lambda1 non-zeros
        lambda1=SPARSITY,
        batchsize=BATCH,
        iter=planted.epochs * len(planted.signals) // BATCH,
        numThreads=torch.get_num_threads(),
        verbose=False,
    )
    return np.asarray(found).T


LEARNERS: dict[str, Callable[[Planted], np.ndarray]] = {
    "ours, masked": partial(_learn_ours, objective="masked"),
    "ours, reconstruction": partial(_learn_ours, objective="reconstruction"),
    "scikit-learn MiniBatchDictionaryLearning": _learn_sklearn,
    "spams.trainDL": _learn_spams,
}
