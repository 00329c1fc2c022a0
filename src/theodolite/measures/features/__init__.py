"""What a model has learned to look at: average gradient outer products of its outputs in its inputs."""

from theodolite.measures.features.agop import AGOP, agop, agop_alignment, agop_penalty
from theodolite.measures.features.gradients import InputGradients, input_gradients
from theodolite.measures.features.movement import FeatureMovement, feature_movement
from theodolite.measures.features.report import FeatureReport, feature_report

__all__ = [
    "AGOP",
    "FeatureMovement",
    "FeatureReport",
    "InputGradients",
    "agop",
    "agop_alignment",
    "agop_penalty",
    "feature_movement",
    "feature_report",
    "input_gradients",
]
