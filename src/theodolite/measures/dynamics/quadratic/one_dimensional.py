"""Several examples on a line: two problems of one example each, exactly.

With inputs of one dimension and no biases a two-layer ReLU network, and its quadratic model, is `a₊x` for x ≥ 0 and
`a₋x` for x < 0. Points of one sign therefore act as one example of size ‖p‖, p the vector of these inputs, and what of
the targets is orthogonal to both vectors is never fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.measures.dynamics.quadratic.orbit import Orbit
from theodolite.measures.dynamics.quadratic.recursions import one_example


@dataclass(frozen=True, eq=False)
class SignClasses:
    """Inputs on a line by sign, x ≥ 0 first.

    `directions` (2, n) holds p₊ and p₋, the inputs of either sign by absolute value (the source has p₋ with the other
    sign); `inputs` (2, 1) and `targets` (2) are the two effective examples, ±‖p‖ and ⟨p, y⟩/‖p‖; `floor` is the part of the
    loss that no weights can remove.
    """

    directions: Tensor
    inputs: Tensor
    targets: Tensor
    floor: Tensor

    @property
    def norms(self) -> Tensor:
        """‖p₊‖ and ‖p₋‖."""
        return self.inputs[:, 0].abs()

    def project(self, values: Tensor) -> Tensor:
        """⟨p, values⟩/‖p‖ of outputs, targets or residuals (..., n): (..., 2)."""
        return values @ self.directions.mT / self.norms

    def rest(self, residual: Tensor) -> Tensor:
        """½ ‖residual off both directions‖² of (..., n)."""
        inside = self.project(residual) / self.norms @ self.directions
        return 0.5 * (residual - inside).square().sum(-1)


def sign_classes(x: Tensor, y: Tensor) -> SignClasses:
    """The two effective examples of inputs (n) or (n, 1) and targets (n); both signs must occur."""
    x = x.reshape(-1)
    directions = torch.stack([x.clamp(min=0), (-x).clamp(min=0)])
    norms = directions.norm(dim=1)
    if not bool((norms > 0).all()):
        raise ValueError("Inputs of both signs are needed. Got one sign only: the data are one example, use `one_example`.")
    targets = directions @ y / norms
    inputs = (norms * torch.tensor([1.0, -1.0], dtype=x.dtype))[:, None]
    return SignClasses(directions, inputs, targets, 0.5 * (y.square().sum() - targets.square().sum()))


def class_eigenvalues(u: Tensor, v: Tensor, u0: Tensor, classes: SignClasses) -> Tensor:
    """Eigenvalues of the kernel along p₊ and p₋, `‖p‖² (1/m) Σ (u_k² + v_k²)` over units open there: (..., 2).

    u, u0 (..., m, 1), v (..., m). With u for u0 they belong to the ReLU network, not to its quadratic model.
    """
    square = u[..., 0].square() + v.square()
    open_units = torch.stack([u0[..., 0] >= 0, u0[..., 0] <= 0], -1).to(u.dtype)
    return classes.norms.square() * (square[..., None, :] @ open_units)[..., 0, :] / u.shape[-2]


def class_orbit(
    u: Tensor, v: Tensor, classes: SignClasses, rate: Tensor | float, steps: int, *, until: float | None = None
) -> tuple[Orbit, Tensor]:
    """The recursion of either class from weights (..., m, 1), (..., m): its last run axis is (p₊, p₋).

    Also the constants c = ‖p‖²/m of the two. `rate` broadcasts against the leading axes.
    """
    c = classes.norms.square() / u.shape[-2]
    kernel = class_eigenvalues(u, v, u, classes)
    product = u[..., 0] * v
    slopes = torch.stack([product * (u[..., 0] >= 0), product * (u[..., 0] <= 0)], -1).sum(-2) / u.shape[-2] ** 0.5
    output = slopes * classes.inputs[:, 0]
    rates = torch.as_tensor(rate, dtype=torch.float64)[..., None]
    return one_example(output, kernel, classes.targets, c, rates, steps, until=until), c
