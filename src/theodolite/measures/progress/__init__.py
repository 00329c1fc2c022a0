"""Is it learning, do gradients reach every layer, and does the set-up fit?"""

from theodolite.measures.progress.learning import LearningProgress, judge_state, learning_progress
from theodolite.measures.progress.trivial import LossKind, Trivial, loss_kind, trivial_prediction

__all__ = ["LearningProgress", "LossKind", "Trivial", "judge_state", "learning_progress", "loss_kind", "trivial_prediction"]
