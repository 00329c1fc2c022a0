"""Meta-gradients of networks: how far a perturbation grows over rate and horizon, and what a derivative says of a change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.data import load
from theodolite.experiments import Figure, at_least, at_most, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels
from theodolite.experiments.query import select
from theodolite.experiments.study import Study, grid
from theodolite.measures.stepsize.meta_gradients.meta_gradient import MetaObjective
from theodolite.measures.stepsize.meta_gradients.unrolled import Task
from theodolite.results import Row

ACTIVATIONS = {"ReLU": nn.ReLU, "GELU": nn.GELU}
#: Momentum of all runs, and their batches.
MOMENTUM, BATCH = 0.9, 32


def digits(samples: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and validation samples, as many of each; pixels from 0 to 1, in float64: slopes over 1e-7 are taken."""
    found = load("digits")
    x = torch.cat([found.x_train, found.x_test]).double().flatten(1)
    y = torch.cat([found.y_train, found.y_test]).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    (x, y), half = (x[order] / x.max(), y[order]), samples
    return (x[:half], y[:half]), (x[half : 2 * half], y[half : 2 * half])


class NetworkGradients(Study):
    """64-32-10 on digits: the derivative of the validation loss in log lr, its growth, and slopes over steps of many lengths."""

    sizes = sizes(
        tiny={"samples": 200, "rates": (0.1, 0.3), "horizons": (30, 100), "scales": (1e-7, 1e-3), "seeds": 1},
        laptop={
            "samples": 300,
            "rates": (0.03, 0.1, 0.3),
            "horizons": (50, 100, 200, 400),
            "scales": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
            "seeds": 3,
        },
        paper={
            "samples": 800,
            "rates": (0.01, 0.03, 0.1, 0.2, 0.3),
            "horizons": (50, 100, 200, 400, 800),
            "scales": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
            "seeds": 8,
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        shared = {"samples": p.samples, "scales": p.scales}
        yield from grid(shared, *shared, activation=ACTIVATIONS, rate=p.rates, steps=p.horizons, seed=range(p.seeds))

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        activation = ACTIVATIONS[job["activation"]]

        def make(seed: int) -> nn.Module:
            return nn.Sequential(nn.Linear(64, 32), activation(), nn.Linear(32, 10)).double()

        settings = {"lr": job["rate"], "momentum": MOMENTUM}
        train, valid = digits(job["samples"])
        loss = nn.CrossEntropyLoss()
        task = Task(make, "sgd", train, valid, loss, job["steps"], ("lr",), settings, "valid", batch_size=BATCH, seed=job["seed"])
        training = MetaObjective(task, "last")
        found = training.at()
        facts = {name: job[name] for name in ("activation", "rate", "steps", "seed")}
        known = {"growth": found.growth, "log10": found.log_scale["lr"] / math.log(10), "loss": found.loss}
        yield {"kind": "run", **facts, **known, "health": found.health, "exploded": int(found.health == "explodes")}
        for scale in job["scales"]:
            low, high = (training.evaluate(torch.tensor([way * scale], dtype=torch.float64)).value for way in (-1, 1))
            slope, derivative = (high - low) / (2 * scale), found.gradient["lr"]
            gap = abs(slope - derivative) / max(abs(slope), abs(derivative))
            yield {"kind": "slope", **facts, "scale": scale, "slope": slope, "derivative": derivative, "gap": gap}


def _decades(found: list[Row]) -> float:
    """By how many powers of ten the derivative grows from the shortest horizon to the longest."""
    ordered = sorted(found, key=lambda row: row["steps"])
    return float(ordered[-1]["log10"] - ordered[0]["log10"])


runs, slopes = rows(kind="run"), rows(kind="slope")
#: Runs of a hundred steps and more: before, a start's own transient is what grows or falls.
long = runs.where(lambda row: row["steps"] >= 100)
wild = runs(rate=0.3)
relu, gelu = (slopes(rate=0.1, activation=name) for name in ACTIVATIONS)


class Networks(Figure):
    """What a meta-gradient of a small network is worth: over the learning rate, the horizon and the activation.

    A perturbation of the weights dies out at low rates. At high ones it grows in every step, and the derivative with it,
    until it says nothing about a change that one can make. ReLU networks are kinked besides: their gradients jump as units
    switch, so that the exact derivative is the slope over changes too small to matter and misses that over larger ones.
    """

    study, id, where = (
        NetworkGradients(),
        "step-size/networks",
        "Wang et al. 2021, section 3 (the general case is left open there)",
    )
    claims = {
        "at rate 0.1 a perturbation does not grow (largest growth per step)": at_most(0.01, long(rate=0.1).max("growth")),
        "at rate 0.3 it grows in every step (least growth per step)": at_least(0.02, long(rate=0.3).min("growth")),
        "at rate 0.3 the derivative grows with the horizon (decades from the shortest to the longest, at least)": at_least(
            0.5, wild.by("activation", "seed").each(_decades).min()
        ),
        "GELU, rate 0.1: the derivative is the slope over changes up to 0.1 % (largest relative gap)": at_most(
            0.02, gelu.where(lambda row: row["scale"] <= 1e-3).max("gap")
        ),
        "ReLU, rate 0.1: it is the slope over changes of 1e-7 (share of the runs, to 1 %)": at_least(
            0.9, relu(scale=1e-7)["gap"].share(lambda gap: gap <= 0.01)
        ),
        "ReLU, rate 0.1: and misses that over changes of 0.1 % (largest relative gap)": at_least(
            0.2, relu(scale=1e-3).max("gap")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        lines = [{**row, "of": f"{row['activation']}, rate {row['rate']:g}"} for row in select(rows, kind="run")]
        gaps = [{**row, "of": f"{row['activation']}, rate {row['rate']:g}"} for row in select(rows, kind="slope")]
        longest = max(row["steps"] for row in gaps)
        size = {"xlabel": "steps", "ylabel": "log10 of the derivative"}
        miss = {"xlabel": "change of log lr", "ylabel": f"slope beside derivative, gap ({longest} steps)", "log": "x"}
        return draw_panels(
            curves(lines, "steps", "growth", by="of", xlabel="steps", ylabel="growth per step"),
            curves(lines, "steps", "log10", by="of", **size),
            curves([row for row in gaps if row["steps"] == longest], "scale", "gap", by="of", **miss),
            size=(4.2, 3.4),
        )
