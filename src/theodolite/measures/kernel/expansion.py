"""First and second order Taylor expansions of a function of named tensors, and their gradients, without p × p matrices.

For an expansion point w₀ and a displacement δ, `f + Jδ + ½ δᵀHδ` costs a few forward passes. Its gradient in the direction
of cotangents s at the output is `Jᵀs + H_s δ` with H_s = Σ s_i H_i: both are what one pull back of `J(w)δ` gives, with respect
to δ and to w. So a second order model needs no third derivative.

A function that takes jets is expanded by Taylor arithmetic, five forward passes; others by nested forward mode, eight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from theodolite.measures.kernel.jets import Jet

Named = dict[str, Tensor]
Function = Callable[[dict[str, Any]], Any]


def taylor(function: Function, point: Named, displacement: Named, order: int, *, jets: bool = False) -> Tensor:
    """The Taylor polynomial of degree 1 or 2 at `point + displacement`; differentiable in the displacement."""
    if order == 1:
        value, slope = _push(function, point, displacement)
        return value + slope  # type: ignore[no-any-return]
    value, slope, bend = second_order_terms(function, point, displacement, displacement, jets=jets)
    return value + slope + bend


def second_order_terms(
    function: Function, point: Named, displacement: Named, fixed: Named, *, jets: bool, aside: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`f`, `Jδ` and `½ δᵀHδ`; `fixed` is δ once more, for the outer derivative."""
    if jets:
        return as_terms(function({name: Jet(point[name], d, aside=aside) for name, d in displacement.items()}))
    (value, slope), (_, curvature) = _push(lambda w: _push(function, w, displacement), point, fixed)
    return value, slope, 0.5 * curvature


def as_terms(found: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of a jet, zeros for those that are missing."""
    if not isinstance(found, Jet):
        raise TypeError(f"The network turned jets into {type(found).__name__}.")
    slope, bend = (torch.zeros_like(found.value) if part is None else part for part in (found.slope, found.bend))
    return found.value, slope, bend


def taylor_with_pull(
    function: Function, point: Named, displacement: Named, order: int, *, jets: bool = False
) -> tuple[Tensor, Callable[[Tensor], Named]]:
    """The same value, and a function that turns cotangents of it into the gradient in the displacement."""
    if order == 1:

        def slope_and_line(d: Named) -> tuple[Tensor, Tensor]:
            value, slope = _push(function, point, d)
            return slope, value + slope

        pull, line = _pull(slope_and_line, displacement)
        return line, lambda s: pull(s)[0]

    def slope_and_parabola(w: Named, d: Named) -> tuple[Tensor, Tensor]:
        # What is pulled back is the slope Jδ alone; the curvature rides along for the value.
        value, slope, bend = second_order_terms(function, w, d, displacement, jets=jets, aside=True)
        return slope, value + slope + bend

    pull, parabola = _pull(slope_and_parabola, point, displacement)

    def gradient(s: Tensor) -> Named:
        by_point, by_displacement = pull(s)
        return {name: by_point[name] + by_displacement[name] for name in displacement}

    return parabola, gradient


def _push(function: Callable[[Named], Any], point: Named, direction: Named) -> tuple[Any, Any]:
    """A value and its derivative in a direction."""
    value, slope, *_ = jvp(function, (point,), (direction,))
    return value, slope


def _pull(function: Callable[..., tuple[Tensor, Tensor]], *points: Named) -> tuple[Callable[[Tensor], Any], Tensor]:
    """The pull back of the first thing a function returns, and the second as it is."""
    _, pull, aside = vjp(function, *points, has_aux=True)  # type: ignore[misc]
    return pull, aside
