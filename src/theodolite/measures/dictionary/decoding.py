"""From signals to codes: matching pursuit, or the Lasso by accelerated proximal gradients; several dictionaries at once."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.measures.dictionary.matching_pursuit import Selection, SparseCodes, pursue_runs

Decoder = Literal["omp", "lasso"]


def check_decoder(decoder: str, penalty: float) -> None:
    if decoder not in get_args(Decoder):
        raise ValueError(f"decoder must be 'omp' or 'lasso'. Got {decoder!r}.")
    if not penalty > 0:
        raise ValueError(f"penalty must be positive. Got {penalty}.")


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
    flat = dictionaries.reshape(R * p, d)
    spanned = torch.nn.functional.embedding_bag(rows.view(-1, k), flat, per_sample_weights=codes.values.view(-1, k), mode="sum")
    return spanned.view(R, n, d)


def lasso(
    signals: Tensor,
    dictionaries: Tensor,
    penalty: float,
    visible: Tensor | None = None,
    *,
    tolerance: float = 1e-4,
    steps: int = 1000,
) -> Tensor:
    """The codes (R, n, p) that minimise ½‖signals − codes @ dictionaries‖² + penalty·‖codes‖₁ over visible coordinates.

    FISTA with restarts. Ends when no entry breaks the optimality conditions by more than `tolerance` · penalty.
    """
    seen = None if visible is None else visible.to(signals.dtype)
    Y = signals if visible is None else torch.where(visible, signals, 0.0)
    D = dictionaries if seen is None or seen.shape[1] > 1 else dictionaries * seen
    # ‖D‖² bounds the curvature also where only some coordinates are seen; a zero dictionary has a zero gradient.
    curvature = torch.linalg.matrix_norm(D, 2).square().clamp(min=torch.finfo(Y.dtype).tiny)[:, None, None]
    codes = ahead = Y.new_zeros(*Y.shape[:2], D.shape[1])
    momentum = Y.new_ones(*Y.shape[:2], 1)
    for _ in range(steps):
        left = Y - ahead @ D
        slope = (left if seen is None else left * seen) @ D.transpose(1, 2)
        if _optimality(ahead, slope, penalty) <= tolerance * penalty:
            return ahead
        moved = ahead + slope / curvature
        new = moved.sign() * (moved.abs() - penalty / curvature).clamp(min=0)
        # Momentum that points uphill is dropped, signal by signal.
        uphill = ((ahead - new) * (new - codes)).sum(2, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        longer = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = new + (momentum - 1) / longer * (new - codes)
        codes, momentum = new, longer
    return codes


def _optimality(codes: Tensor, slope: Tensor, penalty: float) -> float:
    """The largest violation: |slope| above the penalty at zeros, slope other than ±penalty elsewhere."""
    at_zero = (slope.abs() - penalty).clamp(min=0)
    elsewhere = (slope - penalty * codes.sign()).abs()
    worst = torch.where(codes == 0, at_zero, elsewhere)
    return float(worst.max()) if worst.numel() else 0.0
