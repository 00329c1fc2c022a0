"""L9: static pages from runs, verdicts and figures."""

from theodolite.report.gallery import collect_runs, gallery_html, write_gallery

__all__ = ["collect_runs", "gallery_html", "write_gallery"]
