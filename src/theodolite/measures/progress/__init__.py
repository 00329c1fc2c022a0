"""Is it learning, do gradients reach every layer, and does the set-up fit?"""

from theodolite.measures.progress.gradient_flow import GradientFlow, gradient_flow
from theodolite.measures.progress.learning import LearningProgress, judge_state, learning_progress
from theodolite.measures.progress.settings import SetupCheck, check_setup
from theodolite.measures.progress.trivial import LossKind, Trivial, loss_kind, trivial_prediction

__all__ = [
    "GradientFlow",
    "LearningProgress",
    "LossKind",
    "SetupCheck",
    "Trivial",
    "check_setup",
    "gradient_flow",
    "judge_state",
    "learning_progress",
    "loss_kind",
    "trivial_prediction",
]
