"""Which learning rate for this training? Meta-gradients, how far they can be trusted, and the choice itself."""

from theodolite._names import imported
from theodolite.measures.stepsize.learned_optimizer import LearnedOptimizer as LearnedOptimizer
from theodolite.measures.stepsize.learned_optimizer import OptimizerNetwork as OptimizerNetwork
from theodolite.measures.stepsize.meta_gradient import MetaGradient as MetaGradient
from theodolite.measures.stepsize.meta_gradient import meta_gradient as meta_gradient
from theodolite.measures.stepsize.meta_training import MetaTraining as MetaTraining
from theodolite.measures.stepsize.meta_training import meta_train as meta_train
from theodolite.measures.stepsize.tuning import StepSizeChoice as StepSizeChoice
from theodolite.measures.stepsize.tuning import tune_step_size as tune_step_size

__all__ = sorted(imported(__file__))
