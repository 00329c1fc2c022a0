"""L7: many jobs on one machine or several, and runs that survive being killed. Only this room names an engine."""

from theodolite.runners.engines import ENGINES, Engine, Failure, Finished, finish_all, kept_open, run_all
from theodolite.runners.runs import RunSummary, Work, run_stored
from theodolite.runners.store import Computations, Record, RunStore

__all__ = [
    "ENGINES",
    "Computations",
    "Engine",
    "Failure",
    "Finished",
    "Record",
    "RunStore",
    "RunSummary",
    "Work",
    "finish_all",
    "kept_open",
    "run_all",
    "run_stored",
]
