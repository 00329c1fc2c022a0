"""Ctrl-C at any moment: the model, the data and every global switch are left as they were found.

Strikes are real: SIGINT, which Python turns into a call of whatever handler is set.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import theodolite as th
from theodolite import interrupts
from theodolite.problem import activations, state_guard
from theodolite.problem.derivatives import second_order
from theodolite.problem.state_guard import being_measured


@pytest.fixture(autouse=True)
def hears_ctrl_c():
    """Those who run in the background of a script inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    gc.unfreeze()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


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


def monitored(model):
    """A few steps of training, every one of them looked at."""
    loss, x, y = nn.CrossEntropyLoss(), torch.ones(8, 2, 6), torch.arange(8) % 3
    with th.Monitor(loss, budget=None) as monitor:
        monitor.attach(model, model.optimizer[0])
        for _ in range(3):
            model.optimizer[0].zero_grad()
            loss(model(x), y).backward()
            model.optimizer[0].step()
    return monitor


MEASURES = {
    "problem": lambda model: problem_of(model).loss(),
    "eigenpairs": lambda model: th.top_eigenpairs(th.hessian(problem_of(model)), 2, progress=False),
    "layers": lambda model: th.top_eigenpairs(th.layer_hessians(problem_of(model)), 1, progress=False),
    "gauss_newton": lambda model: th.trace(th.gauss_newton(problem_of(model)), matvecs=6, progress=False),
    "factors": lambda model: th.kronecker_factors(problem_of(model)),
    "kernel": lambda model: th.tangent_kernel(problem_of(model)),
    "features": lambda model: th.agop(model, torch.ones(3, 2, 6)),
    "monitor": monitored,
    "survey": lambda model: th.survey(problem_of(model), only=["batches", "rate"], lr=0.1, budget=None, progress=False),
}
#: What training is there to change.
CHANGES = {"monitor": {"tensors", "calls", "random"}}


def network(kind=Network):
    torch.manual_seed(0)
    model = kind().train()
    model.optimizer = (torch.optim.SGD(model.parameters(), lr=1e-3),)
    return model


def level_of(up, down):
    level = up()
    down()
    return level


def state_of(model):
    """Everything that a measurement may change, in a form that can be compared."""
    modules = dict(model.named_modules())
    return {
        "modes": {name: module.training for name, module in modules.items()},
        "attributes": {name: set(vars(module)) for name, module in modules.items()},
        "hooks": {
            name: [len(book) for key, book in vars(module).items() if key.endswith("hooks")] for name, module in modules.items()
        },
        "step hooks": [len(book) for key, book in vars(model.optimizer[0]).items() if key.endswith("hooks")],
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
            torch.get_default_dtype(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch._C._get_mkldnn_enabled(),
            torch._dynamo.eval_frame._stance,
            torch.get_num_threads(),
            len(_get_current_function_mode_stack()),
            being_measured(),
        ),
        "levels": (
            torch._C._functorch.peek_interpreter_stack() is None,
            level_of(torch.autocast_increment_nesting, torch.autocast_decrement_nesting),
            level_of(torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
        ),
        "checkpoint": (
            torch.utils.checkpoint.CheckpointFunction.__module__,
            torch.utils.checkpoint.CheckpointFunction.__qualname__,
        ),
        "python": (signal.getsignal(signal.SIGINT), id(warnings.filters), list(warnings.filters), list(sys.path)),
    }


def state_after(action, model):
    """The state once all that is loaded and kept at a first call is there; what is there is not collected any more."""
    action()
    before = state_of(model)
    gc.collect()
    gc.freeze()
    return before


def traces(before, model, name=""):
    """The parts of the state that differ, also once what was broken off has been collected."""
    now = state_of(model)
    gc.collect()
    later = state_of(model)
    parts = set(before) - CHANGES.get(name, set())
    return sorted(part for part in parts if not before[part] == now[part] == later[part])


# At random moments


def struck_after(seconds, measure, model):
    """Whether SIGINT, sent after so many seconds, interrupted the measurement."""
    struck = []

    def strike(number, frame):
        struck.append(number)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        measure(model)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if struck:  # one that met a foreign context comes back a moment later
            time.sleep(2 * interrupts.AT_MOST)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def strike_often(name, times, seed):
    """Traces that interruptions at random moments of a measurement left behind, and how many struck."""
    model, measure, draw = network(), MEASURES[name], random.Random(seed)
    before, found, struck = state_after(lambda: measure(model), model), [], 0
    began = time.perf_counter()
    measure(model)
    whole = time.perf_counter() - began
    for _ in range(times):
        moment = max(1e-5, draw.random() * whole)
        struck += struck_after(moment, measure, model)
        found += [(round(moment, 4), part) for part in traces(before, model, name)]
    return found, struck


@pytest.mark.parametrize("name", ["eigenpairs", "factors"])
def test_nothing_is_left_behind(name):
    found, struck = strike_often(name, 12, seed=0)
    assert found == []
    assert struck


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", MEASURES)
def test_nothing_is_left_behind_often(name, seed):
    found, struck = strike_often(name, 170, seed)
    print(f"{name}: {struck} interruptions")  # noqa: T201
    assert found == []


# During calls of the model


class Interrupted(Network):
    """Ctrl-C during its call number `at`."""

    at = 0

    def forward(self, x):
        type(self).at -= 1
        if type(self).at == 0:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("call", [1, *(pytest.param(later, marks=pytest.mark.slow) for later in (2, 3))])
def test_a_call_that_is_broken_off_leaves_nothing_behind(name, call, monkeypatch):
    model = network(Interrupted)
    monkeypatch.setattr(Interrupted, "at", 0)
    before = state_after(lambda: MEASURES[name](model), model)
    monkeypatch.setattr(Interrupted, "at", call)
    with pytest.raises(KeyboardInterrupt):
        MEASURES[name](model)
    assert traces(before, model, name) == []


# At every instruction of what enters and leaves

GUARDS = {module.__file__ for module in (interrupts, state_guard, activations, second_order, contextlib, warnings)}
GUARDS |= {sys.modules[name].__file__ for name in ("torch.autograd.grad_mode", "torch.amp.autocast_mode", "torch.nn.attention")}


def struck_at(place, action):
    """Strike before the instruction number `place` of all that run in the guards; how many ran, and whether it interrupted."""
    count = 0

    def instruction(frame, event, arg):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == place:
                signal.raise_signal(signal.SIGINT)
        return instruction

    def call(frame, event, arg):
        if frame.f_code.co_filename not in GUARDS:
            return None
        frame.f_trace_opcodes = True
        return instruction

    sys.settrace(call)
    try:
        action()
        if 0 < place <= count:  # one that met a foreign context comes back a moment later
            time.sleep(2 * interrupts.AT_MOST)
        return count, False
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(None)


def session(model):
    problem = problem_of(model)

    def enter_and_leave():
        with problem.session():
            pass

    return enter_and_leave


def hooks(model):
    def enter_and_leave():
        with activations.recorded_calls(dict(model.named_modules())), state_guard.modes_kept(model):
            model.eval()

    return enter_and_leave


def product(model):
    operator = th.hessian(problem_of(model))
    vectors = torch.ones(operator.shape[0], 2)
    return lambda: operator @ vectors


def wide_copy(model):
    """torch copies and converts modules inside contexts of its own."""
    return problem_of(model).in_float64


def monitor(model):
    def enter_and_leave():
        with th.Monitor(nn.CrossEntropyLoss()) as watching:
            watching.attach(model, model.optimizer[0])

    return enter_and_leave


ACTIONS = {"session": session, "hooks": hooks, "product": product, "copy": wide_copy, "monitor": monitor}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("most", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_no_instruction_of_a_guard_can_be_broken_off(name, most):
    model = network()
    action = ACTIONS[name](model)
    before = state_after(action, model)
    instructions, _ = struck_at(0, action)
    assert instructions > 100
    places = range(1, instructions + 1) if most is None else random.Random(0).sample(range(1, instructions + 1), most)
    ends = {place: (struck_at(place, action)[1], traces(before, model)) for place in places}
    print(f"{name}: {len(ends)} of {instructions} instructions")  # noqa: T201
    assert {place: end for place, end in ends.items() if end != (True, [])} == {}
