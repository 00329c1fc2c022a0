"""What a model has learned to look at: average gradient outer products of its outputs in its inputs."""

from theodolite.measures.features.agop import AGOP, InputGradients, agop, agop_alignment, agop_penalty, input_gradients
from theodolite.measures.features.report import FeatureMovement, FeatureReport, feature_movement, feature_report

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
