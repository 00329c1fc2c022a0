"""L1: the user's model, loss, parameters and data behind one face."""

from theodolite.problem.batches import Batch
from theodolite.problem.calling import Evaluation
from theodolite.problem.parameters import Layer, Selection, match_layers
from theodolite.problem.problem import Problem, flatten

__all__ = ["Batch", "Evaluation", "Layer", "Problem", "Selection", "flatten", "match_layers"]
