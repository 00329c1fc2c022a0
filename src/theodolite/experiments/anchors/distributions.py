"""Figures 3.2, 3.3 and B.1 to B.4: how the atoms of an output layer lie, and how the log partition function varies."""

from __future__ import annotations

from typing import Any

from theodolite.experiments import at_least, at_most, measured
from theodolite.experiments.anchors.probes import (
    BULK,
    CONTROL,
    FOLDERS,
    FOUR,
    FOUR_MODELS,
    LOCAL,
    SMOLLM,
    STORIES,
    WHOLE,
    ProbeFigure,
    Probes,
    as_measured,
    of_model,
    shown,
    value_of,
)
from theodolite.experiments.claims import Claims, Measure
from theodolite.experiments.query import chosen
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
    claims = (
        {
            "local GPT: the dictionary is close to low rank (stable rank over that of atoms uniform on a sphere)": at_most(
                0.5, value_of(LOCAL, "rank_share", "ranks"), says="close to low rank", where="Wu 2023, section 3.4"
            ),
        },
        *({f"{name}: ranks": measured(as_measured(name, _ranks))} for name in (STORIES, SMOLLM)),
        *(
            {
                f"{model}: stable rank over that of atoms uniform on a sphere": at_most(
                    0.5,
                    value_of(model, "rank_share", "ranks"),
                    says="close to low rank",
                    where="Wu 2023, section 3.4",
                    since="paper",
                )
            }
            for model in FOUR
        ),
    )

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        figure, axes = plots.panels(1, letters=False, size=(5.2, 3.6))
        plots.curves(
            [row for row in rows if row["kind"] == "value"],
            "place",
            "relative",
            by="model",
            log="y",
            labels="legend",
            markers=False,
            xlabel="rank over dimension",
            ylabel="singular value over the largest",
            ax=axes[0],
        )
        return figure


class _Histograms(ProbeFigure):
    """One panel per model."""

    xlabel = ""

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        models = list(dict.fromkeys(row["model"] for row in rows if row["kind"] == "bar"))
        figure, axes = plots.panels(len(models), size=(4.0, 2.9))
        for ax, model in zip(axes, models, strict=True):
            bars = of_model(rows, model, "bar")
            several = len({row["of"] for row in bars}) > 1
            plots.counted_histogram(bars, by="of" if several else None, xlabel=self.xlabel, title=model, ax=ax)
        return figure


def _norms(rows: list[Row]) -> str:
    row = chosen(rows, kind="norms")[0]
    return f"from {row['least']:.3g} to {row['largest']:.3g}, median {row['median']:.3g}"


class FigureB1(_Histograms):
    """Atoms have bounded norms."""

    item, where = "wu-2023 Figure B.1", "section B.2"
    view = shown("norms")
    xlabel = "norm of an atom"
    claims = (
        {
            "local GPT: the largest norm over the median": at_most(
                5.0, value_of(LOCAL, "spread", "norms"), says="norms are bounded", where="Wu 2023, section B.2"
            ),
        },
        *({f"{name}: norms": measured(as_measured(name, _norms))} for name in (STORIES, SMOLLM)),
        *(
            {
                f"{model}: the largest norm over the median": at_most(
                    5.0, value_of(model, "spread", "norms"), says="norms are bounded", where="Wu 2023, section B.2", since="paper"
                )
            }
            for model in FOLDERS
        ),
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
    claims = (
        {
            "local GPT: mean cosine of two atoms": at_least(
                0.0,
                value_of(LOCAL, "mean", "cosines", of="atoms"),
                says="strongly biased to positive values",
                where="Wu 2023, section B.2",
            ),
            "Gaussian atoms: mean cosine times the root of dimension and pairs (size)": at_most(
                4.0,
                value_of(LOCAL, "scaled", "cosines", of=CONTROL),
                reported=0.0,
                where="Wu 2023, section 3.4",
                read_from="theory",
            ),
        },
        *({f"{name}: cosine of two atoms": measured(as_measured(name, _cosines))} for name in (STORIES, SMOLLM)),
        *(
            {
                f"{model}: mean cosine of two atoms": at_least(
                    0.1,
                    value_of(model, "mean", "cosines", of="atoms"),
                    says="strongly biased to positive values",
                    where="Wu 2023, section B.2",
                    since="paper",
                )
            }
            for model in FOLDERS
        ),
    )


#: How many times its error the variance must be for the anchor to be no constant.
TIMES = 5.0


def spread_over_error(model: str, which: str) -> Measure:
    """The variance over the error of the anchor; nothing where the model is not measured."""

    def measure(rows: list[Row]) -> float | None:
        found = of_model(rows, model, "spread", which=which)
        return found[0]["variance"] / found[0]["mse"] if found else None

    return measure


def deviation(model: str, which: str) -> Measure:
    """The standard deviation over positions."""

    def measure(rows: list[Row]) -> float | None:
        found = of_model(rows, model, "spread", which=which)
        return found[0]["variance"] ** 0.5 if found else None

    return measure


def _spread(rows: list[Row]) -> str:
    return "; ".join(
        f"{row['which']}: {row['mean']:.3g} ± {row['variance'] ** 0.5:.2g}, from {row['low']:.3g} to {row['high']:.3g}, anchor's "
        f"error {row['mse']:.3g} ({row['intercept_mse']:.3g} with an intercept)"
        for row in chosen(rows, kind="spread")
    )


def _claims(models: tuple[str, ...], *which: str) -> Claims:
    where = "Wu 2023, section 3.4"
    local = (
        {
            f"local GPT: the {one} is no constant: its variance over the anchor's error": at_least(
                TIMES, spread_over_error(LOCAL, one), says="varies a lot over samples", where=where
            )
        }
        for one in which
    )
    described = ({f"{name}: distribution": measured(as_measured(name, _spread))} for name in (STORIES, SMOLLM))
    named = (
        {
            f"{model}: the {one} varies (standard deviation)": at_least(
                0.5, deviation(model, one), says="varies a lot over samples", where=where, since="paper"
            )
        }
        for model in models
        for one in which
    )
    return (*local, *described, *named)


class _Distributions(ProbeFigure):
    """One panel per model."""

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        models = list(dict.fromkeys(row["model"] for row in rows if row["kind"] == "bar"))
        figure, axes = plots.panels(len(models), size=(4.0, 2.9))
        for ax, model in zip(axes, models, strict=True):
            bars = [{**row, "of": _called(row)} for row in of_model(rows, model, "bar")]
            several = len({row["of"] for row in bars}) > 1
            label = "logarithm of the partition function" if several else bars[0]["of"]
            plots.counted_histogram(bars, by="of" if several else None, xlabel=label, title=model, ax=ax)
        return figure


def _called(row: Row) -> str:
    return f"{row['which']}, top {row['top']} removed" if row["top"] else str(row["which"])


class Figure33(_Distributions):
    """The log partition function and its bulk vary over the text: the anchor is not the trivial constant.

    Over all token positions, for the four models of the main text.
    """

    item, where = "wu-2023 Figure 3.3", "section 3.4"
    study = Probes(sizes=FOUR_MODELS)
    view = shown("values")
    claims = _claims(FOUR, WHOLE, BULK)


class FigureB3(_Distributions):
    """The log partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.3", "section B.2"
    view = shown("values", which=WHOLE)
    claims = _claims(tuple(FOLDERS), WHOLE)


class FigureB4(_Distributions):
    """The log bulk partition function over all token positions, of all models."""

    item, where = "wu-2023 Figure B.4", "section B.2"
    view = shown("values", which=BULK)
    claims = _claims(tuple(FOLDERS), BULK)
