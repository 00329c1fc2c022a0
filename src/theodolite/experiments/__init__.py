"""L8: every figure and table of the sources as a view of a study, with claims that can fail."""

from theodolite.experiments.claims import (
    Claim,
    Reported,
    State,
    Verdict,
    at_least,
    at_most,
    between,
    cited,
    equal,
    measured,
    relative,
    within,
)
from theodolite.experiments.figure import Experiment, Figure
from theodolite.experiments.query import Measured, rows
from theodolite.experiments.registry import UnknownExperimentError, get, names, register
from theodolite.experiments.running import ExperimentRun, load_run, run
from theodolite.experiments.sources import Coverage, Source, coverage, sources
from theodolite.experiments.study import Params, Study, sizes

__all__ = [
    "Claim",
    "Coverage",
    "Experiment",
    "ExperimentRun",
    "Figure",
    "Measured",
    "Params",
    "Reported",
    "Source",
    "State",
    "Study",
    "UnknownExperimentError",
    "Verdict",
    "at_least",
    "at_most",
    "between",
    "cited",
    "coverage",
    "equal",
    "get",
    "load_run",
    "measured",
    "names",
    "register",
    "relative",
    "rows",
    "run",
    "sizes",
    "sources",
    "within",
]
