"""The learned optimizer against its formula by hand, and its three uses against one another."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import theodolite as th
from theodolite.measures.stepsize import LearnedOptimizer, OptimizerNetwork
from theodolite.measures.stepsize.learned.learned_optimizer import (
    DECAYS,
    SCALES,
    change_of,
    gradient_features,
    learned_step,
    normalised,
    step_features,
)
from theodolite.training import Fleet
from theodolite.training.schedules import epoch_order

SIZES = [12, 5]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(**settings):
    return OptimizerNetwork.new(seed=1, dtype=torch.float64, **settings)


def after_some_steps(seed=0):
    """Values and gradient (1, 17), moving averages (5, 1, 17) that have seen a few gradients."""
    means, squares = torch.zeros(5, 1, 17).double(), torch.zeros(5, 1, 17).double()
    decays = torch.tensor(DECAYS).double()[:, None, None]
    for k in range(6):
        g = numbers(1, 17, seed=10 + k)
        means, squares = decays * means + (1 - decays) * g, decays * squares + (1 - decays) * g**2
    return numbers(1, 17, seed=seed), numbers(1, 17, seed=seed + 1), means, squares


def by_hand(net, values, gradient, means, squares, k):
    """The 31 numbers of each weight in the order of the paper, one weight after the other, and what the network makes of them."""
    moved = []
    starts = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    columns = [gradient[0], values[0]]
    m = [b * old + (1 - b) * gradient[0] for b, old in zip(DECAYS, means[:, 0], strict=True)]
    r = [b * old + (1 - b) * gradient[0] ** 2 for b, old in zip(DECAYS, squares[:, 0], strict=True)]
    columns += m + r + [a / (b + 1e-6).sqrt() for a, b in zip(m, r, strict=True)] + [1 / (b + 1e-6).sqrt() for b in r]
    assert len(columns) == 22
    for first, end in pairwise(starts):
        scaled = [c[first:end] / (1e-5 + c[first:end].pow(2).mean()).sqrt() for c in columns]
        for i in range(end - first):
            vector = torch.stack(
                [c[i] for c in scaled] + [torch.tensor(math.tanh(k / s - 1), dtype=torch.float64) for s in SCALES]
            )
            assert len(vector) == 31
            hidden = (net.weights["hidden.weight"] @ vector + net.weights["hidden.bias"]).clamp(min=0)
            direction, magnitude = net.weights["output.weight"] @ hidden + net.weights["output.bias"]
            moved.append(0.001 * direction * math.exp(0.001 * float(magnitude)))
    return torch.stack(moved)[None]


def test_the_rule_is_the_formula_of_the_paper():
    """AC23: 31 features in the stated order, normalised in each tensor but for the step's."""
    net, given = network(), after_some_steps()
    found, means, squares = learned_step(net, *given, torch.tensor(7), SIZES)
    torch.testing.assert_close(found, by_hand(net, *given, 7), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(means[1], 0.9 * given[2][1] + 0.1 * given[1])
    torch.testing.assert_close(squares[4], 0.9999 * given[3][4] + 0.0001 * given[1] ** 2)


def test_normalised_features():
    net, (values, gradient, means, squares) = network(), after_some_steps()
    raw = torch.cat([gradient_features(gradient, means, squares), values[None]])
    found = normalised(net, raw, SIZES)
    assert found.shape == (22, 1, 17)
    checked = 0
    for part, scaled in zip(raw.split(SIZES, -1), found.split(SIZES, -1), strict=True):
        large = part.square().mean(-1).sqrt() > 0.1
        assert (scaled.square().mean(-1).sqrt()[large] - 1).abs().max() < 1e-3
        checked += int(large.sum())
    assert checked > 20
    assert torch.equal(found.sign(), raw.sign())
    standard = normalised(network(normalise="standard"), raw, SIZES)
    assert standard.mean(-1).abs().max() < 1e-12
    assert (standard.square().mean(-1)[:2] - 1).abs().max() < 1e-3


def test_permuted_weights_move_alike_and_the_step_is_the_same_for_all():
    net, given = network(), after_some_steps()
    order = torch.cat([torch.randperm(12, generator=torch.Generator().manual_seed(0)), 12 + torch.tensor([4, 2, 0, 1, 3])])
    straight = learned_step(net, *given, torch.tensor(3), SIZES)
    turned = learned_step(net, *(t[..., order] for t in given), torch.tensor(3), SIZES)
    for a, b in zip(straight, turned, strict=True):
        torch.testing.assert_close(a[..., order], b, rtol=1e-11, atol=1e-14)
    assert step_features(net, torch.tensor(3)).shape == (9, 1)
    zeros = torch.zeros(21, 1, 17).double()
    same = change_of(net, zeros, zeros[:1], torch.tensor(3))
    assert same.min() == same.max() != 0


def test_replicas_at_different_steps():
    """Each is what it would be alone."""
    net, one, two = network(), after_some_steps(), after_some_steps(seed=5)
    both = [torch.cat(pair, -2) for pair in zip(one, two, strict=True)]
    found = learned_step(net, *both, torch.tensor([3, 200]), SIZES)[0]
    alone = [learned_step(net, *given, torch.tensor(k), SIZES)[0] for given, k in ((one, 3), (two, 200))]
    torch.testing.assert_close(found, torch.cat(alone))


def signed():
    """A network by hand whose direction is the gradient over its root mean square."""
    weights = {name: torch.zeros_like(w) for name, w in network(hidden=2).weights.items()}
    weights["hidden.weight"][:, 0] = torch.tensor([1.0, -1.0])
    weights["output.weight"][0] = torch.tensor([1.0, -1.0])
    return OptimizerNetwork(weights)


def test_a_network_by_hand_is_normalised_descent():
    model = nn.Linear(3, 2).double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = LearnedOptimizer(model.parameters(), signed(), lr=2.0)
    model(numbers(4, 3)).square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        wanted = start[name] - 0.002 * p.grad / (1e-5 + p.grad.square().mean()).sqrt()
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-12, atol=1e-15)


def classifier(seed):
    return th.models.fcn(6, [5], 3, seed=seed).double()


X, Y = numbers(40, 6), torch.arange(40) % 3


def trained_by_hand(model, optimizer, steps, seed, first=0):
    """Steps on batches of 8 in the order of `seed`."""
    for k in range(first, steps):
        epoch, place = divmod(k, 5)
        rows = epoch_order(seed, epoch, 40)[8 * place : 8 * place + 8]
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("normalise", ["rms", "standard"])
def test_a_fleet_and_a_plain_loop_agree(normalise):
    net = network(normalise=normalise)
    fleet = Fleet(classifier, [3, 4], loss=nn.CrossEntropyLoss(), optimizer=net, rate=[1.0, 0.5])
    fleet.train((X, Y), steps=12, batch_size=8, progress=False)
    for r, (seed, lr) in enumerate([(3, 1.0), (4, 0.5)]):
        model = classifier(seed)
        trained_by_hand(model, LearnedOptimizer(model.parameters(), net, lr=lr), 12, seed)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), fleet.parameters[name][r], rtol=1e-9, atol=1e-12)


def test_it_goes_on_from_its_state():
    whole, broken = classifier(0), classifier(0)
    trained_by_hand(whole, LearnedOptimizer(whole.parameters(), network()), 9, 0)
    first = LearnedOptimizer(broken.parameters(), network())
    trained_by_hand(broken, first, 4, 0)
    second = LearnedOptimizer(broken.parameters(), network())
    second.load_state_dict(first.state_dict())
    trained_by_hand(broken, second, 9, 0, first=4)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), broken.parameters(), strict=True))
    assert float(second.state[broken.fc1.weight]["step"]) == 9
    other = LearnedOptimizer(broken.parameters(), OptimizerNetwork.new(seed=5))
    for state in (first.state_dict(), torch.optim.Adam(broken.parameters()).state_dict()):
        with pytest.raises(ValueError, match="another network"):
            other.load_state_dict(state)


def test_train_takes_it_and_resumes(tmp_path):
    def run(steps, folder, **more):
        model = classifier(1)
        th.train(model, nn.CrossEntropyLoss(), (X, Y), lambda p: LearnedOptimizer(p, network()), steps=steps, batch_size=8,
                 checkpoint=tmp_path / folder, progress=False, **more)  # fmt: skip
        return model.state_dict()

    run(4, "broken")
    again, whole = run(9, "broken", resume=True), run(9, "whole")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_groups_closures_and_parameters_without_gradient():
    model = classifier(0)
    groups = [{"params": [model.fc1.weight], "lr": 0.0}, {"params": [model.fc2.weight, model.fc2.bias]}]
    optimizer = LearnedOptimizer(groups, network())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        model.fc2.bias.grad = None
        return loss

    assert optimizer.step(closure).item() > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"fc2.weight"}
    scalar = nn.Parameter(torch.tensor(2.0))
    alone = LearnedOptimizer([scalar], network())
    scalar.square().backward()
    alone.step()
    assert scalar.shape == ()
    assert scalar.item() != 2.0


def test_half_precision_is_computed_in_single():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = LearnedOptimizer([p], network(step_size=1.0))
    p.sum().backward()
    optimizer.step()
    assert p.dtype == torch.bfloat16
    assert optimizer.state[p]["mean"].dtype == torch.float32


# Files


def test_saved_and_loaded(tmp_path):
    net = network(normalise="standard", scales=(5.0, 50.0), shift=0.0)
    net.save(tmp_path / "net.safetensors")
    back = OptimizerNetwork.load(tmp_path / "net.safetensors")
    assert back.digest == net.digest
    assert (back.scales, back.normalise, back.features) == ((5.0, 50.0), "standard", 24)
    assert all(torch.equal(back.weights[name], net.weights[name]) for name in net.weights)
    model = classifier(0)
    assert LearnedOptimizer(model.parameters(), str(tmp_path / "net.safetensors")).network.digest == net.digest


def test_damaged_and_foreign_files(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "net.safetensors"
    network().save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="check sum"):
        OptimizerNetwork.load(path)
    path.write_bytes(content[:40])
    with pytest.raises(ValueError, match="damaged"):
        OptimizerNetwork.load(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="holds no learned optimizer"):
        OptimizerNetwork.load(path)
    with pytest.raises(FileNotFoundError):
        OptimizerNetwork.load(tmp_path / "nothing")


# Bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"normalise": "max"}, "'rms' or 'standard'"),
        ({"decays": (0.5, 1.0)}, r"decays\[1\] must be"),
        ({"step_size": -1.0}, "step_size must be"),
        ({"step_sise": 1.0}, "step_size"),
        ({"hidden": 0}, "hidden must be"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        OptimizerNetwork.new(**settings)


def test_weights_that_do_not_fit():
    weights = network().weights
    with pytest.raises(ValueError, match=r"hidden\.weight must have shape"):
        OptimizerNetwork({**weights, "hidden.weight": torch.zeros(32, 30)})
    with pytest.raises(ValueError, match="weights must be a dict"):
        OptimizerNetwork({"hidden.weight": torch.zeros(32, 31)})


@pytest.mark.parametrize("params", [nn.Linear(1, 1), [], 3.0, "text", torch.zeros(2), [torch.arange(3)], {"params": []}])
def test_bad_parameters(params):
    with pytest.raises(ValueError, match="params must be parameters"):
        LearnedOptimizer(params, network())


def test_bad_networks_rates_and_gradients():
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match="network must be an OptimizerNetwork"):
        LearnedOptimizer(model.parameters(), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="lr must be"):
        LearnedOptimizer(model.parameters(), network(), lr=-1.0)
    optimizer = LearnedOptimizer(model.parameters(), network())
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        optimizer.step()
