"""Identities behind the bounds, checked with numbers: the inverse of kl, the divergence, the grid, and the best variances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from theodolite.experiments import Figure, at_least, at_most, rows, sizes, within
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.pac_bayes import paper
from theodolite.experiments.query import select
from theodolite.experiments.study import InParts, grid
from theodolite.measures.bounds import Block, GaussianPosterior, bernoulli_kl, grid_penalty, kl_inverse
from theodolite.results import Row

# The inverse of kl


def _inverse(job: Mapping[str, Any]) -> Iterator[Row]:
    """`kl(q‖kl⁻¹(q|B)) = B` unless the inverse is 1; Pinsker's `q + √(B/2)` is above it; at q = 0 it is `1 − exp(−B)`."""
    for budget in (0.0, 1e-6, 1e-3, 0.01, 0.0634, 0.3, 1.0, 3.0, 1e6):
        for q in (0.0, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0):
            p = float(kl_inverse(q, budget))
            back = budget if p >= 1 - 1e-9 else 0.0 if p == q else float(bernoulli_kl(q, p))
            exact = 1 - math.exp(-budget) if q == 0 else math.nan
            pinsker = q + math.sqrt(budget / 2)
            yield {"q": q, "budget": budget, "p": p, "back": abs(back - budget), "exact": exact, "above": pinsker - p}


def _chance(job: Mapping[str, Any]) -> Iterator[Row]:
    """What 50,000 drawn networks make of an error rate that is nearly chance: the rows of random labels show it."""
    yield {"q": 0.4993, "p": float(kl_inverse(0.4993, math.log(200) / 50_000))}


# The divergence


def _divergence(job: Mapping[str, Any]) -> Iterator[Row]:
    """`KL(N(w, R diag(s) Rᵀ) ‖ N(w₀, λ I))` by the sum over coordinates, in two bases, and by the dense formula."""
    m, n, variance = 5, 6, 0.07
    normal = torch.Generator().manual_seed(job["seed"])
    w, w0, log_std = (torch.randn(m, n, generator=normal, dtype=torch.float64) for _ in range(3))
    own = Block("w", "w", (m, n), w, 0.3 * log_std, w0)
    turned = own.turned(*(_rotation(size, normal) for size in (m, n)))
    found = [GaussianPosterior(blocks=(b,), variances={"w": variance}, basis="any").kl() for b in (own, turned)]
    yield {"seed": job["seed"], "own": found[0], "turned": found[1], "dense": _dense_divergence(turned, variance)}


def _rotation(size: int, generator: torch.Generator) -> Tensor:
    rotation: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return rotation


def _dense_divergence(block: Block, variance: float) -> float:
    """By determinant, trace and distance of the full covariance matrix."""
    assert block.left is not None
    assert block.right is not None
    axes = torch.kron(block.left, block.right)
    covariance = axes @ torch.diag((2 * block.log_std).exp().flatten()) @ axes.T
    distance = (block.parameter(block.mean) - block.parameter(block.start)).square().sum()
    size = len(axes)
    trace = covariance.diagonal().sum() / variance
    return 0.5 * float(trace + distance / variance - size + size * math.log(variance) - torch.logdet(covariance))


# The grid of prior variances


def _grid(job: Mapping[str, Any]) -> Iterator[Row]:
    """The probabilities `exp(−penalty)` of all j together; the rest beyond J is below `6/(π² J)`."""
    count = 20_000
    known = sum(math.exp(-grid_penalty(j)) for j in range(1, count + 1))
    yield {"known": known, "rest": 6 / (math.pi**2 * count)}


# The best variances of a quadratic loss

#: The source's setting for the arithmetic: samples, prior variance, δ, precision and ceiling of the grid.
SAMPLES, VARIANCE, DELTA, PRECISION, CEILING = 1000, 0.05, 0.025, 100.0, 0.1
#: A Hessian whose axes are not the coordinates': eigenvalues 9.5 and 0.5.
HESSIAN = ((5.0, 4.5), (4.5, 5.0))


def objective(log_s: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """`½ Σ h s + R` with `R = √(B/2)`, and R: what a posterior around the prior's own centre costs on a quadratic loss."""
    s = log_s.exp()
    kl = 0.5 * (s / VARIANCE - 1 + math.log(VARIANCE) - log_s).sum()
    index = PRECISION * math.log(CEILING / VARIANCE)
    nats = kl + 2 * math.log(index) + math.log(math.pi**2 * SAMPLES / (6 * DELTA))
    complexity = (nats / (SAMPLES - 1) / 2).sqrt()
    return 0.5 * (curvature * s).sum() + complexity, complexity


def best_variances(curvature: Tensor) -> tuple[float, float, Tensor]:
    """The smallest objective over independent variances, R there, and the variances, by L-BFGS."""
    log_s = torch.full_like(curvature, math.log(VARIANCE), requires_grad=True)
    search = torch.optim.LBFGS([log_s], max_iter=300, tolerance_grad=1e-13, tolerance_change=1e-15, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = objective(log_s, curvature)[0]
        value.backward()
        return value

    search.step(closure)
    value, complexity = objective(log_s.detach(), curvature)
    return float(value), float(complexity), log_s.detach().exp()


def _quadratic(job: Mapping[str, Any]) -> Iterator[Row]:
    """The optimum over independent variances along the coordinates and along the eigenvectors, and what stationarity says."""
    hessian = torch.tensor(HESSIAN, dtype=torch.float64)
    axes = {"coordinates": hessian.diagonal(), "eigenvectors": torch.linalg.eigvalsh(hessian)}
    for name, curvature in axes.items():
        value, complexity, variances = best_variances(curvature)
        for h, s in zip(curvature.tolist(), variances.tolist(), strict=True):
            predicted = 1 / (1 / VARIANCE + 4 * complexity * (SAMPLES - 1) * h)
            yield {"axes": name, "objective": value, "h": h, "s": s, "predicted": predicted}


def _ladder(job: Mapping[str, Any]) -> Iterator[Row]:
    """The same along many axes of different curvature, one of them flat."""
    curvature = torch.cat([torch.zeros(1), torch.logspace(-3, 2, 11)]).double()
    _, complexity, variances = best_variances(curvature)
    for h, s in zip(curvature.tolist(), variances.tolist(), strict=True):
        yield {"h": h, "s": s, "predicted": 1 / (1 / VARIANCE + 4 * complexity * (SAMPLES - 1) * h)}


class Identities(InParts):
    """What the bounds are made of, one computation for each statement."""

    sizes = sizes(tiny={"seeds": 5}, laptop={"seeds": 50}, paper={"seeds": 500})
    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]]] = {
        "inverse": _inverse,
        "chance": _chance,
        "grid": _grid,
        "quadratic": _quadratic,
        "ladder": _ladder,
        "divergence": _divergence,
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, part=[part for part in self.parts if part != "divergence"], seed=[0])
        yield from grid(p, part=["divergence"], seed=range(p.seeds))


inverse, divergence, ladder = rows(part="inverse"), rows(part="divergence"), rows(part="ladder")
quadratic = rows(part="quadratic")
by_axes = {name: quadratic(axes=name)["objective"].first() for name in ("eigenvectors", "coordinates")}


class Theorems(Figure):
    """Identities of the bound: the inverse of kl, the divergence in any basis, the union over prior variances, best variances.

    For a quadratic loss the best variance along an axis of curvature h is 1/(1/λ + 4R(n−1)h): sharp axes get little noise, flat
    ones the prior's. Along the eigenvectors of a Hessian that is not diagonal the optimum is lower than along the coordinates.
    """

    study, id, where = Identities(), "pac-bayes/theorems", "Wu, Zhu et al. 2020, section 6 and appendix G"
    claims = {
        "kl(q‖kl⁻¹(q|B)) = B (largest distance, relative above 1)": at_most(
            1e-9, inverse.column(lambda row: row["back"] / max(1.0, row["budget"])).max()
        ),
        "kl⁻¹(0|B) = 1 − exp(−B) (largest distance)": at_most(1e-12, abs(inverse(q=0.0)["p"] - inverse(q=0.0)["exact"]).max()),
        "Pinsker's q + √(B/2) is never below it (smallest difference)": at_least(-1e-12, inverse.min("above"), says="at most"),
        "the inverse never leaves [q, 1] (least of p − q and 1 − p)": at_least(
            0.0, inverse.column(lambda row: min(row["p"] - row["q"], 1 - row["p"])).min()
        ),
        "kl⁻¹(0.4993 | log(200)/50000), which the rows of random labels show": within(
            1e-4, 0.5066, rows(part="chance").only("p"), **paper(0.5066, "Table 9, R-600")
        ),
        "the divergence does not depend on the axes (largest relative distance)": at_most(
            1e-10,
            (divergence["own"] / divergence["turned"]).change().max(),
            **paper("the same value in the eigenbasis", "appendix G"),
        ),
        "and is that of the dense formula (largest relative distance)": at_most(
            1e-10, (divergence["turned"] / divergence["dense"]).change().max()
        ),
        "the probabilities of all prior variances sum to 1 (what is known plus the rest)": within(
            1e-6, 1.0, rows(part="grid").column(lambda row: row["known"] + row["rest"]).only(), **paper("6/(π² j²)", "appendix G")
        ),
        "quadratic loss along its eigenvectors: the optimum": within(1e-5, 0.108365, by_axes["eigenvectors"]),
        "quadratic loss along the coordinates: the optimum": within(1e-5, 0.110218, by_axes["coordinates"]),
        "the best variances are 1/(1/λ + 4R(n−1)h) (largest relative distance)": at_most(
            1e-4, rows(part=("quadratic", "ladder")).column(lambda row: abs(row["s"] / row["predicted"] - 1)).max()
        ),
        "they fall with the curvature (largest step)": at_most(
            0.0, ladder["s"].steps().max(), **paper("sharper directions have smaller variance", "section 6")
        ),
        "along a flat axis the variance is the prior's (relative distance)": at_most(
            1e-4, (ladder(h=0.0)["s"] / VARIANCE).change().only()
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        shown = select(rows, part="inverse", budget=[0.01, 0.0634, 0.3, 1.0])
        look: dict[str, Any] = {"xlabel": "curvature h", "ylabel": "best variance s", "log": "xy"}
        steps = [{**row, "of": "found"} for row in ladder.of(rows) if row["h"] > 0]
        return draw_panels(
            curves(shown, "q", "p", by="budget", xlabel="error rate q", ylabel="kl⁻¹(q|B)"),
            scatter(steps, "h", "s", **look).then(lambda ax: ax.plot(*_line(steps), color="0.5", zorder=0)),
            size=(4.4, 3.4),
        )


def _line(steps: list[Row]) -> tuple[list[float], list[float]]:
    return [row["h"] for row in steps], [row["predicted"] for row in steps]
