"""Update rules: the steps are those of torch's optimizers, and the tangents those of autograd through the steps."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.functional import jvp

from theodolite.measures.stepsize.meta_gradients.hyperparameters import read_optimizer
from theodolite.measures.stepsize.meta_gradients.update_rules import AdaptiveMoments, Descent, RootMeanSquare

from .trainings import SETTINGS, TORCH, as_arguments

RULES = {
    "plain": (Descent(velocity=False), {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.2}),
    "momentum": (Descent(dampening=0.3), {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2}),
    "nesterov": (Descent(nesterov=True), {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2}),
    "adam": (AdaptiveMoments(), {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2}),
    "adamw": (AdaptiveMoments(decoupled=True), {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2}),
    "rmsprop": (RootMeanSquare(velocity=True), {"lr": 0.1, "alpha": 0.9, "momentum": 0.8, "weight_decay": 0.2}),
    "rmsprop-plain": (RootMeanSquare(), {"lr": 0.1, "alpha": 0.9, "momentum": 0.0, "weight_decay": 0.2}),
}


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("name", RULES)
def test_a_tangent_is_the_derivative_of_the_step(name, count):
    """T' = A T + b against forward differentiation of `advance`, with settings that are numbers and vectors."""
    rule, settings = RULES[name]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    p, k = 6, 1 + len(rule.columns)
    curvature = draw(p, p)
    state = [draw(p), *(draw(p).abs() * (count > 0) for _ in rule.columns)]
    gradient = draw(p)
    tangents = draw(2, k, p)
    for spread in (False, True):
        at = {n: torch.full((p,), v).double() if spread else v for n, v in settings.items()}
        moved = rule.advance(state[0], state[1:], gradient, at, count)
        carried = tangents.clone()
        rule.carry(carried, tangents[:, 0] @ curvature, moved, at, count)
        for row, found in zip(tangents, carried, strict=True):

            def step(*parts, at=at):
                out = rule.advance(parts[0], list(parts[1:-1]), parts[-1], at, count)
                return (out.weights, *out.columns)

            _, truth = jvp(step, (*state, gradient), (*row, row[0] @ curvature))
            torch.testing.assert_close(found, torch.stack(truth), rtol=1e-11, atol=1e-13)
        for setting in rule.settings:
            if setting == "momentum" and "velocity" not in rule.columns:
                continue
            slope = draw(p) if spread else 0.7

            def of_setting(value, setting=setting, at=at):
                out = rule.advance(state[0], state[1:], gradient, {**at, setting: value}, count)
                return (out.weights, *out.columns)

            value = torch.as_tensor(at[setting], dtype=torch.float64)
            _, truth = jvp(of_setting, (value,), (torch.as_tensor(slope, dtype=torch.float64).expand_as(value).clone(),))
            found = torch.zeros(k, p, dtype=torch.float64)
            for place, vector, factor in rule.source(setting, slope, moved, at, count):
                found[place] += vector * factor
            torch.testing.assert_close(found, torch.stack(truth), rtol=1e-11, atol=1e-13, msg=setting)


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_those_of_torch(name):
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(9, generator=generator, dtype=torch.float64)
    p = start.clone().requires_grad_()
    made = TORCH[name]([p], SETTINGS[name])
    optimizer = name if name != "nesterov" else "nesterov"
    recipe = read_optimizer(optimizer, as_arguments(SETTINGS[name]), [start])
    weights, columns = start.clone(), [torch.zeros_like(start) for _ in recipe.rule.columns]
    for count in range(6):
        gradient = torch.randn(9, generator=generator, dtype=torch.float64)
        p.grad = gradient.clone()
        made.step()
        moved = recipe.rule.advance(weights, columns, gradient, recipe.groups[0], count)
        weights, columns = moved.weights, moved.columns
    torch.testing.assert_close(weights, p.detach(), rtol=1e-13, atol=1e-15)


def test_adam_from_a_zero_second_moment_has_the_derivative_of_its_step():
    """Where no gradient came yet the step is g/(|g| + ε): its derivative at zero is 1/ε, and no NaN."""
    rule, at = AdaptiveMoments(eps=1e-3), {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    zero = torch.zeros(2, dtype=torch.float64)
    moved = rule.advance(zero, [zero, zero], zero, at, 0)
    tangents = torch.zeros(1, 3, 2, dtype=torch.float64)
    rule.carry(tangents, torch.tensor([[1.0, 0.0]]).double(), moved, at, 0)
    torch.testing.assert_close(tangents[0, 0], torch.tensor([-0.1 / 1e-3, 0.0]).double())
    assert bool(torch.isfinite(tangents).all())
