"""Tables 3.1, B.1 and B.2, Figures 3.1 to 3.3 and B.1 to B.4: the views of the probes, with what their claims read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from theodolite.experiments import Claim, Figure, Reported, at_least, at_most, cited, equal, measured, relative, rows
from theodolite.experiments.anchors.probes import BULK, CONTROL, FOLDERS, FOUR, FOUR_MODELS, LOCAL, STORED, WHOLE, Probes
from theodolite.experiments.claims import Claims, Measure
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, scatter, split
from theodolite.experiments.query import Query, chosen, fits, select, values_of
from theodolite.results import Row

TOPS = (0, 10, 100, 1000, 10_000)
#: Parameters in millions, hidden dimension and perplexity, and mean square errors by the number of words removed.
STATED = {
    "GPT-2": (124, 768, 25.92, (625.8, 651.4, 665.2, 685.5, 727.4)),
    "GPT-2 Medium": (355, 1024, 19.19, (0.7647, 0.3444, 0.3005, 0.2683, 0.2396)),
    "GPT-2 Large": (774, 1280, 17.13, (0.7296, 0.1288, 0.0740, 0.0317, 0.0022)),
    "GPT-2 XL": (1500, 1600, 15.34, (0.7716, 0.1219, 0.0648, 0.0279, 0.0019)),
    "OPT-125M": (125, 768, 25.01, (0.6688, 0.1010, 0.0443, 0.0117, 0.0006)),
    "OPT-350M": (350, 1024, 19.69, (2.2449, 0.9393, 0.7587, 0.6182, 0.4275)),
    "OPT-1.3B": (1300, 2048, 13.16, (0.5234, 0.0984, 0.0402, 0.0117, 0.0006)),
}
ERRORS = {model: errors for model, (*_, errors) in STATED.items()}
#: The one with two clusters, and the others.
CLUSTERED = "GPT-2"
OTHERS = [model for model in FOLDERS if model != CLUSTERED]
#: Windows, precision and the part of the corpus are not stated; the specification expects agreement of about 30 %.
TOLERANCE, PERPLEXITY_TOLERANCE = 0.3, 0.15
WHERE = "Wu 2023, Table B.2"
ABSENT = "not available"

DEPARTS = (
    "The source's models are not downloaded: at paper size they are read from the directory that $THEODOLITE_MODELS names. Below "
    "it a small GPT stands for them that is trained here (tiny: 2 layers of 64 units, 300 steps on generated text of 1000 words; "
    "laptop: 3 layers of 96 units, 2000 steps on WikiText-2 with 2000 words), beside stories260k on TinyStories and, at laptop "
    "size, SmolLM2-135M on WikiText-2; these two are reported as measured. Where the source removes 100 of 50,000 words, 2 % of "
    "a small vocabulary are removed. Windows do not overlap and are as long as the model allows, at most 1024. WikiText-2 is its "
    "word-level form, with <unk> for rare words and blanks around punctuation; the source seems to have used the raw form."
)


class ProbeFigure(Figure):
    """A view of the probes."""

    study = Probes()
    departs = DEPARTS


def shown(what: str, **where: Any) -> Query:
    """Rows of one kind of table or figure; a model that is absent is so everywhere."""
    return rows(shows=[what, None]).where(lambda row: row["kind"] == "absent" or fits(row, where))


# What claims read


def of_model(model: str, read: Callable[[list[Row]], Any], kind: str = "error", **where: Any) -> Measure:
    """A function of a model's rows of one kind; nothing where the model is not measured at this size."""

    def measure(rows: list[Row]) -> Any:
        mine = select(rows, model=model, kind=kind, **where)
        return read(mine) if mine else None

    return measure


def value_of(model: str, column: str, kind: str = "error", **where: Any) -> Measure:
    """One entry of the first of these rows."""
    return of_model(model, lambda mine: mine[0][column], kind, **where)


def largest_step(model: str) -> Measure:
    """The largest ratio of the error to the one with fewer words removed: below 1 where it falls at every step."""
    return of_model(model, lambda table: max(after["mse"] / before["mse"] for before, after in pairwise(table)))


def bulk_ratio(model: str) -> Measure:
    """The error of the bulk over that of the whole partition function."""
    return of_model(model, lambda table: chosen(table, bulk=True)[0]["mse"] / chosen(table, top=0)[0]["mse"])


def falls(rows: list[Row]) -> float | None:
    """The largest step of the source's models but the clustered one; nothing where one of them is missing."""
    steps = [largest_step(model)(rows) for model in OTHERS]
    return None if None in steps else max(steps)


def as_measured(model: str, text: Callable[[Row], str], **where: Any) -> Measure:
    """A sentence about each of some rows of a model that may be absent."""

    def measure(rows: list[Row]) -> str:
        mine = select(rows, model=model)
        if not mine:
            return "not part of this size"
        return ABSENT if mine[0]["kind"] == "absent" else "; ".join(map(text, chosen(mine, **where)))

    return measure


def described(what: str, text: Callable[[Row], str], **where: Any) -> dict[str, Claim]:
    """Such sentences about each of the models beside the local one."""
    return {f"{name}: {what}": measured(as_measured(name, text, **where)) for name in STORED}


def of_each(models: Iterable[str], what: str, claim: Callable[[str], Claim]) -> dict[str, Claim]:
    """A claim about each of the source's models, which are there at paper size."""
    return {f"{model}: {what}": replace(claim(model), since="paper") for model in models}


# How well the log bulk partition function is linear in the hidden state


def error_claims(models: Iterable[str], tops: tuple[int, ...]) -> dict[str, Claim]:
    """The errors of the source's models, as printed."""
    return {
        f"{model}: mean square error with the top {top} removed": relative(
            TOLERANCE, None, value_of(model, "mse", top=top), reported=ERRORS[model][TOPS.index(top)], since="paper"
        )
        for model in models
        for top in tops
    }


def error_in_words(row: Row) -> str:
    """An error in sample and held out."""
    return f"top {row['top']}: {row['mse']:.4g} (held out {row['held_out_mse']:.4g})"


LOCAL_RATIO = at_most(
    0.3,
    "local GPT: removing 2 % of the words takes most of the error away (error over that of the whole partition function)",
    bulk_ratio(LOCAL),
    says="0.07 to 0.10 for the four models, top 100 removed",
    where="Wu 2023, Table 3.1",
)
LOCAL_FALLS = at_most(
    1.0,
    "local GPT: the error falls with every further word removed (largest ratio to the error before)",
    largest_step(LOCAL),
    says="falls for six of seven models",
    where=WHERE,
)
AS_MEASURED = described("mean square error by words removed", error_in_words, kind="error")


class Table31(ProbeFigure):
    """Without the most probable words the log partition function is linear in the hidden state, with them it is not.

    Mean square error of the best anchor vector, ⟨h, v₀⟩ ≈ log Z, for the whole partition function and for the bulk.
    """

    item, where = "wu-2023 Table 3.1", "section 3.4"
    study = Probes(sizes=FOUR_MODELS)
    view = shown("errors")
    claims = (
        LOCAL_RATIO,
        {
            "local GPT: the anchor explains the variance of the log bulk partition function (R², 2 % of the words removed)": (
                at_least(0.8, value_of(LOCAL, "r2", bulk=True), says="not a constant", where="Wu 2023, section 3.4")
            ),
            **AS_MEASURED,
        },
        error_claims(FOUR, (0, 100)),
        of_each(
            FOUR,
            "the bulk over the original error",
            lambda model: relative(TOLERANCE, None, bulk_ratio(model), reported=round(ERRORS[model][2] / ERRORS[model][0], 3)),
        ),
    )

    def draw(self, rows: list[Row]) -> Any:
        bars = [
            {**row, "of": f"bulk (top {row['top']} removed)" if row["top"] else "original"}
            for row in select(rows, kind="error")
            if row["top"] == 0 or row["bulk"]
        ]
        look: dict[str, Any] = {"mark": "held_out_mse", "log": True, "xlabel": "bars: in sample; black lines: held out"}
        panel = Panel("grouped_bars", bars, "model", "mse", by="of", ylabel="mean square error", **look)
        return draw_panels(panel, size=(1.7 * len(values_of(bars, "model")) + 2.4, 3.2))


class TableB2(ProbeFigure):
    """The error of the anchor falls with the number of words removed.

    All models, the top 0 to 10,000 of about 50,000 words removed, or the same shares of smaller vocabularies; in sample as in
    the source, and held out. Two anchors stand beside for the model whose partition function has two clusters.
    """

    item, where = "wu-2023 Table B.2", "section B.2"
    view = shown("errors")
    claims = (
        LOCAL_FALLS,
        LOCAL_RATIO,
        AS_MEASURED,
        error_claims(FOLDERS, TOPS),
        {
            "the error falls at every step for all models but GPT-2 (largest ratio to the error before)": at_most(
                1.0, falls, says="falls", since="paper"
            ),
            "GPT-2: one anchor does not fit at any number of words (smallest error)": at_least(
                100.0, of_model(CLUSTERED, lambda table: min(row["mse"] for row in table)), reported=625.8, since="paper"
            ),
            "GPT-2: with one anchor for each of two clusters it does (larger error of the two, top 100 removed)": at_most(
                1.0,
                value_of(CLUSTERED, "two_anchors", top=100),
                says="two clusters, each with its own anchor",
                where="Wu 2023, section B.2",
                since="paper",
            ),
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(errors(rows, "mse", "in sample"), errors(rows, "held_out_mse", "held out"), size=(4.6, 3.4))


def errors(rows: list[Row], column: str, title: str = "") -> Panel:
    """Error against the share of the vocabulary removed, one line per model."""
    table = [{**row, "removed": 100 * row["share"]} for row in select(rows, kind="error")]
    names = {"xlabel": "words removed, % of the vocabulary", "ylabel": "mean square error", "title": title}
    panel = curves(table, "removed", column, by="model", log="y", labels="legend", **names)
    # Linear up to one word of the largest vocabulary, so that "none removed" has a place.
    return panel.then(lambda ax: ax.set_xscale("symlog", linthresh=0.02, linscale=0.4))


class Figure31(ProbeFigure):
    """The log bulk partition function becomes linear in the hidden state as probable words are removed.

    The numbers of Table B.2, one line per model.
    """

    item, where = "wu-2023 Figure 3.1", "section 3.4"
    view = shown("errors")
    claims = (
        LOCAL_FALLS,
        {
            f"{model}: the error with the top 10,000 removed over that with none": at_most(
                1.0,
                of_model(model, lambda table: table[-1]["mse"] / table[0]["mse"]),
                reported=round(ERRORS[model][-1] / ERRORS[model][0], 4),
                where=WHERE,
                since="paper",
            )
            for model in OTHERS
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(errors(rows, "mse"), size=(5.4, 3.8))


# What the models are


def model_claims(model: str) -> dict[str, Claim]:
    """Size and perplexity of one of the source's models."""
    millions, hidden, perplexity, _ = STATED[model]
    of_size, of_width, of_text = (value_of(model, column, "model") for column in ("parameters", "hidden", "perplexity"))
    return {
        f"{model}: parameters": relative(0.06, None, of_size, reported=millions * 1e6, since="paper"),
        f"{model}: hidden dimension": equal(hidden, of_width, reported=hidden, since="paper"),
        f"{model}: perplexity": relative(PERPLEXITY_TOLERANCE, None, of_text, reported=perplexity, since="paper"),
    }


class TableB1(ProbeFigure):
    """The models: size and perplexity.

    Perplexity is that at the positions of the probe, with the context that each has in its window.
    """

    item, where = "wu-2023 Table B.1", "section B.2"
    view = shown("models")
    claims = (
        {
            "local GPT: it has learned more than how frequent words are (perplexity over that of frequencies)": at_most(
                0.7,
                of_model(LOCAL, lambda mine: mine[0]["perplexity"] / mine[0]["frequency_perplexity"], "model"),
                says="trained models",
            )
        },
        described(
            "size and perplexity",
            lambda row: (
                f"{row['parameters']:,} parameters, hidden {row['hidden']}, {row['vocabulary']:,} words, perplexity "
                f"{row['perplexity']:.2f} at {row['positions']:,} positions"
            ),
            kind="model",
        ),
        *map(model_claims, FOLDERS),
    )

    def draw(self, rows: list[Row]) -> Any:
        table = select(rows, kind="model")
        panel = scatter(table, "parameters", "perplexity", by="model", log="xy", ylabel="perplexity on its text")
        return draw_panels(panel, size=(5.0, 3.4))


# How the atoms of an output layer lie


def flat(model: str) -> Claim:
    """That its dictionary is not uniform on a sphere."""
    return at_most(0.5, value_of(model, "rank_share", "ranks"), says="close to low rank")


class Figure32(ProbeFigure):
    """The dictionaries are close to low rank: their atoms are not uniform on a sphere.

    Singular values of the output layer over the largest. Uniform atoms would have them all nearly equal.
    """

    item, where = "wu-2023 Figure 3.2", "section 3.4"
    study = Probes(sizes=FOUR_MODELS)
    view = shown("spectra")
    claims = cited(
        "Wu 2023, section 3.4",
        {
            "local GPT: the dictionary is close to low rank (stable rank over that of atoms uniform on a sphere)": flat(LOCAL),
            **described(
                "ranks",
                lambda row: (
                    f"stable rank {row['stable_rank']:.3g}, effective rank {row['effective_rank']:.3g} of {row['dim']} dimensions"
                ),
                kind="ranks",
            ),
            **of_each(FOUR, "stable rank over that of atoms uniform on a sphere", flat),
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        look = {"by": "model", "log": "y", "labels": "legend", "markers": False, "xlabel": "rank over dimension"}
        values = select(rows, kind="value")
        return draw_panels(curves(values, "place", "relative", ylabel="singular value over the largest", **look), size=(5.2, 3.6))


class Histograms(ProbeFigure):
    """One panel per model; `xlabel` is the quantity, a log partition function where none is stated."""

    xlabel = ""

    def draw(self, rows: list[Row]) -> Any:
        panels = []
        for model, bars in split(select(rows, kind="bar"), "model").items():
            if not self.xlabel:
                bars = [{**row, "of": row["which"] + (f", top {row['top']} removed" if row["top"] else "")} for row in bars]
            several = len(values_of(bars, "of")) > 1
            label = self.xlabel or ("logarithm of the partition function" if several else bars[0]["of"])
            panels.append(Panel("counted_histogram", bars, by="of" if several else None, xlabel=label, title=model))
        return draw_panels(*panels, size=(4.0, 2.9))


def bounded_norms(model: str) -> Claim:
    """That no atom is much longer than the others."""
    return at_most(5.0, value_of(model, "spread", "norms"), says="norms are bounded")


class FigureB1(Histograms):
    """Atoms have bounded norms."""

    item, where = "wu-2023 Figure B.1", "section B.2"
    view = shown("norms")
    xlabel = "norm of an atom"
    claims = cited(
        "Wu 2023, section B.2",
        {
            "local GPT: the largest norm over the median": bounded_norms(LOCAL),
            **described(
                "norms", lambda row: f"from {row['least']:.3g} to {row['largest']:.3g}, median {row['median']:.3g}", kind="norms"
            ),
            **of_each(FOLDERS, "the largest norm over the median", bounded_norms),
        },
    )


def in_a_cone(model: str, least: float = 0.1) -> Claim:
    """That two atoms point the same way."""
    return at_least(least, value_of(model, "mean", "cosines", of="atoms"), says="strongly biased to positive values")


class FigureB2(Histograms):
    """Two random atoms point the same way: the dictionary lies in a cone.

    Cosine similarity of 100,000 random pairs, beside that of Gaussian atoms of the same number and dimension.
    """

    item, where = "wu-2023 Figure B.2", "section B.2"
    view = shown("cosines")
    xlabel = "cosine of two atoms"
    claims = cited(
        "Wu 2023, section B.2",
        {
            "local GPT: mean cosine of two atoms": in_a_cone(LOCAL, 0.0),
            "Gaussian atoms: mean cosine times the root of dimension and pairs (size)": at_most(
                4.0, value_of(LOCAL, "scaled", "cosines", of=CONTROL), reported=Reported.theory(0.0, "Wu 2023, section 3.4")
            ),
            **described("cosine of two atoms", lambda row: f"{row['mean']:.3g} ± {row['std']:.2g}", kind="cosines", of="atoms"),
            **of_each(FOLDERS, "mean cosine of two atoms", in_a_cone),
        },
    )


# How the log partition function varies


def spread_in_words(row: Row) -> str:
    """Mean, spread and the anchor's error."""
    return (
        f"{row['which']}: {row['mean']:.3g} ± {row['variance'] ** 0.5:.2g}, from {row['low']:.3g} to {row['high']:.3g}, anchor's "
        f"error {row['mse']:.3g} ({row['intercept_mse']:.3g} with an intercept)"
    )


def spread_claims(models: Iterable[str], *which: str) -> Claims:
    """That the log partition function, or its bulk, is no constant: its variance is several times the anchor's error."""
    says = "varies a lot over samples"
    local = {
        f"local GPT: the {one} is no constant: its variance over the anchor's error": at_least(
            5.0, of_model(LOCAL, lambda mine: mine[0]["variance"] / mine[0]["mse"], "spread", which=one), says=says
        )
        for one in which
    }
    named = {
        f"{model}: the {one} varies (standard deviation)": at_least(
            0.5, of_model(model, lambda mine: mine[0]["variance"] ** 0.5, "spread", which=one), says=says, since="paper"
        )
        for model in models
        for one in which
    }
    return cited("Wu 2023, section 3.4", local | described("distribution", spread_in_words, kind="spread") | named)


class Figure33(Histograms):
    """The log partition function and its bulk vary over the text: the anchor is not the trivial constant.

    Over all token positions, for the four models of the main text.
    """

    item, where = "wu-2023 Figure 3.3", "section 3.4"
    study = Probes(sizes=FOUR_MODELS)
    view = shown("values")
    claims = spread_claims(FOUR, WHOLE, BULK)


class FigureB3(Histograms):
    """The log partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.3", "section B.2"
    view = shown("values", which=WHOLE)
    claims = spread_claims(FOLDERS, WHOLE)


class FigureB4(Histograms):
    """The log bulk partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.4", "section B.2"
    view = shown("values", which=BULK)
    claims = spread_claims(FOLDERS, BULK)
