"""What is measured for each theorem on masking; nothing is trained but two short comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from theodolite.data.generators.dictionaries import planted_dictionary, planted_samples
from theodolite.measures.dictionary import (
    LearningSettings,
    chi_square_max_bound,
    coherence,
    learn_dictionaries,
    masked_loss,
    omp_success_bound,
    omp_threshold,
    oracle_risks,
    overfitting_dictionary,
    pursue,
    reconstruction_loss,
    recovery_error,
    restricted_isometry,
)
from theodolite.measures.dictionary.hidden import visible_masks
from theodolite.measures.dictionary.losses import mean_and_error
from theodolite.measures.dictionary.matching_pursuit import SparseCodes
from theodolite.measures.dictionary.theory import noise_cross_term, oracle_codes
from theodolite.results import Row

#: Atoms and dimension of the overfitting theorem's checks.
ATOMS, DIM = 40, 20
#: Of the consistency theorem's: atoms, dimension, visible coordinates hidden, atoms per signal, noise.
WIDE = {"atoms": 50, "dim": 400, "hidden": 40, "k": 2, "noise": 0.5}
#: Noise and hidden coordinates of the decomposition's.
NOISE, HIDDEN = 0.3, 4


def one_atom_signals(true: Tensor, n: int, sigma: float, seed: int) -> Tensor:
    """Plus or minus one atom each, with noise."""
    return planted_samples(true, n, 1, noise=sigma, law="rademacher", seed=seed).signals


def best_loss(signals: Tensor, dictionary: Tensor, k: int = 1) -> float:
    """L(B, k): the mean error of the best k-sparse codes."""
    return reconstruction_loss(signals, dictionary, k, decoder="exhaustive").value


def visible(dim: int, hidden: int, seed: int) -> Tensor:
    """One random set, bool (dim,)."""
    return visible_masks(dim, hidden, masks="batch", batch=1, step=0, seeds=(seed,))[0, 0]


def gershgorin(job: Mapping[str, Any]) -> Iterator[Row]:
    """T1: restricted isometry constants over their bound."""
    for seed in range(job["count"]):
        true = planted_dictionary(12, 20, seed=seed)
        found = [restricted_isometry(true, s) for s in (2, 3, 4)]
        yield {"draw": seed, "ratio": max(each.value / each.gershgorin for each in found)}


def overfitting(job: Mapping[str, Any]) -> Iterator[Row]:
    """T2, T3: what a second atom gains, and what mixtures of two atoms gain instead, in units of σ²."""
    sigma, seed = job["sigma"], job["seed"]
    true = planted_dictionary(ATOMS, DIM, seed=seed)
    signals = one_atom_signals(true, job["n"], sigma, seed)
    one = best_loss(signals, true)
    gap = one - best_loss(signals, true, 2)
    for angles in job["angles"]:
        for radius in job["radii"]:
            net = overfitting_dictionary(true, angles, radius * sigma)
            gain = one - best_loss(signals, net)
            yield {
                "sigma": sigma,
                "angles": angles,
                "radius": radius,
                "mixtures": len(net),
                "gap": gap / sigma**2,
                "gain": gain / sigma**2,
                "share": gain / gap,
                "distance": recovery_error(true, net, "euclidean") / sigma**2,
            }


def mixtures_needed(job: Mapping[str, Any]) -> Iterator[Row]:
    """T4: the fewest mixtures with half of the gain at σ² = 1/d, over p²d."""
    p, d, seed = job["atoms"], job["dim"], job["seed"]
    true = planted_dictionary(p, d, seed=seed)
    signals = one_atom_signals(true, job["n"], 1 / math.sqrt(d), seed)
    one, two = best_loss(signals, true), best_loss(signals, true, 2)
    nets = (overfitting_dictionary(true, angles) for angles in range(2, d + 1))
    needed = next((len(net) for net in nets if best_loss(signals, net) <= (one + two) / 2), math.inf)
    yield {"atoms": p, "dim": d, "mixtures": needed, "share": needed / (p**2 * d)}


def decomposition(job: Mapping[str, Any]) -> Iterator[Row]:
    """T5, T6: cross terms of errors and noise in standard errors, and the distance of L_mask from its lower bound."""
    true = planted_dictionary(ATOMS, DIM, seed=job["seed"])
    sample = planted_samples(true, job["n"], 2, noise=NOISE, normalize=False, seed=job["seed"])
    clean, seen = sample.signals - sample.noise, visible(DIM, HIDDEN, job["seed"])
    risks = oracle_risks(true, 2, seen, noise=NOISE, scale=1.0)
    for name, dictionary in dictionaries(true, sample.signals[:500]).items():
        masked = pursue(sample.signals, dictionary, 2, visible=seen).reconstruct(dictionary) - clean
        whole = pursue(sample.signals, dictionary, 2).reconstruct(dictionary) - clean
        hidden_mean, hidden_error = noise_cross_term(masked, sample.noise, seen)
        mean, error = noise_cross_term(whole, sample.noise)
        loss = masked_loss(sample.signals, dictionary, 2, seen)
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
        settings = LearningSettings(2, objective, batch_size=100, learning_rate=1e-2, shuffle=False)
        named[f"trained, {objective}"] = learn_dictionaries(signals, start[None], settings, epochs=20).components[0]
    return named | {f"random {i}": planted_dictionary(*true.shape, seed=100 + i) for i in range(1, 6)}


def consistency(job: Mapping[str, Any]) -> Iterator[Row]:
    """T7: risks of matching pursuit and of oracles that know the support, with large coefficients."""
    k, noise, scale, seed = WIDE["k"], WIDE["noise"], job["scale"], job["seed"]
    true = planted_dictionary(int(WIDE["atoms"]), int(WIDE["dim"]), seed=seed)
    seen = visible(int(WIDE["dim"]), int(WIDE["hidden"]), seed)
    sample = planted_samples(true, job["n"], int(k), noise=noise, scale=scale, normalize=False, seed=seed)
    clean, supports = sample.signals - sample.noise, sample.codes.abs().topk(int(k)).indices
    pursued = pursue(sample.signals, true, int(k), visible=seen, selection="normalized")

    def risk(codes: SparseCodes) -> Tensor:
        return (codes.reconstruct(true) - clean)[:, ~seen].square().sum(1)

    omp, bayes = risk(pursued), risk(oracle_codes(sample.signals, true, supports, seen, ridge=(noise / scale) ** 2))
    exact = oracle_risks(true, int(k), seen, noise=noise, scale=scale)
    excess, error = mean_and_error(omp - bayes)
    yield {
        "scale": scale,
        "seed": seed,
        "coherence": coherence(true, seen),
        "risk": float(omp.mean()),
        "excess": excess,
        "excess_error": error,
        "least_squares_excess": exact.least_squares - exact.bayes,
        "bayes": exact.bayes,
        "wrong": float((pursued.support.sort(1).values != supports.sort(1).values).any(1).double().mean()),
    }


def rankings(job: Mapping[str, Any]) -> Iterator[Row]:
    """T8: both losses of the true dictionary and of the mixtures, with either rule of selection."""
    sigma, seed = job["sigma"], job["seed"]
    true = planted_dictionary(ATOMS, DIM, seed=seed)
    signals = one_atom_signals(true, job["n"], sigma, seed + 1)
    net = overfitting_dictionary(true, angles=64, radius=sigma)
    yield {"sigma": sigma, "loss": "reconstruction", "true": best_loss(signals, true), "mixtures": best_loss(signals, net)}
    masks = [visible(DIM, 2, mask) for mask in range(job["masks"])]
    for selection in ("normalized", "raw"):
        losses = {
            name: fmean(masked_loss(signals, atoms, 1, seen, selection=selection).value for seen in masks)
            for name, atoms in (("true", true), ("mixtures", net))
        }
        yield {"sigma": sigma, "loss": f"masked, {selection}", **losses}


def threshold(job: Mapping[str, Any]) -> Iterator[Row]:
    """T9: how often pursuit finds supports whose coefficients are at the theorem's threshold."""
    k, noise, eta, n = int(WIDE["k"]), WIDE["noise"], job["eta"], job["n"]
    true = planted_dictionary(int(WIDE["atoms"]), int(WIDE["dim"]), seed=job["seed"])
    gamma = omp_threshold(noise, k, len(true), coherence(true), eta)
    signs = {"law": "rademacher", "scale": gamma, "normalize": False, "seed": job["seed"]}
    sample = planted_samples(true, n, k, noise=noise, **signs)
    supports = sample.codes.abs().topk(k).indices.sort(1).values
    right = float((pursue(sample.signals, true, k).support.sort(1).values == supports).all(1).double().mean())
    bound = omp_success_bound(k, len(true), eta)
    yield {"eta": eta, "gamma": gamma, "frequency": right, "bound": bound, "error": math.sqrt(bound * (1 - bound) / n)}


def largest_square(job: Mapping[str, Any]) -> Iterator[Row]:
    """T10: the mean of the largest of n squared Gaussians, independent and all the same."""
    generator = torch.Generator().manual_seed(job["seed"])
    draws = torch.randn(job["draws"], job["n"], generator=generator, dtype=torch.float64).square()
    yield {
        "n": job["n"],
        "independent": float(draws.amax(1).mean()),
        "equal": float(draws[:, 0].mean()),
        "bound": chi_square_max_bound(job["n"]),
    }


PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "T1": gershgorin,
    "T2-T3": overfitting,
    "T4": mixtures_needed,
    "T5-T6": decomposition,
    "T7": consistency,
    "T8": rankings,
    "T9": threshold,
    "T10": largest_square,
}
