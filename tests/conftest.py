"""Settings of every test: one thread per worker and per process it starts, fresh seeds, no leftover default dtype."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
