"""From signals to codes: matching pursuit, or the Lasso by accelerated proximal gradients; several dictionaries at once."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.arguments import either, positive
from theodolite.errors import NumericalWarning
from theodolite.measures.dictionary.matching_pursuit import Selection, SparseCodes, pursue_runs

Decoder = Literal["omp", "lasso"]

# Codes (signals × atoms) of the Lasso worked on at a time, and steps between two looks at who is finished.
_PART, _LOOK = 1 << 18, 5


def check_decoder(decoder: str, penalty: float) -> None:
    """Refuse an unknown decoder and a penalty that is not positive."""
    either("decoder", decoder, get_args(Decoder))
    positive("penalty", penalty)


def decode(
    signals: Tensor,
    dictionaries: Tensor,
    sparsity: int,
    visible: Tensor | None,
    decoder: Decoder,
    selection: Selection,
    penalty: float,
) -> SparseCodes | Tensor:
    """Codes of signals (R, n, d) by dictionaries (R, p, d); visible is None or bool (R, 1 or n, d). Unchecked."""
    if decoder == "lasso":
        return lasso(signals, dictionaries, penalty, visible)
    return pursue_runs(signals, dictionaries, sparsity, visible, selection)


def reconstruct(codes: SparseCodes | Tensor, dictionaries: Tensor) -> Tensor:
    """codes @ dictionaries, (R, n, d)."""
    if isinstance(codes, Tensor):
        return codes @ dictionaries
    R, n, k = codes.support.shape
    p, d = dictionaries.shape[1:]
    rows = codes.support.clamp(min=0) + torch.arange(R, device=dictionaries.device)[:, None, None] * p
    flat = SparseCodes(rows.view(-1, k), codes.values.reshape(-1, k))
    return flat.reconstruct(dictionaries.reshape(R * p, d)).view(R, n, d)


def lasso(
    signals: Tensor,
    dictionaries: Tensor,
    penalty: float,
    visible: Tensor | None = None,
    *,
    tolerance: float = 1e-4,
    steps: int = 20_000,
) -> Tensor:
    """The codes (R, n, p) that minimise ½‖signals − codes @ dictionaries‖² + penalty·‖codes‖₁ over visible coordinates.

    FISTA with restarts, run by run and in parts that fit into the cache; a signal is finished when no entry of its code breaks
    the optimality conditions by more than `tolerance` · penalty. Those that are not after `steps` are counted in a warning.
    """
    codes = signals.new_zeros(*signals.shape[:2], dictionaries.shape[1])
    open_ = 0
    for run, (Y, D) in enumerate(zip(signals, dictionaries, strict=True)):
        seen = None if visible is None else visible[run].expand_as(Y)
        # ‖D‖² bounds the curvature also where only some coordinates are seen; a zero dictionary has a zero gradient.
        curvature = float(torch.linalg.matrix_norm(D, 2).square().clamp(min=torch.finfo(Y.dtype).tiny))
        size = max(1, _PART // len(D))
        for start in range(0, len(Y), size):
            part = slice(start, start + size)
            found, unfinished = _fista(Y[part], D, penalty, None if seen is None else seen[part], curvature, tolerance, steps)
            codes[run, part], open_ = found, open_ + unfinished
    if open_:
        warnings.warn(
            f"The Lasso codes of {open_} signals are not optimal after {steps} steps: atoms are nearly parallel or the penalty "
            f"{penalty} is small. Raise it, or use matching pursuit.",
            NumericalWarning,
            stacklevel=2,
        )
    return codes


def _fista(
    Y: Tensor, D: Tensor, penalty: float, visible: Tensor | None, curvature: float, tolerance: float, steps: int
) -> tuple[Tensor, int]:
    """Codes (n, p) of signals (n, d), and how many are not optimal yet; finished signals leave the computation."""
    Y = Y if visible is None else torch.where(visible, Y, 0.0)
    result = Y.new_zeros(len(Y), len(D))
    rows = torch.arange(len(Y), device=Y.device)
    codes = ahead = result.clone()
    momentum = Y.new_ones(len(Y), 1)
    for step in range(steps):
        left = Y - ahead @ D
        slope = (left if visible is None else left * visible) @ D.T
        if step % _LOOK == 0:
            ready = _violation(ahead, slope, penalty) <= tolerance * penalty
            if bool(ready.any()):
                result[rows[ready]] = ahead[ready]
                keep = ~ready
                rows, Y, codes, ahead, momentum, slope = (x[keep] for x in (rows, Y, codes, ahead, momentum, slope))
                visible = None if visible is None else visible[keep]
            if not len(rows):
                return result, 0
        moved = ahead + slope / curvature
        new = moved.sign() * (moved.abs() - penalty / curvature).clamp(min=0)
        # Momentum that points uphill is dropped, signal by signal.
        uphill = ((ahead - new) * (new - codes)).sum(1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        longer = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = new + (momentum - 1) / longer * (new - codes)
        codes, momentum = new, longer
    result[rows] = codes
    return result, len(rows)


def _violation(codes: Tensor, slope: Tensor, penalty: float) -> Tensor:
    """Of each code (n,): |slope| above the penalty at zeros, slope other than ±penalty elsewhere, the largest."""
    at_zero = (slope.abs() - penalty).clamp(min=0)
    elsewhere = (slope - penalty * codes.sign()).abs()
    return torch.where(codes == 0, at_zero, elsewhere).amax(1)
