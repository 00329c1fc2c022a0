"""Dictionary learning of other packages, on the same signals from the same start."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from theodolite.measures.dictionary import orthogonal_matching_pursuit


def penalty(dim: int) -> float:
    """Of the Lasso, where a method has no number of atoms per signal: 1.2/√d, as is usual for unit atoms."""
    return float(1.2 / dim**0.5)


def mini_batch(signals: Tensor, start: Tensor, sparsity: int, *, batch: int, epochs: int, seed: int) -> Tensor:
    """scikit-learn's online learning, a tenth of the passes and at least 10: each solves for the best atoms so far."""
    from sklearn.decomposition import MiniBatchDictionaryLearning

    learner = MiniBatchDictionaryLearning(
        len(start),
        alpha=penalty(signals.shape[1]),
        fit_algorithm="cd",
        batch_size=batch,
        max_iter=max(10, epochs // 10),
        max_no_improvement=None,
        tol=0.0,
        shuffle=False,
        dict_init=_unit(start).numpy(),
        random_state=seed,
    )
    return _fitted(learner, signals)


def alternating(signals: Tensor, start: Tensor, sparsity: int, *, batch: int, epochs: int, seed: int) -> Tensor:
    """scikit-learn's alternation of codes and atoms over all signals, a tenth of the passes and at least 10."""
    from sklearn.decomposition import DictionaryLearning

    atoms = _unit(start)
    learner = DictionaryLearning(
        len(atoms),
        alpha=penalty(signals.shape[1]),
        fit_algorithm="cd",
        max_iter=max(10, epochs // 10),
        dict_init=atoms.numpy(),
        code_init=orthogonal_matching_pursuit(signals, atoms, sparsity).numpy(),
        random_state=seed,
    )
    return _fitted(learner, signals)


def spams(signals: Tensor, start: Tensor, sparsity: int, *, batch: int, epochs: int, seed: int) -> Tensor:
    """spams.trainDL with its own matching pursuit, `epochs` passes."""
    import numpy as np

    steps = epochs * -(-len(signals) // batch)
    found = import_module("spams").trainDL(
        np.asfortranarray(signals.numpy().T),
        D=np.asfortranarray(_unit(start).numpy().T),
        K=len(start),
        lambda1=sparsity,
        mode=3,
        iter=steps,
        batchsize=batch,
        numThreads=1,
        verbose=False,
    )
    return torch.from_numpy(np.ascontiguousarray(found.T))


METHODS: dict[str, Callable[..., Tensor]] = {
    "scikit-learn, mini-batch": mini_batch,
    "scikit-learn, alternating": alternating,
    "spams": spams,
}
_NEEDS = {"spams": "spams"}


def installed(method: str) -> bool:
    """Whether the package of a method is there."""
    return method not in _NEEDS or find_spec(_NEEDS[method]) is not None


def _fitted(learner: Any, signals: Tensor) -> Tensor:
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # a fixed number of passes is wanted, whether they suffice or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner.fit(signals.numpy())
    return torch.from_numpy(learner.components_)


def _unit(atoms: Tensor) -> Tensor:
    lengths: Tensor = atoms.norm(dim=1, keepdim=True)
    return atoms / lengths.clamp_min(1e-12)
