"""L6: rows in, matplotlib Axes out. One style, deterministic SVG, nothing pops up.

>>> from theodolite import plots
>>> ax = plots.curves([{"step": 0, "loss": 2.3}, {"step": 1, "loss": 0.7}], "step", "loss", log="y")
>>> plots.to_svg(ax).startswith("<svg")
True
"""

from theodolite.plots.anchors import (
    counted_histogram,
    grouped_bars,
    plot_anchor_errors,
    plot_anchor_probe,
    plot_atom_geometry,
    plot_log_partitions,
)
from theodolite.plots.axes_style import reference, span
from theodolite.plots.curves import curves
from theodolite.plots.dictionary import plot_atom_usage, plot_atoms, plot_dictionary_choice, plot_learning_curve
from theodolite.plots.figures import panels, save, to_svg
from theodolite.plots.heatmaps import heatmap, leading_blocks, matrix
from theodolite.plots.linear_path import linear_path, linear_path_panels
from theodolite.plots.monitor import plot_monitor
from theodolite.plots.regimes import regime_diagram
from theodolite.plots.scatter import PowerLaw, correlation_of, log_log, power_law, scatter, with_error
from theodolite.plots.spectra import density, eigenvalues, histogram
from theodolite.plots.stability import pairs_and_maxima, stability_panels
from theodolite.plots.style import DIVERGING, MARKERS, PALETTE, SEQUENTIAL, Look, look, looks, style

__all__ = [
    "DIVERGING",
    "MARKERS",
    "PALETTE",
    "SEQUENTIAL",
    "Look",
    "PowerLaw",
    "correlation_of",
    "counted_histogram",
    "curves",
    "density",
    "eigenvalues",
    "grouped_bars",
    "heatmap",
    "histogram",
    "leading_blocks",
    "linear_path",
    "linear_path_panels",
    "log_log",
    "look",
    "looks",
    "matrix",
    "pairs_and_maxima",
    "panels",
    "plot_anchor_errors",
    "plot_anchor_probe",
    "plot_atom_geometry",
    "plot_atom_usage",
    "plot_atoms",
    "plot_dictionary_choice",
    "plot_learning_curve",
    "plot_log_partitions",
    "plot_monitor",
    "power_law",
    "reference",
    "regime_diagram",
    "save",
    "scatter",
    "span",
    "stability_panels",
    "style",
    "to_svg",
    "with_error",
]
