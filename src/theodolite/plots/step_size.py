"""The choice of a step size as a picture: the loss of every setting, on the data trained on and on held-out data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from theodolite.arguments import checked, instance
from theodolite.measures.stepsize import StepSizeChoice
from theodolite.plots.axes_style import label_axes, legend, reference
from theodolite.plots.curves import curves
from theodolite.plots.style import GREY, PALETTE, an_axes, new_axes, style
from theodolite.plots.tables import numbers
from theodolite.results import Row

WORDS = {"valid": "held-out data", "train": "data trained on"}


@checked(choice=instance(StepSizeChoice), ax=an_axes)
def plot_step_size(choice: StepSizeChoice, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The loss after the last step over the learning rate, by both losses where both are known; blown-up runs are shaded.

    The band is the standard error of the difference to the best rate, which is what the choice rests on. Where two
    hyperparameters were swept there is a line for each value of the second. The setting that was chosen is marked.
    """
    names = list(choice.best)
    if not choice.curve or len({row[names[0]] for row in choice.curve}) < 2:
        raise ValueError("A single setting was tried, so there is no picture. Its numbers are in rows().")
    rows = sorted(choice.curve, key=lambda row: row[names[0]])
    other = next((name for name in names[1:] if len({row[name] for row in rows}) > 1 and not name.startswith("lr:")), None)
    swept = {row["search"] for row in choice.compared} & {"sweep"} or choice.search == "sweep"
    if other is not None and swept:
        return _by_second(choice, rows, names[0], other, title, ax)
    with style():
        ax = new_axes(ax, size=(5.6, 3.6))
        ax.set_xscale("log")
        for colour, split in zip(PALETTE, ("valid", "train"), strict=False):
            if rows[0][split] is not None:
                _line(ax, rows, names[0], split, colour, banded=split == choice.split)
        limits = _limits(rows)
        ax.set_yscale("log")
        ax.set_ylim(*limits)
        _shade(ax, rows, names[0])
        label_axes(ax, "", "", _called(names[0]), f"loss after {choice.steps} steps", title)
        reference(ax, x=choice.best[names[0]], label="chosen")
        legend(ax)
    return ax


def _line(ax: Axes, rows: list[Row], name: str, split: str, colour: str, *, banded: bool) -> None:
    """One loss over the rates, where not all runs blew up."""
    x, y = (np.array(numbers(rows, column), dtype=float) for column in (name, split))
    ax.plot(x, y, color=colour, marker="o", markersize=3, label=WORDS[split])
    if banded:
        error = np.array([0.0 if math.isnan(row["difference_error"]) else row["difference_error"] for row in rows])
        ax.fill_between(x, np.maximum(y - error, 1e-300), y + error, color=colour, alpha=0.2, linewidth=0)


def _limits(rows: list[Row]) -> tuple[float, float]:
    """Room for the losses of rates at which no run blew up; of all where there are none."""
    calm = [row for row in rows if not row["truncated"]] or rows
    losses = [row[split] for row in calm for split in ("train", "valid") if row[split]]
    return 0.7 * min(losses), 1.5 * max(losses)


def _shade(ax: Axes, rows: list[Row], name: str) -> None:
    """The rates at which runs blew up, from halfway between the last calm one and the first that is not."""
    lost = [row[name] for row in rows if row["truncated"]]
    if not lost:
        return
    calm = [row[name] for row in rows if not row["truncated"] and row[name] < min(lost)]
    first = math.sqrt(max(calm) * min(lost)) if calm else min(lost)
    ax.axvspan(first, max(lost), color=GREY, alpha=0.15, linewidth=0, zorder=0.5, label="runs blow up")


def _by_second(choice: StepSizeChoice, rows: list[Row], name: str, other: str, title: str | None, ax: Axes | None) -> Axes:
    """A line over the rate for each value of the second hyperparameter."""
    shown = [{**row, other: f"{other} {row[other]:.3g}"} for row in rows if row["truncated"] < 1]
    labels: dict[str, Any] = {"xlabel": _called(name), "ylabel": f"loss after {choice.steps} steps", "title": title, "ax": ax}
    ax = curves(shown, name, "score", by=other, log="xy", **labels)
    return reference(ax, x=choice.best[name], label="chosen")


def _called(name: str) -> str:
    return "learning rate" if name == "lr" else name
