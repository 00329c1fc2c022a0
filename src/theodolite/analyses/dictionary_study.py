"""A dictionary of the user's signals: learned on a part of them, judged by what it predicts of the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken
from theodolite.measures.dictionary import DictionaryChoice, HiddenError, choose_dictionary, hidden_error
from theodolite.measures.dictionary.arrays import without_missing
from theodolite.measures.dictionary.decoding import Decoder, decode
from theodolite.measures.dictionary.estimator import split_signals
from theodolite.measures.dictionary.hidden import hidden_count
from theodolite.measures.dictionary.learning import (
    LearnerState,
    LearningSettings,
    Objective,
    initial_dictionary,
    learn_dictionaries,
    start_seeds,
)
from theodolite.measures.dictionary.matching_pursuit import SparseCodes
from theodolite.measures.dictionary.structure import AtomUsage, atom_usage
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row, fields_of

STEPS, FEWEST = 2500, 10  # passes by default: enough for so many steps, and no fewer than this
KEEP_EVERY = 10.0  # seconds between two notes of where learning stands
BITE = 1.0  # seconds of learning between two looks at the clock


@dataclass(frozen=True, kw_only=True)
class DictionaryPlan:
    """What to learn and how. `n_components` and `sparsity` None: as many atoms as features, a tenth of the features.

    `center` takes the mean of the training signals away first. `sizes` and `sparsities`, where given, are tried and the best
    is taken. `objectives`: the first is the one whose atoms count.
    """

    n_components: int | None = None
    sparsity: int | None = None
    objectives: tuple[Objective, ...] = ("masked",)
    hidden_fraction: float = 0.1
    epochs: int | None = None
    init: str = "samples"
    decoder: Decoder = "omp"
    penalty: float = 0.1
    missing: Literal["error", "mask"] = "error"
    center: bool = False
    sizes: tuple[int, ...] = ()
    sparsities: tuple[int, ...] = ()
    held_out: float = 0.2
    batch_size: int = 200
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def stream(self) -> int:
        """That of `MaskedDictionaryLearning(random_state=seed)`, so that both learn the same atoms."""
        return start_seeds(self.seed)[0]

    def atoms(self, dim: int) -> int:
        return dim if self.n_components is None else self.n_components

    def nonzeros(self, dim: int, atoms: int) -> int:
        if self.sparsity is not None:
            return self.sparsity
        return min(max(1, dim // 10), atoms, dim - hidden_count(dim, self.hidden_fraction))

    def passes(self, samples: int) -> int:
        """`epochs`, or so many that there are about 2500 steps."""
        return self.epochs or max(FEWEST, math.ceil(STEPS / math.ceil(samples / self.batch_size)))

    def settings(self, objective: Objective, sparsity: int) -> LearningSettings:
        same = fields_of(self, "hidden_fraction decoder penalty batch_size learning_rate")
        return LearningSettings(sparsity=sparsity, objective=objective, **same)

    def check(self, samples: int, dim: int) -> None:
        """Refuse what cannot be done before anything is learned; `samples` are those to learn from."""
        if not self.objectives or set(self.objectives) - set(get_args(Objective)):
            raise ValueError(f"objectives must be 'masked', 'reconstruction' or both. Got {self.objectives}.")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1. Got {self.epochs}.")
        for atoms in self.sizes or (self.atoms(dim),):
            if atoms < 1:
                raise ValueError(f"A dictionary has at least 1 atom. Got {atoms}.")
            for k in self.sparsities or (self.nonzeros(dim, atoms),):
                # Whatever the objective, the score hides coordinates.
                self.settings("masked", k).check(samples, dim, atoms)


@dataclass(frozen=True, eq=False)
class Learner:
    """Where the learning of one objective stands: its state, and the mean loss of each pass so far, (passes,)."""

    state: LearnerState
    losses: Tensor

    @property
    def components(self) -> Tensor:
        return self.state.components[0]


@dataclass(frozen=True, eq=False)
class Judged:
    """A learned dictionary with its errors on held-out and on training signals, and the uses of its atoms in training."""

    learner: Learner
    held: HiddenError
    train: HiddenError
    usage: AtomUsage


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DictionaryStudy(Result):
    """Dictionaries by objective, `main` the one to take; `choice` where several sizes were tried.

    `offset` (d,) is what was taken from each signal, `mean_energy` the share of the energy in the mean of the training signals,
    `missing` the share of entries that are NaN.
    """

    main: Objective
    judged: Mapping[Objective, Judged]
    choice: DictionaryChoice | None
    samples: int
    held_out: int
    dim: int
    sparsity: int
    hidden: int
    missing: float
    zeros: int
    mean_energy: float
    offset: Tensor | None = None

    @property
    def components(self) -> Tensor:
        return self.judged[self.main].learner.components

    def rows(self) -> list[Row]:
        return [
            {
                "objective": objective,
                "n_components": len(found.learner.components),
                "sparsity": self.sparsity,
                "hidden_error": found.held.value,
                **fields_of(found.held, "stderr explained reconstruction baseline"),
                "train_hidden_error": found.train.value,
                "train_reconstruction": found.train.reconstruction,
                "dead_atoms": len(found.usage.dead),
                "twins": len(found.usage.twins()),
                "epochs": found.learner.state.epoch,
                "steps": found.learner.state.step,
            }
            for objective, found in self.judged.items()
        ]

    def learning_rows(self) -> list[Row]:
        """The mean loss of each pass per coordinate that was charged, so that both objectives stand on one scale."""
        there = 1 - self.missing
        charged = {"masked": self.hidden * there, "reconstruction": self.dim * there}
        return [
            {"objective": objective, "epoch": epoch, "loss": loss / charged[objective]}
            for objective, found in self.judged.items()
            for epoch, loss in enumerate(found.learner.losses.tolist(), 1)
        ]

    def sentence(self) -> str:
        found = self.judged[self.main]
        return f"{len(self.components)} atoms, {self.sparsity} per signal. {found.held.sentence()}"


Keep = Callable[[Objective, Learner], None]


def study_dictionary(
    signals: Any,
    plan: DictionaryPlan,
    *,
    learned: Mapping[Objective, Learner] | None = None,
    choice: DictionaryChoice | None = None,
    keep: Keep | None = None,
    on_choice: Callable[[DictionaryChoice], None] | None = None,
    progress: bool | None = False,
) -> DictionaryStudy:
    """Learn dictionaries of signals (n, d) as the plan says, and judge them on the signals that were held out.

    `keep` is called with where learning stands, every few seconds and whenever it ends, `on_choice` with what was chosen; given
    back as `learned` and `choice`, learning goes on as if it had never stopped.
    """
    began = time.perf_counter()
    data = np.asarray(signals)
    train, test = split_signals(data, plan.held_out, plan.seed)
    plan.check(len(train), data.shape[1])
    zeros = int((np.nan_to_num(data) == 0).all(1).sum())
    mean, mean_energy = _mean_signal(train)
    if plan.center:
        data, train, test = data - mean, train - mean, test - mean
    if choice is None and (plan.sizes or plan.sparsities):
        choice = _choose(data, plan, len(train), progress)
        if on_choice is not None:
            on_choice(choice)
    atoms = plan.atoms(data.shape[1]) if choice is None else choice.n_components
    sparsity = plan.nonzeros(data.shape[1], atoms) if choice is None else choice.sparsity
    seen, unseen = without_missing(train), without_missing(test)
    judged = {}
    for objective in plan.objectives:
        settings = plan.settings(objective, sparsity)
        learner = (learned or {}).get(objective)
        if learner is None:
            first = initial_dictionary(seen[0], atoms, plan.init, seed=plan.stream)
            learner = Learner(LearnerState.begin(first[None]), torch.zeros(0, dtype=torch.float64))
        learner = _learn(learner, *seen, settings, plan, keep or (lambda *_: None), progress)
        how = fields_of(settings, "sparsity hidden_fraction decoder selection penalty") | {"seed": plan.stream}
        held, own = (hidden_error(Y, learner.components, observed=there, **how) for Y, there in (unseen, seen))
        usage = atom_usage(_codes(*seen, learner.components, settings), learner.components)
        judged[objective] = Judged(learner, held, own, usage)
    return DictionaryStudy(
        main=plan.objectives[0],
        judged=judged,
        choice=choice,
        samples=len(train),
        held_out=len(test),
        dim=data.shape[1],
        sparsity=sparsity,
        hidden=hidden_count(data.shape[1], plan.hidden_fraction),
        missing=float(np.isnan(data).mean()),
        zeros=zeros,
        mean_energy=mean_energy,
        offset=torch.from_numpy(mean) if plan.center else None,
        outcome=Outcome.FINISHED,
        seed=plan.seed,
        cost=Cost(seconds=time.perf_counter() - began),
    )


def encode(signals: Any, study: DictionaryStudy, plan: DictionaryPlan) -> SparseCodes | Tensor:
    """Codes of signals (n, d), NaN where missing, by the main dictionary: non-zeros (n, k), or dense (n, p) for the Lasso."""
    centred = np.asarray(signals) if study.offset is None else np.asarray(signals) - study.offset.numpy()
    return _codes(*without_missing(centred), study.components, plan.settings(study.main, study.sparsity))


def _codes(Y: Tensor, observed: Tensor | None, atoms: Tensor, settings: LearningSettings) -> SparseCodes | Tensor:
    seen, how = None if observed is None else observed[None], fields_of(settings, "decoder selection penalty")
    with unbroken(torch.no_grad()):
        codes = decode(Y[None], atoms[None].to(Y), settings.sparsity, seen, **how)
    return codes[0] if isinstance(codes, Tensor) else SparseCodes(codes.support[0], codes.values[0])


def _mean_signal(train: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """The mean of the signals (d,) over the entries that are there, and the share of their energy in it."""
    there = ~np.isnan(train)
    filled = np.where(there, train, 0)
    mean = filled.sum(0) / np.maximum(there.sum(0), 1)
    energy = float(np.square(filled, dtype=np.float64).sum())
    return mean.astype(train.dtype), float((mean**2 * there).sum()) / energy if energy > 0 else 0.0


def _choose(data: NDArray[Any], plan: DictionaryPlan, samples: int, progress: bool | None) -> DictionaryChoice:
    dim = data.shape[1]
    sizes = plan.sizes or (plan.atoms(dim),)
    return choose_dictionary(
        data,
        sizes,
        plan.sparsities or (plan.nonzeros(dim, min(sizes)),),
        progress=progress,
        objective=plan.objectives[0],
        max_iter=plan.passes(samples),
        **fields_of(plan, "held_out seed hidden_fraction init decoder penalty missing batch_size learning_rate"),
    )


def _learn(
    learner: Learner,
    Y: Tensor,
    observed: Tensor | None,
    settings: LearningSettings,
    plan: DictionaryPlan,
    keep: Keep,
    progress: bool | None,
) -> Learner:
    """Pass after pass up to the number planned, noting in between where learning stands."""
    total = plan.passes(len(Y))
    bite, noted = 1, time.perf_counter()
    known = None if observed is None else observed[None]
    title = f"learning, {settings.objective} objective"
    with counting(title, progress=progress, total=max(0, total - learner.state.epoch)) as advance:
        try:
            while learner.state.epoch < total:
                bite = min(bite, total - learner.state.epoch)
                done = learn_dictionaries(
                    Y[None], None, settings, epochs=bite, seeds=(plan.stream,), observed=known, resume=learner.state
                )
                if not done.outcome.good:
                    raise NonFiniteError(
                        f"Learning with the {settings.objective} objective diverged in pass {done.state.epoch}; "
                        "try a smaller learning rate."
                    )
                learner = Learner(done.state, torch.cat([learner.losses, done.losses[:, 0].double()]))
                advance(len(done.losses))
                if done.interrupted:
                    raise KeyboardInterrupt
                bite = max(1, round(BITE * len(done.losses) / max(done.cost.seconds, 1e-3)))
                if time.perf_counter() - noted > KEEP_EVERY:
                    keep(settings.objective, learner)
                    noted = time.perf_counter()
        finally:
            keep(settings.objective, learner)
    return learner
