"""What is kept of a stream of hidden states, whatever its length: least squares, a uniform sample, the sums of a probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from theodolite.arguments import checked, count, whole
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.probing.bulk import bulk_sums, check_excluded, check_top
from theodolite.problem.arguments import a_tensor

#: Directions whose eigenvalue is below this fraction of the largest, after scaling the columns, are left out of a solution:
#: those along which the scaled columns are a millionth of their largest.
CUTOFF = 1e-12
SAFE_PIVOT = 1e-9
#: Rows widened to float64 at a time.
ROWS_AT_ONCE = 1024
#: Numbers a sample of states may hold, and rows at most.
NUMBERS, SAMPLE_ROWS = 2**25, 8192
#: Numbers of logits held at a time (one large product is faster), of those sorted at a time (which should fit into the cache),
#: and states added to the sums at a time.
LOGITS, SORTED, ROWS = 2**24, 2**21, 4096


# Least squares over a stream: the Gram matrix and its right-hand sides, in float64, whatever the number of rows.


class NormalEquations:
    """Sums over rows h (d,) with targets y (K,); a constant column is added, which a fit may use or not.

    Memory is (d + 1)² numbers. `+` joins two parts of a stream. Errors are differences of sums, so sums are taken of what a
    `reference` fit (d + 1, K) leaves of the targets: where that is good, an exact fit shows as one to the last digits.

    >>> x = torch.arange(6.0)[:, None]
    >>> sums = NormalEquations(1, 1)
    >>> sums.update(x, 2 * x + 1)
    >>> fit = sums.solve(intercept=True)
    >>> fit.round(decimals=6).tolist(), round(float(sums.mse(fit)[0]), 9)
    ([[2.0], [1.0]], 0.0)
    """

    @checked(dim=count, targets=count, rows=whole, reference=a_tensor)
    def __init__(self, dim: int, targets: int, rows: int = 0, reference: Tensor | None = None) -> None:
        self.dim, self.targets, self.rows, self.reference = dim, targets, rows, reference
        self.gram = torch.zeros(dim + 1, dim + 1, dtype=torch.float64)
        self.cross = torch.zeros(dim + 1, targets, dtype=torch.float64)  # with what the reference leaves, and so are the squares
        self.squares = torch.zeros(targets, dtype=torch.float64)
        self.shift: Tensor | None = None  # (K,), the first targets: far from 0 their variance would cancel
        self.sums = torch.zeros(2, targets, dtype=torch.float64)  # of the targets less the shift and of the squares of that
        self.low = torch.full((targets,), torch.inf, dtype=torch.float64)
        self.high = torch.full((targets,), -torch.inf, dtype=torch.float64)

    def update(self, states: Tensor, values: Tensor) -> None:
        """Add rows: states (N, d) and values (N, K)."""
        if not len(states):
            return
        h, y = _with_constant(states), values.double()
        if self.shift is None:
            self.shift = y[0].to(self.sums.device, copy=True)
        moved = y - self.shift.to(y.device)
        left = y if self.reference is None else y - h @ self.reference.to(h.device)
        self.rows += len(states)
        self.gram += (h.mT @ h).to(self.gram.device)
        self.cross += (h.mT @ left).to(self.gram.device)
        self.squares += left.square().sum(0).to(self.gram.device)
        self.sums += torch.stack([moved.sum(0), moved.square().sum(0)]).to(self.gram.device)
        self.low = torch.minimum(self.low, y.amin(0).to(self.low.device))
        self.high = torch.maximum(self.high, y.amax(0).to(self.high.device))

    def __add__(self, other: NormalEquations) -> NormalEquations:
        total = NormalEquations(self.dim, self.targets, self.rows + other.rows, self.reference)
        for name in ("gram", "cross", "squares"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        total.shift = other.shift if self.shift is None else self.shift
        total.sums = self._shifted_sums(total.shift) + other._shifted_sums(total.shift)
        total.low, total.high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return total

    def _shifted_sums(self, shift: Tensor | None) -> Tensor:
        """`sums` for another shift."""
        if self.shift is None or shift is None:
            return self.sums
        by, (first, second) = self.shift - shift, self.sums
        return torch.stack([first + self.rows * by, second + 2 * by * first + self.rows * by.square()])

    @property
    def mean(self) -> Tensor:
        """Means (K,) of the targets."""
        mean: Tensor = self.sums[0] / self.rows
        return mean if self.shift is None else mean + self.shift

    @property
    def variance(self) -> Tensor:
        """Variances (K,) of the targets: the mean square error of predicting their mean."""
        means = self.sums / self.rows
        return (means[1] - means[0].square()).clamp_min(0)

    def solve(self, *, intercept: bool = False, rows: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The least squares coefficients, (d, K), or (d + 1, K) with that of the constant column last.

        Columns are scaled to length 1 first, and directions that the rows do not hold get the coefficient 0. Where the `rows`
        (states, values) behind the sums are still at hand, what the solution leaves of them is solved for once more, which
        makes up for the squared condition number.
        """
        size = self.dim + intercept
        gram, cross = self.gram[:size, :size], self.cross[:size]
        length = gram.diagonal().sqrt()
        scale = torch.where(length > 0, 1 / length, 0.0)[:, None]
        start = length[:, None] * self._reference(size)
        inverse = _inverse(scale * gram * scale.mT)
        found = scale * inverse(scale * cross, start)
        if rows is None:
            return found
        left = torch.zeros_like(cross)
        for states, values in zip(*(part.split(ROWS_AT_ONCE) for part in rows), strict=True):
            h = _with_constant(states)[:, :size]
            left += (h.mT @ (values.double() - h @ found.to(h.device))).to(left.device)
        return found + scale * inverse(scale * left, torch.zeros_like(start))

    def mse(self, coefficients: Tensor) -> Tensor:
        """The mean square errors (K,) of coefficients (d, K) or (d + 1, K) on these rows.

        A difference of sums: what is below 1e-15 times the mean square that the reference leaves is rounding.
        """
        size = len(coefficients)
        gram, cross = self.gram[:size, :size], self.cross[:size]
        beyond = coefficients - self._reference(size)
        explained = (beyond * (2 * cross - gram @ beyond)).sum(0)
        return ((self.squares - explained) / self.rows).clamp_min(0)

    def _reference(self, size: int) -> Tensor:
        """The reference (size, K); one for d columns has no constant."""
        return torch.zeros(size, self.targets, dtype=torch.float64) if self.reference is None else self.reference[:size]

    def constant_mse(self, constants: Tensor) -> Tensor:
        """The mean square errors (K,) of predicting the constants (K,)."""
        return self.variance + (self.mean - constants).square()

    @property
    def memory(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in vars(self).values() if isinstance(held, Tensor))


def _with_constant(states: Tensor) -> Tensor:
    """[h; 1] (N, d + 1) in float64."""
    h = states.new_ones(len(states), states.shape[1] + 1, dtype=torch.float64)
    h[:, :-1] = states
    return h


def _inverse(gram: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(cross, start) → x with gram · (x − start) = cross.

    By Cholesky where all columns stand apart, else by eigenvalues above the cut-off. In the second case x, start included, has
    no part in the directions that are cut off.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    # A squared pivot is what the columns before leave of one of length 1.
    if not int(failed) and float(factor.diagonal().square().min()) > SAFE_PIVOT:
        return lambda cross, start: start + torch.cholesky_solve(cross, factor)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > CUTOFF * values[-1]
    inverse = torch.where(kept, 1 / values, 0.0)[:, None]
    return lambda cross, start: vectors @ (inverse * (vectors.mT @ cross) + kept[:, None] * (vectors.mT @ start))


# A uniform sample of bounded size from a stream of unknown length.


def rows_within_budget(dim: int) -> int:
    """How many states (d,) a sample holds.

    >>> rows_within_budget(768), rows_within_budget(8192)
    (8192, 4096)
    """
    return max(1, min(SAMPLE_ROWS, NUMBERS // max(dim, 1)))


class Reservoir:
    """Keeps the `size` rows with the smallest random keys, which is a uniform sample at every moment; all rows while they fit.

    A row is what several tensors hold at one index: `offer(states, values, places)` takes (N, ...) each.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seen = size, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64)
        self._held: list[Tensor] = []

    def __len__(self) -> int:
        return min(self.seen, self.size)

    @property
    def complete(self) -> bool:
        """Whether every row offered is held."""
        return self.seen <= self.size

    def offer(self, *parts: Tensor) -> None:
        """Let N more rows try for a place."""
        keys = torch.rand(len(parts[0]), generator=self._generator, dtype=torch.float64)
        free = self.size - len(self)
        if free:
            held = self._held or [part[:0] for part in parts]
            self._held = [torch.cat([old, part[:free]]) for old, part in zip(held, parts, strict=True)]
            self._keys = torch.cat([self._keys, keys[:free]])
        self.seen += len(keys)
        if free < len(keys):  # rows whose keys are below the largest held take the places of those
            rows = torch.arange(free, len(keys))
            rows = rows[keys[rows] < self._keys.max()]
            order = torch.cat([self._keys, keys[rows]]).argsort()
            leaving, entering = order[self.size :], order[: self.size]
            places, rows = leaving[leaving < self.size], rows[entering[entering >= self.size] - self.size]
            self._keys[places] = keys[rows]
            for old, part in zip(self._held, parts, strict=True):
                old[places.to(old.device)] = part[rows.to(part.device)]

    def rows(self) -> tuple[Tensor, ...]:
        """The sample, one tensor (at most `size`, ...) per part."""
        return tuple(held.clone() for held in self._held)


# States in, sums out: what an anchor probe keeps of a stream of hidden states, whose size does not grow with it.


class ProbeStream:
    """Takes states (N, d) chunk by chunk; holds normal equations of two parts, running extremes and a sample of positions.

    `cut` is the number of the first held-out position, one of `ends` if there are any within. Where the length `total` of the
    stream is not known (`cut` None), the last share `held_out` of the positions of every call is held out. `cap` c is for the
    perplexity only, where the model says c · tanh(z/c) instead of its logits z.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        top: int | Iterable[int] | None,
        exclude: int | Iterable[int] | Tensor | None = None,
        *,
        held_out: float = 0.2,
        chunk: int | None = None,
        sample: int | None = None,
        seed: int = 0,
        total: int | None = None,
        ends: Tensor | None = None,
        cap: float | None = None,
    ) -> None:
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is a share of the positions in [0, 1). Got {held_out}.")
        if any(value is not None and value < 1 for value in (chunk, sample)):
            raise ValueError(f"chunk and sample must be 1 or more. Got {chunk} and {sample}.")
        n, d = weight.shape
        self.weight, self.bias, self.exclude = weight, bias, check_excluded(exclude, n)
        self.excluded = 0 if self.exclude is None else len(self.exclude)
        self.top = check_top(top, n, self.excluded)
        self.held_out, self.cap = held_out, cap
        self.cut: int | None = None
        if total is not None:
            cut = math.ceil((1 - held_out) * total)
            within = [end for end in ([] if ends is None else ends.tolist()) if 0 < end < total]
            self.cut = min(within, key=lambda end: abs(end - cut)) if within and held_out else cut
        self.chunk = min(ROWS, max(1, LOGITS // n)) if chunk is None else chunk
        self._logits = weight.new_empty(0, n)  # one buffer for all chunks: fresh memory costs as much as the product
        self.train, self.test = NormalEquations(d, len(self.top)), NormalEquations(d, len(self.top))
        self.sample = Reservoir(rows_within_budget(d) if sample is None else sample, seed)
        self.positions = 0
        self.mass_sum = torch.zeros(len(self.top), dtype=torch.float64)
        self.mass_low = torch.ones(len(self.top), dtype=torch.float64)
        self.loss_sum, self.predicted = 0.0, 0

    def add(self, states: Tensor, targets: Tensor | None = None, places: Tensor | None = None) -> None:
        """States (N, d), the tokens (N,) that came there (−100: none), and their places (N,) in their windows."""
        border = math.ceil((1 - self.held_out) * len(states)) if self.cut is None else max(0, self.cut - self.positions)
        for start in range(0, len(states), ROWS):
            part = slice(start, start + ROWS)
            words, where = (None if given is None else given[part] for given in (targets, places))
            self._add(states[part], words, where, border - start)

    def _add(self, states: Tensor, targets: Tensor | None, places: Tensor | None, border: int) -> None:
        """One block; rows from `border` on are held out."""
        total, bulk = self.values(states, targets)
        border = min(max(border, 0), len(states))
        if not self.positions:
            self.train.reference = self.test.reference = self._first_fit(states, bulk)
        self.train.update(states[:border], bulk[:border])
        self.test.update(states[border:], bulk[border:])
        mass = (bulk - total[:, None]).double().exp()
        self.mass_sum += mass.sum(0).cpu()
        self.mass_low = torch.minimum(self.mass_low, mass.amin(0).cpu())
        numbers = torch.arange(self.positions, self.positions + len(states))
        where = numbers if places is None else places.cpu()
        held_out = torch.arange(len(states)) >= border
        self.sample.offer(states.cpu(), bulk.double().cpu(), total.double().cpu(), where, numbers, held_out)
        self.positions += len(states)

    def _first_fit(self, states: Tensor, bulk: Tensor) -> Tensor:
        """Coefficients (d + 1, tops) without a constant from the first block, which the sums are taken relative to.

        A little ridge saves the search for directions that the states do not hold; solving again for what is left undoes it in
        those they do.
        """
        h, y = states.double(), bulk.double()
        gram = h.mT @ h
        gram.diagonal().add_(1e-8 * gram.diagonal().mean() + torch.finfo(torch.float64).tiny)
        factor = torch.linalg.cholesky(gram)
        fit = torch.cholesky_solve(h.mT @ y, factor)
        fit += torch.cholesky_solve(h.mT @ (y - h @ fit), factor)
        return torch.cat([fit, torch.zeros_like(fit[:1])]).cpu()

    def values(self, states: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log Z (N,) and the log bulk sums (N, tops) of states (N, d)."""
        parts = []
        for start in range(0, len(states), self.chunk):
            rows = slice(start, start + self.chunk)
            logits = self._product(states[rows])
            step = max(1, SORTED // logits.shape[1])
            found = [bulk_sums(some, self.top, self.exclude) for some in logits.split(step)]
            parts += found
            if targets is not None:
                self._predict(logits, torch.cat([part.total for part in found]), targets[rows])
        total, bulk = torch.cat([p.total for p in parts]), torch.cat([p.bulk for p in parts])
        if not bool(torch.isfinite(bulk).all()):
            row = int((~torch.isfinite(bulk)).any(1).nonzero()[0])
            raise NonFiniteError(
                f"The log bulk partition function of position {self.positions + row} is {float(bulk[row].sum()):g}: NaN or "
                "infinity in the states or the head. Look for them in the model's weights, or for half precision that overflows."
            )
        return total, bulk

    def _product(self, states: Tensor) -> Tensor:
        """The logits (N, n) of states (N, d); good until the next call."""
        if len(self._logits) < len(states):
            self._logits = self.weight.new_empty(len(states), len(self.weight))
        out = self._logits[: len(states)]
        if self.bias is None:
            return torch.mm(states, self.weight.mT, out=out)
        return torch.addmm(self.bias, states, self.weight.mT, out=out)

    def _predict(self, logits: Tensor, total: Tensor, targets: Tensor) -> None:
        """Add −log p of the tokens that came, where one of the vocabulary did."""
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
            total = logits.logsumexp(-1)
        known = ((targets >= 0) & (targets < logits.shape[1])).to(logits.device)
        chosen = logits.gather(1, targets.to(logits.device).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.loss_sum += float((total - chosen)[known].double().sum())
        self.predicted += int(known.sum())
