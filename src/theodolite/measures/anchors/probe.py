"""Is there an anchor vector? How well the log bulk partition function is a linear function of the hidden state."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.errors import NumericalWarning
from theodolite.measures.anchors.atoms import AtomGeometry, atom_geometry
from theodolite.measures.anchors.bulk import check_excluded, check_top
from theodolite.measures.anchors.clusters import AnchorClusters, anchor_clusters
from theodolite.measures.anchors.stream import ProbeStream
from theodolite.results import Cost, Outcome, Result, Row

#: Below so many positions per dimension the in-sample error is visibly too small (by the factor 1 − d/N).
ENOUGH = 10
#: The share of the vocabulary whose removal the sentence speaks of: 100 words of 50,000.
SPOKEN = 2e-3
#: What a row says of one number of words removed.
COLUMNS = (
    *("mse", "rmse", "r2", "held_out_mse", "held_out_r2", "intercept_mse", "constant_mse", "variance"),
    *("mean", "low", "high", "max_error", "error_99", "mass_mean", "mass_1", "mass_min"),
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AnchorProbe(Result):
    """Anchor vectors v₀ with ⟨h, v₀⟩ ≈ log Z_bulk, one per number of most probable words removed, and their errors.

    All tuples have one entry per number in `top`. `mse` is that of the least squares fit without intercept on all positions,
    `held_out_mse` that of a fit on the first part on the rest (`split` says which); `variance` is the error of predicting the
    mean, `constant_mse` that of predicting the logarithm of the number of bulk words (all words alike), `intercept_mse` that of
    a fit with intercept. `vectors` (tops, d) hold the anchors; where the head has a bias, states are [h; 1] and v₀ has d + 1
    entries (`biased`). `bulk_mass` is Z_bulk/Z. Largest and 99 % errors, quantiles and histograms are those of a uniform
    `sample` of positions; where it holds all positions they are exact, and so is the mean square error at any precision.
    `sampled_values` (sample, tops) are its log bulk sums, `sampled_log_z` (sample,) its log Z, `sampled_places` the positions in
    their windows and `sampled_numbers` those in the stream.
    """

    top: tuple[int, ...]
    mse: tuple[float, ...]
    variance: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    held_out_mse: tuple[float, ...]
    held_out_variance: tuple[float, ...]
    constant_mse: tuple[float, ...]
    intercept_mse: tuple[float, ...]
    max_error: tuple[float, ...]
    error_99: tuple[float, ...]
    mass_mean: tuple[float, ...]
    mass_1: tuple[float, ...]
    mass_min: tuple[float, ...]
    vectors: Tensor
    biased: bool
    positions: int
    held_out_positions: int
    hidden: int
    vocabulary: int
    excluded: int
    perplexity: float | None
    split: str
    sampled_values: Tensor
    sampled_log_z: Tensor
    sampled_places: Tensor
    sampled_numbers: Tensor
    geometry: AtomGeometry | None = None
    clusters: tuple[AnchorClusters, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rmse(self) -> tuple[float, ...]:
        """Roots of `mse`."""
        return tuple(math.sqrt(value) for value in self.mse)

    @property
    def r2(self) -> tuple[float, ...]:
        """Shares of the variance that the anchors explain, in sample."""
        return tuple(_r2(mse, variance) for mse, variance in zip(self.mse, self.variance, strict=True))

    @property
    def held_out_r2(self) -> tuple[float, ...]:
        """The same for the held-out positions, with their own variance."""
        return tuple(_r2(mse, variance) for mse, variance in zip(self.held_out_mse, self.held_out_variance, strict=True))

    @property
    def sample(self) -> int:
        """Number of positions that quantiles, largest errors and histograms are from."""
        return len(self.sampled_log_z)

    @property
    def exact(self) -> bool:
        """Whether the sample holds every position."""
        return self.sample == self.positions

    def vector(self, top: int) -> Tensor:
        """The anchor for one number of words removed."""
        return self.vectors[self._index(top)]

    def histogram(self, top: int | None = None, bins: int = 60) -> tuple[Tensor, Tensor]:
        """Counts (bins,) and edges (bins + 1,) of the log bulk partition function; of log Z where no number is given."""
        values = self.sampled_log_z if top is None else self.sampled_values[:, self._index(top)]
        found = torch.histogram(values.contiguous(), bins)
        return found.hist.long(), found.bin_edges

    def _index(self, top: int) -> int:
        if top not in self.top:
            raise ValueError(f"top={top} was not measured. Measured: {', '.join(map(str, self.top))}.")
        return self.top.index(top)

    def rows(self) -> list[Row]:
        shared: Row = {name: getattr(self, name) for name in ("positions", "hidden", "vocabulary", "perplexity", "seed")}
        return [{"top": k, **{name: getattr(self, name)[i] for name in COLUMNS}, **shared} for i, k in enumerate(self.top)]

    @property
    def spoken(self) -> int:
        """The place in `top` that sentences speak of: near 0.2 % of the vocabulary, which is 100 words of 50,000."""
        removed = [i for i, k in enumerate(self.top) if k] or [0]
        return min(removed, key=lambda i: abs(self.top[i] - SPOKEN * self.vocabulary))

    def sentence(self) -> str:
        i = self.spoken
        what = f"the log bulk partition function (top {self.top[i]} removed)" if self.top[i] else "the log partition function"
        outside = f", held out {self.held_out_mse[i]:.3g}" if math.isfinite(self.held_out_mse[i]) else ""
        without = f", against {self.mse[0]:.3g} without removing them" if i and self.top[0] == 0 else ""
        numbers = f"mean square error {self.mse[i]:.3g}{outside}{without}; {self.positions} positions, {self.vocabulary} words"
        if self.r2[i] > 0:
            return f"An anchor vector explains {100 * self.r2[i]:.3g} % of the variance of {what}: {numbers}."
        return f"No anchor vector predicts {what} better than its mean does (variance {self.variance[i]:.3g}): {numbers}."


def _r2(mse: float, variance: float) -> float:
    return 1 - mse / variance if variance > 0 else math.nan


def probe_states(
    states: Tensor | Iterable[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top: int | Iterable[int] | None = None,
    exclude: Iterable[int] | Tensor | None = None,
    anchors: int = 1,
    held_out: float = 0.2,
    chunk: int | None = None,
    targets: Tensor | None = None,
    geometry: bool = True,
    sample: int | None = None,
    seed: int = 0,
) -> AnchorProbe:
    """The anchor probe of a log-linear model given by its states and its output layer.

    Parameters
    ----------
    states : (N, d), or an iterable of such chunks, read once.
    weight, bias : the output layer (n, d), (n,); logits are states · weightᵀ + bias, in float32 or the precision given.
    targets : the words (N,) that came, for the perplexity; only with states as one tensor.

    The other parameters are those of `anchor_probe`.

    >>> h = torch.cat([torch.randn(500, 3), torch.ones(500, 1)], dim=1).double()
    >>> atoms = torch.randn(1, 4).double().expand(20, 4)    # one atom 20 times: log Z = ⟨h, v⟩ + log 20
    >>> probe = probe_states(h, atoms, top=0, geometry=False)
    >>> probe.mse[0] < 1e-18
    True
    """
    began = time.perf_counter()
    weight, bias = _output_layer(weight, bias)
    if isinstance(states, Tensor) and states.ndim != 2:
        raise ValueError(f"states must be (N, d), or an iterable of such chunks. Got shape {tuple(states.shape)}.")
    total = len(states) if isinstance(states, Tensor) else None
    stream = new_stream(weight, bias, top, exclude, held_out, chunk, sample, seed, total=total)
    with torch.no_grad():
        for part in [states] if isinstance(states, Tensor) else states:
            if not isinstance(part, Tensor) or part.ndim != 2 or part.shape[1] != weight.shape[1]:
                got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"states must be tensors (N, {weight.shape[1]}), as wide as the weight's rows. Got {got}.")
            stream.add(part.to(weight), None if total is None else targets)
    return summarise(stream, anchors, geometry, seed, began, ())


def _output_layer(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if weight.ndim != 2 or not weight.is_floating_point() or len(weight) < 2:
        raise ValueError(f"weight must be (n, d), floating, with two or more words. Got {weight.dtype} {tuple(weight.shape)}.")
    exact = torch.promote_types(weight.dtype, torch.float32)
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must be ({len(weight)},), one number per word. Got {tuple(bias.shape)}.")
    return weight.detach().to(exact), None if bias is None else bias.detach().to(weight.device, exact)


def new_stream(
    weight: Tensor,
    bias: Tensor | None,
    top: int | Iterable[int] | None,
    exclude: Iterable[int] | Tensor | None,
    held_out: float,
    chunk: int | None,
    sample: int | None,
    seed: int,
    *,
    total: int | None,
) -> ProbeStream:
    """An empty stream for these settings."""
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is a share of the positions in [0, 1). Got {held_out}.")
    if any(value is not None and value < 1 for value in (chunk, sample)):
        raise ValueError(f"chunk and sample must be 1 or more. Got {chunk} and {sample}.")
    words = check_excluded(exclude, len(weight))
    tops = check_top(top, len(weight), 0 if words is None else len(words))
    cut = None if total is None else math.ceil((1 - held_out) * total)
    return ProbeStream(weight, bias, tops, exclude=words, held_out=held_out, cut=cut, chunk=chunk, sample=sample, seed=seed)


def summarise(stream: ProbeStream, anchors: int, geometry: bool, seed: int, began: float, notes: tuple[str, ...]) -> AnchorProbe:
    """Solve, and put the numbers together."""
    if not stream.positions:
        raise ValueError("data has no position to measure at: every one is padding, left out, or not there.")
    biased = stream.bias is not None
    sums = stream.train + stream.test
    vectors, with_intercept = sums.solve(intercept=biased), sums.solve(intercept=True)
    states, values, log_z, places, numbers, _ = stream.sample.rows()
    errors = _residuals(states, values, vectors)
    mse, intercept_mse = (_mean_squares(stream, fit) for fit in (vectors, with_intercept))
    mass = (values - log_z[:, None]).exp()
    outside, outside_variance = _held_out(stream, biased)
    n, d = stream.weight.shape
    excluded = 0 if stream.exclude is None else len(stream.exclude)
    alike = torch.tensor([math.log(n - excluded - k) for k in stream.top], dtype=torch.float64)
    if stream.positions < ENOUGH * d:
        share = f"{d / stream.positions:.0%}"
        note = f"{stream.positions} positions for {d} dimensions: the in-sample error is too small by about {share}"
        warnings.warn(
            f"{note}; look at the held-out error, or give at least {ENOUGH * d} positions.", NumericalWarning, stacklevel=3
        )
        notes = (*notes, note)
    if not stream.sample.complete:
        notes = (*notes, f"quantiles and largest errors are those of {len(values)} of {stream.positions} positions")
    return AnchorProbe(
        top=stream.top,
        mse=_floats(mse),
        variance=_floats(sums.variance),
        mean=_floats(sums.mean),
        low=_floats(sums.low),
        high=_floats(sums.high),
        held_out_mse=outside,
        held_out_variance=outside_variance,
        constant_mse=_floats(sums.constant_mse(alike)),
        intercept_mse=_floats(intercept_mse),
        max_error=_floats(errors.abs().amax(0)),
        error_99=_floats(errors.abs().quantile(0.99, dim=0)),
        mass_mean=_floats(stream.mass_sum / stream.positions),
        mass_1=_floats(mass.quantile(0.01, dim=0)),
        mass_min=_floats(stream.mass_low),
        vectors=vectors.mT.contiguous(),
        biased=biased,
        positions=stream.positions,
        held_out_positions=stream.test.rows,
        hidden=d,
        vocabulary=n,
        excluded=excluded,
        perplexity=math.exp(min(stream.loss_sum / stream.predicted, 700.0)) if stream.predicted else None,
        split=_split(stream),
        sampled_values=values,
        sampled_log_z=log_z,
        sampled_places=places,
        sampled_numbers=numbers,
        geometry=atom_geometry(stream.weight, seed=seed) if geometry else None,
        clusters=_clusters(states, values, places, stream.top, anchors, biased, seed),
        notes=notes,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(
            time.perf_counter() - began, "one pass, float64 normal equations", stream.train.memory + stream.test.memory, notes
        ),
    )


def _residuals(states: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """values − ⟨h, v₀⟩ (N, tops), for vectors (d, tops) or, with the constant's coefficient last, (d + 1, tops)."""
    d = states.shape[1]
    found = values - torch.cat([part.double() @ vectors[:d] for part in states.split(1024)])
    return found if len(vectors) == d else found - vectors[d]


def _held_out(stream: ProbeStream, biased: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The errors of the fit on the first part on the second, and the variances there; NaN where one part is empty."""
    if not stream.train.rows or not stream.test.rows:
        return (math.nan,) * len(stream.top), (math.nan,) * len(stream.top)
    fit = stream.train.solve(intercept=biased)
    return _floats(_mean_squares(stream, fit, held_out=True)), _floats(stream.test.variance)


def _mean_squares(stream: ProbeStream, fit: Tensor, *, held_out: bool = False) -> Tensor:
    """The mean square errors (tops,) of a fit on all positions or those held out.

    From residuals while every position is at hand, since those are exact where differences of sums are rounding.
    """
    if not stream.sample.complete:
        return (stream.test if held_out else stream.train + stream.test).mse(fit)
    states, values, _, _, _, later = stream.sample.rows()
    chosen = later if held_out else torch.ones_like(later)
    return _residuals(states[chosen], values[chosen], fit).square().mean(0)


def _split(stream: ProbeStream) -> str:
    if not stream.test.rows:
        return "nothing held out"
    share = f"the last {100 * stream.held_out:g} %"
    return f"{share} of all positions" if stream.cut is not None else f"{share} of the positions of every batch"


def _clusters(
    states: Tensor, values: Tensor, places: Tensor, top: tuple[int, ...], anchors: int, biased: bool, seed: int
) -> tuple[AnchorClusters, ...]:
    """K anchors for each number of words removed, on the sample."""
    if anchors == 1:
        return ()
    if biased:
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
    return tuple(anchor_clusters(states, values[:, i], anchors, places=places, top=k, seed=seed) for i, k in enumerate(top))


def _floats(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.tolist())
