"""How tight can a bound be? Priors from half of the data, on three data sets, beside the binomial bound on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from theodolite.experiments import Figure, at_least, at_most, measured, rows, sizes
from theodolite.experiments.lab.panels import draw_panels, scatter
from theodolite.experiments.pac_bayes import paper
from theodolite.experiments.pac_bayes.networks import DIGITS, MNIST, Parts, Setup, data_of, drawn_error, error_of, untrained
from theodolite.experiments.query import Value
from theodolite.experiments.study import Study
from theodolite.measures.bounds import pac_bayes_bound
from theodolite.problem import Problem
from theodolite.results import Row
from theodolite.training import train

_TEN = DIGITS.but(classes=10, rate=0.1)
_WIDE, _LENET = MNIST.but(classes=10, epochs=10), MNIST.but(network="LeNet5", classes=10, epochs=10, rate=0.02)


class SplitPriors(Study):
    """A network is trained on half of the data; around it, the other half certifies a posterior."""

    sizes = sizes(
        tiny={"setups": [asdict(_TEN), asdict(_TEN.but(network="LeNet-mini", epochs=20))], "fit": {"epochs": 3, "passes": 5}},
        laptop={
            "setups": [
                asdict(setup) for setup in (_WIDE, _WIDE.but(data="fashion_mnist"), _LENET, _LENET.but(data="cifar10", side=32))
            ],
            "fit": {"epochs": 3, "passes": 5},
        },
        paper={
            "setups": [
                asdict(setup.but(epochs=100))
                for setup in (_WIDE, _WIDE.but(data="fashion_mnist"), _LENET, _LENET.but(data="cifar10", side=32))
            ],
            "fit": {"epochs": 50, "passes": 50},
        },
    )

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for setup in p.setups:
            yield {"setup": setup, "fit": p.fit, "seed": 0}

    def run(self, job: Mapping[str, Any]) -> Iterator[Row]:
        setup, how, seed = Setup(**job["setup"]), job["fit"], job["seed"]
        parts = data_of(setup, seed)
        model = untrained(setup, parts.x, seed)
        problem = Problem(model, nn.CrossEntropyLoss(), (parts.x, parts.y))
        half = _Recipe(setup, seed)
        found = pac_bayes_bound(
            problem, prior="split", start=dict(model.state_dict()), recipe=half, seed=seed, progress=False, **how
        )
        assert found.posterior is not None
        yield {
            "data": setup.data,
            "network": setup.network,
            "name": f"{setup.data} {setup.network}",
            "n": found.n,
            "bound": found.value,
            "held_out": found.held_out,
            "prior_bound": found.prior_value,
            "kl": found.kl,
            "drawn": found.empirical,
            "guessing": found.guessing,
            **_on_new_samples(model, found.posterior, half.trained, parts),
        }


class _Recipe:
    """Training on the half that is given; it keeps the network that it has trained."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed, self.trained = setup, seed, nn.Module()

    def __call__(self, model: nn.Module, data: Any) -> None:
        setup = self.setup
        sgd = torch.optim.SGD(model.parameters(), lr=setup.rate, momentum=setup.momentum)
        how: dict[str, Any] = {"epochs": setup.epochs, "batch_size": setup.batch, "seed": self.seed}
        (part,) = data
        train(model, nn.CrossEntropyLoss(), part, sgd, **how, progress=False, every=10**9)
        self.trained = model


def _on_new_samples(model: nn.Module, posterior: Any, trained: nn.Module, parts: Parts) -> Row:
    new, error = drawn_error(model, posterior, parts.x_new, parts.y_new)
    return {"new": new, "new_error": error, "test_error": error_of(trained, parts.x_new, parts.y_new)}


def of(data: str, network: str, column: str) -> Value:
    """A number of one network; NaN where a size does not have it."""
    return rows(data=data, network=network).if_any(rows.only(column))


class Peers(Figure):
    """Bounds from a prior that was trained on half of the data, beside what held-out samples say.

    They are far tighter than those around untrained weights. The binomial bound of the network without noise, from the same half,
    is tighter still: what a PAC-Bayes certificate covers is another network, whose noise costs errors.
    """

    study, id = SplitPriors(), "pac-bayes/peers"
    where = "none in the sources: a prior from a part of the data, as others certify networks"
    claims = {
        "no bound is vacuous (largest share of guessing)": at_most(
            0.9999, (rows["bound"] / rows["guessing"]).max(), **paper("0.120 to 0.605", "Table 1")
        ),
        "no bound is below the error of drawn networks on new samples (least distance, in standard errors)": at_least(
            -3.0, ((rows["bound"] - rows["new"]) / rows["new_error"]).min()
        ),
        "the binomial bound on held-out samples is tighter than the PAC-Bayes bound (smallest difference)": at_least(
            0.0, (rows["bound"] - rows["held_out"]).min()
        ),
        "the bound is within twice the error of drawn networks on new samples, and 0.02 (largest excess)": at_most(
            0.02, (rows["bound"] - 2 * rows["new"]).max(), since="laptop"
        ),
        "MNIST, F-600: tighter than the source's best bound around untrained weights": at_most(
            0.2132, of("mnist", "F-600", "bound"), **paper(0.2132, "Table 9, T-600_10"), since="laptop"
        ),
        "MNIST, F-600": measured(of("mnist", "F-600", "bound")),
        "Fashion-MNIST, F-600": measured(of("fashion_mnist", "F-600", "bound")),
        "MNIST, LeNet5": measured(of("mnist", "LeNet5", "bound")),
        "CIFAR-10, LeNet5": measured(of("cifar10", "LeNet5", "bound")),
    }

    def draw(self, rows: list[Row]) -> Any:
        look: dict[str, Any] = {"xlabel": "error of drawn networks on new samples", "identity": True, "by": "name"}
        return draw_panels(
            scatter(rows, "new", "bound", ylabel="PAC-Bayes bound", **look),
            scatter(rows, "test_error", "held_out", ylabel="bound on held-out samples", **look),
            size=(4.6, 3.6),
        )
