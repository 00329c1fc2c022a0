"""The spectral norm of the Hessian of a model's output, the quantity that vanishes where a model becomes linear."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.kernel.scalar_output import Choice, chosen, require_problem, scalar_problem
from theodolite.operators import hessian
from theodolite.problem import Problem
from theodolite.results import Cost, Outcome, Result, Row, number


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HessianNorm(Result):
    """`value` is the largest |eigenvalue| of the Hessian of an output with respect to the measured parameters.

    Several outputs or samples give the largest of theirs; `values`, `errors` (eigen-residuals), `samples` and `outputs`
    list them all. `vector` is the eigenvector of the largest, the direction in which the output curves most.
    """

    value: float
    error: float
    values: tuple[float, ...]
    errors: tuple[float, ...]
    samples: tuple[int, ...]
    outputs: tuple[int, ...]
    vector: Tensor
    matvecs: int

    @property
    def where(self) -> tuple[int, int]:
        """(sample, output) of the largest."""
        i = self.values.index(self.value)
        return self.samples[i], self.outputs[i]

    def rows(self) -> list[Row]:
        return [
            {"sample": s, "output": o, "hessian_norm": v, "error": e, "seed": self.seed}
            for s, o, v, e in zip(self.samples, self.outputs, self.values, self.errors, strict=True)
        ]

    def sentence(self) -> str:
        sample, output = self.where
        of = f"output {output} of sample {sample}"
        if len(self.values) > 1:
            of += f", the largest of {len(self.values)}"
        return f"The Hessian of {of} has spectral norm {number(self.value, self.error)}."


def hessian_norm(
    problem: Problem,
    *,
    output: Choice = None,
    samples: Choice = None,
    tol: float = 1e-4,
    start: Any = None,
    seed: int = 0,
    progress: bool | None = None,
) -> HessianNorm:
    """Spectral norm of the Hessian of one output of one sample, or the largest of several, without forming it.

    Args:
        problem: its model, parameters and inputs are used, its loss and targets are not. Blocks of the Hessian come from
            `Problem(..., params=...)`.
        output: which of the model's outputs, one or several; may be left out where there is one.
        samples: which samples of the data; by default the first.
        start: an earlier `Eigenpairs` or columns near the wanted eigenvector, for a warm start.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    >>> data = torch.full((1, 1), 3.0).double(), torch.zeros(1, 1).double()
    >>> round(hessian_norm(Problem(model, torch.nn.MSELoss(), data)).value, 9)  # of 3 w₁ w₂
    3.0
    """
    require_problem(problem, "hessian_norm")
    began = time.perf_counter()
    problem.refuse_batch_coupling("The Hessian of an output")
    problem.check_repeatable()
    pairs = chosen(problem, output, samples)
    found = [
        top_hessian_pair(scalar_problem(problem, o, s), tol=tol, start=start, seed=seed, progress=progress) for s, o in pairs
    ]
    values = tuple(abs(float(each.values[0])) for each in found)
    errors = tuple(float(each.residuals[0]) for each in found)
    best = max(range(len(values)), key=values.__getitem__)
    return HessianNorm(
        value=values[best],
        error=errors[best],
        values=values,
        errors=errors,
        samples=tuple(s for s, _ in pairs),
        outputs=tuple(o for _, o in pairs),
        vector=found[best].vectors[:, 0],
        matvecs=sum(each.matvecs for each in found),
        outcome=next((each.outcome for each in found if not each.outcome.good), Outcome.CONVERGED),
        seed=seed,
        cost=Cost(time.perf_counter() - began, found[best].cost.route, found[best].cost.peak_bytes, problem.notes),
    )


def top_hessian_pair(
    scalar: Problem, *, tol: float = 1e-4, start: Any = None, seed: int = 0, progress: bool | None = None
) -> Eigenpairs:
    """The eigenpair of largest magnitude of the Hessian of a scalar problem's objective.

    Extreme eigenvalues often come in pairs ±λ: Lanczos tells them apart where power iteration would not settle.
    """
    return top_eigenpairs(hessian(scalar), 1, which="magnitude", tol=tol, start=start, seed=seed, progress=progress)
