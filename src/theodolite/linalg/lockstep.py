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
from theodolite.progress import Advance
from theodolite.results import Cost

Answer = TypeVar("Answer")
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


def run(op: LinearOperator, steps: Steps[Answer], advance: Advance) -> Answer:
    """Drive one algorithm with the products of `op`, counting them on `advance`."""
    try:
        block = next(steps)
        while True:
            image = op @ block
            advance(block.shape[1])
            block = steps.send(image)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def run_all(ops: Mapping[str, Any], make: Callable[[str, LinearOperator], Steps[Answer]], count: Advance) -> dict[str, Answer]:
    """Drive one algorithm per operator of a mapping, multiplying all pending blocks together."""
    if not ops:
        raise ValueError("The mapping of operators is empty: there is nothing to measure.")
    operators = {name: as_operator(op) for name, op in ops.items()}
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
            images = ops.products(blocks) if isinstance(ops, JointProducts) else {n: operators[n] @ b for n, b in blocks.items()}
            count(sum(block.shape[1] for block in blocks.values()))
            for name, image in images.items():
                advance(name, image)
    finally:
        for steps in running.values():
            steps.close()
    return {name: answers[name] for name in operators}
