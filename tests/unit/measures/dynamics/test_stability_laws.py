"""Laws of adaptive optimizers against torch's own steps, with everything but the momentum held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.dynamics.optimizers import stability_law

CURVATURES = torch.tensor([40.0, 3.0, 0.5]).double()
MOVING = ("exp_avg", "momentum_buffer")  # what remains of the state: the recursion is in these and the weights
CLIP = 0.05

KINDS: dict[str, Any] = {
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "AMSGrad": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True, betas=(0.8, 0.99)),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.5),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "NAdamW": lambda p, lr: torch.optim.NAdam(p, lr=lr, weight_decay=0.5, decoupled_weight_decay=True),
    "RAdam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
    "RMSprop with momentum": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, lr_decay=0.01),
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.5),
}


def trained(kind: str, steps: int, clip: float) -> tuple[th.Problem, Any]:
    """A bowl `½ Σ λ w²` and an optimizer that has taken so many steps in it, with gradients times `clip`."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    x = torch.diag(CURVATURES.sqrt())
    problem = th.Problem(model, lambda z, y: 0.5 * z.square().sum(), (x, torch.zeros(3, 1).double()))
    optimizer = KINDS[kind](model.parameters(), 1e-3)
    for _ in range(steps):
        model.weight.grad = clip * CURVATURES * model.weight.detach()
        optimizer.step()
    model.weight.grad = torch.full_like(model.weight, 1e-14)  # the coming step is one near the minimum
    return problem, optimizer


def diverges(optimizer: Any, rate: float, clip: float) -> bool:
    """torch's own steps from near the minimum; before each, all state but the momentum is what it was."""
    optimizer = copy.deepcopy(optimizer)
    [group] = optimizer.param_groups
    [w] = group["params"]
    group["lr"] = rate
    state = optimizer.state[w]
    for name in MOVING:
        if isinstance(state.get(name), torch.Tensor):
            state[name].zero_()
    held = {name: copy.deepcopy(value) for name, value in state.items() if name not in MOVING}
    w.data.fill_(1e-9)
    sizes = []
    for _ in range(800):
        state.update(copy.deepcopy(held))
        w.grad = clip * CURVATURES * w.detach()
        optimizer.step()
        sizes.append(float(w.detach().norm()))
        if not sizes[-1] < 1e-6:
            return True
    return max(sizes[-100:]) > max(sizes[300:400])


@pytest.mark.parametrize("clip", [1.0, CLIP], ids=["", "clipped"])
@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize("kind", KINDS)
def test_a_law_is_the_edge_of_a_frozen_run(kind: str, steps: int, clip: float) -> None:
    problem, optimizer = trained(kind, steps, clip)
    law = stability_law(optimizer, problem, coming_step=True).clipped(clip)
    edge = law.rate(float(th.top_eigenpairs(law.effective(th.hessian(problem)), 1, tol=1e-8).values[0]))
    assert not diverges(optimizer, 0.97 * edge, clip)
    assert diverges(optimizer, 1.03 * edge, clip)
    assert ("clip factor c = 0.05" in law.rule) == (clip != 1.0)


def test_bias_correction_early_and_late() -> None:
    """The first step is ten times as long as momentum alone would make it, a late one is not."""
    edges = {}
    for steps in (0, 300):
        problem, optimizer = trained("Adam", steps, 1.0)
        edges[steps] = th.critical_learning_rate(problem, optimizer=optimizer)
        moment = optimizer.state[problem.parameters[0]]["exp_avg_sq"] if steps else problem.gradient().square()
        root = (moment.reshape(-1) / (1 - 0.999**steps if steps else 1.0)).sqrt() + 1e-8
        plain = 2 * 1.9 / (0.1 * float((CURVATURES / root).max()))
        assert edges[steps].value == pytest.approx(plain * (1 - 0.9 ** max(1, steps)), rel=1e-6)
    assert "1−β₁ᵗ = 0.1 of step t = 1" in edges[0].rule
    assert "1−β₁ᵗ" not in edges[300].rule


def test_a_clip_factor_by_argument() -> None:
    problem, optimizer = trained("Adam", 50, CLIP)
    plain, told = (th.critical_learning_rate(problem, optimizer=optimizer, clip=clip) for clip in (None, CLIP))
    assert told.value == pytest.approx(plain.value / CLIP, rel=1e-6)
    assert "clip factor c = 0.05" in told.rule
    kernel = th.critical_learning_rate(problem, optimizer=optimizer, clip=CLIP, by="kernel")
    assert kernel.value == pytest.approx(told.value, rel=1e-4)
    for wrong in ({"clip": 0.0}, {"clip": 1.5}, {"clip": float("nan")}, {"clip": 0.5, "trial": True}):
        with pytest.raises(ValueError, match="clip"):
            th.critical_learning_rate(problem, optimizer=optimizer, **wrong)


class SignDescent(torch.optim.Optimizer):
    """Lion without its momentum: every step has the same length."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("lr", [1e-3, 100.0])
def test_the_edge_of_an_optimizer_without_a_law_is_found_by_trial(lr: float) -> None:
    problem, _ = trained("SGD", 0, 1.0)
    found = th.critical_learning_rate(problem, optimizer=SignDescent(problem.parameters, lr), trial=True)
    # From 1 in every coordinate: a step longer than 1 passes the minimum, the next one comes back to 1, and so on.
    assert 0.95 <= found.value <= 1.0
    assert found.value + found.error >= 1.0
    assert "no law" in found.rule
    assert problem.parameters[0].detach().eq(1.0).all()
    assert "trial" in str(found)


def test_what_has_none_names_the_trial() -> None:
    problem, _ = trained("SGD", 0, 1.0)
    for optimizer in (torch.optim.Rprop(problem.parameters), torch.optim.RMSprop(problem.parameters, centered=True)):
        with pytest.raises(ValueError, match="trial=True"):
            stability_law(optimizer, problem)
