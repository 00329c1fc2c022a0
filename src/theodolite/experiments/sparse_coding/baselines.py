"""Both objectives beside the dictionary learning of other packages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from theodolite.experiments.claims import Claim, Measure
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import Measured, chosen
from theodolite.experiments.sparse_coding.other_methods import METHODS, installed
from theodolite.experiments.sparse_coding.overrealization import FULL, TINY, over_realized
from theodolite.experiments.sparse_coding.planted import OBJECTIVES, SCORE_MASKS, Init, Setting, job_of, planted, rows_of
from theodolite.experiments.sparse_coding.recovery_figures import NAMES
from theodolite.measures.dictionary import hidden_error, recovery_error
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    """Settings by p'/p, and runs that train as one fleet; other methods see as many seeds."""

    settings: tuple[tuple[float, Setting], ...]
    fleets: tuple[tuple[tuple[Init, int], ...], ...]


#: The fleet of Figure 2.1 at tiny size: a process that has trained it uses it again.
TINY_FLEET: tuple[tuple[Init, int], ...] = (("samples", 0), ("local", 0))


def error_of(method: str) -> Measure:
    """Mean recovery error with as many learned atoms as signals, or that the package is not there."""

    def measure(rows: list[Row]) -> Measured | str:
        mine = chosen(rows, method=method, place=FULL)
        if any(row["state"] != "trained" for row in mine):
            return "not installed"
        finals = [row["final"] for row in mine]
        return Measured(fmean(finals), pstdev(finals) if len(finals) > 1 else None)

    return measure


class Baselines(Experiment):
    """Both objectives beside the dictionary learning of scikit-learn and spams.

    Recovery error of planted atoms by the number of learned ones: the two objectives, scikit-learn's two algorithms (which
    decode by the Lasso while they learn) and spams, all from the same noisy samples.
    """

    id = "sparse-coding/baselines"
    source = "beside 000, Figure 2.1 (a)"
    sizes = {
        "tiny": Params(over_realized(TINY, 1, 2, 5), (TINY_FLEET,)),
        "laptop": Params(over_realized(Setting(), 1, 2, 5), ((("samples", 0),),)),
        "paper": Params(over_realized(Setting(), 1, 2, 3, 4, 5), tuple((("samples", s),) for s in range(5))),
    }
    departs = (
        "Not in the source. The Lasso's penalty is 1.2/√d; scikit-learn's algorithms have a tenth of the passes. At tiny size "
        "100 atoms in 50 dimensions, 500 signals and 100 passes."
    )
    claims = tuple(
        Claim(f"recovery error with as many learned atoms as signals: {name}", error_of(name))
        for name in (*NAMES.values(), *METHODS)
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for place, setting in p.settings:
            for runs in p.fleets:
                for objective in OBJECTIVES:
                    yield job_of(setting, objective, runs, place=place, method=NAMES[objective])
            for seed in range(len(p.fleets)):
                for method in METHODS:
                    yield {"setting": asdict(setting), "method": method, "place": place, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setting = Setting(**job["setting"])
        mark = {"method": job["method"], "place": job["place"], "learned": setting.learned}
        if job["method"] in METHODS:
            yield {**mark, "seed": job["seed"], **compared(job["method"], setting, job["seed"])}
            return
        for row in rows_of(job):
            if row["init"] == "samples":
                yield {**mark, "state": "trained", **{name: row[name] for name in ("seed", *COLUMNS)}}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, (left, right) = plots.panels(2, size=(4.8, 3.6))
        drawn = chosen(rows, state="trained")
        names: dict[str, Any] = {"by": "method", "xlabel": "learned atoms p'", "band": "std"}
        plots.curves(drawn, "learned", "final", labels="legend", ylabel="recovery error (cosine)", ax=left, **names)
        left.set_ylim(bottom=0.0)
        title = "held-out signals"
        plots.curves(
            drawn, "learned", "score", labels="none", ylabel="error per hidden coordinate", title=title, ax=right, **names
        )
        return figure


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
