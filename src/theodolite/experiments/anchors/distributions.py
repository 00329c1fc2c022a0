"""Figures 3.2, 3.3 and B.1 to B.4: how the atoms of an output layer lie, and how the log partition function varies."""

from __future__ import annotations

from typing import Any

from theodolite.experiments import Reported, at_least, at_most, cited
from theodolite.experiments.anchors.probes import (
    BULK,
    CONTROL,
    FOLDERS,
    FOUR,
    FOUR_MODELS,
    LOCAL,
    WHOLE,
    ProbeFigure,
    Probes,
    described,
    shown,
    value_of,
)
from theodolite.experiments.claims import Claims
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, split
from theodolite.experiments.query import chosen, select, values_of
from theodolite.results import Row


def _ranks(rows: list[Row]) -> str:
    row = chosen(rows, kind="ranks")[0]
    return f"stable rank {row['stable_rank']:.3g}, effective rank {row['effective_rank']:.3g} of {row['dim']} dimensions"


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
            "local GPT: the dictionary is close to low rank (stable rank over that of atoms uniform on a sphere)": at_most(
                0.5, value_of(LOCAL, "rank_share", "ranks"), says="close to low rank"
            ),
            **described("ranks", _ranks),
            **{
                f"{model}: stable rank over that of atoms uniform on a sphere": at_most(
                    0.5, value_of(model, "rank_share", "ranks"), says="close to low rank", since="paper"
                )
                for model in FOUR
            },
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        look = {"by": "model", "log": "y", "labels": "legend", "markers": False, "xlabel": "rank over dimension"}
        values = select(rows, kind="value")
        return draw_panels(curves(values, "place", "relative", ylabel="singular value over the largest", **look), size=(5.2, 3.6))


class _Histograms(ProbeFigure):
    """One panel per model; `xlabel` is the quantity, a log partition function where none is stated."""

    xlabel = ""

    def draw(self, rows: list[Row]) -> Any:
        bars = [row if "of" in row else {**row, "of": _called(row)} for row in select(rows, kind="bar")]
        return draw_panels(*(self._panel(mine, model) for model, mine in split(bars, "model").items()), size=(4.0, 2.9))

    def _panel(self, bars: list[Row], model: str) -> Panel:
        several = len(values_of(bars, "of")) > 1
        label = self.xlabel or ("logarithm of the partition function" if several else bars[0]["of"])
        return Panel("counted_histogram", bars, by="of" if several else None, xlabel=label, title=model)


def _called(row: Row) -> str:
    return f"{row['which']}, top {row['top']} removed" if row["top"] else str(row["which"])


def _norms(rows: list[Row]) -> str:
    row = chosen(rows, kind="norms")[0]
    return f"from {row['least']:.3g} to {row['largest']:.3g}, median {row['median']:.3g}"


class FigureB1(_Histograms):
    """Atoms have bounded norms."""

    item, where = "wu-2023 Figure B.1", "section B.2"
    view = shown("norms")
    xlabel = "norm of an atom"
    claims = cited(
        "Wu 2023, section B.2",
        {
            "local GPT: the largest norm over the median": at_most(
                5.0, value_of(LOCAL, "spread", "norms"), says="norms are bounded"
            ),
            **described("norms", _norms),
            **{
                f"{model}: the largest norm over the median": at_most(
                    5.0, value_of(model, "spread", "norms"), says="norms are bounded", since="paper"
                )
                for model in FOLDERS
            },
        },
    )


def _cosines(rows: list[Row]) -> str:
    row = chosen(rows, kind="cosines", of="atoms")[0]
    return f"{row['mean']:.3g} ± {row['std']:.2g}"


class FigureB2(_Histograms):
    """Two random atoms point the same way: the dictionary lies in a cone.

    Cosine similarity of 100,000 random pairs, beside that of Gaussian atoms of the same number and dimension.
    """

    item, where = "wu-2023 Figure B.2", "section B.2"
    view = shown("cosines")
    xlabel = "cosine of two atoms"
    claims = cited(
        "Wu 2023, section B.2",
        {
            "local GPT: mean cosine of two atoms": at_least(
                0.0, value_of(LOCAL, "mean", "cosines", of="atoms"), says="strongly biased to positive values"
            ),
            "Gaussian atoms: mean cosine times the root of dimension and pairs (size)": at_most(
                4.0, value_of(LOCAL, "scaled", "cosines", of=CONTROL), reported=Reported.theory(0.0, "Wu 2023, section 3.4")
            ),
            **described("cosine of two atoms", _cosines),
            **{
                f"{model}: mean cosine of two atoms": at_least(
                    0.1, value_of(model, "mean", "cosines", of="atoms"), says="strongly biased to positive values", since="paper"
                )
                for model in FOLDERS
            },
        },
    )


#: How many times its error the variance must be for the anchor to be no constant.
TIMES = 5.0


def _spread(rows: list[Row]) -> str:
    return "; ".join(
        f"{row['which']}: {row['mean']:.3g} ± {row['variance'] ** 0.5:.2g}, from {row['low']:.3g} to {row['high']:.3g}, anchor's "
        f"error {row['mse']:.3g} ({row['intercept_mse']:.3g} with an intercept)"
        for row in chosen(rows, kind="spread")
    )


def _claims(models: tuple[str, ...], *which: str) -> Claims:
    def over_error(row: Row) -> float:
        return float(row["variance"] / row["mse"])

    def deviation(row: Row) -> float:
        return float(row["variance"] ** 0.5)

    local = {
        f"local GPT: the {one} is no constant: its variance over the anchor's error": at_least(
            TIMES, value_of(LOCAL, over_error, "spread", which=one), says="varies a lot over samples"
        )
        for one in which
    }
    named = {
        f"{model}: the {one} varies (standard deviation)": at_least(
            0.5, value_of(model, deviation, "spread", which=one), says="varies a lot over samples", since="paper"
        )
        for model in models
        for one in which
    }
    return cited("Wu 2023, section 3.4", local | described("distribution", _spread) | named)


class Figure33(_Histograms):
    """The log partition function and its bulk vary over the text: the anchor is not the trivial constant.

    Over all token positions, for the four models of the main text.
    """

    item, where = "wu-2023 Figure 3.3", "section 3.4"
    study = Probes(sizes=FOUR_MODELS)
    view = shown("values")
    claims = _claims(FOUR, WHOLE, BULK)


class FigureB3(_Histograms):
    """The log partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.3", "section B.2"
    view = shown("values", which=WHOLE)
    claims = _claims(tuple(FOLDERS), WHOLE)


class FigureB4(_Histograms):
    """The log bulk partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.4", "section B.2"
    view = shown("values", which=BULK)
    claims = _claims(tuple(FOLDERS), BULK)
