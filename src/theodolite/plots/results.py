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
from theodolite.plots.regimes import regime_diagram
from theodolite.plots.scatter import scatter
from theodolite.plots.spectra import density, eigenvalues
from theodolite.plots.stability import stability_panels
from theodolite.plots.step_size import plot_step_size, range_test
from theodolite.plots.studies.growth import growth_study_panels, plot_growth_choice, plot_layer_ablation, plot_stacking
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


def meta_objective(result: Any) -> Axes:
    """The mean loss of each segment, by meta-update; the first of a trajectory stand high."""
    title = "Training of a learned optimizer"
    rows = [row for row in result.rows() if math.isfinite(row["objective"])] or result.rows()
    return curves(rows, "update", "objective", markers=False, title=title, xlabel="meta-update", ylabel="mean loss of a segment")


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


def tangents_along_run(result: Any) -> Axes:
    """How long the derivative of the weights in each hyperparameter grows along the run, in powers of ten."""
    names = [name for name in result.gradient if result.trace and f"length of {name}" in result.trace[0]]
    rows = [
        {"step": row["step"], "hyperparameter": name, "length": row[f"length of {name}"] / math.log(10)}
        for name in names
        for row in result.trace
        if math.isfinite(row[f"length of {name}"])
    ]
    if not rows:
        raise ValueError("No derivative was carried along the run, so there is no picture. Its numbers are in rows().")
    title = f"Derivative of the weights: {result.health}"
    return curves(rows, "step", "length", by="hyperparameter", markers=False, title=title, ylabel="log10 of its length")


def rates_swept(result: Any) -> Axes:
    """Loss over rate, with the critical rate, the catapult window, the user's rate and the suggestion."""
    edge = result.critical
    known = edge is not None and edge.value < float("inf")
    marks = {"suggestion": result.suggestion, "own": result.lr, "critical": edge.value if known else None}
    return range_test(result.rows(), **marks, window=(edge.window or None) if known else None)


def meta_gradient_over_rates(result: Any) -> Axes:
    """The loss after some steps over the learning rate, as (1/t) log f, with its lowest point."""
    if result.rate.numel() < 2:
        raise ValueError("The meta-gradient at one rate has no picture: give several rates.")
    rows = [{"rate": row["rate"], "value": row["log_value"] / row["steps"]} for row in result.rows()]
    names = {"ylabel": "(1/t) log f", "title": f"Loss after {result.steps} steps, by learning rate"}
    best = min(rows, key=lambda row: row["value"])["rate"]
    return reference(curves(rows, "rate", "value", markers=False, **names), x=best, label="lowest")  # type: ignore[arg-type]


def tuned_rate(result: Any) -> Axes:
    """The learning rate along its tuning, with the best one."""
    rows = [row for row in result.rows() if math.isfinite(row["rate"])]
    several = {"by": "start"} if len(result.rates[0]) > 1 else {}
    names = {"ylabel": "learning rate", "title": f"Tuned for {result.steps} steps: {result.method}"}
    return reference(curves(rows, "update", "rate", markers=False, **several, **names), y=result.optimum, label="best")  # type: ignore[arg-type]


def trusted_meta_gradients(result: Any) -> Axes:
    """What autograd makes of each meta-gradient, over the horizon and the size of the loss."""
    title = "Meta-gradients by autograd, and the loss behind them"
    return scatter(result.rows(), x="steps", y="log10_loss", by="health", title=title, ylabel="log₁₀ of the loss")


def objectives_over_rates(result: Any) -> Axes:
    """The mean loss over step sizes by training samples and by held-out ones, for each noise."""
    names = {"train": "training samples", "valid": "held-out samples"}
    several = len(result.sigmas) > 1
    lines = [{**row, "of": names[row["split"]] + f", σ = {row['sigma']:g}" * several} for row in result.rows()]
    look = {"xlabel": "step size", "ylabel": "mean loss", "title": "Two ways to choose a step size"}
    return curves(lines, "rate", "objective", by="of", log="xy", error="stderr", labels="legend", **look)  # type: ignore[arg-type]


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
    "layer-ablation": plot_layer_ablation,
    "learning-progress": short_training,
    "least-squares-curves": objectives_over_rates,
    "linear-path": lambda result: linear_path_panels(result.rows()),
    "meta-gradient-health": trusted_meta_gradients,
    "meta-gradient": tangents_along_run,
    "meta-training": meta_objective,
    "monitor-report": plot_monitor,
    "range-test": rates_swept,
    "rate-descent": tuned_rate,
    "regime": trial_run,
    "risk-certificate": plot_certificate,
    "run-comparison": plot_runs,
    "stable-meta-gradient": meta_gradient_over_rates,
    "step-size-choice": plot_step_size,
    "stability-result": lambda result: stability_panels(result.rows()),
    "stacking": plot_stacking,
    "trace": loss_curve,
    "trial-runs": trial_runs,
}
