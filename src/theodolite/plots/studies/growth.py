"""Operators that grow a model, as pictures: the losses of a trial, and what a study says of choosing early."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.arguments import checked, instance
from theodolite.measures.growth import GrowthChoice, GrowthStudy, LayerAblation, Stacking
from theodolite.plots.axes_style import note, reference
from theodolite.plots.curves import curves
from theodolite.plots.figures import panels
from theodolite.plots.heatmaps import matrix
from theodolite.plots.style import an_axes
from theodolite.results import Row

#: Curves that keep a name of their own; the others are drawn as one kind.
NAMED = 6
OTHERS = "other operators"


@checked(choice=instance(GrowthChoice), ax=an_axes)
def plot_growth_choice(choice: GrowthChoice, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The validation loss of each operator against the step of the trial; the best ones by name, baselines as lines."""
    best = [operator.name for operator in choice.ranking[:NAMED]]
    rows = [row for row in choice.rows() if not row["equal_to"] and row["operator"] not in ("small", "scratch")]
    ax = _losses(rows, best, title or "Validation loss after growing", ax)
    for row in choice.baselines:
        if row["equal_to"] == "all trials":
            reference(ax, y=row["loss"], label=f"{row['operator']}, equal FLOPs")
    return ax


@checked(study=instance(GrowthStudy))
def growth_study_panels(study: GrowthStudy, *, title: str | None = None) -> Figure:
    """Losses, their rank correlations over time, the correlation with the final ranks, and recall with relative regret.

    Where ranks are noise, only the losses are drawn.
    """
    heat = study.heatmap()
    figure, axes = panels(1 if heat is None else 4, columns=1 if heat is None else 2, size=(4.8, 3.4), title=title)
    best = [study.names[c] for c in sorted(range(len(study.names)), key=lambda c: float(study.final[c]))[:NAMED]]
    _losses([row for row in study.rows() if row["operator"] in study.names], best, "Validation loss", axes[0])
    if heat is None:
        note(axes[0], "the spread is below three times the noise: no ranks")
        return figure
    names = [f"{step:g}" for step in study.steps]
    shown = {"row_names": names, "column_names": names, "limits": (-1.0, 1.0), "annotate": False}
    matrix(heat, **shown, xlabel="step", ylabel="step", title="Rank correlation", ax=axes[1])  # type: ignore[arg-type]
    found = {"Spearman": study.final_correlation(), "Pearson": study.final_correlation("pearson")}
    _lines(study, found, "correlation", "Correlation with the final losses", axes[2])
    costs = {f"recall@{r}": study.recall(r) for r in (1, 2, 3)} | {"relative regret": study.relative_regret()}
    _lines(study, costs, "value", "Choosing at a step", axes[3])
    return figure


@checked(stacking=instance(Stacking), ax=an_axes)
def plot_stacking(stacking: Stacking, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The validation loss at the end of each stage, by way."""
    first = next(row for row in stacking.rows() if row["way"] == "adaptive")
    shared = [{**first, "way": "last"}] if any(row["way"] == "last" for row in stacking.rows()) else []
    rows = [*stacking.rows(), *shared]
    return curves(rows, "step", "loss", by="way", title=title or "Stacking", ylabel="validation loss", ax=ax)


@checked(ablation=instance(LayerAblation), ax=an_axes)
def plot_layer_ablation(ablation: LayerAblation, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The rise of the loss with each layer left out, and with each repeated, against the layer; bands are the errors."""
    rows = [
        {"layer": row["layer"], "rise": row[key], "error": row[f"{key}_error"], "of": name}
        for key, name in (("left_out", "left out"), ("repeated", "repeated"))
        for row in ablation.rows()
    ]
    known = all(math.isfinite(row["error"]) for row in rows)
    ax = curves(
        rows, "layer", "rise", by="of", error="error" if known else None, markers=True, title=title or "Layers one by one",
        ylabel="rise of the loss", ax=ax,
    )  # fmt: skip
    ax.xaxis.get_major_locator().set_params(integer=True)
    return reference(ax, y=0.0, label="the model as it is")


def _losses(rows: list[Row], best: list[str], title: str, ax: Axes | None) -> Axes:
    named = [{**row, "operator": row["operator"] if row["operator"] in best else OTHERS} for row in rows]
    order = [*best, *([OTHERS] if any(row["operator"] == OTHERS for row in named) else [])]
    return curves(
        named, "step", "loss", by="operator", order=order, markers=False, labels="legend", title=title,
        xlabel="steps after growing", ylabel="validation loss", ax=ax,
    )  # fmt: skip


def _lines(study: GrowthStudy, columns: dict[str, object], y: str, title: str, ax: Axes) -> None:
    rows = [
        {"step": step, y: float(value), "of": name}
        for name, values in columns.items()
        for step, value in zip(study.steps, values, strict=True)  # type: ignore[call-overload]
    ]
    curves(rows, "step", y, by="of", markers=False, title=title, xlabel="steps after growing", ax=ax)
