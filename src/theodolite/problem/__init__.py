"""L1: the user's model, loss, parameters and data behind one face."""

from theodolite.problem.batches import Batch
from theodolite.problem.calling import Evaluation
from theodolite.problem.parameters import Layer, Selection, join_like, match_layers, split_like
from theodolite.problem.problem import Problem

__all__ = ["Batch", "Evaluation", "Layer", "Problem", "Selection", "join_like", "match_layers", "split_like"]
