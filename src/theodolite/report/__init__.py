"""L9: static pages from runs, verdicts and figures."""

from theodolite.report.gallery import Gallery, collect_runs, write_gallery

__all__ = ["Gallery", "collect_runs", "write_gallery"]
