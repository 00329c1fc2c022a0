"""Peak memory, counted from every allocation that torch makes.

The profiler records each allocation and release of torch's CPU allocator with its time. Their running sum is the
memory in use, its maximum the peak: exact to the byte and the same on each run, where the resident set of a process
also shows what malloc keeps back. Scratch space that oneDNN takes past torch is not seen, for anybody.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Usage:
    """Bytes above the state before the work: at most, and still held at its end."""

    peak: int
    held: int


def usage(work: Callable[[], Any]) -> tuple[Usage, Any]:
    """Run `work` and count; the result is returned so that what it holds stays alive."""
    gc.collect()
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
        gc.collect()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return Usage(peak, total), result


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's native part reports its start and stop on stderr, past Python."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


@dataclass(frozen=True)
class ProductMemory:
    """Memory of an operator in bytes above the model and its data."""

    steady: int  # what it holds between products, and the temporaries of one product
    setup: int  # the peak from nothing to the first product


def product_memory(start: Callable[[], Callable[[], Any]]) -> ProductMemory:
    """Set up an operator with its first product, then measure one more product on top of what it holds."""

    def first() -> Callable[[], Any]:
        product = start()
        product()
        return product

    setup, product = usage(first)
    one, _ = usage(product)
    return ProductMemory(setup.held + one.peak, setup.peak)
