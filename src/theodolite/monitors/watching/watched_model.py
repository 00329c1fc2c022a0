"""The model that a monitor watches, with its optimizer: what a step was, and problems that can be measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.errors import NonFiniteError
from theodolite.measures.dynamics.noise import joined_parts
from theodolite.measures.features import InputGradients, agop_alignment, input_gradients
from theodolite.monitors.watching.recorder import (
    ForwardRecorder,
    PreviousWeights,
    StepStats,
    input_size,
    norm_of,
    rate_of,
    second_moment,
    trained,
)
from theodolite.problem import Problem
from theodolite.problem.batches import Batch, BatchParser
from theodolite.problem.calling import ModelCall, main_output, unwrap
from theodolite.problem.state_guard import modes_kept
from theodolite.problem.tensors import map_tensors

#: Samples of the probe where the user gives none: as many as the first batch has, within these limits.
FEWEST, MOST = 32, 128
#: Batches it is gathered from at most.
PROBE_BATCHES = 8
#: Random signs over the outputs behind an estimate of the features; up to so many outputs it is exact.
PROJECTIONS = 10
#: Parts into which a batch is cut to see whether all of it is hard.
PARTS = 8


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop: its numbers, and its batches unless `bad_data` says what is wrong with them."""

    stats: StepStats
    batches: list[Batch]
    bad_data: str = ""


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

    def gather(self, batches: list[Batch]) -> None:
        """Copy the first batches, where the user gave no data."""
        for batch in [] if self.complete else batches:
            have = sum(b.size for b in self._gathered)
            wanted = min(MOST, max(FEWEST, (self._gathered or [batch])[0].size))
            room = wanted - have
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
        self.pending: tuple[bool, float] | None = None  # critical rate exceeded at the step before, loss of the probe there
        self._call = ModelCall(self.inner, self.loss)
        self._parse = BatchParser(own_loss=loss is None, target_key=target)
        self._parse_unchecked = BatchParser(own_loss=loss is None, target_key=target, check=False)
        self._target = target

    # Recording

    def record(self, step: int, batch: Any, value: Any) -> StepRecord:
        """The step under way, from what its loop has computed; `batch` and `value` are the recorded ones where they are None."""
        self.recorder.trains_in_train_mode = self.model.training
        batch = self.recorder.batch() if batch is None else batch
        if batch is None:
            raise ValueError(
                "No batch passed through the model and the loss before this step: give observe the batch, or call the model and "
                "the loss module that the monitor knows."
            )
        batches, size, bad_data = self._parsed(batch)
        loss = self._loss_of_step(batches) if value is None else float(value)
        if value is not None:
            self.recorder.take()
        gradient_norm = norm_of([p.grad for p in self.named.values() if p.grad is not None])
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
        )
        return StepRecord(stats, batches, bad_data)

    def keep(self, record: StepRecord) -> None:
        """Remember weights and batches: those before the coming step."""
        self.previous_weights.keep()
        self.previous_batches = record.batches

    def close(self) -> None:
        self.recorder.close()

    def _parsed(self, batch: Any) -> tuple[list[Batch], float | None, str]:
        """The batches of a step and the size of their inputs; none where they hold NaN or infinity, with words that say where."""
        several = isinstance(batch, list) and batch and all(isinstance(part, tuple | list | Mapping | Batch) for part in batch)
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
        with torch.no_grad():
            if raw is not None and len(batches) == 1:
                return float(self._call._apply_loss(raw, main_output(raw), batches[0].target))
            with self.measuring():
                problem = self.problem(batches)
                tensors = problem.tensors(problem.leaves(grad=False))
                values = [problem.raw_loss(tensors, batch) for batch in batches]
        return sum(values) / len(values)

    # Problems

    def problem(self, batches: Any, *, before: bool = False) -> Problem:
        """The loss of batches as a function of the weights that the optimizer moves, now or `before` the last step."""
        if isinstance(batches, list):
            own = self.loss is None
            batches = [_raw(b, self._target, own_loss=own) if isinstance(b, Batch) else b for b in batches]
        found = Problem(
            self.inner, self.loss, batches, params=lambda name, p: name in self.named, mode=None, target=self._target, check=False
        )
        return found.at(self.previous_weights.values) if before else found

    def probe_problem(self, *, before: bool = False) -> Problem:
        """The same for the probe."""
        if not isinstance(self.probe.data, Problem):
            return self.problem(self.probe.data, before=before)
        found = self.probe.data.with_model(self.inner)
        return found.at(self.previous_weights.values) if before else found

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The state in which measurements are made: no random number of training is used, no dropout."""
        with torch.random.fork_rng(devices=[]), quiet_training_mode(self.inner):
            yield

    # Measurements other than curvature

    def typical_loss(self, batches: list[Batch]) -> float:
        """The median loss over parts of the batches."""
        problem = self.problem(batches)
        with problem.session(second=False), torch.no_grad():
            tensors = problem.tensors(problem.leaves(grad=False))
            placed = [problem.placed(batch) for batch in batches]
            return median(float(loss) for batch in placed for loss in self._losses_of_parts(tensors, batch))

    def _losses_of_parts(self, tensors: dict[str, Tensor], batch: Batch) -> Iterator[Tensor]:
        cuts = [slice(i * batch.size // PARTS, (i + 1) * batch.size // PARTS) for i in range(PARTS)]
        cuts = [cut for cut in cuts if cut.stop > cut.start]
        if self.loss is None:  # the model computes its own loss, for one part after the other
            yield from (self._call(tensors, batch.part(cut), 0).loss for cut in cuts)
            return
        output = self._call.output(tensors, batch, 0)  # once: normalisation sees the whole batch
        for cut in cuts:
            yield self.loss(output[cut], batch.part(cut).target)

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
            found = input_gradients(problem, at=_embedding(self.inner, problem), projections=PROJECTIONS)
        except (ValueError, RuntimeError, TypeError) as error:  # no gradient in the inputs here
            probe.no_features = str(error)
            return None, f"the drift of the features is not followed: {str(error).splitlines()[0]}"
        if probe.first_features is None:
            probe.first_features = found
        return float(agop_alignment(found, probe.first_features)), ""


@contextmanager
def quiet_training_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, but normalisation over the batch as it is trained: the loss of training without the noise of dropout."""
    with modes_kept(model):
        for module in model.modules():
            module.training = module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
        yield


def _embedding(model: nn.Module, problem: Problem) -> str | None:
    """Where features begin for a model of whole numbers: what its first embedding returns."""
    batch = next(iter(problem.data))
    floats = [t for t in (*batch.args, *batch.kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    if floats:
        return None
    return next((name for name, m in model.named_modules() if isinstance(m, nn.Embedding)), None)


def _raw(batch: Batch, target: str, *, own_loss: bool) -> Any:
    """A parsed batch in the form a user would give it."""
    if own_loss:
        return dict(batch.kwargs) if not batch.args else (batch.args[0] if len(batch.args) == 1 else (*batch.args, batch.target))
    if batch.kwargs and not batch.args:
        return {**batch.kwargs, target: batch.target}
    return (*batch.args, batch.target)
