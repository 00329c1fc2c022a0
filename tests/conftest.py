"""Settings of every test: one thread per worker and per process it starts, fresh seeds, no leftover default dtype."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Equal bits are asserted of fleets in any order of the tests; MKL can be asked for them before its first product only.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import torch
from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent

#: What `make test-fast` leaves out, by measured times: what trains, starts processes, builds pages or opens a browser.
LONG = (
    *("browser", "cli", "docs", "experiments", "oracles", "unit/experiments", "unit/runners"),
    *("unit/instruments/test_kernel_and_regimes.py", "unit/instruments/test_survey.py"),
    *("unit/measures/dictionary/test_estimator.py", "unit/measures/stability/test_study.py"),
    *("unit/measures/dynamics/test_catapult_sweep.py", "unit/measures/dynamics/test_critical_kernel.py"),
    *("unit/measures/dynamics/test_spikes.py", "unit/measures/linearity"),
    *("unit/monitors/test_spike_causes.py", "unit/monitors/test_training_unchanged.py"),
    *("unit/report/test_watch.py", "unit/training/test_fleet_bitwise.py", "unit/measures/hessian/test_structure.py"),
    *("unit/data/test_real_files.py", "unit/models/test_pretrained.py"),
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = [HERE / name for name in LONG]
    assert all(path.exists() for path in long), "LONG names a test that is not there"
    for item in items:
        if any(item.path.is_relative_to(path) for path in long):
            item.add_marker("long")


class ByStudy(LoadScopeScheduling):
    """Modules and classes stay on one worker, and so do the figures of one study, `Test…_of_<study>`: they share its runs."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        module, _, suite = scope.partition("::")
        return f"{module}::{suite.partition('_of_')[2]}" if module.endswith("test_registered.py") else scope


def pytest_xdist_make_scheduler(config: Any, log: Any) -> ByStudy:
    return ByStudy(config, log)
