"""Generated data: pure functions of their arguments and a seed; the global random state is not touched."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from theodolite.arguments import (
    a_text,
    at_least,
    checked,
    choice,
    count,
    finite,
    integer,
    nonnegative,
    one_or_each,
    positive,
    random_seed,
    share,
    shown,
)
from theodolite.problem.arguments import a_finite_tensor, of_dimensions

_FROM_TWO = partial(integer, least=2)
Law = Literal["gaussian", "rademacher", "exponential", "student"]
Rank = Literal["rank-2", "rank-3", "rank-4", "full"]
RadiusLaw = Literal["uniform", "two"]


@checked(purpose=a_text)
def stream(purpose: str, seed: int) -> torch.Generator:
    """A generator of its own for each purpose, so that equal seeds of two of them share no numbers."""
    word = hashlib.blake2b(f"{purpose}:{random_seed(seed)}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(word, "big") >> 1)


# Classes that overlap in a known way: image-like, Gaussian in many dimensions, Gaussian on the line.
#
# Two-class labels are -1 and +1 in turn, so that every beginning of a sample is balanced and any part of it may
# serve as a training or a test set.


class TwoClassImages(NamedTuple):
    """Images (n, C, side, side), their labels ±1, and the labels before some were flipped."""

    x: Tensor
    y: Tensor
    clean: Tensor


@checked(
    n=count, side=_FROM_TWO, channels=count, rms=nonnegative, mean_cos=share, class_frac=share, label_noise=share
)  # fmt: skip
def two_class_images(
    n: int,
    side: int,
    channels: int = 1,
    *,
    rms: float = 1.1,
    mean_cos: float = 0.9,
    class_frac: float = 0.2,
    label_noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TwoClassImages:
    """Smooth images of two classes: `rms (√ρ t + √(1-ρ) (√a (±s) + √(1-a) z))` with ρ = mean_cos, a = class_frac.

    t is common to all, s to a class and z an image's own. All three are smooth fields of unit root mean square,
    orthogonal to one another (z to t and s), so each image has exactly the given rms, and two images have the
    cosine ρ on average. `label_noise` is the share of labels flipped afterwards.
    """
    generator = stream("two_class_images", seed)
    t = _unit(_smooth(1, side, channels, generator))  # (1, d), also s
    s = _unit(_without(_smooth(1, side, channels, generator), t))
    z = _unit(_without(_without(_smooth(n, side, channels, generator), t), s))
    clean = _alternating(n)
    own = math.sqrt(class_frac) * clean[:, None] * s + math.sqrt(1 - class_frac) * z
    x = rms * (math.sqrt(mean_cos) * t + math.sqrt(1 - mean_cos) * own)
    flipped = torch.randperm(n, generator=generator)[: round(label_noise * n)]
    y = clean.clone()
    y[flipped] *= -1
    return TwoClassImages(x.reshape(n, channels, side, side).to(dtype), y.to(dtype), clean.to(dtype))


class TwoGaussians(NamedTuple):
    """Points (n, dim), labels ±1, and the unit vector between the two means."""

    x: Tensor
    y: Tensor
    direction: Tensor


@checked(n=count, dim=count, margin=finite)
def gaussian_classes(
    n: int, dim: int = 50, *, margin: float = 1.2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TwoGaussians:
    """`x | y ~ N(margin · y · u, I)` with y = ±1 and a random unit vector u; the best error is Φ(-margin)."""
    generator = stream("gaussian_classes", seed)
    direction = torch.randn(dim, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    y = _alternating(n)
    x = margin * y[:, None] * direction + torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return TwoGaussians(x.to(dtype), y.to(dtype), direction.to(dtype))


class GaussianMixture(NamedTuple):
    """Points (n, dim), class numbers, and the means (classes, dim)."""

    x: Tensor
    y: Tensor
    means: Tensor


@checked(n=count, dim=count, classes=count, within=nonnegative)
def gaussian_mixture(
    n: int, dim: int = 64, classes: int = 10, *, within: float = 2.4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GaussianMixture:
    """Classes in turn, with means from N(0, I) and `within` as the standard deviation around them.

    The default makes the best classifier, a linear one, right in 90 to 95 % of cases.
    """
    generator = stream("gaussian_mixture", seed)
    means = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    y = torch.arange(n) % classes
    x = means[y] + within * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return GaussianMixture(x.to(dtype), y, means.to(dtype))


@checked(n=count, center=finite, std=nonnegative)
def mixture_1d(
    n: int = 128, *, center: float = 2.0, std: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Points (n, 1) on the line and labels ±1: `x | y ~ N(center · y, std²)`.

    >>> x, y = mixture_1d(4, std=0.0)
    >>> x[:, 0].tolist(), y.tolist()
    ([-2.0, 2.0, -2.0, 2.0], [-1.0, 1.0, -1.0, 1.0])
    """
    y = _alternating(n)
    x = center * y + std * torch.randn(n, generator=stream("mixture_1d", seed), dtype=torch.float64)
    return x[:, None].to(dtype), y.to(dtype)


@checked(labels=a_finite_tensor, classes=count, share=share)
def noisy_labels(labels: Tensor, classes: int, share: float = 0.2, *, seed: int = 0) -> Tensor:
    """With probability `share` a label is drawn anew from all classes, its own among them: `share (1 - 1/classes)` change.

    >>> noisy_labels(torch.tensor([3, 1, 4, 1]), 10, 0.0)
    tensor([3, 1, 4, 1])
    """
    if labels.is_floating_point() or not labels.numel() or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels must be whole numbers from 0 to {classes - 1}, one class each. Got {shown(labels)}.")
    generator = stream("noisy_labels", seed)
    drawn = torch.rand(labels.shape, generator=generator, dtype=torch.float64) < share
    return torch.where(drawn, torch.randint(classes, labels.shape, generator=generator), labels)


def _alternating(n: int) -> Tensor:
    return torch.arange(n).remainder(2).double() * 2 - 1


def _smooth(n: int, side: int, channels: int, generator: torch.Generator) -> Tensor:
    """Random fields (n, d) whose amplitude falls with the frequency k like 1/(1+k), as in photographs."""
    white = torch.randn(n, channels, side, side, generator=generator, dtype=torch.float64)
    frequency = torch.fft.fftfreq(side, d=1 / side, dtype=torch.float64)
    amplitude = 1 / (1 + (frequency[:, None] ** 2 + frequency**2).sqrt())
    filtered: Tensor = torch.fft.ifft2(torch.fft.fft2(white) * amplitude)
    return filtered.real.flatten(1)


def _without(fields: Tensor, unit: Tensor) -> Tensor:
    """What is left of each field after taking out its part along one of unit root mean square."""
    return fields - (fields @ unit.T) / unit.shape[1] * unit


def _unit(fields: Tensor) -> Tensor:
    return fields / fields.square().mean(1, keepdim=True).sqrt()


# Planted dictionaries: signals that are sparse combinations of known atoms, plus noise.
#
# Rows are atoms, signals and codes: `signals = codes @ dictionary + noise`. In double precision, because
# near-ties between atoms decide otherwise in single.


@dataclass(frozen=True, eq=False)
class PlantedSample:
    """Signals (n, dim) with their parts: codes (n, atoms) and noise (n, dim)."""

    signals: Tensor
    codes: Tensor
    noise: Tensor


@checked(atoms=count, dim=count)
def planted_dictionary(atoms: int = 200, dim: int = 100, *, seed: int = 0) -> Tensor:
    """Independent Gaussian atoms of unit length, (atoms, dim).

    >>> planted_dictionary(3, 5).norm(dim=1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    return torch.nn.functional.normalize(
        torch.randn(atoms, dim, generator=stream("planted_dictionary", seed), dtype=torch.float64)
    )


@checked(dictionary=of_dimensions(2), n=count, sparsity=count, noise=nonnegative, scale=positive)
def planted_samples(
    dictionary: Tensor,
    n: int = 1000,
    sparsity: int = 5,
    *,
    noise: float | None = None,
    law: Law = "gaussian",
    scale: float = 1.0,
    normalize: bool = True,
    seed: int = 0,
) -> PlantedSample:
    """n signals of `sparsity` atoms each, chosen uniformly, with Gaussian noise of the given standard deviation.

    Code entries follow `law`, each of unit mean square: Gaussian, random signs, exponential (positive) or
    Student t with 3 degrees of freedom (heavy tails). Then each code is brought to the length `scale`, or, with
    `normalize=False`, only multiplied by it. Without `noise` it is 1/√dim, as strong as a code of length 1.
    """
    choice("law", law, get_args(Law))
    atoms, dim = dictionary.shape
    if sparsity > atoms:
        raise ValueError(f"sparsity must be at most {atoms}, the number of atoms. Got {sparsity}.")
    level = 1 / math.sqrt(dim) if noise is None else noise
    generator = stream("planted_samples", seed)
    support = torch.rand(n, atoms, generator=generator, dtype=torch.float64).topk(sparsity).indices
    values = _entries(law, n, sparsity, generator)
    if normalize:
        values = values / values.norm(dim=1, keepdim=True)
    codes = torch.zeros(n, atoms, dtype=torch.float64).scatter_(1, support, scale * values)
    errors = level * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return PlantedSample(codes @ dictionary.double() + errors, codes, errors)


def _entries(law: Law, n: int, k: int, generator: torch.Generator) -> Tensor:
    """Independent entries (n, k) of unit mean square."""
    gaussian = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if law == "rademacher":
        return torch.where(gaussian < 0, -1.0, 1.0).double()
    if law == "exponential":
        uniform = torch.rand(n, k, generator=generator, dtype=torch.float64)
        return -torch.log1p(-uniform) / math.sqrt(2)
    if law == "student":
        # normal / √(χ²₃/3) has variance 3
        chi2 = torch.randn(n, k, 3, generator=generator, dtype=torch.float64).square().sum(2)
        return gaussian / chi2.sqrt()
    return gaussian


# Regression targets that depend on few directions, with their expected gradient outer products.


@dataclass(frozen=True, eq=False)
class RankTarget:
    """A function of x ~ N(0, I) with what is known of it.

    `egop` is E[∇f ∇fᵀ] (dim, dim) and `variance` that of f(x): predicting the mean of noisy labels costs
    `variance + noise²`.
    """

    name: Rank
    function: Callable[[Tensor], Tensor]
    egop: Tensor
    variance: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True, eq=False)
class TargetSample:
    """Points (n, dim), noisy labels, labels without noise, and the target."""

    x: Tensor
    y: Tensor
    clean: Tensor
    target: RankTarget


@checked(dim=count)
def rank_k_target(name: Rank, dim: int = 100) -> RankTarget:
    """`x₁x₂`, `x₁x₂(x₁+...+x₁₀)`, `x₁+x₁x₂+x₁x₂x₃+x₁x₂x₃x₄` or `‖x‖/√dim`, for rank-2, rank-3, rank-4 and full.

    >>> rank_k_target("rank-4", dim=5).egop.diag().tolist()
    [4.0, 3.0, 2.0, 1.0, 0.0]
    """
    choice("name", name, _TARGETS)
    least, function, egop, variance = _TARGETS[name]
    at_least(least, dim=dim)
    return RankTarget(name, function, egop(dim), variance(dim))


@checked(n=count, dim=count, noise=nonnegative)
def rank_k_targets(
    name: Rank, n: int, *, dim: int = 100, noise: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TargetSample:
    """`y = f(x) + noise · N(0, 1)` at n points x ~ N(0, I)."""
    target, generator = rank_k_target(name, dim), stream("rank_k_targets", seed)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    clean = target(x)
    y = clean + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    return TargetSample(x.to(dtype), y.to(dtype), clean.to(dtype), target)


def _diagonal(dim: int, *values: float) -> Tensor:
    return torch.diag(torch.tensor([*values, *[0.0] * (dim - len(values))], dtype=torch.float64))


def _egop3(dim: int) -> Tensor:
    # With S = x₁+...+x₁₀: ∂₁ = x₂S + x₁x₂, ∂₂ = x₁S + x₁x₂, ∂ⱼ = x₁x₂ for j = 3..10.
    egop = torch.zeros(dim, dim, dtype=torch.float64)
    egop[:10, :10] = 1.0
    egop[:2, :10] = egop[:10, :2] = 2.0
    egop[:2, :2] = torch.tensor([[15.0, 5.0], [5.0, 15.0]])
    return egop


def _variance_full(dim: int) -> float:
    # 1 - (E‖x‖)²/dim with E‖x‖ = √2 Γ((dim+1)/2) / Γ(dim/2); about 1/(2 dim).
    return 1 - 2 / dim * math.exp(2 * (math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)))


# Name -> least dimension, function, expected gradient outer product, variance.
_TARGETS: dict[str, tuple[int, Callable[[Tensor], Tensor], Callable[[int], Tensor], Callable[[int], float]]] = {
    "rank-2": (2, lambda x: x[:, 0] * x[:, 1], lambda dim: _diagonal(dim, 1, 1), lambda dim: 1.0),
    "rank-3": (10, lambda x: x[:, 0] * x[:, 1] * x[:, :10].sum(1), _egop3, lambda dim: 14.0),
    "rank-4": (4, lambda x: x[:, :4].cumprod(1).sum(1), lambda dim: _diagonal(dim, 4, 3, 2, 1), lambda dim: 4.0),
    "full": (
        1,
        lambda x: x.norm(dim=1) / math.sqrt(x.shape[1]),
        lambda dim: torch.eye(dim, dtype=torch.float64) / dim**2,
        _variance_full,
    ),
}


# Synthetic log-linear word models, p(word | context) ∝ exp⟨h, v_word⟩, whose log bulk partition function is known.
#
# Rows are contexts and words: states (contexts, dim), atoms (words, dim). The last coordinate of every state is 1, so that
# constants are linear in the state. In double precision.


@dataclass(frozen=True, eq=False)
class WordModel:
    """States (contexts, dim) and atoms (words, dim); the logits are `states @ atoms.T`.

    `labels` are the ids of the words of interest, empty where all words are alike. `anchor` (dim,) is the exact anchor
    vector for the bulk of all other words, None where there is none. `group` (contexts,) tells contexts of different norm
    apart: 0 or 1 where the radius takes two values, else 0.
    """

    states: Tensor
    atoms: Tensor
    labels: Tensor
    anchor: Tensor | None
    group: Tensor


@checked(
    contexts=count, dim=_FROM_TWO, label_words=count, bulk_words=count, level=finite, scale=nonnegative
)  # fmt: skip
def exact_anchor_world(
    contexts: int = 2000,
    dim: int = 16,
    label_words: int = 4,
    bulk_words: int = 50,
    *,
    level: float = -1.0,
    scale: float = 1.0,
    seed: int = 0,
) -> WordModel:
    """A world with an exact anchor: all bulk words share one atom w, so log Z_bulk = ⟨h, w⟩ + log(bulk_words).

    The first `label_words` words are labels. Their anchored logits ⟨h, v_j − v0⟩ are Gaussian over contexts with mean
    `level` and standard deviation `scale` (on average over atoms).

    >>> world = exact_anchor_world(5, bulk_words=7)
    >>> bulk = (world.states @ world.atoms[4:].T).logsumexp(1)
    >>> bool((world.states @ world.anchor - bulk).abs().max() < 1e-12)
    True
    """
    generator = stream("exact_anchor_world", seed)
    states = torch.ones(contexts, dim, dtype=torch.float64)
    states[:, :-1] = torch.randn(contexts, dim - 1, generator=generator, dtype=torch.float64)
    bulk = torch.randn(dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    anchor = bulk.clone()
    anchor[-1] += math.log(bulk_words)
    labels = anchor.repeat(label_words, 1)
    labels[:, :-1] += scale / math.sqrt(dim - 1) * torch.randn(label_words, dim - 1, generator=generator, dtype=torch.float64)
    labels[:, -1] += level
    atoms = torch.cat([labels, bulk.repeat(bulk_words, 1)])
    return WordModel(states, atoms, torch.arange(label_words), anchor, torch.zeros(contexts, dtype=torch.int64))


@checked(words=count, dim=_FROM_TWO, contexts=count, radius=one_or_each(nonnegative), spread=nonnegative, offset=nonnegative)
def gaussian_dictionary_world(
    words: int = 4000,
    dim: int = 32,
    contexts: int = 6000,
    radius: float | tuple[float, float] = 3.0,
    *,
    law: RadiusLaw = "uniform",
    spread: float = 1.0,
    offset: float = 0.3,
    seed: int = 0,
) -> WordModel:
    """Gaussian atoms around a common mean, and states of a chosen radius on a sphere, with a constant coordinate.

    Atoms are N(m, spread² I) with m = `offset` · N(0, I); then log Z ≈ log(words) + ⟨h, m⟩ + spread² ‖h‖² / 2 as long as
    ‖h‖ · spread is well below √(2 log words). An anchor vector therefore exists only for states of (nearly) constant
    norm. A pair as `radius` breaks that: drawn uniformly between the two (`law="uniform"`), or one of the two for the
    first and the other for the second half of the contexts (`law="two"`), where each half has an anchor of its own.
    """
    choice("law", law, get_args(RadiusLaw))
    ends = [radius, radius] if isinstance(radius, int | float) else list(radius)
    if len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(f"radius must be a number, or two with the smaller first. Got {radius}.")
    low, high = ends
    generator = stream("gaussian_dictionary_world", seed)
    mean = offset * torch.randn(dim, generator=generator, dtype=torch.float64)
    atoms = mean + spread * torch.randn(words, dim, generator=generator, dtype=torch.float64)
    directions = torch.randn(contexts, dim - 1, generator=generator, dtype=torch.float64)
    where = torch.rand(contexts, generator=generator, dtype=torch.float64)
    group = torch.zeros(contexts, dtype=torch.int64)
    if law == "two":
        where = (torch.arange(contexts) >= (contexts + 1) // 2).double()
        group = where.long() if high > low else group
    lengths = low + (high - low) * where
    states = torch.ones(contexts, dim, dtype=torch.float64)
    states[:, :-1] = lengths[:, None] * directions / directions.norm(dim=1, keepdim=True)
    return WordModel(states, atoms, torch.empty(0, dtype=torch.int64), None, group)
