"""Is there an anchor vector? How well the log bulk partition function is a linear function of the hidden state."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.errors import NumericalWarning
from theodolite.measures.anchors.probing.geometry import AnchorClusters, AtomGeometry, anchor_clusters, atom_geometry
from theodolite.measures.anchors.probing.streams import NormalEquations, ProbeStream
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
    mean, `constant_mse` that of predicting the logarithm of the number of bulk words, vocabulary − excluded − top (all words
    alike), `intercept_mse` that of a fit with intercept. A bulk has the words that are neither among the `top` most probable of
    all nor excluded. `vectors` (tops, d) hold the anchors; where the head has a bias, states are [h; 1] and v₀ has d + 1
    entries (`biased`). `bulk_mass` is Z_bulk/Z. Largest and 99 % errors, quantiles and histograms are those of a uniform
    `sample` of positions; where it holds all positions they are exact, and so is the mean square error at any precision.
    Directions along which the states, scaled to one length per coordinate, reach less than a millionth of their largest count as
    absent: anchors have no part there, so among several that fit alike it is the shortest in these scaled coordinates.
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

    @property
    def enough(self) -> bool:
        """Whether there are positions enough, ten per dimension, for the error in sample to say something."""
        return self.positions >= ENOUGH * self.hidden

    def sentence(self) -> str:
        i = self.spoken
        what = f"the log bulk partition function (top {self.top[i]} removed)" if self.top[i] else "the log partition function"
        outside = f", held out {self.held_out_mse[i]:.3g}" if math.isfinite(self.held_out_mse[i]) else ""
        without = f", against {self.mse[0]:.3g} without removing them" if i and self.top[0] == 0 else ""
        numbers = f"mean square error {self.mse[i]:.3g}{outside}{without}; {self.positions} positions, {self.vocabulary} words"
        share, where, variance = self.r2[i], "", self.variance[i]
        if not self.enough:
            share, where, variance = self.held_out_r2[i], " at the positions held out", self.held_out_variance[i]
        if math.isnan(share) and not self.enough:
            few = f"{self.positions} positions are too few for {self.hidden} dimensions"
            return f"Whether an anchor vector predicts {what} is open, {few}: {numbers}."
        if share > 0:
            return f"An anchor vector explains {100 * share:.3g} % of the variance of {what}{where}: {numbers}."
        return f"No anchor vector predicts {what}{where} better than its mean does (variance {variance:.3g}): {numbers}."


def _r2(mse: float, variance: float) -> float:
    return 1 - mse / variance if variance > 0 else math.nan


def probe_states(
    states: Tensor | Iterable[Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top: int | Iterable[int] | None = None,
    exclude: int | Iterable[int] | Tensor | None = None,
    anchors: int = 1,
    held_out: float = 0.2,
    chunk: int | None = None,
    targets: Tensor | None = None,
    geometry: bool = True,
    sample: int | None = None,
    seed: int = 0,
) -> AnchorProbe:
    """The anchor probe of a log-linear model given by its states and its output layer.

    Args:
        states: (N, d), or an iterable of such chunks, read once.
        weight, bias: the output layer (n, d), (n,); logits are states · weightᵀ + bias, in float32 or the precision given.
        targets: the words (N,) that came, for the perplexity, −100 where none did.

    The other parameters are those of `anchor_probe`.

    >>> h = torch.cat([torch.randn(500, 3), torch.ones(500, 1)], dim=1).double()
    >>> atoms = torch.randn(1, 4).double().expand(20, 4)    # one atom 20 times: log Z = ⟨h, v⟩ + log 20
    >>> probe = probe_states(h, atoms, top=0, geometry=False)
    >>> probe.mse[0] < 1e-18
    True
    """
    began = time.perf_counter()
    weight, bias = _output_layer(weight, bias)
    states = torch.as_tensor(states) if hasattr(states, "__array__") else states
    if isinstance(states, Tensor) and states.ndim != 2:
        raise ValueError(f"states must be (N, d), or an iterable of such chunks. Got shape {tuple(states.shape)}.")
    total = len(states) if isinstance(states, Tensor) else None
    words = _words_that_came(targets, total)
    stream = ProbeStream(weight, bias, top, exclude, held_out=held_out, chunk=chunk, sample=sample, seed=seed, total=total)
    with torch.no_grad():
        for part in [states] if isinstance(states, Tensor) else states:
            if not isinstance(part, Tensor) or part.ndim != 2 or part.shape[1] != weight.shape[1]:
                got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"states must be tensors (N, {weight.shape[1]}), as wide as the weight's rows. Got {got}.")
            seen = stream.positions
            if words is not None and len(words) < seen + len(part):
                raise ValueError(f"targets must hold one word per state. Got {len(words)} for {seen + len(part)} or more states.")
            stream.add(part.to(weight), None if words is None else words[seen : seen + len(part)])
    if words is not None and len(words) != stream.positions:
        raise ValueError(f"targets must hold one word per state. Got {len(words)} for {stream.positions} states.")
    return summarise(stream, anchors, geometry, seed, began, ())


def _words_that_came(targets: Tensor | None, total: int | None) -> Tensor | None:
    if targets is None:
        return None
    words = torch.as_tensor(targets)
    if words.ndim != 1 or words.is_floating_point() or words.dtype == torch.bool or (total is not None and len(words) != total):
        want = "(N,)" if total is None else f"({total},)"
        raise ValueError(f"targets must be whole numbers {want}, one word per state. Got {words.dtype} {tuple(words.shape)}.")
    return words.long()


def _output_layer(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    weight, bias = torch.as_tensor(weight), None if bias is None else torch.as_tensor(bias)
    if weight.ndim != 2 or not weight.is_floating_point() or len(weight) < 2:
        raise ValueError(f"weight must be (n, d), floating, with two or more words. Got {weight.dtype} {tuple(weight.shape)}.")
    exact = torch.promote_types(weight.dtype, torch.float32)
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must be ({len(weight)},), one number per word. Got {tuple(bias.shape)}.")
    return weight.detach().to(exact), None if bias is None else bias.detach().to(weight.device, exact)


class _Sample(NamedTuple):
    """The positions that a stream has kept, a row each; `later` marks those held out."""

    states: Tensor
    values: Tensor
    log_z: Tensor
    places: Tensor
    numbers: Tensor
    later: Tensor


def summarise(stream: ProbeStream, anchors: int, geometry: bool, seed: int, began: float, notes: tuple[str, ...]) -> AnchorProbe:
    """Solve, and put the numbers together."""
    if not stream.positions:
        raise ValueError("data has no position to measure at: every one is padding, left out, or not there.")
    notes = (*notes, *_caveats(stream))
    sample = _Sample(*stream.sample.rows())
    return AnchorProbe(
        top=stream.top,
        **_errors(stream, sample),
        **_values(stream, sample),
        biased=stream.bias is not None,
        positions=stream.positions,
        held_out_positions=stream.test.rows,
        hidden=stream.weight.shape[1],
        vocabulary=len(stream.weight),
        excluded=stream.excluded,
        perplexity=math.exp(min(stream.loss_sum / stream.predicted, 700.0)) if stream.predicted else None,
        split=_split(stream),
        sampled_values=sample.values,
        sampled_log_z=sample.log_z,
        sampled_places=sample.places,
        sampled_numbers=sample.numbers,
        geometry=atom_geometry(stream.weight, seed=seed) if geometry else None,
        clusters=_clusters(sample, stream.top, anchors, stream.bias is not None, seed),
        notes=notes,
        outcome=Outcome.FINISHED,
        seed=seed,
        cost=Cost(
            time.perf_counter() - began, "one pass, float64 normal equations", stream.train.memory + stream.test.memory, notes
        ),
    )


def _caveats(stream: ProbeStream) -> list[str]:
    """What to know about the numbers, with a warning where there are too few positions."""
    found, d = [], stream.weight.shape[1]
    if stream.positions < ENOUGH * d:
        share = f"{d / stream.positions:.0%}"
        found.append(f"{stream.positions} positions for {d} dimensions: the in-sample error is too small by about {share}")
        warnings.warn(
            f"{found[0]}; look at the held-out error, or give at least {ENOUGH * d} positions.", NumericalWarning, stacklevel=4
        )
    if not stream.sample.complete:
        found.append(f"quantiles and largest errors are those of {len(stream.sample)} of {stream.positions} positions")
    return found


def _errors(stream: ProbeStream, sample: _Sample) -> dict[str, Any]:
    """The anchors and their errors, in sample and held out (NaN where one part is empty)."""
    biased, everywhere = stream.bias is not None, slice(None)
    sums = stream.train + stream.test
    vectors = _fit(stream, sample, sums, everywhere, intercept=biased)
    with_intercept = vectors if biased else _fit(stream, sample, sums, everywhere, intercept=True)
    size = _residuals(sample.states, sample.values, vectors).abs()
    held_out = held_out_variance = (math.nan,) * len(stream.top)
    if stream.train.rows and stream.test.rows:
        first = _fit(stream, sample, stream.train, ~sample.later, intercept=biased)
        held_out = _floats(_mean_squares(stream, sample, stream.test, sample.later, first))
        held_out_variance = _floats(stream.test.variance)
    return {
        "vectors": vectors.mT.contiguous(),
        "mse": _floats(_mean_squares(stream, sample, sums, everywhere, vectors)),
        "intercept_mse": _floats(_mean_squares(stream, sample, sums, everywhere, with_intercept)),
        "held_out_mse": held_out,
        "held_out_variance": held_out_variance,
        "max_error": _floats(size.amax(0)),
        "error_99": _floats(size.quantile(0.99, dim=0)),
    }


def _values(stream: ProbeStream, sample: _Sample) -> dict[str, Any]:
    """What the log bulk partition functions and the bulk masses are like."""
    sums, mass = stream.train + stream.test, (sample.values - sample.log_z[:, None]).exp()
    words = len(stream.weight) - stream.excluded
    alike = torch.tensor([math.log(words - k) for k in stream.top], dtype=torch.float64)
    return {
        "variance": _floats(sums.variance),
        "mean": _floats(sums.mean),
        "low": _floats(sums.low),
        "high": _floats(sums.high),
        "constant_mse": _floats(sums.constant_mse(alike)),
        "mass_mean": _floats(stream.mass_sum / stream.positions),
        "mass_1": _floats(mass.quantile(0.01, dim=0)),
        "mass_min": _floats(stream.mass_low),
    }


def _fit(stream: ProbeStream, sample: _Sample, sums: NormalEquations, chosen: Tensor | slice, *, intercept: bool) -> Tensor:
    """The coefficients (d or d + 1, tops), from the sums of the positions `chosen` and, while they are at hand, from these."""
    rows = (sample.states[chosen], sample.values[chosen]) if stream.sample.complete else None
    return sums.solve(intercept=intercept, rows=rows)


def _mean_squares(stream: ProbeStream, sample: _Sample, sums: NormalEquations, chosen: Tensor | slice, fit: Tensor) -> Tensor:
    """The mean square errors (tops,) of a fit on the positions `chosen`.

    From residuals while every position is at hand, since those are exact where differences of sums are rounding.
    """
    if not stream.sample.complete:
        return sums.mse(fit)
    return _residuals(sample.states[chosen], sample.values[chosen], fit).square().mean(0)


def _residuals(states: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """values − ⟨h, v₀⟩ (N, tops), for vectors (d, tops) or, with the constant's coefficient last, (d + 1, tops)."""
    d = states.shape[1]
    found = values - torch.cat([part.double() @ vectors[:d] for part in states.split(1024)])
    return found if len(vectors) == d else found - vectors[d]


def _split(stream: ProbeStream) -> str:
    if not stream.test.rows:
        return "nothing held out"
    share = f"the last {100 * stream.test.rows / stream.positions:.3g} %"
    return f"{share} of all positions" if stream.cut is not None else f"{share} of the positions of every batch"


def _clusters(sample: _Sample, top: tuple[int, ...], anchors: int, biased: bool, seed: int) -> tuple[AnchorClusters, ...]:
    """K anchors for each number of words removed, on the sample."""
    if anchors == 1:
        return ()
    states, values, places = sample.states, sample.values, sample.places
    if biased:
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
    return tuple(anchor_clusters(states, values[:, i], anchors, places=places, top=k, seed=seed) for i, k in enumerate(top))


def _floats(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.tolist())
