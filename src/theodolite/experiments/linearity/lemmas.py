"""The lemmas behind the theorem, by Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from theodolite.experiments.claims import Claim, Reported
from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import INPUTS, built, gaussian_inputs
from theodolite.experiments.linearity.ensembles import Ensemble, added
from theodolite.experiments.linearity.scaling_claims import log_slope
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RADIUS = 1.0


@dataclass(frozen=True)
class Params:
    draws: int
    widths: tuple[int, ...]
    seeds: int


def tails(lemma: str) -> Callable[[list[Row]], float]:
    """The largest distance of an observed frequency above its bound, in standard errors of the bound."""

    def measure(rows: list[Row]) -> float:
        mine = [row for row in rows if row["part"] == "tail" and row["lemma"] == lemma]
        return max(float((row["frequency"] - row["bound"]) / row["error"]) for row in mine)

    return measure


def largest(lemma: str) -> Callable[[list[Row]], float]:
    """The largest observed value over its bound."""
    return lambda rows: max(row["ratio"] for row in rows if row["part"] == "norm" and row["lemma"] == lemma)


def growth(column: str) -> Callable[[list[Row]], float]:
    """The power of the width that the mean over the seeds of a column follows."""

    def measure(rows: list[Row]) -> float:
        mine = [row for row in rows if row["part"] == "network"]
        widths = sorted({row["m"] for row in mine})
        return log_slope([(m, fmean(row[column] for row in mine if row["m"] == m)) for m in widths])

    return measure


def log_growth(rows: list[Row]) -> float:
    """Largest |neuron| over log m, the widest network's over the narrowest's."""
    mine = [row for row in rows if row["part"] == "network"]
    low, high = min(row["m"] for row in mine), max(row["m"] for row in mine)
    mean = {m: fmean(row["largest"] for row in mine if row["m"] == m) for m in (low, high)}
    return float((mean[high] / math.log(high)) / (mean[low] / math.log(low)))


class Lemmas(Experiment):
    """Norm bounds behind the theorem: Gaussian series, products with Gaussian vectors, neurons and their derivatives.

    Tail frequencies of the norms of T15 (matrix Gaussian series), T16 (Gaussian vector) and T17 (columns B_i a_i) with the
    Gaussians moved in the worst way within a ball of radius 1, beside their bounds; for tanh networks of growing width at
    distance 1 from the initialisation, the size of neurons (T18) and the norms of their derivatives by weights (T9).
    """

    id = "linearity/lemmas"
    source = "003, Lemmas A.2.1 and A.11.2 to A.11.8"
    sizes = {
        "tiny": Params(draws=2000, widths=(16, 64, 256), seeds=5),
        "laptop": Params(draws=20000, widths=(16, 32, 64, 128, 256, 512), seeds=10),
        "paper": Params(draws=20000, widths=(16, 32, 64, 128, 256, 512, 1024, 2048), seeds=10),
    }
    claims = (
        Claim(
            "T9: spectral norm of ∂f/∂w of the second layer's neurons, by the first layer's weights (power of m)",
            growth("spectral_1"),
            rule="between",
            expected=(-0.15, 0.15),
            reported=Reported("bounded up to logs", "003, Lemma A.2.1"),
        ),
        Claim(
            "T9: the same by their own weights (power of m)",
            growth("spectral_2"),
            rule="between",
            expected=(-0.15, 0.15),
            reported=Reported("bounded up to logs", "003, Lemma A.2.1"),
        ),
        Claim(
            "T9: Frobenius norm by the first layer's weights (power of m)",
            growth("frobenius_1"),
            rule="within",
            expected=0.5,
            tolerance=0.1,
            reported=Reported("1/2 up to logs", "003, Lemma A.2.1"),
        ),
        Claim(
            "T15: matrix Gaussian series: frequency above its bound (in standard errors)",
            tails("series"),
            rule="at most",
            expected=3.0,
            reported=Reported("below (d₁ + d₂) exp(−t²/2ν)", "003, Lemma A.11.8, corrected: R√ν"),
        ),
        Claim(
            "T16: Gaussian vector: frequency above its bound (in standard errors)",
            tails("vector"),
            rule="at most",
            expected=3.0,
            reported=Reported("below 2 exp(−t²/2‖b‖²)", "003, Lemma A.11.4"),
        ),
        Claim(
            "T17: ‖[B_i a_i]‖ over max‖B‖(√n + R + 1) + max‖B‖_F, largest of all draws (the constant C)",
            largest("columns"),
            rule="at most",
            expected=3.0,
            reported=Reported("an absolute constant", "003, Lemmas A.11.5 and A.11.6"),
        ),
        Claim(
            "T17: ‖Ba‖ − ‖B‖_F − ‖B‖R over 4‖B‖ (largest of all draws)",
            largest("product"),
            rule="at most",
            expected=1.0,
            reported=Reported("a Gaussian tail in units of ‖B‖", "003, Lemma A.11.7"),
        ),
        Claim(
            "T18: the largest |pre-activation| grows at most like log m (widest over narrowest)",
            log_growth,
            rule="at most",
            expected=1.0,
            reported=Reported("bounded up to logs", "003, Lemma A.11.2"),
        ),
        Claim(
            "T18: norm of a layer's values over √m (power of m)",
            growth("normalised"),
            rule="between",
            expected=(-0.1, 0.1),
            reported=Reported("bounded up to logs", "003, Lemma A.11.3"),
        ),
    )
    departs = "Lemma A.11.8 prints R·ν; its proof and all its uses have R·√ν, which is tested."

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        yield {"part": "series", "draws": p.draws, "seed": 0}
        yield {"part": "vectors", "draws": p.draws, "seed": 0}
        for m in p.widths:
            yield {"part": "network", "m": m, "seeds": p.seeds, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from {"series": _series, "vectors": _vectors, "network": _network}[job["part"]](job)

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        tail = [
            {"t": row["t"], "probability": row[column], "which": f"{_SERIES[row['lemma']]}: {name}"}
            for row in rows
            if row["part"] == "tail"
            for column, name in (("frequency", "observed"), ("bound", "bound"))
        ]
        network = [
            {"m": row["m"], "value": row[column], "which": name}
            for row in rows
            if row["part"] == "network"
            for column, name in _COLUMNS.items()
        ]
        figure, (left, right) = plots.panels(2, size=(4.8, 4.0))
        names: dict[str, Any] = {"xlabel": "t, in units of its scale", "ylabel": "P(norm beyond t)"}
        plots.curves(tail, "t", "probability", by="which", log="y", labels="legend", **names, ax=left)
        plots.log_log(network, "m", "value", by="which", guides=(0.5,), xlabel="width m", ylabel="norm at distance 1", ax=right)
        return figure  # fmt: skip


_SERIES = {"series": "matrix series", "vector": "vector"}
_COLUMNS = {
    "spectral_1": "‖∂f/∂w⁽¹⁾‖",
    "spectral_2": "‖∂f/∂w⁽²⁾‖",
    "frobenius_1": "‖∂f/∂w⁽¹⁾‖_F",
    "largest": "largest |pre-activation|",
    "normalised": "‖f‖/√m",
}


def _tail(lemma: str, t: float, excess: Tensor, bound: float) -> Row:
    """How often a norm lies beyond t, and the standard error that the bound itself would have."""
    bound = min(1.0, bound)
    error = math.sqrt(max(bound * (1 - bound), 1.0 / len(excess)) / len(excess))
    frequency = float((excess >= t).double().mean())
    return {"part": "tail", "lemma": lemma, "t": t, "frequency": frequency, "bound": bound, "error": error}


def _series(job: Mapping[str, Any]) -> Iterator[Row]:
    """T15: Z = Σ (γ_k + Δγ_k) B_k with Δγ chosen for each draw to make ‖Z‖ as large as it can."""
    generator = torch.Generator().manual_seed(job["seed"])
    rows, columns, terms = 6, 4, 20
    b = torch.randn(terms, rows, columns, generator=generator, dtype=torch.float64)
    variance = max(float(torch.linalg.matrix_norm(m, 2)) for m in ((b @ b.mT).sum(0), (b.mT @ b).sum(0)))
    gamma = torch.randn(job["draws"], terms, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(torch.einsum("nk,kij->nij", gamma, b), full_matrices=False)
    push = torch.einsum("ni,kij,nj->nk", u[:, :, 0], b, vh[:, 0])
    moved = gamma + RADIUS * push / push.norm(dim=1, keepdim=True)
    norms = torch.linalg.matrix_norm(torch.einsum("nk,kij->nij", moved, b), 2)
    excess = (norms - RADIUS * math.sqrt(variance)) / math.sqrt(variance)
    for squared in (4.0, 8.0, 12.0):
        yield _tail("series", math.sqrt(squared), excess, (rows + columns) * math.exp(-squared / 2))


def _vectors(job: Mapping[str, Any]) -> Iterator[Row]:
    """T16 and T17, the Gaussians moved along what is measured."""
    generator = torch.Generator().manual_seed(job["seed"] + 1)
    size, draws = 12, job["draws"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    b, a = normal(size), normal(draws, size)
    worst = a + RADIUS * torch.sign(a @ b)[:, None] * b / b.norm()
    excess = ((worst @ b).abs() - b.norm() * RADIUS) / b.norm()
    for t in (1.0, 2.0, 3.0):
        yield _tail("vector", t, excess, 2 * math.exp(-(t**2) / 2))
    matrix = normal(8, size)
    top = float(torch.linalg.matrix_norm(matrix, 2))
    image = a @ matrix.T
    pulled = image @ matrix
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
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = built("three layers", job["m"], seeds)
    assert isinstance(networks, Ensemble)
    x = gaussian_inputs(seeds, 1, INPUTS)
    weights = added(networks.weights, [RADIUS * s for s in networks.direction(torch.Generator().manual_seed(9))])
    pre, values = networks.forward(weights, x)
    slopes = [1 - torch.tanh(p[:, 0]).square() for p in pre[:2]]  # σ' of both hidden layers, (S, m)
    through = slopes[1][:, :, None] * weights[1] * slopes[0][:, None] * job["m"] ** -0.5
    reach = x[:, 0].norm(dim=1) / INPUTS**0.5
    length = values[1][:, 0].norm(dim=1) * job["m"] ** -0.5
    spectral = torch.linalg.matrix_norm(through, 2) * reach
    frobenius = torch.linalg.matrix_norm(through) * reach
    for i, seed in enumerate(seeds):
        yield {
            "part": "network",
            "m": job["m"],
            "seed": seed,
            "spectral_1": float(spectral[i]),
            "spectral_2": float(slopes[1][i].max() * length[i]),
            "frobenius_1": float(frobenius[i]),
            "frobenius_2": float(slopes[1][i].norm() * length[i]),
            "largest": max(float(p[i].abs().max()) for p in pre),
            "normalised": float(values[2][i, 0].norm() * job["m"] ** -0.5),
        }
