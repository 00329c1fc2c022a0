"""Capturing what goes into modules and comes out of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from theodolite.problem.activations import Call, Hooks, capturing, recorded_calls


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_with_kwargs) for m in model.modules())


def test_calls_are_recorded_in_order_with_what_went_in_and_came_out():
    model, x = network(), torch.ones(4, 2)
    with recorded_calls(dict(model.named_children())) as calls:
        expected = model(x)
    assert [call.name for call in calls] == ["0", "1", "2"]
    assert calls[0].input is x
    assert calls[-1].output is expected
    assert hooks_of(model) == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_are_gone_after_an_exception(error):
    model = network()
    with pytest.raises(error), recorded_calls(dict(model.named_modules())):
        raise error
    assert hooks_of(model) == 0


def test_hooks_are_gone_where_one_could_not_be_set():
    model = network()
    with pytest.raises(AttributeError):
        Hooks({"0": model[0], "nothing": None}, print).open()
    assert hooks_of(model) == 0


def test_opening_and_closing_twice_is_harmless():
    model = network()
    hooks = Hooks({"0": model[0]}, print)
    hooks.close()
    hooks.open()
    once = hooks_of(model)
    hooks.open()
    assert hooks_of(model) == once > 0
    hooks.close()
    hooks.close()
    assert hooks_of(model) == 0


def test_a_copy_of_a_hooked_model_is_silent():
    model, seen = network(), []
    with Hooks({"model": model}, seen.append):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.ones(1, 2))
        assert seen == []
        model(torch.ones(1, 2))
    assert len(seen) == 1


def test_copies_are_visited_where_that_is_asked_for():
    model, seen = network(), []
    with Hooks({"model": model}, seen.append, in_copies=True):
        copy.deepcopy(model)(torch.ones(1, 2))
    assert len(seen) == 1


def test_a_visitor_may_replace_output_and_arguments():
    model = nn.Identity()
    with Hooks({"": model}, lambda call: 2 * call.output):
        assert float(model(torch.ones(()))) == 2.0
    with Hooks({"": model}, lambda call: ((3 * call.args[0],), call.kwargs), before=True):
        assert float(model(torch.ones(()))) == 3.0


def test_before_a_call_there_is_no_output():
    seen: list[Call] = []
    model = nn.Identity()
    with Hooks({"": model}, seen.append, before=True):
        model(input=torch.ones(()))
    assert seen[0].output is None
    assert float(seen[0].input) == 1.0


def test_captured_outputs_survive_work_in_place_and_can_be_differentiated():
    model, x = network(), torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    with capturing({"first": model[0]}) as seen:
        output = model(x)
    (z,) = seen.outputs["first"]
    assert torch.equal(z, model[0](x))
    assert torch.autograd.grad(output.sum(), z)[0].shape == (5, 3)


def test_calls_that_return_no_tensor_are_passed_over():
    layer = nn.LSTM(2, 3)
    with capturing({"lstm": layer}) as seen:
        layer(torch.ones(4, 1, 2))
    assert seen.outputs["lstm"] == []
