"""Both objectives beside the dictionary learning of other packages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from theodolite.experiments import Experiment, Params, measured, rows
from theodolite.experiments.claims import Measure
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import chosen
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, SCORE_MASKS, Init, OnTrained, Setting, job_of, planted
from theodolite.experiments.sparse_coding.recovery import FULL, NAMES, TINY, mean_and_spread, over_realized
from theodolite.measures.dictionary import hidden_error, orthogonal_matching_pursuit, recovery_error
from theodolite.results import Row


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
        for name in (*NAMES.values(), *METHODS)
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for place, setting in p.settings:
            for runs in p.fleets:
                for objective in OBJECTIVES:
                    yield job_of(setting, objective, runs, place=place, method=NAMES[objective])
            for seed in range(len(p.fleets)):
                for method in METHODS:
                    yield {"setting": asdict(setting), "method": method, "place": place, "seed": seed}

    def run(self, job: Mapping[str, Any], *trained: list[Row]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        mark = {"method": job["method"], "place": job["place"], "learned": setting.learned}
        if job["method"] in METHODS:
            yield {**mark, "seed": job["seed"], **compared(job["method"], setting, job["seed"])}
            return
        for row in trained[0]:
            if row["init"] == "samples":
                yield {**mark, "state": "trained", **{name: row[name] for name in ("seed", *COLUMNS)}}

    def draw(self, rows: list[Row]) -> Any:
        drawn = chosen(rows, state="trained")
        look: dict[str, Any] = {"by": "method", "xlabel": "learned atoms p'", "band": "std"}
        return draw_panels(
            curves(drawn, "learned", "final", labels="legend", ylabel="recovery error (cosine)").then(
                lambda ax: ax.set_ylim(bottom=0.0)
            ),
            curves(drawn, "learned", "score", labels="none", ylabel="error per hidden coordinate", title="held-out signals"),
            size=(4.8, 3.6),
            **look,
        )


COLUMNS = ("initial", "final", "score", "reconstruction")


def compared(method: str, setting: Setting, seed: int) -> Row:
    """Another method's errors, as `trained` measures ours."""
    if not installed(method):
        return {"state": "not installed", **dict.fromkeys(COLUMNS, math.nan)}
    data = planted(setting, "samples", seed)
    learned = METHODS[method](data.signals, data.start, setting.sparsity, batch=setting.batch, epochs=setting.epochs, seed=seed)
    held = hidden_error(data.held_out, learned, setting.sparsity, masks=SCORE_MASKS, seed=seed)
    return {
        "state": "trained",
        "initial": recovery_error(data.true, data.start),
        "final": recovery_error(data.true, learned),
        "score": held.value,
        "reconstruction": hidden_error(data.signals, learned, setting.sparsity, masks=1, seed=seed).reconstruction,
    }
