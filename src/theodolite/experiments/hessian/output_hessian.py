"""The output Hessian of a layer: its spectrum beside the layer's, and what it is made of."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.experiments import Experiment, Measured, at_least, at_most, equal, measured, rows
from theodolite.experiments.hessian import paper
from theodolite.experiments.hessian.layers import layer_factors, layers_of, numbered
from theodolite.experiments.hessian.networks import DIGITS, MNIST, NetworkStudy, Setup, as_printed, cases, network_of, train_on
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, melted, scatter, split
from theodolite.experiments.query import Column, Value, select, values_of
from theodolite.experiments.study import Computation
from theodolite.linalg import subspace_overlap
from theodolite.measures.hessian import (
    Autocorrelation,
    Clusters,
    EigenTrajectory,
    autocorrelation,
    firing_rates,
    logit_clusters,
    outlier_count,
    sharp_subspace,
    track_eigenpairs,
    weight_product,
)
from theodolite.operators import DenseOperator, kronecker_factors
from theodolite.problem import Problem
from theodolite.problem.activations import recorded_calls
from theodolite.results import Row

# The gap at c − 1


CLASSES = 10
MATRICES = ("output Hessian", "layer Hessian")
STAGES = ("initialisation", "true labels", "random labels")

models = rows(kind="model")


def _stages(setup: Setup, random: Setup, seeds: int) -> list[dict[str, Any]]:
    """A network at its start and at a minimum, and one that is too small for its random labels."""
    setups = zip(STAGES, (setup.but(epochs=0), setup, random), strict=True)
    return [case for stage, found in setups for case in cases(found, seeds=seeds, stage=stage, layer="fc2")]


SAME_RATIOS = "the first nine eigenvalues of both matrices have the same ratios (correlation, smallest without random labels)"


class Figure4(NetworkStudy, Experiment):
    """The layer's Hessian has the spectrum of its output Hessian, with a gap at the number of classes.

    Eigenvalues of E[M] and of the layer's Hessian, each over its largest, at initialisation, at a minimum with the true
    labels, and at a minimum with random labels of a network too small to learn them, where the gap is gone. Which layer and
    network the source shows is not said; here it is the second hidden layer.
    """

    item, where = "wu-zhu-2020 Figure 4", "section 4.4"
    departs = "A width of 200 on digits too: with 40 units the outliers of the initialisation are not yet apart."
    sizes = {
        "tiny": _stages(DIGITS.but(network="F-200^2"), Setup("F-20^2", labels="random", epochs=30), 3),
        "laptop": _stages(MNIST, MNIST.but(network="F-20^2", labels="random", epochs=5), 3),
        "paper": _stages(as_printed("MNIST F-200^2"), as_printed("MNIST-R F-20^2"), 5),
    }
    claims = {
        SAME_RATIOS: at_least(
            0.95, models(stage=STAGES[:2]).min("correlation"), **paper("the same relative ratios", "section 4.4")
        ),
        **{
            f"{stage}: the {matrix} has c − 1 = 9 outliers (median over seeds)": equal(
                9.0,
                models(stage=stage).median(f"{matrix} outliers"),
                **paper("a gap around the number of classes", "section 4.4 and Figure 4"),
            )
            for stage in STAGES[:2]
            for matrix in MATRICES
        },
        "with random labels the gap at c − 1 of the output Hessian is less than half of that with true labels": at_most(
            0.5,
            models(stage="random labels").median("output Hessian gap") / models(stage="true labels").median("output Hessian gap"),
            **paper("the gap does not appear at minimum for random labels", "section 4.4"),
        ),
    }

    def run(self, job: Mapping[str, Any], *weights: list[Row]) -> Iterator[Row]:
        [problem], layer = self.problems(job, weights), job["layer"]
        k = 3 * CLASSES  # as far as outliers are looked for
        # Eigenvalues are exact to the square of the residuals.
        factors, pairs = layers_of(problem, [layer], k, tol=3e-3)[layer]
        values = dict(zip(MATRICES, (torch.linalg.eigvalsh(factors.output).flip(0)[:k], pairs.values), strict=True))
        shared = {"stage": job["stage"], "network": job["setup"]["network"], "layer": layer, "seed": job["seed"]}
        top = torch.stack([v[: CLASSES - 1] / v[0] for v in values.values()])
        row: Row = {"kind": "model", **shared, "correlation": float(torch.corrcoef(top)[0, 1])}
        for name, v in values.items():
            row[f"{name} outliers"] = outlier_count(v, CLASSES)
            row[f"{name} gap"] = float((v[CLASSES - 2] / v[CLASSES - 1]).log())
        yield row
        for name, v in values.items():
            yield from numbered({"kind": "eigenvalue", **shared, "matrix": name}, value=v / v[0])

    def draw(self, rows: list[Row]) -> Any:
        parts = split(select(rows, kind="eigenvalue"), "stage")
        panels = [
            curves(mine, "i", "value", title="{stage}: {layer} of {network}".format(**mine[0])).line(x=9.5, label="c − 1 = 9")
            for mine in parts.values()
        ]
        look: dict[str, Any] = {"by": "matrix", "band": "range", "log": "y", "markers": True, "labels": "legend"}
        return draw_panels(*panels, share="y", **look, xlabel="rank", ylabel="eigenvalue over the largest")


checkpoints = rows(kind="checkpoint")


class Figure18(NetworkStudy, Experiment):
    """The two factors of a layer keep their shape along training: one large input direction, about c outputs.

    Top eigenvalues of E[xxᵀ] and of E[M] at checkpoints from the initialisation on, each over the largest of its checkpoint.
    """

    item = ("wu-zhu-2020 Figure 18", "wu-zhu-2020 Figure 19")
    where = "appendix E.4: fc1 of LeNet5"
    sizes = {  # checkpoints are epochs
        "tiny": cases(DIGITS, layer="fc2", checkpoints=[0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25]),
        "laptop": cases(DIGITS, seeds=5, layer="fc2", checkpoints=[0, 1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90]),
        "paper": cases("CIFAR10 LeNet5", layer="fc1", checkpoints=[0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 700, 1000]),
    }
    claims = {
        "E[xxᵀ] has one dominant eigenvalue at every checkpoint (smallest γ₁/γ₂)": at_least(
            2.5, checkpoints.min("ratio"), **paper("always approximately rank 1", "appendix E.4")
        ),
        "E[M] has c − 1 = 9 large eigenvalues (share of checkpoints where τ₉/τ₁₀ > τ₁₀/τ₁₁)": at_least(
            0.8,
            checkpoints.column(lambda row: row["gap"] > row["next_gap"]).mean(),
            **paper("always around c large eigenvalues", "appendix E.4"),
        ),
    }

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return []  # it trains, from checkpoint to checkpoint

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, seed, layer = Setup(**job["setup"]), job["seed"], job["layer"]
        start, (x, y) = network_of(setup.but(epochs=0, samples=10**9), seed)
        problem = Problem(start, nn.CrossEntropyLoss(), (x[: setup.samples], y[: setup.samples]))
        states = _training(copy.deepcopy(start).float(), (x.float(), y), setup, job["checkpoints"], seed)
        seen: list[Autocorrelation] = []

        def both(problem: Problem) -> dict[str, DenseOperator]:
            factors = layer_factors(problem, layer)
            seen.append(autocorrelation(factors))
            return {"input": DenseOperator(factors.input), "output": DenseOperator(factors.output)}

        found = track_eigenpairs(
            problem, states, 2 * CLASSES, labels=job["checkpoints"], matrix=both, tol=1e-8, seed=0, progress=False
        )
        for t, epoch in enumerate(job["checkpoints"]):
            yield from _checkpoint(found, t, seen[t], {"epoch": epoch, "seed": seed})

    def draw(self, rows: list[Row]) -> Any:
        shown = select(rows, kind="eigenvalue", i=[1, 2, 3, 5, 9, 10, 11])
        values = [{**row, "at": row["epoch"] + 1, "name": f"{row['i']}"} for row in shown]
        titles = {"input": "Input auto-correlation E[xxᵀ]", "output": "Output Hessian E[M]"}
        panels = [curves(select(values, factor=factor), "at", "value", title=title) for factor, title in titles.items()]
        look: dict[str, Any] = {"by": "name", "log": "xy", "labels": "direct", "xlabel": "epoch + 1"}
        return draw_panels(*panels, **look, ylabel="eigenvalue over the largest")


def _training(
    model: nn.Module, data: tuple[Tensor, Tensor], setup: Setup, checkpoints: Sequence[int], seed: int
) -> Iterator[nn.Module]:
    """The model at each of these epochs, trained in between."""
    sgd = torch.optim.SGD(model.parameters(), lr=setup.rate)
    for done, epoch in pairwise([0, *checkpoints]):
        if epoch > done:
            train_on(model, data, sgd, setup, range(done, epoch), seed)
        yield model


def _checkpoint(
    found: Mapping[str, EigenTrajectory], t: int, inputs: Autocorrelation, shared: Mapping[str, Any]
) -> Iterator[Row]:
    """Both spectra of a layer at one moment of training."""
    values = {name: track.values[t] for name, track in found.items()}
    tau = values["output"]
    yield {
        "kind": "checkpoint",
        **shared,
        "loss": found["output"].losses[t],
        "ratio": inputs.ratio,
        "squared_dot": inputs.squared_dot,
        "gap": float(tau[CLASSES - 2] / tau[CLASSES - 1]),
        "next_gap": float(tau[CLASSES - 1] / tau[CLASSES]),
    }
    for name, spectrum in values.items():
        yield from numbered({"kind": "eigenvalue", **shared, "factor": name}, value=spectrum / spectrum[0])


# Groups of logit gradients


networks = rows(kind="network")
start, minimum = networks(stage="start"), networks(stage="minimum")


IN_THE_GROUPS = (
    "the centres predicted from the weights lie in the groups: means of γ nearest in angle to their own (smallest share)"
)


class Figure20(NetworkStudy, Experiment):
    """Logit gradients: groups by logit at initialisation, hardly any by class at the minimum.

    For each class i of the samples and each logit j the mean of the logit gradient δ (and of its output part γ) is one
    point: c·c of them. How far they lie in groups is the share of their variance between groups, by logit or by class.
    The source shows t-SNE pictures; here the points are drawn on their two leading principal directions, and only the
    shares are judged. The centres predicted from products of weights are compared with the measured ones.
    """

    item = ("wu-zhu-2020 Figure 20", "wu-zhu-2020 Figure 21")
    where = "appendix F.1; Wu 2023, section C.7.4"
    sizes = {
        "tiny": cases(Setup("F-200^2"), seeds=2, layer="fc1"),
        "laptop": cases(
            Setup("F-200^2"), Setup("F-200^2", data="mnist", epochs=10, until=0.01, batch=128, samples=2000), seeds=3, layer="fc1"
        ),
        "paper": cases(as_printed("MNIST F-200^2", samples=10000), seeds=5, layer="fc1"),
    }
    claims = {
        **{
            f"at initialisation logits explain the spread of the means of {name} (smallest share)": at_least(
                0.8, start.min(f"{part}_logit"), **paper("clustered around the logit centres", place), fails={"tiny": why}
            )
            for name, part, place, why in (
                ("δ", "delta", "Figure 20c", "0.56: δ has the input as a factor, whose mean differs from class to class"),
                ("γ", "gamma", "Figure 20b", "0.795 for one seed of two, wanted 0.8"),
            )
        },
        **{
            f"at initialisation logits explain more than classes, for {name} (smallest difference)": at_least(
                0.0, (start[f"{part}_logit"] - start[f"{part}_class"]).min(), **paper("logit clustering", place)
            )
            for name, part, place in (("δ", "delta", "Figure 20c"), ("γ", "gamma", "Figure 20b"))
        },
        IN_THE_GROUPS: at_least(
            1.0, start.min("predicted_plain"), **paper("predicted centres inside the groups", "Figure 20, (57)")
        ),
        # calibrated: 0.997 on digits and on MNIST
        "predicted with firing rates, the centres of γ point where they should (mean cosine at initialisation)": at_least(
            0.98, start.mean("cosine_gated")
        ),
        "predicted from the weights alone: mean cosine at initialisation": measured(start.mean("cosine_plain")),
        "at initialisation E[M] has c − 1 outliers (networks with another number)": equal(
            0, (start["outliers"] - start["classes"]).count(lambda more: more != -1), **paper("around c", "Figure 20a")
        ),
        "at the minimum E[M] has c − 1 outliers (networks with another number)": equal(
            0, (minimum["outliers"] - minimum["classes"]).count(lambda more: more != -1), **paper("around c", "Figure 21a")
        ),
        "at the minimum: share of the spread of δ that classes explain": measured(minimum.mean("delta_class")),
        "at the minimum: share of the spread of δ that logits explain": measured(minimum.mean("delta_logit")),
        "at the minimum: share of the spread of γ that classes explain": measured(minimum.mean("gamma_class")),
        "the means and the spread around them make up the layer's Hessian (distance of the traces over the trace)": at_most(
            1e-8, networks.max("trace_gap"), **paper("H = c E[ΔΔᵀ] + the spread", "(55), corrected", "theory")
        ),
    }
    departs = (
        "The source writes H as the mean of ΔᵀΔ over classes and logits; the identity needs a factor c and the spread of the "
        "gradients within each group, which is not small. Predicted centres are columns of SᵀE[Q]ᵀ, the transposition that "
        "fits. The source's picture is t-SNE; a score that can be wrong takes its place."
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for job in super().jobs(p):
            yield {**job, "setup": {**job["setup"], "epochs": 0}, "stage": "start"}
            yield {**job, "stage": "minimum"}

    def run(self, job: Mapping[str, Any], weights: list[Row]) -> Iterator[Row]:
        setup, layer = Setup(**job["setup"]), job["layer"]
        model, (x, y) = network_of(setup, job["seed"], weights)
        problem = Problem(model, nn.CrossEntropyLoss(), (x, y))
        groups = logit_clusters(problem, layer)
        tau = torch.linalg.eigvalsh(layer_factors(problem, layer).output).flip(0)
        shared = {"network": f"{setup.data} {setup.network}", "stage": job["stage"], "seed": job["seed"]}
        classes = len(groups.frequency)
        scores = {f"{part}_{by}": groups.score(by, part) for part in ("delta", "gamma") for by in ("logit", "class")}
        yield {
            "kind": "network",
            **shared,
            "classes": classes,
            **scores,
            "outliers": outlier_count(tau, classes),
            "between": groups.between / (groups.between + groups.within),
            "trace_gap": _trace_gap(model, x, layer, groups),
            **_prediction(problem, x, layer, groups),
        }
        yield from numbered({"kind": "eigenvalue", **shared}, "index", value=(tau / tau[0])[: 3 * classes])
        yield from _points(shared, groups)

    def draw(self, rows: list[Row]) -> Any:
        rows = select(rows, network=rows[0]["network"])
        panels = []
        for stage, by in (("start", "logit"), ("minimum", "class")):
            here = select(rows, stage=stage)
            spectrum = curves(select(here, kind="eigenvalue"), "index", "value", log="y", ylabel="over the largest")
            panels.append(spectrum.set(xlabel=f"eigenvalue of E[M], {stage}").line(x=9.5, label="c − 1 = 9"))
            for part, name in (("gamma", "γ"), ("delta", "δ")):
                points = select(here, kind="point", part=part, seed=0)
                share = select(here, kind="network", seed=0)[0][f"{part}_{by}"]
                title = f"{stage}: means of {name}, by {by} ({share:.2f})"
                means = scatter(points, "first", "second", by=by, xlabel="first direction", ylabel="second", title=title)
                legend: dict[str, Any] = {"title": by, "title_fontsize": 7, "handletextpad": 0.1, "columnspacing": 0.4}
                panels.append(means.legend(fontsize=6.5, ncols=2, **legend))
        return draw_panels(*panels, size=(3.9, 3.2))


def _trace_gap(model: nn.Module, x: Tensor, layer: str, groups: Clusters) -> float:
    """The trace of the layer's block, sample by sample from Jacobians of the logits, against that of the two parts."""
    with recorded_calls({layer: model.get_submodule(layer)}) as calls:
        logits = model(x)
    seen = calls[-1]
    p = logits.detach().double().softmax(-1)
    rows = [torch.autograd.grad(logits[:, j].sum(), seen.output, retain_graph=True)[0] for j in range(logits.shape[1])]
    jacobian = torch.stack(rows, dim=1).double()  # (B, c, m)
    mean = torch.einsum("bc,bcm->bm", p, jacobian)
    # tr M = Σ_k p_k |G_k|² − |Σ_k p_k G_k|², and tr(M ⊗ xxᵀ) is that times |x|².
    curvature = torch.einsum("bc,bcm->b", p, jacobian.square()) - mean.square().sum(1)
    trace = float((curvature * seen.input.detach().double().square().sum(1)).mean())
    return abs(groups.between + groups.within - trace) / trace


def _prediction(problem: Problem, x: Tensor, layer: str, groups: Clusters) -> dict[str, float]:
    """The share of the means of γ that are nearest, in angle, to the centre predicted for their own logit."""
    names, weights, rates = firing_rates(problem)
    place = names.index(layer)
    above, fires = weights[place + 1 :], rates[place:]
    p = problem.model(x).detach().double().softmax(-1)
    root = p.sqrt()
    q = torch.diag(root.mean(0)) - root.T @ p / len(p)  # E[Q], row j: E[√p_j (e_j − p)]
    means = torch.nn.functional.normalize(groups.gamma, dim=-1)  # (i, j, m)
    own = torch.arange(means.shape[1])
    shares = {}
    for name, product in (("plain", weight_product(above)), ("gated", weight_product(above, fires))):
        centres = torch.nn.functional.normalize(q @ product, dim=-1)  # (j, m)
        nearest = (means @ centres.T).argmax(-1)
        shares[f"predicted_{name}"] = float((nearest == own).double().mean())
        cosines = torch.nn.functional.cosine_similarity(groups.gamma.mean(0), q @ product, dim=-1)
        shares[f"cosine_{name}"] = float(cosines.mean())
    return shares


def _points(shared: Mapping[str, Any], groups: Clusters) -> Iterator[Row]:
    """The means on their two leading principal directions."""
    c = len(groups.frequency)
    for part, means in (("gamma", groups.gamma), ("delta", groups.delta)):
        flat = means.reshape(c * c, -1)
        flat = flat - flat.mean(0)
        left, sizes, _ = torch.linalg.svd(flat, full_matrices=False)
        places = left[:, :2] * sizes[:2] * torch.sign(left[:1, :2])  # signs are free: the first point lies right and up
        for n, (first, second) in enumerate((places / sizes[0] * math.sqrt(c)).tolist()):
            yield {"kind": "point", **shared, "part": part, "class": n // c, "logit": n % c, "first": first, "second": second}


# Products of the weights above a layer


#: Wu, Zhu et al. 2020, Table 10: fc1, fc2, fc3. The fully connected network has a fourth layer, LeNet5 has not.
TABLE_10: dict[str, tuple[float, float, float]] = {
    "MNIST F-1500^3": (0.602, 0.967, 0.982),
    "MNIST LeNet5": (0.890, 0.931, 0.999),
    "MNIST-R F-1500^3": (0.235, 0.801, 0.998),
    "MNIST-R LeNet5": (0.518, 0.912, 0.999),
    "CIFAR10 F-1500^3": (0.880, 0.943, 0.993),
    "CIFAR10 LeNet5": (0.951, 0.972, 0.999),
    "CIFAR10-R F-1500^3": (0.903, 0.931, 0.996),
    "CIFAR10-R LeNet5": (0.213, 0.701, 0.999),
}
digits = {labels: rows(data="digits", labels=labels) for labels in ("true", "random")}


def with_standard_error(values: list[float]) -> Measured:
    """The mean over seeds with its standard error; one seed has none."""
    return Measured(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def overlap_of(labels: str, layer: str, column: str = "plain") -> Value:
    """The mean overlap of one layer."""
    return digits[labels](layer=layer)[column].reduce(with_standard_error)


def rise(labels: str) -> Value:
    """By how much fc3 >= fc2 >= fc1 − 0.05 holds for the overlaps, means over seeds: the smaller of the two margins."""
    fc1, fc2, fc3 = (overlap_of(labels, layer) for layer in ("fc1", "fc2", "fc3"))
    return Column.of(fc3 - fc2, fc2 - fc1 + 0.05).min()


def gains(labels: str) -> Column:
    """How much better the gated product is in the hidden layers."""
    hidden = digits[labels](last=False)
    return hidden["gated"] - hidden["plain"]


def from_printed(rows: list[Row]) -> float:
    """Distance of the mean overlap of a line's layer from the printed one."""
    return abs(fmean(row["plain"] for row in rows) - TABLE_10[rows[0]["line"]][rows[0]["place"] - 1])


printed = rows(line=list(TABLE_10), layer=["fc1", "fc2", "fc3"])
DIGITS_3 = Setup("F-100^3")
DIGITS_3_R = DIGITS_3.but(labels="random", epochs=200)


class Table10(NetworkStudy, Experiment):
    """The top eigenspace of the output Hessian from products of the weights above, at minima.

    The span of Sᵀv over all v orthogonal to the ones vector, S the product of the weights above the layer, against the
    c − 1 leading eigenvectors of E[M]; for true and for random labels. Beside it the gated product, in which every hidden
    unit counts as often as it fires: what the product leaves out is mainly which units are on.
    """

    item, where = "wu-zhu-2020 Table 10", "appendix H.4"
    sizes = {
        "tiny": cases(DIGITS_3, seeds=5) + cases(DIGITS_3_R.but(epochs=100)),
        "laptop": cases(
            *(DIGITS_3, DIGITS_3_R),
            Setup("LeNet5", data="mnist", epochs=3, until=0.0, batch=128, samples=2000, flat=False),
            seeds=5,
        ),
        "paper": cases(DIGITS_3, DIGITS_3_R, *(as_printed(line, samples=10000) for line in TABLE_10), seeds=5),
    }
    claims = {
        **{
            f"{labels} labels: the overlap rises with depth, fc3 >= fc2 >= fc1 − 0.05 (smaller margin)": at_least(
                0.0, rise(labels), **paper(value, f"Table 10, {line}: fc3 over fc2")
            )
            for labels, value, line in (("true", 0.015, "MNIST F-1500³"), ("random", 0.197, "MNIST-R F-1500³"))
        },
        "the last hidden layer's subspace is that of the product": at_least(
            0.9,
            overlap_of("true", "fc3"),
            **paper(0.982, "Table 10, MNIST F-1500³"),
            fails={"tiny": "0.82: in these networks units fire unequally often; the gated product, which counts that, has 0.96"},
        ),
        "the last hidden layer's subspace is that of the gated product": at_least(0.9, overlap_of("true", "fc3", "gated")),
        "the last layer's subspace is orthogonal to the ones vector, exactly (smallest overlap)": at_least(
            1 - 1e-8, rows(last=True).min("plain"), **paper(0.999, "Table 10, LeNet5 fc3")
        ),
        "the gated product is at least as good, mean over the layers (share of the seeds)": at_least(
            0.8,
            digits["true"].by("seed").each(gains("true").mean()).map(lambda gain: gain if math.isnan(gain) else gain >= 0).mean(),
        ),
        "true labels: how much better the gated product is": at_least(0.0, gains("true").mean()),
        "random labels: the last hidden layer's subspace is that of the product": at_least(
            0.9, overlap_of("random", "fc3"), **paper(0.998, "Table 10, MNIST-R F-1500³")
        ),
        "random labels: overlap in fc1": measured(overlap_of("random", "fc1")),
        "random labels: how much better the gated product is": measured(gains("random").mean()),
        "column by column: largest distance from the printed overlap": at_most(
            0.1,
            printed.if_any(printed.by("line", "layer").each(from_printed).max()),
            says="0.213 to 0.999",
            since="paper",
        ),
    }
    departs = (
        "Beside the source's product of weights the gated one is measured, which the corrected theorem asks for: hidden inputs "
        "have a mean, so units do not fire half of the time each. The subspace is the range of SᵀAS."
    )

    def run(self, job: Mapping[str, Any], *weights_of: list[Row]) -> Iterator[Row]:
        setup, [problem] = Setup(**job["setup"]), self.problems(job, weights_of)
        names, weights, rates = firing_rates(problem, "fc*")
        factors: Any = kronecker_factors(problem, names, sharing="expand")
        for place, name in enumerate(names):
            c = len(weights[-1])
            top = torch.linalg.eigh(factors[name].output)[1].flip(1)[:, : c - 1]
            last = place == len(names) - 1
            above, fires = weights[place + 1 :], rates[place:]
            plain = torch.eye(c, dtype=torch.float64) if last else weight_product(above)
            gated = plain if last else weight_product(above, fires)
            yield {
                "line": setup.line,
                "data": setup.data,
                "labels": setup.labels,
                "seed": job["seed"],
                "layer": name,
                "place": place + 1,
                "last": last,
                "plain": subspace_overlap(top, sharp_subspace(plain)),
                "gated": subspace_overlap(top, sharp_subspace(gated)),
                "complement": subspace_overlap(top, sharp_subspace(plain, definition="B")),
            }

    def draw(self, rows: list[Row]) -> Any:
        def panel(line: str, here: list[Row]) -> Panel:
            drawn = melted(here, {"plain": "plain", "gated": "gated"}, by="product")
            drawn += [{"place": i, "value": v, "product": "source"} for i, v in enumerate(TABLE_10.get(line, ()), start=1)]
            places = sorted(values_of(here, "place"))
            shown = curves(drawn, "place", "value", title=line).set(xticks=places, xticklabels=[f"fc{i}" for i in places])
            return shown.legend(fontsize=8, loc="lower right", title="product of weights", title_fontsize=8)

        mine = split(rows, "line")
        panels = [*map(panel, mine, mine.values())]
        panels[-1].set(ylim=(None, 1.03))  # of all: they share it
        look: dict[str, Any] = {"by": "product", "labels": "legend", "xlabel": "layer", "ylabel": "overlap"}
        return draw_panels(*panels, size=(3.6, 3.0), share="y", **look)
