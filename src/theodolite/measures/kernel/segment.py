"""An output along a straight way through the weights: whether its second derivatives explain how it changes there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.kernel.scalar_output import moved
from theodolite.operators import hessian
from theodolite.problem import Problem

#: Pieces a segment is cut into at first, and at most.
PIECES, MOST_PIECES = 8, 64


@dataclass(frozen=True)
class Segment:
    """φ(t) = f(w₀ + t·step), 0 ≤ t ≤ 1, looked at closely.

    `bend` is the largest |φ''| seen. `resolved` is false where more than the share `slack` of the change of the slope is not
    the integral of φ'': there is a kink or a jump on the way, or an oscillation faster than 1/64 of it.
    """

    bend: float
    resolved: bool


def look_along(scalar: Problem, step: Tensor, *, slack: float) -> Segment:
    """Values, slopes and second derivatives at equally spaced points, more of them until integrals and differences agree.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    >>> step = 2.0 - model.weight.detach()[0]
    >>> look_along(Problem(model, lambda f, y: f.pow(3).sum(), data), step, slack=1e-3).resolved           # w³
    True
    >>> look_along(Problem(model, lambda f, y: (f - 1.3).abs().sum(), data), step, slack=1e-3).resolved    # |w − 1.3|
    False
    """
    seen: dict[float, tuple[float, float, float]] = {}
    pieces = PIECES
    while True:
        for i in range(pieces + 1):
            if i / pieces not in seen:
                seen[i / pieces] = _point(scalar, step, i / pieces)
        found = torch.tensor([seen[i / pieces] for i in range(pieces + 1)], dtype=torch.float64)
        resolved = _explained(found, slack, torch.finfo(scalar.dtype).eps)
        if resolved or pieces >= MOST_PIECES:
            return Segment(float(found[:, 2].abs().max()), resolved)
        pieces *= 2


def _point(scalar: Problem, step: Tensor, t: float) -> tuple[float, float, float]:
    """φ, φ', φ'' at t."""
    there = moved(scalar, t * step)
    value, gradient = there.loss_and_gradient()
    image = hessian(there, keep="never") @ step.to(there.device, there.dtype)
    return value, float(step.double() @ gradient.double()), float(step.double() @ image.double())


def _explained(found: Tensor, slack: float, eps: float) -> bool:
    """Whether Simpson's integrals of φ'' and φ' over pairs of pieces (P+1, 3) give the changes of φ' and φ."""
    value, slope, bend = found.T
    width = 1.0 / (len(found) - 1)
    turned, gone = slope[2::2] - slope[:-2:2], value[2::2] - value[:-2:2]
    missed = [float((change - _simpson(rate, width)).abs().sum()) for change, rate in ((turned, bend), (gone, slope))]
    rounding = 16 * eps * len(found) * float(slope.abs().max() + value.abs().max())
    return max(missed) <= slack * float(turned.abs().sum()) + rounding


def _simpson(rate: Tensor, width: float) -> Tensor:
    return width / 3 * (rate[:-2:2] + 4 * rate[1:-1:2] + rate[2::2])
