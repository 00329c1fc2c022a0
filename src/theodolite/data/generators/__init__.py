"""Generated data: pure functions of their arguments and a seed; the global random state is not touched."""

from theodolite.data.generators.classes import (
    GaussianMixture,
    TwoClassImages,
    TwoGaussians,
    gaussian_classes,
    gaussian_mixture,
    mixture_1d,
    two_class_images,
)
from theodolite.data.generators.dictionaries import PlantedSample, planted_dictionary, planted_samples
from theodolite.data.generators.targets import RankTarget, TargetSample, rank_k_target, rank_k_targets

__all__ = [
    "GaussianMixture",
    "PlantedSample",
    "RankTarget",
    "TargetSample",
    "TwoClassImages",
    "TwoGaussians",
    "gaussian_classes",
    "gaussian_mixture",
    "mixture_1d",
    "planted_dictionary",
    "planted_samples",
    "rank_k_target",
    "rank_k_targets",
    "two_class_images",
]
