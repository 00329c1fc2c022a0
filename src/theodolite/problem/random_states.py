"""The random states of torch, NumPy and Python, put back after a measurement."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept(devices: Sequence[int] = (), generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the global states of torch (also on CUDA `devices`), NumPy and Python, and those of the given generators."""
    # Models, losses and data sets of the user may draw from the global state of NumPy, whatever this package does.
    python, numpy, own = random.getstate(), np.random.get_state(), [g.get_state() for g in generators]  # noqa: NPY002
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for generator, state in zip(generators, own, strict=True):
                generator.set_state(state)
