"""What does the model look at: which directions and coordinates of its input do the outputs depend on?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import theodolite as th
from theodolite.errors import TheodoliteError
from theodolite.instruments.base import InapplicableError, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.instruments.subset import OnSubset, of_samples, subset
from theodolite.measures.audit import column_names
from theodolite.measures.features import FeatureMovement, FeatureReport, feature_movement, feature_report
from theodolite.measures.features.agop import QUANTITY, token_embedding
from theodolite.measures.features.report import DENSE, cannot_start_anew
from theodolite.problem import Problem
from theodolite.problem.tensors import named_tensors
from theodolite.results import Cost, Finding, Outcome, Result, Row, Severity
from theodolite.text import listed

#: Numbers in all gradients together: fewer samples are taken of large inputs.
NUMBERS = 2**22
#: Fresh copies that the features are compared with.
COPIES = 10
#: A share of the squared gradient above which one direction is all there is.
ALONE = 0.95


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FeaturesOfModel(Result):
    """The average gradient outer product of a model in numbers, and beside those of fresh copies where these can be made."""

    report: FeatureReport
    movement: FeatureMovement | None
    missing: str
    samples: int
    population: int

    def rows(self) -> list[Row]:
        fresh = [] if self.movement is None else self.movement.rows()
        return self.report.rows() + [
            {"quantity": f"{row['quantity']}, fresh", "value": row["fresh"], "error": row["spread"]} for row in fresh
        ]

    def sentence(self) -> str:
        return self.report.sentence()


def measure_features(problem: Problem, *, samples: int, passes: int, seed: int = 0) -> FeaturesOfModel:
    """The report on at most so many samples, with so many backward passes each."""
    began = time.perf_counter()
    seen = input_shape(problem)
    part = subset(problem, seen.samples(samples, passes))
    projections = passes if seen.outputs > passes else None
    missing = cannot_start_anew(problem.model)
    return FeaturesOfModel(
        report=feature_report(part, at=seen.at, projections=projections, seed=seed),
        movement=None if missing else feature_movement(part, at=seen.at, projections=projections, copies=COPIES, seed=seed),
        missing=missing,
        samples=part.samples,
        population=problem.samples,
        outcome=Outcome.FINISHED if projections is None else Outcome.ESTIMATED,
        seed=seed,
        cost=Cost(time.perf_counter() - began, "input gradients", 0, problem.notes),
    )


@dataclass(frozen=True)
class InputShape:
    """From a look at two samples: where gradients are taken (None: the inputs), how many numbers and coordinates they have."""

    at: str | None
    numbers: int  # in one gradient of one sample
    dim: int
    outputs: int

    def samples(self, most: int, passes: int) -> int:
        """At most so many samples, fewer where their gradients would be large."""
        return max(8, min(most, NUMBERS // (passes * self.numbers)))


def input_shape(problem: Problem) -> InputShape:
    """The inputs where they are numbers; else the embedding that turns tokens into numbers."""
    first = problem.placed(problem.few(2))
    with problem.session(second=False), torch.no_grad():
        outputs = problem.output(problem.tensors(problem.leaves(grad=False)), first, 0).numel() // first.size
    floating = [t for _, t in named_tensors(first.inputs) if t.is_floating_point() and t.ndim and t.shape[0] == first.size]
    if floating:
        numbers = sum(t.numel() for t in floating) // first.size
        return InputShape(None, numbers, numbers, outputs)
    embedding = token_embedding(problem, first)
    if embedding is None:
        raise InapplicableError("the inputs are not numbers, and no embedding turns each sample into some")
    out = embedding.output
    return InputShape(embedding.name, out.numel() // first.size, out.shape[-1], outputs)


def _namer(problem: Problem, report: FeatureReport) -> Callable[[int], str]:
    """How a sentence calls a coordinate: by the name of its column, or by its number."""
    names = column_names(problem, report.dim) if report.at is None else ()
    return lambda i: repr(names[i]) if names else str(i)


class Features(OnSubset):
    name = "features"
    order = 150
    title = "What the model looks at"
    question = "On which directions and coordinates of the input do the outputs depend, and have features been learned?"
    how = (
        "The derivatives of the outputs in the inputs (for tokens: in their embeddings) of some samples, averaged to the "
        "gradient outer product G. Its effective rank (Tr G)²/‖G‖² counts the directions that matter. Where all layers can be "
        "initialised anew by their reset_parameters, G is compared with those of ten fresh copies."
    )
    source = "Radhakrishnan and others (2024), the average gradient outer product; Zhu (2024), alignment and catapults."
    quantity = QUANTITY
    efforts = ({"samples": 400, "passes": 10}, {"samples": 100, "passes": 8}, {"samples": 30, "passes": 4})

    def look(self, problem: Problem) -> None:
        super().look(problem)
        input_shape(problem)

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        problem = context.problem
        seen = input_shape(problem)
        count = min(problem.samples, seen.samples(effort["samples"], effort["passes"]))
        passes = min(effort["passes"], seen.outputs)
        times = 1 if cannot_start_anew(problem.model) else 1 + COPIES
        rows = count * passes * seen.numbers / seen.dim
        size = min(seen.dim, rows)  # of the matrices that are formed
        # Each network's G, or a Gram matrix for each pair of networks; then the eigenvectors of one.
        products = 2.0 * rows * size * seen.dim * (times if size < rows else 1 + times * (times + 1) / 2)
        seconds = 0.005 * (1 + times) + products / 4e10 + (1e-9 * size**3 if size <= DENSE else 3e-7 * size**2)
        # A backward pass to the inputs alone is about half a gradient.
        gradients = 0.5 * times * (passes + 1) * count / problem.samples
        return Work(gradients=gradients, seconds=seconds, bytes=int(8 * count * passes * seen.numbers))

    @inapplicable(TheodoliteError, NotImplementedError, ValueError)  # outputs that hang together, a zero derivative
    def run(self, context: SurveyContext, **effort: Any) -> FeaturesOfModel:
        return measure_features(context.problem, **effort, seed=context.seed)

    def findings(self, context: SurveyContext, result: FeaturesOfModel) -> list[Finding]:
        report = result.report
        advice = ""
        if report.top_share > ALONE and report.dim > 1:
            advice = "One direction of the input decides: whatever else is in the data, the outputs do not see it."
        rank = ("effective rank of the gradient outer product", report.effective_rank, report.effective_rank_error)
        called = _namer(context.problem, report)
        used = ", ".join(f"{called(i)} ({100 * share:.3g} %)" for i, share in report.coordinates[:3])
        text = f"On {of_samples(result.samples, result.population)}: {report.sentence()} Most used coordinates: {used}."
        found = [self.found(Severity.NOTE, text, "input directions", *rank, advice=advice)]
        return [*found, *self._unused(context, result), *self._movement(result)]

    def _unused(self, context: SurveyContext, result: FeaturesOfModel) -> Iterator[Finding]:
        unused = [_namer(context.problem, result.report)(i) for i in result.report.unused]
        what = "inputs" if result.report.at is None else f"features of {result.report.at}"
        text = f"{len(unused)} of {result.report.dim} {what} have no effect on any output, at any sample: {listed(unused, 4)}."
        advice = (
            "All weights on them are zero, or every unit that reads them is shut. Expected where columns were masked or pruned; "
            "else look at how the inputs are wired."
        )
        if unused:
            yield self.found(Severity.WARNING, text, "unused inputs", "inputs without effect", float(len(unused)), advice=advice)

    def _movement(self, result: FeaturesOfModel) -> Iterator[Finding]:
        movement = result.movement
        if movement is None:
            return
        row = next((row for row in movement.rows() if row["moved"]), movement.rows()[0])
        label = "features moved" if movement.moved else "features of chance"
        advice = "As it should be before training; after it, features hardly moved, or no more than these numbers can tell."
        if movement.moved:
            advice = "Features have been learned: what the outputs depend on is no longer what chance made it."
        yield self.found(Severity.NOTE, movement.sentence(), label, row["quantity"], row["value"], advice=advice)

    def figure(self, results: Results) -> Picture:
        report: FeatureReport = results[self.name].report
        rows = [{"direction": i, "share": share} for i, share in enumerate(report.shares, 1) if share > 0]
        if len(rows) < 2:
            return None
        title = "Top directions of the gradient outer product"
        axes = th.plots.curves(rows, "direction", "share", title=title, ylabel="share of the trace")
        axes.set_ylim(bottom=0)
        return axes
