"""Dictionaries learned from planted signals, with both objectives from the same dictionary, data and start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from theodolite.data.generators import Law, planted_dictionary, planted_samples
from theodolite.experiments import Study
from theodolite.experiments.study import Computation
from theodolite.measures.dictionary import LearningSettings, hidden_error, learn_dictionaries, recovery_error
from theodolite.measures.dictionary.decoding import Decoder
from theodolite.measures.dictionary.hidden import Masks
from theodolite.measures.dictionary.learning import Objective, Optimizer
from theodolite.results import Row

Init = Literal["samples", "local", "gaussian"]

#: Names of the two objectives, the usual one first.
OBJECTIVES: tuple[Objective, Objective] = ("reconstruction", "masked")
#: What is added to a seed for the signals that a dictionary starts from, and for those it is scored on.
STARTS, HELD_OUT = 10_000, 20_000
#: Random sets of hidden coordinates that a score averages over.
SCORE_MASKS = 5


@dataclass(frozen=True)
class Setting:
    """Planted signals and how dictionaries are learned from them; the defaults are the source's. `noise` None is 1/√dim."""

    dim: int = 100
    atoms: int = 200
    learned: int = 1000
    sparsity: int = 5
    noise: float | None = None
    samples: int = 1000
    law: Law = "gaussian"
    batch: int = 200
    epochs: int = 500
    masks: Masks = "batch"
    optimizer: Optimizer = "adam"
    learning_rate: float = 1e-3
    decoder: Decoder = "omp"
    penalty: float = 0.1

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise per coordinate."""
        return 1 / math.sqrt(self.dim) if self.noise is None else self.noise

    def learning(self, objective: Objective) -> LearningSettings:
        """With the source's fixed order of the batches."""
        own = {name: getattr(self, name) for name in ("masks", "decoder", "penalty", "learning_rate", "optimizer")}
        return LearningSettings(self.sparsity, objective, batch_size=self.batch, shuffle=False, **own)


class Planted(NamedTuple):
    """The true atoms (p, d), signals to learn from (n, d), atoms to start at (p', d), signals to score on (m, d)."""

    true: Tensor
    signals: Tensor
    start: Tensor
    held_out: Tensor


def planted(setting: Setting, init: Init, seed: int) -> Planted:
    """One run's data. Settings that differ in `learned` alone share dictionary and signals.

    "local" starts at the true atoms and further signals, "samples" at further signals, "gaussian" at random directions; those
    further signals it may then learn from.
    """
    true = planted_dictionary(setting.atoms, setting.dim, seed=seed)

    def signals(n: int, shift: int = 0) -> Tensor:
        drawn = planted_samples(true, n, setting.sparsity, noise=setting.deviation, law=setting.law, seed=seed + shift)
        return drawn.signals

    known, further = signals(setting.samples), signals(setting.learned, STARTS)
    if init == "gaussian":
        start, known = planted_dictionary(setting.learned, setting.dim, seed=seed + STARTS), torch.cat([known, further])
    else:
        start = further if init == "samples" else torch.cat([true, further])[: setting.learned]
    return Planted(true, known, start, signals(min(setting.samples, 500), HELD_OUT))


def errors_of(data: Planted, learned: Tensor, setting: Setting, seed: int) -> Row:
    """Errors of a learned dictionary.

    `initial` and `final` are recovery errors (cosine); `score` is the squared error per hidden coordinate of held-out
    signals, `reconstruction` that per coordinate of the signals learned from.
    """
    decoding: dict[str, Any] = {"decoder": setting.decoder, "penalty": setting.penalty, "seed": seed}
    return {
        "initial": recovery_error(data.true, data.start),
        "final": recovery_error(data.true, learned),
        "score": hidden_error(data.held_out, learned, setting.sparsity, masks=SCORE_MASKS, **decoding).value,
        "reconstruction": hidden_error(data.signals, learned, setting.sparsity, masks=1, **decoding).reconstruction,
    }


class Trained(Study):
    """Dictionaries learned by one objective; the runs of a job (start and seed of each) are trained as one fleet.

    Other studies need its jobs; it has none itself.
    """

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting, objective, runs = Setting(**job["setting"]), job["objective"], job["runs"]
        data = [planted(setting, init, seed) for init, seed in runs]
        found = learn_dictionaries(
            torch.stack([each.signals for each in data]),
            torch.stack([each.start for each in data]),
            setting.learning(objective),
            epochs=setting.epochs,
            seeds=[seed for _, seed in runs],
        )
        for (init, seed), each, components, losses in zip(runs, data, found.components, found.losses.T.tolist(), strict=True):
            start = {"init": init, "objective": objective, "seed": seed}
            ends = {"first_loss": losses[0], "last_loss": losses[-1]}
            yield {**start, **errors_of(each, components, setting, seed), **ends}


class OnTrained(Study):
    """Parent of studies whose jobs may look at a fleet: those that carry `runs` get its rows as the second argument of `run`."""

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [Trained().job(**{name: job[name] for name in FLEET})] if "runs" in job else []


#: What a fleet is known by.
FLEET = ("setting", "objective", "runs", "seed")


def job_of(setting: Setting, objective: Objective, runs: tuple[tuple[Init, int], ...], **marks: Any) -> dict[str, Any]:
    """A fleet as plain values; `marks` go into its rows."""
    return {"setting": asdict(setting), "objective": objective, "runs": [list(run) for run in runs], "seed": runs[0][1], **marks}
