"""Approximate against true: the top eigenpairs of layers and of the whole network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from theodolite.experiments import Figure, at_least, between, measured, rows
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.networks import DIGITS, MNIST, TOLERANCE, NetworkStudy, cases, layers_of, numbered
from theodolite.experiments.hessian.overlap import farthest
from theodolite.experiments.lab.panels import Panel, curves, draw_panels
from theodolite.experiments.query import Query, Value, select, values_of
from theodolite.linalg import overlap_curve, top_eigenpairs
from theodolite.measures.hessian import full_hessian_approximation, kronecker_overlap
from theodolite.operators import hessian
from theodolite.results import Row

WHOLE = "whole network"
VARIANTS: tuple[Literal["paper", "whitened"], ...] = ("paper", "whitened")


class Approximation(NetworkStudy):
    """The first k eigenpairs: of layers against their Kronecker products, of the whole Hessian against both approximations.

    A case states `k` of the whole network, and `layers` with their `layer_k` where they are looked at: jobs of their own.
    """

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for job in super().jobs(p):
            layers, layer_k = job.pop("layers", None), job.pop("layer_k", None)
            if layers:
                yield {**job, "layers": layers, "k": layer_k}
            yield job

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        [problem] = self.problems(job, weights)
        shared = {"network": job["setup"]["network"], "seed": job["seed"]}
        if "layers" in job:
            for layer, (factors, true) in layers_of(problem, job["layers"], job["k"]).items():
                found = factors.top_eigenpairs(len(true.values)).values
                columns = {"true": true.values, "approximate": found, "overlap": kronecker_overlap(true.vectors, factors)}
                yield from numbered({**shared, "part": layer, "variant": "Kronecker"}, "k", **columns)
            return
        true = top_eigenpairs(hessian(problem), job["k"], tol=TOLERANCE, seed=0, progress=False)
        for variant in VARIANTS:
            whole = full_hessian_approximation(problem, job["k"], variant=variant)
            columns = {"true": true.values, "approximate": whole.values, "overlap": overlap_curve(true.vectors, whole.vectors)}
            yield from numbered({**shared, "part": WHOLE, "variant": variant}, "k", **columns)


layers = rows(part=lambda part: part != WHOLE)
whole = rows(part=WHOLE, variant="paper")


def smallest_overlap(query: Query) -> Value:
    """Overlap at k = 9, mean over the seeds, the smallest of the networks and parts."""
    return query(k=9).by("network", "part").each(rows.mean("overlap")).min()


def value_ratio(query: Query) -> Value:
    """Approximate over true eigenvalue of the first nine, the one farthest from 1."""
    first = query(k=range(1, 10))
    return (first["approximate"] / first["true"]).reduce(farthest)


def better_in_front(rows_of_network: list[Row]) -> float:
    """Overlap at k = 9 over that at the last k, of means over the seeds."""
    last = max(row["k"] for row in rows_of_network)
    return float((rows(k=9).mean("overlap") / rows(k=last).mean("overlap"))(rows_of_network))


class ApproximationFigure(Figure):
    """Two panels per layer or network."""

    def draw(self, rows: list[Row]) -> Any:
        parts = values_of(rows, "network", "part")
        panels = [panel for network, part in parts for panel in _pair(select(rows, network=network, part=part))]
        return draw_panels(*panels, columns=4 if len(parts) > 1 else 2, by="name", band="range", labels="legend")


def _pair(rows: list[Row]) -> tuple[Panel, Panel]:
    """Eigenvalues and overlap of one part, the mean over the seeds."""
    network, part = rows[0]["network"], rows[0]["part"]
    title = network if part == WHOLE else f"{part} of {network}"
    variants = values_of(rows, "variant")
    names = {"paper": "approximate", "whitened": "whitened"} if len(variants) > 1 else {variants[0]: "approximate"}
    named = [{**row, "name": names[row["variant"]]} for row in rows]
    lines = [{**row, "name": "true", "value": row["true"]} for row in select(rows, variant=variants[0])]
    lines += [{**row, "value": row["approximate"]} for row in named]
    overlap = curves(named, "k", "overlap", xlabel="dimension k", ylabel="overlap", title=f"{title}: overlap")
    return (
        curves(lines, "k", "value", log="y", xlabel="rank", ylabel="eigenvalue", title=title),
        overlap.set(ylim=(0.0, 1.05)).line(x=9, label="c − 1"),
    )


WORKS = paper("works reasonably well", "section 4.1")
WORKS_FOR_ALL = paper("works reasonably well for the full parameter Hessian", "section 4.1")
WHITENED = {"the same overlap of the whitened variant": measured(smallest_overlap(rows(part=WHOLE, variant="whitened")))}


class Figure2(ApproximationFigure):
    """The Kronecker approximation gives the top eigenvalues and eigenspaces of layers and of the whole network.

    Exact eigenpairs against those of E[M] ⊗ E[xxᵀ] layer by layer, and against the approximation of the whole Hessian by the
    joint output Hessian and the mean inputs. The whitened variant solves that approximation exactly.
    """

    item, where = "wu-zhu-2020 Figure 2", "section 4.1: F-200^2 on MNIST"
    study = Approximation.of(
        tiny=cases(DIGITS, seeds=2, layers=["fc1", "fc2", "fc3"], layer_k=20, k=20),
        laptop=cases(MNIST, seeds=2, layers=["fc1", "fc2", "fc3"], layer_k=30, k=30),
        paper=cases("MNIST F-200^2", layers=["fc1", "fc2", "fc3"], layer_k=300, k=50),
    )
    # How near is near the source does not say; measured on digits, two seeds: 0.56, 0.698 (fc1, which fails), 0.834.
    claims = {
        "the first nine eigenvalues of every layer (approximate over true, the one farthest from 1)": between(
            0.5, 2.0, value_ratio(layers), **WORKS
        ),
        "the first nine eigenvectors of every layer (overlap, smallest of the layers)": at_least(
            0.7, smallest_overlap(layers), **WORKS, fails={"tiny": "0.698 in fc1, wanted 0.7"}
        ),
        "the first nine eigenvectors of the whole Hessian (overlap)": at_least(0.6, smallest_overlap(whole), **WORKS),
        **WHITENED,
    }


class Figure8(ApproximationFigure):
    """The approximation of the whole Hessian in networks of several depths.

    Top eigenvalues and eigenspaces of the whole Hessian against those of the joint output Hessian lifted by the mean inputs.
    """

    item = "wu-zhu-2020 Figure 8"
    where = "appendix B: F-200^2, F-200^4, F-600^4 and F-600^8 on MNIST, 50 dimensions"
    study = Approximation.of(
        tiny=cases(*DIGITS.networks("F-40^2", "F-40^4"), seeds=2, k=20),
        laptop=cases(*MNIST.networks("F-200^2", "F-200^4"), k=30),
        paper=cases("MNIST F-200^2", "MNIST F-200^4", "MNIST F-600^4", "MNIST F-600^8", k=50),
    )
    claims = {
        "the first nine eigenvectors of the whole Hessian (overlap, smallest of the networks)": at_least(
            0.6, smallest_overlap(whole), **WORKS_FOR_ALL
        ),
        "the first nine eigenvalues of the whole Hessian (approximate over true, the one farthest from 1)": between(
            0.5, 2.0, value_ratio(whole), **WORKS_FOR_ALL
        ),
        "the leading directions are found best (overlap at 9 over that at the last k, smallest of the networks)": at_least(
            1.0,
            whole.by("network").each(better_in_front).min(),
            **paper("accurate for top eigenvectors, not as accurate for latter ones", "appendix B"),
        ),
        **WHITENED,
    }
