"""Do the certificates hold? Counted where the error on new data is known, and where somebody cheats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.errors import ArgumentError
from theodolite.experiments import Figure, at_least, at_most, equal, measured, rows, sizes
from theodolite.experiments.lab.panels import curves, draw_panels, scatter
from theodolite.experiments.pac_bayes import paper
from theodolite.experiments.pac_bayes.networks import SYNTHETIC, Setup, drawn_error, trained
from theodolite.experiments.pac_bayes.posteriors import METHODS
from theodolite.experiments.query import Value, select
from theodolite.experiments.study import InParts
from theodolite.measures.bounds import kl_inverse, pac_bayes_bound
from theodolite.problem import Problem
from theodolite.results import Row

# One weight, whose risk is known exactly

#: Labels that are wrong by chance, and the threshold that makes no other error.
FLIPPED, THRESHOLD = 0.1, 0.5
#: Posteriors among which one is chosen by its bound: means and standard deviations of the threshold.
MEANS, SPREADS = torch.linspace(0.0, 1.0, 21).double(), torch.logspace(-2.5, 0.0, 6).double()
#: The prior: N(0, 1). Its centre is a bad threshold.
PRIOR = 1.0


def _one_weight(job: Mapping[str, Any]) -> Iterator[Row]:
    """`sign(x − w)` on uniform x: its posterior is the one with the best bound on the data, its risk an integral.

    For each δ, how often the bound of the chosen posterior is below its risk; also of the bound without its divergence, which
    promises nothing for a posterior that was chosen.
    """
    generator = torch.Generator().manual_seed(job["seed"])
    mean, spread = (part.flatten() for part in torch.meshgrid(MEANS, SPREADS, indexing="ij"))
    risk = exact_risk(mean, spread)
    kl = 0.5 * ((spread.square() + mean.square()) / PRIOR - 1 + math.log(PRIOR) - 2 * spread.log())
    n, found = job["n"], []
    for _ in range(job["sets"]):
        x = torch.rand(n, generator=generator, dtype=torch.float64)
        flipped = torch.rand(n, generator=generator) < FLIPPED
        label = (x > THRESHOLD) ^ flipped
        above = torch.special.ndtr((x[:, None] - mean) / spread)  # P(w < x) for each posterior
        found.append(torch.where(label[:, None], 1 - above, above).mean(0).clamp(0, 1))
    empirical = torch.stack(found)
    for delta in job["deltas"]:
        rest = math.log(2 * math.sqrt(n) / delta)
        misses, bound = _misses(empirical, (kl + rest) / n, risk)
        without, _ = _misses(empirical, torch.full_like(kl, rest / n), risk)
        yield {"n": n, "delta": delta, "misses": misses, "without": without, "bound": bound}


def _misses(empirical: Tensor, budget: Tensor, risk: Tensor) -> tuple[float, float]:
    """How often the posterior with the smallest bound has a larger risk than that, and the mean of these bounds."""
    least, chosen = kl_inverse(empirical, budget.expand_as(empirical)).min(1)
    return float((least < risk[chosen]).double().mean()), float(least.mean())


def exact_risk(mean: Tensor, spread: Tensor) -> Tensor:
    """The expectation over w ~ N(mean, spread²) of `0.1 + 0.8 |w − ½|`, w cut off at 0 and 1.

    >>> exact_risk(torch.tensor([0.5]).double(), torch.tensor([1e-9]).double())
    tensor([0.1000], dtype=torch.float64)
    """
    low, middle, high = (_first_moment(edge, mean, spread) for edge in (0.0, THRESHOLD, 1.0))
    # E|c − ½| = E max(½ − c, 0) + E max(c − ½, 0) with c the weight cut off
    below, above = middle - low, (mean - THRESHOLD + middle) - (mean - 1.0 + high)
    return FLIPPED + (1 - 2 * FLIPPED) * (below + above)


def _first_moment(edge: float, mean: Tensor, spread: Tensor) -> Tensor:
    """`E max(edge − w, 0)`."""
    z = (edge - mean) / spread
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    found: Tensor = (edge - mean) * torch.special.ndtr(z) + spread * density
    return found


# Draws of unequal means


def _draws(job: Mapping[str, Any]) -> Iterator[Row]:
    """Independent errors, each with a probability of its own: how often their mean's bound is below the mean probability."""
    generator = torch.Generator().manual_seed(job["seed"])
    laws = {
        "equal": torch.full((job["m"],), 0.05),
        "uneven": torch.rand(job["m"], generator=generator).pow(8),
        "sure or never": (torch.arange(job["m"]) % 10 == 0).float(),
    }
    for (name, p), delta in product(laws.items(), job["deltas"]):
        wrong = torch.rand(job["sets"], job["m"], generator=generator) < p
        upper = kl_inverse(wrong.double().mean(1), math.log(1 / delta) / job["m"])
        yield {"law": name, "delta": delta, "misses": float((upper < float(p.double().mean())).double().mean())}


# Networks, on new samples


def _network(job: Mapping[str, Any]) -> Iterator[Row]:
    """A certificate, and the error of drawn networks on samples that had no part in it."""
    setup, seed = Setup(**job["setup"]), job["seed"]
    network = trained(setup, seed)
    asked: dict[str, Any] = {**METHODS[job["method"]], "epochs": job["epochs"], "batch_size": job["batch"], "passes": 5}
    found = pac_bayes_bound(network.problem, start=network.start, **asked, seed=seed, progress=False)
    assert found.posterior is not None
    new, error = drawn_error(network.problem.model, found.posterior, network.parts.x_new, network.parts.y_new, seed)
    counted = {"bound": found.value, "drawn": found.empirical, "new": new, "new_error": error}
    yield {"n": found.n, "method": job["method"], **counted, "beyond": (found.value - new) / error}


# Somebody cheats


def _cheat(job: Mapping[str, Any]) -> Iterator[Row]:
    """Weights that memorised random labels, given as if they had never seen them: in three ways, all to be refused.

    What the certificate says where nobody can tell (neither the training data nor test data is given) is counted too: samples on
    which a network is always right look the same whether it learned them by heart or the labels are what it says.
    """
    setup = SYNTHETIC.but(network="F-100", labels="random", samples=job["memorised"], epochs=150, momentum=0.9)
    network = trained(setup, job["seed"])
    problem = network.problem
    memorised = {name: p.detach().clone() for name, p in problem.model.named_parameters()}
    for p in problem.model.parameters():
        p.data.add_(1e-4)  # no longer the centre of the prior itself
    new = Problem(problem.model, nn.CrossEntropyLoss(), (network.parts.x_new, network.parts.y_new))
    how: dict[str, Any] = {"epochs": 2, "batch_size": 200, "passes": 20, "progress": False}
    ways: dict[str, Callable[[], Any]] = {
        "as untrained weights": lambda: pac_bayes_bound(problem, start=memorised, **how),
        "as held-out, with the training data": lambda: pac_bayes_bound(problem, prior="held-out", trained_on=problem, **how),
        "as held-out, with test data": lambda: pac_bayes_bound(problem, prior="held-out", test=new, **how),
    }
    for way, certify in ways.items():
        yield {"way": way, "refused": int(_is_refused(certify)), "new": network.error()}
    lie = pac_bayes_bound(problem, prior="held-out", **how)
    yield {"way": "as held-out, without", "bound": lie.value, "new": network.error()}


def _is_refused(certify: Callable[[], Any]) -> bool:
    try:
        certify()
    except ArgumentError:
        return True
    return False


class Coverage(InParts):
    """Certificates beside what they are about."""

    sizes = sizes(
        deltas=(0.025, 0.2, 0.5),
        tiny={"setup": asdict(SYNTHETIC.but(network="F-10", epochs=3)), "samples": (300, 1000), "sets": 300, "networks": 8},
        laptop={"setup": asdict(SYNTHETIC.but(fresh=20_000)), "samples": (300, 1000, 3000), "sets": 20_000, "networks": 200},
        paper={"setup": asdict(SYNTHETIC.but(fresh=20_000)), "samples": (1000, 3000, 10_000), "sets": 20_000, "networks": 1000},
    )
    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]]] = {
        "one weight": _one_weight,
        "draws": _draws,
        "network": _network,
        "cheat": _cheat,
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        for n in (50, 200):
            yield {"part": "one weight", "n": n, "sets": p.sets, "deltas": p.deltas, "seed": 0}
        yield {"part": "draws", "m": 200, "sets": 10 * p.sets, "deltas": p.deltas, "seed": 0}
        for seed in range(p.networks):  # each trained on samples of its own
            setup = asdict(Setup(**p.setup).but(samples=p.samples[seed // 2 % len(p.samples)]))
            how = {"epochs": 10, "batch": 100, "method": ("BASE", "ITER")[seed % 2]}
            yield {"part": "network", "setup": setup, **how, "seed": seed}
        yield {"part": "cheat", "memorised": 200, "seed": 0}


def within_budget(part: str) -> Value:
    """The share of misses minus what is allowed, at worst."""
    found = rows(part=part)
    return (found["misses"] - found["delta"]).max()


weights, networks, cheats = rows(part="one weight"), rows(part="network"), rows(part="cheat")


class Validity(Figure):
    """Certificates hold as often as they say: counted over training sets, over draws, and on new samples.

    One weight: the risk of any posterior is an integral, the posterior is the one with the best bound on the data, and many
    training sets say how often the bound is below the risk. Draws: independent errors of unequal probability. Networks: drawn
    ones on new samples. And a prior that has seen the data, which must be refused.
    """

    study, id, where = Coverage(), "pac-bayes/validity", "Wu, Zhu et al. 2020, appendix G: the theorem and the final certificate"
    claims = {
        "one weight: bounds of chosen posteriors miss their risk in at most δ of the training sets (share minus δ)": at_most(
            0.0, within_budget("one weight"), **paper("with probability at least 1 − δ", "section 6")
        ),
        "one weight: the bounds say something (largest mean bound)": at_most(0.6, weights.max("bound")),
        "one weight: without the divergence the same bounds miss more often (share, δ = 0.5)": measured(
            weights(delta=0.5).max("without")
        ),
        "draws of unequal probability: bounds on their mean miss in at most δ' of all cases (share minus δ')": at_most(
            0.0, within_budget("draws"), **paper("with probability at least 1 − δ'", "appendix G")
        ),
        "draws: the bound is not loose beyond reason: misses at δ' = 0.5 (share, equal probabilities)": at_least(
            0.02, rows(part="draws", law="equal", delta=0.5).only("misses")
        ),
        "networks: certificates below the error on new samples (by three standard errors)": equal(
            0, networks["beyond"].map(lambda beyond: not beyond >= -3).sum(), **paper(0, "section 6")
        ),
        "networks that were certified": measured(networks["bound"].count(lambda bound: bound <= 1)),
        "networks whose error rate on the samples alone would be below that on new ones (share)": at_least(
            0.5, (networks["new"] - networks["drawn"]).map(lambda gap: gap > 0).mean()
        ),
        "networks: the least distance of a certificate from the error on new samples": at_least(
            0.0, (networks["bound"] - networks["new"]).min()
        ),
        "a prior that memorised the labels is refused (share of the ways to give it)": equal(
            1.0, cheats(refused=lambda known: known is not None)["refused"].mean()
        ),
        "memorised labels: error on new samples, where there is nothing to know": at_least(0.4, cheats["new"].min()),
        "and what a certificate would say of it if it cannot be refused": measured(
            cheats(way="as held-out, without").only("bound")
        ),
    }

    def draw(self, rows: list[Row]) -> Any:
        misses = [{**row, "of": f"n = {row['n']}"} for row in select(rows, part="one weight")]
        misses += [{**row, "of": f"draws, {row['law']}"} for row in select(rows, part="draws")]
        look: dict[str, Any] = {"xlabel": "error of drawn networks on new samples", "ylabel": "certificate", "identity": True}
        return draw_panels(
            curves(misses, "delta", "misses", by="of", xlabel="allowed δ", ylabel="share of misses"),
            scatter(select(rows, part="network"), "new", "bound", by="n", **look),
            size=(4.6, 3.6),
        )
