"""The Hessian blocks of all layers, one product each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import peers
import theodolite as th
import truth
from harness import Row, Settings, one_shot, race, try_row
from networks import Task, deep_stack

Vectors = dict[str, Tensor]  # layer name -> flat vector of its weight
AllBlocks = Callable[[], list[Tensor]]


def weights(task: Task) -> dict[str, nn.Parameter]:
    return {name: p for name, p in task.model.named_parameters() if name.endswith("weight")}


def ours_blocks(task: Task, vectors: Vectors, **options: bool) -> AllBlocks:
    blocks = th.layer_hessians(peers.problem(task), **options)
    columns = {name.removesuffix(".weight"): v[:, None] for name, v in vectors.items()}
    return lambda: [image[:, 0] for image in blocks.products(columns).values()]


def curvlinops_blocks(task: Task, vectors: Vectors) -> AllBlocks:
    parameters = list(weights(task).values())
    operator = peers.curvlinops_hessian(task, params=parameters, block_sizes=[1] * len(parameters), check_deterministic=False)
    v = torch.cat(list(vectors.values()))
    sizes = [p.numel() for p in parameters]
    return lambda: list((operator @ v).split(sizes))


def eigenthings_blocks(task: Task, vectors: Vectors) -> AllBlocks:
    operators = {name: peers.eigenthings_hessian(task, only=name) for name in vectors}
    return lambda: [operators[name].matvec(v) for name, v in vectors.items()]


def full_second_backward(task: Task, vectors: Vectors) -> AllBlocks:
    """One kept graph, and for each layer a second backward to all weights."""
    parameters, gradients = _kept_gradients(task)

    def blocks() -> list[Tensor]:
        images = []
        for i, v in enumerate(vectors.values()):
            parts = torch.autograd.grad(gradients[i], parameters, v.view_as(parameters[i]), retain_graph=True, allow_unused=True)
            own = parts[i]
            assert own is not None
            images.append(own.reshape(-1))
        return images

    return blocks


def pruned_second_backward(task: Task, vectors: Vectors) -> AllBlocks:
    """One kept graph, and for each layer a second backward to its own weight only."""
    parameters, gradients = _kept_gradients(task)

    def blocks() -> list[Tensor]:
        return [
            torch.autograd.grad(g, p, v.view_as(p), retain_graph=True)[0].reshape(-1)
            for g, p, v in zip(gradients, parameters, vectors.values(), strict=True)
        ]

    return blocks


def _kept_gradients(task: Task) -> tuple[list[nn.Parameter], tuple[Tensor, ...]]:
    ((inputs, targets),) = task.batches
    parameters = list(weights(task).values())
    loss = task.loss(task.model(inputs), targets)
    return parameters, torch.autograd.grad(loss, parameters, create_graph=True)


CONTENDERS: dict[str, Callable[[Task, Vectors], AllBlocks]] = {
    "ours": ours_blocks,
    "ours, closed_form=False": partial(ours_blocks, closed_form=False),
    "curvlinops block_sizes=[1]*7": curvlinops_blocks,
    "eigenthings, an operator per layer": eigenthings_blocks,
    "kept graph, full second backward per layer": full_second_backward,
    "kept graph, second backward pruned by hand": pruned_second_backward,
}


def layer_blocks(settings: Settings) -> Iterator[Row]:
    """One product with the block of every layer of a 7-layer MLP, after set-up. Error: largest relative error of a block."""
    for activation in (nn.ReLU, nn.Tanh):
        task = deep_stack(activation)
        generator = torch.Generator().manual_seed(1)
        vectors = {name: torch.randn(p.numel(), generator=generator) for name, p in weights(task).items()}
        true = true_blocks(task, vectors)
        rows = {who: Row("all layer blocks", task.name, who) for who in CONTENDERS}
        ready: dict[str, AllBlocks] = {}
        for row in rows.values():
            try_row(row, partial(_line_up, task, vectors, true, ready))
        for who, timing in race(task.gradient, ready, settings).items():
            rows[who].charge(timing)
            start = partial(CONTENDERS[who], task.copy(), vectors)
            first, _ = one_shot(task.gradient, lambda start=start: start()(), settings, most=3)
            rows[who].say(f"from nothing to the first products {first.gradients:.1f} gradients")
        yield from rows.values()


def _line_up(task: Task, vectors: Vectors, true: list[Tensor], ready: dict[str, AllBlocks], row: Row) -> None:
    blocks = CONTENDERS[row.who](task.copy(), vectors)
    images = blocks()
    row.error = max(truth.relative_error(a, b) for a, b in zip(images, true, strict=True))
    row.products = len(images)
    ready[row.who] = blocks


def true_blocks(task: Task, vectors: Vectors) -> list[Tensor]:
    double = task.double()
    return [block.detach() for block in pruned_second_backward(double, {k: v.double() for k, v in vectors.items()})()]
