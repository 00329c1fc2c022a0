"""Attention and recurrence: layers the theorem does not cover, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, measured, rows, sizes
from theodolite.experiments.lab.fits import power_of
from theodolite.experiments.lab.panels import curves, draw_panels, log_log
from theodolite.experiments.linearity.ensembles import fully_connected, gaussian_inputs
from theodolite.experiments.query import select
from theodolite.measures.linearity import hessian_norm
from theodolite.models.initialisation import NTKLinear, ntk_parameterise
from theodolite.models.transformers import SelfAttention
from theodolite.problem import Problem
from theodolite.results import Row

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


class AttentionAndRecurrence(Experiment):
    """Attention and recurrent layers: does the Hessian of the output shrink with their width too?

    The source expects it and leaves it open. Self-attention and a recurrent layer over four tokens, in the NTK
    parameterisation, are measured like the networks of the theorem. All that one attention head passes on goes through the
    softmax of a few scores, a narrow layer in disguise; with heads of fixed width there are more of them the wider the
    layer. Also left open: the smallest eigenvalue of the tangent kernel for several samples, against width and samples.
    """

    id, where = "linearity/attention-and-recurrence", "Zhu 2024, section 2.5 (discussion)"
    sizes = sizes(
        {
            "widths": ((16, 64), (16, 32, 64, 128, 256), (16, 32, 64, 128, 256, 512, 1024)),
            "seeds": (3, 5, 10),
            "kernel_widths": ((32, 128), (16, 32, 64, 128, 256, 512), (16, 64, 256, 1024)),
            "samples": ((5, 10, 20), (5, 10, 20, 40, 80), (5, 10, 20, 40, 80, 160)),
            "kernel_seeds": (3, 5, 10),
        }
    )
    claims = {
        **{
            f"{name}: slope of ‖H‖ against the width": measured(power_of(rows(part="hessian", network=name), "m", "norm", median))
            for name in NETWORKS
        },
        "λ_min of the tangent kernel, most samples, widest network": measured(
            rows(part="kernel").by("m", "samples").each(rows.median("lambda_min")).last()
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for name, m, seed in product(NETWORKS, p.widths, range(p.seeds)):
            yield {"part": "hessian", "network": name, "m": m, "seed": seed}
        for m, n in product(p.kernel_widths, p.samples):
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
        shared = {"part": "hessian", "network": job["network"], "m": job["m"], "seed": job["seed"]}
        yield {**shared, "norm": found.value, "gradient": float(problem.gradient().norm())}

    def draw(self, rows: list[Row]) -> Any:
        hessians, kernels = (select(rows, part=part) for part in ("hessian", "kernel"))
        names = {"xlabel": "samples n", "ylabel": "λ_min of the tangent kernel"}
        return draw_panels(
            log_log(hessians, "m", "norm", by="network", guides=(-0.5,), xlabel="width m", ylabel="‖H‖ of the output"),
            curves(kernels, "samples", "lambda_min", by="m", log="xy", **names),
            size=(4.6, 3.6),
        )


def _kernel(job: Mapping[str, Any]) -> Iterator[Row]:
    seeds = range(job["seed"], job["seed"] + job["seeds"])
    networks = fully_connected(job["m"], seeds)
    values = torch.linalg.eigvalsh(networks.kernel(networks.weights, gaussian_inputs(seeds, job["samples"], FEATURES)))
    for i, seed in enumerate(seeds):
        shared = {"part": "kernel", "m": job["m"], "samples": job["samples"], "seed": seed}
        yield {**shared, "lambda_min": float(values[i, 0]), "lambda_max": float(values[i, -1])}
