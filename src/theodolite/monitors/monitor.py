"""`Monitor`: why did my loss spike, was it harmful, what should the learning rate be, are features learned?

One step, in the order of the data: the recorder (`watching`) says what the loop computed, the detector (`spikes.detector`) what
the loss means, the tracker (`spikes.tracker`) why, with the measurements that answer it (`measuring`); log and report keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from os import PathLike
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import also_called
from theodolite.monitors.log import LogWriter
from theodolite.monitors.measuring.curvature import CurvatureProbe, CurvatureSample
from theodolite.monitors.measuring.scheduler import MeasurementScheduler, TimeBudget
from theodolite.monitors.report import MonitorReport, summarise
from theodolite.monitors.spikes.detector import SpikeDetector
from theodolite.monitors.spikes.diagnosis import Spike, finding_of
from theodolite.monitors.spikes.tracker import Diagnosis, Situation, SpikeTracker
from theodolite.monitors.watching.recorder import StepStats, trained
from theodolite.monitors.watching.watched_model import WatchedModel
from theodolite.operators.matrices import MatrixName, check_matrix_or_none


class Monitor(AbstractContextManager["Monitor"]):
    """Watches a training run from inside its loop and explains its spikes.

    Every step: loss, gradient norm, size of the update, learning rate. On sampled steps and around spikes: the critical
    learning rate of the batch, sharpness on a fixed probe set, the part of the loss in the top eigenspace, the drift of the
    features. Training is not changed by a bit: nothing of the model, the optimizer or the random state is written to.

    Args:
        loss: `(output, target) -> scalar`, or None for models that return `.loss`.
        probe: fixed data for sharpness and features, in any form `Problem` takes; None copies the first batch
            (32 to 128 samples).
        budget: share of the training time that measurements may take; None measures at every step.
        log: file or folder for a JSON-lines log, which `theodolite watch` shows while training goes on.
        by: (or `matrix`) the matrix whose top eigenvalue is tracked, `"kernel"`, `"gauss_newton"` or `"hessian"`; None chooses.
        top: dimension of the top eigenspace; None means 5 where the tangent kernel is written out and 1 elsewhere.
        target: key of the target in mapping batches.
        writer: something with `add_scalar(name, value, step)`, such as TensorBoard's SummaryWriter.

    >>> torch.manual_seed(0)                                                          # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model, loss = nn.Linear(2, 1).double(), nn.MSELoss()
    >>> x = torch.randn(8, 2).double()
    >>> y = x.sum(1, keepdim=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Monitor(loss, budget=None) as monitor:
    ...     for step in range(20):
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         monitor.observe(step, model, (x, y), optimizer)
    ...         optimizer.step()
    >>> monitor.report().spikes
    ()
    """

    @also_called(matrix="by")
    def __init__(
        self,
        loss: Any,
        *,
        probe: Any = None,
        budget: float | None = 0.25,
        log: str | PathLike[str] | None = None,
        by: MatrixName | None = None,
        top: int | None = None,
        target: str = "labels",
        writer: Any = None,
        seed: int = 0,
    ) -> None:
        if loss is not None and not callable(loss):
            raise ValueError(f"loss must be a callable (output, target) -> scalar, or None. Got {type(loss).__name__}.")
        if budget is not None and not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(f"budget is a share of the training time, such as 0.25, or None for every step. Got {budget!r}.")
        check_matrix_or_none(by)
        self.loss, self.budget = loss, budget
        self._probe, self._target, self._writer = probe, target, writer
        self._log = None if log is None else LogWriter(log)
        self._budget = TimeBudget(budget)
        self._detector, self._tracker = SpikeDetector(), SpikeTracker()
        self._measure = MeasurementScheduler(CurvatureProbe(by=by, top=top, seed=seed), self._budget)
        self._watched: dict[int, WatchedModel] = {}  # by optimizer
        self._handles: list[Any] = []
        self._attached: set[int] = set()
        self._closed = False
        self.steps: list[StepStats] = []

    # The three ways in

    def observe(
        self, step: int, model: nn.Module, batch: Any, optimizer: Optimizer, *, value: float | torch.Tensor | None = None
    ) -> None:
        """Observe one step, after `backward` and before `optimizer.step()`.

        `batch` is what the step was computed from (a list of them where gradients were accumulated); None takes the one that
        passed through the model. `value` is the loss of the step where you have it; it is recorded otherwise.
        """
        if self._closed:
            raise ValueError("This monitor is closed. Make a new one; with the same log it goes on where this one ended.")
        self._budget.enter()
        try:
            # What is wrong from the start is reported at once, anything later must not end a training.
            with self._measure.guarded() if self.steps else nullcontext():
                self._observe(int(step), model, batch, optimizer, value)
        finally:
            self._budget.leave()

    def _observe(self, step: int, model: nn.Module, batch: Any, optimizer: Optimizer, value: Any) -> None:
        watched = self._watch(model, optimizer)
        record = watched.record(step, batch, value)  # what the loop has computed
        if self.steps and step <= self.steps[-1].step:
            self._measure.note("step numbers went back or repeated: the log keeps the later ones")
        self.steps.append(record.stats)
        index, known, diagnosis = len(self.steps) - 1, len(self._measure.samples), Diagnosis()
        with self._measure.guarded():
            self._measure.settle(watched)
            watched.probe.gather(record.batches)
            state = self._detector.update(index, record.stats.loss)  # calm, or a spike
            diagnosis = self._tracker.update(Situation(state, record, self.steps, watched, self._measure))  # why
            self._detector.correct(diagnosis.correction, index, record.stats.loss)
            self._measure.sample(watched, record, calm=state.phase == "calm" and record.stats.finite)
        for text in diagnosis.notes:
            self._measure.note(text)
        self._write(record.stats, self._measure.samples[known:], diagnosis.spikes)
        watched.keep(record)

    def attach(self, model: nn.Module, optimizer: Optimizer, *, first_step: int = 0) -> Self:
        """Observe by itself before every `optimizer.step()`: inputs, targets and losses are recorded as they pass by.

        The loss must be a module that the loop calls (or None with a model that returns its own).
        """
        if self.loss is not None and not isinstance(self.loss, nn.Module):
            raise ValueError(
                "attach records targets where the loss is called: it must be an nn.Module such as nn.CrossEntropyLoss(). "
                "With a plain function call observe(step, model, batch, optimizer) in the loop."
            )
        watched = self._watch(model, optimizer)
        if id(optimizer) in self._attached:
            return self
        self._attached.add(id(optimizer))
        state = {"step": first_step}

        def before_step(hooked: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
            if closure is not None:
                self._measure.note("a step with a closure cannot be observed by attach; call observe inside the closure")
            elif watched.recorder.batch() is None:
                self._measure.note("no batch passed through the model and the loss that the monitor knows; call observe instead")
            else:
                self.observe(state["step"], model, None, optimizer)
            state["step"] += 1

        self._handles.append(optimizer.register_step_pre_hook(before_step))
        return self

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to record batches and losses; `observe` does so by itself from its first call on."""
        self._watch(model, optimizer)

    def close(self, reason: str = "closed") -> None:
        """Take all hooks away and end the log."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for watched in self._watched.values():
            watched.close()
        self._watched = {}
        if self._log is not None:
            self._log.write(kind="end", reason=reason, **self.report().end_record())
            self._log.close()
            self._log = None

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close("closed" if kind is None else kind.__name__)

    def report(self) -> MonitorReport:
        """What was seen so far, as findings."""
        return summarise(
            self.steps, self._measure.samples, self._tracker.spikes, self._measure.match,
            training_seconds=self._budget.training, monitor_seconds=self._budget.used, notes=self._measure.all_notes(),
        )  # fmt: skip

    def _watch(self, model: nn.Module, optimizer: Optimizer) -> WatchedModel:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise ValueError(
                "observe takes (step, model, batch, optimizer) with an nn.Module and a torch optimizer. "
                f"Got {type(model).__name__} and {type(optimizer).__name__}."
            )
        known = self._watched.get(id(optimizer))
        if known is None or known.model is not model or known.trained != len(trained(optimizer)):
            other = next((w for w in self._watched.values() if w.model is model), None)
            known = WatchedModel(model, self.loss, optimizer, self._probe, self._target, other)
            self._watched[id(optimizer)] = known
            self._write_header(known)
        return known

    # Log and scalars

    def _write_header(self, watched: WatchedModel) -> None:
        from theodolite import __version__

        if self._log is not None:
            self._log.write(
                kind="run", schema=1, started=datetime.now(UTC).isoformat(timespec="seconds"), version=__version__,
                model=type(watched.inner).__name__, parameters=sum(p.numel() for p in watched.named.values()),
                loss="own loss" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__),
                optimizer=type(watched.optimizer).__name__, budget=self.budget, curvature=self._measure.probe.by or "auto",
            )  # fmt: skip

    def _write(self, stats: StepStats, samples: Sequence[CurvatureSample], spikes: Sequence[Spike]) -> None:
        """What a step has shown, to the log and to the writer of scalars."""
        if self._log is not None:
            for sample in samples:
                self._log.write(kind="look", **sample.row())
            for spike in spikes:
                row, found = spike.row(), finding_of(spike)
                row |= {"severity": found.severity.value, "sentence": found.sentence, "advice": found.advice}
                self._log.write(kind="spike", **{name: value for name, value in row.items() if name != "rate"})
            self._log.write(kind="step", **stats.row())
        if self._writer is not None:
            for sample in samples:
                names = ("critical_rate", "ratio", "sharpness", "kernel_norm", "top_share", "agop_alignment")
                self._write_scalars(f"theodolite/{sample.on}", sample, names)
            self._write_scalars("theodolite", stats, ("loss", "gradient_norm", "update_norm"))

    def _write_scalars(self, prefix: str, values: CurvatureSample | StepStats, names: Sequence[str]) -> None:
        for name in names:
            if (number := getattr(values, name)) is not None:
                self._writer.add_scalar(f"{prefix}/{name}", number, values.step)
