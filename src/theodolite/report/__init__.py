"""L9: static pages from runs, verdicts and figures, and the live page of a training.

Names are imported on first use: the live page is served without loading torch.
"""

from typing import TYPE_CHECKING

from theodolite._names import attach

if TYPE_CHECKING:
    from theodolite.report.gallery import Gallery as Gallery
    from theodolite.report.gallery import collect_runs as collect_runs
    from theodolite.report.gallery import write_gallery as write_gallery
    from theodolite.report.page import Answer as Answer
    from theodolite.report.page import Page as Page
    from theodolite.report.page import Section as Section
    from theodolite.report.page import page_html as page_html
    from theodolite.report.page import provenance_of as provenance_of
    from theodolite.report.page import write_page as write_page
    from theodolite.report.watch import WatchServer as WatchServer
    from theodolite.report.watch import watch_html as watch_html
    from theodolite.report.watch import write_watch as write_watch

__all__, __getattr__, __dir__ = attach(__name__, __file__)
