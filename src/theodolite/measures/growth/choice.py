"""`landscape_aware_growth`: all operators are tried for a few steps, the one with the least validation loss goes on.

`Ĝ = argmin ℓ_q(G)`, ℓ_q the validation loss q steps after growing (LAG@q). The loss right after growing says little about that
after training; the loss after a few hundred steps may say much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.arguments import a_path, a_text, checked, count, integer, one_of, positive, whole
from theodolite.arguments import seed as a_seed
from theodolite.measures.growth.diagnostics import ranks_mean_something, told_apart
from theodolite.measures.growth.lag import USUAL_HORIZON, TrialCurves, dropped_now, gain_of, has_settled
from theodolite.measures.growth.operators import GrowthOperator
from theodolite.measures.growth.optimizer_state import STATES
from theodolite.measures.growth.runs import Arm, Run, Runs, refuse_other_streams, step_flops
from theodolite.measures.growth.search import looks_at, prepared, resting_place, some_baselines
from theodolite.problem.arguments import a_loss, a_model
from theodolite.problem.calling import Loss
from theodolite.progress import Advance, counting
from theodolite.results import Cost, Outcome, Result, Row
from theodolite.text import grouped, listed, number
from theodolite.training.schedules import Schedule

#: Steps of a trial at most, and between looks, where nobody says how long the grown model will be trained.
MOST_STEPS, USUAL_EVERY = 1000, 50


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GrowthChoice(Result):
    """The operator that a trial chose, and what it saw.

    Attributes:
        model, optimizer: of the best operator after the trial: training goes on from here, at step `next_step`. None in a result
            that was loaded.
        operators: the candidates, in the order in which ties are broken.
        steps: where losses were looked at, counted from growing.
        parts: (candidates, looks, parts), losses on the parts of the validation data; NaN from where a candidate was dropped,
            infinite where it diverged.
        weights: (parts,), what the parts weigh in the mean.
        horizon: how long the grown model is to be trained, None where nobody said.
        settled: whether the trial ended because its ranks had settled; None for a trial of given length.
        next_step: the number of the step at which training goes on, for `train(..., first=)`.
        step_flops, small_step_flops: floating-point operations of one step of the grown and of the small model; validation is not
            counted.
        baselines: rows for the small model trained on and for one from scratch, at the FLOPs of the best operator alone and at
            those of all trials.
        stream: the check sum of the batches that every candidate saw.
    """

    model: nn.Module | None
    optimizer: Optimizer | None
    operators: tuple[GrowthOperator, ...]
    steps: tuple[int, ...]
    parts: Tensor
    weights: Tensor
    horizon: int | None
    settled: bool | None
    next_step: int
    step_flops: float
    small_step_flops: float
    baselines: tuple[Row, ...]
    stream: int
    notes: tuple[str, ...] = ()

    @property
    def curves(self) -> TrialCurves:
        """The losses, with their paired errors."""
        return TrialCurves(tuple(o.name for o in self.operators), self.steps, self.parts.numpy(), self.weights.numpy())

    @property
    def ranking(self) -> tuple[GrowthOperator, ...]:
        """The operators from the best to the worst; those that were dropped come last."""
        return tuple(self.operators[c] for c in self.curves.ranked())

    @property
    def best(self) -> GrowthOperator:
        """The operator with the least validation loss at the end of the trial."""
        return self.operators[self.curves.leader]

    @property
    def tied(self) -> tuple[GrowthOperator, ...]:
        """Operators that are not told apart from the best: behind by less than twice the paired error."""
        return tuple(self.operators[c] for c in self.curves.tied())

    @property
    def gaining(self) -> tuple[GrowthOperator, ...]:
        """Operators that were gaining on the best fast enough to pass it by the horizon."""
        curves = self.curves
        far = self.horizon or USUAL_HORIZON * max(1, self.lag)
        gains = {c: gain_of(curves, c, far) for c in curves.alive if c != curves.leader}
        return tuple(self.operators[c] for c, gain in gains.items() if gain is not None and gain.may_pass)

    @property
    def lag(self) -> int:
        """Steps of the trial."""
        return self.steps[-1]

    @property
    def transition(self) -> float | None:
        """The step at which the ranks of the trial turned, None where there is none or the ranks are noise."""
        return self.curves.transition()

    @property
    def trial_steps(self) -> int:
        """Steps of all candidates together."""
        seen = (~np.isnan(self.curves.losses)).sum(axis=1)
        return sum(self.steps[n - 1] for n in seen if n)

    @property
    def trial_flops(self) -> float:
        """Floating-point operations of all candidates' steps."""
        return self.trial_steps * self.step_flops

    @property
    def paid(self) -> bool | None:
        """Whether growing paid: the small model trained on, at equal FLOPs, is behind by twice the error."""
        rows = [row for row in self.baselines if row["operator"] == "small" and row["step"] > 0]
        return all(row["behind"] > 0 and told_apart(row["behind"], row["error"]) for row in rows) if rows else None

    def rows(self) -> list[Row]:
        """One row per operator and look, then the baselines.

        `loss` is the validation loss, `behind` its distance from that of the best, with its paired `error`; `flops` what the run
        has taken, and `equal_to` what takes as much, for a baseline.
        """
        curves, found = self.curves, []
        for c, operator in enumerate(self.operators):
            for look, step in enumerate(self.steps):
                if math.isnan(loss := float(curves.losses[c, look])):
                    break
                behind, error = curves.behind(c, look=look)
                row = {"operator": operator.name, "step": step, "loss": loss, "behind": behind, "error": error}
                found.append({**row, "flops": step * self.step_flops, "equal_to": ""})
        return [*found, *(dict(row) for row in self.baselines)]

    def save(self, path: str | PathLike[str]) -> None:
        """Write what the result says; the model and the optimizer are for their own `save_pretrained` or `state_dict`."""
        super(GrowthChoice, replace(self, model=None, optimizer=None)).save(path)

    def sentence(self) -> str:
        return " ".join(part for part in (self._lead(), self._horizon(), self._baselines(), self._cost(), *self.notes) if part)

    def _lead(self) -> str:
        curves, best = self.curves, self.best.name
        others = [c for c in curves.ranked() if c != curves.leader and c in curves.alive]
        loss = number(float(curves.losses[curves.leader, -1]))
        after = f"after {self.lag} steps" if self.lag else "right after growing"
        if not math.isfinite(curves.losses[curves.leader, -1]):
            return f"All operators diverged {after}: lower the learning rate."
        if not others:
            return f"{best} has validation loss {loss} {after}; no other operator is left in the trial."
        behind, error = curves.behind(others[0])
        lead = (
            f"{best} has the least validation loss {after}, {loss}; {curves.names[others[0]]} is {number(behind, error)} behind."
        )
        kept = curves.losses[curves.alive, -1]
        if len(curves.alive) > 2 and not ranks_mean_something(kept, curves.noise):
            return f"{lead} The spread of all is below three times the noise: their order says nothing."
        return f"{lead} Not told apart from it: {listed([o.name for o in self.tied], 4)}." if self.tied else lead

    def _horizon(self) -> str:
        ends = {
            True: f"The ranks have settled within {self.lag} steps.",
            False: f"The trial reached its limit of {self.lag} steps before the ranks settled.",
            None: "",
        }[self.settled]
        far = f" of {self.horizon}" if self.horizon else ""
        gaining = f" {listed([o.name for o in self.gaining], 4)} gained on it fast enough to pass it." if self.gaining else ""
        short = (
            f"This is what the first {self.lag}{far} steps say: short trials favour operators that preserve the loss.{gaining}"
        )
        return f"{ends} {short}".strip()

    def _baselines(self) -> str:
        parts = []
        for name, words in (("small", "The small model trained on"), ("scratch", "The grown model from scratch")):
            rows = [row for row in self.baselines if row["operator"] == name and row["step"] > 0]
            if rows:
                ends = [f"{number(row['loss'])} for the FLOPs of {row['equal_to']}" for row in rows]
                parts.append(f"{words} has {' and '.join(ends)}.")
        if self.paid is not None:
            parts.append("Growing has paid." if self.paid else "Growing has not paid so far.")
        return " ".join(parts)

    def _cost(self) -> str:
        if not self.trial_steps:
            return "No step was taken."
        lost = 100 * (1 - self.lag / self.trial_steps)
        return f"The trials took {self.trial_steps} steps, {grouped(self.trial_flops)} FLOPs, {lost:.0f} % of it thrown away."


def _a_lag(name: str, value: Any) -> int | Literal["auto"]:
    wanted = "'auto', or a number of steps of at least 0"
    return "auto" if isinstance(value, str) and value == "auto" else integer(name, value, least=0, wanted=wanted)


@checked(
    model=a_model, loss=a_loss, layers=count, lag=_a_lag, steps=count, baselines=some_baselines, checkpoint=a_path,
    batch_size=count, first=whole, state=one_of(*STATES), body=a_text, clip=positive, target=a_text, seed=a_seed,
)  # fmt: skip
def landscape_aware_growth(
    model: nn.Module,
    loss: Loss,
    data: Any,
    optimizer: Any,
    *,
    layers: int,
    validation: Any,
    operators: Any = "all",
    lag: int | Literal["auto"] = "auto",
    steps: int | None = None,
    schedule: Schedule | Mapping[int, float] | float | None = None,
    every: int | Sequence[int] | None = None,
    baselines: Sequence[str] = ("small",),
    prune: bool = True,
    engine: Any = "serial",
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = False,
    batch_size: int | None = None,
    shuffle: bool = True,
    first: int = 0,
    clip: float | None = None,
    state: Literal["copy", "zero_new", "reset"] = "copy",
    body: str | None = None,
    target: str = "labels",
    seed: int = 0,
    progress: bool | None = None,
) -> GrowthChoice:
    """Grow a trained model by every operator, train each for a few steps on the same batches, and keep the best.

    The small model and its optimizer are left as found. Each candidate sees the same batches in the same order and is judged on
    the same validation data, in eval mode; so differences have paired errors.

    Args:
        loss, data, batch_size, shuffle, clip, target: as in `train`.
        optimizer: the one that the model was trained with, whose state goes on, or a new one by a function of the parameters.
        layers: the depth to grow to.
        validation: data that training does not see; fixed.
        operators: "all" (every start and block, copied and random, and "identity"), or a list of operators, names or lists.
        lag: steps of the trial. "auto" ends it when its own losses say so: ranks agree with those at half the steps, the lead is
            above its error, and nobody gains fast enough to pass the leader within `steps`; all trials together take at most
            `steps` steps.
        steps: how long the grown model is to be trained, trial included. None: 20 times as long as the trial.
        schedule: the learning rate as a function of the step. Growing does not restart it: it goes on at `first`.
        every: steps between looks at the validation loss, or a list of them; by default ten looks in a trial of given length.
        baselines: "small", the small model trained on, and "scratch", the grown one from new weights, at equal FLOPs with all
            trials counted. () leaves them out; each costs as much as all trials together.
        prune: drop candidates that cannot be the best at the end any more.
        engine: "serial", or an engine of `runners`, each candidate a job.
        checkpoint, resume: folder in which each run is kept at each look, and whether to go on with a search that is there.
        first: steps that the small model has been trained for: the schedule and the order of the data go on from there.
        state: of the optimizer for new layers, and `body`, the list of blocks: as in `grow`.
        seed: of random layers, the order of the data and dropout.

    Returns:
        The choice: the best operator, its model and optimizer after the trial, and the losses of all.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    >>> x = torch.randn(32, 4)
    >>> choice = landscape_aware_growth(
    ...     model, nn.MSELoss(), (x[:16], x[:16]), "adam", schedule=0.01, validation=(x[16:], x[16:]), layers=3, lag=4)
    >>> choice.lag, choice.best == choice.ranking[0], len(choice.operators)
    (4, True, 5)
    """
    began = time.perf_counter()
    trial = steps or MOST_STEPS
    recipe, chosen = prepared(
        model, loss, data, optimizer, validation, operators, layers, trial if lag == "auto" else lag, seed,
        schedule=schedule, batch_size=batch_size, shuffle=shuffle, first=first, state=state, body=body, target=target, clip=clip,
    )  # fmt: skip
    if lag == "auto":
        # All trials together take at most as long as the training they are for.
        usual = USUAL_EVERY if steps is None else max(1, min(USUAL_EVERY, steps // (20 * len(chosen))))
        looks = looks_at(every, max(1, trial if steps is None else steps - (len(chosen) - 1)), usual)
    else:
        looks = looks_at(every, lag, max(1, lag // 10))
    rules = _Rules(lag == "auto", prune, steps, None if lag != "auto" or steps is None else steps)
    settings = {"seed": seed, "lag": lag, "steps": steps, "looks": looks, "prune": prune}
    arms: list[Arm] = [*chosen, *baselines]  # type: ignore[list-item]
    with (
        resting_place(recipe, arms, engine, checkpoint, resume, settings, rests=True) as runs,
        counting("trying operators", progress=progress) as count,
    ):
        curves, settled, stream, notes = _tried(runs, len(chosen), looks, rules, engine, seed, count)
        best = runs.open(curves.leader, seed)
        batch = next(recipe.batches(seed))
        flops, small = (step_flops(m, recipe, batch) for m in (best.model, recipe.model))
        choice = GrowthChoice(
            model=best.model,
            optimizer=best.optimizer,
            operators=tuple(chosen),
            steps=curves.steps,
            parts=torch.from_numpy(curves.parts),
            weights=torch.from_numpy(curves.weights),
            horizon=steps,
            settled=settled,
            next_step=first + curves.steps[-1],
            step_flops=flops,
            small_step_flops=small,
            baselines=(),
            stream=stream,
            notes=notes,
            outcome=Outcome.FINISHED if math.isfinite(curves.losses[curves.leader, -1]) else Outcome.DIVERGED,
            seed=seed,
        )
        rows = [row for name in baselines for row in _baseline(runs, arms.index(name), choice, best, engine, seed, count)]  # type: ignore[arg-type]
    route = engine if isinstance(engine, str) else engine.name
    return replace(choice, baselines=tuple(rows), cost=Cost(time.perf_counter() - began, route))


@dataclass(frozen=True)
class _Rules:
    """When a trial ends, and who is dropped before: with `auto` as far as `horizon`, within `budget` steps of all candidates."""

    auto: bool
    prune: bool
    horizon: int | None
    budget: int | None


def _tried(
    runs: Runs, candidates: int, looks: list[int], rules: _Rules, engine: Any, seed: int, count: Advance
) -> tuple[TrialCurves, bool | None, int, tuple[str, ...]]:
    """All candidates from look to look, until the trial is over: the losses, whether they have settled, the stream, notes."""
    weights = np.array(runs.recipe.validation.weighting.weights)
    parts = np.full((candidates, 0, len(weights)), math.nan)
    names = tuple(arm.name for arm in runs.arms[:candidates] if isinstance(arm, GrowthOperator))
    alive, taken, stream, notes = list(range(candidates)), 0, 0, dict[str, None]()
    curves = TrialCurves(names, (), parts, weights)
    for place, look in enumerate(looks):
        cost = len(alive) * (look - looks[place - 1]) if place else 0
        if rules.budget is not None and place > 1 and taken + cost > rules.budget:
            return curves, False, stream, tuple(notes)
        rows = runs.perform([{"arm": c, "seed": seed, "looks": [look], "rests": True} for c in alive], engine, count)
        refuse_other_streams((row for row in rows if np.isfinite(row["parts"]).all()), names)
        taken += cost
        column = np.full((candidates, 1, len(weights)), math.nan)
        for row in rows:
            column[row["arm"], 0] = np.where(np.isfinite(row["parts"]).all(), row["parts"], math.inf)
            notes.update(dict.fromkeys(row["notes"]))
        curves = TrialCurves(names, (*curves.steps, look), np.concatenate([curves.parts, column], axis=1), weights)
        stream = next((row["stream"] for row in rows if row["arm"] == curves.leader), stream)
        if rules.auto and has_settled(curves, rules.horizon):
            return curves, True, stream, tuple(notes)
        if rules.prune and place + 1 < len(looks):
            gone = dropped_now(curves, rules.horizon if rules.auto else looks[-1])
            alive = [c for c in alive if c not in gone]
            for c in gone:
                runs.drop(c, seed)
    return curves, False if rules.auto else None, stream, tuple(notes)


def _baseline(runs: Runs, arm: int, choice: GrowthChoice, best: Run, engine: Any, seed: int, count: Advance) -> list[Row]:
    """A baseline at the FLOPs of the best operator alone, and at those of all trials."""
    name = str(runs.arms[arm])
    flops = choice.small_step_flops if name == "small" else choice.step_flops
    ends = {
        round(choice.trial_flops / flops): "all trials", round(choice.lag * choice.step_flops / flops): "the best operator alone",
    }  # fmt: skip
    looks = sorted({0, *ends})
    rows = runs.perform([{"arm": arm, "seed": seed, "looks": looks, "rests": False}], engine, count)
    curves, found = choice.curves, []
    for row in rows:
        against = best.seen[0 if row["step"] == 0 else choice.lag]
        finite = bool(np.isfinite(row["parts"]).all() and np.isfinite(against).all())
        behind, error = curves.mean(np.subtract(row["parts"], against)) if finite else (math.inf, 0.0)
        loss = curves.mean(np.array(row["parts"]))[0] if finite else math.inf
        entry = {"operator": name, "step": row["step"], "loss": loss, "behind": behind, "error": error}
        found.append({**entry, "flops": row["step"] * flops, "equal_to": ends.get(row["step"], "") if row["step"] else ""})
    return found
