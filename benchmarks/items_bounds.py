"""A certificate's parts: a step of the fit beside a gradient of the same batch, a pass of draws beside a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

import networks
import peers
from harness import Row, Settings, Work, race, try_row
from theodolite.measures.bounds.blocks import make_blocks
from theodolite.measures.bounds.fit import Fit
from theodolite.measures.bounds.fit import Settings as FitSettings
from theodolite.measures.bounds.gibbs import drawn_error
from theodolite.measures.bounds.noisy_network import NoisyNetwork, Samples

#: Directions of each layer's inputs that may leave the prior, where they are limited.
RANK = 256
BATCHES = (1000, 128)


def _task(settings: Settings) -> networks.Task:
    """784-600-2, as in the source's figures: the time does not depend on what the pixels show."""
    torch.manual_seed(0)
    samples, width = settings.pick(10_000, 400), settings.pick(600, 20)
    data = [(torch.rand(samples, 784), torch.randint(0, 2, (samples,)))]
    return networks.Task(f"784-{width}-2, {samples} samples", networks.stack(784, width, 2), nn.CrossEntropyLoss(), data)


def _started(task: networks.Task, batch: int, rank: int | None) -> Fit:
    """A fit before its first step, as `pac_bayes_bound` builds it, around weights a little away from those of the model."""
    problem = peers.problem(task)
    start = {name: p.detach() + 0.02 * torch.randn_like(p) for name, p in task.model.named_parameters()}
    network = NoisyNetwork(problem, Samples(problem), make_blocks(problem, start, rank=rank))
    return Fit(network, list(network.blocks.values()), FitSettings(batch_size=batch), 0)


def bound_steps(settings: Settings) -> Iterator[Row]:
    """A step of the fit of a PAC-Bayes posterior (noise drawn for each sample in the eigenvectors of Kronecker factors, the
    divergence and Adam included) in gradients of the same batch; the aims are 4 at batch 1000 and 5 at batch 128."""
    task = _task(settings)
    for batch in BATCHES:
        for rank in (None, settings.pick(RANK, 8)):
            which = "all directions" if rank is None else f"rank {rank}"
            row = Row("bound-steps", f"a step at batch {batch}, {which}", "ours")
            yield try_row(row, partial(_steps, task=task, batch=batch, rank=rank, settings=settings))


def _steps(row: Row, *, task: networks.Task, batch: int, rank: int | None, settings: Settings) -> None:
    fit = _started(task, batch, rank)
    x, y = (part[:batch] for part in task.batches[0])
    rows, part = next(iter(fit.network.samples.epoch(batch)))
    slopes = fit._slopes()

    def step() -> None:
        with fit.problem.session(second=False):
            fit._step(rows, part, *slopes)

    row.charge(race(partial(_gradient, task, x, y), {"step": step}, settings)["step"])
    row.say(f"{1000 * row.details['gradient_seconds']:.3g} ms a gradient")


def _gradient(task: networks.Task, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(task.loss(task.model(x), y), task.parameters)


def bound_draws(settings: Settings) -> Iterator[Row]:
    """A pass of draws, every sample through a network of its own, in forward passes over the same samples in batches of 1000;
    the aim is 5. The inputs of the first layer are rotated once before, as a certificate does."""
    task = _task(settings)
    for rank in (None, settings.pick(RANK, 8)):
        which = "all directions" if rank is None else f"rank {rank}"
        row = Row("bound-draws", f"a pass of draws, {which}", "ours, in forward passes")
        yield try_row(row, partial(_draws, task=task, rank=rank, settings=settings))


def _draws(row: Row, *, task: networks.Task, rank: int | None, settings: Settings) -> None:
    fit = _started(task, 1000, rank)
    fit._slopes()
    posterior, few, many = fit.posterior(), 1, settings.pick(5, 2)
    # The rotation is paid once for all passes: what the passes beyond the first add is what one costs.
    works: dict[str, Work] = {str(n): partial(drawn_error, fit.network, posterior, n) for n in (few, many)}
    timings = race(partial(_forward, task), works, settings)
    one, all_ = (timings[str(n)].gradients for n in (few, many))
    row.charge(timings[str(few)])
    row.gradients = (all_ - one) / (many - few)
    row.say(f"the first pass, with the rotation: {one:.3g}; {1000 * row.details['gradient_seconds']:.3g} ms a forward pass")


def _forward(task: networks.Task) -> Tensor:
    (x, _), *_ = task.batches
    with torch.no_grad():
        return torch.cat([task.model(part) for part in x.split(1000)])
