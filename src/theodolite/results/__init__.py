"""L0: frozen results with their error, cost, outcome and seed."""

from theodolite._names import imported
from theodolite.results.base import Result as Result
from theodolite.results.base import ResultMapping as ResultMapping
from theodolite.results.base import Row as Row
from theodolite.results.base import fields_of as fields_of
from theodolite.results.base import html_table as html_table
from theodolite.results.findings import Finding as Finding
from theodolite.results.findings import Severity as Severity
from theodolite.results.findings import worst_first as worst_first
from theodolite.results.provenance import Cost as Cost
from theodolite.results.provenance import Outcome as Outcome
from theodolite.results.provenance import Provenance as Provenance
from theodolite.results.storage import load as load
from theodolite.results.storage import save as save
from theodolite.text import number as number

__all__ = sorted(imported(__file__))
