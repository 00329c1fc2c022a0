"""The anchor vector along pre-training: the probe at the start of a small GPT and at five steps of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from theodolite.experiments import Experiment, Params, at_least, at_most, measured
from theodolite.experiments.anchors.probes import BENCHMARK, QUICK, removed
from theodolite.experiments.anchors.small_gpt import Recipe, corpus_of, network_at, pretraining_of
from theodolite.experiments.query import chosen
from theodolite.experiments.study import Computation
from theodolite.measures.anchors import anchor_probe
from theodolite.results import Row

#: R² from which the sentence speaks of an anchor; that of the local model's check.
PRESENT = 0.8


def bulk_line(rows: list[Row]) -> list[Row]:
    """The rows with the bulk of the histograms, by step."""
    return sorted(chosen(rows, bulk=True), key=lambda row: row["step"])


def first_step(rows: list[Row]) -> str:
    """When the anchor is there."""
    steps = [row["step"] for row in bulk_line(rows) if row["r2"] >= PRESENT]
    return f"step {steps[0]}" if steps else "never"


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
            0.0, lambda rows: bulk_line(rows)[0]["r2"]
        ),
        "at the end one does (R², 2 % of the words removed)": at_least(
            PRESENT, lambda rows: bulk_line(rows)[-1]["r2"], says="trained models have one", where="Wu 2023, section 3.4"
        ),
        "the error falls from the start to the end (ratio)": at_most(
            0.1, lambda rows: bulk_line(rows)[-1]["mse"] / bulk_line(rows)[0]["mse"]
        ),
        "the model learns (perplexity at the end over that at the start)": at_most(
            0.5, lambda rows: bulk_line(rows)[-1]["perplexity"] / bulk_line(rows)[0]["perplexity"]
        ),
        "the anchor explains 80 % of the variance from": measured(first_step),
        "mean cosine of two atoms at the start and at the end": measured(
            lambda rows: [round(bulk_line(rows)[i]["cosine_mean"], 3) for i in (0, -1)]
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
        from theodolite import plots

        table = [{**row, "removed": f"top {row['top']} removed", "at": row["step"] + 1} for row in rows]
        fits = [
            {"at": row["at"], "mse": row[column], "fit": name}
            for row in table
            if row["bulk"]
            for column, name in (("mse", "anchor"), ("intercept_mse", "anchor and intercept"), ("variance", "mean"))
        ]
        figure, axes = plots.panels(3, size=(4.3, 3.4))
        shared: dict[str, Any] = {"log": "xy", "labels": "legend", "xlabel": "1 + step of pre-training"}
        plots.curves(table, "at", "mse", by="removed", ylabel="mean square error", **shared, ax=axes[0])
        plots.curves(
            fits, "at", "mse", by="fit", ylabel="mean square error", title="2 % of the words removed", **shared, ax=axes[1]
        )
        end = [row for row in table if row["bulk"]]
        plots.curves(end, "at", "perplexity", xlabel="1 + step of pre-training", log="xy", ax=axes[2])
        return figure
