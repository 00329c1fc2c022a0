"""Classes that overlap in a known way: image-like, Gaussian in many dimensions, Gaussian on the line.

Two-class labels are -1 and +1 in turn, so that every beginning of a sample is balanced and any part of it may
serve as a training or a test set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from theodolite.arguments import at_least, between
from theodolite.data.generators.seeding import stream


class TwoClassImages(NamedTuple):
    """Images (n, C, side, side), their labels ±1, and the labels before some were flipped."""

    x: Tensor
    y: Tensor
    clean: Tensor


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
    at_least(1, n=n, channels=channels)
    at_least(2, side=side)
    between(0, 1, mean_cos=mean_cos, class_frac=class_frac, label_noise=label_noise)
    between(0, math.inf, rms=rms)
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


def gaussian_classes(
    n: int, dim: int = 50, *, margin: float = 1.2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TwoGaussians:
    """`x | y ~ N(margin · y · u, I)` with y = ±1 and a random unit vector u; the best error is Φ(-margin)."""
    at_least(1, n=n, dim=dim)
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


def gaussian_mixture(
    n: int, dim: int = 64, classes: int = 10, *, within: float = 2.4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GaussianMixture:
    """Classes in turn, with means from N(0, I) and `within` as the standard deviation around them.

    The default makes the best classifier, a linear one, right in 90 to 95 % of cases.
    """
    at_least(1, n=n, dim=dim, classes=classes)
    between(0, math.inf, within=within)
    generator = stream("gaussian_mixture", seed)
    means = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    y = torch.arange(n) % classes
    x = means[y] + within * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return GaussianMixture(x.to(dtype), y, means.to(dtype))


def mixture_1d(
    n: int = 128, *, center: float = 2.0, std: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Points (n, 1) on the line and labels ±1: `x | y ~ N(center · y, std²)`.

    >>> x, y = mixture_1d(4, std=0.0)
    >>> x[:, 0].tolist(), y.tolist()
    ([-2.0, 2.0, -2.0, 2.0], [-1.0, 1.0, -1.0, 1.0])
    """
    at_least(1, n=n)
    between(0, math.inf, std=std)
    y = _alternating(n)
    x = center * y + std * torch.randn(n, generator=stream("mixture_1d", seed), dtype=torch.float64)
    return x[:, None].to(dtype), y.to(dtype)


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
