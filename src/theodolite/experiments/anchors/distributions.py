"""Figures 3.3, B.3 and B.4: the log partition function and its bulk are far from constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from theodolite.experiments.anchors.language_models import FOLDERS, LOCAL, SMOLLM, STORIES, Probed
from theodolite.experiments.anchors.probes import (
    ALL_MODELS,
    FOUR,
    FOUR_MODELS,
    ProbeExperiment,
    as_measured,
    histogram_rows,
    of_model,
    removed,
)
from theodolite.experiments.claims import Claim, Measure, Reported
from theodolite.experiments.query import chosen
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE, BULK = "log Z", "log Z of the bulk"
#: How many times its error the variance must be for the anchor to be no constant.
TIMES = 5.0


def value_rows(found: Probed) -> Iterator[Row]:
    """Histograms of the log partition function and of its bulk, with their spread and the anchor's error."""
    probe = found.probe
    top = removed(probe.vocabulary)
    for which, number in ((WHOLE, 0), (BULK, top)):
        i = probe.top.index(number)
        shared: dict[str, Any] = {"which": which, "top": number}
        summary = ("mean", "variance", "low", "high", "mse", "intercept_mse", "constant_mse")
        yield {"kind": "spread", **shared, **{name: getattr(probe, name)[i] for name in summary}}
        yield from histogram_rows("bar", *probe.histogram(number), **shared)


def whole_rows(found: Probed) -> Iterator[Row]:
    """Those of the whole partition function."""
    return (row for row in value_rows(found) if row["which"] == WHOLE)


def bulk_rows(found: Probed) -> Iterator[Row]:
    """Those of the bulk."""
    return (row for row in value_rows(found) if row["which"] == BULK)


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


def _claims(models: tuple[str, ...], *which: str) -> tuple[Claim, ...]:
    where = "000, section 3.4"
    local = (
        Claim(
            f"local GPT: the {one} is no constant: its variance over the anchor's error",
            spread_over_error(LOCAL, one),
            rule="at least",
            expected=TIMES,
            reported=Reported("varies a lot over samples", where),
        )
        for one in which
    )
    measured = (Claim(f"{name}: distribution", as_measured(name, _spread)) for name in (STORIES, SMOLLM))
    named = (
        Claim(
            f"{model}: the {one} varies (standard deviation)",
            deviation(model, one),
            rule="at least",
            expected=0.5,
            reported=Reported("varies a lot over samples", where),
            since="paper",
        )
        for model in models
        for one in which
    )
    return (*local, *measured, *named)


class _Distributions(ProbeExperiment):
    """One panel per model."""

    def draw(self, rows: list[Row]) -> Figure:
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

    id = "anchor/figure-3.3"
    source = "000, section 3.4, Figure 3.3"
    item = "wu-2023 Figure 3.3"
    sizes = FOUR_MODELS
    show = value_rows
    claims = _claims(FOUR, WHOLE, BULK)


class FigureB3(_Distributions):
    """The log partition function over all token positions, of all models."""

    id = "anchor/figure-B.3"
    source = "000, section B.2, Figure B.3"
    item = "wu-2023 Figure B.3"
    sizes = ALL_MODELS
    show = whole_rows
    claims = _claims(tuple(FOLDERS), WHOLE)


class FigureB4(_Distributions):
    """The log bulk partition function over all token positions, of all models."""

    id = "anchor/figure-B.4"
    source = "000, section B.2, Figure B.4"
    item = "wu-2023 Figure B.4"
    sizes = ALL_MODELS
    show = bulk_rows
    claims = _claims(tuple(FOLDERS), BULK)
