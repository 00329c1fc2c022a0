"""The anchor vector along pre-training: the probe at the start of a small GPT and at five steps of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from theodolite.experiments import Experiment, Params, at_least, at_most, measured, rows
from theodolite.experiments.anchors.probes import BENCHMARK, QUICK, removed
from theodolite.experiments.anchors.small_gpt import Recipe, corpus_of, network_at, pretraining_of
from theodolite.experiments.lab.panels import curves, draw_panels, melted
from theodolite.experiments.query import select
from theodolite.experiments.study import Computation
from theodolite.measures.anchors import anchor_probe
from theodolite.results import Row

#: R² from which the sentence speaks of an anchor; that of the local model's check.
PRESENT = 0.8


#: The rows with the bulk of the histograms, by step.
bulk = rows(bulk=True)


def first_step(rows: list[Row]) -> str:
    """When the anchor is there."""
    return next((f"step {row['step']}" for row in bulk.found(rows) if row["r2"] >= PRESENT), "never")


class AlongPretraining(Experiment):
    """When in pre-training the anchor vector appears.

    The probe at initialisation and at five steps of a GPT that is trained here. Why the vector exists is left open by the source;
    this shows when. At the start the log partition function is nearly constant, but the states have no constant direction, so
    that no vector predicts it; an intercept does.
    """

    id = "anchor/pretraining"
    where = "Wu 2023, section 3.6: why anchor vectors exist is an open question"
    sizes = {"tiny": Params(recipe=QUICK), "laptop": Params(recipe=BENCHMARK), "paper": Params(recipe=BENCHMARK)}
    departs = "The source does not follow training. Generated text at tiny size, WikiText-2 with 2000 words otherwise."
    claims = {
        "at the start no vector predicts the log bulk partition function (R², 2 % of the words removed)": at_most(
            0.0, bulk["r2"].first()
        ),
        "at the end one does (R², 2 % of the words removed)": at_least(
            PRESENT, bulk["r2"].last(), says="trained models have one", where="Wu 2023, section 3.4"
        ),
        "the error falls from the start to the end (ratio)": at_most(0.1, bulk["mse"].last() / bulk["mse"].first()),
        "the model learns (perplexity at the end over that at the start)": at_most(
            0.5, bulk["perplexity"].last() / bulk["perplexity"].first()
        ),
        "the anchor explains 80 % of the variance from": measured(first_step),
        "mean cosine of two atoms at the start and at the end": measured(
            bulk["cosine_mean"].reduce(lambda cosines: [round(cosines[i], 3) for i in (0, -1)])
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield {"recipe": asdict(p.recipe), "seed": p.recipe.seed}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [pretraining_of(Recipe.of(job["recipe"]))]

    def run(self, job: Mapping[str, Any], trained: list[Row]) -> Iterator[Row]:
        recipe = Recipe.of(job["recipe"])
        held_out = corpus_of(recipe)[1]
        for step in recipe.kept:
            probe = anchor_probe(network_at(recipe, trained, step), held_out)
            geometry = probe.geometry
            assert geometry is not None
            shape = {"cosine_mean": geometry.cosine_mean, "stable_rank": geometry.stable_rank}
            for row in probe.rows():
                yield {"step": step, **row, **shape, "bulk": row["top"] == removed(probe.vocabulary)}

    def draw(self, rows: list[Row]) -> Any:
        table = [{**row, "removed": f"top {row['top']} removed", "at": row["step"] + 1} for row in rows]
        ends = select(table, bulk=True)
        fits = melted(ends, {"mse": "anchor", "intercept_mse": "anchor and intercept", "variance": "mean"}, "error", "fit")
        look: dict[str, Any] = {"labels": "legend", "ylabel": "mean square error"}
        return draw_panels(
            curves(table, "at", "mse", by="removed", **look),
            curves(fits, "at", "error", by="fit", title="2 % of the words removed", **look),
            curves(ends, "at", "perplexity"),
            size=(4.3, 3.4),
            log="xy",
            xlabel="1 + step of pre-training",
        )
