"""Bounds where the data are generated, so that the error on new data is known: by this package's fit and by the source's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from theodolite.experiments import Figure, at_least, at_most, between, measured, rows, sizes
from theodolite.experiments.lab.panels import draw_panels, scatter
from theodolite.experiments.pac_bayes import paper
from theodolite.experiments.pac_bayes.networks import SYNTHETIC, Setup, drawn_error, trained, training_of
from theodolite.experiments.pac_bayes.posteriors import METHODS
from theodolite.experiments.pac_bayes.printed import rerun
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import Computation, Study
from theodolite.measures.bounds import pac_bayes_bound
from theodolite.results import Row

#: The methods that are compared, and the two ways to fit them.
COMPARED = ("BASE", "APPR", "ITER")
ROUTES = ("this package", "the source")
SMALL = SYNTHETIC.but(network="F-10", samples=1000, epochs=5)


class Prototypes(Study):
    """Eight noisy prototypes with two labels in turn, 40 inputs, one hidden layer; with random labels too.

    Both ways of fitting start from the same trained networks.
    """

    sizes = sizes(
        tiny={
            "setup": asdict(SMALL),
            "ours": {"epochs": 10, "batch": 200, "passes": 5},
            "theirs": {"epochs": 20, "batch": 200, "every": 5, "decays": (12, 17), "networks": 50},
            "seeds": 2,
        },
        laptop={
            "setup": asdict(SYNTHETIC),
            "ours": {"epochs": 20, "batch": 200, "passes": 10},
            "theirs": {"epochs": 100, "batch": 200, "every": 5, "decays": (60, 85), "networks": 1000},
            "seeds": 3,
        },
        paper={
            "setup": asdict(SYNTHETIC.but(epochs=200)),
            "ours": {"epochs": 200, "batch": 200, "passes": 50},
            "theirs": {"epochs": 2000, "batch": 128, "every": 10, "decays": (400, 800, 1200, 1600), "networks": 50_000},
            "seeds": 10,
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for labels in ("true", "random"):
            setup = asdict(Setup(**p.setup).but(labels=labels))
            for seed in range(p.seeds if labels == "true" else 1):
                for method in COMPARED if labels == "true" else ("BASE", "APPR"):
                    for route, fit in zip(ROUTES, (p.ours, p.theirs), strict=True):
                        yield {"setup": setup, "method": method, "route": route, "fit": fit, "seed": seed}

    def needs(self, job: Mapping[str, Any]) -> list[Computation]:
        return [training_of(Setup(**job["setup"]), job["seed"])]

    def run(self, job: Mapping[str, Any], weights: Sequence[Row]) -> Iterator[Row]:
        setup = Setup(**job["setup"])
        fitted = _fitted if job["route"] == ROUTES[0] else rerun
        found = fitted(setup, job["method"], job["fit"], job["seed"], weights)
        shared = {name: job[name] for name in ("method", "route", "seed")}
        yield {"labels": setup.labels, **shared, **found}


def _fitted(setup: Setup, method: str, how: Mapping[str, Any], seed: int, weights: Sequence[Row]) -> Row:
    """The certificate of `pac_bayes_bound`."""
    network = trained(setup, seed, weights)
    asked: dict[str, Any] = {**METHODS[method], "epochs": how["epochs"], "batch_size": how["batch"], "passes": how["passes"]}
    found = pac_bayes_bound(network.problem, start=network.start, **asked, seed=seed, progress=False)
    assert found.posterior is not None
    new, error = drawn_error(network.problem.model, found.posterior, network.parts.x_new, network.parts.y_new)
    counted = {"bound": found.value, "kl": found.kl, "drawn": found.empirical, "new": new, "new_error": error}
    return {**counted, "prior_bound": found.prior_value, "test_error": network.error(), "n": found.n}


learned, guessed = rows(labels="true"), rows(labels="random")


def gain(route: str, better: str, column: str = "bound") -> Value:
    """By how much BASE is above another method, in the mean over the seeds."""
    mine = learned(route=route)
    return mine(method="BASE").mean(column) - mine(method=better).mean(column)


def compared(route: str) -> dict[str, Any]:
    """What is claimed of each way of fitting."""
    mine = learned(route=route)
    return {
        f"{route}: BASE is above APPR by 0.01 or more (mean over the seeds)": at_least(
            0.01, gain(route, "APPR"), **paper(0.0108, "Table 9, T-600")
        ),
        f"{route}: BASE is above ITER by 0.01 or more (mean over the seeds)": at_least(
            0.01, gain(route, "ITER"), **paper(0.0342, "Table 9, T-600")
        ),
        f"{route}: ITER is at most 0.01 above APPR (mean over the seeds)": at_least(
            -0.01, gain(route, "ITER") - gain(route, "APPR"), **paper(0.0234, "Table 9, T-600")
        ),
        f"{route}: BASE is farther from its prior than ITER (mean, in nats)": at_least(
            0.0, gain(route, "ITER", "kl"), **paper(846.5, "Table 9, T-600")
        ),
        f"{route}: no bound is vacuous (largest)": at_most(0.9999, mine.max("bound"), **paper(0.192, "Table 9, two classes")),
        f"{route}: no bound is below the error on new data (least distance, in standard errors)": at_least(
            -3.0, ((mine["bound"] - mine["new"]) / mine["new_error"]).min(), **paper("a bound", "section 6")
        ),
    }


class Synthetic(Figure):
    """Bounds of small networks on generated data, where the error on new data is known.

    Three methods by two ways of fitting: descent on the certificate itself with draws for every sample (this package), and the
    source's algorithm step by step. With random labels there is nothing to learn, the error is one half, and so must the bound be
    or more.
    """

    study, id, where = Prototypes(), "pac-bayes/synthetic", "Wu, Zhu et al. 2020, section 6 and appendix G, on generated data"
    claims = {
        **compared(ROUTES[0]),
        **compared(ROUTES[1]),
        "the same method is tighter by this package than by the source's steps (least gain)": at_least(
            0.0, learned(route=ROUTES[1]).mean("bound") - learned(route=ROUTES[0]).mean("bound")
        ),
        "random labels: error of drawn networks on new samples (farthest from one half)": at_most(
            0.03, abs(guessed["new"] - 0.5).max(), **paper("0.4992 to 0.4997", "Table 9, R-600")
        ),
        "random labels, this package: the bound": between(
            0.5, 0.75, guessed(route=ROUTES[0]).max("bound"), **paper("0.562 to 0.605", "Table 9, R-600")
        ),
        "random labels, the source's steps: the bound is at least chance (smallest)": at_least(
            0.5, guessed(route=ROUTES[1]).min("bound"), **paper("0.562 to 0.605", "Table 9, R-600")
        ),
        "random labels: divergence left by this package (largest, in nats)": measured(
            guessed(route=ROUTES[0]).max("kl"), **paper(390.25, "Table 9, R-600, APPR")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"by": "method", "ylabel": "bound", "xlabel": "error of drawn networks on new data"}
        panels = [scatter(select(rows, labels="true", route=route), "new", "bound", **look, title=route) for route in ROUTES]
        return draw_panels(*panels, size=(4.4, 3.6))
