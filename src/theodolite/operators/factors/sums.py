"""The running averages that make up the factors of one layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theodolite.operators.factors.affine import AffineLayer
from theodolite.operators.factors.kronecker_factors import KroneckerFactors
from theodolite.results import Cost, Outcome


class Sums:
    """Running averages of one layer."""

    def __init__(self, recipe: AffineLayer) -> None:
        self.recipe = recipe
        self.samples = 0
        self.positions = 1
        self.passes = 0
        self.draws = 0
        self.last = False
        self.input = torch.zeros(())
        self.mean = torch.zeros(())
        self.output = torch.zeros(())
        self._batch: list[Tensor] = []
        self._variance = 0.0

    def add_inputs(self, x: Tensor, fraction: float, *, last: bool) -> None:
        """Inputs (B, P, n) of a batch that holds `fraction` of all samples."""
        flat = x.flatten(0, 1)
        weight = fraction / len(x)
        mean = x.sum(0).T.double() * weight  # (n, P)
        product = (flat.T @ flat).double() * weight  # products in the network's precision, sums in float64
        self.input = self.input + product
        self.mean = _side_by_side(self.mean, mean) if self.samples else mean
        self.samples += len(x)
        self.positions = max(self.positions, x.shape[1])
        self.last = last

    def add_root(self, n: Tensor, share: float, *, drawn: int) -> None:
        """One root's derivatives (B, P, m): the mean over positions of their outer products. `drawn`: of how many, 0 if exact."""
        flat = n.flatten(0, 1)
        product = (flat.T @ flat).double() * (share / n.shape[1])
        if drawn:
            self._batch.append(product)
            self.draws = drawn
        self.output = self.output + product
        self.passes += 1

    def end_batch(self) -> None:
        """The variance that sampling leaves: from the spread of the draws, in the Frobenius norm."""
        k = len(self._batch)
        if k == 1:
            self._variance = math.nan
        elif k > 1:
            draws = torch.stack(self._batch)
            self._variance += float((draws - draws.mean(0)).square().sum()) * k / (k - 1)
        self._batch = []

    def add_output(self, total: Tensor, share: float, positions: int, passes: int) -> None:
        """The second derivatives (m, m) of a batch, summed over samples and positions."""
        self.output = self.output + 0.5 * (total + total.T) * (share / positions)
        self.passes += passes

    def result(self, kind: str, mode: str, seed: int, cost: Cost) -> KroneckerFactors:
        recipe = self.recipe
        output = self.output if self.output.ndim else torch.zeros(recipe.m, recipe.m, dtype=torch.float64)
        size = float(output.norm())
        return KroneckerFactors(
            layer=recipe.name,
            kind=kind,
            mode=mode,
            output=output,
            input=self.input,
            mean=_leading(self.mean),
            positions=self.positions,
            samples=self.samples,
            passes=self.passes,
            stderr=math.sqrt(self._variance) / size if size > 0 else 0.0,
            draws=self.draws,
            groups=recipe.groups,
            transposed=recipe.transposed,
            last=self.last,
            outcome=Outcome.ESTIMATED if self.draws else Outcome.FINISHED,
            seed=seed,
            cost=cost,
        )


def _leading(mean: Tensor) -> Tensor:
    """The mean input, or of several positions (n, P) the leading left singular vector times its value, most entries positive."""
    if mean.shape[1] == 1:
        return mean[:, 0]
    left, sizes, _ = torch.linalg.svd(mean, full_matrices=False)
    lead: Tensor = left[:, 0] * sizes[0]
    return -lead if float(lead.sum()) < 0 else lead


def _side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """The sum of means (n, P); with different numbers of positions (sequences of different length) where both have them."""
    short, long = (a, b) if a.shape[1] < b.shape[1] else (b, a)
    out = long.clone()
    out[:, : short.shape[1]] += short
    return out
