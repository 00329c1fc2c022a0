"""The quadratic model of a two-layer ReLU network: the same network with the gates of its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.measures.dynamics.quadratic.orbit import Orbit, all_over


class GatedBilinear(nn.Module):
    """`g(u, v; x) = (md)^(-1/2) Σ_i 1{u0_i·x ≥ 0} v_i u_i·x`: second Taylor model of a two-layer ReLU network at (u0, v0).

    Parameters `u` (m, d) and `v` (m) start at the given weights, the gates stay those of `u0` (by default of `u`).
    Inputs are (n, d) or images of d values, outputs (n).

    >>> model = GatedBilinear(torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0]))
    >>> round(model(torch.tensor([[2.0]])).item(), 6)                     # 2/√2: the second unit is off, and stays off
    1.414214
    """

    u0: Tensor

    def __init__(self, u: Tensor, v: Tensor, u0: Tensor | None = None) -> None:
        super().__init__()
        if u.ndim != 2 or v.shape != u.shape[:1]:
            raise ValueError(f"u must be (m, d) and v (m). Got {tuple(u.shape)} and {tuple(v.shape)}.")
        self.u = nn.Parameter(u.detach().clone())
        self.v = nn.Parameter(v.detach().clone())
        self.register_buffer("u0", (u if u0 is None else u0).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return gated_output(self.u, self.v, gates(self.u0, x), x)

    def kernel(self, x: Tensor) -> Tensor:
        """Tangent kernel (n, n) at the inputs."""
        x = x.flatten(1)
        with torch.no_grad():
            return gated_kernel(self.u, self.v, gates(self.u0, x), x)


def gates(u: Tensor, x: Tensor) -> Tensor:
    """1{u_i·x_j ≥ 0}: (..., m, n), as numbers."""
    return (u @ x.mT >= 0).to(u.dtype)


def gated_output(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """Outputs (..., n) of weights u (..., m, d), v (..., m) with given gates (..., m, n) at inputs (n, d)."""
    return _scale(u) * (v[..., None, :] @ (gate * (u @ x.mT)))[..., 0, :]


def gated_kernel(u: Tensor, v: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    """`K_jk = (md)^(-1) Σ_i gate_ij gate_ik (v_i² x_j·x_k + u_i·x_j u_i·x_k)`: (..., n, n).

    With gates 1{u_i·x_j ≥ 0} it is the kernel of the ReLU network itself.
    """
    active = gate * (u @ x.mT)
    return _scale(u) ** 2 * ((gate * v.square()[..., None]).mT @ gate * (x @ x.mT) + active.mT @ active)


@dataclass(frozen=True, eq=False)
class Descent(Orbit):
    """An orbit with the weights it ended at: u (runs, m, d), v (runs, m)."""

    u: Tensor
    v: Tensor


def descend(
    u: Tensor,
    v: Tensor,
    x: Tensor,
    y: Tensor,
    rate: Tensor | float,
    steps: int,
    *,
    frozen: bool = True,
    until: float | None = None,
) -> Descent:
    """Full-batch gradient descent on ½ Σ (g − y)² for many starts and rates at once.

    Starts u (runs, m, d) and v (runs, m), inputs (n, d), targets (n); `rate` broadcasts against the runs, so one start
    can be run at many rates. `frozen=False` takes the gates anew in every step: the ReLU network instead of its
    quadratic model. Descent ends early once every loss is at most `until` or infinite.
    """
    rates = torch.as_tensor(rate, dtype=u.dtype, device=u.device)
    runs = torch.broadcast_shapes(u.shape[:-2], rates.shape)
    rates = rates.expand(runs)
    u = u.expand(*runs, *u.shape[-2:]).clone()
    v = v.expand(*runs, v.shape[-1]).clone()
    scale, gate = _scale(u), gates(u, x)
    outputs, kernels = [], []
    for taken in range(steps + 1):
        if not frozen and taken:
            gate = gates(u, x)
        active = gate * (u @ x.mT)  # (runs, m, n)
        output = scale * (v[..., None, :] @ active)[..., 0, :]
        outputs.append(output)
        kernels.append(gated_kernel(u, v, gate, x))
        residual = output - y
        if taken == steps or all_over(0.5 * residual.square().sum(-1), until):
            break
        pull = (rates[..., None] * scale * residual)[..., None, :]  # (runs, 1, n)
        change = (active * pull).sum(-1)
        u -= (v[..., None] * gate * pull) @ x
        v -= change
    return Descent(rates, y, torch.stack(outputs), torch.stack(kernels), u, v)


def _scale(u: Tensor) -> float:
    m, d = u.shape[-2:]
    return 1.0 / math.sqrt(m * d)
