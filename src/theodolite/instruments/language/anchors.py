"""Has a language model an anchor vector, so that its logits can be compared across contexts?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.errors import NonFiniteError, NumericalWarning
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import subset
from theodolite.interrupts import unbroken
from theodolite.measures.anchors import AnchorProbe, OutputHead, anchor_probe, find_head
from theodolite.measures.anchors.probing.inputs import IGNORED, POSITIONS, read, windows_for
from theodolite.measures.anchors.probing.probe import ENOUGH
from theodolite.problem import Batch, Problem
from theodolite.problem.state_guard import left_as_found
from theodolite.problem.tensors import named_tensors
from theodolite.results import Finding, Severity
from theodolite.text import plural

SOURCE = "Wu (2023), thesis, chapter 3: anchor vectors, and which downstream tasks provably benefit from pre-training."
#: Shares of the held-out variance from which an anchor is one, and from which it is a weak one.
STRONG, WEAK = 0.9, 0.5
#: A log bulk partition function whose standard deviation is below this needs no anchor: shifts are below 10 % in probability.
#: An anchor whose error is below it is as good.
FLAT = 0.1
#: A share of the variance that the first positions of windows must make up to be mentioned.
FIRSTS = 0.5
#: Positions per dimension below which a held-out error says nothing.
FEWEST = 3


def anchor_findings(probe: AnchorProbe) -> list[Finding]:
    """What a probe means: whether there is an anchor, and what stands in its way; the verdict comes first."""
    more = [several_anchors(probe)] if probe.clusters else []
    more += [atoms(probe)] if probe.geometry is not None else []
    return [verdict(probe), *first_positions(probe), bulk_mass(probe), *more]


def verdict(probe: AnchorProbe) -> Finding:
    """Whether the log bulk partition function is linear in the state, by the held-out error where there is one."""
    i = probe.spoken
    held = math.isfinite(probe.held_out_mse[i])
    mse = probe.held_out_mse[i] if held else probe.mse[i]
    variance = probe.held_out_variance[i] if held else probe.variance[i]
    share = (probe.held_out_r2 if held else probe.r2)[i]
    where = f"{probe.held_out_positions} held-out" if held else f"{probe.positions} fitted"
    if math.sqrt(variance) < FLAT:
        text = (
            f"The logarithm of the {_bulk(probe, i)} hardly varies between contexts: its mean is {probe.mean[i]:.3g} and its "
            f"standard deviation {math.sqrt(variance):.2g} on {where} positions. A constant is its anchor."
        )
        advice = "Logits of label words can be compared across contexts as they are."
        spread = ("standard deviation of the log bulk partition function", math.sqrt(variance))
        return found(Severity.NOTE, text, "constant partition", *spread, advice=advice, headline=True)
    beside = (
        f"the root mean square error is {math.sqrt(mse):.3g} on {where} positions, where its mean would err by "
        f"{math.sqrt(variance):.3g} and taking all words as alike by {math.sqrt(probe.constant_mse[i]):.3g}"
    )
    few = probe.positions < ENOUGH * probe.hidden
    note = f" ({probe.positions} positions are few for {probe.hidden} dimensions)" if few else ""
    quantity = "share of the variance explained" + (", held out" if held else "")
    explained = (quantity, share, abs(share - probe.r2[i]) if held else None)
    if share >= STRONG or (share >= WEAK and math.sqrt(mse) < FLAT):
        text = (
            f"There is an anchor vector: it predicts the logarithm of the {_bulk(probe, i)} from the last hidden state and "
            f"explains {100 * share:.3g} % of its variance; {beside}{note}."
        )
        return found(Severity.GOOD, text, "anchor vector", *explained, advice=USE_IT, headline=True)
    if share >= WEAK:
        text = (
            f"There is a weak anchor vector: it explains {100 * share:.3g} % of the variance of the logarithm of the "
            f"{_bulk(probe, i)}; {beside}{note}.{_others(probe, i)}"
        )
        return found(Severity.NOTE, text, "weak anchor", *explained, advice=CALIBRATE, headline=True)
    what = f"the logarithm of the {_bulk(probe, i)}"
    fit = f"predicts {what} worse than its mean does"
    if share >= 0:
        fit = f"explains only {100 * share:.2g} % of the variance of {what}"
    text = f"There is no anchor vector: a linear function of the last hidden state {fit}; {beside}{note}.{_others(probe, i)}"
    return found(Severity.NOTE, text, "no anchor", *explained, advice=NOT_COMPARABLE, headline=True)


USE_IT = (
    "Read label words by anchored logits, ⟨h, v_j − v₀⟩: they estimate log p(word)/p(bulk), and no common shift of the logits "
    "moves them."
)
CALIBRATE = (
    "Anchored logits take away most of the common shift of the logits, not all: set thresholds of a prompt-based classifier "
    "on unlabelled text of the task, or compare log-probabilities."
)
NOT_COMPARABLE = (
    "Logits of label words are not comparable across contexts: compare words within one context, or use log-probabilities, "
    "calibrated on unlabelled text of the task."
)


def _bulk(probe: AnchorProbe, i: int) -> str:
    """The bulk partition function in words."""
    most = "the most probable word" if probe.top[i] == 1 else f"the {probe.top[i]} most probable words"
    removed = [f"{most} of each context"] * bool(probe.top[i])
    removed += [plural(probe.excluded, "excluded word")] * bool(probe.excluded)
    return f"bulk partition function (without {' and '.join(removed)})" if removed else "partition function"


def _others(probe: AnchorProbe, i: int) -> str:
    """What else would do better: an intercept, or another number of words removed."""
    text = ""
    with_intercept = 1 - probe.intercept_mse[i] / probe.variance[i]
    if with_intercept >= max(WEAK, probe.r2[i] + 0.1):
        text += f" With an intercept it would be {100 * with_intercept:.3g} % (in sample): the states hold no constant direction."
    shares = probe.held_out_r2 if math.isfinite(probe.held_out_mse[i]) else probe.r2
    best = max(range(len(shares)), key=lambda j: shares[j])
    if best != i and shares[best] >= max(WEAK, shares[i] + 0.1):
        mass = f"where the bulk holds {_percent(probe.mass_mean[best])} of the probability"
        text += f" Without the {probe.top[best]} most probable words it is {100 * shares[best]:.3g} %, {mass}."
    return text


def _percent(share: float) -> str:
    """A share as a percentage.

    >>> _percent(0.25), _percent(3e-7)
    ('25 %', '3e-05 %')
    """
    return f"{100 * share:.2g} %"


def first_positions(probe: AnchorProbe) -> list[Finding]:
    """Whether the beginnings of windows, a known outlier state, are what varies."""
    i = probe.spoken
    values, first = probe.sampled_values[:, i], probe.sampled_places == 0
    if int(first.sum()) < 1 or int((~first).sum()) < 2:
        return []
    whole, rest = float(values.var(correction=0)), float(values[~first].var(correction=0))
    share = 1 - rest / whole if whole > 0 else 0.0
    if share < FIRSTS:
        return []
    text = (
        f"First positions of windows make up {100 * share:.3g} % of the variance of the log bulk partition "
        f"function: their mean is {float(values[first].mean()):.3g}, that of all others {float(values[~first].mean()):.3g} with "
        f"the standard deviation {math.sqrt(rest):.3g}."
    )
    advice = "A share of explained variance flatters the anchor here: leave first positions out with drop_first=1 (--drop-first)."
    due = ("share of the variance due to first positions", share)
    return [found(Severity.NOTE, text, "first positions", *due, advice=advice)]


def bulk_mass(probe: AnchorProbe) -> Finding:
    """How much probability the bulk holds."""
    i = probe.spoken
    each = ", ".join(f"{_percent(mass)} without {k}" for k, mass in zip(probe.top, probe.mass_mean, strict=True) if k)
    if not probe.top[i] and not probe.excluded:
        text = "The bulk is the whole vocabulary where nothing is removed" + (f"; on average it holds {each}." if each else ".")
        return found(Severity.NOTE, text, "bulk mass", "mean bulk mass", 1.0)
    text = (
        f"The {_bulk(probe, i).replace('partition function ', '')} holds {_percent(probe.mass_mean[i])} of the probability on "
        f"average, {_percent(probe.mass_1[i])} in the most confident 1 % of the contexts and at least "
        f"{_percent(probe.mass_min[i])}. By words removed: {each}."
    )
    advice = ""
    if probe.mass_1[i] < 0.01 and probe.top[i]:
        advice = "Too little for a transfer certificate: there, exclude the label words (exclude=, --exclude) instead of the top."
    return found(Severity.NOTE, text, "bulk mass", "mean bulk mass", probe.mass_mean[i], advice=advice)


def several_anchors(probe: AnchorProbe) -> Finding:
    """Whether positions fall into clusters with anchors of their own."""
    clusters = probe.clusters[probe.spoken]
    text = clusters.sentence()
    starts = [row["first_places"] for row in clusters.rows()]
    if max(starts) > 0.5:
        text += f" Cluster {starts.index(max(starts)) + 1} is the first positions of windows."
    advice = "" if clusters.by == "state" else "Clusters by value describe; they are not known at inference."
    ratio = clusters.overall_mse / clusters.joint_mse if clusters.joint_mse > 0 else None
    quantity = "error of several anchors over that of one"
    return found(Severity.NOTE, text, "several anchors", quantity, ratio, advice=advice)


def atoms(probe: AnchorProbe) -> Finding:
    """How the rows of the output layer lie; the error is that of a mean over random pairs."""
    geometry = probe.geometry
    assert geometry is not None
    cosine = ("mean cosine of two atoms", geometry.cosine_mean, geometry.cosine_std / math.sqrt(geometry.pairs))
    return found(Severity.NOTE, geometry.sentence(), "atoms", *cosine)


def certificate_needs(probe: AnchorProbe) -> Finding:
    """What a transfer certificate would need beyond a probe, and whether it could say anything with this anchor."""
    i = probe.spoken
    largest, sure = probe.max_error[i], "" if probe.exact else f", in a sample of {probe.sample}"
    text = (
        "A transfer certificate bounds the downstream error of a student by its divergence from a teacher; a probe of one model "
        "gives none, and without a student it is neither vacuous nor not. It needs the logits of both on the same contexts, "
        "label words with coefficients and thresholds, and a margin. The largest error of this anchor is "
        f"{largest:.3g}{sure}, so the normalised margin Γ would have to be above {4 * largest:.3g}, and above {8 * largest:.3g} "
        f"and below 6 for the theorem itself: {'it cannot apply here' if 8 * largest >= 6 else 'that is possible'}."
    )
    advice = (
        "Where there is a student: theodolite.measures.anchors.transfer_certificate(teacher, student, labels=..., a=..., b=...)."
    )
    return found(Severity.NOTE, text, "certificate", "largest error of the anchor", largest, advice=advice)


# The survey's instrument


class Anchors(Instrument):
    name = "anchors"
    order = 170
    title = "Anchor vector"
    question = (
        "Is the log bulk partition function linear in the last hidden state, so that logits can be compared across contexts?"
    )
    how = (
        "What enters the output layer is caught at every position, in eval mode. For each context the logarithm of the sum of "
        "exp(logits) over all words but the most probable ones is fitted by a linear function of it, by least squares in float64 "
        "on the first 80 % of the positions; errors are those on the rest. The error of the explained share is how far the value "
        "in sample lies from it. Variance is that of predicting the mean."
    )
    source = SOURCE
    efforts = ({"positions": 16384}, {"positions": 4096}, {"positions": 1024})
    columns: ClassVar[Mapping[str, str]] = {
        "top": "words removed", "mse": "error in sample", "held_out_mse": "held out", "intercept_mse": "with intercept",
        "variance": "variance", "constant_mse": "all words alike", "r2": "R²", "held_out_r2": "R² held out",
        "max_error": "largest error", "mass_mean": "bulk mass",
    }  # fmt: skip

    def concerns(self, context: SurveyContext) -> bool:
        """Only for models that read tokens and have as many outputs as tokens."""
        return is_language_model(context.problem)

    def applies(self, context: SurveyContext) -> str:
        if not self.concerns(context):
            return "the model is no language model: tokens in, a logit for each token of the vocabulary out"
        try:
            subset(context.problem, 1)
            head = head_of(context.problem)
        except (ValueError, TypeError) as error:  # no linear head, or weights were given batch by batch
            return str(error)
        positions, d = context.problem.samples * positions_per_sample(context.problem), head.weight.shape[1]
        few = f"{positions:.0f} positions are too few for {d} dimensions: {FEWEST * d} are needed"
        return few if positions < FEWEST * d else ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        n, d = head_of(context.problem).weight.shape
        total = context.problem.samples * positions_per_sample(context.problem)
        positions = min(max(effort["positions"], FEWEST * d), total)
        # A logit takes about 15 ns beside its product; then the Gram matrices and the cosines of 100,000 pairs.
        seconds = 0.02 + positions * n * (1.5e-8 + 5e-11 * d) + 1e-10 * (positions + n) * d**2 + 3e-10 * d**3 + 4e-4 * d
        held = 4 * d * min(positions, 8192) + 3 * 4 * 2**22 + 5 * 8 * d**2
        return Work(gradients=0.4 * positions / total, seconds=seconds, bytes=int(held))

    @inapplicable(NonFiniteError, ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> AnchorProbe:
        problem = context.problem
        wanted = max(effort["positions"], FEWEST * head_of(problem).weight.shape[1])  # more where states are large
        per_sample = positions_per_sample(problem)
        part = subset(problem, max(1, math.ceil(wanted / per_sample)))
        batches: Any = [_raw(small) for batch in part.data for small in _small(batch)]
        if per_sample < _width(next(iter(part.data))):  # some positions do not count, so how many there are shows only at the end
            batches = iter(batches)
        with unbroken(warnings.catch_warnings()):
            warnings.simplefilter("ignore", NumericalWarning)  # the same stands in the notes
            return anchor_probe(problem.model, batches, seed=context.seed)

    def findings(self, context: SurveyContext, result: AnchorProbe) -> list[Finding]:
        return anchor_findings(result)

    def figure(self, results: Results) -> Picture:
        return th.plots.plot_anchor_probe(results[self.name])


found = Anchors().found


def is_language_model(problem: Problem) -> bool:
    """Tokens in, and a matrix with a row for each of them at the output: by shapes alone, nothing is run."""
    batch = next(iter(problem.data))
    tensors = [t for _, t in named_tensors((batch.args, batch.kwargs)) if t.ndim]
    if not tensors or any(t.is_floating_point() and t.ndim > 1 for t in tensors) or len(batch.args) > 1:
        return False
    if not any(t.ndim == 2 and not t.is_floating_point() and t.dtype != torch.bool for t in tensors):
        return False
    return any(isinstance(m, nn.Linear) and m.out_features in _vocabularies(problem.model) for m in problem.model.modules())


def _vocabularies(model: nn.Module) -> set[int]:
    return {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}


def head_of(problem: Problem) -> OutputHead:
    """The output layer, from a look at one sample."""
    model = problem.model
    batch = problem.placed(next(iter(problem.data)).part(slice(0, 1)))
    with left_as_found(model, "eval"), torch.no_grad():
        reading = next(iter(read(model, [_raw(batch)], windows_for(model))))
        head = find_head(model, *reading.glance())
    if len(head.weight) not in _vocabularies(model):
        raise ValueError(f"the output layer has {len(head.weight)} rows, which is no vocabulary that the model embeds")
    return head


def positions_per_sample(problem: Problem) -> float:
    """How many positions of a sample are looked at, by the first batch: those with a target."""
    batch = next(iter(problem.data))
    target = batch.target
    if isinstance(target, Tensor) and target.ndim == 2 and not target.is_floating_point():
        return max(1.0, float((target != IGNORED).sum()) / batch.size)
    ids = next(t for _, t in named_tensors((batch.args, batch.kwargs)) if t.ndim == 2 and not t.is_floating_point())
    return float(ids.shape[1])


def _width(batch: Batch) -> int:
    """Tokens of a sample."""
    return max((t.shape[1] for _, t in named_tensors((batch.args, batch.kwargs)) if t.ndim == 2), default=1)


def _small(batch: Batch) -> list[Batch]:
    """The batch in parts that one forward pass takes easily."""
    step = max(1, POSITIONS // _width(batch))
    return [batch.part(slice(start, start + step)) for start in range(0, batch.size, step)]


def _raw(batch: Batch) -> Any:
    """A batch as the probe takes it: a mapping with labels, or a pair."""
    if batch.kwargs:
        labels = {"labels": batch.target} if isinstance(batch.target, Tensor) else {}
        return {**batch.kwargs, **labels}
    return (batch.args[0], batch.target) if isinstance(batch.target, Tensor) else batch.args[0]
