"""All theorems on learning a step size as one sheet: those on one quadratic, on least-squares tasks, and on SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from theodolite.experiments import Figure, sizes
from theodolite.experiments.lab.panels import draw_panels
from theodolite.experiments.step_size import least_squares_theorems, quadratic_theorems
from theodolite.experiments.study import InParts
from theodolite.results import Row


class Theory(InParts):
    """One computation for each statement."""

    sizes = sizes(least_squares_theorems.SIZES, **quadratic_theorems.SIZES)
    parts: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Iterable[Row]]]] = {
        **quadratic_theorems.PARTS,
        **least_squares_theorems.PARTS,
    }

    def jobs(self, p: Any) -> Iterator[dict[str, Any]]:
        yield from quadratic_theorems.jobs(p)
        yield from least_squares_theorems.jobs(p)


class Theorems(Figure):
    """The theory of the step size, statement by statement.

    T1: the gradient of the last loss vanishes or explodes. T2 to T4: that of (1/t) log f has one root, and is bounded from both
    sides. T5: descending on it converges. T6: autograd fails where the loss leaves the range of the numbers. T7 to T15, gradient
    descent on random least-squares tasks: with few samples train-by-train takes a constant rate and fits the noise,
    train-by-validation one of order 1/t; with many both agree. T16 and T17: the same for SGD. T18: the tools.
    """

    study, id = Theory(), "step-size/theorems"
    where = "Wang et al. 2021, sections 3 to 4 and appendices; Wu 2023, sections 5.3, 5.4 and D.1 to D.5"
    departs = (
        "L is the smallest constant that the drawn tasks allow where the proofs take 100, at which most thresholds are empty. "
        "C is 1/(1280 L⁵σ²), which η₂t/32L = 5C/4 gives; printed is 1/(819.2 L⁵σ²)."
    )
    claims = {**quadratic_theorems.CLAIMS, **least_squares_theorems.CLAIMS}

    def draw(self, rows: list[Row]) -> Any:
        return draw_panels(*quadratic_theorems.panels(rows), *least_squares_theorems.panels(rows), size=(4.2, 3.2))
