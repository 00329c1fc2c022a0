"""Looks within a budget: what may be measured now, what it cost, and what went wrong, without ever ending a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from theodolite.errors import NonFiniteError
from theodolite.monitors.looks import Look, Looker
from theodolite.monitors.purse import Purse
from theodolite.monitors.subject import Subject
from theodolite.monitors.vitals import Vitals
from theodolite.problem import Problem
from theodolite.problem.batches import Batch

#: Seconds a whole run may spend on spikes beyond its budget: a short run still gets its diagnosis.
GRACE = 2.0
#: Steps of training a first look costs, until its price is known.
FIRST_LOOK = 20.0
#: Steps that are timed before the first look of calm times.
TIMED = 5


class Inspector:
    """Takes looks at a subject, pays for them and keeps them; `heard` is told of each."""

    def __init__(self, looker: Looker, purse: Purse, heard: Callable[[Look], None]) -> None:
        self.looker, self.purse, self._heard = looker, purse, heard
        self.looks: list[Look] = []
        self.notes: dict[str, int] = {}
        self.steps = 0

    def affords(self, what: str) -> bool:
        """Whether the budget pays for a look of this kind now; nobody knows before a few steps were timed."""
        return self.purse.affords(what, guess=self._guess()) and (self.steps >= TIMED or self.purse.budget is None)

    def look(
        self,
        subject: Subject,
        problem: Callable[[], Problem],
        vitals: Vitals,
        *,
        on: str,
        why: str,
        split: bool = False,
        urgent: bool = False,
        features: bool = False,
        coming_step: bool = True,
    ) -> Look | None:
        """A look at the weights as they stand; None where it failed, or where an urgent one is beyond all credit."""
        if urgent and not (self.purse.affords(on, urgent=True, guess=self._guess()) or self.purse.overdrawn < GRACE):
            self.note("a spike was not looked at closely: the budget was spent")
            return None

        def measure() -> Look:
            look = self.looker.look(
                problem(), subject.optimizer, step=vitals.step, on=on, why=why, rate=vitals.rate, split=split,
                coming_step=coming_step, thorough=urgent or self.purse.budget is None,
            )  # fmt: skip
            if not features:
                return look
            notes: list[str] = []
            look = replace(look, agop_alignment=subject.feature_alignment(notes))
            for text in notes:
                self.note(text)
            return look

        began = time.perf_counter()
        found: Look | None = self._safely(subject, measure)
        self.purse.pay(on, time.perf_counter() - began)
        if found is not None:
            self.looks.append(found)
            self._heard(found)
        return found

    def probe_loss(self, subject: Subject) -> float | None:
        """The loss of the probe at the weights as they stand."""
        if not subject.has_probe:
            return None
        began = time.perf_counter()
        loss: float | None = self._safely(subject, lambda: subject.probe().loss())
        self.purse.pay("probe loss", time.perf_counter() - began, from_budget=False)
        return loss

    def typical_loss(self, subject: Subject, batches: list[Batch]) -> float | None:
        """The median loss of parts of a step's batches: single hard samples do not move it."""
        found: float | None = self._safely(subject, lambda: subject.typical_loss(batches)) if batches else None
        return found

    def note(self, text: str) -> None:
        """Something the report should tell."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def all_notes(self) -> tuple[str, ...]:
        counted = [text if n == 1 else f"{text} ({n} times)" for text, n in self.notes.items()]
        return (*counted, *sorted(self.looker.notes))

    def _guess(self) -> float:
        """The price of a look of which none was taken yet: that of the other kind, and more, or what usual models pay."""
        known = [self.purse.prices[on] for on in ("batch", "probe") if on in self.purse.prices]
        return 1.5 * known[0] if known else FIRST_LOOK * self.purse.training / max(1, self.steps)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What goes wrong in here is noted, and training goes on."""
        try:
            yield
        except NonFiniteError:
            pass  # the vital signs tell of it
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            self.note(f"a look failed ({type(error).__name__}: {first})")

    def _safely(self, subject: Subject, measure: Callable[[], Any]) -> Any:
        with self.guarded(), subject.measuring():
            return measure()
        return None
