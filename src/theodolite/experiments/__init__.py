"""L8: every figure and table of the sources as a view of a study, with claims that can fail."""

from theodolite._names import imported
from theodolite.experiments.claims import Claim as Claim
from theodolite.experiments.claims import Reported as Reported
from theodolite.experiments.claims import State as State
from theodolite.experiments.claims import Verdict as Verdict
from theodolite.experiments.claims import at_least as at_least
from theodolite.experiments.claims import at_most as at_most
from theodolite.experiments.claims import between as between
from theodolite.experiments.claims import cited as cited
from theodolite.experiments.claims import equal as equal
from theodolite.experiments.claims import measured as measured
from theodolite.experiments.claims import relative as relative
from theodolite.experiments.claims import within as within
from theodolite.experiments.figure import Experiment as Experiment
from theodolite.experiments.figure import Figure as Figure
from theodolite.experiments.query import Measured as Measured
from theodolite.experiments.query import rows as rows
from theodolite.experiments.registry import UnknownExperimentError as UnknownExperimentError
from theodolite.experiments.registry import get as get
from theodolite.experiments.registry import names as names
from theodolite.experiments.registry import register as register
from theodolite.experiments.running import ExperimentRun as ExperimentRun
from theodolite.experiments.running import load_run as load_run
from theodolite.experiments.running import run as run
from theodolite.experiments.sources import Coverage as Coverage
from theodolite.experiments.sources import Source as Source
from theodolite.experiments.sources import coverage as coverage
from theodolite.experiments.sources import sources as sources
from theodolite.experiments.study import Params as Params
from theodolite.experiments.study import Study as Study
from theodolite.experiments.study import sizes as sizes

__all__ = sorted(imported(__file__))
