"""Is there an anchor vector? How well the log bulk partition function is a linear function of the hidden state."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from theodolite.arguments import about, checked, count, number_in, seed, sequence, whole
from theodolite.errors import NumericalWarning
from theodolite.interrupts import unbroken
from theodolite.measures.anchors.probing.geometry import AnchorClusters, AtomGeometry, anchor_clusters, atom_geometry
from theodolite.measures.anchors.probing.heads import OutputHead, find_head, states_of
from theodolite.measures.anchors.probing.inputs import Reading, Source, read, windows_for
from theodolite.measures.anchors.probing.streams import NormalEquations, ProbeStream
from theodolite.problem.arguments import a_model, as_finite_tensor
from theodolite.problem.calling import unwrap
from theodolite.problem.state_guard import left_as_found
from theodolite.problem.tensors import map_tensors, named_tensors
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row, fields_of

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
        return _shares(self.mse, self.variance)

    @property
    def held_out_r2(self) -> tuple[float, ...]:
        """The same for the held-out positions, with their own variance."""
        return _shares(self.held_out_mse, self.held_out_variance)

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
        bins = count("bins", bins)
        values = self.sampled_log_z if top is None else self.sampled_values[:, self._index(top)]
        found = torch.histogram(values.contiguous(), bins)
        return found.hist.long(), found.bin_edges

    def _index(self, top: int) -> int:
        if whole("top", top) not in self.top:
            raise ValueError(f"top={top} was not measured. Measured: {', '.join(map(str, self.top))}.")
        return self.top.index(top)

    def rows(self) -> list[Row]:
        shared = fields_of(self, "positions hidden vocabulary perplexity seed")
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


def _shares(errors: tuple[float, ...], variances: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(1 - e / v if v > 0 else math.nan for e, v in zip(errors, variances, strict=True))


@checked(
    states=sequence,
    weight=as_finite_tensor,
    bias=as_finite_tensor,
    anchors=count,
    held_out=number_in(least=0, below=1),
    chunk=count,
    sample=count,
    seed=seed,
)
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
    if weight.ndim != 2 or not weight.is_floating_point() or len(weight) < 2:
        raise ValueError(f"weight must be (n, d), floating, with two or more words. Got {weight.dtype} {tuple(weight.shape)}.")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must be ({len(weight)},), one number per word. Got {tuple(bias.shape)}.")
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    bias = None if bias is None else bias.detach().to(weight)
    states = torch.as_tensor(states) if hasattr(states, "__array__") else states
    if isinstance(states, Tensor) and states.ndim != 2:
        raise ValueError(f"states must be (N, d), or an iterable of such chunks. Got shape {tuple(states.shape)}.")
    total = len(states) if isinstance(states, Tensor) else None
    words = _words_that_came(targets, total)
    stream = ProbeStream(weight, bias, top, exclude, held_out=held_out, chunk=chunk, sample=sample, seed=seed, total=total)
    with unbroken(torch.no_grad()):
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
        raise ValueError("The data (or states) have no position to measure at: every one is padding, left out, or not there.")
    notes = (*notes, *_caveats(stream))
    sample = _Sample(*stream.sample.rows())
    numbers = _numbers(stream, sample)
    vectors = numbers.pop("vectors")
    columns: dict[str, Any] = {name: tuple(each.tolist()) for name, each in numbers.items()}
    return AnchorProbe(
        top=stream.top,
        vectors=vectors,
        **columns,
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


class _Part(NamedTuple):
    """Sums over some positions and, while every position is at hand, their states and values."""

    sums: NormalEquations
    rows: tuple[Tensor, Tensor] | None

    def fit(self, *, intercept: bool) -> Tensor:
        """The coefficients (d or d + 1, tops)."""
        return self.sums.solve(intercept=intercept, rows=self.rows)

    def mse(self, fit: Tensor) -> Tensor:
        """The mean square errors (tops,) of a fit, best from residuals: differences of sums are rounding where it is exact."""
        return self.sums.mse(fit) if self.rows is None else _residuals(*self.rows, fit).square().mean(0)


def _numbers(stream: ProbeStream, sample: _Sample) -> dict[str, Tensor]:
    """The anchors, their errors in sample and held out (NaN where one part is empty), what values and bulk masses are like."""

    def part(sums: NormalEquations, chosen: Tensor | slice) -> _Part:
        return _Part(sums, (sample.states[chosen], sample.values[chosen]) if stream.sample.complete else None)

    biased, sums = stream.bias is not None, stream.train + stream.test
    everything = part(sums, slice(None))
    vectors = everything.fit(intercept=biased)
    size = _residuals(sample.states, sample.values, vectors).abs()
    held_out = held_out_variance = torch.full((len(stream.top),), math.nan)
    if stream.train.rows and stream.test.rows:
        held_out = part(stream.test, sample.later).mse(part(stream.train, ~sample.later).fit(intercept=biased))
        held_out_variance = stream.test.variance
    words = len(stream.weight) - stream.excluded
    alike = torch.tensor([math.log(words - k) for k in stream.top], dtype=torch.float64)
    return {
        "vectors": vectors.mT.contiguous(),
        "mse": everything.mse(vectors),
        "intercept_mse": everything.mse(vectors if biased else everything.fit(intercept=True)),
        "held_out_mse": held_out,
        "held_out_variance": held_out_variance,
        "max_error": size.amax(0),
        "error_99": size.quantile(0.99, dim=0),
        "variance": sums.variance,
        "mean": sums.mean,
        "low": sums.low,
        "high": sums.high,
        "constant_mse": sums.constant_mse(alike),
        "mass_mean": stream.mass_sum / stream.positions,
        "mass_1": (sample.values - sample.log_z[:, None]).exp().quantile(0.01, dim=0),
        "mass_min": stream.mass_low,
    }


def _residuals(states: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """values − ⟨h, v₀⟩ (N, tops), for vectors (d, tops) or, with the constant's coefficient last, (d + 1, tops)."""
    d = states.shape[1]
    found = values - torch.cat([part.double() @ vectors[:d] for part in states.split(1024)])
    return found if len(vectors) == d else found - vectors[d]


def _split(stream: ProbeStream) -> str:
    if not stream.test.rows:
        return "nothing held out"
    where = "all positions" if stream.cut is not None else "the positions of every batch"
    return f"the last {100 * stream.test.rows / stream.positions:.3g} % of {where}"


def _clusters(sample: _Sample, top: tuple[int, ...], anchors: int, biased: bool, seed: int) -> tuple[AnchorClusters, ...]:
    """K anchors for each number of words removed, on the sample."""
    if anchors == 1:
        return ()
    states, values, places = sample.states, sample.values, sample.places
    if biased:
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
    return tuple(anchor_clusters(states, values[:, i], anchors, places=places, top=k, seed=seed) for i, k in enumerate(top))


# The anchor probe of a whole model: run it over the data, catch what enters the output layer, hand it to the stream.


@checked(
    model=a_model,
    anchors=count,
    held_out=number_in(least=0, below=1),
    context=count,
    stride=count,
    drop_first=whole,
    max_positions=count,
    batch_size=count,
    restrict_vocab=count,
    chunk=count,
    mask_token=whole,
    every=count,
    sample=count,
    seed=seed,
)
def anchor_probe(
    model: nn.Module,
    data: Any,
    *,
    top: int | Iterable[int] | None = None,
    tokenizer: Any = None,
    head: str | nn.Module | None = None,
    exclude: int | Iterable[int] | Tensor | None = None,
    anchors: int = 1,
    held_out: float = 0.2,
    context: int | None = None,
    stride: int | None = None,
    drop_first: int = 0,
    max_positions: int | None = None,
    batch_size: int | None = None,
    restrict_vocab: int | None = None,
    chunk: int | None = None,
    mask_token: int | None = None,
    every: int = 7,
    geometry: bool = True,
    sample: int | None = None,
    seed: int = 0,
    progress: bool | None = False,
) -> AnchorProbe:
    """Whether the log bulk partition function of a language model is linear in its last hidden state: ⟨h, v₀⟩ ≈ log Z_bulk.

    h is what enters the output layer, whatever the model does before. The model runs in eval mode, once over the data, and is
    left as found; logits are computed in float32 or better and never held for more than a chunk of positions; sums are in
    float64. Memory does not grow with the data.

    Args:
        model: a Hugging Face causal or masked language model or encoder-decoder, or any module with a linear output layer.
        data: text (with `tokenizer`), token ids (N,) or (B, T), or batches (tensors, pairs (inputs, targets), mappings) from a
            list, a DataLoader or any iterable; numbers may also be in lists or NumPy arrays, and a list of ids (N,) is one of
            texts. Text is cut into windows. A masked model sees each window `every` times, with each `every`-th token replaced by
            `mask_token`; an encoder-decoder reads half of a window and predicts the other half. A tuple of two tensors is always
            (inputs, targets), also if both are token ids: put two batches of ids into a list. The targets of a pair are taken as
            they are, one per position (−100: leave it out), not shifted; ids alone, and `labels` in mappings for a causal model,
            are.
        top: numbers of most probable words to remove; by default 0, 10, 100, 1000, 10000, or the same shares of other
            vocabularies.
        head: the output layer or its name, where it is not found by itself.
        exclude: token numbers that are in no bulk (label words), or a mask over the vocabulary. The bulk is what is neither
            excluded nor among the most probable of all words, excluded ones counted.
        anchors: with K > 1 also K anchors, each for a cluster of positions (`AnchorProbe.clusters`).
        held_out: the share of the positions, the last ones, that the held-out error is from; of each batch where the length of
            the data is not known beforehand. Windows of a masked model are held out as a whole.
        context, stride: length of the windows that running text is cut into (the model's own, at most 1024) and distance of their
            starts (the length; less, and only new positions count). Rows (B, T) and batches stay as they are.
        drop_first: positions to leave out at the start of each window or sequence.
        max_positions: stop after so many.
        batch_size: windows, or samples of other inputs, per forward pass; rows of windows for a masked model.
        restrict_vocab: use only so many rows of the output layer (`len(tokenizer)` leaves out padding rows).
        chunk: positions whose logits are held at a time.
        sample: positions kept for quantiles, largest errors and clusters; 8192 where they take at most 2²⁵ numbers.

    Returns:
        An `AnchorProbe`: the fit, its errors and controls, rows by position, `.plot()`.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 50))
    >>> probe = anchor_probe(model, torch.randn(400, 6), top=(0, 5))
    >>> probe.positions, probe.biased, tuple(probe.vectors.shape)
    (400, True, (2, 9))
    """
    began = time.perf_counter()
    model = unwrap(model)
    windows = windows_for(model, tokenizer, context, stride, drop_first, batch_size, mask_token, every)
    with left_as_found(model, "eval"), torch.no_grad(), _outside_embeddings(model):
        with about("data"):
            refuse_meta(data)
            source = read(model, data, windows, tokenizer)
        readings = _placed(source, model)
        first = next(readings, None)
        if first is None:
            raise ValueError("data is empty: give at least one batch.")
        layer = find_head(model, *first.glance(), head)
        if hasattr(tokenizer, "__len__") and len(tokenizer) > len(layer.weight):
            raise ValueError(
                f"The tokenizer knows {len(tokenizer)} tokens, but the output layer has {len(layer.weight)} rows: it is not that "
                "of this model. Load both from one checkpoint, or resize the model's embeddings."
            )
        with about("restrict_vocab"):
            layer = layer.restricted(restrict_vocab)
        caught = states_of(model, layer.module, first.args, first.kwargs, layer.call)
        total = _length(source, first, math.prod(caught.shape[:-1]))
        total = total if total is None or max_positions is None else min(total, max_positions)
        _check_places(first, caught, drop_first)
        known: dict[str, Any] = {"total": total, "ends": source.ends, "cap": layer.cap}
        given: dict[str, Any] = {"held_out": held_out, "chunk": chunk, "sample": sample, "seed": seed}
        stream = ProbeStream(layer.weight, layer.bias, top, exclude, **given, **known)
        with counting("positions", progress=progress, total=total) as advance:
            for reading, entered in _passes(model, layer, first, caught, readings):
                states, targets, places = _wanted(layer, reading, entered, _room(stream, max_positions))
                stream.add(states, targets, places)
                advance(len(states))
                if _room(stream, max_positions) == 0:
                    break
    return summarise(stream, anchors, geometry, seed, began, layer.notes)


def refuse_meta(data: Any) -> None:
    """Raise for a tensor without values."""
    if any(t.is_meta for _, t in named_tensors(data)):
        raise ValueError("a tensor lies on the meta device and has no values; load the data first.")


@contextmanager
def _outside_embeddings(model: nn.Module) -> Iterator[None]:
    """Torch's word for a number that has no row in an embedding is no help."""
    try:
        yield
    except IndexError as error:
        if "index out of range" not in str(error):
            raise
        tables = ", ".join(f"{name} {m.num_embeddings}" for name, m in model.named_modules() if isinstance(m, nn.Embedding))
        raise ValueError(
            f"A token or a position lies outside the embeddings of {type(model).__name__} (rows: {tables or 'unknown'}). Encode "
            "the text with the model's own tokenizer; context= shortens the windows."
        ) from error


def _placed(source: Source, model: nn.Module) -> Iterator[Reading]:
    """Readings on the device of the model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(tree: Any) -> Any:
        return map_tensors(lambda t: t.to(device), tree)

    for r in source:
        yield Reading(move(r.args), dict(move(r.kwargs)), move(r.keep), move(r.targets))


def _passes(
    model: nn.Module, layer: OutputHead, first: Reading, caught: Tensor, readings: Iterator[Reading]
) -> Iterator[tuple[Reading, Tensor]]:
    """Readings with what enters the head; that of the first is known already."""
    yield first, caught
    del first, caught
    for reading in readings:
        yield reading, states_of(model, layer.module, reading.args, reading.kwargs, layer.call)


def _room(stream: ProbeStream, limit: int | None) -> int | None:
    return None if limit is None else limit - stream.positions


def _wanted(layer: OutputHead, reading: Reading, caught: Tensor, room: int | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """States (N, d), targets and places in the windows of the positions of a reading that are wanted, `room` at most."""
    shape = caught.shape[:-1]
    places = torch.arange(shape[-1], device=caught.device).expand(shape).reshape(-1)
    states, targets, keep = layer.states(caught), _aligned(reading.targets, shape), _aligned(reading.keep, shape)
    if keep is not None:
        states, places, targets = states[keep], places[keep], None if targets is None else targets[keep]
    return states[:room], None if targets is None else targets[:room], places[:room]


def _length(source: Source, first: Reading, positions: int) -> int | None:
    """Positions that the data will give, judged by the first reading, which has so many before any is left out.

    None if it does not tell. Only readings that can be looked at twice are asked.
    """
    if source.total is not None and _per_position(first, positions):
        return source.total
    if source.total is None and source.samples is None:
        return None
    readings = list(source)
    if not _per_position(first, positions) and positions == first.samples:  # one state per sequence
        return sum(r.samples for r in readings)
    if all(r.keep is None for r in readings):
        widths = {tuple(t.shape[1:]) for r in readings for _, t in named_tensors((r.args, r.kwargs)) if t.ndim}
        return round(sum(r.samples for r in readings) * positions / first.samples) if len(widths) == 1 else None
    if first.keep is not None and first.keep.numel() == positions and all(r.keep is not None for r in readings):
        return sum(int(r.keep.sum()) for r in readings if r.keep is not None)
    return None


def _per_position(reading: Reading, positions: int) -> bool:
    """Whether there are as many states as positions that the reading speaks of."""
    spoken = reading.targets if reading.targets is not None else reading.keep
    return spoken is not None and spoken.numel() == positions


def _check_places(reading: Reading, caught: Tensor, drop_first: int) -> None:
    if drop_first and reading.keep is not None and _aligned(reading.keep, caught.shape[:-1]) is None:
        raise ValueError(
            f"drop_first={drop_first} leaves out positions of sequences {tuple(reading.keep.shape)}, but the head reads "
            f"{tuple(caught.shape)}, not a state for each of them: leave it out."
        )


def _aligned(tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """One entry per position, flat; None where the tensor is about something else."""
    return tensor.reshape(-1) if tensor is not None and tensor.numel() == math.prod(shape) else None
