"""L9: static pages from runs, verdicts and figures, and the live page of a training.

Names are imported on first use: the live page is served without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.report.gallery import Gallery, collect_runs, write_gallery
    from theodolite.report.survey import Section, SurveyPage, survey_html, write_survey
    from theodolite.report.watch import WatchServer, watch_html, write_watch

_CONTENTS = {
    "gallery": ["Gallery", "collect_runs", "write_gallery"],
    "survey": ["Section", "SurveyPage", "survey_html", "write_survey"],
    "watch": ["WatchServer", "watch_html", "write_watch"],
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = [
    "Gallery",
    "Section",
    "SurveyPage",
    "WatchServer",
    "collect_runs",
    "survey_html",
    "watch_html",
    "write_gallery",
    "write_survey",
    "write_watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"theodolite.report.{_HOME[name]}"), name)
    raise AttributeError(f"module 'theodolite.report' has no attribute {name!r}")
