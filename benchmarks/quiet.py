"""Is anybody else using the cores? Threads that must share one wait for each other, and times turn meaningless."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Share of the cores that other processes may use during a measurement.
TOLERATED = 0.05


class Watch:
    """From its making on, how much of all cores other processes use; 0 where the system does not tell."""

    def __init__(self) -> None:
        self._ticks, self._own = _ticks(), time.process_time()

    def others(self) -> float:
        now = _ticks()
        if now is None or self._ticks is None:
            return 0.0
        total, idle = now[0] - self._ticks[0], now[1] - self._ticks[1]
        own = (time.process_time() - self._own) * os.sysconf("SC_CLK_TCK")
        return max(0.0, (total - idle - own) / total) if total > 0 else 0.0

    def disturbed(self) -> bool:
        return self.others() > TOLERATED


def _ticks() -> tuple[int, int] | None:
    """All ticks and idle ticks of the processors since the machine started."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(fields), fields[3] + fields[4]


class Patience:
    """Waits for idle cores before a measurement, up to so many seconds in a whole run."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.waited = 0.0

    def wait(self) -> None:
        began = time.perf_counter()
        while self.left > 0:
            watch = Watch()
            time.sleep(min(0.3, self.left))
            if not watch.disturbed():
                return
            spent = time.perf_counter() - began
            self.left, self.waited, began = self.left - spent, self.waited + spent, began + spent
