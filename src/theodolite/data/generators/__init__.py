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
from theodolite.data.generators.word_models import WordModel, exact_anchor_world, gaussian_dictionary_world

__all__ = [
    "GaussianMixture",
    "PlantedSample",
    "RankTarget",
    "TargetSample",
    "TwoClassImages",
    "TwoGaussians",
    "WordModel",
    "exact_anchor_world",
    "gaussian_classes",
    "gaussian_dictionary_world",
    "gaussian_mixture",
    "mixture_1d",
    "planted_dictionary",
    "planted_samples",
    "rank_k_target",
    "rank_k_targets",
    "two_class_images",
]
