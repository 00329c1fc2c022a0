"""Table C.2: adaptive stacking beside last stacking, from a shallow model to a deep one in stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from theodolite.experiments.claims import at_least, at_most, equal, measured
from theodolite.experiments.figure import Figure
from theodolite.experiments.growing import karp
from theodolite.experiments.growing.figures import NOT_TOLD
from theodolite.experiments.growing.runs import BASE, WIDE
from theodolite.experiments.growing.small_models import Setup, token_loss
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import Measured, Value, rows
from theodolite.experiments.study import Study, sizes
from theodolite.measures.growth import Stage, adaptive_stacking, bert_large_stages
from theodolite.measures.growth.diagnostics import stacking_trial_steps
from theodolite.results import Row

ADAPTIVE, LAST = "adaptive", "last"


def _plain(stages: list[Stage]) -> list[dict[str, Any]]:
    return [asdict(stage) for stage in stages]


def _stage(plain: Mapping[str, Any]) -> Stage:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Stage(**fields)


class Stacked(Study):
    """A GPT, and at the size of the paper BERT-Large, grown in stages by copies of its layers: losses at the end of each stage.

    Both ways share the first stage, the data and its order. The trials' steps come on top of those of adaptive stacking.
    """

    sizes = sizes(
        tiny={
            "setup": Setup("gpt", rate=5e-3, dim=16, hidden=64, tokens=16_000),
            "stages": _plain([Stage(1, 40), Stage(2, 12), Stage(3, 12)]),
            "lag": 4,
            "seeds": 1,
        },
        laptop={
            "setup": Setup("gpt", **{**WIDE, "rate": 1e-3}),
            "stages": _plain([Stage(2, 800), Stage(4, 800), Stage(6, 1000)]),
            "lag": 50,
            "seeds": 3,
        },
        paper={
            "setup": Setup("bert", "masked", norm_first=False, **{**BASE, "dim": 1024, "hidden": 4096, "heads": 16}),
            "stages": _plain(bert_large_stages()),
            "lag": 200,
            "seeds": 1,
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            yield {"setup": asdict(p.setup), "stages": p.stages, "lag": p.lag, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, stages = Setup.of(job["setup"]), [_stage(plain) for plain in job["stages"]]
        sample = setup.sample()
        found = adaptive_stacking(
            lambda layers: setup.but(layers=layers).model(seed=job["seed"]),
            token_loss,
            (sample.x, sample.y),
            optimizer=setup.optimizer,
            stages=stages,
            lag=job["lag"],
            validation=(sample.x_held_out, sample.y_held_out),
            schedule=setup.schedule,
            batch_size=setup.batch,
            seed=job["seed"],
            progress=False,
        )
        for row in found.rows():
            yield {"kind": "stage", "seed": job["seed"], **row}
        counts = [len(stage.operators(before.layers)) for before, stage in pairwise(stages)]
        planned, thrown = stacking_trial_steps(counts, job["lag"])
        yield {
            **{"kind": "cost", "seed": job["seed"], "trial_steps": found.trial_steps, "planned": planned, "thrown": thrown},
            **{"steps": sum(stage.steps for stage in stages), "origin": sample.origin},
            **dict(zip(("source_trials", "source_thrown"), source_cost(), strict=True)),
        }


def source_cost() -> tuple[int, int]:
    """Steps of the source's trials, and those of them that are thrown away."""
    stages = bert_large_stages()
    return stacking_trial_steps([len(stage.operators(before.layers)) for before, stage in pairwise(stages)], 200)


ends, cost = rows(kind="stage"), rows(kind="cost")


def final(way: str) -> Value:
    """The final loss of a way, the mean over seeds, with half the range as its error."""

    def measure(found: list[Row]) -> Measured:
        lasts = [max(part, key=lambda row: row["step"])["loss"] for part in _by_seed(found)]
        return Measured(sum(lasts) / len(lasts), 0.5 * (max(lasts) - min(lasts)))

    return ends(way=way).measure(measure)


def _by_seed(found: list[Row]) -> list[list[Row]]:
    return [[row for row in found if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in found)]


def same_plan(found: list[Row]) -> int:
    """Stages that only one of the ways ends at that depth and step; both share the first."""
    ends_of: dict[str, set[tuple[int, ...]]] = {ADAPTIVE: set(), LAST: set()}
    for row in found:
        ends_of[row["way"]].add(tuple(int(row[name]) for name in ("seed", "layers", "step")))
    shallow = min(layers for _, layers, _ in ends_of[ADAPTIVE])
    return len({end for end in ends_of[ADAPTIVE] if end[1] > shallow} ^ ends_of[LAST])


class TableC2(Figure):
    """Adaptive and last stacking: the final loss, and the loss at the end of each stage."""

    study, item = Stacked(), "karp-2024 Table C.2"
    claims = {
        "adaptive stacking ends below last stacking by": at_least(
            0.0, final(LAST) - final(ADAPTIVE), reported=0.0131, since="paper"
        ),
        "adaptive stacking ends above last stacking by 0.01 at most": at_most(
            0.01, final(ADAPTIVE) - final(LAST), reported=-0.0131, since="laptop"
        ),
        "final loss of adaptive stacking": measured(final(ADAPTIVE)),
        "final loss of last stacking": measured(final(LAST)),
        "stages that the two ways end at different steps": equal(0, ends.measure(same_plan)),
        "trials take as many steps as planned (largest distance)": at_most(0, abs(cost["trial_steps"] - cost["planned"]).max()),
        "steps of the source's trials": equal(18_600, cost.max("source_trials")),
        "of which are thrown away": equal(17_600, cost.max("source_thrown")),
        "the source's trials over its 1,000,000 steps": at_most(
            0.02, cost["source_trials"].map(lambda steps: steps / 1e6).max(), **karp("small", "Appendix C.1.3")
        ),
    }
    departs = NOT_TOLD + " Below the size of the paper the model is a GPT of at most six layers in three stages."

    def draw(self, rows: list[Row]) -> Any:
        found = ends.of(rows)
        shared = [{**row, "way": LAST} for row in found if row["step"] == min(other["step"] for other in found)]
        panel = curves([*found, *shared], "step", "loss", by="way", band="range", ylabel="validation loss")
        return draw_panels(panel, size=(4.6, 3.4))
