"""Settings of every test: one thread per worker, fresh seeds, no leftover default dtype."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
