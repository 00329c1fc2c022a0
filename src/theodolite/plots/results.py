"""What `result.plot()` draws: for each kind of result the picture that people would look at first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from theodolite.plots.anchors import plot_anchor_probe, plot_atom_geometry
from theodolite.plots.axes_style import reference
from theodolite.plots.bars import bars, layer_ratios
from theodolite.plots.certificate import plot_certificate, plot_posterior
from theodolite.plots.curves import curves
from theodolite.plots.dictionary import plot_atom_usage, plot_dictionary_choice
from theodolite.plots.linear_path import linear_path_panels
from theodolite.plots.monitor import plot_monitor, plot_runs
from theodolite.plots.range_test import range_test
from theodolite.plots.regimes import regime_diagram
from theodolite.plots.scatter import scatter
from theodolite.plots.spectra import density, eigenvalues
from theodolite.plots.stability import stability_panels
from theodolite.plots.studies.growth import growth_study_panels, plot_growth_choice, plot_stacking
from theodolite.results import Result

Drawing = Axes | Figure


def draw(result: Result) -> Figure:
    """The picture of a result; raises where its kind has none.

    >>> from theodolite.training import Trace
    >>> draw(Trace(loss=(2.0, 1.0), rate=(0.1, 0.1), epoch=(0, 0), measured={})).axes[0].get_ylabel()
    'loss'
    """
    if result.type_key not in _DRAWINGS:
        raise ValueError(f"A {type(result).__name__} has no picture. Its numbers are in rows(); th.plots draws rows.")
    drawn = _DRAWINGS[result.type_key](result)
    return drawn if isinstance(drawn, Figure) else drawn.figure  # type: ignore[return-value]


def has_picture(result: Result) -> bool:
    """Whether `draw` knows this kind of result."""
    return result.type_key in _DRAWINGS


def loss_curve(result: Any) -> Axes:
    """The loss of each step; on a logarithmic axis where it spans more than a decade."""
    rows = result.step_rows() if hasattr(result, "step_rows") else result.rows()
    losses = [row["loss"] for row in rows if row["loss"] == row["loss"]]
    wide = losses and min(losses) > 0 and max(losses) > 20 * min(losses)
    by = "replica" if rows and "replica" in rows[0] else None
    return curves(rows, "step", "loss", by=by, log="y" if wide else "", markers=False)


def trial_run(result: Any) -> Axes:
    """The losses of a trial at the user's rate, beside where they began."""
    axes = loss_curve(result)
    axes.set_title(f"Trial run on a copy at your rate, {result.rate:g}")
    return reference(axes, y=result.losses[0], label="start") if result.losses else axes


def trial_runs(result: Any) -> Axes:
    """The losses of short trainings, as they are and with each change."""
    if not result.curves:
        raise ValueError("Nothing was tried, so there is no picture.")
    return curves(list(result.curves), "step", "loss", by="run", markers=False, title="Short trainings of copies")


def short_training(result: Any) -> Axes:
    """The losses of a short training, beside those of the same batches without it and that of the best constant prediction."""
    rows = [row for row in result.curve() if math.isfinite(row["loss"])]
    if not rows:
        raise ValueError("No run was made, so there is no picture: name a learning rate.")
    near = result.trivial is not None and result.trivial < 3 * max(row["loss"] for row in rows)
    if near:  # as a curve of its own: its name then keeps clear of those of the others
        ends = {row["step"] for row in rows}
        rows += [{"run": "constant prediction", "step": step, "loss": result.trivial} for step in (min(ends), max(ends))]
    title = "A short training of a copy, as it stands"
    return curves(rows, x="step", y="loss", by="run", markers=False, title=title, ylabel="loss of the batch")


def gradients_by_layer(result: Any) -> Axes:
    """Gradients and updates over the weights of each layer, from the first to the last."""
    columns = {"gradient_ratio": "gradient over weights"}
    if result.lr is not None:
        columns["update_ratio"] = f"one step of {result.optimizer} over weights"
    return layer_ratios(result.rows(), columns, title="Gradients from the first layer to the last")


def gradient_groups(result: Any) -> Axes:
    """Loss and gradient norm of each group of samples."""
    title = "Loss and gradient of each group of samples"
    return scatter(result.rows(), x="loss", y="gradient_norm", title=title, ylabel="gradient norm")


def batch_rates(result: Any) -> Axes:
    """The share of batches whose critical rate lies below a rate, with the user's own marked."""
    finite = sorted(rate for rate in result.rates.tolist() if rate < float("inf"))
    rows = [{"rate": rate, "share": (i + 1) / len(result.rates)} for i, rate in enumerate(finite)]
    names = {"xlabel": "critical rate", "ylabel": "share of batches below", "title": "Critical rates of single batches"}
    axes = curves(rows, x="rate", y="share", markers=False, **names)  # type: ignore[arg-type]
    return axes if result.rate is None else reference(axes, x=result.rate, label="your rate")


def input_directions(result: Any) -> Axes:
    """The shares of the top directions of the gradient outer product."""
    rows = [{"direction": i, "share": share} for i, share in enumerate(result.shares, 1) if share > 0]
    axes = curves(rows, "direction", "share", title="Top directions of the gradient outer product", ylabel="share of the trace")
    axes.set_ylim(bottom=0)
    return axes


def gradient_share(result: Any) -> Axes:
    """The share of the squared gradient in the sharpest directions, by how many they are."""
    title = "Share of the squared gradient in the sharpest directions"
    axes = curves(result.rows(), x="directions", y="fraction", markers=True, title=title, ylabel="share")
    axes.set_ylim(0, 1.05)
    return axes


def sweep_of_rates(result: Any) -> Axes:
    """The regimes of a sweep of learning rates."""
    return regime_diagram(result.rows(), steps=getattr(result, "steps", None))


def eigenvalues_in_time(result: Any) -> Axes:
    """Eigenvalues at the checkpoints, one line for each rank."""
    places = {label: t for t, label in enumerate(result.labels)}
    numeric = all(isinstance(label, int | float) for label in result.labels)
    rows = [{**row, "at": row["label"] if numeric else places[row["label"]]} for row in result.rows()]
    return curves(rows, "at", "eigenvalue", by="index", xlabel="checkpoint", title="Eigenvalues along training")


def drift_by_distance(result: Any) -> Axes:
    """How far the tangent kernel changes, by the distance of the weights."""
    return scatter(result.rows(), x="distance", y="drift", title="Change of the tangent kernel", ylabel="‖K − K₀‖ / ‖K₀‖")


def column_scales(result: Any) -> Axes:
    """The standard deviations of the columns of the input, on a logarithmic axis."""
    rows = sorted(result.plain, key=lambda row: -row["spread"])
    title = "Scale of the channels" if result.channels else "Scale of the columns"
    return bars(rows, "column", "spread", log=True, title=title, xlabel="standard deviation")


def class_counts(result: Any) -> Axes:
    """The samples of each class; on a logarithmic axis where they differ by far."""
    wide = max(result.counts) > 50 * max(1, min(result.counts))
    return bars(result.rows(), "class", "samples", log=wide, title="Samples of each class")


def rates_swept(result: Any) -> Axes:
    """Loss over rate, with the critical rate, the catapult window, the user's rate and the suggestion."""
    edge = result.critical
    known = edge is not None and edge.value < float("inf")
    marks = {"suggestion": result.suggestion, "own": result.lr, "critical": edge.value if known else None}
    return range_test(result.rows(), **marks, window=(edge.window or None) if known else None)


_DRAWINGS: dict[str, Callable[[Any], Drawing]] = {
    "alignment": gradient_share,
    "anchor-probe": plot_anchor_probe,
    "atom-geometry": plot_atom_geometry,
    "atom-usage": lambda result: plot_atom_usage(result.rows()),
    "batch-critical-rates": batch_rates,
    "catapult-sweep": sweep_of_rates,
    "column-audit": column_scales,
    "density": density,
    "dictionary-choice": lambda result: plot_dictionary_choice(result.rows()),
    "eigen-trajectory": eigenvalues_in_time,
    "eigenpairs": eigenvalues,
    "feature-report": input_directions,
    "fleet-trace": loss_curve,
    "gaussian-posterior": plot_posterior,
    "gradient-flow": gradients_by_layer,
    "gradient-noise": gradient_groups,
    "growth-choice": plot_growth_choice,
    "growth-study": growth_study_panels,
    "kernel-drift": drift_by_distance,
    "label-audit": class_counts,
    "learning-progress": short_training,
    "linear-path": lambda result: linear_path_panels(result.rows()),
    "monitor-report": plot_monitor,
    "range-test": rates_swept,
    "regime": trial_run,
    "risk-certificate": plot_certificate,
    "run-comparison": plot_runs,
    "stability-result": lambda result: stability_panels(result.rows()),
    "stacking": plot_stacking,
    "trace": loss_curve,
    "trial-runs": trial_runs,
}
