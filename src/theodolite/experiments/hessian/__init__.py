"""The layer-wise Hessian: Kronecker structure, overlap of models trained apart, and the theorems behind them."""

from typing import Any

from theodolite.experiments.claims import ReadFrom, Reported


def paper(value: Any, place: str, read_from: ReadFrom = "text") -> Reported:
    """What "Dissecting Hessian" reports at a place of it."""
    return Reported(value, f"Wu, Zhu et al. 2020, {place}", read_from)


def thesis(value: Any, place: str, read_from: ReadFrom = "text") -> Reported:
    """What the thesis on it reports."""
    return Reported(value, f"Wu 2023, {place}", read_from)
