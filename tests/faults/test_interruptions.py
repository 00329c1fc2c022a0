"""Ctrl-C at any moment: the model, the data and every global switch are left as they were found."""

from __future__ import annotations

import random
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import theodolite as th
from theodolite.problem.state_guard import being_measured


class Network(nn.Module):
    """A little of everything that has to be put back: modes, buffers, a recurrent layer, attention, a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)
        self.head.register_forward_hook(lambda module, args, output: None)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.norm(self.conv(x)).transpose(1, 2)
        return self.head(self.drop(self.attention(h, h, h, need_weights=False)[0].mean(1)))


def problem_of(model):
    generator = torch.Generator().manual_seed(1)
    return th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(8, 2, 6, generator=generator), torch.arange(8) % 3))


MEASURES = {
    "problem": lambda model: problem_of(model).loss(),
    "eigenpairs": lambda model: th.top_eigenpairs(th.hessian(problem_of(model)), 2, progress=False),
    "layers": lambda model: th.top_eigenpairs(th.layer_hessians(problem_of(model)), 1, progress=False),
    "gauss_newton": lambda model: th.trace(th.gauss_newton(problem_of(model)), matvecs=6, progress=False),
    "factors": lambda model: th.kronecker_factors(problem_of(model)),
    "kernel": lambda model: th.tangent_kernel(problem_of(model)),
    "features": lambda model: th.agop(model, torch.ones(3, 2, 6)),
}


def state_of(model):
    """Everything that a measurement may change, in a form that can be compared."""
    modules = dict(model.named_modules())
    return {
        "modes": {name: module.training for name, module in modules.items()},
        "attributes": {name: set(vars(module)) for name, module in modules.items()},
        "hooks": {
            name: [len(book) for key, book in vars(module).items() if key.endswith("hooks")] for name, module in modules.items()
        },
        "forwards": {name: "forward" in vars(module) for name, module in modules.items()},
        "tensors": {
            name: (id(t), t._version, t.requires_grad, t.grad is None) for name, t in model.state_dict(keep_vars=True).items()
        },
        "calls": model.calls,
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        "switches": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.get_num_threads(),
            len(_get_current_function_mode_stack()),
            being_measured(),
        ),
        "checkpoint": (
            torch.utils.checkpoint.CheckpointFunction.__module__,
            torch.utils.checkpoint.CheckpointFunction.__qualname__,
        ),
    }


@contextmanager
def interrupted_after(seconds):
    """Raises KeyboardInterrupt in the block after so many seconds."""

    def strike(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def strike_often(measure, times, seed):
    """Traces that interruptions at random moments of a measurement left behind, and how many struck."""
    torch.manual_seed(0)
    model = Network().train()
    measure(model)
    began = time.perf_counter()
    measure(model)
    whole = time.perf_counter() - began
    before, traces, struck = state_of(model), [], 0
    draw = random.Random(seed)
    for _ in range(times):
        moment = max(1e-5, draw.random() * whole)
        try:
            with interrupted_after(moment):
                measure(model)
        except KeyboardInterrupt:
            struck += 1
        after = state_of(model)
        traces += [(round(moment, 4), name) for name in before if after[name] != before[name]]
    return traces, struck


class Interrupted(Network):
    """Ctrl-C during its call number `at`."""

    at = 0

    def forward(self, x):
        type(self).at -= 1
        if type(self).at == 0:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_call_that_is_broken_off_leaves_nothing_behind(name, call, monkeypatch):
    torch.manual_seed(0)
    model = Interrupted().train()
    monkeypatch.setattr(Interrupted, "at", 0)
    MEASURES[name](model)
    before = state_of(model)
    monkeypatch.setattr(Interrupted, "at", call)
    with pytest.raises(KeyboardInterrupt):
        MEASURES[name](model)
    after = state_of(model)
    assert [part for part in before if before[part] != after[part]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_nothing_is_left_behind_often(name):
    traces, struck = strike_often(MEASURES[name], 170, seed=1)
    print(f"{name}: {struck} interruptions")  # noqa: T201
    assert not traces
