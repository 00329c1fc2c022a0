"""L9: static pages from runs, verdicts and figures, and the live page of a training.

Names are imported on first use: the live page is served without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.report.gallery import Gallery, collect_runs, write_gallery
    from theodolite.report.page import Page, Section, page_html, provenance_of, write_page
    from theodolite.report.watch import WatchServer, watch_html, write_watch

_CONTENTS = {
    "gallery": ["Gallery", "collect_runs", "write_gallery"],
    "page": ["Page", "Section", "page_html", "provenance_of", "write_page"],
    "watch": ["WatchServer", "watch_html", "write_watch"],
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = [
    "Gallery",
    "Page",
    "Section",
    "WatchServer",
    "collect_runs",
    "page_html",
    "provenance_of",
    "watch_html",
    "write_gallery",
    "write_page",
    "write_watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"theodolite.report.{_HOME[name]}"), name)
    raise AttributeError(f"module 'theodolite.report' has no attribute {name!r}")
