"""The inequalities behind the transfer theorem: how far apart two models must be where their classifiers disagree.

For one context, with label words j = 1..k, anchored logits u*_j of the teacher and u_j of the student, and the classifier
f = Σ a_j max(u_j − b_j, 0) for both: if |f*| ≥ γ and f has not the sign of f*, then the two word distributions differ in
the mass of the bulk or in the mass of some label words. All functions are vectorised over contexts and float64.

Notation: Γ = γ / (k max|a|), ε_b the largest error of either anchor, p_b the least bulk mass of the teacher,
Λ = Γ/2 − 2 ε_b, ε_p = |log bulk mass of the teacher − that of the student|.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from theodolite.arguments import checked, choice, each, nonnegative, number_in, sequence, shown, whole
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.probing.bulk import check_one_top
from theodolite.measures.anchors.probing.streams import NormalEquations
from theodolite.measures.anchors.transfer.log_linear import LogLinear, kl_divergence
from theodolite.measures.anchors.transfer.readout import anchored_logits, label_ids, thresholded_score
from theodolite.problem.arguments import of_dimensions
from theodolite.results import Result, Row, fields_of

Number = float | Tensor
Over = Literal["all", "downstream"]


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


# The transfer certificate: how large the downstream error of a student can be, given its pre-training divergence.
#
# Where both models have an anchor vector (⟨h, v0⟩ ≈ log Z_bulk), the share of downstream contexts whose class the student gets
# wrong is at most ε_KL / (μ · least KL at such a context). The least KL comes from `kl_floors`; every quantity in it is measured.


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TransferCertificate(Result):
    """Bounds on the downstream error of a student, with all that enters them; symbols as in the theorem.

    Bounds, each capped at 1: `theorem_bound` 288 ε_KL / (μ p_b² Γ²), 1 unless its conditions hold; `general_bound` and
    `tight_bound`, which need only Λ > 0; `bound`, the smallest of them. They cover wrong and undecided contexts alike.
    `heuristic_bound` is the tight one with `eps_b_99` and `p_b_01` in place of the extremes: not a guarantee.

    Measured: `eps_cls`, the share of downstream contexts of the wrong sign, and `undecided`, that of f = 0; `eps_kl`, the
    mean KL on pre-training contexts; `eps_b`, the largest error of either anchor (`eps_b_teacher`, `eps_b_student`), and
    `eps_b_99`, its 99 % quantile; `p_b` and `p_b_01`, the smallest bulk mass of the teacher and its 1 % quantile;
    `gamma`, the margin; `discarded`, the share of downstream contexts with |f*| below it, which `eps_cls`, `undecided` and
    the bounds leave out; `Gamma` = γ/(k max|a|); `Lambda` = Γ/2 − 2ε_b; `mu`, the density ratio for the contexts kept, and
    `mu_source`, how it is known; `kl_of_errors`, the smallest KL among wrong contexts (NaN without any) and `kl_floor`, what
    the tight form says it must be at least. `violated` names in words the conditions that do not hold. `anchor_teacher`
    and `anchor_student` are the vectors used (a bias of the head is their last coordinate).
    """

    theorem_bound: float
    general_bound: float
    tight_bound: float
    heuristic_bound: float
    eps_cls: float
    undecided: float
    eps_kl: float
    eps_b: float
    eps_b_teacher: float
    eps_b_student: float
    eps_b_99: float
    p_b: float
    p_b_01: float
    gamma: float
    discarded: float
    Gamma: float
    Lambda: float
    mu: float
    mu_source: str
    kl_of_errors: float
    kl_floor: float
    violated: tuple[str, ...]
    labels: tuple[int, ...]
    anchor_teacher: Tensor
    anchor_student: Tensor

    @property
    def bound(self) -> float:
        """The smallest guaranteed bound on the share of wrong or undecided contexts."""
        return min(self.theorem_bound, self.general_bound, self.tight_bound)

    @property
    def verdict(self) -> str:
        """`"vacuous"` where no bound is below 1, else `"non-vacuous"`."""
        return "non-vacuous" if self.bound < 1 else "vacuous"

    def rows(self) -> list[Row]:
        names = (
            "verdict bound theorem_bound general_bound tight_bound heuristic_bound eps_cls undecided eps_kl eps_b eps_b_99 p_b "
            "p_b_01 gamma discarded Gamma Lambda mu mu_source kl_of_errors kl_floor"
        )
        return [{**fields_of(self, names), "violated": "; ".join(self.violated)}]

    def sentence(self) -> str:
        measured = f"measured: {self.eps_cls:.3g} wrong, {self.undecided:.3g} undecided, ε_KL = {self.eps_kl:.3g}"
        each = f"theorem {self.theorem_bound:.3g}, general {self.general_bound:.3g}, tight {self.tight_bound:.3g}"
        aside = f" Left out, below the margin: {self.discarded:.1%} of the downstream contexts." if self.discarded else ""
        why = f" Precondition violated: {'; '.join(self.violated)}." if self.violated else ""
        if self.verdict == "vacuous":
            return f"Vacuous: the certificate guarantees nothing ({each}; {measured}).{why}{aside}"
        return f"Non-vacuous: at most {self.bound:.3g} of the downstream contexts can go wrong ({each}; {measured}).{why}{aside}"


@checked(
    labels=sequence,
    a=sequence,
    b=sequence,
    gamma=nonnegative,
    mu=number_in(above=0, most=1),
    bulk=each(whole),
)
def transfer_certificate(
    teacher: LogLinear | Tensor,
    student: LogLinear | Tensor,
    *,
    labels: Sequence[int] | Tensor,
    a: Sequence[float] | Tensor,
    b: Sequence[float] | Tensor,
    mu: float | None = None,
    downstream: tuple[LogLinear, LogLinear] | tuple[Tensor, Tensor] | Tensor | None = None,
    pretraining: Tensor | None = None,
    gamma: float | None = None,
    bulk: Sequence[int] | Tensor | None = None,
    top: int = 0,
    anchors: tuple[Tensor, Tensor] | None = None,
    over: Over = "all",
) -> TransferCertificate:
    """Bound the downstream error of `student` against `teacher` for f = Σ_j a_j max(⟨h, v_j − v0⟩ − b_j, 0).

    Args:
        teacher, student: models on the same pre-training contexts and vocabulary, as `LogLinear` or as logits (contexts, words).
        labels, a, b: ids of the k label words, their coefficients and thresholds, used for both models.
        downstream: models (or logits) on downstream contexts, with `mu` supplied; or probabilities (contexts,) of the downstream
            task over the contexts of `teacher`, from which μ is computed; None: both distributions are one, and μ is 1.
        pretraining: probabilities (contexts,) of the pre-training contexts, uniform by default. Need not be normalised.
        mu: least ratio of pre-training to downstream density, in (0, 1]; for separate `downstream` contexts only.
        gamma: the margin, the smallest non-zero |f*| by default; contexts below it are discarded, and their share is reported.
        bulk, top: the bulk is all words but the labels and, in each context, the teacher's `top` most probable words; or, with
            `bulk`, those of these words. It is chosen by the teacher and used for the student too.
        anchors: anchor vectors (teacher's, student's); fitted by least squares to all contexts if not given.
        over: where ε_b and p_b are taken: over all contexts, as the theorem is stated, or over the downstream contexts kept,
            which its proof is content with.
    """
    choice("over", over, get_args(Over))
    teacher, student = _as_model(teacher, "teacher"), _as_model(student, "student")
    places = _contexts(teacher, student, downstream, pretraining, mu)
    models = (places.teacher, places.student)
    words = label_ids(labels, models[0].words)
    a_, b_ = check_coefficients(a, b, len(words))
    seen = _observe(*models, _bulk_words(bulk, words, models[0].words), top)
    vectors = [torch.as_tensor(anchor) for anchor in anchors or map(fit_anchor, (m.states for m in models), seen.bulk)]
    u = [anchored_logits(model, vector, words) for model, vector in zip(models, vectors, strict=True)]
    errors = [m.states @ v.double().cpu() - y for m, v, y in zip(models, vectors, seen.bulk, strict=True)]
    scores = [thresholded_score(logits, a_, b_) for logits in u]
    margin, kept = _margin(scores[0], places.downstream, gamma)
    used = kept if over == "downstream" else (places.pretraining > 0) | (places.downstream > 0)
    return TransferCertificate(
        **_bounds(places, seen, torch.stack(errors).abs()[:, used], used, kept, float(normalized_margin(margin, a_)), b_),
        **_failures(places.downstream, scores, kept, seen.kl),
        gamma=margin,
        labels=tuple(words.tolist()),
        anchor_teacher=vectors[0],
        anchor_student=vectors[1],
    )


def _bounds(
    places: _Contexts, seen: _Observed, errors: Tensor, used: Tensor, kept: Tensor, Gamma: float, b: Tensor
) -> dict[str, Any]:
    """The bounds and what enters them; `errors` (2, used) are those of the two anchors."""
    # μ for the contexts kept: leaving some out makes the others more probable by 1 / their share.
    share, ratio = float(places.downstream[kept].sum()), places.pretraining[kept] / places.downstream[kept]
    mu = min(1.0, share * float(ratio.min())) if places.mu is None else places.mu * share
    mass = seen.mass[used].exp()
    eps_b, p_b = float(errors.max()), float(mass.min())
    eps_b_99, p_b_01 = float(errors.flatten().quantile(0.99)), float(mass.quantile(0.01))
    eps_kl = float((places.pretraining * seen.kl).sum())
    floors, typical = kl_floors(b, Gamma, eps_b, p_b), kl_floors(b, Gamma, eps_b_99, p_b_01)
    return {
        "theorem_bound": _bound(eps_kl, mu, floors.theorem),
        "general_bound": _bound(eps_kl, mu, floors.general),
        "tight_bound": _bound(eps_kl, mu, floors.tight),
        "heuristic_bound": _bound(eps_kl, mu, typical.tight),
        "eps_kl": eps_kl,
        "eps_b": eps_b,
        "eps_b_teacher": float(errors[0].max()),
        "eps_b_student": float(errors[1].max()),
        "eps_b_99": eps_b_99,
        "p_b": p_b,
        "p_b_01": p_b_01,
        "Gamma": Gamma,
        "Lambda": Gamma / 2 - 2 * eps_b,
        "mu": mu,
        "mu_source": places.mu_source,
        "kl_floor": float(floors.tight),
        "violated": tuple(_violations(b, Gamma, eps_b, p_b, mu)),
    }


def _failures(downstream: Tensor, scores: list[Tensor], kept: Tensor, kl: Tensor) -> dict[str, Any]:
    """Shares of the downstream contexts kept that the student gets wrong or leaves undecided, and of those not kept."""
    share = float(downstream[kept].sum())
    wrong, undecided = kept & (scores[0] * scores[1] < 0), kept & (scores[1] == 0)
    return {
        "eps_cls": float(downstream[wrong].sum()) / share,
        "undecided": float(downstream[undecided].sum()) / share,
        "discarded": float(downstream[~kept].sum()),
        "kl_of_errors": float(kl[wrong].min()) if bool(wrong.any()) else math.nan,
    }


def fit_anchor(states: Tensor, log_bulk: Tensor) -> Tensor:
    """The vector v0 (dim,) with ⟨h, v0⟩ nearest to the log bulk partition function in least squares, no intercept."""
    sums, values = NormalEquations(states.shape[1], 1), log_bulk[:, None]
    sums.update(states, values)
    return sums.solve(rows=(states, values))[:, 0]


class _Contexts(NamedTuple):
    """Both models on all contexts, (N,) each, with the probabilities of these under either distribution."""

    teacher: LogLinear
    student: LogLinear
    pretraining: Tensor
    downstream: Tensor
    mu: float | None
    mu_source: str


class _Observed(NamedTuple):
    """Per context: log bulk partition functions (2, N) of teacher and student, log bulk mass of the teacher, KL."""

    bulk: Tensor
    mass: Tensor
    kl: Tensor


def _contexts(
    teacher: LogLinear | Tensor,
    student: LogLinear | Tensor,
    downstream: tuple[LogLinear, LogLinear] | tuple[Tensor, Tensor] | Tensor | None,
    pretraining: Tensor | None,
    mu: float | None,
) -> _Contexts:
    """Bring the forms of input to one."""
    if mu is not None and not 0 < mu <= 1:
        raise ValueError(f"mu must lie in (0, 1]: it is the least ratio of pre-training to downstream density. Got {mu}.")
    separate = None
    if isinstance(downstream, tuple | list) and not all(isinstance(one, numbers.Real) for one in downstream):
        if len(downstream) != 2:
            raise ValueError(f"downstream must be a pair (teacher, student) of models. Got {len(downstream)} of them.")
        separate = [_as_model(model, "downstream") for model in downstream]
    one, two = (_joined(*pair) for pair in zip((teacher, student), separate or (None, None), strict=True))
    first = len(teacher) if isinstance(teacher, Tensor) else teacher.contexts
    if one.words != two.words:
        raise ValueError(f"Teacher and student must share one vocabulary. Got {one.words} and {two.words} words.")
    if one.contexts != two.contexts or first != (len(student) if isinstance(student, Tensor) else student.contexts):
        raise ValueError(f"Teacher and student must be given on the same contexts. Got {one.contexts} and {two.contexts}.")
    pre = torch.zeros(one.contexts, dtype=torch.float64)
    pre[:first] = _probabilities(pretraining, first, "pretraining")
    if separate is not None:
        if mu is None:
            raise ValueError("Separate downstream contexts say nothing about the density ratio: pass mu in (0, 1].")
        down = torch.zeros_like(pre)
        down[first:] = 1 / (one.contexts - first)
        return _Contexts(one, two, pre, down, mu, "supplied")
    if mu is not None:
        raise ValueError(
            "On one set of contexts μ is computed from the probabilities: leave mu out, or give downstream as a pair "
            f"(teacher, student) of models. Got {shown(downstream)}."
        )
    if downstream is None:
        return _Contexts(one, two, pre, pre, None, "one distribution")
    return _Contexts(one, two, pre, _probabilities(downstream, first, "downstream"), None, "computed")


def _as_model(model: Any, name: str) -> LogLinear | Tensor:
    """A LogLinear as it is; logits (contexts, words) of any kind as a tensor."""
    if isinstance(model, LogLinear):
        return model
    if isinstance(model, Tensor) or hasattr(model, "__array__"):
        logits = of_dimensions(2, finite=False)(name, torch.as_tensor(model))
        if not bool(logits.isfinite().all()):
            raise NonFiniteError(f"{name}: logits hold NaN or infinity; words the model excludes must be left out.")
        return logits
    raise TypeError(f"{name} must be LogLinear models or logits (contexts, words). Got {type(model).__name__}.")


def _joined(model: LogLinear | Tensor, more: LogLinear | Tensor | None) -> LogLinear:
    """One model on its contexts and, after them, on more of them."""
    if isinstance(model, Tensor) and (more is None or isinstance(more, Tensor)):
        if more is not None and model.shape[1:] != more.shape[1:]:
            raise ValueError(f"Logits must share one vocabulary. Got shapes {tuple(model.shape)} and {tuple(more.shape)}.")
        return LogLinear.from_logits(model if more is None else torch.cat([model, more]))
    if isinstance(model, Tensor) or isinstance(more, Tensor):
        raise TypeError("Give pre-training and downstream contexts both as LogLinear models or both as logits.")
    if more is None:
        return model
    if model.weight.shape != more.weight.shape or not torch.equal(model.weight, more.weight):
        raise ValueError("A model must have the same atoms (weight and bias) on pre-training and on downstream contexts.")
    return LogLinear(torch.cat([model.states, more.states]), model.weight)


def _probabilities(weights: Any, count: int, name: str) -> Tensor:
    """Weights (count,) as probabilities, uniform if None."""
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    if isinstance(weights, LogLinear):
        raise TypeError(f"{name} must be ({count},) probabilities, or a pair of models. Got one LogLinear.")
    values = torch.as_tensor(weights).detach().double().cpu()
    if values.shape != (count,):
        raise ValueError(f"{name} must be ({count},), one probability per context. Got shape {tuple(values.shape)}.")
    if not values.isfinite().all() or bool((values < 0).any()) or not values.sum() > 0:
        raise ValueError(f"{name} must hold finite probabilities of at least 0, not all of them 0.")
    return values / values.sum()


def check_coefficients(a: Sequence[float] | Tensor, b: Sequence[float] | Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Coefficients and thresholds (k,) in float64."""
    values = [torch.as_tensor(v, dtype=torch.float64).detach().cpu() for v in (a, b)]
    for name, value in zip("ab", values, strict=True):
        if value.shape != (k,):
            raise ValueError(f"{name} must hold {k} numbers, one per label word. Got shape {tuple(value.shape)}.")
        if not value.isfinite().all():
            raise NonFiniteError(f"{name} holds NaN or infinity.")
    if not values[0].any():
        raise ValueError("a is zero throughout: there is no classifier to certify.")
    return values[0], values[1]


def _bulk_words(bulk: Sequence[int] | Tensor | None, labels: Tensor, words: int) -> Tensor:
    """Which words (words,) may be in the bulk."""
    allowed = torch.ones(words, dtype=torch.bool)
    if bulk is not None:
        ids = label_ids(bulk, words, name="bulk")
        shared = sorted(set(ids.tolist()) & set(labels.tolist()))
        if shared:
            raise ValueError(f"The bulk must not hold label words. Take {shared[:8]} out of bulk or out of labels.")
        allowed[:] = False
        allowed[ids] = True
    allowed[labels] = False
    if not allowed.any():
        raise ValueError(f"No bulk is left: all {words} words are labels.")
    return allowed


def _observe(teacher: LogLinear, student: LogLinear, allowed: Tensor, top: int) -> _Observed:
    """Walk over the contexts in chunks; the teacher chooses the bulk."""
    top = check_one_top(top, len(allowed), len(allowed) - int(allowed.sum()))
    parts = []
    for rows in teacher.chunks():
        z = [model.logits(rows) for model in (teacher, student)]
        outside = (~allowed).expand(len(rows), -1)
        if top:
            outside = outside.scatter(1, z[0].topk(top, sorted=False).indices, True)
        bulk = [logits.masked_fill(outside, -math.inf).logsumexp(1) for logits in z]
        parts.append(torch.stack([*bulk, bulk[0] - z[0].logsumexp(1), kl_divergence(*z)]))
    columns = torch.cat(parts, dim=1)
    return _Observed(columns[:2], columns[2], columns[3])


def _margin(score: Tensor, downstream: Tensor, gamma: float | None) -> tuple[float, Tensor]:
    """The margin γ, and which downstream contexts (N,) reach it."""
    present = downstream > 0
    decided = present & (score != 0)
    if gamma is None:
        if not decided.any():
            raise ValueError("The teacher's f* is 0 at every downstream context: lower the thresholds b.")
        return float(score[decided].abs().min()), decided
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma must be a positive number. Got {gamma}.")
    kept = present & (score.abs() >= gamma)
    if not kept.any():
        largest = float(score[present].abs().max())
        raise ValueError(f"No downstream context has |f*| ≥ gamma = {gamma:g}; the largest |f*| is {largest:g}.")
    return gamma, kept


def _bound(eps_kl: float, mu: float, floor: Tensor) -> float:
    """ε_KL / (μ · floor), at most 1, and 1 where the floor says nothing."""
    least = mu * float(floor)
    return min(1.0, eps_kl / least) if least > 0 else 1.0


def _violations(b: Tensor, Gamma: float, eps_b: float, p_b: float, mu: float) -> list[str]:
    """The conditions of the theorem that do not hold, in words."""
    low, need, margin = float(b.min()), eps_b - math.log(4 * len(b)), f"the margin Γ = {Gamma:.3g} is not"
    conditions = {
        f"{margin} above 4 ε_b = {4 * eps_b:.3g}, so that no bound holds": Gamma > 4 * eps_b,
        f"{margin} above 8 ε_b = {8 * eps_b:.3g}": Gamma > 8 * eps_b or not Gamma > 4 * eps_b,
        f"{margin} below 6": Gamma < 6,
        f"the lowest threshold b = {low:.3g} is below ε_b − log(4k) = {need:.3g}": not low < need,
        "the bulk mass of the teacher is 0 in some context": p_b > 0,
        "some downstream context never occurs in pre-training (μ = 0)": mu > 0,
    }
    return [otherwise for otherwise, holds in conditions.items() if not holds]
