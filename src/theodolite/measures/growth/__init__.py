"""How do I make a trained network deeper? Where new layers go, what they start from, and the grown model with its optimizer."""

from theodolite._names import imported
from theodolite.measures.growth.ablation import LayerAblation as LayerAblation
from theodolite.measures.growth.ablation import ablate_layers as ablate_layers
from theodolite.measures.growth.body import Body as Body
from theodolite.measures.growth.body import find_body as find_body
from theodolite.measures.growth.choice import GrowthChoice as GrowthChoice
from theodolite.measures.growth.choice import landscape_aware_growth as landscape_aware_growth
from theodolite.measures.growth.growing import Grown as Grown
from theodolite.measures.growth.growing import grow as grow
from theodolite.measures.growth.operators import INITS as INITS
from theodolite.measures.growth.operators import NAMES as NAMES
from theodolite.measures.growth.operators import GrowthOperator as GrowthOperator
from theodolite.measures.growth.operators import growth_operator as growth_operator
from theodolite.measures.growth.operators import growth_operators as growth_operators
from theodolite.measures.growth.preservation import Preservation as Preservation
from theodolite.measures.growth.stacking import Stacking as Stacking
from theodolite.measures.growth.stacking import Stage as Stage
from theodolite.measures.growth.stacking import adaptive_stacking as adaptive_stacking
from theodolite.measures.growth.stacking import bert_large_stages as bert_large_stages
from theodolite.measures.growth.study import GrowthStudy as GrowthStudy
from theodolite.measures.growth.study import growth_study as growth_study

__all__ = sorted(imported(__file__))
