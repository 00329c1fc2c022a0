"""L8: every figure and table of the sources as an experiment whose claims can fail."""

from theodolite.experiments.base import Experiment
from theodolite.experiments.claims import Claim, Measured, Reported, State, Verdict
from theodolite.experiments.manifest import Coverage, coverage
from theodolite.experiments.registry import UnknownExperimentError, get, names, register
from theodolite.experiments.running import ExperimentRun, load_run, run

__all__ = [
    "Claim",
    "Coverage",
    "Experiment",
    "ExperimentRun",
    "Measured",
    "Reported",
    "State",
    "UnknownExperimentError",
    "Verdict",
    "coverage",
    "get",
    "load_run",
    "names",
    "register",
    "run",
]
