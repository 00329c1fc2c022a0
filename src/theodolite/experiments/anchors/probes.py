"""What the tables and figures of probed models share: which models at which size, their rows, and how claims read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from theodolite.data import DataError
from theodolite.experiments.anchors.language_models import FOLDERS, LOCAL, SMOLLM, STORIES, Probed, Subject, probed
from theodolite.experiments.anchors.model_folder import MissingModelError
from theodolite.experiments.anchors.small_gpt import Recipe
from theodolite.experiments.claims import Measure
from theodolite.experiments.figure import Experiment
from theodolite.experiments.query import chosen
from theodolite.results import Row

#: The four models of the main text, those with the smallest errors.
FOUR = ("GPT-2 Large", "GPT-2 XL", "OPT-125M", "OPT-1.3B")
#: Words removed where the source removes 100 of 50,000: the same number near that size, 2 % of small vocabularies.
REMOVED, SMALL_SHARE = 100, 0.02
#: The generated text and the GPT of the specification's quick variant, with 300 of its 1000 steps.
QUICK = Recipe(steps=300, milestones=(20, 40, 80, 160))
#: 3 layers of 96 units on the 2000 most frequent words of WikiText-2.
BENCHMARK = Recipe(
    text="wikitext2",
    words=2000,
    context=128,
    dim=96,
    depth=3,
    steps=2000,
    rate=1e-3,
    final_rate=1e-4,
    warmup=100,
    betas=(0.9, 0.95),
    decay=0.1,
    held_out=20_480,
    milestones=(50, 150, 400, 1000),
)
ABSENT = "not available"

DEPARTS = (
    "The source's models are not downloaded: at paper size they are read from the directory that $THEODOLITE_MODELS names. Below "
    "it a small GPT stands for them that is trained here (tiny: 2 layers of 64 units, 300 steps on generated text of 1000 words; "
    "laptop: 3 layers of 96 units, 2000 steps on WikiText-2 with 2000 words), beside stories260k on TinyStories and, at laptop "
    "size, SmolLM2-135M on WikiText-2; these two are reported as measured. Where the source removes 100 of 50,000 words, 2 % of "
    "a small vocabulary are removed. Windows do not overlap and are as long as the model allows, at most 1024. WikiText-2 is its "
    "word-level form, with <unk> for rare words and blanks around punctuation; the source seems to have used the raw form."
)


@dataclass(frozen=True)
class Params:
    """The models."""

    subjects: tuple[Subject, ...]


def _named(names: tuple[str, ...]) -> tuple[Subject, ...]:
    return tuple(Subject(name, "checkpoint") for name in names)


LOCAL_MODEL = {
    "tiny": Subject(LOCAL, "trained", recipe=QUICK),
    "laptop": Subject(LOCAL, "trained", recipe=BENCHMARK),
    "paper": Subject(LOCAL, "trained", recipe=BENCHMARK),
}
_BESIDE = {
    "tiny": (Subject(STORIES, "stories260k", 12_800, optional=True),),
    "laptop": (Subject(STORIES, "stories260k", 20_480, optional=True), Subject(SMOLLM, "smollm2", 8192, optional=True)),
}


def sizes_of(names: tuple[str, ...]) -> dict[str, Params]:
    """The local model at every size, stored ones below paper size, the source's models at paper size."""
    return {
        "tiny": Params((LOCAL_MODEL["tiny"], *_BESIDE["tiny"])),
        "laptop": Params((LOCAL_MODEL["laptop"], *_BESIDE["laptop"])),
        "paper": Params((LOCAL_MODEL["paper"], *_named(names))),
    }


ALL_MODELS, FOUR_MODELS = sizes_of(tuple(FOLDERS)), sizes_of(FOUR)


def removed(vocabulary: int) -> int:
    """How many words the bulk leaves out in the table and histograms of the main text.

    >>> removed(50257), removed(1000)
    (100, 20)
    """
    return REMOVED if 45_000 <= vocabulary <= 55_000 else round(SMALL_SHARE * vocabulary)


class ProbeExperiment(Experiment):
    """One job per model; `show` makes its rows from the probe."""

    sizes = ALL_MODELS
    departs = DEPARTS
    show: ClassVar[Callable[[Probed], Iterator[Row]]]

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for subject in p.subjects:
            yield {"subject": asdict(subject), "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        subject = Subject.of(job["subject"])
        try:
            found = probed(subject)
        except (DataError, MissingModelError) as error:
            if not subject.optional:
                raise
            yield {"kind": "absent", "model": subject.name, "why": str(error)}
            return
        for row in type(self).show(found):
            yield {"model": subject.name, **row}


# Rows


def error_rows(found: Probed) -> Iterator[Row]:
    """One row for each number of words removed."""
    probe = found.probe
    for i, row in enumerate(probe.rows()):
        own = probe.clusters[i] if probe.clusters else None
        yield {
            "kind": "error",
            **row,
            "share": row["top"] / probe.vocabulary,
            "bulk": row["top"] == removed(probe.vocabulary),
            "two_anchors": None if own is None else max(own.mse),
        }


def histogram_rows(kind: str, counts: Tensor, edges: Tensor, **mark: Any) -> Iterator[Row]:
    """The bars of a histogram: their edges and how many there are."""
    total = float(counts.sum())
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield {"kind": kind, **mark, "low": low, "high": high, "count": int(count), "density": count / total / (high - low)}


# What claims read


def of_model(rows: list[Row], model: str, kind: str, **where: Any) -> list[Row]:
    """Rows of a model; none where it is not measured at this size."""
    return [
        row
        for row in rows
        if row["model"] == model and row["kind"] == kind and all(row[name] == value for name, value in where.items())
    ]


def value_of(model: str, column: str, kind: str = "error", **where: Any) -> Measure:
    """One entry of a model's rows; nothing where the model is not measured at this size."""

    def measure(rows: list[Row]) -> Any:
        found = of_model(rows, model, kind, **where)
        return found[0][column] if found else None

    return measure


def as_measured(model: str, text: Callable[[list[Row]], str]) -> Measure:
    """A sentence about a model that may be absent."""

    def measure(rows: list[Row]) -> str:
        mine = [row for row in rows if row["model"] == model]
        if not mine:
            return "not part of this size"
        return ABSENT if mine[0]["kind"] == "absent" else text(mine)

    return measure


def errors_by_top(rows: list[Row]) -> str:
    """The errors of one model in a line, in sample and held out."""
    table = sorted(chosen(rows, kind="error"), key=lambda row: row["top"])
    return "; ".join(f"top {row['top']}: {row['mse']:.4g} (held out {row['held_out_mse']:.4g})" for row in table)


def largest_step(model: str) -> Measure:
    """The largest ratio of the error to the one with fewer words removed: below 1 where it falls at every step."""

    def measure(rows: list[Row]) -> float | None:
        table = sorted(of_model(rows, model, "error"), key=lambda row: row["top"])
        return max((after["mse"] / before["mse"] for before, after in pairwise(table)), default=None)

    return measure


def bulk_ratio(model: str) -> Measure:
    """The error of the bulk over that of the whole partition function."""

    def measure(rows: list[Row]) -> float | None:
        whole, bulk = (of_model(rows, model, "error", **where) for where in ({"top": 0}, {"bulk": True}))
        return bulk[0]["mse"] / whole[0]["mse"] if whole and bulk else None

    return measure
