"""Noise in calls has the law of drawn weights: by sample, by layer, at all positions at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm
from torch import nn

import theodolite as th
from theodolite.measures.bounds import GaussianPosterior
from theodolite.measures.bounds.blocks import blocks_in_basis, make_blocks
from theodolite.measures.bounds.gibbs import drawn_error, smooth_error
from theodolite.measures.bounds.noisy_network import NoisyNetwork, Samples

from .cases import Normed, Scaled, SmallCnn, TiedTwice, Words, mlp, state

#: Draws that are compared.
REPEATS = 8000
INPUTS = {
    "mlp": lambda: torch.randn(60, 5),
    "cnn": lambda: torch.randn(60, 1, 8, 8),
    "tied": lambda: torch.randn(60, 5),
    "words": lambda: torch.randint(7, (60, 6)),
    "normed": lambda: torch.randn(60, 1, 8, 8),
    "scaled": lambda: torch.randn(60, 5),
}
MODELS = {"mlp": lambda: mlp(5, 6, 4, 3), "cnn": SmallCnn, "tied": TiedTwice, "words": Words, "normed": Normed, "scaled": Scaled}


def network(kind: str, *, by_sample: bool = True, rank: int | None = None) -> NoisyNetwork:
    torch.manual_seed(0)
    model, x = MODELS[kind](), INPUTS[kind]()
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(60) % 3))
    blocks = make_blocks(problem, {name: 0.5 * value for name, value in state(model).items()}, rank=rank)
    turned = blocks_in_basis(problem, blocks, "kronecker", "once", {})
    generator = torch.Generator().manual_seed(1)
    noisy = [replace(b, log_std=-1.2 + 0.3 * torch.randn(b.mean.shape, generator=generator)) for b in turned]
    settled = GaussianPosterior(blocks=tuple(noisy), variances=dict.fromkeys({b.group for b in noisy}, 0.05), basis="test")
    return NoisyNetwork(problem, Samples(problem), settled.rounded()[0].blocks, by_sample=by_sample)


def outputs(net: NoisyNetwork, repeats: int, seed: int = 0) -> torch.Tensor:
    """Outputs of the first four samples, drawn often: (repeats, 4, C); of samples that stand in one batch."""
    values = {name: (b.mean, (2 * b.log_std).exp()) for name, b in net.blocks.items()}
    variance = math.exp(2 * float(next(iter(net.blocks.values())).log_std[..., -1:].flatten()[-1]))
    scales = {b.group: variance for b in net.blocks.values()}
    for block in net.blocks.values():
        if block.rank is not None:
            scales[block.group] = math.exp(2 * float(block.log_std[0, -1]))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(4).repeat(repeats if net.by_sample else 1)
    batch = net.samples.batches[0].part(rows)
    with net.problem.session(second=False), torch.no_grad():
        calls = 1 if net.by_sample else repeats
        found = [net(rows, batch, values, generator, scales, open_last=False).output for _ in range(calls)]
    return torch.cat(found).unflatten(0, (repeats, 4))


def outputs_of_networks(net: NoisyNetwork, repeats: int, seed: int = 1) -> torch.Tensor:
    """The same of whole networks, whose parameters are drawn and put into the model: (repeats, 4, C)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, b in net.blocks.items():
        noise = torch.randn(repeats, *b.mean.shape, generator=generator)
        weights[name] = torch.vmap(b.parameter)(b.mean + noise * b.log_std.exp())
    (x,), model = net.samples.batches[0].part(torch.arange(4)).args, net.problem.model.eval()
    with torch.no_grad():
        return torch.vmap(lambda drawn: torch.func.functional_call(model, drawn, (x,)), chunk_size=1000)(weights)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied", "words", "normed"])
def test_draws_for_every_sample_have_the_law_of_drawn_networks(kind):
    """Means and covariances of the logits of a sample: 150 comparisons, of which the largest may be at four standard errors."""
    by_sample = network(kind)
    assert by_sample.by_sample, by_sample.why
    one, other = outputs(by_sample, REPEATS), outputs_of_networks(by_sample, REPEATS)
    for sample in range(4):
        a, b = one[:, sample].double(), other[:, sample].double()
        error = ((a.var(0) + b.var(0)) / REPEATS).sqrt()
        assert float(((a.mean(0) - b.mean(0)).abs() / error).max()) < 4
        products = [torch.einsum("ri,rj->rij", t - t.mean(0), t - t.mean(0)) for t in (a, b)]
        error = sum(p.var(0) / REPEATS for p in products).sqrt()
        assert float(((products[0].mean(0) - products[1].mean(0)).abs() / error).max()) < 4
    between = (one[:, 0] - one[:, 0].mean(0)) * (one[:, 1] - one[:, 1].mean(0))
    assert float((between.mean(0) / (between.std(0) / math.sqrt(REPEATS))).abs().max()) < 4  # samples meet different networks


def test_error_rates_of_both_routes_agree():
    found = {}
    for by_sample in (True, False):
        net = network("cnn", by_sample=by_sample)
        posterior = GaussianPosterior(
            blocks=tuple(net.blocks.values()), variances=dict.fromkeys({b.group for b in net.blocks.values()}, 0.05), basis="t"
        )
        found[by_sample] = drawn_error(net, posterior, 60 if by_sample else 300, batch_size=60 if by_sample else 10)
    error = math.sqrt(0.25 / found[True].draws + 0.25 / found[False].draws)
    assert abs(found[True].value - found[False].value) < 3 * error
    assert found[True].draws == 60 * 60
    assert found[False].draws == 6 * 300


def test_unequal_batches_are_counted_for_what_they_are():
    net = network("mlp", by_sample=False)
    posterior = GaussianPosterior(
        blocks=tuple(net.blocks.values()), variances=dict.fromkeys({b.group for b in net.blocks.values()}, 0.05), basis="t"
    )
    found = drawn_error(net, posterior, 5, batch_size=25)  # 25, 25, 10
    assert found.draws == 15
    assert found.scale == pytest.approx(15 * 25 / 300)
    assert found.value < found.upper(0.01) <= 1


def test_directions_that_keep_the_prior_are_drawn_too():
    by_sample = network("mlp", rank=2)
    assert by_sample.by_sample, by_sample.why
    one, other = outputs(by_sample, REPEATS).double(), outputs_of_networks(by_sample, REPEATS).double()
    error = ((one.var(0) + other.var(0)) / REPEATS).sqrt()
    assert float(((one.mean(0) - other.mean(0)).abs() / error).max()) < 4
    squares = [(t - t.mean(0)).square() for t in (one, other)]
    error = sum(part.var(0) / REPEATS for part in squares).sqrt()
    assert float(((squares[0].mean(0) - squares[1].mean(0)).abs() / error).max()) < 4


def test_networks_drawn_for_a_batch_are_drawn_networks():
    by_network = network("cnn", by_sample=False)
    one, other = outputs(by_network, 400).double(), outputs_of_networks(by_network, REPEATS).double()
    error = (one.var(0) / 400 + other.var(0) / REPEATS).sqrt()
    assert float(((one.mean(0) - other.mean(0)).abs() / error).max()) < 4
    assert float((one.var(0) / other.var(0) - 1).abs().max()) < 4 * math.sqrt(3 / 400)  # of what is not far from normal


def test_a_parameter_of_another_kind_is_drawn_for_each_batch():
    found = network("scaled")
    assert not found.by_sample
    assert "it is used by mul" in found.why
    assert outputs(found, 3).std(0).max() > 0


def test_kept_inputs_change_nothing():
    net = network("mlp")
    fresh = outputs(net, 3)
    net.keep_inputs(16)
    assert net.kept
    torch.testing.assert_close(outputs(net, 3), fresh, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 5])
def test_the_smooth_error_is_the_probability_of_falling_behind(classes):
    """Exact for two classes; for more the product over pairs of classes is above the error rate, and below the union bound."""
    torch.manual_seed(0)
    model = mlp(4, classes)
    x, y = torch.randn(60, 4), torch.arange(60) % classes
    problem = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
    blocks = blocks_in_basis(problem, make_blocks(problem, state(model)), "kronecker", "once", {})
    blocks = [replace(b, log_std=torch.full_like(b.mean, -0.7)) for b in blocks]
    net = NoisyNetwork(problem, Samples(problem), blocks)
    posterior = GaussianPosterior(blocks=tuple(blocks), variances={b.group: 0.05 for b in blocks}, basis="t")
    counted = drawn_error(net, posterior, 500)
    values = {b.name: (b.mean, (2 * b.log_std).exp()) for b in blocks}
    with problem.session(second=False):
        drawn = net(torch.arange(60), net.samples.batches[0], values, torch.Generator(), posterior.variances, open_last=True)
    smooth = float(smooth_error(drawn, y, problem.loss_function))
    behind = probabilities_of_falling_behind(drawn, y)
    assert smooth == pytest.approx(1 - float(behind.neg().add(1).prod(1).mean()), abs=1e-6)
    error = 3 * math.sqrt(counted.value * (1 - counted.value) / counted.draws)
    # Rivals are met together more often than if they were independent (Slepian), and less often than one alone.
    assert float(behind.max(1).values.mean()) - error < counted.value < smooth + error
    if classes == 2:
        assert abs(smooth - counted.value) < error
    else:
        assert smooth < float(behind.sum(1).clamp(max=1).mean())


def probabilities_of_falling_behind(drawn, y) -> torch.Tensor:
    """Of each class against the right one, sample by sample, from the dense covariance of the logits; 0 for the right one."""
    left = torch.eye(drawn.output.shape[1]) if drawn.left is None else drawn.left
    covariance = torch.einsum("ci,bi,di->bcd", *(t.detach().double() for t in (left, drawn.variance, left)))
    found = torch.zeros(drawn.output.shape, dtype=torch.float64)
    for i, right in enumerate(y.tolist()):
        for rival in range(found.shape[1]):
            ahead = torch.zeros(found.shape[1], dtype=torch.float64)
            ahead[right] += 1
            ahead[rival] -= 1
            spread = float(ahead @ covariance[i] @ ahead)
            if rival != right:
                mean = float(ahead @ drawn.output[i].detach().double())
                found[i, rival] = norm.cdf(-mean / math.sqrt(spread))
    return found


def test_a_single_output_is_a_classifier_too():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x, y = torch.randn(60, 4), (torch.arange(60) % 2).float()[:, None]
    problem = th.Problem(model, nn.BCEWithLogitsLoss(), (x, y))
    net = NoisyNetwork(problem, Samples(problem), make_blocks(problem, state(model)))
    values = {name: (b.mean, torch.full_like(b.mean, 0.1)) for name, b in net.blocks.items()}
    with problem.session(second=False):
        drawn = net(torch.arange(60), net.samples.batches[0], values, torch.Generator(), {"(model)": 0.1}, open_last=True)
        assert float(smooth_error(drawn, y, problem.loss_function)) > 0
