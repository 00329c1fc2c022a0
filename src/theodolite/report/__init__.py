"""L9: static pages from runs, verdicts and figures."""

from theodolite.report.gallery import Gallery, collect_runs, write_gallery
from theodolite.report.survey import Section, SurveyPage, survey_html, write_survey

__all__ = ["Gallery", "Section", "SurveyPage", "collect_runs", "survey_html", "write_gallery", "write_survey"]
