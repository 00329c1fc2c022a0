"""The inequalities behind the transfer theorem: how far apart two models must be where their classifiers disagree.

For one context, with label words j = 1..k, anchored logits u*_j of the teacher and u_j of the student, and the classifier
f = Σ a_j max(u_j − b_j, 0) for both: if |f*| ≥ γ and f has not the sign of f*, then the two word distributions differ in
the mass of the bulk or in the mass of some label words. All functions are vectorised over contexts and float64.

Notation: Γ = γ / (k max|a|), ε_b the largest error of either anchor, p_b the least bulk mass of the teacher,
Λ = Γ/2 − 2 ε_b, ε_p = |log bulk mass of the teacher − that of the student|.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Tensor


class Disagreement(NamedTuple):
    """Where the difference f* − f comes from, per context.

    `teacher_above` (N,): True where it is words that speak for the teacher's class and that the teacher scores higher, False
    where it is words that speak against it and that the student scores higher. `members` (N, k) are those words and `excess`
    (N, k) by how much, Δ_j = (u*_j − b_j) − max(u_j − b_j, 0), or the same with teacher and student exchanged.
    """

    teacher_above: Tensor
    members: Tensor
    excess: Tensor


class KLFloors(NamedTuple):
    """Least KL divergence at a context where the classifiers disagree, by three forms of the theorem."""

    theorem: Tensor
    general: Tensor
    tight: Tensor


def normalized_margin(gamma: Number, a: Tensor) -> Tensor:
    """Γ = γ / (k max|a|), unchanged by rescaling the coefficients a (..., k)."""
    return torch.as_tensor(gamma, dtype=torch.float64) / (a.shape[-1] * a.double().abs().amax(-1))


def disagreement(teacher: Tensor, student: Tensor, a: Tensor, b: Tensor, sign: Tensor) -> Disagreement:
    """Split f* − f by the sign of the coefficients and keep the larger part.

    teacher, student : anchored logits (N, k). a, b : (k,) or (N, k). sign : (N,), the teacher's class, +1 or −1.
    """
    toward = sign[:, None] * a
    above_teacher, above_student = (teacher - b).clamp(min=0), (student - b).clamp(min=0)
    gain = toward * (above_teacher - above_student)
    first = gain.where(toward > 0, 0.0).sum(1) >= gain.where(toward < 0, 0.0).sum(1)
    excess = torch.where(first[:, None], (teacher - b) - above_student, (student - b) - above_teacher)
    members = (excess > 0) & torch.where(first[:, None], toward > 0, toward < 0)
    return Disagreement(first, members, excess)


def bulk_mass_gap(p_b: Number, eps_p: Tensor) -> Tensor:
    """Least difference of the two bulk masses: p_b (1 − e^−ε_p)."""
    return -p_b * torch.expm1(-eps_p)


def word_mass_gap(excess: Tensor, b: Tensor, p_b: Number, eps_b: Number, eps_p: Tensor) -> Tensor:
    """Least difference of the two probabilities of a member word: p_b e^{b − ε_b − ε_p} (e^{max(Δ − 2ε_b − ε_p, 0)} − 1)."""
    return p_b * torch.exp(b - eps_b - eps_p) * torch.expm1((excess - 2 * eps_b - eps_p).clamp(min=0))


def m_max(b: Tensor, Gamma: Number, eps_b: Number) -> Tensor:
    """min over ε ≥ 0 of max{1 − e^−ε, T(ε)}: at a disagreement TV ≥ p_b m_max (proved). b : (..., k).

    T(ε) = K (e^{Λ − 2ε} − e^−ε) on [0, Λ] with K = k min_j e^{b_j − ε_b} falls where the other rises; they cross at the
    positive root of K e^Λ y² + (1 − K) y − 1 = 0, y = e^−ε.
    """
    K, L = _label_weight(b, eps_b), _headroom(Gamma, eps_b)
    root = ((1 - K).square() + 4 * K * L.exp()).sqrt()
    # two forms of one root; each adds numbers of equal sign on its side
    y = torch.where(K < 1, 2 / (1 - K + root), (K - 1 + root) / (2 * K * L.exp()))
    return (1 - y).clamp(min=0)


def m_sum(b: Tensor, Gamma: Number, eps_b: Number) -> Tensor:
    """min over ε ≥ 0 of {1 − e^−ε + T(ε)}: at a disagreement 2 TV ≥ p_b m_sum (the source prints TV). b : (..., k).

    In y = e^−ε a parabola, 1 − (1 + K) y + K e^Λ y², on [e^−Λ, 1].
    """
    K, L = _label_weight(b, eps_b), _headroom(Gamma, eps_b)
    y = torch.minimum(torch.maximum((1 + K) / (2 * K * L.exp()), (-L).exp()), torch.ones_like(L))
    return (1 - (1 + K) * y + K * L.exp() * y.square()).clamp(min=0)


def m_simplified(b: Tensor, Gamma: Number, eps_b: Number) -> Tensor:
    """min{1 − e^{−Λ/3}, 2 k min_j e^{b_j − ε_b} sinh(Λ/3)}, below m_max; equation (3.21) of the source. b : (..., k)."""
    third = _headroom(Gamma, eps_b) / 3
    return torch.minimum(-torch.expm1(-third), 2 * _label_weight(b, eps_b) * third.sinh())


def pinsker(total_variation: Tensor) -> Tensor:
    """KL ≥ 2 TV²."""
    return 2 * total_variation.square()


def kl_floors(b: Tensor, Gamma: Number, eps_b: Number, p_b: Number) -> KLFloors:
    """Least KL at a context where teacher and student disagree; zero where the form says nothing.

    `theorem` is p_b² Γ² / 288 and needs 8 ε_b < Γ < 6 and min b ≥ ε_b − log(4k); `general`, 2 (p_b m_simplified)², and
    `tight`, 2 (p_b m_max)², need only Γ > 4 ε_b. Divided into ε_KL / μ each bounds the downstream error.
    """
    margin, error = torch.as_tensor(Gamma, dtype=torch.float64), torch.as_tensor(eps_b, dtype=torch.float64)
    holds = (8 * error < margin) & (margin < 6) & (b.double().amin(-1) >= error - math.log(4 * b.shape[-1]))
    theorem = torch.where(holds, (p_b * margin).square() / 288, 0.0)
    return KLFloors(theorem, pinsker(p_b * m_simplified(b, Gamma, eps_b)), pinsker(p_b * m_max(b, Gamma, eps_b)))


def _label_weight(b: Tensor, eps_b: Number) -> Tensor:
    """K = k min_j e^{b_j − ε_b}."""
    return b.shape[-1] * torch.exp(b.double().amin(-1) - eps_b)


def _headroom(Gamma: Number, eps_b: Number) -> Tensor:
    """Λ = Γ/2 − 2 ε_b, or 0 where the anchor errors use up the margin."""
    return torch.as_tensor(Gamma / 2 - 2 * eps_b, dtype=torch.float64).clamp(min=0)
