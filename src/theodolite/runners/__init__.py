"""L7: many jobs on one machine or several, and runs that survive being killed. Only this room names an engine."""

from theodolite.runners.engines import ENGINES, Failure, Finished, finish_all, kept_open, run_all
from theodolite.runners.runs import RunSummary, run_stored
from theodolite.runners.store import Record, RunStore

__all__ = [
    "ENGINES",
    "Failure",
    "Finished",
    "Record",
    "RunStore",
    "RunSummary",
    "finish_all",
    "kept_open",
    "run_all",
    "run_stored",
]
