"""Settings of every test: one thread per worker and per process it starts, fresh seeds, no leftover default dtype."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Equal bits are asserted of fleets in any order of the tests; MKL can be asked for them before its first product only.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import torch
from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


class ByChapter(LoadScopeScheduling):
    """Modules and classes stay on one worker, and so do the experiments of a chapter: they share trained networks."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        chapter = re.match(r"(.*test_registered.py::Test[A-Z][a-z]+)", scope)
        return chapter.group(1) if chapter else scope


def pytest_xdist_make_scheduler(config: Any, log: Any) -> ByChapter:
    return ByChapter(config, log)
