"""An orthonormal basis with the images of its vectors: all a Rayleigh-Ritz method needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RitzPairs:
    """Ritz values in the wanted order and their coordinates (m, m) in the basis, column by column."""

    values: Tensor
    coordinates: Tensor


class RitzBasis:
    """Rows V (m, n) orthonormal in float64, their images W = V A, and the projection T = V A Vᵀ.

    Keeping the images costs memory and buys true residuals, warm starts from any subspace and restarts
    without a single extra product.
    """

    def __init__(self, n: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.size = n, 0
        self._vectors = torch.empty(capacity, n, dtype=torch.float64, device=device)
        self._images = torch.empty(capacity, n, dtype=dtype, device=device)
        self._projection = torch.zeros(capacity, capacity, dtype=torch.float64)

    @property
    def capacity(self) -> int:
        return self._vectors.shape[0]

    @property
    def vectors(self) -> Tensor:
        return self._vectors[: self.size]

    @property
    def images(self) -> Tensor:
        return self._images[: self.size]

    @property
    def projection(self) -> Tensor:
        return self._projection[: self.size, : self.size]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._vectors, self._images, self._projection))

    def orthogonalise(self, x: Tensor) -> tuple[Tensor, float]:
        """`x` without its part in the basis, and its norm. Repeats while cancellation is heavy."""
        norm = float(x.norm())
        for _ in range(4):
            if self.size:
                x = torch.addmv(x, self.vectors.T, self.vectors @ x, alpha=-1.0)
            before, norm = norm, float(x.norm())
            if norm > 0.7 * before or norm == 0.0:
                break
        return x, norm

    def append(self, vector: Tensor, image: Tensor) -> Tensor:
        """Add a unit vector orthogonal to the basis; returns its image's part outside the new basis."""
        m = self.size
        self._vectors[m] = vector
        self._images[m] = image
        self.size = m + 1
        image = image.double()
        column = self.vectors @ image
        self._projection[: m + 1, m] = column.cpu()
        self._projection[m, : m + 1] = column.cpu()
        outside = torch.addmv(image, self.vectors.T, column, alpha=-1.0)
        if float(outside.norm()) <= 0.7 * float(image.norm()):
            outside, _ = self.orthogonalise(outside)
        return outside

    def ritz(self, *, by_magnitude: bool) -> RitzPairs:
        """Ritz pairs, largest first (largest magnitude first if asked)."""
        values, coordinates = torch.linalg.eigh(self.projection)
        order = (values.abs() if by_magnitude else values).argsort(descending=True)
        return RitzPairs(values[order], coordinates[:, order])

    def lift(self, coordinates: Tensor) -> Tensor:
        """Columns (n, j) of the vectors with these coordinates (m, j)."""
        return self.vectors.T @ coordinates.to(self._vectors.device)

    def lift_images(self, coordinates: Tensor) -> Tensor:
        """Columns (n, j): A applied to `lift(coordinates)`, without a product."""
        return (self.images.T @ coordinates.to(self._images)).double()

    def residuals(self, pairs: RitzPairs, k: int) -> Tensor:
        """The vectors `A y − θ y` (n, k) of the first k Ritz pairs, from the stored images."""
        s = pairs.coordinates[:, :k]
        return self.lift_images(s) - self.lift(s * pairs.values[:k])

    def compress(self, pairs: RitzPairs, keep: int) -> None:
        """Keep the span of the first `keep` Ritz vectors only (a thick restart)."""
        s = pairs.coordinates[:, :keep]
        self._vectors[:keep] = self.lift(s).T
        self._images[:keep] = (self.images.T @ s.to(self._images)).T
        self._projection.zero_()
        self._projection[:keep, :keep] = torch.diag(pairs.values[:keep])
        self.size = keep

    def grow(self, capacity: int) -> None:
        """Make room for more vectors."""
        extra = capacity - self.capacity
        if extra <= 0:
            return
        self._vectors = torch.cat([self._vectors, self._vectors.new_empty(extra, self.n)])
        self._images = torch.cat([self._images, self._images.new_empty(extra, self.n)])
        projection = torch.zeros(capacity, capacity, dtype=torch.float64)
        projection[: self.size, : self.size] = self.projection
        self._projection = projection
