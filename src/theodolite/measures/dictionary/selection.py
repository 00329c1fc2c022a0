"""Choosing the number of atoms and the sparsity by what they predict of held-out signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.measures.dictionary.estimator import MaskedDictionaryLearning
from theodolite.progress import counting
from theodolite.results import Outcome, Result, Row


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DictionaryChoice(Result):
    """`n_components` and `sparsity` with the lowest error on hidden coordinates of held-out signals, and the table behind.

    `simplest_components` and `simplest_sparsity`: the smallest dictionary whose error lies within one standard error of the best.
    """

    n_components: int
    sparsity: int
    simplest_components: int
    simplest_sparsity: int
    table: tuple[Row, ...]

    def rows(self) -> list[Row]:
        return list(self.table)

    def sentence(self) -> str:
        best = min(self.table, key=lambda row: row["hidden_error"])
        words = f"{self.n_components} atoms with {self.sparsity} per signal predict hidden coordinates best"
        words += f" (mean squared error {best['hidden_error']:.4g} ± {best['stderr']:.2g})"
        if (self.simplest_components, self.simplest_sparsity) != (self.n_components, self.sparsity):
            words += f"; {self.simplest_components} atoms with {self.simplest_sparsity} are within one standard error"
        return words + "."


def choose_dictionary(
    X: Any,
    n_components: Sequence[int],
    sparsity: Sequence[int],
    *,
    held_out: float = 0.2,
    seed: int = 0,
    progress: bool | None = False,
    **settings: Any,
) -> DictionaryChoice:
    """Fit every pair of `n_components` and `sparsity` to a part of X (n, d) and score it on the rest.

    `settings` go to `MaskedDictionaryLearning`. Rows also tell the error of reconstruction, which always prefers more.
    """
    if "random_state" in settings:
        raise TypeError("choose_dictionary takes seed=, a whole number, instead of random_state=.")
    train, test = split_signals(np.asarray(X), held_out, seed)
    if not len(n_components) or not len(sparsity):
        raise ValueError("n_components and sparsity must each name at least one value.")
    table: list[Row] = []
    with counting("choosing", progress=progress, total=len(n_components) * len(sparsity)) as advance:
        for atoms in n_components:
            for k in sparsity:
                table.append(_judge(train, test, int(atoms), int(k), seed, settings))
                advance(1)
    best = min(table, key=lambda row: row["hidden_error"])
    within = [row for row in table if row["hidden_error"] <= best["hidden_error"] + best["stderr"]]
    simplest = min(within, key=lambda row: (row["n_components"], row["sparsity"]))
    return DictionaryChoice(
        n_components=best["n_components"],
        sparsity=best["sparsity"],
        simplest_components=simplest["n_components"],
        simplest_sparsity=simplest["sparsity"],
        table=tuple(table),
        outcome=Outcome.ESTIMATED,
        seed=seed,
    )


def split_signals(data: NDArray[Any], held_out: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Signals to learn from and signals held out, drawn by the seed; at least one of each."""
    if data.ndim != 2 or len(data) < 2:
        raise ValueError(f"A dictionary needs at least two signals, as rows (n, d). Got shape {data.shape}.")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1. Got {held_out}.")
    order = np.random.default_rng((seed, 3)).permutation(len(data))
    cut = min(len(data) - 1, max(1, round((1 - held_out) * len(data))))
    return data[order[:cut]], data[order[cut:]]


def _judge(train: Any, test: Any, atoms: int, k: int, seed: int, settings: dict[str, Any]) -> Row:
    learner = MaskedDictionaryLearning(atoms, sparsity=k, random_state=seed, **settings)
    learner.fit(train)
    held, seen = learner.hidden_error(test), learner.hidden_error(train)
    return {
        "n_components": atoms,
        "sparsity": k,
        "hidden_error": held.value,
        "stderr": held.stderr,
        "reconstruction": held.reconstruction,
        "train_hidden_error": seen.value,
        "train_reconstruction": seen.reconstruction,
    }
