"""How do I make a trained network deeper? Where new layers go, what they start from, and the grown model with its optimizer."""

from theodolite._names import imported
from theodolite.measures.growth.operators import NAMES as NAMES
from theodolite.measures.growth.operators import GrowthOperator as GrowthOperator
from theodolite.measures.growth.operators import growth_operator as growth_operator
from theodolite.measures.growth.operators import growth_operators as growth_operators

__all__ = sorted(imported(__file__))
