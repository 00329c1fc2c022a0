"""Run an algorithm on one operator, or on many in lockstep.

An algorithm is a generator: it yields a block of columns to be multiplied, is sent the product, and returns
its answer. It never sees who multiplies. For a mapping of operators all pending blocks go into one joint
product, so that operators which share work (the layers of one network) pay for it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from theodolite.operators import LinearOperator, as_operator
from theodolite.progress import Advance, counting
from theodolite.results import Cost, Outcome, Result, ResultMapping

Answer = TypeVar("Answer")
Kind = TypeVar("Kind", bound=Result)
Steps = Generator[Tensor, Tensor, Answer]


@runtime_checkable
class JointProducts(Protocol):
    """A mapping of operators that multiplies several blocks in one go."""

    def products(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


def spent(op: Any, began: float) -> Cost:
    """What a computation on an operator, or on a mapping of them, took since `began`."""
    seconds = time.perf_counter() - began
    if hasattr(op, "cost"):
        facts: Cost = op.cost()
        return replace(facts, seconds=seconds)
    costs = [as_operator(item).cost() for item in op.values()]
    notes = tuple(dict.fromkeys(note for cost in costs for note in cost.notes))
    return Cost(seconds, "; ".join(dict.fromkeys(c.route for c in costs)), sum(c.peak_bytes for c in costs), notes)


def solve(
    op: Any,
    title: str,
    steps: Callable[[str, LinearOperator], Steps[Answer]],
    result: Callable[[Answer, Cost], Kind],
    *,
    progress: bool | None,
    good: Outcome,
    seed: int,
    total: Callable[[LinearOperator], int | None] = lambda _: None,
    held: Callable[[Answer], int] = lambda _: 0,
) -> Kind | ResultMapping:
    """The result of an algorithm on an operator, or on each one of a mapping in lockstep.

    `good` is the outcome of a mapping whose results all are; `total` is how many products are expected for a single operator,
    `held` the bytes that an algorithm itself kept.
    """
    began = time.perf_counter()
    several = isinstance(op, Mapping)
    ops = op if several else {"": as_operator(op)}
    with counting(title, progress=progress, total=None if several else total(ops[""])) as count:
        found = run_all(ops, steps, count)
    cost = spent(op if several else ops[""], began)
    cost = replace(cost, peak_bytes=cost.peak_bytes + sum(map(held, found.values())))
    results = {name: result(answer, cost) for name, answer in found.items()}
    if not several:
        return results[""]
    outcome = next((r.outcome for r in results.values() if not r.outcome.good), good)
    return ResultMapping(results={**results}, outcome=outcome, seed=seed, cost=cost)


def run_all(ops: Mapping[str, Any], make: Callable[[str, LinearOperator], Steps[Answer]], count: Advance) -> dict[str, Answer]:
    """Drive one algorithm per operator of a mapping, multiplying all pending blocks together."""
    operators = {name: as_operator(op) for name, op in ops.items()}
    together = ops.products if isinstance(ops, JointProducts) else None
    running = {name: make(name, op) for name, op in operators.items()}
    answers: dict[str, Answer] = {}
    pending: dict[str, Tensor] = {}

    def advance(name: str, image: Tensor | None) -> None:
        try:
            pending[name] = next(running[name]) if image is None else running[name].send(image)
        except StopIteration as stop:
            answers[name] = stop.value
            pending.pop(name, None)

    try:
        for name in running:
            advance(name, None)
        while pending:
            blocks = dict(pending)
            images = together(blocks) if together else {n: operators[n] @ b for n, b in blocks.items()}
            count(sum(block.shape[1] for block in blocks.values()))
            for name, image in images.items():
                advance(name, image)
    finally:
        for steps in running.values():
            steps.close()
    return {name: answers[name] for name in operators}
