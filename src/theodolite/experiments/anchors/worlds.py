"""Synthetic word models in which it is known whether an anchor vector exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from theodolite.data.generators import exact_anchor_world, gaussian_dictionary_world
from theodolite.experiments import Experiment, Reported, at_least, at_most, cited, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels, melted
from theodolite.experiments.query import select
from theodolite.measures.anchors import anchor_clusters, probe_states
from theodolite.measures.anchors.probing.bulk import log_bulk_partition
from theodolite.results import Row

TOPS = (0, 1, 8, 80, 800)
#: Mean square errors by radius of the states and number of words removed, computed for the specification.
TABLE = {
    1: (0.00039, 0.00030, 0.00021, 0.00010, 0.00005),
    2: (0.0166, 0.0077, 0.0035, 0.0012, 0.0003),
    3: (0.166, 0.056, 0.017, 0.0043, 0.0009),
    4: (0.619, 0.193, 0.049, 0.011, 0.0020),
}
VARIANCE_AT_80 = {1: 0.075, 2: 0.295, 3: 0.692, 4: 1.197}
#: The radius is uniform in this range, or one of its two ends.
RANGE = (0.5, 4.0)
AT = 80
_TABLE = "computed beforehand for this experiment, not in the source"


def exact(job: Mapping[str, Any]) -> Iterator[Row]:
    """All bulk words share one atom."""
    world = exact_anchor_world(seed=job["seed"])
    probe = probe_states(world.states, world.atoms, top=0, exclude=world.labels, geometry=False, held_out=0.0)
    assert world.anchor is not None
    known = world.states @ world.anchor
    found = world.states @ probe.vectors[0]
    yield {"mse": probe.mse[0], "max_error": probe.max_error[0], "distance": float((known - found).abs().max())}


def gaussian(job: Mapping[str, Any]) -> Iterator[Row]:
    """Gaussian atoms; states on a sphere of one radius, or of radii between two."""
    radius = job["radius"]
    world = gaussian_dictionary_world(
        job["words"], job["dim"], job["contexts"], tuple(radius) if isinstance(radius, list) else radius, seed=job["seed"]
    )
    probe = probe_states(world.states, world.atoms, top=TOPS, geometry=False)
    for row in probe.rows():
        yield {"radius": "mixed" if isinstance(radius, list) else radius, **row}


def clusters(job: Mapping[str, Any]) -> Iterator[Row]:
    """Half of the states have the one radius, half the other: two anchors, found from the values."""
    world = gaussian_dictionary_world(job["words"], job["dim"], job["contexts"], RANGE, law="two", seed=job["seed"])
    values = log_bulk_partition(world.states @ world.atoms.mT, TOPS).bulk
    for i, top in enumerate(TOPS):
        found = anchor_clusters(world.states, values[:, i], 2, top=top, seed=job["seed"])
        right = float((found.membership == world.group).double().mean())
        yield {
            "top": top,
            "joint_mse": found.joint_mse,
            "small_mse": found.mse[0],
            "large_mse": found.mse[1],
            "larger_mse": max(found.mse),
            "right": right,
        }


PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {"exact": exact, "gaussian": gaussian, "clusters": clusters}


exact_worlds, gaussian_worlds, two_norms = (rows(part=part) for part in PARTS)


def factor(have: float, wanted: float) -> float:
    """How many times too large or too small."""
    return max(have / wanted, wanted / have)


#: How far the errors, and the variances with 80 words removed, are from the reference table, for all radii and seeds.
error_factors = gaussian_worlds(radius=list(TABLE)).column(
    lambda row: factor(row["mse"], TABLE[row["radius"]][TOPS.index(row["top"])])
)
variance_factors = gaussian_worlds(radius=list(TABLE), top=AT).column(
    lambda row: factor(row["variance"], VARIANCE_AT_80[row["radius"]])
)


def steepest(rows: list[Row]) -> float:
    """The largest ratio of an error to the one with fewer words removed."""
    line = sorted(rows, key=lambda row: row["top"])
    return float(max(after["mse"] / before["mse"] for before, after in pairwise(line)))


class Worlds(Experiment):
    """Synthetic word models: where an anchor vector exists, where it does not, and where there are two.

    In the first all bulk words share one atom: the anchor is exact. In the others atoms are Gaussian, so that log Z ≈ log n +
    ⟨h, μ⟩ + τ²‖h‖²/2: an anchor exists where all states have one norm and fails where norms vary; with two norms there are two.
    The errors at radius 4 fall with the number of words removed as those of the large language models do.
    """

    id = "anchor/worlds"
    where = "Wu 2023, section 3.4, Hypothesis 3.4.2; synthetic worlds of ours"
    sizes = sizes(words=4000, dim=32, contexts=6000, tiny={"seeds": 1}, laptop={"seeds": 5}, paper={"seeds": 10})
    departs = "The source has no synthetic experiment; reference values were computed for this one beforehand."
    claims = (
        cited(
            "Wu 2023, Hypothesis 3.4.2",
            {
                "exact anchor: mean square error (largest)": at_most(1e-18, exact_worlds.max("mse"), reported=0.0),
                "exact anchor: the probe predicts what the planted vector does (largest difference)": at_most(
                    1e-9, exact_worlds.max("distance"), reported=0.0
                ),
                "exact anchor: largest error at any context": at_most(1e-12, exact_worlds.max("max_error"), reported=0.0),
            },
            read_from="theory",
        ),
        {
            "Gaussian atoms: errors as in the reference table (largest factor of 20 cells)": at_most(
                2.0, error_factors.max(), reported=Reported.theory("0.619 / 0.193 / 0.049 / 0.011 / 0.0020 at radius 4", _TABLE)
            ),
            "Gaussian atoms: variances as in the reference table (largest factor)": at_most(
                2.0, variance_factors.max(), reported=Reported.theory("0.075 to 1.197", _TABLE)
            ),
            "Gaussian atoms: at every radius the error falls with the words removed (largest ratio to the error before)": at_most(
                1.0,
                gaussian_worlds(radius=list(TABLE)).by("radius", "seed").each(steepest).max(),
                says="falls",
                where="Wu 2023, Table B.2",
            ),
            "states of varying norm have no anchor (R², 80 words removed, largest)": at_most(
                0.3, gaussian_worlds(radius="mixed", top=AT).max("r2"), reported=Reported.theory(0.22, _TABLE)
            ),
            "two norms: one anchor fails (error, 80 words removed, smallest)": at_least(
                1.0, two_norms(top=AT).min("joint_mse"), reported=Reported.theory(4.23, _TABLE)
            ),
            "two norms: two anchors fit (larger error of both clusters, 80 words removed)": at_most(
                0.05, two_norms(top=AT).max("larger_mse"), reported=Reported.theory(0.010, _TABLE)
            ),
            "two norms: positions that the probe puts into their cluster (share, 80 words removed, smallest)": at_least(
                0.99, two_norms(top=AT).min("right"), says="two clusters", where="Wu 2023, section B.2"
            ),
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        shape = {"words": p.words, "dim": p.dim, "contexts": p.contexts}
        for seed in range(p.seeds):
            yield {"part": "exact", "seed": seed}
            for radius in (*TABLE, list(RANGE)):
                yield {"part": "gaussian", "radius": radius, **shape, "seed": seed}
            yield {"part": "clusters", **shape, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        for row in PARTS[job["part"]](job):
            yield {"part": job["part"], **row, "seed": job["seed"]}

    def draw(self, rows: list[Row]) -> Any:
        table = [{**row, "removed": row["top"] + 1} for row in rows if row["part"] != "exact"]
        errors = [
            {**row, "states": f"radius {str(row['radius']).replace('mixed', '0.5 to 4')}"}
            for row in select(table, part="gaussian")
        ]
        fits = {"joint_mse": "one anchor", "small_mse": "two: radius 0.5", "large_mse": "two: radius 4"}
        halves = melted(select(table, part="clusters"), fits, "mse", "fit")
        return draw_panels(
            curves(errors, "removed", "mse", by="states", title="Gaussian atoms"),
            curves(halves, "removed", "mse", by="fit", title="states of two norms"),
            size=(4.6, 3.6),
            log="xy",
            labels="direct",
            xlabel="1 + words removed",
            ylabel="mean square error",
        )
