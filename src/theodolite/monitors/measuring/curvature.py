"""One measurement of the curvature of a model in training: its sharpest direction, the critical rate, the loss along it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.errors import NonFiniteError
from theodolite.interrupts import unbroken
from theodolite.linalg import Eigenpairs, top_eigenpairs
from theodolite.measures.dynamics.critical import kernel_curvature
from theodolite.measures.dynamics.eigenspace_split import split_loss_by_curvature
from theodolite.measures.dynamics.optimizers import StabilityLaw, stability_law
from theodolite.measures.kernel.problem_views import outputs_per_sample
from theodolite.monitors.rates.critical_rate import KERNEL_ROWS
from theodolite.operators import LinearOperator, tangent_kernel
from theodolite.operators.matrices import ON_PARAMETERS, MatrixName
from theodolite.problem import Problem
from theodolite.results import Row, fields_of

#: Products of one measurement, and at most where it matters most.
PRODUCTS, THOROUGH = 5, 40
#: Relative residual below which an eigenvalue counts as found; its own error is about the square.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class CurvatureSample:
    """What was measured at one place of the weights, on a batch or on the probe.

    `sharpness` is the eigenvalue that sets the edge, with its relative residual `error`; before it has converged it is too
    small and `critical_rate` too large: `exceeded` is then claimed or left open, never denied. `kernel_norm` is the largest
    eigenvalue of the tangent kernel (squared losses). `top_loss` is the part of the
    loss that lies in the top eigenspace (of `top` directions). `clip` is the factor by which clipping has made the gradients
    smaller, and with them the curvature that the optimizer meets: `sharpness` holds it.
    """

    step: int
    on: str
    why: str
    loss: float
    rate: float
    sharpness: float
    error: float
    critical_rate: float | None
    by: str
    converged: bool
    matvecs: int
    seconds: float
    kernel_norm: float | None = None
    top: int = 1
    top_loss: float | None = None
    agop_alignment: float | None = None
    rule: str = ""
    clip: float = 1.0

    @property
    def ratio(self) -> float | None:
        """Learning rate over the critical one."""
        return None if self.critical_rate is None else self.rate / self.critical_rate

    @property
    def exceeded(self) -> bool | None:
        """Whether the learning rate exceeds the critical one; None where it is not known."""
        if self.critical_rate is None:
            return None
        above = self.rate - self.critical_rate > 1e-8
        return above if above or self.converged else None

    @property
    def top_share(self) -> float | None:
        """Share of the loss in the top eigenspace."""
        return None if self.top_loss is None or not self.loss > 0 else self.top_loss / self.loss

    def row(self) -> Row:
        found = fields_of(self, "step on why loss rate sharpness error critical_rate ratio exceeded by converged matvecs seconds")
        return found | fields_of(self, "kernel_norm top top_loss top_share agop_alignment clip")


@dataclass
class CurvatureProbe:
    """Measures problems of one kind one after the other, each from the directions that the one before has found.

    `by=None` chooses: the tangent kernel for a squared loss with few outputs under plain or momentum descent, the Gauss-Newton
    matrix otherwise.
    """

    by: MatrixName | None = None
    top: int | None = None
    seed: int = 0
    starts: dict[str, Tensor] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)
    _passed: set[str] = field(default_factory=set)
    _needs_hessian: bool = False

    def measure(
        self,
        problem: Problem,
        optimizer: Optimizer,
        *,
        step: int,
        on: str,
        why: str,
        rate: float,
        split: bool,
        coming_step: bool = True,
        thorough: bool = False,
        clip: float = 1.0,
        ready: float = 1.0,
    ) -> CurvatureSample:
        """One measurement.

        `split` also asks for the part of the loss in the top eigenspace, `coming_step` is about the step that the gradients at
        hand will make (and not the last one), `thorough` spends products until the eigenvalue has converged. `clip` is the
        factor of clipped gradients, and `ready` what is still to be multiplied to those at hand.
        """
        began = time.perf_counter()
        law = self._law(optimizer, problem, coming_step, clip, ready)
        c = self._kernel_curvature(problem, law)
        facts = self._by_products(problem, law, on, split, thorough) if c is None else self._by_kernel(problem, c, law)
        sharpness = facts["sharpness"]
        critical = None if law is None else law.rate(sharpness) if sharpness > 0 else math.inf
        rule = "" if law is None else law.rule
        seconds = time.perf_counter() - began
        places: dict[str, Any] = {"step": step, "on": on, "why": why, "rate": rate, "clip": clip}
        return CurvatureSample(critical_rate=critical, seconds=seconds, rule=rule, **places, **facts)

    def _law(self, optimizer: Optimizer, problem: Problem, coming_step: bool, clip: float, ready: float) -> StabilityLaw | None:
        try:
            return stability_law(optimizer, problem, coming_step=coming_step, ready=ready).clipped(clip)
        except (ValueError, KeyError) as error:
            self.notes.add(f"no critical rate: {error}")
            return None

    def _kernel_curvature(self, problem: Problem, law: StabilityLaw | None) -> float | None:
        """The c of a squared loss whose tangent kernel is to be written out; None where products serve better."""
        if self.by not in (None, "kernel"):
            return None
        plain = stability_law(None, problem) if law is None else law
        found = kernel_curvature(problem, plain, rows=KERNEL_ROWS, required=False)
        if self.by == "kernel" and found is None:
            self.notes.add(
                "the tangent kernel does not serve here (no squared loss, several rates, a preconditioner, batch normalisation, "
                "or too many outputs); the Gauss-Newton matrix was used"
            )
        return found

    def _by_kernel(self, problem: Problem, curvature: float, law: StabilityLaw | None) -> dict[str, Any]:
        """Everything from the tangent kernel written out; c K has the nonzero eigenvalues of the Gauss-Newton matrix."""
        kernel = tangent_kernel(problem).double()
        loss, pull = _loss_and_output_gradient(problem)
        values, vectors = torch.linalg.eigh(kernel)
        top = min((self.top or 5) * outputs_per_sample(problem), len(values))
        parts = (vectors[:, -top:].T @ (pull.double() / curvature)).square()
        decay = 0.0 if law is None or law.decay is None else float(law.decay[0])
        return {
            "loss": loss,
            "sharpness": curvature * float(values[-1]) * (1.0 if law is None else law.clip) + decay,
            "error": 0.0,
            "kernel_norm": float(values[-1]),
            "top": top,
            "top_loss": 0.5 * curvature * float(parts.sum()),
            "by": "kernel",
            "converged": True,
            "matvecs": 0,
        }

    def _by_products(self, problem: Problem, law: StabilityLaw | None, on: str, split: bool, thorough: bool) -> dict[str, Any]:
        """A few products with the Gauss-Newton matrix or the Hessian, from where the last measurement of the same kind ended."""
        if self.by == "hessian" or self._needs_hessian:
            return self._by_matrix("hessian", problem, law, on, split, thorough)
        try:
            return self._by_matrix("gauss_newton", problem, law, on, split, thorough)
        except (ValueError, RuntimeError) as error:
            if self.by is not None or isinstance(error, NonFiniteError) or "gauss_newton" in self._passed:
                raise
            found = self._by_matrix("hessian", problem, law, on, split, thorough)  # an auxiliary loss, several outputs
            self._needs_hessian = True
            self.notes.add(
                "the loss is not a function of the model's output alone: the Hessian is followed, not the Gauss-Newton matrix"
            )
            return found

    def _by_matrix(
        self, by: MatrixName, problem: Problem, law: StabilityLaw | None, on: str, split: bool, thorough: bool
    ) -> dict[str, Any]:
        matrix = ON_PARAMETERS[by](problem)
        op = matrix if law is None else law.effective(matrix)
        # Probing symmetry costs as much as measuring. That the loss sees the weights through the output alone is checked once.
        if by in self._passed:
            matrix.trusted()
        LinearOperator.trusted(matrix)
        LinearOperator.trusted(op)  # which may be the matrix itself
        start = self.starts.get(on, next(iter(self.starts.values()), None))
        if start is None or start.shape[0] != op.shape[0]:
            start = _ready_gradient(problem, law)
        top = min(self.top or 1, op.shape[0])
        most = THOROUGH if thorough else PRODUCTS + top - 1
        pairs = top_eigenpairs(op, top, tol=TOLERANCE, start=start, max_matvecs=most, seed=self.seed, progress=False)
        self._passed.add(by)
        # Bare vectors: what else eigenpairs know of their neighbourhood misleads on another batch.
        self.starts[on] = pairs.vectors.clone()
        loss, gradient = problem.loss_and_gradient() if split else (problem.loss(), None)
        sharpness = float(pairs.values[0])
        return {
            "loss": loss,
            "sharpness": sharpness,
            "error": float(pairs.residuals[0]) / abs(sharpness) if sharpness else 0.0,
            "top": top,
            "top_loss": None if gradient is None else _top_loss(pairs, gradient, law, loss),
            "by": by,
            "converged": pairs.converged,
            "matvecs": pairs.matvecs,
        }


def _ready_gradient(problem: Problem, law: StabilityLaw | None) -> Tensor | None:
    """The gradient that lies ready in `.grad`, (p, 1), in the optimizer's metric: it leans towards the sharpest directions."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in problem.parameters]
    flat = torch.cat([part.detach().to(problem.dtype).reshape(-1) for part in parts])
    flat = flat if law is None or law.scale is None else flat * law.scale.to(flat)
    size = float(flat.norm())
    return (flat / size)[:, None] if 0.0 < size < math.inf else None


def _top_loss(pairs: Eigenpairs, gradient: Tensor, law: StabilityLaw | None, loss: float) -> float:
    """Σ (v·g)²/(2λ): how far the loss lies above its least value along the top directions, in the optimizer's own metric."""
    scaled = gradient if law is None or law.scale is None else gradient * law.scale.to(gradient)
    top = len(pairs.values)
    values = pairs.values if law is None else pairs.values / law.clip  # of the loss itself
    return split_loss_by_curvature(values, pairs.vectors, scaled, loss, ranks=(top,)).top[top]


def _loss_and_output_gradient(problem: Problem) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to the outputs of all samples, flattened sample-major."""
    total, pulls = 0.0, []
    with problem.session(second=False):
        tensors = problem.tensors(problem.leaves(grad=False))
        for i, share, batch in problem.iterate():
            with unbroken(torch.no_grad()):
                found = problem.evaluate(tensors, batch, i)
            output = found.output.detach().requires_grad_()
            assert found.loss_of is not None  # it is a squared one
            loss = found.loss_of(output)
            [pull] = torch.autograd.grad(loss, output)
            total += share * float(loss.detach().double())
            pulls.append(share * pull.reshape(-1))
    return total, torch.cat(pulls)
