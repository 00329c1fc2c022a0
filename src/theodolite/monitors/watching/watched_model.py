"""The model that a monitor watches, with its optimizer: what a step was, and problems that can be measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import a_number, about, positive
from theodolite.errors import NonFiniteError, WeightingError
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.measures.dynamics.noise import joined_parts
from theodolite.measures.features import InputGradients, agop_alignment, input_gradients
from theodolite.measures.features.agop import token_embedding
from theodolite.monitors.watching.recorder import (
    ForwardRecorder,
    PreviousWeights,
    StepStats,
    input_size,
    joint_norm,
    norms_of,
    rate_of,
    second_moment,
    trained,
)
from theodolite.problem import Problem
from theodolite.problem.activations import Call, Hooks, recorded_calls
from theodolite.problem.batches import Batch, BatchParser, rows_of
from theodolite.problem.calling import ModelCall, unwrap
from theodolite.problem.calling.outputs import possible_outputs
from theodolite.problem.parameters import clean_name
from theodolite.problem.state_guard import cuda_devices, modes_kept, random_states_kept
from theodolite.problem.tensors import map_tensors, named_tensors

#: `(model, batch) -> loss`, the trainer's own way: class weights, smoothed labels, penalties and all.
ComputeLoss = Callable[[nn.Module, dict[str, Any]], Tensor]
#: Samples of the probe where the user gives none: as many as the first batch has, within these limits.
FEWEST, MOST = 32, 128
#: Batches it is gathered from at most.
PROBE_BATCHES = 8
#: Random signs over the outputs behind an estimate of the features; up to so many outputs it is exact.
PROJECTIONS = 10
#: Gradients that agree in their norm so closely were clipped to it, where one is among so many steps before the other.
SAME_NORM, CLIPPED_WITHIN = 1e-4, 20
#: Least and largest output of functions that saturate, and how near to one of them, in shares of their distance, is at it.
_LIMITS: dict[type[nn.Module], tuple[float, float]] = {nn.Tanh: (-1.0, 1.0), nn.Sigmoid: (0.0, 1.0), nn.Hardtanh: (-1.0, 1.0)}
SATURATED = 0.005
#: Parts into which a batch is cut to see whether all of it is hard.
PARTS = 8


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop: its numbers, and its batches unless `bad_data` says what is wrong with them.

    `gradient_norms` are those of the watched parameters one by one, None where there is no gradient; `output` is what the model
    returned, where it passed by.
    """

    stats: StepStats
    batches: list[Batch]
    bad_data: str = ""
    gradient_norms: Sequence[float | None] = ()
    output: Any = None


class ProbeSet:
    """Fixed data on which sharpness, loss and features are followed: the user's, or copies of the first batches."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.complete = data is not None
        self.input_size: float | None = None  # of gathered data
        self.losses: deque[float] = deque(maxlen=50)  # in calm times
        self.ratios: deque[float] = deque(maxlen=50)  # loss of a batch over that of the probe
        self.first_features: InputGradients | None = None
        self.no_features = ""
        self._gathered: list[Batch] = []

    def gather(self, batches: list[Batch], coupled: Callable[[], bool]) -> None:
        """Copy the first batches, where the user gave no data; of samples that are `coupled` one batch, and that whole."""
        for batch in [] if self.complete else batches:
            have = sum(b.size for b in self._gathered)
            wanted = min(MOST, max(FEWEST, (self._gathered or [batch])[0].size))
            room = wanted - have
            if (have or batch.size > room) and coupled():
                wanted, room = batch.size, batch.size
                self.complete = have > 0
            if self.complete:
                return
            part = batch.part(slice(0, room)) if batch.size > room else batch
            args, kwargs, target = (map_tensors(torch.clone, x) for x in (part.args, part.kwargs, part.target))
            self._gathered.append(Batch(args, kwargs, target, part.size))
            self.input_size = input_size([b.inputs for b in self._gathered])
            self.data = list(self._gathered)
            if have + part.size >= wanted or len(self._gathered) >= PROBE_BATCHES:
                self.complete, self.data = True, joined_parts(self._gathered)
                return

    def compare(self, batch_loss: float, probe_loss: float | None) -> None:
        """Keep the loss of the probe in calm times, and how that of a batch compares with it."""
        if probe_loss is None:
            return
        self.losses.append(probe_loss)
        if probe_loss > 0:
            self.ratios.append(batch_loss / probe_loss)

    @property
    def usual_ratio(self) -> float:
        """How much harder than the probe a batch usually is; at least 1, for a stretch of easy batches makes no other one bad."""
        return max(1.0, median(self.ratios)) if self.ratios else 1.0


class StepLoss(nn.Module):
    """`compute(model, batch)` as the loss of a batch, with the output it was computed from; `observe` takes it as the model.

    >>> mean = StepLoss(nn.Identity(), lambda model, batch: model(batch["x"]).mean())
    >>> float(mean(x=Tensor([1.0, 3.0]))["loss"])
    2.0
    """

    def __init__(self, model: nn.Module, compute: ComputeLoss) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *args: Any, **batch: Any) -> dict[str, Any]:
        if args:  # a probe of the user's, which came as a pair
            batch = {"batch": (*args, *batch.values())}
        with recorded_calls(dict(self.model.named_modules())) as calls:
            loss = self.compute(self.model, batch)
        return {"loss": loss, "outputs": _outputs(self.model, calls, loss)}


def _outputs(model: nn.Module, calls: list[Call], loss: Tensor) -> Any:
    """What the loss may be a function of: all that the model returned, else what its parts did.

    Which of them it is, the graph of the loss tells; where there is nothing, a number that no loss depends on.
    """
    whole = [call.output for call in calls if call.module is model]
    parts = [call.output for call in calls if not isinstance(call.module, nn.modules.loss._Loss)]
    found = whole if len(whole) == 1 else parts
    return found if any(possible_outputs(one) for one in found) else loss.new_zeros(1).requires_grad_()


def _as_loss(value: Any) -> float:
    """The loss of a step as the loop gives it: a number or a tensor of one, NaN where the run has blown up."""
    return a_number("value", value)


def loss_of(found: Any) -> Any:
    """The loss in what a training step returns: itself, or under its name, or first."""
    if isinstance(found, Mapping):
        return found.get("loss")
    return found[0] if isinstance(found, tuple) and found else found


class TokenLoss(nn.Module):
    """A classification loss for logits (B, T, V) and targets (B, T), which loops flatten before they call it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Any) -> Tensor:
        tokens = isinstance(target, Tensor) and output.ndim == 3 and target.ndim == 2 and output.shape[:2] == target.shape
        found: Tensor = self.loss(output.flatten(0, 1), target.flatten()) if tokens else self.loss(output, target)
        return found


class WatchedModel:
    """One model with its optimizer and loss.

    What is known of the model whatever its optimizer, `recorder` and `probe`, is taken from `other`, which watches the same
    model with another one.
    """

    def __init__(
        self, model: nn.Module, loss: Any, optimizer: Optimizer, probe: Any, target: str, other: WatchedModel | None = None
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) or loss is nn.functional.cross_entropy:
            self.loss = TokenLoss(loss)
        self.inner = unwrap(model)
        self.called = self.inner.model if isinstance(self.inner, StepLoss) else self.inner
        moved = {id(p) for p in trained(optimizer)}
        self.named = {name: p for name, p in self.inner.named_parameters() if id(p) in moved}
        if not self.named:
            raise ValueError(
                "The optimizer trains none of the model's parameters: observe(step, model, batch, optimizer) needs both."
            )
        self.trained = len(trained(optimizer))
        self.recorder: ForwardRecorder = ForwardRecorder(model, loss) if other is None else other.recorder
        self.probe: ProbeSet = ProbeSet(probe) if other is None else other.probe
        self.previous_weights = PreviousWeights(self.named)
        self.previous_batches: list[Batch] = []
        self.ready = 1.0  # what clipping will still multiply the gradients by
        self._clip: float | None = None
        self._norms: deque[float] = deque(maxlen=CLIPPED_WITHIN)
        self._batches: list[Batch] = []
        self.pending: tuple[bool, float] | None = None  # critical rate exceeded at the step before, loss of the probe there
        self._coupled: bool | None = None  # whether samples of a batch belong together
        self.saturation: dict[str, float] = {}  # share of saturated outputs by layer, at the last loss of the probe
        self._call = ModelCall(self.inner, self.loss)
        self._parse = BatchParser.of(self.inner, loss, target)
        self._parse_unchecked = BatchParser.of(self.inner, loss, target, check=False)
        self.target_key = target

    @property
    def called_parameters(self) -> dict[str, Tensor]:
        """The watched parameters as the model itself names them, whatever it is wrapped in."""
        prefix = "model." if self.called is not self.inner else ""
        return {name.removeprefix(prefix): p for name, p in self.named.items()}

    # Recording

    def record(self, step: int, batch: Any, value: Any, seconds: float | None = None) -> StepRecord:
        """The step under way, from what its loop has computed; `batch` and `value` are the recorded ones where they are None."""
        self.recorder.trains_in_train_mode = self.model.training
        batch = self.recorder.batch() if batch is None else batch
        if batch is None:
            raise ValueError(
                "No batch passed through the model and the loss before this step: give observe the batch, or call the model and "
                "the loss module that the monitor knows."
            )
        with about("batch"):
            batches, size, bad_data = self._parsed(batch)
        output = self.recorder.output
        loss = self._loss_of_step(batches) if value is None else _as_loss(value)
        if value is not None:
            self.recorder.take()
        gradients = [p.grad for p in self.named.values()]
        norms: list[float | None] = [*norms_of([g for g in gradients if g is not None])]
        gradient_norm = joint_norm(norm for norm in norms if norm is not None)
        if len(norms) < len(gradients):
            found = iter(norms)
            norms = [None if g is None else next(found) for g in gradients]
        self._learn_clipping(gradient_norm, batches)
        moment, surprise = second_moment(self.optimizer, gradient_norm)
        stats = StepStats(
            step=step,
            loss=loss,
            gradient_norm=gradient_norm,
            update_norm=self.previous_weights.step_length(),
            rate=rate_of(self.optimizer),
            moment=moment,
            surprise=surprise,
            input_size=size if batches else None,
            seconds=seconds,
        )
        return StepRecord(stats, batches, bad_data, norms, output)

    # Clipped gradients

    def clipping(self, factor: float | None, done: bool) -> None:
        """What is known of the clipping at the step under way: its factor, and whether `.grad` holds it."""
        if factor is not None:
            factor = positive("clip", factor, wanted="the factor of clipped gradients, above 0 and mostly below 1")
        self._clip, self.ready = factor, 1.0 if done or factor is None else factor

    def _learn_clipping(self, norm: float, batches: list[Batch]) -> None:
        """Where the factor is not given: two gradients of one norm were clipped to it, all others are as they came."""
        clipped = any(abs(norm - other) <= SAME_NORM * norm for other in self._norms)
        self._norms.append(norm)
        self._batches = batches if clipped else []
        if self._clip is None and not self._batches:
            self._clip = 1.0

    def clip_factor(self) -> float:
        """The gradient that lies ready over that of the loss, along the latter: other dropout has other gradients."""
        if self._clip is None:
            problem = self.problem(self._batches)
            gradient = problem.gradient().double()
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in problem.parameters]
            ready = torch.cat([part.detach().double().reshape(-1) for part in parts])
            share = float(ready @ gradient) / max(float(gradient @ gradient), 1e-300)
            self._clip = share if 0.0 < share < 1.0 - SAME_NORM else 1.0
        return self._clip

    def keep(self, record: StepRecord) -> None:
        """Remember weights and batches: those before the coming step."""
        self.previous_weights.keep()
        self.previous_batches = record.batches

    def close(self) -> None:
        self.recorder.close()

    def _parsed(self, batch: Any) -> tuple[list[Batch], float | None, str]:
        """The batches of a step and the size of their inputs; none where they hold NaN or infinity, with words that say where."""
        if isinstance(batch, list) and not batch:
            return [], None, ""
        several = isinstance(batch, list) and all(isinstance(part, tuple | list | Mapping | Batch) for part in batch)
        parts = batch if several else [batch]
        found = [b if isinstance(b, Batch) else self._parse_unchecked(b, i) for i, b in enumerate(parts)]
        size = input_size([b.inputs for b in found])
        if size is None or math.isfinite(size):
            return found, size, ""
        try:
            return [b if isinstance(b, Batch) else self._parse(b, i) for i, b in enumerate(parts)], size, ""
        except NonFiniteError as error:
            return [], size, str(error).removeprefix("data: ").split(";")[0]

    def _loss_of_step(self, batches: list[Batch]) -> float:
        """The loss of the step under way: as it passed by, from the output that did, or computed once more."""
        recorded, raw = self.recorder.take(), self.recorder.output
        self.recorder.output = None
        if recorded is not None or not batches:
            return math.nan if recorded is None else recorded
        with unbroken(torch.no_grad()):
            if raw is not None and len(batches) == 1:
                return float(self._call._apply_loss(raw, batches[0].target, {}))
            problem = self._problem(batches)
            with self.measuring(), problem.session(second=False), torch.no_grad():
                tensors = problem.tensors(problem.leaves(grad=False))
                values = [problem.raw_loss(tensors, batch) for batch in batches]
        return sum(values) / len(values)

    # Problems

    def problem(self, batches: Any, *, before: bool = False) -> Problem:
        """The loss of batches as a function of the weights that the optimizer moves, now or `before` the last step.

        Batches of which nobody knows what they weigh (in-batch contrast) weigh the same, as steps do.
        """
        found = self._problem(batches)
        if len(found.data) > 1:
            with suppress(WeightingError):
                _ = found.weighting
                return found.at(self.previous_weights.values) if before else found
            found = self._problem(batches, batch_weight=lambda batch: 1.0)
        return found.at(self.previous_weights.values) if before else found

    def _problem(self, batches: Any, **options: Any) -> Problem:
        own: dict[str, Any] = {"mode": None, "target": self.target_key, "check": False}
        return Problem(self.inner, self.loss, batches, params=lambda name, p: name in self.named, **own, **options)

    def coupled(self, batches: list[Batch]) -> bool:
        """Whether the samples of a batch belong together, so that it must not be cut."""
        if self._coupled is None:
            with self.measuring():
                self._coupled = bool(self._problem(batches[:1]).coupled)
        return self._coupled

    def gather(self, batches: list[Batch]) -> None:
        """Copy the first batches into the probe, where the user gave no data for it."""
        self.probe.gather(batches, lambda: self.coupled(batches))

    def probe_problem(self, *, before: bool = False) -> Problem:
        """The same for the probe."""
        if not isinstance(self.probe.data, Problem):
            return self.problem(self.probe.data, before=before)
        found = self.probe.data.with_model(self.inner)
        return found.at(self.previous_weights.values) if before else found

    @unbroken_context
    def measuring(self) -> Iterator[None]:
        """The state in which measurements are made: no random number of training is used, no dropout."""
        with random_states_kept(cuda_devices(self.inner)), quiet_training_mode(self.inner):
            yield

    # Measurements other than curvature

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of an output that no model has made."""
        assert self.loss is not None
        with self.measuring():
            found: Tensor = self.loss(output, target)
        return found

    def probe_loss(self, *, before: bool = False) -> float:
        """The loss of the probe, now or `before` the last step; in passing, how many outputs lie at their limits."""
        modules = {name: m for name, m in self.called.named_modules() if type(m) in _LIMITS}
        found: dict[str, list[float]] = {name: [] for name in modules}

        def count(call: Call) -> None:
            low, high = _LIMITS[type(call.module)]
            edge = SATURATED * (high - low)
            found[call.name].append(float(((call.output < low + edge) | (call.output > high - edge)).float().mean()))

        with Hooks(modules, count):
            loss = self.probe_problem(before=before).loss()
        if not before:
            self.saturation = {clean_name(name): sum(shares) / len(shares) for name, shares in found.items() if shares}
        return loss

    def typical_loss(self, batches: list[Batch]) -> float:
        """The median loss over parts of the batches."""
        problem = self.problem(batches)
        with problem.session(second=False), torch.no_grad():
            tensors = problem.tensors(problem.leaves(grad=False))
            placed = [problem.placed(batch) for batch in batches]
            if self.coupled(batches):
                return median(problem.raw_loss(tensors, batch) for batch in placed)
            return median(float(loss) for batch in placed for loss in self._losses_of_parts(tensors, batch))

    def _losses_of_parts(self, tensors: dict[str, Tensor], batch: Batch) -> Iterator[Tensor]:
        cuts = [slice(i * batch.size // PARTS, (i + 1) * batch.size // PARTS) for i in range(PARTS)]
        cuts = [cut for cut in cuts if cut.stop > cut.start]
        if self.loss is None:  # the model computes its own loss, for one part after the other
            yield from (self._call(tensors, batch.part(cut), 0).loss for cut in cuts)
            return
        output = self._call.loss_input(tensors, batch, 0)  # once: normalisation sees the whole batch
        for cut in cuts:
            yield self.loss(rows_of(output, cut, batch.size), batch.part(cut).target)

    def feature_alignment(self) -> tuple[float | None, str]:
        """How much the average gradient outer product on the probe still agrees with that at the first measurement.

        None where there is none, and then, once, a text that says why.
        """
        probe = self.probe
        if probe.no_features:
            return None, ""
        try:
            problem = self.probe_problem()
            problem.mode = "eval"
            found = input_gradients(problem, at=_embedding(problem), projections=PROJECTIONS)
        except (ValueError, RuntimeError, TypeError) as error:  # no gradient in the inputs here
            probe.no_features = str(error)
            return None, f"the drift of the features is not followed: {str(error).splitlines()[0]}"
        if probe.first_features is None:
            probe.first_features = found
        return float(agop_alignment(found, probe.first_features)), ""


@unbroken_context
def quiet_training_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, but normalisation over the batch as it is trained: the loss of training without the noise of dropout."""
    with modes_kept(model):
        for module in model.modules():
            module.training = module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
        yield


def _embedding(problem: Problem) -> str | None:
    """Where features begin for a model of whole numbers: what its first embedding returns."""
    batch = problem.placed(next(iter(problem.data)))
    if any(t.is_floating_point() for _, t in named_tensors(batch.inputs)):
        return None
    found = token_embedding(problem, batch)
    return None if found is None else found.name
