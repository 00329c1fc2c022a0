"""L6: measures on a schedule during training, learning-rate drivers that follow them, and the log they write.

Names are imported on first use: the log can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite._names import attach

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

__all__, __getattr__, __dir__ = attach(__name__, __file__)
