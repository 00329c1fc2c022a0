"""L6: measures on a schedule during training, learning-rate drivers that follow them, and the log they write.

Names are imported on first use: the log can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.monitors.log import MonitorLog as MonitorLog
    from theodolite.monitors.log import read_log as read_log
    from theodolite.monitors.monitor import Monitor as Monitor
    from theodolite.monitors.rates.critical_rate import CriticalRateLR as CriticalRateLR
    from theodolite.monitors.rates.critical_rate import cyclical_rate as cyclical_rate
    from theodolite.monitors.rates.multi_catapult import MultiCatapult as MultiCatapult
    from theodolite.monitors.report import MonitorReport as MonitorReport
    from theodolite.monitors.spikes.diagnosis import Cause as Cause
    from theodolite.monitors.spikes.diagnosis import Spike as Spike

_HOME = {
    "Monitor": "monitor",
    "MonitorReport": "report",
    "Spike": "spikes.diagnosis",
    "Cause": "spikes.diagnosis",
    "MultiCatapult": "rates.multi_catapult",
    "CriticalRateLR": "rates.critical_rate",
    "cyclical_rate": "rates.critical_rate",
    "MonitorLog": "log",
    "read_log": "log",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'theodolite.monitors' has no attribute {name!r}")
    return getattr(importlib.import_module(f"theodolite.monitors.{_HOME[name]}"), name)
