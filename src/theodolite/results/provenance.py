"""Where a number comes from: the versions and the machine settings it was computed with."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata

from torch import __version__ as torch_version
from torch import get_num_threads


@cache  # reading a package's metadata takes a millisecond, and every result asks
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Provenance:
    """Facts that let somebody else repeat the computation."""

    theodolite: str = field(default_factory=lambda: _version("theodolite"))
    torch: str = field(default_factory=lambda: str(torch_version))
    python: str = field(default_factory=platform.python_version)
    machine: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    threads: int = field(default_factory=get_num_threads)
    created: str = field(default_factory=_now)


@dataclass(frozen=True)
class Cost:
    """What a result took.

    `route` says how the products were made ("kept graph", "recomputed", ...); `peak_bytes` is the
    memory that stayed allocated for them, 0 where it is not known.
    """

    seconds: float = 0.0
    route: str = ""
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()
