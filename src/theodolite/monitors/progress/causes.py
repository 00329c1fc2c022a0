"""Why does it not learn? Progress, layers, curvature and spikes in, a cause with its advice out; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from theodolite.monitors.measuring.curvature import CurvatureSample
from theodolite.monitors.progress.layers import LayerState
from theodolite.monitors.progress.loss_course import BELOW, LossSummary
from theodolite.monitors.progress.tracker import ProgressSample
from theodolite.monitors.spikes.diagnosis import Cause, Spike
from theodolite.text import listed, plural

#: Gradients of one layer per entry over those of another below which they have vanished. Usual networks stay above 1e-3.
VANISHED = 1e-6
#: Weights that have shrunk to this share under weight decay are held down by it; that have grown so many times were thrown away.
DECAYED, GREW = 0.3, 10.0
#: Share of outputs at their limits from which a layer is saturated.
SATURATED = 0.9
#: Share of a hidden layer's units below which it is dying, where it has so many.
DYING, UNITS = 0.15, 16
#: A step that changes the weights by less than this share is small; one that changes them by more than this is large.
SMALL_STEP, LARGE_STEP = 1e-4, 0.3
#: Steps near the highest rate after which a loss that is where a guess would be counts without any other sign.
LONG = 400
#: Batches whose loss a few samples carry, from which these are what is wrong with a run that does not learn.
OUTLIERS = 2
#: Share of what a guess leaves that must be gained before weights that grew are no sign.
GAINED = 0.15
#: A run that began this many times above a guess has weights that are too large.
FAR_ABOVE = 10.0
#: A learning rate of this share of the critical one moves at the edge of stability; from the second on it is above it.
AT_THE_EDGE, ABOVE_THE_EDGE = 0.8, 1.05


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The learning rate against the critical one: lately and at most (`ratio`, `highest`); `critical` is that of hard moments."""

    ratio: float | None = None
    highest: float | None = None
    critical: float | None = None
    looks: int = 0


def edge_of(samples: Sequence[CurvatureSample]) -> Edge:
    """The last looks of calm times, the highest of them all, and the lower quartile of all critical rates."""
    calm = [s.ratio for s in samples if s.why == "schedule" and s.ratio is not None and math.isfinite(s.ratio)]
    rates = sorted(s.critical_rate for s in samples if s.critical_rate is not None and 0.0 < s.critical_rate < math.inf)
    critical = rates[len(rates) // 4] if rates else None
    lately = calm[-6:]
    return Edge(ratio=median(lately) if calm else None, highest=max(calm, default=None), critical=critical, looks=len(lately))


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What is wrong: a name of `theodolite.results.CAUSES`, why it is known, what to do, and a learning rate to set.

    `hard`: seen in other numbers than the loss alone. `since` is the step from which it is known to be so.
    """

    cause: str
    why: str
    advice: str
    lr: float | None = None
    hard: bool = True
    since: int | None = None


def trouble_of(sample: ProgressSample, edge: Edge, spikes: Sequence[Spike] = ()) -> Trouble | None:
    """The first cause that the numbers prove, the most certain ones first; None for a run that learns."""
    state = sample.loss.state
    if state == "not finite":
        return _not_finite(sample, edge, spikes)
    stuck = state in ("not learning", "lost", "diverged")
    barely = state == "flat" and gained(sample.loss) < GAINED
    if sample.ended and state != "learning":
        return _rate_is_gone(sample) if stuck or barely or state == "starting" else None
    if sample.layers.missing:
        return missing_parameters(sample)
    outliers = _outliers(spikes) if state != "learning" and sample.loss.level > sample.loss.began else None
    if outliers is not None:
        return outliers
    if stuck and _shrunk(sample):
        return _weight_decay(sample)
    if sample.layers.dead and not _finished(sample.loss):
        return dead_layer(sample, edge, spikes)
    grew = sample.layers.weight_change is not None and sample.layers.weight_change > GREW
    if barely and grew:
        return _rate_too_high(sample, edge, f"the weights are {sample.layers.weight_change:.3g} times as large as at the start")
    if state == "flat" and not _finished(sample.loss) and dying_units(sample) is not None:
        return dead_units(sample, edge)
    found = _of_stuck(sample, edge, spikes) if stuck else None
    noisy = (sample.loss.possible_gain or 0.0) > BELOW  # batch by batch it may well be better than a guess
    return None if found is not None and found.cause == "labels do not fit" and noisy else found


def gained(loss: LossSummary) -> float:
    """The share of a guess's loss that is gone."""
    return (loss.reference - loss.level) / abs(loss.reference) if loss.reference else 1.0


def _finished(loss: LossSummary) -> bool:
    """A loss near zero has no gradient for a good reason."""
    return loss.level < 0.1 * loss.reference and loss.state in ("flat", "learning")


def _outliers(spikes: Sequence[Spike]) -> Trouble | None:
    """Targets, or inputs, far outside the others: single samples whose loss outweighs all others, again and again."""
    found = [spike for spike in spikes if spike.few_samples]
    if len(found) < OUTLIERS:
        return None
    batches = listed([spike.batch for spike in found if spike.batch is not None], 3)
    return Trouble(
        cause="outliers",
        why=f"a few samples carry nearly all of the loss of their batches (steps {batches})",
        advice="Look at the targets and inputs of these samples: correct them or leave them out; if they are right, train on "
        "logarithms, with nn.HuberLoss, or clip the gradient.",
        since=found[0].start,
    )


def _of_stuck(sample: ProgressSample, edge: Edge, spikes: Sequence[Spike]) -> Trouble:
    """The cause of a run that is stuck, from the layers, the learning rate and, where nothing else is seen, the data."""
    layers, loss = sample.layers, sample.loss
    first = _outliers(spikes) or vanishing(sample)
    if first is not None:
        return first
    tight = [name for name, share in sample.saturation.items() if share > SATURATED]
    if tight:
        why = f"{listed(tight, 2)} {'is' if len(tight) == 1 else 'are'} saturated: their outputs lie at their limits"
        return Trouble(cause="saturation", why=why, advice="Start with smaller weights, or normalise before these layers.")
    grew = layers.weight_change is not None and layers.weight_change > GREW
    if loss.state == "diverged" or grew or (layers.ratio or 0.0) > LARGE_STEP:
        return _thrown_away(sample, edge)
    unrecovered = next((s for s in reversed(spikes) if s.harmed and s.cause in (Cause.CATAPULT, Cause.RATE_JUMP)), None)
    if unrecovered is not None:
        times = "" if unrecovered.ratio is None else f", where the learning rate was {unrecovered.ratio:.3g} times critical"
        return _rate_too_high(sample, edge, f"it has not come back from the spike at step {unrecovered.start}{times}")
    if edge.ratio is not None and edge.ratio > 1.0:
        return _rate_too_high(sample, edge, f"the learning rate is {edge.ratio:.3g} times the critical one")
    if layers.ratio is not None and 0.0 < layers.ratio < SMALL_STEP:
        return rate_too_low(sample, edge)
    if loss.state == "lost":
        why = f"the loss was {loss.best:.3g} at step {loss.best_step} and has come back to {loss.level:.3g}"
        advice = f"Go back to a checkpoint from about step {loss.best_step}, with a lower learning rate."
        return Trouble(cause="rate too high", why=why, advice=advice, lr=lower_rate(sample, edge), hard=False)
    return Trouble(
        cause="labels do not fit",
        why="weights move and gradients reach every layer, but nothing in the inputs tells the targets",
        advice="Check that inputs and targets belong together and that the inputs reach the model; a single batch must be "
        "learnable by heart.",
        hard=False,
    )


def _not_finite(sample: ProgressSample, edge: Edge, spikes: Sequence[Spike]) -> Trouble:
    """NaN: from a batch, or because the loss ran away before."""
    loss, spike = sample.loss, next((s for s in reversed(spikes) if s.cause is Cause.NON_FINITE), None)
    ran_away = loss.highest > 3.0 * max(loss.reference, loss.began)
    if (ran_away or (edge.ratio or 0.0) > 1.0 or _began_far_above(loss)) and not (spike is not None and spike.bad_data):
        return _thrown_away(sample, edge, "the loss grew beyond all bounds before it became no number")
    where = "" if spike is None or not spike.detail else f": {spike.detail}"
    advice = "Start again from the last checkpoint"
    advice += f" and skip or mend batch {spike.batch}." if spike is not None else "."
    return Trouble(cause="not finite", why=f"a number is not finite{where}", advice=advice)


def _rate_is_gone(sample: ProgressSample) -> Trouble:
    if not sample.highest_rate > 0.0:
        return Trouble(cause="frozen model", why="the learning rate is 0", advice="Set a learning rate above 0.")
    since = sample.step - sample.rate_gone + 1
    return Trouble(
        cause="schedule ended",
        why=f"the learning rate fell from {sample.highest_rate:.3g} to nothing by step {since}, and nothing moves since",
        advice="Make the schedule as long as the run, in steps where it is stepped every step.",
        lr=sample.highest_rate,
        since=since,
    )


def missing_parameters(sample: ProgressSample) -> Trouble:
    """Parameters with gradients that stand in no optimizer."""
    names = sample.layers.missing
    verb = "gets gradients and never moves" if len(names) == 1 else "get gradients and never move"
    return Trouble(
        cause="missing parameters",
        why=f"{listed(names, 3)} {verb}: no optimizer has {'it' if len(names) == 1 else 'them'}",
        advice="Give the optimizer all of model.parameters(), or freeze them with requires_grad_(False) if that is meant.",
    )


def dead_layer(sample: ProgressSample, edge: Edge, spikes: Sequence[Spike]) -> Trouble:
    """A hidden layer without any gradient; of several, the last one stops all others."""
    name, since = list(sample.layers.dead.items())[-1]
    layer = next((found for found in sample.layers.layers if found.layer == name), None)
    units = f"all {layer.units} units of layer {name}" if layer is not None and layer.units else f"the units of layer {name}"
    led = next((s for s in reversed(spikes) if s.start <= since <= s.start + 100 or s.died), None)
    blame = led is not None and (led.ratio or 0.0) > 1.0
    at_the_edge = edge.highest is None or edge.highest > AT_THE_EDGE  # weights that died are flat: looks at them do not count
    by_the_rate = blame or at_the_edge or any(s.cause in (Cause.CATAPULT, Cause.RATE_JUMP) for s in spikes)
    why = f"{units} have had no gradient since step {since}, so nothing before them moves"
    if blame and led is not None:
        why += f"; they died in the spike at step {led.start}, where the learning rate was {led.ratio:.3g} times critical"
    lr = lower_rate(sample, edge) if by_the_rate and since > 0 else None
    back = f"from a checkpoint before step {led.start if led is not None else since}" if since > 0 else "with smaller biases"
    advice = f"Start again {back}{'' if lr is None else f' with lr={lr:g}'}: a dead ReLU does not come back by itself."
    return Trouble(cause="dead layer", why=why, advice=advice, lr=lr, since=since)


def dying_units(sample: ProgressSample) -> LayerState | None:
    """A hidden layer of which few units are left, over several looks: a small batch does not need all of them."""
    shares = {
        layer.layer: layer.lately / layer.units for layer in sample.layers.hidden if layer.units and layer.lately is not None
    }
    few = [layer for layer in sample.layers.hidden if (layer.units or 0) >= UNITS and shares.get(layer.layer, 1.0) < DYING]
    return min(few, key=lambda layer: shares[layer.layer], default=None)


def dead_units(sample: ProgressSample, edge: Edge) -> Trouble:
    """Few units are left of a layer, and the loss has stopped to fall."""
    least, lr = dying_units(sample), lower_rate(sample, edge)
    assert least is not None
    advice = f"Start again from before that{'' if lr is None else f' with lr={lr:g}'}, or with a leaky activation."
    return Trouble(cause="dead units", why=few_units(least), advice=advice, lr=lr)


def few_units(layer: LayerState) -> str:
    """How many units of a layer are left, as a clause."""
    return f"only {layer.lately} of {layer.units} units of layer {layer.layer} still get gradients"


def vanishing(sample: ProgressSample) -> Trouble | None:
    """Gradients that fall by orders of magnitude from layer to layer; under weight decay to nothing they do so too."""
    spread = sample.layers.spread
    if spread is None or not 0.0 < spread[0].gradient < VANISHED * spread[1].gradient:
        return None
    low, high = spread
    return Trouble(
        cause="vanishing gradients",
        why=f"the gradients of {low.layer} are {low.gradient / high.gradient:.1g} times those of {high.layer}",
        advice="Use ReLU-like activations with their usual initialisation, normalisation layers or skip connections.",
    )


def _shrunk(sample: ProgressSample) -> bool:
    change = sample.layers.weight_change
    return sample.decay > 0 and change is not None and change < DECAYED


def _weight_decay(sample: ProgressSample) -> Trouble:
    return Trouble(
        cause="weight decay",
        why=f"weight decay {sample.decay:g} has shrunk the weights to {sample.layers.weight_change:.2g} times their first norm",
        advice=f"Set weight_decay={sample.decay / 100:.1g}.",
    )


def _began_far_above(loss: LossSummary) -> bool:
    return loss.trivial is not None and loss.began > FAR_ABOVE * loss.trivial > 0.0


def high_start(loss: LossSummary) -> str:
    """What is wrong with weights whose first outputs are far worse than a guess; empty where they are not."""
    if not _began_far_above(loss):
        return ""
    assert loss.trivial is not None
    times = f"{loss.began / loss.trivial:.2g} times that of a guess"
    return f"it began at a loss of {loss.began:.3g}, {times}: the first outputs are far too large"


def _thrown_away(sample: ProgressSample, edge: Edge, how: str = "the loss ran away") -> Trouble:
    """Weights far from where they began: because signals grow from layer to layer, or steps were too large."""
    if _began_far_above(sample.loss):
        advice = "Start with smaller weights (the usual initialisation of each layer) and clip the gradient norm to 1."
        return Trouble(cause="exploding gradients", why=high_start(sample.loss), advice=advice)
    grew = sample.layers.weight_change
    if grew is not None and grew > GREW:
        how = f"the weights are {grew:.3g} times as large as at the start"
    return _rate_too_high(sample, edge, how)


def _rate_too_high(sample: ProgressSample, edge: Edge, why: str) -> Trouble:
    lr = lower_rate(sample, edge)
    again = "" if lr is None else f" with lr={lr:g}"
    advice = f"Start again from before that{again}; a longer warm-up or clipped gradients help too."
    return Trouble(cause="rate too high", why=why, advice=advice, lr=lr)


def rate_too_low(sample: ProgressSample, edge: Edge) -> Trouble:
    """Steps so small that weights hardly change."""
    lr = higher_rate(sample, edge)
    why = f"a step changes the weights by {sample.layers.ratio:.1g} of their size"
    return Trouble(cause="rate too low", why=why, advice="" if lr is None else f"Set lr={lr:g}.", lr=lr)


def lower_rate(sample: ProgressSample, edge: Edge) -> float | None:
    """Half the critical rate of hard moments, and at most a quarter of the rate so far; a tenth where nothing was measured.

    The critical rate of weights that were thrown away says nothing of those to start from: the rate is lowered as they grew.
    """
    highest, grew = sample.highest_rate, sample.layers.weight_change
    if not highest > 0.0:
        return None
    lr = 0.1 * highest if edge.critical is None else min(0.5 * edge.critical, 0.25 * highest)
    lr = min(lr, 2.0 / grew * highest) if grew is not None and GREW < grew < math.inf else lr
    return _rounded(max(lr, 0.01 * highest))


def higher_rate(sample: ProgressSample, edge: Edge) -> float | None:
    """Ten times the rate so far, and at most half the critical one."""
    highest = sample.highest_rate
    if not highest > 0.0:
        return None
    lr = _rounded(10.0 * highest if edge.critical is None else min(10.0 * highest, 0.5 * edge.critical))
    return lr if lr > 1.5 * highest else None


def _rounded(value: float) -> float:
    return float(f"{value:.1g}")


def slow(sample: ProgressSample, edge: Edge) -> Trouble | None:
    """A loss that falls, but so slowly that little is gained after many steps of small size."""
    loss, ratio = sample.loss, sample.layers.ratio
    small = ratio is not None and 0.0 < ratio < 5.0 * SMALL_STEP and not sample.rate < 0.5 * sample.highest_rate
    gained = (max(loss.reference, loss.began) - loss.level) / abs(loss.reference) if loss.reference else 1.0
    if loss.state != "learning" or not small or gained > 2 * GAINED or sample.working < LONG // 2:
        return None
    more = math.inf if not loss.slope < 0.0 else 0.5 * loss.level / -loss.slope
    lr = higher_rate(sample, edge)
    if not more > 2.0 * loss.steps or lr is None:
        return None
    per = "at this pace the loss is halved in " + plural(int(float(f"{more:.1g}")), "more step")
    return Trouble(cause="rate too low", why=f"the loss falls, but slowly: {per}", advice=f"Try lr={lr:g}.", lr=lr)
