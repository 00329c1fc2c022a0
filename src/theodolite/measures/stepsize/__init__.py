"""Which learning rate for this training? Meta-gradients, how far they can be trusted, and the choice itself."""

from theodolite._names import imported
from theodolite.measures.stepsize.learned.learned_optimizer import LearnedOptimizer as LearnedOptimizer
from theodolite.measures.stepsize.learned.learned_optimizer import OptimizerNetwork as OptimizerNetwork
from theodolite.measures.stepsize.learned.meta_training import MetaTraining as MetaTraining
from theodolite.measures.stepsize.learned.meta_training import meta_train as meta_train
from theodolite.measures.stepsize.meta_gradients.meta_gradient import MetaGradient as MetaGradient
from theodolite.measures.stepsize.meta_gradients.meta_gradient import meta_gradient as meta_gradient
from theodolite.measures.stepsize.quadratics.health import MetaGradientHealth as MetaGradientHealth
from theodolite.measures.stepsize.quadratics.health import descend_unrolled as descend_unrolled
from theodolite.measures.stepsize.quadratics.health import meta_gradient_health as meta_gradient_health
from theodolite.measures.stepsize.quadratics.health import unrolled_meta_gradient as unrolled_meta_gradient
from theodolite.measures.stepsize.quadratics.least_squares import LeastSquaresCurves as LeastSquaresCurves
from theodolite.measures.stepsize.quadratics.least_squares import LeastSquaresScores as LeastSquaresScores
from theodolite.measures.stepsize.quadratics.least_squares import LeastSquaresTasks as LeastSquaresTasks
from theodolite.measures.stepsize.quadratics.least_squares import PopulationRisk as PopulationRisk
from theodolite.measures.stepsize.quadratics.least_squares import draw_tasks as draw_tasks
from theodolite.measures.stepsize.quadratics.least_squares import interpolation_error as interpolation_error
from theodolite.measures.stepsize.quadratics.least_squares import least_squares_curves as least_squares_curves
from theodolite.measures.stepsize.quadratics.least_squares import least_squares_scores as least_squares_scores
from theodolite.measures.stepsize.quadratics.least_squares import population_rates as population_rates
from theodolite.measures.stepsize.quadratics.least_squares import population_risk as population_risk
from theodolite.measures.stepsize.quadratics.quadratic import StableMetaGradient as StableMetaGradient
from theodolite.measures.stepsize.quadratics.quadratic import stable_meta_gradient as stable_meta_gradient
from theodolite.measures.stepsize.quadratics.quadratic_descent import OptimalRate as OptimalRate
from theodolite.measures.stepsize.quadratics.quadratic_descent import RateDescent as RateDescent
from theodolite.measures.stepsize.quadratics.quadratic_descent import descend_rate as descend_rate
from theodolite.measures.stepsize.quadratics.quadratic_descent import optimal_rate as optimal_rate
from theodolite.measures.stepsize.quadratics.sgd_moments import SGDRisk as SGDRisk
from theodolite.measures.stepsize.quadratics.sgd_moments import sgd_risk as sgd_risk
from theodolite.measures.stepsize.search.tuning import StepSizeChoice as StepSizeChoice
from theodolite.measures.stepsize.search.tuning import tune_step_size as tune_step_size

__all__ = sorted(imported(__file__))
