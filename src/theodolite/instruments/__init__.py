"""L10: the main job. What applies to this problem, at what cost, run it, and say what was found.

An instrument is one file: what it applies to, what it costs, how it runs, what it finds. `registry.py` lists them; other
packages add theirs through the entry points `theodolite.instruments`.
"""

from theodolite.instruments.base import InapplicableError, Instrument, Site, Work
from theodolite.instruments.comparing import Comparison, compare
from theodolite.instruments.planning import Plan
from theodolite.instruments.registry import names, register
from theodolite.instruments.surveying import Survey, plan_survey, survey

__all__ = [
    "Comparison",
    "InapplicableError",
    "Instrument",
    "Plan",
    "Site",
    "Survey",
    "Work",
    "compare",
    "names",
    "plan_survey",
    "register",
    "survey",
]
