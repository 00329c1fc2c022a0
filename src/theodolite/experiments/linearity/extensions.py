"""Attention and recurrence: layers the theorem does not cover, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from theodolite.experiments.claims import Claim
from theodolite.experiments.figure import Experiment
from theodolite.experiments.linearity.architectures import built, gaussian_inputs
from theodolite.experiments.linearity.ensembles import Ensemble
from theodolite.experiments.linearity.scaling_claims import log_slope
from theodolite.measures.linearity import hessian_norm
from theodolite.models.initialisation import NTKLinear, ntk_parameterise
from theodolite.models.transformers import SelfAttention
from theodolite.problem import Problem
from theodolite.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, FEATURES = 4, 10


class AttentionNetwork(nn.Module):
    """Tokens (n, T, d) embedded in width m, self-attention, the mean over tokens, a linear output."""

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.embed = NTKLinear(FEATURES, width, bias=False)
        self.attention = ntk_parameterise(SelfAttention(width, heads))
        self.read = NTKLinear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.read(self.attention(self.embed(x)).mean(1))
        return mixed


class RecurrentNetwork(nn.Module):
    """Sequences (n, T, d) through h ← tanh((W h + U x)/√·), width m, and a linear output of the last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.read_in = NTKLinear(FEATURES, width, bias=False)
        self.carry = NTKLinear(width, width, bias=False)
        self.read = NTKLinear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.read_in(x[:, 0]))
        for t in range(1, x.shape[1]):
            state = torch.tanh(self.carry(state) + self.read_in(x[:, t]))
        out: Tensor = self.read(state)
        return out


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "attention, one head": AttentionNetwork,
    "attention, heads of width 8": lambda m: AttentionNetwork(m, heads=m // 8),
    "recurrence": RecurrentNetwork,
}


@dataclass(frozen=True)
class Params:
    widths: tuple[int, ...]
    seeds: int
    kernel_widths: tuple[int, ...]
    samples: tuple[int, ...]
    kernel_seeds: int


def slope(network: str) -> Any:
    """The power of the width that the median Hessian norm follows."""

    def measure(rows: list[Row]) -> float:
        mine = [row for row in rows if row["part"] == "hessian" and row["network"] == network]
        widths = sorted({row["m"] for row in mine})
        return log_slope([(m, median(row["norm"] for row in mine if row["m"] == m)) for m in widths])

    return measure


def smallest_eigenvalue(rows: list[Row]) -> float:
    """λ_min for the most samples in the widest network, median over seeds."""
    mine = [row for row in rows if row["part"] == "kernel"]
    m, n = max(row["m"] for row in mine), max(row["samples"] for row in mine)
    return median(float(row["lambda_min"]) for row in mine if (row["m"], row["samples"]) == (m, n))


class AttentionAndRecurrence(Experiment):
    """Attention and recurrent layers: does the Hessian of the output shrink with their width too?

    The source expects it and leaves it open. Self-attention and a recurrent layer over four tokens, in the NTK
    parameterisation, are measured like the networks of the theorem. All that one attention head passes on goes through the
    softmax of a few scores, a narrow layer in disguise; with heads of fixed width there are more of them the wider the
    layer. Also left open: the smallest eigenvalue of the tangent kernel for several samples, against width and samples.
    """

    id = "linearity/attention-and-recurrence"
    source = "003, section 2.5 (discussion)"
    sizes = {
        "tiny": Params(widths=(16, 64), seeds=3, kernel_widths=(32, 128), samples=(5, 10, 20), kernel_seeds=3),
        "laptop": Params(
            widths=(16, 32, 64, 128, 256), seeds=5, kernel_widths=(16, 32, 64, 128, 256, 512), samples=(5, 10, 20, 40, 80),
            kernel_seeds=5,
        ),
        "paper": Params(
            widths=(16, 32, 64, 128, 256, 512, 1024), seeds=10, kernel_widths=(16, 64, 256, 1024),
            samples=(5, 10, 20, 40, 80, 160), kernel_seeds=10,
        ),
    }  # fmt: skip
    claims = (
        *(Claim(f"{name}: slope of ‖H‖ against the width", slope(name)) for name in NETWORKS),
        Claim("λ_min of the tangent kernel, most samples, widest network", smallest_eigenvalue),
    )

    def jobs(self, p: Params) -> Iterator[dict[str, Any]]:
        for name in NETWORKS:
            for m in p.widths:
                for seed in range(p.seeds):
                    yield {"part": "hessian", "network": name, "m": m, "seed": seed}
        for m in p.kernel_widths:
            for n in p.samples:
                yield {"part": "kernel", "m": m, "samples": n, "seeds": p.kernel_seeds, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        if job["part"] == "kernel":
            yield from _kernel(job)
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job["seed"])
            model = NETWORKS[job["network"]](job["m"]).double()
        x = gaussian_inputs([job["seed"]], TOKENS, FEATURES)
        problem = Problem(model, nn.MSELoss(), (x, torch.zeros(1, 1, dtype=torch.float64)))
        found = hessian_norm(problem, tol=1e-3, seed=job["seed"], progress=False)
        yield {
            "part": "hessian",
            "network": job["network"],
            "m": job["m"],
            "seed": job["seed"],
            "norm": found.value,
            "gradient": float(problem.gradient().norm()),
        }

    def draw(self, rows: list[Row]) -> Figure:
        from theodolite import plots

        figure, (left, right) = plots.panels(2, size=(4.6, 3.6))
        hessians = [row for row in rows if row["part"] == "hessian"]
        plots.log_log(hessians, "m", "norm", by="network", guides=(-0.5,), xlabel="width m", ylabel="‖H‖ of the output", ax=left)
        kernels = [row for row in rows if row["part"] == "kernel"]
        plots.curves(
            kernels, "samples", "lambda_min", by="m", log="xy", xlabel="samples n", ylabel="λ_min of the tangent kernel", ax=right
        )
        return figure


def _kernel(job: Mapping[str, Any]) -> Iterator[Row]:
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = built("three layers", job["m"], seeds)
    assert isinstance(networks, Ensemble)
    values = torch.linalg.eigvalsh(networks.kernel(networks.weights, gaussian_inputs(seeds, job["samples"], FEATURES)))
    for i, seed in enumerate(seeds):
        smallest, largest = float(values[i, 0]), float(values[i, -1])
        yield {
            "part": "kernel",
            "m": job["m"],
            "samples": job["samples"],
            "seed": seed,
            "lambda_min": smallest,
            "lambda_max": largest,
        }
