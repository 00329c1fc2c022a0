"""`Monitor`: why did my loss spike, was it harmful, what should the learning rate be, are features learned?"""

from __future__ import annotations

from datetime import UTC, datetime
from os import PathLike
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.measures.dynamics.spikes import MatchTable
from theodolite.monitors.casebook import Casebook
from theodolite.monitors.diagnosis import Spike, finding_of
from theodolite.monitors.inspector import Inspector
from theodolite.monitors.log import LogWriter
from theodolite.monitors.looks import Look, Looker
from theodolite.monitors.purse import Purse
from theodolite.monitors.rate_schedules import By
from theodolite.monitors.report import MonitorReport, summarise
from theodolite.monitors.subject import Subject
from theodolite.monitors.vitals import Vitals, norm_of, rate_of, second_moment, trained
from theodolite.problem.batches import Batch

#: Steps between two losses of the probe in calm times.
PROBE_LOSS_EVERY = 20


class Monitor:
    """Watches a training run from inside its loop and explains its spikes.

    Every step: loss, gradient norm, size of the update, learning rate. On sampled steps and around spikes: the critical
    learning rate of the batch, sharpness on a fixed probe set, the part of the loss in the top eigenspace, the drift of the
    features. Training is not changed by a bit: nothing of the model, the optimizer or the random state is written to.

    Parameters
    ----------
    loss : `(output, target) -> scalar`, or None for models that return `.loss`.
    probe : fixed data for sharpness and features, in any form `Problem` takes; None copies the first batch
        (32 to 128 samples).
    budget : share of the training time that looks may take; None looks at every step.
    log : file or folder for a JSON-lines log, which `theodolite watch` shows while training goes on.
    by : the matrix whose top eigenvalue is tracked, `"kernel"`, `"gauss_newton"` or `"hessian"`; None chooses.
    top : dimension of the top eigenspace; None means 5 where the tangent kernel is written out and 1 elsewhere.
    target : key of the target in mapping batches.
    writer : something with `add_scalar(name, value, step)`, such as TensorBoard's SummaryWriter.

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

    def __init__(
        self,
        loss: Any,
        *,
        probe: Any = None,
        budget: float | None = 0.25,
        log: str | PathLike[str] | None = None,
        by: By | None = None,
        top: int | None = None,
        target: str = "labels",
        writer: Any = None,
        seed: int = 0,
    ) -> None:
        if loss is not None and not callable(loss):
            raise ValueError(f"loss must be a callable (output, target) -> scalar, or None. Got {type(loss).__name__}.")
        if budget is not None and not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(f"budget is a share of the training time, such as 0.25, or None for every step. Got {budget!r}.")
        if by not in (None, "kernel", "gauss_newton", "hessian"):
            raise ValueError(f"by must be 'kernel', 'gauss_newton', 'hessian' or None. Got {by!r}.")
        self.loss, self.budget = loss, budget
        self._probe, self._target, self._writer = probe, target, writer
        self._log = None if log is None else LogWriter(log)
        self._purse = Purse(budget)
        self._inspector = Inspector(Looker(by=by, top=top, seed=seed), self._purse, self._write_look)
        self._casebook = Casebook(self._inspector, self._write_spike)
        self._subjects: dict[int, Subject] = {}  # by optimizer
        self._subject: Subject | None = None
        self._handles: list[Any] = []
        self._attached: set[int] = set()
        self._closed = False
        self.vitals: list[Vitals] = []
        self._counts = [0, 0, 0, 0]  # both, only up, only exceeded, neither
        self._turn = 0

    # The three ways in

    def observe(
        self, step: int, model: nn.Module, batch: Any, optimizer: Optimizer, *, value: float | torch.Tensor | None = None
    ) -> None:
        """Look at one step, after `backward` and before `optimizer.step()`.

        `batch` is what the step was computed from (a list of them where gradients were accumulated); None takes the one that
        passed through the model. `value` is the loss of the step where you have it; it is otherwise overheard.
        """
        if self._closed:
            raise ValueError("This monitor is closed. Make a new one; with the same log it goes on where this one ended.")
        self._purse.enter()
        try:
            if not self.vitals:  # what is wrong from the start is said at once, anything later must not end a training
                self._observe(step, model, batch, optimizer, value)
            else:
                with self._inspector.guarded():
                    self._observe(step, model, batch, optimizer, value)
        finally:
            self._purse.leave()

    def attach(self, model: nn.Module, optimizer: Optimizer, *, first_step: int = 0) -> Self:
        """Observe by itself before every `optimizer.step()`: inputs, targets and losses are overheard.

        The loss must be a module that the loop calls (or None with a model that returns its own).
        """
        if self.loss is not None and not isinstance(self.loss, nn.Module):
            raise ValueError(
                "attach overhears targets where the loss is called: it must be an nn.Module such as nn.CrossEntropyLoss(). "
                "With a plain function call observe(step, model, batch, optimizer) in the loop."
            )
        self.listen(model, optimizer)
        if id(optimizer) in self._attached:
            return self
        self._attached.add(id(optimizer))
        state = {"step": first_step}

        def before_step(hooked: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
            if closure is not None:
                self._inspector.note("a step with a closure cannot be observed by attach; call observe inside the closure")
            elif self._subject is not None and self._subject.tap.batch() is None:
                self._inspector.note(
                    "no batch passed through the model and the loss that the monitor knows; call observe instead"
                )
            else:
                self.observe(state["step"], model, None, optimizer)
            state["step"] += 1

        self._handles.append(optimizer.register_step_pre_hook(before_step))
        return self

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to overhear batches and losses; `observe` does so by itself from its first call on."""
        self._of(model, optimizer)

    def close(self, reason: str = "closed") -> None:
        """Take all hooks away and end the log."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for subject in self._subjects.values():
            subject.close()
        self._subjects, self._subject = {}, None
        if self._log is not None:
            self._log.write(kind="end", reason=reason, **self.report().end_record())
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close("closed" if kind is None else kind.__name__)

    def report(self) -> MonitorReport:
        """What was seen so far, as findings."""
        return summarise(
            self.vitals, self._inspector.looks, self._casebook.spikes, self._match(),
            training_seconds=self._purse.training, monitor_seconds=self._purse.used, notes=self._inspector.all_notes(),
        )  # fmt: skip

    def _match(self) -> MatchTable:
        both, only_up, only_exceeded, neither = self._counts
        return MatchTable(both=both, only_up=only_up, only_exceeded=only_exceeded, neither=neither)

    # One step

    def _observe(self, step: int, model: nn.Module, batch: Any, optimizer: Optimizer, value: Any) -> None:
        subject = self._of(model, optimizer)
        subject.tap.trains_in_train_mode = model.training
        batches = subject.parsed(self._overheard(subject) if batch is None else batch)
        vitals = self._vitals(int(step), subject, batches, value)
        if self.vitals and vitals.step <= self.vitals[-1].step:
            self._inspector.note("step numbers went back or repeated: the log keeps the later ones")
        self.vitals.append(vitals)
        self._inspector.steps = len(self.vitals) - 1
        with self._inspector.guarded():
            self._settle_pending(subject)
            subject.gather(batches)
            calm = self._casebook.update(subject, self.vitals, batches)
            if batches and vitals.finite and (calm or self.budget is None):
                self._sample(subject, vitals, batches, calm)
        self._write_step(vitals)
        subject.footprint.keep(subject.parameters)
        subject.previous = batches

    def _vitals(self, step: int, subject: Subject, batches: list[Batch], value: Any) -> Vitals:
        heard = subject.loss_of_step(batches) if value is None else float(value)
        if value is not None:
            subject.tap.take()
        gradient_norm = norm_of([p.grad for p in subject.parameters if p.grad is not None])
        moment, surprise = second_moment(subject.optimizer, gradient_norm)
        return Vitals(
            step=step,
            loss=heard,
            gradient_norm=gradient_norm,
            update_norm=subject.footprint.update(subject.parameters),
            rate=rate_of(subject.optimizer),
            moment=moment,
            surprise=surprise,
            input_size=subject.input_size if batches else None,
        )

    def _sample(self, subject: Subject, vitals: Vitals, batches: list[Batch], calm: bool) -> None:
        """The looks of calm times, at batch and probe in turn, as far as the budget goes; without one, of all times."""
        inspector, every_step = self._inspector, self.budget is None
        due, exceeded = calm and len(self.vitals) % PROBE_LOSS_EVERY == 1, None
        if (self._turn % 2 == 0 or every_step) and inspector.affords("batch"):
            look = inspector.look(subject, lambda: subject.problem(batches), vitals, on="batch", why="schedule")
            exceeded = None if look is None else look.exceeded
            self._turn += 1
        if due or exceeded is not None:
            loss = inspector.probe_loss(subject)
            if calm:
                subject.compare(vitals.loss, loss)
            subject.pending = None if exceeded is None or loss is None else (exceeded, loss)
        if (self._turn % 2 == 1 or every_step) and subject.has_probe and inspector.affords("probe"):
            inspector.look(subject, subject.probe, vitals, on="probe", why="schedule", split=True, features=True)
            self._turn += 1

    def _settle_pending(self, subject: Subject) -> None:
        """Did the step before, whose batch was looked at, raise the loss of the probe?"""
        if subject.pending is None:
            return
        (exceeded, before), subject.pending = subject.pending, None
        after = self._inspector.probe_loss(subject)
        if after is not None:
            self._counts[(0 if exceeded else 1) if after > before else (2 if exceeded else 3)] += 1

    # Odds and ends

    def _of(self, model: nn.Module, optimizer: Optimizer) -> Subject:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise ValueError(
                "observe takes (step, model, batch, optimizer) with an nn.Module and a torch optimizer. "
                f"Got {type(model).__name__} and {type(optimizer).__name__}."
            )
        known = self._subjects.get(id(optimizer))
        if known is None or known.model is not model or known.trained != len(trained(optimizer)):
            related = next((s for s in self._subjects.values() if s.model is model), None)
            known = Subject(model, self.loss, optimizer, self._probe, self._target, related)
            self._subjects[id(optimizer)] = known
            self._write_header(known)
        self._subject = known
        return known

    def _overheard(self, subject: Subject) -> Any:
        batch = subject.tap.batch()
        if batch is None:
            raise ValueError(
                "No batch passed through the model and the loss before this step: give observe the batch, or call the model and "
                "the loss module that the monitor knows."
            )
        return batch

    def _write_spike(self, spike: Spike) -> None:
        found = finding_of(spike)
        self._write(
            "spike", start=spike.start, peak=spike.peak, end=spike.end, height=spike.height, cause=spike.cause.value,
            severity=found.severity.value, sentence=found.sentence, advice=found.advice, batch=spike.batch, ratio=spike.ratio,
            sharpness_before=spike.sharpness_before, sharpness_after=spike.sharpness_after, top_share=spike.top_share,
        )  # fmt: skip

    def _write(self, kind: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(kind=kind, **values)

    def _write_header(self, subject: Subject) -> None:
        from theodolite import __version__

        self._write(
            "run", schema=1, started=datetime.now(UTC).isoformat(timespec="seconds"), version=__version__,
            model=type(subject.inner).__name__, parameters=sum(p.numel() for p in subject.parameters),
            loss="own loss" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__),
            optimizer=type(subject.optimizer).__name__, budget=self.budget, curvature=self._inspector.looker.by or "auto",
        )  # fmt: skip

    def _write_step(self, v: Vitals) -> None:
        self._write("step", step=v.step, loss=v.loss, gradient_norm=v.gradient_norm, update_norm=v.update_norm, rate=v.rate)
        if self._writer is not None:
            for name in ("loss", "gradient_norm", "update_norm"):
                if (number := getattr(v, name)) is not None:
                    self._writer.add_scalar(f"theodolite/{name}", number, v.step)

    def _write_look(self, look: Look) -> None:
        self._write("look", **look.row())
        if self._writer is None:
            return
        for name in ("critical_rate", "ratio", "sharpness", "kernel_norm", "top_share", "agop_alignment"):
            if (number := getattr(look, name)) is not None:
                self._writer.add_scalar(f"theodolite/{look.on}/{name}", number, look.step)
