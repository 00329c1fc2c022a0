"""L0: frozen results with their error, cost, outcome and seed."""

from theodolite.results.base import Result, ResultMapping, Row, fields_of, html_table
from theodolite.results.findings import Finding, Severity, worst_first
from theodolite.results.provenance import Cost, Outcome, Provenance
from theodolite.results.storage import load, save
from theodolite.text import number

__all__ = [
    "Cost",
    "Finding",
    "Outcome",
    "Provenance",
    "Result",
    "ResultMapping",
    "Row",
    "Severity",
    "fields_of",
    "html_table",
    "load",
    "number",
    "save",
    "worst_first",
]
