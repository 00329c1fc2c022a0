"""How linear a model is in its weights: the Hessian of its outputs, its distance from its linearisation, its in-degrees."""

from theodolite._names import imported
from theodolite.measures.linearity.graph import Graph as Graph
from theodolite.measures.linearity.graph import InDegrees as InDegrees
from theodolite.measures.linearity.graph import WidthReport as WidthReport
from theodolite.measures.linearity.graph import dag_width as dag_width
from theodolite.measures.linearity.graph import in_degree_report as in_degree_report
from theodolite.measures.linearity.graph import layer_index as layer_index
from theodolite.measures.linearity.report import Deviation as Deviation
from theodolite.measures.linearity.report import HessianNorm as HessianNorm
from theodolite.measures.linearity.report import LinearityReport as LinearityReport
from theodolite.measures.linearity.report import hessian_norm as hessian_norm
from theodolite.measures.linearity.report import linearity as linearity
from theodolite.measures.linearity.report import linearity_deviation as linearity_deviation

__all__ = sorted(imported(__file__))
