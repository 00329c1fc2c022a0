"""Bounds behind the theorem: Taylor's on the distance from the linearisation, and the lemmas by Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, at_most, between, equal, measured, rows, sizes, within
from theodolite.experiments.lab.panels import curves, draw_panels, log_log, melted, reduced, scatter
from theodolite.experiments.linearity.ensembles import INPUTS, fully_connected, gaussian_inputs, job_seeds, normals, seed_rows
from theodolite.experiments.linearity.hessian import ARCHITECTURES
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import grid
from theodolite.measures.linearity import linearity_deviation
from theodolite.models.dag import DagNetwork
from theodolite.models.ntk import ntk_cnn
from theodolite.problem import Problem
from theodolite.results import Row

# The distance of a network from its linearisation

#: By name, and what they are called among the architectures.
NETWORKS = {"fully connected": "three layers", "dense": "dense", "skip": "skip", "convolution": "convolution"}
smooth, kinked = rows(activation="tanh"), rows(activation="relu")


class Taylor(Experiment):
    """Deviation from the linearisation against Taylor's bound ½R² max‖H‖.

    For tanh networks (fully connected, dense, with skips, convolutional) the deviation of the output from its first-order
    model at distance R is taken along random directions, the gradient and the top Hessian eigenvector, and compared with
    the bound from Hessian norms on the segment. ReLU has kinks that no Hessian sees: there the bound promises nothing.
    """

    id, where = "linearity/taylor", "Zhu 2024, Corollary 2.3.7, (2.9) and (2.10)"
    sizes = sizes(
        radii=(0.5, 1.0, 2.0),
        seeds=1,
        tiny={"widths": (16, 64), "radii": (1.0,), "directions": 1, "segments": 3},
        laptop={"widths": (16, 64, 256), "directions": 2, "segments": 4},
        paper={"widths": (16, 64, 256, 1024), "directions": 8, "segments": 5, "seeds": 5},
    )
    cites = "Zhu 2024, Corollary 2.3.7"
    claims = {
        "T2: smooth networks never exceed the bound (violations)": equal(
            0,
            smooth.column(lambda row: not row["deviation"] <= row["certificate"] * (1 + 1e-3) + 1e-12).sum(),
            says="at most ½R² sup‖H‖",
        ),
        "T2: the worst deviation at distance 1 shrinks with the width (flattest slope)": at_most(
            -0.2, smooth(radius=1.0).by("network").each(rows.power("m", "deviation", max)).max(), says="−1/2 up to logs"
        ),
        "ReLU, where the bound is not valid: the largest deviation over the bound": measured(
            (kinked["deviation"] / kinked["certificate"]).max()
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        kinds = (*((name, "tanh") for name in NETWORKS), ("fully connected", "relu"))
        for seed, (name, activation), m, radius in product(range(p.seeds), kinds, p.widths, p.radii):
            measure = {"radius": radius, "directions": p.directions, "segments": p.segments}
            yield {"network": name, "activation": activation, "m": m, **measure, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        x = gaussian_inputs([job["seed"]], 1)[0]
        model = network(job["network"], job["m"], job["activation"], job["seed"])
        inputs = x[:, None] if job["network"] == "convolution" else x
        problem = Problem(model, nn.MSELoss(), (inputs, torch.zeros(1, 1, dtype=torch.float64)))
        asked = {name: job[name] for name in ("radius", "directions", "segments", "seed")}
        found = linearity_deviation(problem, tol=1e-3, progress=False, **asked)
        for row in found.rows():
            yield {"network": job["network"], "activation": job["activation"], "m": job["m"], **row}

    def draw(self, rows: list[Row]) -> Any:
        named = [
            {
                **row,
                "which": row["network"] if row["activation"] == "tanh" else "fully connected, ReLU",
                "share": row["deviation"] / row["certificate"],
                "along": "random direction" if row["direction"].startswith("random") else row["direction"],
            }
            for row in rows
        ]
        worst = reduced(select(named, radius=1.0), max, "deviation", "which", "m")
        bound: dict[str, Any] = {"xlabel": "Taylor's bound ½R² max‖H‖", "ylabel": "deviation / bound"}
        slopes: dict[str, Any] = {"xlabel": "width m", "ylabel": "worst deviation at distance 1"}
        return draw_panels(
            scatter(named, "certificate", "share", by="along", log="xy", **bound).line(y=1.0, label="the bound"),
            log_log(worst, "m", "deviation", by="which", guides=(-0.5,), **slopes),
            size=(4.8, 4.0),
        )


def network(name: str, m: int, activation: str, seed: int) -> nn.Module:
    """A three-layer network of width m."""
    graph = ARCHITECTURES[NETWORKS[name]].graph
    if graph is None:
        return ntk_cnn((1, INPUTS), [m, m], activation=activation, seed=seed).double()
    return DagNetwork(graph(m, seed), activation=activation, seed=seed)


# The lemmas

RADIUS = 1.0
_SERIES = {"series": "matrix series", "vector": "vector"}
_COLUMNS = {
    "spectral_1": "‖∂f/∂w⁽¹⁾‖",
    "spectral_2": "‖∂f/∂w⁽²⁾‖",
    "frobenius_1": "‖∂f/∂w⁽¹⁾‖_F",
    "largest": "largest |pre-activation|",
    "normalised": "‖f‖/√m",
}
largest_by_width = rows(part="network").by("m").each(rows.mean("largest") / rows["m"].first().then(math.log))


def above_bound(lemma: str) -> Value:
    """The largest distance of an observed frequency above its bound, in standard errors of the bound."""
    tail = rows(part="tail", lemma=lemma)
    return ((tail["frequency"] - tail["bound"]) / tail["error"]).max()


def norm_ratio(lemma: str) -> Value:
    """The largest norm over its bound."""
    return rows(part="norm", lemma=lemma).max("ratio")


def growth(column: str) -> Value:
    """The power of the width that the mean over the seeds of a column follows."""
    return rows(part="network").power("m", column)


class Lemmas(Experiment):
    """Norm bounds behind the theorem: Gaussian series, products with Gaussian vectors, neurons and their derivatives.

    Tail frequencies of the norms of T15 (matrix Gaussian series), T16 (Gaussian vector) and T17 (columns B_i a_i) with the
    Gaussians moved in the worst way within a ball of radius 1, beside their bounds; for tanh networks of growing width at
    distance 1 from the initialisation, the size of neurons (T18) and the norms of their derivatives by weights (T9).
    """

    id, where = "linearity/lemmas", "Zhu 2024, Lemmas A.2.1 and A.11.2 to A.11.8"
    sizes = sizes(
        seeds=10,
        draws=20000,
        tiny={"draws": 2000, "widths": (16, 64, 256), "seeds": 5},
        laptop={"widths": (16, 32, 64, 128, 256, 512)},
        paper={"widths": (16, 32, 64, 128, 256, 512, 1024, 2048)},
    )
    cites = "Zhu 2024, Lemma A.2.1"
    claims = {
        "T9: spectral norm of ∂f/∂w of the second layer's neurons, by the first layer's weights (power of m)": between(
            -0.15, 0.15, growth("spectral_1"), says="bounded up to logs"
        ),
        "T9: the same by their own weights (power of m)": between(-0.15, 0.15, growth("spectral_2"), says="bounded up to logs"),
        "T9: Frobenius norm by the first layer's weights (power of m)": within(
            0.1, 0.5, growth("frobenius_1"), says="1/2 up to logs"
        ),
        "T15: matrix Gaussian series: frequency above its bound (in standard errors)": at_most(
            3.0, above_bound("series"), says="below (d₁ + d₂) exp(−t²/2ν)", where="Zhu 2024, Lemma A.11.8, corrected: R√ν"
        ),
        "T16: Gaussian vector: frequency above its bound (in standard errors)": at_most(
            3.0, above_bound("vector"), says="below 2 exp(−t²/2‖b‖²)", where="Zhu 2024, Lemma A.11.4"
        ),
        "T17: ‖[B_i a_i]‖ over max‖B‖(√n + R + 1) + max‖B‖_F, largest of all draws (the constant C)": at_most(
            3.0, norm_ratio("columns"), says="an absolute constant", where="Zhu 2024, Lemmas A.11.5 and A.11.6"
        ),
        "T17: ‖Ba‖ − ‖B‖_F − ‖B‖R over 4‖B‖ (largest of all draws)": at_most(
            1.0, norm_ratio("product"), says="a Gaussian tail in units of ‖B‖", where="Zhu 2024, Lemma A.11.7"
        ),
        "T18: the largest |pre-activation| grows at most like log m (widest over narrowest)": at_most(
            1.0, largest_by_width.last() / largest_by_width.first(), says="bounded up to logs", where="Zhu 2024, Lemma A.11.2"
        ),
        "T18: norm of a layer's values over √m (power of m)": between(
            -0.1, 0.1, growth("normalised"), says="bounded up to logs", where="Zhu 2024, Lemma A.11.3"
        ),
    }
    departs = "Lemma A.11.8 prints R·ν; its proof and all its uses have R·√ν, which is tested."

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, "draws", part=("series", "vectors"), seed=[0])
        yield from grid(p, "seeds", part=["network"], m=p.widths, seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from {"series": _series, "vectors": _vectors, "network": _network}[job["part"]](job)

    def draw(self, rows: list[Row]) -> Any:
        tail = melted(select(rows, part="tail"), {"frequency": "observed", "bound": "bound"}, "probability")
        tail = [{**row, "which": f"{_SERIES[row['lemma']]}: {row['of']}"} for row in tail]
        network = melted(select(rows, part="network"), _COLUMNS, by="which")
        names: dict[str, Any] = {"xlabel": "t, in units of its scale", "ylabel": "P(norm beyond t)"}
        return draw_panels(
            curves(tail, "t", "probability", log="y", labels="legend", **names),
            log_log(network, "m", "value", guides=(0.5,), xlabel="width m", ylabel="norm at distance 1"),
            size=(4.8, 4.0),
            by="which",
        )


def _tail(lemma: str, t: float, excess: Tensor, bound: float) -> Row:
    """How often a norm lies beyond t, and the standard error that the bound itself would have."""
    bound = min(1.0, bound)
    error = math.sqrt(max(bound * (1 - bound), 1.0 / len(excess)) / len(excess))
    frequency = float((excess >= t).double().mean())
    return {"part": "tail", "lemma": lemma, "t": t, "frequency": frequency, "bound": bound, "error": error}


def _series(job: Mapping[str, Any]) -> Iterator[Row]:
    """T15: Z = Σ (γ_k + Δγ_k) B_k with Δγ chosen for each draw to make ‖Z‖ as large as it can."""
    rows, columns, terms = 6, 4, 20
    normal = normals(job["seed"])
    b, gamma = normal(terms, rows, columns), normal(job["draws"], terms)
    variance = max(float(torch.linalg.matrix_norm(m, 2)) for m in ((b @ b.mT).sum(0), (b.mT @ b).sum(0)))
    u, _, vh = torch.linalg.svd(torch.einsum("nk,kij->nij", gamma, b), full_matrices=False)
    push = torch.einsum("ni,kij,nj->nk", u[:, :, 0], b, vh[:, 0])
    moved = gamma + RADIUS * push / push.norm(dim=1, keepdim=True)
    norms = torch.linalg.matrix_norm(torch.einsum("nk,kij->nij", moved, b), 2)
    excess = (norms - RADIUS * math.sqrt(variance)) / math.sqrt(variance)
    for squared in (4.0, 8.0, 12.0):
        yield _tail("series", math.sqrt(squared), excess, (rows + columns) * math.exp(-squared / 2))


def _vectors(job: Mapping[str, Any]) -> Iterator[Row]:
    """T16 and T17, the Gaussians moved along what is measured."""
    size, draws = 12, job["draws"]
    normal = normals(job["seed"] + 1)
    b, a = normal(size), normal(draws, size)
    worst = a + RADIUS * torch.sign(a @ b)[:, None] * b / b.norm()
    excess = ((worst @ b).abs() - b.norm() * RADIUS) / b.norm()
    for t in (1.0, 2.0, 3.0):
        yield _tail("vector", t, excess, 2 * math.exp(-(t**2) / 2))
    matrix = normal(8, size)
    top = float(torch.linalg.matrix_norm(matrix, 2))
    pulled = a @ matrix.T @ matrix
    moved = (a + RADIUS * pulled / pulled.norm(dim=1, keepdim=True)) @ matrix.T
    beyond = (moved.norm(dim=1) - matrix.norm() - top * RADIUS) / (4 * top)
    yield {"part": "norm", "lemma": "product", "ratio": float(beyond.max())}
    n, count = 10, max(1, draws // 10)
    blocks = normal(n, 8, size)
    spectral = float(torch.linalg.matrix_norm(blocks, 2).max())
    frobenius = float(torch.linalg.matrix_norm(blocks).max())
    vectors = normal(count, n, size)
    shift = normal(count, n, size)
    vectors = vectors + RADIUS * shift / shift.flatten(1).norm(dim=1)[:, None, None]
    norms = torch.linalg.matrix_norm(torch.einsum("nij,cnj->cin", blocks, vectors), 2)
    bound = spectral * (math.sqrt(n) + RADIUS + 1.0) + frobenius
    yield {"part": "norm", "lemma": "columns", "ratio": float(norms.max()) / bound}


def _network(job: Mapping[str, Any]) -> Iterator[Row]:
    """T9 and T18 in a three-layer network at a random point at distance 1.

    With f² = σ(W₂ f¹/√m), f¹ = σ(W₁ x/√d): ∂f²/∂w² is block diagonal with blocks σ'·f¹/√m, and ∂f²/∂w¹ is the Kronecker
    product of diag(σ'₂) W₂ diag(σ'₁)/√m with x/√d.
    """
    seeds = job_seeds(job)
    networks, x = fully_connected(job["m"], seeds), gaussian_inputs(seeds, 1)
    weights = networks.at(RADIUS, seed=9)
    pre, values = networks.forward(weights, x)
    slopes = [1 - torch.tanh(p[:, 0]).square() for p in pre[:2]]  # σ' of both hidden layers, (S, m)
    through = slopes[1][:, :, None] * networks.matrices(weights)[1] * slopes[0][:, None] * job["m"] ** -0.5
    reach = x[:, 0].norm(dim=1) / INPUTS**0.5
    length = values[1][:, 0].norm(dim=1) * job["m"] ** -0.5
    return seed_rows(
        {"part": "network", "m": job["m"]},
        seeds,
        spectral_1=torch.linalg.matrix_norm(through, 2) * reach,
        spectral_2=slopes[1].amax(1) * length,
        frobenius_1=torch.linalg.matrix_norm(through) * reach,
        frobenius_2=slopes[1].norm(dim=1) * length,
        largest=torch.cat(pre, dim=2).abs().amax((1, 2)),
        normalised=values[2][:, 0].norm(dim=1) * job["m"] ** -0.5,
    )
