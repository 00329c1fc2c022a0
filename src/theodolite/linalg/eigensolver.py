"""Restarted Lanczos with full reorthogonalisation, any start, true residuals, and a search for missed copies.

From one vector the method is thick-restart Lanczos. From a subspace (a warm start) it expands by the leading
direction of the unsettled residuals, corrected for the neighbouring eigenvectors where those are known
(`Neighbours`). Both end the same way: a random vector orthogonal to everything seen starts a fresh chain, which
either brings up an eigenvalue that was missed or certifies (`certificate.py`) that there is none. A warm start is
trusted further: its chain stops early unless it comes near the wanted values.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import Enum

import torch
from torch import Tensor

from theodolite.linalg.certificate import RISK, Chain
from theodolite.results import Outcome


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


#: A warm start that settled early spends its search up to this many products in all.
WARM_PRODUCTS = 7

#: Residuals of a start, relative to the largest value, up to which it is taken for what it claims to be.
NEAR = 0.05

#: How far the values of a start, relative to the largest, may have moved.
SAME = 0.5

#: So many vectors beyond a warm start, random or residuals of the changed operator, count as a look around.
LOOK = 4

#: Residuals of a warm start, in units of the tolerance, above which old vectors serve only through their mean: a
#: chain from it is cheaper than mending them one by one, the more so the more there are.
MOVED_MANY, MOVED_FEW = 8.0, 50.0

Products = Generator[Tensor, Tensor, None]


@dataclass(frozen=True)
class Solution:
    """What the solver found, wanted order, before it becomes a result."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    outcome: Outcome
    matvecs: int
    scale: float
    miss_probability: float
    neighbours: Neighbours
    basis_bytes: int


class _Search(Enum):
    CLEAN = 1
    FOUND = 2
    BUDGET = 3


@dataclass(eq=False)
class EigenSolver:
    """The k largest (or largest in magnitude) eigenpairs of a symmetric operator; see `steps`."""

    n: int
    k: int
    _: KW_ONLY
    tol: float
    by_magnitude: bool
    start: Tensor | None
    neighbours: Neighbours | None
    claimed: Tensor | None  # eigenvalues of a start that was verified once; None: nothing is to be trusted
    max_matvecs: int
    max_basis: int
    dtype: InitVar[torch.dtype]
    device: torch.device
    generator: torch.Generator

    # Where the solver stands
    matvecs = 0
    scale = 0.0
    chained = True  # as long as it is, every residual lies along `tail`, the last image's part outside the basis
    restarted = False
    miss = 1.0
    certified = float("inf")  # nothing beyond this value was missed
    trusted = False
    _stalled = 0
    _best = float("inf")

    def __post_init__(self, dtype: torch.dtype) -> None:
        self.basis = RitzBasis(self.n, min(self.n, self.max_basis), dtype=dtype, device=self.device)
        self.tail = torch.zeros(self.n, dtype=torch.float64, device=self.device)

    def steps(self) -> Generator[Tensor, Tensor, Solution]:
        """Yield blocks to multiply, receive products, return the solution."""
        yield from self._begin()
        while True:
            pairs = self._ritz()
            norms = self._residual_norms(pairs)
            if self._settled(norms):
                if self.basis.size == self.n:
                    self.miss = 0.0
                    return self._solution(pairs, Outcome.CONVERGED)
                search = yield from self._search(pairs)
                pairs = self._ritz()
                if search is _Search.CLEAN:
                    return self._solution(pairs, Outcome.CONVERGED)
                if search is _Search.BUDGET:
                    return self._solution(pairs, Outcome.UNVERIFIED)
                continue
            if self.matvecs >= self.max_matvecs:
                return self._solution(pairs, Outcome.MAX_MATVECS)
            if self.basis.size == self.n or self._stalls(norms):
                return self._solution(pairs, Outcome.PRECISION)
            direction = self._direction(pairs, norms)
            self._make_room()
            yield from self._expand(direction)

    # Starting and expanding

    def _begin(self) -> Products:
        if self.start is None:
            yield from self._expand(self._random_direction())
            return
        block, _ = torch.linalg.qr(self.start.to(device=self.device, dtype=torch.float64))
        block = block[:, : max(1, min(block.shape[1], self.basis.capacity, self.max_matvecs))]
        if block.shape[1] > 1:
            mean, rest = _mean_and_rest(block)
            yield from self._expand(mean)
            image = self.basis.images[0].double()
            moved = float((image - block @ (block.T @ image)).norm())
            allowed = MOVED_FEW if block.shape[1] <= FEW else MOVED_MANY
            if moved > allowed * self.tol * float(image.norm()):
                self.trusted = self._may_trust(moved <= NEAR * float(image.norm()))
                return
            block = rest
        images = yield block
        self.matvecs += block.shape[1]
        for vector, image in zip(block.T, images.T, strict=True):
            self.tail = self.basis.append(vector, image)
        self.chained = self.basis.size == 1 and self.neighbours is None
        norms = self.basis.residuals(self._ritz(), self.basis.size).norm(dim=0)
        self.trusted = self._may_trust(float(norms.max()) <= NEAR * self.scale)

    def _may_trust(self, near: bool) -> bool:
        """A start with all the wanted vectors, nearly eigenvectors of nearly its values, is a warm one; others are only hints."""
        if not near or self.claimed is None or self.start is None or self.start.shape[1] < self.k:
            return False
        quotient = float(self.basis.projection[0, 0])  # of the mean of the start
        return abs(quotient - float(self.claimed.mean())) <= SAME * float(self.claimed.abs().max())

    def _expand(self, direction: Tensor) -> Products:
        image = yield direction[:, None]
        self.matvecs += 1
        self.tail = self.basis.append(direction, image[:, 0])

    def _direction(self, pairs: RitzPairs, norms: Tensor) -> Tensor:
        if self.chained:  # the basis has orthogonalised its tail already, as often as cancellation asked for
            candidate = self.tail
            length = norm = float(candidate.norm())
        else:
            candidate = self._common_direction(pairs, norms)
            length = float(candidate.norm())
            candidate, norm = self.basis.orthogonalise(candidate)
        if norm <= 1e-13 * max(self.scale, length) or norm == 0.0:
            return self._random_direction()
        return candidate / norm

    def _common_direction(self, pairs: RitzPairs, norms: Tensor) -> Tensor:
        """The leading singular direction of the unsettled corrections: one product serves every pair it can."""
        steps = self.basis.residuals(pairs, len(norms))
        # Neighbours that have not helped by now are out of date.
        if self.neighbours is not None and self.matvecs <= 3 * self.k + WARM_PRODUCTS:
            steps = self.neighbours.correct(steps, pairs.values[: len(norms)])
            steps = steps - self.basis.vectors.T @ (self.basis.vectors @ steps)
        steps = steps * (norms > self.tol * self.scale).to(steps)
        leading: Tensor = steps @ torch.linalg.eigh(steps.T @ steps).eigenvectors[:, -1]
        return leading

    def _random_direction(self) -> Tensor:
        draw = torch.randn(self.n, generator=self.generator, dtype=torch.float64).to(self.device)
        draw, norm = self.basis.orthogonalise(draw)
        return draw / norm

    def _make_room(self) -> None:
        """Thick restart: drop the far end of the basis when it is full."""
        if self.basis.size < self.basis.capacity or self.basis.size >= self.n:
            return
        self.restarted = True
        spare = self.basis.capacity - self.k
        self.basis.compress(self._ritz(), self.k + max(1, min(spare - 2, spare // 2)))

    # Judging

    def _ritz(self) -> RitzPairs:
        pairs = self.basis.ritz(by_magnitude=self.by_magnitude)
        self.scale = max(self.scale, float(pairs.values.abs().max()))
        return pairs

    def _residual_norms(self, pairs: RitzPairs) -> Tensor:
        """Residual norms of the wanted pairs that exist so far."""
        count = min(self.k, self.basis.size)
        if self.chained:
            estimate = float(self.tail.norm()) * pairs.coordinates[-1, :count].abs()
            if count < self.k or float(estimate.max()) > self.tol * self.scale:
                return estimate
        norms: Tensor = self.basis.residuals(pairs, count).norm(dim=0).cpu()
        return norms

    def _settled(self, norms: Tensor) -> bool:
        return len(norms) == self.k and float(norms.max()) <= self.tol * self.scale

    def _stalls(self, norms: Tensor) -> bool:
        """Whether small residuals stopped falling: then rounding, not the basis, is the limit."""
        worst = float(norms.max())
        if len(norms) < self.k or worst > 1e-4 * self.scale:
            return False
        if worst < 0.9 * self._best:
            self._best, self._stalled = worst, 0
        else:
            self._stalled += 1
        return self._stalled > 40 + self.basis.capacity

    # The search for missed copies

    def _search(self, pairs: RitzPairs) -> Generator[Tensor, Tensor, _Search]:
        """Grow a random chain until it finds a missed eigenvalue or certifies that there is none."""
        wanted = pairs.values[: self.k]
        edge = float(wanted.abs().min() if self.by_magnitude else wanted.min())
        bound = edge + self.tol * self.scale
        if bound >= self.certified:
            return _Search.CLEAN
        chain = self._open_chain()
        while True:
            if chain.length and chain.reach(both_ends=self.by_magnitude) > bound:
                self.trusted = False  # the start was not what it claimed to be
                return _Search.FOUND
            self.miss = chain.miss_probability(bound, both_ends=self.by_magnitude)
            if self.miss <= RISK or self._trusts(chain, edge) or self.basis.size == self.n:
                self.certified = bound
                # The chain may have pulled a close value into the wanted ones: that one still has to settle.
                return _Search.CLEAN if self._settled(self._residual_norms(self._ritz())) else _Search.FOUND
            if self.matvecs >= self.max_matvecs:
                return _Search.BUDGET
            if self.basis.size == self.basis.capacity:
                self.basis.grow(min(self.n, 2 * self.basis.capacity))
            yield from self._expand(self._chain_direction(chain))
            chain.extend(float(self.basis.projection[-1, -1]), float(self.tail.norm()), self.scale)

    def _open_chain(self) -> Chain:
        """A new random chain in the complement; for one pair, the random chain that found it goes on.

        Copies of the single wanted value do not matter, so nothing has to be deflated for k = 1.
        """
        if self.k == 1 and self.chained and self.start is None and not self.restarted:
            return Chain.of_projection(self.basis.projection, float(self.tail.norm()), self.n)
        self._make_room()
        self.chained = False
        return Chain(self.n - self.basis.size)

    def _chain_direction(self, chain: Chain) -> Tensor:
        norm = float(self.tail.norm())
        return self.tail / norm if chain.length and norm > 0.0 else self._random_direction()

    def _trusts(self, chain: Chain, edge: float) -> bool:
        """Whether a warm start needs no further search: a short chain stayed below the wanted values."""
        if not self.trusted or self.matvecs < WARM_PRODUCTS:
            return False
        # A start that took so many residuals to settle has met whatever moved.
        looked = self.start is not None and self.matvecs - self.start.shape[1] >= LOOK
        if looked or chain.length >= LOOK:
            return True
        return chain.length >= 2 and chain.reach(both_ends=self.by_magnitude) <= 0.9 * edge

    def _solution(self, pairs: RitzPairs, outcome: Outcome) -> Solution:
        count = min(self.k, self.basis.size)
        vectors = self.basis.lift(pairs.coordinates[:, :count])
        return Solution(
            values=pairs.values[:count],
            vectors=vectors,
            residuals=self.basis.residuals(pairs, count).norm(dim=0).cpu(),
            outcome=outcome,
            matvecs=self.matvecs,
            scale=self.scale,
            miss_probability=self.miss,
            neighbours=self._next_to(vectors, pairs),
            basis_bytes=self.basis.bytes,
        )

    def _next_to(self, vectors: Tensor, pairs: RitzPairs) -> Neighbours:
        """The Ritz pairs after the wanted ones; a short warm run knows no better ones than it was given."""
        if self.neighbours is not None and self.basis.size < 2 * self.k + self.neighbours.values.numel():
            return self.neighbours.outside(vectors)
        beyond = slice(self.k, self.k + room_for(self.n, self.k, self.basis.images.dtype))
        found = self.basis.lift(pairs.coordinates[:, beyond])
        return Neighbours(pairs.values[beyond], found.to(self.basis.images.dtype))


def _mean_and_rest(block: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised sum (n,) of orthonormal columns (n, j), and (n, j−1) orthonormal columns for what remains."""
    ones = block.new_ones(block.shape[1], 1)
    rotation = torch.linalg.qr(ones, mode="complete").Q
    return block @ rotation[:, 0], block @ rotation[:, 1:]


#: Neighbours kept beside the wanted pairs, and the most memory they may take, in bytes.
COUNT = 10
MEMORY = 256 * 2**20

#: For more wanted pairs than this their own residuals point as well as the corrected ones.
FEW = 5


@dataclass(frozen=True)
class Neighbours:
    """Rough eigenpairs beyond the wanted ones: `values` (g,) and orthonormal `vectors` (n, g).

    They make `M = Σ_j g_j u_j u_jᵀ`, an operator like A that can be inverted. To first order an eigenvector with
    value θ and residual r moves by `(θ − M)⁻¹ r`: large along neighbours with a close value, where a plain
    residual would need many steps.

    >>> near = Neighbours(torch.tensor([2.0]).double(), torch.tensor([[0.0], [1.0], [0.0]]).double())
    >>> near.correct(torch.tensor([[0.0], [1.0], [1.0]]).double(), torch.tensor([4.0]).double())[:, 0].tolist()
    [0.0, 0.5, 0.25]
    """

    values: Tensor
    vectors: Tensor

    def correct(self, residuals: Tensor, theta: Tensor) -> Tensor:
        """`(θ_i − M)⁻¹ r_i` for every column (n, j); differences below 1 % of the largest θ are held there."""
        theta = theta.to(residuals)
        vectors, values = self.vectors.to(residuals), self.values.to(residuals)
        inside = vectors.T @ residuals
        floor = 1e-2 * float(theta.abs().max())
        rest = (residuals - vectors @ inside) / _away_from_zero(theta, floor)
        return rest + vectors @ (inside / _away_from_zero(theta - values[:, None], floor))

    def outside(self, basis: Tensor) -> Neighbours:
        """The same neighbours made orthogonal to the columns of `basis` (n, k); those that lie in it are dropped."""
        vectors = self.vectors.to(basis)
        vectors = vectors - basis @ (basis.T @ vectors)
        kept = vectors.norm(dim=0) > 0.5
        vectors, _ = torch.linalg.qr(vectors[:, kept])
        return Neighbours(self.values[kept.cpu()], vectors.to(self.vectors.dtype))


def room_for(n: int, k: int, dtype: torch.dtype) -> int:
    """How many neighbours of length n are worth keeping beside k pairs."""
    return min(COUNT, MEMORY // max(1, n * dtype.itemsize)) if k <= FEW else 0


def _away_from_zero(x: Tensor, floor: float) -> Tensor:
    return torch.where(x.abs() < floor, torch.where(x < 0, -floor, floor), x)
