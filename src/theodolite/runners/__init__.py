"""L7: many jobs on one machine or several, and runs that survive being killed. Only this room names an engine."""

from theodolite._names import imported
from theodolite.runners.engines import ENGINES as ENGINES
from theodolite.runners.engines import Engine as Engine
from theodolite.runners.engines import Failure as Failure
from theodolite.runners.engines import Finished as Finished
from theodolite.runners.engines import finish_all as finish_all
from theodolite.runners.engines import kept_open as kept_open
from theodolite.runners.engines import run_all as run_all
from theodolite.runners.runs import RunSummary as RunSummary
from theodolite.runners.runs import Work as Work
from theodolite.runners.runs import run_stored as run_stored
from theodolite.runners.store import Computations as Computations
from theodolite.runners.store import Record as Record
from theodolite.runners.store import RunStore as RunStore

__all__ = sorted(imported(__file__))
