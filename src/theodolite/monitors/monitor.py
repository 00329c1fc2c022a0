"""`Monitor`: is it learning, why did my loss spike, was it harmful, what should the learning rate be, are features learned?

One step, in the order of the data: the recorder (`watching`) says what the loop computed, `progress` whether it learns, the
detector (`spikes.detector`) what the loss means, the tracker (`spikes.tracker`) why, with the measurements that answer it
(`measuring`); alerts, log and report tell it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.arguments import a_number, a_text, also_called, checked, count, optional, positive, whole
from theodolite.arguments import seed as a_seed
from theodolite.interrupts import UnbrokenContext, unbroken_call
from theodolite.measures.dynamics.optimizers import plain_optimizer
from theodolite.monitors.log import SCHEMA, LogWriter
from theodolite.monitors.measuring.curvature import CurvatureProbe, CurvatureSample
from theodolite.monitors.measuring.scheduler import MeasurementScheduler, TimeBudget
from theodolite.monitors.progress.alerts import Alert, AlertKeeper, print_alert
from theodolite.monitors.progress.alerts import Situation as AlertSituation
from theodolite.monitors.progress.causes import edge_of
from theodolite.monitors.progress.tracker import ProgressSample, ProgressTracker
from theodolite.monitors.report import MonitorReport, summarise
from theodolite.monitors.spikes.detector import SpikeDetector
from theodolite.monitors.spikes.diagnosis import Spike, finding_of
from theodolite.monitors.spikes.tracker import Diagnosis, Situation, SpikeTracker
from theodolite.monitors.watching.recorder import StepStats, trained
from theodolite.monitors.watching.watched_model import StepLoss, StepRecord, WatchedModel
from theodolite.operators.matrices import MatrixName, check_matrix_or_none
from theodolite.problem import Problem
from theodolite.problem.arguments import a_loss, a_module, an_optimizer, some_data
from theodolite.results import Row

#: What a log that cannot be written means; training and measurements go on.
LOG_FAILS = "the log cannot be written, and records are kept in memory only"


class Monitor(UnbrokenContext["Monitor"]):
    """Watches a training run from inside its loop: says whether it learns, alerts where it does not, and explains its spikes.

    Every step: loss, gradient norm, size of the update, learning rate. On sampled steps: the loss against that of a guess, its
    trend, units that still get gradients, gradients and updates of each layer. Now and then, and around spikes: the critical
    learning rate of the batch, sharpness on a fixed probe set, the part of the loss in the top eigenspace, the drift of the
    features. Training is not changed by a bit: nothing of the model, the optimizer or the random state is written to.

    An alert is one line on stderr, the only thing that is ever printed: what is wrong and what to change, at most one of a kind
    in a stretch. `alerts=False` turns the line off, a function takes it instead; log, report and `on_alert` have them always.

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
        alerts: True shows alerts on stderr, False does not; a function `(line) -> None` shows them its own way.
        on_alert: called with every `Alert`, to stop a run or to send a message.

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
    @checked(
        loss=a_loss, top=count, target=a_text, seed=a_seed,
        budget=optional(partial(positive, wanted="a positive number, the share of the training time")),
        probe=lambda name, value: value if isinstance(value, Problem) else some_data(name, value),
    )  # fmt: skip
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
        alerts: bool | Callable[[str], object] = True,
        on_alert: Callable[[Alert], object] | None = None,
        seed: int = 0,
    ) -> None:
        check_matrix_or_none(by)
        for name, given in {"alerts": alerts, "on_alert": on_alert}.items():
            if not (given is None or callable(given) or (isinstance(given, bool) and name == "alerts")):
                wanted = "True, False or a function of a line" if name == "alerts" else "a function of an Alert, or None"
                raise ValueError(f"{name} must be {wanted}. Got {given!r}.")
        self._show_alert: Callable[[str], object] | None = alerts if callable(alerts) else print_alert if alerts else None
        self._on_alert = on_alert
        self.loss, self.budget = loss, budget
        self._probe, self._target, self._writer = probe, target, writer
        self._log = None if log is None else LogWriter(log)
        self._budget = TimeBudget(budget)
        self._progress, self._alerts = ProgressTracker(), AlertKeeper()
        self._validation: list[Row] = []
        self._last: WatchedModel | None = None
        self._detector, self._tracker = SpikeDetector(), SpikeTracker()
        self._measure = MeasurementScheduler(CurvatureProbe(by=by, top=top, seed=seed), self._budget)
        self._watched: dict[int, WatchedModel] = {}  # by optimizer
        self._handles: list[Any] = []
        self._attached: set[int] = set()
        self._closed = False
        self._said: dict[str, str] = {}
        self.steps: list[StepStats] = []

    # The three ways in

    def observe(
        self,
        step: int,
        model: nn.Module,
        batch: Any,
        optimizer: Optimizer,
        *,
        value: float | torch.Tensor | None = None,
        clip: float | None = None,
        clipped: bool = True,
    ) -> None:
        """Observe one step, after `backward` and before `optimizer.step()`.

        `batch` is what the step was computed from (a list of them where gradients were accumulated, an empty one where nothing
        can be measured); None takes the one that passed through the model. `value` is the loss of the step where you have it; it
        is recorded otherwise. `clip` is the factor by which clipping makes the gradients of this step smaller; where it is None
        and gradients of equal norm show that they are clipped, it is learned from them. `clipped` says whether that was done
        already. What goes wrong here is said once, by a warning and in the report, and never ends a training; only arguments that
        are no model and no optimizer are refused.
        """
        _check_arguments(model, optimizer)
        if self._closed:
            self.say("this monitor is closed; make a new one, which goes on with the same log")
            return
        self._budget.enter()
        try:
            with self.quietly("a step was not observed"):
                watched = self._watch(model, optimizer)
                watched.clipping(clip, clipped)
                self._observe(whole("step", step), watched, batch, value)
        finally:
            self._budget.leave()

    def _observe(self, step: int, watched: WatchedModel, batch: Any, value: Any) -> None:
        record = watched.record(step, batch, value, self._budget.training)  # what the loop has computed
        if self.steps and step <= self.steps[-1].step:
            self._measure.note("step numbers went back or repeated: the log keeps the later ones")
        self.steps.append(record.stats)
        index, known, diagnosis = len(self.steps) - 1, len(self._measure.samples), Diagnosis()
        self._last = watched
        look_due, look = self._progress.update(record, watched), None  # is it learning?
        with self._measure.guarded():
            look = self._progress.look(record, watched) if look_due else None
            self._measure.settle(watched)
            watched.gather(record.batches)
            state = self._detector.update(index, record.stats.loss)  # calm, or a spike
            layers = self._progress.samples[-1].layers
            diagnosis = self._tracker.update(Situation(state, record, self.steps, watched, self._measure, layers))  # why
            self._detector.correct(diagnosis.correction, index, record.stats.loss)
            self._measure.sample(watched, record, calm=state.phase == "calm" and record.stats.finite)
        for text in diagnosis.notes:
            self._measure.note(text)
        self._write(record.stats, self._measure.samples[known:], diagnosis.spikes, look)
        self._raise_alerts(watched, record, looked=look is not None)
        watched.keep(record)

    def _weights_fine(self, watched: WatchedModel, record: StepRecord, limit: float) -> bool:
        """Whether the loss of the probe, or of most of this batch, lies below a limit."""
        losses = (self._measure.probe_loss(watched), self._measure.typical_loss(watched, record.batches))
        return any(loss is not None and loss < limit for loss in losses)

    def _raise_alerts(self, watched: WatchedModel, record: StepRecord, *, looked: bool) -> None:
        """What the step and the look have shown that should not wait."""
        samples = self._progress.samples
        reference = None if not samples else max(samples[-1].loss.reference, self._progress.course.began)
        alerts = list(self._alerts.step(self.steps, reference, partial(self._weights_fine, watched, record)))
        if looked:
            here = AlertSituation(samples, edge_of(self._measure.samples), self._tracker.spikes, self.steps)
            alerts += self._alerts.look(here)
        for alert in alerts:
            self._write_record("alert", **alert.row())
            with self.quietly("an alert was not shown"):
                if self._show_alert is not None:
                    self._show_alert(str(alert))
            with self.quietly("on_alert failed"):
                if self._on_alert is not None:
                    self._on_alert(alert)

    def show_alerts_by(self, show: Callable[[str], object]) -> None:
        """Show alerts by a trainer's own logger, where they would go to stderr."""
        if self._show_alert is print_alert:
            self._show_alert = show

    def validated(self, step: int, loss: float | torch.Tensor) -> None:
        """Take a validation loss that the loop has computed after so many steps: for verdict, log and page."""
        with self.quietly("a validation loss was not taken"):
            row: Row = {"step": whole("step", step), "loss": a_number("loss", loss)}
            self._validation.append(row)
            self._write_record("validation", **row)

    def attach(self, model: nn.Module, optimizer: Optimizer, *, first_step: int = 0) -> Self:
        """Observe by itself before every `optimizer.step()`: inputs, targets and losses are recorded as they pass by.

        The loss must be a module that the loop calls (or None with a model that returns its own).
        """
        if self.loss is not None and not isinstance(self.loss, nn.Module):
            raise ValueError(
                "attach records targets where the loss is called: it must be an nn.Module such as nn.CrossEntropyLoss(). "
                "With a plain function call observe(step, model, batch, optimizer) in the loop."
            )
        optimizer = plain_optimizer(optimizer)
        watched = self._watch(model, optimizer)
        if id(optimizer) in self._attached:
            return self
        state = {"step": whole("first_step", first_step)}

        def before_step(hooked: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
            with self.quietly("a step was not observed"):
                if closure is not None:
                    self._measure.note("a step with a closure cannot be observed by attach; call observe inside the closure")
                elif watched.recorder.batch() is None:
                    text = "no batch passed through the model and the loss that the monitor knows; call observe instead"
                    self._measure.note(text)
                else:
                    self.observe(state["step"], model, None, optimizer)
            state["step"] += 1

        self._hook_steps(optimizer, before_step)
        return self

    @unbroken_call
    def _hook_steps(self, optimizer: Optimizer, before_step: Any) -> None:
        self._attached.add(id(optimizer))
        self._handles.append(optimizer.register_step_pre_hook(before_step))

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to record batches and losses; `observe` does so by itself from its first call on."""
        if not self._closed:
            self._watch(model, optimizer)

    def close(self, reason: str = "closed") -> None:
        """Take all hooks away and end the log."""
        self._take_hooks_away()
        if self._log is not None:
            with self.quietly("the log has no last line"):
                self._write_record("end", reason=reason, **self.report().end_record())
            log, self._log = self._log, None
            with self.quietly(LOG_FAILS):
                log.close()

    @unbroken_call
    def _take_hooks_away(self) -> None:
        self._closed = True
        handles, self._handles = self._handles, []
        watched, self._watched = list(self._watched.values()), {}
        for end in (*(handle.remove for handle in handles), *(one.close for one in watched)):
            with self.quietly("a hook was not taken away"):
                end()

    def _enter(self) -> Self:
        return self

    def _leave(self, error: BaseException | None) -> bool:
        self._take_hooks_away()
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return super().__exit__(kind, error, trace)
        finally:  # the log is no part of it: writing may take its time, and is interrupted like anything else
            self.close("closed" if kind is None else kind.__name__)

    # What goes wrong

    @contextmanager
    def quietly(self, what: str) -> Iterator[None]:
        """What goes wrong in here is said once, and training goes on as if nothing had been there."""
        try:
            yield
        except Exception as error:
            kind = f"{what} ({type(error).__name__}"
            self.say(f"{kind}: {(str(error).splitlines() or [''])[0]})", once=kind)

    def say(self, text: str, *, once: str | None = None) -> None:
        """Something for the report and, the first time, for a warning; later texts of the same `once` only count."""
        known = (once or text) in self._said
        text = self._said.setdefault(once or text, text)
        self._measure.note(text)
        if not known:
            with suppress(Warning):  # where warnings are errors, this one still ends no training
                warnings.warn(f"theodolite.Monitor: {text}", RuntimeWarning, stacklevel=3)

    def report(self) -> MonitorReport:
        """What was seen so far: a verdict first, then findings."""
        return summarise(
            self.steps, self._measure.samples, self._tracker.spikes, self._measure.match,
            training_seconds=self._budget.training, monitor_seconds=self._budget.used, notes=self._measure.all_notes(),
            progress=self._progress.samples, now=None if self._last is None else self._progress.now(self._last),
            alerts=self._alerts.alerts, validation=self._validation,
        )  # fmt: skip

    def _watch(self, model: nn.Module, optimizer: Optimizer) -> WatchedModel:
        _check_arguments(model, optimizer)
        optimizer = plain_optimizer(optimizer)
        known = self._watched.get(id(optimizer))
        if known is None or known.model is not model or known.trained != len(trained(optimizer)):
            other = next((w for w in self._watched.values() if w.model is model), None)
            loss = None if isinstance(model, StepLoss) else self.loss
            known = WatchedModel(model, loss, optimizer, self._probe, self._target, other)
            self._listen_to(known, optimizer)
            self._write_header(known)
        return known

    @unbroken_call
    def _listen_to(self, watched: WatchedModel, optimizer: Optimizer) -> None:
        self._watched[id(optimizer)] = watched
        watched.recorder.open()

    # Log and scalars: a full disk or a writer that fails costs records and nothing else

    def _write_header(self, watched: WatchedModel) -> None:
        from theodolite import __version__

        self._write_record(
            "run", schema=SCHEMA, started=datetime.now(UTC).isoformat(timespec="seconds"), version=__version__,
            model=type(watched.called).__name__, parameters=sum(p.numel() for p in watched.named.values()),
            loss="own loss" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__),
            optimizer=type(watched.optimizer).__name__, budget=self.budget, curvature=self._measure.probe.by or "auto",
        )  # fmt: skip

    def _write(
        self, stats: StepStats, samples: Sequence[CurvatureSample], spikes: Sequence[Spike], look: ProgressSample | None
    ) -> None:
        """What a step has shown, to the log and to the writer of scalars."""
        if look is not None:
            self._write_record("progress", **look.row())
        for sample in samples:
            self._write_record("look", **sample.row())
        seen = self._progress.samples
        guess = seen[-1].loss.trivial if seen else None
        for spike in spikes:
            row, found = spike.row(), finding_of(spike, guess=guess)
            row |= {"severity": found.severity.value, "sentence": found.sentence, "advice": found.advice}
            self._write_record("spike", **{name: value for name, value in row.items() if name != "rate"})
        self._write_record("step", **stats.row())
        if self._writer is not None:
            for sample in samples:
                names = ("critical_rate", "ratio", "sharpness", "kernel_norm", "top_share", "agop_alignment")
                self._write_scalars(f"theodolite/{sample.on}", sample, names)
            self._write_scalars("theodolite", stats, ("loss", "gradient_norm", "update_norm"))

    def _write_record(self, kind: str, **values: Any) -> None:
        """One line of the log; the next one is tried again, for a disk may be full for a while only."""
        if self._log is not None:
            with self.quietly(LOG_FAILS):
                self._log.write(kind=kind, **values)

    def _write_scalars(self, prefix: str, values: CurvatureSample | StepStats, names: Sequence[str]) -> None:
        with self.quietly("the writer of scalars fails, and its scalars are lost"):
            for name in names:
                if (number := getattr(values, name)) is not None:
                    self._writer.add_scalar(f"{prefix}/{name}", number, values.step)


def _check_arguments(model: object, optimizer: object) -> None:
    """`observe` takes (step, model, batch, optimizer): two of them in each other's place are the usual mistake."""
    a_module("model", model)
    an_optimizer("optimizer", optimizer)
