"""`MaskedDictionaryLearning`: the scikit-learn face of dictionary learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from theodolite.arguments import checked, count, each, either, fraction, integer, shown, whole
from theodolite.measures.dictionary.arrays import without_missing
from theodolite.measures.dictionary.decoding import Decoder, decode, reconstruct
from theodolite.measures.dictionary.hidden import HiddenError, Masks, check_hidden, hidden_count, hidden_error
from theodolite.measures.dictionary.learning import (
    LearnerState,
    LearningSettings,
    Objective,
    Optimizer,
    initial_dictionary,
    learn_batch,
    learn_dictionaries,
    start_seeds,
)
from theodolite.measures.dictionary.matching_pursuit import FROM_ONE, Selection
from theodolite.progress import counting
from theodolite.results import Outcome, Result, Row, fields_of

Floats = NDArray[np.floating[Any]]


@dataclass(eq=False, repr=False)
class MaskedDictionaryLearning(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Learn atoms whose sparse combinations predict the coordinates of a signal that were hidden from it.

    The usual objective, reconstruction, overfits noise as soon as there are more atoms than the data has: a mixture of two
    true atoms lets one coefficient do the work of two. Noise on a hidden coordinate cannot be fitted, so the masked
    objective has no use for such mixtures. Signals are not centred.

    Args:
        n_components: atoms to learn; None takes as many as there are features.
        sparsity: atoms per signal; None takes a tenth of the features, at least 1.
        hidden_fraction: share of the coordinates hidden in a step, at least one of them.
        objective: "masked", or "reconstruction" for the usual one.
        masks: "batch" hides one random set per batch, "sample" one per signal, "cycle" blocks of a fixed order in turn.
        init: "samples", "random" or an array (n_components, n_features).
        n_init: starts, trained side by side; the one that predicts hidden coordinates of the data best is kept.
        max_iter: passes over the data in `fit`.
        batch_size, learning_rate, optimizer: of the steps; "adam" or "sgd", atoms are brought back to unit length after each.
        shuffle: draw the batches anew in each pass.
        decoder: "omp" (matching pursuit with `sparsity` atoms) or "lasso" (½‖y − xD‖² + penalty·‖x‖₁).
        selection: of matching pursuit, "raw" inner products or "normalized" by the lengths of the visible parts of atoms.
        penalty: of the Lasso.
        missing: "error" refuses NaN; "mask" takes NaN as never seen: neither decoded from nor charged.
        score_masks: sets of hidden coordinates that `score` averages over.
        warm_start: `fit` goes on where the last one ended, as if it had never stopped.
        random_state: seed, generator or None.
        verbose: show a bar.

    Attributes:
        components_: atoms of unit length (n_components, n_features).
        n_iter_: passes made.
        n_steps_: steps made.
        loss_curve_: mean loss of each pass.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    >>> from theodolite.data.generators import planted_dictionary, planted_samples
    >>> signals = planted_samples(planted_dictionary(20, 16), 300, 2, noise=0.05).signals.numpy()
    >>> learner = MaskedDictionaryLearning(30, sparsity=2, max_iter=20, random_state=0).fit(signals)
    >>> learner.components_.shape, learner.transform(signals).shape
    ((30, 16), (300, 30))
    """

    n_components: int | None = None
    _: KW_ONLY
    sparsity: int | None = None
    hidden_fraction: float = 0.1
    objective: Objective = "masked"
    masks: Masks = "batch"
    init: Any = "samples"
    n_init: int = 1
    max_iter: int = 500
    batch_size: int = 200
    learning_rate: float = 1e-3
    optimizer: Optimizer = "adam"
    shuffle: bool = True
    decoder: Decoder = "omp"
    selection: Selection = "raw"
    penalty: float = 0.1
    missing: Literal["error", "mask"] = "error"
    score_masks: int = 10
    warm_start: bool = False
    random_state: Any = None
    verbose: bool = False
    components_: Floats = field(init=False)
    loss_curve_: Floats = field(init=False)

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from signals (n_samples, n_features). Ctrl-C keeps what was learned; `warm_start` goes on from there."""
        integer("max_iter", self.max_iter, least=1, wanted=FROM_ONE)
        signals, observed, settings = self._open(X, fresh=not (self.warm_start and hasattr(self, "_state")))
        learned = learn_dictionaries(
            signals.expand(len(self._seeds), -1, -1),
            None,
            settings,
            epochs=self.max_iter,
            seeds=self._seeds,
            observed=observed,
            resume=self._state,
            progress=None if self.verbose else False,
        )
        self._keep(learned.state, learned.losses, signals, observed, settings)
        if not learned.outcome.good:
            raise ArithmeticError(f"Learning stopped after pass {self.n_iter_}: {learned.outcome.value}.")
        if learned.interrupted:
            raise KeyboardInterrupt
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One step on a batch of signals; the first call starts from it."""
        signals, observed, settings = self._open(X, fresh=not hasattr(self, "_state"))
        known = None if observed is None else observed[None]
        state, loss = learn_batch(self._state, signals, settings, seeds=self._seeds, observed=known)
        self._keep(state, loss[None], signals, observed, settings)
        return self

    def transform(self, X: Any) -> Floats:
        """Codes (n_samples, n_components), decoded from all coordinates that are there."""
        signals, observed, atoms = self._ready(X)
        codes = self._decode(signals, observed, atoms)
        return np.asarray((codes if isinstance(codes, Tensor) else codes.dense(len(atoms)))[0].numpy())

    def inverse_transform(self, X: Any) -> Floats:
        """Signals (n_samples, n_features) of codes (n_samples, n_components)."""
        check_is_fitted(self)
        codes = np.asarray(X)
        if codes.ndim != 2 or codes.shape[1] != len(self.components_):
            raise ValueError(f"codes must be (n_samples, {len(self.components_)}). Got {codes.shape}.")
        return np.asarray(codes @ self.components_)

    def reconstruct(self, X: Any) -> Floats:
        """The signals as their codes say them: denoised, and with missing values filled where `missing="mask"`."""
        signals, observed, atoms = self._ready(X)
        return np.asarray(reconstruct(self._decode(signals, observed, atoms), atoms[None])[0].numpy())

    def impute(self, X: Any) -> Floats:
        """The data with its missing values, and only those, replaced by what the codes of the rest say."""
        signals, observed, _ = self._ready(X)
        return signals.numpy() if observed is None else np.where(observed.numpy(), signals.numpy(), self.reconstruct(X))

    def hidden_error(self, X: Any) -> HiddenError:
        """Mean squared error per hidden coordinate on these signals, with its standard error; lower is better."""
        signals, observed, atoms = self._ready(X)
        return self._hidden_error(signals, observed, atoms, self._settings(signals.shape[1]))

    def score(self, X: Any, y: Any = None) -> float:
        """Minus the mean squared error per hidden coordinate: higher is better, as `GridSearchCV` wants it.

        Needs no ground truth; on signals that were not trained on it chooses `n_components` and `sparsity`.
        """
        return -self.hidden_error(X).value

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "mask"
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _read(self, X: Any, *, reset: bool) -> tuple[Tensor, Tensor | None]:
        """Signals with zeros where missing, and what is there (None: everything)."""
        either("missing", self.missing, ("error", "mask"))
        finite: Any = "allow-nan" if self.missing == "mask" else True
        try:
            array = validate_data(self, X, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite=finite)
        except ValueError as error:
            if self.missing == "error" and "NaN" in str(error):
                first = str(error).splitlines()[0]  # scikit-learn goes on with advice for other estimators
                raise ValueError(f"{first} missing='mask' learns from the entries that are there.") from None
            raise
        return without_missing(array)

    def _open(self, X: Any, *, fresh: bool) -> tuple[Tensor, Tensor | None, LearningSettings]:
        """Signals to learn from, what is there of them, and the settings; a fresh start is made, or the old one kept."""
        signals, observed = self._read(X, reset=fresh)
        if observed is not None and not observed.any():
            raise ValueError("Every entry is missing.")
        dim, settings = signals.shape[1], self._settings(signals.shape[1])
        atoms = self._count(dim)
        if fresh:
            integer("n_init", self.n_init, least=1, wanted=FROM_ONE)
            settings.check(len(signals), dim, atoms)
            if not (self.random_state is None or hasattr(self.random_state, "randint")):
                integer("random_state", self.random_state, least=0, wanted="a whole number, a generator or None")
            if self.n_init > 1:
                check_hidden(dim, atoms, settings.sparsity, self.hidden_fraction, self.score_masks, settings.decoder)
            self._seeds = start_seeds(self.random_state, self.n_init)
            starts = [initial_dictionary(signals, atoms, self.init, seed=seed) for seed in self._seeds]
            self._state, self.loss_curve_ = LearnerState.begin(torch.stack(starts)), np.empty(0)
        now, before = (self.n_init, atoms), tuple(self._state.components.shape[:2])
        if now != before:
            raise ValueError(
                f"Learning began with n_init={before[0]} and {before[1]} atoms; it cannot go on with n_init={now[0]} and "
                f"{now[1]}. Fit a fresh estimator (sklearn.base.clone), or set warm_start=False."
            )
        return signals, observed, settings

    def _settings(self, dim: int) -> LearningSettings:
        atoms = self._count(dim)
        visible = dim - hidden_count(dim, self.hidden_fraction) if self.objective == "masked" else dim
        chosen = min(max(1, dim // 10), atoms, visible) if self.sparsity is None else self.sparsity
        given = {setting.name: getattr(self, setting.name) for setting in fields(LearningSettings)}
        return LearningSettings(**{**given, "sparsity": chosen})

    def _count(self, dim: int) -> int:
        atoms = dim if self.n_components is None else self.n_components
        return integer("n_components", atoms, least=1, wanted=f"{FROM_ONE}, or None")

    def _keep(
        self, state: LearnerState, losses: Tensor, signals: Tensor, observed: Tensor | None, settings: LearningSettings
    ) -> None:
        """Note where learning stands, and losses (passes, starts); the components are those of the start that predicts best."""
        best = 0
        if len(self._seeds) > 1:
            errors = [self._hidden_error(signals, observed, atoms, settings).value for atoms in state.components]
            best = int(np.argmin(errors))
        self._state = state
        self.components_ = state.components[best].numpy().copy()
        self.loss_curve_ = np.concatenate([self.loss_curve_, losses[:, best].double().numpy()])
        self.n_iter_, self.n_steps_ = max(state.epoch, 1), state.step

    def _ready(self, X: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        check_is_fitted(self)
        signals, observed = self._read(X, reset=False)
        return signals, observed, torch.from_numpy(self.components_).to(signals.dtype)

    def _decode(self, signals: Tensor, observed: Tensor | None, atoms: Tensor) -> Any:
        settings = self._settings(signals.shape[1])
        settings.check(len(signals), signals.shape[1], len(atoms))
        seen = None if observed is None else observed[None]
        return decode(signals[None], atoms[None], settings.sparsity, seen, self.decoder, self.selection, self.penalty)

    def _hidden_error(self, signals: Tensor, observed: Tensor | None, atoms: Tensor, settings: LearningSettings) -> HiddenError:
        given = fields_of(self, "hidden_fraction decoder selection penalty")
        masks, seed = count("score_masks", self.score_masks), self._seeds[0]
        return hidden_error(signals, atoms, settings.sparsity, masks=masks, observed=observed, seed=seed, **given)


# Choosing the number of atoms and the sparsity by what they predict of held-out signals.


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


@checked(n_components=each(count), sparsity=each(count), held_out=fraction, seed=whole)
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
    train, test = split_signals(_as_signals(X), held_out, seed)
    table: list[Row] = []
    with counting("choosing", progress=progress, total=len(n_components) * len(sparsity)) as advance:
        for atoms in n_components:
            for k in sparsity:
                learner = MaskedDictionaryLearning(int(atoms), sparsity=int(k), random_state=seed, **settings).fit(train)
                held, seen = learner.hidden_error(test), learner.hidden_error(train)
                row: Row = {"n_components": int(atoms), "sparsity": int(k), "hidden_error": held.value}
                row |= fields_of(held, "stderr reconstruction")
                table.append(row | {"train_hidden_error": seen.value, "train_reconstruction": seen.reconstruction})
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


def _as_signals(X: Any) -> NDArray[Any]:
    """X as an array of numbers; NaN is left to the estimator, which may take it for what is missing."""
    if getattr(X, "is_meta", False):
        raise ValueError(f"X must hold numbers. Got {shown(X)}.")
    data = np.asarray(X)
    if data.dtype.kind not in "fiub":
        raise ValueError(f"X must hold numbers. Got {shown(X)}.")
    return data


def split_signals(data: NDArray[Any], held_out: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Signals to learn from and signals held out, drawn by the seed; at least one of each."""
    if data.ndim != 2 or len(data) < 2:
        raise ValueError(f"X must hold at least two signals, as rows (n, d). Got shape {data.shape}.")
    order = np.random.default_rng((seed, 3)).permutation(len(data))
    cut = min(len(data) - 1, max(1, round((1 - held_out) * len(data))))
    return data[order[:cut]], data[order[cut:]]
