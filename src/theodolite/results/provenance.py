"""How a number came about: how it ended, what it cost, and with which versions it was made."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from importlib import metadata

from torch import __version__ as torch_version
from torch import get_num_threads


class Outcome(Enum):
    """How a computation ended; the value is the sentence a user reads."""

    CONVERGED = "converged"
    FINISHED = "finished"
    MAX_MATVECS = (
        "stopped at the product budget before every residual fell below tol; raise max_matvecs, raise tol or ask for fewer pairs"
    )
    UNVERIFIED = (
        "residuals are below tol, but the product budget ended before the search for missed "
        "copies of eigenvalues did; raise max_matvecs"
    )
    PRECISION = (
        "stopped because the residuals no longer fall: they have reached the rounding of the "
        "products; raise tol, or use a float64 model"
    )
    DIVERGED = "the loss became NaN or infinite; lower the learning rate, or look at the step before"
    UNBOUNDED = "no upper end was found in the range tried; raise it"
    ESTIMATED = "estimated; the error stands beside the value"

    @property
    def good(self) -> bool:
        """Whether the number may be used as it stands."""
        return self in (Outcome.CONVERGED, Outcome.FINISHED, Outcome.ESTIMATED)


@cache  # reading a package's metadata takes a millisecond, and every result asks
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class Provenance:
    """Facts that let somebody else repeat the computation."""

    theodolite: str = field(default_factory=lambda: _version("theodolite"))
    torch: str = field(default_factory=lambda: str(torch_version))
    python: str = field(default_factory=platform.python_version)
    machine: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    threads: int = field(default_factory=get_num_threads)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


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
