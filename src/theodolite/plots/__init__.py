"""L6: rows in, matplotlib Axes out. One style, deterministic SVG, nothing pops up.

Drawings of rows in groups all take `by` (a column or several), `order`, `label`, `xlabel`, `ylabel`, `title` and `ax`.

>>> from theodolite import plots
>>> ax = plots.curves([{"step": 0, "loss": 2.3}, {"step": 1, "loss": 0.7}], "step", "loss", log="y")
>>> plots.to_svg(ax).startswith("<svg")
True
"""

from theodolite._names import imported
from theodolite.plots.anchors import counted_histogram as counted_histogram
from theodolite.plots.anchors import grouped_bars as grouped_bars
from theodolite.plots.anchors import plot_anchor_errors as plot_anchor_errors
from theodolite.plots.anchors import plot_anchor_probe as plot_anchor_probe
from theodolite.plots.anchors import plot_atom_geometry as plot_atom_geometry
from theodolite.plots.anchors import plot_log_partitions as plot_log_partitions
from theodolite.plots.axes_style import reference as reference
from theodolite.plots.axes_style import span as span
from theodolite.plots.bars import bars as bars
from theodolite.plots.bars import intervals as intervals
from theodolite.plots.bars import layer_ratios as layer_ratios
from theodolite.plots.bars import model_scores as model_scores
from theodolite.plots.certificate import plot_bound_fit as plot_bound_fit
from theodolite.plots.certificate import plot_certificate as plot_certificate
from theodolite.plots.certificate import plot_posterior as plot_posterior
from theodolite.plots.curves import curves as curves
from theodolite.plots.dictionary import plot_atom_usage as plot_atom_usage
from theodolite.plots.dictionary import plot_atoms as plot_atoms
from theodolite.plots.dictionary import plot_dictionary_choice as plot_dictionary_choice
from theodolite.plots.dictionary import plot_learning_curve as plot_learning_curve
from theodolite.plots.figures import panels as panels
from theodolite.plots.figures import save as save
from theodolite.plots.figures import to_svg as to_svg
from theodolite.plots.heatmaps import heatmap as heatmap
from theodolite.plots.heatmaps import leading_blocks as leading_blocks
from theodolite.plots.heatmaps import matrix as matrix
from theodolite.plots.linear_path import linear_path as linear_path
from theodolite.plots.linear_path import linear_path_panels as linear_path_panels
from theodolite.plots.monitor import plot_monitor as plot_monitor
from theodolite.plots.monitor import plot_runs as plot_runs
from theodolite.plots.regimes import regime_diagram as regime_diagram
from theodolite.plots.scatter import PowerLaw as PowerLaw
from theodolite.plots.scatter import correlation_of as correlation_of
from theodolite.plots.scatter import log_log as log_log
from theodolite.plots.scatter import power_law as power_law
from theodolite.plots.scatter import scatter as scatter
from theodolite.plots.scatter import with_error as with_error
from theodolite.plots.spectra import density as density
from theodolite.plots.spectra import eigenvalues as eigenvalues
from theodolite.plots.spectra import histogram as histogram
from theodolite.plots.stability import pairs_and_maxima as pairs_and_maxima
from theodolite.plots.stability import stability_panels as stability_panels
from theodolite.plots.step_size import plot_step_size as plot_step_size
from theodolite.plots.step_size import range_test as range_test
from theodolite.plots.studies.growth import growth_study_panels as growth_study_panels
from theodolite.plots.studies.growth import plot_growth_choice as plot_growth_choice
from theodolite.plots.studies.growth import plot_layer_ablation as plot_layer_ablation
from theodolite.plots.studies.growth import plot_stacking as plot_stacking
from theodolite.plots.style import DIVERGING as DIVERGING
from theodolite.plots.style import MARKERS as MARKERS
from theodolite.plots.style import PALETTE as PALETTE
from theodolite.plots.style import SEQUENTIAL as SEQUENTIAL
from theodolite.plots.style import Look as Look
from theodolite.plots.style import look as look
from theodolite.plots.style import looks as looks
from theodolite.plots.style import style as style

__all__ = sorted(imported(__file__))
