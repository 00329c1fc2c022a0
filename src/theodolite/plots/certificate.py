"""A certificate as pictures: error rates that were counted beside their bounds, the fit, and where a posterior is wide."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from theodolite.arguments import checked, finite, instance
from theodolite.arguments import count as positive_count
from theodolite.measures.bounds import GaussianPosterior, RiskCertificate
from theodolite.plots.axes_style import note, reference
from theodolite.plots.bars import name_rows
from theodolite.plots.chart import chart, drawing
from theodolite.plots.curves import curves
from theodolite.plots.scatter import scatter
from theodolite.plots.style import an_axes
from theodolite.plots.tables import numbers, read
from theodolite.results import Row

#: Points of a cloud at most, over all layers.
MOST = 3000
#: Layers at most.
LAYERS = 8
#: Eigenvalues below this share of the largest are zero up to rounding.
ROUNDING = 1e-10
COUNTED, BOUND = "counted on the samples", "at most, on new data"


@checked(certificate=instance(RiskCertificate), ax=an_axes)
def plot_certificate(certificate: RiskCertificate, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Error rates with and without noise in the weights, on the samples and at most on new data, beside that of guessing.

    >>> from theodolite.measures.bounds import risk_certificate
    >>> ax = plot_certificate(risk_certificate(1200, 60_000, 4000.0, 60_000))
    >>> [round(float(bar.get_width()), 4) for bar in ax.patches]
    [0.02, 0.1205]
    """
    rows = error_rates(certificate)
    with chart(rows, "rate", "network", by="kind", xlabel="error rate", ylabel="", title=title, ax=ax) as drawn:
        ax, places = drawn.ax, {id(row): i for i, row in enumerate(drawn.table)}
        for group, look in drawn:
            lengths = numbers(group.rows, "rate")
            heights = [places[id(row)] for row in group.rows]
            found = ax.barh(heights, lengths, 0.8, color=look.colour, alpha=0.8, label=group.label)
            ax.bar_label(found, [f"{100 * length:.3g} %" for length in lengths], padding=3, fontsize=8.5)
        name_rows(ax, [row["network"] for row in drawn.table])
        most = max(certificate.guessing, *(row["rate"] for row in rows))
        ax.set_xlim(0, 1.22 * most)
        ax.set_ylim(len(rows) - 0.4, -0.9 - 0.25 * len(rows))  # the legend stands above the first bar
        reference(ax, x=certificate.guessing, label="guessing")
    return ax


def error_rates(certificate: RiskCertificate) -> list[Row]:
    """The error rates of a certificate, as far as they are known: of which network, what it is, and of which kind."""
    known = [
        ("mean weights", certificate.mean_error, COUNTED),
        ("drawn weights", certificate.empirical, COUNTED),
        ("model without noise", certificate.held_out, BOUND),
        ("drawn weights", certificate.value, BOUND),
    ]
    return [{"network": name, "rate": rate, "kind": kind} for name, rate, kind in known if rate is not None]


@drawing(bound=finite)
def plot_bound_fit(rows: Any, *, bound: float | None = None, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The objective and the error rate of a fit (`certificate.trace`) against the epoch; `bound` is what was certified.

    >>> ax = plot_bound_fit([{"epoch": 1, "error": 0.3, "objective": 0.8}, {"epoch": 2, "error": 0.1, "objective": 0.5}])
    >>> [line.get_ydata().tolist() for line in ax.lines if len(line.get_ydata())]
    [[0.8, 0.5], [0.3, 0.1]]
    """
    names = {"objective": "bound, as fitted", "error": "error, smoothed"}
    rows = read(rows, "epoch", *names)
    long = [{"epoch": row["epoch"], "of": name, "rate": row[key]} for key, name in names.items() for row in rows]
    ax = curves(long, "epoch", "rate", by="of", markers=False, ylabel="rate", title=title, ax=ax)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return ax if bound is None else reference(ax, y=bound, label="certified")


@checked(posterior=instance(GaussianPosterior), most=positive_count, ax=an_axes)
def plot_posterior(posterior: GaussianPosterior, *, most: int = MOST, title: str | None = None, ax: Axes | None = None) -> Axes:
    """The variance of each coordinate against its approximate eigenvalue, layer by layer; evenly thinned to `most` points.

    Of more than eight layers the largest are shown.

    Raises:
        ValueError: where no curvature is known.
    """
    sizes = {b.group: b.size for b in posterior.blocks if b.curvature is not None and b.mean.ndim > 1}
    shown = sorted(sizes, key=lambda layer: -sizes[layer])[:LAYERS]
    layers = [layer for layer in sizes if layer in shown]
    if not layers:
        raise ValueError("There is no picture of a posterior without known curvature. Its numbers are in rows().")
    clouds = [posterior.variance_by_eigenvalue(layer) for layer in layers]
    total = sum(map(len, clouds))
    step = max(1, -(-total // most))
    least = ROUNDING * max(row["eigenvalue"] for cloud in clouds for row in cloud)
    rows = [row for cloud in clouds for row in cloud[::step] if row["eigenvalue"] > least]
    labels = {"xlabel": "approximate eigenvalue", "ylabel": "variance of the coordinate", "title": title, "ax": ax}
    ax = scatter(rows, "eigenvalue", "variance", log="xy", by="layer", **labels)  # type: ignore[arg-type]
    if len(rows) < total:
        few = f" of the {len(layers)} largest of {len(sizes)} layers" if len(layers) < len(sizes) else ""
        note(ax, f"{len(rows)} of {total} coordinates{few}, none whose eigenvalue is zero up to rounding")
    return ax
