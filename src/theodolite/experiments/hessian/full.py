"""Approximate against true: the top eigenpairs of layers and of the whole network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.measuring import (
    TOLERANCE,
    as_job,
    farthest,
    layer_factors,
    pairs_of,
    select,
    setup_of,
    values_of,
)
from theodolite.experiments.hessian.networks import Setup, problem_of
from theodolite.experiments.hessian.overlap import DIGITS, MNIST, SOURCE_MNIST
from theodolite.linalg import overlap_curve, top_eigenpairs
from theodolite.measures.hessian import full_hessian_approximation, kronecker_overlap
from theodolite.operators import hessian
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = "whole network"
VARIANTS: tuple[Literal["paper", "whitened"], ...] = ("paper", "whitened")


@dataclass(frozen=True)
class Params:
    setups: tuple[Setup, ...]
    layers: tuple[str, ...]  # none: the whole network only
    k: int  # of the layers
    whole: int  # of the whole network
    seeds: int


def compared(part: str, variant: str, true: Tensor, approximate: Tensor, overlap: Tensor, **shared: Any) -> Iterator[Row]:
    """Eigenvalues and overlap, one row per index."""
    columns = zip(true.tolist(), approximate.tolist(), overlap.tolist(), strict=True)
    for i, (value, found, shared_part) in enumerate(columns):
        yield {
            **shared,
            "part": part,
            "variant": variant,
            "k": i + 1,
            "true": value,
            "approximate": found,
            "overlap": shared_part,
        }


def whole_rows(setup: Setup, seed: int, k: int) -> Iterator[Row]:
    """The whole Hessian against both approximations."""
    problem = problem_of(setup, seed)
    true = top_eigenpairs(hessian(problem), k, tol=TOLERANCE, seed=0, progress=False)
    for variant in VARIANTS:
        found = full_hessian_approximation(problem, k, variant=variant)
        overlap = overlap_curve(true.vectors, found.vectors)
        yield from compared(WHOLE, variant, true.values, found.values, overlap, network=setup.network, seed=seed)


def at_nine(rows: list[Row], column: str = "overlap") -> list[float]:
    """A column at k = 9, one mean over the seeds for each network and part."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["k"] == 9:
            groups.setdefault((row["network"], row["part"]), []).append(row[column])
    return [sum(values) / len(values) for values in groups.values()]


def layer_overlap(rows: list[Row]) -> float:
    """Overlap at k = 9, mean over the seeds, the smallest of the layers."""
    return min(at_nine([row for row in rows if row["part"] != WHOLE]))


def whole_overlap(variant: str) -> Any:
    """Overlap at k = 9 of the whole Hessian, mean over the seeds, the smallest of the networks."""

    def measure(rows: list[Row]) -> float:
        return min(at_nine(select(rows, part=WHOLE, variant=variant)))

    return measure


def value_ratio(rows: list[Row]) -> float:
    """Approximate over true eigenvalue of the layers' first nine, the one farthest from 1."""
    return farthest([row["approximate"] / row["true"] for row in rows if row["part"] != WHOLE and not row["k"] > 9])


def whole_ratio(rows: list[Row]) -> float:
    """Approximate over true eigenvalue of the whole Hessian's first nine, the one farthest from 1."""
    mine = select(rows, part=WHOLE, variant="paper")
    return farthest([row["approximate"] / row["true"] for row in mine if not row["k"] > 9])


def better_in_front(rows: list[Row]) -> float:
    """Overlap at k = 9 over that at the last k, the smallest of the networks."""
    mine = select(rows, part=WHOLE, variant="paper")
    last = max(row["k"] for row in mine)
    ends = [{**row, "k": 9} for row in mine if row["k"] == last]
    return min(a / b for a, b in zip(at_nine(mine), at_nine(ends), strict=True))


def draw_pair(rows: list[Row], title: str, values: Any, overlap: Any) -> None:
    """Eigenvalues and overlap of one part, the mean over the seeds."""
    from theodolite import plots

    variants = values_of(rows, "variant")
    names = {"paper": "approximate", "whitened": "whitened"} if len(variants) > 1 else {variants[0]: "approximate"}
    lines = [{**row, "name": "true", "value": row["true"]} for row in select(rows, variant=variants[0])]
    lines += [{**row, "name": names[row["variant"]], "value": row["approximate"]} for row in rows]
    plots.curves(
        lines,
        "k",
        "value",
        by="name",
        band="range",
        log="y",
        labels="legend",
        xlabel="rank",
        ylabel="eigenvalue",
        title=title,
        ax=values,
    )
    plots.curves(
        [{**row, "name": names[row["variant"]]} for row in rows],
        "k",
        "overlap",
        by="name",
        band="range",
        labels="legend",
        xlabel="dimension k",
        ylabel="overlap",
        title=f"{title}: overlap",
        ax=overlap,
    )
    overlap.set_ylim(0.0, 1.05)
    plots.reference(overlap, x=9, label="c − 1")


class FullExperiment(Experiment):
    """Parent of both: one job per network and seed, two panels per layer or network."""

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for setup in p.setups:
            for seed in range(p.seeds):
                yield {"setup": as_job(setup), "layers": list(p.layers), "k": p.k, "whole": p.whole, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, seed = setup_of(job), job["seed"]
        if job["layers"]:
            pairs = pairs_of((setup, seed), tuple(job["layers"]), job["k"])
        for layer in job["layers"]:
            factors, true = layer_factors((setup, seed), layer), pairs[layer]
            found = factors.top_eigenpairs(len(true.values)).values
            overlap = kronecker_overlap(true.vectors, factors)
            yield from compared(layer, "Kronecker", true.values, found, overlap, network=setup.network, seed=seed)
        yield from whole_rows(setup, seed, job["whole"])

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        parts = list(dict.fromkeys((row["network"], row["part"]) for row in rows))
        figure, axes = plots.panels(2 * len(parts), columns=4 if len(parts) > 1 else 2)
        for i, (network, part) in enumerate(parts):
            title = network if part == WHOLE else f"{part} of {network}"
            draw_pair(select(rows, network=network, part=part), title, axes[2 * i], axes[2 * i + 1])
        return figure


class Figure2(FullExperiment):
    """The Kronecker approximation gives the top eigenvalues and eigenspaces of layers and of the whole network.

    Exact eigenpairs against those of E[M] ⊗ E[xxᵀ] layer by layer, and against the approximation of the whole Hessian by the
    joint output Hessian and the mean inputs. The whitened variant solves that approximation exactly.
    """

    id = "hessian/figure-2"
    source = "002, section 4.1, Figure 2: F-200^2 on MNIST"
    item = "wu-zhu-2020 Figure 2"
    sizes = {
        "tiny": Params((DIGITS,), ("fc1", "fc2", "fc3"), k=20, whole=20, seeds=2),
        "laptop": Params((MNIST,), ("fc1", "fc2", "fc3"), k=30, whole=30, seeds=2),
        "paper": Params((SOURCE_MNIST,), ("fc1", "fc2", "fc3"), k=300, whole=50, seeds=1),
    }
    # How near is near the source does not say; measured on digits, two seeds: 0.56, 0.698 (fc1, which fails), 0.834.
    claims = (
        Claim(
            "the first nine eigenvalues of every layer (approximate over true, the one farthest from 1)",
            value_ratio,
            rule="between",
            expected=(0.5, 2.0),
            reported=Reported("works reasonably well", "002, section 4.1"),
        ),
        Claim(
            "the first nine eigenvectors of every layer (overlap, smallest of the layers)",
            layer_overlap,
            rule="at least",
            expected=0.7,
            reported=Reported("works reasonably well", "002, section 4.1"),
        ),
        Claim(
            "the first nine eigenvectors of the whole Hessian (overlap)",
            whole_overlap("paper"),
            rule="at least",
            expected=0.6,
            reported=Reported("works reasonably well", "002, section 4.1"),
        ),
        Claim("the same overlap of the whitened variant", whole_overlap("whitened")),
    )


class Figure8(FullExperiment):
    """The approximation of the whole Hessian in networks of several depths.

    Top eigenvalues and eigenspaces of the whole Hessian against those of the joint output Hessian lifted by the mean inputs.
    """

    id = "hessian/figure-8"
    source = "002, appendix B, Figure 8: F-200^2, F-200^4, F-600^4 and F-600^8 on MNIST, 50 dimensions"
    item = "wu-zhu-2020 Figure 8"
    sizes = {
        "tiny": Params((DIGITS, replace(DIGITS, network="F-40^4")), (), k=0, whole=20, seeds=2),
        "laptop": Params((MNIST, replace(MNIST, network="F-200^4")), (), k=0, whole=30, seeds=1),
        "paper": Params(
            tuple(replace(SOURCE_MNIST, network=name) for name in ("F-200^2", "F-200^4", "F-600^4", "F-600^8")),
            (),
            k=0,
            whole=50,
            seeds=1,
        ),
    }
    claims = (
        Claim(
            "the first nine eigenvectors of the whole Hessian (overlap, smallest of the networks)",
            whole_overlap("paper"),
            rule="at least",
            expected=0.6,
            reported=Reported("works reasonably well for the full parameter Hessian", "002, section 4.1"),
        ),
        Claim(
            "the first nine eigenvalues of the whole Hessian (approximate over true, the one farthest from 1)",
            whole_ratio,
            rule="between",
            expected=(0.5, 2.0),
            reported=Reported("works reasonably well for the full parameter Hessian", "002, section 4.1"),
        ),
        Claim(
            "the leading directions are found best (overlap at 9 over that at the last k, smallest of the networks)",
            better_in_front,
            rule="at least",
            expected=1.0,
            reported=Reported("accurate for top eigenvectors, not as accurate for latter ones", "002, appendix B"),
        ),
        Claim("the same overlap of the whitened variant", whole_overlap("whitened")),
    )
