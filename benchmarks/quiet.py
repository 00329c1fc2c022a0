"""Is anybody else using the cores? Threads that must share one wait for each other, and times turn meaningless."""

from __future__ import annotations

import time
from pathlib import Path


def busy_share(seconds: float = 0.3) -> float:
    """Share of all cores in use while this process sleeps; 0 where the system does not tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None:
        return 0.0
    total, idle = after[0] - before[0], after[1] - before[1]
    return 1.0 - idle / total if total > 0 else 0.0


def _ticks() -> tuple[int, int] | None:
    """All ticks and idle ticks of the processors since the start."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(fields), fields[3] + fields[4]


class Patience:
    """Waits for idle cores before a measurement, up to so many seconds in a whole run."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.busy_starts = 0  # measurements that began beside somebody else

    def wait(self) -> None:
        began = time.perf_counter()
        while busy_share() > 0.1:
            if time.perf_counter() - began > self.left:
                self.busy_starts += 1
                break
            time.sleep(1.0)
        self.left = max(0.0, self.left - (time.perf_counter() - began))
