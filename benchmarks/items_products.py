"""One Hessian product: its cost, its error, its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import peers
import truth
from harness import Row, Settings, Timing, one_shot, race, try_row
from memory import product_memory, usage
from networks import Task, gpt, layernorm_net, lenet5, mlp

Product = Callable[[], Tensor]
Contender = Callable[[Task, Tensor], Product]

CONTENDERS: dict[str, Contender] = {
    "ours": peers.ours_product,
    "ours, closed_form=False": partial(peers.ours_product, closed_form=False),
    "ours, keep='never'": partial(peers.ours_product, keep="never"),
    "curvlinops": peers.curvlinops_product,
    "eigenthings autograd": peers.eigenthings_product,
    "eigenthings finite difference": peers.eigenthings_difference,
    "pyhessian, graph reused": peers.pyhessian_product,
    "double backward, fresh graph": peers.fresh_double_backward,
}


def tasks(settings: Settings) -> list[Task]:
    return [mlp(), lenet5(settings.pick(500, 50)), gpt(settings.pick(8, 2))]


@dataclass
class Entry:
    """A contender's row with what starts it, and its product once it has made one."""

    row: Row
    start: Callable[[], Product]
    product: Product | None = None


def line_up(item: str, task: Task, contenders: Mapping[str, Contender], vectors: Tensor) -> list[Entry]:
    """Set every contender up with a first product; whoever fails at the default attention kernel tries once more

    with the kernel that has second derivatives, entered by hand. Both attempts stay in the table.
    """
    entries = []
    for who, contender in contenders.items():
        first = _enter(Entry(Row(item, task.name, who), lambda c=contender: c(task.copy(), vectors)))
        entries.append(first)
        if first.product is None and "scaled_dot_product" in first.row.note:
            entries.append(_enter(Entry(Row(item, task.name, f"{who}, math attention by hand"), _by_hand(first.start))))
    return entries


def _enter(entry: Entry) -> Entry:
    def warm_up(row: Row) -> None:
        product = entry.start()
        product()
        entry.product = product

    try_row(entry.row, warm_up)
    return entry


def _by_hand(start: Callable[[], Product]) -> Callable[[], Product]:
    def started() -> Product:
        with sdpa_kernel(SDPBackend.MATH):
            product = start()

        def within() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return product()

        return within

    return started


def hessian_product(settings: Settings) -> Iterator[Row]:
    """One product with the Hessian after set-up. Error: relative, against double backward in float64."""
    for task in tasks(settings):
        v = task.vectors(1)[:, 0]
        true = truth.hessian_product(task, v)
        entries = line_up("Hessian product", task, CONTENDERS, v)
        timings = _race(task, entries, settings)
        for entry in entries:
            if entry.product is not None:
                try_row(entry.row, partial(_fill, task, entry, true, timings[entry.row.who], settings))
            yield entry.row


def _race(task: Task, entries: list[Entry], settings: Settings) -> dict[str, Timing]:
    works = {e.row.who: e.product for e in entries if e.product is not None}
    return race(task.gradient, works, settings)


def _fill(task: Task, entry: Entry, true: Tensor, timing: Timing, settings: Settings, row: Row) -> None:
    assert entry.product is not None
    row.charge(timing)
    row.products = 1
    row.error = truth.relative_error(entry.product(), true)
    first, _ = one_shot(task.gradient, lambda: entry.start()(), settings, most=3)
    row.details["first_product"] = first.gradients
    row.say(f"from nothing to the first product {first.gradients:.1f} gradients")
    _fill_memory(task, entry, row)


def _fill_memory(task: Task, entry: Entry, row: Row) -> None:
    """Peak in training steps. Parameters and data rest in both; the gradients belong to the step."""
    entry.product = None  # what it holds must not count twice
    step, _ = usage(task.gradient)
    found = product_memory(entry.start)
    row.memory = (task.bytes + found.steady) / (task.bytes + step.peak)
    setup = (task.bytes + found.setup) / (task.bytes + step.peak)
    row.details["bytes"] = {"resting": task.bytes, "step": step.peak, "product": found.steady, "setup": found.setup}
    row.say(f"peak until then {setup:.1f} steps")


def eight_products(settings: Settings) -> Iterator[Row]:
    """Eight vectors at once; the cost is of one product of the eight. Error: relative, of the first column."""
    contenders = {name: CONTENDERS[name] for name in ("ours", "curvlinops")}
    for task in tasks(settings):
        vectors = task.vectors(8)
        true = truth.hessian_product(task, vectors[:, 0])
        entries = line_up("8 products at once", task, contenders, vectors)
        timings = _race(task, entries, settings)
        for entry in entries:
            if entry.product is not None:
                timing = timings[entry.row.who]
                entry.row.charge(timing)
                entry.row.gradients, entry.row.products = timing.gradients / 8, 8
                entry.row.error = truth.relative_error(entry.product()[:, 0], true)
            yield entry.row


def layernorm(settings: Settings) -> Iterator[Row]:
    """One Hessian product of a network with LayerNorm. Error: relative, against double backward."""
    task = layernorm_net()
    v = task.vectors(1)[:, 0]
    true = truth.hessian_product(task, v)
    names = ("ours", "curvlinops", "eigenthings autograd", "eigenthings finite difference", "pyhessian, graph reused")
    contenders = {**{name: CONTENDERS[name] for name in names}, "torch.func.hessian": functional_hessian}
    for entry in line_up("LayerNorm", task, contenders, v):
        if entry.product is not None:
            entry.row.products = 1
            entry.row.error = truth.relative_error(entry.product(), true)
        yield entry.row


def functional_hessian(task: Task, v: Tensor) -> Product:
    """The whole matrix by `torch.func.hessian`, times v."""
    ((inputs, targets),) = task.batches
    names, parameters = zip(*task.model.named_parameters(), strict=True)

    def loss(vector: Tensor) -> Tensor:
        tensors = dict(zip(names, truth.split(vector, parameters), strict=True))
        value: Tensor = task.loss(torch.func.functional_call(task.model, tensors, (inputs,)), targets)
        return value

    point = truth.flat(parameters, parameters).detach()
    return lambda: torch.func.hessian(loss)(point) @ v
