"""The theorems on why masking helps, checked without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.data.generators import planted_dictionary, planted_samples
from theodolite.experiments import Experiment, at_least, at_most, between, rows, sizes, within
from theodolite.experiments.claims import quoted
from theodolite.experiments.lab.panels import Panel, curves, draw_panels, matrix, melted, split
from theodolite.experiments.query import Column, Measured, Value, chosen, select, values_of
from theodolite.experiments.study import InParts, grid
from theodolite.measures import dictionary
from theodolite.measures.dictionary.hidden import visible_masks
from theodolite.measures.dictionary.losses import mean_and_error
from theodolite.measures.dictionary.theory import noise_cross_term, oracle_codes
from theodolite.results import Row

#: Atoms and dimension of the overfitting theorem's checks.
ATOMS, DIM = 40, 20
#: Of the consistency theorem's and of the threshold's: atoms and dimension, coordinates hidden, atoms per signal, noise.
WIDE, WIDE_HIDDEN, K, WIDE_NOISE = (50, 400), 40, 2, 0.5
#: Noise and hidden coordinates of the decomposition's.
NOISE, HIDDEN = 0.3, 4


def one_atom_signals(true: Tensor, n: int, sigma: float, seed: int) -> Tensor:
    """Plus or minus one atom each, with noise."""
    return planted_samples(true, n, 1, noise=sigma, law="rademacher", seed=seed).signals


def best_loss(signals: Tensor, atoms: Tensor, k: int = 1) -> float:
    """L(B, k): the mean error of the best k-sparse codes."""
    return dictionary.reconstruction_loss(signals, atoms, k, decoder="exhaustive").value


def visible(dim: int, hidden: int, seed: int) -> Tensor:
    """One random set, bool (dim,)."""
    return visible_masks(dim, hidden, masks="batch", batch=1, step=0, seeds=(seed,))[0, 0]


def wrong_share(codes: dictionary.SparseCodes, supports: Tensor) -> float:
    """The share of signals whose atoms are not the true ones."""
    return float((codes.support.sort(1).values != supports.sort(1).values).any(1).double().mean())


def gershgorin(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1: restricted isometry constants over their bound."""
    for seed in range(job["count"]):
        true = planted_dictionary(12, 20, seed=seed)
        found = [dictionary.restricted_isometry(true, s) for s in (2, 3, 4)]
        yield {"draw": seed, "ratio": max(each.value / each.gershgorin for each in found)}


def overfitting(job: Mapping[str, Any]) -> Iterator[Row]:
    """T2, T3: what a second atom gains, and what mixtures of two atoms gain instead, in units of σ²."""
    sigma, seed = job["sigma"], job["seed"]
    true = planted_dictionary(ATOMS, DIM, seed=seed)
    signals = one_atom_signals(true, job["n"], sigma, seed)
    one = best_loss(signals, true)
    gap = one - best_loss(signals, true, 2)
    for angles, radius in product(job["angles"], job["radii"]):
        net = dictionary.overfitting_dictionary(true, angles, radius * sigma)
        gain = one - best_loss(signals, net)
        yield {
            "sigma": sigma,
            "angles": angles,
            "radius": radius,
            "mixtures": len(net),
            "gap": gap / sigma**2,
            "gain": gain / sigma**2,
            "share": gain / gap,
            "distance": dictionary.recovery_error(true, net, "euclidean") / sigma**2,
        }


def mixtures_needed(job: Mapping[str, Any]) -> Iterator[Row]:
    """T4: the fewest mixtures with half of the gain at σ² = 1/d, over p²d."""
    p, d, seed = job["atoms"], job["dim"], job["seed"]
    true = planted_dictionary(p, d, seed=seed)
    signals = one_atom_signals(true, job["n"], 1 / math.sqrt(d), seed)
    one, two = best_loss(signals, true), best_loss(signals, true, 2)
    nets = (dictionary.overfitting_dictionary(true, angles) for angles in range(2, d + 1))
    needed = next((len(net) for net in nets if best_loss(signals, net) <= (one + two) / 2), math.inf)
    yield {"atoms": p, "dim": d, "mixtures": needed, "share": needed / (p**2 * d)}


def decomposition(job: Mapping[str, Any]) -> Iterator[Row]:
    """T5, T6: cross terms of errors and noise in standard errors, and the distance of L_mask from its lower bound."""
    true = planted_dictionary(ATOMS, DIM, seed=job["seed"])
    sample = planted_samples(true, job["n"], 2, noise=NOISE, normalize=False, seed=job["seed"])
    clean, seen = sample.signals - sample.noise, visible(DIM, HIDDEN, job["seed"])
    risks = dictionary.oracle_risks(true, 2, seen, noise=NOISE, scale=1.0)
    for name, atoms in dictionaries(true, sample.signals[:500]).items():
        masked = dictionary.pursue(sample.signals, atoms, 2, visible=seen).reconstruct(atoms) - clean
        whole = dictionary.pursue(sample.signals, atoms, 2).reconstruct(atoms) - clean
        hidden_mean, hidden_error = noise_cross_term(masked, sample.noise, seen)
        mean, error = noise_cross_term(whole, sample.noise)
        loss = dictionary.masked_loss(sample.signals, atoms, 2, seen)
        risk = masked[:, ~seen].square().sum(1)
        off, off_error = mean_and_error(loss.per_signal - risk - risks.floor)
        yield {
            "dictionary": name,
            "hidden_cross": hidden_mean / hidden_error,
            "cross": mean / error,
            "off_floor": off / off_error,
            "above_bayes": (loss.value - risks.floor - risks.bayes) / loss.error,
        }


def dictionaries(true: Tensor, signals: Tensor) -> dict[str, Tensor]:
    """The true one, two trained ones, and random ones."""
    start = planted_dictionary(*true.shape, seed=100)
    named = {"true": true}
    for objective in ("reconstruction", "masked"):
        settings = dictionary.LearningSettings(2, objective, batch_size=100, learning_rate=1e-2, shuffle=False)
        named[f"trained, {objective}"] = dictionary.learn_dictionaries(signals, start[None], settings, epochs=20).components[0]
    return named | {f"random {i}": planted_dictionary(*true.shape, seed=100 + i) for i in range(1, 6)}


def consistency(job: Mapping[str, Any]) -> Iterator[Row]:
    """T7: risks of matching pursuit and of oracles that know the support, with large coefficients."""
    scale, seed = job["scale"], job["seed"]
    true, seen = planted_dictionary(*WIDE, seed=seed), visible(WIDE[1], WIDE_HIDDEN, seed)
    sample = planted_samples(true, job["n"], K, noise=WIDE_NOISE, scale=scale, normalize=False, seed=seed)
    clean, supports = sample.signals - sample.noise, sample.codes.abs().topk(K).indices
    pursued = dictionary.pursue(sample.signals, true, K, visible=seen, selection="normalized")

    def risk(codes: dictionary.SparseCodes) -> Tensor:
        return (codes.reconstruct(true) - clean)[:, ~seen].square().sum(1)

    omp, bayes = risk(pursued), risk(oracle_codes(sample.signals, true, supports, seen, ridge=(WIDE_NOISE / scale) ** 2))
    exact = dictionary.oracle_risks(true, K, seen, noise=WIDE_NOISE, scale=scale)
    excess, error = mean_and_error(omp - bayes)
    yield {
        "scale": scale,
        "seed": seed,
        "coherence": dictionary.coherence(true, seen),
        "risk": float(omp.mean()),
        "excess": excess,
        "excess_error": error,
        "least_squares_excess": exact.least_squares - exact.bayes,
        "bayes": exact.bayes,
        "wrong": wrong_share(pursued, supports),
    }


def rankings(job: Mapping[str, Any]) -> Iterator[Row]:
    """T8: both losses of the true dictionary and of the mixtures, with either rule of selection."""
    sigma, seed = job["sigma"], job["seed"]
    true = planted_dictionary(ATOMS, DIM, seed=seed)
    signals = one_atom_signals(true, job["n"], sigma, seed + 1)
    net = dictionary.overfitting_dictionary(true, angles=64, radius=sigma)
    yield {"sigma": sigma, "loss": "reconstruction", "true": best_loss(signals, true), "mixtures": best_loss(signals, net)}
    masks = [visible(DIM, 2, mask) for mask in range(job["masks"])]
    for selection in ("normalized", "raw"):
        losses = {
            name: fmean(dictionary.masked_loss(signals, atoms, 1, seen, selection=selection).value for seen in masks)
            for name, atoms in (("true", true), ("mixtures", net))
        }
        yield {"sigma": sigma, "loss": f"masked, {selection}", **losses}


def threshold(job: Mapping[str, Any]) -> Iterator[Row]:
    """T9: how often pursuit finds supports whose coefficients are at the theorem's threshold."""
    eta, n, seed = job["eta"], job["n"], job["seed"]
    true = planted_dictionary(*WIDE, seed=seed)
    gamma = dictionary.omp_threshold(WIDE_NOISE, K, len(true), dictionary.coherence(true), eta)
    sample = planted_samples(true, n, K, noise=WIDE_NOISE, law="rademacher", scale=gamma, normalize=False, seed=seed)
    right = 1 - wrong_share(dictionary.pursue(sample.signals, true, K), sample.codes.abs().topk(K).indices)
    bound = dictionary.omp_success_bound(K, len(true), eta)
    yield {"eta": eta, "gamma": gamma, "frequency": right, "bound": bound, "error": math.sqrt(bound * (1 - bound) / n)}


def largest_square(job: Mapping[str, Any]) -> Iterator[Row]:
    """T10: the mean of the largest of n squared Gaussians, independent and all the same."""
    generator = torch.Generator().manual_seed(job["seed"])
    draws = torch.randn(job["draws"], job["n"], generator=generator, dtype=torch.float64).square()
    yield {
        "n": job["n"],
        "independent": float(draws.amax(1).mean()),
        "equal": float(draws[:, 0].mean()),
        "bound": dictionary.chi_square_max_bound(job["n"]),
    }


ranked, mixed, decomposed, consistent = (rows(part=part) for part in ("T8", "T2-T3", "T5-T6", "T7"))
fine = mixed(angles=64, radius=1.0)


def power_of_scale(column: str, least_scale: float) -> Value:
    """The power of σ_z that a column of T7 follows from some scale on, in mean over the dictionaries."""
    return consistent(scale=lambda scale: scale >= least_scale).power("scale", column)


def excess_share(rows: list[Row]) -> Measured:
    """Risk above Bayes over the Bayes risk at the largest σ_z, with its standard error."""
    last = max(row["scale"] for row in chosen(rows, part="T7"))
    mine = chosen(rows, part="T7", scale=last)
    bayes = fmean(row["bayes"] for row in mine)
    error = math.sqrt(sum(row["excess_error"] ** 2 for row in mine)) / len(mine)
    return Measured(fmean(row["excess"] for row in mine) / bayes, error / bayes)


def relative_loss(loss: str) -> Column:
    """By how much the mixtures' loss exceeds the true dictionary's, as a share of it."""
    return ranked(loss=loss)["mixtures"] / ranked(loss=loss)["true"] - 1


#: The smallest change of the gain when the angles double, with no atom taken out.
refinement = mixed(radius=0.0).by("sigma").each(rows["gain"].steps().min()).min()
shares_of_p2d = rows(part="T4")["share"]


theory = partial(quoted, "Wu 2023", read_from="theory")
CLAIMS = {
    "T8: by reconstruction the mixtures beat the true dictionary (their loss over its own, less 1; largest)": at_most(
        -0.2, relative_loss("reconstruction").max(), **theory("lower", "Theorem 2.3.2")
    ),
    "T8: by the masked loss the true dictionary beats the mixtures (their loss over its own, less 1; smallest)": at_least(
        0.15, relative_loss("masked, normalized").min(), **theory("higher", "Theorem 2.3.6")
    ),
    "T8: so it does when atoms are selected by raw inner products (smallest)": at_least(
        0.15, relative_loss("masked, raw").min(), **theory("higher", "Theorem 2.3.6")
    ),
    "T1: restricted isometry constants over (s − 1) times the coherence (largest)": at_most(
        1.0, rows(part="T1").max("ratio"), tolerance=1e-9, **theory(1.0, "section 2.2")
    ),
    "T2: a second atom per signal lowers the loss in proportion to σ² ((L(A,1) − L(A,2))/σ², smallest)": between(
        4.0, 7.0, mixed.min("gap"), **theory("of the order of kσ²", "(A.7)")
    ),
    "T2: the same at every σ (variation over σ as a share of the mean)": at_most(
        0.03, mixed["gap"].reduce(lambda gaps: float(np.ptp(gaps) / np.mean(gaps))), **theory(0.0, "(A.7)")
    ),
    "T3: mixtures of two atoms gain nearly as much (share of T2's gap with 64 angles, smallest)": between(
        0.8, 1.0, fine.min("share"), **theory("a constant share", "Theorem 2.3.2")
    ),
    "T3: and no more than the second atom (largest share)": at_most(
        1.0, mixed.max("share"), **theory("at most 1", "Theorem 2.3.2")
    ),
    "T3: although they stay away from all true atoms (d_R/σ² with radius σ, smallest)": at_least(
        1.0, fine.min("distance"), **theory("of the order of 1", "Theorem 2.3.2")
    ),
    "T3: finer mixtures gain more (smallest change of the gain over σ² when the angles double)": at_least(
        0.0, refinement, **theory("growing", "Theorem 2.3.2")
    ),
    "T4: mixtures needed for half of the gain grow no faster than p²d (their ratio at the largest d over the smallest)": at_most(
        1.0, shares_of_p2d.last() / shares_of_p2d.first(), **theory("of the order of p²d", "Corollary 2.3.4")
    ),
    "T5: errors on hidden coordinates do not know their noise (|cross term| in standard errors, largest)": at_most(
        4.0, abs(decomposed["hidden_cross"]).max(), **theory(0.0, "(A.11)")
    ),
    "T5: errors of the usual decoder do (cross term in standard errors, smallest)": at_least(
        10.0, decomposed.min("cross"), **theory("positive", "section 2.3")
    ),
    "T5: the masked loss is a risk plus the noise of the hidden coordinates (|difference| in standard errors, largest)": at_most(
        4.0, abs(decomposed["off_floor"]).max(), **theory(0.0, "(A.11)")
    ),
    "T6: no dictionary beats the Bayes risk (masked loss less noise less Bayes risk, in standard errors, smallest)": at_least(
        -3.0, decomposed.min("above_bayes"), **theory("at least 0", "(A.16), ridge σ²/σ_z²")
    ),
    "T7: wrong supports become rare like 1/σ_z (power, from σ_z = 8 on)": within(
        0.15, -1.0, power_of_scale("wrong", 8), **theory(-1.0, "(A.23), corrected")
    ),
    "T7: the true dictionary's risk above Bayes falls like 1/σ_z (power, from σ_z = 4 on)": within(
        0.25, -1.0, power_of_scale("excess", 4), **theory("to 0", "Theorem 2.3.6")
    ),
    "T7: risk above Bayes at the largest σ_z, as a share of the Bayes risk": at_most(
        0.1, excess_share, **theory("to 0", "Theorem 2.3.6")
    ),
    "T7: least squares approaches Bayes like 1/σ_z² (power of exact risks, from σ_z = 4 on)": within(
        0.05, -2.0, power_of_scale("least_squares_excess", 4), **theory(-2.0, "(A.15), corrected")
    ),
    "T9: coefficients at the threshold are found at least as often as the bound says (frequency less bound, smallest)": at_least(
        0.0,
        rows(part="T9").column(lambda row: row["frequency"] - row["bound"] + 3 * row["error"]).min(),
        **theory("at least 0", "Theorem A.1.1"),
    ),
    "T10: the mean of the largest squared Gaussian over its bound (largest)": at_most(
        1.0,
        rows(part="T10").column(lambda row: max(row["independent"], row["equal"]) / row["bound"]).max(),
        **theory("at most 1", "Lemma A.1.2"),
    ),
}


SIGMAS = (0.05, 0.1, 0.2)
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Theorems(InParts, Experiment):
    """Why masking helps, without training: the two losses rank the same two dictionaries oppositely.

    Mixtures of two true atoms fit noise better than the true atoms (Theorem 2.3.2), unless the loss is taken where the code
    has not looked (Theorem 2.3.6); with the lemmas behind both: T1 restricted isometry, T2 to T4 overfitting, T5 to T7 the
    masked loss, T8 both, T9 the threshold of matching pursuit, T10 the largest of squared Gaussians.
    """

    id = "sparse-coding/theorems"
    where = "Wu 2023, section 2.3, Theorems 2.3.2 and 2.3.6, appendix A.1"
    parts = {
        "T1": gershgorin,
        "T2-T3": overfitting,
        "T4": mixtures_needed,
        "T5-T6": decomposition,
        "T7": consistency,
        "T8": rankings,
        "T9": threshold,
        "T10": largest_square,
    }
    #: Draws of each theorem.
    sizes = sizes(
        {
            "signals": (1500, 8000, 20_000),
            "needed": (800, 2000, 4000),
            "noisy": (6000, 10_000, 20_000),
            "dictionaries": (3, 6, 6),
            "ranked": (500, 2000, 8000),
            "masks": (2, 4, 10),
            "dims": ((10, 20, 40), (10, 20, 40, 80), (10, 20, 40, 80, 160)),
        },
        matrices=200,
        consistent=4000,
    )
    departs = (
        "Mixtures are directions in the plane of two atoms, one parameter each, where the source covers a ball. The ridge of the "
        "Bayes predictor is σ²/σ_z², not 1/σ_z² (A.15), and the chance of a small coefficient is added to that of failure (A.23)."
    )
    claims = CLAIMS

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield {"part": "T1", "count": p.matrices, "seed": 0}
        yield from grid(p, part=["T2-T3"], sigma=SIGMAS, n=[p.signals], angles=[[8, 16, 32, 64]], radii=[[0.0, 1.0]], seed=[0])
        yield from grid(p, part=["T4"], atoms=[20], dim=p.dims, n=[p.needed], seed=[0])
        yield {"part": "T5-T6", "n": p.noisy, "seed": 0}
        yield from grid(p, part=["T7"], scale=SCALES, n=[p.consistent], seed=range(p.dictionaries))
        yield from grid(p, part=["T8"], sigma=SIGMAS, n=[p.ranked], masks=[p.masks], seed=[0])
        yield from grid(p, part=["T9"], eta=(0.0, 0.5, 1.0), n=[1000], seed=[0])
        yield from grid(p, part=["T10"], n=(10, 100, 1000), draws=[2000], seed=[0])

    def draw(self, rows: list[Row]) -> Any:
        part = split(rows, "part")
        ratios = [{**row, "of": row["loss"], "value": row["mixtures"] / row["true"]} for row in part["T8"]]
        risks = melted(part["T7"], {"excess": "risk above Bayes", "bayes": "Bayes risk", "wrong": "P(support wrong)"})
        squares = melted(part["T10"], {"independent": "independent", "equal": "all equal", "bound": "bound"})
        needed: dict[str, Any] = {"xlabel": "dimension d", "ylabel": "mixtures needed / p²d", "title": "T4: for half of the gain"}
        return draw_panels(
            _lines(ratios, "sigma", "xy", "noise σ", "loss of mixtures / of true atoms", "T8: two losses, two rankings").line(
                y=1.0
            ),
            _gains(select(part["T2-T3"], radius=1.0)),
            curves(part["T4"], "dim", "share", log="xy", **needed),
            _cross_terms(part["T5-T6"]),
            _lines(risks, "scale", "xy", "size of the coefficients σ_z", "", "T7: the true atoms become optimal"),
            _lines(squares, "n", "x", "variables n", "mean of the largest", "T10: squared Gaussians"),
            size=(4.7, 3.4),
        )


def _lines(table: list[Row], x: str, log: str, xlabel: str, ylabel: str, title: str) -> Panel:
    """The `value` of rows by x, a line for each `of`."""
    return curves(table, x, "value", by="of", log=log, labels="legend", xlabel=xlabel, ylabel=ylabel, title=title)


def _gains(rows: list[Row]) -> Panel:
    lines = split(rows, "sigma")
    values = [[row["gain"] for row in line] for line in lines.values()]
    names: dict[str, Any] = {"row_names": [f"σ = {sigma:g}" for sigma in lines], "column_names": values_of(rows, "angles")}
    look: dict[str, Any] = {"xlabel": "directions per pair of atoms", "label": "gain / σ²", "annotate": True}
    return matrix(values, **names, **look, title="T3: what mixtures gain in loss")


def _cross_terms(rows: list[Row]) -> Panel:
    values = [[row["hidden_cross"], row["cross"], row["above_bayes"]] for row in rows]
    names = {"row_names": [row["dictionary"] for row in rows], "column_names": ["hidden noise", "noise, usual", "above Bayes"]}
    return matrix(values, **names, annotate=True, title="T5, T6: cross terms and excess, in s.e.", number=".1f")
