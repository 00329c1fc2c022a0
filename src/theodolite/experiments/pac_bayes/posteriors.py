"""Posteriors fitted to their certificates, in the coordinates of the weights or along the axes of the Hessian.

One study; Table 1 looks at the bounds, Figures 7 and 30 at the variances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels, labelled
from theodolite.experiments.pac_bayes import paper
from theodolite.experiments.pac_bayes.networks import DIGITS, MNIST, PRINTED, Setup, Trained, drawn_error, trained, training_of
from theodolite.experiments.query import Value, select, split
from theodolite.experiments.study import Computation, Study
from theodolite.measures.bounds import GaussianPosterior, pac_bayes_bound
from theodolite.operators import kronecker_factors
from theodolite.problem import Problem
from theodolite.results import Row

#: The methods of the source as arguments of `pac_bayes_bound`.
METHODS: dict[str, dict[str, str]] = {
    "BASE": {"posterior": "standard", "refresh": "once"},
    "APPR": {"posterior": "kronecker", "refresh": "once"},
    "ITER": {"posterior": "kronecker", "refresh": "iter"},
    "ITER.M": {"posterior": "kronecker", "refresh": "weights"},
}
#: Those that use the Hessian.
HESSIAN = ("APPR", "ITER", "ITER.M")
#: The layer whose variances the figures show, and into how many parts its coordinates are put.
LAYER, BINS = "fc1", 60
#: Samples that the Hessian's axes are found from for the figures.
FACTOR_SAMPLES = 4000


def _case(setup: Setup, methods: Sequence[str] = tuple(METHODS), init_s: str = "curvature", **how: Any) -> dict[str, Any]:
    return {"setup": asdict(setup), "methods": tuple(methods), "init_s": init_s, **how}


def _ten(setup: Setup) -> Setup:
    """The network of the figures, with ten classes."""
    return setup.but(network="F-200^2", classes=10)


TINY: dict[str, Any] = {"epochs": 10, "batch": 200, "passes": 5}
LAPTOP: dict[str, Any] = {"epochs": 20, "batch": 1000, "passes": 10}
PAPER: dict[str, Any] = {"epochs": 200, "batch": 500, "passes": 50}
_NETWORKS = ("F-600", "F-1200", "F-300^2", "F-600^2")


class Posteriors(Study):
    """Fitted posteriors and their certificates, by network and method.

    The variances begin by curvature for the bounds; for the figures all at that of the prior, since otherwise their order by
    eigenvalue would be there before the first step.
    """

    sizes = sizes(
        tiny={
            "cases": [
                _case(DIGITS, **TINY),
                _case(DIGITS.but(labels="random"), ("BASE", "ITER"), **TINY),
                _case(DIGITS.but(network="F-20^2", classes=10), init_s="flat", **TINY),
            ]
        },
        laptop={
            "cases": [
                _case(MNIST, **LAPTOP),
                _case(MNIST.but(labels="random"), ("BASE", "ITER"), **{**LAPTOP, "epochs": 5}),
                _case(_ten(MNIST), init_s="flat", **LAPTOP),
            ]
        },
        paper={
            "cases": [
                *(_case(PRINTED.but(network=name), **PAPER) for name in _NETWORKS),
                _case(PRINTED.but(labels="random"), **PAPER),
                *(_case(PRINTED.but(network=name, classes=10), **PAPER) for name in ("F-600", "F-200^2")),
                _case(_ten(PRINTED), init_s="flat", **PAPER),
            ]
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for case in p.cases:
            for method in case["methods"]:
                yield {**{name: value for name, value in case.items() if name != "methods"}, "method": method, "seed": 0}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [training_of(Setup(**job["setup"]), job["seed"])]

    def run(self, job: Mapping[str, Any], weights: Sequence[Row]) -> Iterator[Row]:
        setup = Setup(**job["setup"])
        network = trained(setup, job["seed"], weights)
        asked: dict[str, Any] = {**METHODS[job["method"]], "init_s": job["init_s"], "batch_size": job["batch"]}
        how = {name: job[name] for name in ("epochs", "passes", "seed")}
        found = pac_bayes_bound(network.problem, start=network.start, **asked, **how, progress=False)
        shared = {"network": setup.title, "method": job["method"], "init_s": job["init_s"], "seed": job["seed"]}
        fitted = found.fitted or found  # where the prior wins
        assert found.posterior is not None
        assert fitted.posterior is not None
        new, error = drawn_error(network.problem.model, found.posterior, network.parts.x_new, network.parts.y_new)
        yield {
            "kind": "certificate",
            **shared,
            "classes": setup.classes,
            "n": found.n,
            "bound": found.value,
            "confidence": found.confidence,
            "prior_bound": found.prior_value,
            "fitted": fitted.value,
            "kl": found.kl,
            "drawn": found.empirical,
            "new": new,
            "new_error": error,
            "test_error": network.error(),
        }
        if job["init_s"] == "flat":
            yield from ({"kind": "variance", **shared, **row} for row in variances(network, fitted.posterior, job["seed"]))


def variances(network: Trained, posterior: GaussianPosterior, seed: int) -> Iterator[Row]:
    """The variance along each eigenvector of the layer's Hessian, and how it is ordered by the eigenvalue.

    One row for each of `BINS` parts of the coordinates, the largest eigenvalues first; in all of them the rank correlation of
    variance and eigenvalue, and that of a random order. Coordinates of no curvature at all are left out.
    """
    eigenvalue, variance = along_eigenvectors(network.problem.at(posterior.means()), posterior)
    known = eigenvalue > 1e-12 * eigenvalue.max()
    order = eigenvalue[known].argsort(descending=True, stable=True)
    values, s = eigenvalue[known][order], variance[known][order]
    mixed = s[torch.randperm(len(s), generator=torch.Generator().manual_seed(seed))]
    shared = {"correlation": _rank_correlation(values, s), "random": _rank_correlation(values, mixed)}
    share = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    for i, part in enumerate(torch.tensor_split(torch.arange(len(s)), BINS)):
        low, middle, high = s[part].quantile(torch.tensor([0.1, 0.5, 0.9], dtype=s.dtype)).tolist()
        place = {"index": i, "share": float(share[i]), "eigenvalue": float(values[part].median())}
        yield {**place, "variance": middle, "low": low, "high": high, **shared}


def along_eigenvectors(problem: Problem, posterior: GaussianPosterior) -> tuple[Tensor, Tensor]:
    """Approximate eigenvalues τ γ of the layer's Hessian, and the variance of the posterior along their eigenvectors.

    In the posterior's own basis `W = U C Vᵀ`; along other axes A, B the variance is `Σ (AᵀU)² s (VᵀB)²`, entries squared.
    """
    few = problem.with_batches([problem.few(FACTOR_SAMPLES)])
    factors = kronecker_factors(few, LAYER, sharing="expand")[LAYER]
    (tau, a), (gamma, b) = (torch.linalg.eigh(part.double()) for part in (factors.output, factors.input))
    block = next(block for block in posterior.blocks if block.name == f"{LAYER}.weight")
    left = a.T if block.left is None else a.T @ block.left.double()
    right = b if block.right is None else block.right.double().T @ b
    spread = left.square() @ (2 * block.log_std.double()).exp() @ right.square()
    return torch.outer(tau.clamp(min=0.0), gamma.clamp(min=0.0)).flatten(), spread.flatten()


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(spearmanr(a.numpy(), b.numpy()).statistic)


# Table 1: the bounds

certificates = rows(kind="certificate")
true, random = (certificates(network=lambda name, letter=letter: name.startswith(letter)) for letter in "TR")


def bound(network: str, method: str, column: str = "bound") -> Value:
    """A number of the table; NaN where a size does not have that network."""
    found = certificates(network=network, method=method, init_s="curvature")
    return found.if_any(rows.only(column))


def gap(worse: str, better: str, column: str = "bound") -> Value:
    """The smallest difference between two methods, over the networks with true labels."""

    def difference(group: list[Row]) -> float:
        one, other = (select(group, method=method)[0][column] for method in (worse, better))
        return float(one - other)

    return true.by("network", "init_s").each(difference).min()


class Table1(Figure):
    """PAC-Bayes bounds of trained networks, with noise along the weights or along the axes of the Hessian.

    A Gaussian posterior is fitted around each trained network; its bound holds with a probability of 0.965 for networks drawn
    from it. BASE gives each weight a variance of its own; APPR, ITER and ITER.M give one to each eigenvector of the layer's
    Kronecker factors, found once, again and again, or from products of the weights. The fit is descent on the certificate itself
    with a prior variance for each layer, and the certificate is Maurer's: both are tighter than the source's, whose own methods
    Table 9 runs again.
    """

    study, item = Posteriors(), ("wu-zhu-2020 Table 1", "wu-2023 Table 4.1")
    claims = {
        "no bound is vacuous (largest bound)": at_most(0.9999, certificates.max("bound"), says="0.120 to 0.605"),
        "no bound is below the error of drawn networks on new samples (least distance, in standard errors)": at_least(
            -3.0, ((certificates["bound"] - certificates["new"]) / certificates["new_error"]).min(), says="a bound"
        ),
        "true labels: APPR is tighter than BASE (least gain)": at_least(0.0, gap("BASE", "APPR"), reported=0.002),
        "true labels: ITER is tighter than BASE by 0.01 or more (least gain)": at_least(
            0.01, gap("BASE", "ITER"), reported=0.033
        ),
        "true labels: ITER is tighter than APPR (least gain)": at_least(0.0, gap("APPR", "ITER"), reported=0.017, since="laptop"),
        "true labels: ITER is tighter than ITER.M (least gain)": at_least(
            0.0, gap("ITER.M", "ITER"), reported=0.004, since="laptop"
        ),
        "true labels: ITER is nearer to its prior than BASE (least difference, in nats)": at_least(
            0.0, gap("BASE", "ITER", "kl"), **paper(846.5, "Table 9, T-600")
        ),
        "T-600: error of the trained network": at_most(
            0.025, bound("T-600", "ITER", "test_error"), reported=0.015, since="laptop"
        ),
        "T-600: BASE is as tight as the source's": at_most(0.154, bound("T-600", "BASE"), reported=0.154, since="paper"),
        "T-600: ITER is as tight as the source's": at_most(0.120, bound("T-600", "ITER"), reported=0.120, since="paper"),
        "T-600: what the Hessian's axes gain (BASE minus ITER)": at_least(
            0.02, bound("T-600", "BASE") - bound("T-600", "ITER"), reported=0.034, since="laptop"
        ),
        "random labels: bounds are a little above one half (smallest)": at_least(0.5, random.min("bound"), reported=0.562),
        "random labels: and at most the source's BASE (largest)": at_most(
            0.605, random.max("bound"), reported=0.605, since="laptop"
        ),
        "random labels: the posterior goes back to its prior (largest divergence, in nats)": measured(
            random.max("kl"), **paper(1144.8, "Table 9")
        ),
        "random labels: the bound of the fitted posteriors, where the prior's own is better (largest)": measured(
            random.max("fitted"), **paper(0.605, "Table 9, R-600, BASE")
        ),
    }
    departs = (
        "The fit and the certificate are those of `theodolite.measures.bounds`: a prior variance for each layer, draws for every "
        "sample, Maurer's form. Below the paper size the networks are trained and fitted for fewer epochs. The divergence is "
        "KL(Q‖P), which the source's numbers follow and its formula turns around."
    )

    def draw(self, rows: list[Row]) -> Any:
        from theodolite import plots

        table = certificates(init_s="curvature").of(rows) or certificates.of(rows)
        networks = split(table, "network")
        figure, axes = plots.panels(len(networks), size=(4.2, 2.4), letters=len(networks) > 1)
        for ax, (name, found) in zip(axes, networks.items(), strict=True):
            plots.bars(found, "method", "bound", xlabel="bound on the error rate", title=name, ax=ax)
            plots.reference(ax, x=found[0]["test_error"], label="test error")
        return figure


# Figures 7 and 30: the variances

spectra = rows(kind="variance")


def correlation(method: str) -> Value:
    """The rank correlation of variance and eigenvalue of a method."""
    return spectra(method=method)["correlation"].first()


class Figure30(Figure):
    """The variance of the posterior along each eigenvector of the first layer's Hessian, the largest eigenvalue first.

    All variances begin at that of the prior. Where the loss is sharp little noise is allowed, where it is flat it grows up to the
    prior's. BASE, which has no such axes, is shown along the same eigenvectors.
    """

    study, item, only = Posteriors(), ("wu-zhu-2020 Figure 30", "wu-2023 Figure C.27"), {"init_s": "flat"}
    claims = {
        **{
            f"{method}: the larger the eigenvalue, the smaller the variance (rank correlation)": at_most(
                -0.2, correlation(method), says="larger eigenvalue has a smaller variance"
            )
            for method in HESSIAN
        },
        "clearer for ITER than for APPR (difference of the rank correlations)": at_most(
            0.0,
            correlation("ITER") - correlation("APPR"),
            says="more significant and consistent",
            where="Wu, Zhu et al. 2020, appendix G",
            since="laptop",
        ),
        "clearer for ITER than for BASE (difference of the rank correlations)": at_most(
            0.0, correlation("ITER") - correlation("BASE"), says="BASE has no such order", read_from="plot"
        ),
        "a random order shows nothing (largest |rank correlation|)": at_most(
            0.05,  # some thousand coordinates, as at tiny, leave a standard error of 0.03
            abs(spectra["random"]).max(),
            says="none",
            since="laptop",
        ),
        "ITER: the variance at the sharpest sixtieth of the axes over that at the flattest": at_most(
            0.5,
            spectra(method="ITER", index=0)["variance"].only() / spectra(method="ITER", index=BINS - 1)["variance"].only(),
            says="much smaller",
            read_from="plot",
        ),
    }
    departs = "Variances begin all alike: from the squares of the weights, or from curvature, the order would be there at once."

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"xlabel": "share of the axes, sharpest first", "ylabel": "variance s", "log": "y"}
        shown = [
            curves(found, "share", "variance", lower="low", upper="high", title=title, **look)
            for title, found in split(labelled(spectra.of(rows), name="{method}: {correlation:.2f}"), "name").items()
        ]
        return draw_panels(*shown, columns=2, size=(4.4, 3.0), share="y")


class Figure7(Figure):
    """Variance along the Hessian's eigenvectors, all methods in one picture."""

    study, item, only = Posteriors(), "wu-zhu-2020 Figure 7", {"init_s": "flat"}
    claims = {
        "APPR, ITER and ITER.M: larger eigenvalue, smaller variance (weakest rank correlation)": at_most(
            -0.2, spectra(method=HESSIAN).max("correlation"), says="larger eigenvalue has a smaller variance"
        ),
        "the bound is tightest where the order is clearest: ITER below BASE": at_least(
            0.0,
            certificates(method="BASE")["bound"].only() - certificates(method="ITER")["bound"].only(),
            reported=0.202,
            where="Wu, Zhu et al. 2020, Table 9",
        ),
        "methods whose bound says something": equal(4, certificates["bound"].count(lambda value: value < 1), reported=4),
    }

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"xlabel": "eigenvalue τ γ of the layer's Hessian", "ylabel": "variance s", "log": "xy"}
        return draw_panels(curves(spectra.of(rows), "eigenvalue", "variance", by="method", **look), size=(6.0, 4.0))
