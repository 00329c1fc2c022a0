"""How the Hessian of the output shrinks with the width: architectures of the theorem, and layers it does not cover."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from theodolite.experiments import Claim, Experiment, Figure, Study, at_least, at_most, between, equal, measured, rows, sizes
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, log_log, reduced
from theodolite.experiments.linearity import ensembles
from theodolite.experiments.linearity.ensembles import INPUTS, Convolutions, Ensemble, gaussian_inputs, job_seeds, seed_rows
from theodolite.experiments.query import Column, Value, select
from theodolite.experiments.study import grid
from theodolite.measures.linearity import Graph, dag_width, hessian_norm
from theodolite.models.dag import densenet_graph, fcn_graph, with_bottlenecks, with_connections, with_drops, with_skips
from theodolite.models.initialisation import NTKLinear, ntk_parameterise
from theodolite.models.transformers import SelfAttention
from theodolite.problem import Problem
from theodolite.problem.state_guard import own_random_state
from theodolite.results import Row

# The networks by name


@dataclass(frozen=True)
class Architecture:
    """A family of networks: `graph(m, seed)`; None is the convolutional network.

    The Hessian is by the weights of the layers from `first` on; `layer` is the one whose first pre-activation stands for the
    output; `outputs` counts output neurons.
    """

    graph: Callable[[int, int], Graph] | None
    first: int = 0
    output_activation: str = "identity"
    layer: int | None = None
    outputs: int = 1


def _fcn(*powers: float | int, outputs: int = 1) -> Callable[[int, int], Graph]:
    """Hidden widths: `1.0` stands for m, `2.0` for m², whole numbers for themselves."""

    def graph(m: int, seed: int) -> Graph:
        widths = [round(m**p) if isinstance(p, float) else p for p in powers]
        return fcn_graph(INPUTS, widths, outputs)

    return graph


#: What the claims and figures call them.
ARCHITECTURES: dict[str, Architecture] = {
    "two layers": Architecture(_fcn(1.0)),
    "three layers": Architecture(_fcn(1.0, 1.0)),
    "m, m²": Architecture(_fcn(1.0, 2.0)),
    "skip": Architecture(lambda m, seed: with_skips(fcn_graph(INPUTS, [m, m]))),
    "dense": Architecture(lambda m, seed: densenet_graph(INPUTS, [m, m])),
    "dropped edges": Architecture(lambda m, seed: with_drops(densenet_graph(INPUTS, [m, m]), 0.5, seed=seed)),
    "convolution": Architecture(None),
    "three outputs": Architecture(_fcn(1.0, 1.0, outputs=3), outputs=3),
    "hidden pre-activation": Architecture(_fcn(1.0, 1.0), layer=2),
    "first pre-activation": Architecture(_fcn(1.0, 1.0), layer=1),
    "two bottlenecks": Architecture(lambda m, seed: with_bottlenecks(fcn_graph(INPUTS, [m, m]), 2, 2, seed=seed)),
    "half bottlenecks": Architecture(lambda m, seed: with_bottlenecks(fcn_graph(INPUTS, [m, m]), 2, m // 2, seed=seed)),
    "narrow first": Architecture(_fcn(2, 1.0)),
    "narrow first, upper blocks": Architecture(_fcn(2, 1.0), first=1),
    "narrow second": Architecture(_fcn(1.0, 2)),
    "output block": Architecture(_fcn(1.0, 1.0), first=2),
    "tanh output": Architecture(_fcn(1.0), output_activation="tanh"),
    "m, 2, m": Architecture(_fcn(1.0, 2, 1.0)),
    "m, 2, m restored": Architecture(lambda m, seed: with_connections(fcn_graph(INPUTS, [m, 2, m]), 1, 3)),
}


def networks_of(family: Architecture, m: int, seeds: Sequence[int]) -> Ensemble | Convolutions:
    """The networks of these seeds."""
    if (graph := family.graph) is None:
        return Convolutions(len(seeds), INPUTS, [m, m], seed=seeds[0])
    return Ensemble.of(lambda seed: graph(m, seed), seeds, output_activation=family.output_activation)


# Their Hessians

#: Families of the sheet; those with a narrow layer between wide ones belong to the figure on bottlenecks.
FAMILIES = tuple(name for name in ARCHITECTURES if not name.startswith("m, 2, m"))
BOTTLENECKS = ("three layers", "two bottlenecks", "narrow first", "m, 2, m", "m, 2, m restored")
#: Where a neuron's in-degree is not m alone, other widths.
SQUARED = "m, m²"


class HessianNorms(Study):
    """Spectral norms of the Hessian of one output of the `families`; those of `away` also at distance 1 from the start.

    `squared` are the widths m of the network m, m².
    """

    sizes = sizes(
        families=FAMILIES,
        away=FAMILIES,
        squared=(8, 16, 32, 64),
        seeds=10,
        steps=24,
        tiny={"widths": (16, 36, 80), "squared": (8, 14, 24), "away": ("three layers",)},
        laptop={"widths": (16, 32, 64, 128, 256, 512)},
        paper={"widths": (16, 32, 64, 128, 256, 512, 1024, 2048), "seeds": 20},
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for name in p.families:
            for m in p.squared if name == SQUARED else p.widths:
                for distance in (0.0, 1.0) if name in p.away else (0.0,):
                    yield {"family": name, "m": m, "distance": distance, "seeds": p.seeds, "steps": p.steps, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        family, seeds = ARCHITECTURES[job["family"]], job_seeds(job)
        networks = networks_of(family, job["m"], seeds)
        x = gaussian_inputs(seeds, 1)
        weights = networks.at(job["distance"], 777 + job["seed"])

        def scalar(weights: Tensor, combination: Tensor) -> Tensor:
            """What the Hessian is taken of: a combination of the outputs for the first sample, or a pre-activation."""
            if family.layer is not None and isinstance(networks, Ensemble):
                return networks.forward(weights, x)[0][family.layer - 1][:, 0, 0]
            return networks(weights, x)[:, 0] @ combination

        outputs = family.outputs
        combinations = [*torch.eye(outputs).double()]
        if outputs > 1:  # the norm of the third-order tensor is the largest of all unit combinations: three more are tried
            combinations += normalize(ensembles.normals(5)(3, outputs))
        below = sum(shape.numel() for shape in networks.shapes[: family.first])
        found = [
            ensembles.hessian_norms(partial(scalar, combination=each), weights, first=below, steps=job["steps"])
            for each in combinations
        ]
        values, residuals = (torch.stack(part) for part in zip(*found, strict=True))  # (combinations, S)
        columns = {"norm": values[:outputs].amax(0), "residual": residuals[:outputs].amax(0)}
        if outputs > 1:
            columns["tensor_norm"] = values.amax(0)
        shared = {"family": job["family"], "m": job["m"], "distance": job["distance"], **_in_degrees(family, job)}
        yield from seed_rows(shared, seeds, **columns)


def _in_degrees(family: Architecture, job: Mapping[str, Any]) -> Row:
    """What the in-degree report says from the graph alone."""
    if family.graph is None:
        return {}
    report = dag_width(family.graph(job["m"], job["seed"]))
    return {"width": report.width, "bottlenecks": int(report.bottleneck.sum()), "safe": report.linear}


# What is claimed


def slope(name: str, distance: float = 0.0) -> Value:
    """The power of m that a family's median follows."""
    return rows(family=name, distance=distance).power("m", "norm", median)


def medians(name: str, scale: Callable[[int], float] = lambda m: 1.0) -> Column:
    """A family's medians by width, from narrow to wide, times a function of the width."""
    return rows(family=name, distance=0.0).by("m").each(rows.median("norm") * rows["m"].first().then(scale))


#: Where the source speaks of narrow layers, and what it says of harmless ones.
NARROW, LINEAR = "Zhu 2024, section A.6", "transitions to linearity"
#: At the largest width m, brought to m = 512 by the law 1/√m.
at_512 = medians("three layers", lambda m: math.sqrt(m / 512)).last()
without_law = medians("three layers", lambda m: math.sqrt(m) / math.log(m))
narrow_over_plain = medians("narrow first").last() / medians("three layers").last()


def decays(name: str, bound: float, where: str = "", **given: Any) -> Claim:
    return at_most(bound, slope(name), **{"says": "−1/2 up to logs", **given}, where=where and f"Zhu 2024, {where}")


def stays(name: str, says: str = "no decay") -> Claim:
    return between(-0.15, 0.15, slope(name), says=says, where=NARROW)


def norms_of(rows: list[Row], names: Sequence[str]) -> Panel:
    """Medians over the seeds against the width."""
    found = select(rows, family=names, distance=0.0)
    shown = reduced(found, median, "norm", "family", "m")
    labels: dict[str, Any] = {"xlabel": "width m", "ylabel": "‖H‖ of the output, median over seeds"}
    return log_log(shown, "m", "norm", by="family", order=names, guides=(-0.5,), **labels)


class HessianScaling(Figure):
    """The Hessian of the output shrinks like 1/√m with the smallest in-degree m behind the first layer.

    Spectral norms of the Hessian of one output for tanh networks of growing width, at the initialisation and at a random
    point at distance 1: fully connected (two and three layers), with skips, densely connected, with half of the edges
    dropped, convolutional, with bottleneck neurons, with a narrow layer and with an activation on the output. A narrow
    layer and an output activation keep the norm from shrinking; only in-degrees above a block's layers matter for it.
    """

    study, id = HessianNorms(), "linearity/hessian-scaling"
    where = "Zhu 2024, Theorems 2.3.6, 2.3.8, A.4.1, A.5.1; Corollary A.3.1; Lemma A.2.2; section A.6"
    departs = (
        "Logarithms in the bound make slopes flatter than −1/2 at these widths; the claims allow for it. That few bottlenecks "
        "are harmless is sufficient and not necessary: half of the neurons with in-degree 1 but different sources is shown too."
    )
    cites = "Zhu 2024, Theorem 2.3.6"
    claims = (
        {
            "T1: three layers: slope of ‖H‖ against the width at the initialisation": between(
                -0.65, -0.33, slope("three layers"), says="−1/2 up to logs"
            ),
            "T1: its value at m = 512 (at the largest width, times √(m/512))": between(0.08, 0.16, at_512),
            "T1: ‖H‖√m / log m stays bounded (widest over narrowest)": at_most(
                1.25, without_law.last() / without_law.first(), says="bounded up to logs"
            ),
            "T1: the same slope at a random point at distance 1": between(  # calibrated: −0.446 from 16 to 512, ten seeds
                -0.65, -0.30, slope("three layers", 1.0), says="−1/2 up to logs"
            ),
            "T1: the smallest in-degree rules: hidden layers m and m²": between(
                -0.65, -0.20, slope(SQUARED), says="−1/2 in the smallest in-degree"
            ),
            "T1 and T8: two layers, output linear": decays("two layers", -0.3),
            "T1: densely connected": decays("dense", -0.25),
            # With ten inputs read by every layer in-degrees hardly grow below m = 100: −0.14 from 16 to 100, −0.30 to 512.
            "T1: half of the edges dropped": decays("dropped edges", -0.25, since="laptop"),
            "T3: pre-activation of a neuron in the second layer": decays("hidden pre-activation", -0.25, "Theorem 2.3.8"),
            "T3: the Hessian of a first-layer pre-activation is zero (largest norm)": at_most(
                1e-12, rows(family="first pre-activation").max("norm"), reported=0, where="Zhu 2024, Remark 2.3.9"
            ),
            "T4: three outputs, the largest of them": decays("three outputs", -0.25, "Corollary A.3.1"),
        },
        at_most(
            1.0,
            "T4: the norm of the third-order tensor over its bound d_L max‖H_k‖ "
            "(largest; triangle inequality: a check of the code)",
            rows(family="three outputs").column(lambda row: row["tensor_norm"] / (3 * row["norm"])).max(),
            says="at most 1",
            where="Zhu 2024, section A.3, before Corollary A.3.1",
        ),
        {
            "T5: with skip connections": decays("skip", -0.25, "Theorem A.4.1"),
            "T6: convolutional, weights shared": decays("convolution", -0.25, "Theorem A.5.1"),
            "T7: two neurons of in-degree 1": decays("two bottlenecks", -0.3, "section A.6"),
            "T7: a narrow first layer keeps ‖H‖ from shrinking (slope)": stays("narrow first"),
            "T7: a narrow second layer too (slope)": stays("narrow second"),
            "T7: ‖H‖ with a narrow first layer over that of the plain network, at the largest width": at_least(
                4.0, narrow_over_plain, since="laptop"
            ),
            "T10: narrow first layer: the blocks above it shrink": decays("narrow first, upper blocks", -0.25, "Lemma A.2.2"),
            "T10: the block of the output layer is zero (largest norm)": at_most(
                1e-12, rows(family="output block").max("norm"), reported=0, where="Zhu 2024, (2.13)", read_from="theory"
            ),
            "T8: an activation on the output keeps ‖H‖ from shrinking (slope)": at_least(
                -0.2, slope("tanh output"), says="no decay", where="Zhu 2024, section 2.3"
            ),
            "half of the neurons of in-degree 1 with different sources (slope)": measured(slope("half bottlenecks")),
        },
    )

    def draw(self, rows: list[Row]) -> Any:
        decaying = ("three layers", "m, m²", "skip", "dense", "dropped edges", "convolution", "two bottlenecks")
        staying = ("narrow first", "narrow second", "tanh output", "narrow first, upper blocks", "half bottlenecks", "two layers")
        return draw_panels(norms_of(rows, decaying), norms_of(rows, staying), columns=1, size=(7.6, 3.6))


def reports_agree(rows: list[Row]) -> bool:
    """Whether the in-degree report calls exactly those wirings safe that shrink, at the largest width."""
    widest = select(rows, m=max(row["m"] for row in rows))
    safe = {row["family"]: row["safe"] for row in widest}
    return safe == {name: name not in ("narrow first", "m, 2, m") for name in BOTTLENECKS}


class Figure23(Figure):
    """Bottleneck neurons: a few leave transition to linearity intact, a narrow layer destroys it, more edges restore it.

    Hessian norm of the output against the width for five wirings: plain, two neurons of the second layer with in-degree
    1, a first hidden layer of two neurons, and a middle layer of two neurons between wide ones without and with trainable
    edges that lead around it. The in-degree report must tell the same from the graph alone.
    """

    study = HessianNorms(
        sizes=sizes(
            families=BOTTLENECKS,
            away=(),
            seeds=10,
            steps=24,
            tiny={"widths": (16, 36, 80)},
            laptop={"widths": (16, 32, 64, 128, 256)},
            paper={"widths": (16, 32, 64, 128, 256, 512, 1024), "seeds": 20},
        )
    )
    item, where = "zhu-2024 Figure 2.3", "section A.6"
    claims = {
        "two neurons of in-degree 1: ‖H‖ shrinks with the width (slope)": decays("two bottlenecks", -0.3, says=LINEAR),
        "a narrow layer: it does not (slope)": stays("narrow first", "does not"),
        "a narrow layer between wide ones: it does not (slope)": stays("m, 2, m", "does not"),
        "trainable edges around the narrow layer restore it (slope)": decays(
            "m, 2, m restored", -0.3, "section A.6", says=LINEAR
        ),
        "the in-degree report tells safe wirings from those at risk, at the largest width": equal(
            True, rows.measure(reports_agree)
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(norms_of(rows, BOTTLENECKS), size=(6.4, 4.4))


# Attention and recurrence: layers the theorem does not cover

TOKENS = 4


class AttentionNetwork(nn.Module):
    """Tokens (n, T, d) embedded in width m, self-attention, the mean over tokens, a linear output."""

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.embed = NTKLinear(INPUTS, width, bias=False)
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
        self.read_in = NTKLinear(INPUTS, width, bias=False)
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
            f"{name}: slope of ‖H‖ against the width": measured(rows(part="hessian", network=name).power("m", "norm", median))
            for name in NETWORKS
        },
        "λ_min of the tangent kernel, most samples, widest network": measured(
            rows(part="kernel").by("m", "samples").each(rows.median("lambda_min")).last()
        ),
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from grid(p, part=["hessian"], network=NETWORKS, m=p.widths, seed=range(p.seeds))
        yield from grid(p, part=["kernel"], m=p.kernel_widths, samples=p.samples, seeds=[p.kernel_seeds], seed=[0])

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        yield from _kernel(job) if job["part"] == "kernel" else _hessian(job)

    def draw(self, rows: list[Row]) -> Any:
        hessians, kernels = (select(rows, part=part) for part in ("hessian", "kernel"))
        names = {"xlabel": "samples n", "ylabel": "λ_min of the tangent kernel"}
        return draw_panels(
            log_log(hessians, "m", "norm", by="network", guides=(-0.5,), xlabel="width m", ylabel="‖H‖ of the output"),
            curves(kernels, "samples", "lambda_min", by="m", log="xy", **names),
            size=(4.6, 3.6),
        )


def _hessian(job: Mapping[str, Any]) -> Iterator[Row]:
    with own_random_state(job["seed"]):
        model = NETWORKS[job["network"]](job["m"]).double()
    x = gaussian_inputs([job["seed"]], TOKENS)
    problem = Problem(model, nn.MSELoss(), (x, torch.zeros(1, 1, dtype=torch.float64)))
    found = hessian_norm(problem, tol=1e-3, seed=job["seed"], progress=False)
    yield {**job, "norm": found.value, "gradient": float(problem.gradient().norm())}


def _kernel(job: Mapping[str, Any]) -> Iterator[Row]:
    seeds = job_seeds(job)
    networks = ensembles.fully_connected(job["m"], seeds)
    values = torch.linalg.eigvalsh(networks.kernel(networks.weights, gaussian_inputs(seeds, job["samples"])))
    shared = {"part": "kernel", "m": job["m"], "samples": job["samples"]}
    return seed_rows(shared, seeds, lambda_min=values[:, 0], lambda_max=values[:, -1])
