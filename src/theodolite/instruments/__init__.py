"""L10: the main job. What applies to this problem, at what cost, run it, and say what was found.

An instrument is one class: what it applies to, what it costs, how it runs, what it finds. Ours are in the sub-folders, where
`registry.py` finds them; other packages add theirs through the entry points `theodolite.instruments`.
"""

from theodolite.instruments.base import InapplicableError, Instrument, SurveyContext, Work
from theodolite.instruments.planning import Plan
from theodolite.instruments.registry import names, register
from theodolite.instruments.survey_run import Survey, SurveyInterrupted, plan_survey, survey

Site = SurveyContext  # its name in instruments written for earlier versions

__all__ = [
    "InapplicableError",
    "Instrument",
    "Plan",
    "Site",
    "Survey",
    "SurveyContext",
    "SurveyInterrupted",
    "Work",
    "names",
    "plan_survey",
    "register",
    "survey",
]
