"""The training that a monitor watches: its model, its optimizer, the batches it has seen, as problems that can be measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.errors import NonFiniteError
from theodolite.measures.features import InputGradients, agop_alignment, input_gradients
from theodolite.monitors.looks import quiet_training_mode
from theodolite.monitors.tap import Tap
from theodolite.monitors.vitals import Footprint, input_size, trained
from theodolite.problem import Problem
from theodolite.problem.batches import Batch, BatchParser
from theodolite.problem.calling import ModelCall, main_output, unwrap
from theodolite.problem.tensors import map_tensors

#: Samples of the probe where the user gives none: as many as the first batch has, within these limits.
FEWEST, MOST = 32, 128
#: Random signs over the outputs behind an estimate of the features; up to so many outputs it is exact.
PROJECTIONS = 10
#: Parts into which a batch is cut to see whether all of it is hard.
PARTS = 8
#: Batches it is gathered from at most.
PROBE_BATCHES = 8


def as_batches(batch: Any) -> list[Any]:
    """The micro-batches of one step: a list of pairs or mappings, or one of them alone."""
    several = isinstance(batch, list) and bool(batch) and all(isinstance(part, tuple | list | Mapping | Batch) for part in batch)
    return list(batch) if several else [batch]


#: What a subject knows of its model, whatever the optimizer.
_OF_THE_MODEL = (
    "tap", "_probe", "_gathered", "_complete", "_first_features", "_no_features", "probe_size", "probe_losses", "ratios",
)  # fmt: skip


class TokenLoss(nn.Module):
    """A classification loss for logits (B, T, V) and targets (B, T), which loops flatten before they call it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Any) -> Tensor:
        tokens = isinstance(target, Tensor) and output.ndim == 3 and target.ndim == 2 and output.shape[:2] == target.shape
        found: Tensor = self.loss(output.flatten(0, 1), target.flatten()) if tokens else self.loss(output, target)
        return found


def as_trained(loss: Any) -> Any:
    """The loss as a language model's loop uses it; others as they are."""
    return TokenLoss(loss) if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) or loss is nn.functional.cross_entropy else loss


class Subject:
    """One model with its optimizer and loss; problems are made from the weights as they stand."""

    def __init__(
        self, model: nn.Module, loss: Any, optimizer: Optimizer, probe: Any, target: str, heir_of: Subject | None = None
    ) -> None:
        self.model, self.loss, self.optimizer = model, as_trained(loss), optimizer
        self.inner = unwrap(model)
        moved = {id(p) for p in trained(optimizer)}
        self.named = {name: p for name, p in self.inner.named_parameters() if id(p) in moved}
        if not self.named:
            raise ValueError(
                "The optimizer trains none of the model's parameters: observe(step, model, batch, optimizer) needs both."
            )
        self.parameters: list[Tensor] = list(self.named.values())
        self.trained = len(trained(optimizer))
        self.footprint = Footprint()
        self.pending: tuple[bool, float] | None = None  # critical rate exceeded at the step before, loss of the probe there
        self.previous: list[Batch] = []
        self._call = ModelCall(self.inner, self.loss)
        self._parse = BatchParser(own_loss=loss is None, target_key=target)
        self._parse_unchecked = BatchParser(own_loss=loss is None, target_key=target, check=False)
        self._target = target
        self._probe = probe
        self._gathered: list[Batch] = []
        self._complete = probe is not None
        self._first_features: InputGradients | None = None
        self._no_features = ""
        self.bad_data = ""
        self.probe_size: float | None = None  # of its inputs
        self.input_size: float | None = None  # of the batches parsed last
        self.probe_losses: deque[float] = deque(maxlen=50)
        self.ratios: deque[float] = deque(maxlen=50)  # loss of a batch over that of the probe
        if heir_of is None:
            self.tap = Tap(model, loss)
        else:  # another optimizer of the same model: what is known of the model stays
            self.__dict__.update({name: getattr(heir_of, name) for name in _OF_THE_MODEL})

    # Batches

    def parsed(self, batch: Any) -> list[Batch]:
        """The batches of a step, empty where they hold NaN or infinity: then `bad_data` says where."""
        self.bad_data = ""
        found = [b if isinstance(b, Batch) else self._parse_unchecked(b, i) for i, b in enumerate(as_batches(batch))]
        self.input_size = input_size([b.inputs for b in found])
        if self.input_size is None or math.isfinite(self.input_size):
            return found
        try:
            return [b if isinstance(b, Batch) else self._parse(b, i) for i, b in enumerate(as_batches(batch))]
        except NonFiniteError as error:
            self.bad_data = str(error).removeprefix("data: ").split(";")[0]
            return []

    def gather(self, batches: list[Batch]) -> None:
        """Copy the first batches as the probe, where the user gave none."""
        if self._complete:
            return
        for batch in batches:
            have = sum(b.size for b in self._gathered)
            wanted = min(MOST, max(FEWEST, (self._gathered or [batch])[0].size))
            room = wanted - have
            part = batch.part(slice(0, room)) if batch.size > room else batch
            args, kwargs, target = (map_tensors(torch.clone, x) for x in (part.args, part.kwargs, part.target))
            copy = Batch(args, kwargs, target, part.size)
            self._gathered.append(copy)
            self.probe_size = input_size([b.inputs for b in self._gathered])
            if have + part.size >= wanted or len(self._gathered) >= PROBE_BATCHES:
                self._complete, self._probe = True, _as_few(self._gathered)
                return

    @property
    def has_probe(self) -> bool:
        return self._complete or bool(self._gathered)

    # Problems

    def problem(self, batches: Any) -> Problem:
        """The loss of these batches as a function of the weights that the optimizer moves."""
        batches = [_raw(b, self._target, own_loss=self.loss is None) if isinstance(b, Batch) else b for b in batches]
        return Problem(
            self.inner, self.loss, batches, params=lambda name, p: name in self.named, mode=None, target=self._target, check=False
        )

    def probe(self) -> Problem:
        if isinstance(self._probe, Problem):
            return self._probe.with_model(self.inner)
        data = self._probe if self._complete else list(self._gathered)
        if isinstance(data, list) and data and isinstance(data[0], Batch):
            return self.problem(data)
        return Problem(
            self.inner, self.loss, data, params=lambda name, p: name in self.named, mode=None, target=self._target, check=False
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The state in which looks are taken: no random number of training is used, no dropout."""
        with torch.random.fork_rng(devices=[]), quiet_training_mode(self.inner):
            yield

    # Numbers

    def loss_of_step(self, batches: list[Batch]) -> float:
        """The loss of the step under way: as it passed by, from the output that did, or computed once more."""
        heard, raw = self.tap.take(), self.tap.output
        self.tap.output = None
        if heard is not None or not batches:
            return math.nan if heard is None else heard
        with torch.no_grad():
            if raw is not None and len(batches) == 1:
                return float(self._call._apply_loss(raw, main_output(raw), batches[0].target))
            with self.measuring():
                problem = self.problem(batches)
                tensors = problem.tensors(problem.leaves(grad=False))
                values = [problem.raw_loss(tensors, batch) for batch in batches]
        return sum(values) / len(values)

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

    def compare(self, batch_loss: float, probe_loss: float | None) -> None:
        """Note the loss of the probe in calm times, and how that of a batch compares with it."""
        if probe_loss is None:
            return
        self.probe_losses.append(probe_loss)
        if probe_loss > 0:
            self.ratios.append(batch_loss / probe_loss)

    @property
    def usual_ratio(self) -> float:
        """How much harder than the probe a batch usually is; at least 1, for a stretch of easy batches makes no other one bad."""
        return max(1.0, median(self.ratios)) if self.ratios else 1.0

    def feature_alignment(self, notes: list[str]) -> float | None:
        """How much the average gradient outer product on the probe still agrees with that at the first look.

        None where there is none, and then `notes` learns why, once.
        """
        if self._no_features:
            return None
        try:
            problem = self.probe()
            problem.mode = "eval"
            found = input_gradients(problem, at=_embedding(self.inner, problem), projections=PROJECTIONS)
        except (ValueError, RuntimeError, TypeError) as error:  # no gradient in the inputs here
            self._no_features = str(error)
            notes.append(f"the drift of the features is not followed: {str(error).splitlines()[0]}")
            return None
        if self._first_features is None:
            self._first_features = found
        return float(agop_alignment(found, self._first_features))

    def close(self) -> None:
        self.tap.close()


def _embedding(model: nn.Module, problem: Problem) -> str | None:
    """Where features begin for a model of whole numbers: what its first embedding returns."""
    batch = next(iter(problem.data))
    floats = [t for t in (*batch.args, *batch.kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    if floats:
        return None
    return next((name for name, m in model.named_modules() if isinstance(m, nn.Embedding)), None)


def _as_few(batches: list[Batch]) -> list[Batch]:
    """The batches joined to one where their shapes allow it."""
    whole = batches[0]
    try:
        for batch in batches[1:]:
            whole = whole.joined(batch)
    except (RuntimeError, StopIteration, TypeError):
        return batches
    return [whole]


def _raw(batch: Batch, target: str, *, own_loss: bool) -> Any:
    """A parsed batch in the form a user would give it."""
    if own_loss:
        return dict(batch.kwargs) if not batch.args else (batch.args[0] if len(batch.args) == 1 else (*batch.args, batch.target))
    if batch.kwargs and not batch.args:
        return {**batch.kwargs, target: batch.target}
    return (*batch.args, batch.target)
