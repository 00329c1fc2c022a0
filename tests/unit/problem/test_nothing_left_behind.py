"""What forward passes write outside of parameters and buffers is undone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import theodolite as th

GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(3, (5,), generator=GENERATOR)
CE = nn.CrossEntropyLoss()


class Recorder(nn.Module):
    """Keeps what it computes, as research models do, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        self.last, self.maps, self.books, self.calls = None, [], {"maps": [], "shapes": {(1, 2)}}, 0

    def forward(self, x):
        self.last = self.fresh = torch.tanh(self.a(x))
        self.maps.append(self.last)
        self.books["maps"].append(self.last)
        self.books["shapes"].add(tuple(x.shape))
        self.calls += 1
        self.register_buffer("late", self.last)
        return self.b(self.last)


MEASURES = {
    "loss": lambda p: p.loss(),
    "gradient": lambda p: p.gradient(),
    "hessian": lambda p: th.hessian(p) @ torch.ones(p.size, dtype=torch.float64),
    "recomputed hessian": lambda p: th.hessian(p, keep="never") @ torch.ones(p.size, dtype=torch.float64),
    "gauss-newton": lambda p: th.gauss_newton(p) @ torch.ones(p.size, dtype=torch.float64),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_attributes_that_forward_writes(measure):
    model = Recorder()
    maps, books, names = model.maps, model.books, set(vars(model))
    MEASURES[measure](th.Problem(model, CE, (X, Y)))
    assert model.last is None
    assert model.calls == 0
    assert model.maps is maps == []
    assert model.books is books == {"maps": [], "shapes": {(1, 2)}}
    assert set(vars(model)) == names
    assert not list(model.buffers())
    copy.deepcopy(model)


def test_attributes_after_an_exception():
    model = Recorder()

    def broken(z, y):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        th.Problem(model, broken, (X, Y))
    assert model.last is None
    assert model.maps == []
    assert not hasattr(model, "fresh")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x[:, None])[0][:, -1])


def test_recurrent_layers_keep_their_own_weights():
    model = Recurrent().double()
    problem = th.Problem(model, CE, (X, Y))
    th.hessian(problem) @ torch.ones(problem.size, dtype=torch.float64)
    own = {id(p) for p in model.cell.parameters()}
    assert {id(w) for w in model.cell._flat_weights} == own


class Drifting(nn.Module):
    """Keeps a running number in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, z, y):
        self.mean.add_(1.0)
        return CE(z, y)


def test_a_loss_that_is_a_module_is_left_as_found():
    model = nn.Linear(3, 3).double()
    loss = Drifting().train()
    buffer, version = loss.mean, loss.mean._version
    problem = th.Problem(model, loss, [(X[:3], Y[:3]), (X[3:], Y[3:])])
    for measure in MEASURES.values():
        measure(problem)
    assert problem.weighting.rule == "labels"
    assert loss.mean is buffer
    assert (float(buffer), buffer._version, loss.training) == (1.0, version, True)


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_buffers_of_a_loss_keep_their_part_in_the_derivatives(outside):
    model = nn.Linear(3, 3).double()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    by_hand = th.hessian(th.Problem(model, lambda z, y: weighted(z, y), (X, Y))).to_dense()
    with outside():
        torch.testing.assert_close(th.hessian(th.Problem(model, weighted, (X, Y))).to_dense(), by_hand)


# Random states


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3).double()

    def forward(self, x):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return self.a(x)


class NoisyData(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return X[i] + 0.01 * np.random.randn() * random.random(), Y[i]  # noqa: NPY002


def states() -> tuple:
    kind, keys, place, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), (kind, keys.tolist(), place, *rest), torch.get_rng_state().tolist()


def test_random_states_of_python_and_arrays():
    model = Noise()
    before = states()
    problem = th.Problem(model, CE, DataLoader(NoisyData(), batch_size=2))
    problem.gradient()
    th.hessian(problem) @ torch.ones(problem.size, dtype=torch.float64)
    assert states() == before


def test_generators_of_samplers():
    data = TensorDataset(X, Y)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    sampler = RandomSampler(data, generator=generator)
    for loader in (
        DataLoader(data, batch_size=2, sampler=sampler),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False)),
    ):
        th.Problem(nn.Linear(3, 3).double(), CE, loader)
        assert torch.equal(generator.get_state(), before)


def test_streamed_passes_leave_the_random_state():
    problem = th.Problem(nn.Linear(3, 3).double(), CE, DataLoader(TensorDataset(X, Y), batch_size=2), hold_bytes=1)
    assert not problem.data.held
    before = torch.get_rng_state()
    th.hessian(problem, keep="never") @ torch.ones(problem.size, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_used_twice_holds_its_own_weight_between_two_calls():
    shared = nn.PReLU()
    model = nn.Sequential(nn.Linear(3, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 3)).double()
    problem = th.Problem(model, CE, (X, Y))
    doubled = problem.at({"1.weight": 2 * shared.weight.detach()})
    with doubled.session():
        doubled.evaluate(doubled.tensors(doubled.leaves()), doubled.placed(next(iter(doubled.data))), 0)
        assert model[1].weight is model[3].weight
        assert isinstance(shared.weight, nn.Parameter)
        assert float(shared.weight.detach()) == 0.25


class CapturesOutputs(nn.Module):
    """Installs a hook at its first call, as Hugging Face models do, and remembers that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x):
        if not getattr(self, "_installed", False):
            self.inner.register_forward_hook(lambda module, args, output: 2 * output)
            self._installed = True
        return self.inner(x)


def test_hooks_that_the_first_call_installs_are_not_installed_twice():
    model = CapturesOutputs()
    for _ in range(2):
        problem = th.Problem(model, CE, (X, Y))
        for measure in MEASURES.values():
            measure(problem)
    assert not model.inner._forward_hooks
    expected = CE(2 * model.inner(X), Y).item()
    assert problem.loss() == pytest.approx(expected)
    assert CE(model(X), Y).item() == pytest.approx(expected)
    assert th.Problem(model, CE, (X, Y)).loss() == pytest.approx(expected)
    assert len(model.inner._forward_hooks) == 1
