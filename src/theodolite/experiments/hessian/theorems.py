"""The theorems on two-layer networks with Gaussian weights, with their corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from theodolite.experiments.figure import Experiment
from theodolite.experiments.hessian.theorems_claims import CLAIMS, PLAIN_LIMIT
from theodolite.experiments.hessian.theorems_networks import (
    first_layer_problem,
    logits,
    rectified_autocorrelation,
    rectified_moments,
    top_space,
    two_layers,
)
from theodolite.linalg import subspace_overlap, top_eigenpairs
from theodolite.measures.hessian import decoupling_error, kronecker_overlap, rank_ratios, sharp_subspace
from theodolite.operators import kronecker_factors, layer_hessians
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Params:
    widths: tuple[tuple[int, int], ...]  # (n, d) of the output-Hessian theorems
    samples: int
    blocks: tuple[tuple[int, int], ...]  # (n, d) of the theorem on the whole block
    block_samples: int
    seeds: int
    logit_samples: int = 4000


class Theorems(Experiment):
    """Theorems on random two-layer networks: output Hessian, decoupling, and the moments behind them.

    With y = relu(W₁x), z = W₂y and Gaussian weights. T1: Gaussian inputs, the top eigenspace of the output Hessian M is
    spanned by W₂. T2: rectified inputs, M and M* (gates independent of the softmax) share their top eigenspace, but W₂
    alone does not span it. T3: the layer's Hessian and its Kronecker form share theirs when inputs have a mean. T4 to T6:
    auto-correlation of rectified Gaussians, moments, and the spectrum of the mean softmax Hessian.
    """

    id = "hessian/theorems"
    source = "002, appendix H (Theorem H.1); 000, Theorems 4.4.1 and 4.4.2 and appendix C.2"
    sizes = {
        "tiny": Params(
            widths=((100, 251), (400, 1325)), samples=8000, blocks=((40, 120), (80, 300)), block_samples=2000, seeds=1
        ),
        "laptop": Params(
            widths=((100, 251), (400, 1325)),
            samples=20000,
            blocks=((40, 120), (80, 300), (160, 700)),
            block_samples=8000,
            seeds=2,
            logit_samples=20000,
        ),
        "paper": Params(
            widths=((100, 251), (400, 1325), (1600, 6997)),
            samples=20000,
            blocks=((40, 120), (80, 300), (160, 700)),
            block_samples=8000,
            seeds=5,
            logit_samples=20000,
        ),
    }
    claims = CLAIMS
    departs = (
        "Theorem 4.4.2 (000) says that for rectified inputs the top eigenspace is the row space of W₂ less its sum. Its lemma "
        "takes a sum of n terms of variance 1/n to vanish, but the sum has variance 1: units have a mean input, and fire with "
        "rates spread by 0.227 about one half. The overlap with W₂ tends to 0.829, that with W₂ times the rates to 1; that M and "
        "M* share their eigenspace does hold. By the same slip the logits have a mean (deviation 0.399 and 0.351 instead of 0), "
        "and the variance of the second theorem is 0.1266, not 0.1162."
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for seed in range(p.seeds):
            for rectified in (False, True):
                for n, d in p.widths:
                    yield {"part": "output", "n": n, "d": d, "c": 10, "samples": p.samples, "rectified": rectified, "seed": seed}
                for n, d in p.blocks if rectified else p.blocks[1:2]:
                    sizes = {"n": n, "d": d, "c": 5, "samples": p.block_samples}
                    yield {"part": "block", **sizes, "rectified": rectified, "seed": seed}
                n, d = p.widths[-1]
                yield {
                    "part": "logits",
                    "n": n,
                    "d": d,
                    "c": 400,
                    "samples": p.logit_samples,
                    "rectified": rectified,
                    "seed": seed,
                }
            yield {"part": "exact", "d": 50, "samples": 20 * p.samples, "seed": seed}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        parts: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
            "output": _output,
            "block": _block,
            "logits": _logits,
            "exact": _exact,
        }
        for row in parts[job["part"]](job):
            yield {"part": job["part"], "seed": job["seed"], **row}

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        outputs = [{**row, "inputs": _named(row)} for row in rows if row["part"] == "output"]
        blocks = [{**row, "inputs": _named(row)} for row in rows if row["part"] == "block"]
        missing = [
            {"n": row["n"], "missing": 1 - row[column], "subspace": f"{row['inputs']}: {name}"}
            for row in outputs
            for column, name in (("plain", "W₂"), ("gated", "W₂ × rates"), ("star", "M*"))
        ]
        figure, axes = plots.panels(4, columns=2, size=(4.4, 3.2))
        plots.curves(
            missing,
            "n",
            "missing",
            by="subspace",
            log="xy",
            labels="legend",
            xlabel="hidden units n",
            ylabel="1 − overlap with top c − 1 of M",
            ax=axes[0],
        )
        axes[0].legend(fontsize=6.5, loc="lower left")
        axes[0].set_ylim(bottom=1e-5)
        plots.reference(axes[0], y=1 - PLAIN_LIMIT, label="1 − 0.829")
        gaussian = [row for row in outputs if not row["rectified"]]
        plots.log_log(
            gaussian,
            "n",
            "frobenius",
            guides=(-0.5,),
            xlabel="hidden units n",
            ylabel="‖M − W₂ᵀE[A]W₂/4‖ / ‖M‖",
            label="Gaussian inputs",
            ax=axes[1],
        )
        by_inputs: dict[str, Any] = {"by": "inputs", "labels": "legend", "xlabel": "hidden units n"}
        plots.curves(outputs, "n", "ratio", **by_inputs, log="xy", ylabel="λ_c / λ_(c−1) of M", ax=axes[2])
        plots.curves(blocks, "n", "overlap", **by_inputs, log="x", ylabel="overlap, Hessian and product", ax=axes[3])
        for ax in axes:
            _ticks_at_widths(ax, sorted({row["n"] for row in (blocks if ax is axes[3] else outputs)}))
        return figure


def _named(row: Row) -> str:
    return "rectified" if row["rectified"] else "Gaussian"


def _ticks_at_widths(ax: Any, widths: list[int]) -> None:
    ax.set_xticks(widths, [str(n) for n in widths])
    ax.set_xticks([], minor=True)


def _output(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1 and T2: the output Hessian against what the weights alone predict."""
    n, c = job["n"], job["c"]
    found = two_layers(n, job["d"], c, job["samples"], rectified=job["rectified"], seed=job["seed"])
    values = torch.linalg.eigvalsh(found.M).flip(0)
    top = top_space(found.M, c - 1)
    reference = found.W.T @ found.A @ found.W / 4
    yield {
        "n": n,
        "rectified": job["rectified"],
        "plain": subspace_overlap(top, sharp_subspace(found.W)),
        "complement": subspace_overlap(top, sharp_subspace(found.W, definition="B")),
        "gated": subspace_overlap(top, sharp_subspace(found.W * found.rates)),
        "star": subspace_overlap(top, top_space(found.star, c - 1)),
        "ratio": float(values[c - 1] / values[c - 2]),
        "frobenius": float((found.M - reference).norm() / found.M.norm()),
        "kept": float((found.W @ found.M @ found.W.T).square().sum() / found.M.square().sum()),
        "rate_spread": float(found.rates.std()),
    }


def _block(job: Mapping[str, Any]) -> Iterator[Row]:
    """T3: the first layer's Hessian against its Kronecker form."""
    n, d, c = job["n"], job["d"], job["c"]
    problem = first_layer_problem(n, d, c, job["samples"], rectified=job["rectified"], seed=job["seed"])
    factors: Any = kronecker_factors(problem, "0")["0"]
    block = layer_hessians(problem, "0")["0"]
    pairs = top_eigenpairs(block, c, tol=1e-3, progress=False)
    leading = pairs.vectors[:, : c - 1]
    tau = torch.linalg.eigvalsh(factors.output).flip(0)
    yield {
        "n": n,
        "rectified": job["rectified"],
        "overlap": float(kronecker_overlap(leading, factors)[c - 2]),
        "decoupling": decoupling_error(block, factors, seed=job["seed"]),
        "ratio": float(pairs.values[c - 1] / pairs.values[c - 2]),
        "output_ratio": float(tau[c - 1] / tau[c - 2]),
        "rank": float(rank_ratios(leading, n, d).min()),
    }


def _logits(job: Mapping[str, Any]) -> Iterator[Row]:
    """T5: mean and variance of the logits for fixed weights, over many outputs."""
    z = logits(job["n"], job["d"], job["c"], job["samples"], rectified=job["rectified"], seed=job["seed"])
    yield {"rectified": job["rectified"], "variance": fmean(z.var(0).tolist()), "mean_spread": float(z.mean(0).std())}


def _exact(job: Mapping[str, Any]) -> Iterator[Row]:
    """T4 to T6: what has a closed form."""
    d = job["d"]
    values, vectors = torch.linalg.eigh(rectified_autocorrelation(d))
    rest = (math.pi - 1) / (2 * math.pi * d)
    first = 1 / (2 * math.pi) + rest
    moments = rectified_moments()
    generator = torch.Generator().manual_seed(job["seed"])
    sizes: dict[str, float] = {}
    slack = math.inf
    for c in (2, 5, 10):
        z = math.sqrt(0.3408) * torch.randn(job["samples"], c, generator=generator, dtype=torch.float64)
        p = z.softmax(-1)
        mean = torch.diag(p.mean(0)) - p.T @ p / len(p)
        spectrum = torch.linalg.eigvalsh(mean)
        sizes |= {f"softmax_{c}": float(spectrum[1:].mean()), f"null_{c}": float(spectrum[0].abs() / spectrum[-1])}
        few = p[:500]
        each = torch.linalg.eigvalsh(torch.diag_embed(few) - few[:, :, None] * few[:, None, :])[:, 1]
        slack = min(slack, float((each / (few.min(1).values.square() / (2 * c))).min()))
    yield {
        "eigenvalue_gap": max(abs(float(values[-1]) - first), float((values[:-1] - rest).abs().max())),
        "vector_gap": abs(1 - abs(float(vectors[:, -1].sum())) / math.sqrt(d)),
        "mean": moments["mean"],
        "variance": moments["variance"],
        "fourth": moments["fourth"],
        **sizes,
        "bound_slack": slack,
    }
